/* Checks of the index arrays of sparse and ragged arrays: contiguous integers of 32 or 64
 * bits in host memory, at any address. */

#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC optimize("O3") /* vectors, which clang uses anyway */
#endif

#include "indices.h"

#include "allocate.h"
#include "dlx.h"

#define INLINE static inline __attribute__((always_inline))

static const void* first(const DLTensor* t) {
  return (const char*)t->data + t->byte_offset;
}

/* With `descents`: whether an offset is below the one before it. Numbers of 32 bits are not
 * widened, so that the compiler finds vectors. */
INLINE int is_bad(const void* data, int bits, int64_t i, int descents, int64_t end) {
  int64_t index = dlx_index_at(data, bits, i);
  if (descents && bits == 32) return (int32_t)dlx_index_at(data, 32, i - 1) > (int32_t)index;
  if (descents) return dlx_index_at(data, bits, i - 1) > index;
  if (bits == 32) return (uint32_t)index >= (uint32_t)(end < INT64_C(1) << 31 ? end : 1u << 31);
  return (uint64_t)index >= (uint64_t)end;
}

INLINE int64_t find_bad(const DLTensor* t, int bits, int descents, int64_t end) {
  const void* data = first(t);
  int64_t count = dlx_size(t);
  int bad = 0;
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
  int64_t end, index; /* end: of the row */
} place;

typedef struct {
  place* places;
  uint64_t mask;
} table;

/* Return 1 if a row that ends there already has an index, else add it. */
static int is_repeated(const table* t, int64_t end, int64_t index) {
  uint64_t at = (uint64_t)index * UINT64_C(0x9e3779b97f4a7c15) >> 32;
  place* p;
  while ((p = &t->places[at++ & t->mask])->end == end)
    if (p->index == index) return 1;
  *p = (place){end, index};
  return 0;
}

INLINE int64_t find_repeat(const DLTensor* indptr, const void* indices, int bits, int64_t end,
                           int rising, table* seen) {
  int64_t rows = dlx_size(indptr) - 1, from, to = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t rises = 1;
    from = to;
    to = dlx_index_at(first(indptr), indptr->dtype.bits, row + 1);
    for (int64_t i = from + 1; i < to; i++)
      rises &= dlx_index_at(indices, bits, i) > dlx_index_at(indices, bits, i - 1);
    if (from == to || (rises && dlx_index_at(indices, bits, from) >= 0 &&
                       dlx_index_at(indices, bits, to - 1) < end))
      continue;
    if (!rising && seen->mask < 2 * (uint64_t)(to - from)) {
      while (seen->mask < 2 * (uint64_t)(to - from)) seen->mask = seen->mask << 1 | 1;
      size_t bytes = (size_t)(seen->mask + 1) * sizeof *seen->places;
      free(seen->places);
      if ((seen->places = dlx_allocate(bytes)) == NULL) return -2;
      memset(seen->places, 0, bytes);
    }
    for (int64_t i = from; i < to; i++) {
      int64_t index = dlx_index_at(indices, bits, i);
      if (index < 0 || index >= end) return i;
      if (rising ? i > from && index <= dlx_index_at(indices, bits, i - 1)
                 : is_repeated(seen, to, index))
        return i;
    }
  }
  return -1;
}

int64_t dlx_find_repeat(const DLTensor* indptr, const DLTensor* indices, int64_t end, int rising) {
  table seen = {NULL, 0};
  int64_t found = indices->dtype.bits == 64
                      ? find_repeat(indptr, first(indices), 64, end, rising, &seen)
                      : find_repeat(indptr, first(indices), 32, end, rising, &seen);
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
  int64_t count = dlx_size(from);
  void* made = (void*)first(to);
  if (from->dtype.bits == 64)
    for (int64_t i = 0; i < count; i++)
      ((int64_t*)made)[i] = dlx_index_at(first(from), 64, i) - minus;
  else
    for (int64_t i = 0; i < count; i++)
      ((int32_t*)made)[i] = (int32_t)(dlx_index_at(first(from), 32, i) - minus);
}
