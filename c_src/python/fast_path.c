/* One array on a known route: examined, exported, checked, copied where that resolves what stands
 * in the way, and handed over. With every guard answered false, and no incompatibility but those
 * that a copy resolves, this runs no Python code except the `load` of a target without a table;
 * anything else is left to the Python path. */

#include "route.h"

#include <string.h>

/* ---- an array: examined, exported, checked --------------------------------------------------- */

/* What is "ask Python" here and below: an Exception is forgotten, since Python finds the same and
 * says it; any other (see py_error_forget) is left set, and ends the call. */

/* 1 = the question is answered false, or was made so; 0 = ask Python. GIL: needed. Errors: 0, see
 * above. */
static int is_clear(const py_guard* guard, PyObject* obj, PyObject* owner) {
  PyObject* answer = py_ask(&guard->ask, guard->of_owner ? owner : obj);
  if (answer == NULL) {
    py_error_forget();
    return 0;
  }
  if (answer == Py_False) { /* as nearly always */
    Py_DECREF(answer);
    return 1;
  }
  int is_true = answer == Py_True ? 1 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  if (is_true == 0) return 1;
  PyObject* resolved = is_true > 0 && guard->resolve.name ? py_ask(&guard->resolve, obj) : NULL;
  if (resolved == NULL) {
    py_error_forget();
    return 0;
  }
  Py_DECREF(resolved);
  return 1;
}

/* The guards that hold for every dtype, before anything is borrowed. Returns 1 = every guard is
 * clear; 0 = ask Python. */
static int early_clear(const py_route* r, PyObject* obj) {
  for (int i = 0; i < r->n_early; i++) {
    if (!is_clear(&r->guards[i], obj, obj)) return 0;
  }
  return r->quick == NULL || r->quick(obj, NULL);
}

/* The others, of the array or of its owner. Returns 1 = every guard is clear; 0 = ask Python. */
static int late_clear(const py_route* r, int of_owner, int code, PyObject* obj, PyObject* owner) {
  for (int i = r->n_early; i < r->n_guards; i++) {
    const py_guard* guard = &r->guards[i];
    if (guard->of_owner != of_owner || !(guard->codes >> code & 1)) continue;
    if (!is_clear(guard, obj, owner)) return 0;
  }
  return 1;
}

/* A number that an object answers with; 0 where it does not. GIL: needed. Errors: -1 with what may
 * not be forgotten. */
static int number_of(const py_question* question, PyObject* obj, int64_t* number) {
  PyObject* answer = question->name ? py_ask(question, obj) : NULL;
  *number = answer ? PyLong_AsLongLong(answer) : 0;
  Py_XDECREF(answer);
  if (!PyErr_Occurred()) return 0;
  *number = 0;
  return py_error_forget();
}

/* Whether a tensor lies inside the bytes that its owner has: an owner that cannot be resized any
 * more may have been before. Nothing is asked where a guard in C has looked. GIL: needed; may run
 * Python. Errors: 0 = ask Python. */
static int inside(const py_route* r, const DLTensor* t, PyObject* owner) {
  if (r->nbytes.name == NULL) return 1;
  int64_t low, high, start, nbytes;
  if (number_of(&r->start, owner, &start) < 0 || number_of(&r->nbytes, owner, &nbytes) < 0)
    return 0;
  dlx_extent(t, 0, &low, &high);
  int64_t first = (int64_t)(uintptr_t)t->data - start;
  return high == 0 || (start && first + low >= 0 && first + high <= nbytes);
}

/* Whether the array's own dtype is the one that the tensor's dtype maps to; asked where a framework
 * has several dtypes for one DLPack dtype. Errors: 0 = ask Python. */
static int dtype_confirmed(const py_route* r, PyObject* obj, DLDataType dtype) {
  if (r->confirmed == NULL || dtype.bits != 8) return 1;
  PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
  PyObject* wanted = key ? PyDict_GetItemWithError(r->confirmed, key) : NULL;
  Py_XDECREF(key);
  if (wanted == NULL) {
    int nothing_asked = !PyErr_Occurred();
    py_error_forget();
    return nothing_asked;
  }
  PyObject* found = py_ask(&r->dtype, obj);
  if (found == NULL) py_error_forget();
  Py_XDECREF(found);
  return found == wanted;
}

#if PY_VERSION_HEX < 0x030C0000
/* Every change of any dict gives it a version that no dict had before. */
static int is_unchanged(py_switch* s) {
  uint64_t version = ((PyDictObject*)s->owner)->ma_version_tag;
  if (version == s->version) return 1;
  if (PyDict_GetItemWithError(s->owner, s->name) != s->value) return 0;
  s->version = version;
  return 1;
}
#else
static int is_unchanged(py_switch* s) {
  return PyDict_GetItemWithError(s->owner, s->name) == s->value;
}
#endif

/* Errors: 0 = ask Python. */
static int switches_off(py_route* r) {
  for (int i = 0; i < r->n_switches; i++) {
    if (!is_unchanged(&r->switches[i])) return py_error_forget(), 0;
  }
  return 1;
}

int py_fast_path_holds(py_route* r) {
  for (int i = 0; i < r->n_states; i++) {
    PyObject* found = PyObject_GetAttr(r->states[i].owner, r->states[i].name);
    int same = found ? PyObject_RichCompareBool(found, r->states[i].value, Py_EQ) : -1;
    Py_XDECREF(found);
    if (same == 1) continue;
    if (same == 0) py_route_stale(r);
    py_error_forget();
    return 0;
  }
  return 1;
}

/* Whether the consumer takes a tensor that was looked at before: row-major, of the dtype it took
 * last. */
static int is_plain(const py_route* r, const DLTensor* t) {
  py_plain plain = atomic_load_explicit(&r->plain, memory_order_relaxed);
  return memcmp(&t->dtype, &plain.dtype, sizeof t->dtype) == 0 && t->ndim <= r->accepts.max_ndim &&
         dlx_is_plain(t, plain.alignment);
}

/* The whole check; what the consumer takes as it is is remembered. What a copy resolves, where the
 * options allow one, is no incompatibility: it is written to `resolvable`. */
static int is_accepted(py_route* r, const DLTensor* t, uint64_t flags, unsigned options,
                       uint32_t* resolvable) {
  uint32_t found = dlx_check(t, flags, &r->accepts), allowed = DLX_COPY_RESOLVES;
  int on_host = t->device.device_type == kDLCPU;
  if (found) {
    if (found == DLX_INCOMPATIBLE_READONLY && (options & DLX_UNMARKS)) options &= ~DLX_SHARES;
    if ((options & DLX_SHARES) || r->is_narrow || !on_host) return 0;
    if ((options & (DLX_COPIES | DLX_KEEPS_READONLY)) == DLX_KEEPS_READONLY)
      allowed &= ~(uint32_t)DLX_INCOMPATIBLE_READONLY;
    if ((found & ~allowed) || dlx_itemsize(t->dtype, 0) == 0) return 0;
    *resolvable = found;
    return 1;
  }
  if (!on_host) {
    *resolvable = DLX_ON_DEVICE;
  } else if (flags == 0 && r->accepts.min_ndim == 0) {
    py_plain old = atomic_load_explicit(&r->plain, memory_order_relaxed);
    if (memcmp(&t->dtype, &old.dtype, sizeof t->dtype) != 0) {
      py_plain plain = {t->dtype, (uint32_t)dlx_wanted_alignment(t->dtype, &r->accepts)};
      atomic_store_explicit(&r->plain, plain, memory_order_relaxed);
    }
  }
  return 1;
}

/* Of a dlx.Tensor, whose flags are known: nothing is asked. Owns, GIL, Errors: as
 * py_fast_path_borrow. */
static DLManagedTensorVersioned* borrow_own(py_route* r, const TensorObject* tensor,
                                            unsigned options, uint32_t* resolvable) {
  DLManagedTensorVersioned *base = py_tensor_inside(tensor), *made = NULL;
  if (base == NULL || base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) return NULL;
  const DLTensor* own = &base->dl_tensor;
  /* Pinned memory that becomes host memory takes the Python path. */
  if (own->device.device_type != kDLCPU && !py_cuda_may_share(r, own, options)) return NULL;
  if (!(base->flags == 0 && is_plain(r, own)) &&
      !is_accepted(r, own, base->flags, options, resolvable))
    return NULL;
  return dlx_managed_share(base, NULL, base->flags, &made) == DLX_OK ? made : NULL;
}

/* What a function of an adapter exports: a dlx.Tensor, or None. Owns, GIL, Errors: as `exported`.
 */
static DLManagedTensorVersioned* exported_by(PyObject* function, PyObject* obj) {
  DLManagedTensorVersioned* made = NULL;
  PyObject* tensor = PyObject_CallOneArg(function, obj);
  if (tensor == NULL) {
    py_error_forget();
    return NULL;
  }
  if (Py_IS_TYPE(tensor, &py_tensor_type)) {
    DLManagedTensorVersioned* m = py_tensor_inside((TensorObject*)tensor);
    if (m && dlx_managed_share(m, NULL, m->flags, &made) != DLX_OK) made = NULL;
  }
  Py_DECREF(tensor);
  return made;
}

/* An array that a DLTensor cannot describe (a read-only one), as its table's managed slot or its
 * adapter's function exports it. Only of arrays that have nothing to be asked afterwards. Owns: the
 * caller owns the result. GIL: needed; may run Python. Errors: NULL = ask Python. */
static DLManagedTensorVersioned* exported(py_route* r, PyObject* obj) {
  DLManagedTensorVersioned* made = NULL;
  if (r->fields.address) {
    made = py_cuda_read_fields(r, obj);
    if (made == NULL) py_error_forget();
    return made;
  }
  if (r->exports && r->exports->managed_tensor_from_py_object_no_sync) {
    if (py_exchange_managed(r->exports, obj, &made) == 0) return made;
    if (py_error_forget() < 0) return NULL;
  }
  return r->export ? exported_by(r->export, obj) : NULL;
}

int py_fast_path_takes(py_route* r, DLManagedTensorVersioned* made, unsigned options,
                       uint32_t* resolvable) {
  const DLTensor* t = &made->dl_tensor;
  uint64_t flags = made->flags;
  /* Whether its producer has just copied it matters to calls only that say `copy`. */
  if (!(options & (DLX_COPIES | DLX_SHARES))) flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
  if ((t->device.device_type != kDLCPU && !py_cuda_may_share(r, t, options)) ||
      flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY)
    return 0;
  if (!(flags == 0 && is_plain(r, t)) && !is_accepted(r, t, flags, options, resolvable)) return 0;
  made->flags = flags;
  return 1;
}

/* A managed tensor that was just made, where the consumer takes it. Owns: takes `made`; the caller
 * owns the result. GIL: needed. Errors: NULL = ask Python. */
static DLManagedTensorVersioned* taken(py_route* r, DLManagedTensorVersioned* made,
                                       unsigned options, uint32_t* resolvable) {
  if (py_fast_path_takes(r, made, options, resolvable)) return made;
  dlx_managed_release(made);
  return NULL;
}

/* Of an array that cannot be borrowed. Owns, GIL, Errors: as py_fast_path_borrow. */
static DLManagedTensorVersioned* borrow_exported(py_route* r, PyObject* obj, unsigned options,
                                                 uint32_t* resolvable) {
  DLManagedTensorVersioned* made = exported(r, obj);
  if (made == NULL) {
    *resolvable = DLX_BLOCKED;
    return NULL;
  }
  if (r->is_immutable) made->flags |= DLPACK_FLAG_BITMASK_READ_ONLY;
  return taken(r, made, options, resolvable);
}

DLManagedTensorVersioned* py_fast_path_unblocked(py_route* r, PyObject* obj, unsigned options,
                                                 uint32_t* resolvable) {
  *resolvable = 0;
  if (r->unblocked == NULL || options & (DLX_COPIES | DLX_SHARES) || PyErr_Occurred()) return NULL;
  DLManagedTensorVersioned* made = exported_by(r->unblocked, obj);
  return made ? taken(r, made, options, resolvable) : NULL;
}

/* Of an array whose early guards are clear. Owns, GIL, Errors: as py_fast_path_borrow. */
static DLManagedTensorVersioned* borrow_clear(py_route* r, PyObject* obj, unsigned options,
                                              uint32_t* resolvable) {
  DLManagedTensorVersioned* made = NULL;
  DLTensor t = {.ndim = -1}; /* a slot may write nothing */
  /* A table that reports success and leaves an error behind has failed as well. */
  if (r->exports->dltensor_from_py_object_no_sync(obj, &t) != 0 || PyErr_Occurred()) {
    if (py_error_forget() < 0) return NULL;
    int may_export = !(r->owner.name || r->n_guards > r->n_early || r->quick || r->confirmed);
    return may_export ? borrow_exported(r, obj, options, resolvable) : NULL;
  }
  if ((t.device.device_type != kDLCPU && !py_cuda_may_share(r, &t, options)) || t.dtype.code > 31)
    return NULL;
  /* Copied before any guard runs: the borrowed shape and strides may be overwritten by the table's
   * next call. */
  int plain = is_plain(r, &t);
  if (dlx_managed_new(&t, 0, NULL, NULL, &made) != DLX_OK) return NULL;
  /* Where there are guards, a tensor without memory may pretend to be empty: it takes the Python
   * path, unless a guard in C looks at it. */
  if (!plain && ((made->dl_tensor.data == NULL && r->n_guards && r->quick == NULL) ||
                 !is_accepted(r, &made->dl_tensor, 0, options, resolvable))) {
    dlx_managed_release(made);
    return NULL;
  }
  /* Only read by the copy, and not kept; in device memory there is nothing to be done about it. */
  int brief = options & DLX_COPIES || *resolvable;
  int code = t.dtype.code;
  if ((r->quick == NULL || r->quick(obj, &made->dl_tensor)) && late_clear(r, 0, code, obj, obj) &&
      dtype_confirmed(r, obj, t.dtype)) {
    PyObject* owner = r->owner.name ? py_ask(&r->owner, obj) : Py_NewRef(obj);
    int clear = owner && (brief || late_clear(r, 1, code, obj, owner));
    if (clear && inside(r, &made->dl_tensor, owner)) {
      dlx_managed_own(made, owner, py_release_object);
      return made;
    }
    if (owner == NULL) py_error_forget();
    Py_XDECREF(owner);
  }
  dlx_managed_release(made);
  return NULL;
}

/* Of an array of which a guard holds: without its graph, where the call allows that. Owns, GIL,
 * Errors: as py_fast_path_borrow. */
static DLManagedTensorVersioned* borrow_detached(py_route* r, PyObject* obj, unsigned options,
                                                 uint32_t* resolvable) {
  *resolvable = DLX_BLOCKED;
  if (PyErr_Occurred() || !(options & DLX_DETACHES) || r->detach.name == NULL) return NULL;
  PyObject* plain = py_ask(&r->detach, obj);
  if (plain == NULL) {
    py_error_forget();
    return NULL;
  }
  DLManagedTensorVersioned* made = NULL;
  if (early_clear(r, plain)) {
    *resolvable = 0;
    made = borrow_clear(r, plain, options, resolvable);
  }
  Py_DECREF(plain);
  return made;
}

static DLManagedTensorVersioned* borrow(py_route* r, PyObject* obj, unsigned options,
                                        uint32_t* resolvable) {
  *resolvable = 0;
  if (options & r->leaves) return NULL;
  if (r->n_states && !py_fast_path_holds(r)) return NULL;
  if (r->type == &py_tensor_type) return borrow_own(r, (TensorObject*)obj, options, resolvable);
  if (!switches_off(r)) return NULL;
  if (!early_clear(r, obj)) return borrow_detached(r, obj, options, resolvable);
  if (r->is_managed) return borrow_exported(r, obj, options, resolvable);
  return borrow_clear(r, obj, options, resolvable);
}

DLManagedTensorVersioned* py_fast_path_borrow(py_route* r, PyObject* obj, unsigned options,
                                              uint32_t* resolvable) {
  return borrow(r, obj, options, resolvable);
}

/* Whether guards or a dtype are asked after borrowing; then Python may run. */
static int has_questions(const py_route* r, DLDataType dtype) {
  if (r->confirmed && dtype.bits == 8) return 1;
  for (int i = r->n_early; i < r->n_guards; i++) {
    if (!r->guards[i].of_owner && r->guards[i].codes >> dtype.code & 1) return 1;
  }
  return 0;
}

int py_fast_path_is_clear(py_route* r, PyObject* obj) {
  return switches_off(r) && early_clear(r, obj);
}

static int is_open(py_route* r, PyObject* obj) {
  return (r->n_states == 0 || py_fast_path_holds(r)) && switches_off(r) && early_clear(r, obj);
}

int py_fast_path_is_open(py_route* r, PyObject* obj) {
  return is_open(r, obj);
}

int py_fast_path_look(py_route* r, PyObject* obj, DLTensor* out) {
  uint32_t resolvable;
  if (r->exports == NULL || r->exports->dltensor_from_py_object_no_sync == NULL ||
      !r->is_borrowed || r->is_immutable || !is_open(r, obj))
    return 0;
  for (int asked = 0;; asked = 1) {
    *out = (DLTensor){.ndim = -1}; /* a slot may write nothing */
    if (r->exports->dltensor_from_py_object_no_sync(obj, out) != 0 || PyErr_Occurred()) {
      py_error_forget();
      return 0;
    }
    DLDataType dtype = out->dtype;
    if (out->device.device_type != kDLCPU || dtype.code > 31) return 0;
    if (asked || !has_questions(r, dtype)) break; /* nothing has run since it was borrowed */
    if (!late_clear(r, 0, dtype.code, obj, obj) || !dtype_confirmed(r, obj, dtype)) return 0;
  }
  if (out->strides == NULL && out->ndim) return 0;
  if (!is_plain(r, out) &&
      (dlx_validate(out, 0) != DLX_OK || out->data == NULL || dlx_has_odd_strides(out) ||
       !is_accepted(r, out, 0, DLX_SHARES, &resolvable)))
    return 0;
  return r->quick == NULL || r->quick(obj, out);
}

/* ---- handed over ----------------------------------------------------------------------------- */

/* Takes the count that was held on `made`; NULL = the consumer has it, or never saw it. Errors:
 * NULL with what `failed` gives of the exception. */
static PyObject* refused(PyObject* callable, DLManagedTensorVersioned* made, PyObject* obj,
                         PyObject* to, PyObject* tree) {
  py_pending cause = py_pending_save();
  if (made) dlx_managed_abandon(made);
  if (cause.type && !py_error_may_go(cause.type)) { /* no refusal: it propagates unchanged */
    py_pending_restore(cause);
    return NULL;
  }
  PyErr_NormalizeException(&cause.type, &cause.value, &cause.traceback);
  /* Before 3.12 what was fetched does not hold its traceback yet. */
  if (cause.value && cause.traceback) PyException_SetTraceback(cause.value, cause.traceback);
  PyObject* error = PyObject_CallFunctionObjArgs(((FastPathObject*)callable)->failed, obj, to,
                                                 cause.value ? cause.value : Py_None, tree, NULL);
  Py_XDECREF(cause.type);
  Py_XDECREF(cause.value);
  Py_XDECREF(cause.traceback);
  if (error) {
    PyErr_SetObject((PyObject*)Py_TYPE(error), error);
    Py_DECREF(error);
  }
  return NULL;
}

/* Let the target's adapter take it, in Python. Owns: takes `made`; the result is new. Errors: NULL
 * with MemoryError, or with what `failed` gives. */
static PyObject* loaded(PyObject* callable, const py_route* r, DLManagedTensorVersioned* made,
                        PyObject* obj, PyObject* to, PyObject* tree, unsigned options) {
  PyObject* tensor = py_tensor_wrap(made);
  if (tensor == NULL) return NULL;
  ((TensorObject*)tensor)->is_ordered = 1; /* its streams, where it is in device memory */
  int is_named = options & DLX_NAMES_DEVICE && r->load_named;
  PyObject* result = PyObject_CallOneArg(is_named ? r->load_named : r->load, tensor);
  Py_DECREF(tensor);
  return result ? result : refused(callable, NULL, obj, to, tree);
}

/* For a hand-over of a tensor that has other holders (a buffer of the dlx.Tensor that it was in): a
 * tensor of the same memory with one holder. Owns: takes `made`; the caller owns the result.
 * Errors: NULL without memory, none set. */
static DLManagedTensorVersioned* single_holder(DLManagedTensorVersioned* made) {
  DLManagedTensorVersioned* alone = NULL;
  dlx_managed_share(made, NULL, made->flags, &alone);
  dlx_managed_release(made);
  return alone;
}

/* What makes the target's array one of the real dtype, where the tensor is imported under a storage
 * dtype, which it gets here. Owns: borrowed. Errors: NULL = it is imported as it is, unless an
 * exception is set. */
static PyObject* stored(py_route* r, DLTensor* t) {
  PyObject* key = PyLong_FromLong(t->dtype.code | t->dtype.bits << 8);
  PyObject* found = key ? PyDict_GetItemWithError(r->storage, key) : NULL;
  Py_XDECREF(key);
  if (found == NULL) {
    if (!PyErr_Occurred()) atomic_store_explicit(&r->direct, t->dtype, memory_order_relaxed);
    return NULL;
  }
  long code = PyLong_AsLong(PyTuple_GET_ITEM(found, 0));
  t->dtype = (DLDataType){(uint8_t)code, (uint8_t)(code >> 8), 1};
  return PyTuple_GET_ITEM(found, 1);
}

/* Owns: takes `made`; the result is new. Errors: NULL with what `failed` gives. */
static PyObject* imported(PyObject* callable, const py_route* r, DLManagedTensorVersioned* made,
                          PyObject* obj, PyObject* to, PyObject* tree, unsigned options) {
  if (r->imports == NULL)
    return r->load ? loaded(callable, r, made, obj, to, tree, options) : py_tensor_wrap(made);
  void* result = NULL;
  /* A consumer that fails may have released it or not, whatever the protocol says: torch's has
   * where it could not wrap the tensor that it had made. */
  if (!dlx_managed_is_sole(made) && (made = single_holder(made)) == NULL) return PyErr_NoMemory();
  dlx_managed_hold(made);
  if (r->imports->managed_tensor_to_py_object_no_sync(made, &result) != 0 || result == NULL)
    return refused(callable, made, obj, to, tree);
  dlx_managed_release(made);
  PyTypeObject* found = Py_TYPE((PyObject*)result);
  if (!PyErr_Occurred()) { /* else it has failed as well */
    /* The table of a base makes arrays of the base: see Adapter.fast_path_imports. */
    if (found == r->target || !PyType_IsSubtype(r->target, found)) return result;
    PyErr_Format(PyExc_TypeError, "its exchange table made a %s", found->tp_name);
  }
  py_pending pending = py_pending_save(); /* a foreign deleter may run */
  Py_DECREF((PyObject*)result);
  py_pending_restore(pending);
  return refused(callable, NULL, obj, to, tree);
}

/* As a storage dtype, and viewed. Owns, Errors: as `imported`. */
static PyObject* imported_as_storage(PyObject* callable, py_route* r,
                                     DLManagedTensorVersioned* made, PyObject* obj, PyObject* to,
                                     PyObject* tree, unsigned options) {
  PyObject* view = stored(r, &made->dl_tensor);
  if (view == NULL && PyErr_Occurred()) { /* no consumer has seen it: a release, no abandonment */
    py_pending pending = py_pending_save();
    dlx_managed_release(made);
    py_pending_restore(pending);
    return refused(callable, NULL, obj, to, tree);
  }
  PyObject* result = imported(callable, r, made, obj, to, tree, options);
  if (view == NULL || result == NULL) return result;
  PyObject* real = PyObject_CallOneArg(view, result);
  Py_DECREF(result);
  return real ? real : refused(callable, NULL, obj, to, tree);
}

static PyObject* hand_over(PyObject* callable, py_route* r, DLManagedTensorVersioned* made,
                           PyObject* obj, PyObject* to, PyObject* tree, unsigned options) {
  if (r->storage) {
    DLDataType direct = atomic_load_explicit(&r->direct, memory_order_relaxed);
    if (memcmp(&made->dl_tensor.dtype, &direct, sizeof direct) != 0)
      return imported_as_storage(callable, r, made, obj, to, tree, options);
  }
  return imported(callable, r, made, obj, to, tree, options);
}

PyObject* py_fast_path_hand_over(PyObject* callable, py_route* r, DLManagedTensorVersioned* made,
                                 PyObject* obj, PyObject* to, PyObject* tree, unsigned options) {
  return hand_over(callable, r, made, obj, to, tree, options);
}

DLManagedTensorVersioned* py_fast_path_resolve(const py_route* r, DLManagedTensorVersioned* made,
                                               unsigned options, uint32_t resolvable) {
  if ((options & (DLX_UNMARKS | DLX_COPIES)) == DLX_UNMARKS &&
      resolvable == DLX_INCOMPATIBLE_READONLY) {
    made->flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY;
    return made;
  }
  int is_kept = r->load_named == NULL || options & DLX_NAMES_DEVICE; /* on its device */
  DLManagedTensorVersioned* copy =
      py_managed_copy(made, is_kept && (r->accepts.layouts & DLX_LAYOUT_PERMUTED));
  dlx_managed_release(made);
  if (copy == NULL) py_error_forget();
  return copy;
}

PyObject* py_fast_path_hand_over_cuda(py_stream_pairs* all, PyObject* callable, py_route* r,
                                      DLManagedTensorVersioned* made, PyObject* obj, PyObject* to,
                                      PyObject* tree) {
  dlx_ready* ready = NULL;
  made = py_cuda_behind(all, r, made, &ready);
  PyObject* result = made ? py_fast_path_hand_over(callable, r, made, obj, to, tree, 0) : NULL;
  if (result && ready) ((TensorObject*)result)->ready = dlx_ready_hold(ready);
  return result;
}

/* One array in device memory. Owns, Errors: as run_specially. */
static PyObject* run_on_device(PyObject* callable, py_route* r, DLManagedTensorVersioned* made,
                               PyObject* obj, PyObject* to) {
  py_stream_pairs all;
  all.n = all.n_waited = 0;
  PyObject* result = NULL;
  if (py_cuda_order(&all, r, made, obj)) {
    result = py_fast_path_hand_over_cuda(&all, callable, r, made, obj, to, NULL);
  } else {
    py_pending pending = py_pending_save();
    dlx_managed_release(made);
    py_pending_restore(pending);
  }
  py_cuda_clear(&all);
  return result;
}

/* Of an array that cannot be exported as it is. Owns, Errors: as py_fast_path_run. */
static PyObject* run_unblocked(PyObject* callable, py_route* r, PyObject* obj, PyObject* to,
                               unsigned options) {
  uint32_t resolvable;
  DLManagedTensorVersioned* made = py_fast_path_unblocked(r, obj, options, &resolvable);
  if (made && resolvable) made = py_fast_path_resolve(r, made, options, resolvable);
  return made ? py_fast_path_hand_over(callable, r, made, obj, to, NULL, options) : NULL;
}

/* What is not handed over as it was borrowed: it is copied, is in device memory, or `made` is NULL.
 * Owns: takes `made`; the result is new. GIL: needed. Errors: NULL, as py_fast_path_run. */
static PyObject* run_specially(PyObject* callable, py_route* r, DLManagedTensorVersioned* made,
                               PyObject* obj, PyObject* to, unsigned options, uint32_t resolvable) {
  if (made == NULL)
    return resolvable == DLX_BLOCKED ? run_unblocked(callable, r, obj, to, options) : NULL;
  if (resolvable == DLX_ON_DEVICE) return run_on_device(callable, r, made, obj, to);
  made = py_fast_path_resolve(r, made, options, resolvable);
  return made ? py_fast_path_hand_over(callable, r, made, obj, to, NULL, options) : NULL;
}

PyObject* py_fast_path_run(PyObject* callable, py_route* r, PyObject* obj, PyObject* to,
                           unsigned options) {
  uint32_t resolvable;
  py_route_enter(r);
  DLManagedTensorVersioned* made = borrow(r, obj, options, &resolvable);
  PyObject* result = made == NULL || resolvable || options & DLX_COPIES
                         ? run_specially(callable, r, made, obj, to, options, resolvable)
                         : hand_over(callable, r, made, obj, to, NULL, options);
  py_route_leave(r);
  return result;
}

/* Of a pair that the table lacks. Owns, Errors: as py_fast_path_route. */
static py_route* learnt(PyObject* callable, PyTypeObject* type, PyObject* to) {
  /* Strings that are equal but not the same object share one route; literals are interned already.
   */
  PyObject* key = py_route_key(to);
  py_route* r = key != to ? py_route_find(type, key) : NULL;
  if (r) return r;
  PyObject* done =
      PyObject_CallFunctionObjArgs(((FastPathObject*)callable)->learn, (PyObject*)type, to, NULL);
  if (done == NULL && py_error_forget() < 0) return NULL;
  Py_XDECREF(done);
  return py_route_find(type, py_route_key(to));
}

py_route* py_fast_path_route(PyObject* callable, PyTypeObject* type, PyObject* to) {
  py_route* r = py_route_find(type, to);
  return r ? r : learnt(callable, type, to);
}
