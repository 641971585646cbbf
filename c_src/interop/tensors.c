/* Builtins that create dlx.Tensor objects from addresses, views and copies, or check them. */

#include "interop.h"
#include "core/allocate.h"

#include <string.h>

static int read_numbers(PyObject* sequence, int64_t* out, Py_ssize_t n, const char* what) {
  PyObject* fast = PySequence_Tuple(sequence); /* a copy: reading a number may run Python */
  if (fast == NULL) return -1;
  int ok = PyTuple_GET_SIZE(fast) == n;
  if (!ok)
    PyErr_Format(PyExc_ValueError, "%s takes %zd numbers, found %zd", what, n,
                 PyTuple_GET_SIZE(fast));
  for (Py_ssize_t i = 0; ok && i < n; i++) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(fast, i));
    ok = !(out[i] == -1 && PyErr_Occurred());
  }
  Py_DECREF(fast);
  return ok ? 0 : -1;
}

int py_read_dtype(PyObject* triple, DLDataType* out) {
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
    PyErr_SetString(PyExc_OverflowError, "a device is two 32-bit integers");
    return -1;
  }
  *out = (DLDevice){(int32_t)n[0], (int32_t)n[1]};
  return 0;
}

PY_DOC(tensor_new,
       "Return a dlx.Tensor of memory that `owner` keeps alive. strides are in elements, or None.");
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
  if (read_numbers(shape, extents, ndim, "shape") < 0 || py_read_dtype(dtype, &like.dtype) < 0 ||
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

PY_DOC(
    tensor_view,
    "Return a dlx.Tensor of the same memory. None for dtype, device or flags keeps the tensor's. "
    "The view also keeps `owner` (or None) alive.");
static PyObject* tensor_view(PyObject* module, PyObject* args) {
  PyObject *tensor, *dtype, *device, *flags_object, *owner;
  if (!PyArg_ParseTuple(args, "OOOOO:tensor_view", &tensor, &dtype, &device, &flags_object, &owner))
    return NULL;
  DLManagedTensorVersioned *base = py_tensor_managed(tensor), *made;
  if (base == NULL) return NULL;
  DLTensor like = base->dl_tensor;
  uint64_t flags = base->flags;
  if (dtype != Py_None && py_read_dtype(dtype, &like.dtype) < 0) return NULL;
  if (device != Py_None && py_read_device(device, &like.device) < 0) return NULL;
  if (flags_object != Py_None) {
    flags = PyLong_AsUnsignedLongLong(flags_object);
    if (flags == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  }
  int64_t item = dlx_itemsize(like.dtype, flags);
  int packed_bits = like.dtype.bits * like.dtype.lanes;
  if (item != dlx_itemsize(base->dl_tensor.dtype, base->flags) ||
      (item == 0 && packed_bits != base->dl_tensor.dtype.bits * base->dl_tensor.dtype.lanes))
    return py_raise(DLX_E_MISMATCH, "a view must have the same element size");
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

/* Copy and cast host memory, or copy device memory on a stream. Errors: a status; *out is NULL. */
static int copy_to_host(const DLTensor* from, DLDataType dtype, uint64_t flags, int keep_order,
                        uint64_t stream, DLManagedTensorVersioned** out) {
  DLTensor like = *from;
  like.dtype = dtype;
  *out = NULL;
  int status = dlx_managed_empty(&like, flags, keep_order, out);
  if (status != DLX_OK) return status;
  const DLTensor* to = &(*out)->dl_tensor;
  status = stream ? dlx_cuda_transfer(from, to, flags, stream, 1) : dlx_cast(from, to, flags);
  if (status != DLX_OK) {
    dlx_managed_release(*out);
    *out = NULL;
  }
  return status;
}

DLManagedTensorVersioned* py_managed_copy(DLManagedTensorVersioned* from, const DLDataType* dtype,
                                          int keep_order, uint64_t stream) {
  const DLTensor* t = &from->dl_tensor;
  uint64_t flags = py_fresh_flags(from);
  DLManagedTensorVersioned* fresh;
  if (!stream && !dlx_host_readable(t->device.device_type))
    return (DLManagedTensorVersioned*)py_raise(DLX_E_DEVICE, NULL);
  PyThreadState* state = NULL;
  if (stream || dlx_nbytes(t, flags) > PY_FEW_BYTES) {
    dlx_managed_hold(from); /* another thread may drop the last reference to the tensor */
    state = PyEval_SaveThread();
  }
  int status = copy_to_host(t, dtype ? *dtype : t->dtype, flags, keep_order, stream, &fresh);
  if (state) {
    PyEval_RestoreThread(state);
    py_managed_release(from);
  }
  return status == DLX_OK ? fresh : (DLManagedTensorVersioned*)py_raise(status, NULL);
}

PY_DOC(tensor_copy,
       "Copy to writable host memory, row-major or in the source's order of dimensions. The stream "
       "for device memory must already wait for it. Host memory is cast to a dtype.");
static PyObject* tensor_copy(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  DLManagedTensorVersioned* m =
      py_check_args("tensor_copy", nargs, 2, 4) ? py_tensor_managed(args[0]) : NULL;
  int keep_order = m ? PyObject_IsTrue(args[1]) : -1;
  uint64_t stream = nargs >= 3 ? PyLong_AsUnsignedLongLong(args[2]) : 0;
  if (keep_order < 0 || PyErr_Occurred()) return NULL;
  DLDataType dtype = m->dl_tensor.dtype;
  if (nargs == 4 && args[3] != Py_None && py_read_dtype(args[3], &dtype) < 0) return NULL;
  m = py_managed_copy(m, &dtype, keep_order, stream);
  return m ? py_tensor_wrap(m) : NULL;
}

PY_DOC(tensor_repack, "Copy packed elements of less than a byte to a byte each, or vice versa.");
static PyObject* tensor_repack(PyObject* module, PyObject* tensor) {
  DLManagedTensorVersioned *from = py_tensor_managed(tensor), *made;
  if (from == NULL) return NULL;
  uint64_t flags = ~from->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  int status = dlx_managed_empty(&from->dl_tensor, flags, 0, &made);
  if (status != DLX_OK) return py_raise(status, NULL);
  PY_WITHOUT_GIL(status = dlx_repack(&from->dl_tensor, from->flags, &made->dl_tensor, flags));
  if (status == DLX_OK) return py_tensor_wrap(made);
  dlx_managed_release(made);
  return py_raise(status, NULL);
}

PY_DOC(tensor_check, "Return the DLX_INCOMPATIBLE_* bits for the dlx_capabilities at an address.");
static PyObject* tensor_check(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  DLManagedTensorVersioned* m =
      py_check_args("tensor_check", nargs, 2, 2) ? py_tensor_managed(args[0]) : NULL;
  const dlx_capabilities* consumer = m ? PyLong_AsVoidPtr(args[1]) : NULL;
  if (consumer == NULL) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_ValueError, "the address of the capabilities is 0");
    return NULL;
  }
  return PyLong_FromUnsignedLong(dlx_check(&m->dl_tensor, m->flags, consumer));
}

PY_DOC(buffer_address, "Return the address of a memoryview's first element.");
static PyObject* buffer_address(PyObject* module, PyObject* view) {
  if (!PyMemoryView_Check(view))
    return PyErr_Format(PyExc_TypeError, "buffer_address takes a memoryview");
  Py_buffer buffer; /* checks that the view is not released */
  if (PyObject_GetBuffer(view, &buffer, PyBUF_FULL_RO) < 0) return NULL;
  void* address = buffer.buf;
  PyBuffer_Release(&buffer);
  return PyLong_FromVoidPtr(address);
}

typedef struct {
  DLManagedTensorVersioned* wrapper; /* owes the foreign deleter, unless borrowed */
  PyObject* keep;                    /* or NULL; released after the deleter has run */
} foreign_owner;

static void release_foreign(void* owner) {
  foreign_owner* self = owner;
  dlx_managed_release(self->wrapper);
  if (self->keep) py_release_object(self->keep);
  free(self);
}

/* Owns: *out owes the deleter (unless borrowed) and a reference to `keep`. Errors: a status. */
static int wrap_foreign(void* foreign, int legacy, int borrow, PyObject* keep,
                        DLManagedTensorVersioned** out) {
  foreign_owner* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = (foreign_owner){.keep = keep};
  int status = legacy ? dlx_legacy_adopt(foreign, &self->wrapper)
                      : dlx_managed_adopt(foreign, &self->wrapper);
  if (status == DLX_OK) {
    /* The copied flag describes a hand-over, not the memory. */
    uint64_t flags = self->wrapper->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
    status = dlx_managed_new(&self->wrapper->dl_tensor, flags, self, release_foreign, out);
    if (status != DLX_OK || borrow) dlx_managed_own(self->wrapper, NULL, NULL);
    if (status != DLX_OK) dlx_managed_release(self->wrapper);
  }
  if (status == DLX_OK)
    Py_XINCREF(keep);
  else
    free(self);
  return status;
}

PY_DOC(managed_adopt,
       "Return a dlx.Tensor that owns the managed tensor at an address, unless borrowed. `keep` "
       "lives until the deleter has run.");
static PyObject* managed_adopt(PyObject* module, PyObject* args) {
  PyObject *address, *keep;
  int legacy, borrow;
  if (!PyArg_ParseTuple(args, "OppO:managed_adopt", &address, &legacy, &borrow, &keep)) return NULL;
  void* foreign = PyLong_AsVoidPtr(address);
  if (foreign == NULL) {
    if (!PyErr_Occurred()) py_raise(DLX_E_NULL, "the address of the managed tensor is 0");
    return NULL;
  }
  /* Allocate first: nothing may fail after taking ownership. */
  TensorObject* tensor = py_tensor_alloc();
  if (tensor == NULL) return NULL;
  int status =
      wrap_foreign(foreign, legacy, borrow, keep == Py_None ? NULL : keep, &tensor->managed);
  if (status == DLX_OK) return (PyObject*)tensor;
  Py_DECREF(tensor);
  if (status != DLX_E_VERSION) return py_raise(status, NULL);
  const DLPackVersion* found = foreign; /* the first field of every version */
  return py_raise(status, "the struct has DLPack %u.%u, dlx reads 1.x", found->major, found->minor);
}

PY_DOC(tensor_address,
       "Return the address of a dlx.Tensor's DLTensor; valid while the tensor is alive.");
static PyObject* tensor_address(PyObject* module, PyObject* tensor) {
  DLManagedTensorVersioned* made = py_tensor_managed(tensor);
  return made ? PyLong_FromVoidPtr(&made->dl_tensor) : NULL;
}

PY_DOC(tensor_empty, "Return a dlx.Tensor of new host memory like the DLTensor at an address.");
static PyObject* tensor_empty(PyObject* module, PyObject* address) {
  const DLTensor* like = PyLong_AsVoidPtr(address);
  if (like == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the address of the DLTensor is 0");
    return NULL;
  }
  DLManagedTensorVersioned* made;
  int status;
  PY_WITHOUT_GIL(status = dlx_managed_empty(like, 0, 0, &made));
  return py_tensor_result(status, made);
}

PyMethodDef py_tensor_functions[] = {
    PY_VARARGS(tensor_new),    PY_VARARGS(tensor_view),
    PY_FASTCALL(tensor_copy),  PY_ONE(tensor_repack),
    PY_FASTCALL(tensor_check), PY_ONE(buffer_address),
    PY_VARARGS(managed_adopt), PY_ONE(tensor_address),
    PY_ONE(tensor_empty),      PY_END,
};
