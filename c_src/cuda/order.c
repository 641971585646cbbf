/* Stream synchronization, readiness events, and releasing memory behind a stream. A stream that
 * waits for an event keeps its state, so events are reused soon: a small pool is enough. */

#include "driver.h"
#include "core/allocate.h"

/* ---- events, pooled by device ---------------------------------------------------------------- */

static int take_event(int32_t device_id, cu_event* event) {
  cuda_device* device = &cuda_devices[device_id];
  dlx_lock(&cuda_event_lock);
  *event = device->n_spare > 0 ? device->spare[--device->n_spare] : NULL;
  dlx_unlock(&cuda_event_lock);
  if (*event) return DLX_OK;
  int before = cuda_relax(), status = CUDA(EventCreate, event, CU_EVENT_DISABLE_TIMING);
  cuda_unrelax(before);
  return status;
}

/* Keep an event (or NULL) for later. If it failed, destroy it and all that are kept: the device may
 * have been reset. */
static void return_event(int32_t device_id, cu_event event, int has_failed) {
  cuda_device* device = &cuda_devices[device_id];
  while (event != NULL && dlx_cuda_loaded()) {
    cu_event next = NULL;
    dlx_lock(&cuda_event_lock);
    int keeps = !has_failed && device->n_spare < CUDA_SPARE;
    if (keeps) device->spare[device->n_spare++] = event;
    if (has_failed && device->n_spare > 0) next = device->spare[--device->n_spare];
    dlx_unlock(&cuda_event_lock);
    if (!keeps) dlx_cuda_drop_event(device_id, event);
    event = next;
  }
}

/* ---- graph capture --------------------------------------------------------------------------- */

#define UNKNOWN_CAPTURE UINT64_MAX

/* Find the capture of a stream: 0 = none. Errors: the driver's code. */
static int find_capture(uint64_t stream, uint64_t* id) {
  int state = CU_CAPTURE_NONE, code = cu.StreamIsCapturing(cuda_stream(stream), &state);
  *id = code == CU_CAPTURE_IMPLICIT || state != CU_CAPTURE_NONE ? UNKNOWN_CAPTURE : 0;
  if (*id == 0) return code;
  if (state == CU_CAPTURE_ACTIVE && cu.StreamGetCaptureInfo &&
      (cu.StreamGetCaptureInfo(cuda_stream(stream), &state, id, NULL, NULL, NULL) != CU_OK ||
       state != CU_CAPTURE_ACTIVE))
    *id = UNKNOWN_CAPTURE;
  return CU_OK;
}

static int get_capture(uint64_t stream, uint64_t* id) {
  return cuda_check("cuStreamIsCapturing", find_capture(stream, id));
}

int cuda_can_wait(uint64_t stream) {
  uint64_t capture;
  CUDA_TRY(get_capture(stream, &capture));
  return capture ? DLX_E_CAPTURE : DLX_OK;
}

/* ---- one stream waits for another ------------------------------------------------------------ */

/* Like dlx_cuda_can_order, for different streams; `from_device` is current. */
static int can_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  uint64_t here, there;
  int hop = from_device != to_device;
  CUDA_TRY(get_capture(from, &here));
  if (hop) CUDA_TRY(dlx_cuda_push(to_device));
  int status = get_capture(to, &there);
  if (hop) dlx_cuda_pop();
  if (status != DLX_OK) return status;
  /* Within one capture, a dependency is an edge of the graph. */
  if (here != there || here == UNKNOWN_CAPTURE) return DLX_E_CAPTURE;
  if (!here) dlx_cuda_release_pending(); /* owners may add nodes to a graph */
  return DLX_OK;
}

int dlx_cuda_can_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  if (from == to && from_device == to_device) return DLX_OK;
  CUDA_PUSH(from_device);
  return to_device < 0 ? cuda_can_wait(from) : can_order(from_device, from, to_device, to);
}

int dlx_cuda_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  int hop = from_device != to_device;
  cu_event event;
  if (from == to && !hop) return DLX_OK;
  CUDA_PUSH(from_device);
  CUDA_TRY(take_event(from_device, &event));
  int status = can_order(from_device, from, to_device, to);
  if (status == DLX_OK) status = CUDA(EventRecord, event, cuda_stream(from));
  if (status == DLX_OK && hop) status = dlx_cuda_push(to_device);
  if (status == DLX_OK) {
    status = CUDA(StreamWaitEvent, cuda_stream(to), event, 0);
    if (hop) dlx_cuda_pop();
  }
  return_event(from_device, event, status == DLX_E_DRIVER);
  return status;
}

int dlx_cuda_synchronize(int32_t device_id, uint64_t stream) {
  CUDA_ENTER(device_id);
  CUDA_TRY(cuda_can_wait(stream));
  return CUDA(StreamSynchronize, cuda_stream(stream));
}

static int create_stream(int32_t device_id, uint64_t* made) {
  (void)device_id; /* current */
  cu_stream stream = NULL;
  int status = CUDA(StreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  *made = (uint64_t)(uintptr_t)stream;
  return status;
}

uint64_t dlx_cuda_known_stream(int32_t device_id) {
  if (!dlx_cuda_entered(device_id)) return 0;
  return atomic_load_explicit(&cuda_devices[device_id].stream, memory_order_acquire);
}

int dlx_cuda_work_stream(int32_t device_id, uint64_t* stream) {
  cu_context context; /* checks the number */
  CUDA_TRY(cuda_get_primary(device_id, &context));
  return cuda_make_once(&cuda_devices[device_id].stream, device_id, create_stream, stream);
}

int dlx_cuda_wait_event(int32_t device_id, void* event) {
  uint64_t stream;
  CUDA_TRY(dlx_cuda_work_stream(device_id, &stream));
  CUDA_PUSH(device_id);
  return CUDA(StreamWaitEvent, cuda_stream(stream), event, 0);
}

static int is_own(int32_t device_id, uint64_t stream) {
  return stream != 0 && dlx_cuda_known_stream(device_id) == stream;
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

/* Record the event, unless the stream captures: then the stream itself is the event. */
static int record(dlx_ready* ready) {
  uint64_t capture;
  CUDA_PUSH(ready->device);
  CUDA_TRY(get_capture(ready->stream, &capture));
  if (capture) return DLX_OK;
  dlx_cuda_release_pending();
  CUDA_TRY(take_event(ready->device, &ready->event));
  int status = CUDA(EventRecord, ready->event, cuda_stream(ready->stream));
  if (status != DLX_OK) return_event(ready->device, ready->event, 1);
  return status;
}

int dlx_ready_new(int32_t device_id, uint64_t stream, void* keep, dlx_release release_keep,
                  dlx_ready** out) {
  dlx_ready* ready = dlx_allocate(sizeof *ready);
  if (ready == NULL) return DLX_E_MEMORY;
  *ready = (dlx_ready){1, device_id, stream, NULL, keep, release_keep};
  int status = stream ? record(ready) : dlx_cuda_work_stream(device_id, &ready->stream);
  if (status == DLX_OK)
    *out = ready;
  else
    free(ready);
  return status;
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
  return_event(ready->device, ready->event, 0);
  if (ready->keep && !cuda_is_child()) ready->release_keep(ready->keep);
  free(ready);
}

/* The driver reuses handles of destroyed streams, and 2 means another stream on each thread: a
 * handle is only valid while `keep` keeps its stream alive. */
static int is_alive(const dlx_ready* ready) {
  if (ready->stream == DLX_STREAM_PER_THREAD) return 0;
  return ready->keep || ready->stream == DLX_STREAM_LEGACY || is_own(ready->device, ready->stream);
}

/* Check that memory is ready now, so that no capture has to wait for it. */
static int check_finished(const dlx_ready* ready) {
  CUDA_ENTER(ready->device);
  int code =
      ready->event ? cu.EventQuery(ready->event) : cu.StreamQuery(cuda_stream(ready->stream));
  return code == CU_OK ? DLX_OK : DLX_E_CAPTURE;
}

int dlx_ready_wait(dlx_ready* ready, int32_t device_id, uint64_t stream) {
  if (ready->device == device_id && ready->stream == stream && is_alive(ready)) return DLX_OK;
  uint64_t capture;
  CUDA_PUSH(device_id);
  CUDA_TRY(get_capture(stream, &capture));
  if (capture && (ready->event || dlx_ready_own_device(ready) >= 0)) return check_finished(ready);
  return ready->event ? CUDA(StreamWaitEvent, cuda_stream(stream), ready->event, 0)
                      : dlx_cuda_order(ready->device, ready->stream, device_id, stream);
}

uint64_t dlx_ready_stream(const dlx_ready* ready, int32_t* device_id) {
  *device_id = ready->device;
  return is_alive(ready) ? ready->stream : 0;
}

int dlx_ready_synchronize(dlx_ready* ready) {
  if (ready->event == NULL) return dlx_cuda_synchronize(ready->device, ready->stream);
  CUDA_ENTER(ready->device);
  return CUDA(EventSynchronize, ready->event);
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

static use* queues;                    /* guarded by cuda_lock */
static atomic_int_least64_t n_waiting; /* relaxed: a hint outside of cuda_lock */

int dlx_use_new(int32_t device_id, uint64_t stream, void* owner, dlx_release release, void* keep,
                dlx_release release_keep, void** out) {
  cu_context context = NULL; /* retain it now: a release must not wait, and cannot report errors */
  CUDA_TRY(cuda_get_primary(device_id, &context));
  use* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  int may_die = keep == NULL && !is_own(device_id, stream);
  /* 2 would mean the releasing thread's stream; the legacy stream waits for all of them. */
  int is_substitute = stream == DLX_STREAM_PER_THREAD || (may_die && stream != DLX_STREAM_LEGACY);
  *self = (use){owner, keep, release, release_keep, device_id, .is_substitute = is_substitute};
  self->stream = is_substitute ? DLX_STREAM_LEGACY : stream;
  *out = self;
  return DLX_OK;
}

/* The caller must not hold a lock: a release may run anything, such as a cudaFree, which a capture
 * on any thread forbids without the relaxed mode. */
static void finish(use* self) {
  return_event(self->device, self->event, 0);
  int is_loaded = dlx_cuda_loaded(), mode = is_loaded ? cuda_relax() : -1;
  if (self->release) self->release(self->owner);
  if (self->keep) self->release_keep(self->keep);
  if (is_loaded) cuda_unrelax(mode);
  free(self);
}

/* Like cuda_enter. Errors: the driver's code. */
static int enter(int32_t device_id, int* before) {
  cu_context context = NULL;
  int code = CU_INVALID_CONTEXT;
  if (cuda_get_primary(device_id, &context) == DLX_OK) code = cu.CtxPushCurrent(context);
  if (code == CU_OK) *before = cuda_relax();
  return code;
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
    uint64_t capture;
    int code = find_capture(self->stream, &capture);
    if (code != CU_OK) return is_final(code);
    if (capture) return 0;
    if (!self->is_substitute) {
      code = cu.StreamQuery(cuda_stream(self->stream));
      if (code != CU_NOT_READY) return is_final(code);
    }
    if (take_event(self->device, &self->event) != DLX_OK) return 0;
    code = cu.EventRecord(self->event, cuda_stream(self->stream));
    if (code != CU_OK) {
      return_event(self->device, self->event, 1);
      self->event = NULL;
      /* The event's handle may be invalid; the next query detects a destroyed stream. */
      return code != CU_INVALID_HANDLE && is_final(code);
    }
    if (!self->is_substitute) return 0;
  }
  return is_final(cu.EventQuery(self->event));
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
  int mode, code = dlx_cuda_loaded() ? enter(self->device, &mode) : CU_DEINITIALIZED;
  int done = code == CU_OK ? is_done(self) : is_final(code);
  if (code == CU_OK) cuda_leave(mode);
  if (done) {
    finish(self);
    dlx_cuda_release_pending();
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
  int mode, code = enter(self->device, &mode);
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
  if (code == CU_OK) cuda_leave(mode);
  return self ? &self->next_queue : queue;
}

int64_t dlx_cuda_release_pending(void) {
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
