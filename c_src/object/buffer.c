/* The buffer protocol in both directions, with the formats of numpy and struct: dlx.Tensor's
 * buffer, and a managed tensor over any object's buffer. Errors: -1 with an exception, unless a
 * function says otherwise.
 *
 * Each view of a dlx.Tensor has a managed tensor that shares the memory, so memory, shape and
 * strides stay valid while the view lives, independent of the dlx.Tensor. */

#include "tensor.h"

#include "core/dtypes.h"
#include "core/strides.h"

#include <string.h>

_Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "extents are handed on as they are");

static char no_elements[16];

/* Formats of PEP 3118 and `struct`: those that dlx writes, then aliases. The width must match, too:
 * ctypes marks a native 'l' with '<' although it is not 4 bytes wide; unions use 'B'. */
static const struct {
  char letters[3];
  uint8_t code, bits;
} formats[] = {
#define FORMAT(code, bits, letters, arrow, number) {letters, code, bits},
    DLX_DTYPES(FORMAT){"l", kDLInt, 32},
    {"q", kDLInt, 64},
    {"n", kDLInt, 64},
    {"L", kDLUInt, 32},
    {"Q", kDLUInt, 64},
    {"N", kDLUInt, 64},
    {"c", kDLUInt, 8},
    {"Ze", kDLComplex, 32},
    {"F", kDLComplex, 64},
    {"D", kDLComplex, 128},
};

enum { FORMATS = sizeof formats / sizeof *formats, WRITTEN = FORMATS - 10 };

/* GIL: not needed. Errors: NULL = buffers have no format for the dtype. */
static const char* find_format(DLDataType dtype) {
  for (int i = 0; i < WRITTEN; i++) {
    if (formats[i].code == dtype.code && formats[i].bits == dtype.bits && dtype.lanes == 1)
      return formats[i].letters;
  }
  return NULL;
}

/* GIL: not needed. Errors: -1 = not a number of this many bytes. */
static int find_dtype(const char* letters, Py_ssize_t itemsize, DLDataType* out) {
  for (int i = 0; i < FORMATS; i++) {
    if (formats[i].letters[0] == *letters && strcmp(formats[i].letters, letters) == 0 &&
        formats[i].bits == 8 * itemsize) {
      *out = (DLDataType){formats[i].code, formats[i].bits, 1};
      return 0;
    }
  }
  return -1;
}

/* Convert strides from elements to bytes, in place. Strides that no element depends on may
 * overflow, so they are replaced by compact ones. GIL: not needed. */
static void scale_strides(DLTensor* t, int64_t itemsize) {
  int64_t step = 1, size = dlx_size(t);
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    if (size == 0 || t->shape[i] == 1) t->strides[i] = step;
    t->strides[i] *= itemsize;
    if (size) step *= t->shape[i];
  }
}

static int check_view(PyObject* self, const DLManagedTensorVersioned* m, int flags) {
  const DLTensor* t = &m->dl_tensor;
  if (!dlx_host_readable(t->device.device_type)) {
    py_raise(DLX_E_DEVICE,
             "cannot export a buffer of this dlx.Tensor: it is on device (%d, %d), not on the host",
             t->device.device_type, t->device.device_id);
  } else if (find_format(t->dtype) == NULL) {
    PyObject* dtype = PyObject_GetAttrString(self, "dtype");
    if (dtype)
      py_raise(DLX_E_DTYPE,
               "cannot export a buffer of this dlx.Tensor: buffers have no format for %S", dtype);
    Py_XDECREF(dtype);
  } else if (t->ndim > PyBUF_MAX_NDIM) {
    py_raise(DLX_E_NDIM,
             "cannot export a buffer of this dlx.Tensor: it has %d dimensions, buffers at most %d",
             t->ndim, PyBUF_MAX_NDIM);
  } else if ((flags & PyBUF_WRITABLE) && (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY)) {
    py_raise(DLX_E_READONLY, "cannot export a writable buffer of this dlx.Tensor: it is read-only");
  } else if (!(flags & PyBUF_ND)) { /* torch.asarray(x) would read plain bytes as float32 */
    PyErr_SetString(
        PyExc_BufferError,
        "cannot export this dlx.Tensor as plain bytes: the consumer would lose its dtype "
        "and shape. Pass memoryview(tensor).");
  } else {
    return 0;
  }
  return -1;
}

static int check_order(const Py_buffer* view, int flags) {
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
               "cannot export a %s buffer of this dlx.Tensor: it has gaps or another order", order);
  return -1;
}

int py_buffer_get(PyObject* self, Py_buffer* view, int flags) {
  DLManagedTensorVersioned *made = py_tensor_managed(self), *shared;
  view->obj = NULL;
  if (made == NULL || check_view(self, made, flags) < 0) return -1;
  if (py_check(dlx_managed_share(made, NULL, made->flags, &shared)) < 0) return -1;
  DLTensor* t = &shared->dl_tensor;
  int64_t itemsize = dlx_itemsize(t->dtype, shared->flags);
  scale_strides(t, itemsize);
  *view = (Py_buffer){
      .buf = t->data ? t->data : no_elements,
      .len = dlx_nbytes(t, shared->flags),
      .itemsize = itemsize,
      .readonly = (shared->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0,
      .ndim = t->ndim,
      .format = (char*)find_format(t->dtype),
      .shape = t->ndim ? (Py_ssize_t*)t->shape : NULL,
      .strides = t->ndim ? (Py_ssize_t*)t->strides : NULL,
      .internal = shared,
  };
  if (check_order(view, flags) < 0) {
    dlx_managed_release(shared);
    return -1;
  }
  if (!(flags & PyBUF_FORMAT)) view->format = NULL;
  if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES) view->strides = NULL;
  Py_INCREF(self);
  view->obj = self;
  return 0;
}

void py_buffer_release(PyObject* self, Py_buffer* view) {
  py_managed_release(view->internal);
}

/* ---- buffers of any object ------------------------------------------------------------------- */

enum { SWAPPED = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? '<' : '>' };

/* Errors: -1 without an exception: not numbers in native byte order. */
static int read_dtype(const Py_buffer* b, DLDataType* out) {
  const char* letters = b->format ? b->format : "B";
  if (*letters == '@' || *letters == '=' || *letters == '<' || *letters == '>' || *letters == '!') {
    int is_swapped = *letters == SWAPPED || (*letters == '!' && SWAPPED == '>');
    if (is_swapped && b->itemsize > 1) return -1;
    letters++;
  }
  return find_dtype(letters, b->itemsize, out);
}

/* Describe a buffer as a DLTensor, with strides in elements. Errors: -1 without an exception: not
 * one number per element, or strides between elements. */
static int describe(const Py_buffer* b, int64_t* strides, DLTensor* out) {
  DLDataType dtype;
  if (b->suboffsets || b->ndim > PyBUF_MAX_NDIM || read_dtype(b, &dtype) < 0) return -1;
  if (!dlx_convert_strides(b->ndim, (int64_t*)b->shape, (int64_t*)b->strides, b->itemsize, strides))
    return -1;
  *out = (DLTensor){.data = b->buf,
                    .device = {kDLCPU, 0},
                    .ndim = b->ndim,
                    .dtype = dtype,
                    .shape = (int64_t*)b->shape,
                    .strides = strides};
  return 0;
}

/* Export any object's buffer; it is held until the tensor is released. Owns: the caller owns *out.
 * GIL: needed; may run Python. */
static int export(void* object, DLManagedTensorVersioned** out) {
  int64_t strides[PyBUF_MAX_NDIM];
  DLTensor t;
  PyObject* view = PyMemoryView_FromObject(object);
  if (view == NULL) return -1;
  const Py_buffer* b = PyMemoryView_GET_BUFFER(view);
  if (describe(b, strides, &t) < 0) {
    py_raise(DLX_E_DTYPE, "its buffer is not one number per element");
  } else {
    uint64_t flags = b->readonly ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;
    if (py_check(dlx_managed_new(&t, flags, view, py_release_object, out)) == 0) return 0;
  }
  Py_DECREF(view);
  return -1;
}

int py_buffer_bytes(PyObject* object, int64_t* low, int64_t* high) {
  DLDataType dtype;
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_ND | PyBUF_FORMAT) < 0) return py_error_forget();
  int is_known = read_dtype(&view, &dtype) == 0;
  *low = (int64_t)(uintptr_t)view.buf;
  *high = *low + view.len;
  PyBuffer_Release(&view);
  return is_known;
}

const DLPackExchangeAPI py_buffer_table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_from_py_object_no_sync = export,
};

PyDoc_STRVAR(buffer_exchange_doc,
             "buffer_exchange()\n--\n\n"
             "Return an exchange table that exports the buffer of any object, and nothing else.");

static PyObject* buffer_exchange(PyObject* module, PyObject* unused) {
  return PyCapsule_New((void*)&py_buffer_table, "dlpack_exchange_api", NULL);
}

PyDoc_STRVAR(letters_dtype_doc,
             "letters_dtype(letters, itemsize, /)\n--\n\n"
             "Return (code, bits, lanes) of a buffer's format without byte order; None if it isn't "
             "a number of\nthat many bytes.");

static PyObject* letters_dtype(PyObject* module, PyObject* args) {
  PyObject* text;
  Py_ssize_t itemsize, length;
  DLDataType dtype;
  if (!PyArg_ParseTuple(args, "Un:letters_dtype", &text, &itemsize)) return NULL;
  const char* letters = PyUnicode_AsUTF8AndSize(text, &length);
  if (letters == NULL && py_error_forget() < 0) return NULL;
  if (letters == NULL || strlen(letters) != (size_t)length ||
      find_dtype(letters, itemsize, &dtype) < 0)
    Py_RETURN_NONE;
  return Py_BuildValue("(iii)", dtype.code, dtype.bits, dtype.lanes);
}

PyMethodDef py_buffer_functions[] = {
    PY_NOARGS(buffer_exchange),
    PY_VARARGS(letters_dtype),
    PY_END,
};
