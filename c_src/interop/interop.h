#ifndef DLX_INTEROP_H_
#define DLX_INTEROP_H_

/* Capsules, tables, addresses, Arrow and CUDA memory of others. cffi never reads this. Everything
 * here wants the GIL unless it says so. */

#include "object/tensor.h"

/* ---- interop/capsule.c ---------------------------------------------------------------------- */

/* Wrap a managed tensor in a capsule, versioned or legacy. Owns: takes `made`, also on failure (it
 * is released then). Errors: NULL with an exception. */
PyObject* py_capsule_wrap(DLManagedTensorVersioned* made, int legacy);

/* Take ownership of a fresh capsule's tensor and mark the capsule used; nothing runs between. Owns:
 * the caller owns the result, which owes the foreign deleter. Errors: NULL without an exception: it
 * is no fresh capsule, or a refused one, and nothing has changed. */
DLManagedTensorVersioned* py_capsule_take(PyObject* capsule);

/* Undo that, of a tensor that no other thread has seen, if nobody else holds its memory. Owns: on 1
 * takes `made`, and the capsule owns its tensor again. Errors: 0 = nothing has changed. */
int py_capsule_give_back(PyObject* capsule, DLManagedTensorVersioned* made);

/* Export what an object's __dlpack__(max_version=...) gives: of a type that is known to have that
 * keyword, on the host. Owns: the caller owns *out, which owes the foreign deleter. GIL: needed;
 * runs Python. Errors: -1 with an exception. */
int py_capsule_export(PyObject* obj, DLManagedTensorVersioned** out);

extern PyMethodDef py_capsule_functions[];

/* ---- interop/builtins.c --------------------------------------------------------------------- */

/* The flags of a copy: the others describe a hand-over, which sets them, or the source's memory. */
static inline uint64_t py_fresh_flags(const DLManagedTensorVersioned* from) {
  return from->flags & ~(uint64_t)(DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED);
}

/* A device from a pair of int. Errors: -1 with an exception. */
int py_read_device(PyObject* pair, DLDevice* out);

/* A writable copy in fresh host memory, the order of dimensions kept if asked. The GIL is released
 * while bytes move. Owns: the caller owns the result. Errors: NULL with an exception. */
DLManagedTensorVersioned* py_managed_copy(DLManagedTensorVersioned* from, int keep_order);

extern PyMethodDef py_make_functions[];

/* ---- interop/packed.c ----------------------------------------------------------------------- */

extern PyMethodDef py_within_functions[];

/* ---- interop/at_address.c ------------------------------------------------------------------- */

extern PyMethodDef py_adopt_functions[];

/* ---- interop/cuda.c ------------------------------------------------------------------------- */

/* Put a managed tensor that shares `tensor`'s device memory behind the consumer's stream, as
 * __dlpack__(stream=...) says: the stream waits for the memory, the memory's release for the
 * stream. Owns: takes `made` and returns it or its like; on failure it is released. Errors: NULL
 * with an exception. */
DLManagedTensorVersioned* py_cuda_export(TensorObject* tensor, DLManagedTensorVersioned* made,
                                         PyObject* stream);

/* Whether there is a driver that can order anything. GIL: needed, released meanwhile. Errors: none.
 */
int py_cuda_can_order(void);

/* A managed tensor over the same memory that is released when the stream is done with it. Owns:
 * takes `made` and `keep` (may be NULL); on failure both are released. Errors: NULL with an
 * exception. */
DLManagedTensorVersioned* py_cuda_put_behind(DLManagedTensorVersioned* made, int32_t device_id,
                                             uint64_t stream, PyObject* keep);

/* A copy of device memory on the host. Owns: the caller owns the result. Errors: NULL with an
 * exception. */
DLManagedTensorVersioned* py_cuda_fetch(TensorObject* tensor);

/* Move the use of a tensor's memory to dlx's own stream of its device, permanently: the stream
 * waits for the memory, and readers of the tensor wait for the stream from now on. Errors: -1 with
 * an exception. */
int py_cuda_to_own_stream(TensorObject* tensor);

/* Let a new tensor be ready when dlx's own stream is; nothing is recorded before somebody waits.
 * Errors: -1 with an exception. */
int py_cuda_ready_here(TensorObject* tensor, int32_t device_id);

/* dlx_cuda_work_stream, the first time without the GIL. Errors: -1 with an exception. */
int py_cuda_work_stream(int32_t device_id, uint64_t* stream);

extern PyMethodDef py_cuda_functions[];

/* ---- interop/arrow.c ------------------------------------------------------------------------ */

extern PyMethodDef py_arrow_functions[];

/* ---- interop/tables.c ----------------------------------------------------------------------- */

/* The table behind a capsule (or, where it may be one, a number) whose major version is ours, newer
 * ones being walked back; NULL for anything else. Owns: borrowed, static. GIL: needed. Errors:
 * none. */
const DLPackExchangeAPI* py_exchange_read(PyObject* attribute, int may_be_number);

/* The table that an exact type carries, under the name of DLPack 1.3 or of 1.2, or NULL. Owns:
 * borrowed, static. GIL: needed. Errors: NULL with what py_error_forget leaves. */
const DLPackExchangeAPI* py_exchange_find(PyTypeObject* type);

/* Export an array by the managed slot of a table that has one. Owns: the caller owns *out, which
 * owes the foreign deleter. GIL: needed; may run Python. Errors: -1 with an exception. */
int py_exchange_managed(const DLPackExchangeAPI* table, PyObject* obj,
                        DLManagedTensorVersioned** out);

extern PyMethodDef py_exchange_functions[];

#endif
