#ifndef DLX_MAP_H_
#define DLX_MAP_H_

/* Maps from an address to a Python object with flags in its low bits. Maps grow; the entry of a
 * deleted type stays until a new type has its address.
 *
 * Without the GIL, threads read a map while one thread changes it under a lock. Words are read and
 * written atomically: release, acquire, since a reader uses the object or map behind them; relaxed
 * by the thread with the lock and by the collector. Removed entries and outgrown maps are freed
 * when no thread can be reading them. */

#include "interop/interop.h"
#include "base/threads.h"

enum { DLX_WORD_BITS = 15 }; /* objects of the collector are aligned to 16 bytes */

typedef struct {
  _Atomic(const void*) key; /* compared, not held; NULL = free; release, acquire */
  _Atomic(uintptr_t) word;  /* a strong reference and flags; 0 = no value; release, acquire */
} py_entry;

typedef struct py_map {
  size_t mask, in_use;
  py_entry at[];
} py_map;

static inline PyObject* py_word_object(uintptr_t word) {
  return (PyObject*)(word & ~(uintptr_t)DLX_WORD_BITS);
}

/* Return the word of a key, or 0. Errors: none. */
static inline uintptr_t py_map_get(const _Atomic(py_map*)* place, const void* key) {
  const py_map* map = atomic_load_explicit(place, memory_order_acquire);
  if (map == NULL) return 0;
  for (size_t i = (uintptr_t)key >> 4 ^ (uintptr_t)key >> 12;; i++) { /* never full */
    const py_entry* e = &map->at[i & map->mask];
    const void* found = atomic_load_explicit(&e->key, memory_order_acquire);
    if (found == key) return atomic_load_explicit(&e->word, memory_order_acquire);
    if (found == NULL) return 0;
  }
}

/* Set the word of a key. Owns: holds the object. */
int py_map_set(_Atomic(py_map*)* place, const void* key, uintptr_t word);

/* Remove all entries. A pending exception is kept. */
void py_map_clear(_Atomic(py_map*)* place);

int py_map_visit(const _Atomic(py_map*)* place, visitproc visit, void* arg);

/* Between these two calls, entries that this thread finds stay alive, even if another thread
 * replaces them. Calls may be nested. GIL: needed; neither runs Python. With a GIL they do nothing:
 * callers hold references by the next two functions. */
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
