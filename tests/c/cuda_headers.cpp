// Compare dlx's declarations of the CUDA driver (c_src/cuda/driver.h) with NVIDIA's cuda.h by the
// compiler:
//   c++ -std=c++17 -fsyntax-only -I <folder of cuda.h> -I c_src -I c_src/include
//   tests/c/cuda_headers.cpp

#define CU_EVENT_DISABLE_TIMING DLX_EVENT_DISABLE_TIMING
#define CU_STREAM_NON_BLOCKING DLX_STREAM_NON_BLOCKING
extern "C" {
#define _Atomic(type) type
#include "cuda/driver.h"
}
#undef CU_EVENT_DISABLE_TIMING
#undef CU_STREAM_NON_BLOCKING
#define __CUDA_API_VERSION_INTERNAL 1  // no macro renames plain names
#include <cuda.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#define SAME(ours, theirs) static_assert((long long)(ours) == (long long)(theirs), #ours)

SAME(CU_OK, CUDA_SUCCESS);
SAME(CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(CU_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(DLX_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(DLX_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(CU_CAPTURE_ACTIVE, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CU_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(CU_ATTRIBUTE_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(CU_ATTRIBUTE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(CU_MEMORY_HOST, CU_MEMORYTYPE_HOST);
SAME(CU_MEMORY_UNIFIED, CU_MEMORYTYPE_UNIFIED);
SAME(CU_POOL_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
SAME(CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(sizeof(CUdevice) == sizeof(int) && sizeof(CUresult) == sizeof(int), "");
static_assert(sizeof(CUdeviceptr) == sizeof(cu_address), "");

template <class T>
constexpr bool is_number = std::is_integral<T>::value || std::is_enum<T>::value;

template <class A, class B>
constexpr bool is_alike =
    sizeof(A) == sizeof(B) &&
    ((std::is_pointer<A>::value && std::is_pointer<B>::value) ||
     (std::is_class<A>::value && std::is_class<B>::value) || (is_number<A> && is_number<B>));

template <class A, class B>
struct same_function : std::false_type {};

template <class A, class... As, class B, class... Bs>
struct same_function<A (*)(As...), B (*)(Bs...)> {
  template <size_t... i>
  static constexpr bool all(std::index_sequence<i...>) {
    return (is_alike<std::tuple_element_t<i, std::tuple<As...>>,
                     std::tuple_element_t<i, std::tuple<Bs...>>> &&
            ...);
  }
  static constexpr bool find() {
    if constexpr (sizeof...(As) != sizeof...(Bs))
      return false;
    else
      return is_alike<A, B> && all(std::index_sequence_for<As...>{});
  }
  static constexpr bool value = find();
};

#define FUNCTION(name, version, parameters)                                                   \
  static_assert(same_function<decltype(cu_table::name), decltype(&cu##name##version)>::value, \
                #name);

CU_CALLS(FUNCTION, FUNCTION)

#define MEMBER(type, ours, their_type, theirs)                                    \
  static_assert(offsetof(type, ours) == offsetof(their_type, theirs) &&           \
                    sizeof(((type*)0)->ours) == sizeof(((their_type*)0)->theirs), \
                #theirs)
#define FIELD(ours, theirs) MEMBER(cu_box, ours, CUDA_MEMCPY2D_v2, theirs)

FIELD(from_x, srcXInBytes);
FIELD(from_y, srcY);
FIELD(from_type, srcMemoryType);
FIELD(from_host, srcHost);
FIELD(from_device, srcDevice);
FIELD(from_array, srcArray);
FIELD(from_pitch, srcPitch);
FIELD(to_x, dstXInBytes);
FIELD(to_y, dstY);
FIELD(to_type, dstMemoryType);
FIELD(to_host, dstHost);
FIELD(to_device, dstDevice);
FIELD(to_array, dstArray);
FIELD(to_pitch, dstPitch);
FIELD(width, WidthInBytes);
FIELD(height, Height);
static_assert(sizeof(cu_box) == sizeof(CUDA_MEMCPY2D_v2), "");

MEMBER(cu_location, type, CUmemLocation, type);
MEMBER(cu_location, id, CUmemLocation, id);
static_assert(sizeof(cu_location) == sizeof(CUmemLocation), "");
MEMBER(cu_properties, allocation, CUmemPoolProps, allocType);
MEMBER(cu_properties, handles, CUmemPoolProps, handleTypes);
MEMBER(cu_properties, where, CUmemPoolProps, location);
MEMBER(cu_properties, security, CUmemPoolProps, win32SecurityAttributes);
static_assert(sizeof(cu_properties) == sizeof(CUmemPoolProps), "");
MEMBER(cu_pool_access, where, CUmemAccessDesc, location);
MEMBER(cu_pool_access, access, CUmemAccessDesc, flags);
static_assert(sizeof(cu_pool_access) == sizeof(CUmemAccessDesc), "");

SAME(CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(CU_ATTRIBUTE_IPC, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(CU_ATTRIBUTE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(CU_ATTRIBUTE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(CU_ATTRIBUTE_HANDLES, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
SAME(CU_DEVICE_HAS_DESCRIPTORS, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(CU_DEVICE_HAS_IPC, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
SAME(CU_EVENT_BETWEEN_PROCESSES, CU_EVENT_INTERPROCESS);
SAME(CU_IPC_PEERS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(CU_DESCRIPTOR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(CU_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(DLX_UUID_BYTES == sizeof(CUuuid) && sizeof(cu_ipc) == sizeof(CUipcMemHandle), "");
static_assert(sizeof(cu_ipc) == sizeof(CUipcEventHandle), "");
static_assert(sizeof(cu_allocation) == sizeof(CUmemGenericAllocationHandle), "");
static_assert(sizeof(cu_properties) >= sizeof(CUmemAllocationProp), "");
MEMBER(cu_properties, allocation, CUmemAllocationProp, type);
MEMBER(cu_properties, handles, CUmemAllocationProp, requestedHandleTypes);
MEMBER(cu_properties, where, CUmemAllocationProp, location);
MEMBER(cu_properties, security, CUmemAllocationProp, win32HandleMetaData);
