/* Trees in the fast path: lists, tuples and dicts of exactly these types, and containers that have
 * a rule (records, OrderedDict), around arrays that have routes. The stages are those of
 * dlx/_engine/batch.py: flatten everything, then borrow and check every array, and only then hand
 * over. Anything unusual falls back to the Python path before anything is handed over, with nothing
 * changed.
 *
 * Children are copied out of a container at once, so that code that runs meanwhile (a guard, the
 * collector) may change it. There is no recursion, so any depth works. */

#include "fast_path_walk.h"

typedef enum {
  FAILED = -1,
  LEAVE = 0,
  DONE = 1
} outcome; /* an exception is set; ask Python; well */

/* Python is asked, unless what has just failed ends the call, see py_fast_path_route. */
static outcome leave(void) {
  return PyErr_Occurred() ? FAILED : LEAVE;
}

/* ---- flatten --------------------------------------------------------------------------------- */

/* Data that passes through and may stand anywhere. */
static int is_plain_data(PyTypeObject* type) {
  return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyFloat_Type ||
         type == &PyBool_Type || type == Py_TYPE(Py_None) || type == &PyBytes_Type ||
         type == &PyComplex_Type;
}

/* Keys that can be put into another dict without running Python. */
static int is_plain_key(PyObject* key) {
  PyTypeObject* type = Py_TYPE(key);
  return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type ||
         type == &PyBool_Type || key == Py_None;
}

static int is_tree(PyTypeObject* type) {
  return type == &PyList_Type || type == &PyTuple_Type || type == &PyDict_Type;
}

int py_tree_takes(PyTypeObject* type) {
  return is_tree(type);
}

int py_tree_passes(PyTypeObject* type) {
  return is_plain_data(type);
}

/* Open a node whose children lie before `at`. */
static node* entered(walk* w, PyObject* obj, const item* at) {
  Py_ssize_t first = w->n_items, end = at - w->items;
  node* n = &w->nodes[w->n_nodes];
  *n = (node){.obj = Py_NewRef(obj), .first = first, .end = end, .next = first, .is_open = 1};
  w->n_items = end;
  w->stack[w->n_stack++] = w->n_nodes++;
  return n;
}

/* Make room for what a container with so many children may add. Errors: -1 with MemoryError. */
static int need_room(walk* w, Py_ssize_t n_items, Py_ssize_t n_children) {
  return need_node(w) < 0 || need_items(w, n_items) < 0 || need_leaves(w, n_children) < 0 ||
                 need_visits(w, n_children) < 0
             ? -1
             : 0;
}

/* Copy keys and values out of a dict. */
static outcome copy_dict(walk* w, PyObject* dict) {
  Py_ssize_t count = PyDict_GET_SIZE(dict), position = 0;
  if (need_room(w, 2 * count, count) < 0) return FAILED;
  item *first = &w->items[w->n_items], *at = first;
  PyObject *key, *value;
  while (PyDict_Next(dict, &position, &key, &value) && is_plain_key(key)) {
    at[0] = (item){Py_NewRef(value), ITSELF};
    at++[count] = (item){Py_NewRef(key), ITSELF};
  }
  if (at - first < count) {
    while (at > first) { /* the dict holds them, too */
      at--;
      Py_DECREF(at[0].value);
      Py_DECREF(at[count].value);
    }
    return LEAVE;
  }
  entered(w, dict, at);
  w->n_items += count;
  return DONE;
}

/* Copy the children of a list, tuple or dict out of it, which no other thread changes meanwhile; no
 * Python runs. */
static outcome copy_children(walk* w, PyObject* obj) {
  if (PyDict_CheckExact(obj)) return copy_dict(w, obj);
  Py_ssize_t count = Py_SIZE(obj);
  if (need_room(w, count, count) < 0) return FAILED;
  item* at = &w->items[w->n_items];
  PyObject** children =
      PyList_CheckExact(obj) ? ((PyListObject*)obj)->ob_item : ((PyTupleObject*)obj)->ob_item;
  for (Py_ssize_t i = 0; i < count; i++) *at++ = (item){Py_NewRef(children[i]), ITSELF};
  entered(w, obj, at);
  return DONE;
}

static outcome enter(walk* w, PyObject* obj) {
  outcome result;
  PY_LOCKED(obj)
  result = copy_children(w, obj);
  PY_UNLOCKED()
  return result;
}

/* rule(type) -> (flatten, unflatten, whether it is mutable), as in dlx.adapter.Container, or None.
 */
static PyObject* rule_of;

/* Errors: LEAVE, with `rule` NULL, for a type without one. */
static outcome find_rule(walk* w, PyTypeObject* type) {
  if (w->rule && w->ruled == type) return DONE;
  PyObject* rule = rule_of ? PyObject_CallOneArg(rule_of, (PyObject*)type) : NULL;
  if (rule && !(PyTuple_CheckExact(rule) && PyTuple_GET_SIZE(rule) == 3)) Py_CLEAR(rule);
  w->ruled = type;
  Py_XSETREF(w->rule, rule);
  if (rule == NULL && py_error_forget() < 0) return FAILED;
  return rule ? DONE : LEAVE;
}

/* Copy the children of a container out of it, by w->rule. */
static outcome enter_by_rule(walk* w, PyObject* obj) {
  PyObject* rule = Py_NewRef(w->rule);
  PyObject* parts = PyObject_CallOneArg(PyTuple_GET_ITEM(rule, 0), obj);
  outcome result = parts == NULL && py_error_forget() < 0 ? FAILED : LEAVE;
  if (parts && PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 2 &&
      PyList_CheckExact(PyTuple_GET_ITEM(parts, 1))) {
    PyObject* children = PyTuple_GET_ITEM(parts, 1);
    PY_LOCKED(children)
    Py_ssize_t count = PyList_GET_SIZE(children);
    result = need_room(w, count, count) < 0 ? FAILED : DONE;
    if (result == DONE) {
      item* at = &w->items[w->n_items];
      for (Py_ssize_t i = 0; i < count; i++)
        *at++ = (item){Py_NewRef(PyList_GET_ITEM(children, i)), ITSELF};
      node* n = entered(w, obj, at);
      n->rule = Py_NewRef(rule);
      n->keys = Py_NewRef(PyTuple_GET_ITEM(parts, 0));
    }
    PY_UNLOCKED()
  }
  Py_XDECREF(parts);
  Py_DECREF(rule);
  return result;
}

/* Note the container that is entered next. Errors: -1 with MemoryError. */
static int remember_next(walk* w, visit* slot, PyObject* obj) {
  if (need_node(w) < 0) return -1;
  w->nodes[w->n_nodes].obj = obj;
  return remember(w, slot, (visit)w->n_nodes + 1);
}

/* A child that is a container. */
static outcome look_into(walk* w, Py_ssize_t which, int has_rule) {
  PyObject* child = w->items[which].value;
  visit* v = find(w, child);
  if (*v < 0) return LEAVE; /* it was met as an array: its type has become a container's since */
  if (*v) {
    node* known = &w->nodes[*v - 1];
    if (known->is_open && (has_rule || PyTuple_CheckExact(child)))
      return LEAVE; /* the Python path reports the path, or makes a record that holds itself */
    known->is_cyclic |= known->is_open;
    w->items[which].link = *v - 1;
    return DONE;
  }
  w->items[which].link = w->n_nodes;
  if (remember_next(w, v, child) < 0) return FAILED;
  return has_rule ? enter_by_rule(w, child) : enter(w, child);
}

/* A child whose result is known. Owns: takes `result`. */
static outcome add_known(walk* w, Py_ssize_t which, PyObject* result) {
  PyObject* child = w->items[which].value;
  visit* v = find(w, child);
  outcome found = *v > 0 ? LEAVE : *v == 0 && need_leaves(w, 1) < 0 ? FAILED : DONE;
  if (found == DONE && *v < 0) w->leaves[~*v].is_shared = 1;
  if (found == DONE) w->items[which].link = *v < 0 ? *v : ~w->n_leaves;
  if (found != DONE || *v < 0) {
    Py_DECREF(result);
    return found;
  }
  w->leaves[w->n_leaves] = (leaf){.obj = child, .result = result};
  return remember(w, v, (visit)~w->n_leaves++) < 0 ? FAILED : DONE;
}

/* Ask the visitor about a child: whether it is done with, as by look_at, or an array. */
static outcome ask(walk* w, Py_ssize_t which, int* is_array) {
  PyObject *child = w->items[which].value, *found = NULL;
  int action = w->visitor->look(w->visitor, child, &found);
  *is_array = action == PY_CONVERTS;
  if (action == PY_KNOWN) return add_known(w, which, found);
  if (action != PY_ENTERS) return action < DONE ? (outcome)action : DONE;
  Py_XSETREF(w->rule, found);
  w->ruled = Py_TYPE(child);
  return look_into(w, which, 1);
}

/* Say what a child is, and note it if it is new. */
static outcome look_at(walk* w, PyObject* callable, Py_ssize_t which, PyObject* to) {
  PyObject* child = w->items[which].value;
  PyTypeObject* type = Py_TYPE(child);
  if (is_plain_data(type)) return DONE;
  if (is_tree(type)) return look_into(w, which, 0);
  int is_array = 0;
  outcome asked = w->visitor ? ask(w, which, &is_array) : DONE;
  if (w->visitor && !is_array) return asked;
  if (w->rule && w->ruled == type) return look_into(w, which, 1);
  py_route* route = py_fast_path_route(callable, type, to); /* may run Python; `child` is held */
  if (route == NULL && PyErr_Occurred()) return FAILED;
  if (route == NULL || !route->is_fast_path) {
    outcome found = route && route->children ? LEAVE : find_rule(w, type);
    return found == DONE ? look_into(w, which, 1) : found;
  }
  if (route->is_root_only) return DONE; /* it passes through */
  if (w->options & route->leaves) return LEAVE;
  visit* v = find(w, child);
  if (*v == 0) {
    if (need_leaves(w, 1) < 0) return FAILED;
    py_route_enter(route);
    w->leaves[w->n_leaves] = (leaf){.obj = child, .route = route};
    w->items[which].link = ~w->n_leaves;
    w->has_producers |= route->producer.names != NULL;
    return remember(w, v, (visit)~w->n_leaves++) < 0 ? FAILED : DONE;
  }
  w->items[which].link = *v < 0 ? *v : *v - 1;
  if (*v < 0) w->leaves[~*v].is_shared = 1;
  return DONE;
}

static outcome flatten(walk* w, PyObject* callable, PyObject* root, PyObject* to) {
  if (remember_next(w, find(w, root), root) < 0) return FAILED;
  outcome result = is_tree(Py_TYPE(root)) ? DONE : find_rule(w, Py_TYPE(root));
  if (result == DONE) result = is_tree(Py_TYPE(root)) ? enter(w, root) : enter_by_rule(w, root);
  while (result == DONE && w->n_stack) {
    Py_ssize_t number = w->stack[w->n_stack - 1];
    if (w->nodes[number].next < w->nodes[number].end) {
      fetch_children(w, &w->nodes[number]);
      result = look_at(w, callable, w->nodes[number].next++, to);
    } else {
      w->nodes[number].is_open = 0;
      w->order[w->n_order++] = number;
      w->n_stack--;
    }
  }
  if (result == DONE && w->n_leaves == 0 && !w->visitor)
    return LEAVE; /* `to` has not been checked yet */
  return result;
}

/* ---- borrow and copy the arrays -------------------------------------------------------------- */

/* Whether a container's own Python makes it anew, which may fail after the hand-over. */
static int has_rules(const walk* w) {
  Py_ssize_t i = 0;
  while (i < w->n_nodes && w->nodes[i].rule == NULL) i++;
  return i < w->n_nodes;
}

static void note_resolvable(walk* w, const leaf* l) {
  if (l->resolvable == DLX_ON_DEVICE)
    w->has_devices = 1;
  else if (l->resolvable || w->options & DLX_COPIES)
    w->has_copies = 1;
}

/* Owns: the leaf owns what was borrowed. Errors: LEAVE or FAILED, see leave. */
static outcome borrowed(walk* w, leaf* l, DLManagedTensorVersioned* made) {
  if (made == NULL) return leave();
  l->made = made;
  l->is_borrowed = 1;
  note_resolvable(w, l);
  return DONE;
}

/* Of the arrays that cannot be exported as they are, when all others are borrowed. Errors: LEAVE or
 * FAILED, see leave. */
static outcome borrow_blocked(walk* w) {
  outcome result = DONE;
  for (Py_ssize_t i = 0; i < w->n_leaves && result == DONE; i++) {
    leaf* l = &w->leaves[i];
    if (l->resolvable != DLX_BLOCKED) continue;
    result = borrowed(w, l, py_fast_path_unblocked(l->route, l->obj, w->options, &l->resolvable));
  }
  return result;
}

/* Copies are made, and then producers called, where nothing else is refused, or may be later. */
static outcome borrow_all(walk* w) {
  outcome result = DONE;
  int has_blocked = 0;
  for (Py_ssize_t i = 0; i < w->n_leaves && result == DONE; i++) {
    leaf* l = &w->leaves[i];
    if (i + AHEAD < w->n_leaves) fetch(w->leaves[i + AHEAD].obj);
    if (l->route == NULL) continue;
    if (l->route->is_same) {
      if ((l->result = py_fast_path_same(l->route, l->obj, w->options)) == NULL) return leave();
    } else if (l->route->producer.names == NULL) {
      DLManagedTensorVersioned* made =
          py_fast_path_borrow(l->route, l->obj, w->options, &l->resolvable);
      int is_blocked =
          made == NULL && l->resolvable == DLX_BLOCKED && l->route->unblocked && !PyErr_Occurred();
      has_blocked |= is_blocked;
      if (!is_blocked) result = borrowed(w, l, made);
    }
  }
  if (result == DONE && has_blocked) result = borrow_blocked(w);
  if (result != DONE || !w->has_producers) return result;
  if (has_rules(w)) return LEAVE;
  w->capsules = PyMem_Calloc((size_t)w->n_leaves, sizeof(PyObject*));
  if (w->capsules == NULL) return PyErr_NoMemory(), FAILED;
  for (Py_ssize_t i = 0; i < w->n_leaves && result == DONE; i++) {
    leaf* l = &w->leaves[i];
    if (l->route == NULL || l->route->is_same || l->is_borrowed) continue;
    result = borrowed(
        w, l, py_producer_borrow(l->route, l->obj, w->options, &l->resolvable, &w->capsules[i]));
  }
  return result;
}

/* What producers gave goes to the Python path, which does not call them again. */
static void leave_capsules(walk* w) {
  for (Py_ssize_t i = 0; w->capsules && i < w->n_leaves && !PyErr_Occurred(); i++) {
    leaf* l = &w->leaves[i];
    if (w->capsules[i] == NULL || !l->is_borrowed || l->made == NULL) continue;
    if (!py_capsule_give_back(w->capsules[i], l->made)) continue; /* a copy's is asked again */
    l->made = NULL;
    py_producer_leave(l->obj, w->capsules[i], NULL);
  }
}

/* Streams are made to wait before anything is handed over. */
static outcome order_all(walk* w) {
  for (Py_ssize_t i = 0; w->has_devices && i < w->n_leaves; i++) {
    leaf* l = &w->leaves[i];
    if (l->resolvable == DLX_ON_DEVICE && !py_cuda_order(&w->pairs, l->route, l->made, l->obj))
      return leave();
  }
  return DONE;
}

/* Nothing is copied before every array was found right, and streams wait: a capsule whose tensor
 * was copied cannot be left to Python. */
static outcome copy_all(walk* w) {
  for (Py_ssize_t i = 0; w->has_copies && i < w->n_leaves; i++) {
    leaf* l = &w->leaves[i];
    if (!l->is_borrowed || l->resolvable == DLX_ON_DEVICE) continue;
    if ((l->resolvable || w->options & DLX_COPIES) &&
        (l->made = py_fast_path_resolve(l->route, l->made, w->options, l->resolvable)) == NULL)
      return leave();
  }
  return DONE;
}

/* The copies that the target framework makes of its own arrays. One may fail, so they come before
 * those of capsules, see copy_all. */
static outcome copy_within(walk* w) {
  for (Py_ssize_t i = 0; w->options & DLX_COPIES && i < w->n_leaves; i++) {
    leaf* l = &w->leaves[i];
    if (l->route && l->route->is_same &&
        (l->result = py_fast_path_copied(l->route, l->result)) == NULL)
      return leave();
  }
  return DONE;
}

static outcome hand_over_all(walk* w, PyObject* callable, PyObject* root, PyObject* to) {
  for (Py_ssize_t i = 0; i < w->n_leaves; i++) {
    leaf* l = &w->leaves[i];
    if (i + AHEAD < w->n_leaves) {      /* a dlx.Tensor asks its owner, too, what it is */
      fetch(w->leaves[i + AHEAD].made); /* or its result */
      __builtin_prefetch(w->leaves[i + AHEAD].obj);
    }
    if (!l->is_borrowed) continue;
    DLManagedTensorVersioned* made = l->made;
    l->is_borrowed = 0;
    l->result =
        w->has_devices && l->resolvable == DLX_ON_DEVICE
            ? py_fast_path_hand_over_cuda(&w->pairs, callable, l->route, made, l->obj, to, root)
            : py_fast_path_hand_over(callable, l->route, made, l->obj, to, root, w->options);
    if (l->result == NULL) return FAILED;
  }
  return DONE;
}

/* ---- unflatten ------------------------------------------------------------------------------- */

/* Owns: borrowed. */
static PyObject* result_of(const walk* w, const item* it) {
  if (it->link == ITSELF) return it->value;
  return it->link < 0 ? w->leaves[~it->link].result : w->nodes[it->link].result;
}

/* The same for a new container. What stands once moves there: of many results none is in a cache.
 * Owns: the result is new. */
static PyObject* take_result(const walk* w, const item* it) {
  if (it->link < 0 && !w->leaves[~it->link].is_shared) {
    PyObject* result = w->leaves[~it->link].result;
    w->leaves[~it->link].result = NULL;
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
    PyList_SET_ITEM(made, i - n->first, take_result(w, &w->items[i]));
  return made;
}

static int is_changed(const walk* w, const node* n) {
  Py_ssize_t i = n->first;
  while (i < n->end && result_of(w, &w->items[i]) == w->items[i].value) i++;
  return i < n->end;
}

/* A tuple none of whose children changed is itself. */
static PyObject* make_tuple(const walk* w, const node* n) {
  if (!is_changed(w, n)) return Py_NewRef(n->obj);
  PyObject* made = PyTuple_New(n->end - n->first);
  for (Py_ssize_t i = n->first; made && i < n->end; i++)
    PyTuple_SET_ITEM(made, i - n->first, take_result(w, &w->items[i]));
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
  for (const item *it = &w->items[n->first], *end = it + count; it < end; it++) {
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
  const item* first = &w->items[n->first];
  if (Py_TYPE(own) != Py_TYPE(n->obj)) return 0;
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

/* Give the results to the visitor, of arrays before they move into containers. */
static outcome note_arrays(walk* w) {
  for (Py_ssize_t i = 0; w->visitor && w->visitor->note && i < w->n_leaves; i++) {
    if (w->visitor->note(w->visitor, w->leaves[i].obj, w->leaves[i].result, 0) < 0) return FAILED;
  }
  return DONE;
}

static outcome note_containers(walk* w) {
  for (Py_ssize_t i = 1; w->visitor && w->visitor->note && i < w->n_nodes; i++) {
    if (w->visitor->note(w->visitor, w->nodes[i].obj, w->nodes[i].result, 1) < 0) return FAILED;
  }
  return DONE;
}

static outcome unflatten(walk* w) {
  for (Py_ssize_t i = 0; i < w->n_nodes; i++) {
    node* n = &w->nodes[i];
    if (n->is_cyclic && (n->result = new_empty(n)) == NULL) return FAILED;
  }
  for (Py_ssize_t i = 0; i < w->n_order; i++) {
    node* n = &w->nodes[w->order[i]];
    PyObject* own =
        w->visitor && w->visitor->own && !n->is_cyclic ? w->visitor->own(w->visitor, n->obj) : NULL;
    if (own && !n->rule && holds_results(w, n, own)) {
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

/* Release everything; a pending exception is kept. */
static void clean_up(walk* w) {
  py_pending pending = py_pending_save();
  for (Py_ssize_t i = 0; i < w->n_leaves; i++) {
    leaf* l = &w->leaves[i];
    if (!l->is_borrowed)
      Py_XDECREF(l->result);
    else if (l->made)
      dlx_managed_release(l->made);
    if (w->capsules) Py_XDECREF(w->capsules[i]);
    if (l->route) py_route_leave(l->route);
  }
  for (Py_ssize_t i = 0; i < w->n_nodes; i++) {
    Py_XDECREF(w->nodes[i].result);
    Py_DECREF(w->nodes[i].obj);
    Py_XDECREF(w->nodes[i].rule);
    Py_XDECREF(w->nodes[i].keys);
  }
  for (Py_ssize_t i = 0; i < w->n_items; i++) {
    if (i + AHEAD < w->n_items) __builtin_prefetch(w->items[i + AHEAD].value, 1);
    Py_DECREF(w->items[i].value);
  }
  if (w->pairs.n) py_cuda_clear(&w->pairs);
  Py_XDECREF(w->rule);
  if (w->items != w->few_items) PyMem_Free(w->items);
  if (w->nodes != w->few_nodes) PyMem_Free(w->nodes);
  if (w->order != w->few_order) PyMem_Free(w->order); /* see need_node */
  if (w->stack != w->few_stack) PyMem_Free(w->stack);
  if (w->leaves != w->few_leaves) PyMem_Free(w->leaves);
  if (w->visits != w->few_visits) PyMem_Free(w->visits);
  PyMem_Free(w->capsules);
  py_pending_restore(pending);
}

PyObject* py_tree_run(PyObject* callable, PyObject* root, PyObject* to, unsigned options) {
  return py_tree_visit(callable, root, to, options, NULL);
}

PyObject* py_tree_visit(PyObject* callable, PyObject* root, PyObject* to, unsigned options,
                        py_visitor* visitor) {
  walk w;
  w.items = w.few_items;
  w.nodes = w.few_nodes;
  w.leaves = w.few_leaves;
  w.order = w.few_order;
  w.stack = w.few_stack;
  w.visits = w.few_visits;
  w.capsules = NULL;
  w.n_items = w.n_nodes = w.n_leaves = w.n_order = w.n_stack = w.n_visits = 0;
  w.room_items = w.room_nodes = w.room_leaves = FEW;
  w.room_visits = 2 * FEW;
  w.has_producers = w.has_copies = w.has_devices = 0;
  w.options = options;
  w.visitor = visitor;
  w.pairs.n = w.pairs.n_waited = 0;
  w.ruled = NULL;
  w.rule = NULL;
  memset(w.few_visits, 0, sizeof w.few_visits);

  PyObject* result = NULL;
  if (flatten(&w, callable, root, to) == DONE && borrow_all(&w) == DONE && order_all(&w) == DONE &&
      copy_within(&w) == DONE && copy_all(&w) == DONE &&
      hand_over_all(&w, callable, root, to) == DONE && note_arrays(&w) == DONE &&
      unflatten(&w) == DONE && note_containers(&w) == DONE)
    result = Py_NewRef(w.nodes[0].result);
  else if (!PyErr_Occurred())
    leave_capsules(&w);
  PyObject* answers = py_producer_aside();
  clean_up(&w);
  py_producer_back(answers);
  return result;
}

PyDoc_STRVAR(
    set_tree_rule_doc,
    "set_tree_rule(function, /)\n--\n\n"
    "Register function(type) -> (flatten, unflatten, mutable), or None, of containers that "
    "are no list, tuple or dict.");

/* Owns: keeps a reference. GIL: needed. Errors: none. */
static PyObject* set_tree_rule(PyObject* module, PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(rule_of, function);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(convert_tree_doc,
             "convert_tree(fast_path, root, to, /)\n--\n\n"
             "Convert a container by the fast path; NotImplemented where Python must do it.");

/* Owns: the result is new. GIL: needed; may run Python. Errors: NULL with an exception. */
static PyObject* convert_tree(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3) {
    PyErr_SetString(PyExc_TypeError, "convert_tree takes the fast path, a container and a target");
    return NULL;
  }
  py_routes_begin();
  PyObject* result = py_tree_run(args[0], args[1], args[2], 0);
  py_routes_end();
  if (result || PyErr_Occurred()) return result;
  Py_RETURN_NOTIMPLEMENTED;
}

PyMethodDef py_tree_functions[] = {
    {"set_tree_rule", set_tree_rule, METH_O, set_tree_rule_doc},
    {"convert_tree", (PyCFunction)(void (*)(void))convert_tree, METH_FASTCALL, convert_tree_doc},
    {NULL, NULL, 0, NULL},
};
