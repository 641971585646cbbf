#ifndef DLX_TARGET_H_
#define DLX_TARGET_H_

/* What a consumer takes, and how its arrays are made. A target is made once for each `to` of calls;
 * it knows the pairs that it has been part of. */

#include "call.h"
#include "map.h"
#include "source.h"

#include <string.h>

/* Hand a managed tensor to the consumer. Owns: takes `made`; the result is new. GIL: needed; may
 * run Python. Errors: NULL with what `failed` of the function gives. */
typedef PyObject* py_make(const py_call* call, py_target* target, DLManagedTensorVersioned* made,
                          PyObject* obj);

/* What the consumer was last found to take as it is, in one word, which is read and written whole.
 */
typedef struct {
  DLDataType dtype;   /* without bits = nothing yet */
  uint32_t alignment; /* what the consumer wants for it */
} py_trivial;

struct py_target {
  PyObject_HEAD PyObject* given; /* tuple that owns what is borrowed here; strong */
  PyObject* key;                 /* the `to` of calls; strong */
  py_kind kind;                  /* of its arrays; without a type: dlx.Tensor */
  PyObject* consumer;            /* the Target of dlx/_registry that it is; borrowed */
  PyObject* stated; /* what `accepts` is copied from; NULL = nothing is taken; borrowed */
  py_make *make, *make_direct;    /* the second of what needs no storage dtype */
  const DLPackExchangeAPI* table; /* NULL = none is used */
  PyObject* load;                 /* load(dlx.Tensor), where no table is used; or NULL */
  PyObject* place;   /* place(dlx.Tensor, committed), where the call names the host; or NULL */
  PyObject* storage; /* {code | bits << 8: (the same of the dtype to import it as, what makes the
                        array one of the real dtype)}, or NULL */
  _Atomic DLDataType direct; /* the one that was last found to be imported as it is */
  _Atomic py_trivial trivial;
  dlx_capabilities accepts;
  int is_narrow;        /* it takes more than `accepts`: what is not accepted is left to Python */
  unsigned unsupported; /* options of a call that are left to Python */
  py_switches states;   /* what `accepts` depends on */
  py_stream_source streams;
  atomic_int has_worked; /* on a device, see streams.c */
  _Atomic(py_map*) pairs;
};

extern PyTypeObject* py_target_type;

/* Let calls find another target in the place of this one. GIL: needed; may run Python. A pending
 * exception is kept. It is in convert/pairs.c. */
void py_target_forget(py_target* target);

/* Whether a target supports the options, and takes what it took when it was made; else it is
 * forgotten. Asked before anything is taken for it. GIL: needed; may run Python. Errors: 0 = ask
 * Python, unless an exception is set. */
static inline int py_target_holds(py_target* t, unsigned options) {
  if (options & t->unsupported) return 0;
  int same = t->states.n ? py_switches_hold(&t->states) : 1;
  if (same == 0) py_target_forget(t);
  return same == 1;
}

/* Say in an offer whether the consumer takes a tensor, and what a copy resolves where the options
 * allow one; `out->made` is not touched. Errors: 0 = it does not. */
int py_target_checks(py_target* target, const DLTensor* tensor, uint64_t flags, unsigned options,
                     py_offer* out);

/* The same of a tensor that py_is_trivial does not hold of. */
int py_target_examines(py_target* target, const DLTensor* tensor, uint64_t flags, unsigned options,
                       py_offer* out);

/* The same of a managed tensor of a source, which may be in device memory. Whether its
 * producer has copied it matters to calls only that say `copy`. It is in convert/take.c. */
int py_offer_checks(py_source* source, py_target* target, DLManagedTensorVersioned* made,
                    unsigned options, py_offer* out);

/* Offer a managed tensor that was just made, where the consumer takes it. Owns: takes `made`. */
void py_offer_made(py_source* source, py_target* target, DLManagedTensorVersioned* made,
                   unsigned options, py_offer* out);

/* Whether the consumer takes a tensor that was looked at before: row-major, of the dtype it took
 * last. */
static inline int py_is_trivial(const py_target* t, const DLTensor* tensor) {
  py_trivial known = atomic_load_explicit(&t->trivial, memory_order_relaxed);
  return memcmp(&tensor->dtype, &known.dtype, sizeof known.dtype) == 0 &&
         tensor->ndim <= t->accepts.max_ndim && dlx_is_plain(tensor, known.alignment);
}

/* A tensor as it is handed over: mostly a copy, in the order of dimensions that the consumer takes.
 * Owns: takes `made`; the caller owns the result. GIL: needed, released meanwhile. Errors: NULL =
 * ask Python, unless an exception is set. */
DLManagedTensorVersioned* py_target_copy(const py_target* target, DLManagedTensorVersioned* made,
                                         unsigned options, uint32_t incompatible);

#endif
