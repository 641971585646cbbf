/* Copy elements smaller than a byte between packed memory (the first element in the lowest bits)
 * and memory with one byte for each. */

#include <string.h>

#include "allocate.h"
#include "copy.h"

typedef struct {
  uint8_t* at;
  int bits;
} packed;

static uint8_t read_bits(packed from, int64_t index) {
  int64_t bit = index * from.bits;
  const uint8_t* byte = from.at + bit / 8;
  int shift = (int)(bit % 8);
  unsigned word = byte[0];
  if (shift + from.bits > 8) word |= (unsigned)byte[1] << 8;
  return (uint8_t)(word >> shift & ((1u << from.bits) - 1));
}

/* The memory was cleared: bits that are not yet written are 0. */
static void write_bits(packed to, int64_t index, uint8_t value) {
  int64_t bit = index * to.bits;
  uint8_t* byte = to.at + bit / 8;
  int shift = (int)(bit % 8);
  unsigned word = (value & ((1u << to.bits) - 1)) << shift;
  byte[0] |= (uint8_t)word;
  if (shift + to.bits > 8) byte[1] |= (uint8_t)(word >> 8);
}

static uint8_t* first_byte(const DLTensor* t) {
  return (uint8_t*)t->data + t->byte_offset;
}

/* Visit the padded side in row-major order; the packed side is contiguous. */
static void repack_each(packed dense, const DLTensor* loose, int packs) {
  dlx_axis axes[DLX_MAX_NDIM];
  int64_t index[DLX_MAX_NDIM] = {0}, i = 0, below = 1;
  for (int32_t d = loose->ndim - 1; d >= 0; below *= loose->shape[d--]) {
    int64_t stride = loose->strides ? loose->strides[d] : below;
    axes[d] = (dlx_axis){loose->shape[d], 0, loose->shape[d] == 1 ? 0 : stride};
  }
  char* at = (char*)first_byte(loose);
  const char* unused = at; /* NULL + 0 is undefined in C */
  do {
    if (packs) {
      write_bits(dense, i++, (uint8_t)*at);
    } else {
      *at = (char)read_bits(dense, i++);
    }
  } while (dlx_next(axes, loose->ndim, index, &at, &unused));
}

int dlx_repack(const DLTensor* from, uint64_t from_flags, const DLTensor* to, uint64_t to_flags) {
  int status = dlx_check_alike(from, to);
  if (status != DLX_OK) return status;
  int packs = dlx_itemsize(to->dtype, to_flags) == 0;
  if (from->dtype.bits >= 8 || from->dtype.lanes != 1 ||
      packs == (dlx_itemsize(from->dtype, from_flags) == 0)) {
    return DLX_E_PACKED;
  }
  const DLTensor *dense = packs ? to : from, *loose = packs ? from : to;
  if (dlx_layout(dense)) return DLX_E_PACKED;
  if (dlx_size(from) == 0) return DLX_OK;
  if (packs) memset(first_byte(to), 0, (size_t)dlx_nbytes(to, to_flags));
  repack_each((packed){first_byte(dense), dense->dtype.bits}, loose, packs);
  return DLX_OK;
}
