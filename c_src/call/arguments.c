/* Calls of functions that are decorated by dlx.using: arguments that share memory are converted,
 * the function is called, and its result is converted. What needs more, such as a copy of an
 * argument or a device, is left to Python (dlx/_using) before anything is converted.
 *
 * Trees are converted by the walker. It asks here what each object is, and notes here what the
 * function gets for each array and container: one that is returned becomes the caller's own. */

#include "convert/pairs.h"
#include "function.h"
#include "view/view.h"

/* A call's plan, see dlx/_using/plan.py: */
enum {
  FUNCTION,  /* the function that is decorated */
  FAST_PATH, /* by which pairs are learned */
  TO,        /* its target */
  KINDS,     /* {type: (kind, source)}: good while the fast path has this source of the type */
  LEARN,     /* learn(type): a type's kind, which it adds */
  SKIPPED,   /* how many arguments are passed as they are, as `self` is */
  RESULTS,   /* the target of results; None = that of the caller's arrays */
  READONLY,  /* the number of the option: 0 = "copy", 1 = "error", 2 = "share" */
  DETACH,    /* whether results are detached */
  VIEWS, /* {target: view(container, owned)}: makes lazy views of containers; None = there are none
          */
  MAKE_VIEW, /* make_view(target, options, is_committed): that function, which it adds */
  IDENTITY,  /* identity(array): equal for all wrappers of one array of the function's; or None */
  FINISH,    /* finish(args, pairs, result): converts a result in Python */
  LOCATE,    /* locate(error, is_result): says where the object is that failed */
  SPEC,      /* for Python */
  N_PLAN
};

/* A kind is None = passes through; Ellipsis = does so, unless the object's own attributes make it
 * an array; False = left to Python; a container's rule (flatten, unflatten, is_mutable); the same
 * and True of a container of the function's framework, which becomes a list or dict; or an array's:
 */
enum {
  ADAPTER,
  IS_INSIDE,  /* whether it is of the function's framework */
  RESULT_TO,  /* the target of results for such a caller; None = they stay; NotImplemented = Python
                 decides */
  IS_TRACKED, /* is_tracked(array): whether a graph records it; None = that cannot matter */
  IS_COMMITTED, /* is_committed(array): whether it stays on its device; None = all do */
  N_ARRAY
};
enum { N_RULE = 3, N_OWN_RULE = 4 };

/* A pair is (what the function got, the caller's object, whether it is a container). */
enum { PASSED, OWN, IS_CONTAINER };
enum { FEW = 16 }; /* pairs that are looked through one by one */

typedef struct {
  py_visitor visitor;              /* first: what the walker is given */
  PyObject *plan, *args, *options; /* borrowed */
  PyObject* values;                /* `args` without those that are skipped; borrowed */
  PyObject* pairs;                 /* a list; strong */
  PyObject *by_address, *by_name;  /* {address, or identity, of what was passed: pair}; strong, or
                                      NULL until it is needed */
  PyObject* to;                    /* the target of results; strong, or NULL */
  int is_changed;                  /* some of what the function got is not the caller's own */
  int has_graphs;                  /* some arrays may be recorded */
  int is_uncommitted;              /* no array of the caller's is committed to its device */
} call;

static PyObject* planned(const call* c, int which) {
  return PyTuple_GET_ITEM(c->plan, which);
}

/* ---- what an object is ----------------------------------------------------------------------- */

/* Owns: new. GIL: needed; may run Python. Errors: NULL with an exception. */
static PyObject* kind_of(const call* c, PyObject* obj) {
  PyTypeObject *type = Py_TYPE(obj), *meta = Py_TYPE(type);
  if (meta->tp_hash == PyType_Type.tp_hash && meta->tp_richcompare == PyType_Type.tp_richcompare) {
    PyObject* known = py_dict_get(planned(c, KINDS), (PyObject*)type);
    int holds = known && py_source_holds(PyTuple_GET_ITEM(known, 1), type);
    PyObject* kind = holds ? Py_NewRef(PyTuple_GET_ITEM(known, 0)) : NULL;
    Py_XDECREF(known);
    if (kind || PyErr_Occurred()) return kind;
  }
  return PyObject_CallOneArg(planned(c, LEARN), (PyObject*)type);
}

static int is_kind(PyObject* kind, Py_ssize_t size) {
  return PyTuple_CheckExact(kind) && PyTuple_GET_SIZE(kind) == size;
}

static int is_inside(PyObject* kind) {
  return is_kind(kind, N_ARRAY) && PyTuple_GET_ITEM(kind, IS_INSIDE) == Py_True;
}

/* What the walker does with an object by its kind, of which *found is the rule. */
static int action_of(PyObject* kind, PyObject* obj, PyObject** found) {
  if (kind == Py_None) return PY_ASK_PASSES;
  if (kind == Py_Ellipsis && !py_has_interface(obj)) return PY_ASK_PASSES;
  if (kind == Py_Ellipsis) return PyErr_Occurred() ? PY_ASK_FAILS : PY_ASK_LEAVES;
  if (is_kind(kind, N_ARRAY)) return PY_ASK_CONVERTS;
  if (!is_kind(kind, N_RULE) && !is_kind(kind, N_OWN_RULE)) return PY_ASK_LEAVES;
  *found = Py_NewRef(kind);
  return PY_ASK_ENTERS;
}

/* ---- what was passed ------------------------------------------------------------------------- */

static PyObject* passed_in(PyObject* pair) {
  return PyTuple_GET_ITEM(pair, PASSED);
}

static int is_container(PyObject* pair) {
  return PyTuple_GET_ITEM(pair, IS_CONTAINER) == Py_True;
}

/* Errors: -1 with MemoryError. */
static int note(py_visitor* visitor, PyObject* own, PyObject* passed, int is_container) {
  call* c = (call*)visitor;
  if (own == c->values || own == c->options) return 0; /* they are no argument */
  PyObject* pair = PyTuple_Pack(3, passed, own, is_container ? Py_True : Py_False);
  int failed = pair == NULL ? -1 : PyList_Append(c->pairs, pair);
  Py_XDECREF(pair);
  c->is_changed |= passed != own;
  return failed;
}

/* {address, or identity, of what was passed: pair}. Owns: new. Errors: NULL with an exception. */
static PyObject* table_of(const call* c, PyObject* identity) {
  PyObject* table = PyDict_New();
  for (Py_ssize_t i = 0; table && i < PyList_GET_SIZE(c->pairs); i++) {
    PyObject *pair = PyList_GET_ITEM(c->pairs, i), *key = NULL;
    if (identity && is_container(pair)) continue;
    key = identity ? PyObject_CallOneArg(identity, passed_in(pair))
                   : PyLong_FromVoidPtr(passed_in(pair));
    if (key == NULL || PyDict_SetItem(table, key, pair) < 0) Py_CLEAR(table);
    Py_XDECREF(key);
  }
  return table;
}

/* Owns: borrowed. Errors: NULL, an exception may be set. */
static PyObject* find_in(PyObject* table, PyObject* key) {
  PyObject* pair = table && key ? PyDict_GetItemWithError(table, key) : NULL;
  Py_XDECREF(key);
  return pair;
}

/* The pair of an object that was passed. Owns: borrowed. Errors: NULL: it was not; an exception may
 * be set. */
static PyObject* find(call* c, PyObject* passed) {
  Py_ssize_t n = PyList_GET_SIZE(c->pairs);
  for (Py_ssize_t i = n; n <= FEW && i-- > 0;) {
    PyObject* pair = PyList_GET_ITEM(c->pairs, i);
    if (passed_in(pair) == passed) return pair;
  }
  if (n <= FEW) return NULL;
  if (c->by_address == NULL) c->by_address = table_of(c, NULL);
  return find_in(c->by_address, PyLong_FromVoidPtr(passed));
}

/* The same of an array that may be wrapped anew. */
static PyObject* find_array(call* c, PyObject* array, PyObject* kind) {
  PyObject *identity = planned(c, IDENTITY), *pair = find(c, array);
  if (pair || PyErr_Occurred() || identity == Py_None || !is_inside(kind)) return pair;
  if (c->by_name == NULL) c->by_name = table_of(c, identity);
  return find_in(c->by_name, c->by_name ? PyObject_CallOneArg(identity, array) : NULL);
}

/* ---- in -------------------------------------------------------------------------------------- */

static PyObject* walk(call* c, PyObject* root, PyObject* to, unsigned options) {
  py_call inner = {.function = (FastPathObject*)planned(c, FAST_PATH),
                   .to = to,
                   .options = options,
                   .visitor = &c->visitor};
  py_maps_begin();
  PyObject* made = py_convert_tree(&inner, root, NULL);
  py_maps_end();
  Py_XDECREF(inner.answers); /* none: producers are left to Python */
  if (made || !PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_Exception)) return made;
  py_pending pending = py_pending_save();
  PyErr_NormalizeException(&pending.type, &pending.value, &pending.traceback);
  PyObject* args[] = {pending.value, c->visitor.note ? Py_False : Py_True};
  Py_XDECREF(PyObject_Vectorcall(planned(c, LOCATE), args, 2, NULL));
  py_pending_restore(pending);
  return NULL;
}

static int look_at_argument(py_visitor* visitor, PyObject* obj, PyObject** found) {
  PyObject* kind = kind_of((call*)visitor, obj);
  if (kind == NULL) return PY_ASK_FAILS;
  int action = is_kind(kind, N_OWN_RULE) ? PY_ASK_LEAVES : action_of(kind, obj, found);
  Py_DECREF(kind);
  return action;
}

/* Whether an argument passes as it is: most do. Errors: PY_ASK_LEAVES, or PY_ASK_FAILS with an
 * exception. */
static int look_at_value(call* c, PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  Py_ssize_t i = 0, n = PyTuple_Check(value) ? PyTuple_GET_SIZE(value) : -1;
  if (py_is_plain(type)) return PY_ASK_PASSES;
  while (i < n && py_is_plain(Py_TYPE(PyTuple_GET_ITEM(value, i)))) i++;
  if (py_is_tree(type)) return i == n ? PY_ASK_PASSES : PY_ASK_ENTERS;
  PyObject *kind = kind_of(c, value), *rule = NULL;
  if (kind == NULL) return PY_ASK_FAILS;
  int action = is_inside(kind) ? PY_ASK_PASSES : action_of(kind, value, &rule);
  if (rule && i == n && PyTuple_GET_ITEM(rule, 2) != Py_True)
    action = PY_ASK_PASSES; /* plain data */
  Py_XDECREF(rule);
  Py_DECREF(kind);
  return action;
}

/* Find the target of results: that of the one framework that arrays of the caller's are of. Errors:
 * PY_ASK_LEAVES, or PY_ASK_FAILS with an exception. */
static int find_target(call* c) {
  PyObject *caller = NULL, *to = Py_None, *results = planned(c, RESULTS);
  int is_one = 1, can_stay = 0, has_committed = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(c->pairs); i++) {
    PyObject* pair = PyList_GET_ITEM(c->pairs, i);
    PyObject *own = PyTuple_GET_ITEM(pair, OWN),
             *kind = is_container(pair) ? Py_NewRef(Py_None) : kind_of(c, own);
    int is_array = kind && is_kind(kind, N_ARRAY);
    c->has_graphs |= is_array && PyTuple_GET_ITEM(kind, IS_TRACKED) != Py_None;
    if (is_array && !is_inside(kind)) {
      PyObject* is_committed = PyTuple_GET_ITEM(kind, IS_COMMITTED);
      is_one &= caller == NULL || caller == PyTuple_GET_ITEM(kind, ADAPTER);
      caller = PyTuple_GET_ITEM(kind, ADAPTER); /* adapters live for good */
      to = PyTuple_GET_ITEM(kind, RESULT_TO);   /* and so do names of targets */
      can_stay |= is_committed != Py_None;
      PyObject* answer = is_committed == Py_None ? NULL : PyObject_CallOneArg(is_committed, own);
      has_committed |= answer == Py_True;
      Py_XDECREF(answer);
    }
    Py_XDECREF(kind);
    if (PyErr_Occurred()) return PY_ASK_FAILS;
    if (!is_array && !is_container(pair)) return PY_ASK_LEAVES;
  }
  to = results != Py_None ? results : is_one ? to : Py_None;
  c->is_uncommitted = results == Py_None && can_stay && !has_committed;
  if (to == Py_NotImplemented) return PY_ASK_LEAVES;
  c->to = to == Py_None ? NULL : Py_NewRef(to);
  return PY_ASK_PASSES;
}

/* Leave arrays to Python that a graph records. Errors: PY_ASK_FAILS with an exception. */
static int look_for_graphs(const call* c) {
  PyObject* answer = Py_NewRef(Py_False);
  for (Py_ssize_t i = 0; answer == Py_False && i < PyList_GET_SIZE(c->pairs); i++) {
    PyObject *pair = PyList_GET_ITEM(c->pairs, i), *own = PyTuple_GET_ITEM(pair, OWN);
    PyObject* kind = is_container(pair) ? Py_NewRef(Py_None) : kind_of(c, own);
    if (kind == NULL) return PY_ASK_FAILS;
    PyObject* ask = is_kind(kind, N_ARRAY) ? PyTuple_GET_ITEM(kind, IS_TRACKED) : Py_None;
    if (ask != Py_None && (c->to || !is_inside(kind)))
      Py_SETREF(answer, PyObject_CallOneArg(ask, own));
    Py_DECREF(kind);
  }
  Py_XDECREF(answer);
  return answer == NULL ? PY_ASK_FAILS : answer == Py_False ? PY_ASK_PASSES : PY_ASK_LEAVES;
}

/* Convert positional arguments, but those that are skipped, and options: *given = (args, options);
 * NULL where they are the caller's. Errors: PY_ASK_LEAVES, or PY_ASK_FAILS with an exception. */
static int convert_arguments(call* c, PyObject** given) {
  Py_ssize_t skipped = PyLong_AsSsize_t(planned(c, SKIPPED)), n = PyTuple_GET_SIZE(c->args);
  Py_ssize_t position = 0;
  int action = PY_ASK_PASSES, found = PY_ASK_PASSES;
  PyObject *name, *value, *args = NULL, *root = NULL;
  if (skipped > n) skipped = n;
  for (Py_ssize_t i = 0; i < n && found != PY_ASK_LEAVES && found != PY_ASK_FAILS; i++) {
    value = PyTuple_GET_ITEM(c->args, i);
    if (i < skipped)
      found = py_is_tree(Py_TYPE(value)) ? PY_ASK_LEAVES : PY_ASK_PASSES;
    else
      found = look_at_value(c, value);
    if (found != PY_ASK_PASSES) action = found;
  }
  while (found != PY_ASK_LEAVES && found != PY_ASK_FAILS &&
         PyDict_Next(c->options, &position, &name, &value)) {
    if ((found = look_at_value(c, value)) != PY_ASK_PASSES) action = found;
  }
  if (action == PY_ASK_LEAVES || action == PY_ASK_FAILS) return action;
  if (action == PY_ASK_PASSES && planned(c, RESULTS) == Py_None)
    return action; /* nothing comes back */
  c->values = args = PyTuple_GetSlice(c->args, skipped, n);
  if (args && (root = PyTuple_Pack(PyDict_GET_SIZE(c->options) ? 2 : 1, args, c->options)))
    *given = walk(c, root, planned(c, TO), DLX_SHARES | DLX_HOST_ONLY);
  Py_XDECREF(args);
  Py_XDECREF(root);
  if (*given == NULL) return PyErr_Occurred() ? PY_ASK_FAILS : PY_ASK_LEAVES;
  action = find_target(c);
  if (action == PY_ASK_PASSES && c->has_graphs) action = look_for_graphs(c);
  for (Py_ssize_t i = 0; i < skipped && action == PY_ASK_PASSES; i++) {
    value = PyTuple_GET_ITEM(c->args, i);
    if (note(&c->visitor, value, value, 0) < 0) action = PY_ASK_FAILS;
  }
  return action;
}

/* Call the function. Owns: the result is new. Errors: those of the function. */
static PyObject* call_function(const call* c, PyObject* given) {
  PyObject* options = PyDict_GET_SIZE(c->options) == 0 ? NULL
                      : given                          ? PyTuple_GET_ITEM(given, 1)
                                                       : c->options;
  PyObject* args = Py_NewRef(given ? PyTuple_GET_ITEM(given, 0) : c->args);
  Py_ssize_t skipped = PyTuple_GET_SIZE(c->args) - PyTuple_GET_SIZE(args);
  if (skipped) {
    PyObject* kept = PyTuple_GetSlice(c->args, 0, skipped);
    Py_SETREF(args, kept ? PySequence_Concat(kept, args) : NULL);
    Py_XDECREF(kept);
  }
  PyObject* result = args ? PyObject_Call(planned(c, FUNCTION), args, options) : NULL;
  Py_XDECREF(args);
  return result;
}

/* ---- out ------------------------------------------------------------------------------------- */

static PyObject* own_container(py_visitor* visitor, PyObject* passed) {
  PyObject* pair = find((call*)visitor, passed);
  return pair && is_container(pair) ? PyTuple_GET_ITEM(pair, OWN) : NULL;
}

static int look_at_result(py_visitor* visitor, PyObject* obj, PyObject** found) {
  call* c = (call*)visitor;
  PyObject *kind = kind_of(c, obj), *pair = kind ? find_array(c, obj, kind) : NULL;
  int action = PyErr_Occurred() ? PY_ASK_FAILS : PY_ASK_LEAVES;
  if (pair && !is_container(pair) && planned(c, RESULTS) == Py_None) {
    *found = Py_NewRef(PyTuple_GET_ITEM(pair, OWN));
    action = PY_ASK_KNOWN;
  } else if (pair == NULL && action == PY_ASK_LEAVES) {
    action = action_of(kind, obj, found);
    if (action == PY_ASK_CONVERTS && c->to == NULL) action = PY_ASK_PASSES;
  }
  Py_XDECREF(kind);
  return action;
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

/* A lazy view of a container of the function's framework, which is given {name: the caller's own
 * array, weakly}. Owns: new. Errors: NULL with an exception, or without one: Python does it. */
static PyObject* view_result(call* c, PyObject* result) {
  PyObject *identity = planned(c, IDENTITY), *owned = PyDict_New(), *view = NULL, *make = NULL;
  for (Py_ssize_t i = 0; owned && i < PyList_GET_SIZE(c->pairs) && !PyErr_Occurred(); i++) {
    PyObject* pair = PyList_GET_ITEM(c->pairs, i);
    PyObject* name = is_container(pair) ? NULL : py_view_name(passed_in(pair), identity);
    PyObject* ref = name ? PyWeakref_NewRef(PyTuple_GET_ITEM(pair, OWN), NULL) : NULL;
    if (name && ref == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();
    if (ref) PyDict_SetItem(owned, name, ref);
    Py_XDECREF(name);
    Py_XDECREF(ref);
  }
  if (owned && !c->is_uncommitted) make = py_dict_get(planned(c, VIEWS), c->to);
  if (make == NULL && !PyErr_Occurred())
    make = PyObject_CallFunction(planned(c, MAKE_VIEW), "OIi", c->to, result_options(c),
                                 !c->is_uncommitted);
  if (make && !PyErr_Occurred()) {
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
  if (py_is_plain(Py_TYPE(result)) || (c->to == NULL && !c->is_changed)) return Py_NewRef(result);
  int is_tree = py_is_tree(Py_TYPE(result)), is_lazy = planned(c, VIEWS) != Py_None && c->to;
  PyObject *kind = is_tree ? Py_NewRef(Py_None) : kind_of(c, result), *root = NULL, *made = NULL;
  if (kind == NULL) return NULL;
  int is_own = is_kind(kind, N_OWN_RULE), is_container = is_tree || is_own || is_kind(kind, N_RULE);
  Py_DECREF(kind);
  if (is_own && planned(c, RESULTS) != Py_None)
    return NULL; /* it may be the target that holds it */
  if (is_container && is_lazy) return is_own && !find(c, result) ? view_result(c, result) : NULL;
  c->visitor = (py_visitor){look_at_result, NULL, own_container};
  if ((root = PyTuple_Pack(1, result)))
    made = walk(c, root, c->to ? c->to : planned(c, TO), result_options(c));
  PyObject* converted = made ? Py_NewRef(PyTuple_GET_ITEM(made, 0)) : NULL;
  Py_XDECREF(root);
  Py_XDECREF(made);
  return converted;
}

PyDoc_STRVAR(
    call_converted_doc,
    "call_converted(plan, args, options, /)\n--\n\n"
    "Call the function of a plan with converted arguments, and convert its result; the plan "
    "itself, with nothing\ncalled, where Python must do it.");

/* Owns: the result is new. GIL: needed; runs Python. Errors: NULL with an exception. */
static PyObject* call_converted(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != N_PLAN ||
      !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
    PyErr_SetString(PyExc_TypeError, "call_converted takes a plan, a tuple and a dict");
    return NULL;
  }
  call c = {.visitor = {look_at_argument, note, NULL},
            .plan = args[0],
            .args = args[1],
            .options = args[2]};
  PyObject *given = NULL, *result = NULL, *made = NULL;
  if ((c.pairs = PyList_New(0)) == NULL) return NULL;
  int action = convert_arguments(&c, &given);
  if (action == PY_ASK_LEAVES) {
    made = Py_NewRef(c.plan);
  } else if (action != PY_ASK_FAILS && (result = call_function(&c, given))) {
    made = convert_result(&c, result);
    if (made == NULL && !PyErr_Occurred())
      made = PyObject_CallFunctionObjArgs(planned(&c, FINISH), c.args, c.pairs, result, NULL);
  }
  py_pending pending = py_pending_save(); /* what is released may run Python */
  Py_XDECREF(given);
  Py_XDECREF(result);
  Py_DECREF(c.pairs);
  Py_XDECREF(c.by_address);
  Py_XDECREF(c.by_name);
  Py_XDECREF(c.to);
  py_pending_restore(pending);
  return made;
}

PyMethodDef py_arguments_functions[] = {
    {"call_converted", (PyCFunction)(void (*)(void))call_converted, METH_FASTCALL,
     call_converted_doc},
    {NULL, NULL, 0, NULL},
};
