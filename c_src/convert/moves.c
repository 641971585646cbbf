/* Moves of one array between the host and a CUDA device, in one run. Everything else is left to the
 * Python path. */

#include "pairs.h"
#include "streams.h"
#include "core/copy.h"

/* Take an array of any framework in place, for a copy during the call. Owns: the caller owns the
 * result. Errors: NULL = fallback; *source as py_pair.source, to release on success. */
static DLManagedTensorVersioned* take_in_place(const py_call* call, PyObject* obj, py_pair* pair) {
  py_offer offer = {.made = NULL};
  unsigned options = DLX_COPIES | DLX_MOVES;
  if (!py_pair_learn(call->function, Py_TYPE(obj), py_name_dlx, pair)) return NULL;
  if (pair->what == PY_CONVERTS && py_target_holds(pair->target, options))
    pair->source->take(pair->source, pair->target, obj, options, &offer);
  else if (Py_IS_TYPE(obj, &py_tensor_type))
    py_take_tensor(pair->source, pair->target, obj, options, &offer);
  if (offer.made == NULL) py_pair_release(pair);
  if (offer.response) py_drop(offer.response);
  return offer.made;
}

/* Whether a target accepts a dense copy of a tensor on a device; set its strides. */
static int accepts_copy(const py_target* t, const DLTensor* tensor, DLDevice device,
                        int64_t* strides) {
  DLTensor copy = *tensor;
  dlx_fresh_strides(tensor, t->accepts.layouts & DLX_LAYOUT_PERMUTED, strides);
  copy.device = device;
  copy.data = (void*)(uintptr_t)DLX_ALIGNMENT;
  copy.byte_offset = 0;
  copy.strides = strides;
  return dlx_size(tensor) && dlx_itemsize(tensor->dtype, 0) &&
         dlx_check(&copy, 0, &t->accepts) == 0;
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
    copy = py_managed_copy(from, 1, stream);
  }
  Py_XDECREF(keep);
  if (copy == NULL && PyErr_Occurred()) py_error_forget(); /* the Python path raises it */
  return copy;
}

/* Call `allocate` for an array like a tensor with other strides. Owns: takes `like`. Errors: NULL =
 * fallback. */
static PyObject* allocate(const py_target* t, PyObject* like, int ndim, const int64_t* strides,
                          PyObject* device) {
  PyObject* args[] = {like ? PyObject_GetAttr(like, py_name_shape) : NULL, NULL, device, NULL};
  if (args[0]) args[1] = PyObject_GetAttr(like, py_name_dtype);
  if (args[1]) args[3] = PyTuple_New(ndim);
  for (int i = 0; args[3] && i < ndim; i++) {
    PyObject* step = PyLong_FromLongLong(strides[i]);
    if (step)
      PyTuple_SET_ITEM(args[3], i, step);
    else
      Py_CLEAR(args[3]);
  }
  PyObject* array = args[3] ? PyObject_Vectorcall(t->allocate, args, 4, NULL) : NULL;
  Py_XDECREF(args[0]);
  Py_XDECREF(args[1]);
  Py_XDECREF(args[3]);
  Py_XDECREF(like);
  if (array == Py_None) Py_CLEAR(array);
  return array;
}

/* Copy from the host into a new array of the target. */
static PyObject* send(const py_call* call, py_target* t, DLManagedTensorVersioned* from) {
  PyObject* where = PyObject_CallOneArg(t->where, call->device ? call->device : Py_None);
  PyObject *keep = NULL, *array = NULL;
  DLManagedTensorVersioned* to = NULL;
  uint64_t stream = 0;
  int64_t strides[DLX_MAX_NDIM];
  DLDevice device;
  py_pair pair;
  int status = DLX_E_DEVICE;
  if (where && where != Py_None && py_read_device(where, &device) == 0 &&
      accepts_copy(t, &from->dl_tensor, device, strides) &&
      py_stream_ask(&t->streams, device.device_id, &stream, &keep) &&
      dlx_cuda_can_order(device.device_id, stream, -1, 0) == DLX_OK) {
    dlx_managed_hold(from);
    array = allocate(t, py_tensor_wrap(from), from->dl_tensor.ndim, strides, where);
  }
  if (array) to = take_in_place(call, array, &pair);
  if (to) {
    PY_WITHOUT_GIL(status = dlx_cuda_transfer(&from->dl_tensor, &to->dl_tensor, 0, stream, 1));
    dlx_managed_release(to);
    py_pair_release(&pair);
  }
  Py_XDECREF(keep);
  Py_XDECREF(where);
  if (status != DLX_OK) Py_CLEAR(array);
  if (array == NULL && PyErr_Occurred()) py_error_forget();
  return array;
}

PyObject* py_move(const py_call* call, PyObject* obj) {
  py_pair pair, in_place;
  PyObject* result = NULL;
  if (PyErr_Occurred() || !dlx_cuda_loaded() || call->responses ||
      call->options & ~(unsigned)(DLX_MOVES | DLX_COPIES) || /* Python checks the other options */
      !py_pair_learn(call->function, Py_TYPE(obj), call->to, &pair))
    return NULL;
  py_target* t = pair.target;
  int stays = pair.what == PY_STAYS && call->device && Py_IS_TYPE(obj, t->kind.type);
  int goes = (pair.what == PY_CONVERTS || stays) && py_target_holds(t, 0) && t->place == NULL;
  DLManagedTensorVersioned* made = goes ? take_in_place(call, obj, &in_place) : NULL;
  if (made) {
    DLDevice device = made->dl_tensor.device, host = {kDLCPU, 0};
    int64_t strides[DLX_MAX_NDIM];
    int takes_device = t->accepts.device_types >> device.device_type & 1;
    if (device.device_type == kDLCPU && t->allocate && (call->device || !takes_device)) {
      result = send(call, t, made);
    } else if (device.device_type == kDLCUDA && call->device == NULL && !takes_device &&
               dlx_layout(&made->dl_tensor) == 0 &&
               accepts_copy(t, &made->dl_tensor, host, strides)) {
      DLManagedTensorVersioned* copy = fetch(in_place.source, made, obj);
      if (copy) result = t->hand_over(call, t, copy, obj);
    }
    dlx_managed_release(made);
    py_pair_release(&in_place);
  }
  py_pair_release(&pair);
  return result;
}
