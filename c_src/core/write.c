/* Mapped files: dlx.share writes and maps them, dlx.attach maps them. From 16 MB on, filling huge
 * pages takes 0.5 to 0.9 of the time of pwritev, and the first read a third to an eighth. */

#include "dlx.h"
#include "platform/platform.h"

#include <errno.h>
#include <stdatomic.h>

enum { HUGE_PAGE = DLX_HUGE_PAGE, MAX_PARTS = DLX_MAX_PARTS };

typedef struct {
  int fd;
  char* mapping;
  int64_t size;
  const dlx_run* runs;
  int64_t count;
  _Atomic int64_t next; /* relaxed, as the next two: joining the thread orders all other data */
  _Atomic int failed;   /* errno; relaxed */
  _Atomic int is_short; /* memory for huge pages has run out; relaxed */
} write_job;

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

/* Write the runs in a range of the file. Errors: -1 with errno. */
static int write_between(const write_job* w, int64_t low, int64_t high) {
  static char zeros[DLX_ALIGNMENT];
  dlx_part parts[MAX_PARTS];
  for (int64_t i = find_first_after(w, low); i < w->count && w->runs[i].to < high;) {
    int n = 0;
    int64_t first = clip_run(w->runs[i], low, high).to, at = first;
    for (; i < w->count && w->runs[i].to < high && n + 2 <= MAX_PARTS; i++) {
      dlx_run part = clip_run(w->runs[i], low, high);
      size_t gap = (size_t)(part.to - at);
      if (gap > sizeof zeros) break;
      if (gap) parts[n++] = (dlx_part){zeros, gap};
      parts[n++] = (dlx_part){(void*)part.from, (size_t)part.size};
      at = part.to + part.size;
    }
    if (dlx_write_parts(w->fd, parts, n, first) != 0) return -1;
  }
  return 0;
}

/* Copy the runs in a range to the mapping, by the kernel. Errors: -1, e.g. unreadable memory. */
static int copy_between(const write_job* w, int64_t low, int64_t high) {
  enum { LEAST = 16 << 10 }; /* average bytes of a run, below which pwritev is faster */
  dlx_part from[MAX_PARTS], to[MAX_PARTS];
  int64_t i = find_first_after(w, low), last = find_first_after(w, high - 1);
  if ((last - i) * LEAST > high - low) return -1;
  while (i < w->count && w->runs[i].to < high) {
    size_t n = 0;
    for (; n < MAX_PARTS && i < w->count && w->runs[i].to < high; i++, n++) {
      dlx_run part = clip_run(w->runs[i], low, high);
      from[n] = (dlx_part){(void*)part.from, (size_t)part.size};
      to[n] = (dlx_part){w->mapping + part.to, (size_t)part.size};
    }
    if (dlx_copy_parts(to, from, n) != 0) return -1;
  }
  return 0;
}

/* Create huge pages, each from an existing page. Errors: -1 = not supported. */
static int create_huge_pages(write_job* w, int64_t low, int64_t high) {
  if (atomic_load_explicit(&w->is_short, memory_order_relaxed) || low == high) return -1;
  if (dlx_create_huge_pages(w->mapping + low, (size_t)(high - low)) == 0) return 0;
  if (errno == ENOMEM) /* a failed search moves other memory: try only once */
    atomic_store_explicit(&w->is_short, 1, memory_order_relaxed);
  return -1;
}

/* Write pieces until none is left. Each call that creates huge pages waits for all processors, so a
 * piece is a few of them. */
static void* write_pieces(void* argument) {
  enum { PIECE = 4 * HUGE_PAGE };
  write_job* w = argument;
  for (;;) {
    int64_t low = atomic_fetch_add_explicit(&w->next, PIECE, memory_order_relaxed);
    if (low >= w->size || atomic_load_explicit(&w->failed, memory_order_relaxed)) return NULL;
    int64_t high = w->size - low < PIECE ? w->size : low + PIECE;
    int64_t huge = high - high % HUGE_PAGE;
    if (create_huge_pages(w, low, huge) == 0 && copy_between(w, low, huge) == 0) low = huge;
    if (low < high && write_between(w, low, high) != 0)
      atomic_store_explicit(&w->failed, errno, memory_order_relaxed);
  }
}

int dlx_write_runs(int fd, void* mapping, int64_t size, const dlx_run* runs, int64_t count) {
  enum { MIN_THREADED = 8 * HUGE_PAGE };
  write_job w = {.fd = fd, .mapping = mapping, .size = size, .runs = runs, .count = count};
  if (mapping == NULL) return write_between(&w, 0, size);
  dlx_thread helper;
  int is_helped = size >= MIN_THREADED && dlx_count_cores() > 1 &&
                  dlx_start_thread(&helper, write_pieces, &w) == 0;
  write_pieces(&w);
  if (is_helped) dlx_join_thread(helper);
  errno = atomic_load_explicit(&w.failed, memory_order_relaxed);
  return errno ? -1 : 0;
}
