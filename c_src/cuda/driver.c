/* The CUDA driver: loading it on first use, its devices, contexts and errors. */

#include "driver.h"
#include "core/allocate.h"
#include "core/thread_state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cu_table cu;
/* For creating the table and handles of a device, which may take long; releases do not take it. */
static dlx_mutex cuda_once_lock = DLX_MUTEX_INIT;
dlx_mutex cuda_lock = DLX_MUTEX_INIT;
dlx_mutex cuda_event_lock = DLX_MUTEX_INIT;

static atomic_int initialised; /* release, acquire: its readers use `cu` */
static atomic_int forked;      /* relaxed: set before the child has another thread */
/* Exit handlers run: the driver may disappear at any time. Relaxed: that can follow any check. */
static atomic_int ending;
cuda_device cuda_devices[DLX_MAX_DEVICES];

/* ---- errors: a message for each thread ------------------------------------------------------- */

const char* dlx_cuda_message(void) {
  const dlx_thread_state* own = dlx_state_of_thread();
  return own && own->message[0] ? own->message
                                : "the CUDA driver failed, without memory for its message";
}

__attribute__((format(printf, 1, 2))) static void report(const char* format, ...) {
  dlx_thread_state* own = dlx_state_of_thread();
  if (own == NULL) return;
  va_list values;
  va_start(values, format);
  vsnprintf(own->message, sizeof own->message, format, values);
  va_end(values);
}

int cuda_fail(const char* operation, int code) {
  const char *name = NULL, *text = NULL;
  if (cu.GetErrorName && cu.GetErrorName(code, &name) != CU_OK) name = NULL;
  if (cu.GetErrorString && cu.GetErrorString(code, &text) != CU_OK) text = NULL;
  report("%s failed with %s (%d)%s%s", operation, name ? name : "an unknown error", code,
         text ? ": " : "", text ? text : "");
  return DLX_E_DRIVER;
}

static int report_no_driver(const char* why) {
  report("there is no CUDA driver here: %s", why);
  return DLX_E_NO_DRIVER;
}

static int report_forked(void) {
  report(
      "CUDA was in use before this process was forked, and a forked child cannot use it: start "
      "the worker with the 'spawn' method");
  return DLX_E_FORKED;
}

int dlx_cuda_loaded(void) {
  return atomic_load_explicit(&initialised, memory_order_acquire) &&
         !atomic_load_explicit(&forked, memory_order_relaxed) &&
         !atomic_load_explicit(&ending, memory_order_relaxed);
}

int cuda_is_child(void) {
  return atomic_load_explicit(&forked, memory_order_relaxed);
}

/* ---- fork and exit --------------------------------------------------------------------------- */

/* Whether this thread holds cuda_once_lock: a driver may fork during its start. */
static DLX_FEW_WORDS int holds_once_lock;

static void begin_once(void) {
  dlx_lock(&cuda_once_lock);
  holds_once_lock = 1;
}

static void end_once(void) {
  holds_once_lock = 0;
  dlx_unlock(&cuda_once_lock);
}

static void take_locks(void) {
  if (!holds_once_lock) dlx_lock(&cuda_once_lock);
  dlx_lock(&cuda_lock);
  dlx_lock(&cuda_event_lock);
}

static void release_locks(void) {
  dlx_unlock(&cuda_event_lock);
  dlx_unlock(&cuda_lock);
  if (!holds_once_lock) dlx_unlock(&cuda_once_lock);
}

static void after_fork(void) {
  if (atomic_load_explicit(&initialised, memory_order_relaxed))
    atomic_store_explicit(&forked, 1, memory_order_relaxed);
  release_locks();
}

static void at_exit(void) {
  atomic_store_explicit(&ending, 1, memory_order_relaxed);
}

/* ---- loading --------------------------------------------------------------------------------- */

static const struct {
  const char* name;
  size_t offset;
  int is_needed;
} entries[] = {
#define NEED(name, version, parameters) {"cu" #name #version, offsetof(cu_table, name), 1},
#define WANT(name, version, parameters) {"cu" #name #version, offsetof(cu_table, name), 0},
    CU_CALLS(NEED, WANT)};

enum { ENTRIES = sizeof entries / sizeof *entries };

const char* dlx_cuda_library(void) {
  const char* chosen = getenv("DLX_CUDA_DRIVER");
  return chosen && *chosen ? chosen : DLX_CUDA_LIBRARY;
}

/* Fill the table or leave it empty. The caller holds cuda_once_lock. Errors: DLX_E_NO_DRIVER. */
static int fill_table(void) {
  char why[300];
  void* library = dlx_open_library(dlx_cuda_library(), why, sizeof why);
  if (library == NULL) return report_no_driver(why);
  cu_table found;
  memset(&found, 0, sizeof found);
  for (int i = 0; i < ENTRIES; i++) {
    void* symbol = dlx_find_symbol(library, entries[i].name);
    if (symbol == NULL && entries[i].is_needed) {
      snprintf(why, sizeof why, "the installed driver is too old, it lacks %s", entries[i].name);
      dlx_close_library(library);
      return report_no_driver(why);
    }
    memcpy((char*)&found + entries[i].offset, &symbol, sizeof symbol);
  }
  cu = found;
  return DLX_OK;
}

/* The caller holds cuda_once_lock. */
static int initialise(void) {
  static int watched;
  if (cu.Init == NULL) CUDA_TRY(fill_table());
  int code = cu.Init(0);
  if (code == CU_NOT_INITIALIZED) return report_forked(); /* another library used CUDA */
  if (code == CU_NO_DEVICE) return report_no_driver("the driver sees no device");
  if (code != CU_OK) return cuda_fail("cuInit", code);
  if (!watched++) atexit(at_exit); /* runs before the driver's exit handlers, which are older */
  atomic_store_explicit(&initialised, 1, memory_order_release);
  return DLX_OK;
}

static void watch_forks(void) {
  dlx_watch_forks(take_locks, release_locks, after_fork);
}

int dlx_cuda_load(void) {
  /* Before the first lock, so that no child inherits a lock that another thread held. */
  static dlx_once once = DLX_ONCE_INIT;
  if (cuda_is_child()) return report_forked();
  if (atomic_load_explicit(&ending, memory_order_relaxed))
    return report_no_driver("the process is ending");
  if (atomic_load_explicit(&initialised, memory_order_acquire)) return DLX_OK;
  dlx_run_once(&once, watch_forks);
  begin_once();
  int status = DLX_OK;
  if (!atomic_load_explicit(&initialised, memory_order_relaxed)) status = initialise();
  end_once();
  return status;
}

/* ---- devices and contexts -------------------------------------------------------------------- */

int dlx_cuda_count(int32_t* count) {
  CUDA_TRY(dlx_cuda_load());
  return CUDA(DeviceGetCount, count);
}

static int find_device(int32_t device_id, int* device) {
  int32_t count;
  CUDA_TRY(dlx_cuda_count(&count));
  if (device_id < 0 || device_id >= count || device_id >= DLX_MAX_DEVICES) {
    report("there is no device cuda:%d, the driver sees %d; dlx.devices() lists them", device_id,
           count);
    return DLX_E_DRIVER;
  }
  return CUDA(DeviceGet, device, device_id);
}

int dlx_cuda_name(int32_t device_id, char* name, int32_t room) {
  int device;
  CUDA_TRY(find_device(device_id, &device));
  return CUDA(DeviceGetName, name, room, device);
}

int cuda_get_primary(int32_t device_id, cu_context* context) {
  int device;
  CUDA_TRY(dlx_cuda_load());
  if (device_id >= 0 && device_id < DLX_MAX_DEVICES) {
    *context = atomic_load_explicit(&cuda_devices[device_id].primary, memory_order_acquire);
    if (*context) return DLX_OK;
  }
  CUDA_TRY(find_device(device_id, &device));
  int before = cuda_relax(); /* this may allocate */
  int status = CUDA(DevicePrimaryCtxRetain, context, device);
  cuda_unrelax(before);
  /* Two threads may both retain it, which is harmless: it is never released. */
  if (status == DLX_OK)
    atomic_store_explicit(&cuda_devices[device_id].primary, *context, memory_order_release);
  return status;
}

int dlx_cuda_entered(int32_t device_id) {
  return dlx_cuda_loaded() && device_id >= 0 && device_id < DLX_MAX_DEVICES &&
         atomic_load_explicit(&cuda_devices[device_id].primary, memory_order_relaxed) != NULL;
}

int dlx_cuda_push(int32_t device_id) {
  cu_context context;
  CUDA_TRY(cuda_get_primary(device_id, &context));
  return CUDA(CtxPushCurrent, context);
}

void dlx_cuda_pop(void) {
  cu_context popped;
  if (dlx_cuda_loaded()) cu.CtxPopCurrent(&popped);
}

int cuda_relax(void) {
  int mode = CU_CAPTURE_RELAXED;
  return cu.ThreadExchangeStreamCaptureMode(&mode) == CU_OK ? mode : -1;
}

void cuda_unrelax(int before) {
  if (before >= 0) cu.ThreadExchangeStreamCaptureMode(&before);
}

int cuda_enter(int32_t device_id, int* before) {
  CUDA_TRY(dlx_cuda_push(device_id));
  *before = cuda_relax();
  return DLX_OK;
}

void cuda_leave(int before) {
  cuda_unrelax(before);
  dlx_cuda_pop();
}

int cuda_make_once(_Atomic(uint64_t)* place, int32_t device_id,
                   int (*create)(int32_t device_id, uint64_t* made), uint64_t* out) {
  *out = atomic_load_explicit(place, memory_order_acquire);
  if (*out) return DLX_OK;
  CUDA_ENTER(device_id);
  begin_once();
  *out = atomic_load_explicit(place, memory_order_relaxed); /* under the lock */
  int status = *out ? DLX_OK : create(device_id, out);
  if (status == DLX_OK) atomic_store_explicit(place, *out, memory_order_release);
  end_once();
  return status;
}

void dlx_cuda_drop_event(int32_t device_id, void* event) {
  int mode;
  if (!dlx_cuda_loaded() || cuda_enter(device_id, &mode) != DLX_OK) return;
  cu.EventDestroy(event);
  cuda_leave(mode);
}

int dlx_cuda_where(const void* address, DLDevice* device) {
  int type = 0, managed = 0, ordinal = 0;
  CUDA_TRY(dlx_cuda_load());
  cu_address at = (cu_address)(uintptr_t)address; /* a driver answers without a context, too */
  int code = cu.PointerGetAttribute(&type, CU_ATTRIBUTE_MEMORY_TYPE, at);
  if (code == CU_OK) code = cu.PointerGetAttribute(&managed, CU_ATTRIBUTE_MANAGED, at);
  if (code == CU_OK) code = cu.PointerGetAttribute(&ordinal, CU_ATTRIBUTE_ORDINAL, at);
  if (code == CU_INVALID_VALUE) { /* unknown to the driver: plain host memory */
    *device = (DLDevice){kDLCPU, 0};
    return DLX_OK;
  }
  if (code != CU_OK) return cuda_fail("cuPointerGetAttribute", code);
  int32_t kind = managed ? kDLCUDAManaged : type == CU_MEMORY_HOST ? kDLCUDAHost : kDLCUDA;
  *device = (DLDevice){kind, ordinal < 0 ? 0 : ordinal};
  return DLX_OK;
}

void dlx_cuda_forget(void) {
  begin_once();
  for (int32_t i = 0; i < DLX_MAX_DEVICES; i++) {
    cuda_device* device = &cuda_devices[i];
    while (device->n_spare > 0) dlx_cuda_drop_event(i, device->spare[--device->n_spare]);
  }
  memset(cuda_devices, 0, sizeof cuda_devices);
  memset(&cu, 0, sizeof cu);
  atomic_store_explicit(&initialised, 0, memory_order_relaxed);
  end_once();
}
