#ifndef DLX_THREAD_STATE_H_
#define DLX_THREAD_STATE_H_

/* What each thread has of its own, in each extension, and only it writes to, so that the fast path
 * takes no locked operation on memory that other threads use. A thread that ends leaves its count
 * to the next one. cffi never reads this. */

#include <stdatomic.h>
#include <stdint.h>

#include "dlx.h"

/* The cheap kind of thread-local storage; under glibc a library that is loaded late has room for a
 * few words of it, elsewhere (musl) it has none. */
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

/* Give this thread a state. Owns: the thread, until it ends. GIL: not needed. Errors: NULL without
 * memory. */
dlx_thread_state* dlx_take_state(void);

static inline dlx_thread_state* dlx_state_of_thread(void) {
  return dlx_own_state ? dlx_own_state : dlx_take_state();
}

#endif
