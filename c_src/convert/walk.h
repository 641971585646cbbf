#ifndef DLX_WALK_H_
#define DLX_WALK_H_

/* Data of a walk through a tree for convert/tree.c: containers, children, arrays, and visited
 * objects. For many arrays, new memory and cache misses cost more than instructions: structs are
 * small, and the next objects are prefetched. */

#include "pairs.h"
#include "streams.h"

/* A growing array that begins in its owner's memory on the stack. */
typedef struct {
  void* at;
  const void* few; /* the initial memory; not freed */
  Py_ssize_t n, room;
  size_t size; /* bytes of an element */
} py_vector;

#define PY_VECTOR(first) \
  ((py_vector){(first), (first), 0, sizeof(first) / sizeof *(first), sizeof *(first)})

typedef struct {
  PyObject* value; /* strong */
  Py_ssize_t link; /* index of a node; ~index of a leaf; ITSELF = passes through */
} item;

typedef struct {
  PyObject* obj;               /* strong */
  PyObject* result;            /* strong; NULL until created */
  PyObject* rule;              /* strong; NULL for a list, tuple or dict */
  PyObject* keys;              /* strong; the keys from the rule's `flatten`, or NULL */
  Py_ssize_t first, end, next; /* children in `items`, and the next one; then the keys of a dict */
  int is_open;                 /* not all children are visited */
  int is_cyclic;               /* it contains itself */
} node;

typedef struct {
  PyObject* obj;     /* borrowed from an item */
  py_source* source; /* held; NULL = its result was known */
  py_offer offer;    /* `made` is NULL after the hand-over */
  PyObject* result;  /* strong, or NULL; moved into its only container */
  uint8_t what;      /* py_what */
  uint8_t is_shared; /* occurs more than once */
} leaf;

/* A visited object: 1 + index of a node; ~index of a leaf; 0 = none. */
typedef int32_t visit;

enum { FEW = 32, AHEAD = 8 };
enum { ITSELF = PY_SSIZE_T_MAX };

typedef struct {
  py_call* call;
  py_target* target; /* held; NULL = no arrays */
  py_vector items, nodes, leaves;
  py_vector order, stack; /* indices of nodes: children before parents; open nodes */
  py_vector visits;       /* hash table by address; uses all of its room */
  Py_ssize_t n_visits;
  int has_producers, has_copies, has_devices; /* among the leaves */
  py_stream_pairs streams;                    /* empty without a device */
  item few_items[FEW];
  node few_nodes[FEW];
  leaf few_leaves[FEW];
  Py_ssize_t few_order[FEW], few_stack[FEW];
  visit few_visits[2 * FEW];
} walk;

static inline item* get_items(const walk* w) {
  return w->items.at;
}

static inline node* get_nodes(const walk* w) {
  return w->nodes.at;
}

static inline leaf* get_leaves(const walk* w) {
  return w->leaves.at;
}

typedef enum {
  FAILED = -1, /* an exception is set */
  LEAVE,       /* fallback without an exception */
  DONE
} outcome;

/* See "fallback" in call.h. */
static inline outcome leave(void) {
  return PyErr_Occurred() ? FAILED : LEAVE;
}

/* ---- convert/walk.c -------------------------------------------------------------------------- */

void walk_begin(walk* w, py_call* call);

/* Release everything. A pending exception is kept. */
void walk_end(walk* w);

outcome walk_flatten(walk* w, PyObject* root, PyObject* rule);

/* Prefetch both ends of an array object or managed tensor. */
static inline void prefetch(const void* object) {
  __builtin_prefetch(object);
  __builtin_prefetch((const char*)object + 64);
}

#endif
