/* The notes of a walk through a tree: see walk.h. */

#include "walk.h"
#include "core/allocate.h"

#include <string.h>

int py_vector_grow(py_vector* v, Py_ssize_t more) {
  Py_ssize_t wanted = v->n + more, twice = v->room > INT32_MAX / 2 ? INT32_MAX : 2 * v->room;
  if (wanted < twice) wanted = twice;
  if (wanted > INT32_MAX) return PyErr_NoMemory(), -1; /* numbers of elements are kept in 32 bits */
  size_t bytes = (size_t)wanted * v->size;
  void* wider = v->at == v->few ? PyMem_Malloc(bytes) : PyMem_Realloc(v->at, bytes);
  if (wider == NULL) return PyErr_NoMemory(), -1;
  if (v->at == v->few) memcpy(wider, v->few, (size_t)v->n * v->size);
  dlx_use_huge_pages(wider, bytes);
  v->at = wider;
  v->room = wanted;
  return 0;
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
  w->streams.n = w->streams.n_waited = 0;
  memset(w->few_visits, 0, sizeof w->few_visits);
}

void walk_end(walk* w) {
  py_pending pending = py_pending_save();
  for (leaf *l = leaves_of(w), *end = l + w->leaves.n; l < end; l++) {
    if (l->offer.made) dlx_managed_release(l->offer.made);
    Py_XDECREF(l->offer.answer);
    Py_XDECREF(l->result);
    if (l->source) py_map_release(l->source);
  }
  for (node *n = nodes_of(w), *end = n + w->nodes.n; n < end; n++) {
    Py_XDECREF(n->result);
    Py_DECREF(n->obj);
    Py_XDECREF(n->rule);
    Py_XDECREF(n->keys);
  }
  for (item *it = items_of(w), *end = it + w->items.n; it < end; it++) {
    if (it + AHEAD < end) __builtin_prefetch(it[AHEAD].value, 1);
    Py_DECREF(it->value);
  }
  if (w->streams.n) py_streams_clear(&w->streams);
  if (w->target) py_map_release(w->target);
  py_vector* all[] = {&w->items, &w->nodes, &w->leaves, &w->order, &w->stack, &w->visits};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) py_vector_free(all[i]);
  py_pending_restore(pending);
}

/* Where an object is remembered first: objects that lie side by side are remembered side by side,
 * since they are mostly visited in turn. */
static size_t place_of(PyObject* obj) {
  return (uintptr_t)obj >> 6;
}

/* A place that is taken is followed by others at a distance that depends on the object, and is odd,
 * so that every place has its turn. */
visit* walk_find(const walk* w, PyObject* obj) {
  size_t mask = (size_t)w->visits.room - 1, at = place_of(obj);
  for (size_t step = ((uintptr_t)obj >> 4) * 0x9E3779B97F4A7C15u >> 32 | 1;; at += step) {
    visit* v = (visit*)w->visits.at + (at & mask);
    if (*v == 0 || (*v > 0 ? nodes_of(w)[*v - 1].obj : leaves_of(w)[~*v].obj) == obj) return v;
  }
}

/* Errors: -1 with MemoryError. */
static int need_visits(walk* w, Py_ssize_t more) {
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
    if (*v) *walk_find(w, *v > 0 ? nodes_of(w)[*v - 1].obj : leaves_of(w)[~*v].obj) = *v;
  }
  py_vector_free(&old);
  return 0;
}

int walk_need(walk* w, Py_ssize_t n_items, Py_ssize_t n_children) {
  return py_vector_need(&w->nodes, 1) < 0 || py_vector_need(&w->stack, 1) < 0 ||
                 py_vector_need(&w->items, n_items) < 0 ||
                 py_vector_need(&w->leaves, n_children) < 0 || need_visits(w, n_children) < 0
             ? -1
             : 0;
}

int walk_remember(walk* w, visit* slot, visit met) {
  *slot = met;
  w->n_visits++;
  return need_visits(w, 1);
}

void walk_fetch(const walk* w, const node* n) {
  const item* items = items_of(w);
  Py_ssize_t near = n->next + AHEAD, far = near + AHEAD;
  if (far < n->end) __builtin_prefetch(items[far].value);
  if (near < n->end) {
    size_t mask = (size_t)w->visits.room - 1;
    __builtin_prefetch((visit*)w->visits.at + (place_of(items[near].value) & mask));
  }
}
