#ifndef DLX_THREAD_STATE_H_
#define DLX_THREAD_STATE_H_

/* Data that only one thread writes to, for each extension, so that the fast path needs no locked
 * operation on shared memory. When a thread ends, another one reuses its state. */

#include <stdatomic.h>
#include <stdint.h>

#include "dlx.h"
#include "platform/platform.h"

typedef struct dlx_thread_state {
  atomic_int_least64_t count;        /* live managed tensors: created here minus released here;
                                        release, acquire: who reads 0 may free what they used */
  int depth;                         /* nested releases, see core/managed.c */
  DLManagedTensorVersioned* waiting; /* released after the nested ones */
  _Atomic(uint64_t) since; /* when it began to read maps; 0 = not reading; fences of convert/map.c
                              order it */
  int nested;              /* nested reads of maps */
  atomic_int entering;     /* 1 while it takes the GIL; seq_cst, see base/gil.c */
  char message[400];       /* the CUDA driver's last failure, see cuda/driver.c */
  atomic_flag taken;       /* acquire, release: the next thread sees what this one left */
  struct dlx_thread_state* next;
  char apart[64]; /* keeps states on different cache lines */
} dlx_thread_state;

/* The newest state. Release, acquire: its members are initialized. */
extern _Atomic(dlx_thread_state*) dlx_thread_states;

static inline dlx_thread_state* dlx_first_state(void) {
  return atomic_load_explicit(&dlx_thread_states, memory_order_acquire);
}

extern DLX_FEW_WORDS dlx_thread_state* dlx_own_state;

/* Give the current thread a state. GIL: not needed. Errors: NULL = no memory. */
dlx_thread_state* dlx_take_state(void);

static inline dlx_thread_state* dlx_state_of_thread(void) {
  return dlx_own_state ? dlx_own_state : dlx_take_state();
}

#endif
