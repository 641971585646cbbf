/* Functions that only Linux has, for other systems; see platform.h. */

#ifndef __linux__

#include "platform.h"
#include "dlx.h"

#include <errno.h>

static int fail(void) {
  errno = ENOSYS;
  return -1;
}

void dlx_use_huge_pages(void* memory, size_t size) {
  (void)memory;
  (void)size;
}

int dlx_create_huge_pages(char* start, size_t size) {
  (void)start;
  (void)size;
  return fail();
}

int dlx_copy_parts(const dlx_part* to, const dlx_part* from, size_t n) {
  (void)to;
  (void)from;
  (void)n;
  return fail();
}

int dlx_write_parts(int fd, dlx_part* parts, int n, int64_t at) {
  (void)fd;
  (void)parts;
  (void)n;
  (void)at;
  return fail();
}

int dlx_take_descriptor(int32_t pid, int32_t fd) {
  (void)pid;
  (void)fd;
  return fail();
}

void dlx_wait_word(void* word, uint32_t value, int64_t nanoseconds) {
  (void)word;
  (void)value;
  (void)nanoseconds;
}

void dlx_wake_word(void* word) {
  (void)word;
}

#endif
