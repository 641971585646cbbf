/* Sharing device memory between processes, by the driver's IPC handles or by descriptors. */

#define _GNU_SOURCE

#include "driver.h"
#include "core/allocate.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

/* CUDA_ENTERED, for a driver that can share memory. */
#define SHARING_ENTERED(device_id) \
  DLX_TRY(dlx_cuda_load());        \
  DLX_TRY(cuda_can_share());       \
  CUDA_ENTERED(device_id)

int dlx_ipc_uuid(int32_t device_id, unsigned char* uuid) {
  int device = 0;
  cu_uuid found;
  SHARING_ENTERED(device_id);
  DLX_TRY(CUDA(DeviceGet, &device, device_id));
  DLX_TRY(CUDA(DeviceGetUuid, &found, device));
  memcpy(uuid, found.bytes, sizeof found.bytes);
  return DLX_OK;
}

/* ---- an allocation --------------------------------------------------------------------------- */

typedef struct {
  int32_t device;
  int kind;
  cu_address address;
  size_t size;
} memory;

void dlx_ipc_release(void* owner) {
  memory* self = owner;
  int mode;
  if (dlx_cuda_loaded() && cuda_enter(self->device, &mode) == DLX_OK) {
    if (self->kind == DLX_IPC_HANDLE)
      cu.IpcCloseMemHandle(self->address);
    else if (self->kind == DLX_IPC_NONE)
      cu.MemFree(self->address);
    else if (cu.MemUnmap(self->address, self->size) == CU_OK)
      cu.MemAddressFree(self->address, self->size);
    cuda_leave(mode);
  }
  free(self);
}

/* Map an allocation; the mapping keeps it alive. Owns: takes the allocation, also on failure. */
static int map(memory* self, cu_allocation allocation) {
  cu_pool_access access = {{CU_LOCATION_DEVICE, self->device}, CU_ACCESS_READ_WRITE};
  int mapped = 0, status = CUDA(MemAddressReserve, &self->address, self->size, 0, 0, 0);
  if (status == DLX_OK) {
    status = CUDA(MemMap, self->address, self->size, 0, allocation, 0);
    if (status == DLX_OK) {
      status = CUDA(MemSetAccess, self->address, self->size, &access, 1);
      mapped = status == DLX_OK || cu.MemUnmap(self->address, self->size) != CU_OK;
    }
    if (!mapped) cu.MemAddressFree(self->address, self->size);
  }
  cu.MemRelease(allocation);
  return status;
}

static int create(memory* self) {
  cu_allocation_properties properties = {.kind = CU_ALLOCATION_PINNED,
                                         .handles = CU_DESCRIPTOR,
                                         .location = {CU_LOCATION_DEVICE, self->device}};
  cu_allocation made = 0;
  size_t step = 1;
  DLX_TRY(CUDA(MemGetAllocationGranularity, &step, &properties, CU_MINIMUM));
  self->size = (self->size + step - 1) / step * step;
  int status = CUDA(MemCreate, &made, self->size, &properties, 0);
  return status == DLX_OK ? map(self, made) : status;
}

static int allocate(memory* self, const unsigned char* unused_handle, int unused_fd) {
  int yes = 0;
  (void)unused_handle, (void)unused_fd;
  SHARING_ENTERED(self->device);
  DLX_TRY(cuda_attribute(self->device, CU_DEVICE_HAS_IPC, &yes));
  if (yes) return CUDA(MemAlloc, &self->address, self->size); /* DLX_IPC_NONE */
  DLX_TRY(cuda_attribute(self->device, CU_DEVICE_HAS_DESCRIPTORS, &yes));
  self->kind = DLX_IPC_DESCRIPTOR;
  return yes ? create(self) : cuda_failed("sharing memory of this device", CU_NOT_SUPPORTED);
}

static int open_memory(memory* self, const unsigned char* handle, int fd) {
  cu_allocation made = 0;
  SHARING_ENTERED(self->device);
  if (self->kind != DLX_IPC_HANDLE) {
    DLX_TRY(CUDA(MemImportFromShareableHandle, &made, (void*)(uintptr_t)fd, CU_DESCRIPTOR));
    return map(self, made);
  }
  cu_ipc exported;
  memcpy(exported.bytes, handle, sizeof exported.bytes);
  DLX_TRY(CUDA(IpcOpenMemHandle, &self->address, exported, CU_IPC_PEERS));
  /* Do not trust the exporter's size: ask the driver. */
  int status = CUDA(PointerGetAttribute, &self->size, CU_ATTRIBUTE_SIZE, self->address);
  if (status != DLX_OK) cu.IpcCloseMemHandle(self->address);
  return status;
}

static int new_memory(memory like, int (*fill)(memory*, const unsigned char*, int),
                      const unsigned char* handle, int fd, void** owner, uintptr_t* address) {
  memory* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = like;
  int status = fill(self, handle, fd);
  *address = (uintptr_t)self->address;
  if (status == DLX_OK)
    *owner = self;
  else
    free(self);
  return status;
}

int dlx_ipc_empty(int32_t device_id, int64_t nbytes, void** owner, uintptr_t* address) {
  memory like = {.device = device_id, .size = (size_t)(nbytes > 0 ? nbytes : 1)};
  return new_memory(like, allocate, NULL, 0, owner, address);
}

int dlx_ipc_open(int32_t device_id, int kind, const unsigned char* handle, int fd, int64_t* size,
                 void** owner, uintptr_t* address) {
  memory like = {.device = device_id, .kind = kind, .size = (size_t)*size};
  DLX_TRY(new_memory(like, open_memory, handle, fd, owner, address));
  *size = (int64_t)((memory*)*owner)->size;
  return DLX_OK;
}

int dlx_ipc_find(int32_t device_id, const void* address, uintptr_t* base, int64_t* size,
                 int* kind) {
  cu_address at = (cu_address)(uintptr_t)address, start = 0;
  unsigned long long handles = 0;
  size_t length = 0;
  char legacy[8] = {0}; /* a bool, of the driver's size */
  int by_handle = 0;
  SHARING_ENTERED(device_id);
  DLX_TRY(CUDA(PointerGetAttribute, &start, CU_ATTRIBUTE_START, at));
  DLX_TRY(CUDA(PointerGetAttribute, &length, CU_ATTRIBUTE_SIZE, at));
  DLX_TRY(CUDA(PointerGetAttribute, legacy, CU_ATTRIBUTE_IPC, at));
  DLX_TRY(CUDA(PointerGetAttribute, &handles, CU_ATTRIBUTE_HANDLES, at));
  if (legacy[0]) DLX_TRY(cuda_attribute(device_id, CU_DEVICE_HAS_IPC, &by_handle));
  *base = (uintptr_t)start;
  *size = (int64_t)length;
  *kind = by_handle ? DLX_IPC_HANDLE : DLX_IPC_NONE;
  if (by_handle || !(handles & CU_DESCRIPTOR)) return DLX_OK;
  cu_allocation found = 0; /* fails for memory of a pool */
  int code = cu.MemRetainAllocationHandle(&found, (void*)(uintptr_t)start);
  if (code == CU_INVALID_VALUE || code == CU_NOT_PERMITTED || code == CU_NOT_SUPPORTED)
    return DLX_OK;
  if (code != CU_OK) return cuda_failed("cuMemRetainAllocationHandle", code);
  *kind = DLX_IPC_DESCRIPTOR;
  cu.MemRelease(found);
  return DLX_OK;
}

int dlx_ipc_export(int32_t device_id, uintptr_t base, int kind, unsigned char* handle, int* fd) {
  cu_ipc made;
  cu_allocation found = 0;
  SHARING_ENTERED(device_id);
  if (kind == DLX_IPC_HANDLE) {
    DLX_TRY(CUDA(IpcGetMemHandle, &made, (cu_address)base));
    memcpy(handle, made.bytes, sizeof made.bytes);
    return DLX_OK;
  }
  DLX_TRY(CUDA(MemRetainAllocationHandle, &found, (void*)base));
  int status = CUDA(MemExportToShareableHandle, fd, found, CU_DESCRIPTOR, 0);
  cu.MemRelease(found);
  return status;
}

int dlx_ipc_take(int32_t pid, int32_t fd, int* taken) {
  *taken = -1;
  int process = (int)syscall(SYS_pidfd_open, pid, 0);
  if (process < 0) return DLX_E_DRIVER;
  *taken = (int)syscall(SYS_pidfd_getfd, process, fd, 0);
  close(process);
  return *taken < 0 ? DLX_E_DRIVER : DLX_OK;
}

int dlx_ipc_event_new(int32_t device_id, uint64_t stream, unsigned char* handle, void** event) {
  cu_event made = NULL;
  cu_ipc exported;
  SHARING_ENTERED(device_id);
  DLX_TRY(CUDA(EventCreate, &made, CU_EVENT_BETWEEN_PROCESSES | CU_EVENT_DISABLE_TIMING));
  int status = CUDA(EventRecord, made, cuda_stream(stream));
  if (status == DLX_OK) status = CUDA(IpcGetEventHandle, &exported, made);
  if (status != DLX_OK) {
    cu.EventDestroy(made);
    return status;
  }
  memcpy(handle, exported.bytes, sizeof exported.bytes);
  *event = made;
  return DLX_OK;
}

void dlx_ipc_event_drop(int32_t device_id, void* event) {
  int mode;
  if (!dlx_cuda_loaded() || cuda_enter(device_id, &mode) != DLX_OK) return;
  cu.EventDestroy(event);
  cuda_leave(mode);
}

int dlx_ipc_event_wait(int32_t device_id, const unsigned char* handle) {
  cu_event event = NULL;
  cu_ipc exported;
  memcpy(exported.bytes, handle, sizeof exported.bytes);
  SHARING_ENTERED(device_id);
  DLX_TRY(CUDA(IpcOpenEventHandle, &event, exported));
  int status = dlx_cuda_wait_event(device_id, event); /* keeps the event's current state */
  cu.EventDestroy(event);
  return status;
}
