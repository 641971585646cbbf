#ifndef DLX_PAIRS_H_
#define DLX_PAIRS_H_

/* Pairs of a source and a target, found by the type and the `to` of a call, or learned in Python at
 * the first call. */

#include "target.h"

typedef enum {
  PY_PYTHON,     /* the Python path converts or rejects it */
  PY_PASSES,     /* not an array: passes through a tree */
  PY_LOOKS,      /* the same, unless the object has an array interface */
  PY_CHILDREN,   /* a container that becomes a list or dict */
  PY_RULE,       /* a container that stays itself */
  PY_STAYS,      /* already an array of the target */
  PY_CONVERTS,   /* an array, by the source's `take` and the target's `hand_over` */
  PY_PRODUCES,   /* the same for a producer, which is called once */
  PY_AT_ROOT = 8 /* a flag: an array only at the root; passes through a tree */
} py_what;

typedef struct {
  py_source* source;
  py_target* target;
  unsigned what, at_root; /* at_root is PY_AT_ROOT or 0 */
} py_pair;

/* Find a pair that is already known. Owns: the caller holds the pair, between py_maps_begin and
 * py_maps_end, and owes py_pair_release. Errors: 0 = fallback, and nothing is held. */
int py_pair_find(PyTypeObject* type, PyObject* to, py_pair* out);

/* Find a pair, or learn it. Owns, Errors: as py_pair_find. */
int py_pair_learn(const FastPathObject* function, PyTypeObject* type, PyObject* to, py_pair* out);

/* Find the target of a known pair. Owns: as py_pair_find, with py_map_release. Errors: NULL. */
py_target* py_target_find(PyObject* to);

/* A pending exception is kept. */
static inline void py_pair_release(const py_pair* pair) {
  py_map_release(pair->source);
  py_map_release(pair->target);
}

/* Find the source of a type with a known `like`, or learn it. Owns: as py_pair_find, with
 * py_map_release. Errors: as py_pair_learn. */
py_source* py_example_learn(const FastPathObject* function, PyTypeObject* type);

/* Whether a source is still valid for an exact type. Errors: 0; an exception that ends the call may
 * be set. */
int py_source_holds(PyObject* source, PyTypeObject* type);

extern PyMethodDef py_pair_functions[];

int py_pair_init(void);

/* ---- convert/array.c ------------------------------------------------------------------------- */

PyObject* py_convert_array(py_call* call, const py_pair* pair, PyObject* obj);

PyObject* py_convert(py_call* call, PyObject* obj);

/* Return the target for an example on the host, and add the example's options to the call. */
PyObject* py_target_like(py_call* call, PyObject* like);

/* ---- convert/moves.c ------------------------------------------------------------------------- */

/* Move an array between the host and a CUDA device, in one run: to a host-only target, or into a
 * new array of the target on `device` or its default device. Waits for the copy, and asks first
 * whether its stream captures. Called when py_convert falls back, or if the call names a device. */
PyObject* py_move(const py_call* call, PyObject* obj);

/* Stack a tuple of arrays of a CUDA device along an axis of `out`, an array of the target, or of a
 * new one, with one wait per stream of a producer. Asks first whether a stream captures. */
PyObject* py_stack(const py_call* call, PyObject* objs, PyObject* out, int axis);

/* Open a frame, see `open` of py_source. If its columns are one matrix on the host, and each is
 * adjacent, copy it, and cast it to a dtype (NULL: its own). Return (copy or None, opened). */
PyObject* py_open_frame(const py_call* call, PyObject* frame, const DLDataType* dtype);

/* ---- convert/exchange_any.c ------------------------------------------------------------------ */

/* Return a capsule with the exchange table for any array. `function` is the fast path;
 * python_path(obj) returns a dlx.Tensor. Owns: new reference; keeps its arguments. Errors: NULL
 * with an exception. */
PyObject* py_exchange_any(PyObject* function, PyObject* to, PyObject* python_path);

/* ---- convert/walk.c -------------------------------------------------------------------------- */

/* Whether objects of an exact type are trees without a pair. */
static inline int py_is_tree(PyTypeObject* type) {
  return type == &PyList_Type || type == &PyTuple_Type || type == &PyDict_Type;
}

/* Whether objects of an exact type are data that trees may contain. */
int py_passes_through(PyTypeObject* type);

/* Whether the object, not its class, has an array interface. Reads only its dict, without running
 * its code. Errors: 1 with an exception. */
int py_has_interface(PyObject* obj);

/* ---- convert/tree.c -------------------------------------------------------------------------- */

/* Convert a list, tuple or dict (`rule` = NULL), or a container by its rule. Errors: NULL =
 * fallback, and nothing was handed over. */
PyObject* py_convert_tree(py_call* call, PyObject* root, PyObject* rule);

/* Convert another container by its pair. Errors: as py_convert_tree. */
PyObject* py_convert_container(py_call* call, const py_pair* pair, PyObject* obj);

#endif
