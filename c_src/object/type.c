/* The type dlx.Tensor: attributes and methods. Python registers the classes and functions that they
 * use, see hooks.h. Functions need the GIL, return new references, and fail with an exception. */

#include "tensor.h"
#include "base/threads.h"

/* ---- attributes ------------------------------------------------------------------------------ */

/* Create an instance of a registered class without checking the numbers, by tuple's tp_new: since
 * Python 3.14 a tuple caches its hash, which tp_alloc leaves uninitialised. */
static PyObject* new_instance(PyObject* class, const int64_t* numbers, int32_t n) {
  PyObject* tuple = py_new_tuple(numbers, n);
  PyObject* args = tuple ? PyTuple_Pack(1, tuple) : NULL;
  PyObject* made = args ? PyTuple_Type.tp_new((PyTypeObject*)class, args, NULL) : NULL;
  Py_XDECREF(args);
  Py_XDECREF(tuple);
  return made;
}

static PyObject* new_device(DLDevice device) {
  if (device.device_type == kDLCPU && device.device_id == 0 && py_hooks.host)
    return Py_NewRef(py_hooks.host);
  return new_instance(py_hooks.device, (int64_t[]){device.device_type, device.device_id}, 2);
}

static PyObject* find_dtype(DLDataType dtype) {
  if (dtype.lanes == 1 && py_hooks.dtypes) {
    PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
    PyObject* known = key ? py_dict_get(py_hooks.dtypes, key) : NULL;
    Py_XDECREF(key);
    if (known || PyErr_Occurred()) return known;
  }
  return new_instance(py_hooks.dtype, (int64_t[]){dtype.code, dtype.bits, dtype.lanes}, 3);
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
      return py_new_tuple(t->shape, t->ndim);
    case STRIDES:
      return py_new_tuple(t->strides, t->ndim);
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
      return new_device(t->device);
    default:
      return find_dtype(t->dtype);
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
    ATTRIBUTE("device", DEVICE, "Device of the memory, as dlx.Device."),
    ATTRIBUTE("is_host", IS_HOST, "Whether the memory is plain host memory, not pinned."),
    ATTRIBUTE("nbytes", NBYTES, "Bytes of all elements, without gaps."),
    ATTRIBUTE("readonly", IS_READONLY, "Whether the memory is read-only."),
    ATTRIBUTE("data_ptr", DATA_PTR, "Address of the first element; a handle on opaque devices."),
    ATTRIBUTE("byte_offset", BYTE_OFFSET,
              "Bytes from data_ptr to the first element; 0 if data_ptr is an address."),
    ATTRIBUTE("flags", FLAGS, "The DLPack flags, as an int."),
    ATTRIBUTE("version", VERSION, "The DLPack version of exported capsules."),
    {"__array_interface__", interface_get, NULL,
     "numpy's array interface, for numbers in host memory.", NULL},
    {"__cuda_array_interface__", cuda_interface_get, NULL,
     "The CUDA array interface, for numbers in CUDA memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- methods --------------------------------------------------------------------------------- */

static PyObject* tensor_repr(PyObject* self) {
  if (py_tensor_inside((TensorObject*)self) == NULL)
    return PyUnicode_FromString("dlx.Tensor(cleared)");
  PyObject* hook = py_hook(py_hooks.represent, "__repr__");
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

static PyObject* tensor_array(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                              PyObject* names) {
  PyObject *all[3] = {self}, *hook = py_hook(py_hooks.array, "__array__");
  Py_ssize_t n = nargs + (names ? PyTuple_GET_SIZE(names) : 0);
  if (hook == NULL || !py_check_args("__array__", n, 0, 2)) return NULL;
  for (Py_ssize_t i = 0; i < n; i++) all[i + 1] = args[i];
  return PyObject_Vectorcall(hook, all, (size_t)nargs + 1, names);
}

static PyObject* tensor_reduce(PyObject* self, PyObject* protocol) {
  PyObject* hook = py_hook(py_hooks.reduce, "__reduce_ex__");
  return hook ? PyObject_CallFunctionObjArgs(hook, self, protocol, NULL) : NULL;
}

PyDoc_STRVAR(
    py_tensor_dlpack_doc,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "Return a new capsule over this memory (a copy if copy=True), versioned if max_version is\n"
    "(1, 0) or more. Read-only memory cannot be exported in a legacy capsule.");

PyDoc_STRVAR(py_tensor_dlpack_device_doc,
             "__dlpack_device__($self, /)\n--\n\n"
             "Return (device type, device id) as DLPack numbers.");

PyDoc_STRVAR(
    py_arrow_array_doc,
    "__arrow_c_array__($self, /, requested_schema=None)\n--\n\n"
    "Return (schema, array) capsules of Arrow's PyCapsule interface over this memory, which must\n"
    "be row-major host memory of numbers with at least one dimension. Each further dimension\n"
    "becomes a level of fixed-size lists. Bools are packed into a copy. requested_schema is\n"
    "ignored.");

PyDoc_STRVAR(py_arrow_schema_doc,
             "__arrow_c_schema__($self, /)\n--\n\n"
             "Return the schema of __arrow_c_array__ in a capsule.");

PyDoc_STRVAR(tensor_array_doc,
             "__array__($self, dtype=None, /, *, copy=None)\n--\n\n"
             "Return a numpy array over this memory, read-only if the tensor is; a copy if dtype "
             "differs.\nRaise for device memory.");

PyDoc_STRVAR(tensor_reduce_doc,
             "__reduce_ex__($self, protocol, /)\n--\n\n"
             "Return the state for pickle and copy; with protocol 5, the values are out of band.");

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
    "Create one with dlx.convert(obj, to='dlx'). Any DLPack consumer imports it; host memory is\n"
    "also a buffer.");

/* setattr refuses static types, so this writes to the type's dict. */
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
