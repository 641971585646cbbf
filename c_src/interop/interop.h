#ifndef DLX_INTEROP_H_
#define DLX_INTEROP_H_

/* Capsules, tables, addresses, Arrow and CUDA memory of others. Functions of this folder want the
 * GIL, return new references, and fail with NULL or -1 and an exception, unless they say more. */

#include "object/tensor.h"

extern PyMethodDef py_capsule_functions[], py_tensor_functions[], py_packed_functions[],
    py_cuda_functions[], py_arrow_functions[], py_exchange_functions[];

/* ---- interop/capsule.c ---------------------------------------------------------------------- */

/* Wrap a managed tensor in a capsule, versioned or legacy. Owns: takes `made`, also on failure. */
PyObject* py_capsule_wrap(DLManagedTensorVersioned* made, int legacy);

/* Take ownership of a fresh capsule's tensor and mark the capsule used; nothing runs between. Owns:
 * the result owes the foreign deleter. Errors: NULL without an exception: nothing has changed. */
DLManagedTensorVersioned* py_capsule_take(PyObject* capsule);

/* Undo that, of a tensor that no other thread has seen, if nothing else holds its memory. Owns: on
 * 1 takes `made`, and the capsule owns its tensor again. Errors: 0 = nothing has changed. */
int py_capsule_give_back(PyObject* capsule, DLManagedTensorVersioned* made);

/* Export what __dlpack__(max_version=...) gives, of a type on the host that has that keyword. Runs
 * Python. Owns: *out owes the foreign deleter. */
int py_capsule_export(PyObject* obj, DLManagedTensorVersioned** out);

/* ---- interop/tensors.c --------------------------------------------------------------------- */

/* The flags of a copy: the others describe a hand-over, which sets them, or the source's memory. */
static inline uint64_t py_fresh_flags(const DLManagedTensorVersioned* from) {
  return from->flags & ~(uint64_t)(DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED);
}

/* A device from a pair of int. */
int py_read_device(PyObject* pair, DLDevice* out);

/* A writable copy in fresh host memory, the order of dimensions kept if asked; of device memory on
 * a stream, 0 = of host memory. The GIL is released. Owns: the caller owns it. */
DLManagedTensorVersioned* py_managed_copy(DLManagedTensorVersioned* from, int keep_order,
                                          uint64_t stream);

/* ---- interop/cuda.c ------------------------------------------------------------------------- */

/* Put a managed tensor that shares `tensor`'s device memory behind the consumer's stream, as
 * __dlpack__(stream=...) says: the stream waits for the memory, the memory's release for the
 * stream. Owns: takes `made`, also on failure, and returns it or its like. */
DLManagedTensorVersioned* py_cuda_export(TensorObject* tensor, DLManagedTensorVersioned* made,
                                         PyObject* stream);

/* Whether a driver can order anything. The GIL is released. */
int py_cuda_can_order(void);

/* A managed tensor over the same memory that is released when the stream is done with it. Owns:
 * takes `made` and `keep` (may be NULL), also on failure. */
DLManagedTensorVersioned* py_cuda_release_behind(DLManagedTensorVersioned* made, int32_t device_id,
                                             uint64_t stream, PyObject* keep);

/* A copy of device memory on the host. Owns: the caller owns the result. */
DLManagedTensorVersioned* py_cuda_fetch(TensorObject* tensor);

/* Move the use of a tensor's memory to dlx's own stream of its device, permanently: the stream
 * waits for the memory, and readers of the tensor wait for the stream from now on.
 * py_cuda_set_ready does that for a new tensor; nothing is recorded before a reader waits. */
int py_cuda_to_own_stream(TensorObject* tensor);
int py_cuda_set_ready(TensorObject* tensor, int32_t device_id);

/* dlx_cuda_work_stream, the first time without the GIL. */
int py_cuda_work_stream(int32_t device_id, uint64_t* stream);

/* ---- interop/tables.c ----------------------------------------------------------------------- */

/* The static table of our major version in a capsule (or a number), or NULL. Errors: none. */
const DLPackExchangeAPI* py_exchange_read(PyObject* attribute, int may_be_number);

/* The table that an exact type carries, under the name of DLPack 1.3 or of 1.2, or NULL. Owns:
 * borrowed, static. Errors: NULL with an exception that py_error_forget leaves. */
const DLPackExchangeAPI* py_exchange_find(PyTypeObject* type);

/* Export an array by the managed slot of a table. Owns: *out owes the foreign deleter. */
int py_exchange_managed(const DLPackExchangeAPI* table, PyObject* obj,
                        DLManagedTensorVersioned** out);

#endif
