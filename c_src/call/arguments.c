/* Calls of functions with the decorator dlx.using: convert arguments that can share memory, call
 * the function, convert its result. Calls that need more, such as a copy or a device, are left to
 * Python (dlx/_using) before anything is converted.
 *
 * The tree walker converts. It calls back to classify each object and to note the object that the
 * function gets for it: if the function returns that, the caller gets the original. */

#include "convert/pairs.h"
#include "function.h"
#include "view/view.h"

/* A call's plan, see dlx/_using/plan.py */
enum {
  FUNCTION,  /* the decorated function */
  FAST_PATH, /* learns pairs */
  TO,        /* the function's target */
  KINDS,     /* {type: (kind, source)}: valid while the fast path has this source */
  LEARN,     /* learn(type): adds a type's kind */
  SKIPPED,   /* number of leading arguments passed unchanged, such as `self` */
  RESULTS,   /* the target of results; None = the framework of the caller's arrays */
  READONLY,  /* 0 = "copy", 1 = "error", 2 = "share" */
  DETACH,    /* whether results are detached */
  VIEWS,     /* {target: view(container, owned)}: creates lazy views; None = no views */
  MAKE_VIEW, /* make_view(target, options, is_committed): adds a function to VIEWS */
  IDENTITY,  /* identity(array): equal for all wrappers of an array; or None */
  FINISH,    /* finish(args, pairs, result): converts a result in Python */
  LOCATE,    /* locate(error, is_result): adds the failed object's position to an error */
  SPEC,      /* for Python */
  N_PLAN
};

/* A kind is None = passes through; Ellipsis = passes through unless the object's attributes make it
 * an array; False = left to Python; a container's rule (flatten, unflatten, is_mutable), followed
 * by True for the function's framework, which becomes a list or dict; or an array's: */
enum {
  ADAPTER,
  IS_INSIDE,    /* whether the array is of the function's framework */
  RESULT_TO,    /* the target of results; None = unchanged; NotImplemented = Python decides */
  IS_TRACKED,   /* is_tracked(array): whether a graph records it; None = irrelevant */
  IS_COMMITTED, /* is_committed(array): whether it stays on its device; None = always */
  N_ARRAY
};
enum { N_RULE = 3, N_OWN_RULE = 4 };

/* A pair is (the function's object, the caller's object, is_container). */
enum { PASSED, OWN, IS_CONTAINER };
enum { FEW = 16 }; /* pairs: up to here a linear search is used */

typedef struct {
  py_visitor visitor;              /* first member: the walker's argument is cast */
  PyObject *plan, *args, *options; /* borrowed */
  PyObject* values;                /* `args` without the skipped ones; borrowed */
  PyObject* pairs;                 /* a list; strong */
  PyObject *by_address, *by_name;  /* {address or identity: pair}; strong, or NULL until needed */
  PyObject* to;                    /* the target of results; strong, or NULL */
  int is_changed;                  /* the function got an object that is not the caller's */
  int has_graphs;                  /* arrays may be recorded */
  int is_uncommitted;              /* none of the caller's arrays is committed to a device */
} call;

static PyObject* get_plan_item(const call* c, int which) {
  return PyTuple_GET_ITEM(c->plan, which);
}

/* ---- kinds ----------------------------------------------------------------------------------- */

/* Errors: NULL with an exception. */
static PyObject* find_kind(const call* c, PyObject* obj) {
  PyTypeObject *type = Py_TYPE(obj), *meta = Py_TYPE(type);
  if (meta->tp_hash == PyType_Type.tp_hash && meta->tp_richcompare == PyType_Type.tp_richcompare) {
    PyObject* known = py_dict_get(get_plan_item(c, KINDS), (PyObject*)type);
    int holds = known && py_source_holds(PyTuple_GET_ITEM(known, 1), type);
    PyObject* kind = holds ? Py_NewRef(PyTuple_GET_ITEM(known, 0)) : NULL;
    Py_XDECREF(known);
    if (kind || PyErr_Occurred()) return kind;
  }
  return PyObject_CallOneArg(get_plan_item(c, LEARN), (PyObject*)type);
}

static int is_kind(PyObject* kind, Py_ssize_t size) {
  return PyTuple_CheckExact(kind) && PyTuple_GET_SIZE(kind) == size;
}

static int is_inside(PyObject* kind) {
  return is_kind(kind, N_ARRAY) && PyTuple_GET_ITEM(kind, IS_INSIDE) == Py_True;
}

/* Choose the walker's action; *found = a container's rule. */
static int choose_action(PyObject* kind, PyObject* obj, PyObject** found) {
  if (kind == Py_None) return PY_ASK_PASSES;
  if (kind == Py_Ellipsis && !py_has_interface(obj)) return PY_ASK_PASSES;
  if (kind == Py_Ellipsis) return PyErr_Occurred() ? PY_ASK_FAILS : PY_ASK_LEAVES;
  if (is_kind(kind, N_ARRAY)) return PY_ASK_CONVERTS;
  if (!is_kind(kind, N_RULE) && !is_kind(kind, N_OWN_RULE)) return PY_ASK_LEAVES;
  *found = Py_NewRef(kind);
  return PY_ASK_ENTERS;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static PyObject* get_passed(PyObject* pair) {
  return PyTuple_GET_ITEM(pair, PASSED);
}

static int is_container(PyObject* pair) {
  return PyTuple_GET_ITEM(pair, IS_CONTAINER) == Py_True;
}

static int note_pair(py_visitor* visitor, PyObject* own, PyObject* passed, int is_container) {
  call* c = (call*)visitor;
  if (own == c->values || own == c->options) return 0; /* not arguments */
  PyObject* pair = PyTuple_Pack(3, passed, own, is_container ? Py_True : Py_False);
  int failed = pair == NULL ? -1 : PyList_Append(c->pairs, pair);
  Py_XDECREF(pair);
  c->is_changed |= passed != own;
  return failed;
}

/* Return {address or identity: pair}. Errors: NULL with an exception. */
static PyObject* index_pairs(const call* c, PyObject* identity) {
  PyObject* table = PyDict_New();
  for (Py_ssize_t i = 0; table && i < PyList_GET_SIZE(c->pairs); i++) {
    PyObject *pair = PyList_GET_ITEM(c->pairs, i), *key = NULL;
    if (identity && is_container(pair)) continue;
    key = identity ? PyObject_CallOneArg(identity, get_passed(pair))
                   : PyLong_FromVoidPtr(get_passed(pair));
    if (key == NULL || PyDict_SetItem(table, key, pair) < 0) Py_CLEAR(table);
    Py_XDECREF(key);
  }
  return table;
}

static PyObject* find_key(PyObject* table, PyObject* key) {
  PyObject* pair = table && key ? PyDict_GetItemWithError(table, key) : NULL;
  Py_XDECREF(key);
  return pair;
}

/* Owns: borrowed. Errors: NULL = not passed to the function, or an exception is set. */
static PyObject* find_pair(call* c, PyObject* passed) {
  Py_ssize_t n = PyList_GET_SIZE(c->pairs);
  for (Py_ssize_t i = n; n <= FEW && i-- > 0;) {
    PyObject* pair = PyList_GET_ITEM(c->pairs, i);
    if (get_passed(pair) == passed) return pair;
  }
  if (n <= FEW) return NULL;
  if (c->by_address == NULL) c->by_address = index_pairs(c, NULL);
  return find_key(c->by_address, PyLong_FromVoidPtr(passed));
}

/* The function may return another wrapper of the array. */
static PyObject* find_array(call* c, PyObject* array, PyObject* kind) {
  PyObject *identity = get_plan_item(c, IDENTITY), *pair = find_pair(c, array);
  if (pair || PyErr_Occurred() || identity == Py_None || !is_inside(kind)) return pair;
  if (c->by_name == NULL) c->by_name = index_pairs(c, identity);
  return find_key(c->by_name, c->by_name ? PyObject_CallOneArg(identity, array) : NULL);
}

/* ---- in -------------------------------------------------------------------------------------- */

static PyObject* walk_tree(call* c, PyObject* root, PyObject* to, unsigned options) {
  py_call inner = {.function = (FastPathObject*)get_plan_item(c, FAST_PATH),
                   .to = to,
                   .options = options,
                   .visitor = &c->visitor};
  py_maps_begin();
  PyObject* made = py_convert_tree(&inner, root, NULL);
  py_maps_end();
  Py_XDECREF(inner.responses); /* NULL: producers are left to Python */
  if (made || !PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_Exception)) return made;
  py_pending pending = py_pending_save();
  PyErr_NormalizeException(&pending.type, &pending.value, &pending.traceback);
  PyObject* args[] = {pending.value, c->visitor.note ? Py_False : Py_True};
  Py_XDECREF(PyObject_Vectorcall(get_plan_item(c, LOCATE), args, 2, NULL));
  py_pending_restore(pending);
  return NULL;
}

static int classify_argument(py_visitor* visitor, PyObject* obj, PyObject** found) {
  PyObject* kind = find_kind((call*)visitor, obj);
  if (kind == NULL) return PY_ASK_FAILS;
  int action = is_kind(kind, N_OWN_RULE) ? PY_ASK_LEAVES : choose_action(kind, obj, found);
  Py_DECREF(kind);
  return action;
}

/* Most arguments pass unchanged. Errors: PY_ASK_LEAVES, or PY_ASK_FAILS with an exception. */
static int classify_value(call* c, PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  Py_ssize_t i = 0, n = PyTuple_Check(value) ? PyTuple_GET_SIZE(value) : -1;
  if (py_passes_through(type)) return PY_ASK_PASSES;
  while (i < n && py_passes_through(Py_TYPE(PyTuple_GET_ITEM(value, i)))) i++;
  if (py_is_tree(type)) return i == n ? PY_ASK_PASSES : PY_ASK_ENTERS;
  PyObject *kind = find_kind(c, value), *rule = NULL;
  if (kind == NULL) return PY_ASK_FAILS;
  int action = is_inside(kind) ? PY_ASK_PASSES : choose_action(kind, value, &rule);
  if (rule && i == n && PyTuple_GET_ITEM(rule, 2) != Py_True)
    action = PY_ASK_PASSES; /* no arrays in it */
  Py_XDECREF(rule);
  Py_DECREF(kind);
  return action;
}

/* Find the target of results: the framework of the caller's arrays if they have only one. Errors:
 * PY_ASK_LEAVES, or PY_ASK_FAILS with an exception. */
static int find_target(call* c) {
  PyObject *caller = NULL, *to = Py_None, *results = get_plan_item(c, RESULTS);
  int is_one = 1, can_stay = 0, has_committed = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(c->pairs); i++) {
    PyObject* pair = PyList_GET_ITEM(c->pairs, i);
    PyObject *own = PyTuple_GET_ITEM(pair, OWN),
             *kind = is_container(pair) ? Py_NewRef(Py_None) : find_kind(c, own);
    int is_array = kind && is_kind(kind, N_ARRAY);
    c->has_graphs |= is_array && PyTuple_GET_ITEM(kind, IS_TRACKED) != Py_None;
    if (is_array && !is_inside(kind)) {
      PyObject* is_committed = PyTuple_GET_ITEM(kind, IS_COMMITTED);
      is_one &= caller == NULL || caller == PyTuple_GET_ITEM(kind, ADAPTER);
      caller = PyTuple_GET_ITEM(kind, ADAPTER); /* adapters and names of targets are immortal */
      to = PyTuple_GET_ITEM(kind, RESULT_TO);
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

/* Leave recorded arrays to Python. Errors: PY_ASK_FAILS with an exception. */
static int check_graphs(const call* c) {
  PyObject* answer = Py_NewRef(Py_False);
  for (Py_ssize_t i = 0; answer == Py_False && i < PyList_GET_SIZE(c->pairs); i++) {
    PyObject *pair = PyList_GET_ITEM(c->pairs, i), *own = PyTuple_GET_ITEM(pair, OWN);
    PyObject* kind = is_container(pair) ? Py_NewRef(Py_None) : find_kind(c, own);
    if (kind == NULL) return PY_ASK_FAILS;
    PyObject* ask = is_kind(kind, N_ARRAY) ? PyTuple_GET_ITEM(kind, IS_TRACKED) : Py_None;
    if (ask != Py_None && (c->to || !is_inside(kind)))
      Py_SETREF(answer, PyObject_CallOneArg(ask, own));
    Py_DECREF(kind);
  }
  Py_XDECREF(answer);
  return answer == NULL ? PY_ASK_FAILS : answer == Py_False ? PY_ASK_PASSES : PY_ASK_LEAVES;
}

/* Convert positional arguments, except skipped ones, and options: *converted = (args, options), or
 * NULL if nothing changes. Errors: PY_ASK_LEAVES, or PY_ASK_FAILS with an exception. */
static int convert_arguments(call* c, PyObject** converted) {
  Py_ssize_t skipped = PyLong_AsSsize_t(get_plan_item(c, SKIPPED)), n = PyTuple_GET_SIZE(c->args);
  Py_ssize_t position = 0;
  int action = PY_ASK_PASSES, found = PY_ASK_PASSES;
  PyObject *name, *value, *args = NULL, *root = NULL;
  if (skipped > n) skipped = n;
  for (Py_ssize_t i = 0; i < n && found != PY_ASK_LEAVES && found != PY_ASK_FAILS; i++) {
    value = PyTuple_GET_ITEM(c->args, i);
    if (i < skipped)
      found = py_is_tree(Py_TYPE(value)) ? PY_ASK_LEAVES : PY_ASK_PASSES;
    else
      found = classify_value(c, value);
    if (found != PY_ASK_PASSES) action = found;
  }
  while (found != PY_ASK_LEAVES && found != PY_ASK_FAILS &&
         PyDict_Next(c->options, &position, &name, &value)) {
    if ((found = classify_value(c, value)) != PY_ASK_PASSES) action = found;
  }
  if (action == PY_ASK_LEAVES || action == PY_ASK_FAILS) return action;
  if (action == PY_ASK_PASSES && get_plan_item(c, RESULTS) == Py_None)
    return action; /* results are not converted */
  c->values = args = PyTuple_GetSlice(c->args, skipped, n);
  if (args && (root = PyTuple_Pack(PyDict_GET_SIZE(c->options) ? 2 : 1, args, c->options)))
    *converted = walk_tree(c, root, get_plan_item(c, TO), DLX_SHARES | DLX_HOST_ONLY);
  Py_XDECREF(args);
  Py_XDECREF(root);
  if (*converted == NULL) return PyErr_Occurred() ? PY_ASK_FAILS : PY_ASK_LEAVES;
  action = find_target(c);
  if (action == PY_ASK_PASSES && c->has_graphs) action = check_graphs(c);
  for (Py_ssize_t i = 0; i < skipped && action == PY_ASK_PASSES; i++) {
    value = PyTuple_GET_ITEM(c->args, i);
    if (note_pair(&c->visitor, value, value, 0) < 0) action = PY_ASK_FAILS;
  }
  return action;
}

/* Errors: the function's. */
static PyObject* call_function(const call* c, PyObject* converted) {
  PyObject* options = PyDict_GET_SIZE(c->options) == 0 ? NULL
                      : converted                      ? PyTuple_GET_ITEM(converted, 1)
                                                       : c->options;
  PyObject* args = Py_NewRef(converted ? PyTuple_GET_ITEM(converted, 0) : c->args);
  Py_ssize_t skipped = PyTuple_GET_SIZE(c->args) - PyTuple_GET_SIZE(args);
  if (skipped) {
    PyObject* leading = PyTuple_GetSlice(c->args, 0, skipped);
    Py_SETREF(args, leading ? PySequence_Concat(leading, args) : NULL);
    Py_XDECREF(leading);
  }
  PyObject* result = args ? PyObject_Call(get_plan_item(c, FUNCTION), args, options) : NULL;
  Py_XDECREF(args);
  return result;
}

/* ---- out ------------------------------------------------------------------------------------- */

static PyObject* find_own_container(py_visitor* visitor, PyObject* passed) {
  PyObject* pair = find_pair((call*)visitor, passed);
  return pair && is_container(pair) ? PyTuple_GET_ITEM(pair, OWN) : NULL;
}

static int classify_result(py_visitor* visitor, PyObject* obj, PyObject** found) {
  call* c = (call*)visitor;
  PyObject *kind = find_kind(c, obj), *pair = kind ? find_array(c, obj, kind) : NULL;
  int action = PyErr_Occurred() ? PY_ASK_FAILS : PY_ASK_LEAVES;
  if (pair && !is_container(pair) && get_plan_item(c, RESULTS) == Py_None) {
    *found = Py_NewRef(PyTuple_GET_ITEM(pair, OWN));
    action = PY_ASK_KNOWN;
  } else if (pair == NULL && action == PY_ASK_LEAVES) {
    action = choose_action(kind, obj, found);
    if (action == PY_ASK_CONVERTS && c->to == NULL) action = PY_ASK_PASSES;
  }
  Py_XDECREF(kind);
  return action;
}

static unsigned get_result_options(const call* c) {
  if (c->is_uncommitted) return DLX_SHARES | DLX_HOST_ONLY; /* a copy would be committed */
  long readonly = PyLong_AsLong(get_plan_item(c, READONLY));
  unsigned options = readonly == 1 ? DLX_KEEPS_READONLY : readonly ? DLX_UNMARKS : 0;
  if (get_plan_item(c, DETACH) == Py_True) options |= DLX_DETACHES;
  if (get_plan_item(c, RESULTS) == Py_None) options |= DLX_HOST_ONLY | DLX_NAMES_DEVICE;
  return options;
}

/* Create a lazy view of a container of the function's framework, with {name: weak reference to the
 * caller's array}. Errors: NULL, without an exception: Python does it. */
static PyObject* view_result(call* c, PyObject* result) {
  PyObject *identity = get_plan_item(c, IDENTITY), *owned = PyDict_New(), *view = NULL,
           *make = NULL;
  for (Py_ssize_t i = 0; owned && i < PyList_GET_SIZE(c->pairs) && !PyErr_Occurred(); i++) {
    PyObject* pair = PyList_GET_ITEM(c->pairs, i);
    PyObject* name = is_container(pair) ? NULL : py_view_name(get_passed(pair), identity);
    PyObject* ref = name ? PyWeakref_NewRef(PyTuple_GET_ITEM(pair, OWN), NULL) : NULL;
    if (name && ref == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();
    if (ref) PyDict_SetItem(owned, name, ref);
    Py_XDECREF(name);
    Py_XDECREF(ref);
  }
  if (owned && !c->is_uncommitted) make = py_dict_get(get_plan_item(c, VIEWS), c->to);
  if (make == NULL && !PyErr_Occurred())
    make = PyObject_CallFunction(get_plan_item(c, MAKE_VIEW), "OIi", c->to, get_result_options(c),
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

/* Errors: NULL, without an exception: Python does it. */
static PyObject* convert_result(call* c, PyObject* result) {
  if (py_passes_through(Py_TYPE(result)) || (c->to == NULL && !c->is_changed))
    return Py_NewRef(result);
  int is_tree = py_is_tree(Py_TYPE(result)), is_lazy = get_plan_item(c, VIEWS) != Py_None && c->to;
  PyObject *kind = is_tree ? Py_NewRef(Py_None) : find_kind(c, result), *root = NULL, *made = NULL;
  if (kind == NULL) return NULL;
  int is_own = is_kind(kind, N_OWN_RULE), is_container = is_tree || is_own || is_kind(kind, N_RULE);
  Py_DECREF(kind);
  if (is_own && get_plan_item(c, RESULTS) != Py_None)
    return NULL; /* the container may belong to the target */
  if (is_container && is_lazy)
    return is_own && !find_pair(c, result) ? view_result(c, result) : NULL;
  c->visitor = (py_visitor){classify_result, NULL, find_own_container};
  if ((root = PyTuple_Pack(1, result)))
    made = walk_tree(c, root, c->to ? c->to : get_plan_item(c, TO), get_result_options(c));
  PyObject* first = made ? Py_NewRef(PyTuple_GET_ITEM(made, 0)) : NULL;
  Py_XDECREF(root);
  Py_XDECREF(made);
  return first;
}

PyDoc_STRVAR(call_converted_doc,
             "call_converted(plan, args, options, /)\n--\n\n"
             "Call the function of a plan with converted arguments, and convert its result.\n\n"
             "Return the plan, without a call, if Python must do it.");

/* Errors: NULL with an exception. */
static PyObject* call_converted(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != N_PLAN ||
      !PyTuple_CheckExact(args[1]) || !PyDict_CheckExact(args[2])) {
    PyErr_SetString(PyExc_TypeError, "call_converted takes a plan, a tuple and a dict");
    return NULL;
  }
  call c = {.visitor = {classify_argument, note_pair, NULL},
            .plan = args[0],
            .args = args[1],
            .options = args[2]};
  PyObject *converted = NULL, *result = NULL, *made = NULL;
  if ((c.pairs = PyList_New(0)) == NULL) return NULL;
  int action = convert_arguments(&c, &converted);
  if (action == PY_ASK_LEAVES) {
    made = Py_NewRef(c.plan);
  } else if (action != PY_ASK_FAILS && (result = call_function(&c, converted))) {
    made = convert_result(&c, result);
    if (made == NULL && !PyErr_Occurred())
      made = PyObject_CallFunctionObjArgs(get_plan_item(&c, FINISH), c.args, c.pairs, result, NULL);
  }
  py_pending pending = py_pending_save(); /* deallocators may run Python */
  Py_XDECREF(converted);
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
