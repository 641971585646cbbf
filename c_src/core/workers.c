/* Starting threads; see workers.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "workers.h"

#include <sched.h>
#include <signal.h>

enum { STACK = 256 << 10 };

int dlx_count_cores(void) {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

int dlx_start_thread(pthread_t* thread, void* (*function)(void*), void* argument) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  sigset_t all, before;
  pthread_attr_t attributes;
  sigfillset(&all);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
  int failed = pthread_attr_init(&attributes);
  if (failed) return failed;
  pthread_attr_setstacksize(&attributes, STACK);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  failed = pthread_create(thread, &attributes, function, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return failed;
}
