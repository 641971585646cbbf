#ifndef DLX_DLX_H_
#define DLX_DLX_H_

#include "dlpack_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pure core, without Python. cffi reads this file too: see dlpack_abi.h.
 *   GIL     no function needs it; those that move many bytes, or may wait, are called without it
 *   Owns    what the caller must release after success; after failure nothing was taken
 *   Errors  an int that says none of its own is DLX_OK or one of the statuses below */

enum {
  DLX_OK = 0,
  DLX_E_MEMORY = -1,    /* allocation failed */
  DLX_E_VERSION = -2,   /* another major version of DLPack */
  DLX_E_NDIM = -3,      /* below 0 or above DLX_MAX_NDIM */
  DLX_E_SHAPE = -4,     /* missing, or a negative extent */
  DLX_E_DTYPE = -5,     /* no bits or no lanes */
  DLX_E_OVERFLOW = -6,  /* the bytes do not fit 63 bits, or the offset the address space */
  DLX_E_FLAGS = -7,     /* unknown flags where they could change the layout */
  DLX_E_NULL = -8,      /* no memory behind a tensor that has elements */
  DLX_E_DEVICE = -9,    /* not memory that the host can read */
  DLX_E_PACKED = -10,   /* packed sub-byte elements that are not contiguous */
  DLX_E_MISMATCH = -11, /* shapes or dtypes of source and destination differ */
  /* raised at the Python boundary only */
  DLX_E_CAPSULE = -12,  /* not a DLPack capsule */
  DLX_E_CONSUMED = -13, /* a capsule that was used before */
  DLX_E_READONLY = -14, /* read-only memory through an interface that cannot say so */
  DLX_E_STREAM = -15,   /* a stream where there is none */
  DLX_E_COPY = -16,     /* asked for sharing, only a copy is possible */
  /* of the CUDA driver; dlx_cuda_message says more */
  DLX_E_NO_DRIVER = -17, /* not to be had, or no device behind it */
  DLX_E_FORKED = -18,    /* initialised before a fork, unusable after it */
  DLX_E_DRIVER = -19,    /* a call of it failed */
  DLX_E_CAPTURE = -20,   /* would break a graph capture */
  DLX_E_SCATTERED = -21, /* a strided copy that takes too many steps */
  DLX_E_ARROW = -22      /* Arrow data that contradicts itself */
};

enum { DLX_MAX_NDIM = 128, DLX_ALIGNMENT = 256 /* bytes, of memory that dlx allocates */ };

/* ---- layout.c: arithmetic on one tensor ------------------------------------------------------ */

/* How elements lie in memory; dimensions of extent 0 or 1 are ignored. */
enum {
  DLX_LAYOUT_NEGATIVE = 1, /* a stride below 0 */
  DLX_LAYOUT_ZERO = 2,     /* a stride of 0: broadcast */
  DLX_LAYOUT_GAPS = 4,     /* unused elements in between, or overlap */
  DLX_LAYOUT_PERMUTED = 8  /* dimensions not in row-major order */
};

/* Check what every later function relies on: rank, shape, dtype, flags, memory, overflow. Errors:
 * DLX_E_NDIM _SHAPE _DTYPE _FLAGS _NULL _OVERFLOW. */
int dlx_validate(const DLTensor* tensor, uint64_t flags);

/* 1 if dlx_validate and the layout part of dlx_check find nothing, for any consumer: row-major
 * elements in host memory at a multiple of `alignment` (a power of two). 0 = check fully. */
int dlx_is_plain(const DLTensor* tensor, uint32_t alignment);

/* 1 if strides without a meaning could overflow in a program that calculates with them: below 0 or
 * too large for the extents in a tensor without elements, too large in bits at an extent of 1. The
 * second function writes them with small numbers in their place. */
int dlx_has_odd_strides(const DLTensor* tensor);
void dlx_normalize_strides(const DLTensor* tensor, int64_t* out);

/* Elements in all, bytes of them, and DLX_LAYOUT_* (0 = contiguous) of a validated tensor. */
int64_t dlx_size(const DLTensor* tensor);
int64_t dlx_nbytes(const DLTensor* tensor, uint64_t flags);
uint32_t dlx_layout(const DLTensor* tensor);

/* The byte range [low, high) of its elements, counted from the first one (low <= 0). */
void dlx_extent(const DLTensor* tensor, uint64_t flags, int64_t* low, int64_t* high);

/* Bytes from one element to the next; 0 if elements are packed below a byte. */
int64_t dlx_itemsize(DLDataType dtype, uint64_t flags);

/* Write row-major strides (elements) for a shape. */
void dlx_compact_strides(int32_t ndim, const int64_t* shape, int64_t* strides);

/* 1 if `data` is an address on such a device, and no opaque handle; if the host may read the memory
 * without asking a device first; if the memory has streams that dlx can order. */
int dlx_data_is_address(int32_t device_type);
int dlx_host_readable(int32_t device_type);
int dlx_is_cuda(DLDevice device);

/* ---- managed.c: tensors with an owner, released exactly once --------------------------------- */

typedef void (*dlx_release)(void* owner);

/* Make a managed tensor over memory that `owner` keeps alive. Shape and strides are copied, missing
 * strides written out, odd ones (dlx_has_odd_strides) normalized, and the byte offset is added to
 * `data` if that is an address. dlx_managed_trust does not check again what dlx_is_plain has. Owns:
 * the result calls release(owner) once, when it and all that share it are gone. Errors: as
 * dlx_validate, DLX_E_MEMORY. */
int dlx_managed_new(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                    DLManagedTensorVersioned** out);
int dlx_managed_trust(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                      DLManagedTensorVersioned** out);

/* The same around a foreign managed tensor, which is checked. Owns: the result owes `foreign` its
 * deleter. Errors: as dlx_managed_new, DLX_E_VERSION. */
int dlx_managed_adopt(DLManagedTensorVersioned* foreign, DLManagedTensorVersioned** out);

/* A further managed tensor over the memory of `made` (one of ours), described by `like`; NULL = as
 * `made`, with other flags. Owns: it counts on `made`. Errors: as dlx_managed_new. */
int dlx_managed_share(DLManagedTensorVersioned* made, const DLTensor* like, uint64_t flags,
                      DLManagedTensorVersioned** out);

/* Fresh, uninitialised host memory (DLX_ALIGNMENT) for the ndim, shape and dtype of `like`:
 * row-major, or with keep_order in the order of dimensions of a `like` that is validated. Nothing
 * else of it is read. Errors: as dlx_managed_new. */
int dlx_managed_empty(const DLTensor* like, uint64_t flags, int keep_order,
                      DLManagedTensorVersioned** out);

/* Give a tensor of ours, which no other thread has, another owner (NULL and NULL = none); return
 * its owner, borrowed, if `release` is what releases it (NULL = whatever does), else NULL. Owns:
 * the owner of before is the caller's again. */
void dlx_managed_own(DLManagedTensorVersioned* made, void* owner, dlx_release release);
void* dlx_managed_owner(const DLManagedTensorVersioned* made, dlx_release release);

/* 1 if a managed tensor is one of ours, and the caller's count on it the only one. */
int dlx_managed_is_sole(const DLManagedTensorVersioned* managed);

/* Take another count on a tensor of ours: so that it lives while the GIL is released, or before a
 * hand-over to a consumer that may fail after it has released, or later. */
void dlx_managed_hold(DLManagedTensorVersioned* made);

/* The same without a locked operation if the caller's count is the only one; 0 = it is not. */
int dlx_managed_hold_sole(DLManagedTensorVersioned* made);

/* Give up a tensor with no other holders whose consumer failed, by the count of dlx_managed_hold:
 * the owner is released now, unless the consumer has done so. A deleter call later frees the struct
 * only. */
void dlx_managed_abandon(DLManagedTensorVersioned* made);

/* Call the deleter of a DLManagedTensorVersioned, if there is one. Owns: gives up a count. */
void dlx_managed_release(void* managed);

/* A deleter for the conformance kit: adds 1 to the uint64_t at manager_ctx, and frees nothing. */
void dlx_count_managed(DLManagedTensorVersioned* self);

/* Managed tensors made or adopted here and not yet released. */
int64_t dlx_live(void);

/* ---- legacy.c: the only file that knows DLManagedTensor -------------------------------------- */

/* As dlx_managed_adopt, dlx_managed_release and dlx_count_managed, for the legacy struct. */
int dlx_legacy_adopt(DLManagedTensor* foreign, DLManagedTensorVersioned** out);
void dlx_legacy_release(void* managed);
void dlx_count_legacy(DLManagedTensor* self);

/* Wrap one of ours in the legacy struct, which has no read-only flag. Owns: the result owns `made`.
 * Errors: DLX_E_MEMORY. */
int dlx_legacy_export(DLManagedTensorVersioned* made, DLManagedTensor** out);

/* Undo that, unless the tensor is shared or has flags. Owns: takes `shell`, and gives its tensor to
 * the caller. Errors: NULL = nothing changed. */
DLManagedTensorVersioned* dlx_legacy_unwrap(DLManagedTensor* shell);

/* ---- allocate.c: for tests ------------------------------------------------------------------- */

/* Let one allocation of dlx's own C fail: number 1 is the next one, on any thread; 0 = none.
 * Returns what was left of the number before: 0 = that allocation has failed. */
int64_t dlx_fail_allocation(int64_t number);

/* ---- check.c: may this consumer take this tensor as it is? ----------------------------------- */

/* What a consumer that multiplies the extents of a tensor without elements wants of them: that the
 * product fits 64 bits, in bytes 63; 0 = nothing. */
enum {
  DLX_EXTENTS_ALL = 1,     /* of all but those that are 0 */
  DLX_EXTENTS_LEADING = 2, /* of those before the first 0 */
  DLX_EXTENTS_BYTES = 4,   /* in bytes; else in elements */
  DLX_EXTENTS_NONE = 8     /* nothing fits: it takes no such tensor */
};

/* What a consumer takes as it is. Filled by field name from adapter.Capabilities. */
typedef struct {
  uint32_t device_types;  /* bit n = DLPack device type n */
  uint32_t layouts;       /* DLX_LAYOUT_* that it can hold */
  uint32_t min_alignment; /* bytes; 0 = the natural alignment of the dtype, 1 = any */
  int32_t min_ndim;
  int32_t max_ndim;
  int32_t keeps_readonly; /* 1: keeps the flag, or its arrays cannot be written */
  int32_t takes_packed;   /* 1: elements of less than a byte, next to each other */
  int32_t takes_padded;   /* 1: such elements, a byte each */
  int32_t takes_null;     /* 1: a tensor without elements may have no address */
  int32_t empty_extents;  /* DLX_EXTENTS_* */
  int32_t n_dtypes;       /* -1 = any dtype */
  uint32_t dtypes[64];    /* each code | bits << 8 | lanes << 16 */
} dlx_capabilities;

enum {
  DLX_INCOMPATIBLE_DEVICE = 1,
  DLX_INCOMPATIBLE_DTYPE = 2,
  DLX_INCOMPATIBLE_NDIM = 4,
  DLX_INCOMPATIBLE_PADDED = 8, /* sub-byte elements in a byte each, if the consumer packs them */
  DLX_INCOMPATIBLE_READONLY = 16,
  DLX_INCOMPATIBLE_NEGATIVE = 32,
  DLX_INCOMPATIBLE_ZERO = 64,
  DLX_INCOMPATIBLE_GAPS = 128,
  DLX_INCOMPATIBLE_PERMUTED = 256,
  DLX_INCOMPATIBLE_UNALIGNED = 512,
  DLX_INCOMPATIBLE_PACKED = 1024,  /* packed sub-byte elements, if it pads them */
  DLX_INCOMPATIBLE_NULL = 2048,    /* no element and no address, if it wants one */
  DLX_INCOMPATIBLE_EXTENTS = 4096, /* no element, and extents that the consumer cannot multiply */
  DLX_COPY_RESOLVES = 1008         /* by a plain copy: read-only, layout and alignment */
};

/* DLX_INCOMPATIBLE_* between a validated tensor and a consumer; 0 = it may be handed over as it is.
 * No framework is known here by name. */
uint32_t dlx_check(const DLTensor* tensor, uint64_t flags, const dlx_capabilities* consumer);

/* Bytes that the address of the first element must be a multiple of: for a consumer, or any. */
int64_t dlx_wanted_alignment(DLDataType dtype, const dlx_capabilities* consumer);
int64_t dlx_natural_alignment(DLDataType dtype);

/* ---- guards in C ----------------------------------------------------------------------------- */

/* How an adapter may answer several of its guards at once: first without a tensor, then with the
 * validated tensor that its exchange table gave, which may have no address. 1 = all of them are
 * false, 0 = ask Python. GIL: held. Errors: none. */
typedef int (*dlx_guard_function)(void* array, const DLTensor* borrowed);

/* ---- copy.c: strided copies on the host ------------------------------------------------------ */

/* Copy every element of `from` to the same index of `to`: same shape, dtype and flags, no overlap.
 * Errors: DLX_E_DEVICE _MISMATCH _PACKED. */
int dlx_copy(const DLTensor* from, const DLTensor* to, uint64_t flags);

/* Copy between packed and padded elements of less than a byte (one lane, 1 to 7 bits), the first in
 * the lowest bits; the flags say which side is which, and the packed side is row-major. Unused bits
 * become 0. Errors: DLX_E_DEVICE _MISMATCH _PACKED. */
int dlx_repack(const DLTensor* from, uint64_t from_flags, const DLTensor* to, uint64_t to_flags);

/* ---- write.c: files in memory ---------------------------------------------------------------- */

enum { DLX_MAP_READ, DLX_MAP_WRITE, DLX_MAP_PRIVATE };

/* Map the first `size` bytes of a file: to read, to write for everybody, or to write for oneself. A
 * large mapping begins where a huge page may. Owns: the caller calls dlx_unmap. Errors: NULL with
 * errno. */
void* dlx_map(int fd, int64_t size, int mode);
void dlx_unmap(void* address, int64_t size);

/* Whether an open descriptor is of this file. */
int dlx_is_file(int fd, uint64_t device, uint64_t inode);

typedef struct {
  int64_t from; /* address of memory of the host */
  int64_t to;   /* offset in a file */
  int64_t size; /* bytes, more than 0: leave empty runs out */
} dlx_run;

/* Write runs of bytes into a file, in ascending order of their offsets; small gaps become zeros.
 * `mapping` is NULL, or the file's first `size` bytes, mapped with DLX_MAP_WRITE: it then gets huge
 * pages if the kernel makes them, filled from 16 MiB on by two threads. Errors: -1 with errno,
 * EFAULT if memory cannot be read because its file has become shorter. */
int dlx_write_runs(int fd, void* mapping, int64_t size, const dlx_run* runs, int64_t count);

/* ---- layout.c: texts ------------------------------------------------------------------------- */

/* One sentence for a status, for the reason of an error. */
const char* dlx_status_text(int status);

/* The compiler of this binary, with its version; its flags, without warnings and paths. */
const char* dlx_compiler(void);
const char* dlx_compile_flags(void);

#ifdef __cplusplus
}
#endif

#endif
