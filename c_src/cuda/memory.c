/* Device memory, and copies to, from and between devices, on a stream. The driver copies bytes,
 * rows and boxes; other layouts take several calls, up to a limit. */

#include "driver.h"
#include "core/allocate.h"
#include "core/copy.h"

#include <stdio.h>
#include <string.h>

/* ---- pools ----------------------------------------------------------------------------------- */

/* Bytes that an unused pool keeps. Copying more takes so long that allocation adds little. */
enum { POOL_BYTES = 256 << 20 };

/* Let all devices that can access a pool's memory use it. Copies also work without. */
static void allow_peers(cu_pool pool, int32_t device_id, int device) {
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

static int create_pool(int32_t device_id, uint64_t* made) {
  cu_pool pool = NULL;
  int device;
  CUDA_TRY(CUDA(DeviceGet, &device, device_id));
  cu_properties properties = {.allocation = CU_ALLOCATION_PINNED,
                              .where = {CU_LOCATION_DEVICE, device}};
  CUDA_TRY(CUDA(MemPoolCreate, &pool, &properties));
  uint64_t bytes = POOL_BYTES;
  int no = 0; /* an allocation must not wait for the stream of another thread */
  cu.MemPoolSetAttribute(pool, CU_POOL_RELEASE_THRESHOLD, &bytes);
  cu.MemPoolSetAttribute(pool, CU_POOL_REUSE_BY_WAITING, &no);
  allow_peers(pool, device_id, device);
  *made = (uint64_t)(uintptr_t)pool;
  return DLX_OK;
}

/* ---- allocation ------------------------------------------------------------------------------ */

typedef struct {
  cu_address address;
  int32_t device;
  uint64_t stream; /* dlx's own, on which it is freed */
} block;

static void release_block(void* owner) {
  block* self = owner;
  int mode;
  if (dlx_cuda_loaded() && cuda_enter(self->device, &mode) == DLX_OK) {
    cu.MemFreeAsync(self->address, cuda_stream(self->stream));
    cuda_leave(mode);
  }
  free(self);
}

int dlx_cuda_empty(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                   uint64_t stream, DLManagedTensorVersioned** out) {
  int64_t strides[DLX_MAX_NDIM];
  DLTensor fresh;
  char operation[80];
  uint64_t pool, own;
  CUDA_TRY(dlx_describe_fresh(like, flags, keep_order, strides, &fresh));
  CUDA_TRY(dlx_cuda_load());
  dlx_cuda_release_pending();
  fresh.device = (DLDevice){kDLCUDA, device_id};
  if (dlx_size(like) == 0) return dlx_managed_new(&fresh, flags, NULL, NULL, out);
  CUDA_TRY(dlx_cuda_work_stream(device_id, &own));
  CUDA_ENTER(device_id);
  CUDA_TRY(cuda_make_once(&cuda_devices[device_id].pool, device_id, create_pool, &pool));
  block* made = dlx_allocate(sizeof *made);
  if (made == NULL) return DLX_E_MEMORY;
  *made = (block){.device = device_id, .stream = own};
  size_t nbytes = (size_t)dlx_nbytes(like, flags);
  int code = cu.MemAllocFromPoolAsync(&made->address, nbytes, (cu_pool)(uintptr_t)pool,
                                      cuda_stream(stream ? stream : own));
  if (code != CU_OK) {
    free(made);
    snprintf(operation, sizeof operation, "cuMemAllocFromPoolAsync of %zu bytes on cuda:%d", nbytes,
             device_id);
    return cuda_fail(operation, code);
  }
  fresh.data = (void*)(uintptr_t)made->address;
  int status = dlx_managed_new(&fresh, flags, made, release_block, out);
  if (status != DLX_OK) release_block(made);
  return status;
}

/* ---- copies ---------------------------------------------------------------------------------- */

enum { MAX_CALLS = 1 << 14, MAX_PITCH = 1 << 30 /* bytes; all devices support more */ };
/* Measured on an H100 with pageable memory: a call takes as long as packing 64 KiB on the host, a
 * row of a box 10 ns, which packs 32 bytes. */
enum { NARROW = 32, CALL_BITS = 16, SPARSE = 16 };

typedef struct {
  int32_t from_device, to_device; /* -1 = the host */
  int packs;                      /* many calls, and narrow rows, become one packed run */
  cu_stream stream;               /* of the current device */
  const DLTensor *from, *to;
  uint64_t flags;
} transfer;

static cu_address to_address(const char* address) {
  return (cu_address)(uintptr_t)address;
}

static int copy_run(const transfer* t, char* to, const char* from, size_t nbytes) {
  cu_context from_context = NULL, to_context = NULL;
  if (t->from_device < 0 || t->to_device < 0 || t->from_device == t->to_device)
    return CUDA(MemcpyAsync, to_address(to), to_address(from), nbytes, t->stream);
  CUDA_TRY(cuda_get_primary(t->from_device, &from_context));
  CUDA_TRY(cuda_get_primary(t->to_device, &to_context));
  return CUDA(MemcpyPeerAsync, to_address(to), to_context, to_address(from), from_context, nbytes,
              t->stream);
}

static int copy_rows(const transfer* t, char* to, const char* from, const dlx_axis* rows,
                     size_t width) {
  /* The driver may not know the address of host memory, and reads the field of the type. */
  cu_box box = {.from_type = t->from_device < 0 ? CU_MEMORY_HOST : CU_MEMORY_UNIFIED,
                .from_host = from,
                .from_device = to_address(from),
                .from_pitch = (size_t)rows->from,
                .to_type = t->to_device < 0 ? CU_MEMORY_HOST : CU_MEMORY_UNIFIED,
                .to_host = to,
                .to_device = to_address(to),
                .to_pitch = (size_t)rows->to,
                .width = width,
                .height = (size_t)rows->extent};
  int code = cu.Memcpy2DAsync(&box, t->stream), status = DLX_OK;
  if (code != CU_INVALID_VALUE || t->from_device < 0 || t->to_device < 0)
    return cuda_check("cuMemcpy2DAsync", code);
  /* Within a device it "may fail for pitches not computed by cuMemAllocPitch" (cuda.h). */
  for (int64_t i = 0; i < rows->extent && status == DLX_OK; i++)
    status = copy_run(t, to + i * rows->to, from + i * rows->from, width);
  return status;
}

/* Return 1 if one call can copy the rows: ascending, disjoint, on one device. */
static int is_box(const transfer* t, const dlx_axis* rows, int64_t width) {
  return rows->from >= width && rows->to >= width && rows->from <= MAX_PITCH &&
         rows->to <= MAX_PITCH &&
         (t->from_device < 0 || t->to_device < 0 || t->from_device == t->to_device);
}

/* One call for each index of the first `n` axes, for `width` bytes or a box of such rows. */
typedef struct {
  int64_t width;
  const dlx_axis* rows;
  int n;
} parts;

/* Errors: DLX_E_SCATTERED = too many calls. */
static int plan_calls(const transfer* t, const dlx_axis* axes, int n, int64_t item, parts* p) {
  int64_t calls = 1;
  *p = (parts){.width = item};
  if (n > 0 && axes[n - 1].from == item && axes[n - 1].to == item) p->width *= axes[--n].extent;
  if (n > 0 && is_box(t, &axes[n - 1], p->width)) p->rows = &axes[--n];
  p->n = n;
  if (t->packs && p->rows && p->width < NARROW) return DLX_E_SCATTERED;
  int64_t most = t->packs ? 1 + (dlx_nbytes(t->from, t->flags) >> CALL_BITS) : MAX_CALLS;
  for (int i = 0; i < n; i++) {
    if (axes[i].extent > most / calls) return DLX_E_SCATTERED;
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
  return plan_calls(&t, axes, dlx_find_axes(from, &to, item, item, axes), item, &p) != DLX_OK;
}

static const char* get_first(const DLTensor* tensor) {
  return (const char*)tensor->data + tensor->byte_offset;
}

/* Start a copy. Errors: DLX_E_PACKED; DLX_E_SCATTERED before anything is copied. */
static int start_copy(const transfer* t) {
  const DLTensor *from = t->from, *to = t->to;
  int64_t index[DLX_MAX_NDIM] = {0}, item = dlx_itemsize(from->dtype, t->flags);
  if (item == 0 && (dlx_layout(from) || dlx_layout(to))) return DLX_E_PACKED;
  char* target = (char*)to->data + to->byte_offset;
  const char* source = get_first(from);
  if (item == 0) return copy_run(t, target, source, (size_t)dlx_nbytes(from, t->flags));
  dlx_axis axes[DLX_MAX_NDIM];
  parts p;
  CUDA_TRY(plan_calls(t, axes, dlx_find_axes(from, to, item, item, axes), item, &p));
  do {
    CUDA_TRY(p.rows ? copy_rows(t, target, source, p.rows, (size_t)p.width)
                    : copy_run(t, target, source, (size_t)p.width));
  } while (dlx_next(axes, p.n, index, &target, &source));
  return DLX_OK;
}

/* Wait for a copy, also if one of its calls failed: the memory may be freed next. */
static int finish_copy(const transfer* t, int status) {
  int code = cu.StreamSynchronize(t->stream);
  return status == DLX_OK ? cuda_check("cuStreamSynchronize", code) : status;
}

static int send_packed(transfer t) {
  DLTensor like = *t.to; /* keep its layout: one run if the target is compact */
  DLManagedTensorVersioned* packed;
  like.device = (DLDevice){kDLCPU, 0};
  CUDA_TRY(dlx_managed_empty(&like, t.flags, 1, &packed));
  int status = dlx_copy(t.from, &packed->dl_tensor, t.flags);
  t.from = &packed->dl_tensor;
  if (status == DLX_OK) status = finish_copy(&t, start_copy(&t));
  dlx_managed_release(packed);
  return status;
}

/* Whether most bytes between the first and the last element are gaps. */
static int is_sparse(const DLTensor* tensor, uint64_t flags) {
  int64_t low, high;
  dlx_extent(tensor, flags, &low, &high);
  return (high - low) / SPARSE > dlx_nbytes(tensor, flags);
}

/* Copy all bytes from the first to the last element, and gather the elements on the host. */
static int fetch_whole(const transfer* t) {
  int64_t low, high;
  DLTensor here = *t->from;
  dlx_extent(&here, t->flags, &low, &high);
  char* bytes = dlx_allocate((size_t)(high - low));
  if (bytes == NULL) return DLX_E_MEMORY;
  const char* first = get_first(&here) + low;
  int status = finish_copy(t, copy_run(t, bytes, first, (size_t)(high - low)));
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
  if (!dlx_has_same_elements(from, to)) return DLX_E_MISMATCH;
  if (dlx_size(from) == 0) return DLX_OK;
  int32_t from_device = up ? -1 : from->device.device_id;
  int32_t to_device = down ? -1 : to->device.device_id;
  int packs = up || (down && !is_sparse(from, flags));
  transfer t = {from_device, to_device, packs, cuda_stream(stream), from, to, flags};
  CUDA_ENTER(up ? to_device : from_device);
  if (wait) CUDA_TRY(cuda_can_wait(stream));
  int status = start_copy(&t);
  if (status != DLX_E_SCATTERED || !(up || down)) return wait ? finish_copy(&t, status) : status;
  if (!wait) CUDA_TRY(cuda_can_wait(stream)); /* the host takes part in this one */
  return up ? send_packed(t) : fetch_whole(&t);
}

/* Count the rows from the first one at equal distances, and of equal strides; set the distance. */
static int64_t count_even(const DLTensor* const* rows, int64_t n, int64_t* step) {
  int64_t count = 1;
  *step = n > 1 ? get_first(rows[1]) - get_first(rows[0]) : 0;
  for (; count < n; count++) {
    const DLTensor *one = rows[count - 1], *next = rows[count];
    if (get_first(next) - get_first(one) != *step ||
        memcmp(one->strides, next->strides, (size_t)one->ndim * sizeof *one->strides) != 0)
      break;
  }
  return count;
}

int dlx_cuda_stack(const DLTensor* const* rows, int64_t n, const DLTensor* to, uint64_t flags,
                   int axis, uint64_t stream) {
  int64_t shape[DLX_MAX_NDIM], steps[DLX_MAX_NDIM], strides[DLX_MAX_NDIM], step = 0, count = 1;
  int64_t item = dlx_itemsize(to->dtype, flags);
  int64_t pace = axis < 0 ? 0 : item ? to->strides[axis] * item : dlx_nbytes(rows[0], flags);
  int ndim = rows[0]->ndim, more = axis >= 0; /* a leading axis for rows that are copied together */
  if (dlx_size(rows[0]) == 0) return DLX_OK;
  CUDA_ENTER(to->device.device_id);
  DLTensor part = *to, from;
  part.ndim = ndim + more;
  part.shape = shape;
  part.strides = strides;
  if (more) strides[0] = to->strides[axis];
  for (int i = 0; i < ndim; i++) {
    shape[more + i] = rows[0]->shape[i];
    strides[more + i] = to->strides[i + (more && i >= axis)];
  }
  for (int64_t i = 0; i < n; i += count) {
    count = item && more ? count_even(&rows[i], n - i, &step) : 1;
    if (item && step % item) count = 1;
    if (more) shape[0] = count;
    if (more) steps[0] = item ? step / item : 0;
    for (int k = 0; k < ndim; k++) steps[more + k] = rows[i]->strides[k];
    from = *rows[i];
    from.ndim = part.ndim;
    from.shape = shape;
    from.strides = steps;
    part.data = (char*)to->data + i * pace;
    CUDA_TRY(start_copy(&(transfer){from.device.device_id, to->device.device_id, 0,
                                    cuda_stream(stream), &from, &part, flags}));
  }
  return DLX_OK;
}
