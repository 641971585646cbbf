/* Guards and switches: how they are checked, and read from Python. Exceptions that py_error_forget
 * clears are raised again by the Python path. */

#include "gate.h"
#include "base/threads.h"

PyObject* py_ask(const py_question* q, PyObject* obj) {
  if (Py_TYPE(obj) == q->type) {
    if (q->get) return q->get(obj, q->closure);
    if (q->call) return q->call(obj, NULL);
  }
  return q->is_method ? PyObject_CallMethodNoArgs(obj, q->name) : PyObject_GetAttr(obj, q->name);
}

int py_guard_is_false(const py_guard* guard, PyObject* obj, PyObject* asked) {
  PyObject* answer = py_ask(&guard->ask, asked);
  if (answer == NULL) return py_error_forget(), 0;
  int is_true = answer == Py_False ? 0 : answer == Py_True ? 1 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  if (is_true == 0) return 1;
  PyObject* resolved = is_true > 0 && guard->resolve.name ? py_ask(&guard->resolve, obj) : NULL;
  if (resolved == NULL) return py_error_forget(), 0;
  Py_DECREF(resolved);
  return 1;
}

/* Before Python 3.12, each change of a dict gives it a new version that is unique among all dicts.
 */
static int is_off(py_switch* s) {
#if PY_VERSION_HEX < 0x030C0000
  uint64_t version = ((PyDictObject*)s->owner)->ma_version_tag;
  if (version == s->version) return 1;
  if (PyDict_GetItemWithError(s->owner, s->name) != s->value) return 0;
  s->version = version;
  return 1;
#else
  return PyDict_GetItemWithError(s->owner, s->name) == s->value;
#endif
}

int py_gate_is_open(py_gate* gate, PyObject* obj) {
  for (int i = 0; i < gate->switches.n; i++) {
    if (!is_off(&gate->switches.at[i])) return py_error_forget(), 0;
  }
  for (int i = 0; i < gate->n_early; i++) {
    if (!py_guard_is_false(&gate->guards[i], obj, obj)) return 0;
  }
  return gate->in_c == NULL || gate->in_c(obj, NULL);
}

int py_gate_asks(const py_gate* gate, int code) {
  for (int i = gate->n_early; i < gate->n_of_array; i++) {
    if (gate->guards[i].codes >> code & 1) return 1;
  }
  return 0;
}

int py_switches_hold(const py_switches* states) {
  for (int i = 0; i < states->n; i++) {
    PyObject* found = PyObject_GetAttr(states->at[i].owner, states->at[i].name);
    int same = found ? PyObject_RichCompareBool(found, states->at[i].value, Py_EQ) : -1;
    Py_XDECREF(found);
    if (same != 1) return py_error_forget(), same;
  }
  return 1;
}

/* ---- read ------------------------------------------------------------------------------------ */

int py_question_read(PyObject* value, PyTypeObject* type, py_question* q) {
  PyObject *name, *of, *descriptor;
  if (!PyArg_ParseTuple(value, "UOOp:Question", &name, &of, &descriptor, &q->is_method)) return -1;
  q->name = name;
  q->type = PyType_Check(of) ? (PyTypeObject*)of : type;
  if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type) && !q->is_method) {
    const PyGetSetDef* def = ((PyGetSetDescrObject*)descriptor)->d_getset;
    q->get = def->get;
    q->closure = def->closure;
  } else if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type) && q->is_method) {
    const PyMethodDef* def = ((PyMethodDescrObject*)descriptor)->d_method;
    if (def->ml_flags == METH_NOARGS) q->call = def->ml_meth;
  }
  return 0;
}

/* A getter: whether an object has an attribute that is not None. Errors: NULL with an exception. */
static PyObject* has_value(PyObject* obj, void* name) {
  PyObject* value;
  if (py_get_optional(obj, name, &value) < 0) return NULL;
  int has = value && value != Py_None;
  Py_XDECREF(value);
  return PyBool_FromLong(has);
}

/* Read one Guard and return its range: early, array or owner. */
static int read_guard(PyObject* value, PyTypeObject* type, py_guard* out) {
  PyObject *ask, *resolve;
  int of_owner, is_optional;
  if (!PyArg_ParseTuple(value, "OIpOp:Guard", &ask, &out->codes, &of_owner, &resolve,
                        &is_optional) ||
      py_question_read(ask, type, &out->ask) < 0 ||
      (resolve != Py_None && py_question_read(resolve, type, &out->resolve) < 0))
    return -1;
  if (is_optional) {
    out->ask.get = has_value;
    out->ask.closure = out->ask.name;
  }
  int range = of_owner ? 2 : out->codes ? 1 : 0;
  if (out->codes == 0) out->codes = UINT32_MAX;
  return range;
}

int py_guards_read(PyObject* value, PyTypeObject* type, py_gate* gate) {
  if (!PyTuple_Check(value))
    return PyErr_SetString(PyExc_TypeError, "expected a tuple of guards"), -1;
  Py_ssize_t n = PyTuple_GET_SIZE(value);
  gate->guards = PyMem_Calloc((size_t)n + 1, sizeof(py_guard));
  if (gate->guards == NULL) return PyErr_NoMemory(), -1;
  for (int range = 0; range < 3; range++) {
    for (Py_ssize_t i = 0; i < n; i++) {
      py_guard guard = {.codes = 0};
      int found = read_guard(PyTuple_GET_ITEM(value, i), type, &guard);
      if (found < 0) return -1;
      if (found == range) gate->guards[gate->n++] = guard;
    }
    if (range == 0) gate->n_early = gate->n;
    if (range == 1) gate->n_of_array = gate->n;
  }
  return 0;
}

int py_switches_read(PyObject* value, PyTypeObject* owners, py_switches* out) {
  if (!PyTuple_Check(value))
    return PyErr_SetString(PyExc_TypeError, "expected a tuple of switches"), -1;
  Py_ssize_t n = PyTuple_GET_SIZE(value);
  out->at = PyMem_Calloc((size_t)n + 1, sizeof(py_switch));
  if (out->at == NULL) return PyErr_NoMemory(), -1;
  for (; out->n < n; out->n++) {
    py_switch* s = &out->at[out->n];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(value, out->n), "O!UO:Switch", owners, &s->owner,
                          &s->name, &s->value))
      return -1;
  }
  return 0;
}

void py_switches_free(py_switches* switches) {
  PyMem_Free(switches->at);
  *switches = (py_switches){0, NULL};
}

void py_gate_free(py_gate* gate) {
  py_switches_free(&gate->switches);
  PyMem_Free(gate->guards);
  *gate = (py_gate){.guards = NULL};
}
