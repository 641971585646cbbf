#ifndef DLX_COPY_H_
#define DLX_COPY_H_

/* Helpers of host and device copies. No function needs the GIL. */

#include "dlx.h"

typedef struct {
  int64_t extent;
  int64_t from; /* byte strides */
  int64_t to;
} dlx_axis;

/* Find the axes of a copy between validated tensors of the same shape, with elements of these
 * sizes: outermost in `to` first, adjacent runs merged. Return their number. */
int dlx_find_axes(const DLTensor* from, const DLTensor* to, int64_t from_item, int64_t to_item,
                  dlx_axis* axes);

/* Advance to the next index of `n` axes; the last one changes fastest. 0 = the end. */
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

/* Does a part of a job, the indices [first, end). Errors: a status. */
typedef int (*dlx_worker)(void* job, int64_t first, int64_t end);

/* Do a job of `n` indices that copies `nbytes` bytes, on one thread, or on several if that is
 * faster. The threads are joined before it returns: none is left at a fork or at exit. Errors: a
 * worker's status. */
int dlx_work_in_parts(dlx_worker work, void* job, int64_t n, int64_t nbytes);

/* Copies along `n` axes; may reorder them. `item` is the size of an element, or the copier's own.
 */
typedef void (*dlx_copier)(char* to, const char* from, dlx_axis* axes, int n, int64_t item);

/* Run a copy of `nbytes` bytes, as dlx_work_in_parts. */
void dlx_copy_in_parts(dlx_copier copy, char* to, const char* from, dlx_axis* axes, int n,
                       int64_t nbytes, int64_t item);

/* Return 1 for the same dtype and shape; DLX_OK if both are also in host memory. */
int dlx_has_same_elements(const DLTensor* a, const DLTensor* b);
int dlx_check_alike(const DLTensor* from, const DLTensor* to);

/* Compute strides for new memory: row-major, or in the dimension order of `like`. */
void dlx_fresh_strides(const DLTensor* like, int keep_order, int64_t* strides);

/* Describe the memory of dlx_managed_empty in `out`, without an address, and with `strides`.
 * Errors: as dlx_managed_empty. */
int dlx_describe_fresh(const DLTensor* like, uint64_t flags, int keep_order, int64_t* strides,
                       DLTensor* out);

#endif
