/* Copying with several threads. */

#include "copy.h"
#include "platform/platform.h"

#include <string.h>

/* A second thread is faster from about 2 MiB, but much slower while others use the cores. */
enum { MIN_BYTES = 8 << 20, MAX_THREADS = 4 };

typedef struct {
  dlx_thread thread;
  dlx_worker work;
  void* job;
  int64_t first, end;
  int status;
} part;

static void* run_part(void* argument) {
  part* p = argument;
  p->status = p->work(p->job, p->first, p->end);
  return NULL;
}

int dlx_work_in_parts(dlx_worker work, void* job, int64_t n, int64_t nbytes) {
  int cores = nbytes < MIN_BYTES ? 1 : dlx_count_cores(), started = 0;
  int64_t threads = cores < MAX_THREADS ? cores : MAX_THREADS, done = 0;
  part parts[MAX_THREADS];
  if (n < threads) threads = n;
  for (; started < threads - 1; started++) {
    part* p = &parts[started];
    *p = (part){.work = work, .job = job, .first = done};
    p->end = done + (n - done) / (threads - started);
    if (dlx_start_thread(&p->thread, run_part, p) != 0) break; /* the rest is done here */
    done = p->end;
  }
  int status = work(job, done, n);
  for (int i = 0; i < started; i++) {
    dlx_join_thread(parts[i].thread);
    if (status == DLX_OK) status = parts[i].status;
  }
  return status;
}

typedef struct {
  dlx_copier copy;
  char* to;
  const char* from;
  const dlx_axis* axes;
  int n;
  int64_t item;
} copy_job;

static int copy_part(void* job, int64_t first, int64_t end) {
  const copy_job* j = job;
  dlx_axis axes[DLX_MAX_NDIM]; /* the copier may reorder them */
  memcpy(axes, j->axes, (size_t)j->n * sizeof *axes);
  axes[0].extent = end - first;
  j->copy(j->to + first * axes[0].to, j->from + first * axes[0].from, axes, j->n, j->item);
  return DLX_OK;
}

void dlx_copy_in_parts(dlx_copier copy, char* to, const char* from, dlx_axis* axes, int n,
                       int64_t nbytes, int64_t item) {
  copy_job job = {copy, to, from, axes, n, item};
  if (n == 0 || nbytes < MIN_BYTES)
    copy(to, from, axes, n, item);
  else
    dlx_work_in_parts(copy_part, &job, axes[0].extent, nbytes);
}
