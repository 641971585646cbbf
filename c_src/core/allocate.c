/* Allocation, with failures for tests; see allocate.h. */

#define _DEFAULT_SOURCE

#include "allocate.h"

#include <sys/mman.h>

static atomic_int_least64_t until_failure; /* 1 = the next one fails; 0 = none fails */

static int is_failing(void) {
  int64_t left = atomic_load(&until_failure);
  while (left > 0 && !atomic_compare_exchange_weak(&until_failure, &left, left - 1)) continue;
  return left == 1;
}

static void* allocate_or_fail(size_t size) {
  return is_failing() ? NULL : malloc(size);
}

void* (*dlx_allocate)(size_t size) = malloc;

void* dlx_allocate_aligned(size_t size) {
  return is_failing() ? NULL : aligned_alloc(DLX_ALIGNMENT, size);
}

void dlx_use_huge_pages(void* memory, size_t size) {
#ifdef MADV_HUGEPAGE
  enum { LARGE = 1 << 22, PAGE = 4096 };
  if (size < LARGE) return;
  uintptr_t first = ((uintptr_t)memory + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
  madvise((void*)first, (uintptr_t)memory + size - first, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)size;
#endif
}

int64_t dlx_fail_allocation(int64_t number) {
  dlx_allocate = number ? allocate_or_fail : malloc;
  return atomic_exchange(&until_failure, number);
}
