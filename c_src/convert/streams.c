/* CUDA streams of one call, and moves: see streams.h. */

#include "streams.h"
#include "core/thread_state.h"

/* Contexts of this thread, see count_stream_contexts. */
static DLX_FEW_WORDS int stream_contexts;

static int has_streams(const py_stream_source* s) {
  return s->table || s->function;
}

int py_may_share_cuda(const py_source* s, const py_target* t, const DLTensor* tensor,
                      unsigned options) {
  DLDevice device = tensor->device;
  return device.device_type == kDLCUDA && device.device_id >= 0 &&
         device.device_id < DLX_MAX_DEVICES &&
         (options & DLX_MOVES || !(options & (DLX_COPIES | DLX_HOST_ONLY))) &&
         (s->kind.type == &py_tensor_type || has_streams(&s->streams)) &&
         (t->kind.type == NULL || has_streams(&t->streams));
}

PyDoc_STRVAR(count_stream_contexts_doc,
             "count_stream_contexts(change, /)\n--\n\n"
             "Count this thread's contexts in which a framework uses another's stream (1 = begin, "
             "-1 = end). "
             "Inside one,\nthe Python path knows the object that keeps the stream alive.");

static PyObject* count_stream_contexts(PyObject* module, PyObject* change) {
  long by = PyLong_AsLong(change);
  if (by == -1 && PyErr_Occurred()) return NULL;
  if (stream_contexts + by >= 0)
    stream_contexts += (int)by; /* an interrupt may have skipped the begin */
  Py_RETURN_NONE;
}

static int ask_stream(const py_stream_source* s, int32_t device, uint64_t* stream,
                      PyObject** keep) {
  void* handle = NULL;
  PyObject *number = NULL, *attribute = NULL;
  if (s->table) {
    if (s->table(kDLCUDA, device, &handle) != 0 || PyErr_Occurred()) return 0;
    *keep = Py_NewRef(Py_None); /* the framework keeps it alive, see StreamSupport.quick */
  } else {
    number = PyLong_FromLong(device);
    *keep = number ? PyObject_CallOneArg(s->function, number) : NULL;
    Py_XDECREF(number);
    attribute = *keep ? PyObject_GetAttr(*keep, s->attribute) : NULL;
    if (attribute) handle = PyLong_AsVoidPtr(attribute);
    Py_XDECREF(attribute);
    if (PyErr_Occurred()) {
      Py_CLEAR(*keep);
      return 0;
    }
  }
  *stream = handle ? (uint64_t)(uintptr_t)handle : DLX_STREAM_LEGACY;
  return 1;
}

static py_stream_pair* get_stream_pair(py_stream_pairs* all, const py_source* s, int32_t device) {
  for (int i = 0; i < all->n; i++) {
    if (all->at[i].source == s && all->at[i].device == device) return &all->at[i];
  }
  return NULL;
}

/* Find the streams of a source on a device, once per call. Owns: borrowed from `all`. */
static py_stream_pair* find_streams(py_stream_pairs* all, py_source* s, py_target* t,
                                    int32_t device) {
  py_stream_pair* found = get_stream_pair(all, s, device);
  if (found) return found;
  /* A framework may initialize CUDA in its Python functions: the first use is left to the Python
   * path. */
  int was_used = atomic_exchange_explicit(&s->has_worked, 1, memory_order_relaxed) &
                 atomic_exchange_explicit(&t->has_worked, 1, memory_order_relaxed);
  if (!was_used || stream_contexts || all->n == DLX_MAX_STREAM_PAIRS || !py_cuda_can_order())
    return NULL;
  py_stream_pair x = {.source = s, .device = device};
  int is_own = s->kind.type == &py_tensor_type;
  int is_known = (is_own || ask_stream(&s->streams, device, &x.from, &x.from_keep)) &&
                 (t->kind.type == NULL || ask_stream(&t->streams, device, &x.to, &x.to_keep));
  /* A dlx.Tensor without an event is ready on any stream; stream 2 is left to Python. */
  if (is_known && !(is_own && x.to == DLX_STREAM_PER_THREAD)) {
    all->at[all->n] = x;
    return &all->at[all->n++];
  }
  if (PyErr_Occurred()) py_error_forget();
  py_pending pending = py_pending_save();
  Py_XDECREF(x.from_keep);
  Py_XDECREF(x.to_keep);
  py_pending_restore(pending);
  return NULL;
}

/* Make the consumer's stream wait for a dlx.Tensor, once per call. Owns: takes `ready`. GIL:
 * needed, released during the wait. Errors: a status. */
static int wait_for_tensor(py_stream_pairs* all, const py_stream_pair* x, dlx_ready* ready) {
  int own =
      dlx_ready_own_device(ready); /* all tensors on dlx's stream of a device share one wait */
  for (int i = 0; i < all->n_waited; i++) {
    const dlx_ready* other = all->waited[i].ready;
    if (all->waited[i].device == x->device && all->waited[i].stream == x->to &&
        (other == ready || (own >= 0 && dlx_ready_own_device(other) == own))) {
      dlx_ready_drop(ready);
      return DLX_OK;
    }
  }
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = dlx_ready_wait(ready, x->device, x->to);
  Py_END_ALLOW_THREADS
  if (status == DLX_OK && all->n_waited < DLX_MAX_STREAM_PAIRS) {
    all->waited[all->n_waited].ready = ready;
    all->waited[all->n_waited].device = x->device;
    all->waited[all->n_waited++].stream = x->to;
  } else {
    dlx_ready_drop(ready);
  }
  return status;
}

/* Find another source of the call with the same ordered streams, or NULL. */
static const py_stream_pair* find_same_order(const py_stream_pairs* all, const py_stream_pair* x) {
  for (int i = 0; i < all->n; i++) {
    const py_stream_pair* other = &all->at[i];
    if (other->is_ordered && other->device == x->device && other->from == x->from &&
        other->to == x->to)
      return other;
  }
  return NULL;
}

/* Make the consumer's stream wait for the producer's, or record an event on the producer's. GIL:
 * needed, released during the call of the driver. Errors: a status. */
static int order_pair(py_stream_pairs* all, py_stream_pair* x) {
  int status = DLX_OK;
  if (x->is_ordered || x->from == x->to) return DLX_OK;
  const py_stream_pair* other = find_same_order(all, x);
  if (other) {
    if (other->ready) x->ready = dlx_ready_hold(other->ready);
  } else if (x->to == 0) {
    dlx_ready* ready = NULL;
    PyObject* keep = Py_NewRef(x->from_keep);
    Py_BEGIN_ALLOW_THREADS
      status = dlx_ready_new(x->device, x->from, keep, py_release_object, &ready);
    Py_END_ALLOW_THREADS
    if (status != DLX_OK) Py_DECREF(keep);
    x->ready = ready;
  } else {
    Py_BEGIN_ALLOW_THREADS
      status = dlx_cuda_order(x->device, x->from, x->device, x->to);
    Py_END_ALLOW_THREADS
  }
  x->is_ordered = status == DLX_OK;
  return status;
}

int py_streams_order(py_stream_pairs* all, py_source* s, py_target* t,
                     const DLManagedTensorVersioned* made, PyObject* obj) {
  py_stream_pair* x = find_streams(all, s, t, made->dl_tensor.device.device_id);
  if (x == NULL) return 0;
  if (x->from) return order_pair(all, x) == DLX_OK;
  dlx_ready* ready = py_tensor_ready((TensorObject*)obj);
  return ready == NULL || wait_for_tensor(all, x, ready) == DLX_OK;
}

PyObject* py_streams_hand_over(py_stream_pairs* all, const py_call* call, const py_source* s,
                               py_target* t, DLManagedTensorVersioned* made, PyObject* obj) {
  int32_t device = made->dl_tensor.device.device_id;
  const py_stream_pair* x = get_stream_pair(all, s, device); /* py_streams_order has added it */
  /* On the same stream, later work of the producer is already ordered. */
  if (x->to && x->from != x->to && dlx_size(&made->dl_tensor))
    made = py_cuda_release_behind(made, device, x->to, Py_XNewRef(x->to_keep));
  PyObject* result = made ? t->hand_over(call, t, made, obj) : NULL;
  if (result && x->ready) ((TensorObject*)result)->ready = dlx_ready_hold(x->ready);
  return result;
}

void py_streams_clear(py_stream_pairs* all) {
  py_pending pending = py_pending_save();
  for (int i = 0; i < all->n; i++) {
    if (all->at[i].ready) dlx_ready_drop(all->at[i].ready);
    Py_XDECREF(all->at[i].from_keep);
    Py_XDECREF(all->at[i].to_keep);
  }
  for (int i = 0; i < all->n_waited; i++) dlx_ready_drop(all->waited[i].ready);
  py_pending_restore(pending);
}

PyObject* py_streams_convert(const py_call* call, py_source* s, py_target* t,
                             DLManagedTensorVersioned* made, PyObject* obj) {
  py_stream_pairs all;
  all.n = all.n_waited = 0;
  PyObject* result = NULL;
  if (py_streams_order(&all, s, t, made, obj))
    result = py_streams_hand_over(&all, call, s, t, made, obj);
  else
    py_managed_release(made);
  py_streams_clear(&all);
  return result;
}

/* ---- moves ----------------------------------------------------------------------------------- */

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
             ask_stream(&s->streams, device, &stream, &keep)) {
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
      ask_stream(&t->streams, device.device_id, &stream, &keep) &&
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

PyObject* py_streams_move(const py_call* call, PyObject* obj) {
  py_pair pair, in_place;
  PyObject* result = NULL;
  if (PyErr_Occurred() || !dlx_cuda_loaded() || call->responses ||
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

PyMethodDef py_stream_functions[] = {
    {"count_stream_contexts", count_stream_contexts, METH_O, count_stream_contexts_doc},
    {NULL, NULL, 0, NULL},
};
