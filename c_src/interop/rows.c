/* Builtins that copy the tensors of a list, or lists of values, into one tensor. */

#include "interop.h"
#include "core/copy.h"

#include <string.h>

/* Return the tensor of `whole` without an axis; -1 removes none. */
static DLTensor without_axis(const DLTensor* whole, int axis, int64_t* shape, int64_t* strides) {
  DLTensor row = *whole;
  row.ndim = 0;
  for (int32_t d = 0; d < whole->ndim; d++) {
    if (d == axis) continue;
    shape[row.ndim] = whole->shape[d];
    strides[row.ndim++] = whole->strides[d];
  }
  row.shape = shape;
  row.strides = strides;
  return row;
}

/* Return 1 if elements below a byte are packed alike, and rows of `whole` begin with a byte. */
static int is_packed_alike(const DLManagedTensorVersioned* row,
                           const DLManagedTensorVersioned* whole, long axis) {
  DLDataType dtype = whole->dl_tensor.dtype;
  int64_t item = dlx_itemsize(dtype, whole->flags);
  return item == dlx_itemsize(dtype, row->flags) && (item || axis < 0);
}

enum match { BEGIN, SHAPE, SHAPE_AND_DTYPE }; /* what a row has in common with its place */

/* Return 1 if `row` can be copied to the first elements of `to`, or to all of it. */
static int fits(const DLTensor* row, const DLTensor* to, enum match match) {
  if (row->ndim != to->ndim) return 0;
  for (int32_t d = 0; d < row->ndim; d++) {
    if (match == BEGIN ? row->shape[d] > to->shape[d] : row->shape[d] != to->shape[d]) return 0;
  }
  return memcmp(&row->dtype, &to->dtype, sizeof row->dtype) == 0 ||
         (match != SHAPE_AND_DTYPE && dlx_can_cast(row->dtype, to->dtype));
}

/* Return 1 if two tensors of the same shape are the same elements in memory. */
static int is_same_memory(const DLTensor* a, const DLTensor* b) {
  return a->data == b->data && memcmp(&a->dtype, &b->dtype, sizeof a->dtype) == 0 &&
         memcmp(a->strides, b->strides, (size_t)a->ndim * sizeof *a->strides) == 0;
}

int py_may_meet(const DLTensor* a, uint64_t a_flags, const DLTensor* b, uint64_t b_flags) {
  int64_t a_low, a_high, b_low, b_high;
  dlx_extent(a, a_flags, &a_low, &a_high);
  dlx_extent(b, b_flags, &b_low, &b_high);
  int64_t one = (int64_t)(uintptr_t)a->data + (int64_t)a->byte_offset;
  int64_t other = (int64_t)(uintptr_t)b->data + (int64_t)b->byte_offset;
  return one + a_low < other + b_high && other + b_low < one + a_high;
}

/* Copy the indices [first, first + count) of the first axis of a row, or all of a row without axes,
 * to the same place of `to`. Errors: a status. */
static int copy_part(const DLManagedTensorVersioned* row, const DLTensor* to, int64_t first,
                     int64_t count) {
  DLTensor from = row->dl_tensor, there = *to;
  int64_t shape[DLX_MAX_NDIM];
  if (from.ndim) {
    memcpy(shape, from.shape, (size_t)from.ndim * sizeof *shape);
    shape[0] = from.shape[0] - first < count ? from.shape[0] - first : count;
    if (shape[0] <= 0) return DLX_OK;
    from.data = (char*)from.data + first * from.strides[0] * dlx_itemsize(from.dtype, row->flags);
    there.data = (char*)to->data + first * to->strides[0] * dlx_itemsize(to->dtype, row->flags);
    from.shape = there.shape = shape;
  }
  return dlx_cast(&from, &there, row->flags);
}

/* A tensor of a list, and its place along an axis; with `step`, its last axis goes there. */
typedef struct {
  DLManagedTensorVersioned* tensor;
  int64_t start, step;
} row;

/* Return the place of a row in `to`, the tensor without the axis, with room for one more. */
static DLTensor place_of(const row* r, const DLTensor* to, int64_t stride) {
  DLTensor there = *to;
  there.data = (char*)to->data + r->start * stride * dlx_itemsize(to->dtype, r->tensor->flags);
  if (r->step == 0) return there;
  there.shape[there.ndim] = r->tensor->dl_tensor.shape[there.ndim];
  there.strides[there.ndim++] = r->step * stride;
  return there;
}

typedef struct {
  const row* rows;
  Py_ssize_t n;
  const DLTensor* to;
  int64_t stride, count; /* count: indices of the first axis in a block; 0 = rows are not cut */
} fill_job;

/* Copy some rows, or some blocks of all rows, to their places. Errors: a status. */
static int fill_part(void* job, int64_t first, int64_t end) {
  fill_job j = *(const fill_job*)job;
  int64_t shape[DLX_MAX_NDIM], strides[DLX_MAX_NDIM], count = j.count ? j.count : INT64_MAX;
  DLTensor to = without_axis(j.to, -1, shape, strides); /* `place_of` changes it */
  int status = DLX_OK;
  if (j.count == 0) {
    j.rows += first;
    j.n = end - first;
    first = 0;
    end = 1;
  }
  for (; first < end; first++) {
    for (Py_ssize_t i = 0; i < j.n && status == DLX_OK; i++) {
      DLTensor there = place_of(&j.rows[i], &to, j.stride);
      status = copy_part(j.rows[i].tensor, &there, first * count, count);
    }
  }
  return status;
}

/* Copy rows to their places. If elements of several rows are adjacent, copy blocks of them that fit
 * the cache. Errors: a status. */
static int fill_rows(const row* rows, Py_ssize_t n, const DLTensor* to, int64_t stride,
                     int64_t nbytes) {
  enum { BLOCK = 1 << 16 };
  fill_job job = {rows, n, to, stride, 0};
  int64_t extent = to->ndim ? to->shape[0] : 1;
  int is_interleaved = n > 1 && to->ndim && stride < to->strides[0];
  if (is_interleaved && nbytes > BLOCK) job.count = extent * BLOCK / nbytes + 1;
  return dlx_work_in_parts(fill_part, &job, job.count ? (extent - 1) / job.count + 1 : n, nbytes);
}

/* Read a tensor of a list and its place, a slice of `extent` indices, or NULL: number i. Return -1
 * with an exception. */
static int read_row(PyObject* list, PyObject* places, Py_ssize_t i, int64_t extent, row* out) {
  *out = (row){py_tensor_managed(PyList_GET_ITEM(list, i)), i, 0}; /* the list keeps it */
  if (out->tensor == NULL || places == NULL) return out->tensor ? 0 : -1;
  const DLTensor* t = &out->tensor->dl_tensor;
  Py_ssize_t start, stop, step;
  PyObject* place = i < PyList_GET_SIZE(places) ? PyList_GET_ITEM(places, i) : Py_None;
  if (!PySlice_Check(place) || PySlice_Unpack(place, &start, &stop, &step) < 0 || t->ndim == 0 ||
      PySlice_AdjustIndices(extent, &start, &stop, step) != t->shape[t->ndim - 1]) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "each matrix takes a slice");
    return -1;
  }
  out->start = start;
  out->step = step;
  return 0;
}

/* Copy a list of host tensors to the rows of `whole` along an axis, or one to all of it (-1); with
 * `places`, matrices to slices. Return None, -1 or -2 as tensor_fill. Owns: a new reference. GIL:
 * held; released while much is copied. Errors: NULL. */
static PyObject* fill(DLManagedTensorVersioned* whole, PyObject* list, long axis, enum match match,
                      PyObject* places) {
  Py_ssize_t n = PyList_GET_SIZE(list);
  row* rows = PyMem_New(row, n);
  if (rows == NULL) return PyErr_NoMemory();
  const DLTensor* t = &whole->dl_tensor;
  int64_t shape[DLX_MAX_NDIM], strides[DLX_MAX_NDIM], stride = axis < 0 ? 0 : t->strides[axis];
  DLTensor to = without_axis(t, (int)axis, shape, strides);
  int is_alike = 1, answer = 0, status = DLX_E_PACKED;
  for (Py_ssize_t i = 0; i < n && answer > -2; i++) {
    if (read_row(list, places, i, axis < 0 ? 1 : t->shape[axis], &rows[i]) < 0) {
      PyMem_Free(rows);
      return NULL;
    }
    const DLManagedTensorVersioned* from = rows[i].tensor;
    int32_t type = from->dl_tensor.device.device_type;
    is_alike &= is_packed_alike(from, whole, axis);
    int is_plain = is_alike && dlx_host_readable(type) &&
                   type == (int32_t)rows[0].tensor->dl_tensor.device.device_type;
    int has_axes = places == NULL || from->dl_tensor.ndim == to.ndim + 1;
    DLTensor there = has_axes ? place_of(&rows[i], &to, stride) : to;
    if (!has_axes || !fits(&from->dl_tensor, &there, match) || (match != BEGIN && !is_plain))
      answer = -2;
    else if (py_may_meet(&from->dl_tensor, from->flags, t, whole->flags))
      answer = -1;
  }
  if (answer == -1 && axis < 0 && is_same_memory(&rows[0].tensor->dl_tensor, &to)) n = answer = 0;
  if (answer == 0) {
    int64_t nbytes = dlx_nbytes(t, whole->flags);
    dlx_managed_hold(whole); /* another thread may drop the last reference to the tensor */
    PyThreadState* state = nbytes > PY_FEW_BYTES ? PyEval_SaveThread() : NULL;
    if (is_alike) status = fill_rows(rows, n, &to, stride, nbytes);
    if (state) PyEval_RestoreThread(state);
    py_managed_release(whole);
  }
  PyMem_Free(rows);
  if (answer) return PyLong_FromLong(answer);
  return status == DLX_OK ? Py_NewRef(Py_None) : py_raise(status, NULL);
}

PY_DOC(tensor_fill,
       "Copy a list of host tensors to the beginnings of the rows of `whole` along an axis, and "
       "cast them; -1: copy one tensor to all of it. With a list of slices, the last axes of "
       "matrices go there. Without a write, return -1 if memory may be shared, or -2 if one does "
       "not fit. `match` 1: they have the shape of their places, and the result is writable and "
       "has no gaps; 2: the dtype, too.");
static PyObject* tensor_fill(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("tensor_fill", nargs, 3, 5)) return NULL;
  DLManagedTensorVersioned* whole = py_tensor_managed(args[0]);
  long axis = PyLong_AsLong(args[2]), match = nargs >= 4 ? PyLong_AsLong(args[3]) : BEGIN;
  PyObject* places = nargs == 5 && PyList_CheckExact(args[4]) ? args[4] : NULL;
  if (whole == NULL || PyErr_Occurred()) return NULL;
  const DLTensor* t = &whole->dl_tensor;
  Py_ssize_t n = PyList_CheckExact(args[1]) ? PyList_GET_SIZE(args[1]) : 0;
  if (axis >= t->ndim || (axis < 0 ? n != 1 : n != t->shape[axis] && places == NULL))
    return PyErr_Format(PyExc_TypeError, "tensor_fill takes one tensor for each row");
  int is_readonly = (whole->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
  if (is_readonly && match == BEGIN) return py_raise(DLX_E_READONLY, NULL);
  int is_plain = !is_readonly && dlx_layout(t) == 0 && dlx_host_readable(t->device.device_type);
  if (match != BEGIN && !is_plain) return PyLong_FromLong(-2);
  return fill(whole, args[1], axis, match, places);
}

/* Allocate n rows like the first one, less its last axis for matrices, of a dtype, along an axis,
 * unless a consumer (or NULL) rejects them: then *out is NULL. With `keep`, the elements of a row
 * are adjacent. Errors: a status. */
static int allocate_rows(const DLManagedTensorVersioned* first, int is_matrix, Py_ssize_t n,
                         DLDataType dtype, long axis, int keep, const dlx_capabilities* consumer,
                         DLManagedTensorVersioned** out) {
  int64_t shape[DLX_MAX_NDIM + 1], strides[DLX_MAX_NDIM];
  DLTensor like = first->dl_tensor;
  uint64_t flags = first->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  *out = NULL;
  like.ndim -= is_matrix;
  if (like.ndim < 0 || axis < 0 || axis > like.ndim) return DLX_E_MISMATCH;
  for (int32_t d = 0; d < like.ndim; d++) shape[d + (d >= axis)] = like.shape[d];
  shape[axis] = n;
  like.shape = shape;
  like.strides = NULL;
  like.ndim++;
  like.dtype = dtype;
  like.data = (void*)(uintptr_t)DLX_ALIGNMENT; /* for the checks of alignment */
  like.byte_offset = 0;
  int status = dlx_validate(&like, flags);
  if (status != DLX_OK || (consumer && dlx_check(&like, flags, consumer))) return status;
  dlx_compact_strides(like.ndim, shape, strides);
  strides[axis] = dlx_size(&like); /* the largest one */
  like.strides = strides;
  return dlx_managed_empty(&like, flags, keep, out);
}

PY_DOC(tensor_stack,
       "Stack a list of tensors that no other thread uses into a new tensor along an axis (0), of "
       "a dtype (None: theirs); with a list of slices, the last axes of matrices. With `keep`, the "
       "elements of a row stay adjacent. Return None if they differ in shape, dtype or device, or "
       "if the dlx_capabilities at an address (0: none) reject rows along the first axis.");
static PyObject* tensor_stack(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("tensor_stack", nargs, 1, 6)) return NULL;
  Py_ssize_t n = PyList_CheckExact(args[0]) ? PyList_GET_SIZE(args[0]) : 0, columns = 0;
  if (n == 0)
    return PyErr_Format(PyExc_TypeError, "tensor_stack takes a list of tensors that is not empty");
  DLManagedTensorVersioned *first = py_tensor_managed(PyList_GET_ITEM(args[0], 0)), *whole;
  const dlx_capabilities* consumer = nargs >= 2 ? PyLong_AsVoidPtr(args[1]) : NULL;
  long axis = nargs >= 3 ? PyLong_AsLong(args[2]) : 0;
  int keep = nargs >= 4 && args[3] == Py_True, casts = nargs >= 5 && args[4] != Py_None, status;
  PyObject* places = nargs == 6 && PyList_CheckExact(args[5]) ? args[5] : NULL;
  if (first == NULL || PyErr_Occurred()) return NULL;
  DLDataType dtype = first->dl_tensor.dtype;
  if (casts && py_read_dtype(args[4], &dtype) < 0) return NULL;
  for (Py_ssize_t i = 0; places && i < n; i++) {
    const DLManagedTensorVersioned* m = py_tensor_managed(PyList_GET_ITEM(args[0], i));
    if (m == NULL) return NULL;
    columns += m->dl_tensor.ndim ? m->dl_tensor.shape[m->dl_tensor.ndim - 1] : 0;
  }
  PY_WITHOUT_GIL(status = allocate_rows(first, places != NULL, places ? columns : n, dtype, axis,
                                        keep, consumer, &whole));
  if (status != DLX_OK) return py_raise(status, NULL);
  if (whole == NULL) Py_RETURN_NONE;
  PyObject* answer = fill(whole, args[0], axis, casts ? SHAPE : SHAPE_AND_DTYPE, places);
  Py_XDECREF(answer);
  if (answer == Py_None) return py_tensor_wrap(whole);
  dlx_managed_release(whole);
  return answer ? Py_NewRef(Py_None) : NULL;
}

/* Copy the rows of `values` between offsets to the beginnings of the rows of `whole`, and cast
 * them. Errors: a status. */
static int join_rows(const DLManagedTensorVersioned* whole, const DLManagedTensorVersioned* values,
                     const int64_t* offsets, int64_t n) {
  int64_t shape[DLX_MAX_NDIM], strides[DLX_MAX_NDIM];
  DLTensor to = without_axis(&whole->dl_tensor, 0, shape, strides), from = values->dl_tensor;
  int64_t size = dlx_itemsize(from.dtype, values->flags), to_size = dlx_itemsize(to.dtype, 0);
  int64_t end = from.shape[0], longest = shape[0], step = size * from.strides[0];
  if (size == 0 || to_size == 0) return DLX_E_PACKED;
  from.shape = shape;
  for (int64_t i = 0; i < n; i++) {
    int64_t first = offsets[i];
    shape[0] = offsets[i + 1] - first;
    if (first < 0 || shape[0] < 0 || shape[0] > longest || offsets[i + 1] > end) return DLX_E_SHAPE;
    from.data = (char*)values->dl_tensor.data + first * step;
    to.data = (char*)whole->dl_tensor.data + i * whole->dl_tensor.strides[0] * to_size;
    int status = dlx_cast(&from, &to, values->flags);
    if (status != DLX_OK) return status;
  }
  return DLX_OK;
}

PY_DOC(tensor_join,
       "Copy lists, of values between int64 offsets in row-major memory, to the beginnings of the "
       "rows of a new tensor, and cast them.");
static PyObject* tensor_join(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  const DLManagedTensorVersioned* m[3];
  if (!py_check_args("tensor_join", nargs, 3, 3)) return NULL;
  for (int i = 0; i < 3; i++) {
    if ((m[i] = py_tensor_managed(args[i])) == NULL) return NULL;
  }
  const DLTensor *whole = &m[0]->dl_tensor, *values = &m[1]->dl_tensor, *offsets = &m[2]->dl_tensor;
  int status = DLX_E_MISMATCH;
  if (values->ndim && whole->ndim == values->ndim + 1 && offsets->ndim == 1 &&
      offsets->dtype.bits == 64 && offsets->shape[0] == whole->shape[0] + 1)
    PY_WITHOUT_GIL(status = join_rows(m[0], m[1], offsets->data, whole->shape[0]));
  return status == DLX_OK ? Py_NewRef(Py_None) : py_raise(status, NULL);
}

PyMethodDef py_row_functions[] = {PY_FASTCALL(tensor_stack), PY_FASTCALL(tensor_fill),
                                  PY_FASTCALL(tensor_join), PY_END};
