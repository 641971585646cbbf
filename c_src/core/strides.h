#ifndef DLX_STRIDES_H_
#define DLX_STRIDES_H_

#include <stdint.h>

/* Convert byte strides to elements of `item` bytes, a power of two, because a division would take
 * longer. `strides` may be `bytes`. Errors: 0 = not a multiple, at an extent above 1. */
static inline int dlx_convert_strides(int ndim, const int64_t* shape, const int64_t* bytes,
                                      int64_t item, int64_t* strides) {
  int shift = __builtin_ctzll((uint64_t)item);
  for (int i = 0; i < ndim; i++) {
    int64_t step = bytes[i];
    strides[i] = step >> shift;
    if (strides[i] * item != step && shape[i] > 1) return 0;
  }
  return 1;
}

#endif
