/* Managed tensors that dlx makes: one allocation for the struct, shape and strides; a count of
 * holders; an owner that is released once, with the last holder. All foreign memory is wrapped in
 * one, so that a producer's metadata is never read after the hand-over. */

#include "allocate.h"
#include "copy.h"
#include "thread_state.h"

typedef struct {
  DLManagedTensorVersioned managed; /* first, so that a pointer to it is a pointer to us */
  void* owner;                      /* keeps the memory alive */
  dlx_release release;              /* how to release it; NULL = nothing to do */
  atomic_int_least32_t holders;     /* who may still call the deleter or shares the memory */
  int64_t numbers[];                /* shape, then strides */
} made_tensor;

/* With the 8 bytes that glibc adds, one of one dimension is among its fastest sizes. */
_Static_assert(sizeof(made_tensor) + 2 * sizeof(int64_t) + 8 <= 128, "made_tensor has grown");

enum { MAX_DEPTH = 50 }; /* releases inside releases, on one thread */

static atomic_int_least64_t uncounted; /* live ones of threads without a state: no memory */

/* Count what is live in a number for each thread, without a locked operation. */
static void count(dlx_thread_state* own, int change) {
  if (own == NULL) {
    atomic_fetch_add(&uncounted, change);
    return;
  }
  int64_t before = atomic_load_explicit(&own->count, memory_order_relaxed);
  atomic_store_explicit(&own->count, before + change, memory_order_release);
}

int64_t dlx_live(void) {
  int64_t sum = atomic_load(&uncounted);
  for (dlx_thread_state* each = atomic_load(&dlx_thread_states); each; each = each->next)
    sum += atomic_load_explicit(&each->count, memory_order_acquire);
  return sum;
}

static void finish(made_tensor* self, dlx_thread_state* own) {
  if (self->release) self->release(self->owner);
  free(self);
  count(own, -1);
}

static void drop(DLManagedTensorVersioned* managed) {
  made_tensor* self = (made_tensor*)managed;
  /* Only a holder can add holders, so the last one needs no locked operation. */
  if (atomic_load_explicit(&self->holders, memory_order_acquire) != 1 &&
      atomic_fetch_sub(&self->holders, 1) != 1)
    return;
  /* An owner may own further tensors of ours: a long chain must not eat the stack. */
  dlx_thread_state* own = dlx_state_of_thread();
  if (own == NULL) { /* no memory for that */
    finish(self, own);
    return;
  }
  if (own->depth >= MAX_DEPTH) {
    managed->manager_ctx = own->waiting; /* nobody reads this any more */
    own->waiting = managed;
    return;
  }
  own->depth++;
  finish(self, own);
  while (own->depth == 1 && own->waiting) {
    self = (made_tensor*)own->waiting;
    own->waiting = self->managed.manager_ctx;
    finish(self, own);
  }
  own->depth--;
}

/* Make one of a valid tensor, with `bytes` bytes of memory in the same allocation. Owns: as
 * dlx_managed_new. Errors: DLX_E_MEMORY. */
static inline int make(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                       size_t bytes, DLManagedTensorVersioned** out) {
  size_t rank = (size_t)like->ndim, size = sizeof(made_tensor) + 2 * rank * sizeof(int64_t);
  made_tensor* self = dlx_allocate(bytes ? size + DLX_ALIGNMENT - 1 + bytes : size);
  if (self == NULL) return DLX_E_MEMORY;
  /* Field by field: compilers clear a whole struct first, which takes longer than all the rest. */
  DLManagedTensorVersioned* m = &self->managed;
  m->version = (DLPackVersion){DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR};
  m->manager_ctx = self; /* unused here, but paddle calls no deleter where it is NULL */
  m->deleter = drop;
  m->flags = flags;
  self->owner = owner;
  self->release = release;
  atomic_init(&self->holders, 1);
  DLTensor* t = &m->dl_tensor;
  t->data = like->data;
  t->device = like->device;
  t->ndim = like->ndim;
  t->dtype = like->dtype;
  t->shape = self->numbers;
  t->strides = self->numbers + rank;
  t->byte_offset = like->byte_offset;
  for (size_t i = 0; i < rank; i++) t->shape[i] = like->shape[i]; /* few: no call is worth it */
  if (like->strides) {
    for (size_t i = 0; i < rank; i++) t->strides[i] = like->strides[i];
  } else {
    dlx_compact_strides(like->ndim, t->shape, t->strides);
  }
  if (bytes) {
    uintptr_t end = (uintptr_t)self + size + DLX_ALIGNMENT - 1;
    t->data = (void*)(end - end % DLX_ALIGNMENT);
  } else if (t->byte_offset && dlx_data_is_address(t->device.device_type)) {
    if (t->data) t->data = (char*)t->data + t->byte_offset;
    t->byte_offset = 0;
  }
  count(dlx_state_of_thread(), 1);
  *out = &self->managed;
  return DLX_OK;
}

int dlx_managed_trust(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                      DLManagedTensorVersioned** out) {
  return make(like, flags, owner, release, 0, out);
}

int dlx_managed_new(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                    DLManagedTensorVersioned** out) {
  int status = dlx_validate(like, flags);
  if (status != DLX_OK) return status;
  int64_t strides[DLX_MAX_NDIM];
  DLTensor normal = *like;
  if (dlx_has_odd_strides(like)) {
    normal.strides = strides;
    dlx_normalize_strides(like, strides);
  }
  return make(&normal, flags, owner, release, 0, out);
}

int dlx_managed_adopt(DLManagedTensorVersioned* foreign, DLManagedTensorVersioned** out) {
  if (foreign->version.major != DLX_DLPACK_MAJOR) return DLX_E_VERSION;
  uint64_t flags = foreign->flags;
  /* Whole bytes are never padded, and whoever passes the tensor on would have to say so again. */
  if (dlx_itemsize(foreign->dl_tensor.dtype, 0))
    flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  const DLTensor* t = &foreign->dl_tensor;
  return flags == 0 && dlx_is_plain(t, 1)
             ? dlx_managed_trust(t, flags, foreign, dlx_managed_release, out)
             : dlx_managed_new(t, flags, foreign, dlx_managed_release, out);
}

int dlx_managed_share(DLManagedTensorVersioned* made, const DLTensor* like, uint64_t flags,
                      DLManagedTensorVersioned** out) {
  int status = like ? dlx_managed_new(like, flags, made, dlx_managed_release, out)
                    : make(&made->dl_tensor, flags, made, dlx_managed_release, 0, out);
  if (status == DLX_OK) dlx_managed_hold(made);
  return status;
}

void dlx_fresh_strides(const DLTensor* like, int keep_order, int64_t* strides) {
  /* A broadcast dimension has no position in the order: fall back to row-major. */
  if (!keep_order || !like->strides || dlx_size(like) == 0 || dlx_layout(like) & DLX_LAYOUT_ZERO) {
    dlx_compact_strides(like->ndim, like->shape, strides);
    return;
  }
  int32_t order[DLX_MAX_NDIM];
  for (int32_t i = 0; i < like->ndim; i++) { /* outermost first, stable */
    int32_t at = i;
    for (; at > 0 && llabs(like->strides[order[at - 1]]) < llabs(like->strides[i]); at--)
      order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t step = 1;
  for (int32_t i = like->ndim - 1; i >= 0; i--) {
    strides[order[i]] = step;
    step *= like->shape[order[i]];
  }
}

int dlx_fresh(const DLTensor* like, uint64_t flags, int keep_order, int64_t* strides,
              DLTensor* out) {
  *out = (DLTensor){.data = (void*)(uintptr_t)DLX_ALIGNMENT, /* any address, for the check */
                    .device = {kDLCPU, 0},
                    .ndim = like->ndim,
                    .dtype = like->dtype,
                    .shape = like->shape};
  int status = dlx_validate(out, flags);
  if (status == DLX_OK) dlx_fresh_strides(like, keep_order, strides);
  out->strides = strides;
  out->data = NULL;
  return status;
}

int dlx_managed_empty(const DLTensor* like, uint64_t flags, int keep_order,
                      DLManagedTensorVersioned** out) {
  enum { FEW = 1 << 12 /* bytes: an allocation would cost more than they do */ };
  int64_t strides[DLX_MAX_NDIM];
  DLTensor fresh;
  int status = dlx_fresh(like, flags, keep_order, strides, &fresh);
  if (status != DLX_OK) return status;
  size_t bytes = (size_t)dlx_nbytes(&fresh, flags);
  if (bytes <= FEW) return make(&fresh, flags, NULL, NULL, bytes, out);
  bytes = (bytes + DLX_ALIGNMENT - 1) / DLX_ALIGNMENT * DLX_ALIGNMENT;
  fresh.data = dlx_allocate_aligned(bytes);
  if (fresh.data == NULL) return DLX_E_MEMORY;
  dlx_use_huge_pages(fresh.data, bytes);
  status = make(&fresh, flags, fresh.data, free, 0, out);
  if (status != DLX_OK) free(fresh.data);
  return status;
}

void dlx_managed_own(DLManagedTensorVersioned* made, void* owner, dlx_release release) {
  ((made_tensor*)made)->owner = owner;
  ((made_tensor*)made)->release = release;
}

void* dlx_managed_owner(const DLManagedTensorVersioned* made, dlx_release release) {
  const made_tensor* self = (const made_tensor*)made;
  return release == NULL || self->release == release ? self->owner : NULL;
}

int dlx_managed_is_sole(const DLManagedTensorVersioned* managed) {
  const made_tensor* self = (const made_tensor*)managed;
  return managed->deleter == drop &&
         atomic_load_explicit(&self->holders, memory_order_acquire) == 1;
}

int dlx_managed_hold_sole(DLManagedTensorVersioned* made) {
  if (!dlx_managed_is_sole(made)) return 0;
  atomic_store_explicit(&((made_tensor*)made)->holders, 2, memory_order_relaxed);
  return 1;
}

void dlx_managed_hold(DLManagedTensorVersioned* made) {
  atomic_fetch_add_explicit(&((made_tensor*)made)->holders, 1, memory_order_relaxed);
}

/* The release of an abandoned tensor, which is counted as released already. */
static void uncount(void* unused) {
  (void)unused;
  count(dlx_state_of_thread(), 1); /* finish takes it off again */
}

void dlx_managed_abandon(DLManagedTensorVersioned* made) {
  made_tensor* self = (made_tensor*)made;
  /* 1 = the consumer has released its count. Else it may do so on another thread, later or never:
   * the last one finds no owner any more, and frees the struct. The count orders these writes. */
  if (atomic_load(&self->holders) != 1) {
    dlx_release release = self->release;
    self->release = uncount;
    if (release) release(self->owner);
    count(dlx_state_of_thread(), -1);
  }
  drop(made);
}

void dlx_managed_release(void* managed) {
  DLManagedTensorVersioned* self = managed;
  if (self->deleter) self->deleter(self);
}

void dlx_count_managed(DLManagedTensorVersioned* self) {
  atomic_fetch_add((_Atomic uint64_t*)self->manager_ctx, 1);
}
