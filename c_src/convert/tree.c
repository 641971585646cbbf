/* Trees on the fast path: lists, tuples, dicts of these exact types, and containers with a rule
 * (records, OrderedDict). It has the stages of dlx/_engine/batch.py: flatten, take and check
 * every array, then hand over. If anything is left to the Python path, nothing was handed over, and
 * nothing has changed. */

#include "walk.h"

/* ---- take and copy the arrays ---------------------------------------------------------------- */

/* Whether Python code rebuilds a container, which may fail after the hand-over. */
static int has_rules(const walk* w) {
  Py_ssize_t i = 0;
  while (i < w->nodes.n && get_nodes(w)[i].rule == NULL) i++;
  return i < w->nodes.n;
}

static outcome check_leaf(walk* w, const leaf* l) {
  if (l->offer.made == NULL) return leave();
  if (l->offer.state == PY_ON_DEVICE)
    w->has_devices = 1;
  else if (l->offer.state == PY_NEEDS_COPY || w->call->options & DLX_COPIES)
    w->has_copies = 1;
  return DONE;
}

/* Take the arrays of one kind of pair. Blocked arrays follow, then producers, which are called only
 * if nothing else is left to Python. */
static outcome take_pairs(walk* w, unsigned what, int* has_blocked) {
  outcome result = DONE;
  unsigned options = w->call->options;
  for (Py_ssize_t i = 0; i < w->leaves.n && result == DONE; i++) {
    leaf* l = &get_leaves(w)[i];
    if (i + AHEAD < w->leaves.n) prefetch(l[AHEAD].obj);
    if (l->what != what) continue;
    if (py_target_holds(w->target, options))
      l->source->take(l->source, w->target, l->obj, options, &l->offer);
    if (l->offer.state == PY_BLOCKED && l->source->unblocked && !PyErr_Occurred())
      *has_blocked = 1;
    else
      result = check_leaf(w, l);
  }
  return result;
}

static outcome take_all(walk* w) {
  outcome result = DONE;
  int has_blocked = 0;
  unsigned options = w->call->options;
  for (Py_ssize_t i = 0; i < w->leaves.n; i++) {
    leaf* l = &get_leaves(w)[i];
    if (l->what == PY_STAYS &&
        (l->result = l->source->framework.stay(l->source, w->target, l->obj, options)) == NULL)
      return leave();
  }
  result = take_pairs(w, PY_CONVERTS, &has_blocked);
  for (Py_ssize_t i = 0; has_blocked && i < w->leaves.n && result == DONE; i++) {
    leaf* l = &get_leaves(w)[i];
    if (l->offer.state != PY_BLOCKED) continue;
    py_take_unblocked(l->source, w->target, l->obj, options, &l->offer);
    result = check_leaf(w, l);
  }
  if (result != DONE || !w->has_producers) return result;
  return has_rules(w) ? LEAVE : take_pairs(w, PY_PRODUCES, &has_blocked);
}

/* Keep responses for the Python path, which does not call the producers again. */
static void keep_responses(walk* w) {
  for (Py_ssize_t i = 0; i < w->leaves.n && !PyErr_Occurred(); i++) {
    leaf* l = &get_leaves(w)[i];
    if (l->offer.response == NULL) continue;
    if (l->offer.made) {
      if (!py_capsule_give_back(l->offer.response, l->offer.made))
        continue; /* copied: call it again */
      l->offer.made = NULL;
    }
    py_call_keep_response(w->call, l->obj, l->offer.response, l->offer.state == PY_RAISED);
  }
}

static outcome order_all(walk* w) {
  for (Py_ssize_t i = 0; w->has_devices && i < w->leaves.n; i++) {
    leaf* l = &get_leaves(w)[i];
    if (l->offer.state == PY_ON_DEVICE &&
        !py_streams_order(&w->streams, l->source, w->target, l->offer.made, l->obj))
      return leave();
  }
  return DONE;
}

/* Copies by the framework come before copies of capsules, as they may fail: see copy_all. */
static outcome copy_by_framework(walk* w) {
  for (Py_ssize_t i = 0; w->call->options & DLX_COPIES && i < w->leaves.n; i++) {
    leaf* l = &get_leaves(w)[i];
    if (l->what == PY_STAYS && (l->result = py_copy_by_framework(l->source, l->result)) == NULL)
      return leave();
  }
  return DONE;
}

/* Copies come last: a capsule whose tensor was copied cannot be left to Python. */
static outcome copy_all(walk* w) {
  unsigned options = w->call->options;
  for (Py_ssize_t i = 0; w->has_copies && i < w->leaves.n; i++) {
    py_offer* o = &get_leaves(w)[i].offer;
    if (o->made && (o->state == PY_NEEDS_COPY || (options & DLX_COPIES && o->state == PY_TAKEN)) &&
        (o->made = py_target_copy(w->target, o->made, options, o->incompatible)) == NULL)
      return leave();
  }
  return DONE;
}

static outcome hand_over_all(walk* w) {
  for (Py_ssize_t i = 0; i < w->leaves.n; i++) {
    leaf* l = &get_leaves(w)[i];
    if (i + AHEAD < w->leaves.n) { /* a dlx.Tensor reads from its owner, too */
      if (l[AHEAD].offer.made) prefetch(l[AHEAD].offer.made);
      __builtin_prefetch(l[AHEAD].obj);
    }
    DLManagedTensorVersioned* made = l->offer.made;
    if (made == NULL) continue;
    l->offer.made = NULL;
    l->result = l->offer.state == PY_ON_DEVICE
                    ? py_streams_hand_over(&w->streams, w->call, l->source, w->target, made, l->obj)
                    : w->target->hand_over(w->call, w->target, made, l->obj);
    if (l->result == NULL) return FAILED;
  }
  return DONE;
}

/* ---- unflatten ------------------------------------------------------------------------------- */

/* Owns: borrowed. */
static PyObject* get_result(const walk* w, const item* it) {
  if (it->link == ITSELF) return it->value;
  return it->link < 0 ? get_leaves(w)[~it->link].result : get_nodes(w)[it->link].result;
}

/* Move the result into its only container, without touching its reference count: it is not in a
 * cache. */
static PyObject* take_result(const walk* w, const item* it) {
  if (it->link < 0 && !get_leaves(w)[~it->link].is_shared) {
    PyObject* result = get_leaves(w)[~it->link].result;
    get_leaves(w)[~it->link].result = NULL;
    return result;
  }
  return Py_NewRef(get_result(w, it));
}

/* For a container that contains itself. Errors: NULL with an exception. */
static PyObject* new_empty(const node* n) {
  return PyList_CheckExact(n->obj) ? PyList_New(0) : PyDict_New();
}

static PyObject* build_list(const walk* w, const node* n) {
  PyObject* made = PyList_New(n->end - n->first);
  for (Py_ssize_t i = n->first; made && i < n->end; i++)
    PyList_SET_ITEM(made, i - n->first, take_result(w, &get_items(w)[i]));
  return made;
}

static int is_changed(const walk* w, const node* n) {
  Py_ssize_t i = n->first;
  while (i < n->end && get_result(w, &get_items(w)[i]) == get_items(w)[i].value) i++;
  return i < n->end;
}

/* Without changes, return the tuple itself. */
static PyObject* build_tuple(const walk* w, const node* n) {
  if (!is_changed(w, n)) return Py_NewRef(n->obj);
  PyObject* made = PyTuple_New(n->end - n->first);
  for (Py_ssize_t i = n->first; made && i < n->end; i++)
    PyTuple_SET_ITEM(made, i - n->first, take_result(w, &get_items(w)[i]));
  return made;
}

/* Without changes, return an immutable container itself. */
static PyObject* build_by_rule(const walk* w, const node* n) {
  if (PyTuple_GET_ITEM(n->rule, 2) != Py_True && !is_changed(w, n)) return Py_NewRef(n->obj);
  PyObject *children = build_list(w, n), *made = NULL;
  if (children)
    made = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(n->rule, 1), n->obj, n->keys, children,
                                        Py_None, NULL);
  Py_XDECREF(children);
  if (made == NULL) py_error_forget();
  return made;
}

static int fill_container(const walk* w, const node* n, PyObject* made) {
  Py_ssize_t count = n->end - n->first;
  for (const item *it = &get_items(w)[n->first], *end = it + count; it < end; it++) {
    int failed = PyDict_CheckExact(made) ? PyDict_SetItem(made, it[count].value, get_result(w, it))
                                         : PyList_Append(made, get_result(w, it));
    if (failed < 0) return -1;
  }
  return 0;
}

/* Whether the results of a node's children are the children of `own`, a container of the same type.
 * Runs no Python: keys are plain data. */
static int holds_results(const walk* w, const node* n, PyObject* own) {
  Py_ssize_t count = n->end - n->first, i = 0, position = 0;
  const item* first = &get_items(w)[n->first];
  if (n->rule || Py_TYPE(own) != Py_TYPE(n->obj)) return 0;
  PyObject *key, *value;
  PY_LOCKED(own)
  if (PyDict_CheckExact(own)) {
    while (PyDict_GET_SIZE(own) == count && PyDict_Next(own, &position, &key, &value) &&
           get_result(w, &first[i]) == value &&
           (key == first[i + count].value ||
            (Py_TYPE(key) == Py_TYPE(first[i + count].value) &&
             PyObject_RichCompareBool(key, first[i + count].value, Py_EQ) == 1)))
      i++;
  } else if (PySequence_Fast_GET_SIZE(own) == count) {
    while (i < count && PySequence_Fast_GET_ITEM(own, i) == get_result(w, &first[i])) i++;
  } else {
    i = -1;
  }
  PY_UNLOCKED()
  return i == count;
}

/* Before the results move into containers. */
static outcome note_arrays(walk* w) {
  py_visitor* visitor = w->call->visitor;
  for (leaf *l = get_leaves(w), *end = l + w->leaves.n; visitor && visitor->note && l < end; l++) {
    if (visitor->note(visitor, l->obj, l->result, 0) < 0) return FAILED;
  }
  return DONE;
}

static outcome note_containers(walk* w) {
  py_visitor* visitor = w->call->visitor;
  for (Py_ssize_t i = 1; visitor && visitor->note && i < w->nodes.n; i++) {
    if (visitor->note(visitor, get_nodes(w)[i].obj, get_nodes(w)[i].result, 1) < 0) return FAILED;
  }
  return DONE;
}

static outcome unflatten(walk* w) {
  py_visitor* visitor = w->call->visitor;
  for (Py_ssize_t i = 0; i < w->nodes.n; i++) {
    node* n = &get_nodes(w)[i];
    if (n->is_cyclic && (n->result = new_empty(n)) == NULL) return FAILED;
  }
  for (Py_ssize_t i = 0; i < w->order.n; i++) {
    node* n = &get_nodes(w)[((Py_ssize_t*)w->order.at)[i]];
    PyObject* own =
        visitor && visitor->find_own && !n->is_cyclic ? visitor->find_own(visitor, n->obj) : NULL;
    if (own && holds_results(w, n, own)) {
      n->result = Py_NewRef(own);
    } else if (n->rule) {
      if ((n->result = build_by_rule(w, n)) == NULL) return leave();
    } else if (PyTuple_CheckExact(n->obj)) {
      n->result = build_tuple(w, n);
    } else if (PyList_CheckExact(n->obj) && !n->is_cyclic) {
      n->result = build_list(w, n);
    } else {
      if (n->result == NULL) n->result = PyDict_New();
      if (n->result && fill_container(w, n, n->result) < 0) return FAILED;
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
      copy_by_framework(&w) == DONE && copy_all(&w) == DONE && hand_over_all(&w) == DONE &&
      note_arrays(&w) == DONE && unflatten(&w) == DONE && note_containers(&w) == DONE)
    result = Py_NewRef(get_nodes(&w)[0].result);
  else if (!PyErr_Occurred())
    keep_responses(&w);
  walk_end(&w);
  return result;
}

/* Convert a container of another framework that becomes a list or dict. `children` returns that, or
 * a pair of that (or None) and the container's response, which is kept for the Python path. */
static PyObject* convert_children(py_call* call, PyObject* children, PyObject* obj) {
  PyObject* may_copy = call->options & (DLX_COPIES | DLX_SHARES) ? Py_False : Py_True;
  PyObject* value = PyObject_CallFunctionObjArgs(children, obj, may_copy, NULL);
  if (value == NULL) return py_error_forget(), NULL;
  int has_answer = PyTuple_CheckExact(value) && PyTuple_GET_SIZE(value) == 2;
  PyObject* tree = has_answer ? PyTuple_GET_ITEM(value, 0) : value;
  PyObject* result = PyDict_CheckExact(tree) || PyList_CheckExact(tree)
                         ? py_convert_tree(call, tree, NULL)
                         : NULL; /* fallback */
  if (result == NULL && has_answer && !PyErr_Occurred()) {
    PyObject* answer = PyTuple_GET_ITEM(value, 1);
    py_call_keep_response(call, obj, answer, PyExceptionInstance_Check(answer));
  }
  py_drop(value);
  return result;
}

PyObject* py_convert_container(py_call* call, const py_pair* pair, PyObject* obj) {
  PyObject* parts = pair->source->parts;
  if (pair->what == PY_RULE) return py_convert_tree(call, obj, parts);
  return pair->what == PY_CHILDREN ? convert_children(call, parts, obj) : NULL;
}
