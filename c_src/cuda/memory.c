/* Memory on devices, and copies to, from and between them, on a stream. The driver copies bytes,
 * rows and boxes; any other layout takes several calls, up to a limit. */

#include "driver.h"
#include "core/allocate.h"
#include "core/copy.h"

#include <stdio.h>

/* ---- pools ----------------------------------------------------------------------------------- */

/* Bytes that an unused pool keeps: more takes so long to copy that allocating it adds little. */
enum { KEPT = 256 << 20 };

static char none; /* its address stands for a device that has no pools */
#define NO_POOL ((cu_pool)(void*)&none)

static _Atomic(cu_pool) pools[DLX_MAX_DEVICES]; /* NULL = not asked yet */

/* Let every device that can reach the memory of a pool use it. Copies work without, too. */
static void open_to_peers(cu_pool pool, int32_t device_id, int device) {
  cu_pool_access access[DLX_MAX_DEVICES];
  size_t n = 0;
  int32_t count = 0;
  if (dlx_cuda_count(&count) != DLX_OK) return;
  for (int32_t i = 0; i < count && i < DLX_MAX_DEVICES; i++) {
    int peer = 0, yes = 0;
    if (i == device_id || cu.DeviceGet(&peer, i) != CU_OK ||
        cu.DeviceCanAccessPeer(&yes, peer, device) != CU_OK || !yes)
      continue;
    access[n++] = (cu_pool_access){{CU_LOCATION_DEVICE, peer}, CU_ACCESS_READ_WRITE};
  }
  if (n > 0) cu.MemPoolSetAccess(pool, access, n);
}

/* cuda_once_lock is held. */
static int make_pool(int32_t device_id, cu_pool* pool) {
  int device = 0, status = CUDA(DeviceGet, &device, device_id);
  if (status != DLX_OK) return status;
  cu_pool_properties properties = {.allocation = CU_ALLOCATION_PINNED,
                                   .where = {CU_LOCATION_DEVICE, device}};
  status = CUDA(MemPoolCreate, pool, &properties);
  if (status != DLX_OK) return status;
  uint64_t kept = KEPT;
  cu.MemPoolSetAttribute(*pool, CU_POOL_RELEASE_THRESHOLD, &kept); /* slower without */
  open_to_peers(*pool, device_id, device);
  return DLX_OK;
}

/* Find dlx's pool of a device, which is current, or make it; NO_POOL if the device has none. */
static int find_pool(int32_t device_id, cu_pool* pool) {
  int status = DLX_OK, has_pools = 0;
  *pool = atomic_load(&pools[device_id]);
  if (*pool) return DLX_OK;
  cuda_once_begin();
  *pool = atomic_load(&pools[device_id]);
  if (*pool == NULL) {
    *pool = NO_POOL;
    if (cu.MemPoolCreate && cuda_attribute(device_id, CU_DEVICE_HAS_POOLS, &has_pools) == DLX_OK &&
        has_pools)
      status = make_pool(device_id, pool);
    if (status == DLX_OK) atomic_store(&pools[device_id], *pool);
  }
  cuda_once_end();
  return status;
}

/* ---- allocation ------------------------------------------------------------------------------ */

typedef struct {
  cu_address address;
  int32_t device;
  uint64_t stream; /* of the pool's allocation; 0 = not from a pool */
} block;

/* In stream order to a pool; else the driver waits for the device. */
static void release_block(void* owner) {
  block* self = owner;
  int mode;
  if (dlx_cuda_loaded() && cuda_enter(self->device, &mode) == DLX_OK) {
    self->stream ? cu.MemFreeAsync(self->address, cuda_stream(self->stream))
                 : cu.MemFree(self->address);
    cuda_leave(mode);
  }
  free(self);
}

/* Owns: `self` holds the memory. Errors: as dlx_cuda_load. */
static int allocate(block* self, size_t nbytes, uint64_t stream) {
  cu_pool pool;
  int before, status = cuda_enter(self->device, &before);
  if (status != DLX_OK) return status;
  int pooled = 0, code = CU_OK;
  status = find_pool(self->device, &pool);
  if (status == DLX_OK) {
    pooled = pool != NO_POOL;
    code = pooled ? cu.MemAllocFromPoolAsync(&self->address, nbytes, pool, cuda_stream(stream))
                  : cu.MemAlloc(&self->address, nbytes);
  }
  cuda_leave(before);
  self->stream = pooled ? stream : 0;
  if (code == CU_OK) return status;
  char operation[80];
  snprintf(operation, sizeof operation, "%s of %zu bytes on cuda:%d",
           pooled ? "cuMemAllocFromPoolAsync" : "cuMemAlloc", nbytes, self->device);
  return cuda_failed(operation, code);
}

/* Owns: the caller owns `out`. Errors: DLX_E_MEMORY, as dlx_cuda_load. */
static int new_block(int32_t device_id, size_t nbytes, uint64_t stream, block** out) {
  block* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = (block){.device = device_id};
  int status = allocate(self, nbytes, stream);
  if (status == DLX_OK)
    *out = self;
  else
    free(self);
  return status;
}

int dlx_cuda_empty(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                   DLManagedTensorVersioned** out) {
  int64_t strides[DLX_MAX_NDIM];
  uint64_t stream;
  DLTensor fresh;
  block* made;
  int status = dlx_fresh(like, flags, keep_order, strides, &fresh);
  if (status == DLX_OK) status = dlx_cuda_load();
  if (status != DLX_OK) return status;
  dlx_cuda_release_pending(); /* what is done makes room */
  fresh.device = (DLDevice){kDLCUDA, device_id};
  if (dlx_size(like) == 0) return dlx_managed_new(&fresh, flags, NULL, NULL, out);
  status = dlx_cuda_work_stream(device_id, &stream);
  if (status == DLX_OK)
    status = new_block(device_id, (size_t)dlx_nbytes(like, flags), stream, &made);
  if (status != DLX_OK) return status;
  fresh.data = (void*)(uintptr_t)made->address;
  void* owner = made;
  dlx_release release = made->stream ? release_block : dlx_use_release;
  if (!made->stream) status = cuda_use_waiting(device_id, stream, made, release_block, &owner);
  if (status != DLX_OK) release = release_block;
  if (status == DLX_OK) status = dlx_managed_new(&fresh, flags, owner, release, out);
  if (status != DLX_OK) release(owner);
  return status;
}

/* ---- copies ---------------------------------------------------------------------------------- */

enum { MAX_CALLS = 1 << 14, MAX_PITCH = 1 << 30 /* bytes; any device takes more */ };

typedef struct {
  int32_t from_device, to_device; /* -1 = the host */
  cu_stream stream;               /* of a device that is entered */
  const DLTensor *from, *to;
  uint64_t flags;
} transfer;

static cu_address at(const char* address) {
  return (cu_address)(uintptr_t)address;
}

static int copy_run(const transfer* t, char* to, const char* from, size_t nbytes) {
  cu_context from_context = NULL, to_context = NULL;
  if (t->from_device < 0 || t->to_device < 0 || t->from_device == t->to_device)
    return CUDA(MemcpyAsync, at(to), at(from), nbytes, t->stream);
  int status = cuda_primary(t->from_device, &from_context);
  if (status == DLX_OK) status = cuda_primary(t->to_device, &to_context);
  if (status != DLX_OK) return status;
  return CUDA(MemcpyPeerAsync, at(to), to_context, at(from), from_context, nbytes, t->stream);
}

/* Copy rows of `width` bytes. */
static int copy_rows(const transfer* t, char* to, const char* from, const dlx_axis* rows,
                     size_t width) {
  cu_box box = {.from_type = CU_MEMORY_UNIFIED,
                .from_device = at(from),
                .from_pitch = (size_t)rows->from,
                .to_type = CU_MEMORY_UNIFIED,
                .to_device = at(to),
                .to_pitch = (size_t)rows->to,
                .width = width,
                .height = (size_t)rows->extent};
  if (t->from_device < 0) { /* the driver may not know the address */
    box.from_type = CU_MEMORY_HOST;
    box.from_host = from;
  }
  if (t->to_device < 0) {
    box.to_type = CU_MEMORY_HOST;
    box.to_host = to;
  }
  return CUDA(Memcpy2DAsync, &box, t->stream);
}

/* Whether one call can copy the rows: forward, apart from each other, on one device. */
static int is_box(const transfer* t, const dlx_axis* rows, int64_t width) {
  return rows->from >= width && rows->to >= width && rows->from <= MAX_PITCH &&
         rows->to <= MAX_PITCH &&
         (t->from_device < 0 || t->to_device < 0 || t->from_device == t->to_device);
}

/* One call for each index of the first `n` axes, of `width` bytes or a box of such rows. */
typedef struct {
  int64_t width;
  const dlx_axis* rows; /* NULL: no box */
  int n;
} parts;

/* Errors: DLX_E_SCATTERED if it would take too many calls. */
static int divide(const transfer* t, const dlx_axis* axes, int n, int64_t item, parts* p) {
  int64_t calls = 1;
  *p = (parts){.width = item};
  if (n > 0 && axes[n - 1].from == item && axes[n - 1].to == item) p->width *= axes[--n].extent;
  if (n > 0 && is_box(t, &axes[n - 1], p->width)) p->rows = &axes[--n];
  p->n = n;
  for (int i = 0; i < n; i++) {
    if (axes[i].extent > MAX_CALLS / calls) return DLX_E_SCATTERED;
    calls *= axes[i].extent;
  }
  return DLX_OK;
}

int dlx_cuda_is_scattered(const DLTensor* from, uint64_t flags, int keep_order) {
  int64_t strides[DLX_MAX_NDIM], item = dlx_itemsize(from->dtype, flags);
  if (item == 0 || dlx_size(from) == 0) return 0;
  transfer t = {.from_device = from->device.device_id, .to_device = from->device.device_id};
  DLTensor to = *from;
  dlx_axis axes[DLX_MAX_NDIM];
  parts p;
  dlx_fresh_strides(from, keep_order, strides);
  to.strides = strides;
  return divide(&t, axes, dlx_axes(from, &to, item, axes), item, &p) != DLX_OK;
}

/* Begin a copy. Errors: DLX_E_PACKED; DLX_E_SCATTERED before anything is copied. */
static int copy(const transfer* t) {
  const DLTensor *from = t->from, *to = t->to;
  int64_t index[DLX_MAX_NDIM] = {0}, item = dlx_itemsize(from->dtype, t->flags);
  if (item == 0 && (dlx_layout(from) || dlx_layout(to))) return DLX_E_PACKED;
  char* target = (char*)to->data + to->byte_offset;
  const char* source = (const char*)from->data + from->byte_offset;
  if (item == 0) return copy_run(t, target, source, (size_t)dlx_nbytes(from, t->flags));
  dlx_axis axes[DLX_MAX_NDIM];
  parts p;
  int status = divide(t, axes, dlx_axes(from, to, item, axes), item, &p);
  if (status != DLX_OK) return status;
  do {
    status = p.rows ? copy_rows(t, target, source, p.rows, (size_t)p.width)
                    : copy_run(t, target, source, (size_t)p.width);
  } while (status == DLX_OK && dlx_next(axes, p.n, index, &target, &source));
  return status;
}

/* Pack rows of the host first. */
static int send_packed(transfer t) {
  DLTensor like = *t.to; /* its layout, so that the copy is one run if the target is compact */
  DLManagedTensorVersioned* packed;
  like.device = (DLDevice){kDLCPU, 0};
  int status = dlx_managed_empty(&like, t.flags, 1, &packed);
  if (status != DLX_OK) return status;
  status = dlx_copy(t.from, &packed->dl_tensor, t.flags);
  t.from = &packed->dl_tensor;
  if (status == DLX_OK) status = copy(&t);
  if (status == DLX_OK) status = CUDA(StreamSynchronize, t.stream);
  dlx_managed_release(packed);
  return status;
}

/* Copy the bytes from the first to the last element in one piece, and gather them on the host. */
static int fetch_whole(const transfer* t) {
  int64_t low, high;
  DLTensor here = *t->from;
  dlx_extent(&here, t->flags, &low, &high);
  char* bytes = dlx_allocate((size_t)(high - low));
  if (bytes == NULL) return DLX_E_MEMORY;
  const char* first = (const char*)here.data + here.byte_offset + low;
  int status = copy_run(t, bytes, first, (size_t)(high - low));
  if (status == DLX_OK) status = CUDA(StreamSynchronize, t->stream);
  here.data = bytes - low;
  here.byte_offset = 0;
  here.device = (DLDevice){kDLCPU, 0};
  if (status == DLX_OK) status = dlx_copy(&here, t->to, t->flags);
  free(bytes);
  return status;
}

int dlx_cuda_transfer(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream,
                      int wait) {
  int up = !dlx_is_cuda(from->device), down = !dlx_is_cuda(to->device);
  if ((up && !dlx_host_readable(from->device.device_type)) ||
      (down && !dlx_host_readable(to->device.device_type)) || (up && down))
    return DLX_E_DEVICE;
  if (!dlx_same_elements(from, to)) return DLX_E_MISMATCH;
  if (dlx_size(from) == 0) return DLX_OK;
  int32_t from_device = up ? -1 : from->device.device_id;
  int32_t to_device = down ? -1 : to->device.device_id;
  transfer t = {from_device, to_device, cuda_stream(stream), from, to, flags};
  int before, status = cuda_enter(down ? from_device : to_device, &before);
  if (status != DLX_OK) return status;
  if (wait) status = cuda_can_wait(stream);
  if (status == DLX_OK) status = copy(&t); /* which may wait for pageable memory */
  if (status == DLX_E_SCATTERED && (up || down)) {
    status = cuda_can_wait(stream); /* the host takes part in this one */
    if (status == DLX_OK) status = up ? send_packed(t) : fetch_whole(&t);
  } else if (status == DLX_OK && wait) {
    status = CUDA(StreamSynchronize, t.stream);
  }
  cuda_leave(before);
  return status;
}

void dlx_cuda_forget(void) {
  for (int i = 0; i < DLX_MAX_DEVICES; i++) {
    cu_pool pool = atomic_exchange(&pools[i], NULL);
    if (pool && pool != NO_POOL) cu.MemPoolDestroy(pool);
  }
  cuda_forget_streams();
  cuda_forget_driver();
}
