#ifndef DLX_DLX_CUDA_H_
#define DLX_DLX_CUDA_H_

#include "dlx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA without its headers: the driver is found with dlopen when it is first needed. cffi reads
 * this file too, so it holds declarations only.
 *
 * A stream is a handle of the driver's: 1 is the legacy default stream, 2 the per-thread default
 * stream of the calling thread, larger numbers are created streams. 0 is never passed. Every
 * function that can fail leaves a sentence for dlx_cuda_message. */

enum { DLX_STREAM_LEGACY = 1, DLX_STREAM_PER_THREAD = 2, DLX_MAX_DEVICES = 64 };

/* ---- cuda/driver.c: finding the driver, contexts, errors ------------------------------------- */

/* Load the driver and initialise it, once. GIL: not needed. Errors: DLX_E_NO_DRIVER, DLX_E_FORKED,
 * DLX_E_DRIVER. */
int dlx_cuda_load(void);

/* 1 where the driver was loaded in this process and may still be called: it is no forked child, and
 * not ending. Loads nothing. GIL: not needed. */
int dlx_cuda_loaded(void);

/* What went wrong in the last call of this thread that failed. Owns: static, until this thread's
 * next failure. GIL: not needed. */
const char* dlx_cuda_message(void);

/* Devices that the driver sees. GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_cuda_count(int32_t* count);

/* A device's name, cut to `room` bytes. GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_cuda_name(int32_t device_id, char* name, int32_t room);

/* Where an address is: device, pinned or managed memory with the device's number, or plain host
 * memory. GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_cuda_where(const void* address, DLDevice* device);

/* Make a device current on this thread (its primary context is pushed), and undo that.
 * GIL: not needed. Errors: as dlx_cuda_load; a push that failed wants no pop. */
int dlx_cuda_push(int32_t device_id);
void dlx_cuda_pop(void);

/* 1 where the device's context is there, so that none of its calls waits for that to be made. Loads
 * nothing. GIL: not needed. */
int dlx_cuda_entered(int32_t device_id);

/* ---- cuda/order.c: stream synchronization, readiness events, release behind a stream ----------
 */

/* Make a stream of one device wait for what is on a stream of another, or the same, device. Nothing
 * is called where both are one stream. GIL: not needed. Errors: as dlx_cuda_load; DLX_E_CAPTURE
 * where a graph capture would be broken, which goes on unharmed. */
int dlx_cuda_order(int32_t from_device, uint64_t from, int32_t to_device, uint64_t to);

/* Wait on the host for what is on a stream now. GIL: not needed; callers release it. Errors: as
 * dlx_cuda_order. */
int dlx_cuda_synchronize(int32_t device_id, uint64_t stream);

/* Say whether a stream captures a graph, so that it cannot be waited for on the host; the legacy
 * stream, whether one does that it waits for. GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_cuda_capturing(int32_t device_id, uint64_t stream, int* yes);

/* A stream of dlx's own, one a device, which waits for no other by itself. Owns: the process.
 * GIL: not needed; callers release it where there is none yet. Errors: as dlx_cuda_load. */
int dlx_cuda_work_stream(int32_t device_id, uint64_t* stream);

/* The same, 0 where there is none yet. Loads nothing. GIL: not needed. */
uint64_t dlx_cuda_known_stream(int32_t device_id);

/* Make dlx's own stream wait for an event of somebody else's (a cudaEvent_t), recorded before.
 * GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_cuda_wait_event(int32_t device_id, void* event);

/* A readiness event: the point on a stream at which memory is ready; reference-counted. */
typedef struct dlx_ready dlx_ready;

/* Make one for what is on a stream now. Where the stream captures, the stream itself is the event.
 * `keep` keeps a stream that can die alive; without it the handle is only used in this call (or,
 * while capturing, trusted).
 * Owns: on success `out` is the caller's and releases `keep`; on failure nothing is taken.
 * GIL: not needed. Errors: as dlx_cuda_load, DLX_E_MEMORY. */
int dlx_ready_new(int32_t device_id, uint64_t stream, void* keep, dlx_release release_keep,
                  dlx_ready** out);

/* The same for whatever will be on dlx's own work stream when it is waited for. */
int dlx_ready_later(int32_t device_id, dlx_ready** out);

/* The device of such a one, -1 for others: all of a device are alike. GIL: not needed. */
int32_t dlx_ready_own_device(const dlx_ready* ready);

/* Take, and give up, one count. GIL: not needed. */
dlx_ready* dlx_ready_hold(dlx_ready* ready);
void dlx_ready_drop(dlx_ready* ready);

/* Make a stream wait for it; nothing is called where the event is on that very stream.
 * GIL: not needed. Errors: as dlx_cuda_order. */
int dlx_ready_wait(dlx_ready* ready, int32_t device_id, uint64_t stream);

/* Make the event's stream wait for what is on another stream now, after which work on it may write
 * to the memory again. Where that stream may be gone, the host waits.
 * GIL: not needed; callers release it. Errors: as dlx_cuda_order. */
int dlx_ready_follow(dlx_ready* ready, int32_t device_id, uint64_t stream);

/* Wait for it on the host. GIL: not needed; callers release it. Errors: as dlx_cuda_order. */
int dlx_ready_synchronize(dlx_ready* ready);

/* Put an owner behind a stream: `out` is an owner whose release, dlx_use_release, releases the real
 * owner once the device is done with what is on the stream then. `keep` is what keeps the stream
 * alive; where it is NULL and the stream is none of the numbered ones, the stream may be gone by
 * then, so the legacy stream stands in for it.
 * Owns: on success `out` owns both; on failure nothing is taken. GIL: not needed. Errors:
 * DLX_E_MEMORY, as dlx_cuda_load. The first call for a device makes its context. */
int dlx_use_new(int32_t device_id, uint64_t stream, void* owner, dlx_release release, void* keep,
                dlx_release release_keep, void** out);

/* Owns: gives up a use. From any thread; never waits. In a forked child the owner is left alone.
 * GIL: not needed. */
void dlx_use_release(void* use);

/* Release all owners whose device work is done; returns how many still wait. Loads nothing. Waits
 * for nothing but what the driver waits for where a device has no memory pools. GIL: not needed;
 * callers release it. */
int64_t dlx_cuda_release_pending(void);

/* ---- cuda/memory.c: memory on devices, and copies to, from and between them ------------------ */

/* Fresh device memory, ready on dlx's work stream of that device; shapes and order as
 * dlx_managed_empty. It is from a pool of dlx's own, and goes back in the order of that stream;
 * where the device has no pools, from the driver, and back by dlx_cuda_release_pending. Owns: the
 * caller owns the result. GIL: not needed; callers release it. Errors: as dlx_managed_new,
 * dlx_cuda_load. */
int dlx_cuda_empty(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                   DLManagedTensorVersioned** out);

/* Copy every element of `from` to the same index of `to`, on a stream of the device that is `to`'s,
 * or `from`'s where `to` is on the host. What is too scattered for the driver's copies and has a
 * host side goes through host memory in one piece. With `wait`, or where that was so, the stream is
 * waited for; without, the memory must stay until it is done, and host memory must not be written
 * to. Owns: nothing. GIL: not needed; callers release it. Errors: DLX_E_DEVICE _MISMATCH _PACKED,
 * as dlx_cuda_load, dlx_managed_empty; DLX_E_CAPTURE before anything is copied, where a stream that
 * captures were to be waited for; DLX_E_SCATTERED between devices only. */
int dlx_cuda_transfer(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream,
                      int wait);

/* 1 where copying to fresh memory on the same device would be DLX_E_SCATTERED. GIL: not needed. */
int dlx_cuda_is_scattered(const DLTensor* from, uint64_t flags, int keep_order);

/* Forget the driver and all that is known of it, so that the next use looks for it again. For
 * tests: nothing that came from it may be in use. GIL: not needed. */
void dlx_cuda_forget(void);

/* ---- cuda/ipc.c: device memory of several processes -------------------------------------------
 */

enum { DLX_IPC_NONE = 0, DLX_IPC_HANDLE = 1, DLX_IPC_DESCRIPTOR = 2 };
enum { DLX_IPC_BYTES = 64, DLX_UUID_BYTES = 16 };

/* The 16 bytes that name a device in every process. GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_ipc_uuid(int32_t device_id, unsigned char* uuid);

/* Say which allocation an address of a device is in, and how other processes can open that: by a
 * handle of DLX_IPC_BYTES, by a descriptor, or not at all. GIL: not needed. Errors: as
 * dlx_cuda_load. */
int dlx_ipc_find(int32_t device_id, const void* address, uintptr_t* base, int64_t* size, int* kind);

/* Fill `handle`, or `fd`, for such an allocation. Owns: the caller owns the descriptor. GIL: not
 * needed. Errors: as dlx_cuda_load. */
int dlx_ipc_export(int32_t device_id, uintptr_t base, int kind, unsigned char* handle, int* fd);

/* Open what another process has exported. `size` is what that one said, and becomes what the driver
 * says; with a descriptor the driver maps so much, or fails. Owns: `owner` is the caller's,
 * who ends it by dlx_ipc_release; the descriptor stays the caller's. GIL: not needed. Errors: as
 * dlx_cuda_load, DLX_E_MEMORY. */
int dlx_ipc_open(int32_t device_id, int kind, const unsigned char* handle, int fd, int64_t* size,
                 void** owner, uintptr_t* address);

/* Fresh device memory that other processes can open; not initialised. Owns: as dlx_ipc_open. GIL:
 * not needed. Errors: as dlx_cuda_load, DLX_E_MEMORY. */
int dlx_ipc_empty(int32_t device_id, int64_t nbytes, void** owner, uintptr_t* address);

/* Owns: gives up what dlx_ipc_open or dlx_ipc_empty gave. Nothing is called in a forked child, nor
 * while the process ends. GIL: not needed. */
void dlx_ipc_release(void* owner);

/* Take a descriptor of another process, by pidfd_getfd. Owns: the caller owns it. GIL: not needed.
 * Errors: DLX_E_DRIVER with errno. */
int dlx_ipc_take(int32_t pid, int32_t fd, int* taken);

/* An event for other processes, recorded on a stream. Owns: `event` is the caller's; it must live
 * until the others have waited for it. GIL: not needed. Errors: as dlx_cuda_load. */
int dlx_ipc_event_new(int32_t device_id, uint64_t stream, unsigned char* handle, void** event);
void dlx_ipc_event_drop(int32_t device_id, void* event);

/* Make dlx's own stream wait for such an event of another process. GIL: not needed. Errors: as
 * dlx_cuda_load. */
int dlx_ipc_event_wait(int32_t device_id, const unsigned char* handle);

#ifdef __cplusplus
}
#endif

#endif
