#ifndef DLX_THREAD_STATE_H_
#define DLX_THREAD_STATE_H_

/* What only one thread writes to, in each extension, so that the fast path takes no locked
 * operation on memory that other threads use. A thread that ends leaves it to the next one. */

#include <stdatomic.h>
#include <stdint.h>

#include "dlx.h"

/* Cheap thread-local storage: a late library gets a few words from glibc, none from musl. */
#ifdef __GLIBC__
#define FEW_WORDS _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define FEW_WORDS _Thread_local
#endif

typedef struct dlx_thread_state {
  atomic_int_least64_t count;        /* of live managed tensors: made here less released here */
  int depth;                         /* releases inside releases, see core/managed.c */
  DLManagedTensorVersioned* waiting; /* what is released after those */
  _Atomic(uint64_t) since; /* when it began to read maps, see convert/map.c; 0 = it reads none */
  int nested;              /* how often it did so */
  atomic_int entering;     /* whether it is taking the GIL, see base/gil.c */
  char message[400];       /* of the CUDA driver's last failure, see cuda/driver.c */
  atomic_flag taken;
  struct dlx_thread_state* next;
  char apart[64]; /* of the next state in memory: no two share a cache line */
} dlx_thread_state;

/* All there are, a list that only grows. */
extern _Atomic(dlx_thread_state*) dlx_thread_states;

/* This thread's, or NULL where it has none yet. */
extern FEW_WORDS dlx_thread_state* dlx_own_state;

/* Give this thread a state until it ends. GIL: not needed. Errors: NULL = no memory. */
dlx_thread_state* dlx_take_state(void);

static inline dlx_thread_state* dlx_state_of_thread(void) {
  return dlx_own_state ? dlx_own_state : dlx_take_state();
}

#endif
