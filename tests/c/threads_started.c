/* Counts the threads that a process starts: preloaded, so its pthread_create is found first. */

#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <pthread.h>

typedef int (*creator)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

static int started;

int threads_started(void) {
  return __atomic_load_n(&started, __ATOMIC_RELAXED);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) {
  creator next = (creator)dlsym(RTLD_NEXT, "pthread_create");
  int failed = next(thread, attributes, run, argument);
  if (!failed) __atomic_fetch_add(&started, 1, __ATOMIC_RELAXED);
  return failed;
}
