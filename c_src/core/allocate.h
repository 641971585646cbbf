#ifndef DLX_ALLOCATE_H_
#define DLX_ALLOCATE_H_

/* The memory that dlx's own C takes, all of it through here, so that a test can let each allocation
 * fail (dlx_fail_allocation). cffi never reads this. */

#include "dlx.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Memory of a number of bytes, uninitialised. It is malloc itself but in such a test: a call
 * through this takes no more instructions than one into a shared library. Owns: the caller, who
 * calls free. GIL: not needed. Errors: NULL = no memory. */
extern void* (*dlx_allocate)(size_t size);

/* The same at a multiple of DLX_ALIGNMENT; `size` is one, too. */
void* dlx_allocate_aligned(size_t size);

/* Ask for huge pages where memory is large and fresh, as numpy does: most of what its first use
 * costs is page faults. GIL: not needed. Errors: none. */
void dlx_use_huge_pages(void* memory, size_t size);

#endif
