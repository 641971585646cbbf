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

/* Same dtype and shape. */
int dlx_same_elements(const DLTensor* a, const DLTensor* b);

/* Strides for fresh memory: row-major, or in the order of dimensions of `like`. */
void dlx_fresh_strides(const DLTensor* like, int keep_order, int64_t* strides);

#endif
