#ifndef DLX_ALLOCATE_H_
#define DLX_ALLOCATE_H_

/* The memory of dlx's own C; a test can let each allocation fail (dlx_fail_allocation). */

#include "dlx.h"

#include <stdatomic.h>
#include <stdlib.h>

/* malloc, but in such a test; a pointer costs no more than a call into a shared library. Owns: the
 * caller calls free. GIL: not needed. Errors: NULL = no memory. */
extern void* (*dlx_allocate)(size_t size);

/* The same at a multiple of DLX_ALIGNMENT; `size` is one, too. */
void* dlx_allocate_aligned(size_t size);

/* Ask for huge pages for large fresh memory, whose first use is mostly page faults. */
void dlx_use_huge_pages(void* memory, size_t size);

#endif
