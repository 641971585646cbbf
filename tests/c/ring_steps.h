/* c_src/core/ring.c with a call of `step` before each access to the memory of a ring. */

#include <stdatomic.h>

#include "dlx.h"
#include "platform/platform.h"

static void step(const volatile void* word, int is_load);

#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_exchange_explicit
#undef atomic_fetch_add_explicit
#define atomic_load_explicit(word, order) (step(word, 1), __atomic_load_n(word, order))
#define atomic_store_explicit(word, value, order) \
  (step(word, 0), __atomic_store_n(word, value, order))
#define atomic_exchange_explicit(word, value, order) \
  (step(word, 0), __atomic_exchange_n(word, value, order))
#define atomic_fetch_add_explicit(word, value, order) \
  (step(word, 0), __atomic_fetch_add(word, value, order))
#include "core/ring.c"
