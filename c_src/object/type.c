/* The type dlx.Tensor: its attributes and methods. The classes and texts among them are made in
 * Python, see hooks.h. */

#include "tensor.h"
#include "base/threads.h"

/* ---- attributes ------------------------------------------------------------------------------ */

/* One of the registered classes, which need not look at the numbers again. Made by tuple itself:
 * from Python 3.14 on a tuple has a hash that its own tp_alloc leaves wrong. Owns: a new reference.
 * Errors: NULL with an exception. */
static PyObject* of_class(PyObject* class, const int64_t* numbers, int32_t n) {
  PyObject* plain = py_tuple_of(numbers, n);
  PyObject* args = plain ? PyTuple_Pack(1, plain) : NULL;
  PyObject* made = args ? PyTuple_Type.tp_new((PyTypeObject*)class, args, NULL) : NULL;
  Py_XDECREF(args);
  Py_XDECREF(plain);
  return made;
}

/* Owns: a new reference. GIL: needed. Errors: NULL with an exception. */
static PyObject* device_of(DLDevice device) {
  if (device.device_type == kDLCPU && device.device_id == 0 && py_hooks.host)
    return Py_NewRef(py_hooks.host);
  return of_class(py_hooks.device, (int64_t[]){device.device_type, device.device_id}, 2);
}

/* Owns: a new reference. GIL: needed. Errors: NULL with an exception. */
static PyObject* dtype_of(DLDataType dtype) {
  if (dtype.lanes == 1 && py_hooks.dtypes) {
    PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
    PyObject* known = key ? py_dict_get(py_hooks.dtypes, key) : NULL;
    Py_XDECREF(key);
    if (known || PyErr_Occurred()) return known;
  }
  return of_class(py_hooks.dtype, (int64_t[]){dtype.code, dtype.bits, dtype.lanes}, 3);
}

enum {
  SHAPE,
  STRIDES,
  NDIM,
  DTYPE,
  DEVICE,
  IS_HOST,
  NBYTES,
  IS_READONLY,
  DATA_PTR,
  BYTE_OFFSET,
  FLAGS,
  VERSION
};

static PyObject* tensor_get(PyObject* self, void* which) {
  const DLManagedTensorVersioned* m = py_tensor_managed(self);
  if (m == NULL) return NULL;
  const DLTensor* t = &m->dl_tensor;
  switch ((intptr_t)which) {
    case SHAPE:
      return py_tuple_of(t->shape, t->ndim);
    case STRIDES:
      return py_tuple_of(t->strides, t->ndim);
    case NDIM:
      return PyLong_FromLong(t->ndim);
    case NBYTES:
      return PyLong_FromLongLong(dlx_nbytes(t, m->flags));
    case IS_READONLY:
      return PyBool_FromLong((m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0);
    case IS_HOST:
      return PyBool_FromLong(t->device.device_type == kDLCPU);
    case DATA_PTR:
      return PyLong_FromVoidPtr(t->data);
    case BYTE_OFFSET:
      return PyLong_FromUnsignedLongLong(t->byte_offset);
    case FLAGS:
      return PyLong_FromUnsignedLongLong(m->flags);
    case VERSION:
      return Py_BuildValue("II", m->version.major, m->version.minor);
    case DEVICE:
      return device_of(t->device);
    default:
      return dtype_of(t->dtype);
  }
}

static PyObject* interface_get(PyObject* self, void* unused) {
  PyObject* hook = py_hook(py_hooks.array_interface, "__array_interface__");
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

static PyObject* cuda_interface_get(PyObject* self, void* unused) {
  PyObject* hook = py_hook(py_hooks.cuda_interface, "__cuda_array_interface__");
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

#define ATTRIBUTE(name, which, doc) {name, tensor_get, NULL, doc, (void*)(intptr_t)(which)}

static PyGetSetDef attributes[] = {
    ATTRIBUTE("shape", SHAPE, "Extents, a tuple (ndim,)."),
    ATTRIBUTE("strides", STRIDES, "Strides in elements, a tuple (ndim,)."),
    ATTRIBUTE("ndim", NDIM, "Number of dimensions."),
    ATTRIBUTE("dtype", DTYPE, "The dtype as dlx.DType."),
    ATTRIBUTE("device", DEVICE, "Where the memory is, as dlx.Device."),
    ATTRIBUTE("is_host", IS_HOST, "Whether it is plain host memory, pinned memory left out."),
    ATTRIBUTE("nbytes", NBYTES, "Bytes of all elements, gaps not counted."),
    ATTRIBUTE("readonly", IS_READONLY, "Whether writing to the memory is forbidden."),
    ATTRIBUTE("data_ptr", DATA_PTR, "Address of the first element; a handle on opaque devices."),
    ATTRIBUTE("byte_offset", BYTE_OFFSET,
              "Bytes from data_ptr to the first element; 0 where data_ptr is an address."),
    ATTRIBUTE("flags", FLAGS, "The DLPack flags, as an int."),
    ATTRIBUTE("version", VERSION, "The DLPack version this tensor is exported with."),
    {"__array_interface__", interface_get, NULL,
     "The memory as numpy's array interface says it, where it can: numbers in host memory.", NULL},
    {"__cuda_array_interface__", cuda_interface_get, NULL,
     "The memory as the CUDA array interface says it, where it can: numbers in a CUDA device's "
     "memory.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- methods --------------------------------------------------------------------------------- */

/* Owns: new reference. GIL: needed. Errors: NULL with an exception. */
static PyObject* tensor_repr(PyObject* self) {
  if (py_tensor_inside((TensorObject*)self) == NULL)
    return PyUnicode_FromString("dlx.Tensor(cleared)");
  PyObject* hook = py_hook(py_hooks.represent, "__repr__");
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

/* Owns: new reference. GIL: needed; runs Python. Errors: NULL with an exception. */
static PyObject* tensor_array(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                              PyObject* names) {
  PyObject *all[3] = {self}, *hook = py_hook(py_hooks.array, "__array__");
  Py_ssize_t given = nargs + (names ? PyTuple_GET_SIZE(names) : 0);
  if (hook == NULL || !py_args("__array__", given, 0, 2)) return NULL;
  for (Py_ssize_t i = 0; i < given; i++) all[i + 1] = args[i];
  return PyObject_Vectorcall(hook, all, (size_t)nargs + 1, names);
}

/* Owns, GIL, Errors: as tensor_array. */
static PyObject* tensor_reduce(PyObject* self, PyObject* protocol) {
  PyObject* hook = py_hook(py_hooks.reduce, "__reduce_ex__");
  return hook ? PyObject_CallFunctionObjArgs(hook, self, protocol, NULL) : NULL;
}

PyDoc_STRVAR(
    py_tensor_dlpack_doc,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "Return a fresh capsule over this memory (a copy where copy=True), versioned where "
    "max_version\n"
    "is (1, 0) or more. A read-only tensor is not exported in a legacy capsule.");

PyDoc_STRVAR(py_tensor_dlpack_device_doc,
             "__dlpack_device__($self, /)\n--\n\n"
             "Return (device type, device id) as DLPack numbers.");

PyDoc_STRVAR(
    py_arrow_array_doc,
    "__arrow_c_array__($self, /, requested_schema=None)\n--\n\n"
    "Return (type, data) in the capsules of Arrow's PyCapsule interface, over this memory: "
    "row-major\n"
    "host memory of numbers, of one dimension or more. Every further dimension is a level of "
    "fixed-size\n"
    "lists. Bools are packed into a copy. A schema that is requested is not regarded.");

PyDoc_STRVAR(py_arrow_schema_doc,
             "__arrow_c_schema__($self, /)\n--\n\n"
             "Return the type of what __arrow_c_array__ gives, in a capsule.");

PyDoc_STRVAR(
    tensor_array_doc,
    "__array__($self, dtype=None, /, *, copy=None)\n--\n\n"
    "Return a numpy array over this memory, read-only where it is; of another dtype a copy. "
    "Device\nmemory is refused.");

PyDoc_STRVAR(tensor_reduce_doc,
             "__reduce_ex__($self, protocol, /)\n--\n\n"
             "Return what pickle and copy make a tensor of the same values from; with protocol 5 "
             "out of\nband.");

PyDoc_STRVAR(tobytes_doc,
             "tobytes($self, /)\n--\n\n"
             "Return the elements as bytes, in row-major order.");

static PyObject* tensor_tobytes(PyObject* self, PyObject* unused) {
  return PyBytes_FromObject(self);
}

static PyMethodDef methods[] = {
    PY_KEYWORDS("__array__", tensor_array),
    {"tobytes", tensor_tobytes, METH_NOARGS, tobytes_doc},
    {"__reduce_ex__", tensor_reduce, METH_O, tensor_reduce_doc},
    PY_KEYWORDS("__arrow_c_array__", py_arrow_array),
    {"__arrow_c_schema__", py_arrow_schema, METH_NOARGS, py_arrow_schema_doc},
    PY_KEYWORDS("__dlpack__", py_tensor_dlpack),
    {"__dlpack_device__", py_tensor_dlpack_device, METH_NOARGS, py_tensor_dlpack_device_doc},
    PY_END,
};

/* ---- the type -------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    tensor_doc,
    "A tensor in DLPack's sense, owned by dlx: memory, dtype, shape, strides, device, flags.\n\n"
    "It comes from dlx.convert(obj, to='dlx'); any DLPack consumer takes it, and host memory is a\n"
    "buffer.");

/* Publish the exchange table, in the type's dict: the type is immutable from its birth. Errors: -1
 * with an exception. */
static int publish_table(void) {
  PyObject* capsule = PyCapsule_New((void*)&py_tensor_table, "dlpack_exchange_api", NULL);
  if (capsule == NULL) return -1;
  int failed = PyDict_SetItemString(py_tensor_type.tp_dict, "__dlpack_c_exchange_api__", capsule);
  Py_DECREF(capsule);
  if (!failed) PyType_Modified(&py_tensor_type);
  return failed;
}

int py_tensor_init(PyObject* module) {
  static PyBufferProcs buffer = {py_buffer_get, py_buffer_release};
  py_tensor_type.tp_methods = methods;
  py_tensor_type.tp_getset = attributes;
  py_tensor_type.tp_repr = tensor_repr;
  py_tensor_type.tp_as_buffer = &buffer;
  py_tensor_type.tp_doc = tensor_doc;
  if (PyType_Ready(&py_tensor_type) < 0 || publish_table() < 0) return -1;
  return PyModule_AddObjectRef(module, "Tensor", (PyObject*)&py_tensor_type);
}
