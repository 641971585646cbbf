/* Strided copies on the host. Axes are sorted so that writing goes forward in memory, neighbours
 * that form one run are merged, and what is left is a two-dimensional loop under an odometer: rows
 * by memcpy where they are contiguous on both sides, tiles where the two sides disagree about the
 * inner axis. */

#include "copy.h"

#include <stdlib.h>
#include <string.h>

enum { TILE = 32 /* elements a side: both sides of a tile stay in the first-level cache */ };

/* Fixed-size memcpy compiles to one load and one store and minds no alignment. */
#define PLANE(name, item)                                                                          \
  static void name(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner) {     \
    for (int64_t i = 0; i < outer->extent; i++) {                                                  \
      char* t = to + i * outer->to;                                                                \
      const char* f = from + i * outer->from;                                                      \
      int64_t step = inner->from;                                                                  \
      if (inner->to == (item)) {                                                                   \
        for (int64_t j = 0; j < inner->extent; j++) memcpy(t + j * (item), f + j * step, item);    \
      } else {                                                                                     \
        for (int64_t j = 0; j < inner->extent; j++) memcpy(t + j * inner->to, f + j * step, item); \
      }                                                                                            \
    }                                                                                              \
  }

PLANE(plane_1, 1)
PLANE(plane_2, 2)
PLANE(plane_4, 4)
PLANE(plane_8, 8)
PLANE(plane_16, 16)

static void plane_any(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                      int64_t item) {
  for (int64_t i = 0; i < outer->extent; i++) {
    for (int64_t j = 0; j < inner->extent; j++) {
      memcpy(to + i * outer->to + j * inner->to, from + i * outer->from + j * inner->from,
             (size_t)item);
    }
  }
}

static void plane(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                  int64_t item) {
  switch (item) {
    case 1:
      plane_1(to, from, outer, inner);
      return;
    case 2:
      plane_2(to, from, outer, inner);
      return;
    case 4:
      plane_4(to, from, outer, inner);
      return;
    case 8:
      plane_8(to, from, outer, inner);
      return;
    case 16:
      plane_16(to, from, outer, inner);
      return;
    default:
      plane_any(to, from, outer, inner, item);
  }
}

static void rows(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                 int64_t item) {
  size_t run = (size_t)(inner->extent * item);
  for (int64_t i = 0; i < outer->extent; i++)
    memcpy(to + i * outer->to, from + i * outer->from, run);
}

static void tiles(char* to, const char* from, const dlx_axis* outer, const dlx_axis* inner,
                  int64_t item) {
  dlx_axis o = *outer, i = *inner;
  for (int64_t a = 0; a < outer->extent; a += TILE) {
    o.extent = outer->extent - a < TILE ? outer->extent - a : TILE;
    for (int64_t b = 0; b < inner->extent; b += TILE) {
      i.extent = inner->extent - b < TILE ? inner->extent - b : TILE;
      plane(to + a * o.to + b * i.to, from + a * o.from + b * i.from, &o, &i, item);
    }
  }
}

/* Outermost first by where it writes, then by where it reads. */
static int comes_before(const dlx_axis* a, const dlx_axis* b) {
  if (llabs(a->to) != llabs(b->to)) return llabs(a->to) > llabs(b->to);
  return llabs(a->from) > llabs(b->from);
}

int dlx_axes(const DLTensor* from, const DLTensor* to, int64_t item, dlx_axis* axes) {
  int64_t from_step = item, to_step = item;
  int n = 0;
  for (int32_t d = from->ndim - 1; d >= 0; d--) {
    if (from->shape[d] == 1) continue; /* its stride may be any number */
    dlx_axis next = {from->shape[d], from->strides ? from->strides[d] * item : from_step,
                     to->strides ? to->strides[d] * item : to_step};
    from_step *= next.extent;
    to_step *= next.extent;
    int at = n++;
    for (; at > 0 && !comes_before(&axes[at - 1], &next); at--) axes[at] = axes[at - 1];
    axes[at] = next;
  }
  int merged = 0;
  for (int i = 1; i < n;
       i++) { /* an outer axis that only repeats the inner one is one run with it */
    dlx_axis* outer = &axes[merged];
    if (outer->from == axes[i].from * axes[i].extent && outer->to == axes[i].to * axes[i].extent) {
      *outer = (dlx_axis){outer->extent * axes[i].extent, axes[i].from, axes[i].to};
    } else {
      axes[++merged] = axes[i];
    }
  }
  return n ? merged + 1 : 0;
}

/* Move the axis along which reading is tightest next to the innermost one, if it is another. */
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

static void run(char* to, const char* from, dlx_axis* axes, int n, int64_t item) {
  static const dlx_axis once = {1, 0, 0};
  int tiled = n > 1 && pair_for_tiles(axes, n);
  const dlx_axis* inner = n > 0 ? &axes[n - 1] : &once;
  const dlx_axis* outer = n > 1 ? &axes[n - 2] : &once;
  int contiguous = inner->from == item && inner->to == item && inner->extent * item >= 64;
  int64_t at[DLX_MAX_NDIM] = {0};
  for (;;) {
    if (contiguous) {
      rows(to, from, outer, inner, item);
    } else if (tiled) {
      tiles(to, from, outer, inner, item);
    } else {
      plane(to, from, outer, inner, item);
    }
    int d = n - 3; /* odometer over what is left */
    for (; d >= 0; d--) {
      to += axes[d].to;
      from += axes[d].from;
      if (++at[d] < axes[d].extent) break;
      to -= axes[d].to * axes[d].extent;
      from -= axes[d].from * axes[d].extent;
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

int dlx_same_elements(const DLTensor* a, const DLTensor* b) {
  if (a->ndim != b->ndim || a->ndim > DLX_MAX_NDIM ||
      memcmp(&a->dtype, &b->dtype, sizeof a->dtype) != 0)
    return 0;
  for (int32_t i = 0; i < a->ndim; i++) {
    if (a->shape[i] != b->shape[i]) return 0;
  }
  return 1;
}

static const char* first(const DLTensor* t) {
  return (const char*)t->data + t->byte_offset;
}

int dlx_alike(const DLTensor* from, const DLTensor* to) {
  if (!dlx_host_readable(from->device.device_type) || !dlx_host_readable(to->device.device_type)) {
    return DLX_E_DEVICE;
  }
  return dlx_same_elements(from, to) ? DLX_OK : DLX_E_MISMATCH;
}

int dlx_copy(const DLTensor* from, const DLTensor* to, uint64_t flags) {
  int status = dlx_alike(from, to);
  if (status != DLX_OK) return status;
  if (dlx_size(from) == 0) return DLX_OK;

  char* target = (char*)to->data + to->byte_offset;
  int64_t item = dlx_itemsize(from->dtype, flags);
  if (item == 0) {
    if (dlx_layout(from) || dlx_layout(to)) return DLX_E_PACKED;
    memcpy(target, first(from), (size_t)dlx_nbytes(from, flags));
    return DLX_OK;
  }
  dlx_axis axes[DLX_MAX_NDIM];
  run(target, first(from), axes, dlx_axes(from, to, item, axes), item);
  return DLX_OK;
}
