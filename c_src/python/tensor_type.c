/* The type dlx.Tensor, and its half of the DLPack protocol: capsules for any consumer. */

#include "dlx_python.h"

/* ---- the DLPack protocol --------------------------------------------------------------------- */

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
    int is_too_big = 0;
    long value = PyLong_Check(stream) ? PyLong_AsLongAndOverflow(stream, &is_too_big) : 0;
    if (value != -1 || is_too_big) {
      py_raise(DLX_E_STREAM, "host memory has no stream; found stream=%R", stream);
      return -1;
    }
  }
  if (dl_device == Py_None) return 0;
  DLDevice wanted;
  if (py_read_device(dl_device, &wanted) < 0) return -1;
  int same = wanted.device_type == device->device_type && wanted.device_id == device->device_id;
  int to_host = wanted.device_type == kDLCPU &&
                (dlx_host_readable(device->device_type) || dlx_is_cuda(*device));
  if (!same && !to_host) {
    py_raise(DLX_E_DEVICE, "this dlx.Tensor is on device (%d, %d), asked for (%d, %d)",
             device->device_type, device->device_id, wanted.device_type, wanted.device_id);
    return -1;
  }
  *device = wanted;
  return 0;
}

enum { STREAM, MAX_VERSION, DL_DEVICE, COPY, KEYWORDS };
static PyObject* keywords[KEYWORDS]; /* interned */

/* Which keyword a name is, or KEYWORDS. Names in calls are interned too, so the first loop finds
 * it. */
static int keyword_of(PyObject* name) {
  int k = 0;
  while (k < KEYWORDS && name != keywords[k]) k++;
  if (k < KEYWORDS) return k;
  for (k = 0; k < KEYWORDS && PyUnicode_Compare(name, keywords[k]) != 0; k++) continue;
  return k;
}

PyDoc_STRVAR(
    dlpack_doc,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "Return a fresh capsule over this memory (a copy where copy=True), versioned where "
    "max_version\n"
    "is (1, 0) or more. A read-only tensor is not exported in a legacy capsule.");

static PyObject* tensor_dlpack(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                               PyObject* names) {
  PyObject* value[KEYWORDS] = {Py_None, Py_None, Py_None, Py_None};
  if (nargs != 0) {
    PyErr_SetString(PyExc_TypeError, "__dlpack__ takes keyword arguments only");
    return NULL;
  }
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    int k = keyword_of(name);
    if (k == KEYWORDS) {
      PyErr_Format(PyExc_TypeError, "__dlpack__() got an unexpected keyword argument '%U'", name);
      return NULL;
    }
    value[k] = args[i];
  }
  DLManagedTensorVersioned *base = py_tensor_managed(self), *made;
  if (base == NULL) return NULL;
  DLDevice device = base->dl_tensor.device;
  int versioned = wants_versioned(value[MAX_VERSION]);
  if (versioned < 0 || answer_request(value[STREAM], value[DL_DEVICE], &device) < 0) return NULL;
  if (!versioned && (base->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) &&
      dlx_itemsize(base->dl_tensor.dtype, 0) == 0)
    return py_raise(DLX_E_FLAGS, "a legacy capsule cannot say that elements are padded to bytes");
  int copied = value[COPY] == Py_None ? 0 : PyObject_IsTrue(value[COPY]);
  if (copied < 0) return NULL;
  int is_ours = dlx_is_cuda(base->dl_tensor.device);
  if (is_ours && device.device_type == kDLCPU) { /* only a copy can be there */
    if (value[COPY] != Py_None && !copied)
      return py_raise(DLX_E_COPY, "device memory cannot be had on the host without a copy");
    copied = 1;
  } else if (copied && value[DL_DEVICE] != Py_None && device.device_type != kDLCPU) {
    return py_raise(DLX_E_DEVICE, "dlx makes copies in host memory (1, 0), asked for (%d, %d)",
                    device.device_type, device.device_id);
  }
  if (copied) {
    made = is_ours ? py_cuda_fetch((TensorObject*)self) : py_managed_copy(base, 1);
    if (made == NULL) return NULL;
    made->flags |= DLPACK_FLAG_BITMASK_IS_COPIED;
  } else {
    if (!versioned && (base->flags & DLPACK_FLAG_BITMASK_READ_ONLY) &&
        dlx_nbytes(&base->dl_tensor, base->flags) > 0) /* else nobody can write to it */
      return py_raise(DLX_E_READONLY, "a legacy capsule cannot say that memory is read-only");
    uint64_t flags = base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
    int status = dlx_managed_export(base, device, flags, &made);
    if (status != DLX_OK) return py_raise(status, NULL);
    if (is_ours) made = py_cuda_export((TensorObject*)self, made, value[STREAM]);
    if (made == NULL) return NULL;
  }
  return py_capsule_wrap(made, !versioned);
}

PyDoc_STRVAR(dlpack_device_doc,
             "__dlpack_device__($self, /)\n--\n\n"
             "Return (device type, device id) as DLPack numbers.");

static PyObject* tensor_dlpack_device(PyObject* self, PyObject* unused) {
  const DLManagedTensorVersioned* m = py_tensor_managed(self);
  if (m == NULL) return NULL;
  PyObject *pair = PyTuple_New(2), *type = PyLong_FromLong(m->dl_tensor.device.device_type),
           *id = PyLong_FromLong(m->dl_tensor.device.device_id);
  if (pair == NULL || type == NULL || id == NULL) {
    Py_XDECREF(pair);
    Py_XDECREF(type);
    Py_XDECREF(id);
    return NULL;
  }
  PyTuple_SET_ITEM(pair, 0, type);
  PyTuple_SET_ITEM(pair, 1, id);
  return pair;
}

PyDoc_STRVAR(
    arrow_array_doc,
    "__arrow_c_array__($self, /, requested_schema=None)\n--\n\n"
    "Return (type, data) in the capsules of Arrow's PyCapsule interface, over this memory: "
    "row-major\n"
    "host memory of numbers, of one dimension or more. Every further dimension is a level of "
    "fixed-size\n"
    "lists. Bools are packed into a copy. A schema that is requested is not regarded.");

PyDoc_STRVAR(arrow_schema_doc,
             "__arrow_c_schema__($self, /)\n--\n\n"
             "Return the type of what __arrow_c_array__ gives, in a capsule.");

PyDoc_STRVAR(
    array_doc,
    "__array__($self, dtype=None, /, *, copy=None)\n--\n\n"
    "Return a numpy array over this memory, read-only where it is; of another dtype a copy. "
    "Device\nmemory is refused.");

PyDoc_STRVAR(reduce_doc,
             "__reduce_ex__($self, protocol, /)\n--\n\n"
             "Return what pickle and copy make a tensor of the same values from; with protocol 5 "
             "out of\nband.");

PyDoc_STRVAR(tobytes_doc,
             "tobytes($self, /)\n--\n\n"
             "Return the elements as bytes, in row-major order.");

static PyObject* tensor_tobytes(PyObject* self, PyObject* unused) {
  return PyBytes_FromObject(self);
}

static PyMethodDef tensor_methods[] = {
    {"__array__", (PyCFunction)(void (*)(void))py_describe_array, METH_FASTCALL | METH_KEYWORDS,
     array_doc},
    {"tobytes", tensor_tobytes, METH_NOARGS, tobytes_doc},
    {"__reduce_ex__", py_describe_reduce, METH_O, reduce_doc},
    {"__arrow_c_array__", (PyCFunction)(void (*)(void))py_arrow_array,
     METH_FASTCALL | METH_KEYWORDS, arrow_array_doc},
    {"__arrow_c_schema__", py_arrow_schema, METH_NOARGS, arrow_schema_doc},
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_FASTCALL | METH_KEYWORDS,
     dlpack_doc},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, dlpack_device_doc},
    {NULL, NULL, 0, NULL},
};

/* ---- the type -------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    tensor_doc,
    "A tensor in DLPack's sense, owned by dlx: memory, dtype, shape, strides, device, flags.\n\n"
    "It comes from dlx.convert(obj, to='dlx'); any DLPack consumer takes it, and host memory is a\n"
    "buffer.");

int py_tensor_init(PyObject* module) {
  static const char* const names[KEYWORDS] = {[STREAM] = "stream",
                                              [MAX_VERSION] = "max_version",
                                              [DL_DEVICE] = "dl_device",
                                              [COPY] = "copy"};
  for (int k = 0; k < KEYWORDS; k++) {
    keywords[k] = PyUnicode_InternFromString(names[k]);
    if (keywords[k] == NULL) return -1;
  }
  static PyBufferProcs buffer = {py_buffer_get, py_buffer_release};
  py_tensor_type.tp_methods = tensor_methods;
  py_tensor_type.tp_getset = py_describe_attributes;
  py_tensor_type.tp_repr = py_describe_repr;
  py_tensor_type.tp_as_buffer = &buffer;
  py_tensor_type.tp_doc = tensor_doc;
  if (PyType_Ready(&py_tensor_type) < 0 || py_table_publish(&py_tensor_type) < 0) return -1;
  return PyModule_AddObjectRef(module, "Tensor", (PyObject*)&py_tensor_type);
}
