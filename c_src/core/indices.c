/* Checks of the index arrays of sparse and ragged arrays: contiguous integers of 32 or 64
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
                           int64_t rows, int64_t end, int rising, table* seen) {
  for (int64_t row = 0; row < rows; row++) {
    int64_t from = read_at(indptr, bits, row), to = read_at(indptr, bits, row + 1), rises = 1;
    for (int64_t i = from + 1; i < to; i++)
      rises &= read_at(indices, wide, i) > read_at(indices, wide, i - 1);
    if (rises &&
        (from == to || (read_at(indices, wide, from) >= 0 && read_at(indices, wide, to - 1) < end)))
      continue;
    if (!rising && seen->places == NULL && !allocate_table(indptr, bits, rows, seen)) return -2;
    for (int64_t i = from; i < to; i++) {
      int64_t index = read_at(indices, wide, i);
      if (index < 0 || index >= end) return i;
      if (rising ? i > from && index <= read_at(indices, wide, i - 1)
                 : is_repeated(seen, row, index))
        return i;
    }
  }
  return -1;
}

int64_t dlx_find_repeat(const DLTensor* indptr, const DLTensor* indices, int64_t end, int rising) {
  table seen = {NULL, 0};
  int64_t rows = dlx_size(indptr) - 1, found;
  const void *p = first(indptr), *i = first(indices);
  int wide = indices->dtype.bits;
  if (indptr->dtype.bits == 64)
    found = wide == 64 ? find_repeat(p, 64, i, 64, rows, end, rising, &seen)
                       : find_repeat(p, 64, i, 32, rows, end, rising, &seen);
  else
    found = wide == 64 ? find_repeat(p, 32, i, 64, rows, end, rising, &seen)
                       : find_repeat(p, 32, i, 32, rows, end, rising, &seen);
  free(seen.places);
  return found;
}

int64_t dlx_find_disorder(const DLTensor* const* rows, int32_t ndim) {
  int64_t count = dlx_size(rows[0]);
  for (int64_t i = 1; i < count; i++) {
    int64_t rise = 0;
    for (int32_t k = 0; k < ndim && rise == 0; k++) {
      int bits = rows[k]->dtype.bits;
      rise = read_at(first(rows[k]), bits, i) - read_at(first(rows[k]), bits, i - 1);
    }
    if (rise <= 0) return i;
  }
  return -1;
}

void dlx_subtract(const DLTensor* from, int64_t minus, const DLTensor* to) {
  int64_t count = dlx_size(from);
  if (from->dtype.bits == 64) {
    int64_t* t = (int64_t*)first(to);
    for (int64_t i = 0; i < count; i++) t[i] = read_at(first(from), 64, i) - minus;
  } else {
    int32_t* t = (int32_t*)first(to);
    for (int64_t i = 0; i < count; i++) t[i] = (int32_t)(read_at(first(from), 32, i) - minus);
  }
}
