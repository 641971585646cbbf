/* The states of threads: a thread takes one when it first needs it, and leaves it when it ends. */

#include "thread_state.h"
#include "allocate.h"

_Atomic(dlx_thread_state*) dlx_thread_states;
DLX_FEW_WORDS dlx_thread_state* dlx_own_state;

static dlx_thread_key leaving;
static dlx_once once = DLX_ONCE_INIT;

/* A thread can end inside a release, while it reads maps or takes the GIL. */
static void leave(dlx_thread_state* state) {
  state->depth = state->nested = 0;
  state->message[0] = '\0';
  atomic_store(&state->since, 0);
  atomic_store(&state->entering, 0);
  atomic_flag_clear(&state->taken);
}

static void leave_own(void* state) {
  dlx_own_state = NULL;
  leave(state);
}

/* Only the forking thread exists in the child. Tensors that others were about to release leak. */
static void after_fork(void) {
  for (dlx_thread_state* each = atomic_load(&dlx_thread_states); each; each = each->next) {
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
  dlx_thread_state* found = atomic_load(&dlx_thread_states);
  while (found && atomic_flag_test_and_set(&found->taken)) found = found->next;
  if (found == NULL) {
    found = dlx_allocate(sizeof *found);
    if (found == NULL) return NULL;
    *found = (dlx_thread_state){.taken = ATOMIC_FLAG_INIT};
    atomic_flag_test_and_set(&found->taken);
    found->next = atomic_load(&dlx_thread_states);
    while (!atomic_compare_exchange_weak(&dlx_thread_states, &found->next, found)) continue;
  }
  dlx_run_once(&once, watch_threads);
  dlx_set_key(leaving, found); /* on failure, the state is never reused: harmless */
  return dlx_own_state = found;
}
