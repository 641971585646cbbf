#ifndef DLX_DLX_CUDA_H_
#define DLX_DLX_CUDA_H_

#include "dlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA without its headers: dlopen loads the driver on first use. cffi parses this file, too.
 *
 * A stream is a handle of the driver: 1 is the legacy default stream, 2 the per-thread default
 * stream of the calling thread, larger numbers are created streams. 0 is never passed.
 *
 * GIL: never needed; callers release it for functions that may wait. Errors: those of
 * dlx_cuda_load, unless the function says otherwise. dlx_cuda_message describes each failure. */

enum { DLX_STREAM_LEGACY = 1, DLX_STREAM_PER_THREAD = 2, DLX_MAX_DEVICES = 64 };

/* ---- cuda/driver.c: loading the driver, contexts, errors ------------------------------------- */

/* Load and initialise the driver, once. Errors: DLX_E_NO_DRIVER, DLX_E_FORKED, DLX_E_DRIVER. The
 * other two load nothing: return 1 if the driver is loaded and usable (not in a forked child, nor
 * at exit); if the device also has a context, so that no call waits for its creation. */
int dlx_cuda_load(void);
int dlx_cuda_loaded(void);
int dlx_cuda_entered(int32_t device_id);

/* Return the name or path of the driver: DLX_CUDA_DRIVER, or the system's. */
const char* dlx_cuda_library(void);

/* Describe the last failed call of this thread. Owns: valid until the next failure. */
const char* dlx_cuda_message(void);

/* The number of devices; the name of a device, truncated to `room` bytes. */
int dlx_cuda_count(int32_t* count);
int dlx_cuda_name(int32_t device_id, char* name, int32_t room);

/* Find the device of an address: device, pinned or managed memory with its device, or the host. */
int dlx_cuda_where(const void* address, DLDevice* device);

/* Push a device's primary context on this thread; pop it. After a failed push, pop nothing. */
int dlx_cuda_push(int32_t device_id);
void dlx_cuda_pop(void);

/* Destroy an event. Does nothing in a forked child or at exit. */
void dlx_cuda_drop_event(int32_t device_id, void* event);

/* For tests: unload the driver, of which no object may be in use. The next use loads it again. */
void dlx_cuda_forget(void);

/* ---- cuda/order.c: streams, readiness events, release behind a stream ------------------------ */

/* Make a stream wait for the current work of another stream; do nothing if they are the same.
 * Errors: also DLX_E_CAPTURE, if this would invalidate a graph capture, which continues. */
int dlx_cuda_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to);

/* Wait on the host for a stream's current work. Errors: as dlx_cuda_order. */
int dlx_cuda_synchronize(int32_t device_id, uint64_t stream);

/* Check that a stream, or the host (`to_device` -1), may wait for another stream: neither captures
 * a graph, or both the same one. Records nothing. Errors: as dlx_cuda_order. */
int dlx_cuda_can_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to);

/* dlx's own stream of a device, which waits for no other stream implicitly and is never destroyed.
 * The first call creates it and may wait; before that, dlx_cuda_known_stream returns 0. */
int dlx_cuda_work_stream(int32_t device_id, uint64_t* stream);
uint64_t dlx_cuda_known_stream(int32_t device_id);

/* Make dlx's own stream wait for another library's recorded event (a cudaEvent_t). */
int dlx_cuda_wait_event(int32_t device_id, void* event);

/* A readiness event: the point on a stream at which memory is ready. Reference-counted. */
typedef struct dlx_ready dlx_ready;

/* Create an event for a stream's current work; if the stream captures, the stream itself is the
 * event. `keep` keeps a temporary stream alive; if it is NULL, the handle is used in this call only
 * (or trusted, during a capture). Stream 0: all work on dlx's own stream at the time of the wait;
 * such events of a device are alike, and dlx_ready_own_device returns the device (-1 for others).
 * Owns: `out` releases `keep`. Errors: also DLX_E_MEMORY. */
int dlx_ready_new(int32_t device_id, uint64_t stream, void* keep, dlx_release release_keep,
                  dlx_ready** out);
int32_t dlx_ready_own_device(const dlx_ready* ready);

/* Add and release a holder. */
dlx_ready* dlx_ready_hold(dlx_ready* ready);
void dlx_ready_drop(dlx_ready* ready);

/* Make a stream, or the host, wait for an event; does nothing if the event is on the same stream.
 * Errors: as dlx_cuda_order. */
int dlx_ready_wait(dlx_ready* ready, int32_t device_id, uint64_t stream);
int dlx_ready_synchronize(dlx_ready* ready);

/* Return an event's stream, valid while the event is held; 0 if it may be destroyed. */
uint64_t dlx_ready_stream(const dlx_ready* ready, int32_t* device_id);

/* Put an owner behind a stream: dlx_use_release(out) releases the owner once the device finishes
 * the stream's current work, from any thread, without waiting; in a forked child the owner leaks.
 * `keep` keeps the stream alive; if it is NULL, the legacy stream substitutes a created one. The
 * first call for a device creates its context. Owns: `out` owns both. Errors: also DLX_E_MEMORY. */
int dlx_use_new(int32_t device_id, uint64_t stream, void* owner, dlx_release release, void* keep,
                dlx_release release_keep, void** out);
void dlx_use_release(void* use);

/* Release all owners whose device work is done; return how many still wait. Loads nothing. */
int64_t dlx_cuda_release_pending(void);

/* ---- cuda/memory.c: memory on devices, and copies to, from and between them ------------------ */

/* Allocate device memory like dlx_managed_empty from dlx's pool of a device, in the order of a
 * stream (0 = dlx's own). It is freed on dlx's own stream: the caller must release it behind
 * another one. Owns: the caller owns the result. Errors: also as dlx_managed_new. */
int dlx_cuda_empty(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                   uint64_t stream, DLManagedTensorVersioned** out);

/* Copy each element of `from` to the same index of `to`, on a stream of `from`'s device, or of
 * `to`'s if `from` is on the host. To or from the host, memory that is not one run or wide rows
 * goes through one piece of host memory. Waits for the stream in that case and if `wait` is set;
 * otherwise the memory must live, and host memory stay unchanged, until the copy is done. Errors:
 * DLX_E_DEVICE _MISMATCH _PACKED, as dlx_managed_empty; DLX_E_CAPTURE before anything is copied, if
 * it must wait for a stream that captures; DLX_E_SCATTERED between devices only. */
int dlx_cuda_transfer(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream,
                      int wait);

/* Copy `n` > 0 tensors with whole bytes, of one shape, dtype and device, along an axis of `to`, or
 * one to `to` (axis -1), on a stream of its device. Rows at equal distances are copied together.
 * Waits for nothing. */
int dlx_cuda_stack(const DLTensor* const* rows, int64_t n, const DLTensor* to, uint64_t flags,
                   int axis, uint64_t stream);

/* Return 1 if a copy to new memory on the same device would fail with DLX_E_SCATTERED. */
int dlx_cuda_is_scattered(const DLTensor* from, uint64_t flags, int keep_order);

/* ---- cuda/ipc.c: sharing device memory between processes ------------------------------------- */

enum { DLX_IPC_NONE = 0, DLX_IPC_HANDLE = 1, DLX_IPC_DESCRIPTOR = 2 };
enum { DLX_IPC_BYTES = 64, DLX_UUID_BYTES = 16 };

/* Get the 16 bytes that identify a device in every process. */
int dlx_ipc_uuid(int32_t device_id, unsigned char* uuid);

/* Find the allocation of an address, and how other processes can open it: by a handle of
 * DLX_IPC_BYTES, by a descriptor, or not at all. */
int dlx_ipc_find(int32_t device_id, const void* address, uintptr_t* base, int64_t* size, int* kind);

/* Export such an allocation to `handle` or `fd`. Owns: the caller owns the descriptor. */
int dlx_ipc_export(int32_t device_id, uintptr_t base, int kind, unsigned char* handle, int* fd);

/* Open memory that another process exported, or allocate uninitialised memory that others can open
 * (DLX_IPC_NONE). `size` is the exporter's size, and is set to the driver's; with a descriptor, the
 * driver maps exactly this size or fails. Owns: the caller releases `owner` with dlx_ipc_release,
 * which does nothing in a forked child or at exit, and does not close the descriptor. Errors:
 * DLX_E_MEMORY. */
int dlx_ipc_open(int32_t device_id, int kind, const unsigned char* handle, int fd, int64_t* size,
                 void** owner, uintptr_t* address);
void dlx_ipc_release(void* owner);

/* Record an event for other processes on dlx's own stream; make that wait for another process's
 * event. Owns: the caller drops `event` after the others have waited for it. */
int dlx_ipc_record(int32_t device_id, unsigned char* handle, void** event);
int dlx_ipc_wait(int32_t device_id, const unsigned char* handle);

#ifdef __cplusplus
}
#endif

#endif
