#ifndef DLX_FAST_PATH_WALK_H_
#define DLX_FAST_PATH_WALK_H_

/* What python/fast_path_tree.c notes while it walks through a tree: containers, their children, the
 * arrays, and which objects it has met. Everything lies in arrays that begin on the stack. */

#include "route.h"
#include "core/allocate.h"

#include <string.h>

/* Of many arrays, fresh memory and misses of the caches cost more than instructions: a leaf takes
 * no more bytes here than it must. */

typedef struct {
  PyObject* value; /* strong */
  Py_ssize_t link; /* number of a node; ~number of a leaf; ITSELF = passes through */
} item;

typedef struct {
  PyObject* obj;               /* strong */
  PyObject* result;            /* strong; NULL until it is made */
  PyObject* rule;              /* strong; NULL of a list, tuple or dict */
  PyObject* keys;              /* strong; what the rule's `flatten` gave, or NULL */
  Py_ssize_t first, end, next; /* children in `items`, and the one to be looked at; the keys of a
                                  dict follow them there */
  int is_open;                 /* its children are being looked at */
  int is_cyclic;               /* it was met inside itself */
} node;

typedef struct {
  PyObject* obj;   /* borrowed from an item */
  py_route* route; /* NULL = its result was known */
  union {
    DLManagedTensorVersioned* made; /* where it is borrowed, not yet handed over */
    PyObject* result; /* else; strong, or NULL; moved into the new container where it stands once */
  };
  uint32_t resolvable; /* incompatibilities that a copy resolves */
  uint8_t is_borrowed;
  uint8_t is_shared; /* it stands in several places */
} leaf;

/* An object that was met: 1 + number of a node; ~number of a leaf; 0 = none. */
typedef int32_t visit;

enum { FEW = 32, ITSELF = PY_SSIZE_T_MAX };

/* Growing arrays that begin on the stack. */
typedef struct {
  item* items;
  node* nodes;
  leaf* leaves;
  Py_ssize_t* order;   /* nodes, children before parents */
  Py_ssize_t* stack;   /* nodes that are open */
  visit* visits;       /* hash table by address */
  PyObject** capsules; /* by leaf, those of producers; strong, or NULL; NULL = none was called */
  Py_ssize_t n_items, n_nodes, n_leaves, n_order, n_stack, n_visits;
  Py_ssize_t room_items, room_nodes, room_leaves, room_visits;
  int has_producers, has_copies; /* some leaves are those of producers; some are to be copied */
  int has_devices;               /* some are in device memory */
  unsigned options;              /* of the call */
  py_visitor* visitor;           /* or NULL */
  py_stream_pairs pairs;         /* of these; none is noted before there is one */
  PyTypeObject* ruled; /* the type that was asked about last; borrowed, a node holds an object */
  PyObject* rule;      /* its rule; strong, or NULL */
  item few_items[FEW];
  node few_nodes[FEW];
  leaf few_leaves[FEW];
  Py_ssize_t few_order[FEW], few_stack[FEW];
  visit few_visits[2 * FEW];
} walk;

/* Owns: what `array` owned moves from `few`, or the heap, to the heap. Errors: NULL with
 * MemoryError, `array` as it was. */
static inline void* widen(void* array, const void* few, size_t size, Py_ssize_t room,
                          Py_ssize_t wanted) {
  if (wanted > INT32_MAX) return PyErr_NoMemory(); /* what was met is noted in 32 bits */
  void* wider = array == few ? PyMem_Malloc((size_t)wanted * size)
                             : PyMem_Realloc(array, (size_t)wanted * size);
  if (wider == NULL) return PyErr_NoMemory();
  if (array == few) memcpy(wider, few, (size_t)room * size);
  dlx_use_huge_pages(wider, (size_t)wanted * size);
  return wider;
}

static inline Py_ssize_t room_for(Py_ssize_t room, Py_ssize_t wanted) {
  Py_ssize_t twice = room > INT32_MAX / 2 ? INT32_MAX : 2 * room;
  return wanted > twice ? wanted : twice;
}

/* Each of these makes room. Errors: -1 with MemoryError, the content as it was. */
static inline int need_items(walk* w, Py_ssize_t more) {
  if (w->n_items + more <= w->room_items) return 0;
  Py_ssize_t room = room_for(w->room_items, w->n_items + more);
  item* wider = widen(w->items, w->few_items, sizeof(item), w->room_items, room);
  if (wider == NULL) return -1;
  w->items = wider;
  w->room_items = room;
  return 0;
}

static inline int need_node(walk* w) {
  if (w->n_nodes < w->room_nodes) return 0;
  Py_ssize_t old = w->room_nodes, room = room_for(old, old + 1);
  node* nodes = widen(w->nodes, w->few_nodes, sizeof(node), old, room);
  if (nodes == NULL) return -1;
  w->nodes = nodes; /* kept, should one of the others fail */
  Py_ssize_t* order = widen(w->order, w->few_order, sizeof(Py_ssize_t), old, room);
  if (order == NULL) return -1;
  w->order = order;
  Py_ssize_t* stack = widen(w->stack, w->few_stack, sizeof(Py_ssize_t), old, room);
  if (stack == NULL) return -1;
  w->stack = stack;
  w->room_nodes = room;
  return 0;
}

static inline int need_leaves(walk* w, Py_ssize_t more) {
  if (w->n_leaves + more <= w->room_leaves) return 0;
  Py_ssize_t room = room_for(w->room_leaves, w->n_leaves + more);
  leaf* wider = widen(w->leaves, w->few_leaves, sizeof(leaf), w->room_leaves, room);
  if (wider == NULL) return -1;
  w->leaves = wider;
  w->room_leaves = room;
  return 0;
}

/* ---- visited objects ------------------------------------------------------------------------- */

/* Where an object is remembered first: objects that lie side by side are remembered side by side,
 * since they are mostly visited in turn. */
static inline size_t place_of(PyObject* obj) {
  return (uintptr_t)obj >> 6;
}

/* A place that is taken is followed by others at a distance that depends on the object, and is odd,
 * so that every place has its turn. */
static inline visit* find(const walk* w, PyObject* obj) {
  size_t mask = (size_t)w->room_visits - 1, at = place_of(obj);
  for (size_t step = ((uintptr_t)obj >> 4) * 0x9E3779B97F4A7C15u >> 32 | 1;; at += step) {
    visit* v = &w->visits[at & mask];
    if (*v == 0 || (*v > 0 ? w->nodes[*v - 1].obj : w->leaves[~*v].obj) == obj) return v;
  }
}

/* What is about to be looked at is fetched ahead of time: of many arrays none is in a cache. */
enum { AHEAD = 8 };

/* The children of an open node that come after the next one: objects first, then where they are
 * remembered. */
static inline void fetch_children(const walk* w, const node* n) {
  Py_ssize_t near = n->next + AHEAD, far = near + AHEAD;
  if (far < n->end) __builtin_prefetch(w->items[far].value);
  if (near < n->end)
    __builtin_prefetch(&w->visits[place_of(w->items[near].value) & ((size_t)w->room_visits - 1)]);
}

/* Both ends of an array object and of a managed tensor. */
static inline void fetch(const void* object) {
  __builtin_prefetch(object);
  __builtin_prefetch((const char*)object + 64);
}

/* Make room for more objects, in one step where their number is known: fresh memory is what trees
 * of many arrays cost most. Errors: -1 with MemoryError. */
static inline int need_visits(walk* w, Py_ssize_t more) {
  Py_ssize_t old_room = w->room_visits, room = old_room;
  while ((w->n_visits + more) * 2 >= room) room *= 2;
  if (room == old_room) return 0;
  visit *old = w->visits, *wider = PyMem_Calloc((size_t)room, sizeof(visit));
  if (wider == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  dlx_use_huge_pages(wider, (size_t)room * sizeof(visit));
  w->visits = wider;
  w->room_visits = room;
  for (Py_ssize_t i = 0; i < old_room; i++) {
    if (old[i]) *find(w, old[i] > 0 ? w->nodes[old[i] - 1].obj : w->leaves[~old[i]].obj) = old[i];
  }
  if (old != w->few_visits) PyMem_Free(old);
  return 0;
}

/* Note what is in the array of nodes, or of leaves, by now. Errors: -1 with MemoryError. */
static inline int remember(walk* w, visit* slot, visit met) {
  *slot = met;
  w->n_visits++;
  return need_visits(w, 1);
}

#endif
