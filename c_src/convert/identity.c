/* Arrays that are in the target framework already: such a one is the result itself, without its
 * graph or as the framework's own copy where the call says so. */

#include "pairs.h"

int py_is_on_host(const py_source* s, PyObject* obj) {
  DLTensor t = {.ndim = -1};
  DLManagedTensorVersioned* made;
  if (s->kind.type == &py_tensor_type) {
    if ((made = py_tensor_inside((TensorObject*)obj)) == NULL) return 0;
    t = made->dl_tensor;
  } else if (s->table && s->table->dltensor_from_py_object_no_sync &&
             s->table->dltensor_from_py_object_no_sync(obj, &t) == 0 && !PyErr_Occurred()) {
    /* borrowed */
  } else if (s->table && s->table->managed_tensor_from_py_object_no_sync) {
    if (PyErr_Occurred() && py_error_forget() < 0) return 0; /* it cannot say read-only */
    if (py_exchange_managed(s->table, obj, &made) < 0) return py_error_forget(), 0;
    t = made->dl_tensor;
    dlx_managed_release(made);
  } else {
    return py_error_forget(), 0;
  }
  return t.device.device_type == kDLCPU && t.device.device_id == 0;
}

/* Whether an array has no graph. Errors: 0, as py_gate_is_open. */
static int has_no_graph(py_source* s, PyObject* obj) {
  /* One that wraps another may have it there. Such have no memory, which the guards look for where
   * they are given a tensor without any. */
  static const DLTensor none;
  return py_gate_is_open(&s->gate, obj) && (s->gate.in_c == NULL || s->gate.in_c(obj, &none));
}

/* An array without a graph: itself, where it has none. Owns, Errors: as py_stay. */
static PyObject* without_graph(py_source* s, PyObject* obj) {
  if (s->gate.n_of_array > s->gate.n_early)
    return NULL; /* a guard that is asked by dtype may be about the graph */
  if (has_no_graph(s, obj)) return Py_NewRef(obj);
  PyObject* plain = PyErr_Occurred() || s->detach.name == NULL ? NULL : py_ask(&s->detach, obj);
  if (plain == NULL) {
    py_error_forget();
  } else if (!has_no_graph(s, plain)) {
    Py_CLEAR(plain);
  }
  return plain;
}

/* Whether to borrow an array neither waits for it nor changes it, as its adapter says. Errors: 0 =
 * ask Python. */
static int is_ready(const py_source* s, PyObject* obj) {
  PyObject* answer =
      s->within.ready ? PyObject_CallOneArg(s->within.ready, obj) : Py_NewRef(Py_True);
  if (answer == NULL) py_error_forget();
  Py_XDECREF(answer);
  return answer == Py_True;
}

/* Whether nothing blocks the export of an array, which its framework may copy then. Errors: 0 = ask
 * Python. */
static int may_copy(py_source* s, py_target* t, PyObject* obj) {
  py_offer offer = {.made = NULL};
  int borrows = s->take == py_take_borrowed || s->take == py_take_tensor;
  if (s->within.copy == NULL || !borrows || !is_ready(s, obj) || !py_target_holds(t, DLX_COPIES))
    return 0;
  s->take(s, t, obj, DLX_COPIES, &offer);
  if (offer.made) dlx_managed_release(offer.made);
  return offer.state == PY_TAKEN;
}

/* Where the options, or the source, ask more than what framework it is of. `reads`: its table must
 * say where it is. A table without a borrow slot is not asked: its managed one may wait for it. */
static PyObject* stay(py_source* s, py_target* t, PyObject* obj, unsigned options, int reads) {
  if (options & DLX_NAMES_DEVICE && t->place) return NULL;
  if (options & DLX_COPIES)
    return options & DLX_DETACHES || !may_copy(s, t, obj) ? NULL : Py_NewRef(obj);
  if (reads || (options & DLX_HOST_ONLY && !s->traits.host_only)) {
    int can_ask =
        s->kind.type == &py_tensor_type || (s->table && s->table->dltensor_from_py_object_no_sync);
    if (!can_ask || !py_is_on_host(s, obj)) return NULL;
  }
  return options & DLX_DETACHES ? without_graph(s, obj) : Py_NewRef(obj);
}

PyObject* py_stay_as_it_is(py_source* s, py_target* t, PyObject* obj, unsigned options) {
  if (!(options & (DLX_COPIES | DLX_EXAMINES))) return Py_NewRef(obj);
  return stay(s, t, obj, options, 0);
}

PyObject* py_stay_examined(py_source* s, py_target* t, PyObject* obj, unsigned options) {
  return stay(s, t, obj, options, 1);
}

PyObject* py_copy_within(const py_source* s, PyObject* same) {
  PyObject* copy = PyObject_CallOneArg(s->within.copy, same);
  if (copy == NULL) py_error_forget();
  Py_DECREF(same);
  return copy;
}
