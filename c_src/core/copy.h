#ifndef DLX_COPY_H_
#define DLX_COPY_H_

/* What host and device copies share; cffi never reads this. Nothing here wants the GIL. */

#include "dlx.h"

typedef struct {
  int64_t extent;
  int64_t from; /* byte strides */
  int64_t to;
} dlx_axis;

/* The axes of a copy, outermost in `to` first, neighbours that form one run merged; returns how
 * many. Wants validated tensors with the same elements. */
int dlx_axes(const DLTensor* from, const DLTensor* to, int64_t item, dlx_axis* axes);

/* Go on to the next of all indices of `n` axes, the last of which changes fastest: an odometer.
 * Errors: 0 = that was the last. */
static inline int dlx_next(const dlx_axis* axes, int n, int64_t* index, char** to,
                           const char** from) {
  for (int d = n - 1; d >= 0; d--) {
    *to += axes[d].to;
    *from += axes[d].from;
    if (++index[d] < axes[d].extent) return 1;
    *to -= axes[d].to * axes[d].extent;
    *from -= axes[d].from * axes[d].extent;
    index[d] = 0;
  }
  return 0;
}

/* A copy along `n` of these axes, whose order it may change. */
typedef void (*dlx_copier)(char* to, const char* from, dlx_axis* axes, int n, int64_t item);

/* Have it made by one thread, or by several where that is faster; `nbytes` are those of all
 * elements. Errors: none. */
void dlx_copy_in_parts(dlx_copier copy, char* to, const char* from, dlx_axis* axes, int n,
                       int64_t nbytes, int64_t item);

/* Same dtype and shape. */
int dlx_same_elements(const DLTensor* a, const DLTensor* b);

/* Strides for fresh memory: row-major, or in the order of dimensions of `like`. */
void dlx_fresh_strides(const DLTensor* like, int keep_order, int64_t* strides);

/* Describe fresh host memory for a tensor like another, of which ndim, shape and dtype are read,
 * and strides with keep_order; `strides` becomes those of `out`, which has no address yet. Errors:
 * as dlx_managed_empty. */
int dlx_fresh(const DLTensor* like, uint64_t flags, int keep_order, int64_t* strides,
              DLTensor* out);

#endif
