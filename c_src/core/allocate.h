#ifndef DLX_ALLOCATE_H_
#define DLX_ALLOCATE_H_

/* Allocation in dlx's C code, which can fail in tests (dlx_fail_allocation). */

#include "dlx.h"
#include "platform/platform.h"

#include <stdatomic.h>
#include <stdlib.h>

/* malloc, except in such tests; calling through a pointer is as fast as calling a shared library.
 * Owns: the caller calls free. GIL: not needed. Errors: NULL = no memory. */
extern void* (*dlx_allocate)(size_t size);

/* The same, aligned to DLX_ALIGNMENT; `size` must be a multiple of it. Owns: the caller calls
 * dlx_free_aligned. */
void* dlx_allocate_aligned(size_t size);

#endif
