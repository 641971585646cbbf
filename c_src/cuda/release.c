/* Deferred release: memory that was released while a stream may still use it is queued, one queue
 * per stream, until an event recorded on that stream is done. Nothing here blocks. */

#include "driver.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct use {
  void *owner, *keep;
  dlx_release release, release_keep;
  int32_t device;
  uint64_t stream;
  int stands_in;  /* `stream` is the legacy stream, which waits for the real one */
  cu_event event; /* NULL: not recorded yet */
  struct use* next;
} use;

typedef struct line { /* the queue of one stream: the device finishes in this order */
  int32_t device;
  uint64_t stream;
  use *first, *last;
  struct line* next;
} line;

static line* lines; /* guarded by cuda_lock */
static atomic_int_least64_t n_waiting;

int dlx_use_new(int32_t device_id, uint64_t stream, void* owner, dlx_release release, void* keep,
                dlx_release release_keep, void** out) {
  int status = dlx_cuda_load(); /* not at release, which cannot report an error */
  if (status != DLX_OK) return status;
  use* self = malloc(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  int may_die = keep == NULL && !cuda_is_own(device_id, stream);
  /* 2 is another stream on the thread that releases; the legacy stream waits for them all. */
  int stands_in = stream == DLX_STREAM_PER_THREAD || (may_die && stream != DLX_STREAM_LEGACY);
  *self = (use){.owner = owner,
                .keep = keep,
                .release = release,
                .release_keep = release_keep,
                .device = device_id,
                .stream = stands_in ? DLX_STREAM_LEGACY : stream,
                .stands_in = stands_in};
  *out = self;
  return DLX_OK;
}

/* Release the owner. GIL: not needed; no lock may be held. */
static void finish(use* self) {
  cuda_give_event(self->device, self->event);
  if (self->release) self->release(self->owner);
  if (self->keep) self->release_keep(self->keep);
  free(self);
}

/* 1 = the device is done, or can no longer be asked; 0 = not yet. An event is only recorded where
 * the stream still works, and on a stand-in always: that waits for the others with what is put on
 * it, and a query does not. The device's context must be current. GIL: not needed. */
static int is_done(use* self) {
  int mode, code;
  if (self->event == NULL) {
    int captures;
    if (cuda_is_capturing(self->stream, &captures) != DLX_OK) return 1;
    if (captures) return 0;
    if (!self->stands_in) {
      mode = cuda_relax();
      code = cu.StreamQuery(cuda_stream(self->stream));
      cuda_unrelax(mode);
      if (code != CU_NOT_READY) return 1;
    }
    if (cuda_take_event(self->device, &self->event) != DLX_OK) return 0; /* perhaps the next time */
    if (cuda_record(self->event, self->stream) != DLX_OK) {
      cuda_reject_event(self->device, self->event);
      self->event = NULL;
      return 1;
    }
    if (!self->stands_in) return 0;
  }
  mode = cuda_relax();
  code = cu.EventQuery(self->event);
  cuda_unrelax(mode);
  return code != CU_NOT_READY;
}

/* GIL: not needed; cuda_lock held. Errors: 0 = no memory. */
static int append(use* self) {
  line* at = lines;
  while (at && (at->device != self->device || at->stream != self->stream)) at = at->next;
  if (at == NULL) {
    at = calloc(1, sizeof *at);
    if (at == NULL) return 0;
    *at = (line){.device = self->device, .stream = self->stream, .next = lines};
    lines = at;
  }
  self->next = NULL;
  if (at->last) {
    at->last->next = self;
  } else {
    at->first = self;
  }
  at->last = self;
  atomic_fetch_add(&n_waiting, 1);
  return 1;
}

void dlx_use_release(void* object) {
  use* self = object;
  if (cuda_is_child()) { /* whatever it owns belongs to a driver that this process cannot call */
    free(self);
    return;
  }
  dlx_cuda_release_pending();
  if (!cuda_usable() || dlx_cuda_push(self->device) != DLX_OK) {
    finish(self);
    return;
  }
  int done = is_done(self);
  dlx_cuda_pop();
  if (!done) {
    pthread_mutex_lock(&cuda_lock);
    done = !append(self);
    pthread_mutex_unlock(&cuda_lock);
    if (done &&
        dlx_cuda_push(self->device) == DLX_OK) { /* no memory for the queue: the last resort */
      if (self->event) cu.EventSynchronize(self->event);
      dlx_cuda_pop();
    }
  }
  if (done) finish(self);
}

/* Move what is done from a line to a list. GIL: not needed; cuda_lock held. */
static void take_done(line* at, use** done) {
  if (dlx_cuda_push(at->device) != DLX_OK) return;
  while (at->first && is_done(at->first)) {
    use* self = at->first;
    at->first = self->next;
    if (at->first == NULL) at->last = NULL;
    self->next = *done;
    *done = self;
    atomic_fetch_sub(&n_waiting, 1);
  }
  dlx_cuda_pop();
}

int64_t dlx_cuda_release_pending(void) {
  if (atomic_load(&n_waiting) == 0 || !cuda_usable()) return atomic_load(&n_waiting);
  use* done = NULL;
  pthread_mutex_lock(&cuda_lock);
  for (line** at = &lines; *at;) {
    line* here = *at;
    take_done(here, &done);
    if (here->first) {
      at = &here->next;
    } else {
      *at = here->next;
      free(here);
    }
  }
  pthread_mutex_unlock(&cuda_lock);
  while (done) { /* an owner may run anything, this function too */
    use* self = done;
    done = self->next;
    finish(self);
  }
  return atomic_load(&n_waiting);
}
