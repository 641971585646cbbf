/* One array on a known route: examined, exported, checked, copied where that resolves what stands
 * in the way, and handed over. With every guard answered false, and no incompatibility but those
 * that a copy resolves, this runs no Python code except the `load` of a target without a table;
 * anything else is left to the Python path. */

#include "route.h"
#include "core/hot.h"

#include <string.h>

/* Every call goes through these: a call of each, which saves and restores registers, would cost
 * about as much as what it does. */
#define INLINE static inline __attribute__((always_inline))
/* Rare cases, kept out of the hot code. */
#define RARE static __attribute__((noinline, cold))

/* ---- an array: examined, exported, checked --------------------------------------------------- */

/* What is "ask Python" here and below: an Exception is forgotten, since Python finds the same and
 * says it; any other (see py_error_forget) is left set, and ends the call. */

/* 1 = the question is answered false, or was made so; 0 = ask Python. GIL: needed. Errors: 0, see
 * above. */
DLX_HOT static int is_clear(const py_guard* guard, PyObject* obj, PyObject* owner) {
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
INLINE int early_clear(const py_route* r, PyObject* obj) {
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

/* Errors: 0 = ask Python. */
static int switches_off(const py_route* r) {
  for (int i = 0; i < r->n_switches; i++) {
    const py_switch* s = &r->switches[i];
    if (PyDict_GetItemWithError(s->dict, s->name) != s->value) {
      py_error_forget();
      return 0;
    }
  }
  return 1;
}

/* Whether the consumer takes a tensor that was looked at before: row-major, of the dtype it took
 * last. */
static int is_plain(const py_route* r, const DLTensor* t) {
  return memcmp(&t->dtype, &r->plain_dtype, sizeof t->dtype) == 0 &&
         t->ndim <= r->accepts.max_ndim && dlx_is_plain(t, r->plain_alignment);
}

/* The whole check; what the consumer takes as it is is remembered. What a copy resolves, where the
 * options allow one, is no incompatibility: it is written to `resolvable`. */
static int is_accepted(py_route* r, const DLTensor* t, uint64_t flags, unsigned options,
                       uint32_t* resolvable) {
  uint32_t found = dlx_check(t, flags, &r->accepts), allowed = DLX_COPY_RESOLVES;
  if (found) {
    if (options & DLX_SHARES) return 0;
    if ((options & (DLX_COPIES | DLX_KEEPS_READONLY)) == DLX_KEEPS_READONLY)
      allowed &= ~(uint32_t)DLX_INCOMPATIBLE_READONLY;
    if ((found & ~allowed) || dlx_itemsize(t->dtype, 0) == 0) return 0;
    *resolvable = found;
    return 1;
  }
  if (t->device.device_type == kDLCPU && flags == 0) {
    r->plain_dtype = t->dtype;
    r->plain_alignment = (uint32_t)dlx_wanted_alignment(t->dtype, &r->accepts);
  }
  return 1;
}

/* The tensor of an array that a DLTensor cannot describe: a read-only one. Only of arrays that hold
 * their memory themselves and have nothing to be asked. Owns: the caller owns the result. GIL:
 * needed. Errors: NULL = ask Python. */
RARE DLManagedTensorVersioned* with_flags(const py_route* r, PyObject* obj) {
  if (r->owner.name || r->n_guards || r->quick || r->confirmed) return NULL;
  DLManagedTensorVersioned *foreign, *made = NULL;
  if (r->exports->managed_tensor_from_py_object_no_sync == NULL ||
      r->exports->managed_tensor_from_py_object_no_sync(obj, &foreign) != 0) {
    py_error_forget();
    return NULL;
  }
  PyObject* owner = Py_NewRef(obj);
  if (foreign->version.major != DLX_DLPACK_MAJOR ||
      dlx_managed_new(&foreign->dl_tensor, foreign->flags, owner, py_release_object, &made) !=
          DLX_OK)
    Py_DECREF(owner);
  if (foreign->deleter) foreign->deleter(foreign);
  return made;
}

/* Of a dlx.Tensor, whose flags are known: nothing is asked. Owns, GIL, Errors: as
 * py_fast_path_borrow. */
INLINE DLManagedTensorVersioned* borrow_own(py_route* r, const TensorObject* tensor,
                                            unsigned options, uint32_t* resolvable) {
  DLManagedTensorVersioned *base = tensor->managed, *made = NULL;
  if (base == NULL || base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) return NULL;
  const DLTensor* own = &base->dl_tensor;
  /* Streams, and pinned memory that becomes host memory, take the Python path. */
  if (own->device.device_type != kDLCPU) return NULL;
  if (!(base->flags == 0 && is_plain(r, own)) &&
      !is_accepted(r, own, base->flags, options, resolvable))
    return NULL;
  return dlx_managed_export(base, own->device, base->flags, &made) == DLX_OK ? made : NULL;
}

INLINE DLManagedTensorVersioned* borrow(py_route* r, PyObject* obj, unsigned options,
                                        uint32_t* resolvable) {
  DLManagedTensorVersioned* made = NULL;
  DLTensor t;
  *resolvable = 0;
  if (r->type == py_tensor_type) return borrow_own(r, (TensorObject*)obj, options, resolvable);
  if (!switches_off(r) || !early_clear(r, obj)) return NULL;
  /* A table that reports success and leaves an error behind has failed as well. */
  if (r->exports->dltensor_from_py_object_no_sync(obj, &t) != 0 || PyErr_Occurred()) {
    if (py_error_forget() < 0) return NULL;
    made = with_flags(r, obj);
    if (made && made->dl_tensor.device.device_type == kDLCPU &&
        !(made->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) &&
        is_accepted(r, &made->dl_tensor, made->flags, options, resolvable))
      return made;
    if (made) dlx_managed_release(made);
    return NULL;
  }
  if (t.device.device_type != kDLCPU || t.dtype.code > 31) return NULL;
  /* Copied before any guard runs: the borrowed shape and strides may be overwritten by the table's
   * next call. */
  int plain = is_plain(r, &t);
  int status = plain ? dlx_managed_trust(&t, 0, NULL, NULL, &made)
                     : dlx_managed_new(&t, 0, NULL, NULL, &made);
  if (status != DLX_OK) return NULL;
  /* Where there are guards, a tensor without memory may pretend to be empty: it takes the Python
   * path. */
  int guarded = r->n_guards || r->quick;
  if (!plain && ((guarded && made->dl_tensor.data == NULL) ||
                 !is_accepted(r, &made->dl_tensor, 0, options, resolvable))) {
    dlx_managed_release(made);
    return NULL;
  }
  int brief = options & DLX_COPIES || *resolvable; /* only read by the copy, and not kept */
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

DLManagedTensorVersioned* py_fast_path_borrow(py_route* r, PyObject* obj, unsigned options,
                                              uint32_t* resolvable) {
  return borrow(r, obj, options, resolvable);
}

/* ---- handed over ----------------------------------------------------------------------------- */

/* Takes the count that was held on `made`; NULL = the consumer has it, or never saw it. Errors:
 * NULL with what `failed` gives of the exception. */
RARE PyObject* refused(PyObject* callable, DLManagedTensorVersioned* made, PyObject* obj,
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
static __attribute__((noinline)) PyObject* loaded(PyObject* callable, const py_route* r,
                                                  DLManagedTensorVersioned* made, PyObject* obj,
                                                  PyObject* to, PyObject* tree) {
  PyObject* tensor = py_tensor_wrap(made);
  if (tensor == NULL) return NULL;
  PyObject* result = PyObject_CallOneArg(r->load, tensor);
  Py_DECREF(tensor);
  return result ? result : refused(callable, NULL, obj, to, tree);
}

/* For a hand-over of a tensor that has other holders (a buffer of the dlx.Tensor that it was in): a
 * tensor of the same memory with one holder. Owns: takes `made`; the caller owns the result.
 * Errors: NULL without memory, none set. */
RARE DLManagedTensorVersioned* single_holder(DLManagedTensorVersioned* made) {
  DLManagedTensorVersioned* alone = NULL;
  dlx_managed_export(made, made->dl_tensor.device, made->flags, &alone);
  dlx_managed_release(made);
  return alone;
}

INLINE PyObject* hand_over(PyObject* callable, const py_route* r, DLManagedTensorVersioned* made,
                           PyObject* obj, PyObject* to, PyObject* tree) {
  if (r->imports == NULL)
    return r->load ? loaded(callable, r, made, obj, to, tree) : py_tensor_wrap(made);
  void* result = NULL;
  /* A consumer that fails may have released it or not, whatever the protocol says: torch's has
   * where it could not wrap the tensor that it had made. */
  if (!dlx_managed_hold(made) && ((made = single_holder(made)) == NULL || !dlx_managed_hold(made)))
    return PyErr_NoMemory();
  if (r->imports->managed_tensor_to_py_object_no_sync(made, &result) != 0 || result == NULL)
    return refused(callable, made, obj, to, tree);
  dlx_managed_release(made);
  PyTypeObject* found = Py_TYPE((PyObject*)result);
  /* The table of a base makes arrays of the base: see Adapter.fast_path_imports. */
  if (found == r->target || !PyType_IsSubtype(r->target, found)) return result;
  PyErr_Format(PyExc_TypeError, "its exchange table made a %s", found->tp_name);
  Py_DECREF((PyObject*)result);
  return refused(callable, NULL, obj, to, tree);
}

PyObject* py_fast_path_hand_over(PyObject* callable, const py_route* r,
                                 DLManagedTensorVersioned* made, PyObject* obj, PyObject* to,
                                 PyObject* tree) {
  return hand_over(callable, r, made, obj, to, tree);
}

DLManagedTensorVersioned* py_fast_path_copy(const py_route* r, DLManagedTensorVersioned* made) {
  DLManagedTensorVersioned* copy =
      py_managed_copy(made, (r->accepts.layouts & DLX_LAYOUT_PERMUTED) != 0);
  dlx_managed_release(made);
  if (copy == NULL) py_error_forget();
  return copy;
}

DLX_HOT PyObject* py_fast_path_run(PyObject* callable, py_route* r, PyObject* obj, PyObject* to,
                                   unsigned options) {
  if (r->is_same) return options & (DLX_COPIES | DLX_EXAMINES) ? NULL : Py_NewRef(obj);
  uint32_t resolvable;
  py_route_enter(r);
  DLManagedTensorVersioned* made = borrow(r, obj, options, &resolvable);
  if (made && (resolvable || options & DLX_COPIES)) made = py_fast_path_copy(r, made);
  PyObject* result = made ? hand_over(callable, r, made, obj, to, NULL) : NULL;
  py_route_leave(r);
  return result;
}

py_route* py_fast_path_route(PyObject* callable, PyTypeObject* type, PyObject* to) {
  py_route* r = py_route_find(type, to);
  if (r) return r;
  /* Strings that are equal but not the same object share one route; literals are interned already.
   */
  if (PyUnicode_CheckExact(to) && !PyUnicode_CHECK_INTERNED(to)) return NULL;
  PyObject* done =
      PyObject_CallFunctionObjArgs(((FastPathObject*)callable)->learn, (PyObject*)type, to, NULL);
  if (done == NULL && py_error_forget() < 0) return NULL;
  Py_XDECREF(done);
  return py_route_find(type, to);
}
