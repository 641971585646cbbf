#ifndef DLX_COPY_H_
#define DLX_COPY_H_

/* What host and device copies share. Nothing here wants the GIL. */

#include "dlx.h"

typedef struct {
  int64_t extent;
  int64_t from; /* byte strides */
  int64_t to;
} dlx_axis;

/* Find the axes of a copy between validated tensors with the same elements, outermost in `to`
 * first, neighbours that form one run merged; return how many. */
int dlx_axes(const DLTensor* from, const DLTensor* to, int64_t item, dlx_axis* axes);

/* Go on to the next index of `n` axes, the last of which changes fastest. 0 = that was the last. */
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

/* Have it made by one thread, or by several if that is faster; `nbytes` are those of all elements.
 * They are joined before this returns: none is left at a fork or at the end of the process. */
void dlx_copy_in_parts(dlx_copier copy, char* to, const char* from, dlx_axis* axes, int n,
                       int64_t nbytes, int64_t item);

/* 1 = same dtype and shape; DLX_OK = the same, and both lie in host memory. */
int dlx_same_elements(const DLTensor* a, const DLTensor* b);
int dlx_alike(const DLTensor* from, const DLTensor* to);

/* Strides for fresh memory: row-major, or in the order of dimensions of `like`. */
void dlx_fresh_strides(const DLTensor* like, int keep_order, int64_t* strides);

/* Describe fresh host memory, as dlx_managed_empty says, in `out`, which has no address yet;
 * `strides` becomes those of `out`. Errors: as there. */
int dlx_fresh(const DLTensor* like, uint64_t flags, int keep_order, int64_t* strides,
              DLTensor* out);

#endif
