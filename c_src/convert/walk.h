#ifndef DLX_WALK_H_
#define DLX_WALK_H_

/* What convert/tree.c notes while it walks through a tree: containers, their children, the arrays,
 * and which objects it has met. Of many arrays, fresh memory and misses of the caches cost more
 * than instructions: nothing takes more bytes here than it must, and what comes next is fetched
 * ahead. */

#include "pairs.h"
#include "streams.h"

/* An array that grows, and begins in memory of its owner, on the stack. */
typedef struct {
  void* at;
  const void* few; /* where it begins; not freed */
  Py_ssize_t n, room;
  size_t size; /* bytes of an element */
} py_vector;

#define PY_VECTOR(first) \
  ((py_vector){(first), (first), 0, sizeof(first) / sizeof *(first), sizeof *(first)})

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
  PyObject* obj;     /* borrowed from an item */
  py_source* source; /* held; NULL = its result was known */
  py_offer offer;    /* its `made` is NULL again once it was handed over */
  PyObject* result;  /* strong, or NULL; moved into the new container where it stands once */
  uint8_t what;      /* py_what */
  uint8_t is_shared; /* it stands in several places */
} leaf;

/* An object that was met: 1 + number of a node; ~number of a leaf; 0 = none. */
typedef int32_t visit;

enum { FEW = 32, ITSELF = PY_SSIZE_T_MAX, AHEAD = 8 };

typedef struct {
  py_call* call;
  py_target* target; /* held; NULL = no array was met */
  py_vector items, nodes, leaves;
  py_vector order, stack; /* numbers of nodes: children before parents; those that are open */
  py_vector visits;       /* hash table by address; all of its room is in use */
  Py_ssize_t n_visits;
  int has_producers, has_copies, has_devices; /* among the leaves */
  py_stream_pairs streams;                    /* none is noted before there is a device */
  item few_items[FEW];
  node few_nodes[FEW];
  leaf few_leaves[FEW];
  Py_ssize_t few_order[FEW], few_stack[FEW];
  visit few_visits[2 * FEW];
} walk;

static inline item* items_of(const walk* w) {
  return w->items.at;
}

static inline node* nodes_of(const walk* w) {
  return w->nodes.at;
}

static inline leaf* leaves_of(const walk* w) {
  return w->leaves.at;
}

typedef enum {
  FAILED = -1, /* an exception is set */
  LEAVE,       /* ask Python */
  DONE
} outcome;

/* Python is asked, unless what has just failed ends the call, see py_state. */
static inline outcome leave(void) {
  return PyErr_Occurred() ? FAILED : LEAVE;
}

/* ---- convert/walk.c -------------------------------------------------------------------------- */

void walk_begin(walk* w, py_call* call);

/* Release everything; a pending exception is kept. GIL: needed; may run Python. */
void walk_end(walk* w);

/* Find everything in a tree: what is a container is copied into nodes, what is an array is noted.
 * GIL: needed; may run Python. */
outcome walk_flatten(walk* w, PyObject* root, PyObject* rule);

/* Fetch both ends of an array object and of a managed tensor. */
static inline void fetch(const void* object) {
  __builtin_prefetch(object);
  __builtin_prefetch((const char*)object + 64);
}

#endif
