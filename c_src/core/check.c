/* Check a tensor against a consumer's capabilities. */

#include "dlx.h"

enum { ANY_LAYOUT = DLX_LAYOUT_NEGATIVE | DLX_LAYOUT_ZERO | DLX_LAYOUT_GAPS | DLX_LAYOUT_PERMUTED };

int64_t dlx_natural_alignment(DLDataType dtype) {
  int64_t bits = dtype.code == kDLComplex ? dtype.bits / 2 : dtype.bits;
  if (bits < 16 || bits % 8 != 0 || (bits & (bits - 1)) != 0) return 1;
  return bits / 8;
}

int64_t dlx_wanted_alignment(DLDataType dtype, const dlx_capabilities* consumer) {
  return consumer->min_alignment ? consumer->min_alignment : dlx_natural_alignment(dtype);
}

static int takes_dtype(DLDataType dtype, const dlx_capabilities* consumer) {
  if (consumer->n_dtypes < 0) return 1;
  uint32_t wanted = dtype.code | (uint32_t)dtype.bits << 8 | (uint32_t)dtype.lanes << 16;
  for (int32_t i = 0; i < consumer->n_dtypes; i++) {
    if (consumer->dtypes[i] == wanted) return 1;
  }
  return 0;
}

static int takes_device(int32_t device_type, const dlx_capabilities* consumer) {
  if (consumer->device_types == UINT32_MAX) return 1;
  return device_type >= 0 && device_type < 32 && (consumer->device_types >> device_type & 1);
}

static int is_aligned(const DLTensor* t, const dlx_capabilities* consumer) {
  if (!dlx_data_is_address(t->device.device_type)) return 1;
  uintptr_t wanted = (uintptr_t)dlx_wanted_alignment(t->dtype, consumer);
  return ((uintptr_t)t->data + t->byte_offset) % wanted == 0;
}

static int takes_extents(const DLTensor* t, const dlx_capabilities* consumer) {
  uint64_t product = 1, most = UINT64_MAX;
  if (consumer->empty_extents == 0) return 1;
  if (consumer->empty_extents & DLX_EXTENTS_NONE) return 0;
  if (consumer->empty_extents & DLX_EXTENTS_BYTES) {
    product = ((uint64_t)t->dtype.bits * t->dtype.lanes + 7) / 8;
    most = INT64_MAX;
  }
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0 && consumer->empty_extents & DLX_EXTENTS_LEADING) return 1;
    if (t->shape[i] == 0) continue;
    if (__builtin_mul_overflow(product, (uint64_t)t->shape[i], &product) || product > most)
      return 0;
  }
  return 1;
}

uint32_t dlx_check(const DLTensor* t, uint64_t flags, const dlx_capabilities* consumer) {
  uint32_t found = 0;
  if (!takes_device(t->device.device_type, consumer)) found |= DLX_INCOMPATIBLE_DEVICE;
  if (!takes_dtype(t->dtype, consumer)) found |= DLX_INCOMPATIBLE_DTYPE;
  if (t->ndim > consumer->max_ndim || t->ndim < consumer->min_ndim) found |= DLX_INCOMPATIBLE_NDIM;
  if (dlx_itemsize(t->dtype, 0) == 0) {
    int padded = (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) != 0;
    if (padded && !consumer->takes_padded) found |= DLX_INCOMPATIBLE_PADDED;
    if (!padded && !consumer->takes_packed) found |= DLX_INCOMPATIBLE_PACKED;
  }
  if (dlx_size(t) == 0) {
    if (t->data == NULL && !consumer->takes_null) found |= DLX_INCOMPATIBLE_NULL;
    if (!takes_extents(t, consumer)) found |= DLX_INCOMPATIBLE_EXTENTS;
    return found;
  }
  if ((flags & DLPACK_FLAG_BITMASK_READ_ONLY) && !consumer->keeps_readonly)
    found |= DLX_INCOMPATIBLE_READONLY;
  uint32_t unsupported = ANY_LAYOUT & ~consumer->layouts;
  uint32_t rejected = unsupported ? dlx_layout(t) & unsupported : 0;
  if (rejected & DLX_LAYOUT_NEGATIVE) found |= DLX_INCOMPATIBLE_NEGATIVE;
  if (rejected & DLX_LAYOUT_ZERO) found |= DLX_INCOMPATIBLE_ZERO;
  if (rejected & DLX_LAYOUT_GAPS) found |= DLX_INCOMPATIBLE_GAPS;
  if (rejected & DLX_LAYOUT_PERMUTED) found |= DLX_INCOMPATIBLE_PERMUTED;
  if (!is_aligned(t, consumer)) found |= DLX_INCOMPATIBLE_UNALIGNED;
  return found;
}
