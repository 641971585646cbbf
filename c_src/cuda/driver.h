#ifndef DLX_CUDA_DRIVER_H_
#define DLX_CUDA_DRIVER_H_

/* What the cuda_ files share; cffi never reads this. Our own declarations of the driver's
 * interface, with the few entry points that are used. */

#include "device.h"
#include "dlx_cuda.h"

#include <pthread.h>
#include <stddef.h>

typedef struct cu_context_s* cu_context;
typedef struct cu_stream_s* cu_stream;
typedef struct cu_event_s* cu_event;
typedef struct cu_pool_s* cu_pool;
typedef unsigned long long cu_address;

enum {
  CU_OK = 0,
  CU_INVALID_VALUE = 1,   /* also: an address that the driver does not know */
  CU_NOT_INITIALIZED = 3, /* also: initialised before a fork */
  CU_DEINITIALIZED = 4,
  CU_NO_DEVICE = 100,
  CU_OF_CONTEXTS = 200, /* errors from here to 299 */
  CU_INVALID_CONTEXT = 201,
  CU_INVALID_HANDLE = 400,
  CU_NOT_FOUND = 500, /* a symbol */
  CU_NOT_READY = 600,
  CU_LOST = 700, /* errors from here to 799: the process's work on devices is over */
  CU_NOT_PERMITTED = 800,
  CU_NOT_SUPPORTED = 801,
  CU_CAPTURE_IMPLICIT = 906 /* the legacy stream, while a stream that it waits for captures */
};
enum { CU_EVENT_DISABLE_TIMING = 2, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_CAPTURE_NONE = 0, CU_CAPTURE_ACTIVE = 1, CU_CAPTURE_RELAXED = 2 /* a mode */ };
enum { CU_ATTRIBUTE_MEMORY_TYPE = 2, CU_ATTRIBUTE_MANAGED = 8, CU_ATTRIBUTE_ORDINAL = 9 };
enum { CU_MEMORY_HOST = 1, CU_MEMORY_UNIFIED = 4 };
enum { CU_DEVICE_HAS_POOLS = 115, CU_POOL_RELEASE_THRESHOLD = 4 };
enum { CU_ALLOCATION_PINNED = 1, CU_LOCATION_DEVICE = 1, CU_ACCESS_READ_WRITE = 3 };

typedef struct {
  int type, id;
} cu_location;

typedef struct {
  int allocation, handles;
  cu_location where;
  void* security;
  unsigned char reserved[64];
} cu_pool_properties;

typedef struct {
  cu_location where;
  int access;
} cu_pool_access;

typedef struct { /* a box of `height` rows of `width` bytes, from anywhere to anywhere */
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

typedef struct {
  int (*Init)(unsigned flags);
  int (*GetErrorName)(int code, const char** name);
  int (*GetErrorString)(int code, const char** text);
  int (*DeviceGetCount)(int* count);
  int (*DeviceGet)(int* device, int ordinal);
  int (*DeviceGetName)(char* name, int room, int device);
  int (*DeviceGetAttribute)(int* value, int attribute, int device);
  int (*DeviceCanAccessPeer)(int* yes, int device, int peer);
  int (*DevicePrimaryCtxRetain)(cu_context* context, int device);
  int (*CtxPushCurrent)(cu_context context);
  int (*CtxPopCurrent)(cu_context* context);
  int (*PointerGetAttribute)(void* value, int attribute, cu_address address);
  int (*StreamCreate)(cu_stream* stream, unsigned flags);
  int (*StreamSynchronize)(cu_stream stream);
  int (*StreamQuery)(cu_stream stream);
  int (*StreamWaitEvent)(cu_stream stream, cu_event event, unsigned flags);
  int (*StreamIsCapturing)(cu_stream stream, int* status);
  int (*EventCreate)(cu_event* event, unsigned flags);
  int (*EventRecord)(cu_event event, cu_stream stream);
  int (*EventQuery)(cu_event event);
  int (*EventSynchronize)(cu_event event);
  int (*EventDestroy)(cu_event event);
  int (*MemAlloc)(cu_address* address, size_t nbytes);
  int (*MemFree)(cu_address address);
  int (*MemcpyAsync)(cu_address to, cu_address from, size_t nbytes, cu_stream stream);
  int (*MemcpyPeerAsync)(cu_address to, cu_context to_context, cu_address from,
                         cu_context from_context, size_t nbytes, cu_stream stream);
  int (*Memcpy2DAsync)(const cu_box* box, cu_stream stream);
  int (*ThreadExchangeStreamCaptureMode)(int* mode); /* CUDA 10.1, the oldest that will do */
  /* NULL in old drivers: CUDA 11.2, 11.3 */
  int (*MemPoolCreate)(cu_pool* pool, const cu_pool_properties* properties);
  int (*MemPoolDestroy)(cu_pool pool);
  int (*MemPoolSetAttribute)(cu_pool pool, int attribute, void* value);
  int (*MemPoolSetAccess)(cu_pool pool, const cu_pool_access* access, size_t n);
  int (*MemAllocFromPoolAsync)(cu_address* address, size_t nbytes, cu_pool pool, cu_stream stream);
  int (*MemFreeAsync)(cu_address address, cu_stream stream);
  int (*StreamGetCaptureInfo)(cu_stream stream, int* status, uint64_t* id, void* graph,
                              void* dependencies, void* n_dependencies);
} cu_table;

/* The table; filled once dlx_cuda_load has said DLX_OK. */
extern cu_table cu;

/* 1 in a child of a process that had initialised the driver. GIL: not needed. */
int cuda_is_child(void);

/* A function of the driver, which is loaded, or NULL. GIL: not needed. */
void* cuda_symbol(const char* name);

/* Note a failed call for dlx_cuda_message; returns DLX_E_DRIVER. GIL: not needed. */
int cuda_failed(const char* operation, int code);

/* The primary context of a device, retained for good. GIL: not needed. Errors: as dlx_cuda_load. */
int cuda_primary(int32_t device_id, cu_context* context);

/* 1 where the driver and a device have memory pools. GIL: not needed. */
int cuda_has_pools(int32_t device_id);

/* As dlx_cuda_capturing; the context of the stream's device must be current. GIL: not needed. */
int cuda_is_capturing(uint64_t stream, int* yes);

/* As dlx_use_new, on dlx's own stream, for an owner whose release waits for the device: only
 * dlx_cuda_release_pending releases it. Owns, GIL, Errors: as there. */
int cuda_use_waiting(int32_t device_id, uint64_t stream, void* owner, dlx_release release,
                     void** out);

/* Parts of dlx_cuda_forget: the table and contexts; streams and events. GIL: not needed. */
void cuda_forget_driver(void);
void cuda_forget_streams(void);

/* Take part in captures of others as little as may be: while a thread captures in the strictest
 * mode, others must not even ask for an event's state, unless they say so. Returns what to give to
 * cuda_unrelax. GIL: not needed. */
int cuda_relax(void);
void cuda_unrelax(int before);

static inline cu_stream cuda_stream(uint64_t handle) {
  return (cu_stream)(uintptr_t)handle;
}

/* cuda_once_lock is held while what there is once is made, which may take long: the table, dlx's
 * streams and pools. Nothing that releases memory takes it. In cuda/order.c, cuda_lock guards the
 * queue and cuda_event_lock the events; the second may be taken under the first. All are held over
 * a fork, so that a child finds everything whole. None is held while an owner is released. */
void cuda_once_begin(void);
void cuda_once_end(void);
extern pthread_mutex_t cuda_lock, cuda_event_lock;

#endif
