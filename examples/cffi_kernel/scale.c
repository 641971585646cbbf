#include "scale.h"

/* Multiply every element along the dimensions from `dim` on; strides are in elements, of any sign.
 */
static void scale_from(const DLTensor* t, int32_t dim, char* at, int64_t itemsize, double factor) {
  if (dim == t->ndim) {
    if (t->dtype.bits == 32)
      *(float*)at *= (float)factor;
    else
      *(double*)at *= factor;
    return;
  }
  for (int64_t i = 0; i < t->shape[dim]; i++)
    scale_from(t, dim + 1, at + i * t->strides[dim] * itemsize, itemsize, factor);
}

/* Return 0, or -1 for another dtype than float32 and float64, or another device. */
int scale(DLTensor* t, double factor) {
  if (t->device.device_type != kDLCPU) return -1;
  if (t->dtype.code != kDLFloat || t->dtype.lanes != 1) return -1;
  if (t->dtype.bits != 32 && t->dtype.bits != 64) return -1;
  scale_from(t, 0, (char*)t->data + t->byte_offset, t->dtype.bits / 8, factor);
  return 0;
}
