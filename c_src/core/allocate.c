/* Allocation, with failures for tests; see allocate.h. */

#include "allocate.h"

static atomic_int_least64_t until_failure; /* 1 = the next one fails; 0 = none fails; relaxed */

static int is_failing(void) {
  int64_t left = atomic_load_explicit(&until_failure, memory_order_relaxed);
  while (left > 0 &&
         !atomic_compare_exchange_weak_explicit(&until_failure, &left, left - 1,
                                                memory_order_relaxed, memory_order_relaxed))
    continue;
  return left == 1;
}

static void* allocate_or_fail(size_t size) {
  return is_failing() ? NULL : malloc(size);
}

void* (*dlx_allocate)(size_t size) = malloc;

void* dlx_allocate_aligned(size_t size) {
  return is_failing() ? NULL : dlx_malloc_aligned(DLX_ALIGNMENT, size);
}

int64_t dlx_fail_allocation(int64_t number) {
  dlx_allocate = number ? allocate_or_fail : malloc;
  return atomic_exchange_explicit(&until_failure, number, memory_order_relaxed);
}
