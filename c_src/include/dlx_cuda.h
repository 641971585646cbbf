#ifndef DLX_DLX_CUDA_H_
#define DLX_DLX_CUDA_H_

#include "dlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA without its headers: the driver is found with dlopen when it is first needed. cffi reads
 * this file too.
 *
 * A stream is a handle of the driver's: 1 is the legacy default stream, 2 the per-thread default
 * stream of the calling thread, larger numbers are created streams. 0 is never passed.
 *
 * GIL: no function needs it, and callers release it for those that may wait. Errors: without
 * another word, those of dlx_cuda_load. Each leaves a sentence for dlx_cuda_message. */

enum { DLX_STREAM_LEGACY = 1, DLX_STREAM_PER_THREAD = 2, DLX_MAX_DEVICES = 64 };

/* ---- cuda/driver.c: finding the driver, contexts, errors ------------------------------------- */

/* Load the driver and initialise it, once. Errors: DLX_E_NO_DRIVER, DLX_E_FORKED, DLX_E_DRIVER. The
 * others load nothing, and return 1 if that was done in this process, and the driver may still be
 * called (not in a forked child, nor while the process ends); if a device's context exists, too, so
 * that no call waits for its creation. */
int dlx_cuda_load(void);
int dlx_cuda_loaded(void);
int dlx_cuda_entered(int32_t device_id);

/* What failed in the last failed call of this thread. Owns: valid until the next failure. */
const char* dlx_cuda_message(void);

/* The number of devices; the name of one, cut to `room` bytes. */
int dlx_cuda_count(int32_t* count);
int dlx_cuda_name(int32_t device_id, char* name, int32_t room);

/* Where an address is: device, pinned or managed memory with its device's number, or the host. */
int dlx_cuda_where(const void* address, DLDevice* device);

/* Push a device's primary context on this thread, and pop it again; after a failure pop nothing. */
int dlx_cuda_push(int32_t device_id);
void dlx_cuda_pop(void);

/* ---- cuda/order.c: streams, readiness events, release behind a stream ------------------------ */

/* Make a stream wait for what is on another stream, or nothing if they are the same. Errors:
 * DLX_E_CAPTURE, too, if this would break a graph capture, which goes on unharmed. */
int dlx_cuda_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to);

/* Wait on the host for what is on a stream now. Errors: as dlx_cuda_order. */
int dlx_cuda_synchronize(int32_t device_id, uint64_t stream);

/* Say whether a stream captures a graph, so that the host cannot wait for it; the legacy stream,
 * whether one does that it waits for. */
int dlx_cuda_capturing(int32_t device_id, uint64_t stream, int* yes);

/* Dlx's own stream of a device, which waits for no other by itself and is never destroyed; the
 * first call makes it, and may wait. The second one is 0 before that. */
int dlx_cuda_work_stream(int32_t device_id, uint64_t* stream);
uint64_t dlx_cuda_known_stream(int32_t device_id);

/* Make dlx's own stream wait for a recorded event of another library (a cudaEvent_t). */
int dlx_cuda_wait_event(int32_t device_id, void* event);

/* A readiness event: the point on a stream at which memory is ready; reference-counted. */
typedef struct dlx_ready dlx_ready;

/* Make one for what is on a stream now; if the stream captures, the stream itself is the event.
 * `keep` keeps a stream that can die alive; without it the handle is used in this call only (or,
 * while capturing, trusted). dlx_ready_later is one for all that will be on dlx's own stream when
 * it is waited for; all of a device are alike, and dlx_ready_own_device is the device of such a
 * one, -1 for others. Owns: `out` releases `keep`. Errors: DLX_E_MEMORY, too. */
int dlx_ready_new(int32_t device_id, uint64_t stream, void* keep, dlx_release release_keep,
                  dlx_ready** out);
int dlx_ready_later(int32_t device_id, dlx_ready** out);
int32_t dlx_ready_own_device(const dlx_ready* ready);

/* Take, and give up, one count. */
dlx_ready* dlx_ready_hold(dlx_ready* ready);
void dlx_ready_drop(dlx_ready* ready);

/* Make a stream, or the host, wait for it; nothing is called if the event is on that very stream.
 * Errors: as dlx_cuda_order. */
int dlx_ready_wait(dlx_ready* ready, int32_t device_id, uint64_t stream);
int dlx_ready_synchronize(dlx_ready* ready);

/* Make the event's stream wait for what is on another stream now, before it may write to the memory
 * again. If the event's stream may be gone, the host waits. Errors: as dlx_cuda_order. */
int dlx_ready_follow(dlx_ready* ready, int32_t device_id, uint64_t stream);

/* Put an owner behind a stream: `out` is an owner whose release, dlx_use_release, releases the real
 * one once the device is done with what is on the stream then, from any thread, without waiting; in
 * a forked child that is left alone. `keep` keeps the stream alive; if it is NULL and the stream is
 * a created one, the legacy stream stands in for it. The first call for a device makes its context.
 * Owns: `out` owns both. Errors: DLX_E_MEMORY, too. */
int dlx_use_new(int32_t device_id, uint64_t stream, void* owner, dlx_release release, void* keep,
                dlx_release release_keep, void** out);
void dlx_use_release(void* use);

/* Release all owners whose device work is done, and return how many still wait. Loads nothing; the
 * driver may wait for a device without memory pools. */
int64_t dlx_cuda_release_pending(void);

/* ---- cuda/memory.c: memory on devices, and copies to, from and between them ------------------ */

/* Fresh device memory, as dlx_managed_empty, ready on dlx's own stream: from a pool of dlx's, in
 * the order of that stream; without pools from the driver, and back by dlx_cuda_release_pending.
 * Owns: the caller owns the result. Errors: as dlx_managed_new, too. */
int dlx_cuda_empty(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                   DLManagedTensorVersioned** out);

/* Copy every element of `from` to the same index of `to`, on a stream of `to`'s device, or `from`'s
 * if `to` is on the host. Memory that is too scattered for the driver's copies and has a host side
 * goes through host memory in one piece. With `wait`, or in that case, the stream is waited for;
 * else the memory must stay, and host memory unchanged, until it is done. Errors: DLX_E_DEVICE
 * _MISMATCH _PACKED, as dlx_managed_empty; DLX_E_CAPTURE before anything is copied, if it must wait
 * for a stream that captures; DLX_E_SCATTERED between devices only. */
int dlx_cuda_transfer(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream,
                      int wait);

/* 1 if a copy to fresh memory on the same device would be DLX_E_SCATTERED. */
int dlx_cuda_is_scattered(const DLTensor* from, uint64_t flags, int keep_order);

/* Forget the driver and all that is known of it, so that the next use looks for it again. For
 * tests: nothing that came from it may be in use. */
void dlx_cuda_forget(void);

/* ---- cuda/ipc.c: device memory of several processes ------------------------------------------ */

enum { DLX_IPC_NONE = 0, DLX_IPC_HANDLE = 1, DLX_IPC_DESCRIPTOR = 2 };
enum { DLX_IPC_BYTES = 64, DLX_UUID_BYTES = 16 };

/* The 16 bytes that name a device in every process. */
int dlx_ipc_uuid(int32_t device_id, unsigned char* uuid);

/* Say which allocation an address is in, and how other processes can open that: by a handle of
 * DLX_IPC_BYTES, by a descriptor, or not at all. */
int dlx_ipc_find(int32_t device_id, const void* address, uintptr_t* base, int64_t* size, int* kind);

/* Fill `handle`, or `fd`, for such an allocation. Owns: the caller owns the descriptor. */
int dlx_ipc_export(int32_t device_id, uintptr_t base, int kind, unsigned char* handle, int* fd);

/* Open memory that another process has exported, or make some that others can open, uninitialised.
 * `size` is what the other one said, and becomes what the driver says; by a descriptor the driver
 * maps so much, or fails. Owns: the caller releases `owner` by dlx_ipc_release, which calls nothing
 * in a forked child, nor while the process ends, and keeps the descriptor. Errors: DLX_E_MEMORY. */
int dlx_ipc_open(int32_t device_id, int kind, const unsigned char* handle, int fd, int64_t* size,
                 void** owner, uintptr_t* address);
int dlx_ipc_empty(int32_t device_id, int64_t nbytes, void** owner, uintptr_t* address);
void dlx_ipc_release(void* owner);

/* Take a descriptor of another process, for the caller. Errors: DLX_E_DRIVER with errno. */
int dlx_ipc_take(int32_t pid, int32_t fd, int* taken);

/* Record an event for other processes on a stream; make dlx's own stream wait for one of another
 * process. Owns: the caller drops `event` after the others have waited for it. */
int dlx_ipc_event_new(int32_t device_id, uint64_t stream, unsigned char* handle, void** event);
void dlx_ipc_event_drop(int32_t device_id, void* event);
int dlx_ipc_event_wait(int32_t device_id, const unsigned char* handle);

#ifdef __cplusplus
}
#endif

#endif
