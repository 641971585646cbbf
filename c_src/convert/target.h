#ifndef DLX_TARGET_H_
#define DLX_TARGET_H_

/* A consumer's capabilities, and how its arrays are created. There is one target per `to` of calls;
 * it stores the pairs that it is part of. */

#include "call.h"
#include "map.h"
#include "source.h"

#include <string.h>

/* Hand a managed tensor to the consumer. Owns: takes `made`. Errors: NULL with the error that the
 * function's `failed` returns. */
typedef PyObject* py_hand_over(const py_call* call, py_target* target,
                               DLManagedTensorVersioned* made, PyObject* obj);

/* The last dtype that the consumer accepted unchanged, in one atomic word. */
typedef struct {
  DLDataType dtype;   /* bits 0 = none yet */
  uint32_t alignment; /* the consumer's minimum for the dtype */
} py_trivial;

struct py_target {
  PyObject_HEAD PyObject* values; /* tuple that owns the borrowed members; strong */
  PyObject* key;                  /* the `to` of calls; strong */
  py_kind kind;                   /* of its arrays; without a type: dlx.Tensor */
  PyObject* consumer;             /* its Target of dlx/_registry; borrowed */
  PyObject* stated;               /* the source of `accepts`; NULL = accepts nothing; borrowed */
  py_hand_over *hand_over, *hand_over_direct; /* hand_over_direct: without a storage dtype */
  const DLPackExchangeAPI* table;             /* or NULL */
  PyObject* load;                             /* load(dlx.Tensor), without a table; or NULL */
  PyObject* place; /* place(dlx.Tensor, committed), if the call names the host; or NULL */
  /* where(device option): a CUDA device, or None; allocate(dlx.Tensor, device): a new array like
   * it, or None; or both NULL. stack(arrays, out): see Devices.stack; or NULL */
  PyObject *where, *allocate, *stack;
  PyObject* storage; /* {code | bits << 8: (code | bits << 8 of the storage dtype, function that
                        restores the real dtype)}, or NULL */
  _Atomic DLDataType direct;  /* the last dtype that needs no storage dtype; relaxed: it is whole */
  _Atomic py_trivial trivial; /* relaxed: it is whole */
  dlx_capabilities accepts;
  int is_narrow;        /* accepts more than `accepts` says: rejections are left to Python */
  unsigned unsupported; /* options that are left to Python */
  py_switches states;   /* the conditions of `accepts` */
  py_stream_source streams;
  atomic_int has_worked;  /* on a device, see streams.c; relaxed: nothing follows from it */
  _Atomic(py_map*) pairs; /* as in map.h */
};

extern PyTypeObject* py_target_type;

/* Let calls create another target instead. A pending exception is kept. Defined in convert/pairs.c.
 */
void py_target_forget(py_target* target);

/* Whether a target supports the options, and its capabilities are unchanged; else it is forgotten.
 * Call this before taking an array. */
static inline int py_target_holds(py_target* t, unsigned options) {
  if (options & t->unsupported) return 0;
  int same = t->states.n ? py_switches_hold(&t->states) : 1;
  if (same == 0) py_target_forget(t);
  return same == 1;
}

/* Set the state of an offer: whether the consumer accepts a tensor, and the bits that an allowed
 * copy resolves. Does not change `out->made`. Errors: 0 = rejected. */
int py_target_checks(py_target* target, const DLTensor* tensor, uint64_t flags, unsigned options,
                     py_offer* out);

/* The same for a tensor that is not py_is_trivial. */
int py_target_examines(py_target* target, const DLTensor* tensor, uint64_t flags, unsigned options,
                       py_offer* out);

/* The same for a source's managed tensor, even in device memory. If the producer has copied it,
 * only calls with the option `copy` reject that. Defined in convert/take.c. */
int py_offer_checks(py_source* source, py_target* target, DLManagedTensorVersioned* made,
                    unsigned options, py_offer* out);

/* Offer a new managed tensor if the consumer accepts it. Owns: takes `made`. */
void py_offer_managed(py_source* source, py_target* target, DLManagedTensorVersioned* made,
                      unsigned options, py_offer* out);

/* Whether the consumer accepts a tensor without further checks: row-major, of the last accepted
 * dtype. */
static inline int py_is_trivial(const py_target* t, const DLTensor* tensor) {
  py_trivial known = atomic_load_explicit(&t->trivial, memory_order_relaxed);
  return memcmp(&tensor->dtype, &known.dtype, sizeof known.dtype) == 0 &&
         tensor->ndim <= t->accepts.max_ndim && dlx_is_plain(tensor, known.alignment);
}

/* Copy a tensor for the consumer, in an accepted order of dimensions, or clear its read-only flag.
 * Owns: takes `made`; the caller owns the result. GIL: needed, released during a large copy. */
DLManagedTensorVersioned* py_target_copy(const py_target* target, DLManagedTensorVersioned* made,
                                         unsigned options, uint32_t incompatible);

#endif
