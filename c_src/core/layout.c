/* Arithmetic on one tensor: sizes, strides, ranges; and texts for reports. dlx_validate checks
 * every possible overflow; other functions rely on it. */

#include "dlx.h"

#include <stddef.h>

/* dlpack.h 1.3 on LP64. */
_Static_assert(sizeof(DLTensor) == 48, "DLTensor");
_Static_assert(offsetof(DLTensor, shape) == 24, "DLTensor.shape");
_Static_assert(sizeof(DLManagedTensor) == 64, "DLManagedTensor");
_Static_assert(sizeof(DLManagedTensorVersioned) == 80, "DLManagedTensorVersioned");
_Static_assert(offsetof(DLManagedTensorVersioned, dl_tensor) == 32, "dl_tensor");
_Static_assert(sizeof(DLPackExchangeAPI) == 56, "DLPackExchangeAPI");

enum {
  KNOWN_FLAGS = DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED |
  DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED
};

static int64_t item_bits(DLDataType dtype) {
  return (int64_t)dtype.bits * dtype.lanes;
}

static int64_t round_to_bytes(int64_t bits) {
  return bits / 8 + (bits % 8 != 0);
}

int64_t dlx_itemsize(DLDataType dtype, uint64_t flags) {
  int64_t bits = item_bits(dtype);
  if (bits % 8 == 0) return bits / 8;
  return (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) ? round_to_bytes(bits) : 0;
}

int dlx_data_is_address(int32_t device_type) {
  return dlx_host_readable(device_type) || device_type == kDLROCM ||
         dlx_is_cuda((DLDevice){device_type, 0});
}

int dlx_is_cuda(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
}

int dlx_host_readable(int32_t device_type) {
  return device_type == kDLCPU || device_type == kDLCUDAHost || device_type == kDLROCMHost;
}

static int has_elements(const DLTensor* t) {
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0) return 0;
  }
  return 1;
}

/* Compute the size, and the lowest and highest offset, in elements. Errors: 0 = overflow. */
static int find_span(const DLTensor* t, int64_t* size, int64_t* low, int64_t* high) {
  *size = 1;
  *low = *high = 0;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    int64_t reach, step = t->strides ? t->strides[i] : *size;
    if (step == INT64_MIN) return 0; /* cannot be negated */
    if (__builtin_mul_overflow(*size, t->shape[i], size)) return 0;
    if (__builtin_mul_overflow(t->shape[i] - 1, step, &reach)) return 0;
    int64_t* end = reach < 0 ? low : high;
    if (__builtin_add_overflow(*end, reach, end)) return 0;
  }
  return 1;
}

/* Check that data + byte offset is an address: in the same address space as data (at most 56 bits
 * on any processor, below a tag). */
static int is_offset_sound(const DLTensor* t) {
  uint64_t data = (uint64_t)(uintptr_t)t->data, first;
  if (t->byte_offset == 0) return 1;
  if (!dlx_data_is_address(t->device.device_type)) return t->byte_offset <= INT64_MAX;
  return !__builtin_add_overflow(data, t->byte_offset, &first) && data >> 56 == first >> 56;
}

int dlx_validate(const DLTensor* t, uint64_t flags) {
  if (t->ndim < 0 || t->ndim > DLX_MAX_NDIM) return DLX_E_NDIM;
  if (t->ndim > 0 && t->shape == NULL) return DLX_E_SHAPE;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0) return DLX_E_SHAPE;
  }
  if (t->dtype.bits == 0 || t->dtype.lanes == 0) return DLX_E_DTYPE;
  /* An unknown flag may describe the storage of sub-byte elements. */
  if ((flags & ~(uint64_t)KNOWN_FLAGS) && item_bits(t->dtype) % 8 != 0) return DLX_E_FLAGS;
  int is_sound = is_offset_sound(t);
  if (!has_elements(t)) return is_sound ? DLX_OK : DLX_E_OVERFLOW;
  if (t->data == NULL) return DLX_E_NULL;

  int64_t size, low, high, bits = item_bits(t->dtype);
  if (bits % 8 != 0 && (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED))
    bits = (bits + 7) / 8 * 8;
  if (!find_span(t, &size, &low, &high)) return DLX_E_OVERFLOW;
  if (__builtin_mul_overflow(size, bits, &size) || __builtin_mul_overflow(low, bits, &low) ||
      low == INT64_MIN || __builtin_add_overflow(high, 1, &high) ||
      __builtin_mul_overflow(high, bits, &high)) {
    return DLX_E_OVERFLOW;
  }
  if (!is_sound) return DLX_E_OVERFLOW;
  if (dlx_data_is_address(t->device.device_type)) {
    int64_t first, end;
    if ((uintptr_t)t->data > INT64_MAX ||
        __builtin_add_overflow((int64_t)(uintptr_t)t->data, (int64_t)t->byte_offset, &first) ||
        __builtin_add_overflow(first, high / 8 + 1, &end) || first < round_to_bytes(-low)) {
      return DLX_E_OVERFLOW;
    }
  }
  return DLX_OK;
}

/* Return 1 if a stride overflows in bits; no element depends on it. */
static int is_huge(int64_t step, int64_t bits) {
  return __builtin_mul_overflow(step, bits, &step);
}

int dlx_is_plain(const DLTensor* t, uint32_t alignment) {
  int64_t size = 1, bits = item_bits(t->dtype), first = (int64_t)(uintptr_t)t->data;
  if (first <= 0 || (first & (alignment - 1)) || t->device.device_type != kDLCPU ||
      t->byte_offset != 0 || bits <= 0 || bits % 8 || (uint32_t)t->ndim > DLX_MAX_NDIM ||
      (t->ndim > 0 && (t->shape == NULL || t->strides == NULL)))
    return 0;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    int64_t extent = t->shape[i], step = t->strides[i];
    if (extent <= 0 || (step != size && (extent != 1 || step < 0 || is_huge(step, bits))) ||
        __builtin_mul_overflow(size, extent, &size))
      return 0;
  }
  /* The same limits as in dlx_validate: in bits, and one element more. */
  int64_t end;
  return !__builtin_add_overflow(size, 1, &end) && !__builtin_mul_overflow(end, bits, &end) &&
         !__builtin_add_overflow(first, end / 8, &end);
}

int dlx_has_odd_strides(const DLTensor* t) {
  int64_t reach, bits = item_bits(t->dtype);
  if (t->strides == NULL) return 0;
  int is_empty = !has_elements(t);
  for (int32_t i = 0; i < t->ndim; i++) {
    if (is_empty ? t->strides[i] < 0 || __builtin_mul_overflow(t->strides[i], t->shape[i], &reach)
                 : t->shape[i] == 1 && is_huge(t->strides[i], bits))
      return 1;
  }
  return 0;
}

void dlx_normalize_strides(const DLTensor* t, int64_t* out) {
  if (!has_elements(t)) {
    dlx_compact_strides(t->ndim, t->shape, out);
    return;
  }
  int64_t bits = item_bits(t->dtype), step = 1;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    out[i] = t->shape[i] == 1 && is_huge(t->strides[i], bits) ? step : t->strides[i];
    if (__builtin_mul_overflow(out[i], t->shape[i], &step) || is_huge(step, bits)) step = 1;
  }
}

int64_t dlx_size(const DLTensor* t) {
  int64_t size = 1;
  if (!has_elements(t)) return 0; /* first, since other extents may overflow */
  for (int32_t i = 0; i < t->ndim; i++) size *= t->shape[i];
  return size;
}

int64_t dlx_nbytes(const DLTensor* t, uint64_t flags) {
  int64_t item = dlx_itemsize(t->dtype, flags);
  return item ? dlx_size(t) * item : round_to_bytes(dlx_size(t) * item_bits(t->dtype));
}

void dlx_extent(const DLTensor* t, uint64_t flags, int64_t* low, int64_t* high) {
  int64_t size, item = dlx_itemsize(t->dtype, flags);
  *low = *high = 0;
  if (!has_elements(t)) return;
  find_span(t, &size, low, high);
  if (item) {
    *low *= item;
    *high = (*high + 1) * item;
  } else {
    *low = -round_to_bytes(-*low * item_bits(t->dtype));
    *high = round_to_bytes((*high + 1) * item_bits(t->dtype));
  }
}

void dlx_compact_strides(int32_t ndim, const int64_t* shape, int64_t* strides) {
  int64_t step = 1;
  for (int32_t i = ndim - 1; i >= 0; i--) {
    int64_t below = step;
    /* Outside an empty dimension strides have no meaning, but must not overflow. */
    if (shape[i] > 1 && __builtin_mul_overflow(below, shape[i], &step)) below = step = 1;
    strides[i] = below;
  }
}

uint32_t dlx_layout(const DLTensor* t) {
  if (t->strides == NULL || dlx_size(t) < 2) return 0;

  int64_t steps[DLX_MAX_NDIM], extents[DLX_MAX_NDIM];
  int32_t n = 0;
  uint32_t features = 0;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    int64_t step = t->strides[i];
    if (t->shape[i] == 1) continue;
    if (step == 0) {
      features |= DLX_LAYOUT_ZERO;
      continue;
    }
    if (step < 0) {
      features |= DLX_LAYOUT_NEGATIVE;
      step = -step;
    }
    /* Insertion sort by step: few dimensions, mostly sorted. */
    int32_t at = n++;
    for (; at > 0 && steps[at - 1] > step; at--) {
      steps[at] = steps[at - 1];
      extents[at] = extents[at - 1];
      features |= DLX_LAYOUT_PERMUTED;
    }
    steps[at] = step;
    extents[at] = t->shape[i];
  }
  int64_t compact = 1;
  for (int32_t i = 0; i < n; i++) {
    if (steps[i] != compact) return features | DLX_LAYOUT_GAPS;
    compact *= extents[i];
  }
  return features;
}

const char* dlx_compiler(void) {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "an unknown compiler";
#endif
}

const char* dlx_compile_flags(void) {
#ifdef DLX_COMPILE_FLAGS
  return DLX_COMPILE_FLAGS;
#else
  return "";
#endif
}

const char* dlx_status_text(int status) {
  static const char* const texts[] = {
      [DLX_OK] = "fine",
      [-DLX_E_MEMORY] = "out of memory",
      [-DLX_E_VERSION] = "its DLPack major version is not 1",
      [-DLX_E_NDIM] = "its number of dimensions is negative or above 128",
      [-DLX_E_SHAPE] = "its shape is missing or has a negative extent",
      [-DLX_E_DTYPE] = "its dtype has no bits or no lanes",
      [-DLX_E_OVERFLOW] =
          "its size in bytes does not fit 63 bits, or its byte offset leaves the address space",
      [-DLX_E_FLAGS] = "it has unknown flags on a dtype below one byte",
      [-DLX_E_NULL] = "it has elements but no memory (null data)",
      [-DLX_E_DEVICE] = "its memory cannot be read by the host",
      [-DLX_E_PACKED] = "elements packed below a byte are only copied if they are contiguous",
      [-DLX_E_MISMATCH] = "source and destination differ in shape or dtype",
      [-DLX_E_CAPSULE] = "it is not a DLPack capsule",
      [-DLX_E_CONSUMED] = "this DLPack capsule was already consumed",
      [-DLX_E_READONLY] = "it is read-only",
      [-DLX_E_STREAM] = "host memory has no stream",
      [-DLX_E_COPY] = "it cannot be shared without a copy",
      [-DLX_E_NO_DRIVER] = "no CUDA driver was found",
      [-DLX_E_FORKED] = "the CUDA driver cannot be used in a forked child",
      [-DLX_E_DRIVER] = "a CUDA driver call failed",
      [-DLX_E_CAPTURE] =
          "a stream is capturing a graph, and work of another stream would break the capture",
      [-DLX_E_SCATTERED] = "its elements are too scattered for the copies of the CUDA driver",
      [-DLX_E_ARROW] = "its Arrow data is inconsistent",
  };
  enum { KNOWN = sizeof texts / sizeof *texts };
  return status <= 0 && status > -KNOWN ? texts[-status] : "unknown status";
}
