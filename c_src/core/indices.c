/* Checks and casts of the index arrays of sparse and ragged arrays: contiguous integers of 32 or 64
 * bits in host memory, at any address. */

#include <string.h>

#include "allocate.h"
#include "dlx.h"

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t read_at(const void* data, int bits, int64_t i) {
  int32_t narrow;
  int64_t wide;
  if (bits == 64)
    memcpy(&wide, (const char*)data + 8 * i, sizeof wide);
  else
    memcpy(&narrow, (const char*)data + 4 * i, sizeof narrow);
  return bits == 64 ? wide : narrow;
}

static const void* first(const DLTensor* t) {
  return (const char*)t->data + t->byte_offset;
}

/* ---- checks ---------------------------------------------------------------------------------- */

INLINE int64_t find_outside(const void* data, int bits, int64_t count, int64_t end) {
  for (int64_t block = 0; block < count; block += 1024) { /* without branches inside a block */
    int64_t stop = count - block < 1024 ? count : block + 1024, bad = 0;
    for (int64_t i = block; i < stop; i++) bad |= (uint64_t)read_at(data, bits, i) >= (uint64_t)end;
    for (int64_t i = block; bad; i++)
      if ((uint64_t)read_at(data, bits, i) >= (uint64_t)end) return i;
  }
  return -1;
}

int64_t dlx_find_outside(const DLTensor* indices, int64_t end) {
  int64_t count = dlx_size(indices);
  return indices->dtype.bits == 64 ? find_outside(first(indices), 64, count, end)
                                   : find_outside(first(indices), 32, count, end);
}

INLINE int64_t find_descent(const void* data, int bits, int64_t count) {
  for (int64_t block = 1; block < count; block += 1024) {
    int64_t stop = count - block < 1024 ? count : block + 1024, bad = 0;
    for (int64_t i = block; i < stop; i++)
      bad |= read_at(data, bits, i) < read_at(data, bits, i - 1);
    for (int64_t i = block; bad; i++)
      if (read_at(data, bits, i) < read_at(data, bits, i - 1)) return i;
  }
  return -1;
}

int64_t dlx_find_descent(const DLTensor* offsets) {
  int64_t count = dlx_size(offsets);
  return offsets->dtype.bits == 64 ? find_descent(first(offsets), 64, count)
                                   : find_descent(first(offsets), 32, count);
}

/* A hash table of the indices of one row, with open addressing. Entries of other rows are free. */
typedef struct {
  int64_t row, index; /* row: plus one */
} place;

typedef struct {
  place* places; /* NULL = not yet allocated */
  uint64_t mask;
} table;

/* Return 1 if a row already has an index, else add it. */
static int is_repeated(table* t, int64_t row, int64_t index) {
  uint64_t hash = (uint64_t)index * UINT64_C(0x9e3779b97f4a7c15), at = hash >> 32;
  for (;; at++) {
    place* p = &t->places[at & t->mask];
    if (p->row != row + 1) {
      *p = (place){row + 1, index};
      return 0;
    }
    if (p->index == index) return 1;
  }
}

/* Allocate a table that is half full with the longest row. Errors: 0 = no memory. */
static int allocate_table(const void* indptr, int bits, int64_t rows, table* t) {
  int64_t most = 1;
  for (int64_t row = 0; row < rows; row++) {
    int64_t count = read_at(indptr, bits, row + 1) - read_at(indptr, bits, row);
    if (count > most) most = count;
  }
  t->mask = 1;
  while (t->mask < 2 * (uint64_t)most) t->mask = t->mask << 1 | 1;
  t->places = dlx_allocate((size_t)(t->mask + 1) * sizeof *t->places);
  if (t->places) memset(t->places, 0, (size_t)(t->mask + 1) * sizeof *t->places);
  return t->places != NULL;
}

INLINE int64_t find_repeat(const void* indptr, int bits, const void* indices, int wide,
                           int64_t rows, int64_t end, table* seen) {
  for (int64_t row = 0; row < rows; row++) {
    int64_t from = read_at(indptr, bits, row), to = read_at(indptr, bits, row + 1), rises = 1;
    for (int64_t i = from + 1; i < to; i++)
      rises &= read_at(indices, wide, i) > read_at(indices, wide, i - 1);
    if (rises &&
        (from == to || (read_at(indices, wide, from) >= 0 && read_at(indices, wide, to - 1) < end)))
      continue;
    if (seen->places == NULL && !allocate_table(indptr, bits, rows, seen)) return -2;
    for (int64_t i = from; i < to; i++) {
      int64_t index = read_at(indices, wide, i);
      if (index < 0 || index >= end || is_repeated(seen, row, index)) return i;
    }
  }
  return -1;
}

int64_t dlx_find_repeat(const DLTensor* indptr, const DLTensor* indices, int64_t end) {
  table seen = {NULL, 0};
  int64_t rows = dlx_size(indptr) - 1, found;
  const void *p = first(indptr), *i = first(indices);
  int wide = indices->dtype.bits;
  if (indptr->dtype.bits == 64)
    found = wide == 64 ? find_repeat(p, 64, i, 64, rows, end, &seen)
                       : find_repeat(p, 64, i, 32, rows, end, &seen);
  else
    found = wide == 64 ? find_repeat(p, 32, i, 64, rows, end, &seen)
                       : find_repeat(p, 32, i, 32, rows, end, &seen);
  free(seen.places);
  return found;
}

/* ---- casts ----------------------------------------------------------------------------------- */

#define CAST(from_type, to_type)                         \
  {                                                      \
    const char* f = first(from);                         \
    to_type* t = (to_type*)first(to);                    \
    for (int64_t i = 0; i < count; i++) {                \
      from_type x;                                       \
      memcpy(&x, f + i * (int64_t)sizeof x, sizeof x);   \
      int64_t whole = (int64_t)x, value = whole - minus; \
      t[i] = (to_type)value;                             \
      lost |= value ^ (int64_t)t[i]; /* 0 if it fits */  \
      lost |= is_unsigned & (whole < 0);                 \
    }                                                    \
  }
#define CAST_FROM(from_type)   \
  {                            \
    if (to->dtype.bits == 64)  \
      CAST(from_type, int64_t) \
    else                       \
      CAST(from_type, int32_t) \
  }

int dlx_cast_indices(const DLTensor* from, const DLTensor* to, int64_t minus) {
  int64_t count = dlx_size(from), lost = 0, is_unsigned = from->dtype.code == kDLUInt;
  switch (from->dtype.code << 8 | from->dtype.bits) {
    case kDLInt << 8 | 8:
      CAST_FROM(int8_t) break;
    case kDLInt << 8 | 16:
      CAST_FROM(int16_t) break;
    case kDLInt << 8 | 32:
      CAST_FROM(int32_t) break;
    case kDLInt << 8 | 64:
      CAST_FROM(int64_t) break;
    case kDLUInt << 8 | 8:
      CAST_FROM(uint8_t) break;
    case kDLUInt << 8 | 16:
      CAST_FROM(uint16_t) break;
    case kDLUInt << 8 | 32:
      CAST_FROM(uint32_t) break;
    case kDLUInt << 8 | 64:
      CAST_FROM(uint64_t) break;
    default:
      return DLX_E_DTYPE;
  }
  return lost ? DLX_E_MISMATCH : DLX_OK;
}
