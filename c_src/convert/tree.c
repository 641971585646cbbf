/* Trees in the fast path: lists, tuples and dicts of exactly these types, and containers that have
 * a rule (records, OrderedDict), around arrays that have pairs. The stages are those of
 * dlx/_engine/batch.py: flatten everything, then take and check every array, and only then hand
 * over. Anything unusual falls back to the Python path before anything is handed over, with nothing
 * changed.
 *
 * Children are copied out of a container at once, so that code that runs meanwhile (a guard, the
 * collector) may change it. There is no recursion, so any depth works. */

#include "walk.h"

typedef enum {
  FAILED = -1,
  LEAVE = 0,
  DONE = 1
} outcome; /* an exception is set; ask Python; well */

/* Python is asked, unless what has just failed ends the call, see py_state. */
static outcome leave(void) {
  return PyErr_Occurred() ? FAILED : LEAVE;
}

/* ---- flatten --------------------------------------------------------------------------------- */

int py_is_plain(PyTypeObject* type) {
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

/* Open a node whose children lie before `at`. */
static node* open_node(walk* w, PyObject* obj, const item* at) {
  Py_ssize_t first = w->items.n, end = at - items_of(w);
  node* n = &nodes_of(w)[w->nodes.n];
  *n = (node){.obj = Py_NewRef(obj), .first = first, .end = end, .next = first, .is_open = 1};
  w->items.n = end;
  ((Py_ssize_t*)w->stack.at)[w->stack.n++] = w->nodes.n++;
  return n;
}

/* Copy keys and values out of a dict. */
static outcome copy_dict(walk* w, PyObject* dict) {
  Py_ssize_t count = PyDict_GET_SIZE(dict), position = 0;
  if (walk_need(w, 2 * count, count) < 0) return FAILED;
  item *first = items_of(w) + w->items.n, *at = first;
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
  open_node(w, dict, at);
  w->items.n += count;
  return DONE;
}

/* Copy the children of a list or tuple out of it. */
static node* copy_items(walk* w, PyObject* obj, PyObject* list) {
  Py_ssize_t count = Py_SIZE(list);
  if (walk_need(w, count, count) < 0) return NULL;
  item* at = items_of(w) + w->items.n;
  PyObject** children =
      PyList_CheckExact(list) ? ((PyListObject*)list)->ob_item : ((PyTupleObject*)list)->ob_item;
  for (Py_ssize_t i = 0; i < count; i++) *at++ = (item){Py_NewRef(children[i]), ITSELF};
  return open_node(w, obj, at);
}

/* Copy the children of a container out of it by its rule. */
static outcome enter_by_rule(walk* w, PyObject* obj, PyObject* rule) {
  PyObject* parts = PyObject_CallOneArg(PyTuple_GET_ITEM(rule, 0), obj);
  outcome result = parts == NULL && py_error_forget() < 0 ? FAILED : LEAVE;
  if (parts && PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 2 &&
      PyList_CheckExact(PyTuple_GET_ITEM(parts, 1))) {
    node* n;
    PY_LOCKED(PyTuple_GET_ITEM(parts, 1))
    if ((n = copy_items(w, obj, PyTuple_GET_ITEM(parts, 1))) != NULL) {
      n->rule = Py_NewRef(rule);
      n->keys = Py_NewRef(PyTuple_GET_ITEM(parts, 0));
    }
    PY_UNLOCKED()
    result = n ? DONE : FAILED;
  }
  Py_XDECREF(parts);
  return result;
}

/* Copy the children of a container out of it, which no other thread changes meanwhile. */
static outcome enter(walk* w, PyObject* obj, PyObject* rule) {
  outcome result;
  if (rule) return enter_by_rule(w, obj, rule);
  PY_LOCKED(obj)
  result = PyDict_CheckExact(obj) ? copy_dict(w, obj) : copy_items(w, obj, obj) ? DONE : FAILED;
  PY_UNLOCKED()
  return result;
}

/* Note the container that is entered next. Errors: -1 with MemoryError. */
static int remember_next(walk* w, visit* slot, PyObject* obj) {
  if (py_vector_need(&w->nodes, 1) < 0) return -1;
  nodes_of(w)[w->nodes.n].obj = obj;
  return walk_remember(w, slot, (visit)w->nodes.n + 1);
}

/* A child that is a container. */
static outcome look_into(walk* w, Py_ssize_t which, PyObject* rule) {
  PyObject* child = items_of(w)[which].value;
  visit* v = walk_find(w, child);
  if (*v < 0) return LEAVE; /* it was met as an array: its type has become a container's since */
  if (*v) {
    node* met = &nodes_of(w)[*v - 1];
    if (met->is_open && (rule || PyTuple_CheckExact(child)))
      return LEAVE; /* the Python path reports the path, or makes a record that holds itself */
    met->is_cyclic |= met->is_open;
    items_of(w)[which].link = *v - 1;
    return DONE;
  }
  items_of(w)[which].link = w->nodes.n;
  return remember_next(w, v, child) < 0 ? FAILED : enter(w, child, rule);
}

/* A child that is an array. */
static outcome note_array(walk* w, Py_ssize_t which, const py_pair* pair) {
  PyObject* child = items_of(w)[which].value;
  if (w->target == NULL) py_map_hold(w->target = pair->target);
  if (w->target != pair->target || w->call->options & w->target->unsupported) return LEAVE;
  visit* v = walk_find(w, child);
  if (*v) {
    items_of(w)[which].link = *v < 0 ? *v : *v - 1;
    if (*v < 0) leaves_of(w)[~*v].is_shared = 1;
    return DONE;
  }
  if (py_vector_need(&w->leaves, 1) < 0) return FAILED;
  py_map_hold(pair->source);
  leaves_of(w)[w->leaves.n] =
      (leaf){.obj = child, .source = pair->source, .what = (uint8_t)pair->what};
  items_of(w)[which].link = ~w->leaves.n;
  w->has_producers |= pair->what == PY_PRODUCES;
  return walk_remember(w, v, (visit)~w->leaves.n++) < 0 ? FAILED : DONE;
}

int py_has_interface(PyObject* obj) {
  PyObject* dict = PyObject_GenericGetDict(obj, NULL);
  if (dict == NULL) return py_error_forget() < 0;
  int has = PyDict_Contains(dict, py_name_array_interface);
  if (has == 0) has = PyDict_Contains(dict, py_name_cuda_array_interface);
  Py_DECREF(dict);
  return has != 0;
}

/* A child whose result is known. Owns: takes `result`. */
static outcome note_known(walk* w, Py_ssize_t which, PyObject* result) {
  PyObject* child = items_of(w)[which].value;
  visit* v = walk_find(w, child);
  outcome found = *v > 0 ? LEAVE : *v == 0 && py_vector_need(&w->leaves, 1) < 0 ? FAILED : DONE;
  if (found == DONE && *v < 0) leaves_of(w)[~*v].is_shared = 1;
  if (found == DONE) items_of(w)[which].link = *v < 0 ? *v : ~w->leaves.n;
  if (found != DONE || *v < 0) {
    Py_DECREF(result);
    return found;
  }
  leaves_of(w)[w->leaves.n] = (leaf){.obj = child, .result = result, .what = PY_PASSES};
  return walk_remember(w, v, (visit)~w->leaves.n++) < 0 ? FAILED : DONE;
}

/* Ask the visitor about a child: whether it is done with, as by look_at, or an array. */
static outcome ask(walk* w, Py_ssize_t which, int* is_array) {
  PyObject* found = NULL;
  int answer = w->call->visitor->look(w->call->visitor, items_of(w)[which].value, &found);
  *is_array = answer == PY_ASK_CONVERTS;
  if (answer == PY_ASK_KNOWN) return note_known(w, which, found);
  if (answer != PY_ASK_ENTERS) return answer < DONE ? (outcome)answer : DONE;
  outcome result = look_into(w, which, found);
  Py_DECREF(found);
  return result;
}

/* Say what a child is, and note it if it is new. */
static outcome look_at(walk* w, Py_ssize_t which) {
  PyObject* child = items_of(w)[which].value;
  PyTypeObject* type = Py_TYPE(child);
  if (py_is_plain(type)) return DONE;
  if (py_is_tree(type)) return look_into(w, which, NULL);
  int is_array = 1;
  outcome asked = w->call->visitor ? ask(w, which, &is_array) : DONE;
  if (!is_array) return asked;
  py_pair pair;
  if (!py_pair_of(w->call->function, type, w->call->to, &pair)) return leave();
  outcome result = LEAVE;
  if (pair.at_root || pair.what == PY_PASSES)
    result = DONE;
  else if (pair.what == PY_LOOKS)
    result = py_has_interface(child) ? leave() : DONE;
  else if (pair.what == PY_RULE)
    result = look_into(w, which, pair.source->parts);
  else if (pair.what >= PY_STAYS)
    result = note_array(w, which, &pair);
  py_pair_release(&pair);
  return result;
}

static outcome flatten(walk* w, PyObject* root, PyObject* rule) {
  if (remember_next(w, walk_find(w, root), root) < 0) return FAILED;
  outcome result = enter(w, root, rule);
  while (result == DONE && w->stack.n) {
    Py_ssize_t number = ((Py_ssize_t*)w->stack.at)[w->stack.n - 1];
    node* n = &nodes_of(w)[number];
    if (n->next < n->end) {
      walk_fetch(w, n);
      result = look_at(w, n->next++);
    } else if (py_vector_need(&w->order, 1) < 0) {
      result = FAILED;
    } else {
      n->is_open = 0;
      ((Py_ssize_t*)w->order.at)[w->order.n++] = number;
      w->stack.n--;
    }
  }
  if (result == DONE && w->leaves.n == 0 && !w->call->visitor)
    return LEAVE; /* `to` has not been checked yet */
  return result;
}

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
  if (flatten(&w, root, rule) == DONE && take_all(&w) == DONE && order_all(&w) == DONE &&
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
