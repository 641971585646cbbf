/* Managed tensors of dlx: one allocation holds the struct, shape and strides, a count of holders,
 * and an owner that is released with the last holder. Foreign memory is always wrapped in one, so
 * dlx never reads a producer's metadata after the hand-over. */

#include "allocate.h"
#include "copy.h"
#include "thread_state.h"

typedef struct {
  DLManagedTensorVersioned managed; /* first member: both pointers are equal */
  void* owner;                      /* keeps the memory alive */
  dlx_release release;              /* releases the owner; NULL = nothing to do */
  atomic_int_least32_t holders;     /* the consumer, and tensors that share the memory; acq_rel when
                                       one leaves: the last one sees what others did */
  int64_t numbers[];                /* shape, then strides */
} dlx_tensor;

/* With glibc's 8 bytes, a tensor of rank 1 fits its fastest size class. */
_Static_assert(sizeof(dlx_tensor) + 2 * sizeof(int64_t) + 8 <= 128, "dlx_tensor is too large");

enum { MAX_DEPTH = 50 }; /* nested releases on one thread */

/* Live tensors of threads without a state (no memory). Orders as `count` of a thread's state. */
static atomic_int_least64_t stateless;

/* Change the number of live tensors. Each thread has a counter: no locked operation. */
static void count_live(dlx_thread_state* own, int change) {
  if (own == NULL) {
    atomic_fetch_add_explicit(&stateless, change, memory_order_release);
    return;
  }
  int64_t before = atomic_load_explicit(&own->count, memory_order_relaxed);
  atomic_store_explicit(&own->count, before + change, memory_order_release);
}

int64_t dlx_live(void) {
  int64_t sum = atomic_load_explicit(&stateless, memory_order_acquire);
  for (dlx_thread_state* each = dlx_first_state(); each; each = each->next)
    sum += atomic_load_explicit(&each->count, memory_order_acquire);
  return sum;
}

static void finish(dlx_tensor* self, dlx_thread_state* own) {
  if (self->release) self->release(self->owner);
  free(self);
  count_live(own, -1);
}

static void drop(DLManagedTensorVersioned* managed) {
  dlx_tensor* self = (dlx_tensor*)managed;
  /* Only a holder can add holders, so the last holder needs no locked operation. */
  if (atomic_load_explicit(&self->holders, memory_order_acquire) != 1 &&
      atomic_fetch_sub_explicit(&self->holders, 1, memory_order_acq_rel) != 1)
    return;
  /* The owner may own further tensors: a long chain must not overflow the stack. */
  dlx_thread_state* own = dlx_state_of_thread();
  if (own == NULL) { /* no memory for the state */
    finish(self, own);
    return;
  }
  if (own->depth >= MAX_DEPTH) {
    managed->manager_ctx = own->waiting; /* no longer read */
    own->waiting = managed;
    return;
  }
  own->depth++;
  finish(self, own);
  while (own->depth == 1 && own->waiting) {
    self = (dlx_tensor*)own->waiting;
    own->waiting = self->managed.manager_ctx;
    finish(self, own);
  }
  own->depth--;
}

/* Create a managed tensor like a valid one, with `bytes` bytes of memory in the same allocation.
 * Owns: as dlx_managed_new. Errors: DLX_E_MEMORY. */
static inline int new_tensor(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                             size_t bytes, DLManagedTensorVersioned** out) {
  size_t rank = (size_t)like->ndim, size = sizeof(dlx_tensor) + 2 * rank * sizeof(int64_t);
  dlx_tensor* self = dlx_allocate(bytes ? size + DLX_ALIGNMENT - 1 + bytes : size);
  if (self == NULL) return DLX_E_MEMORY;
  /* Field by field: an initializer would clear the whole struct first, which takes longer. */
  DLManagedTensorVersioned* m = &self->managed;
  m->version = (DLPackVersion){DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR};
  m->manager_ctx = self; /* unused, but paddle calls no deleter if it is NULL */
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
  for (size_t i = 0; i < rank; i++) t->shape[i] = like->shape[i]; /* few: faster than memcpy */
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
  count_live(dlx_state_of_thread(), 1);
  *out = &self->managed;
  return DLX_OK;
}

int dlx_managed_trust(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                      DLManagedTensorVersioned** out) {
  return new_tensor(like, flags, owner, release, 0, out);
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
  return new_tensor(&normal, flags, owner, release, 0, out);
}

int dlx_managed_adopt(DLManagedTensorVersioned* foreign, DLManagedTensorVersioned** out) {
  if (foreign->version.major != DLX_DLPACK_MAJOR) return DLX_E_VERSION;
  uint64_t flags = foreign->flags;
  /* The flag means nothing for whole bytes, and consumers may reject it. */
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
                    : new_tensor(&made->dl_tensor, flags, made, dlx_managed_release, 0, out);
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

int dlx_describe_fresh(const DLTensor* like, uint64_t flags, int keep_order, int64_t* strides,
                       DLTensor* out) {
  *out = (DLTensor){.data = (void*)(uintptr_t)DLX_ALIGNMENT, /* any address passes the check */
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
  enum { FEW = 1 << 12 /* bytes: too few for a separate allocation */ };
  int64_t strides[DLX_MAX_NDIM];
  DLTensor fresh;
  int status = dlx_describe_fresh(like, flags, keep_order, strides, &fresh);
  if (status != DLX_OK) return status;
  size_t bytes = (size_t)dlx_nbytes(&fresh, flags);
  if (bytes <= FEW) return new_tensor(&fresh, flags, NULL, NULL, bytes, out);
  bytes = (bytes + DLX_ALIGNMENT - 1) / DLX_ALIGNMENT * DLX_ALIGNMENT;
  fresh.data = dlx_allocate_aligned(bytes);
  if (fresh.data == NULL) return DLX_E_MEMORY;
  dlx_use_huge_pages(fresh.data, bytes);
  status = new_tensor(&fresh, flags, fresh.data, dlx_free_aligned, 0, out);
  if (status != DLX_OK) dlx_free_aligned(fresh.data);
  return status;
}

void dlx_managed_own(DLManagedTensorVersioned* made, void* owner, dlx_release release) {
  ((dlx_tensor*)made)->owner = owner;
  ((dlx_tensor*)made)->release = release;
}

void* dlx_managed_owner(const DLManagedTensorVersioned* made, dlx_release release) {
  const dlx_tensor* self = (const dlx_tensor*)made;
  return release == NULL || self->release == release ? self->owner : NULL;
}

int dlx_managed_is_sole(const DLManagedTensorVersioned* managed) {
  const dlx_tensor* self = (const dlx_tensor*)managed;
  return managed->deleter == drop &&
         atomic_load_explicit(&self->holders, memory_order_acquire) == 1;
}

int dlx_managed_hold_sole(DLManagedTensorVersioned* made) {
  if (!dlx_managed_is_sole(made)) return 0;
  atomic_store_explicit(&((dlx_tensor*)made)->holders, 2, memory_order_relaxed);
  return 1;
}

void dlx_managed_hold(DLManagedTensorVersioned* made) {
  atomic_fetch_add_explicit(&((dlx_tensor*)made)->holders, 1, memory_order_relaxed);
}

/* Release function of an abandoned tensor, which is no longer counted as live. */
static void release_abandoned(void* unused) {
  (void)unused;
  count_live(dlx_state_of_thread(), 1); /* finish subtracts it */
}

void dlx_managed_abandon(DLManagedTensorVersioned* made) {
  dlx_tensor* self = (dlx_tensor*)made;
  /* 1 = the consumer has released its tensor. Otherwise it may do so later, on any thread, or
   * never: the last holder then finds no owner and frees the struct. The count orders these writes.
   */
  if (atomic_load_explicit(&self->holders, memory_order_acquire) != 1) {
    dlx_release release = self->release;
    self->release = release_abandoned;
    if (release) release(self->owner);
    count_live(dlx_state_of_thread(), -1);
  }
  drop(made);
}

void dlx_managed_release(void* managed) {
  DLManagedTensorVersioned* self = managed;
  if (self->deleter) self->deleter(self);
}

void dlx_count_managed(DLManagedTensorVersioned* self) {
  atomic_fetch_add_explicit((_Atomic uint64_t*)self->manager_ctx, 1, memory_order_relaxed);
}
