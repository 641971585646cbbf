#ifndef DLX_CUDA_IPC_H_
#define DLX_CUDA_IPC_H_

/* The driver's interface to memory of several processes, as cuda/ipc.c declares it for itself. */

#include "driver.h"

enum {
  CU_ATTRIBUTE_IPC = 10, /* of memory: cuIpcGetMemHandle takes it */
  CU_ATTRIBUTE_START = 11,
  CU_ATTRIBUTE_SIZE = 12,
  CU_ATTRIBUTE_HANDLES = 14 /* a mask of CU_DESCRIPTOR and its like */
};
enum { CU_DEVICE_HAS_DESCRIPTORS = 103, CU_DEVICE_HAS_IPC = 125 };
enum { CU_EVENT_BETWEEN_PROCESSES = 4, CU_IPC_PEERS = 1, CU_DESCRIPTOR = 1 };
enum { CU_PINNED = 1, CU_ON_DEVICE = 1, CU_READ_WRITE = 3, CU_MINIMUM = 0 };

typedef unsigned long long cu_allocation;

typedef struct {
  char bytes[64];
} cu_ipc;

typedef struct {
  char bytes[16];
} cu_uuid;

typedef struct {
  int kind, id;
} cu_place;

typedef struct {
  int kind, handles;
  cu_place location;
  void* windows;
  unsigned char compression, direct;
  unsigned short usage;
  unsigned char reserved[4];
} cu_properties;

typedef struct {
  cu_place location;
  int flags;
} cu_access;

typedef struct { /* any of them is NULL where the driver has it not */
  int (*DeviceGetUuid)(cu_uuid* uuid, int device);
  int (*IpcGetMemHandle)(cu_ipc* handle, cu_address address);
  int (*IpcOpenMemHandle)(cu_address* address, cu_ipc handle, unsigned flags);
  int (*IpcCloseMemHandle)(cu_address address);
  int (*IpcGetEventHandle)(cu_ipc* handle, cu_event event);
  int (*IpcOpenEventHandle)(cu_event* event, cu_ipc handle);
  int (*MemCreate)(cu_allocation* made, size_t size, const cu_properties* properties,
                   unsigned long long flags);
  int (*MemRelease)(cu_allocation allocation);
  int (*MemRetainAllocationHandle)(cu_allocation* found, void* address);
  int (*MemGetAllocationGranularity)(size_t* bytes, const cu_properties* properties, int option);
  int (*MemAddressReserve)(cu_address* address, size_t size, size_t alignment, cu_address wish,
                           unsigned long long flags);
  int (*MemAddressFree)(cu_address address, size_t size);
  int (*MemMap)(cu_address address, size_t size, size_t offset, cu_allocation allocation,
                unsigned long long flags);
  int (*MemUnmap)(cu_address address, size_t size);
  int (*MemSetAccess)(cu_address address, size_t size, const cu_access* access, size_t count);
  int (*MemExportToShareableHandle)(void* handle, cu_allocation allocation, int kind,
                                    unsigned long long flags);
  int (*MemImportFromShareableHandle)(cu_allocation* made, void* handle, int kind);
} cu_ipc_table;

#endif
