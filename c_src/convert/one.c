/* One array: taken, copied where that resolves what the consumer does not take, and handed over.
 * With every guard answered false this runs no Python code except the `load` of a target without a
 * table; anything else is left to the Python path. */

#include "pairs.h"
#include "streams.h"

/* One array in device memory. Owns: takes `made`; the result is new. Errors: as py_convert_one. */
static PyObject* make_on_device(const py_call* call, const py_pair* pair,
                                DLManagedTensorVersioned* made, PyObject* obj) {
  py_stream_pairs all;
  all.n = all.n_waited = 0;
  PyObject* result = NULL;
  if (py_streams_order(&all, pair->source, pair->target, made, obj)) {
    result = py_streams_make(&all, call, pair->source, pair->target, made, obj);
  } else {
    py_pending pending = py_pending_save();
    dlx_managed_release(made);
    py_pending_restore(pending);
  }
  py_streams_clear(&all);
  return result;
}

/* What is not handed over as it was taken. Owns: takes what is in the offer but its answer; the
 * result is new. Errors: as py_convert_one. */
static PyObject* make_otherwise(const py_call* call, const py_pair* pair, PyObject* obj,
                                py_offer* offer) {
  py_target* t = pair->target;
  if (offer->state == PY_BLOCKED) py_take_unblocked(pair->source, t, obj, call->options, offer);
  if (offer->made == NULL) return NULL;
  if (offer->state == PY_ON_DEVICE) return make_on_device(call, pair, offer->made, obj);
  if (offer->state == PY_NEEDS_COPY || call->options & DLX_COPIES)
    offer->made = py_target_copy(t, offer->made, call->options, offer->incompatible);
  return offer->made ? t->make(call, t, offer->made, obj) : NULL;
}

static inline PyObject* convert(const py_call* call, const py_pair* pair, PyObject* obj) {
  py_offer offer;
  py_take_of(pair, obj, call->options, &offer);
  if (offer.state != PY_TAKEN || call->options & DLX_COPIES)
    return make_otherwise(call, pair, obj, &offer);
  return pair->target->make(call, pair->target, offer.made, obj);
}

/* By a producer, whose answer is left to the Python path where it is not taken. */
static PyObject* produce(py_call* call, const py_pair* pair, PyObject* obj) {
  py_offer offer;
  py_take_of(pair, obj, call->options, &offer);
  int is_taken = offer.made != NULL;
  PyObject* result = is_taken ? make_otherwise(call, pair, obj, &offer) : NULL;
  if (!is_taken && offer.answer) py_call_leave(call, obj, offer.answer, offer.state == PY_RAISED);
  py_pending pending = py_pending_save(); /* the capsule's destructor may run Python */
  Py_XDECREF(offer.answer);
  py_pending_restore(pending);
  return result;
}

/* An array of the target. */
static PyObject* keep(const py_call* call, const py_pair* pair, PyObject* obj) {
  py_source* s = pair->source;
  PyObject* same = s->within.stay(s, pair->target, obj, call->options);
  return same && call->options & DLX_COPIES ? py_copy_within(s, same) : same;
}

PyObject* py_convert_one(py_call* call, const py_pair* pair, PyObject* obj) {
  if (pair->what == PY_CONVERTS) return convert(call, pair, obj);
  if (pair->what == PY_STAYS) return keep(call, pair, obj);
  return pair->what == PY_PRODUCES ? produce(call, pair, obj) : NULL;
}

/* A container of another framework that becomes a list or dict: `children` gives that, or a pair of
 * that or None, and what the container answered, or raised, which the Python path does not ask
 * again. */
static PyObject* convert_children(py_call* call, const py_pair* pair, PyObject* obj) {
  PyObject* may_copy = call->options & (DLX_COPIES | DLX_SHARES) ? Py_False : Py_True;
  PyObject* given = PyObject_CallFunctionObjArgs(pair->source->parts, obj, may_copy, NULL);
  if (given == NULL) return py_error_forget(), NULL;
  int has_answer = PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == 2;
  PyObject* plain = has_answer ? PyTuple_GET_ITEM(given, 0) : given;
  PyObject* result = PyDict_CheckExact(plain) || PyList_CheckExact(plain)
                         ? py_convert_tree(call, plain, NULL)
                         : NULL; /* by Python */
  if (result == NULL && has_answer && !PyErr_Occurred()) {
    PyObject* answer = PyTuple_GET_ITEM(given, 1);
    py_call_leave(call, obj, answer, PyExceptionInstance_Check(answer));
  }
  py_pending pending = py_pending_save(); /* what is released may run Python */
  Py_DECREF(given);
  py_pending_restore(pending);
  return result;
}

PyObject* py_convert(py_call* call, PyObject* obj) {
  if (py_is_tree(Py_TYPE(obj))) return py_convert_tree(call, obj, NULL);
  py_pair pair;
  PyObject* result;
  if (!py_pair_of(call->function, Py_TYPE(obj), call->to, &pair)) return NULL;
  if (pair.what == PY_CONVERTS)
    result = convert(call, &pair, obj);
  else if (pair.what == PY_RULE)
    result = py_convert_tree(call, obj, pair.source->parts);
  else if (pair.what == PY_CHILDREN)
    result = convert_children(call, &pair, obj);
  else
    result = py_convert_one(call, &pair, obj);
  py_pair_release(&pair);
  return result;
}

PyObject* py_target_like(py_call* call, PyObject* like) {
  py_source* s = py_example_of(call->function, Py_TYPE(like));
  if (s == NULL) return NULL;
  PyObject *to = NULL, *known = atomic_load_explicit(&s->like, memory_order_acquire);
  if (PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == 2) {
    PyObject* place = PyTuple_GET_ITEM(known, 1);
    PyObject* stays = place == Py_None ? NULL : PyObject_CallOneArg(place, like);
    call->options |= DLX_EXAMINES | DLX_HOST_ONLY;
    if (place != Py_None) call->options |= DLX_NAMES_DEVICE;
    if (stays == Py_False) call->options |= DLX_MOVABLE;
    if (place == Py_None ? s->traits.host_only || py_is_on_host(s, like)
                         : stays && stays != Py_None)
      to = Py_NewRef(PyTuple_GET_ITEM(known, 0));
    Py_XDECREF(stays);
    if (PyErr_Occurred()) py_error_forget();
  }
  py_map_release(s);
  return to;
}
