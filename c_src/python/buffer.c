/* The buffer protocol of dlx.Tensor: host memory, in the letters that numpy and struct use.
 *
 * A view has a managed tensor of its own, which shares the memory. So the memory, the shape and the
 * strides stay as they are while the view lives, whatever becomes of the dlx.Tensor. */

#include "dlx_python.h"

_Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "extents are handed on as they are");

static char nothing[16]; /* the address of what has no elements, for those who want one */

static const struct {
  DLDataType dtype;
  const char* letters;
} formats[] = {
    {{kDLBool, 8, 1}, "?"},
    {{kDLInt, 8, 1}, "b"},
    {{kDLInt, 16, 1}, "h"},
    {{kDLInt, 32, 1}, "i"},
    {{kDLInt, 64, 1}, sizeof(long) == 8 ? "l" : "q"},
    {{kDLUInt, 8, 1}, "B"},
    {{kDLUInt, 16, 1}, "H"},
    {{kDLUInt, 32, 1}, "I"},
    {{kDLUInt, 64, 1}, sizeof(long) == 8 ? "L" : "Q"},
    {{kDLFloat, 16, 1}, "e"},
    {{kDLFloat, 32, 1}, "f"},
    {{kDLFloat, 64, 1}, "d"},
    {{kDLComplex, 64, 1}, "Zf"},
    {{kDLComplex, 128, 1}, "Zd"},
};

/* GIL: not needed. Errors: NULL where buffers have no letters for the dtype. */
static const char* format_of(DLDataType dtype) {
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    if (formats[i].dtype.code == dtype.code && formats[i].dtype.bits == dtype.bits &&
        formats[i].dtype.lanes == dtype.lanes)
      return formats[i].letters;
  }
  return NULL;
}

/* Turn strides in elements to bytes, in place. Strides that no element depends on may be any
 * number, too large for bytes even: they are written as in compact memory.
 * Owns: nothing. GIL: not needed. */
static void to_bytes(DLTensor* t, int64_t itemsize) {
  int64_t step = 1, size = dlx_size(t);
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    if (size == 0 || t->shape[i] == 1) t->strides[i] = step;
    t->strides[i] *= itemsize;
    if (size) step *= t->shape[i];
  }
}

/* GIL: needed. Errors: -1 with an exception that says what stands against a buffer. */
static int may_view(PyObject* self, const DLManagedTensorVersioned* m, int flags) {
  const DLTensor* t = &m->dl_tensor;
  if (!dlx_host_readable(t->device.device_type)) {
    py_raise(DLX_E_DEVICE, "a buffer is host memory, and this dlx.Tensor is on device (%d, %d)",
             t->device.device_type, t->device.device_id);
  } else if (format_of(t->dtype) == NULL) {
    PyObject* dtype = PyObject_GetAttrString(self, "dtype");
    if (dtype) py_raise(DLX_E_DTYPE, "a buffer cannot say %S", dtype);
    Py_XDECREF(dtype);
  } else if (t->ndim > PyBUF_MAX_NDIM) {
    py_raise(DLX_E_NDIM, "a buffer has up to %d dimensions, this dlx.Tensor has %d", PyBUF_MAX_NDIM,
             t->ndim);
  } else if ((flags & PyBUF_WRITABLE) && (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY)) {
    py_raise(DLX_E_READONLY, "a writable buffer was asked for, and this dlx.Tensor is read-only");
  } else if ((flags & PyBUF_FORMAT) && !(flags & PyBUF_ND)) {
    PyErr_SetString(PyExc_BufferError, "plain bytes were asked for, and a format for them");
  } else {
    return 0;
  }
  return -1;
}

/* GIL: needed. Errors: -1 with an exception where the view is not contiguous in the way asked. */
static int is_as_asked(const Py_buffer* view, int flags) {
  const char* order = NULL;
  if ((flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS ||
      (flags & PyBUF_STRIDES) != PyBUF_STRIDES) {
    if (!PyBuffer_IsContiguous(view, 'C')) order = "row-major";
  } else if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS) {
    if (!PyBuffer_IsContiguous(view, 'F')) order = "column-major";
  } else if ((flags & PyBUF_ANY_CONTIGUOUS) == PyBUF_ANY_CONTIGUOUS) {
    if (!PyBuffer_IsContiguous(view, 'A')) order = "row- or column-major";
  }
  if (order == NULL) return 0;
  PyErr_Format(PyExc_BufferError,
               "%s memory was asked for, and this dlx.Tensor has gaps or another order", order);
  return -1;
}

int py_buffer_get(PyObject* self, Py_buffer* view, int flags) {
  DLManagedTensorVersioned *made = py_tensor_managed(self), *held;
  view->obj = NULL;
  if (made == NULL || may_view(self, made, flags) < 0) return -1;
  int status = dlx_managed_share(made, &made->dl_tensor, made->flags, &held);
  if (status != DLX_OK) {
    py_raise(status, NULL);
    return -1;
  }
  DLTensor* t = &held->dl_tensor;
  int64_t itemsize = dlx_itemsize(t->dtype, held->flags);
  to_bytes(t, itemsize);
  *view = (Py_buffer){
      .buf = t->data ? t->data : nothing,
      .len = dlx_nbytes(t, held->flags),
      .itemsize = itemsize,
      .readonly = (held->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0,
      .ndim = t->ndim,
      .format = (char*)format_of(t->dtype),
      .shape = t->ndim ? (Py_ssize_t*)t->shape : NULL,
      .strides = t->ndim ? (Py_ssize_t*)t->strides : NULL,
      .internal = held,
  };
  if (is_as_asked(view, flags) < 0) {
    dlx_managed_release(held);
    return -1;
  }
  if (!(flags & PyBUF_FORMAT)) view->format = NULL;
  if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES) view->strides = NULL;
  if (!(flags & PyBUF_ND)) { /* plain bytes: one dimension that needs no description */
    view->shape = NULL;
    view->ndim = 1;
  }
  Py_INCREF(self);
  view->obj = self;
  return 0;
}

void py_buffer_release(PyObject* self, Py_buffer* view) {
  py_pending pending = py_pending_save(); /* a foreign deleter may run */
  dlx_managed_release(view->internal);
  py_pending_restore(pending);
}
