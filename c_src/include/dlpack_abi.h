#ifndef DLX_DLPACK_ABI_H_
#define DLX_DLPACK_ABI_H_

#include <stdint.h>

/* Our own declarations of the DLPack 1.3 binary interface. cffi reads this file too, so it holds
 * declarations only. tests/core/test_abi.py compares every size, offset and value with headers that
 * we did not write. Device codes travel as int32_t: a peer may send one that is not named here. */

enum { DLX_DLPACK_MAJOR = 1, DLX_DLPACK_MINOR = 3 };

/* Where the data lives. CPU, CUDA_HOST (pinned) and ROCM_HOST can be read by the host as they are;
 * CUDA_MANAGED can after the device is done. CUDA and ROCM are never alike. */
enum {
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,
  kDLOpenCL = 4,
  kDLVulkan = 7,
  kDLMetal = 8,
  kDLVPI = 9,
  kDLROCM = 10,
  kDLROCMHost = 11,
  kDLExtDev = 12,
  kDLCUDAManaged = 13,
  kDLOneAPI = 14,
  kDLWebGPU = 15,
  kDLHexagon = 16,
  kDLMAIA = 17,
  kDLTrn = 18
};

/* What an element is; `bits` says how wide. */
enum {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLOpaqueHandle = 3,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6,
  kDLFloat8_e3m4 = 7,
  kDLFloat8_e4m3 = 8,
  kDLFloat8_e4m3b11fnuz = 9,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e4m3fnuz = 11,
  kDLFloat8_e5m2 = 12,
  kDLFloat8_e5m2fnuz = 13,
  kDLFloat8_e8m0fnu = 14,
  kDLFloat6_e2m3fn = 15,
  kDLFloat6_e3m2fn = 16,
  kDLFloat4_e2m1fn = 17
};

/* Bits of DLManagedTensorVersioned.flags. */
enum {
  DLPACK_FLAG_BITMASK_READ_ONLY = 1, /* writing is undefined behaviour */
  DLPACK_FLAG_BITMASK_IS_COPIED = 2, /* the producer made this memory for the request */
  DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED =
      4 /* each element below 8 bits has a byte of its own */
};

typedef struct {
  uint32_t major; /* differs: only version, manager_ctx, deleter and flags may be touched */
  uint32_t minor; /* differs: readable, but enum values may be unknown */
} DLPackVersion;

typedef struct {
  int32_t device_type; /* kDL..., by number */
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code;   /* kDL..., by number */
  uint8_t bits;   /* of one fast path */
  uint16_t lanes; /* 1 = scalar */
} DLDataType;

typedef struct {
  void* data; /* may be NULL when there is no element; an opaque handle on some devices */
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;       /* ndim numbers; may be NULL when ndim is 0 */
  int64_t* strides;     /* ndim numbers, in elements; NULL = compact row-major (before 1.2) */
  uint64_t byte_offset; /* bytes from data to the first element */
} DLTensor;

/* Before 1.0: no version, no flags. Only legacy.c looks inside. */
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;                             /* the producer's own */
  void (*deleter)(struct DLManagedTensor* self); /* may be NULL; any thread, no lock held */
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx; /* the producer's own */
  void (*deleter)(
      struct DLManagedTensorVersioned* self); /* may be NULL; any thread, no lock held */
  uint64_t flags;                             /* DLPACK_FLAG_BITMASK_... */
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

/* The exchange API: a table that a type may carry as `__dlpack_c_exchange_api__`. Slots return 0,
 * or -1 with a Python exception set (the allocator tells through SetError instead). */
typedef int (*DLPackManagedTensorAllocator)(DLTensor* prototype, DLManagedTensorVersioned** out,
                                            void* error_ctx,
                                            void (*SetError)(void* error_ctx, const char* kind,
                                                             const char* message));
typedef int (*DLPackManagedTensorFromPyObjectNoSync)(void* py_object,
                                                     DLManagedTensorVersioned** out);
typedef int (*DLPackManagedTensorToPyObjectNoSync)(DLManagedTensorVersioned* tensor,
                                                   void** out_py_object);
typedef int (*DLPackDLTensorFromPyObjectNoSync)(void* py_object, DLTensor* out);
typedef int (*DLPackCurrentWorkStream)(int32_t device_type, int32_t device_id,
                                       void** out_current_stream);

typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader* prev_api; /* an older table of the same type, or NULL */
} DLPackExchangeAPIHeader;

typedef struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  DLPackManagedTensorAllocator managed_tensor_allocator;
  DLPackManagedTensorFromPyObjectNoSync managed_tensor_from_py_object_no_sync;
  DLPackManagedTensorToPyObjectNoSync managed_tensor_to_py_object_no_sync;
  DLPackDLTensorFromPyObjectNoSync dltensor_from_py_object_no_sync;
  DLPackCurrentWorkStream current_work_stream;
} DLPackExchangeAPI;

#endif
