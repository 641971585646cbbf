/* Checks of the index arrays of sparse and ragged arrays: contiguous integers of 32 or 64
 * bits in host memory, at any address. */

#include "indices.h"

#include "allocate.h"
#include "dlx.h"

#define INLINE static inline __attribute__((always_inline))

static const void* first(const DLTensor* t) {
  return (const char*)t->data + t->byte_offset;
}

/* With `descents`: whether an offset is below the one before it. */
INLINE int64_t is_bad(const void* data, int bits, int64_t i, int descents, int64_t end) {
  int64_t index = dlx_index_at(data, bits, i);
  return descents ? dlx_index_at(data, bits, i - 1) > index : (uint64_t)index >= (uint64_t)end;
}

INLINE int64_t find_bad(const DLTensor* t, int bits, int descents, int64_t end) {
  const void* data = first(t);
  int64_t count = dlx_size(t), bad = 0;
  for (int64_t i = descents; i < count; i++) bad |= is_bad(data, bits, i, descents, end);
  for (int64_t i = descents; bad; i++) /* the first loop has no branches */
    if (is_bad(data, bits, i, descents, end)) return i;
  return -1;
}

int64_t dlx_find_outside(const DLTensor* indices, int64_t end) {
  return indices->dtype.bits == 64 ? find_bad(indices, 64, 0, end) : find_bad(indices, 32, 0, end);
}

int64_t dlx_find_descent(const DLTensor* offsets) {
  return offsets->dtype.bits == 64 ? find_bad(offsets, 64, 1, 0) : find_bad(offsets, 32, 1, 0);
}

/* A hash table of the indices of one row, with open addressing. Entries of other rows are free. */
typedef struct {
  int64_t row, index; /* row: plus one */
} place;

typedef struct {
  place* places; /* NULL = not yet allocated */
  uint64_t mask;
} table;

/* Allocate a table that is half full with the longest row. Errors: 0 = no memory. */
static int allocate_table(const void* indptr, int bits, int64_t rows, table* t) {
  int64_t most = 1;
  for (int64_t row = 0; row < rows; row++) {
    int64_t count = dlx_index_at(indptr, bits, row + 1) - dlx_index_at(indptr, bits, row);
    if (count > most) most = count;
  }
  for (t->mask = 1; t->mask < 2 * (uint64_t)most;) t->mask = t->mask << 1 | 1;
  size_t bytes = (size_t)(t->mask + 1) * sizeof *t->places;
  t->places = dlx_allocate(bytes);
  if (t->places) memset(t->places, 0, bytes);
  return t->places != NULL;
}

/* Return 1 if a row already has an index, else add it. */
static int is_repeated(const table* t, int64_t row, int64_t index) {
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

INLINE int64_t find_repeat(const void* indptr, int bits, int64_t rows, const void* indices,
                           int wide, int64_t end, int rising, table* seen) {
  for (int64_t row = 0, from, to = 0; row < rows; row++) {
    int64_t rises = 1;
    from = to;
    to = dlx_index_at(indptr, bits, row + 1);
    for (int64_t i = from + 1; i < to; i++)
      rises &= dlx_index_at(indices, wide, i) > dlx_index_at(indices, wide, i - 1);
    if (from == to || (rises && dlx_index_at(indices, wide, from) >= 0 &&
                       dlx_index_at(indices, wide, to - 1) < end))
      continue;
    if (!rising && seen->places == NULL && !allocate_table(indptr, bits, rows, seen)) return -2;
    for (int64_t i = from; i < to; i++) {
      int64_t index = dlx_index_at(indices, wide, i);
      if (index < 0 || index >= end) return i;
      if (rising ? i > from && index <= dlx_index_at(indices, wide, i - 1)
                 : is_repeated(seen, row, index))
        return i;
    }
  }
  return -1;
}

int64_t dlx_find_repeat(const DLTensor* indptr, const DLTensor* indices, int64_t end, int rising) {
  table seen = {NULL, 0};
  int64_t rows = dlx_size(indptr) - 1, found;
  int wide = indices->dtype.bits;
  const void *p = first(indptr), *i = first(indices);
  if (indptr->dtype.bits == 64)
    found = wide == 64 ? find_repeat(p, 64, rows, i, 64, end, rising, &seen)
                       : find_repeat(p, 64, rows, i, 32, end, rising, &seen);
  else
    found = wide == 64 ? find_repeat(p, 32, rows, i, 64, end, rising, &seen)
                       : find_repeat(p, 32, rows, i, 32, end, rising, &seen);
  free(seen.places);
  return found;
}

int64_t dlx_find_disorder(const DLTensor* const* rows, int32_t ndim) {
  int64_t count = dlx_size(rows[0]);
  for (int64_t i = 1; i < count; i++) {
    int64_t rise = 0;
    for (int32_t k = 0; k < ndim && rise == 0; k++) {
      int bits = rows[k]->dtype.bits;
      const void* row = first(rows[k]);
      rise = dlx_index_at(row, bits, i) - dlx_index_at(row, bits, i - 1);
    }
    if (rise <= 0) return i;
  }
  return -1;
}

void dlx_subtract(const DLTensor* from, int64_t minus, const DLTensor* to) {
  int64_t count = dlx_size(from), *wide = (int64_t*)first(to);
  int32_t* narrow = (int32_t*)first(to);
  if (from->dtype.bits == 64)
    for (int64_t i = 0; i < count; i++) wide[i] = dlx_index_at(first(from), 64, i) - minus;
  else
    for (int64_t i = 0; i < count; i++)
      narrow[i] = (int32_t)(dlx_index_at(first(from), 32, i) - minus);
}
