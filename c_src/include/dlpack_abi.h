#ifndef DLX_DLPACK_ABI_H_
#define DLX_DLPACK_ABI_H_

#include <stddef.h>
#include <stdint.h>

/* dlx's declarations of the DLPack 1.3 binary interface, with the names of the upstream dlpack.h.
 *
 * A file can include this and any dlpack.h (upstream's, torch's, tvm-ffi's ...), in any order: the
 * first one declares, the others see its guard. This header completes an older one that comes
 * first, except for kDLMAIA and kDLTrn, which some of 1.0 and 1.1 declare: include it first if you
 * need them.
 *
 * cffi parses this file, too, with every #ifdef false and every #if and #ifndef true; it takes
 * integer macros as constants. */

enum { DLX_DLPACK_MAJOR = 1, DLX_DLPACK_MINOR = 3 };

/* The version that is already declared; 0 = no header, 99 = before 1.0. */
#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_
#define DLX_DLPACK_BEFORE 0
#elif defined(DLPACK_MAJOR_VERSION)
#define DLX_DLPACK_BEFORE (DLPACK_MAJOR_VERSION * 100 + DLPACK_MINOR_VERSION)
#else
#define DLX_DLPACK_BEFORE 99
#endif

#if DLX_DLPACK_BEFORE >= 200
#error "dlx declares DLPack 1, but the included dlpack.h has another major version"
#elif DLX_DLPACK_BEFORE == 99 && DLPACK_VERSION < 050
#error "the included dlpack.h is older than 0.5: include dlpack_abi.h first"
#elif DLX_DLPACK_BEFORE && DLX_DLPACK_BEFORE < 101
#define DLX_DLPACK_NO_FLOAT8
#endif

#ifdef __cplusplus
extern "C" {
#endif

#if !DLX_DLPACK_BEFORE

#ifdef __cplusplus
#define DLPACK_EXTERN_C extern "C"
#else
#define DLPACK_EXTERN_C
#endif

#ifndef _WIN32
#define DLPACK_DLL
#elif defined(DLPACK_EXPORTS)
#define DLPACK_DLL __declspec(dllexport)
#else
#define DLPACK_DLL __declspec(dllimport)
#endif

#define DLPACK_MAJOR_VERSION 1
#define DLPACK_MINOR_VERSION 3

/* The host can read CPU, CUDA_HOST (pinned) and ROCM_HOST directly, CUDA_MANAGED after
 * synchronizing the device. In C, a device type is an int32_t: peers may send values that are not
 * listed here. */
#ifdef __cplusplus
enum DLDeviceType : int32_t {
#else
typedef int32_t DLDeviceType;
enum {
#endif
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

/* The kind of an element; `bits` is its width. */
typedef enum {
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
} DLDataTypeCode;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code;   /* kDL... */
  uint8_t bits;   /* of each lane */
  uint16_t lanes; /* 1 = scalar */
} DLDataType;

typedef struct {
  void* data; /* may be NULL without elements; an opaque handle on some devices */
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;       /* ndim extents; may be NULL if ndim is 0 */
  int64_t* strides;     /* in elements; NULL = compact row-major (before 1.2) */
  uint64_t byte_offset; /* bytes from data to the first element */
} DLTensor;

/* Before 1.0: no version, no flags. Only legacy.c accesses it. */
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx; /* for the producer only */
  void (*deleter)(
      struct DLManagedTensor* self); /* may be NULL; called on any thread, without locks */
} DLManagedTensor;

#endif /* !DLX_DLPACK_BEFORE */

#ifdef DLX_DLPACK_NO_FLOAT8
enum {
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
#endif

/* Bits of DLManagedTensorVersioned.flags. */
#ifndef DLPACK_FLAG_BITMASK_READ_ONLY /* writing is undefined behaviour */
#define DLPACK_FLAG_BITMASK_READ_ONLY 1UL
#endif
#ifndef DLPACK_FLAG_BITMASK_IS_COPIED /* the producer copied for this request */
#define DLPACK_FLAG_BITMASK_IS_COPIED 2UL
#endif
#ifndef DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED /* elements below 8 bits have a byte each */
#define DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED 4UL
#endif

#if DLX_DLPACK_BEFORE < 100
typedef struct {
  uint32_t major; /* differs: only version, manager_ctx, deleter and flags may be accessed */
  uint32_t minor; /* differs: readable, but enum values may be unknown */
} DLPackVersion;

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;                                      /* for the producer only */
  void (*deleter)(struct DLManagedTensorVersioned* self); /* as in DLManagedTensor */
  uint64_t flags;                                         /* DLPACK_FLAG_BITMASK_... */
  DLTensor dl_tensor;
};
#endif

#if DLX_DLPACK_BEFORE < 102
typedef struct DLManagedTensorVersioned DLManagedTensorVersioned;

/* The exchange API: a table that a type can have as `__dlpack_c_exchange_api__`. Slots return 0, or
 * -1 with a Python exception (the allocator reports errors through SetError). */
typedef int (*DLPackManagedTensorAllocator)(DLTensor* prototype, DLManagedTensorVersioned** out,
                                            void* error_ctx,
                                            void (*SetError)(void* error_ctx, const char* kind,
                                                             const char* message));
typedef int (*DLPackManagedTensorFromPyObjectNoSync)(void* py_object,
                                                     DLManagedTensorVersioned** out);
typedef int (*DLPackManagedTensorToPyObjectNoSync)(DLManagedTensorVersioned* tensor,
                                                   void** out_py_object);
typedef int (*DLPackDLTensorFromPyObjectNoSync)(void* py_object, DLTensor* out);
typedef int (*DLPackCurrentWorkStream)(DLDeviceType device_type, int32_t device_id,
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

#ifdef __cplusplus
}
#endif

#endif
