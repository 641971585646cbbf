/* Arrays that grow: see vector.h. */

#include "vector.h"
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
