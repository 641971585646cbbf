/* Routes: a table from (exact type, target) to what the fast path needs, read once from an
 * adapter's data by attribute name.
 *
 * A route remembers its type's version tag: CPython gives a type a new one whenever it, or a base
 * of it, is changed, so a type that is patched later misses here and is looked at anew. Types and
 * keys are held, so no address is reused. */

#include "route.h"
#include "core/hot.h"

#include <string.h>

enum { SLOTS = 256 /* a power of two; far more than pairs in any program */ };

static py_route* table[SLOTS];
static int in_use;

static size_t slot_of(const void* type, const void* key) {
  uintptr_t mixed = ((uintptr_t)type >> 4) * 31 + ((uintptr_t)key >> 4);
  return (size_t)(mixed ^ mixed >> 8) & (SLOTS - 1);
}

static unsigned tag_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  return type->tp_version_tag; /* 0 = changed since */
#else
  return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
#endif
}

/* Both types are what they were when the route was made. */
static int is_current(const py_route* r) {
  return r->tag != 0 && r->tag == tag_of(r->type) &&
         (r->take_type == NULL || (r->take_tag != 0 && r->take_tag == tag_of(r->take_type)));
}

/* The type's version, given to it now if it has none. Errors: 0, perhaps with MemoryError. */
static unsigned assign_tag(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyUnstable_Type_AssignVersionTag(type);
#else
  static PyObject* name; /* any: a look-up in the type gives it one, and runs no Python */
  if (name == NULL) name = PyUnicode_InternFromString("__hash__");
  if (name) _PyType_Lookup(type, name);
#endif
  return tag_of(type);
}

DLX_HOT py_route* py_route_find(PyTypeObject* type, PyObject* key) {
  for (size_t i = slot_of(type, key), n = 0; n < SLOTS && table[i];
       i = (i + 1) & (SLOTS - 1), n++) {
    if (table[i]->type == type && table[i]->key == key)
      return is_current(table[i]) ? table[i] : NULL;
  }
  return NULL;
}

DLX_HOT PyObject* py_ask(const py_question* q, PyObject* obj) {
  if (Py_TYPE(obj) == q->type) {
    if (q->get) return q->get(obj, q->closure);
    if (q->call) return q->call(obj, NULL);
  }
  return q->is_method ? PyObject_CallMethodNoArgs(obj, q->name) : PyObject_GetAttr(obj, q->name);
}

static void forget_question(py_question* q) {
  Py_CLEAR(q->name);
  Py_CLEAR(q->type);
}

static void route_free(py_route* r) {
  if (r == NULL) return;
  if (r->users) {
    r->is_replaced = 1;
    return;
  }
  for (int i = 0; i < r->n_guards; i++) {
    forget_question(&r->guards[i].ask);
    forget_question(&r->guards[i].resolve);
  }
  for (int i = 0; i < r->n_switches; i++) {
    Py_CLEAR(r->switches[i].dict);
    Py_CLEAR(r->switches[i].name);
    Py_CLEAR(r->switches[i].value);
  }
  forget_question(&r->owner);
  forget_question(&r->start);
  forget_question(&r->nbytes);
  forget_question(&r->dtype);
  Py_CLEAR(r->confirmed);
  if (r->holds_type) Py_CLEAR(r->type);
  Py_CLEAR(r->key);
  Py_CLEAR(r->take_type);
  Py_CLEAR(r->load);
  PyMem_Free(r);
}

/* GIL: needed; releasing types may run Python, so the table is empty before anything is freed. */
static void forget_all(void) {
  py_route* old[SLOTS];
  memcpy(old, table, sizeof table);
  memset(table, 0, sizeof table);
  in_use = 0;
  for (size_t i = 0; i < SLOTS; i++) route_free(old[i]);
}

DLX_HOT void py_route_leave(py_route* r) {
  if (--r->users == 0 && r->is_replaced) {
    py_pending pending = py_pending_save();
    route_free(r);
    py_pending_restore(pending);
  }
}

/* (name, type, descriptor, is_method), or None. Owns: references in `q`. Errors: -1 with an
 * exception. */
static int read_question(PyObject* given, py_question* q) {
  PyObject *name, *type, *descriptor;
  if (given == Py_None) return 0;
  if (!PyArg_ParseTuple(given, "UO!Op:question", &name, &PyType_Type, &type, &descriptor,
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
  return guard->codes == DLX_EVERY_CODE && !guard->of_owner;
}

/* Each (ask, codes, of_owner, resolve). Errors: -1 with an exception. */
static int read_guards(PyObject* given, py_route* r) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
    PyObject *ask, *resolve;
    py_guard read = {.codes = 0};
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "OIpO:guard", &ask, &read.codes,
                          &read.of_owner, &resolve))
      return -1;
    py_guard* slot = &r->guards[r->n_guards++];
    if (is_early(&read)) { /* among the early ones */
      *slot = r->guards[r->n_early];
      slot = &r->guards[r->n_early++];
    }
    *slot = read;
    if (read_question(ask, &slot->ask) < 0 || read_question(resolve, &slot->resolve) < 0) return -1;
  }
  return 0;
}

/* Each (dict, name, value). Errors: -1 with an exception. */
static int read_switches(PyObject* given, py_route* r) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
    PyObject *dict, *name, *value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "O!UO:switch", &PyDict_Type, &dict, &name,
                          &value))
      return -1;
    r->switches[r->n_switches++] = (py_switch){Py_NewRef(dict), Py_NewRef(name), Py_NewRef(value)};
  }
  return 0;
}

/* Errors: 0, perhaps with an exception, see py_exchange_find. */
static int read_table(PyObject* given, PyTypeObject* type, const DLPackExchangeAPI** out) {
  *out = given == Py_None ? py_exchange_find(type) : py_exchange_read(given, 0);
  return *out != NULL;
}

PyDoc_STRVAR(
    route_add_doc,
    "route_add(type, key, same, give, take_type, take, load, guards, quick, switches, "
    "owner, bounds, dtype, confirmed, accepts)\n"
    "--\n\n"
    "Add a route to the fast path. `give` and `take` are capsules, or None for the table of the "
    "type; "
    "take_type None means\nthat dlx.Tensor is the target. Without a table of the target, or where "
    "`take` is False, load(tensor) makes its array;\nload may be None. Return whether the fast "
    "path can "
    "run it: without what it needs it cannot, and\n"
    "that is remembered until the type changes or the routes are cleared.");

static PyObject* route_add(PyObject* module, PyObject* args) {
  PyObject *type, *key, *give, *take_type, *take, *load, *guards, *quick, *switches, *owner,
      *bounds, *dtype, *confirmed, *accepts;
  int same;
  if (!PyArg_ParseTuple(args, "O!OpOOOOO!OO!OO!OOO:route_add", &PyType_Type, &type, &key, &same,
                        &give, &take_type, &take, &load, &PyTuple_Type, &guards, &quick,
                        &PyTuple_Type, &switches, &owner, &PyTuple_Type, &bounds, &dtype,
                        &confirmed, &accepts))
    return NULL;
  if (PyTuple_GET_SIZE(guards) > DLX_MAX_QUESTIONS ||
      PyTuple_GET_SIZE(switches) > DLX_MAX_QUESTIONS) {
    PyErr_SetString(PyExc_ValueError, "too many guards for the fast path");
    return NULL;
  }
  py_route* r = PyMem_Calloc(1, sizeof *r);
  if (r == NULL) return PyErr_NoMemory();
  r->type = (PyTypeObject*)Py_NewRef(type);
  r->holds_type = 1;
  r->key = Py_NewRef(key);
  r->is_same = same;
  if (read_guards(guards, r) < 0 || read_switches(switches, r) < 0 ||
      read_question(owner, &r->owner) < 0 || read_question(dtype, &r->dtype) < 0)
    goto failed;
  if (PyTuple_GET_SIZE(bounds) == 2 && (read_question(PyTuple_GET_ITEM(bounds, 0), &r->start) < 0 ||
                                        read_question(PyTuple_GET_ITEM(bounds, 1), &r->nbytes) < 0))
    goto failed;
  if (quick != Py_None) {
    r->quick = (dlx_guard_function)PyCapsule_GetPointer(quick, "dlx_guard_function");
    if (r->quick == NULL) goto failed;
  }
  if (confirmed != Py_None) r->confirmed = Py_NewRef(confirmed);
  const dlx_capabilities* capabilities = PyLong_AsVoidPtr(accepts);
  if (capabilities == NULL && PyErr_Occurred()) goto failed;
  if (capabilities) r->accepts = *capabilities;
  int gives = r->type == py_tensor_type ||
              (read_table(give, r->type, &r->give) && r->give->dltensor_from_py_object_no_sync);
  if (PyErr_Occurred()) goto failed;
  int takes = take_type == Py_None || load != Py_None;
  if (take_type != Py_None && take != Py_False &&
      read_table(take, (PyTypeObject*)take_type, &r->take)) {
    if (r->take->managed_tensor_to_py_object_no_sync == NULL) r->take = NULL;
    takes = takes || r->take;
  }
  r->is_fast_path = same || (gives && takes);
  if (r->take == NULL && load != Py_None) r->load = Py_NewRef(load);
  if (take_type != Py_None) {
    r->take_type = (PyTypeObject*)Py_NewRef(take_type);
    r->take_tag = assign_tag(r->take_type);
  }
  r->tag = assign_tag(r->type);
  if (PyErr_Occurred()) goto failed;

  if (in_use > SLOTS * 3 / 4) forget_all(); /* many short-lived types: clear the table */
  size_t i = slot_of(type, key);
  while (table[i] && !(table[i]->type == r->type && table[i]->key == key))
    i = (i + 1) & (SLOTS - 1);
  py_route* old = table[i];
  table[i] = r;
  if (old == NULL) in_use++;
  int is_fast_path = r->is_fast_path;
  /* That a type has no route must not keep it alive. Should another type come to lie at its
   * address, its version differs; at worst Python is asked. */
  r->holds_type = is_fast_path;
  if (!is_fast_path) Py_DECREF(type);
  route_free(old);
  return PyBool_FromLong(is_fast_path);

failed:
  route_free(r);
  return NULL;
}

PyDoc_STRVAR(routes_clear_doc,
             "routes_clear()\n--\n\n"
             "Forget every route: the adapters have changed.");

static PyObject* routes_clear(PyObject* module, PyObject* unused) {
  forget_all();
  Py_RETURN_NONE;
}

PyMethodDef py_route_functions[] = {
    {"route_add", route_add, METH_VARARGS, route_add_doc},
    {"routes_clear", routes_clear, METH_NOARGS, routes_clear_doc},
    {NULL, NULL, 0, NULL},
};
