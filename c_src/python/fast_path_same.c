/* Arrays that are in the target framework already: such a one is the result itself, without its
 * graph or as the framework's own copy where the call says so. And what an array stands for as
 * `like`. */

#include "route.h"

/* Whether an array is on the host, as its table says. Errors: 0 = ask Python. */
static int is_on_host(const py_route* r, PyObject* obj) {
  DLTensor t = {.ndim = -1};
  DLManagedTensorVersioned* made;
  if (r->type == &py_tensor_type) {
    if ((made = py_tensor_inside((TensorObject*)obj)) == NULL) return 0;
    t = made->dl_tensor;
  } else if (r->exports && r->exports->dltensor_from_py_object_no_sync &&
             r->exports->dltensor_from_py_object_no_sync(obj, &t) == 0 && !PyErr_Occurred()) {
    /* borrowed */
  } else if (r->exports && r->exports->managed_tensor_from_py_object_no_sync) {
    if (PyErr_Occurred() && py_error_forget() < 0) return 0; /* it cannot say read-only */
    if (py_exchange_managed(r->exports, obj, &made) < 0) return py_error_forget(), 0;
    t = made->dl_tensor;
    dlx_managed_release(made);
  } else {
    return py_error_forget(), 0;
  }
  return t.device.device_type == kDLCPU && t.device.device_id == 0;
}

/* Whether an array has no graph. Errors: 0, as py_fast_path_is_clear. */
static int has_no_graph(py_route* r, PyObject* obj) {
  /* One that wraps another may have it there. Such have no memory, which the guards look for where
   * they are given a tensor without any. */
  static const DLTensor none;
  return py_fast_path_is_clear(r, obj) && (r->quick == NULL || r->quick(obj, &none));
}

/* An array without a graph: itself, where it has none. Owns: new reference. Errors: NULL, as
 * py_fast_path_route. */
static PyObject* without_graph(py_route* r, PyObject* obj) {
  for (int i = r->n_early; i < r->n_guards; i++) {
    if (!r->guards[i].of_owner) return NULL; /* one that may be about the graph, asked by dtype */
  }
  if (has_no_graph(r, obj)) return Py_NewRef(obj);
  PyObject* plain = PyErr_Occurred() || r->detach.name == NULL ? NULL : py_ask(&r->detach, obj);
  if (plain == NULL) {
    py_error_forget();
  } else if (!has_no_graph(r, plain)) {
    Py_CLEAR(plain);
  }
  return plain;
}

/* Whether to borrow an array neither waits for it nor changes it, as its adapter says. Errors: 0 =
 * ask Python. */
static int is_ready(const py_route* r, PyObject* obj) {
  PyObject* answer = r->ready ? PyObject_CallOneArg(r->ready, obj) : Py_NewRef(Py_True);
  if (answer == NULL) py_error_forget();
  Py_XDECREF(answer);
  return answer == Py_True;
}

/* Whether nothing blocks the export of an array, which its framework may copy then. Errors: 0 = ask
 * Python. */
static int may_copy(py_route* r, PyObject* obj) {
  uint32_t resolvable = 0;
  if (r->copy == NULL || r->is_managed || !is_ready(r, obj)) return 0;
  DLManagedTensorVersioned* made = py_fast_path_borrow(r, obj, DLX_COPIES, &resolvable);
  if (made) dlx_managed_release(made);
  return made && resolvable == 0;
}

/* Where the options, or the route, ask more than what framework it is of. Owns, Errors: as
 * py_fast_path_same. */
static PyObject* examined(py_route* r, PyObject* obj, unsigned options) {
  if (options & r->leaves & DLX_NAMES_DEVICE) return NULL;
  if (options & DLX_COPIES)
    return options & DLX_DETACHES || !may_copy(r, obj) ? NULL : Py_NewRef(obj);
  int asks = r->is_examined || (options & DLX_HOST_ONLY && !r->is_host_only);
  /* A table without a borrow slot is not asked: its managed one may wait for the array. */
  int can_ask =
      r->type == &py_tensor_type || (r->exports && r->exports->dltensor_from_py_object_no_sync);
  if (asks && !(can_ask && is_on_host(r, obj))) return NULL;
  return options & DLX_DETACHES ? without_graph(r, obj) : Py_NewRef(obj);
}

PyObject* py_fast_path_same(py_route* r, PyObject* obj, unsigned options) {
  if (!(options & (DLX_COPIES | DLX_EXAMINES)) && !r->is_examined) return Py_NewRef(obj);
  py_route_enter(r);
  PyObject* result = examined(r, obj, options);
  py_route_leave(r);
  return result;
}

PyObject* py_fast_path_copied(const py_route* r, PyObject* same) {
  PyObject* copy = PyObject_CallOneArg(r->copy, same);
  if (copy == NULL) py_error_forget();
  Py_DECREF(same);
  return copy;
}

PyObject* py_fast_path_run_same(py_route* r, PyObject* obj, unsigned options) {
  if (!(options & DLX_COPIES)) return py_fast_path_same(r, obj, options);
  py_route_enter(r);
  PyObject* same = py_fast_path_same(r, obj, options);
  PyObject* copy = same ? py_fast_path_copied(r, same) : NULL;
  py_route_leave(r);
  return copy;
}

PyObject* py_fast_path_like(PyObject* callable, PyObject* like) {
  py_route* r = py_fast_path_route(callable, Py_TYPE(like), Py_NotImplemented);
  if (r == NULL || r->like == NULL) return NULL;
  py_route_enter(r);
  PyObject* to = r->is_host_only || is_on_host(r, like) ? Py_NewRef(r->like) : NULL;
  py_route_leave(r);
  return to;
}
