#ifndef DLX_INDICES_H_
#define DLX_INDICES_H_

#include <stdint.h>
#include <string.h>

/* Read an integer of 32 or 64 bits, at any address. */
static inline __attribute__((always_inline)) int64_t dlx_index_at(const void* data, int bits,
                                                                  int64_t i) {
  int32_t narrow;
  int64_t wide;
  if (bits == 64)
    memcpy(&wide, (const char*)data + 8 * i, sizeof wide);
  else
    memcpy(&narrow, (const char*)data + 4 * i, sizeof narrow);
  return bits == 64 ? wide : narrow;
}

#endif
