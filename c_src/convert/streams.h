#ifndef DLX_STREAMS_H_
#define DLX_STREAMS_H_

/* Arrays in the memory of CUDA devices: which streams producer and consumer work on, one order for
 * each pair of them, and the release behind the consumer's. It does what StreamSync of
 * dlx/_engine/streams.py does for arrays that are read where they are, by the same functions of
 * cuda/order.c; what it cannot do, or what the driver refuses, is left to the Python path. */

#include "target.h"

/* The streams of producer and consumer, for the arrays of one source on one device. */
typedef struct {
  const py_source* source;
  int32_t device;
  uint64_t from, to;             /* 0: each array knows its own; whoever reads the result waits */
  PyObject *from_keep, *to_keep; /* what keeps them alive; strong, or NULL */
  dlx_ready* ready;              /* what is on `from`, where it is not known who waits for it */
  int is_ordered;
} py_stream_pair;

/* Those of one call: more than a program has frameworks and devices at work in one. */
enum { DLX_MAX_STREAM_PAIRS = 8 };
typedef struct {
  int n, n_waited;
  py_stream_pair at[DLX_MAX_STREAM_PAIRS];
  struct {
    dlx_ready* ready;
    int32_t device;
    uint64_t stream;              /* of that device: 1 and 2 are streams of each */
  } waited[DLX_MAX_STREAM_PAIRS]; /* which stream waits already for what; each holds a count */
} py_stream_pairs;

/* Whether an array of a pair may be in such device memory, with these options. GIL: needed. */
int py_may_share_cuda(const py_source* source, const py_target* target, const DLTensor* tensor,
                      unsigned options);

/* Ask for the streams of an array that was taken, and make the consumer's wait: once for all arrays
 * of a call that are on them. Nothing was ordered where this fails, or nothing that the Python path
 * would not order. Owns: the pairs own what they note. GIL: needed, released while the driver is
 * called; may run Python. Errors: 0 = ask Python, unless an exception is set. */
int py_streams_order(py_stream_pairs* all, py_source* source, py_target* target,
                     const DLManagedTensorVersioned* made, PyObject* obj);

/* Hand over an array after py_streams_order of the same pairs: it is released when the consumer's
 * stream is done. Owns, GIL, Errors: as py_make. */
PyObject* py_streams_make(py_stream_pairs* all, const py_call* call, const py_source* source,
                          py_target* target, DLManagedTensorVersioned* made, PyObject* obj);

/* Both for one array. Owns, GIL: as py_make. Errors: NULL = ask Python, unless an exception is set.
 */
PyObject* py_streams_convert(const py_call* call, py_source* source, py_target* target,
                             DLManagedTensorVersioned* made, PyObject* obj);

/* Owns: gives up what the pairs own. GIL: needed; may run Python. A pending exception stays. */
void py_streams_clear(py_stream_pairs* all);

extern PyMethodDef py_stream_functions[];

#endif
