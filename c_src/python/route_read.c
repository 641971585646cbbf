/* What a route holds, read once from an adapter's data by attribute name, and given up again. */

#include "route.h"

/* A Question of dlx/_engine/fast_path.py, or None. Owns: references in `q`. Errors: -1 with an
 * exception. */
static int read_question(PyObject* asked, py_question* q) {
  PyObject *name, *type, *descriptor;
  if (asked == Py_None) return 0;
  if (!PyArg_ParseTuple(asked, "UO!Op:Question", &name, &PyType_Type, &type, &descriptor,
                        &q->is_method))
    return -1;
  q->name = Py_NewRef(name);
  q->type = (PyTypeObject*)Py_NewRef(type);
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

static int is_early(const py_guard* guard) {
  return guard->codes == 0 && !guard->of_owner;
}

/* A getter: whether an object has an attribute, and it is not None. Owns: new reference. GIL:
 * needed; may run Python. Errors: NULL with an exception. */
static PyObject* is_given(PyObject* obj, void* name) {
  PyObject* value;
  if (py_optional(obj, name, &value) < 0) return NULL;
  int given = value && value != Py_None;
  Py_XDECREF(value);
  return PyBool_FromLong(given);
}

/* Errors: -1 with an exception. */
static int read_guards(PyObject* guards, py_route* r) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guards); i++) {
    PyObject *ask, *resolve;
    py_guard read = {.codes = 0};
    int is_optional;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(guards, i), "OIpOp:Guard", &ask, &read.codes,
                          &read.of_owner, &resolve, &is_optional))
      return -1;
    py_guard* slot = &r->guards[r->n_guards++];
    if (is_early(&read)) { /* among the early ones */
      *slot = r->guards[r->n_early];
      slot = &r->guards[r->n_early++];
    }
    *slot = read;
    if (read.codes == 0) slot->codes = UINT32_MAX;
    if (read_question(ask, &slot->ask) < 0 || read_question(resolve, &slot->resolve) < 0) return -1;
    if (is_optional) {
      slot->ask.get = is_given;
      slot->ask.closure = slot->ask.name;
    }
  }
  return 0;
}

/* Errors: -1 with an exception. */
static int read_switches(PyObject* switches, PyTypeObject* owners, py_switch* out, int* n) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(switches); i++) {
    PyObject *owner, *name, *value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(switches, i), "O!UO:Switch", owners, &owner, &name,
                          &value))
      return -1;
    out[(*n)++] = (py_switch){Py_NewRef(owner), Py_NewRef(name), Py_NewRef(value), 0};
  }
  return 0;
}

/* A Producer of dlx/_engine/fast_path.py, or None. Owns: references in `p`. Errors: -1 with an
 * exception. */
static int read_producer(PyObject* producer, py_producer* p) {
  PyObject *names, *values, *no_numbers, *token_of, *token;
  if (producer == Py_None) return 0;
  if (!PyArg_ParseTuple(producer, "O!O!OnOO:Producer", &PyTuple_Type, &names, &PyTuple_Type,
                        &values, &no_numbers, &p->n_modules, &token_of, &token))
    return -1;
  if (PyTuple_GET_SIZE(names) > DLX_MAX_KEYWORDS ||
      PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(values)) {
    PyErr_SetString(PyExc_ValueError, "a producer has a value for each keyword, and few of them");
    return -1;
  }
  p->names = Py_NewRef(names);
  p->values = Py_NewRef(values);
  p->no_numbers = Py_NewRef(no_numbers);
  p->token_of = Py_NewRef(token_of);
  p->token = Py_NewRef(token);
  return 0;
}

/* A Fields of dlx/_engine/fast_path.py, or None. Owns: references in `f`. Errors: -1 with an
 * exception. */
static int read_fields_of(PyObject* fields, py_fields* f) {
  PyObject *asked[5], *address, *dtypes;
  py_question* questions[] = {&f->memory, &f->shape, &f->strides, &f->dtype, &f->device};
  if (fields == Py_None) return 0;
  if (!PyArg_ParseTuple(fields, "OOOOOUO!:Fields", &asked[0], &asked[1], &asked[2], &asked[3],
                        &asked[4], &address, &PyDict_Type, &dtypes))
    return -1;
  f->address = Py_NewRef(address);
  f->dtypes = Py_NewRef(dtypes);
  for (int i = 0; i < 5; i++) {
    if (read_question(asked[i], questions[i]) < 0) return -1;
  }
  return 0;
}

/* Who tells the current stream: True, the table; (function, attribute); None, nobody. Owns:
 * references in `s`. Errors: -1 with an exception. */
static int read_stream(PyObject* told, const DLPackExchangeAPI* table, py_stream_source* s) {
  PyObject *function, *attribute;
  if (told == Py_True && table) s->table = table->current_work_stream;
  if (told == Py_True || told == Py_None) return 0;
  if (!PyArg_ParseTuple(told, "OU:stream", &function, &attribute)) return -1;
  s->function = Py_NewRef(function);
  s->attribute = Py_NewRef(attribute);
  return 0;
}

static int is_told(const py_stream_source* s) {
  return s->table || s->function;
}

/* The table in a capsule, or that of the type where `table` is None. Errors: NULL, perhaps with an
 * exception, see py_exchange_find. */
static const DLPackExchangeAPI* read_table(PyObject* table, PyObject* type) {
  return table == Py_None ? py_exchange_find((PyTypeObject*)type) : py_exchange_read(table, 0);
}

enum {
  LIKE,
  IS_HOST_ONLY,
  CHILDREN,
  IS_SAME,
  IS_EXAMINED,
  IS_ROOT_ONLY,
  IS_IMMUTABLE,
  EXPORTS,
  IS_MANAGED,
  IS_BORROWED,
  EXPORT,
  UNBLOCKED,
  PRODUCER,
  FIELDS_OF,
  PRODUCES_ON,
  CONSUMES_ON,
  TARGET,
  IMPORTS,
  LOAD,
  COPY,
  READY,
  GUARDS,
  QUICK,
  SWITCHES,
  STATES,
  DETACH,
  OWNER,
  START,
  NBYTES,
  DTYPE,
  CONFIRMED,
  STORAGE,
  IS_NARROW,
  ALWAYS_COPIES,
  LOAD_NAMED,
  ACCEPTS,
  FIELDS
};
static const char* const names[FIELDS] = {
    "like",         "is_host_only", "children",    "is_same",       "is_examined", "is_root_only",
    "is_immutable", "exports",      "is_managed",  "is_borrowed",   "export",      "unblocked",
    "producer",     "fields",       "produces_on", "consumes_on",   "target",      "imports",
    "load",         "copy",         "ready",       "guards",        "quick",       "switches",
    "states",       "detach",       "owner",       "start",         "nbytes",      "dtype",
    "confirmed",    "storage",      "is_narrow",   "always_copies", "load_named",  "accepts"};

/* From the fields of a Route of dlx/_engine/fast_path.py. Owns: references in `r`. Errors: -1 with
 * an exception. */
static int read_fields(PyObject* const* field, py_route* r) {
  PyObject *guards = field[GUARDS], *switches = field[SWITCHES], *states = field[STATES],
           *target = field[TARGET];
  if (!PyTuple_Check(guards) || !PyTuple_Check(switches) || !PyTuple_Check(states) ||
      (target != Py_None && !PyType_Check(target))) {
    PyErr_SetString(PyExc_TypeError, "a route has tuples of guards and switches, and a type");
    return -1;
  }
  if (PyTuple_GET_SIZE(guards) > DLX_MAX_QUESTIONS ||
      PyTuple_GET_SIZE(switches) > DLX_MAX_QUESTIONS ||
      PyTuple_GET_SIZE(states) > DLX_MAX_QUESTIONS) {
    PyErr_SetString(PyExc_ValueError, "too many guards for the fast path");
    return -1;
  }
  if (read_guards(guards, r) < 0 ||
      read_switches(switches, &PyDict_Type, r->switches, &r->n_switches) < 0 ||
      read_switches(states, &PyBaseObject_Type, r->states, &r->n_states) < 0 ||
      read_question(field[DETACH], &r->detach) < 0 || read_question(field[OWNER], &r->owner) < 0 ||
      read_question(field[START], &r->start) < 0 || read_question(field[NBYTES], &r->nbytes) < 0 ||
      read_question(field[DTYPE], &r->dtype) < 0 ||
      read_producer(field[PRODUCER], &r->producer) < 0)
    return -1;
  if (field[LIKE] != Py_None) r->like = Py_NewRef(field[LIKE]);
  if (field[CHILDREN] != Py_None) r->children = Py_NewRef(field[CHILDREN]);
  r->is_host_only = field[IS_HOST_ONLY] == Py_True;
  r->is_same = field[IS_SAME] == Py_True;
  r->is_examined = field[IS_EXAMINED] == Py_True;
  r->is_root_only = field[IS_ROOT_ONLY] == Py_True;
  r->is_narrow = field[IS_NARROW] == Py_True;
  if (r->is_narrow) r->leaves = DLX_COPIES;
  if (field[ALWAYS_COPIES] == Py_True) r->leaves = DLX_COPIES | DLX_SHARES;
  if (field[LOAD_NAMED] != Py_None) {
    r->load_named = Py_NewRef(field[LOAD_NAMED]);
    if (r->is_same) r->leaves |= DLX_NAMES_DEVICE;
  }
  r->is_managed = field[IS_MANAGED] == Py_True;
  r->is_borrowed = field[IS_BORROWED] == Py_True;
  r->is_immutable = field[IS_IMMUTABLE] == Py_True;
  if (field[EXPORT] != Py_None) r->export = Py_NewRef(field[EXPORT]);
  if (field[UNBLOCKED] != Py_None) r->unblocked = Py_NewRef(field[UNBLOCKED]);
  if (field[COPY] != Py_None) r->copy = Py_NewRef(field[COPY]);
  if (field[READY] != Py_None) r->ready = Py_NewRef(field[READY]);
  if (field[QUICK] != Py_None) {
    r->quick = (dlx_guard_function)PyCapsule_GetPointer(field[QUICK], "dlx_guard_function");
    if (r->quick == NULL) return -1;
  }
  if (field[CONFIRMED] != Py_None) r->confirmed = Py_NewRef(field[CONFIRMED]);
  if (field[STORAGE] != Py_None) r->storage = Py_NewRef(field[STORAGE]);
  const dlx_capabilities* capabilities = PyLong_AsVoidPtr(field[ACCEPTS]);
  if (capabilities) r->accepts = *capabilities;
  if (PyErr_Occurred()) return -1;
  int is_own = r->type == &py_tensor_type;
  if (!is_own) r->exports = read_table(field[EXPORTS], (PyObject*)r->type);
  if (PyErr_Occurred()) return -1;
  if (target != Py_None && field[IMPORTS] != Py_False)
    r->imports = read_table(field[IMPORTS], target);
  if (PyErr_Occurred()) return -1;
  if (r->imports && r->imports->managed_tensor_to_py_object_no_sync == NULL) r->imports = NULL;
  if (r->imports == NULL && field[LOAD] != Py_None) r->load = Py_NewRef(field[LOAD]);
  if (target != Py_None) r->target = (PyTypeObject*)Py_NewRef(target);
  if (read_fields_of(field[FIELDS_OF], &r->fields) < 0 ||
      read_stream(field[PRODUCES_ON], r->exports, &r->produces) < 0 ||
      read_stream(field[CONSUMES_ON], r->imports, &r->consumes) < 0)
    return -1;
  r->takes_cuda = (is_own || is_told(&r->produces)) && (target == Py_None || is_told(&r->consumes));
  int borrows = r->exports && r->exports->dltensor_from_py_object_no_sync;
  int manages = r->exports && r->exports->managed_tensor_from_py_object_no_sync;
  if (!borrows && !is_own) r->is_managed = 1;
  int can_export =
      is_own || borrows || manages || r->export || r->producer.names || r->fields.address;
  int can_import = target == Py_None || r->imports || r->load;
  r->is_fast_path =
      r->like == NULL && r->children == NULL && (r->is_same || (can_export && can_import));
  if (r->is_fast_path && r->producer.names) r->is_fast_path = 2;
  return 0;
}

int py_route_read(PyObject* route, py_route* r) {
  PyObject* field[FIELDS] = {NULL};
  int n = 0, failed;
  while (n < FIELDS && (field[n] = PyObject_GetAttrString(route, names[n])) != NULL) n++;
  failed = n < FIELDS || read_fields(field, r) < 0;
  while (n > 0) Py_DECREF(field[--n]);
  return failed ? -1 : 0;
}

/* ---- given up again -------------------------------------------------------------------------- */

static void forget_question(py_question* q) {
  Py_CLEAR(q->name);
  Py_CLEAR(q->type);
}

static void forget_switch(py_switch* s) {
  Py_CLEAR(s->owner);
  Py_CLEAR(s->name);
  Py_CLEAR(s->value);
}

static void forget_stream(py_stream_source* s) {
  Py_CLEAR(s->function);
  Py_CLEAR(s->attribute);
}

static void forget_fields(py_fields* f) {
  forget_question(&f->memory);
  forget_question(&f->shape);
  forget_question(&f->strides);
  forget_question(&f->dtype);
  forget_question(&f->device);
  Py_CLEAR(f->address);
  Py_CLEAR(f->dtypes);
  Py_CLEAR(f->known);
}

void py_route_forget(py_route* r) {
  for (int i = 0; i < r->n_guards; i++) {
    forget_question(&r->guards[i].ask);
    forget_question(&r->guards[i].resolve);
  }
  for (int i = 0; i < r->n_switches; i++) forget_switch(&r->switches[i]);
  for (int i = 0; i < r->n_states; i++) forget_switch(&r->states[i]);
  forget_question(&r->detach);
  forget_question(&r->owner);
  forget_question(&r->start);
  forget_question(&r->nbytes);
  forget_question(&r->dtype);
  Py_CLEAR(r->confirmed);
  Py_CLEAR(r->storage);
  Py_CLEAR(r->like);
  Py_CLEAR(r->children);
  Py_CLEAR(r->target);
  Py_CLEAR(r->load);
  Py_CLEAR(r->load_named);
  Py_CLEAR(r->copy);
  Py_CLEAR(r->ready);
  Py_CLEAR(r->export);
  Py_CLEAR(r->unblocked);
  Py_CLEAR(r->producer.names);
  Py_CLEAR(r->producer.values);
  Py_CLEAR(r->producer.no_numbers);
  Py_XDECREF(atomic_exchange(&r->producer.dtype, NULL));
  Py_CLEAR(r->producer.token_of);
  Py_CLEAR(r->producer.token);
  forget_fields(&r->fields);
  forget_stream(&r->produces);
  forget_stream(&r->consumes);
}
