/* The parts of the platform that Linux and macOS share; see platform.h. */

#ifndef _WIN32

#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE

#include "platform.h"
#include "dlx.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { STACK = 256 << 10 };

void dlx_create_key(dlx_thread_key* key, void (*function)(void*)) {
  if (pthread_key_create(key, function) != 0) *key = (dlx_thread_key)-1;
}

void dlx_set_key(dlx_thread_key key, void* value) {
  pthread_setspecific(key, value);
}

int dlx_start_thread(dlx_thread* thread, void* (*function)(void*), void* argument) {
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

void dlx_join_thread(dlx_thread thread) {
  pthread_join(thread, NULL);
}

void dlx_nap(void) {
  const struct timespec pause = {.tv_nsec = 100000};
  nanosleep(&pause, NULL);
}

void dlx_watch_forks(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
  pthread_atfork(before, in_parent, in_child);
}

void* dlx_malloc_aligned(size_t alignment, size_t size) {
  return aligned_alloc(alignment, size);
}

void dlx_free_aligned(void* memory) {
  free(memory);
}

/* Find an aligned address that was free just now. Errors: NULL = use any address. */
static void* find_aligned_address(size_t size) {
  char* found = mmap(NULL, size + DLX_HUGE_PAGE, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return NULL;
  munmap(found, size + DLX_HUGE_PAGE);
  return found + -(uintptr_t)found % DLX_HUGE_PAGE;
}

void* dlx_map(int fd, int64_t size, int mode) {
  int protection = PROT_READ | (mode == DLX_MAP_READ ? 0 : PROT_WRITE);
  int flags = mode == DLX_MAP_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
  void* place = size < DLX_HUGE_PAGE ? NULL : find_aligned_address((size_t)size);
  void* made = mmap(place, (size_t)size, protection, flags, fd, 0);
  return made == MAP_FAILED ? NULL : made;
}

int dlx_is_file(int fd, uint64_t device, uint64_t inode) {
  struct stat found;
  return fstat(fd, &found) == 0 && (uint64_t)found.st_dev == device && found.st_ino == inode;
}

void dlx_unmap(void* address, int64_t size) {
  munmap(address, (size_t)size);
}

void* dlx_open_library(const char* name, char* why, size_t room) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library) return library;
  const char* reason = dlerror();
  snprintf(why, room, "%s", reason ? reason : "it does not load");
  return NULL;
}

void dlx_close_library(void* library) {
  dlclose(library);
}

void* dlx_find_symbol(void* library, const char* symbol) {
  return dlsym(library, symbol);
}

#endif
