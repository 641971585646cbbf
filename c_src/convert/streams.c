/* CUDA streams of one call: see streams.h. */

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

PY_DOC(count_stream_contexts,
       "Count this thread's contexts in which a framework uses another's stream (1 = begin, -1 = "
       "end). Inside one, the Python path knows the object that keeps the stream alive.");
static PyObject* count_stream_contexts(PyObject* module, PyObject* change) {
  long by = PyLong_AsLong(change);
  if (by == -1 && PyErr_Occurred()) return NULL;
  if (stream_contexts + by >= 0)
    stream_contexts += (int)by; /* an interrupt may have skipped the begin */
  Py_RETURN_NONE;
}

int py_stream_ask(const py_stream_source* s, int32_t device, uint64_t* stream, PyObject** keep) {
  void* handle = NULL;
  PyObject *number = NULL, *attribute = NULL;
  if (s->table) {
    if (s->table(kDLCUDA, device, &handle) != 0 || PyErr_Occurred()) return 0;
    *keep = Py_NewRef(Py_None); /* the framework keeps it alive, see StreamSupport.quick */
  } else if (s->function == NULL) {
    return 0;
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

/* Find the first pair of a source (NULL = any), and of a stream of the producer (0 = any). */
static py_stream_pair* get_stream_pair(py_stream_pairs* all, const py_source* s, int32_t device,
                                       uint64_t from) {
  for (int i = 0; i < all->n; i++) {
    py_stream_pair* x = &all->at[i];
    if ((!s || x->source == s) && x->device == device && (from == 0 || x->from == from)) return x;
  }
  return NULL;
}

static void drop_event(PyObject* capsule) {
  dlx_ready_drop(PyCapsule_GetPointer(capsule, NULL));
}

/* Find the stream of a dlx.Tensor's event. Owns: *keep is a new reference. Errors: 0. */
static int find_event_stream(PyObject* obj, int32_t device, uint64_t* stream, PyObject** keep) {
  int32_t place = -1;
  dlx_ready* ready = py_tensor_ready((TensorObject*)obj);
  *stream = ready ? dlx_ready_stream(ready, &place) : 0;
  *keep = *stream && place == device ? PyCapsule_New(ready, NULL, drop_event) : NULL;
  if (*keep == NULL && ready) dlx_ready_drop(ready);
  return *keep != NULL;
}

/* Find the consumer's stream. Errors: 0. */
static int find_stream_to(const py_stream_pairs* all, const py_target* t, py_stream_pair* x) {
  if (t->kind.type) return py_stream_ask(&t->streams, x->device, &x->to, &x->to_keep);
  if (all->copies == 0) return 1;
  x->to = all->n ? all->at[0].to : x->from;
  x->to_keep = Py_XNewRef(all->n ? all->at[0].to_keep : x->from_keep);
  return 1;
}

/* Find the streams of a source on a device, once per call. Owns: borrowed from `all`. */
static py_stream_pair* find_streams(py_stream_pairs* all, py_source* s, py_target* t,
                                    int32_t device, PyObject* obj) {
  int is_own = s->kind.type == &py_tensor_type, is_known = 1;
  py_stream_pair x = {.source = s, .device = device};
  if (is_own && all->copies) is_known = find_event_stream(obj, device, &x.from, &x.from_keep);
  py_stream_pair* found = get_stream_pair(all, s, device, x.from);
  /* Python makes the first use: a framework may initialize CUDA in its Python functions. */
  int asks = !is_own || t->kind.type;
  int was_used = found || (atomic_exchange_explicit(&s->has_worked, 1, memory_order_relaxed) &
                           atomic_exchange_explicit(&t->has_worked, 1, memory_order_relaxed));
  int may_ask = is_known && ((was_used && !stream_contexts) || !asks);
  if (found == NULL && may_ask && all->n < DLX_MAX_STREAM_PAIRS && py_cuda_can_order() &&
      (is_own || py_stream_ask(&s->streams, device, &x.from, &x.from_keep)) &&
      find_stream_to(all, t, &x) &&
      /* A dlx.Tensor without an event is ready on any stream; stream 2 is left to Python. */
      !(is_own && x.to == DLX_STREAM_PER_THREAD)) {
    all->at[all->n] = x;
    return &all->at[all->n++];
  }
  if (PyErr_Occurred()) py_error_forget();
  py_pending pending = py_pending_save();
  Py_XDECREF(x.from_keep);
  Py_XDECREF(x.to_keep);
  py_pending_restore(pending);
  return is_known ? found : NULL;
}

/* Make the consumer's stream wait for a dlx.Tensor, once per call. Owns: takes `ready`. GIL:
 * needed, released during the wait. Errors: a status. */
static int wait_for_tensor(py_stream_pairs* all, const py_stream_pair* x, dlx_ready* ready) {
  int own = dlx_ready_own_device(ready), status = DLX_OK, is_new = 1;
  for (int i = 0; i < all->n_waited && is_new; i++) {
    const dlx_ready* other = all->waited[i].ready;
    /* all tensors on dlx's stream of a device share one wait */
    is_new = all->waited[i].pair != x ||
             (other != ready && (own < 0 || dlx_ready_own_device(other) != own));
  }
  if (is_new) PY_WITHOUT_GIL(status = dlx_ready_wait(ready, x->device, x->to));
  if (is_new && status == DLX_OK && all->n_waited < DLX_MAX_STREAM_PAIRS) {
    all->waited[all->n_waited].ready = ready;
    all->waited[all->n_waited++].pair = x;
  } else {
    dlx_ready_drop(ready);
  }
  return status;
}

/* Make the consumer's stream wait for the producer's, or record an event on the producer's. GIL:
 * needed, released during the call of the driver. Errors: a status. */
static int order_pair(py_stream_pairs* all, py_stream_pair* x) {
  int status = DLX_OK;
  if (x->is_ordered || x->from == x->to) return DLX_OK;
  /* Another source may have the same streams: all pairs of a call and a device have one `to`. */
  const py_stream_pair* other = get_stream_pair(all, NULL, x->device, x->from);
  if (other->is_ordered) {
    if (other->ready) x->ready = dlx_ready_hold(other->ready);
  } else if (x->to == 0) {
    status = py_cuda_new_ready(x->device, x->from, x->from_keep, &x->ready);
  } else {
    PY_WITHOUT_GIL(status = dlx_cuda_order(x->device, x->from, x->device, x->to));
  }
  x->is_ordered = status == DLX_OK;
  return status;
}

int py_streams_order(py_stream_pairs* all, py_source* s, py_target* t,
                     const DLManagedTensorVersioned* made, PyObject* obj) {
  py_stream_pair* x = find_streams(all, s, t, made->dl_tensor.device.device_id, obj);
  if (x == NULL) return 0;
  if (x->from) return order_pair(all, x) == DLX_OK;
  dlx_ready* ready = py_tensor_ready((TensorObject*)obj);
  return ready == NULL || wait_for_tensor(all, x, ready) == DLX_OK;
}

PyObject* py_streams_hand_over(py_stream_pairs* all, const py_call* call, const py_source* s,
                               py_target* t, DLManagedTensorVersioned* made, PyObject* obj) {
  int32_t device = made->dl_tensor.device.device_id;
  const py_stream_pair* x = get_stream_pair(all, s, device, 0); /* py_streams_order has added it */
  /* On the same stream, later work of the producer is already ordered. */
  if (x->to && x->from != x->to && dlx_size(&made->dl_tensor))
    made = py_cuda_release_behind(made, device, x->to, Py_XNewRef(x->to_keep));
  PyObject* result = made ? t->hand_over(call, t, made, obj) : NULL;
  if (result && x->ready) ((TensorObject*)result)->ready = dlx_ready_hold(x->ready);
  return result;
}

void py_streams_order_back(py_stream_pairs* all) {
  int status = DLX_OK;
  for (py_stream_pair* x = all->at; x < all->at + all->n && status == DLX_OK; x++) {
    if (get_stream_pair(all, NULL, x->device, x->from) == x) /* once for each stream */
      PY_WITHOUT_GIL(status = dlx_cuda_order(x->device, x->to, x->device, x->from));
  }
  if (status != DLX_OK) PY_WITHOUT_GIL(dlx_cuda_synchronize(all->at->device, all->at->to));
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
  all.n = all.n_waited = all.copies = 0;
  PyObject* result = NULL;
  if (py_streams_order(&all, s, t, made, obj))
    result = py_streams_hand_over(&all, call, s, t, made, obj);
  else
    py_managed_release(made);
  py_streams_clear(&all);
  return result;
}

PyMethodDef py_stream_functions[] = {PY_ONE(count_stream_contexts), PY_END};
