/* Memory on devices, and copies to, from and between them, on a stream. The driver copies bytes,
 * rows and boxes; any other layout takes several calls, up to a limit. */

#include "driver.h"
#include "core/allocate.h"
#include "core/copy.h"

#include <stdio.h>

/* ---- allocation ------------------------------------------------------------------------------ */

typedef struct {
  cu_address address;
  int32_t device;
  uint64_t stream; /* 0 = not from the pool */
} block;

/* GIL: not needed. Nothing is called in a forked child, nor while the process ends. */
static void release_block(void* owner) {
  block* self = owner;
  if (dlx_cuda_loaded() && dlx_cuda_push(self->device) == DLX_OK) {
    int mode = cuda_relax();
    if (self->stream) {
      cu.MemFreeAsync(self->address, cuda_stream(self->stream));
    } else {
      cu.MemFree(self->address);
    }
    cuda_unrelax(mode);
    dlx_cuda_pop();
  }
  free(self);
}

/* The device's context must be current. Owns: on success `self` holds the memory. GIL: not needed.
 * Errors: DLX_E_DRIVER. */
static int allocate(block* self, size_t nbytes, uint64_t stream) {
  int pooled = cuda_has_pools(self->device), mode = cuda_relax();
  int code = pooled ? cu.MemAllocAsync(&self->address, nbytes, cuda_stream(stream))
                    : cu.MemAlloc(&self->address, nbytes);
  cuda_unrelax(mode);
  self->stream = pooled ? stream : 0;
  if (code == CU_OK) return DLX_OK;
  char operation[80];
  snprintf(operation, sizeof operation, "%s of %zu bytes on cuda:%d",
           pooled ? "cuMemAllocAsync" : "cuMemAlloc", nbytes, self->device);
  return cuda_failed(operation, code);
}

int dlx_cuda_empty(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                   DLManagedTensorVersioned** out) {
  int64_t strides[DLX_MAX_NDIM];
  uint64_t stream;
  int status = dlx_validate(like, flags);
  if (status != DLX_OK) return status;
  dlx_cuda_release_pending(); /* what is done makes room */
  status = dlx_cuda_work_stream(device_id, &stream);
  if (status != DLX_OK) return status;
  DLTensor fresh = *like;
  dlx_fresh_strides(like, keep_order, strides);
  fresh.strides = strides;
  fresh.device = (DLDevice){kDLCUDA, device_id};
  fresh.byte_offset = 0;
  fresh.data = NULL;
  if (dlx_size(like) == 0) return dlx_managed_new(&fresh, flags, NULL, NULL, out);
  block* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = (block){.device = device_id};
  status = dlx_cuda_push(device_id);
  if (status == DLX_OK) {
    status = allocate(self, (size_t)dlx_nbytes(like, flags), stream);
    dlx_cuda_pop();
  }
  if (status != DLX_OK) {
    free(self);
    return status;
  }
  fresh.data = (void*)(uintptr_t)self->address;
  status = dlx_managed_new(&fresh, flags, self, release_block, out);
  if (status != DLX_OK) release_block(self);
  return status;
}

/* ---- copies ---------------------------------------------------------------------------------- */

enum { MAX_CALLS = 1 << 14, MAX_PITCH = 1 << 30 /* bytes; any device takes more */ };

typedef struct { /* source and destination device; -1 = the host */
  int32_t from_device, to_device;
  cu_stream stream;
} ends;

static cu_address at(const char* address) {
  return (cu_address)(uintptr_t)address;
}

/* GIL: not needed. Errors: DLX_E_DRIVER. */
static int copy_run(const ends* w, char* to, const char* from, size_t nbytes) {
  cu_context from_context, to_context;
  if (w->from_device < 0 || w->to_device < 0 || w->from_device == w->to_device) {
    int code = cu.MemcpyAsync(at(to), at(from), nbytes, w->stream);
    return code == CU_OK ? DLX_OK : cuda_failed("cuMemcpyAsync", code);
  }
  int status = cuda_primary(w->from_device, &from_context);
  if (status == DLX_OK) status = cuda_primary(w->to_device, &to_context);
  if (status != DLX_OK) return status;
  int code = cu.MemcpyPeerAsync(at(to), to_context, at(from), from_context, nbytes, w->stream);
  return code == CU_OK ? DLX_OK : cuda_failed("cuMemcpyPeerAsync", code);
}

/* Rows of `width` bytes. GIL: not needed. Errors: DLX_E_DRIVER. */
static int copy_rows(const ends* w, char* to, const char* from, const dlx_axis* rows,
                     size_t width) {
  cu_box box = {.from_type = CU_MEMORY_UNIFIED,
                .from_device = at(from),
                .from_pitch = (size_t)rows->from,
                .to_type = CU_MEMORY_UNIFIED,
                .to_device = at(to),
                .to_pitch = (size_t)rows->to,
                .width = width,
                .height = (size_t)rows->extent};
  if (w->from_device < 0) { /* the driver may not know the address */
    box.from_type = CU_MEMORY_HOST;
    box.from_host = from;
  }
  if (w->to_device < 0) {
    box.to_type = CU_MEMORY_HOST;
    box.to_host = to;
  }
  int code = cu.Memcpy2DAsync(&box, w->stream);
  return code == CU_OK ? DLX_OK : cuda_failed("cuMemcpy2DAsync", code);
}

/* Whether one call can copy the rows: forward, apart from each other, on one device. */
static int is_box(const ends* w, const dlx_axis* rows, int64_t width) {
  return rows->from >= width && rows->to >= width && rows->from <= MAX_PITCH &&
         rows->to <= MAX_PITCH &&
         (w->from_device < 0 || w->to_device < 0 || w->from_device == w->to_device);
}

/* GIL: not needed. Errors: DLX_E_SCATTERED before anything is copied, DLX_E_DRIVER. */
static int copy_axes(const ends* w, char* to, const char* from, dlx_axis* axes, int n,
                     int64_t item) {
  int64_t width = item, calls = 1;
  if (n > 0 && axes[n - 1].from == item && axes[n - 1].to == item) width *= axes[--n].extent;
  int boxed = n > 0 && is_box(w, &axes[n - 1], width);
  const dlx_axis* rows = boxed ? &axes[--n] : NULL;
  for (int i = 0; i < n; i++) {
    if (axes[i].extent > MAX_CALLS / calls) return DLX_E_SCATTERED;
    calls *= axes[i].extent;
  }
  int64_t index[DLX_MAX_NDIM] = {0};
  for (;;) {
    int status =
        rows ? copy_rows(w, to, from, rows, (size_t)width) : copy_run(w, to, from, (size_t)width);
    if (status != DLX_OK) return status;
    int d = n - 1; /* odometer */
    for (; d >= 0; d--) {
      to += axes[d].to;
      from += axes[d].from;
      if (++index[d] < axes[d].extent) break;
      to -= axes[d].to * axes[d].extent;
      from -= axes[d].from * axes[d].extent;
      index[d] = 0;
    }
    if (d < 0) return DLX_OK;
  }
}

/* Nothing is waited for but what the driver itself waits for. GIL: not needed. Errors: as
 * dlx_cuda_transfer; DLX_E_SCATTERED where it would take too many single copies. */
static int copy(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream) {
  if ((!dlx_is_cuda(from->device) && !dlx_host_readable(from->device.device_type)) ||
      (!dlx_is_cuda(to->device) && !dlx_host_readable(to->device.device_type)) ||
      (!dlx_is_cuda(from->device) && !dlx_is_cuda(to->device)))
    return DLX_E_DEVICE;
  if (!dlx_same_elements(from, to)) return DLX_E_MISMATCH;
  if (dlx_size(from) == 0) return DLX_OK;
  ends w = {.from_device = dlx_is_cuda(from->device) ? from->device.device_id : -1,
            .to_device = dlx_is_cuda(to->device) ? to->device.device_id : -1,
            .stream = cuda_stream(stream)};
  int64_t item = dlx_itemsize(from->dtype, flags);
  if (item == 0 && (dlx_layout(from) || dlx_layout(to))) return DLX_E_PACKED;
  char* target = (char*)to->data + to->byte_offset;
  const char* source = (const char*)from->data + from->byte_offset;
  int status = dlx_cuda_push(w.to_device >= 0 ? w.to_device : w.from_device);
  if (status != DLX_OK) return status;
  int mode = cuda_relax(); /* a copy of pageable memory may wait */
  if (item == 0) {
    status = copy_run(&w, target, source, (size_t)dlx_nbytes(from, flags));
  } else {
    dlx_axis axes[DLX_MAX_NDIM];
    status = copy_axes(&w, target, source, axes, dlx_axes(from, to, item, axes), item);
  }
  cuda_unrelax(mode);
  dlx_cuda_pop();
  return status;
}

/* Rows of the host are packed first. GIL: not needed. */
static int send_packed(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream) {
  DLTensor like = *to; /* its layout, so that the copy is one run if the target is compact */
  DLManagedTensorVersioned* packed;
  like.device = (DLDevice){kDLCPU, 0};
  int status = dlx_managed_empty(&like, flags, 1, &packed);
  if (status != DLX_OK) return status;
  status = dlx_copy(from, &packed->dl_tensor, flags);
  if (status == DLX_OK) status = copy(&packed->dl_tensor, to, flags, stream);
  if (status == DLX_OK) status = dlx_cuda_synchronize(to->device.device_id, stream);
  dlx_managed_release(packed);
  return status;
}

/* The bytes from the first to the last element are copied to the host in one piece, and gathered
 * there. */
static int fetch_whole(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream) {
  int64_t low, high;
  dlx_extent(from, flags, &low, &high);
  char* bytes = dlx_allocate((size_t)(high - low));
  if (bytes == NULL) return DLX_E_MEMORY;
  int64_t extent = high - low;
  DLTensor source = {.data = (char*)from->data + from->byte_offset + low,
                     .device = from->device,
                     .ndim = 1,
                     .dtype = {kDLUInt, 8, 1},
                     .shape = &extent};
  DLTensor target = source;
  target.data = bytes;
  target.device = (DLDevice){kDLCPU, 0};
  int status = copy(&source, &target, 0, stream);
  if (status == DLX_OK) status = dlx_cuda_synchronize(from->device.device_id, stream);
  if (status == DLX_OK) {
    DLTensor here = *from;
    here.data = bytes - low;
    here.byte_offset = 0;
    here.device = target.device;
    status = dlx_copy(&here, to, flags);
  }
  free(bytes);
  return status;
}

/* Whether the stream can be waited for after a copy. Errors: DLX_E_CAPTURE, as dlx_cuda_load. */
static int can_wait(int32_t device_id, uint64_t stream) {
  int captures, status = dlx_cuda_capturing(device_id, stream, &captures);
  return status == DLX_OK && captures ? DLX_E_CAPTURE : status;
}

int dlx_cuda_transfer(const DLTensor* from, const DLTensor* to, uint64_t flags, uint64_t stream,
                      int wait) {
  int up = !dlx_is_cuda(from->device), down = !dlx_is_cuda(to->device);
  int32_t device_id = down ? from->device.device_id : to->device.device_id;
  int status = wait && !(up && down) ? can_wait(device_id, stream) : DLX_OK;
  if (status == DLX_OK) status = copy(from, to, flags, stream);
  if (status == DLX_E_SCATTERED && (up || down)) {
    status = wait ? DLX_OK : can_wait(device_id, stream);
    if (status != DLX_OK) return status;
    return up ? send_packed(from, to, flags, stream) : fetch_whole(from, to, flags, stream);
  }
  if (status == DLX_OK && wait) status = dlx_cuda_synchronize(device_id, stream);
  return status;
}
