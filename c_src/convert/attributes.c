/* Arrays on CUDA devices whose type has no exchange table, read by attributes (cupy). */

#include "target.h"
#include "core/strides.h"

/* Read a tuple of numbers. Errors: -1 = fallback. */
static int read_numbers(const py_question* question, PyObject* obj, int64_t* numbers) {
  PyObject* tuple = py_ask(question, obj);
  Py_ssize_t n = tuple && PyTuple_CheckExact(tuple) ? PyTuple_GET_SIZE(tuple) : -1;
  if (n > DLX_MAX_NDIM) n = -1;
  for (Py_ssize_t i = 0; i < n; i++) {
    numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    if (numbers[i] == -1 && PyErr_Occurred()) n = -1;
  }
  Py_XDECREF(tuple);
  return (int)n;
}

static int read_dtype(const py_fields* f, PyObject* obj, DLDataType* out) {
  PyObject* dtype = py_ask(&f->dtype, obj);
  PyObject* found = dtype ? PyDict_GetItemWithError(f->dtypes, dtype) : NULL; /* never changes */
  long key = found ? PyLong_AsLong(found) : -1;
  *out = (DLDataType){(uint8_t)key, (uint8_t)(key >> 8), 1};
  Py_XDECREF(dtype);
  int bits = out->bits;
  return key >= 0 && bits >= 8 && (bits & (bits - 1)) == 0;
}

/* Owns: the caller owns the result, which owns the array's memory. */
static DLManagedTensorVersioned* read_array(const py_fields* f, PyObject* obj) {
  int64_t shape[DLX_MAX_NDIM], strides[DLX_MAX_NDIM], device[DLX_MAX_NDIM];
  DLTensor t = {.shape = shape, .strides = strides};
  if (!read_dtype(f, obj, &t.dtype)) return NULL;
  t.ndim = read_numbers(&f->shape, obj, shape);
  if (t.ndim < 0 || read_numbers(&f->strides, obj, strides) != t.ndim ||
      read_numbers(&f->device, obj, device) != 2 ||
      !dlx_convert_strides(t.ndim, shape, strides, t.dtype.bits / 8, strides))
    return NULL;
  t.device = (DLDevice){(int32_t)device[0], (int32_t)device[1]};
  PyObject* memory = t.device.device_type == kDLCUDA ? py_ask(&f->memory, obj) : NULL;
  if (memory == NULL) return NULL;
  DLManagedTensorVersioned* made = NULL;
  PyObject* address = dlx_size(&t) ? PyObject_GetAttr(memory, f->address) : NULL;
  if (address) t.data = PyLong_AsVoidPtr(address);
  Py_XDECREF(address);
  if (PyErr_Occurred() || dlx_managed_new(&t, 0, memory, py_release_object, &made) != DLX_OK) {
    Py_DECREF(memory);
    return NULL;
  }
  return made;
}

void py_take_attributes(py_source* s, py_target* t, PyObject* obj, unsigned options,
                        py_offer* out) {
  /* A framework may ask the driver for the device: Python refuses that in a forked child. */
  if (!dlx_cuda_loaded() || !py_gate_is_open(&s->gate, obj)) return;
  DLManagedTensorVersioned* made = read_array(&s->fields, obj);
  if (made == NULL) {
    py_error_forget();
    out->state = PY_BLOCKED;
    return;
  }
  made->flags |= s->flags;
  py_offer_managed(s, t, made, options, out);
}
