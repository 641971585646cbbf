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

#endif
