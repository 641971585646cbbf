#ifndef DLX_PAIRS_H_
#define DLX_PAIRS_H_

/* Which source and target a call is about: found, or learned in Python at the first call. */

#include "target.h"

/* What a pair of an exact type and a target is. */
typedef enum {
  PY_PYTHON,     /* only Python can do it, or refuse it */
  PY_PASSES,     /* no array: it passes through a tree */
  PY_LOOKS,      /* the same, unless the object itself has an array interface */
  PY_CHILDREN,   /* a container that becomes a list or dict */
  PY_RULE,       /* a container that stays itself */
  PY_STAYS,      /* an array of the target */
  PY_CONVERTS,   /* an array, by the source's `take` and the target's `make` */
  PY_PRODUCES,   /* the same, by a producer, which is called once */
  PY_AT_ROOT = 8 /* added where it is an array at the root only, and passes through a tree */
} py_what;

typedef struct {
  py_source* source;
  py_target* target;
  unsigned what, at_root; /* the second is PY_AT_ROOT, or 0 */
} py_pair;

/* Find the pair of an exact type and a target, as far as it is known. Owns: the caller holds the
 * pair, between py_maps_begin and py_maps_end, and owes it py_pair_release. GIL: needed; may run
 * Python. Errors: 0 = ask Python, unless an exception is set, see py_state; nothing is held then.
 */
int py_pair_find(PyTypeObject* type, PyObject* to, py_pair* out);

/* The same, learned now if it must be. */
int py_pair_of(const FastPathObject* function, PyTypeObject* type, PyObject* to, py_pair* out);

/* A pending exception is kept. GIL: needed; may run Python. */
static inline void py_pair_release(const py_pair* pair) {
  py_map_release(pair->source);
  py_map_release(pair->target);
}

/* The source of an exact type whose `like` is known, learned now if it must be. Owns: as
 * py_pair_find, by py_map_release. GIL, Errors: as py_pair_of. */
py_source* py_example_of(const FastPathObject* function, PyTypeObject* type);

/* Whether a source is still the one of an exact type. GIL: needed; may run Python. Errors: 0,
 * perhaps with an exception that ends the call. */
int py_source_holds(PyObject* source, PyTypeObject* type);

extern PyMethodDef py_pair_functions[];

int py_pair_init(void);

/* ---- convert/one.c --------------------------------------------------------------------------- */

/* Convert one array, which is no container. Owns: the result is new. GIL: needed; may run Python.
 * Errors: NULL = ask Python, unless an exception is set. */
PyObject* py_convert_one(py_call* call, const py_pair* pair, PyObject* obj);

/* Convert any object: an array, or a container. Owns, GIL, Errors: as py_convert_one. */
PyObject* py_convert(py_call* call, PyObject* obj);

/* The target of an example that is on the host; its options are added to those of the call. Owns:
 * new reference. GIL: needed; may run Python. Errors: as py_convert_one. */
PyObject* py_target_like(py_call* call, PyObject* like);

/* ---- convert/any.c --------------------------------------------------------------------------- */

/* The exchange table for any array, in a capsule: `function` is the fast path, `python_path` what
 * makes a dlx.Tensor of other objects. Owns: new reference; keeps what it is given. GIL: needed.
 * Errors: NULL with an exception. */
PyObject* py_exchange_any(PyObject* function, PyObject* to, PyObject* python_path);

/* ---- convert/walk.c -------------------------------------------------------------------------- */

/* Whether objects of an exact type are trees that need no pair. */
static inline int py_is_tree(PyTypeObject* type) {
  return type == &PyList_Type || type == &PyTuple_Type || type == &PyDict_Type;
}

/* Whether they are data that passes through and may stand anywhere. */
int py_is_plain(PyTypeObject* type);

/* Whether an object itself has an array interface, which nothing says of its class. Its own dict is
 * looked at only: no code of the object runs. Errors: 1 with an exception. */
int py_has_interface(PyObject* obj);

/* ---- convert/tree.c -------------------------------------------------------------------------- */

/* Convert a list, tuple or dict, whose `rule` is NULL, or a container that has one. GIL: needed;
 * may run Python. Errors: as py_convert_one; nothing was handed over then. */
PyObject* py_convert_tree(py_call* call, PyObject* root, PyObject* rule);

/* Convert any other container, by its pair. GIL, Errors: as py_convert_tree. */
PyObject* py_convert_container(py_call* call, const py_pair* pair, PyObject* obj);

#endif
