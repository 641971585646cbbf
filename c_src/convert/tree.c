/* Trees in the fast path: lists, tuples and dicts of exactly these types, and containers that have
 * a rule (records, OrderedDict), around arrays that have pairs. The stages are those of
 * dlx/_engine/batch.py: flatten everything, then take and check every array, and only then hand
 * over. Anything unusual falls back to the Python path before anything is handed over, with nothing
 * changed. */

#include "walk.h"

/* ---- take and copy the arrays ---------------------------------------------------------------- */

/* Whether a container's own Python makes it anew, which may fail after the hand-over. */
static int has_rules(const walk* w) {
  Py_ssize_t i = 0;
  while (i < w->nodes.n && nodes_of(w)[i].rule == NULL) i++;
  return i < w->nodes.n;
}

/* Errors: LEAVE or FAILED, see leave. */
static outcome check(walk* w, const leaf* l) {
  if (l->offer.made == NULL) return leave();
  if (l->offer.state == PY_ON_DEVICE)
    w->has_devices = 1;
  else if (l->offer.state == PY_NEEDS_COPY || w->call->options & DLX_COPIES)
    w->has_copies = 1;
  return DONE;
}

/* Take those arrays whose pair is this. What cannot be exported as it is comes after the others,
 * then producers, which are called where nothing else is refused. */
static outcome take_each(walk* w, unsigned what, int* has_blocked) {
  outcome result = DONE;
  unsigned options = w->call->options;
  for (Py_ssize_t i = 0; i < w->leaves.n && result == DONE; i++) {
    leaf* l = &leaves_of(w)[i];
    if (i + AHEAD < w->leaves.n) fetch(l[AHEAD].obj);
    if (l->what != what) continue;
    if (py_target_holds(w->target, options))
      l->source->take(l->source, w->target, l->obj, options, &l->offer);
    if (l->offer.state == PY_BLOCKED && l->source->unblocked && !PyErr_Occurred())
      *has_blocked = 1;
    else
      result = check(w, l);
  }
  return result;
}

static outcome take_all(walk* w) {
  outcome result = DONE;
  int has_blocked = 0;
  unsigned options = w->call->options;
  for (Py_ssize_t i = 0; i < w->leaves.n; i++) {
    leaf* l = &leaves_of(w)[i];
    if (l->what == PY_STAYS &&
        (l->result = l->source->within.stay(l->source, w->target, l->obj, options)) == NULL)
      return leave();
  }
  result = take_each(w, PY_CONVERTS, &has_blocked);
  for (Py_ssize_t i = 0; has_blocked && i < w->leaves.n && result == DONE; i++) {
    leaf* l = &leaves_of(w)[i];
    if (l->offer.state != PY_BLOCKED) continue;
    py_take_unblocked(l->source, w->target, l->obj, options, &l->offer);
    result = check(w, l);
  }
  if (result != DONE || !w->has_producers) return result;
  return has_rules(w) ? LEAVE : take_each(w, PY_PRODUCES, &has_blocked);
}

/* What producers gave goes to the Python path, which does not call them again. */
static void leave_answers(walk* w) {
  for (Py_ssize_t i = 0; i < w->leaves.n && !PyErr_Occurred(); i++) {
    leaf* l = &leaves_of(w)[i];
    if (l->offer.answer == NULL) continue;
    if (l->offer.made) {
      if (!py_capsule_give_back(l->offer.answer, l->offer.made))
        continue; /* a copy's: asked again */
      l->offer.made = NULL;
    }
    py_call_leave(w->call, l->obj, l->offer.answer, l->offer.state == PY_RAISED);
  }
}

/* Streams are made to wait before anything is handed over. */
static outcome order_all(walk* w) {
  for (Py_ssize_t i = 0; w->has_devices && i < w->leaves.n; i++) {
    leaf* l = &leaves_of(w)[i];
    if (l->offer.state == PY_ON_DEVICE &&
        !py_streams_order(&w->streams, l->source, w->target, l->offer.made, l->obj))
      return leave();
  }
  return DONE;
}

/* The copies that the target framework makes of its own arrays. One may fail, so they come before
 * those of capsules, see copy_all. */
static outcome copy_within(walk* w) {
  for (Py_ssize_t i = 0; w->call->options & DLX_COPIES && i < w->leaves.n; i++) {
    leaf* l = &leaves_of(w)[i];
    if (l->what == PY_STAYS && (l->result = py_copy_within(l->source, l->result)) == NULL)
      return leave();
  }
  return DONE;
}

/* Nothing is copied before every array was found right, and streams wait: a capsule whose tensor
 * was copied cannot be left to Python. */
static outcome copy_all(walk* w) {
  unsigned options = w->call->options;
  for (Py_ssize_t i = 0; w->has_copies && i < w->leaves.n; i++) {
    py_offer* o = &leaves_of(w)[i].offer;
    if (o->made && (o->state == PY_NEEDS_COPY || (options & DLX_COPIES && o->state == PY_TAKEN)) &&
        (o->made = py_target_copy(w->target, o->made, options, o->incompatible)) == NULL)
      return leave();
  }
  return DONE;
}

static outcome hand_over_all(walk* w) {
  for (Py_ssize_t i = 0; i < w->leaves.n; i++) {
    leaf* l = &leaves_of(w)[i];
    if (i + AHEAD < w->leaves.n) { /* a dlx.Tensor asks its owner, too, what it is */
      if (l[AHEAD].offer.made) fetch(l[AHEAD].offer.made);
      __builtin_prefetch(l[AHEAD].obj);
    }
    DLManagedTensorVersioned* made = l->offer.made;
    if (made == NULL) continue;
    l->offer.made = NULL;
    l->result = l->offer.state == PY_ON_DEVICE
                    ? py_streams_make(&w->streams, w->call, l->source, w->target, made, l->obj)
                    : w->target->make(w->call, w->target, made, l->obj);
    if (l->result == NULL) return FAILED;
  }
  return DONE;
}

/* ---- unflatten ------------------------------------------------------------------------------- */

/* Owns: borrowed. */
static PyObject* result_of(const walk* w, const item* it) {
  if (it->link == ITSELF) return it->value;
  return it->link < 0 ? leaves_of(w)[~it->link].result : nodes_of(w)[it->link].result;
}

/* The same for a new container. What stands once moves there: of many results none is in a cache.
 * Owns: the result is new. */
static PyObject* take_result(const walk* w, const item* it) {
  if (it->link < 0 && !leaves_of(w)[~it->link].is_shared) {
    PyObject* result = leaves_of(w)[~it->link].result;
    leaves_of(w)[~it->link].result = NULL;
    return result;
  }
  return Py_NewRef(result_of(w, it));
}

/* An empty container that exists before its children. Errors: NULL with an exception. */
static PyObject* new_empty(const node* n) {
  return PyList_CheckExact(n->obj) ? PyList_New(0) : PyDict_New();
}

static PyObject* make_list(const walk* w, const node* n) {
  PyObject* made = PyList_New(n->end - n->first);
  for (Py_ssize_t i = n->first; made && i < n->end; i++)
    PyList_SET_ITEM(made, i - n->first, take_result(w, &items_of(w)[i]));
  return made;
}

static int is_changed(const walk* w, const node* n) {
  Py_ssize_t i = n->first;
  while (i < n->end && result_of(w, &items_of(w)[i]) == items_of(w)[i].value) i++;
  return i < n->end;
}

/* A tuple none of whose children changed is itself. */
static PyObject* make_tuple(const walk* w, const node* n) {
  if (!is_changed(w, n)) return Py_NewRef(n->obj);
  PyObject* made = PyTuple_New(n->end - n->first);
  for (Py_ssize_t i = n->first; made && i < n->end; i++)
    PyTuple_SET_ITEM(made, i - n->first, take_result(w, &items_of(w)[i]));
  return made;
}

/* The same of what cannot be changed. Errors: NULL: Python says it again, unless an exception is
 * set. */
static PyObject* make_by_rule(const walk* w, const node* n) {
  if (PyTuple_GET_ITEM(n->rule, 2) != Py_True && !is_changed(w, n)) return Py_NewRef(n->obj);
  PyObject *children = make_list(w, n), *made = NULL;
  if (children)
    made = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(n->rule, 1), n->obj, n->keys, children,
                                        Py_None, NULL);
  Py_XDECREF(children);
  if (made == NULL) py_error_forget();
  return made;
}

/* Fill an empty list or dict. Errors: -1 with an exception. */
static int fill(const walk* w, const node* n, PyObject* made) {
  Py_ssize_t count = n->end - n->first;
  for (const item *it = &items_of(w)[n->first], *end = it + count; it < end; it++) {
    int failed = PyDict_CheckExact(made) ? PyDict_SetItem(made, it[count].value, result_of(w, it))
                                         : PyList_Append(made, result_of(w, it));
    if (failed < 0) return -1;
  }
  return 0;
}

/* Whether the results of a node's children are the children of another container of its type. No
 * Python runs: keys are plain. */
static int holds_results(const walk* w, const node* n, PyObject* own) {
  Py_ssize_t count = n->end - n->first, i = 0, position = 0;
  const item* first = &items_of(w)[n->first];
  if (n->rule || Py_TYPE(own) != Py_TYPE(n->obj)) return 0;
  PyObject *key, *value;
  PY_LOCKED(own)
  if (PyDict_CheckExact(own)) {
    while (PyDict_GET_SIZE(own) == count && PyDict_Next(own, &position, &key, &value) &&
           result_of(w, &first[i]) == value &&
           (key == first[i + count].value ||
            (Py_TYPE(key) == Py_TYPE(first[i + count].value) &&
             PyObject_RichCompareBool(key, first[i + count].value, Py_EQ) == 1)))
      i++;
  } else if (PySequence_Fast_GET_SIZE(own) == count) {
    while (i < count && PySequence_Fast_GET_ITEM(own, i) == result_of(w, &first[i])) i++;
  } else {
    i = -1;
  }
  PY_UNLOCKED()
  return i == count;
}

/* Give the results of arrays to the visitor, before they move into containers. */
static outcome note_arrays(walk* w) {
  py_visitor* visitor = w->call->visitor;
  for (leaf *l = leaves_of(w), *end = l + w->leaves.n; visitor && visitor->note && l < end; l++) {
    if (visitor->note(visitor, l->obj, l->result, 0) < 0) return FAILED;
  }
  return DONE;
}

static outcome note_containers(walk* w) {
  py_visitor* visitor = w->call->visitor;
  for (Py_ssize_t i = 1; visitor && visitor->note && i < w->nodes.n; i++) {
    if (visitor->note(visitor, nodes_of(w)[i].obj, nodes_of(w)[i].result, 1) < 0) return FAILED;
  }
  return DONE;
}

static outcome unflatten(walk* w) {
  py_visitor* visitor = w->call->visitor;
  for (Py_ssize_t i = 0; i < w->nodes.n; i++) {
    node* n = &nodes_of(w)[i];
    if (n->is_cyclic && (n->result = new_empty(n)) == NULL) return FAILED;
  }
  for (Py_ssize_t i = 0; i < w->order.n; i++) {
    node* n = &nodes_of(w)[((Py_ssize_t*)w->order.at)[i]];
    PyObject* own = visitor && visitor->own && !n->is_cyclic ? visitor->own(visitor, n->obj) : NULL;
    if (own && holds_results(w, n, own)) {
      n->result = Py_NewRef(own);
    } else if (n->rule) {
      if ((n->result = make_by_rule(w, n)) == NULL) return leave();
    } else if (PyTuple_CheckExact(n->obj)) {
      n->result = make_tuple(w, n);
    } else if (PyList_CheckExact(n->obj) && !n->is_cyclic) {
      n->result = make_list(w, n);
    } else {
      if (n->result == NULL) n->result = PyDict_New();
      if (n->result && fill(w, n, n->result) < 0) return FAILED;
    }
    if (n->result == NULL) return FAILED;
  }
  return DONE;
}

/* ---- the entry point ------------------------------------------------------------------------- */

PyObject* py_convert_tree(py_call* call, PyObject* root, PyObject* rule) {
  walk w;
  walk_begin(&w, call);
  call->tree = root;
  PyObject* result = NULL;
  if (walk_flatten(&w, root, rule) == DONE && take_all(&w) == DONE && order_all(&w) == DONE &&
      copy_within(&w) == DONE && copy_all(&w) == DONE && hand_over_all(&w) == DONE &&
      note_arrays(&w) == DONE && unflatten(&w) == DONE && note_containers(&w) == DONE)
    result = Py_NewRef(nodes_of(&w)[0].result);
  else if (!PyErr_Occurred())
    leave_answers(&w);
  walk_end(&w);
  return result;
}

/* A container of another framework that becomes a list or dict: `children` gives that, or a pair of
 * that or None, and what the container answered, or raised, which the Python path does not ask
 * again. */
static PyObject* convert_children(py_call* call, PyObject* children, PyObject* obj) {
  PyObject* may_copy = call->options & (DLX_COPIES | DLX_SHARES) ? Py_False : Py_True;
  PyObject* given = PyObject_CallFunctionObjArgs(children, obj, may_copy, NULL);
  if (given == NULL) return py_error_forget(), NULL;
  int has_answer = PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == 2;
  PyObject* plain = has_answer ? PyTuple_GET_ITEM(given, 0) : given;
  PyObject* result = PyDict_CheckExact(plain) || PyList_CheckExact(plain)
                         ? py_convert_tree(call, plain, NULL)
                         : NULL; /* by Python */
  if (result == NULL && has_answer && !PyErr_Occurred()) {
    PyObject* answer = PyTuple_GET_ITEM(given, 1);
    py_call_leave(call, obj, answer, PyExceptionInstance_Check(answer));
  }
  py_drop(given);
  return result;
}

PyObject* py_convert_container(py_call* call, const py_pair* pair, PyObject* obj) {
  PyObject* parts = pair->source->parts;
  if (pair->what == PY_RULE) return py_convert_tree(call, obj, parts);
  return pair->what == PY_CHILDREN ? convert_children(call, parts, obj) : NULL;
}
