#ifndef DLX_KIND_H_
#define DLX_KIND_H_

/* What was learned of a type, and how a later call sees that it still holds. CPython gives a type
 * another version tag whenever it, or a base of it, is written to. A new tag makes what was learned
 * only suspect: the few attributes that it depends on are compared, and the new tag is taken. */

#include "interop/interop.h"
#include "base/threads.h"

typedef struct {
  PyTypeObject* type;     /* borrowed: see `alive` */
  PyObject* alive;        /* weak reference to the type; strong. NULL = no type is noted */
  PyObject* names;        /* tuple of the attributes it depends on; borrowed from who owns this */
  PyObject* facts;        /* tuple of their values; strong. see note_fact */
  PyObject* still;        /* still(type) -> whether its class is right; borrowed, or NULL */
  uintptr_t bases;        /* a mark of its method resolution order */
  atomic_uint tag;        /* 0 = compare at the next call */
  Py_ssize_t n_modules;   /* in sys.modules then; -1 = it depends on neither this nor the next */
  uint64_t registrations; /* with abstract base classes then */
} py_kind;

/* Note a type, `names` and `still` being set. Owns: references in `k`. GIL: needed; may run Python.
 * Errors: -1 with an exception. */
int py_kind_note(py_kind* k, PyTypeObject* type);

/* Compare what `k` depends on, and take the type's new tag. GIL: needed; may run Python. Errors: 0
 * = learn it again, perhaps with an exception that ends the call. */
int py_kind_compare(py_kind* k, PyTypeObject* type);

/* What the collector sees, and gives up. */
int py_kind_visit(py_kind* k, visitproc visit, void* arg);
void py_kind_clear(py_kind* k);

/* What a registration counts. GIL: needed. Errors: -1 with an exception. */
int py_kind_init(void);

static inline unsigned py_tag_of(PyTypeObject* type) {
#ifdef Py_GIL_DISABLED
  return __atomic_load_n(&type->tp_version_tag, __ATOMIC_ACQUIRE);
#else
  return type->tp_version_tag; /* 0 = changed since, or changed too often to get one */
#endif
}

/* Whether nothing has changed since; `type` is the one that is asked about now. Tags are never
 * given twice, so another type at the same address has another one. Where not: py_kind_compare. */
static inline int py_kind_is_current(const py_kind* k, PyTypeObject* type) {
  unsigned tag = atomic_load_explicit(&k->tag, memory_order_relaxed);
  return tag && tag == py_tag_of(type) && k->n_modules < 0;
}

#endif
