/* dlx.Tensor: what hands capsules to any consumer. It holds one count on a managed tensor made by
 * dlx, whose shape and strides are our own copies; nothing of the producer's metadata is read
 * again. */

#include "py_dlx.h"

#include <structmember.h>

PyTypeObject* py_tensor_type;

static PyObject *device_class, *dtype_class; /* dlx.abi.Device and DType, registered by abi.py */

TensorObject* py_tensor_alloc(void) {
  return (TensorObject*)py_tensor_type->tp_alloc(py_tensor_type, 0);
}

DLManagedTensorVersioned* py_tensor_managed(PyObject* obj) {
  if (!PyObject_TypeCheck(obj, py_tensor_type)) {
    PyErr_Format(PyExc_TypeError, "expected dlx.Tensor, found %.200s", Py_TYPE(obj)->tp_name);
    return NULL;
  }
  DLManagedTensorVersioned* made = ((TensorObject*)obj)->managed;
  if (made == NULL) py_raise(DLX_E_CONSUMED, "this dlx.Tensor was handed back to its capsule");
  return made;
}

static void tensor_dealloc(PyObject* self) {
  TensorObject* tensor = (TensorObject*)self;
  PyTypeObject* type = Py_TYPE(self);
  if (tensor->weakrefs) PyObject_ClearWeakRefs(self);
  if (tensor->managed) {
    py_pending pending = py_pending_save(); /* a foreign deleter may run */
    dlx_managed_release(tensor->managed);
    py_pending_restore(pending);
  }
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* py_tensor_wrap(DLManagedTensorVersioned* made) {
  TensorObject* tensor = py_tensor_alloc();
  if (tensor == NULL) {
    dlx_managed_release(made);
    return NULL;
  }
  tensor->managed = made;
  return (PyObject*)tensor;
}

/* ---- attributes
 * ---------------------------------------------------------------------------------- */

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

enum { SHAPE, STRIDES, NDIM, DTYPE, DEVICE, NBYTES, IS_READONLY, DATA_PTR, FLAGS, VERSION };

static PyObject* tensor_get(PyObject* self, void* which) {
  const DLManagedTensorVersioned* m = py_tensor_managed(self);
  if (m == NULL) return NULL;
  const DLTensor* t = &m->dl_tensor;
  if (device_class == NULL) { /* abi.py registers its classes when it is imported */
    PyObject* abi = PyImport_ImportModule("dlx.abi");
    if (abi == NULL) return NULL;
    Py_DECREF(abi);
  }
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
    case DATA_PTR:
      return PyLong_FromVoidPtr(t->data);
    case FLAGS:
      return PyLong_FromUnsignedLongLong(m->flags);
    case VERSION:
      return Py_BuildValue("II", m->version.major, m->version.minor);
    case DEVICE:
      return PyObject_CallFunction(device_class, "ii", t->device.device_type, t->device.device_id);
    default:
      return PyObject_CallFunction(dtype_class, "iii", t->dtype.code, t->dtype.bits,
                                   t->dtype.lanes);
  }
}

#define ATTRIBUTE(name, which, doc) {name, tensor_get, NULL, doc, (void*)(intptr_t)(which)}

static PyGetSetDef tensor_attributes[] = {
    ATTRIBUTE("shape", SHAPE, "Extents, a tuple (ndim,)."),
    ATTRIBUTE("strides", STRIDES, "Strides in elements, a tuple (ndim,)."),
    ATTRIBUTE("ndim", NDIM, "Number of dimensions."),
    ATTRIBUTE("dtype", DTYPE, "The dtype as dlx.DType."),
    ATTRIBUTE("device", DEVICE, "Where the memory is, as dlx.Device."),
    ATTRIBUTE("nbytes", NBYTES, "Bytes of all elements, gaps not counted."),
    ATTRIBUTE("readonly", IS_READONLY, "Whether writing to the memory is forbidden."),
    ATTRIBUTE("data_ptr", DATA_PTR, "Address of the first element; a handle on opaque devices."),
    ATTRIBUTE("flags", FLAGS, "The DLPack flags, as an int."),
    ATTRIBUTE("version", VERSION, "The DLPack version this tensor is exported with."),
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- the DLPack protocol
 * -------------------------------------------------------------------------- */

/* GIL: needed. Errors: -1 with an exception; 0 = legacy wanted, 1 = versioned wanted. */
static int wants_versioned(PyObject* max_version) {
  if (max_version == Py_None) return 0;
  if (!PyTuple_Check(max_version) || PyTuple_GET_SIZE(max_version) != 2) {
    PyErr_SetString(PyExc_TypeError, "max_version must be None or a tuple (major, minor)");
    return -1;
  }
  long major = PyLong_AsLong(PyTuple_GET_ITEM(max_version, 0));
  if (major == -1 && PyErr_Occurred()) return -1;
  return major >= 1;
}

/* Where the capsule will say the memory is: host memory of any kind may be asked for as plain CPU.
 * GIL: needed. Errors: -1 with an exception. */
static int answer_request(PyObject* stream, PyObject* dl_device, DLDevice* device) {
  if (stream != Py_None && dlx_host_readable(device->device_type)) {
    long value = PyLong_Check(stream) ? PyLong_AsLong(stream) : 0;
    if (value == -1 && PyErr_Occurred()) {
      PyErr_Clear(); /* too big for a long, and so not -1 */
      value = 0;
    }
    if (value != -1) {
      py_raise(DLX_E_STREAM, "host memory has no stream; found stream=%R", stream);
      return -1;
    }
  }
  if (dl_device == Py_None) return 0;
  DLDevice wanted;
  if (py_read_device(dl_device, &wanted) < 0) return -1;
  int same = wanted.device_type == device->device_type && wanted.device_id == device->device_id;
  if (!same && !(wanted.device_type == kDLCPU && dlx_host_readable(device->device_type))) {
    py_raise(DLX_E_DEVICE, "this dlx.Tensor is on device (%d, %d), asked for (%d, %d)",
             device->device_type, device->device_id, wanted.device_type, wanted.device_id);
    return -1;
  }
  *device = wanted;
  return 0;
}

PyDoc_STRVAR(
    dlpack_doc,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "Return a fresh capsule over this memory (a copy where copy=True), versioned where "
    "max_version\n"
    "is (1, 0) or more. A read-only tensor is not given out in a legacy capsule.");

static PyObject* tensor_dlpack(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                               PyObject* names) {
  static const char* const keywords[] = {"stream", "max_version", "dl_device", "copy"};
  PyObject* value[4] = {Py_None, Py_None, Py_None, Py_None};
  if (nargs != 0) {
    PyErr_SetString(PyExc_TypeError, "__dlpack__ takes keyword arguments only");
    return NULL;
  }
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    int k = 0;
    while (k < 4 && PyUnicode_CompareWithASCIIString(name, keywords[k]) != 0) k++;
    if (k == 4) {
      PyErr_Format(PyExc_TypeError, "__dlpack__() got an unexpected keyword argument '%U'", name);
      return NULL;
    }
    value[k] = args[i];
  }
  DLManagedTensorVersioned *base = py_tensor_managed(self), *made;
  if (base == NULL) return NULL;
  DLTensor like = base->dl_tensor;
  int versioned = wants_versioned(value[1]);
  if (versioned < 0 || answer_request(value[0], value[2], &like.device) < 0) return NULL;
  if (!versioned && (base->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) &&
      dlx_itemsize(like.dtype, 0) == 0)
    return py_raise(DLX_E_FLAGS, "a legacy capsule cannot say that elements are padded to bytes");
  int copied = value[3] == Py_None ? 0 : PyObject_IsTrue(value[3]);
  if (copied < 0) return NULL;
  if (copied && value[2] != Py_None && like.device.device_type != kDLCPU)
    return py_raise(DLX_E_DEVICE, "dlx makes copies in host memory (1, 0), asked for (%d, %d)",
                    like.device.device_type, like.device.device_id);
  if (copied) {
    made = py_managed_copy(base, 1);
    if (made == NULL) return NULL;
    made->flags |= DLPACK_FLAG_BITMASK_IS_COPIED;
  } else {
    if (!versioned && (base->flags & DLPACK_FLAG_BITMASK_READ_ONLY))
      return py_raise(DLX_E_READONLY, "a legacy capsule cannot say that memory is read-only");
    uint64_t flags = base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
    int status = dlx_managed_share(base, &like, flags, &made);
    if (status != DLX_OK) return py_raise(status, NULL);
  }
  return py_capsule_wrap(made, !versioned);
}

PyDoc_STRVAR(dlpack_device_doc,
             "__dlpack_device__($self, /)\n--\n\n"
             "Return (device type, device id) as DLPack numbers.");

static PyObject* tensor_dlpack_device(PyObject* self, PyObject* unused) {
  const DLManagedTensorVersioned* m = py_tensor_managed(self);
  if (m == NULL) return NULL;
  return Py_BuildValue("ii", m->dl_tensor.device.device_type, m->dl_tensor.device.device_id);
}

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_FASTCALL | METH_KEYWORDS,
     dlpack_doc},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, dlpack_device_doc},
    {NULL, NULL, 0, NULL},
};

/* ---- the type
 * ------------------------------------------------------------------------------------- */

static PyMemberDef tensor_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(TensorObject, weakrefs), 1 /* READONLY */, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    tensor_doc,
    "A tensor in DLPack's sense, owned by dlx: memory, dtype, shape, strides, device, flags.\n\n"
    "It comes from dlx.convert(obj, to='dlx'); any DLPack consumer takes it.");

static PyType_Slot tensor_slots[] = {
    {Py_tp_dealloc, tensor_dealloc},   {Py_tp_methods, tensor_methods},
    {Py_tp_getset, tensor_attributes}, {Py_tp_members, tensor_members},
    {Py_tp_doc, (void*)tensor_doc},    {0, NULL},
};

static PyType_Spec tensor_spec = {
    .name = "dlx.Tensor",
    .basicsize = sizeof(TensorObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tensor_slots,
};

PyDoc_STRVAR(set_tensor_classes_doc,
             "set_tensor_classes(device, dtype, /)\n--\n\n"
             "Register the classes that dlx.Tensor.device and .dtype are made of.");

static PyObject* set_tensor_classes(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) {
    PyErr_SetString(PyExc_TypeError, "set_tensor_classes takes two classes");
    return NULL;
  }
  Py_INCREF(args[0]);
  Py_XSETREF(device_class, args[0]);
  Py_INCREF(args[1]);
  Py_XSETREF(dtype_class, args[1]);
  Py_RETURN_NONE;
}

PyMethodDef py_tensor_functions[] = {
    {"set_tensor_classes", (PyCFunction)(void (*)(void))set_tensor_classes, METH_FASTCALL,
     set_tensor_classes_doc},
    {NULL, NULL, 0, NULL},
};

int py_tensor_init(PyObject* module) {
  py_tensor_type = (PyTypeObject*)PyType_FromSpec(&tensor_spec);
  if (py_tensor_type == NULL) return -1;
  return PyModule_AddObjectRef(module, "Tensor", (PyObject*)py_tensor_type);
}
