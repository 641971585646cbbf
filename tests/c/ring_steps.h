/* c_src/core/ring.c with a call of `step` before each access to the memory of a ring. */

#include <stdatomic.h>

#include "dlx.h"
#include "platform/platform.h"

static void step(const volatile void* word, int is_load);

/* clang's builtins refuse pointers to _Atomic types. */
#define plain(word) \
  _Generic((word), _Atomic(uint32_t)*: (uint32_t*)(word), _Atomic(uint64_t)*: (uint64_t*)(word))

#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_exchange_explicit
#undef atomic_fetch_add_explicit
#define atomic_load_explicit(word, order) (step(word, 1), __atomic_load_n(plain(word), order))
#define atomic_store_explicit(word, value, order) \
  (step(word, 0), __atomic_store_n(plain(word), value, order))
#define atomic_exchange_explicit(word, value, order) \
  (step(word, 0), __atomic_exchange_n(plain(word), value, order))
#define atomic_fetch_add_explicit(word, value, order) \
  (step(word, 0), __atomic_fetch_add(plain(word), value, order))
#include "core/ring.c"
