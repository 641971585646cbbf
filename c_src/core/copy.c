/* Strided copies on the host. Axes are sorted so that writes go forward in memory, then merged. The
 * inner two dimensions are a loop: by memcpy if rows are contiguous on both sides, by tiles if the
 * sides differ in their inner axis. */

#include "copy.h"

#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { TILE = 32 /* elements per side: both sides of a tile fit in the L1 cache */ };

typedef struct {
  uint64_t low, high;
} sixteen;

/* A memcpy of constant size compiles to an unaligned load and store. Four elements are read before
 * they are written, so that the loads overlap. */
#define PLANE(name, T)                                                                         \
  static void name(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner) { \
    const int64_t item = sizeof(T), step = inner->from, there = inner->to;                     \
    for (int64_t i = 0; i < outer->extent; i++) {                                              \
      char* t = to + i * outer->to;                                                            \
      const char* f = from + i * outer->from;                                                  \
      int64_t j = 0;                                                                           \
      for (; j + 4 <= inner->extent; j += 4, t += 4 * there, f += 4 * step) {                  \
        T a, b, c, d;                                                                          \
        memcpy(&a, f, item), memcpy(&b, f + step, item);                                       \
        memcpy(&c, f + 2 * step, item), memcpy(&d, f + 3 * step, item);                        \
        memcpy(t, &a, item), memcpy(t + there, &b, item);                                      \
        memcpy(t + 2 * there, &c, item), memcpy(t + 3 * there, &d, item);                      \
      }                                                                                        \
      for (; j < inner->extent; j++, t += there, f += step) memcpy(t, f, item);                \
    }                                                                                          \
  }

PLANE(copy_1, uint8_t)
PLANE(copy_2, uint16_t)
PLANE(copy_4, uint32_t)
PLANE(copy_8, uint64_t)
PLANE(copy_16, sixteen)

static void copy_any(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                     int64_t item) {
  for (int64_t i = 0; i < outer->extent; i++) {
    for (int64_t j = 0; j < inner->extent; j++) {
      memcpy(to + i * outer->to + j * inner->to, from + i * outer->from + j * inner->from,
             (size_t)item);
    }
  }
}

static void copy_plane(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                       int64_t item) {
  static void (*const planes[])(char*, const char*, const dlx_axis*, const dlx_axis*) = {
      [1] = copy_1, [2] = copy_2, [4] = copy_4, [8] = copy_8, [16] = copy_16};
  if (item <= 16 && planes[item])
    planes[item](to, from, outer, inner);
  else
    copy_any(to, from, outer, inner, item);
}

/* In pieces: glibc 2.36 copies hundreds of MB more slowly if page offsets differ. */
static void copy_run(char* to, const char* from, size_t nbytes) {
  enum { PIECE = 4 << 20 };
  for (; nbytes > PIECE; nbytes -= PIECE, to += PIECE, from += PIECE) memcpy(to, from, PIECE);
  memcpy(to, from, nbytes);
}

static void copy_rows(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                      int64_t item) {
  size_t run = (size_t)(inner->extent * item);
  for (int64_t i = 0; i < outer->extent; i++)
    copy_run(to + i * outer->to, from + i * outer->from, run);
}

#ifdef __SSE2__

static inline void transpose_4(char* to, int64_t to_row, const char* from, int64_t from_row) {
  __m128i a = _mm_loadu_si128((const void*)from);
  __m128i b = _mm_loadu_si128((const void*)(from + from_row));
  __m128i c = _mm_loadu_si128((const void*)(from + 2 * from_row));
  __m128i d = _mm_loadu_si128((const void*)(from + 3 * from_row));
  __m128i low_ab = _mm_unpacklo_epi32(a, b), low_cd = _mm_unpacklo_epi32(c, d);
  __m128i high_ab = _mm_unpackhi_epi32(a, b), high_cd = _mm_unpackhi_epi32(c, d);
  _mm_storeu_si128((void*)to, _mm_unpacklo_epi64(low_ab, low_cd));
  _mm_storeu_si128((void*)(to + to_row), _mm_unpackhi_epi64(low_ab, low_cd));
  _mm_storeu_si128((void*)(to + 2 * to_row), _mm_unpacklo_epi64(high_ab, high_cd));
  _mm_storeu_si128((void*)(to + 3 * to_row), _mm_unpackhi_epi64(high_ab, high_cd));
}

static inline void transpose_8(char* to, int64_t to_row, const char* from, int64_t from_row) {
  __m128i a = _mm_loadu_si128((const void*)from);
  __m128i b = _mm_loadu_si128((const void*)(from + from_row));
  _mm_storeu_si128((void*)to, _mm_unpacklo_epi64(a, b));
  _mm_storeu_si128((void*)(to + to_row), _mm_unpackhi_epi64(a, b));
}

/* Transpose four rows of `to` at a time, in a third to a half of the time of tiles. Return the
 * number of finished rows; the caller copies the rest. */
static int64_t transpose_rows(char* to, const char* from, const dlx_axis* outer,
                              const dlx_axis* inner, int64_t item) {
  int64_t a = 0, columns = inner->extent & ~(int64_t)3;
  int applies = columns && inner->to == item && outer->from == item && (item == 4 || item == 8);
  for (; applies && a + 4 <= outer->extent; a += 4) {
    char* t = to + a * outer->to;
    const char* f = from + a * item;
    for (int64_t b = 0; b < columns; b += 4, t += 4 * item, f += 4 * inner->from) {
      if (item == 4) {
        transpose_4(t, outer->to, f, inner->from);
        continue;
      }
      for (int k = 0; k < 4; k++) {
        int64_t row = k & 2, column = 2 * (k & 1);
        transpose_8(t + row * outer->to + column * item, outer->to,
                    f + column * inner->from + row * item, inner->from);
      }
    }
    dlx_axis four = {4, outer->from, outer->to};
    dlx_axis last = {inner->extent - columns, inner->from, inner->to};
    copy_plane(t, f, &four, &last, item);
  }
  return a;
}

#else
#define transpose_rows(to, from, outer, inner, item) 0
#endif

static void copy_tiles(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                       int64_t item) {
  dlx_axis o = *outer, i = *inner;
  for (int64_t a = transpose_rows(to, from, outer, inner, item); a < outer->extent; a += TILE) {
    o.extent = outer->extent - a < TILE ? outer->extent - a : TILE;
    for (int64_t b = 0; b < inner->extent; b += TILE) {
      i.extent = inner->extent - b < TILE ? inner->extent - b : TILE;
      copy_plane(to + a * o.to + b * i.to, from + a * o.from + b * i.from, &o, &i, item);
    }
  }
}

/* Sort by write stride, then by read stride; the outermost axis has the largest. */
static int comes_before(const dlx_axis* a, const dlx_axis* b) {
  if (llabs(a->to) != llabs(b->to)) return llabs(a->to) > llabs(b->to);
  return llabs(a->from) > llabs(b->from);
}

int dlx_find_axes(const DLTensor* from, const DLTensor* to, int64_t from_item, int64_t to_item,
                  dlx_axis* axes) {
  int64_t from_step = from_item, to_step = to_item;
  int n = 0;
  for (int32_t d = from->ndim - 1; d >= 0; d--) {
    if (from->shape[d] == 1) continue;
    dlx_axis next = {from->shape[d], from->strides ? from->strides[d] * from_item : from_step,
                     to->strides ? to->strides[d] * to_item : to_step};
    from_step *= next.extent;
    to_step *= next.extent;
    int at = n++;
    for (; at > 0 && !comes_before(&axes[at - 1], &next); at--) axes[at] = axes[at - 1];
    axes[at] = next;
  }
  int merged = 0;
  for (int i = 1; i < n; i++) {
    dlx_axis* outer = &axes[merged];
    if (outer->from == axes[i].from * axes[i].extent && outer->to == axes[i].to * axes[i].extent) {
      *outer = (dlx_axis){outer->extent * axes[i].extent, axes[i].from, axes[i].to};
    } else {
      axes[++merged] = axes[i];
    }
  }
  return n ? merged + 1 : 0;
}

/* Move the axis with the smallest read stride next to the innermost axis; 0 = it is innermost. */
static int pair_for_tiles(dlx_axis* axes, int n) {
  int tightest = n - 1;
  for (int i = n - 2; i >= 0; i--) {
    if (axes[i].from != 0 && llabs(axes[i].from) < llabs(axes[tightest].from)) tightest = i;
  }
  if (tightest == n - 1) return 0;
  dlx_axis moved = axes[tightest];
  memmove(&axes[tightest], &axes[tightest + 1], (size_t)(n - 2 - tightest) * sizeof(dlx_axis));
  axes[n - 2] = moved;
  return 1;
}

static void copy_planes(char* to, const char* from, dlx_axis* axes, int n, int64_t item) {
  static const dlx_axis single = {1, 0, 0};
  int tiled = n > 1 && pair_for_tiles(axes, n);
  const dlx_axis* inner = n > 0 ? &axes[n - 1] : &single;
  const dlx_axis* outer = n > 1 ? &axes[n - 2] : &single;
  int contiguous = inner->from == item && inner->to == item && inner->extent * item >= 64;
  int64_t index[DLX_MAX_NDIM] = {0};
  do {
    if (contiguous) {
      copy_rows(to, from, outer, inner, item);
    } else if (tiled) {
      copy_tiles(to, from, outer, inner, item);
    } else {
      copy_plane(to, from, outer, inner, item);
    }
  } while (dlx_next(axes, n - 2, index, &to, &from));
}

int dlx_has_same_elements(const DLTensor* a, const DLTensor* b) {
  if (a->ndim != b->ndim || a->ndim > DLX_MAX_NDIM ||
      memcmp(&a->dtype, &b->dtype, sizeof a->dtype) != 0)
    return 0;
  for (int32_t i = 0; i < a->ndim; i++) {
    if (a->shape[i] != b->shape[i]) return 0;
  }
  return 1;
}

int dlx_check_alike(const DLTensor* from, const DLTensor* to) {
  if (!dlx_host_readable(from->device.device_type) || !dlx_host_readable(to->device.device_type))
    return DLX_E_DEVICE;
  return dlx_has_same_elements(from, to) ? DLX_OK : DLX_E_MISMATCH;
}

int dlx_copy(const DLTensor* from, const DLTensor* to, uint64_t flags) {
  enum { SMALL = 4 << 10 }; /* bytes; sorting the axes would take longer than the copy */
  int status = dlx_check_alike(from, to);
  if (status != DLX_OK || dlx_size(from) == 0) return status;
  char* target = (char*)to->data + to->byte_offset;
  const char* source = (const char*)from->data + from->byte_offset;
  int64_t item = dlx_itemsize(from->dtype, flags);
  int is_run = dlx_is_plain(from, 1) && dlx_is_plain(to, 1);
  int64_t nbytes = dlx_nbytes(from, flags);
  if (item == 0 || (is_run && nbytes <= SMALL)) {
    if (!is_run && (dlx_layout(from) || dlx_layout(to))) return DLX_E_PACKED;
    copy_run(target, source, (size_t)nbytes);
    return DLX_OK;
  }
  dlx_axis axes[DLX_MAX_NDIM];
  int n = dlx_find_axes(from, to, item, item, axes);
  dlx_copy_in_parts(copy_planes, target, source, axes, n, nbytes, item);
  return DLX_OK;
}
