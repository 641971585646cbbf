/* Types, and what was learned of them: see kind.h. */

#include "kind.h"

static PyObject *modules, *token_of; /* sys.modules; abc.get_cache_token */

int py_kind_init(void) {
  /* Held, since an interpreter that ends gives it up before all that may convert is freed. */
  modules = Py_XNewRef(PyImport_GetModuleDict());
  PyObject* abc = PyImport_ImportModule("_abc");
  token_of = abc ? PyObject_GetAttrString(abc, "get_cache_token") : NULL;
  Py_XDECREF(abc);
  return modules && token_of ? 0 : -1;
}

/* The type's version, given to it now if it has none. Errors: 0, perhaps with MemoryError. */
static unsigned assign_tag(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyUnstable_Type_AssignVersionTag(type);
#else
  _PyType_Lookup(type, py_name_hash); /* a look-up of any name gives it one, and runs no Python */
#endif
  return py_tag_of(type);
}

/* A class whose bases are replaced has another order, of other classes. */
static uintptr_t mark_of(PyTypeObject* type) {
  uintptr_t mark = 0;
#ifdef Py_GIL_DISABLED /* another thread may replace it */
  PyObject* order = PyObject_GetAttrString((PyObject*)type, "__mro__");
#else
  PyObject* order = Py_XNewRef(type->tp_mro);
#endif
  for (Py_ssize_t i = 0; order && i < PyTuple_GET_SIZE(order); i++)
    mark = mark * 31 + ((uintptr_t)PyTuple_GET_ITEM(order, i) >> 4);
  Py_XDECREF(order);
  return mark;
}

/* An attribute of a class, or NULL; no code of a metaclass runs where there is a GIL. Owns: new
 * reference. Errors: -1 with an exception. */
static int look_up(PyTypeObject* type, PyObject* name, PyObject** out) {
#ifdef Py_GIL_DISABLED /* the other look-up borrows */
  return py_optional((PyObject*)type, name, out);
#else
  *out = Py_XNewRef(_PyType_Lookup(type, name));
  return 0;
#endif
}

/* What stands for the value of an attribute, so that it can be compared later. A function may hold
 * the class that it is from, which must not live by it: it is held weakly. What can neither be held
 * so nor is known to hold no class counts as changed. Owns: takes `value`, or NULL; new reference.
 * Errors: NULL with an exception. */
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

/* Errors: 0 = it differs. */
static int is_fact(PyObject* noted, PyObject* value) {
  if (value == NULL) return noted == Py_Ellipsis;
  if (!PyWeakref_CheckRefExact(noted)) return noted == value;
  PyObject* held = py_weak_get(noted);
  Py_XDECREF(held); /* `value` is held */
  return held == value;
}

/* Errors: -1 with an exception. */
static int count_registrations(uint64_t* count) {
  PyObject* token = PyObject_CallNoArgs(token_of);
  *count = token ? PyLong_AsUnsignedLongLong(token) : 0;
  Py_XDECREF(token);
  return PyErr_Occurred() ? -1 : 0;
}

int py_kind_note(py_kind* k, PyTypeObject* type) {
  Py_ssize_t n = k->names ? PyTuple_GET_SIZE(k->names) : 0;
  k->type = type;
  k->bases = mark_of(type);
  if ((k->alive = PyWeakref_NewRef((PyObject*)type, NULL)) == NULL ||
      (k->facts = PyTuple_New(n)) == NULL)
    return -1;
  unsigned tag = assign_tag(type);
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *value, *noted = NULL;
    if (look_up(type, PyTuple_GET_ITEM(k->names, i), &value) >= 0) noted = note_fact(value);
    if (noted == NULL) return -1;
    PyTuple_SET_ITEM(k->facts, i, noted);
  }
  atomic_store_explicit(&k->tag, tag, memory_order_relaxed);
  return PyErr_Occurred() ? -1 : 0;
}

/* Errors: 0 = something differs, or an exception is set. */
static int is_same_class(const py_kind* k, PyTypeObject* type) {
  if (mark_of(type) != k->bases) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(k->facts); i++) {
    PyObject* value;
    if (look_up(type, PyTuple_GET_ITEM(k->names, i), &value) < 0) return 0;
    int same = is_fact(PyTuple_GET_ITEM(k->facts, i), value);
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
  Py_XDECREF(alive); /* `type` is held, if it is that */
  if (alive != (PyObject*)type) return 0;
  tag = assign_tag(type); /* before it is compared: a change meanwhile is seen at the next call */
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
