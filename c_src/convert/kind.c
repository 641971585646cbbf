/* Types and the facts noted about them: see kind.h. */

#include "kind.h"

static PyObject *modules, *get_token; /* sys.modules; abc.get_cache_token */

int py_kind_init(void) {
  /* Strong: at the end of an interpreter, conversions may run after it has released sys.modules. */
  modules = Py_XNewRef(PyImport_GetModuleDict());
  PyObject* abc = PyImport_ImportModule("_abc");
  get_token = abc ? PyObject_GetAttrString(abc, "get_cache_token") : NULL;
  Py_XDECREF(abc);
  return modules && get_token ? 0 : -1;
}

/* Return the version of a type, assigning one if it has none. Errors: 0; MemoryError may be set. */
static unsigned assign_tag(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyUnstable_Type_AssignVersionTag(type);
#else
  _PyType_Lookup(type, py_name_hash); /* any look-up assigns a tag, and runs no Python */
#endif
  return py_tag_of(type);
}

/* Detects replaced base classes. */
static uintptr_t hash_bases(PyTypeObject* type) {
  uintptr_t mark = 0;
#ifdef Py_GIL_DISABLED /* another thread may replace tp_mro */
  PyObject* order = PyObject_GetAttrString((PyObject*)type, "__mro__");
#else
  PyObject* order = Py_XNewRef(type->tp_mro);
#endif
  for (Py_ssize_t i = 0; order && i < PyTuple_GET_SIZE(order); i++)
    mark = mark * 31 + ((uintptr_t)PyTuple_GET_ITEM(order, i) >> 4);
  Py_XDECREF(order);
  return mark;
}

/* Owns: *out is a new reference, or NULL. With a GIL, runs no code of a metaclass. */
static int look_up_attribute(PyTypeObject* type, PyObject* name, PyObject** out) {
#ifdef Py_GIL_DISABLED /* _PyType_Lookup returns a borrowed reference */
  return py_get_optional((PyObject*)type, name, out);
#else
  *out = Py_XNewRef(_PyType_Lookup(type, name));
  return 0;
#endif
}

/* Return an object to compare an attribute's value with later. A function may reference its class
 * and keep it alive, so it is held weakly. Values without weak references count as changed, unless
 * they are known to reference no class. Owns: takes `value`, or NULL; new reference. Errors: NULL
 * with an exception. */
static PyObject* note_fact(PyObject* value) {
  if (value == NULL) return Py_NewRef(Py_Ellipsis);
  int is_of_c = Py_IS_TYPE(value, &PyMethodDescr_Type) || Py_IS_TYPE(value, &PyGetSetDescr_Type) ||
                Py_IS_TYPE(value, &PyWrapperDescr_Type) || !PyObject_IS_GC(value);
  if (is_of_c) return value;
  PyObject* noted = PyType_SUPPORTS_WEAKREFS(Py_TYPE(value)) ? PyWeakref_NewRef(value, NULL)
                                                             : Py_NewRef(Py_NotImplemented);
  Py_DECREF(value);
  return noted;
}

static int matches_fact(PyObject* noted, PyObject* value) {
  if (value == NULL) return noted == Py_Ellipsis;
  if (!PyWeakref_CheckRefExact(noted)) return noted == value;
  PyObject* referent = py_weak_get(noted);
  Py_XDECREF(referent); /* the caller holds `value` */
  return referent == value;
}

static int count_registrations(uint64_t* count) {
  PyObject* token = PyObject_CallNoArgs(get_token);
  *count = token ? PyLong_AsUnsignedLongLong(token) : 0;
  Py_XDECREF(token);
  return PyErr_Occurred() ? -1 : 0;
}

int py_kind_note(py_kind* k, PyTypeObject* type) {
  Py_ssize_t n = k->names ? PyTuple_GET_SIZE(k->names) : 0;
  k->type = type;
  k->bases = hash_bases(type);
  if ((k->alive = PyWeakref_NewRef((PyObject*)type, NULL)) == NULL ||
      (k->facts = PyTuple_New(n)) == NULL)
    return -1;
  unsigned tag = assign_tag(type);
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *value, *noted = NULL;
    if (look_up_attribute(type, PyTuple_GET_ITEM(k->names, i), &value) >= 0)
      noted = note_fact(value);
    if (noted == NULL) return -1;
    PyTuple_SET_ITEM(k->facts, i, noted);
  }
  atomic_store_explicit(&k->tag, tag, memory_order_relaxed);
  return PyErr_Occurred() ? -1 : 0;
}

static int is_same_class(const py_kind* k, PyTypeObject* type) {
  if (hash_bases(type) != k->bases) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(k->facts); i++) {
    PyObject* value;
    if (look_up_attribute(type, PyTuple_GET_ITEM(k->names, i), &value) < 0) return 0;
    int same = matches_fact(PyTuple_GET_ITEM(k->facts, i), value);
    Py_XDECREF(value);
    if (!same) return 0;
  }
  if (k->still == NULL) return 1;
  PyObject* answer = PyObject_CallOneArg(k->still, (PyObject*)type);
  int still = answer ? PyObject_IsTrue(answer) : 0;
  Py_XDECREF(answer);
  return still > 0;
}

int py_kind_compare(py_kind* k, PyTypeObject* type) {
  uint64_t registrations;
  if (k->n_modules >= 0 &&
      (PyDict_GET_SIZE(modules) != k->n_modules || count_registrations(&registrations) < 0 ||
       registrations != k->registrations))
    return py_error_forget(), 0;
  unsigned tag = py_tag_of(type);
  if (tag && tag == atomic_load_explicit(&k->tag, memory_order_relaxed)) return 1;
  PyObject* alive = py_weak_get(k->alive);
  Py_XDECREF(alive); /* the caller holds `type` */
  if (alive != (PyObject*)type) return 0;
  tag =
      assign_tag(type); /* before the comparison: a change during it is noticed at the next call */
  if (PyErr_Occurred() || !is_same_class(k, type)) return py_error_forget(), 0;
  atomic_store_explicit(&k->tag, tag, memory_order_relaxed);
  return 1;
}

int py_kind_visit(py_kind* k, visitproc visit, void* arg) {
  Py_VISIT(k->alive);
  Py_VISIT(k->facts);
  return 0;
}

void py_kind_clear(py_kind* k) {
  Py_CLEAR(k->alive);
  Py_CLEAR(k->facts);
}
