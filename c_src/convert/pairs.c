/* Sources by type, targets by the `to` of calls, and pairs by type in each target. Types are not
 * held: a version tag, and after changes a weak reference, identify them. */

#include "pairs.h"

static _Atomic(py_map*) sources, targets; /* as in map.h */
static PyObject*
    names; /* {name: name} of targets, for borrowed references; entries are never removed */

int py_pair_init(void) {
  py_map_init();
  names = PyDict_New();
  return names && py_kind_init() == 0 ? 0 : -1;
}

/* Return the object under which a target is stored; for strings the interned one. Owns: borrowed.
 * Errors: `to` itself; NULL for strings with their own comparison. */
static PyObject* find_key(PyObject* to) {
  if (!PyUnicode_Check(to) || (PyUnicode_CheckExact(to) && PyUnicode_CHECK_INTERNED(to))) return to;
  if (Py_TYPE(to)->tp_hash != PyUnicode_Type.tp_hash ||
      Py_TYPE(to)->tp_richcompare != PyUnicode_Type.tp_richcompare)
    return NULL;
  PyObject* known = PyDict_GetItemWithError(names, to);
  return known ? known : to;
}

/* The target is held: comparing its type may run Python. */
static inline py_target* find_target_by_key(PyObject* key) {
  py_target* t = (py_target*)py_word_object(py_map_get(&targets, key));
  if (t == NULL) return NULL;
  py_map_hold(t);
  PyTypeObject* type = t->kind.type;
  if (type == NULL || py_kind_is_current(&t->kind, type) || py_kind_compare(&t->kind, type))
    return t;
  py_map_release(t);
  return NULL;
}

py_target* py_target_find(PyObject* to) {
  py_target* t = find_target_by_key(to);
  if (t || PyErr_Occurred()) return t;
  PyObject* key = find_key(to); /* literals are already interned */
  return key && key != to ? find_target_by_key(key) : NULL;
}

static inline py_source* find_source(const _Atomic(py_map*)* place, PyTypeObject* type,
                                     unsigned* bits) {
  uintptr_t word = py_map_get(place, type);
  py_source* s = (py_source*)py_word_object(word);
  if (s == NULL) return NULL;
  *bits = word & DLX_WORD_BITS;
  py_map_hold(s);
  if (py_kind_is_current(&s->kind, type) || py_kind_compare(&s->kind, type)) return s;
  py_map_release(s);
  return NULL;
}

inline int py_pair_find(PyTypeObject* type, PyObject* to, py_pair* out) {
  unsigned bits;
  py_target* t = py_target_find(to);
  if (t == NULL) return 0;
  py_source* s = find_source(&t->pairs, type, &bits);
  if (s == NULL) return py_map_release(t), 0;
  *out = (py_pair){s, t, bits & (PY_AT_ROOT - 1), bits & PY_AT_ROOT};
  return 1;
}

static int learn_pair(const FastPathObject* function, PyTypeObject* type, PyObject* to) {
  if (PyErr_Occurred()) return -1;
  PyObject* done = PyObject_CallFunctionObjArgs(function->learn, (PyObject*)type, to, NULL);
  if (done == NULL) return py_error_forget();
  Py_DECREF(done);
  return 0;
}

int py_pair_learn(const FastPathObject* function, PyTypeObject* type, PyObject* to, py_pair* out) {
  return py_pair_find(type, to, out) ||
         (learn_pair(function, type, to) == 0 && py_pair_find(type, to, out));
}

static py_source* find_example(PyTypeObject* type) {
  unsigned bits;
  py_source* s = find_source(&sources, type, &bits);
  if (s == NULL || atomic_load_explicit(&s->like, memory_order_acquire)) return s;
  py_map_release(s);
  return NULL;
}

py_source* py_example_learn(const FastPathObject* function, PyTypeObject* type) {
  py_source* s = find_example(type);
  if (s || learn_pair(function, type, Py_NotImplemented) < 0) return s;
  return find_example(type);
}

int py_source_holds(PyObject* source, PyTypeObject* type) {
  unsigned bits;
  py_maps_begin();
  py_source* s = find_source(&sources, type, &bits);
  if (s) py_map_release(s);
  py_maps_end();
  return s && (PyObject*)s == source;
}

void py_target_forget(py_target* t) {
  if (t->key && (py_target*)py_word_object(py_map_get(&targets, t->key)) == t &&
      py_map_set(&targets, t->key, 0) < 0)
    PyErr_Clear(); /* the next call checks it again */
}

/* ---- learned --------------------------------------------------------------------------------- */

static int read_what(PyObject* name) {
  static const char* const words[] = {"python", "passes", "looks",    "children",
                                      "rule",   "stays",  "converts", "produces"};
  for (int i = 0; i < 8; i++) {
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, words[i]) == 0) return i;
  }
  PyErr_Format(PyExc_ValueError, "unknown kind of pair: %R", name);
  return -1;
}

PyDoc_STRVAR(
    pair_add_doc,
    "pair_add(to, source, target, what, at_root=False, /)\n--\n\n"
    "Add a pair to the fast path; see c_src/convert/pairs.h.\n\n"
    "Return whether the fast path can convert it. Pairs that it cannot convert are kept, too, "
    "until the type\nchanges or the pairs are cleared.");

static PyObject* pair_add(PyObject* module, PyObject* args) {
  PyObject *to, *what_name;
  py_source* s;
  py_target* t;
  int at_root = 0;
  if (!PyArg_ParseTuple(args, "OO!O!O|p:pair_add", &to, py_source_type, &s, py_target_type, &t,
                        &what_name, &at_root))
    return NULL;
  int what = read_what(what_name);
  if (what < 0) return NULL;
  int is_array = what == PY_CONVERTS || what == PY_PRODUCES;
  if (is_array && (s->take == NULL || t->hand_over == NULL)) what = PY_PYTHON;
  uintptr_t word = (uintptr_t)s | (unsigned)what | (at_root ? PY_AT_ROOT : 0u);
  if (py_map_set(&t->pairs, s->kind.type, word) < 0) return NULL;
  if ((py_target*)py_word_object(py_map_get(&targets, to)) != t) {
    if (PyUnicode_Check(to) && PyDict_SetDefault(names, to, to) == NULL) return NULL;
    if (t->key == NULL) t->key = Py_NewRef(to);
    if (py_map_set(&targets, to, (uintptr_t)t) < 0) return NULL;
  }
  return PyBool_FromLong(what == PY_STAYS || what == PY_CONVERTS || what == PY_PRODUCES);
}

PyDoc_STRVAR(source_find_doc,
             "source_find(type, /)\n--\n\n"
             "Return the Source of an exact type, or None.");

/* Owns: takes `found`. Errors: None; NULL with an exception. */
static PyObject* return_found(void* found) {
  PyObject* result = found ? Py_NewRef(found) : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
  if (found) py_map_release(found);
  py_maps_end();
  return result;
}

static PyObject* source_find(PyObject* module, PyObject* type) {
  unsigned bits;
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "expected a type");
  py_maps_begin();
  return return_found(find_source(&sources, (PyTypeObject*)type, &bits));
}

PyDoc_STRVAR(target_find_doc,
             "target_find(to, /)\n--\n\n"
             "Return the Target for the `to` of calls, or None.");

static PyObject* target_find(PyObject* module, PyObject* to) {
  py_maps_begin();
  return return_found(py_target_find(to));
}

PyDoc_STRVAR(
    source_add_doc,
    "source_add(source, like=None, /)\n--\n\n"
    "Add the source of its type. `like`: (target, place or None) for arrays as examples; "
    "place(obj) returns\nwhether the array stays on the host, or None if Python decides. False: "
    "Python decides.");

static PyObject* source_add(PyObject* module, PyObject* args) {
  py_source* s;
  PyObject* like = Py_None;
  if (!PyArg_ParseTuple(args, "O!|O:source_add", py_source_type, &s, &like)) return NULL;
  PyObject* unknown = NULL;
  if (like != Py_None &&
      !atomic_compare_exchange_strong_explicit(&s->like, &unknown, Py_NewRef(like),
                                               memory_order_release, memory_order_relaxed))
    Py_DECREF(like); /* set only once: threads read it without a lock */
  if (py_map_set(&sources, s->kind.type, (uintptr_t)s) < 0) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(routes_clear_doc,
             "routes_clear()\n--\n\n"
             "Remove all sources, targets and pairs, since the adapters have changed.");

static PyObject* routes_clear(PyObject* module, PyObject* unused) {
  py_map_clear(&targets);
  py_map_clear(&sources);
  Py_RETURN_NONE;
}

PyMethodDef py_pair_functions[] = {
    {"pair_add", pair_add, METH_VARARGS, pair_add_doc},
    {"source_find", source_find, METH_O, source_find_doc},
    {"target_find", target_find, METH_O, target_find_doc},
    {"source_add", source_add, METH_VARARGS, source_add_doc},
    {"routes_clear", routes_clear, METH_NOARGS, routes_clear_doc},
    {NULL, NULL, 0, NULL},
};
