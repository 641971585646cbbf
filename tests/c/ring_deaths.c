/* The functions of a ring, which send a signal to their process before a step.
 *
 * A step is a write, a wait or a wake, or a call of `ring_step` by
 * tests/support/stress/ring_steps.py, which compiles and loads this in the place of dlx's own
 * functions. */

#define _GNU_SOURCE /* for syscall */
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ring_steps.h"

static long steps, last;
static int sent;

/* Send a signal before a step, counted from 1. */
void ring_steps_stop(long before, int signal) {
  steps = 0, last = before, sent = signal;
}

void ring_step(void) {
  if (++steps == last) raise(sent);
}

long ring_steps_done(void) {
  return steps;
}

static void step(const volatile void* word, int is_load) {
  (void)word;
  if (!is_load) ring_step();
}

void dlx_wait_word(void* word, uint32_t value, int64_t nanoseconds) {
  const struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
  ring_step();
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

void dlx_wake_word(void* word) {
  ring_step();
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}
