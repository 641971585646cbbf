/* Calls of functions that are decorated by dlx.using: arguments that share memory are converted,
 * the function is called, and its result is converted, without Python's complete way (dlx/_using).
 * That is taken for a copy of an argument, a device, an unusual container and whatever else is
 * rare.
 *
 * Trees are converted by the walker. It asks here what each object is, and notes here what the
 * function gets for each of the caller's arrays and containers: one that is returned comes back as
 * the caller's own object. */

#include "python/route.h"

/* A call's plan, see dlx/_using/plan.py: */
enum {
  FUNCTION,  /* the function that is decorated */
  FAST_PATH, /* what routes are learnt by */
  TO,        /* its target */
  KINDS,     /* {type: kind} */
  LEARN,     /* learn(type): a type's kind, which it adds */
  SKIPPED,   /* how many arguments are passed as they are, as `self` is */
  RESULTS,   /* the target of results: a string; None = that of the caller's arrays */
  READONLY,  /* the number of the option: 0 = "copy", 1 = "error", 2 = "share" */
  DETACH,    /* whether results are detached */
  VIEWS, /* {target: view(container, owned)}: makes lazy views of containers; None = it does not */
  MAKE_VIEW, /* make_view(target, options, is_committed): that function, which it adds */
  IDENTITY,  /* identity(array): equal for all wrappers of one array of the function's; or None */
  FINISH,    /* finish(args, options, pairs, result): converts a result in Python */
  FAILED,    /* failed(error, args, options): says where an argument is that failed */
  N_PLAN
};

/* A kind is one of: None = passes through; Ellipsis = does so, unless the object's own attributes
 * make it an array; False = left to Python; (flatten, unflatten, is_mutable), a container's rule;
 * (flatten, target), a container that becomes a list or dict for any other target; and for an
 * array: */
enum {
  ADAPTER,
  IS_INSIDE, /* whether it is of the function's framework */
  RESULT_TO, /* what results of a caller with such arrays become; None = they stay; NotImplemented =
                Python decides */
  IS_TRACKED,   /* is_tracked(array): whether a graph records it; None = that cannot matter */
  IS_COMMITTED, /* is_committed(array): whether it stays on its device; None = all do */
  N_ARRAY
};
enum { N_CHILDREN = 2, N_RULE = 3 };

typedef struct {
  PyObject *passed, *own; /* strong: what the function got, and the caller's object */
  int is_container;
} pair;

enum { FEW = 8 };

typedef struct {
  py_visitor visitor;              /* first: what the walker is given */
  PyObject *plan, *args, *options; /* borrowed; `options` = NULL for none */
  PyObject* to;    /* of results; borrowed from the plan or a kind that it holds, or NULL */
  PyObject* names; /* {identity: what was passed}; strong, or NULL until it is needed */
  pair *pairs, few[FEW];
  Py_ssize_t n, room;
  Py_ssize_t* slots; /* hash table of `passed`: 1 + number; NULL until it is needed */
  size_t mask;
  int is_changed;     /* some of what the function got is not the caller's own */
  int is_uncommitted; /* no array of the caller's is committed to its device */
} call;

static PyObject *array_interface_name, *cuda_interface_name, *dict_name; /* interned */

static PyObject* planned(const call* c, int which) {
  return PyTuple_GET_ITEM(c->plan, which);
}

/* ---- what an object is ----------------------------------------------------------------------- */

/* Owns: new. GIL: needed; may run Python. Errors: NULL with an exception. */
static PyObject* kind_of(const call* c, PyObject* obj) {
  PyTypeObject *type = Py_TYPE(obj), *meta = Py_TYPE(type);
  if (meta->tp_hash == PyType_Type.tp_hash && meta->tp_richcompare == PyType_Type.tp_richcompare) {
    PyObject* known = py_dict_get(planned(c, KINDS), (PyObject*)type);
    if (known || PyErr_Occurred()) return known;
  }
  return PyObject_CallOneArg(planned(c, LEARN), (PyObject*)type);
}

static int is_kind(PyObject* kind, Py_ssize_t size) {
  return PyTuple_CheckExact(kind) && PyTuple_GET_SIZE(kind) == size;
}

/* Whether an object has an array interface of its own, which is not asked. Errors: 1: Python looks;
 * an exception may be set. */
static int offers_interface(PyObject* obj) {
  PyObject* own = NULL;
  if (py_optional(obj, dict_name, &own) < 0) return py_error_forget(), 1;
  int offers = 0;
  if (own && PyDict_Check(own))
    offers =
        PyDict_Contains(own, array_interface_name) || PyDict_Contains(own, cuda_interface_name);
  Py_XDECREF(own);
  return offers;
}

/* What the walker does with an object by its kind, of which *found is the rule. */
static int action_of(PyObject* kind, PyObject* obj, PyObject** found) {
  if (kind == Py_None) return PY_PASSES;
  if (kind == Py_Ellipsis && !offers_interface(obj)) return PY_PASSES;
  if (kind == Py_Ellipsis) return PyErr_Occurred() ? PY_FAILS : PY_LEAVE;
  if (is_kind(kind, N_ARRAY)) return PY_CONVERTS;
  if (!is_kind(kind, N_RULE)) return PY_LEAVE;
  *found = Py_NewRef(kind);
  return PY_ENTERS;
}

/* ---- what was passed ------------------------------------------------------------------------- */

/* Owns: keeps references. Errors: -1 with MemoryError. */
static int note(py_visitor* visitor, PyObject* own, PyObject* passed, int is_container) {
  call* c = (call*)visitor;
  if (c->n == c->room) {
    Py_ssize_t room = 4 * c->room;
    pair* wider = PyMem_Malloc((size_t)room * sizeof *wider);
    if (wider == NULL) return PyErr_NoMemory(), -1;
    memcpy(wider, c->pairs, (size_t)c->n * sizeof *wider);
    if (c->pairs != c->few) PyMem_Free(c->pairs);
    c->pairs = wider;
    c->room = room;
  }
  c->pairs[c->n++] = (pair){Py_NewRef(passed), Py_NewRef(own), is_container};
  c->is_changed |= passed != own;
  return 0;
}

static size_t place_of(PyObject* obj) {
  return (size_t)(((uintptr_t)obj >> 4) * 0x9E3779B97F4A7C15u >> 20);
}

/* Errors: -1 with MemoryError. */
static int make_table(call* c) {
  size_t room = 4 * FEW;
  while (room < 2 * (size_t)c->n) room *= 2;
  if ((c->slots = PyMem_Calloc(room, sizeof *c->slots)) == NULL) return PyErr_NoMemory(), -1;
  c->mask = room - 1;
  for (Py_ssize_t i = c->n; i-- > 0;) {
    size_t at = place_of(c->pairs[i].passed);
    while (c->slots[at & c->mask]) at++;
    c->slots[at & c->mask] = i + 1;
  }
  return 0;
}

/* The pair of an object that was passed, or NULL. Errors: NULL with MemoryError. */
static pair* find(call* c, PyObject* passed) {
  if (c->n <= FEW) {
    for (Py_ssize_t i = 0; i < c->n; i++) {
      if (c->pairs[i].passed == passed) return &c->pairs[i];
    }
    return NULL;
  }
  if (c->slots == NULL && make_table(c) < 0) return NULL;
  for (size_t at = place_of(passed);; at++) {
    Py_ssize_t slot = c->slots[at & c->mask];
    if (slot == 0 || c->pairs[slot - 1].passed == passed) return slot ? &c->pairs[slot - 1] : NULL;
  }
}

/* The object that stands for an array of the function's framework, whose wrappers may be made anew:
 * the one that was passed, or that was `first` met. Owns: new. GIL: needed; may run Python.
 * Errors: NULL with an exception. */
static PyObject* canonical(call* c, PyObject* array, int is_first) {
  PyObject *identity = planned(c, IDENTITY), *found = NULL;
  if (identity == Py_None) return Py_NewRef(array);
  if (c->names == NULL) {
    if ((c->names = PyDict_New()) == NULL) return NULL;
    for (Py_ssize_t i = 0; i < c->n; i++) {
      PyObject* passed = c->pairs[i].passed;
      PyObject* name =
          c->pairs[i].is_container ? Py_NewRef(Py_None) : PyObject_CallOneArg(identity, passed);
      int failed = name == NULL || (name != Py_None && PyDict_SetItem(c->names, name, passed) < 0);
      Py_XDECREF(name);
      if (failed) return NULL;
    }
  }
  PyObject* name = PyObject_CallOneArg(identity, array);
  if (name == NULL) return NULL;
  if (name == Py_None)
    found = array;
  else if (is_first)
    found = PyDict_SetDefault(c->names, name, array);
  else
    found = PyDict_GetItemWithError(c->names, name);
  Py_DECREF(name);
  return PyErr_Occurred() ? NULL : Py_NewRef(found ? found : array);
}

/* ---- in -------------------------------------------------------------------------------------- */

static int look_at_argument(py_visitor* visitor, PyObject* obj, PyObject** found) {
  PyObject* kind = kind_of((call*)visitor, obj);
  if (kind == NULL) return PY_FAILS;
  int action = action_of(kind, obj, found);
  Py_DECREF(kind);
  return action;
}

static int is_plain(PyObject* obj) {
  return py_tree_passes(Py_TYPE(obj));
}

/* Whether a tuple is plain data. */
static int is_plain_tuple(PyObject* obj) {
  Py_ssize_t i = 0, n = PyTuple_Check(obj) ? PyTuple_GET_SIZE(obj) : -1;
  while (i < n && is_plain(PyTuple_GET_ITEM(obj, i))) i++;
  return i == n;
}

/* Whether an argument passes as it is. Errors: PY_LEAVE, or PY_FAILS with an exception. */
static int look_at_value(call* c, PyObject* value, int* is_array) {
  if (is_plain(value)) return PY_PASSES;
  if (PyTuple_CheckExact(value) && is_plain_tuple(value)) return PY_PASSES;
  if (py_tree_takes(Py_TYPE(value))) return PY_ENTERS;
  PyObject *kind = kind_of(c, value), *rule = NULL;
  if (kind == NULL) return PY_FAILS;
  int action = action_of(kind, value, &rule);
  if (action == PY_ENTERS && PyTuple_GET_ITEM(rule, 2) != Py_True && is_plain_tuple(value))
    action = PY_PASSES;
  Py_XDECREF(rule);
  *is_array = action == PY_CONVERTS;
  if (*is_array && PyTuple_GET_ITEM(kind, IS_INSIDE) == Py_True) action = PY_PASSES;
  Py_DECREF(kind);
  return action;
}

/* All arguments but those that are skipped. Owns: new. Errors: NULL with an exception. */
static PyObject* values_of(const call* c) {
  Py_ssize_t skipped = PyLong_AsSsize_t(planned(c, SKIPPED)), n = PyTuple_GET_SIZE(c->args), i = 0;
  if (skipped > n) skipped = n;
  if (c->options == NULL) return PyTuple_GetSlice(c->args, skipped, n);
  PyObject *values = PyTuple_New(n - skipped + PyDict_GET_SIZE(c->options)), *name, *value;
  Py_ssize_t position = 0;
  for (; values && i < n - skipped; i++)
    PyTuple_SET_ITEM(values, i, Py_NewRef(PyTuple_GET_ITEM(c->args, skipped + i)));
  while (values && PyDict_Next(c->options, &position, &name, &value))
    PyTuple_SET_ITEM(values, i++, Py_NewRef(value));
  return values;
}

/* Find the target of results: that of the one framework that arrays of the caller's are of. Errors:
 * PY_LEAVE, or PY_FAILS with an exception. */
static int find_target(call* c) {
  PyObject *caller = NULL, *to = Py_None, *results = planned(c, RESULTS);
  int action = PY_PASSES, is_one = 1, can_stay = 0, has_committed = 0;
  for (Py_ssize_t i = 0; i < c->n && action == PY_PASSES; i++) {
    if (c->pairs[i].is_container) continue;
    PyObject *own = c->pairs[i].own, *kind = kind_of(c, own), *answer = NULL;
    if (kind == NULL) return PY_FAILS;
    if (!is_kind(kind, N_ARRAY)) {
      action = PY_LEAVE;
    } else if (PyTuple_GET_ITEM(kind, IS_INSIDE) != Py_True) {
      is_one &= caller == NULL || caller == PyTuple_GET_ITEM(kind, ADAPTER);
      caller = PyTuple_GET_ITEM(kind, ADAPTER); /* the plan holds both */
      to = PyTuple_GET_ITEM(kind, RESULT_TO);
      PyObject* is_committed = PyTuple_GET_ITEM(kind, IS_COMMITTED);
      if (is_committed != Py_None && !has_committed) {
        if ((answer = PyObject_CallOneArg(is_committed, own)) == NULL) action = PY_FAILS;
        can_stay = 1;
        has_committed = answer == Py_True;
      }
    }
    Py_XDECREF(answer);
    Py_DECREF(kind);
  }
  if (results != Py_None) to = results;
  if (results == Py_None && !is_one) to = Py_None;
  if (action == PY_PASSES && to == Py_NotImplemented) action = PY_LEAVE;
  c->to = to == Py_None ? NULL : to;
  c->is_uncommitted = results == Py_None && can_stay && !has_committed;
  return action;
}

/* Leave arrays to Python that a graph records. Errors: PY_FAILS with an exception. */
static int look_for_graphs(const call* c) {
  int action = PY_PASSES;
  for (Py_ssize_t i = 0; i < c->n && action == PY_PASSES; i++) {
    PyObject* kind = c->pairs[i].is_container ? NULL : kind_of(c, c->pairs[i].own);
    if (kind == NULL && PyErr_Occurred()) return PY_FAILS;
    if (kind && PyTuple_GET_ITEM(kind, IS_TRACKED) != Py_None &&
        (c->to || PyTuple_GET_ITEM(kind, IS_INSIDE) != Py_True)) {
      PyObject* answer = PyObject_CallOneArg(PyTuple_GET_ITEM(kind, IS_TRACKED), c->pairs[i].own);
      action = answer == NULL ? PY_FAILS : answer == Py_False ? PY_PASSES : PY_LEAVE;
      Py_XDECREF(answer);
    }
    Py_XDECREF(kind);
  }
  return action;
}

/* Say in the exception where the argument is that failed, or that it was the result. */
static void say_where(const call* c, int is_result) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
  py_pending pending = py_pending_save();
  PyErr_NormalizeException(&pending.type, &pending.value, &pending.traceback);
  PyObject* args[] = {pending.value, is_result ? Py_None : c->args,
                      c->options ? c->options : Py_None};
  PyObject* done = PyObject_Vectorcall(planned(c, FAILED), args, 3, NULL);
  Py_XDECREF(done);
  py_pending_restore(pending);
}

static PyObject* walk(call* c, PyObject* root, PyObject* to, unsigned options) {
  py_routes_begin();
  PyObject* made = py_tree_visit(planned(c, FAST_PATH), root, to, options, &c->visitor);
  py_routes_end();
  return made;
}

/* What the function gets, where not what its caller passed: *values, in the order of values_of.
 * Owns: the caller owns *values, or NULL. GIL: needed; may run Python. Errors: PY_LEAVE, or
 * PY_FAILS with an exception. */
static int convert_arguments(call* c, PyObject** values) {
  Py_ssize_t skipped = PyLong_AsSsize_t(planned(c, SKIPPED)), i = 0, n;
  int action = PY_PASSES, converts = planned(c, RESULTS) != Py_None, is_array = 0;
  for (; i < skipped && i < PyTuple_GET_SIZE(c->args); i++) {
    if (py_tree_takes(Py_TYPE(PyTuple_GET_ITEM(c->args, i)))) return PY_LEAVE;
  }
  PyObject* all = values_of(c);
  if (all == NULL) return PY_FAILS;
  for (i = 0, n = PyTuple_GET_SIZE(all); i < n && action != PY_LEAVE && action != PY_FAILS; i++) {
    int found = look_at_value(c, PyTuple_GET_ITEM(all, i), &is_array);
    if (found != PY_PASSES) action = found;
  }
  if (action == PY_LEAVE || action == PY_FAILS || (action == PY_PASSES && !converts))
    return Py_DECREF(all), action;
  /* An array of the function's framework that stands alone needs no conversion, but comes back. */
  unsigned options = DLX_SHARES | DLX_HOST_ONLY;
  *values = walk(c, all, planned(c, TO), options);
  Py_DECREF(all);
  if (*values == NULL) {
    if (!PyErr_Occurred()) return PY_LEAVE;
    say_where(c, 0);
    return PY_FAILS;
  }
  action = find_target(c);
  if (action == PY_PASSES) action = look_for_graphs(c);
  for (i = 0; i < skipped && i < PyTuple_GET_SIZE(c->args) && action == PY_PASSES; i++) {
    PyObject* kept = PyTuple_GET_ITEM(c->args, i);
    if (note(&c->visitor, kept, kept, 0) < 0) action = PY_FAILS;
  }
  return action;
}

/* Call the function. Owns: the result is new. Errors: those of the function. */
static PyObject* call_function(const call* c, PyObject* values) {
  if (values == NULL) return PyObject_Call(planned(c, FUNCTION), c->args, c->options);
  Py_ssize_t n = PyTuple_GET_SIZE(c->args), skipped = PyLong_AsSsize_t(planned(c, SKIPPED)), i = 0;
  if (skipped > n) skipped = n;
  if (c->options == NULL && skipped == 0) return PyObject_Call(planned(c, FUNCTION), values, NULL);
  PyObject *args = PyTuple_New(n), *options = c->options ? PyDict_New() : NULL, *name, *value;
  for (; args && i < n; i++)
    PyTuple_SET_ITEM(args, i,
                     Py_NewRef(i < skipped ? PyTuple_GET_ITEM(c->args, i)
                                           : PyTuple_GET_ITEM(values, i - skipped)));
  Py_ssize_t position = 0;
  while (options && PyDict_Next(c->options, &position, &name, &value))
    if (PyDict_SetItem(options, name, PyTuple_GET_ITEM(values, i++ - skipped)) < 0) break;
  PyObject* result = PyErr_Occurred() ? NULL : PyObject_Call(planned(c, FUNCTION), args, options);
  Py_XDECREF(args);
  Py_XDECREF(options);
  return result;
}

/* ---- out ------------------------------------------------------------------------------------- */

static PyObject* own_container(py_visitor* visitor, PyObject* passed) {
  const pair* p = find((call*)visitor, passed);
  return p && p->is_container ? p->own : NULL;
}

static int look_at_result(py_visitor* visitor, PyObject* obj, PyObject** found) {
  call* c = (call*)visitor;
  const pair* p = find(c, obj);
  PyObject* kind = p ? NULL : kind_of(c, obj);
  if (p == NULL && kind == NULL) return PY_FAILS;
  int action = p ? PY_LEAVE : action_of(kind, obj, found);
  if (action == PY_CONVERTS && PyTuple_GET_ITEM(kind, IS_INSIDE) == Py_True) {
    PyObject* known = canonical(c, obj, 0);
    if (known == NULL) return Py_DECREF(kind), PY_FAILS;
    if (known != obj) p = find(c, known);
    Py_DECREF(known);
  }
  Py_XDECREF(kind);
  if (p == NULL) return action == PY_CONVERTS && c->to == NULL ? PY_PASSES : action;
  if (p->is_container || planned(c, RESULTS) != Py_None) return PY_LEAVE;
  *found = Py_NewRef(p->own);
  return PY_KNOWN;
}

/* The children of a container of the function's framework, in a list or dict. Owns: new. Errors:
 * NULL with an exception, or without one: Python is asked. */
static PyObject* plain_container(call* c, PyObject* kind, PyObject* result) {
  int same = c->to ? PyObject_RichCompareBool(c->to, PyTuple_GET_ITEM(kind, 1), Py_EQ) : 1;
  PyObject *parts = same ? NULL : PyObject_CallOneArg(PyTuple_GET_ITEM(kind, 0), result),
           *made = NULL;
  if (parts == NULL || !PyTuple_CheckExact(parts) || PyTuple_GET_SIZE(parts) != 2 ||
      !PyList_CheckExact(PyTuple_GET_ITEM(parts, 1)))
    return Py_XDECREF(parts), py_error_forget(), NULL;
  PyObject *keys = PyTuple_GET_ITEM(parts, 0), *children = PyTuple_GET_ITEM(parts, 1);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(children); i++) {
    PyObject* child = PyList_GET_ITEM(children, i);
    PyObject* known = is_plain(child) ? Py_NewRef(child) : canonical(c, child, 1);
    if (known == NULL || PyList_SetItem(children, i, known) < 0) return Py_DECREF(parts), NULL;
  }
  if (keys == Py_None) {
    made = Py_NewRef(children);
  } else if (PyList_CheckExact(keys) && PyList_GET_SIZE(keys) == PyList_GET_SIZE(children) &&
             (made = PyDict_New())) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
      if (PyDict_SetItem(made, PyList_GET_ITEM(keys, i), PyList_GET_ITEM(children, i)) == 0)
        continue;
      Py_CLEAR(made);
      break;
    }
  }
  Py_DECREF(parts);
  return made;
}

/* What is of the target already stays as it is, with its graph. */
static unsigned result_options(const call* c) {
  if (c->is_uncommitted) return DLX_SHARES | DLX_HOST_ONLY; /* a copy would be committed */
  long readonly = PyLong_AsLong(planned(c, READONLY));
  unsigned options = readonly == 1 ? DLX_KEEPS_READONLY : readonly ? DLX_UNMARKS : 0;
  if (planned(c, DETACH) == Py_True) options |= DLX_DETACHES;
  if (planned(c, RESULTS) == Py_None) options |= DLX_HOST_ONLY | DLX_NAMES_DEVICE;
  return options;
}

/* Convert a result that is an array, or a container. Owns, GIL, Errors: as convert_result. */
static PyObject* walk_result(call* c, PyObject* result) {
  PyObject* root = result ? PyTuple_Pack(1, result) : NULL;
  c->visitor = (py_visitor){look_at_result, NULL, own_container};
  PyObject* made = root ? walk(c, root, c->to ? c->to : planned(c, TO), result_options(c)) : NULL;
  if (made == NULL && PyErr_Occurred()) say_where(c, 1);
  PyObject* converted = made ? Py_NewRef(PyTuple_GET_ITEM(made, 0)) : NULL;
  Py_XDECREF(root);
  Py_XDECREF(made);
  return converted;
}

/* A lazy view of a container of the function's framework, which is given {name: the caller's own
 * array, weakly}. Owns: new. Errors: NULL with an exception, or without one: Python does it. */
static PyObject* view_result(call* c, PyObject* result) {
  PyObject *identity = planned(c, IDENTITY), *owned = PyDict_New(), *view = NULL;
  for (Py_ssize_t i = 0; owned && identity != Py_None && i < c->n && !PyErr_Occurred(); i++) {
    const pair* p = &c->pairs[i];
    PyObject* name = p->is_container ? NULL : py_view_name(p->passed, identity);
    PyObject* ref = name ? PyWeakref_NewRef(p->own, NULL) : NULL;
    if (name && ref == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();
    if (ref) PyDict_SetItem(owned, name, ref);
    Py_XDECREF(name);
    Py_XDECREF(ref);
  }
  PyObject* make = c->is_uncommitted ? NULL : py_dict_get(planned(c, VIEWS), c->to);
  if (make == NULL && !PyErr_Occurred())
    make = PyObject_CallFunction(planned(c, MAKE_VIEW), "OIi", c->to, result_options(c),
                                 !c->is_uncommitted);
  if (make && owned && !PyErr_Occurred()) {
    PyObject* args[] = {result, owned};
    view = PyObject_Vectorcall(make, args, 2, NULL);
    if (view == Py_None) Py_CLEAR(view);
  }
  Py_XDECREF(make);
  Py_XDECREF(owned);
  return view;
}

/* Owns: new. GIL: needed; may run Python. Errors: NULL with an exception, or without one: Python
 * does it. */
static PyObject* convert_result(call* c, PyObject* result) {
  if (is_plain(result) || (c->to == NULL && !c->is_changed)) return Py_NewRef(result);
  int is_view = planned(c, VIEWS) != Py_None && c->to; /* if it is a container */
  if (py_tree_takes(Py_TYPE(result))) return is_view ? NULL : walk_result(c, result);
  PyObject *kind = kind_of(c, result), *made = NULL;
  if (kind == NULL) return NULL;
  if (kind == Py_None || (kind == Py_Ellipsis && !offers_interface(result))) {
    made = Py_NewRef(result);
  } else if (is_kind(kind, N_ARRAY) || (is_kind(kind, N_RULE) && !is_view)) {
    made = walk_result(c, result);
  } else if (is_kind(kind, N_CHILDREN) && is_view) {
    int is_new = planned(c, RESULTS) == Py_None && find(c, result) == NULL;
    made = is_new ? view_result(c, result) : NULL;
  } else if (is_kind(kind, N_CHILDREN)) {
    PyObject* plain = plain_container(c, kind, result);
    made = walk_result(c, plain);
    Py_XDECREF(plain);
  }
  Py_DECREF(kind);
  return made;
}

/* By dlx/_using. Owns: new. Errors: NULL with an exception. */
static PyObject* finish(const call* c, PyObject* result) {
  PyObject *pairs = PyList_New(c->n), *options = c->options ? c->options : Py_None;
  for (Py_ssize_t i = 0; pairs && i < c->n; i++) {
    const pair* p = &c->pairs[i];
    PyList_SET_ITEM(pairs, i, Py_BuildValue("(OOi)", p->passed, p->own, p->is_container));
  }
  PyObject* made = PyErr_Occurred() ? NULL
                                    : PyObject_CallFunctionObjArgs(planned(c, FINISH), c->args,
                                                                   options, pairs, result, NULL);
  Py_XDECREF(pairs);
  return made;
}

static void clean_up(call* c) {
  py_pending pending = py_pending_save(); /* what is released may run Python */
  for (Py_ssize_t i = 0; i < c->n; i++) {
    Py_DECREF(c->pairs[i].passed);
    Py_DECREF(c->pairs[i].own);
  }
  if (c->pairs != c->few) PyMem_Free(c->pairs);
  PyMem_Free(c->slots);
  Py_XDECREF(c->names);
  py_pending_restore(pending);
}

PyDoc_STRVAR(
    call_converted_doc,
    "call_converted(plan, args, options, /)\n--\n\n"
    "Call the function of a plan with arguments that are converted, and convert its result; "
    "the plan itself, with\nnothing called, where Python must do it.");

/* Owns: the result is new. GIL: needed; runs Python. Errors: NULL with an exception. */
static PyObject* call_converted(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != N_PLAN ||
      !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
    PyErr_SetString(PyExc_TypeError, "call_converted takes a plan, a tuple and a dict");
    return NULL;
  }
  call c;
  c.visitor = (py_visitor){look_at_argument, note, NULL};
  c.plan = args[0];
  c.args = args[1];
  c.options = PyDict_GET_SIZE(args[2]) ? args[2] : NULL;
  c.to = c.names = NULL;
  c.pairs = c.few;
  c.n = 0;
  c.room = FEW;
  c.slots = NULL;
  c.is_changed = c.is_uncommitted = 0;
  PyObject *values = NULL, *result = NULL, *made = NULL;
  int action = convert_arguments(&c, &values);
  if (action == PY_LEAVE) {
    made = Py_NewRef(c.plan);
  } else if (action != PY_FAILS && (result = call_function(&c, values))) {
    made = convert_result(&c, result);
    if (made == NULL && !PyErr_Occurred()) made = finish(&c, result);
  }
  Py_XDECREF(values);
  Py_XDECREF(result);
  clean_up(&c);
  return made;
}

static PyMethodDef functions[] = {
    {"call_converted", (PyCFunction)(void (*)(void))call_converted, METH_FASTCALL,
     call_converted_doc},
    {NULL, NULL, 0, NULL},
};

int py_arguments_init(PyObject* module) {
  array_interface_name = PyUnicode_InternFromString("__array_interface__");
  cuda_interface_name = PyUnicode_InternFromString("__cuda_array_interface__");
  dict_name = PyUnicode_InternFromString("__dict__");
  if (!array_interface_name || !cuda_interface_name || !dict_name) return -1;
  return PyModule_AddFunctions(module, functions);
}
