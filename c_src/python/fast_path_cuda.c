/* Arrays in the memory of CUDA devices on the fast path: which streams producer and consumer work
 * on, one order for each pair of them, and the release behind the consumer's. It does what
 * StreamSync of dlx/_engine/streams.py does for arrays that are read where they are, by the same
 * functions of cuda/order.c; what it cannot do, or what the driver refuses, is left to the Python
 * path. */

#include "core/thread_state.h"
#include "route.h"

static FEW_WORDS int
    stream_contexts; /* contexts of this thread that `count_stream_contexts` knows of */

int py_cuda_may_share(const py_route* r, const DLTensor* t, unsigned options) {
  DLDevice device = t->device;
  return r->takes_cuda && device.device_type == kDLCUDA && device.device_id >= 0 &&
         device.device_id < DLX_MAX_DEVICES && !(options & (DLX_COPIES | DLX_HOST_ONLY));
}

/* ---- arrays without a table ------------------------------------------------------------------ */

/* Numbers in a tuple that an attribute is. GIL: needed; may run Python. Errors: -1 = ask Python, or
 * an exception is set. */
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

/* What its dtype is in DLPack. GIL: needed; may run Python. Errors: 0 = as above. */
static int read_dtype(py_fields* f, PyObject* obj, DLDataType* out) {
  PyObject* dtype = py_ask(&f->dtype, obj);
  if (dtype == NULL) return 0;
#ifdef Py_GIL_DISABLED /* two words would have to change at once */
  PyObject* found = PyDict_GetItemWithError(f->dtypes, dtype); /* which nobody changes */
  long key = found ? PyLong_AsLong(found) : -1;
#else
  if (dtype != f->known) {
    PyObject* key = PyDict_GetItemWithError(f->dtypes, dtype);
    if (key == NULL) {
      Py_DECREF(dtype);
      return 0;
    }
    f->key = PyLong_AsLong(key);
    Py_XSETREF(f->known, Py_NewRef(dtype));
  }
  long key = f->key;
#endif
  *out = (DLDataType){(uint8_t)key, (uint8_t)(key >> 8), 1};
  Py_DECREF(dtype);
  return key >= 0;
}

/* From byte strides to elements. Errors: 0 = they are no whole elements. */
static int to_elements(const int64_t* shape, int64_t* strides, int n, int64_t itemsize) {
  for (int i = 0; i < n; i++) {
    int64_t rest = strides[i] % itemsize;
    if (rest && shape[i] > 1) return 0;
    strides[i] = strides[i] / itemsize - (rest < 0); /* as Python divides */
  }
  return 1;
}

/* A number that an object has. GIL: needed; may run Python. Errors: NULL, perhaps with an
 * exception.
 */
static void* read_address(PyObject* obj, PyObject* name) {
  PyObject* number = PyObject_GetAttr(obj, name);
  void* address = number ? PyLong_AsVoidPtr(number) : NULL;
  Py_XDECREF(number);
  return address;
}

DLManagedTensorVersioned* py_cuda_read_fields(py_route* r, PyObject* obj) {
  py_fields* f = &r->fields;
  int64_t shape[DLX_MAX_NDIM], strides[DLX_MAX_NDIM], device[DLX_MAX_NDIM];
  DLTensor t = {.shape = shape, .strides = strides};
  if (!read_dtype(f, obj, &t.dtype)) return NULL;
  t.ndim = read_numbers(&f->shape, obj, shape);
  if (t.ndim < 0 || read_numbers(&f->strides, obj, strides) != t.ndim ||
      read_numbers(&f->device, obj, device) != 2 ||
      !to_elements(shape, strides, t.ndim, t.dtype.bits / 8))
    return NULL;
  t.device = (DLDevice){(int32_t)device[0], (int32_t)device[1]};
  if (t.device.device_type != kDLCUDA) return NULL;
  PyObject* memory = py_ask(&f->memory, obj);
  if (memory == NULL) return NULL;
  DLManagedTensorVersioned* made = NULL;
  t.data = dlx_size(&t) ? read_address(memory, f->address) : NULL;
  if (PyErr_Occurred() || dlx_managed_new(&t, 0, memory, py_release_object, &made) != DLX_OK) {
    Py_DECREF(memory);
    return NULL;
  }
  return made;
}

/* ---- streams --------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    count_stream_contexts_doc,
    "count_stream_contexts(change, /)\n--\n\n"
    "Count the contexts of this thread in which a framework works on a stream of another "
    "(1 begins one, -1 ends it):\nthere the Python path knows who keeps the stream alive.");

static PyObject* count_stream_contexts(PyObject* module, PyObject* change) {
  long by = PyLong_AsLong(change);
  if (by == -1 && PyErr_Occurred()) return NULL;
  if (stream_contexts + by >= 0)
    stream_contexts += (int)by; /* an interrupt may have left out the beginning */
  Py_RETURN_NONE;
}

/* Owns: *keep is a new reference. GIL: needed; may run Python. Errors: 0 = ask Python, perhaps with
 * an exception. */
static int ask_stream(const py_stream_source* s, int32_t device, uint64_t* stream,
                      PyObject** keep) {
  if (s->table) {
    void* handle = NULL;
    if (s->table(kDLCUDA, device, &handle) != 0 || PyErr_Occurred()) return 0;
    *stream = handle ? (uint64_t)(uintptr_t)handle : DLX_STREAM_LEGACY;
    *keep = Py_NewRef(Py_None); /* it lives, see StreamSupport.quick */
    return 1;
  }
  PyObject* number = PyLong_FromLong(device);
  PyObject* found = number ? PyObject_CallOneArg(s->function, number) : NULL;
  Py_XDECREF(number);
  void* handle = found ? read_address(found, s->attribute) : NULL;
  if (found == NULL || PyErr_Occurred()) {
    Py_XDECREF(found);
    return 0;
  }
  *stream = handle ? (uint64_t)(uintptr_t)handle : DLX_STREAM_LEGACY;
  *keep = found;
  return 1;
}

/* The streams of a route on a device, asked for once in a call. Owns: borrowed from `all`. GIL:
 * needed; may run Python. Errors: NULL = ask Python, unless an exception is set. */
static py_stream_pair* find(py_stream_pairs* all, py_route* r, int32_t device) {
  for (int i = 0; i < all->n; i++) {
    if (all->at[i].route == r && all->at[i].device == device) return &all->at[i];
  }
  /* Frameworks may begin to use CUDA in their Python functions only: the first time these run. */
  int is_first = r->takes_cuda == 1;
  r->takes_cuda = 2;
  if (is_first || stream_contexts || all->n == DLX_MAX_STREAM_PAIRS || !py_cuda_can_order())
    return NULL;
  py_stream_pair x = {.route = r, .device = device};
  int is_own = r->type == &py_tensor_type;
  int found = (is_own || ask_stream(&r->produces, device, &x.from, &x.from_keep)) &&
              (r->target == NULL || ask_stream(&r->consumes, device, &x.to, &x.to_keep));
  /* A dlx.Tensor without an event is ready on the stream that it is asked for; 2 is not asked for.
   */
  if (found && !(is_own && x.to == DLX_STREAM_PER_THREAD)) {
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

/* Make the consumer's stream wait for a dlx.Tensor, unless it did so in this call. Owns:
 * takes `ready`. GIL: needed, released meanwhile. Errors: a status. */
static int wait_for(py_stream_pairs* all, const py_stream_pair* x, dlx_ready* ready) {
  int own = dlx_ready_own_device(ready); /* all of a device that is in dlx's own stream is one */
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

/* Another route of the call that has ordered the same streams, or NULL. */
static const py_stream_pair* alike(const py_stream_pairs* all, const py_stream_pair* x) {
  for (int i = 0; i < all->n; i++) {
    const py_stream_pair* other = &all->at[i];
    if (other->is_ordered && other->device == x->device && other->from == x->from &&
        other->to == x->to)
      return other;
  }
  return NULL;
}

/* Make the consumer's stream wait for the producer's, or note what is on that. GIL: needed,
 * released meanwhile. Errors: a status. */
static int order(py_stream_pairs* all, py_stream_pair* x) {
  int status = DLX_OK;
  if (x->is_ordered || x->from == x->to) return DLX_OK;
  const py_stream_pair* other = alike(all, x);
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

int py_cuda_order(py_stream_pairs* all, py_route* r, const DLManagedTensorVersioned* made,
                  PyObject* obj) {
  py_stream_pair* x = find(all, r, made->dl_tensor.device.device_id);
  if (x == NULL) return 0;
  if (x->from) return order(all, x) == DLX_OK;
  dlx_ready* ready = py_tensor_ready((TensorObject*)obj);
  return ready == NULL || wait_for(all, x, ready) == DLX_OK;
}

DLManagedTensorVersioned* py_cuda_behind(py_stream_pairs* all, py_route* r,
                                         DLManagedTensorVersioned* made, dlx_ready** ready) {
  int32_t device = made->dl_tensor.device.device_id;
  const py_stream_pair* x = all->at;
  while (x->route != r || x->device != device) x++; /* py_cuda_order has noted it */
  *ready = x->ready;
  /* Where both work on one stream, what the producer does with the memory next comes later. */
  if (x->to == 0 || x->from == x->to || dlx_size(&made->dl_tensor) == 0) return made;
  return py_cuda_put_behind(made, device, x->to, Py_XNewRef(x->to_keep));
}

void py_cuda_clear(py_stream_pairs* all) {
  py_pending pending = py_pending_save();
  for (int i = 0; i < all->n; i++) {
    if (all->at[i].ready) dlx_ready_drop(all->at[i].ready);
    Py_XDECREF(all->at[i].from_keep);
    Py_XDECREF(all->at[i].to_keep);
  }
  for (int i = 0; i < all->n_waited; i++) dlx_ready_drop(all->waited[i].ready);
  py_pending_restore(pending);
}

PyMethodDef py_stream_functions[] = {
    {"count_stream_contexts", count_stream_contexts, METH_O, count_stream_contexts_doc},
    {NULL, NULL, 0, NULL},
};
