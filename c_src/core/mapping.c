/* Files in memory: what dlx.share writes and maps, and dlx.attach maps. */

#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, madvise and pwritev are beyond ISO C */

#include "dlx.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>

/* Numbers of Linux, which headers older than the kernel do not have. */
enum { POPULATE_WRITE = 23, COLLAPSE = 25 };
enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

/* An address that is free, or was, where a huge page may begin. Errors: NULL, any will do. */
static void* aligned_place(size_t size) {
  char* found =
      mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return NULL;
  munmap(found, size + HUGE_PAGE);
  return found + -(uintptr_t)found % HUGE_PAGE;
}

void* dlx_map(int fd, int64_t size, int mode) {
  int protection = PROT_READ | (mode == DLX_MAP_READ ? 0 : PROT_WRITE);
  int flags = mode == DLX_MAP_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
  void* place = size < HUGE_PAGE ? NULL : aligned_place((size_t)size);
  void* made = mmap(place, (size_t)size, protection, flags, fd, 0);
  return made == MAP_FAILED ? NULL : made;
}

void dlx_unmap(void* address, int64_t size) {
  munmap(address, (size_t)size);
}

int dlx_make_huge(void* address, int64_t size) {
  size_t huge = (size_t)size / HUGE_PAGE * HUGE_PAGE;
  char* first = address;
  if (huge == 0 || (uintptr_t)first % HUGE_PAGE) return -1;
  for (size_t at = 0; at < huge; at += HUGE_PAGE) { /* what has no page yet is not collapsed */
    if (madvise(first + at, PAGE, POPULATE_WRITE) != 0) return -1;
  }
  return madvise(first, huge, COLLAPSE);
}

static int write_all(int fd, struct iovec* parts, int n, int64_t at) {
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

int dlx_write_runs(int fd, const dlx_run* runs, int64_t count) {
  enum { MOST = 1024 }; /* at once, as many as the kernel takes */
  static char zeros[DLX_ALIGNMENT];
  struct iovec parts[MOST];
  for (int64_t i = 0; i < count;) {
    int n = 0;
    int64_t first = runs[i].to, at = first;
    for (; i < count && n + 2 <= MOST; i++) {
      size_t gap = (size_t)(runs[i].to - at);
      if (gap > sizeof zeros) break;
      if (gap) parts[n++] = (struct iovec){zeros, gap};
      parts[n++] = (struct iovec){(void*)runs[i].from, (size_t)runs[i].size};
      at = runs[i].to + runs[i].size;
    }
    if (write_all(fd, parts, n, first) != 0) return -1;
  }
  return 0;
}
