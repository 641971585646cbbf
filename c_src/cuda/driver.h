#ifndef DLX_CUDA_DRIVER_H_
#define DLX_CUDA_DRIVER_H_

/* dlx's declarations of the driver functions that it uses. No function needs the GIL. Errors:
 * DLX_E_DRIVER, unless a function says otherwise. */

#include "dlx_cuda.h"

#include "platform/platform.h"

#include <stddef.h>

typedef struct cu_context_s* cu_context;
typedef struct cu_stream_s* cu_stream;
typedef struct cu_event_s* cu_event;
typedef struct cu_pool_s* cu_pool;
typedef unsigned long long cu_address, cu_allocation, cu_flags;

enum {
  CU_OK = 0,
  CU_INVALID_VALUE = 1,   /* also: an address unknown to the driver */
  CU_NOT_INITIALIZED = 3, /* also: initialised before a fork */
  CU_DEINITIALIZED = 4,
  CU_NO_DEVICE = 100,
  CU_OF_CONTEXTS = 200, /* and errors to 299 */
  CU_INVALID_CONTEXT = 201,
  CU_INVALID_HANDLE = 400,
  CU_NOT_FOUND = 500, /* a symbol */
  CU_NOT_READY = 600,
  CU_LOST = 700, /* and errors to 799: the process cannot use its devices any more */
  CU_NOT_PERMITTED = 800,
  CU_NOT_SUPPORTED = 801,
  CU_CAPTURE_IMPLICIT = 906 /* the legacy stream, while a stream that it waits for captures */
};
enum { CU_EVENT_DISABLE_TIMING = 2, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_CAPTURE_NONE = 0, CU_CAPTURE_ACTIVE = 1, CU_CAPTURE_RELAXED = 2 /* mode */ };
enum { CU_ATTRIBUTE_MEMORY_TYPE = 2, CU_ATTRIBUTE_MANAGED = 8, CU_ATTRIBUTE_ORDINAL = 9 };
enum { CU_MEMORY_HOST = 1, CU_MEMORY_UNIFIED = 4 };
enum { CU_POOL_REUSE_BY_WAITING = 3, CU_POOL_RELEASE_THRESHOLD = 4 };
enum { CU_ALLOCATION_PINNED = 1, CU_LOCATION_DEVICE = 1, CU_ACCESS_READ_WRITE = 3 };

typedef struct {
  int type, id;
} cu_location;

/* Of a pool; those of an allocation begin alike, and dlx leaves the rest 0. */
typedef struct {
  int allocation, handles;
  cu_location where;
  void* security;
  unsigned char reserved[64];
} cu_properties;

typedef struct {
  cu_location where;
  int access;
} cu_pool_access;

typedef struct { /* a box of `height` rows of `width` bytes */
  size_t from_x, from_y;
  int from_type;
  const void* from_host;
  cu_address from_device;
  void* from_array;
  size_t from_pitch;
  size_t to_x, to_y;
  int to_type;
  void* to_host;
  cu_address to_device;
  void* to_array;
  size_t to_pitch;
  size_t width, height;
} cu_box;

enum {
  CU_ATTRIBUTE_IPC = 10, /* of memory: supports cuIpcGetMemHandle */
  CU_ATTRIBUTE_START = 11,
  CU_ATTRIBUTE_SIZE = 12,
  CU_ATTRIBUTE_HANDLES = 14 /* a mask, including CU_DESCRIPTOR */
};
enum { CU_DEVICE_HAS_DESCRIPTORS = 103, CU_DEVICE_HAS_IPC = 125 };
enum { CU_EVENT_BETWEEN_PROCESSES = 4, CU_IPC_PEERS = 1, CU_DESCRIPTOR = 1, CU_MINIMUM = 0 };

typedef struct {
  unsigned char bytes[64];
} cu_ipc;

/* The driver functions that dlx calls: "cu", a name and a version. The oldest driver, CUDA 11.2,
 * has those of NEED. A call of a missing other one fails: capture ids, sharing with processes. */
#define CU_CALLS(NEED, WANT)                                                                      \
  NEED(Init, , (unsigned flags))                                                                  \
  NEED(GetErrorName, , (int code, const char** name))                                             \
  NEED(GetErrorString, , (int code, const char** text))                                           \
  NEED(DeviceGetCount, , (int* count))                                                            \
  NEED(DeviceGet, , (int* device, int ordinal))                                                   \
  NEED(DeviceGetName, , (char* name, int room, int device))                                       \
  NEED(DeviceGetAttribute, , (int* value, int attribute, int device))                             \
  NEED(DeviceCanAccessPeer, , (int* yes, int device, int peer))                                   \
  NEED(DevicePrimaryCtxRetain, , (cu_context * context, int device))                              \
  NEED(CtxPushCurrent, _v2, (cu_context context))                                                 \
  NEED(CtxPopCurrent, _v2, (cu_context * context))                                                \
  NEED(PointerGetAttribute, , (void* value, int attribute, cu_address address))                   \
  NEED(StreamCreate, , (cu_stream * stream, unsigned flags))                                      \
  NEED(StreamSynchronize, , (cu_stream stream))                                                   \
  NEED(StreamQuery, , (cu_stream stream))                                                         \
  NEED(StreamWaitEvent, , (cu_stream stream, cu_event event, unsigned flags))                     \
  NEED(StreamIsCapturing, , (cu_stream stream, int* status))                                      \
  NEED(EventCreate, , (cu_event * event, unsigned flags))                                         \
  NEED(EventRecord, , (cu_event event, cu_stream stream))                                         \
  NEED(EventQuery, , (cu_event event))                                                            \
  NEED(EventSynchronize, , (cu_event event))                                                      \
  NEED(EventDestroy, _v2, (cu_event event))                                                       \
  NEED(MemAlloc, _v2, (cu_address * address, size_t nbytes))                                      \
  NEED(MemFree, _v2, (cu_address address))                                                        \
  NEED(MemcpyAsync, , (cu_address to, cu_address from, size_t nbytes, cu_stream stream))          \
  NEED(MemcpyPeerAsync, ,                                                                         \
       (cu_address to, cu_context to_context, cu_address from, cu_context from_context,           \
        size_t nbytes, cu_stream stream))                                                         \
  NEED(Memcpy2DAsync, _v2, (const cu_box* box, cu_stream stream))                                 \
  NEED(ThreadExchangeStreamCaptureMode, , (int* mode))                                            \
  NEED(MemPoolCreate, , (cu_pool * pool, const cu_properties* kind))                              \
  NEED(MemPoolSetAttribute, , (cu_pool pool, int attribute, void* value))                         \
  NEED(MemPoolSetAccess, , (cu_pool pool, const cu_pool_access* access, size_t n))                \
  NEED(MemAllocFromPoolAsync, , (cu_address * made, size_t size, cu_pool pool, cu_stream stream)) \
  NEED(MemFreeAsync, , (cu_address address, cu_stream stream))                                    \
  WANT(StreamGetCaptureInfo, _v2,                                                                 \
       (cu_stream stream, int* status, uint64_t* id, void* graph, void* dependencies,             \
        void* n_dependencies))                                                                    \
  WANT(DeviceGetUuid, _v2, (void* uuid, int device))                                              \
  WANT(IpcGetMemHandle, , (cu_ipc * handle, cu_address address))                                  \
  WANT(IpcOpenMemHandle, _v2, (cu_address * address, cu_ipc handle, unsigned flags))              \
  WANT(IpcCloseMemHandle, , (cu_address address))                                                 \
  WANT(IpcGetEventHandle, , (cu_ipc * handle, cu_event event))                                    \
  WANT(IpcOpenEventHandle, , (cu_event * event, cu_ipc handle))                                   \
  WANT(MemCreate, , (cu_allocation * made, size_t size, const cu_properties* kind, cu_flags))     \
  WANT(MemRelease, , (cu_allocation allocation))                                                  \
  WANT(MemRetainAllocationHandle, , (cu_allocation * found, void* address))                       \
  WANT(MemGetAllocationGranularity, , (size_t* bytes, const cu_properties* kind, int option))     \
  WANT(MemAddressReserve, ,                                                                       \
       (cu_address * address, size_t size, size_t alignment, cu_address wish, cu_flags))          \
  WANT(MemAddressFree, , (cu_address address, size_t size))                                       \
  WANT(MemMap, , (cu_address address, size_t size, size_t offset, cu_allocation made, cu_flags))  \
  WANT(MemUnmap, , (cu_address address, size_t size))                                             \
  WANT(MemSetAccess, , (cu_address address, size_t size, const cu_pool_access* access, size_t n)) \
  WANT(MemExportToShareableHandle, , (void* handle, cu_allocation made, int kind, cu_flags))      \
  WANT(MemImportFromShareableHandle, , (cu_allocation * made, void* handle, int kind))

#define CU_MEMBER(name, version, parameters) int(*name) parameters;
typedef struct {
  CU_CALLS(CU_MEMBER, CU_MEMBER)
} cu_table;

extern cu_table cu;

/* Return 1 in a child of a process that had initialised the driver. */
int cuda_is_child(void);

/* Describe a failed call for dlx_cuda_message. */
int cuda_fail(const char* operation, int code);

static inline int cuda_check(const char* operation, int code) {
  return code == CU_OK ? DLX_OK : cuda_fail(operation, code);
}

#define CUDA(name, ...) cuda_check("cu" #name, cu.name ? cu.name(__VA_ARGS__) : CU_NOT_FOUND)

enum { CUDA_SPARE = 32 };

/* A device. Handles are created at first use: release, acquire. */
typedef struct {
  _Atomic(cu_context) primary; /* never released */
  _Atomic(uint64_t) stream, pool;
  cu_event spare[CUDA_SPARE]; /* guarded by cuda_event_lock */
  int n_spare;
} cuda_device;

extern cuda_device cuda_devices[DLX_MAX_DEVICES];

/* Return a handle, or create it while the device is current. Errors: as dlx_cuda_load. */
int cuda_make_once(_Atomic(uint64_t)* place, int32_t device_id,
                   int (*create)(int32_t device_id, uint64_t* made), uint64_t* out);

/* Get a device's primary context, which is never released. Errors: as dlx_cuda_load. */
int cuda_get_primary(int32_t device_id, cu_context* context);

/* Check that the host may wait for a stream of the current device. Errors: also DLX_E_CAPTURE. */
int cuda_can_wait(uint64_t stream);

/* Relax the capture mode of this thread; restore the previous mode. While a thread captures in the
 * strictest mode, other threads may not even query an event without this. */
int cuda_relax(void);
void cuda_unrelax(int before);

/* dlx_cuda_push and cuda_relax; undo both. After a failure there is nothing to undo. Errors: as
 * dlx_cuda_load. */
int cuda_enter(int32_t device_id, int* before);
void cuda_leave(int before);

static inline void cuda_end(const int* before) {
  cuda_leave(*before);
}

/* Return from the function if a call fails. */
#define CUDA_TRY(call)                                   \
  do {                                                   \
    int status_of_call = (call);                         \
    if (status_of_call != DLX_OK) return status_of_call; \
  } while (0)

/* cuda_enter, or dlx_cuda_push alone, undone when the function returns; returns if it fails. */
#define CUDA_ENTER(device_id) CUDA_SCOPE(cuda_enter(device_id, &mode_before))
#define CUDA_PUSH(device_id) CUDA_SCOPE(dlx_cuda_push(device_id))
#define CUDA_SCOPE(enter)               \
  int mode_before = -1; /* unchanged */ \
  CUDA_TRY(enter);                      \
  int scope __attribute__((cleanup(cuda_end), unused)) = mode_before

static inline cu_stream cuda_stream(uint64_t handle) {
  return (cu_stream)(uintptr_t)handle;
}

/* In cuda/order.c, cuda_lock guards the queues and cuda_event_lock, the inner lock, guards the
 * events. All are held during a fork, so that a child sees complete data; none is held while an
 * owner is released. */
extern dlx_mutex cuda_lock, cuda_event_lock;

#endif
