/* Stream synchronization and readiness events.
 *
 * An event that is recorded on one stream and waited for on another is free at once: the wait keeps
 * the state that the event had then. So events are taken from a small pool and returned to it. */

#include "driver.h"

#include <stdatomic.h>
#include <stdlib.h>

/* ---- events, by the device whose context they belong to -------------------------------------- */

enum { SPARE = 32 };
static cu_event spare[DLX_MAX_DEVICES][SPARE]; /* guarded by cuda_event_lock */
static int n_spare[DLX_MAX_DEVICES];

int cuda_take_event(int32_t device, cu_event* event) {
  *event = NULL;
  pthread_mutex_lock(&cuda_event_lock);
  if (n_spare[device] > 0) *event = spare[device][--n_spare[device]];
  pthread_mutex_unlock(&cuda_event_lock);
  if (*event) return DLX_OK;
  int code = cu.EventCreate(event, CU_EVENT_DISABLE_TIMING);
  return code == CU_OK ? DLX_OK : cuda_failed("cuEventCreate", code);
}

/* GIL: not needed. */
static void destroy_event(int32_t device, cu_event event) {
  if (dlx_cuda_push(device) != DLX_OK) return;
  cu.EventDestroy(event);
  dlx_cuda_pop();
}

void cuda_give_event(int32_t device, cu_event event) {
  if (event == NULL || !cuda_usable()) return;
  pthread_mutex_lock(&cuda_event_lock);
  int room = n_spare[device] < SPARE;
  if (room) spare[device][n_spare[device]++] = event;
  pthread_mutex_unlock(&cuda_event_lock);
  if (!room) destroy_event(device, event);
}

void cuda_reject_event(int32_t device, cu_event event) {
  while (event != NULL && cuda_usable()) {
    destroy_event(device, event);
    pthread_mutex_lock(&cuda_event_lock);
    event = n_spare[device] > 0 ? spare[device][--n_spare[device]] : NULL;
    pthread_mutex_unlock(&cuda_event_lock);
  }
}

/* ---- graph capture --------------------------------------------------------------------------- */

int cuda_is_capturing(uint64_t stream, int* yes) {
  int state = CU_CAPTURE_NONE, code = cu.StreamIsCapturing(cuda_stream(stream), &state);
  *yes = code == CU_CAPTURE_IMPLICIT || state != CU_CAPTURE_NONE;
  return code == CU_OK || *yes ? DLX_OK : cuda_failed("cuStreamIsCapturing", code);
}

/* The capture that a stream takes part in; 0 = unknown. */
static uint64_t capture_of(uint64_t stream) {
  int state = CU_CAPTURE_NONE;
  uint64_t id = 0;
  if (cu.StreamGetCaptureInfo == NULL ||
      cu.StreamGetCaptureInfo(cuda_stream(stream), &state, &id, NULL, NULL, NULL) != CU_OK ||
      state != CU_CAPTURE_ACTIVE)
    return 0;
  return id;
}

/* ---- one stream waits for another ------------------------------------------------------------ */

int cuda_record(cu_event event, uint64_t stream) {
  int code = cu.EventRecord(event, cuda_stream(stream));
  return code == CU_OK ? DLX_OK : cuda_failed("cuEventRecord", code);
}

/* The context of the stream's device must be current. GIL: not needed. */
static int wait_for(cu_event event, uint64_t stream) {
  int code = cu.StreamWaitEvent(cuda_stream(stream), event, 0);
  return code == CU_OK ? DLX_OK : cuda_failed("cuStreamWaitEvent", code);
}

/* Record on `from`, whose context is current, and make `to` wait. */
static int link_streams(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  int here = 0, there = 0, status = cuda_is_capturing(from, &here);
  if (status != DLX_OK) return status;
  uint64_t capture = here ? capture_of(from) : 0;
  cu_event event;
  status = cuda_take_event(from_device, &event);
  if (status != DLX_OK) return status;
  int hop = from_device != to_device;
  if (hop) status = dlx_cuda_push(to_device);
  if (status == DLX_OK) {
    status = cuda_is_capturing(to, &there);
    /* Within one capture a dependency is a plain edge of the graph. */
    if (status == DLX_OK && (here || there) && (!here || capture == 0 || capture_of(to) != capture))
      status = DLX_E_CAPTURE;
    if (hop) dlx_cuda_pop();
  }
  if (status == DLX_OK) status = cuda_record(event, from);
  if (status == DLX_OK && hop) status = dlx_cuda_push(to_device);
  if (status == DLX_OK) {
    status = wait_for(event, to);
    if (hop) dlx_cuda_pop();
  }
  if (status == DLX_E_DRIVER) {
    cuda_reject_event(from_device, event);
  } else {
    cuda_give_event(from_device, event);
  }
  return status;
}

int dlx_cuda_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to) {
  dlx_cuda_release_pending();
  if (from == to && from_device == to_device) return DLX_OK;
  int status = dlx_cuda_push(from_device);
  if (status != DLX_OK) return status;
  status = link_streams(from_device, from, to_device, to);
  dlx_cuda_pop();
  return status;
}

int dlx_cuda_synchronize(int32_t device_id, uint64_t stream) {
  int captures, status = dlx_cuda_push(device_id);
  if (status != DLX_OK) return status;
  status = cuda_is_capturing(stream, &captures);
  if (status == DLX_OK && captures) status = DLX_E_CAPTURE;
  if (status == DLX_OK) {
    int mode = cuda_relax(), code = cu.StreamSynchronize(cuda_stream(stream));
    cuda_unrelax(mode);
    if (code != CU_OK) status = cuda_failed("cuStreamSynchronize", code);
  }
  dlx_cuda_pop();
  return status;
}

static _Atomic(uint64_t) own_streams[DLX_MAX_DEVICES];

int dlx_cuda_work_stream(int32_t device_id, uint64_t* stream) {
  int status = dlx_cuda_push(device_id);
  if (status != DLX_OK) return status;
  pthread_mutex_lock(&cuda_lock);
  *stream = atomic_load(&own_streams[device_id]);
  if (*stream == 0) {
    cu_stream made = NULL;
    int code = cu.StreamCreate(&made, CU_STREAM_NON_BLOCKING);
    if (code != CU_OK) status = cuda_failed("cuStreamCreate", code);
    *stream = (uint64_t)(uintptr_t)made;
    atomic_store(&own_streams[device_id], *stream);
  }
  pthread_mutex_unlock(&cuda_lock);
  dlx_cuda_pop();
  return status;
}

int cuda_is_own(int32_t device_id, uint64_t stream) {
  return device_id >= 0 && device_id < DLX_MAX_DEVICES &&
         atomic_load(&own_streams[device_id]) == stream;
}

/* ---- readiness events ------------------------------------------------------------------------ */

struct dlx_ready {
  atomic_int holders;
  int32_t device;
  uint64_t stream;
  cu_event event; /* NULL: whatever is on the stream when it is waited for */
  void* keep;     /* keeps the stream alive */
  dlx_release release_keep;
};

/* GIL: not needed. Errors: DLX_E_MEMORY. */
static int make_ready(int32_t device_id, uint64_t stream, dlx_ready** out) {
  *out = calloc(1, sizeof **out);
  if (*out == NULL) return DLX_E_MEMORY;
  atomic_init(&(*out)->holders, 1);
  (*out)->device = device_id;
  (*out)->stream = stream;
  return DLX_OK;
}

int dlx_ready_new(int32_t device_id, uint64_t stream, void* keep, dlx_release release_keep,
                  dlx_ready** out) {
  int captures;
  dlx_ready* ready;
  dlx_cuda_release_pending();
  int status = dlx_cuda_push(device_id);
  if (status != DLX_OK) return status;
  status = make_ready(device_id, stream, &ready);
  if (status == DLX_OK) {
    status = cuda_is_capturing(stream, &captures);
    if (status == DLX_OK && !captures) status = cuda_take_event(device_id, &ready->event);
    if (status == DLX_OK && !captures) status = cuda_record(ready->event, stream);
    if (status != DLX_OK) {
      cuda_reject_event(device_id, ready->event);
      ready->event = NULL;
      dlx_ready_drop(ready);
    }
  }
  dlx_cuda_pop();
  if (status != DLX_OK) return status;
  ready->keep = keep;
  ready->release_keep = release_keep;
  *out = ready;
  return DLX_OK;
}

int dlx_ready_later(int32_t device_id, dlx_ready** out) {
  uint64_t stream;
  int status = dlx_cuda_work_stream(device_id, &stream);
  return status == DLX_OK ? make_ready(device_id, stream, out) : status;
}

dlx_ready* dlx_ready_hold(dlx_ready* ready) {
  atomic_fetch_add(&ready->holders, 1);
  return ready;
}

void dlx_ready_drop(dlx_ready* ready) {
  if (atomic_fetch_sub(&ready->holders, 1) != 1) return;
  cuda_give_event(ready->device, ready->event);
  if (ready->keep && !cuda_is_child()) ready->release_keep(ready->keep);
  free(ready);
}

/* The driver reuses handles, and 2 is another stream on every thread: a handle is only known to be
 * the same stream while `keep` keeps that alive. */
static int is_living(const dlx_ready* ready) {
  if (ready->stream == DLX_STREAM_PER_THREAD) return 0;
  return ready->keep || ready->stream == DLX_STREAM_LEGACY ||
         cuda_is_own(ready->device, ready->stream);
}

static int is_same_stream(const dlx_ready* ready, int32_t device_id, uint64_t stream) {
  return ready->device == device_id && ready->stream == stream && is_living(ready);
}

int dlx_ready_wait(dlx_ready* ready, int32_t device_id, uint64_t stream) {
  if (is_same_stream(ready, device_id, stream)) return DLX_OK;
  if (ready->event == NULL) return dlx_cuda_order(ready->device, ready->stream, device_id, stream);
  int captures, status = dlx_cuda_push(device_id);
  if (status != DLX_OK) return status;
  status = cuda_is_capturing(stream, &captures);
  if (status == DLX_OK && captures) { /* what is done already needs no edge in the graph */
    int mode = cuda_relax(), code = cu.EventQuery(ready->event);
    cuda_unrelax(mode);
    if (code != CU_OK) status = DLX_E_CAPTURE;
  } else if (status == DLX_OK) {
    status = wait_for(ready->event, stream);
  }
  dlx_cuda_pop();
  return status;
}

int dlx_ready_follow(dlx_ready* ready, int32_t device_id, uint64_t stream) {
  return is_living(ready) ? dlx_cuda_order(device_id, stream, ready->device, ready->stream)
                          : dlx_cuda_synchronize(device_id, stream);
}

int dlx_ready_synchronize(dlx_ready* ready) {
  if (ready->event == NULL) return dlx_cuda_synchronize(ready->device, ready->stream);
  int status = dlx_cuda_push(ready->device);
  if (status != DLX_OK) return status;
  int mode = cuda_relax(), code = cu.EventSynchronize(ready->event);
  cuda_unrelax(mode);
  dlx_cuda_pop();
  return code == CU_OK ? DLX_OK : cuda_failed("cuEventSynchronize", code);
}

void cuda_forget_order(void) {
  pthread_mutex_lock(&cuda_lock);
  pthread_mutex_lock(&cuda_event_lock);
  for (int i = 0; i < DLX_MAX_DEVICES; i++) {
    if (n_spare[i] > 0 && dlx_cuda_push(i) == DLX_OK) {
      while (n_spare[i] > 0) cu.EventDestroy(spare[i][--n_spare[i]]);
      dlx_cuda_pop();
    }
    atomic_store(&own_streams[i], 0);
  }
  pthread_mutex_unlock(&cuda_event_lock);
  pthread_mutex_unlock(&cuda_lock);
}
