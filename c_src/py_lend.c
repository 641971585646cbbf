/* The fast lane's first half: an array is examined, exported and checked by its route, in C. The
 * questions, switches and guards are data of the adapters; whatever is not as expected is left to
 * Python. */

#include "py_route.h"

/* 1 = the question is answered false; 2 = it was made so; 0 = ask Python. GIL: needed. Errors: none
 * left set. */
static int is_clear(const py_guard* guard, PyObject* obj, PyObject* owner) {
  PyObject* answer = py_ask(&guard->ask, guard->of_owner ? owner : obj);
  if (answer == NULL) {
    PyErr_Clear();
    return 0;
  }
  if (answer == Py_False) { /* as nearly always */
    Py_DECREF(answer);
    return 1;
  }
  int clear = answer != Py_True && PyObject_IsTrue(answer) == 0;
  Py_DECREF(answer);
  if (clear || guard->amend.name == NULL) {
    PyErr_Clear();
    return clear;
  }
  PyObject* amended = py_ask(&guard->amend, obj);
  if (amended == NULL) {
    PyErr_Clear();
    return 0;
  }
  Py_DECREF(amended);
  return 2;
}

/* The guards that hold for every dtype, before anything is borrowed. Returns 1 = every guard is
 * clear; 0 = ask Python. */
static int early_clear(const py_route* r, PyObject* obj) {
  for (int i = 0; i < r->n_early; i++) {
    if (!is_clear(&r->guards[i], obj, obj)) return 0;
  }
  return r->quick == NULL || r->quick(obj, NULL);
}

/* The others, of the array or of its owner. Returns 1 = every guard is clear; 2 = one of them was
 * amended; 0 = ask Python. */
static int late_clear(const py_route* r, int of_owner, int code, PyObject* obj, PyObject* owner) {
  int worst = 1;
  if (r->n_early == r->n_guards) return worst;
  for (int i = r->n_early; i < r->n_guards; i++) {
    const py_guard* guard = &r->guards[i];
    if (guard->of_owner != of_owner || !(guard->codes >> code & 1)) continue;
    int clear = is_clear(guard, obj, owner);
    if (clear == 0) return 0;
    if (clear == 2) worst = 2;
  }
  return worst;
}

/* A number that an object answers with; 0 where it does not. GIL: needed. Errors: none left set. */
static int64_t number_of(const py_question* question, PyObject* obj) {
  PyObject* answer = question->name ? py_ask(question, obj) : NULL;
  int64_t number = answer ? PyLong_AsLongLong(answer) : 0;
  Py_XDECREF(answer);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  return number;
}

/* Whether a tensor lies inside the bytes that its owner has: an owner that could be resized may
 * have been. */
static int inside(const py_route* r, const DLTensor* t, PyObject* owner) {
  if (r->nbytes.name == NULL) return 1;
  int64_t low, high, start = number_of(&r->start, owner), nbytes = number_of(&r->nbytes, owner);
  dlx_extent(t, 0, &low, &high);
  int64_t first = (int64_t)(uintptr_t)t->data - start;
  return high == 0 || (start && first + low >= 0 && first + high <= nbytes);
}

/* Whether the array's own word for its dtype is the one that the tensor's dtype stands for; asked
 * where a framework has several words for one DLPack dtype. */
static int dtype_confirmed(const py_route* r, PyObject* obj, DLDataType dtype) {
  if (r->confirmed == NULL || dtype.bits != 8) return 1;
  PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
  PyObject* wanted = key ? PyDict_GetItemWithError(r->confirmed, key) : NULL;
  Py_XDECREF(key);
  if (wanted == NULL) {
    int nothing_asked = !PyErr_Occurred();
    PyErr_Clear();
    return nothing_asked;
  }
  PyObject* found = py_ask(&r->dtype, obj);
  if (found == NULL) PyErr_Clear();
  Py_XDECREF(found);
  return found == wanted;
}

static int switches_off(const py_route* r) {
  for (int i = 0; i < r->n_switches; i++) {
    const py_switch* s = &r->switches[i];
    if (PyDict_GetItemWithError(s->dict, s->name) != s->value) {
      PyErr_Clear();
      return 0;
    }
  }
  return 1;
}

/* Whether the consumer takes a tensor that was looked at before: row-major, of the dtype it took
 * last. */
static int is_plain(const py_route* r, const DLTensor* t) {
  return dlx_dtype_word(t->dtype) == r->plain_dtype && t->ndim <= r->accepts.max_ndim &&
         dlx_is_plain(t, r->plain_alignment);
}

/* The whole check; what the consumer takes as it is is remembered. Where a copy may be made, what
 * it cures is no obstacle. */
static int is_accepted(py_route* r, const DLTensor* t, uint64_t flags, uint32_t* cures) {
  uint32_t found = dlx_check(t, flags, &r->accepts);
  if (found) {
    int is_cured = cures && !(found & ~(uint32_t)DLX_OBSTACLES_CURED) && dlx_itemsize(t->dtype, 0);
    if (is_cured) *cures = found;
    return is_cured;
  }
  if (t->device.device_type == kDLCPU && flags == 0) {
    r->plain_dtype = dlx_dtype_word(t->dtype);
    r->plain_alignment = (uint32_t)dlx_wanted_alignment(t->dtype, &r->accepts);
  }
  return 1;
}

/* The tensor of an array that a DLTensor cannot describe: a read-only one. Only of arrays that hold
 * their memory themselves and have nothing to be asked. Owns: the caller owns the result. GIL:
 * needed. Errors: NULL, none left set. */
static DLManagedTensorVersioned* with_flags(const py_route* r, PyObject* obj) {
  if (r->owner.name || r->n_guards || r->quick || r->confirmed) return NULL;
  DLManagedTensorVersioned *foreign, *made = NULL;
  if (r->give->managed_tensor_from_py_object_no_sync == NULL ||
      r->give->managed_tensor_from_py_object_no_sync(obj, &foreign) != 0) {
    PyErr_Clear();
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

/* Of a dlx.Tensor, whose flags are known: nothing is asked. Owns, GIL, Errors: as py_lane_lend. */
static DLManagedTensorVersioned* lend_own(py_route* r, const TensorObject* tensor,
                                          uint32_t* cures) {
  DLManagedTensorVersioned *base = tensor->managed, *made = NULL;
  if (base == NULL || base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) return NULL;
  const DLTensor* own = &base->dl_tensor;
  if (py_cuda_is_ours(own->device)) return NULL; /* streams are Python's to look at */
  if (cures && own->device.device_type != kDLCPU) return NULL;
  if (!(base->flags == 0 && is_plain(r, own)) && !is_accepted(r, own, base->flags, cures))
    return NULL;
  return dlx_managed_lend(base, own->device, base->flags, &made) == DLX_OK ? made : NULL;
}

DLManagedTensorVersioned* py_lane_lend(py_route* r, PyObject* obj, int brief, uint32_t* cures) {
  DLManagedTensorVersioned* made = NULL;
  DLTensor t;
  if (cures) *cures = 0;
  if (r->type == py_tensor_type) return lend_own(r, (TensorObject*)obj, cures);
  if (!switches_off(r) || !early_clear(r, obj)) return NULL;
  if (r->give->dltensor_from_py_object_no_sync(obj, &t) != 0) {
    PyErr_Clear(); /* the slow road says why */
    made = with_flags(r, obj);
    if (made && made->dl_tensor.device.device_type == kDLCPU &&
        !(made->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) &&
        is_accepted(r, &made->dl_tensor, made->flags, cures))
      return made;
    if (made) dlx_managed_release(made);
    return NULL;
  }
  if (t.device.device_type != kDLCPU || t.dtype.code > 31) return NULL;
  /* Copied before anything is asked: what the table lent may be overwritten by the next call. */
  int plain = is_plain(r, &t);
  int status = plain ? dlx_managed_trust(&t, 0, NULL, NULL, &made)
                     : dlx_managed_new(&t, 0, NULL, NULL, &made);
  if (status != DLX_OK) return NULL;
  /* Where there are guards, a tensor without memory may pretend to be empty: it is Python's to look
   * at. */
  int guarded = r->n_guards || r->quick;
  if (!plain &&
      ((guarded && made->dl_tensor.data == NULL) || !is_accepted(r, &made->dl_tensor, 0, cures))) {
    dlx_managed_release(made);
    return NULL;
  }
  if (cures && *cures) brief = 1; /* it is read now, and not kept */
  int code = t.dtype.code;
  if ((r->quick == NULL || r->quick(obj, &made->dl_tensor)) && late_clear(r, 0, code, obj, obj) &&
      dtype_confirmed(r, obj, t.dtype)) {
    PyObject* owner = r->owner.name ? py_ask(&r->owner, obj) : Py_NewRef(obj);
    int clear = owner == NULL ? 0 : brief ? 2 : late_clear(r, 1, code, obj, owner);
    if (clear == 1 || (clear == 2 && inside(r, &made->dl_tensor, owner))) {
      dlx_managed_own(made, owner, py_release_object);
      return made;
    }
    PyErr_Clear();
    Py_XDECREF(owner);
  }
  dlx_managed_release(made);
  return NULL;
}
