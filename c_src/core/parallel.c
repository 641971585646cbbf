/* Copying with several threads. */

#include "copy.h"
#include "platform/platform.h"

#include <string.h>

/* Bytes from which a second thread is faster. */
enum { MIN_RUN = 32 << 20, MIN_STRIDED = 8 << 20, MAX_THREADS = 4 };

typedef struct {
  dlx_thread thread;
  dlx_copier copy;
  char* to;
  const char* from;
  dlx_axis axes[DLX_MAX_NDIM];
  int n;
  int64_t item;
} part;

static void* run_part(void* argument) {
  part* p = argument;
  p->copy(p->to, p->from, p->axes, p->n, p->item);
  return NULL;
}

static int choose_threads(const dlx_axis* axes, int n, int64_t nbytes, int64_t item) {
  int is_run = n > 0 && axes[n - 1].from == item && axes[n - 1].to == item;
  if (n == 0 || nbytes < (is_run ? MIN_RUN : MIN_STRIDED)) return 1;
  int cores = dlx_count_cores(), most = cores < MAX_THREADS ? cores : MAX_THREADS;
  return axes[0].extent < most ? (int)axes[0].extent : most;
}

void dlx_copy_in_parts(dlx_copier copy, char* to, const char* from, dlx_axis* axes, int n,
                       int64_t nbytes, int64_t item) {
  int threads = choose_threads(axes, n, nbytes, item), started = 0;
  part parts[MAX_THREADS];
  int64_t done = 0;
  for (; started < threads - 1; started++) {
    part* p = &parts[started];
    *p = (part){.to = to + done * axes[0].to, .from = from + done * axes[0].from, .n = n};
    p->copy = copy;
    p->item = item;
    memcpy(p->axes, axes, (size_t)n * sizeof *axes);
    int64_t extent = (axes[0].extent - done) / (threads - started);
    p->axes[0].extent = extent; /* before it runs: it may reorder its axes */
    if (dlx_start_thread(&p->thread, run_part, p) != 0) break; /* copy the rest here */
    done += extent;
  }
  if (n) axes[0].extent -= done;
  if (n) from += done * axes[0].from, to += done * axes[0].to;
  copy(to, from, axes, n, item);
  for (int i = 0; i < started; i++) dlx_join_thread(parts[i].thread);
}
