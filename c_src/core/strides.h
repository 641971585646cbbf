#ifndef DLX_STRIDES_H_
#define DLX_STRIDES_H_

#include <stdint.h>

/* Write byte strides in elements of `item` bytes, a power of two, since a division would take
 * longer. Errors: 0 = some are not whole elements (but at an extent of 1). */
static inline int dlx_whole_strides(int ndim, const int64_t* shape, const int64_t* bytes,
                                    int64_t item, int64_t* strides) {
  int shift = __builtin_ctzll((uint64_t)item);
  for (int i = 0; i < ndim; i++) {
    strides[i] = bytes[i] >> shift;
    if (strides[i] * item != bytes[i] && shape[i] > 1) return 0;
  }
  return 1;
}

#endif
