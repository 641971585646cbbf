#ifndef DLX_VECTOR_H_
#define DLX_VECTOR_H_

/* Arrays that grow, and begin in memory of their owner, on the stack. */

#include "interop/interop.h"

typedef struct {
  void* at;
  const void* few; /* where it begins; not freed */
  Py_ssize_t n, room;
  size_t size; /* bytes of an element */
} py_vector;

#define PY_VECTOR(first) \
  ((py_vector){(first), (first), 0, sizeof(first) / sizeof *(first), sizeof *(first)})

/* Errors: -1 with MemoryError, the content as it was. */
int py_vector_grow(py_vector* v, Py_ssize_t more);

/* Make room. Errors: as py_vector_grow. */
static inline int py_vector_need(py_vector* v, Py_ssize_t more) {
  return v->n + more <= v->room ? 0 : py_vector_grow(v, more);
}

static inline void py_vector_free(py_vector* v) {
  if (v->at != v->few) PyMem_Free(v->at);
}

#endif
