/* Which allocation of dlx's own C fails, for tests; see allocate.h. */

#include "allocate.h"

static atomic_int_least64_t until_failure; /* 1 = the next one fails; 0 = none does */

/* Count one allocation; 1 where it is the one to fail. */
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

int64_t dlx_fail_allocation(int64_t number) {
  dlx_allocate = number ? allocate_or_fail : malloc;
  return atomic_exchange(&until_failure, number);
}
