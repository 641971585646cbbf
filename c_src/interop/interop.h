#ifndef DLX_INTEROP_H_
#define DLX_INTEROP_H_

/* Exchange with other libraries: capsules, exchange tables, Arrow, addresses, CUDA memory. Unless
 * noted otherwise, the caller holds the GIL, and functions return new references, or NULL or -1
 * with an exception. */

#include "object/tensor.h"

extern PyMethodDef py_capsule_functions[], py_tensor_functions[], py_row_functions[],
    py_packed_functions[], py_cuda_functions[], py_arrow_functions[], py_exchange_functions[];

/* ---- interop/capsule.c ----------------------------------------------------------------------- */

/* Wrap a managed tensor in a capsule, versioned or legacy. Owns: takes `made`, even on failure. */
PyObject* py_capsule_wrap(DLManagedTensorVersioned* made, int legacy);

/* Take ownership of a fresh capsule's tensor and mark the capsule as used, atomically. Owns: the
 * result owes the foreign deleter. Errors: NULL without an exception: nothing has changed. */
DLManagedTensorVersioned* py_capsule_take(PyObject* capsule);

/* Undo py_capsule_take if only the caller holds the tensor and its memory. Owns: on 1 takes `made`,
 * and the capsule owns its tensor again. Errors: 0 = nothing has changed. */
int py_capsule_give_back(PyObject* capsule, DLManagedTensorVersioned* made);

/* Export a host array by __dlpack__(max_version=...), which runs Python. Owns: *out owes the
 * foreign deleter. */
int py_capsule_export(PyObject* obj, DLManagedTensorVersioned** out);

/* ---- interop/tensors.c ----------------------------------------------------------------------- */

/* The flags of a copy: flags of the source's memory and hand-over are cleared. */
static inline uint64_t py_fresh_flags(const DLManagedTensorVersioned* from) {
  return from->flags & ~(uint64_t)(DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED);
}

enum { PY_FEW_BYTES = 1 << 14 /* faster to copy than to release the GIL */ };

int py_read_device(PyObject* pair, DLDevice* out);
int py_read_dtype(PyObject* triple, DLDataType* out);

/* Copy to writable host memory: from the host if `stream` is 0, and cast to a dtype (NULL: the
 * same), else from the device on that stream. Releases the GIL. Owns: the caller owns the result.
 */
DLManagedTensorVersioned* py_managed_copy(DLManagedTensorVersioned* from, const DLDataType* dtype,
                                          int keep_order, uint64_t stream);

/* ---- interop/rows.c -------------------------------------------------------------------------- */

/* Return 1 if two tensors may have memory in common. */
int py_may_meet(const DLTensor* a, uint64_t a_flags, const DLTensor* b, uint64_t b_flags);

/* ---- interop/cuda.c -------------------------------------------------------------------------- */

/* Order a managed tensor that shares `tensor`'s memory with the consumer's stream, the argument of
 * __dlpack__: the stream waits for the memory, the memory's release waits for the stream.
 * Owns: takes `made`, even on failure, and returns it or a tensor of the same memory. */
DLManagedTensorVersioned* py_cuda_export(TensorObject* tensor, DLManagedTensorVersioned* made,
                                         PyObject* stream);

/* Whether a CUDA driver is loaded, or can be. Releases the GIL. */
int py_cuda_can_order(void);

/* Return a managed tensor of the same memory whose release waits for the stream. Owns: takes `made`
 * and `keep` (may be NULL), even on failure. */
DLManagedTensorVersioned* py_cuda_release_behind(DLManagedTensorVersioned* made, int32_t device_id,
                                                 uint64_t stream, PyObject* keep);

/* Copy device memory to the host. Owns: the caller owns the result. */
DLManagedTensorVersioned* py_cuda_fetch(TensorObject* tensor);

/* Move a tensor permanently to dlx's stream of its device: the stream waits for the memory, readers
 * of the tensor wait for the stream. No event is recorded before a reader waits. */
int py_cuda_to_own_stream(TensorObject* tensor);

/* Call dlx_ready_new without the GIL. Owns: the result holds `keep`. Errors: a status. */
int py_cuda_new_ready(int32_t device_id, uint64_t stream, PyObject* keep, dlx_ready** out);

/* Make readers of a tensor wait for the work on a stream (0 = all work on dlx's own stream, without
 * an event). `keep` (or NULL) keeps the stream alive. */
int py_cuda_set_ready(TensorObject* tensor, int32_t device_id, uint64_t stream, PyObject* keep);

/* Allocate device memory like a tensor, ready on dlx's stream (0), or for a copy on another one,
 * which its release waits for. Owns: new reference. */
PyObject* py_cuda_new(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                      uint64_t stream, PyObject* keep);

/* Call dlx_cuda_work_stream; the first call of a device releases the GIL. */
int py_cuda_work_stream(int32_t device_id, uint64_t* stream);

/* ---- interop/tables.c ------------------------------------------------------------------------ */

/* Return the table of DLPack 1.x in a capsule (or at an address), or NULL. Errors: never raises. */
const DLPackExchangeAPI* py_exchange_read(PyObject* attribute, int may_be_number);

/* Return the table of an exact type, by its name in DLPack 1.3 or 1.2, or NULL. Owns: the table is
 * static. Errors: NULL with an exception only if py_error_forget does not clear it. */
const DLPackExchangeAPI* py_exchange_find(PyTypeObject* type);

/* Export an array by its table. Owns: *out owes the foreign deleter. */
int py_exchange_managed(const DLPackExchangeAPI* table, PyObject* obj,
                        DLManagedTensorVersioned** out);

#endif
