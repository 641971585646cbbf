/* Stream synchronization, readiness events, and releasing memory behind a stream. A stream that
 * waits for an event keeps its state, so events are reused soon: a small pool is enough. */

#include "driver.h"
#include "core/allocate.h"

/* ---- events, pooled by device ---------------------------------------------------------------- */

enum { SPARE = 32 };
static cu_event spare[DLX_MAX_DEVICES][SPARE];
static int n_spare[DLX_MAX_DEVICES];

static int take_event(int32_t device, cu_event* event) {
  *event = NULL;
  dlx_lock(&cuda_event_lock);
  if (n_spare[device] > 0) *event = spare[device][--n_spare[device]];
  dlx_unlock(&cuda_event_lock);
  if (*event) return DLX_OK;
  int before = cuda_relax(), status = CUDA(EventCreate, event, CU_EVENT_DISABLE_TIMING);
  cuda_unrelax(before);
  return status;
}

static void destroy_event(int32_t device, cu_event event) {
  int mode;
  if (cuda_enter(device, &mode) != DLX_OK) return;
  cu.EventDestroy(event);
  cuda_leave(mode);
}

static void return_event(int32_t device, cu_event event) {
  if (event == NULL || !dlx_cuda_loaded()) return;
  dlx_lock(&cuda_event_lock);
  int room = n_spare[device] < SPARE;
  if (room) spare[device][n_spare[device]++] = event;
  dlx_unlock(&cuda_event_lock);
  if (!room) destroy_event(device, event);
}

static void reject_event(int32_t device, cu_event event) {
  while (event != NULL && dlx_cuda_loaded()) {
    destroy_event(device, event);
    dlx_lock(&cuda_event_lock);
    event = n_spare[device] > 0 ? spare[device][--n_spare[device]] : NULL;
    dlx_unlock(&cuda_event_lock);
  }
}

/* ---- graph capture --------------------------------------------------------------------------- */

/* Errors: the driver's code. */
static int ask_capturing(uint64_t stream, int* yes) {
  int state = CU_CAPTURE_NONE, code = cu.StreamIsCapturing(cuda_stream(stream), &state);
  *yes = code == CU_CAPTURE_IMPLICIT || state != CU_CAPTURE_NONE;
  return *yes ? CU_OK : code;
}

static int is_capturing(uint64_t stream, int* yes) {
  int code = ask_capturing(stream, yes);
  return cuda_check("cuStreamIsCapturing", code);
}

int cuda_can_wait(uint64_t stream) {
  int captures, status = is_capturing(stream, &captures);
  return status == DLX_OK && captures ? DLX_E_CAPTURE : status;
}

/* 0 = unknown. */
static uint64_t get_capture(uint64_t stream) {
  int state = CU_CAPTURE_NONE;
  uint64_t id = 0;
  if (cu.StreamGetCaptureInfo == NULL ||
      cu.StreamGetCaptureInfo(cuda_stream(stream), &state, &id, NULL, NULL, NULL) != CU_OK ||
      state != CU_CAPTURE_ACTIVE)
    return 0;
  return id;
}

static int64_t release_finished(void);

/* ---- one stream waits for another ------------------------------------------------------------ */

/* The stream's device must be current. */
static int wait_for(cu_event event, uint64_t stream) {
  return CUDA(StreamWaitEvent, cuda_stream(stream), event, 0);
}

/* Like dlx_cuda_can_order, for different streams; `from_device` is current. */
static int can_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  int here = 0, there = 0, hop = from_device != to_device;
  int status = is_capturing(from, &here);
  uint64_t capture = here ? get_capture(from) : 0;
  if (status == DLX_OK && hop) status = dlx_cuda_push(to_device);
  if (status != DLX_OK) return status;
  status = is_capturing(to, &there);
  /* Within one capture, a dependency is an edge of the graph. */
  if (status == DLX_OK && (here || there) && (!here || capture == 0 || get_capture(to) != capture))
    status = DLX_E_CAPTURE;
  if (hop) dlx_cuda_pop();
  if (status == DLX_OK && !here) release_finished(); /* owners may add nodes to a graph */
  return status;
}

int dlx_cuda_can_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  if (from == to && from_device == to_device) return DLX_OK;
  int status = dlx_cuda_push(from_device);
  if (status != DLX_OK) return status;
  status = to_device < 0 ? cuda_can_wait(from) : can_order(from_device, from, to_device, to);
  dlx_cuda_pop();
  return status;
}

int dlx_cuda_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  int hop = from_device != to_device;
  cu_event event = NULL;
  if (from == to && !hop) return DLX_OK;
  int status = dlx_cuda_push(from_device);
  if (status != DLX_OK) return status;
  status = take_event(from_device, &event);
  if (status == DLX_OK) status = can_order(from_device, from, to_device, to);
  if (status == DLX_OK) status = CUDA(EventRecord, event, cuda_stream(from));
  if (status == DLX_OK && hop) status = dlx_cuda_push(to_device);
  if (status == DLX_OK) {
    status = wait_for(event, to);
    if (hop) dlx_cuda_pop();
  }
  (status == DLX_E_DRIVER ? reject_event : return_event)(from_device, event);
  dlx_cuda_pop();
  return status;
}

int dlx_cuda_synchronize(int32_t device_id, uint64_t stream) {
  int before, status = cuda_enter(device_id, &before);
  if (status != DLX_OK) return status;
  status = cuda_can_wait(stream);
  if (status == DLX_OK) status = CUDA(StreamSynchronize, cuda_stream(stream));
  cuda_leave(before);
  return status;
}

static _Atomic(uint64_t) own_streams[DLX_MAX_DEVICES]; /* release, acquire: an initialized object */

static uint64_t get_own_stream(int32_t device_id) {
  return device_id >= 0 && device_id < DLX_MAX_DEVICES
             ? atomic_load_explicit(&own_streams[device_id], memory_order_acquire)
             : 0;
}

uint64_t dlx_cuda_known_stream(int32_t device_id) {
  return dlx_cuda_loaded() ? get_own_stream(device_id) : 0;
}

int dlx_cuda_work_stream(int32_t device_id, uint64_t* stream) {
  *stream = dlx_cuda_known_stream(device_id);
  if (*stream) return DLX_OK;
  int before, status = cuda_enter(device_id, &before);
  if (status != DLX_OK) return status;
  cuda_once_begin();
  *stream =
      atomic_load_explicit(&own_streams[device_id], memory_order_relaxed); /* under the lock */
  if (*stream == 0) {
    cu_stream made = NULL;
    status = CUDA(StreamCreate, &made, CU_STREAM_NON_BLOCKING);
    *stream = (uint64_t)(uintptr_t)made;
    atomic_store_explicit(&own_streams[device_id], *stream, memory_order_release);
  }
  cuda_once_end();
  cuda_leave(before);
  return status;
}

int dlx_cuda_wait_event(int32_t device_id, void* event) {
  uint64_t stream;
  int status = dlx_cuda_work_stream(device_id, &stream);
  if (status == DLX_OK) status = dlx_cuda_push(device_id);
  if (status != DLX_OK) return status;
  status = wait_for(event, stream);
  dlx_cuda_pop();
  return status;
}

static int is_own(int32_t device_id, uint64_t stream) {
  return stream != 0 && get_own_stream(device_id) == stream;
}

/* ---- readiness events ------------------------------------------------------------------------ */

struct dlx_ready {
  atomic_int holders; /* acq_rel when one leaves: the last one sees what the others did */
  int32_t device;
  uint64_t stream;
  cu_event event; /* NULL: wait for all work of the stream */
  void* keep;
  dlx_release release_keep;
};

static int new_ready(int32_t device_id, uint64_t stream, dlx_ready** out) {
  *out = dlx_allocate(sizeof **out);
  if (*out == NULL) return DLX_E_MEMORY;
  **out = (dlx_ready){.holders = 1, .device = device_id, .stream = stream};
  return DLX_OK;
}

int dlx_ready_new(int32_t device_id, uint64_t stream, void* keep, dlx_release release_keep,
                  dlx_ready** out) {
  int captures;
  dlx_ready* ready;
  int status = new_ready(device_id, stream, &ready);
  if (status != DLX_OK) return status;
  status = dlx_cuda_push(device_id);
  if (status == DLX_OK) {
    status = is_capturing(stream, &captures);
    if (status == DLX_OK && !captures) {
      release_finished();
      status = take_event(device_id, &ready->event);
      if (status == DLX_OK) status = CUDA(EventRecord, ready->event, cuda_stream(stream));
    }
    dlx_cuda_pop();
  }
  if (status != DLX_OK) {
    reject_event(device_id, ready->event);
    free(ready);
    return status;
  }
  ready->keep = keep;
  ready->release_keep = release_keep;
  *out = ready;
  return DLX_OK;
}

int dlx_ready_later(int32_t device_id, dlx_ready** out) {
  uint64_t stream;
  int status = dlx_cuda_work_stream(device_id, &stream);
  return status == DLX_OK ? new_ready(device_id, stream, out) : status;
}

int32_t dlx_ready_own_device(const dlx_ready* ready) {
  return ready->event == NULL && is_own(ready->device, ready->stream) ? ready->device : -1;
}

dlx_ready* dlx_ready_hold(dlx_ready* ready) {
  atomic_fetch_add_explicit(&ready->holders, 1, memory_order_relaxed); /* the caller is a holder */
  return ready;
}

void dlx_ready_drop(dlx_ready* ready) {
  if (atomic_fetch_sub_explicit(&ready->holders, 1, memory_order_acq_rel) != 1) return;
  return_event(ready->device, ready->event);
  if (ready->keep && !cuda_is_child()) ready->release_keep(ready->keep);
  free(ready);
}

/* The driver reuses handles of destroyed streams, and 2 means another stream on each thread: a
 * handle is only valid while `keep` keeps its stream alive. */
static int is_alive(const dlx_ready* ready) {
  if (ready->stream == DLX_STREAM_PER_THREAD) return 0;
  return ready->keep || ready->stream == DLX_STREAM_LEGACY || is_own(ready->device, ready->stream);
}

static int is_finished(const dlx_ready* ready) {
  int mode, code;
  if (cuda_enter(ready->device, &mode) != DLX_OK) return 0;
  code = ready->event ? cu.EventQuery(ready->event) : cu.StreamQuery(cuda_stream(ready->stream));
  cuda_leave(mode);
  return code == CU_OK;
}

int dlx_ready_wait(dlx_ready* ready, int32_t device_id, uint64_t stream) {
  if (ready->device == device_id && ready->stream == stream && is_alive(ready)) return DLX_OK;
  if (ready->event == NULL && dlx_ready_own_device(ready) < 0)
    return dlx_cuda_order(ready->device, ready->stream, device_id, stream);
  int captures, status = dlx_cuda_push(device_id);
  if (status != DLX_OK) return status;
  status = is_capturing(stream, &captures);
  if (status == DLX_OK && captures)
    status = is_finished(ready) ? DLX_OK : DLX_E_CAPTURE;
  else if (status == DLX_OK)
    status = ready->event ? wait_for(ready->event, stream)
                          : dlx_cuda_order(ready->device, ready->stream, device_id, stream);
  dlx_cuda_pop();
  return status;
}

uint64_t dlx_ready_stream(const dlx_ready* ready, int32_t* device_id) {
  *device_id = ready->device;
  return is_alive(ready) ? ready->stream : 0;
}

int dlx_ready_synchronize(dlx_ready* ready) {
  if (ready->event == NULL) return dlx_cuda_synchronize(ready->device, ready->stream);
  int before, status = cuda_enter(ready->device, &before);
  if (status != DLX_OK) return status;
  status = CUDA(EventSynchronize, ready->event);
  cuda_leave(before);
  return status;
}

/* ---- deferred release ------------------------------------------------------------------------ */

/* Memory that a stream may still use after its release waits in a queue, one per stream, for an
 * event on that stream. The device finishes a queue in its order. */
typedef struct use {
  void *owner, *keep;
  dlx_release release, release_keep;
  int32_t device;
  uint64_t stream;
  int is_substitute; /* `stream` is the legacy stream, which waits for the real one */
  cu_event event;
  struct use *next, *last, *next_queue; /* only the first of a queue has the last two */
} use;

static use* queues; /* guarded by cuda_lock */
static atomic_int_least64_t
    n_waiting; /* relaxed: a hint outside of cuda_lock, which guards the uses */

int dlx_use_new(int32_t device_id, uint64_t stream, void* owner, dlx_release release, void* keep,
                dlx_release release_keep, void** out) {
  cu_context context = NULL; /* retain it now: a release must not wait, and cannot report errors */
  int status = cuda_get_primary(device_id, &context);
  if (status != DLX_OK) return status;
  use* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  int may_die = keep == NULL && !is_own(device_id, stream);
  /* 2 would mean the releasing thread's stream; the legacy stream waits for all of them. */
  int is_substitute = stream == DLX_STREAM_PER_THREAD || (may_die && stream != DLX_STREAM_LEGACY);
  *self = (use){.owner = owner,
                .keep = keep,
                .release = release,
                .release_keep = release_keep,
                .device = device_id,
                .stream = is_substitute ? DLX_STREAM_LEGACY : stream,
                .is_substitute = is_substitute};
  *out = self;
  return DLX_OK;
}

/* The caller must not hold a lock: a release may run anything, such as a cudaFree, which a capture
 * on any thread forbids without the relaxed mode. */
static void finish(use* self) {
  return_event(self->device, self->event);
  int is_loaded = dlx_cuda_loaded(), mode = is_loaded ? cuda_relax() : -1;
  if (self->release) self->release(self->owner);
  if (self->keep) self->release_keep(self->keep);
  if (is_loaded) cuda_unrelax(mode);
  free(self);
}

/* Make a device current. Errors: the driver's code. */
static int push_device(int32_t device_id) {
  cu_context context = NULL;
  return cuda_get_primary(device_id, &context) == DLX_OK ? cu.CtxPushCurrent(context)
                                                         : CU_INVALID_CONTEXT;
}

/* Return 1 if a code means that nothing uses the memory any more: the work is finished, or its
 * device, context, stream or event is gone. After other errors the work may still run. */
static int is_final(int code) {
  return code == CU_OK || code == CU_NOT_INITIALIZED || code == CU_DEINITIALIZED ||
         code / 100 == CU_OF_CONTEXTS / 100 || code == CU_INVALID_HANDLE ||
         code / 100 == CU_LOST / 100;
}

/* Return 1 if the current device has finished or is gone; 0 = not yet, or unknown. An event is
 * recorded if the stream works, and always on a substitute, whose query ignores other streams. */
static int is_done(use* self) {
  if (self->event == NULL) {
    int captures, code = ask_capturing(self->stream, &captures);
    if (code != CU_OK) return is_final(code);
    if (captures) return 0;
    if (!self->is_substitute) {
      int before = cuda_relax();
      code = cu.StreamQuery(cuda_stream(self->stream));
      cuda_unrelax(before);
      if (code != CU_NOT_READY) return is_final(code);
    }
    if (take_event(self->device, &self->event) != DLX_OK) return 0;
    code = cu.EventRecord(self->event, cuda_stream(self->stream));
    if (code != CU_OK) {
      reject_event(self->device, self->event);
      self->event = NULL;
      /* The event's handle may be invalid; the next query detects a destroyed stream. */
      return code != CU_INVALID_HANDLE && is_final(code);
    }
    if (!self->is_substitute) return 0;
  }
  int before = cuda_relax(), code = cu.EventQuery(self->event);
  cuda_unrelax(before);
  return is_final(code);
}

/* The caller holds cuda_lock. */
static void append(use* self) {
  use* at = queues;
  while (at && (at->device != self->device || at->stream != self->stream)) at = at->next_queue;
  self->next = NULL;
  if (at) {
    at->last->next = self;
    at->last = self;
  } else {
    self->last = self;
    self->next_queue = queues;
    queues = self;
  }
  atomic_fetch_add_explicit(&n_waiting, 1, memory_order_relaxed);
}

void dlx_use_release(void* object) {
  use* self = object;
  if (cuda_is_child()) {
    free(self);
    return;
  }
  int code = dlx_cuda_loaded() ? push_device(self->device) : CU_DEINITIALIZED;
  int done = code != CU_OK && is_final(code);
  if (code == CU_OK) {
    done = is_done(self);
    dlx_cuda_pop();
  }
  if (done) {
    finish(self);
    release_finished();
  } else {
    dlx_lock(&cuda_lock);
    append(self);
    dlx_unlock(&cuda_lock);
  }
}

/* Move the finished uses of a queue to `done`, and return the place of the next queue. The caller
 * holds cuda_lock. */
static use** take_finished(use** queue, use** done) {
  use* self = *queue;
  int code = push_device(self->device);
  if (!is_final(code)) return &self->next_queue;
  while (self && (code != CU_OK || is_done(self))) {
    use* next = self->next;
    if (next) {
      next->last = self->last;
      next->next_queue = self->next_queue;
    }
    *queue = next ? next : self->next_queue;
    self->next = *done;
    *done = self;
    self = next;
    atomic_fetch_sub_explicit(&n_waiting, 1, memory_order_relaxed);
  }
  if (code == CU_OK) dlx_cuda_pop();
  return self ? &self->next_queue : queue;
}

static int64_t release_finished(void) {
  int64_t n = atomic_load_explicit(&n_waiting, memory_order_relaxed);
  if (n == 0 || !dlx_cuda_loaded()) return n;
  use* done = NULL;
  dlx_lock(&cuda_lock);
  for (use** at = &queues; *at;) at = take_finished(at, &done);
  dlx_unlock(&cuda_lock);
  while (done) {
    use* self = done;
    done = self->next;
    finish(self);
  }
  return atomic_load_explicit(&n_waiting, memory_order_relaxed);
}

int64_t dlx_cuda_release_pending(void) {
  return release_finished();
}

void cuda_forget_streams(void) {
  dlx_lock(&cuda_lock);
  dlx_lock(&cuda_event_lock);
  for (int i = 0; i < DLX_MAX_DEVICES; i++) {
    if (n_spare[i] > 0 && dlx_cuda_push(i) == DLX_OK) {
      while (n_spare[i] > 0) cu.EventDestroy(spare[i][--n_spare[i]]);
      dlx_cuda_pop();
    }
    atomic_store_explicit(&own_streams[i], 0, memory_order_relaxed);
  }
  dlx_unlock(&cuda_event_lock);
  dlx_unlock(&cuda_lock);
}
