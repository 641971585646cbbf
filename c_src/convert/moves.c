/* Moves of one array between the host and a CUDA device, in one run, stacks of arrays on a device,
 * and copies of a frame's matrix. Everything else is left to the Python path. */

#include "pairs.h"
#include "streams.h"
#include "core/copy.h"

/* An array of any framework, taken in place for a copy during the call. */
typedef struct {
  DLManagedTensorVersioned* made; /* NULL = none */
  py_pair pair;
} place;

/* Owns: the caller calls drop_place(out). Errors: NULL = fallback. */
static DLManagedTensorVersioned* take_in_place(const py_call* call, PyObject* obj, place* out) {
  py_offer offer = {.made = NULL};
  unsigned options = DLX_COPIES | DLX_MOVES;
  py_pair* pair = &out->pair;
  if (!py_pair_learn(call->function, Py_TYPE(obj), py_name_dlx, pair)) return NULL;
  if (pair->what == PY_CONVERTS && py_target_holds(pair->target, options))
    pair->source->take(pair->source, pair->target, obj, options, &offer);
  else if (Py_IS_TYPE(obj, &py_tensor_type))
    py_take_tensor(pair->source, pair->target, obj, options, &offer);
  if (offer.made == NULL) py_pair_release(pair);
  if (offer.response) py_drop(offer.response);
  return out->made = offer.made;
}

static void drop_place(place* taken) {
  if (taken->made == NULL) return;
  dlx_managed_release(taken->made);
  py_pair_release(&taken->pair);
}

/* Whether a target accepts a dense copy of a tensor on the device of `copy`; describe the copy. */
static int accepts_copy(const py_target* t, const DLTensor* tensor, int64_t* strides,
                        DLTensor* copy) {
  DLDevice device = copy->device;
  dlx_fresh_strides(tensor, t->accepts.layouts & DLX_LAYOUT_PERMUTED, strides);
  *copy = *tensor;
  copy->device = device;
  copy->data = (void*)(uintptr_t)DLX_ALIGNMENT;
  copy->byte_offset = 0;
  copy->strides = strides;
  return dlx_size(tensor) && dlx_itemsize(tensor->dtype, 0) && dlx_check(copy, 0, &t->accepts) == 0;
}

/* Copy to the host on the producer's stream. Owns: the caller owns the result. */
static DLManagedTensorVersioned* fetch(py_source* s, DLManagedTensorVersioned* from,
                                       PyObject* obj) {
  int32_t device = from->dl_tensor.device.device_id;
  uint64_t stream = 0;
  PyObject* keep = NULL;
  DLManagedTensorVersioned* copy = NULL;
  if (s->kind.type == &py_tensor_type) {
    copy = py_cuda_fetch((TensorObject*)obj);
  } else if (atomic_exchange_explicit(&s->has_worked, 1, memory_order_relaxed) &&
             py_stream_ask(&s->streams, device, &stream, &keep)) {
    copy = py_managed_copy(from, NULL, 1, stream);
  }
  Py_XDECREF(keep);
  if (copy == NULL && PyErr_Occurred()) py_error_forget(); /* the Python path raises it */
  return copy;
}

/* Call `allocate` for an array like a tensor. Owns: new reference. Errors: NULL = fallback. */
static PyObject* allocate(const py_target* t, const DLTensor* like, PyObject* device) {
  DLManagedTensorVersioned* made;
  if (dlx_managed_new(like, 0, NULL, NULL, &made) != DLX_OK) return NULL;
  PyObject *args[] = {py_tensor_wrap(made), device}, *array = NULL;
  if (args[0]) array = PyObject_Vectorcall(t->allocate, args, 2, NULL);
  Py_XDECREF(args[0]);
  if (array == Py_None) Py_CLEAR(array);
  return array;
}

/* Copy from the host into a new array of the target. */
static PyObject* send(const py_call* call, py_target* t, DLManagedTensorVersioned* from) {
  PyObject* where = PyObject_CallOneArg(t->where, call->device ? call->device : Py_None);
  PyObject *keep = NULL, *array = NULL;
  place to = {.made = NULL};
  uint64_t stream = 0;
  int64_t strides[DLX_MAX_NDIM];
  DLTensor copy = {.data = NULL};
  int status = DLX_E_DEVICE;
  if (where && where != Py_None && py_read_device(where, &copy.device) == 0 &&
      accepts_copy(t, &from->dl_tensor, strides, &copy) &&
      py_stream_ask(&t->streams, copy.device.device_id, &stream, &keep) &&
      dlx_cuda_can_order(copy.device.device_id, stream, -1, 0) == DLX_OK)
    array = allocate(t, &copy, where);
  if (array && take_in_place(call, array, &to))
    PY_WITHOUT_GIL(status = dlx_cuda_transfer(&from->dl_tensor, &to.made->dl_tensor, 0, stream, 1));
  drop_place(&to);
  Py_XDECREF(keep);
  Py_XDECREF(where);
  if (status != DLX_OK) Py_CLEAR(array);
  if (array == NULL && PyErr_Occurred()) py_error_forget();
  return array;
}

PyObject* py_move(const py_call* call, PyObject* obj) {
  py_pair pair;
  place from = {.made = NULL};
  PyObject* result = NULL;
  if (PyErr_Occurred() || !dlx_cuda_loaded() || call->responses ||
      call->options & ~(unsigned)(DLX_MOVES | DLX_COPIES) || /* Python checks the other options */
      !py_pair_learn(call->function, Py_TYPE(obj), call->to, &pair))
    return NULL;
  py_target* t = pair.target;
  int stays = pair.what == PY_STAYS && call->device && Py_IS_TYPE(obj, t->kind.type);
  int goes = (pair.what == PY_CONVERTS || stays) && py_target_holds(t, 0) && t->place == NULL;
  DLManagedTensorVersioned* made = goes ? take_in_place(call, obj, &from) : NULL;
  if (made) {
    DLDevice device = made->dl_tensor.device;
    DLTensor on_host = {.device = {kDLCPU, 0}};
    int64_t strides[DLX_MAX_NDIM];
    int takes_device = t->accepts.device_types >> device.device_type & 1;
    if (device.device_type == kDLCPU && t->allocate && (call->device || !takes_device)) {
      result = send(call, t, made);
    } else if (device.device_type == kDLCUDA && call->device == NULL && !takes_device &&
               dlx_layout(&made->dl_tensor) == 0 &&
               accepts_copy(t, &made->dl_tensor, strides, &on_host)) {
      DLManagedTensorVersioned* copy = fetch(from.pair.source, made, obj);
      if (copy) result = t->hand_over(call, t, copy, obj);
    }
  }
  drop_place(&from);
  py_pair_release(&pair);
  return result;
}

/* ---- stacks ---------------------------------------------------------------------------------- */

/* The arrays of a stack, on one device, of one dtype and shape. */
typedef struct {
  PyObject *objs, *out; /* a tuple; the array to copy to, or NULL; borrowed */
  const DLTensor* to;   /* of `out` */
  int axis;
  place* rows;
  const DLTensor** tensors; /* of `rows`; in the same memory */
  py_stream_pairs streams;
} arrays;

/* Whether a row is like the first one, and has no memory of the output. */
static int fits(const arrays* a, const DLTensor* first, const DLTensor* row) {
  if (row->device.device_type != kDLCUDA || row->device.device_id != first->device.device_id ||
      !dlx_has_same_elements(first, row) || row->ndim == DLX_MAX_NDIM)
    return 0;
  if (a->to == NULL) return 1;
  if (a->to->ndim != row->ndim + 1 || a->axis > row->ndim) return 0;
  for (int i = 0; i < row->ndim; i++) {
    if (a->to->shape[i + (i >= a->axis)] != row->shape[i]) return 0;
  }
  return a->to->shape[a->axis] == PyTuple_GET_SIZE(a->objs) &&
         memcmp(&a->to->dtype, &row->dtype, sizeof row->dtype) == 0 &&
         !py_may_meet(a->to, 0, row, 0);
}

/* Have a framework stack its own arrays on its stream. Errors: NULL = fallback. */
static PyObject* stack_own(const py_call* call, const py_pair* pair, const arrays* a) {
  DLManagedTensorVersioned* first = NULL; /* the description of a row */
  DLTensor row;
  py_target* t = pair->target;
  int are_own = t->stack != NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a->objs) && are_own; i++) {
    PyObject* obj = PyTuple_GET_ITEM(a->objs, i);
    place taken = {.made = NULL};
    are_own = Py_IS_TYPE(obj, t->kind.type);
    if (are_own && !py_borrow(pair->source, t, obj, first ? &first->dl_tensor : NULL, &row)) {
      are_own = take_in_place(call, obj, &taken) != NULL; /* it has no table */
      if (are_own) row = taken.made->dl_tensor;
    }
    if (are_own && first == NULL) are_own = dlx_managed_new(&row, 0, NULL, NULL, &first) == DLX_OK;
    are_own = are_own && fits(a, &first->dl_tensor, &row) &&
              (!a->to || a->to->device.device_id == row.device.device_id);
    drop_place(&taken);
  }
  if (first) dlx_managed_release(first);
  PyObject *axis = are_own ? PyLong_FromLong(a->axis) : NULL, *result = NULL;
  PyObject* args[] = {a->objs, a->out ? a->out : Py_None, axis};
  if (axis) result = PyObject_Vectorcall(t->stack, args, 3, NULL);
  Py_XDECREF(axis);
  if (result == Py_None) Py_CLEAR(result);
  if (result == NULL && PyErr_Occurred()) py_error_forget(); /* dlx copies them */
  return result;
}

/* Take all arrays, and make the stream of the copies wait for them. Errors: 0 = fallback. */
static int take_arrays(const py_call* call, py_target* t, arrays* a) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a->objs); i++) {
    PyObject* obj = PyTuple_GET_ITEM(a->objs, i);
    place* row = &a->rows[i];
    if (!take_in_place(call, obj, row)) return 0;
    if (!fits(a, &a->rows[0].made->dl_tensor, &row->made->dl_tensor) ||
        !py_streams_order(&a->streams, row->pair.source, t, row->made, obj))
      return 0;
    a->tensors[i] = &row->made->dl_tensor;
  }
  return 1;
}

/* Create the array to copy to; dlx's memory cannot belong to a graph. Errors: NULL = fallback. */
static PyObject* new_array(const py_target* t, const arrays* a, const DLTensor* like) {
  const py_stream_pair* x = &a->streams.at[0];
  if (t->kind.type == NULL)
    return dlx_cuda_can_order(x->device, x->to, -1, 0) == DLX_OK
               ? py_cuda_new(like, 0, 1, x->device, x->to, x->to_keep)
               : NULL;
  PyObject *number = PyLong_FromLong(x->device), *array = NULL;
  PyObject* where = number ? PyObject_CallOneArg(t->where, number) : NULL;
  if (where && where != Py_None) array = allocate(t, like, where);
  Py_XDECREF(number);
  Py_XDECREF(where);
  return array;
}

static PyObject* stack(const py_call* call, py_target* t, arrays* a) {
  int64_t strides[DLX_MAX_NDIM], shape[DLX_MAX_NDIM], dense[DLX_MAX_NDIM], step = 1;
  place to = {.made = NULL};
  int status = DLX_E_MEMORY;
  if (!take_arrays(call, t, a)) return NULL;
  const DLTensor* row = &a->rows[0].made->dl_tensor;
  const py_stream_pair* x = &a->streams.at[0];
  DLTensor whole = *row, copy = {.device = row->device};
  if (a->axis > row->ndim) return NULL;
  for (int i = row->ndim - 1; i >= 0; i--) { /* the values of a row stay adjacent */
    int at = i + (i >= a->axis);
    shape[at] = row->shape[i];
    strides[at] = step;
    step *= shape[at];
  }
  shape[a->axis] = PyTuple_GET_SIZE(a->objs);
  strides[a->axis] = step;
  whole.ndim++;
  whole.shape = shape;
  whole.strides = strides;
  if (!a->out && !accepts_copy(t, &whole, dense, &copy)) return NULL;
  PyObject* array = a->out ? Py_NewRef(a->out) : new_array(t, a, &copy);
  if (array == NULL) return NULL;
  if (take_in_place(call, array, &to))
    PY_WITHOUT_GIL(status = dlx_cuda_stack(a->tensors, PyTuple_GET_SIZE(a->objs),
                                           &to.made->dl_tensor, 0, a->axis, x->to));
  drop_place(&to);
  py_streams_order_back(&a->streams);
  if (status != DLX_OK ||
      (t->kind.type == NULL &&
       py_cuda_set_ready((TensorObject*)array, x->device, x->to, x->to_keep) < 0))
    Py_CLEAR(array);
  return array;
}

PyObject* py_stack(const py_call* call, PyObject* objs, PyObject* out, int axis) {
  py_pair pair;
  place to = {.made = NULL};
  arrays a = {.objs = objs, .out = out, .axis = axis, .streams = {.copies = 1}};
  Py_ssize_t n = PyTuple_GET_SIZE(objs);
  if (!dlx_cuda_loaded() || n == 0 ||
      !py_pair_learn(call->function, Py_TYPE(PyTuple_GET_ITEM(objs, 0)), call->to, &pair))
    return NULL;
  py_target* t = pair.target;
  PyObject* result = NULL;
  if (out && take_in_place(call, out, &to)) a.to = &to.made->dl_tensor;
  int is_place = a.to && !(to.made->flags & DLPACK_FLAG_BITMASK_READ_ONLY) &&
                 !(dlx_layout(a.to) & ~(uint32_t)DLX_LAYOUT_PERMUTED) &&
                 Py_IS_TYPE(out, t->kind.type);
  if ((is_place || !out) && t->place == NULL && t->hand_over && py_target_holds(t, 0)) {
    result = stack_own(call, &pair, &a);
    if (result == NULL && !PyErr_Occurred() && (t->allocate || t->kind.type == NULL))
      a.rows = PyMem_Calloc((size_t)n, sizeof *a.rows + sizeof *a.tensors);
    if (a.rows) {
      a.tensors = (const DLTensor**)(a.rows + n);
      result = stack(call, t, &a);
    }
  }
  if (result == NULL && PyErr_Occurred()) py_error_forget();
  py_pending pending = py_pending_save();
  for (Py_ssize_t i = 0; a.rows && i < n; i++) drop_place(&a.rows[i]);
  py_streams_clear(&a.streams);
  drop_place(&to);
  py_pending_restore(pending);
  PyMem_Free(a.rows);
  py_pair_release(&pair);
  return result;
}

/* ---- frames ---------------------------------------------------------------------------------- */

static PyObject* copy_matrix(const py_call* call, PyObject* matrix, const DLDataType* dtype) {
  py_pair pair;
  py_offer offer = {.made = NULL};
  place from = {.made = NULL};
  PyObject* result = NULL;
  if (!py_pair_learn(call->function, Py_TYPE(matrix), call->to, &pair)) return NULL;
  py_target* t = pair.target;
  int is_usual = py_target_holds(t, 0) && t->place == NULL && t->hand_over;
  if (is_usual && take_in_place(call, matrix, &from)) {
    const DLTensor* tensor = &from.made->dl_tensor;
    int is_by_column =
        tensor->device.device_type == kDLCPU && tensor->ndim == 2 && tensor->strides[0] == 1;
    int keeps_order = (t->accepts.layouts & DLX_LAYOUT_PERMUTED) != 0;
    if (is_by_column) offer.made = py_managed_copy(from.made, dtype, keeps_order, 0);
    DLManagedTensorVersioned* made = offer.made;
    if (made && py_target_checks(t, &made->dl_tensor, made->flags, DLX_SHARES, &offer))
      result = t->hand_over(call, t, made, matrix);
    else if (made)
      dlx_managed_release(made);
  }
  drop_place(&from);
  py_pair_release(&pair);
  return result;
}

PyObject* py_open_frame(const py_call* call, PyObject* frame, const DLDataType* dtype) {
  py_pair pair;
  PyObject *opened = NULL, *copy = NULL;
  if (!py_pair_learn(call->function, Py_TYPE(frame), call->to, &pair)) return NULL;
  if (pair.source->open) opened = PyObject_CallOneArg(pair.source->open, frame);
  if (opened && PyTuple_CheckExact(opened) && PyTuple_GET_SIZE(opened) == 3) {
    PyObject* matrices = PyTuple_GET_ITEM(opened, 1);
    if (PyList_CheckExact(matrices) && PyList_GET_SIZE(matrices) == 1)
      copy = copy_matrix(call, PyList_GET_ITEM(matrices, 0), dtype);
  }
  py_pair_release(&pair);
  if (PyErr_Occurred() && py_error_forget() < 0) Py_CLEAR(opened);
  PyObject* both = opened ? PyTuple_Pack(2, copy ? copy : Py_None, opened) : NULL;
  Py_XDECREF(copy);
  Py_XDECREF(opened);
  return both;
}
