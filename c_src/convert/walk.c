/* The walk through a tree: see walk.h. Children are copied out of a container at once, since other
 * code (a guard, the collector) may change it. No recursion: any depth works. */

#include "walk.h"
#include "core/allocate.h"

#include <string.h>

/* Errors: -1 with MemoryError; the content is unchanged. */
static int grow(py_vector* v, Py_ssize_t more) {
  Py_ssize_t wanted = v->n + more, twice = v->room > INT32_MAX / 2 ? INT32_MAX : 2 * v->room;
  if (wanted < twice) wanted = twice;
  if (wanted > INT32_MAX) return PyErr_NoMemory(), -1; /* indices have 32 bits */
  size_t bytes = (size_t)wanted * v->size;
  void* wider = v->at == v->few ? PyMem_Malloc(bytes) : PyMem_Realloc(v->at, bytes);
  if (wider == NULL) return PyErr_NoMemory(), -1;
  if (v->at == v->few) memcpy(wider, v->few, (size_t)v->n * v->size);
  dlx_use_huge_pages(wider, bytes);
  v->at = wider;
  v->room = wanted;
  return 0;
}

static inline int reserve(py_vector* v, Py_ssize_t more) {
  return v->n + more <= v->room ? 0 : grow(v, more);
}

static void free_vector(const py_vector* v) {
  if (v->at != v->few) PyMem_Free(v->at);
}

void walk_begin(walk* w, py_call* call) {
  w->call = call;
  w->target = NULL;
  w->items = PY_VECTOR(w->few_items);
  w->nodes = PY_VECTOR(w->few_nodes);
  w->leaves = PY_VECTOR(w->few_leaves);
  w->order = PY_VECTOR(w->few_order);
  w->stack = PY_VECTOR(w->few_stack);
  w->visits = PY_VECTOR(w->few_visits);
  w->n_visits = 0;
  w->has_producers = w->has_copies = w->has_devices = 0;
  w->streams.n = w->streams.n_waited = w->streams.copies = 0;
  memset(w->few_visits, 0, sizeof w->few_visits);
}

void walk_end(walk* w) {
  py_pending pending = py_pending_save();
  for (leaf *l = get_leaves(w), *end = l + w->leaves.n; l < end; l++) {
    if (l->offer.made) dlx_managed_release(l->offer.made);
    Py_XDECREF(l->offer.response);
    Py_XDECREF(l->result);
    if (l->source) py_map_release(l->source);
  }
  for (node *n = get_nodes(w), *end = n + w->nodes.n; n < end; n++) {
    Py_XDECREF(n->result);
    Py_DECREF(n->obj);
    Py_XDECREF(n->rule);
    Py_XDECREF(n->keys);
  }
  for (item *it = get_items(w), *end = it + w->items.n; it < end; it++) {
    if (it + AHEAD < end) __builtin_prefetch(it[AHEAD].value, 1);
    Py_DECREF(it->value);
  }
  if (w->streams.n) py_streams_clear(&w->streams);
  if (w->target) py_map_release(w->target);
  py_vector* all[] = {&w->items, &w->nodes, &w->leaves, &w->order, &w->stack, &w->visits};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free_vector(all[i]);
  py_pending_restore(pending);
}

/* Neighbours in memory get neighbouring slots, since they are mostly visited in turn. */
static size_t hash_address(PyObject* obj) {
  return (uintptr_t)obj >> 6;
}

/* The step depends on the object, and is odd, so every slot is reached. */
static visit* find_visit(const walk* w, PyObject* obj) {
  size_t mask = (size_t)w->visits.room - 1, at = hash_address(obj);
  for (size_t step = ((uintptr_t)obj >> 4) * 0x9E3779B97F4A7C15u >> 32 | 1;; at += step) {
    visit* v = (visit*)w->visits.at + (at & mask);
    if (*v == 0 || (*v > 0 ? get_nodes(w)[*v - 1].obj : get_leaves(w)[~*v].obj) == obj) return v;
  }
}

static int reserve_visits(walk* w, Py_ssize_t more) {
  py_vector old = w->visits;
  Py_ssize_t room = old.room;
  while ((w->n_visits + more) * 2 >= room) room *= 2;
  if (room == old.room) return 0;
  if ((w->visits.at = PyMem_Calloc((size_t)room, sizeof(visit))) == NULL) {
    w->visits = old;
    return PyErr_NoMemory(), -1;
  }
  dlx_use_huge_pages(w->visits.at, (size_t)room * sizeof(visit));
  w->visits.room = room;
  for (visit *v = old.at, *end = v + old.room; v < end; v++) {
    if (*v) *find_visit(w, *v > 0 ? get_nodes(w)[*v - 1].obj : get_leaves(w)[~*v].obj) = *v;
  }
  free_vector(&old);
  return 0;
}

/* Reserve for a container's children in one step: new memory is the largest cost of trees with many
 * arrays. */
static int reserve_all(walk* w, Py_ssize_t n_items, Py_ssize_t n_children) {
  return reserve(&w->nodes, 1) < 0 || reserve(&w->stack, 1) < 0 ||
                 reserve(&w->items, n_items) < 0 || reserve(&w->leaves, n_children) < 0 ||
                 reserve_visits(w, n_children) < 0
             ? -1
             : 0;
}

static int remember(walk* w, visit* slot, visit met) {
  *slot = met;
  w->n_visits++;
  return reserve_visits(w, 1);
}

/* Prefetch later children of an open node: the objects, then their slots. */
static void prefetch_next(const walk* w, const node* n) {
  const item* items = get_items(w);
  Py_ssize_t near = n->next + AHEAD, far = near + AHEAD;
  if (far < n->end) __builtin_prefetch(items[far].value);
  if (near < n->end) {
    size_t mask = (size_t)w->visits.room - 1;
    __builtin_prefetch((visit*)w->visits.at + (hash_address(items[near].value) & mask));
  }
}

/* ---- flatten --------------------------------------------------------------------------------- */

int py_passes_through(PyTypeObject* type) {
  return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyFloat_Type ||
         type == &PyBool_Type || type == Py_TYPE(Py_None) || type == &PyBytes_Type ||
         type == &PyComplex_Type;
}

/* Whether another dict accepts a key without running Python. */
static int is_safe_key(PyObject* key) {
  PyTypeObject* type = Py_TYPE(key);
  return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type ||
         type == &PyBool_Type || key == Py_None;
}

static node* open_node(walk* w, PyObject* obj, const item* at) {
  Py_ssize_t first = w->items.n, end = at - get_items(w);
  node* n = &get_nodes(w)[w->nodes.n];
  *n = (node){.obj = Py_NewRef(obj), .first = first, .end = end, .next = first, .is_open = 1};
  w->items.n = end;
  ((Py_ssize_t*)w->stack.at)[w->stack.n++] = w->nodes.n++;
  return n;
}

static outcome copy_dict(walk* w, PyObject* dict) {
  Py_ssize_t count = PyDict_GET_SIZE(dict), position = 0;
  if (reserve_all(w, 2 * count, count) < 0) return FAILED;
  item *first = get_items(w) + w->items.n, *at = first;
  PyObject *key, *value;
  while (PyDict_Next(dict, &position, &key, &value) && is_safe_key(key)) {
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

static node* copy_items(walk* w, PyObject* obj, PyObject* list) {
  Py_ssize_t count = Py_SIZE(list);
  if (reserve_all(w, count, count) < 0) return NULL;
  item* at = get_items(w) + w->items.n;
  PyObject** children =
      PyList_CheckExact(list) ? ((PyListObject*)list)->ob_item : ((PyTupleObject*)list)->ob_item;
  for (Py_ssize_t i = 0; i < count; i++) *at++ = (item){Py_NewRef(children[i]), ITSELF};
  return open_node(w, obj, at);
}

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

static outcome enter(walk* w, PyObject* obj, PyObject* rule) {
  outcome result;
  if (rule) return enter_by_rule(w, obj, rule);
  PY_LOCKED(obj)
  result = PyDict_CheckExact(obj) ? copy_dict(w, obj) : copy_items(w, obj, obj) ? DONE : FAILED;
  PY_UNLOCKED()
  return result;
}

static int remember_next(walk* w, visit* slot, PyObject* obj) {
  if (reserve(&w->nodes, 1) < 0) return -1;
  get_nodes(w)[w->nodes.n].obj = obj;
  return remember(w, slot, (visit)w->nodes.n + 1);
}

static outcome visit_container(walk* w, Py_ssize_t which, PyObject* rule) {
  PyObject* child = get_items(w)[which].value;
  visit* v = find_visit(w, child);
  if (*v < 0) return LEAVE; /* it was an array before: its type has changed */
  if (*v) {
    node* met = &get_nodes(w)[*v - 1];
    if (met->is_open && (rule || PyTuple_CheckExact(child)))
      return LEAVE; /* the Python path reports the cycle, or builds a record that contains itself */
    met->is_cyclic |= met->is_open;
    get_items(w)[which].link = *v - 1;
    return DONE;
  }
  get_items(w)[which].link = w->nodes.n;
  return remember_next(w, v, child) < 0 ? FAILED : enter(w, child, rule);
}

static outcome note_array(walk* w, Py_ssize_t which, const py_pair* pair) {
  PyObject* child = get_items(w)[which].value;
  if (w->target == NULL) py_map_hold(w->target = pair->target);
  if (w->target != pair->target || w->call->options & w->target->unsupported) return LEAVE;
  visit* v = find_visit(w, child);
  if (*v) {
    get_items(w)[which].link = *v < 0 ? *v : *v - 1;
    if (*v < 0) get_leaves(w)[~*v].is_shared = 1;
    return DONE;
  }
  if (reserve(&w->leaves, 1) < 0) return FAILED;
  py_map_hold(pair->source);
  get_leaves(w)[w->leaves.n] =
      (leaf){.obj = child, .source = pair->source, .what = (uint8_t)pair->what};
  get_items(w)[which].link = ~w->leaves.n;
  w->has_producers |= pair->what == PY_PRODUCES;
  return remember(w, v, (visit)~w->leaves.n++) < 0 ? FAILED : DONE;
}

int py_has_interface(PyObject* obj) {
  PyObject* dict = PyObject_GenericGetDict(obj, NULL);
  if (dict == NULL) return py_error_forget() < 0;
  int has = PyDict_Contains(dict, py_name_array_interface);
  if (has == 0) has = PyDict_Contains(dict, py_name_cuda_array_interface);
  Py_DECREF(dict);
  return has != 0;
}

/* Owns: takes `result`. */
static outcome note_known(walk* w, Py_ssize_t which, PyObject* result) {
  PyObject* child = get_items(w)[which].value;
  visit* v = find_visit(w, child);
  outcome found = *v > 0 ? LEAVE : *v == 0 && reserve(&w->leaves, 1) < 0 ? FAILED : DONE;
  if (found == DONE && *v < 0) get_leaves(w)[~*v].is_shared = 1;
  if (found == DONE) get_items(w)[which].link = *v < 0 ? *v : ~w->leaves.n;
  if (found != DONE || *v < 0) {
    Py_DECREF(result);
    return found;
  }
  get_leaves(w)[w->leaves.n] = (leaf){.obj = child, .result = result, .what = PY_PASSES};
  return remember(w, v, (visit)~w->leaves.n++) < 0 ? FAILED : DONE;
}

static outcome ask_visitor(walk* w, Py_ssize_t which, int* is_array) {
  PyObject* found = NULL;
  int answer = w->call->visitor->classify(w->call->visitor, get_items(w)[which].value, &found);
  *is_array = answer == PY_ASK_CONVERTS;
  if (answer == PY_ASK_KNOWN) return note_known(w, which, found);
  if (answer != PY_ASK_ENTERS) return answer < DONE ? (outcome)answer : DONE;
  outcome result = visit_container(w, which, found);
  Py_DECREF(found);
  return result;
}

static outcome visit_child(walk* w, Py_ssize_t which) {
  PyObject* child = get_items(w)[which].value;
  PyTypeObject* type = Py_TYPE(child);
  if (py_passes_through(type)) return DONE;
  if (py_is_tree(type)) return visit_container(w, which, NULL);
  int is_array = 1;
  outcome asked = w->call->visitor ? ask_visitor(w, which, &is_array) : DONE;
  if (!is_array) return asked;
  py_pair pair;
  if (!py_pair_learn(w->call->function, type, w->call->to, &pair)) return leave();
  outcome result = LEAVE;
  if (pair.at_root || pair.what == PY_PASSES)
    result = DONE;
  else if (pair.what == PY_LOOKS)
    result = py_has_interface(child) ? leave() : DONE;
  else if (pair.what == PY_RULE)
    result = visit_container(w, which, pair.source->parts);
  else if (pair.what >= PY_STAYS)
    result = note_array(w, which, &pair);
  py_pair_release(&pair);
  return result;
}

outcome walk_flatten(walk* w, PyObject* root, PyObject* rule) {
  if (remember_next(w, find_visit(w, root), root) < 0) return FAILED;
  outcome result = enter(w, root, rule);
  while (result == DONE && w->stack.n) {
    Py_ssize_t number = ((Py_ssize_t*)w->stack.at)[w->stack.n - 1];
    node* n = &get_nodes(w)[number];
    if (n->next < n->end) {
      prefetch_next(w, n);
      result = visit_child(w, n->next++);
    } else if (reserve(&w->order, 1) < 0) {
      result = FAILED;
    } else {
      n->is_open = 0;
      ((Py_ssize_t*)w->order.at)[w->order.n++] = number;
      w->stack.n--;
    }
  }
  if (result == DONE && w->leaves.n == 0 && !w->call->visitor)
    return LEAVE; /* `to` is not checked yet */
  return result;
}
