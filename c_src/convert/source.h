#ifndef DLX_SOURCE_H_
#define DLX_SOURCE_H_

/* How arrays of an exact type are exported. dlx/_engine/fast_path.py creates a source once per
 * type; its functions are chosen then. */

#include "gate.h"
#include "kind.h"

typedef struct py_source py_source;
typedef struct py_target py_target;

typedef enum {
  PY_ASK = 0,    /* fallback */
  PY_RAISED,     /* fallback; `response` is the producer's exception */
  PY_BLOCKED,    /* the array cannot be exported; py_take_unblocked may copy it */
  PY_TAKEN,      /* the consumer accepts `made` */
  PY_NEEDS_COPY, /* the consumer accepts a copy of `made` */
  PY_ON_DEVICE   /* `made` is in device memory, see streams.h */
} py_state;

typedef struct {
  DLManagedTensorVersioned* made; /* owned by the caller; NULL = nothing */
  PyObject* response;    /* strong: the producer's capsule, to which an unused `made` returns, or
                            another result or exception; NULL = no producer was called */
  uint32_t incompatible; /* the bits that a copy resolves */
  uint8_t state;
} py_offer;

/* Take an array for a target: examine, export and check it. With DLX_COPIES, later resizing is not
 * prevented. Owns: the caller owns the content of *out; `made` owns the array or its storage.
 * Errors: see py_state. */
typedef void py_take(py_source* source, py_target* target, PyObject* obj, unsigned options,
                     py_offer* out);

/* Return the result for an array of the target framework; with DLX_COPIES the argument for
 * py_copy_by_framework. */
typedef PyObject* py_stay(py_source* source, py_target* target, PyObject* obj, unsigned options);

/* How to get a framework's current stream on a CUDA device: from a table, if the framework keeps
 * its streams alive, or from function(device number), which returns an object that keeps the stream
 * alive and has the handle as an attribute. Without both: fallback. */
typedef struct {
  int is_by_table; /* set first; then `table`, if there is one */
  DLPackCurrentWorkStream table;
  PyObject *function, *attribute;
} py_stream_source;

/* Attributes that describe an array of a type without a table. */
typedef struct {
  py_question memory, shape, strides, dtype, device; /* strides in bytes */
  PyObject* address;                                 /* attribute of `memory`; NULL = unused */
  PyObject* dtypes;                                  /* {dtype: code | bits << 8} */
} py_fields;

enum { DLX_MAX_KEYWORDS = 4 /* of __dlpack__ */ };

/* How to call the producer of a type that no adapter lists. */
typedef struct {
  PyObject *names, *values;  /* tuples: keywords of __dlpack__ */
  PyObject* no_numbers;      /* no_numbers(dtype): why the dtype is not numeric, or "" */
  _Atomic(PyObject*) number; /* the last numeric dtype; strong, or NULL. Relaxed: only its address
                                is used; acq_rel by who releases it */
} py_producer;

struct py_source {
  PyObject_HEAD PyObject* values; /* tuple that owns the borrowed members; strong */
  py_kind kind;
  PyObject* what;                 /* the kind of pair, for Python; borrowed */
  PyObject* adapter;              /* the adapter or container; borrowed */
  py_take *take, *take_second;    /* take_second: for arrays that `take` cannot export; or NULL */
  const DLPackExchangeAPI* table; /* or NULL */
  DLPackDLTensorFromPyObjectNoSync borrow; /* its borrow slot, for borrows during a call; or NULL */
  py_gate gate;
  struct {
    py_question ask, start, nbytes; /* the object that keeps the memory alive; its address and size,
                                       if they must be checked */
  } owner;
  py_question detach; /* returns the array without its graph */
  struct {
    py_question dtype;
    PyObject* expected; /* {code | bits << 8: the expected dtype of the array}, or NULL */
  } dtype_check;
  py_fields fields;     /* for arrays on CUDA devices only */
  py_producer producer; /* for a type that no adapter lists */
  py_stream_source streams;
  PyObject* export;    /* export(array): a dlx.Tensor, or None; or NULL */
  PyObject* unblocked; /* unblocked(array): a copy of an array that cannot be exported, as a
                          dlx.Tensor or an array of the type, or None; or NULL */
  PyObject* parts;     /* children(obj, may_copy) of a container that becomes a list or dict, or the
                          rule (flatten, unflatten, is_mutable) of one that keeps its type */
  PyObject* open;      /* open(frame): (names, matrices, places) as Container.live; or NULL */
  struct {
    py_stay* stay;
    PyObject* copy;        /* copy(array); or NULL */
    PyObject* ready;       /* ready(array): borrowing neither waits nor changes it; NULL = always */
  } framework;             /* for arrays of the target framework */
  _Atomic(PyObject*) like; /* (target, place or None) for an example; None = Python decides; NULL =
                              unknown; strong. Release, acquire: an initialized tuple, set once */
  uint64_t flags;          /* added to exported tensors */
  struct {
    int managed, own_table, examined, immutable, host_only;
  } traits;              /* see choose_functions; host_only: the adapter has no other device */
  atomic_int has_worked; /* on a device, see streams.c; relaxed: nothing follows from it */
};

extern PyTypeObject* py_source_type;

/* ---- convert/members.c ----------------------------------------------------------------------- */

typedef struct {
  const char* name;
  int (*read)(PyObject* value, void* where, void* self); /* Errors: -1 with an exception */
  size_t offset;
} py_member;

/* Read keywords into members; None leaves a member unchanged. Owns: the result is a tuple of the
 * values. Errors: NULL with an exception. */
PyObject* py_members_read(const py_member* members, PyObject* keywords, void* self);

void py_members_dealloc(PyObject* self);

int py_read_object(PyObject* value, void* where, void* self);
int py_read_flag(PyObject* value, void* where, void* self);
int py_read_streams(PyObject* value, void* where, void* self);

int py_source_init(PyObject* module);
int py_target_init(PyObject* module);

/* ---- convert/take.c -------------------------------------------------------------------------- */

py_take py_take_tensor, py_take_borrowed, py_take_managed, py_take_exported;

/* After PY_BLOCKED: take a copy by the adapter. In a tree, this comes last. */
py_take py_take_unblocked;

/* Borrow an array on the host or a CUDA device during a call, checked as with DLX_COPIES |
 * DLX_SHARES, without allocations. Owns: nothing; *out is valid until Python code runs or the next
 * borrow. An earlier one may be `known` to the target (or NULL). */
int py_borrow(py_source* source, py_target* target, PyObject* obj, const DLTensor* known,
              DLTensor* out);

/* ---- convert/attributes.c, convert/producer.c ------------------------------------------------ */

py_take py_take_attributes, py_take_capsule;

/* ---- convert/identity.c ---------------------------------------------------------------------- */

py_stay py_stay_unchanged, py_stay_examined;

/* Copy an array by its framework. Owns: takes `same`; new reference. */
PyObject* py_copy_by_framework(const py_source* source, PyObject* same);

/* Whether an array is on the host according to its table. */
int py_is_on_host(const py_source* source, PyObject* obj);

#endif
