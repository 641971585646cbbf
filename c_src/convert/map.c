/* Maps that grow, and deferred release of their removed entries: see map.h. */

#include "map.h"
#include "core/thread_state.h"

/* ---- entries that left a map ----------------------------------------------------------------- */

/* An object or memory, released when no lock is held, since that may run Python. */
typedef struct retired {
  PyObject* object;
  void* memory;
  uint64_t when; /* of its removal; used without the GIL */
  struct retired* next;
} retired;

static retired* retired_list; /* guarded by the lock, or the GIL */

#ifdef Py_GIL_DISABLED
static PyMutex changing;
static _Atomic(uint64_t) now = 1; /* counts removals; ordered by the fences below */
/* A thread without a state has read: nothing is freed any more. Ordered by the same fences. */
static atomic_int has_stateless_readers;

/* In a forked child, a thread that no longer exists may hold the lock. */
static void reset_lock(void) {
  changing = (PyMutex){0};
}

static void watch_forks(void) {
  dlx_watch_forks(NULL, NULL, reset_lock);
}

void py_map_init(void) {
  static dlx_once once = DLX_ONCE_INIT;
  dlx_run_once(&once, watch_forks);
}

static void lock(void) {
  PyMutex_Lock(&changing);
}

static void unlock(void) {
  PyMutex_Unlock(&changing);
}

void py_maps_begin(void) {
  dlx_thread_state* own = dlx_state_of_thread();
  if (own && own->nested++) return;
  if (own)
    atomic_store_explicit(&own->since, atomic_load_explicit(&now, memory_order_relaxed),
                          memory_order_relaxed);
  else
    atomic_store_explicit(&has_stateless_readers, 1, memory_order_relaxed);
  /* The fence orders this before the thread's reads; `retire` does the reverse. Either its reader
   * is visible, or the thread does not find the removed entry. */
  atomic_thread_fence(memory_order_seq_cst);
}

void py_maps_end(void) {
  dlx_thread_state* own = dlx_own_state;
  if (own == NULL || own->nested == 0 || --own->nested) return;
  atomic_store_explicit(&own->since, 0, memory_order_release);
}

static uint64_t find_oldest_reader(void) {
  uint64_t oldest =
      atomic_load_explicit(&has_stateless_readers, memory_order_relaxed) ? 0 : UINT64_MAX;
  for (dlx_thread_state* each = dlx_first_state(); each; each = each->next) {
    uint64_t since =
        atomic_load_explicit(&each->since, memory_order_acquire); /* its reads are over */
    if (since && since < oldest) oldest = since;
  }
  return oldest;
}

static uint64_t advance_clock(void) {
  atomic_thread_fence(memory_order_seq_cst);
  return atomic_fetch_add_explicit(&now, 1, memory_order_acq_rel) + 1;
}
#else
void py_map_init(void) {}

static void lock(void) {}

static void unlock(void) {}

static uint64_t find_oldest_reader(void) {
  return UINT64_MAX;
}

static uint64_t advance_clock(void) {
  return 0;
}
#endif

/* Owns: takes the object, or the memory. GIL: needed, with the lock. Without memory for the node it
 * leaks. */
static void retire(PyObject* object, void* memory) {
  retired* l = object || memory ? PyMem_Malloc(sizeof *l) : NULL;
  if (l == NULL) return;
  *l = (retired){object, memory, advance_clock(), retired_list};
  retired_list = l;
}

/* Free entries that no thread can read any more. GIL: needed, no lock held; may run Python. A
 * pending exception is kept. */
static void free_retired(void) {
  retired *l, *unused = NULL;
  lock();
  uint64_t oldest = find_oldest_reader();
  for (retired** place = &retired_list; (l = *place) != NULL;) {
    if (l->when <= oldest) {
      *place = l->next;
      l->next = unused;
      unused = l;
    } else {
      place = &l->next;
    }
  }
  unlock();
  py_pending pending = py_pending_save();
  while ((l = unused) != NULL) {
    unused = l->next;
    Py_XDECREF(l->object);
    PyMem_Free(l->memory);
    PyMem_Free(l);
  }
  py_pending_restore(pending);
}

/* ---- maps ------------------------------------------------------------------------------------ */

static py_entry* find_entry(py_map* map, const void* key) {
  size_t i = (uintptr_t)key >> 4 ^ (uintptr_t)key >> 12;
  for (const void* found;
       (found = atomic_load_explicit(&map->at[i & map->mask].key, memory_order_relaxed)) != NULL &&
       found != key;)
    i++;
  return &map->at[i & map->mask];
}

/* Owns: the caller owns the result, which takes the references of `old`. Errors: NULL without
 * memory. */
static py_map* widen(const py_map* old) {
  size_t room = old ? old->mask + 1 : 0, wanted = room ? 2 * room : 16;
  py_map* map = PyMem_Calloc(1, sizeof *map + wanted * sizeof(py_entry));
  if (map == NULL) return NULL;
  map->mask = wanted - 1;
  for (size_t i = 0; i < room; i++) {
    const void* key = atomic_load_explicit(&old->at[i].key, memory_order_relaxed);
    uintptr_t word = atomic_load_explicit(&old->at[i].word, memory_order_relaxed);
    if (word == 0) continue;
    py_entry* e = find_entry(map, key);
    atomic_init(&e->word, word); /* no other thread has the map yet */
    atomic_init(&e->key, key);
    map->in_use++;
  }
  return map;
}

int py_map_set(_Atomic(py_map*)* place, const void* key, uintptr_t word) {
  lock();
  py_map *old = atomic_load_explicit(place, memory_order_relaxed), *map = old;
  if ((old == NULL || old->in_use * 2 > old->mask) && (map = widen(old)) != NULL) {
    atomic_store_explicit(place, map, memory_order_release);
    retire(NULL, old);
  }
  if (map) {
    py_entry* e = find_entry(map, key);
    map->in_use += atomic_load_explicit(&e->key, memory_order_relaxed) == NULL;
    Py_XINCREF(py_word_object(word));
    uintptr_t before = atomic_exchange_explicit(&e->word, word, memory_order_acq_rel);
    atomic_store_explicit(
        &e->key, key,
        memory_order_release); /* after the word, which readers of the key then find */
    retire(py_word_object(before), NULL);
  }
  unlock();
  free_retired();
  return map ? 0 : (PyErr_NoMemory(), -1);
}

void py_map_clear(_Atomic(py_map*)* place) {
  lock();
  py_map* map = atomic_exchange_explicit(place, NULL, memory_order_acq_rel);
  for (size_t i = 0; map && i <= map->mask; i++)
    retire(py_word_object(atomic_load_explicit(&map->at[i].word, memory_order_relaxed)), NULL);
  retire(NULL, map);
  unlock();
  free_retired();
}

int py_map_visit(const _Atomic(py_map*)* place, visitproc visit, void* arg) {
  const py_map* map = atomic_load_explicit(place, memory_order_relaxed);
  for (size_t i = 0; map && i <= map->mask; i++) {
    PyObject* object = py_word_object(atomic_load_explicit(&map->at[i].word, memory_order_relaxed));
    Py_VISIT(object);
  }
  return 0;
}
