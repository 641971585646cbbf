#ifndef DLX_KIND_H_
#define DLX_KIND_H_

/* Facts noted about a type, and how later calls check them. CPython assigns a new version tag to a
 * type if the type or a base is changed. If only the tag is new, the noted attributes are compared,
 * and if they are equal, the new tag is stored. */

#include "interop/interop.h"
#include "base/threads.h"

typedef struct {
  PyTypeObject* type;     /* borrowed: see `alive` */
  PyObject* alive;        /* weak reference to the type; strong. NULL = no type */
  PyObject* names;        /* tuple of the attributes to compare; borrowed from the struct's owner */
  PyObject* facts;        /* tuple of their values, see note_fact; strong */
  PyObject* still;        /* still(type) -> whether the class is still valid; borrowed, or NULL */
  uintptr_t bases;        /* a hash of its method resolution order */
  atomic_uint tag;        /* 0 = compare at the next call; relaxed: the facts never change */
  Py_ssize_t n_modules;   /* in sys.modules; -1 = neither this nor `registrations` matters */
  uint64_t registrations; /* with abstract base classes */
} py_kind;

/* Note a type; `names` and `still` are set. Owns: references in `k`. */
int py_kind_note(py_kind* k, PyTypeObject* type);

/* Compare the facts, and store the type's new tag. Errors: 0 = learn the type again, or fallback.
 */
int py_kind_compare(py_kind* k, PyTypeObject* type);

int py_kind_visit(py_kind* k, visitproc visit, void* arg);
void py_kind_clear(py_kind* k);

int py_kind_init(void);

static inline unsigned py_tag_of(PyTypeObject* type) {
#ifdef Py_GIL_DISABLED
  return atomic_load_explicit((_Atomic(unsigned)*)&type->tp_version_tag, memory_order_acquire);
#else
  return type->tp_version_tag; /* 0 = changed, or changed too often to get a tag */
#endif
}

/* Whether the type is unchanged. Tags are unique, so a new type at the same address has another
 * tag. If not current: py_kind_compare. */
static inline int py_kind_is_current(const py_kind* k, PyTypeObject* type) {
  unsigned tag = atomic_load_explicit(&k->tag, memory_order_relaxed);
  return tag && tag == py_tag_of(type) && k->n_modules < 0;
}

#endif
