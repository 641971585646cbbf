/* The parts of the platform that only Linux has; see platform.h. */

#ifdef __linux__

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "platform.h"
#include "dlx.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The kernel's numbers, for older headers. */
enum { POPULATE_WRITE = 23, COLLAPSE = 25, PIDFD_OPEN = 434, PIDFD_GETFD = 438 };

int dlx_count_cores(void) {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

void dlx_use_huge_pages(void* memory, size_t size) {
  enum { LARGE = 1 << 22, PAGE = 64 << 10 /* or a part of it */ };
  if (size < LARGE) return;
  uintptr_t first = ((uintptr_t)memory + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
  madvise((void*)first, (uintptr_t)memory + size - first, MADV_HUGEPAGE);
}

int dlx_create_huge_pages(char* start, size_t size) {
  for (size_t at = 0; at < size; at += DLX_HUGE_PAGE) {
    if (madvise(start + at, 1, POPULATE_WRITE) != 0) return -1;
  }
  return madvise(start, size, COLLAPSE);
}

int dlx_copy_parts(const dlx_part* to, const dlx_part* from, size_t n) {
  ssize_t bytes = 0;
  for (size_t i = 0; i < n; i++) bytes += (ssize_t)from[i].iov_len;
  return process_vm_readv(getpid(), to, n, from, n, 0) == bytes ? 0 : -1;
}

int dlx_write_parts(int fd, dlx_part* parts, int n, int64_t at) {
  while (n) {
    ssize_t done = pwritev(fd, parts, n, at);
    if (done < 0 && errno == EINTR) continue;
    if (done == 0) errno = EIO;
    if (done <= 0) return -1;
    at += done;
    for (; n && (size_t)done >= parts->iov_len; n--) done -= (ssize_t)(parts++)->iov_len;
    if (n) parts->iov_base = (char*)parts->iov_base + done, parts->iov_len -= (size_t)done;
  }
  return 0;
}

int dlx_take_descriptor(int32_t pid, int32_t fd) {
  int process = (int)syscall(PIDFD_OPEN, pid, 0);
  if (process < 0) return -1;
  int taken = (int)syscall(PIDFD_GETFD, process, fd, 0);
  close(process);
  return taken;
}

void dlx_wait_word(void* word, uint32_t value, int64_t nanoseconds) {
  const struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

void dlx_wake_word(void* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void* dlx_find_loaded_symbol(const char* library, const char* symbol) {
  char name[64];
  snprintf(name, sizeof name, "lib%s.so", library);
  void* loaded = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  void* found = loaded ? dlsym(loaded, symbol) : NULL;
  if (loaded) dlclose(loaded); /* its users keep it loaded */
  return found;
}

#endif
