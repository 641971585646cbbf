/* Sharing device memory between processes, by the driver's IPC handles or by descriptors. */

#include "driver.h"
#include "core/allocate.h"

int dlx_ipc_uuid(int32_t device_id, unsigned char* uuid) { /* makes no context on the device */
  int device = 0, status = dlx_cuda_load();
  if (status == DLX_OK) status = CUDA(DeviceGet, &device, device_id);
  return status == DLX_OK ? CUDA(DeviceGetUuid, (cu_uuid*)uuid, device) : status;
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
  int yes = 0, status = cuda_get_attribute(self->device, CU_DEVICE_HAS_IPC, &yes);
  if (status != DLX_OK) return status;
  if (yes) return CUDA(MemAlloc, &self->address, self->size); /* DLX_IPC_NONE */
  self->kind = DLX_IPC_DESCRIPTOR;
  status = cuda_get_attribute(self->device, CU_DEVICE_HAS_DESCRIPTORS, &yes);
  if (status == DLX_OK && !yes)
    status = cuda_fail("sharing memory of this device", CU_NOT_SUPPORTED);
  if (status == DLX_OK) status = CUDA(MemGetAllocationGranularity, &step, &properties, CU_MINIMUM);
  self->size = (self->size + step - 1) / step * step;
  if (status == DLX_OK) status = CUDA(MemCreate, &made, self->size, &properties, 0);
  return status == DLX_OK ? map(self, made) : status;
}

static int open_memory(memory* self, const unsigned char* handle, int fd) {
  cu_allocation made = 0;
  if (self->kind != DLX_IPC_HANDLE) {
    int status = CUDA(MemImportFromShareableHandle, &made, (void*)(uintptr_t)fd, CU_DESCRIPTOR);
    return status == DLX_OK ? map(self, made) : status;
  }
  int status = CUDA(IpcOpenMemHandle, &self->address, *(const cu_ipc*)handle, CU_IPC_PEERS);
  if (status != DLX_OK) return status;
  /* Do not trust the exporter's size: ask the driver. */
  status = CUDA(PointerGetAttribute, &self->size, CU_ATTRIBUTE_SIZE, self->address);
  if (status != DLX_OK) cu.IpcCloseMemHandle(self->address);
  return status;
}

int dlx_ipc_open(int32_t device_id, int kind, const unsigned char* handle, int fd, int64_t* size,
                 void** owner, uintptr_t* address) {
  memory* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = (memory){.device = device_id, .kind = kind, .size = (size_t)*size};
  int before, status = cuda_enter(device_id, &before);
  if (status == DLX_OK) {
    status = kind == DLX_IPC_NONE ? allocate(self) : open_memory(self, handle, fd);
    cuda_leave(before);
  }
  *address = (uintptr_t)self->address;
  *size = (int64_t)self->size;
  if (status == DLX_OK)
    *owner = self;
  else
    free(self);
  return status;
}

/* Set `kind` to DLX_IPC_DESCRIPTOR if the driver can export the allocation as one. */
static int find_descriptor(uintptr_t start, int* kind) {
  cu_allocation found = 0;
  int code = CU_NOT_SUPPORTED;
  if (cu.MemRetainAllocationHandle) /* fails for memory of a pool */
    code = cu.MemRetainAllocationHandle(&found, (void*)start);
  if (code == CU_INVALID_VALUE || code == CU_NOT_PERMITTED || code == CU_NOT_SUPPORTED)
    return DLX_OK;
  if (code != CU_OK) return cuda_fail("cuMemRetainAllocationHandle", code);
  *kind = DLX_IPC_DESCRIPTOR;
  cu.MemRelease(found);
  return DLX_OK;
}

int dlx_ipc_find(int32_t device_id, const void* address, uintptr_t* base, int64_t* size,
                 int* kind) {
  cu_address at = (cu_address)(uintptr_t)address;
  unsigned long long handles = 0;
  char legacy[8] = {0}; /* a bool, of the driver's size */
  int by_handle = 0;
  int before, status = cuda_enter(device_id, &before);
  if (status != DLX_OK) return status;
  status = CUDA(PointerGetAttribute, base, CU_ATTRIBUTE_START, at);
  if (status == DLX_OK) status = CUDA(PointerGetAttribute, size, CU_ATTRIBUTE_SIZE, at);
  if (status == DLX_OK) status = CUDA(PointerGetAttribute, legacy, CU_ATTRIBUTE_IPC, at);
  if (status == DLX_OK) status = CUDA(PointerGetAttribute, &handles, CU_ATTRIBUTE_HANDLES, at);
  if (status == DLX_OK && legacy[0])
    status = cuda_get_attribute(device_id, CU_DEVICE_HAS_IPC, &by_handle);
  *kind = by_handle ? DLX_IPC_HANDLE : DLX_IPC_NONE;
  if (status == DLX_OK && !by_handle && handles & CU_DESCRIPTOR)
    status = find_descriptor(*base, kind);
  cuda_leave(before);
  return status;
}

int dlx_ipc_export(int32_t device_id, uintptr_t base, int kind, unsigned char* handle, int* fd) {
  cu_allocation found = 0;
  int before, status = cuda_enter(device_id, &before);
  if (status != DLX_OK) return status;
  if (kind == DLX_IPC_HANDLE) {
    status = CUDA(IpcGetMemHandle, (cu_ipc*)handle, (cu_address)base);
  } else {
    status = CUDA(MemRetainAllocationHandle, &found, (void*)base);
    if (status == DLX_OK) {
      status = CUDA(MemExportToShareableHandle, fd, found, CU_DESCRIPTOR, 0);
      cu.MemRelease(found);
    }
  }
  cuda_leave(before);
  return status;
}

int dlx_ipc_take(int32_t pid, int32_t fd) {
  return dlx_take_descriptor(pid, fd);
}

int dlx_ipc_record(int32_t device_id, unsigned char* handle, void** event) {
  cu_event made = NULL;
  uint64_t stream;
  int before, status = dlx_cuda_work_stream(device_id, &stream);
  if (status == DLX_OK) status = cuda_enter(device_id, &before);
  if (status != DLX_OK) return status;
  status = CUDA(EventCreate, &made, CU_EVENT_BETWEEN_PROCESSES | CU_EVENT_DISABLE_TIMING);
  if (status == DLX_OK) status = CUDA(EventRecord, made, cuda_stream(stream));
  if (status == DLX_OK) status = CUDA(IpcGetEventHandle, (cu_ipc*)handle, made);
  if (status != DLX_OK && made) cu.EventDestroy(made);
  *event = made;
  cuda_leave(before);
  return status;
}

int dlx_ipc_wait(int32_t device_id, const unsigned char* handle) {
  cu_event event = NULL;
  int before, status = cuda_enter(device_id, &before);
  if (status != DLX_OK) return status;
  status = CUDA(IpcOpenEventHandle, &event, *(const cu_ipc*)handle);
  if (status == DLX_OK) {
    status = dlx_cuda_wait_event(device_id, event); /* keeps the event's current state */
    cu.EventDestroy(event);
  }
  cuda_leave(before);
  return status;
}
