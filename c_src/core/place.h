#ifndef DLX_PLACE_H_
#define DLX_PLACE_H_

/* What each thread has of its own, for all of dlx: a place that only it writes to, so that the fast
 * path takes no locked operation on memory that other threads use. A thread that ends leaves its
 * place, as it is, to the next one. cffi never reads this. */

#include <stdatomic.h>
#include <stdint.h>

#include "dlx.h"
#include "hot.h"

enum { DLX_SPARE = 16 };

typedef struct dlx_place {
  atomic_int_least64_t count;        /* of live managed tensors: made here less released here */
  int depth;                         /* releases inside releases, see core/managed.c */
  DLManagedTensorVersioned* waiting; /* what is released after those */
  _Atomic(uint64_t) since; /* when it began to read routes, see python/route.c; 0 = it reads none */
  int nested;              /* how often it did so */
  int n_spare;             /* shells of dlx.Tensor for re-use, see python/tensor.c */
  void* spare[DLX_SPARE];
  atomic_flag taken;
  struct dlx_place* next;
  char apart[64]; /* of the next place in memory: no two share a cache line */
} dlx_place;

/* All places there are, a list that only grows. */
extern _Atomic(dlx_place*) dlx_places;

/* This thread's, or NULL where it has none yet. */
extern FEW_WORDS dlx_place* dlx_own_place;

/* Give this thread a place. Owns: the thread, until it ends. GIL: not needed. Errors: NULL without
 * memory. */
dlx_place* dlx_take_place(void);

static inline dlx_place* dlx_place_of_thread(void) {
  return dlx_own_place ? dlx_own_place : dlx_take_place();
}

#endif
