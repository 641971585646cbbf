/* What dlx.Tensor says about itself: its attributes and its repr. The classes and the text are made
 * in Python, which registers them here. */

#include "dlx_python.h"
#include "threads.h"

static PyObject *device_class,
    *dtype_class;                 /* Device and DType: tuples (type, id), (code, bits, lanes) */
static PyObject *host_device,     /* Device("cpu") */
    *known_dtypes;                /* {code | bits << 8: DType}, of one lane; not changed any more */
static PyObject* repr_function;   /* tensor -> str; NULL until one is registered */
static PyObject* reduce_function; /* (tensor, protocol) -> tuple; as above */
/* (tensor, dtype, copy), tensor, tensor; as above */
static PyObject *array_function, *interface_function, *cuda_interface_function;

/* ---- attributes ------------------------------------------------------------------------------ */

static PyObject* tuple_of(const int64_t* numbers, int32_t n) {
  PyObject* tuple = PyTuple_New(n);
  for (int32_t i = 0; tuple && i < n; i++) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == NULL)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, i, number);
  }
  return tuple;
}

/* The same as one of the registered classes, which need not look at the numbers again. Made by
 * tuple itself: from Python 3.14 on a tuple has a hash that its own tp_alloc leaves wrong. Owns: a
 * new reference. Errors: NULL with an exception. */
static PyObject* of_class(PyObject* class, const int64_t* numbers, int32_t n) {
  PyObject* plain = tuple_of(numbers, n);
  PyObject* args = plain ? PyTuple_Pack(1, plain) : NULL;
  PyObject* made = args ? PyTuple_Type.tp_new((PyTypeObject*)class, args, NULL) : NULL;
  Py_XDECREF(args);
  Py_XDECREF(plain);
  return made;
}

/* Owns: a new reference. GIL: needed. Errors: NULL with an exception. */
static PyObject* device_of(DLDevice device) {
  if (device.device_type == kDLCPU && device.device_id == 0 && host_device)
    return Py_NewRef(host_device);
  return of_class(device_class, (int64_t[]){device.device_type, device.device_id}, 2);
}

/* Owns: a new reference. GIL: needed. Errors: NULL with an exception. */
static PyObject* dtype_of(DLDataType dtype) {
  if (dtype.lanes == 1 && known_dtypes) {
    PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
    PyObject* known = key ? py_dict_get(known_dtypes, key) : NULL;
    Py_XDECREF(key);
    if (known || PyErr_Occurred()) return known;
  }
  return of_class(dtype_class, (int64_t[]){dtype.code, dtype.bits, dtype.lanes}, 3);
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
      return tuple_of(t->shape, t->ndim);
    case STRIDES:
      return tuple_of(t->strides, t->ndim);
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
  if (interface_function) return PyObject_CallOneArg(interface_function, self);
  PyErr_SetString(PyExc_AttributeError, "__array_interface__");
  return NULL;
}

static PyObject* cuda_interface_get(PyObject* self, void* unused) {
  if (cuda_interface_function) return PyObject_CallOneArg(cuda_interface_function, self);
  PyErr_SetString(PyExc_AttributeError, "__cuda_array_interface__");
  return NULL;
}

#define ATTRIBUTE(name, which, doc) {name, tensor_get, NULL, doc, (void*)(intptr_t)(which)}

PyGetSetDef py_describe_attributes[] = {
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

/* ---- repr ------------------------------------------------------------------------------------ */

/* Owns: new reference. GIL: needed. Errors: NULL with an exception. */
PyObject* py_describe_repr(PyObject* self) {
  if (py_tensor_inside((TensorObject*)self) == NULL)
    return PyUnicode_FromString("dlx.Tensor(cleared)");
  if (repr_function == NULL) return PyUnicode_FromString("dlx.Tensor(...)");
  return PyObject_CallOneArg(repr_function, self);
}

PyDoc_STRVAR(
    set_tensor_classes_doc,
    "set_tensor_classes(device, dtype, host, dtypes, /)\n--\n\n"
    "Register the classes that dlx.Tensor.device and .dtype are made of; then what need not "
    "be made anew:\nthe host, and {code | bits << 8: dtype}.");

static PyObject* set_tensor_classes(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 4 || !PyDict_CheckExact(args[3])) {
    PyErr_SetString(PyExc_TypeError, "set_tensor_classes takes two classes, a device and a dict");
    return NULL;
  }
  PyObject** kept[] = {&device_class, &dtype_class, &host_device, &known_dtypes};
  for (int i = 0; i < 4; i++) Py_XSETREF(*kept[i], Py_NewRef(args[i]));
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_tensor_repr_doc,
             "set_tensor_repr(function, /)\n--\n\n"
             "Register the function that makes the repr of a dlx.Tensor: tensor -> str.");

static PyObject* set_tensor_repr(PyObject* module, PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(repr_function, function);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_tensor_array_doc,
             "set_tensor_array(array, interface, /)\n--\n\n"
             "Register what __array__ and __array_interface__ of a dlx.Tensor call.");

PyDoc_STRVAR(set_tensor_cuda_interface_doc,
             "set_tensor_cuda_interface(function, /)\n--\n\n"
             "Register what __cuda_array_interface__ of a dlx.Tensor calls: tensor -> dict.");

static PyObject* set_tensor_cuda_interface(PyObject* module, PyObject* function) {
  Py_XSETREF(cuda_interface_function, Py_NewRef(function));
  Py_RETURN_NONE;
}

static PyObject* set_tensor_array(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) {
    PyErr_SetString(PyExc_TypeError, "set_tensor_array takes two functions");
    return NULL;
  }
  Py_INCREF(args[0]);
  Py_XSETREF(array_function, args[0]);
  Py_INCREF(args[1]);
  Py_XSETREF(interface_function, args[1]);
  Py_RETURN_NONE;
}

/* ---- as an array -------------------------------------------------------------------------------
 */

PyObject* py_describe_array(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                            PyObject* names) {
  PyObject* all[3] = {self};
  Py_ssize_t given = nargs + (names ? PyTuple_GET_SIZE(names) : 0);
  if (array_function == NULL) {
    PyErr_SetString(PyExc_TypeError, "no function for __array__ has been registered yet");
    return NULL;
  }
  if (given > 2) {
    PyErr_SetString(PyExc_TypeError, "__array__ takes dtype and copy, and nothing else");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < given; i++) all[i + 1] = args[i];
  return PyObject_Vectorcall(array_function, all, (size_t)nargs + 1, names);
}

/* ---- pickled --------------------------------------------------------------------------------- */

PyObject* py_describe_reduce(PyObject* self, PyObject* protocol) {
  if (reduce_function == NULL) {
    PyErr_SetString(PyExc_TypeError, "no function for pickling has been registered yet");
    return NULL;
  }
  return PyObject_CallFunctionObjArgs(reduce_function, self, protocol, NULL);
}

PyDoc_STRVAR(set_tensor_reduce_doc,
             "set_tensor_reduce(function, /)\n--\n\n"
             "Register what __reduce_ex__ of a dlx.Tensor calls: (tensor, protocol) -> tuple.");

static PyObject* set_tensor_reduce(PyObject* module, PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(reduce_function, function);
  Py_RETURN_NONE;
}

PyMethodDef py_describe_functions[] = {
    {"set_tensor_classes", (PyCFunction)(void (*)(void))set_tensor_classes, METH_FASTCALL,
     set_tensor_classes_doc},
    {"set_tensor_repr", set_tensor_repr, METH_O, set_tensor_repr_doc},
    {"set_tensor_reduce", set_tensor_reduce, METH_O, set_tensor_reduce_doc},
    {"set_tensor_cuda_interface", set_tensor_cuda_interface, METH_O, set_tensor_cuda_interface_doc},
    {"set_tensor_array", (PyCFunction)(void (*)(void))set_tensor_array, METH_FASTCALL,
     set_tensor_array_doc},
    {NULL, NULL, 0, NULL},
};
