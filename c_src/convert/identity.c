/* Arrays that are already in the target framework: the result is the array, the array without its
 * graph, or a copy by the framework. */

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
    if (PyErr_Occurred() && py_error_forget() < 0)
      return 0; /* borrowing rejects read-only arrays */
    if (py_exchange_managed(s->table, obj, &made) < 0) return py_error_forget(), 0;
    t = made->dl_tensor;
    dlx_managed_release(made);
  } else {
    return py_error_forget(), 0;
  }
  return t.device.device_type == kDLCPU && t.device.device_id == 0;
}

/* Errors: 0 = it has one, or fallback. */
static int has_no_graph(py_source* s, PyObject* obj) {
  /* An array that wraps another may have the graph there. Wrappers have no memory; guards check
   * that if they get a tensor without memory. */
  static const DLTensor none;
  return py_gate_is_open(&s->gate, obj) && (s->gate.in_c == NULL || s->gate.in_c(obj, &none));
}

static PyObject* detach_graph(py_source* s, PyObject* obj) {
  if (s->gate.n_of_array > s->gate.n_early)
    return NULL; /* a guard for one dtype may be about the graph */
  if (has_no_graph(s, obj)) return Py_NewRef(obj);
  PyObject* detached = PyErr_Occurred() || s->detach.name == NULL ? NULL : py_ask(&s->detach, obj);
  if (detached == NULL) {
    py_error_forget();
  } else if (!has_no_graph(s, detached)) {
    Py_CLEAR(detached);
  }
  return detached;
}

/* Whether borrowing an array neither waits nor changes it. */
static int is_ready(const py_source* s, PyObject* obj) {
  PyObject* answer =
      s->framework.ready ? PyObject_CallOneArg(s->framework.ready, obj) : Py_NewRef(Py_True);
  if (answer == NULL) py_error_forget();
  Py_XDECREF(answer);
  return answer == Py_True;
}

/* Whether the framework may copy an array: nothing blocks its export. */
static int may_copy(py_source* s, py_target* t, PyObject* obj) {
  py_offer offer = {.made = NULL};
  int borrows = s->take == py_take_borrowed || s->take == py_take_tensor;
  if (s->framework.copy == NULL || !borrows || !is_ready(s, obj) || !py_target_holds(t, DLX_COPIES))
    return 0;
  s->take(s, t, obj, DLX_COPIES | (s->kind.type == &py_tensor_type ? 0 : DLX_MOVES), &offer);
  if (offer.made) dlx_managed_release(offer.made);
  return offer.state == PY_TAKEN || offer.state == PY_ON_DEVICE;
}

/* Whether an array of a framework with placement is on the host, committed to it unless the options
 * allow that it is not. */
static int is_placed(const py_source* s, PyObject* obj, unsigned options) {
  PyObject *known = atomic_load_explicit(&s->like, memory_order_acquire), *stays = NULL;
  if (known && PyTuple_CheckExact(known))
    stays = PyObject_CallOneArg(PyTuple_GET_ITEM(known, 1), obj);
  if (PyErr_Occurred()) py_error_forget();
  Py_XDECREF(stays);
  return stays == Py_True || (stays == Py_False && options & DLX_MOVABLE);
}

/* For options or sources that need more than the type. `reads`: the table must confirm the host.
 * Only the borrow slot is used: the managed slot may wait for a device. */
static PyObject* stay_checked(py_source* s, py_target* t, PyObject* obj, unsigned options,
                              int reads) {
  if (options & DLX_NAMES_DEVICE && t->place) {
    int is_same = !(options & (DLX_COPIES | DLX_DETACHES)) && is_placed(s, obj, options);
    return is_same ? Py_NewRef(obj) : NULL;
  }
  if (options & DLX_COPIES)
    return options & DLX_DETACHES || !may_copy(s, t, obj) ? NULL : Py_NewRef(obj);
  if (reads || (options & DLX_HOST_ONLY && !s->traits.host_only)) {
    int can_ask =
        s->kind.type == &py_tensor_type || (s->table && s->table->dltensor_from_py_object_no_sync);
    if (!can_ask || !py_is_on_host(s, obj)) return NULL;
  }
  return options & DLX_DETACHES ? detach_graph(s, obj) : Py_NewRef(obj);
}

PyObject* py_stay_unchanged(py_source* s, py_target* t, PyObject* obj, unsigned options) {
  if (!(options & (DLX_COPIES | DLX_EXAMINES))) return Py_NewRef(obj);
  return stay_checked(s, t, obj, options, 0);
}

PyObject* py_stay_examined(py_source* s, py_target* t, PyObject* obj, unsigned options) {
  return stay_checked(s, t, obj, options, 1);
}

PyObject* py_copy_by_framework(const py_source* s, PyObject* same) {
  PyObject* copy = PyObject_CallOneArg(s->framework.copy, same);
  if (copy == NULL) py_error_forget();
  Py_DECREF(same);
  return copy;
}
