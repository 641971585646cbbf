/* The base type of lazy views: a source, and a cache of converted elements. dlx/_views/base.py does
 * everything except caching, and converting elements that have a pair. Functions need the GIL, may
 * run Python, return new references, and NULL with an exception, unless they say
 * otherwise. */

#include "view.h"
#include "convert/pairs.h"

#include <stddef.h>
#include <structmember.h>

typedef struct {
  /* Set once, by slots_init, so readers need no new reference: */
  PyObject_HEAD PyObject* source;
  PyObject *handler, *scope, *path; /* see View */
  PyObject* slots;                  /* {index or key: (element, result)}; set last, cleared first */
  PyObject *fast, *me;              /* see View */
  PyObject* is_tracing;             /* the target adapter's is_tracing, or None */
  /* For containers that an adapter declares; NULL for others: */
  PyObject* fixed;          /* exact type of the keys whose elements never change */
  PyObject* getter;         /* getter(key): the element, faster than source[key] */
  PyObject* unchanged;      /* unchanged(key, element): whether source[key] is still the element */
  _Atomic(Py_ssize_t) size; /* 1 + size of a source that never changes; 0 = unknown; relaxed */
} SlotsObject;

/* View._fast: (fast path, target, scope, its `known`, its `moved`, the container's `identity` or
 * None, a weak reference to the view, whether it is nested, the scope's `owned` or None, the
 * options of the fast path). */
enum { N_FAST = 10 };

static int is_str_or_index(PyObject* key) {
  if (!PyLong_CheckExact(key)) return PyUnicode_CheckExact(key);
  int overflow;
  return PyLong_AsLongLongAndOverflow(key, &overflow) >= 0; /* not from the end */
}

/* Return 1 if results join a graph and must not be cached. Errors: 1 with an exception. */
static inline int is_tracing(const SlotsObject* view) {
  PyObject* ask = view->is_tracing;
  if (ask == NULL || ask == Py_None) return 0; /* NULL: cleared */
  int is_builtin = PyCFunction_CheckExact(ask) && PyCFunction_GET_FLAGS(ask) == METH_NOARGS;
  PyObject* answer = is_builtin ? PyCFunction_GET_FUNCTION(ask)(PyCFunction_GET_SELF(ask), NULL)
                                : PyObject_CallNoArgs(ask);
  Py_XDECREF(answer);
  return answer != Py_False;
}

static PyObject* get_element(PyObject* source, PyObject* key) {
  PyObject* element = NULL;
  if (PyList_CheckExact(source) && PyLong_CheckExact(key)) {
    Py_ssize_t i = PyNumber_AsSsize_t(key, NULL), n = PyList_GET_SIZE(source);
    if (i < 0) i += n;
    if (i >= 0) element = py_list_get(source, i);
  } else if (PyDict_CheckExact(source)) {
    element = py_dict_get(source, key);
  }
  if (element || PyErr_Occurred()) return element;
  return PyObject_GetItem(source, key);
}

/* Return the result of a slot if the source still has the slot's element. The caller holds the
 * slot. Errors: NULL = Python must check; an exception may be set. */
static PyObject* find_result(SlotsObject* view, PyObject* slot, PyObject* key) {
  PyObject *old = PyTuple_GET_ITEM(slot, 0), *result = PyTuple_GET_ITEM(slot, 1);
  if (view->fixed == (PyObject*)Py_TYPE(key)) return Py_NewRef(result);
  int is_same;
  if (view->unchanged) {
    if (!is_str_or_index(key)) return NULL;
    PyObject *unchanged = Py_NewRef(view->unchanged), *args[] = {key, old};
    PyObject* answer = PyObject_Vectorcall(unchanged, args, 2, NULL);
    Py_DECREF(unchanged);
    Py_XDECREF(answer);
    is_same = answer == Py_True;
  } else {
    PyObject* element = get_element(view->source, key);
    Py_XDECREF(element);
    is_same = element == old; /* compared only: the slot holds it */
  }
  return is_same ? Py_NewRef(result) : NULL;
}

PyObject* py_view_name(PyObject* element, PyObject* identity) {
  if (identity == Py_None) return PyLong_FromVoidPtr(element);
  PyObject *answer = PyObject_CallOneArg(identity, element), *name;
  if (answer == NULL) return NULL;
  int overflow;
  long long number =
      PyLong_CheckExact(answer) ? PyLong_AsLongLongAndOverflow(answer, &overflow) : -1;
  if (number >= 0)
    name = PyLong_FromLongLong(~number);
  else if (answer == Py_None)
    name = PyLong_FromVoidPtr(element);
  else
    name = PyTuple_Pack(2, py_name_same_as, answer);
  Py_DECREF(answer);
  return name;
}

/* Return the result of an element that gets a new wrapper on each access, or NULL. */
static PyObject* find_owned(PyObject* fast, PyObject* name) {
  PyObject* owned = PyTuple_GET_ITEM(fast, 8);
  PyObject* ref = PyDict_CheckExact(owned) ? py_dict_get(owned, name) : NULL;
  PyObject* result = ref ? py_weak_get(ref) : NULL;
  Py_XDECREF(ref);
  return result;
}

/* Store a result in its slot, and the slot under a name. Errors: 0, also if another thread did. */
static int store(PyObject* slots, PyObject* fast, PyObject* name, PyObject* key, PyObject* element,
                 PyObject* result) {
  PyObject *slot = PyTuple_Pack(2, element, result), *where = NULL;
  int is_noted = slot && PyDict_SetDefault(slots, key, slot) == slot;
  if (is_noted) {
    int is_root_index = PyTuple_GET_ITEM(fast, 7) == Py_False && PyLong_CheckExact(key);
    where = is_root_index ? Py_NewRef(key) : PyTuple_Pack(2, PyTuple_GET_ITEM(fast, 6), key);
    is_noted = where && PyDict_SetItem(PyTuple_GET_ITEM(fast, 3), name, where) == 0;
  }
  Py_XDECREF(slot);
  Py_XDECREF(where);
  return is_noted;
}

static PyObject* get_fast(SlotsObject* view) {
  PyObject* fast;
  PY_LOCKED(view)
  fast = view->fast == Py_None ? NULL : Py_XNewRef(view->fast);
  PY_UNLOCKED()
  return fast;
}

/* Convert an element without a slot by its pair, and store it. Errors: NULL = Python must do it:
 * the element is already known, has no pair or fails, or another thread stored it. */
static PyObject* convert_new(PyObject* slots, PyObject* fast, PyObject* key, PyObject* element) {
  if (!PyTuple_CheckExact(fast) || PyTuple_GET_SIZE(fast) != N_FAST) return NULL;
  if (!((PyDict_GET_SIZE(slots) + 1) & 255)) return NULL; /* removes old slots */
  PyObject *callable = PyTuple_GET_ITEM(fast, 0), *to = PyTuple_GET_ITEM(fast, 1);
  PyObject* back = PyObject_GetAttr(PyTuple_GET_ITEM(fast, 2), py_name_back);
  Py_XDECREF(back);
  if (back != Py_None) return NULL;
  PyObject *name = py_view_name(element, PyTuple_GET_ITEM(fast, 5)), *result = NULL;
  PyObject *known = PyTuple_GET_ITEM(fast, 3), *moved = PyTuple_GET_ITEM(fast, 4);
  int is_known = name ? PyDict_Contains(known, name) : -1;
  if (is_known == 0 && PyDict_GET_SIZE(moved)) is_known = PyDict_Contains(moved, name);
  if (is_known == 0) result = find_owned(fast, name);
  py_call call = {.function = (FastPathObject*)callable,
                  .to = to,
                  .options = (unsigned)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(fast, 9))};
  py_pair pair;
  py_maps_begin();
  if (is_known == 0 && result == NULL && !PyErr_Occurred() &&
      py_pair_learn(call.function, Py_TYPE(element), to, &pair)) {
    if (pair.what == PY_CONVERTS && !pair.at_root) result = py_convert_array(&call, &pair, element);
    py_pair_release(&pair);
  }
  py_maps_end();
  if (result && !store(slots, fast, name, key, element, result)) Py_CLEAR(result);
  Py_XDECREF(name);
  return result;
}

PY_DOC(
    convert_slot,
    "Convert and cache an element of a lazy view by View._fast; return None if Python must do it.");
static PyObject* convert_slot(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("convert_slot", nargs, 4, 4)) return NULL;
  if (!PyDict_CheckExact(args[0])) return PyErr_Format(PyExc_TypeError, "the slots are a dict");
  PyObject* result = convert_new(args[0], args[1], args[2], args[3]);
  if (result || PyErr_Occurred()) return result;
  Py_RETURN_NONE;
}

PyMethodDef py_view_functions[] = {PY_FASTCALL(convert_slot), PY_END};

static PyObject* convert_at(SlotsObject* view, PyObject* key) {
  PyObject *fast = is_str_or_index(key) ? get_fast(view) : NULL, *element = NULL;
  if (fast == NULL) return NULL;
  if (view->getter) {
    PyObject* getter = Py_NewRef(view->getter);
    element = PyObject_CallOneArg(getter, key);
    Py_DECREF(getter);
  } else if (PyList_CheckExact(view->source) || PyTuple_CheckExact(view->source) ||
             PyDict_CheckExact(view->source)) {
    element = get_element(view->source, key);
  } /* reading other sources twice may have side effects */
  PyObject* result = element ? convert_new(view->slots, fast, key, element) : NULL;
  Py_XDECREF(element);
  Py_DECREF(fast);
  return result;
}

/* self[key]: return the cached result if the source still has the same element; otherwise convert
 * it here, or by self._convert_at(key). */
static PyObject* slots_get(PyObject* self, PyObject* key) {
  SlotsObject* view = (SlotsObject*)self;
  if (!PySlice_Check(key) && view->slots && !is_tracing(view)) {
    PyObject *slot = py_dict_get(view->slots, key), *result = NULL;
    if (slot && PyTuple_CheckExact(slot) && PyTuple_GET_SIZE(slot) == 2) {
      result = find_result(view, slot, key);
    } else if (slot == NULL && !PyErr_Occurred()) {
      result = convert_at(view, key);
      if (result == NULL && py_error_forget() < 0) return NULL;
    }
    Py_XDECREF(slot);
    if (result) return result;
    if (PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_LookupError) && !PyErr_ExceptionMatches(PyExc_TypeError))
        return NULL;
      PyErr_Clear(); /* handled or raised again below */
    }
  }
  if (PyErr_Occurred() && py_error_forget() < 0) return NULL; /* _convert_at raises it again */
  return PyObject_CallMethodOneArg(self, py_name_convert_at, key);
}

static PyObject* slots_item(PyObject* self, Py_ssize_t i) {
  PyObject* key = PyLong_FromSsize_t(i);
  PyObject* result = key ? slots_get(self, key) : NULL;
  Py_XDECREF(key);
  return result;
}

static Py_ssize_t slots_size(PyObject* self) {
  SlotsObject* view = (SlotsObject*)self;
  Py_ssize_t size = atomic_load_explicit(&view->size, memory_order_relaxed) - 1;
  if (size >= 0) return size;
  if (view->slots == NULL) {
    PyErr_SetString(PyExc_ValueError, "the view has no source");
    return -1;
  }
  size = PyObject_Size(view->source);
  if (view->fixed && size >= 0) atomic_store_explicit(&view->size, size + 1, memory_order_relaxed);
  return size;
}

/* ---- iteration ------------------------------------------------------------------------------- */

/* Iterator over the results of a sequence view. Elements of lists, tuples and `getter`s are read by
 * index, since they may be cached; others come from the source's iterator. */
typedef struct {
  PyObject_HEAD SlotsObject* view;
  PyObject* elements;
  atomic_flag is_advancing; /* acquire, release: guards `next`, as a lock */
  Py_ssize_t next, size;    /* size of a source that never changes, else -1 */
} ResultsObject;

static PyTypeObject results_type;

static PyObject* touch_element(SlotsObject* view, PyObject* key, PyObject* element) {
  int keeps = !is_tracing(view);
  PyObject* slot = keeps ? py_dict_get(view->slots, key) : NULL;
  PyObject *fast = !keeps || slot || PyErr_Occurred() ? NULL : get_fast(view), *result = NULL;
  if (slot && PyTuple_CheckExact(slot) && PyTuple_GET_SIZE(slot) == 2 &&
      PyTuple_GET_ITEM(slot, 0) == element)
    result = Py_NewRef(PyTuple_GET_ITEM(slot, 1));
  if (fast) result = convert_new(view->slots, fast, key, element);
  Py_XDECREF(slot);
  Py_XDECREF(fast);
  if (result) return result;
  if (py_error_forget() < 0) return NULL; /* raised again, with its path, by _touch */
  return PyObject_CallMethodObjArgs((PyObject*)view, py_name_touch, key, element, NULL);
}

/* Return the source iterator's next element, and its number. A second thread gets an error, as with
 * generators: it would mix up the numbers, and no lock can be held while Python runs. Errors: NULL,
 * at the end without an exception. */
static PyObject* advance(ResultsObject* self, Py_ssize_t* number) {
  if (atomic_flag_test_and_set_explicit(&self->is_advancing, memory_order_acquire)) {
    PyErr_SetString(PyExc_ValueError,
                    "another thread is already using this iterator over a view; "
                    "give each thread its own iterator");
    return NULL;
  }
  PyObject* element = PyIter_Next(self->elements);
  if (element) *number = self->next++;
  atomic_flag_clear_explicit(&self->is_advancing, memory_order_release);
  return element;
}

static PyObject* results_next(PyObject* object) {
  ResultsObject* self = (ResultsObject*)object;
  SlotsObject* view;
  PyObject *element = NULL, *key = NULL, *result = NULL;
  Py_ssize_t next = 0, size;
  PY_LOCKED(object)
  view = (SlotsObject*)Py_XNewRef((PyObject*)self->view);
  PY_UNLOCKED()
  if (view == NULL) return NULL;
  int is_more = view->slots != NULL; /* the collector may have cleared it */
  if (is_more && self->elements) {
    is_more = (element = advance(self, &next)) != NULL;
  } else if (is_more) {
    size = self->size < 0 ? PyObject_Size(view->source) : self->size;
    PY_LOCKED(object)
    is_more = self->next < size;
    if (is_more) next = self->next++;
    PY_UNLOCKED()
    if (is_more && PyList_CheckExact(view->source)) /* another thread may shorten it */
      is_more = (element = py_list_get(view->source, next)) != NULL;
  }
  if (is_more && (key = PyLong_FromSsize_t(next)))
    result = element ? touch_element(view, key, element) : slots_get((PyObject*)view, key);
  if (!is_more && !PyErr_Occurred()) {
    SlotsObject* last;
    PY_LOCKED(object)
    last = self->view;
    self->view = NULL;
    PY_UNLOCKED()
    Py_XDECREF((PyObject*)last);
  }
  Py_XDECREF(key);
  Py_XDECREF(element);
  Py_DECREF((PyObject*)view);
  return result;
}

static int results_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(((ResultsObject*)object)->view);
  Py_VISIT(((ResultsObject*)object)->elements);
  return 0;
}

static void results_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  Py_XDECREF(((ResultsObject*)object)->view);
  Py_XDECREF(((ResultsObject*)object)->elements);
  PyObject_GC_Del(object);
}

static PyTypeObject results_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dlx._core.native.Results",
    .tp_basicsize = sizeof(ResultsObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = results_dealloc,
    .tp_traverse = results_traverse,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = results_next,
};

PyDoc_STRVAR(slots_results_doc,
             "_results()\n--\n\n"
             "Return an iterator over the results of a sequence.");
static PyObject* slots_results(PyObject* object, PyObject* unused) {
  SlotsObject* view = (SlotsObject*)object;
  if (view->slots == NULL) return PyErr_Format(PyExc_ValueError, "the view has no source");
  PyObject* elements = NULL;
  Py_ssize_t size = -1;
  if (view->getter == NULL && !PyList_CheckExact(view->source) &&
      !PyTuple_CheckExact(view->source)) {
    if ((elements = PyObject_GetIter(view->source)) == NULL) return NULL;
  } else if (view->fixed && (size = slots_size(object)) < 0) {
    return NULL;
  }
  ResultsObject* self = (ResultsObject*)results_type.tp_alloc(&results_type, 0);
  if (self == NULL) {
    Py_XDECREF(elements);
    return NULL;
  }
  self->view = (SlotsObject*)Py_NewRef(object);
  self->elements = elements;
  self->size = size;
  return (PyObject*)self;
}

/* iter(self): the results of a sequence with a getter; otherwise View._iterate. */
static PyObject* slots_iter(PyObject* object) {
  SlotsObject* view = (SlotsObject*)object;
  if (view->getter == NULL || view->getter == Py_None)
    return PyObject_CallMethodNoArgs(object, py_name_iterate);
  PyObject* begun = PyObject_CallMethodNoArgs(object, py_name_begin);
  Py_XDECREF(begun);
  return begun ? slots_results(object, NULL) : NULL;
}

/* ---- the type -------------------------------------------------------------------------------- */

static int slots_init(PyObject* object, PyObject* args, PyObject* keywords) {
  SlotsObject* self = (SlotsObject*)object;
  PyObject *source, *handler, *scope, *path;
  if (keywords && PyDict_GET_SIZE(keywords))
    return PyErr_SetString(PyExc_TypeError, "a view takes no keyword arguments"), -1;
  if (!PyArg_UnpackTuple(args, "Slots", 4, 4, &source, &handler, &scope, &path)) return -1;
  if (self->slots) return PyErr_SetString(PyExc_TypeError, "a view is initialised only once"), -1;
  PyObject* slots = PyDict_New();
  if (slots == NULL) return -1;
  self->source = Py_NewRef(source);
  self->handler = Py_NewRef(handler);
  self->scope = Py_NewRef(scope);
  self->path = Py_NewRef(path);
  self->fast = Py_NewRef(Py_None);
  self->me = Py_NewRef(Py_None);
  self->is_tracing = Py_NewRef(Py_None);
  self->slots = slots;
  return 0;
}

/* All references of a view. `_slots` is first, so that it is cleared first. CPython inlines reads
 * and writes of T_OBJECT_EX, but not of T_OBJECT. */
static PyMemberDef slots_members[] = {
    {"_slots", T_OBJECT_EX, offsetof(SlotsObject, slots), READONLY, NULL},
    {"_source", T_OBJECT_EX, offsetof(SlotsObject, source), READONLY, NULL},
    {"_fast", T_OBJECT_EX, offsetof(SlotsObject, fast), 0, NULL},
    {"_handler", T_OBJECT_EX, offsetof(SlotsObject, handler), READONLY, NULL},
    {"_scope", T_OBJECT_EX, offsetof(SlotsObject, scope), READONLY, NULL},
    {"_path", T_OBJECT_EX, offsetof(SlotsObject, path), READONLY, NULL},
    {"_me", T_OBJECT_EX, offsetof(SlotsObject, me), 0, NULL},
    {"_is_tracing", T_OBJECT_EX, offsetof(SlotsObject, is_tracing), 0, NULL},
    {"_fixed", T_OBJECT_EX, offsetof(SlotsObject, fixed), 0, NULL},
    {"_getter", T_OBJECT_EX, offsetof(SlotsObject, getter), 0, NULL},
    {"_unchanged", T_OBJECT_EX, offsetof(SlotsObject, unchanged), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject** field(PyObject* view, const PyMemberDef* member) {
  return (PyObject**)((char*)view + member->offset);
}

static int slots_traverse(PyObject* object, visitproc visit, void* arg) {
  for (const PyMemberDef* each = slots_members; each->name; each++) Py_VISIT(*field(object, each));
  return 0;
}

static int slots_clear(PyObject* object) {
  for (const PyMemberDef* each = slots_members; each->name; each++) Py_CLEAR(*field(object, each));
  return 0;
}

static void slots_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  slots_clear(object);
  Py_TYPE(object)->tp_free(object);
}

static PyMethodDef slots_methods[] = {
    {"_results", slots_results, METH_NOARGS, slots_results_doc},
    PY_END,
};

PyDoc_STRVAR(slots_doc,
             "Slots(source, handler, scope, path, /)\n--\n\n"
             "A source and its converted elements by key; see dlx._views.base.View.");

static PyMappingMethods slots_mapping = {.mp_length = slots_size, .mp_subscript = slots_get};
static PySequenceMethods slots_sequence = {.sq_length = slots_size, .sq_item = slots_item};

static PyTypeObject slots_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dlx._core.native.Slots",
    .tp_basicsize = sizeof(SlotsObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_init = slots_init,
    .tp_dealloc = slots_dealloc,
    .tp_traverse = slots_traverse,
    .tp_clear = slots_clear,
    .tp_iter = slots_iter,
    .tp_as_mapping = &slots_mapping,
    .tp_as_sequence = &slots_sequence,
    .tp_members = slots_members,
    .tp_methods = slots_methods,
    .tp_doc = slots_doc,
};

int py_view_init(PyObject* module) {
  slots_type.tp_new = PyBaseObject_Type.tp_new; /* rejects abstract classes */
  if (PyType_Ready(&results_type) < 0 || PyType_Ready(&slots_type) < 0) return -1;
  return PyModule_AddObjectRef(module, "Slots", (PyObject*)&slots_type);
}
