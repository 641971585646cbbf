/* Mapped files: dlx.share writes and maps them, dlx.attach maps them. From 16 MB on, filling huge
 * pages takes 0.5 to 0.9 of the time of pwritev, and the first read a third to an eighth. */

#define _GNU_SOURCE

#include "dlx.h"
#include "workers.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Linux's numbers, for older headers. */
enum { POPULATE_WRITE = 23, COLLAPSE = 25 };
enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

/* Find an aligned address that was free just now. Errors: NULL = use any address. */
static void* find_aligned_address(size_t size) {
  char* found =
      mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return NULL;
  munmap(found, size + HUGE_PAGE);
  return found + -(uintptr_t)found % HUGE_PAGE;
}

void* dlx_map(int fd, int64_t size, int mode) {
  int protection = PROT_READ | (mode == DLX_MAP_READ ? 0 : PROT_WRITE);
  int flags = mode == DLX_MAP_PRIVATE ? MAP_PRIVATE : MAP_SHARED;
  void* place = size < HUGE_PAGE ? NULL : find_aligned_address((size_t)size);
  void* made = mmap(place, (size_t)size, protection, flags, fd, 0);
  return made == MAP_FAILED ? NULL : made;
}

int dlx_is_file(int fd, uint64_t device, uint64_t inode) {
  struct stat found;
  return fstat(fd, &found) == 0 && found.st_dev == device && found.st_ino == inode;
}

void dlx_unmap(void* address, int64_t size) {
  munmap(address, (size_t)size);
}

typedef struct {
  int fd;
  char* mapping;
  int64_t size;
  const dlx_run* runs;
  int64_t count;
  _Atomic int64_t next;
  _Atomic int failed;   /* errno */
  _Atomic int is_short; /* memory for huge pages has run out */
} write_job;

enum { MAX_PARTS = 1024 }; /* iovecs per call, the kernel's limit */

static int64_t find_first_after(const write_job* w, int64_t offset) {
  int64_t low = 0, high = w->count;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (w->runs[middle].to + w->runs[middle].size <= offset)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static dlx_run clip_run(dlx_run run, int64_t low, int64_t high) {
  int64_t first = run.to < low ? low : run.to;
  int64_t end = run.to + run.size > high ? high : run.to + run.size;
  return (dlx_run){run.from + (first - run.to), first, end - first};
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

/* Write the runs in a range of the file. Errors: -1 with errno. */
static int write_between(const write_job* w, int64_t low, int64_t high) {
  static char zeros[DLX_ALIGNMENT];
  struct iovec parts[MAX_PARTS];
  for (int64_t i = find_first_after(w, low); i < w->count && w->runs[i].to < high;) {
    int n = 0;
    int64_t first = clip_run(w->runs[i], low, high).to, at = first;
    for (; i < w->count && w->runs[i].to < high && n + 2 <= MAX_PARTS; i++) {
      dlx_run part = clip_run(w->runs[i], low, high);
      size_t gap = (size_t)(part.to - at);
      if (gap > sizeof zeros) break;
      if (gap) parts[n++] = (struct iovec){zeros, gap};
      parts[n++] = (struct iovec){(void*)part.from, (size_t)part.size};
      at = part.to + part.size;
    }
    if (write_all(w->fd, parts, n, first) != 0) return -1;
  }
  return 0;
}

/* Copy the runs in a range to the mapping, by the kernel. Errors: -1, e.g. unreadable memory. */
static int copy_between(const write_job* w, int64_t low, int64_t high) {
  enum { LEAST = 16 << 10 }; /* average bytes of a run, below which pwritev is faster */
  struct iovec from[MAX_PARTS], to[MAX_PARTS];
  int64_t i = find_first_after(w, low), last = find_first_after(w, high - 1);
  if ((last - i) * LEAST > high - low) return -1;
  while (i < w->count && w->runs[i].to < high) {
    unsigned long n = 0;
    ssize_t bytes = 0;
    for (; n < MAX_PARTS && i < w->count && w->runs[i].to < high; i++, n++) {
      dlx_run part = clip_run(w->runs[i], low, high);
      from[n] = (struct iovec){(void*)part.from, (size_t)part.size};
      to[n] = (struct iovec){w->mapping + part.to, (size_t)part.size};
      bytes += part.size;
    }
    if (process_vm_readv(getpid(), to, n, from, n, 0) != bytes) return -1;
  }
  return 0;
}

/* Create huge pages, each from an existing page. Errors: -1 = not supported. */
static int create_huge_pages(write_job* w, int64_t low, int64_t high) {
  if (w->is_short || low == high) return -1;
  for (int64_t at = low; at < high; at += HUGE_PAGE) {
    if (madvise(w->mapping + at, PAGE, POPULATE_WRITE) != 0) return -1;
  }
  if (madvise(w->mapping + low, (size_t)(high - low), COLLAPSE) == 0) return 0;
  if (errno == ENOMEM) w->is_short = 1; /* a failed search moves other memory: try only once */
  return -1;
}

/* Write pieces until none is left. Each call that creates huge pages waits for all processors, so a
 * piece is a few of them. */
static void* write_pieces(void* argument) {
  enum { PIECE = 4 * HUGE_PAGE };
  write_job* w = argument;
  for (;;) {
    int64_t low = atomic_fetch_add(&w->next, PIECE);
    if (low >= w->size || w->failed) return NULL;
    int64_t high = w->size - low < PIECE ? w->size : low + PIECE;
    int64_t huge = high - high % HUGE_PAGE;
    if (create_huge_pages(w, low, huge) == 0 && copy_between(w, low, huge) == 0) low = huge;
    if (low < high && write_between(w, low, high) != 0) w->failed = errno;
  }
}

int dlx_write_runs(int fd, void* mapping, int64_t size, const dlx_run* runs, int64_t count) {
  enum { MIN_THREADED = 8 * HUGE_PAGE };
  write_job w = {.fd = fd, .mapping = mapping, .size = size, .runs = runs, .count = count};
  if (mapping == NULL) return write_between(&w, 0, size);
  pthread_t helper;
  int is_helped = size >= MIN_THREADED && dlx_count_cores() > 1 &&
                  dlx_start_thread(&helper, write_pieces, &w) == 0;
  write_pieces(&w);
  if (is_helped) pthread_join(helper, NULL);
  errno = w.failed;
  return w.failed ? -1 : 0;
}
