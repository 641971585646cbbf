#ifndef DLX_SOURCE_H_
#define DLX_SOURCE_H_

/* How arrays of one exact type are taken. A source is made once for a type, from what
 * dlx/_engine/fast_path.py knows of it; then it only calls the functions that were chosen. */

#include "gate.h"
#include "kind.h"

typedef struct py_source py_source;
typedef struct py_target py_target;

typedef enum {
  PY_ASK = 0,    /* ask Python, unless an exception is set, which then ends the call: an interrupt,
                    an exit, or MemoryError */
  PY_RAISED,     /* the same; `answer` is what the producer raised */
  PY_BLOCKED,    /* it cannot be exported as it is; py_take_unblocked may */
  PY_TAKEN,      /* the consumer takes `made` as it is */
  PY_NEEDS_COPY, /* a copy of `made` has what the consumer takes */
  PY_ON_DEVICE   /* `made` is in device memory, see streams.h */
} py_state;

/* What was taken of an array, or why not. */
typedef struct {
  DLManagedTensorVersioned* made; /* the caller owns it; NULL = nothing was taken */
  PyObject* answer;      /* strong: the capsule that `made` goes back to if nothing comes of it, or
                            what the producer gave else, or raised; NULL = no producer was called */
  uint32_t incompatible; /* what a copy resolves */
  uint8_t state;
} py_offer;

/* Take an array for a target: examined, exported and checked. With DLX_COPIES it need not be
 * protected from a later resize. Owns: the caller owns what is in *out; `made` owns the array or
 * its storage. GIL: needed; may run Python. Errors: see py_state. */
typedef void py_take(py_source* source, py_target* target, PyObject* obj, unsigned options,
                     py_offer* out);

/* The result for an array that is in the target framework already, or with DLX_COPIES what is then
 * given to py_copy_within. Owns: new reference. GIL: needed; may run Python. Errors: NULL = ask
 * Python, unless an exception is set. */
typedef PyObject* py_stay(py_source* source, py_target* target, PyObject* obj, unsigned options);

/* How a framework is asked for its current stream on a CUDA device: by a table, whose streams are
 * kept by others, or by function(number of the device), which gives the object that keeps the
 * stream alive and has the handle as an attribute. Neither: it cannot be asked. */
typedef struct {
  int is_by_table; /* read, and then `table` is set where there is one */
  DLPackCurrentWorkStream table;
  PyObject *function, *attribute;
} py_stream_source;

/* Attributes of an array of a type without a table, from which a tensor is made. */
typedef struct {
  py_question memory, shape, strides, dtype, device; /* strides in bytes */
  PyObject* address; /* attribute of what `memory` gives; NULL = there are no such attributes */
  PyObject* dtypes;  /* {dtype: code | bits << 8} */
} py_fields;

enum { DLX_MAX_KEYWORDS = 4 /* of __dlpack__ */ };

/* How a type that no adapter lists is asked for a capsule. */
typedef struct {
  PyObject *names, *values;  /* tuples: keywords of its __dlpack__ */
  PyObject* no_numbers;      /* no_numbers(dtype): why elements are no numbers, or "" */
  _Atomic(PyObject*) number; /* the last dtype whose elements are; strong, or NULL */
} py_producer;

struct py_source {
  PyObject_HEAD PyObject* given; /* tuple that owns what is borrowed here and in members; strong */
  py_kind kind;
  PyObject* what;                 /* what Python calls it, for the pairs that it makes; borrowed */
  PyObject* adapter;              /* the adapter or container that it is of; borrowed */
  py_take *take, *otherwise;      /* the second where the first finds nothing to take; or NULL */
  const DLPackExchangeAPI* table; /* NULL = there is none */
  DLPackDLTensorFromPyObjectNoSync look; /* its borrow slot, for the length of a call; or NULL */
  py_gate gate;
  struct {
    py_question ask, start, nbytes; /* what keeps the memory alive; where that begins, and its size,
                                       where that need be checked */
  } owner;
  py_question detach; /* of the array: one without a graph, where a guard holds */
  struct {
    py_question dtype;
    PyObject* wanted; /* {code | bits << 8: the dtype that the array must have}, or NULL */
  } confirmed;
  py_fields fields;     /* of arrays on a CUDA device only */
  py_producer producer; /* of a type that no adapter lists */
  py_stream_source streams;
  PyObject* export;    /* export(array): a dlx.Tensor, or None; or NULL */
  PyObject* unblocked; /* unblocked(array): a copy of what cannot be exported as it is, in a
                          dlx.Tensor or an array of the type, or None; or NULL */
  PyObject* parts;     /* children(obj, may_copy) of a container that becomes a list or dict; or
                          (flatten, unflatten, whether it is mutable) of one that stays itself */
  struct {
    py_stay* stay;
    PyObject* copy;  /* copy(array); or NULL */
    PyObject* ready; /* ready(array): whether borrowing it neither waits for it nor changes it; NULL
                        = it never does */
  } within;          /* its own framework */
  _Atomic(PyObject*) like; /* (target, place or None) of an example; None = ask Python; NULL = not
                              known yet; strong */
  uint64_t flags;          /* added to those of what is exported */
  struct {
    int managed, own_table, examined, immutable, host_only;
  } traits; /* read once, see choose; the last one: its adapter knows no device but the host */
  atomic_int has_worked; /* on a device, see streams.c */
};

extern PyTypeObject* py_source_type;

/* ---- convert/members.c ----------------------------------------------------------------------- */

/* A member of a source or target: how its keyword is read. */
typedef struct {
  const char* name;
  int (*read)(PyObject* value, void* where, void* self); /* Errors: -1 with an exception */
  size_t offset;
} py_member;

/* Read keywords into members; None leaves one as it is. Owns: the result is the tuple of their
 * values. GIL: needed. Errors: NULL with an exception. */
PyObject* py_members_read(const py_member* members, PyObject* keywords, void* self);

/* tp_dealloc of both types. */
void py_members_dealloc(PyObject* self);

int py_read_object(PyObject* value, void* where, void* self);
int py_read_flag(PyObject* value, void* where, void* self);
int py_read_streams(PyObject* value, void* where, void* self);

/* Make the types, and add them to a module. GIL: needed. Errors: -1 with an exception. */
int py_source_init(PyObject* module);
int py_target_init(PyObject* module);

/* ---- convert/take.c -------------------------------------------------------------------------- */

py_take py_take_tensor, py_take_borrowed, py_take_managed, py_take_exported;

/* After PY_BLOCKED: a copy that the adapter makes. In a tree it is called last. */
py_take py_take_unblocked;

/* Borrow an array for the length of a call: examined and checked as with DLX_COPIES | DLX_SHARES,
 * and nothing is allocated. Owns: nothing; *out is good until Python code runs or something else is
 * borrowed. GIL: needed; may run Python. Errors: 0 = ask Python, unless an exception is set. */
int py_look(py_source* source, py_target* target, PyObject* obj, DLTensor* out);

/* ---- convert/attributes.c, convert/producer.c ------------------------------------------------ */

py_take py_take_attributes, py_take_capsule;

/* ---- convert/identity.c ---------------------------------------------------------------------- */

py_stay py_stay_as_it_is, py_stay_examined;

/* The copy that the framework makes of it. Owns: takes `same`; new reference. GIL: needed; runs
 * Python. Errors: as py_stay. */
PyObject* py_copy_within(const py_source* source, PyObject* same);

/* Whether an array is on the host, as its table says. GIL: needed; may run Python. Errors: 0 = ask
 * Python, unless an exception is set. */
int py_is_on_host(const py_source* source, PyObject* obj);

#endif
