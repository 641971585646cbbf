#ifndef DLX_STREAMS_H_
#define DLX_STREAMS_H_

/* Arrays on CUDA devices: the streams of producer and consumer, one wait per pair of streams, and a
 * release that waits for the consumer's stream, as by StreamSync in dlx/_engine/streams.py. Other
 * cases and errors of the driver are left to that. */

#include "target.h"

/* The streams of producer and consumer for the arrays of a source on a device. */
typedef struct {
  const py_source* source;
  int32_t device;
  uint64_t from, to; /* 0 = from: each array knows its own; to: the reader of the result waits */
  PyObject *from_keep, *to_keep; /* keep the streams alive; strong, or NULL */
  dlx_ready* ready;              /* an event on `from` if the waiting stream is unknown */
  int is_ordered;
} py_stream_pair;

/* The pairs of one call: enough for all frameworks and devices of a program. With `copies`, arrays
 * are copied on `to`, which dlx chooses if the consumer is dlx.Tensor; dlx.Tensors have the streams
 * of their events. */
enum { DLX_MAX_STREAM_PAIRS = 8 };
typedef struct {
  int n, n_waited, copies;
  py_stream_pair at[DLX_MAX_STREAM_PAIRS];
  struct {
    dlx_ready* ready;
    const py_stream_pair* pair;
  } waited[DLX_MAX_STREAM_PAIRS]; /* waits that are already recorded; each holds a count */
} py_stream_pairs;

/* Get a framework's current stream on a device. Owns: *keep, or NULL, keeps it alive. Errors: 0. */
int py_stream_ask(const py_stream_source* source, int32_t device, uint64_t* stream,
                  PyObject** keep);

/* Whether an array of a pair may be shared in CUDA memory with these options. */
int py_may_share_cuda(const py_source* source, const py_target* target, const DLTensor* tensor,
                      unsigned options);

/* Find the streams of an array that was taken, and make the consumer's wait, once per call. On
 * failure nothing was ordered that the Python path would not order. Owns: the pairs own their
 * contents. GIL: needed, released during calls of the driver; may run Python. */
int py_streams_order(py_stream_pairs* all, py_source* source, py_target* target,
                     const DLManagedTensorVersioned* made, PyObject* obj);

/* Hand over an array after py_streams_order; its release waits for the consumer's stream. Owns,
 * Errors: as py_hand_over. */
PyObject* py_streams_hand_over(py_stream_pairs* all, const py_call* call, const py_source* source,
                               py_target* target, DLManagedTensorVersioned* made, PyObject* obj);

/* Order and hand over one array. Owns: as py_hand_over. */
PyObject* py_streams_convert(const py_call* call, py_source* source, py_target* target,
                             DLManagedTensorVersioned* made, PyObject* obj);

/* Make the producers' streams wait for copies; the host waits if that fails. */
void py_streams_order_back(py_stream_pairs* all);

/* Owns: releases the contents of the pairs. A pending exception is kept. */
void py_streams_clear(py_stream_pairs* all);

extern PyMethodDef py_stream_functions[];

#endif
