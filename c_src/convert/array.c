/* Conversion of one array: take it, copy it if that makes it acceptable, and hand it over. If no
 * guard applies, this runs no Python except the `load` of a target without a table; everything else
 * is left to the Python path. */

#include "pairs.h"
#include "streams.h"

/* Finish an offer that is not simply handed over. Keeps an unused response for the Python path.
 * Owns: takes the offer. Errors: as py_convert_array. */
static PyObject* finish_offer(py_call* call, const py_pair* pair, PyObject* obj, py_offer* offer) {
  py_target* t = pair->target;
  PyObject* result = NULL;
  if (offer->state == PY_BLOCKED) py_take_unblocked(pair->source, t, obj, call->options, offer);
  if (offer->made == NULL) {
    if (offer->response)
      py_call_keep_response(call, obj, offer->response, offer->state == PY_RAISED);
  } else if (offer->state == PY_ON_DEVICE) {
    result = py_streams_convert(call, pair->source, t, offer->made, obj);
  } else {
    if (offer->state == PY_NEEDS_COPY || call->options & DLX_COPIES)
      offer->made = py_target_copy(t, offer->made, call->options, offer->incompatible);
    if (offer->made) result = t->hand_over(call, t, offer->made, obj);
  }
  if (offer->response) py_drop(offer->response);
  return result;
}

static PyObject* keep_array(const py_call* call, const py_pair* pair, PyObject* obj) {
  py_source* s = pair->source;
  PyObject* same = s->framework.stay(s, pair->target, obj, call->options);
  return same && call->options & DLX_COPIES ? py_copy_by_framework(s, same) : same;
}

static inline PyObject* convert_by_pair(py_call* call, const py_pair* pair, PyObject* obj) {
  py_offer offer = {.made = NULL};
  if (!py_target_holds(pair->target, call->options)) return NULL;
  pair->source->take(pair->source, pair->target, obj, call->options, &offer);
  if (offer.state != PY_TAKEN || call->options & DLX_COPIES || offer.response)
    return finish_offer(call, pair, obj, &offer);
  return pair->target->hand_over(call, pair->target, offer.made, obj);
}

PyObject* py_convert_array(py_call* call, const py_pair* pair, PyObject* obj) {
  if (pair->what == PY_STAYS) return keep_array(call, pair, obj);
  return pair->what > PY_STAYS ? convert_by_pair(call, pair, obj) : NULL;
}

PyObject* py_convert(py_call* call, PyObject* obj) {
  if (py_is_tree(Py_TYPE(obj))) return py_convert_tree(call, obj, NULL);
  py_pair pair;
  if (!py_pair_learn(call->function, Py_TYPE(obj), call->to, &pair)) return NULL;
  PyObject* result = pair.what > PY_STAYS    ? convert_by_pair(call, &pair, obj)
                     : pair.what == PY_STAYS ? keep_array(call, &pair, obj)
                                             : py_convert_container(call, &pair, obj);
  py_pair_release(&pair);
  return result;
}

PyObject* py_target_like(py_call* call, PyObject* like) {
  py_source* s = py_example_learn(call->function, Py_TYPE(like));
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
