/* Counts the threads that a process starts, and records the signals that the last one blocks.
 * Preloaded, so that its pthread_create is found first. */

#define _GNU_SOURCE /* for RTLD_NEXT */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

typedef int (*creator)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

static int started;
static sigset_t blocked; /* a new thread inherits its creator's mask */

int threads_started(void) {
  return __atomic_load_n(&started, __ATOMIC_RELAXED);
}

int last_takes(int signal) {
  return !sigismember(&blocked, signal);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) {
  creator next = (creator)dlsym(RTLD_NEXT, "pthread_create");
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  int failed = next(thread, attributes, run, argument);
  if (!failed) __atomic_fetch_add(&started, 1, __ATOMIC_RELAXED);
  return failed;
}
