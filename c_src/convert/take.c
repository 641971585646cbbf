/* How arrays are taken, in the order of the protocols: a dlx.Tensor, the borrow slot of an exchange
 * table, its managed slot, a function of the adapter. attributes.c and producer.c contain the
 * others. */

#include "pairs.h"
#include "streams.h"
#include "core/copy.h"

int py_offer_checks(py_source* s, py_target* t, DLManagedTensorVersioned* made, unsigned options,
                    py_offer* out) {
  const DLTensor* tensor = &made->dl_tensor;
  uint64_t flags = made->flags;
  if (!(options & (DLX_COPIES | DLX_SHARES))) flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
  out->state = PY_ASK;
  if ((tensor->device.device_type != kDLCPU && !py_may_share_cuda(s, t, tensor, options)) ||
      flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY ||
      !py_target_checks(t, tensor, flags, options, out))
    return 0;
  made->flags = flags;
  return 1;
}

void py_offer_managed(py_source* s, py_target* t, DLManagedTensorVersioned* made, unsigned options,
                      py_offer* out) {
  if (py_offer_checks(s, t, made, options, out))
    out->made = made;
  else
    dlx_managed_release(made);
}

/* Take an array without its graph, if a guard applies and the call allows that. */
static void take_detached(py_source* s, py_target* t, PyObject* obj, unsigned options,
                          py_offer* out) {
  out->state = PY_BLOCKED;
  if (PyErr_Occurred() || !(options & DLX_DETACHES) || s->detach.name == NULL) return;
  PyObject* detached = py_ask(&s->detach, obj);
  if (detached == NULL) {
    py_error_forget();
    return;
  }
  s->take(s, t, detached, options & ~(unsigned)DLX_DETACHES, out);
  py_drop(detached);
}

/* ---- dlx.Tensor ------------------------------------------------------------------------------ */

/* The flags are known, and no guards are needed. Pinned memory for host memory is left to Python.
 */
void py_take_tensor(py_source* s, py_target* t, PyObject* obj, unsigned options, py_offer* out) {
  DLManagedTensorVersioned* base = py_tensor_inside((TensorObject*)obj);
  if (base == NULL || base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_READ_ONLY) return;
  const DLTensor* own = &base->dl_tensor;
  if ((own->device.device_type != kDLCPU && !py_may_share_cuda(s, t, own, options)) ||
      !py_target_checks(t, own, base->flags, options, out))
    return;
  if (dlx_managed_share(base, NULL, base->flags, &out->made) != DLX_OK) out->state = PY_ASK;
}

/* ---- by the borrow slot ---------------------------------------------------------------------- */

/* Read a number from an object; 0 if that fails. */
static int read_number(const py_question* question, PyObject* obj, int64_t* number) {
  PyObject* answer = question->name ? py_ask(question, obj) : NULL;
  *number = answer ? PyLong_AsLongLong(answer) : 0;
  Py_XDECREF(answer);
  if (!PyErr_Occurred()) return 0;
  *number = 0;
  return py_error_forget();
}

/* Whether a tensor lies in its owner's memory: the owner may have been resized before. */
static int lies_in_owner(const py_source* s, const DLTensor* t, PyObject* owner) {
  if (s->owner.nbytes.name == NULL) return 1;
  int64_t low, high, start, nbytes;
  if (read_number(&s->owner.start, owner, &start) < 0 ||
      read_number(&s->owner.nbytes, owner, &nbytes) < 0)
    return 0;
  dlx_extent(t, 0, &low, &high);
  int64_t first = (int64_t)(uintptr_t)t->data - start;
  return high == 0 || (start && first + low >= 0 && first + high <= nbytes);
}

/* Check the array's dtype if its framework has several dtypes for one DLPack dtype. */
static int matches_dtype(const py_source* s, PyObject* obj, DLDataType dtype) {
  if (s->dtype_check.expected == NULL || dtype.bits != 8) return 1;
  PyObject* key = PyLong_FromLong(dtype.code | dtype.bits << 8);
  PyObject* wanted = key ? PyDict_GetItemWithError(s->dtype_check.expected, key) : NULL;
  Py_XDECREF(key);
  if (wanted == NULL) {
    int is_unasked = !PyErr_Occurred();
    py_error_forget();
    return is_unasked;
  }
  PyObject* found = py_ask(&s->dtype_check.dtype, obj);
  if (found == NULL) py_error_forget();
  Py_XDECREF(found);
  return found == wanted;
}

/* Whether no guard applies after a borrow. `is_brief`: the memory is only read for a copy. Owns:
 * *owner is new, even on failure, or NULL. */
static int passes_guards(const py_source* s, PyObject* obj, const DLTensor* t, int is_brief,
                         PyObject** owner) {
  const py_gate* g = &s->gate;
  int code = t->dtype.code;
  if ((g->in_c && !g->in_c(obj, t)) ||
      !py_gate_is_clear(g, g->n_early, g->n_of_array, code, obj, obj) ||
      !matches_dtype(s, obj, t->dtype))
    return 0;
  *owner = s->owner.ask.name ? py_ask(&s->owner.ask, obj) : Py_NewRef(obj);
  if (*owner == NULL) return py_error_forget(), 0;
  return (is_brief || py_gate_is_clear(g, g->n_of_array, g->n, code, obj, *owner)) &&
         lies_in_owner(s, t, *owner);
}

void py_take_borrowed(py_source* s, py_target* t, PyObject* obj, unsigned options, py_offer* out) {
  DLManagedTensorVersioned* made = NULL;
  DLTensor found = {.ndim = -1}; /* a slot may leave it unchanged */
  if (!py_gate_is_open(&s->gate, obj)) return take_detached(s, t, obj, options, out);
  /* A slot that returns 0 with an exception has failed as well. */
  if (s->table->dltensor_from_py_object_no_sync(obj, &found) != 0 || PyErr_Occurred()) {
    if (py_error_forget() == 0 && s->take_second) s->take_second(s, t, obj, options, out);
    return;
  }
  if ((found.device.device_type != kDLCPU && !py_may_share_cuda(s, t, &found, options)) ||
      found.dtype.code > 31)
    return;
  /* Copy it before guards run: the table's next call may overwrite the borrowed shape and strides.
   */
  int is_trivial = py_is_trivial(t, &found);
  int status = is_trivial ? dlx_managed_trust(&found, 0, NULL, NULL, &made)
                          : dlx_managed_new(&found, 0, NULL, NULL, &made);
  if (status != DLX_OK) return;
  const DLTensor* tensor = &made->dl_tensor;
  /* Wrappers have no memory and look empty: with guards, the Python path takes them, unless a guard
   * in C checks it. */
  int is_hidden = tensor->data == NULL && s->gate.n && s->gate.in_c == NULL;
  out->state = PY_TAKEN;
  if (is_trivial || (!is_hidden && py_target_examines(t, tensor, 0, options, out))) {
    PyObject* owner = NULL;
    int is_brief = options & DLX_COPIES || out->state != PY_TAKEN;
    if (passes_guards(s, obj, tensor, is_brief, &owner)) {
      dlx_managed_own(made, owner, py_release_object);
      out->made = made;
      return;
    }
    Py_XDECREF(owner);
  }
  out->state = PY_ASK;
  dlx_managed_release(made);
}

/* Whether two tensors differ in their data only. */
static int is_alike(const DLTensor* a, const DLTensor* b) {
  if (a->device.device_id != b->device.device_id ||
      a->device.device_type != b->device.device_type || !dlx_has_same_elements(a, b))
    return 0;
  for (int i = 0; i < a->ndim; i++) {
    if (a->strides[i] != b->strides[i]) return 0;
  }
  return 1;
}

int py_borrow(py_source* s, py_target* t, PyObject* obj, const DLTensor* known, DLTensor* out) {
  if (s->borrow == NULL || !py_target_holds(t, 0) || !py_gate_is_open(&s->gate, obj)) return 0;
  const py_gate* g = &s->gate;
  for (int is_asked = 0;; is_asked = 1) {
    *out = (DLTensor){.ndim = -1}; /* a slot may leave it unchanged */
    if (s->borrow(obj, out) != 0 || PyErr_Occurred()) {
      py_error_forget();
      return 0;
    }
    DLDataType dtype = out->dtype;
    int is_near = out->device.device_type == kDLCPU || out->device.device_type == kDLCUDA;
    if (!is_near || dtype.code > 31) return 0;
    int asks = (s->dtype_check.expected && dtype.bits == 8) || py_gate_asks(g, dtype.code);
    if (is_asked || !asks) break; /* no code has run since the borrow */
    if (!py_gate_is_clear(g, g->n_early, g->n_of_array, dtype.code, obj, obj) ||
        !matches_dtype(s, obj, dtype))
      return 0;
  }
  py_offer offer = {.made = NULL};
  if (out->strides == NULL && out->ndim) return 0;
  if (!py_is_trivial(t, out) && !(known && out->data && is_alike(known, out)) &&
      (dlx_validate(out, 0) != DLX_OK || out->data == NULL || dlx_has_odd_strides(out) ||
       !py_target_examines(t, out, 0, DLX_SHARES, &offer)))
    return 0;
  return g->in_c == NULL || g->in_c(obj, out);
}

/* ---- by the managed slot, and by a function -------------------------------------------------- */

/* Share the dlx.Tensor (or None) that an adapter's function returned. Owns: takes `tensor`, or
 * NULL; the caller owns the result. */
static DLManagedTensorVersioned* share_exported(PyObject* tensor) {
  DLManagedTensorVersioned* made = NULL;
  if (tensor == NULL) return py_error_forget(), NULL;
  if (Py_IS_TYPE(tensor, &py_tensor_type)) {
    DLManagedTensorVersioned* m = py_tensor_inside((TensorObject*)tensor);
    if (m && dlx_managed_share(m, NULL, m->flags, &made) != DLX_OK) made = NULL;
  }
  Py_DECREF(tensor);
  return made;
}

/* For arrays that cannot be borrowed, such as read-only ones, and types without a borrow slot. */
static void export_managed(py_source* s, py_target* t, PyObject* obj, unsigned options,
                           py_offer* out, DLManagedTensorVersioned* made) {
  if (made == NULL && s->export && !PyErr_Occurred())
    made = share_exported(PyObject_CallOneArg(s->export, obj));
  out->state = PY_BLOCKED;
  if (made == NULL) return;
  made->flags |= s->flags;
  py_offer_managed(s, t, made, options, out);
}

void py_take_managed(py_source* s, py_target* t, PyObject* obj, unsigned options, py_offer* out) {
  DLManagedTensorVersioned* made = NULL;
  if (!py_gate_is_open(&s->gate, obj)) return take_detached(s, t, obj, options, out);
  if (py_exchange_managed(s->table, obj, &made) < 0) py_error_forget(), made = NULL;
  export_managed(s, t, obj, options, out, made);
}

void py_take_exported(py_source* s, py_target* t, PyObject* obj, unsigned options, py_offer* out) {
  if (!py_gate_is_open(&s->gate, obj)) return take_detached(s, t, obj, options, out);
  export_managed(s, t, obj, options, out, NULL);
}

void py_take_unblocked(py_source* s, py_target* t, PyObject* obj, unsigned options, py_offer* out) {
  *out = (py_offer){.made = NULL};
  if (s->unblocked == NULL || options & (DLX_COPIES | DLX_SHARES) || PyErr_Occurred()) return;
  PyObject* copy = PyObject_CallOneArg(s->unblocked, obj);
  if (copy && Py_IS_TYPE(copy, Py_TYPE(obj))) {
    s->take(s, t, copy, options, out);
    py_drop(copy);
    return;
  }
  DLManagedTensorVersioned* made = share_exported(copy);
  if (made) py_offer_managed(s, t, made, options, out);
}
