#ifndef DLX_MAP_H_
#define DLX_MAP_H_

/* Maps from an address to a Python object, whose low bits say more. They grow; the entry of a
 * type that is gone stays until another type comes to lie at its address.
 *
 * Without the GIL threads read a map while one of them, under a lock, changes it. A word is read
 * and written whole. What has left a map, and a map that was replaced by a larger one, is given up
 * when no thread can be reading it any more. */

#include "interop/interop.h"
#include "base/threads.h"

enum { DLX_WORD_BITS = 15 }; /* objects of the collector lie at multiples of 16 bytes */

typedef struct {
  _Atomic(const void*) key; /* compared, not held; NULL = free */
  _Atomic(uintptr_t) word;  /* an object, strong, and bits; 0 = nothing is known of the key */
} py_entry;

typedef struct py_map {
  size_t mask, in_use;
  py_entry at[];
} py_map;

static inline PyObject* py_word_object(uintptr_t word) {
  return (PyObject*)(word & ~(uintptr_t)DLX_WORD_BITS);
}

/* What is known of a key; 0 = nothing. GIL: needed. Errors: none. */
static inline uintptr_t py_map_get(const _Atomic(py_map*)* place, const void* key) {
  const py_map* map = atomic_load_explicit(place, memory_order_acquire);
  if (map == NULL) return 0;
  for (size_t i = (uintptr_t)key >> 4 ^ (uintptr_t)key >> 12;; i++) { /* it is never full */
    const py_entry* e = &map->at[i & map->mask];
    const void* found = atomic_load_explicit(&e->key, memory_order_acquire);
    if (found == key) return atomic_load_explicit(&e->word, memory_order_acquire);
    if (found == NULL) return 0;
  }
}

/* Note what is known of a key. Owns: holds the object. GIL: needed; may run Python. Errors: -1 with
 * MemoryError. */
int py_map_set(_Atomic(py_map*)* place, const void* key, uintptr_t word);

/* Forget everything. GIL: needed; may run Python. A pending exception is kept. */
void py_map_clear(_Atomic(py_map*)* place);

int py_map_visit(const _Atomic(py_map*)* place, visitproc visit, void* arg);

/* What a thread finds in maps between these two stays, also where another thread replaces it. They
 * may be nested. GIL: needed; neither runs Python. With a GIL they are nothing: calls hold a
 * reference instead, by the two below. */
#ifdef Py_GIL_DISABLED
void py_maps_begin(void);
void py_maps_end(void);

static inline void py_map_hold(void* object) {
  (void)object;
}

static inline void py_map_release(void* object) {
  (void)object;
}
#else
static inline void py_maps_begin(void) {}

static inline void py_maps_end(void) {}

static inline void py_map_hold(void* object) {
  Py_INCREF((PyObject*)object);
}

static inline void py_map_release(void* object) {
  Py_DECREF((PyObject*)object);
}
#endif

void py_map_init(void);

#endif
