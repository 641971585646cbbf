/* Sharing device memory between processes, by the driver's IPC handles or by descriptors. */

#include "driver.h"
#include "core/allocate.h"

int dlx_ipc_uuid(int32_t device_id, unsigned char* uuid) { /* makes no context on the device */
  int device;
  CUDA_TRY(dlx_cuda_load());
  CUDA_TRY(CUDA(DeviceGet, &device, device_id));
  return CUDA(DeviceGetUuid, uuid, device);
}

static int get_attribute(int32_t device_id, int attribute, int* value) {
  int device;
  CUDA_TRY(CUDA(DeviceGet, &device, device_id));
  return CUDA(DeviceGetAttribute, value, attribute, device);
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

/* Map an allocation; the mapping keeps it alive. Owns: takes the allocation, even on failure. */
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

static int allocate(memory* self) {
  cu_properties properties = {.allocation = CU_ALLOCATION_PINNED,
                              .handles = CU_DESCRIPTOR,
                              .where = {CU_LOCATION_DEVICE, self->device}};
  cu_allocation made = 0;
  size_t step = 1;
  int yes;
  CUDA_TRY(get_attribute(self->device, CU_DEVICE_HAS_IPC, &yes));
  if (yes) return CUDA(MemAlloc, &self->address, self->size); /* DLX_IPC_NONE */
  self->kind = DLX_IPC_DESCRIPTOR;
  CUDA_TRY(get_attribute(self->device, CU_DEVICE_HAS_DESCRIPTORS, &yes));
  if (!yes) return cuda_fail("sharing memory of this device", CU_NOT_SUPPORTED);
  CUDA_TRY(CUDA(MemGetAllocationGranularity, &step, &properties, CU_MINIMUM));
  self->size = (self->size + step - 1) / step * step;
  CUDA_TRY(CUDA(MemCreate, &made, self->size, &properties, 0));
  return map(self, made);
}

static int open_memory(memory* self, const unsigned char* handle, int fd) {
  cu_allocation made = 0;
  if (self->kind != DLX_IPC_HANDLE) {
    CUDA_TRY(CUDA(MemImportFromShareableHandle, &made, (void*)(uintptr_t)fd, CU_DESCRIPTOR));
    return map(self, made);
  }
  CUDA_TRY(CUDA(IpcOpenMemHandle, &self->address, *(const cu_ipc*)handle, CU_IPC_PEERS));
  /* Do not trust the exporter's size: ask the driver. */
  int status = CUDA(PointerGetAttribute, &self->size, CU_ATTRIBUTE_SIZE, self->address);
  if (status != DLX_OK) cu.IpcCloseMemHandle(self->address);
  return status;
}

int dlx_ipc_open(int32_t device_id, int kind, const unsigned char* handle, int fd, int64_t* size,
                 void** owner, uintptr_t* address) {
  CUDA_ENTER(device_id);
  memory* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = (memory){.device = device_id, .kind = kind, .size = (size_t)*size};
  int status = kind == DLX_IPC_NONE ? allocate(self) : open_memory(self, handle, fd);
  *address = (uintptr_t)self->address;
  *size = (int64_t)self->size;
  if (status == DLX_OK)
    *owner = self;
  else
    free(self);
  return status;
}

int dlx_ipc_find(int32_t device_id, const void* address, uintptr_t* base, int64_t* size,
                 int* kind) {
  cu_address at = (cu_address)(uintptr_t)address;
  cu_allocation found = 0;
  unsigned long long handles = 0;
  char legacy[8] = {0}; /* a bool, of the driver's size */
  int by_handle = 0;
  CUDA_ENTER(device_id);
  CUDA_TRY(CUDA(PointerGetAttribute, base, CU_ATTRIBUTE_START, at));
  CUDA_TRY(CUDA(PointerGetAttribute, size, CU_ATTRIBUTE_SIZE, at));
  CUDA_TRY(CUDA(PointerGetAttribute, legacy, CU_ATTRIBUTE_IPC, at));
  CUDA_TRY(CUDA(PointerGetAttribute, &handles, CU_ATTRIBUTE_HANDLES, at));
  if (legacy[0]) CUDA_TRY(get_attribute(device_id, CU_DEVICE_HAS_IPC, &by_handle));
  *kind = by_handle ? DLX_IPC_HANDLE : DLX_IPC_NONE;
  if (by_handle || !(handles & CU_DESCRIPTOR) || !cu.MemRetainAllocationHandle) return DLX_OK;
  int code = cu.MemRetainAllocationHandle(&found, (void*)*base); /* fails for memory of a pool */
  if (code == CU_INVALID_VALUE || code == CU_NOT_PERMITTED || code == CU_NOT_SUPPORTED)
    return DLX_OK;
  if (code != CU_OK) return cuda_fail("cuMemRetainAllocationHandle", code);
  *kind = DLX_IPC_DESCRIPTOR;
  cu.MemRelease(found);
  return DLX_OK;
}

int dlx_ipc_export(int32_t device_id, uintptr_t base, int kind, unsigned char* handle, int* fd) {
  cu_allocation found = 0;
  CUDA_ENTER(device_id);
  if (kind == DLX_IPC_HANDLE) return CUDA(IpcGetMemHandle, (cu_ipc*)handle, (cu_address)base);
  CUDA_TRY(CUDA(MemRetainAllocationHandle, &found, (void*)base));
  int status = CUDA(MemExportToShareableHandle, fd, found, CU_DESCRIPTOR, 0);
  cu.MemRelease(found);
  return status;
}

int dlx_ipc_record(int32_t device_id, unsigned char* handle, void** event) {
  cu_event made = NULL;
  uint64_t stream;
  CUDA_TRY(dlx_cuda_work_stream(device_id, &stream));
  CUDA_ENTER(device_id);
  CUDA_TRY(CUDA(EventCreate, &made, CU_EVENT_BETWEEN_PROCESSES | CU_EVENT_DISABLE_TIMING));
  int status = CUDA(EventRecord, made, cuda_stream(stream));
  if (status == DLX_OK) status = CUDA(IpcGetEventHandle, (cu_ipc*)handle, made);
  if (status != DLX_OK) cu.EventDestroy(made);
  *event = made;
  return status;
}

int dlx_ipc_wait(int32_t device_id, const unsigned char* handle) {
  cu_event event = NULL;
  CUDA_ENTER(device_id);
  CUDA_TRY(CUDA(IpcOpenEventHandle, &event, *(const cu_ipc*)handle));
  int status = dlx_cuda_wait_event(device_id, event); /* keeps the event's current state */
  cu.EventDestroy(event);
  return status;
}
