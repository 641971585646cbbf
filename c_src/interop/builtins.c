/* Making dlx.Tensor objects: over an address, as a further view, as a copy; and listing the
 * incompatibilities between one and a consumer. */

#include "interop.h"

#include <string.h>

/* Owns: numbers written to `out`. Errors: -1 with an exception. */
static int read_numbers(PyObject* sequence, int64_t* out, Py_ssize_t n, const char* what) {
  PyObject* fast = PySequence_Tuple(sequence); /* a copy: reading a number may run Python */
  if (fast == NULL) return -1;
  int ok = PyTuple_GET_SIZE(fast) == n;
  if (!ok)
    PyErr_Format(PyExc_ValueError, "%s wants %zd numbers, found %zd", what, n,
                 PyTuple_GET_SIZE(fast));
  for (Py_ssize_t i = 0; ok && i < n; i++) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(fast, i));
    ok = !(out[i] == -1 && PyErr_Occurred());
  }
  Py_DECREF(fast);
  return ok ? 0 : -1;
}

static int read_dtype(PyObject* triple, DLDataType* out) {
  int64_t n[3];
  if (read_numbers(triple, n, 3, "dtype") < 0) return -1;
  if (n[0] < 0 || n[0] > UINT8_MAX || n[1] < 0 || n[1] > UINT8_MAX || n[2] < 0 ||
      n[2] > UINT16_MAX) {
    py_raise(DLX_E_DTYPE, NULL);
    return -1;
  }
  *out = (DLDataType){(uint8_t)n[0], (uint8_t)n[1], (uint16_t)n[2]};
  return 0;
}

int py_read_device(PyObject* pair, DLDevice* out) {
  int64_t n[2];
  if (read_numbers(pair, n, 2, "device") < 0) return -1;
  if (n[0] < INT32_MIN || n[0] > INT32_MAX || n[1] < INT32_MIN || n[1] > INT32_MAX) {
    PyErr_SetString(PyExc_OverflowError, "a device is two numbers of 32 bits");
    return -1;
  }
  *out = (DLDevice){(int32_t)n[0], (int32_t)n[1]};
  return 0;
}

PyDoc_STRVAR(tensor_new_doc,
             "tensor_new(address, shape, strides, dtype, device, flags, owner)\n--\n\n"
             "Make a dlx.Tensor over memory at an address that `owner` keeps alive.\n\n"
             "shape (ndim,) and strides (ndim,) in elements, or None = row-major; dtype (code, "
             "bits, lanes);\n"
             "device (type, id); flags as in DLPack. Raises what dlx_validate finds.");

static PyObject* tensor_new(PyObject* module, PyObject* args) {
  PyObject *address, *shape, *strides, *dtype, *device, *owner;
  unsigned long long flags;
  int64_t extents[DLX_MAX_NDIM], steps[DLX_MAX_NDIM];
  DLTensor like = {0};
  if (!PyArg_ParseTuple(args, "OOOOOKO:tensor_new", &address, &shape, &strides, &dtype, &device,
                        &flags, &owner))
    return NULL;
  Py_ssize_t ndim = PySequence_Size(shape);
  if (ndim < 0) return NULL;
  if (ndim > DLX_MAX_NDIM) return py_raise(DLX_E_NDIM, NULL);
  like.data = PyLong_AsVoidPtr(address);
  if (like.data == NULL && PyErr_Occurred()) return NULL;
  like.ndim = (int32_t)ndim;
  like.shape = extents;
  if (read_numbers(shape, extents, ndim, "shape") < 0 || read_dtype(dtype, &like.dtype) < 0 ||
      py_read_device(device, &like.device) < 0)
    return NULL;
  if (strides != Py_None) {
    if (read_numbers(strides, steps, ndim, "strides") < 0) return NULL;
    like.strides = steps;
  }
  DLManagedTensorVersioned* made;
  int status = dlx_managed_new(&like, flags, owner, py_release_object, &made);
  if (status == DLX_OK) Py_INCREF(owner);
  return py_tensor_result(status, made);
}

PyDoc_STRVAR(tensor_view_doc,
             "tensor_view(tensor, dtype, device, flags, owner)\n--\n\n"
             "Make a further dlx.Tensor over the same memory. dtype, device and flags replace the "
             "tensor's own\n"
             "where they are not None; the view also keeps `owner` alive unless it is None.");

static PyObject* tensor_view(PyObject* module, PyObject* args) {
  PyObject *tensor, *dtype, *device, *flags_object, *owner;
  if (!PyArg_ParseTuple(args, "OOOOO:tensor_view", &tensor, &dtype, &device, &flags_object, &owner))
    return NULL;
  DLManagedTensorVersioned *base = py_tensor_managed(tensor), *made;
  if (base == NULL) return NULL;
  DLTensor like = base->dl_tensor;
  uint64_t flags = base->flags;
  if (dtype != Py_None && read_dtype(dtype, &like.dtype) < 0) return NULL;
  if (device != Py_None && py_read_device(device, &like.device) < 0) return NULL;
  if (flags_object != Py_None) {
    flags = PyLong_AsUnsignedLongLong(flags_object);
    if (flags == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  }
  int64_t item = dlx_itemsize(like.dtype, flags);
  int packed_bits = like.dtype.bits * like.dtype.lanes;
  if (item != dlx_itemsize(base->dl_tensor.dtype, base->flags) ||
      (item == 0 && packed_bits != base->dl_tensor.dtype.bits * base->dl_tensor.dtype.lanes))
    return py_raise(DLX_E_MISMATCH, "a view of another element size");
  int status;
  if (owner == Py_None) {
    status = dlx_managed_share(base, &like, flags, &made);
  } else {
    PyObject* both = PyTuple_Pack(2, tensor, owner);
    if (both == NULL) return NULL;
    status = dlx_managed_new(&like, flags, both, py_release_object, &made);
    if (status != DLX_OK) Py_DECREF(both);
  }
  PyObject* view = py_tensor_result(status, made);
  if (view) py_tensor_follow((TensorObject*)view, (TensorObject*)tensor, base);
  return view;
}

/* Errors: a status; then *out is NULL. GIL: not needed. */
static int copied(const DLTensor* from, uint64_t flags, int keep_order,
                  DLManagedTensorVersioned** out) {
  *out = NULL;
  int status = dlx_managed_empty(from, flags, keep_order, out);
  if (status == DLX_OK && (status = dlx_copy(from, &(*out)->dl_tensor, flags)) != DLX_OK) {
    dlx_managed_release(*out);
    *out = NULL;
  }
  return status;
}

DLManagedTensorVersioned* py_managed_copy(DLManagedTensorVersioned* from, int keep_order) {
  enum { FEW = 1 << 14 /* bytes that move in less time than the GIL takes to change hands */ };
  const DLTensor* t = &from->dl_tensor;
  uint64_t flags = py_fresh_flags(from);
  DLManagedTensorVersioned* fresh = NULL;
  int status = dlx_host_readable(t->device.device_type) ? DLX_OK : DLX_E_DEVICE;
  if (status == DLX_OK && dlx_nbytes(t, flags) <= FEW) {
    status = copied(t, flags, keep_order, &fresh);
  } else if (status == DLX_OK) {
    dlx_managed_hold(from); /* another thread may drop the last reference to the tensor */
    Py_BEGIN_ALLOW_THREADS
      status = copied(t, flags, keep_order, &fresh);
    Py_END_ALLOW_THREADS
    py_managed_release(from);
  }
  return status == DLX_OK ? fresh : (DLManagedTensorVersioned*)py_raise(status, NULL);
}

PyDoc_STRVAR(
    tensor_copy_doc,
    "tensor_copy(tensor, keep_order, /)\n--\n\n"
    "Copy into fresh, writable host memory aligned to 256 bytes; row-major, or with the order of\n"
    "dimensions kept. The GIL is released while bytes move.");

static PyObject* tensor_copy(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  DLManagedTensorVersioned* m =
      py_args("tensor_copy", nargs, 2, 2) ? py_tensor_managed(args[0]) : NULL;
  int keep_order = m ? PyObject_IsTrue(args[1]) : -1;
  if (keep_order < 0) return NULL;
  m = py_managed_copy(m, keep_order);
  return m ? py_tensor_wrap(m) : NULL;
}

/* Owns: borrowed; a reference to each tensor is held by the list. Errors: NULL with an exception.
 */
static DLManagedTensorVersioned** managed_of(PyObject* tensors, Py_ssize_t n) {
  DLManagedTensorVersioned** rows = PyMem_New(DLManagedTensorVersioned*, n);
  if (rows == NULL) return (DLManagedTensorVersioned**)PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < n; i++) {
    if ((rows[i] = py_tensor_managed(PyList_GET_ITEM(tensors, i))) == NULL) {
      PyMem_Free(rows);
      return NULL;
    }
  }
  return rows;
}

/* Whether tensors stack: on one device, of whatever number where the host reads them. */
static int same_kind(const DLManagedTensorVersioned* a, const DLManagedTensorVersioned* b) {
  const DLTensor *s = &a->dl_tensor, *t = &b->dl_tensor;
  uint64_t padded = DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  return s->ndim == t->ndim && memcmp(&s->dtype, &t->dtype, sizeof s->dtype) == 0 &&
         s->device.device_type == t->device.device_type &&
         (s->device.device_id == t->device.device_id || dlx_host_readable(s->device.device_type)) &&
         (a->flags & padded) == (b->flags & padded) &&
         (s->ndim == 0 || memcmp(s->shape, t->shape, (size_t)s->ndim * sizeof *s->shape) == 0);
}

/* Fresh memory for n tensors like `row`, one after another; none where a consumer (NULL = none is
 * asked) does not take it. Errors: a status. */
static int empty_rows(const DLManagedTensorVersioned* row, Py_ssize_t n,
                      const dlx_capabilities* consumer, DLManagedTensorVersioned** out) {
  int64_t shape[DLX_MAX_NDIM + 1] = {n};
  DLTensor like = row->dl_tensor;
  uint64_t flags = row->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  if (dlx_itemsize(like.dtype, flags) == 0 &&
      dlx_size(&like) * like.dtype.bits * like.dtype.lanes % 8 != 0)
    return DLX_E_PACKED; /* rows would not begin on a byte */
  if (like.ndim) memcpy(shape + 1, like.shape, (size_t)like.ndim * sizeof *shape);
  like.shape = shape;
  like.strides = NULL;
  like.ndim++;
  like.data = (void*)(uintptr_t)DLX_ALIGNMENT; /* as aligned as the memory will be; not read */
  like.byte_offset = 0;
  int status = dlx_validate(&like, flags);
  if (status != DLX_OK || (consumer && dlx_check(&like, flags, consumer))) return status;
  return dlx_managed_empty(&like, flags, 0, out);
}

/* GIL: not needed. Errors: a status. */
static int copy_rows(DLManagedTensorVersioned* const* rows, Py_ssize_t n,
                     const DLManagedTensorVersioned* whole) {
  DLTensor to = whole->dl_tensor;
  to.ndim--;
  to.shape++;
  to.strides++;
  int64_t step = dlx_nbytes(&to, whole->flags);
  int status = DLX_OK;
  for (Py_ssize_t i = 0; i < n && status == DLX_OK; i++) {
    to.data = (char*)whole->dl_tensor.data + i * step;
    status = dlx_copy(&rows[i]->dl_tensor, &to, whole->flags);
  }
  return status;
}

PyDoc_STRVAR(
    tensor_stack_doc,
    "tensor_stack(tensors, capabilities=0, /)\n--\n\n"
    "Copy a list of tensors into one new tensor, along a new first dimension. Return the number of "
    "the first one\n"
    "whose shape, dtype or device differs from the first's, if there is one; None where a consumer "
    "does not take the\n"
    "result, whose dlx_capabilities are at an address. The GIL is released while bytes move;\n"
    "nobody else may know the list.");

static PyObject* tensor_stack(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_args("tensor_stack", nargs, 1, 2)) return NULL;
  PyObject* tensors = args[0];
  if (!PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) == 0)
    return PyErr_Format(PyExc_TypeError, "tensor_stack takes a list with tensors in it");
  const dlx_capabilities* consumer = nargs == 2 ? PyLong_AsVoidPtr(args[1]) : NULL;
  if (consumer == NULL && PyErr_Occurred()) return NULL;
  Py_ssize_t n = PyList_GET_SIZE(tensors);
  DLManagedTensorVersioned *whole = NULL, **rows = managed_of(tensors, n);
  if (rows == NULL) return NULL;
  for (Py_ssize_t i = 1; i < n; i++) {
    if (!same_kind(rows[0], rows[i])) {
      PyMem_Free(rows);
      return PyLong_FromSsize_t(i);
    }
  }
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = empty_rows(rows[0], n, consumer, &whole);
    if (status == DLX_OK && whole) status = copy_rows(rows, n, whole);
  Py_END_ALLOW_THREADS
  PyMem_Free(rows);
  if (status == DLX_OK && whole) return py_tensor_wrap(whole);
  if (whole) dlx_managed_release(whole);
  if (status == DLX_OK) Py_RETURN_NONE;
  return py_raise(status, NULL);
}

PyDoc_STRVAR(
    tensor_repack_doc,
    "tensor_repack(tensor, /)\n--\n\n"
    "Copy packed elements of less than a byte to a byte each, or such ones into packed ones; into\n"
    "fresh, writable, row-major host memory. The GIL is released meanwhile.");

static PyObject* tensor_repack(PyObject* module, PyObject* tensor) {
  DLManagedTensorVersioned *from = py_tensor_managed(tensor), *made;
  if (from == NULL) return NULL;
  uint64_t flags =
      ~from->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED; /* the other of the two */
  int status = dlx_managed_empty(&from->dl_tensor, flags, 0, &made);
  if (status != DLX_OK) return py_raise(status, NULL);
  Py_BEGIN_ALLOW_THREADS
    status = dlx_repack(&from->dl_tensor, from->flags, &made->dl_tensor, flags);
  Py_END_ALLOW_THREADS
  if (status == DLX_OK) return py_tensor_wrap(made);
  dlx_managed_release(made);
  return py_raise(status, NULL);
}

PyDoc_STRVAR(
    tensor_check_doc,
    "tensor_check(tensor, capabilities, /)\n--\n\n"
    "Return the DLX_INCOMPATIBLE_* bits between a tensor and the dlx_capabilities at an address.");

static PyObject* tensor_check(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  DLManagedTensorVersioned* m =
      py_args("tensor_check", nargs, 2, 2) ? py_tensor_managed(args[0]) : NULL;
  const dlx_capabilities* consumer = m ? PyLong_AsVoidPtr(args[1]) : NULL;
  if (consumer == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no capabilities at address 0");
    return NULL;
  }
  return PyLong_FromUnsignedLong(dlx_check(&m->dl_tensor, m->flags, consumer));
}

PyDoc_STRVAR(buffer_address_doc,
             "buffer_address(view, /)\n--\n\n"
             "Return the address of a memoryview's first element.");

static PyObject* buffer_address(PyObject* module, PyObject* view) {
  if (!PyMemoryView_Check(view))
    return PyErr_Format(PyExc_TypeError, "buffer_address takes a memoryview");
  Py_buffer buffer; /* asked for anew, since a view may have been released */
  if (PyObject_GetBuffer(view, &buffer, PyBUF_FULL_RO) < 0) return NULL;
  void* address = buffer.buf;
  PyBuffer_Release(&buffer);
  return PyLong_FromVoidPtr(address);
}

PyMethodDef py_make_functions[] = {
    PY_VARARGS(tensor_new),   PY_VARARGS(tensor_view),
    PY_FASTCALL(tensor_copy), PY_FASTCALL(tensor_stack),
    PY_ONE(tensor_repack),    PY_FASTCALL(tensor_check),
    PY_ONE(buffer_address),   PY_END,
};
