/* The states of threads: a thread takes one when it first needs it, and leaves it when it ends. */

#include "thread_state.h"
#include "allocate.h"

_Atomic(dlx_thread_state*) dlx_thread_states; /* release, acquire */
DLX_FEW_WORDS dlx_thread_state* dlx_own_state;

static dlx_thread_key leaving;
static dlx_once once = DLX_ONCE_INIT;

/* A thread can end inside a release, while it reads maps or takes the GIL. */
static void leave(dlx_thread_state* state) {
  state->depth = state->nested = 0;
  state->message[0] = '\0';
  atomic_store_explicit(&state->since, 0, memory_order_release);
  atomic_store_explicit(&state->entering, 0, memory_order_release);
  atomic_flag_clear_explicit(&state->taken, memory_order_release);
}

static void leave_own(void* state) {
  dlx_own_state = NULL;
  leave(state);
}

/* Only the forking thread exists in the child. Tensors that others were about to release leak. */
static void after_fork(void) {
  for (dlx_thread_state* each = dlx_first_state(); each; each = each->next) {
    if (each == dlx_own_state) continue;
    each->waiting = NULL;
    leave(each);
  }
}

static void watch_threads(void) {
  dlx_create_key(&leaving, leave_own);
  dlx_watch_forks(NULL, NULL, after_fork);
}

dlx_thread_state* dlx_take_state(void) {
  dlx_thread_state* found = dlx_first_state();
  while (found && atomic_flag_test_and_set_explicit(&found->taken, memory_order_acquire))
    found = found->next;
  if (found == NULL) {
    found = dlx_allocate(sizeof *found);
    if (found == NULL) return NULL;
    *found = (dlx_thread_state){.taken = ATOMIC_FLAG_INIT};
    atomic_flag_test_and_set_explicit(&found->taken, memory_order_relaxed);
    found->next = atomic_load_explicit(&dlx_thread_states, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&dlx_thread_states, &found->next, found,
                                                  memory_order_acq_rel, memory_order_relaxed))
      continue; /* acquire, too: the states behind it */
  }
  dlx_run_once(&once, watch_threads);
  dlx_set_key(leaving, found); /* on failure, the state is never reused: harmless */
  return dlx_own_state = found;
}
