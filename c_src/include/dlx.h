#ifndef DLX_DLX_H_
#define DLX_DLX_H_

#include "dlpack_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The core of dlx, without Python. cffi parses this file, too: see dlpack_abi.h.
 *   GIL     never needed; callers release it for functions that copy many bytes or may wait
 *   Owns    what the caller must release after success; on failure, ownership is unchanged
 *   Errors  an int is DLX_OK or a status below, unless the function says otherwise */

enum {
  DLX_OK = 0,
  DLX_E_MEMORY = -1,
  DLX_E_VERSION = -2,   /* unsupported DLPack major version */
  DLX_E_NDIM = -3,      /* below 0 or above DLX_MAX_NDIM */
  DLX_E_SHAPE = -4,     /* missing, or a negative extent */
  DLX_E_DTYPE = -5,     /* no bits or no lanes */
  DLX_E_OVERFLOW = -6,  /* size exceeds 63 bits, or the offset exceeds the address space */
  DLX_E_FLAGS = -7,     /* unknown flags that could change the layout */
  DLX_E_NULL = -8,      /* no address for a tensor that has elements */
  DLX_E_DEVICE = -9,    /* memory that the host cannot read */
  DLX_E_PACKED = -10,   /* packed sub-byte elements that are not contiguous */
  DLX_E_MISMATCH = -11, /* source and destination differ in shape or dtype */
  /* Raised by the Python extension only. */
  DLX_E_CAPSULE = -12,
  DLX_E_CONSUMED = -13, /* the capsule was already used */
  DLX_E_READONLY = -14, /* read-only memory, but the interface has no read-only flag */
  DLX_E_STREAM = -15,   /* a stream for memory without streams */
  DLX_E_COPY = -16,     /* sharing was requested, but only a copy is possible */
  /* CUDA driver: dlx_cuda_message has the details. */
  DLX_E_NO_DRIVER = -17, /* no driver, or no device */
  DLX_E_FORKED = -18,    /* initialised before a fork, unusable in the child */
  DLX_E_DRIVER = -19,    /* a driver call failed */
  DLX_E_CAPTURE = -20,   /* would invalidate a graph capture */
  DLX_E_SCATTERED = -21, /* a strided copy with too many steps */
  DLX_E_ARROW = -22      /* inconsistent Arrow data */
};

enum { DLX_MAX_NDIM = 128, DLX_ALIGNMENT = 256 /* bytes, for memory that dlx allocates */ };

/* ---- layout.c: arithmetic on one tensor ------------------------------------------------------ */

/* Layout of the elements in memory; dimensions of extent 0 or 1 are ignored. */
enum {
  DLX_LAYOUT_NEGATIVE = 1, /* a negative stride */
  DLX_LAYOUT_ZERO = 2,     /* a stride of 0 (broadcast) */
  DLX_LAYOUT_GAPS = 4,     /* gaps between elements, or overlap */
  DLX_LAYOUT_PERMUTED = 8  /* dimensions not in row-major order */
};

/* Validate everything that later functions rely on: rank, shape, dtype, flags, address, overflow.
 * Errors: DLX_E_NDIM _SHAPE _DTYPE _FLAGS _NULL _OVERFLOW. */
int dlx_validate(const DLTensor* tensor, uint64_t flags);

/* Return 1 if dlx_validate succeeds and no consumer needs another layout: row-major elements in
 * host memory, aligned to `alignment` (a power of two). 0 = call dlx_validate and dlx_check. */
int dlx_is_plain(const DLTensor* tensor, uint32_t alignment);

/* Return 1 if strides that no element depends on could overflow a program's arithmetic: negative or
 * too large for the extents of a tensor without elements, too large in bits at an extent of 1.
 * dlx_normalize_strides writes the strides with small numbers in their place. */
int dlx_has_odd_strides(const DLTensor* tensor);
void dlx_normalize_strides(const DLTensor* tensor, int64_t* out);

/* Number of elements, their bytes, and DLX_LAYOUT_* (0 = contiguous) of a validated tensor. */
int64_t dlx_size(const DLTensor* tensor);
int64_t dlx_nbytes(const DLTensor* tensor, uint64_t flags);
uint32_t dlx_layout(const DLTensor* tensor);

/* Compute the byte range [low, high) of the elements, relative to the first one (low <= 0). */
void dlx_extent(const DLTensor* tensor, uint64_t flags, int64_t* low, int64_t* high);

/* Bytes per element; 0 if elements are packed below a byte. */
int64_t dlx_itemsize(DLDataType dtype, uint64_t flags);

/* Write row-major strides (in elements) for a shape. */
void dlx_compact_strides(int32_t ndim, const int64_t* shape, int64_t* strides);

/* Return 1 if `data` is an address, not an opaque handle; if the host can read the memory without
 * synchronization; if dlx can order the streams of the memory. */
int dlx_data_is_address(int32_t device_type);
int dlx_host_readable(int32_t device_type);
int dlx_is_cuda(DLDevice device);

/* ---- managed.c: tensors with an owner, released exactly once --------------------------------- */

typedef void (*dlx_release)(void* owner);

/* Create a managed tensor over memory that `owner` keeps alive. Copies shape and strides, writes
 * out missing strides, normalizes odd ones (dlx_has_odd_strides), and adds the byte offset to
 * `data` if that is an address. dlx_managed_trust skips the checks, for tensors that pass
 * dlx_is_plain. Owns: release(owner) is called once, after the result and all tensors that share it
 * are released. Errors: as dlx_validate, DLX_E_MEMORY. */
int dlx_managed_new(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                    DLManagedTensorVersioned** out);
int dlx_managed_trust(const DLTensor* like, uint64_t flags, void* owner, dlx_release release,
                      DLManagedTensorVersioned** out);

/* Validate and wrap a foreign managed tensor. Owns: the result calls the deleter of `foreign`.
 * Errors: as dlx_managed_new, DLX_E_VERSION. */
int dlx_managed_adopt(DLManagedTensorVersioned* foreign, DLManagedTensorVersioned** out);

/* Create another managed tensor over the memory of `made`, a tensor of dlx. `like` describes it;
 * NULL = as `made`, with other flags. Owns: the result holds `made`. Errors: as dlx_managed_new. */
int dlx_managed_share(DLManagedTensorVersioned* made, const DLTensor* like, uint64_t flags,
                      DLManagedTensorVersioned** out);

/* Allocate uninitialised host memory, aligned to DLX_ALIGNMENT, for the ndim, shape and dtype of
 * `like`: row-major, or with keep_order in the dimension order of `like`, which must then be valid.
 * No other field is read. Errors: as dlx_managed_new. */
int dlx_managed_empty(const DLTensor* like, uint64_t flags, int keep_order,
                      DLManagedTensorVersioned** out);

/* Replace the owner of a tensor of dlx that no other thread uses (NULL, NULL: no owner). Return the
 * borrowed owner if `release` releases it (NULL matches any), else NULL. Owns: the caller owns the
 * previous owner. */
void dlx_managed_own(DLManagedTensorVersioned* made, void* owner, dlx_release release);
void* dlx_managed_owner(const DLManagedTensorVersioned* made, dlx_release release);

/* Return 1 if the tensor is dlx's and the caller is its only holder. */
int dlx_managed_is_sole(const DLManagedTensorVersioned* managed);

/* Add a holder to a tensor of dlx: to keep it alive without the GIL, or before a hand-over, since a
 * consumer that fails may release it or not. */
void dlx_managed_hold(DLManagedTensorVersioned* made);

/* The same without a locked operation; return 0 if the caller is not the only holder. */
int dlx_managed_hold_sole(DLManagedTensorVersioned* made);

/* Release the owner after the consumer failed, unless the consumer has done so. Takes the count of
 * dlx_managed_hold; the tensor has no other holders. A later deleter call only frees the struct. */
void dlx_managed_abandon(DLManagedTensorVersioned* made);

/* Call the deleter of a DLManagedTensorVersioned, if it has one. Owns: gives up one count. */
void dlx_managed_release(void* managed);

/* Deleter for the conformance kit: adds 1 to the uint64_t at manager_ctx and frees nothing. */
void dlx_count_managed(DLManagedTensorVersioned* self);

/* Number of live managed tensors of dlx. */
int64_t dlx_live(void);

/* ---- legacy.c: the only file that accesses DLManagedTensor ----------------------------------- */

/* As dlx_managed_adopt, dlx_managed_release and dlx_count_managed, for the legacy struct. */
int dlx_legacy_adopt(DLManagedTensor* foreign, DLManagedTensorVersioned** out);
void dlx_legacy_release(void* managed);
void dlx_count_legacy(DLManagedTensor* self);

/* Wrap a tensor of dlx in the legacy struct, which has no read-only flag. Owns: the result owns
 * `made`. Errors: DLX_E_MEMORY. */
int dlx_legacy_export(DLManagedTensorVersioned* made, DLManagedTensor** out);

/* Undo dlx_legacy_export, unless the tensor is shared or has flags. Owns: takes `shell`; the caller
 * owns the result. Errors: NULL = nothing changed. */
DLManagedTensorVersioned* dlx_legacy_unwrap(DLManagedTensor* shell);

/* ---- allocate.c: for tests ------------------------------------------------------------------- */

/* Make one allocation of dlx's C code fail: number 1 is the next one, on any thread; 0 = none.
 * Returns the rest of the previous number: 0 = that allocation has failed. */
int64_t dlx_fail_allocation(int64_t number);

/* ---- check.c: can this consumer use this tensor without a copy? ------------------------------ */

/* Requirements of a consumer that multiplies the extents of a tensor without elements: the product
 * must fit 64 bits in elements, or 63 bits in bytes; 0 = no requirement. */
enum {
  DLX_EXTENTS_ALL = 1,     /* all extents except zeros */
  DLX_EXTENTS_LEADING = 2, /* extents before the first zero */
  DLX_EXTENTS_BYTES = 4,   /* in bytes instead of elements */
  DLX_EXTENTS_NONE = 8     /* the consumer rejects these tensors */
};

/* Tensors that a consumer accepts without a copy. Set by field name from adapter.Capabilities. */
typedef struct {
  uint32_t device_types;  /* bit n = DLPack device type n */
  uint32_t layouts;       /* accepted DLX_LAYOUT_* */
  uint32_t min_alignment; /* bytes; 0 = the natural alignment of the dtype, 1 = any */
  int32_t min_ndim;
  int32_t max_ndim;
  int32_t keeps_readonly; /* 1: keeps the flag, or its arrays are immutable */
  int32_t takes_packed;   /* 1: accepts sub-byte elements that share bytes */
  int32_t takes_padded;   /* 1: accepts sub-byte elements, a byte each */
  int32_t takes_null;     /* 1: accepts NULL for a tensor without elements */
  int32_t empty_extents;
  int32_t n_dtypes;    /* -1 = any dtype */
  uint32_t dtypes[64]; /* each code | bits << 8 | lanes << 16 */
} dlx_capabilities;

enum {
  DLX_INCOMPATIBLE_DEVICE = 1,
  DLX_INCOMPATIBLE_DTYPE = 2,
  DLX_INCOMPATIBLE_NDIM = 4,
  DLX_INCOMPATIBLE_PADDED = 8, /* sub-byte elements, a byte each, but the consumer packs them */
  DLX_INCOMPATIBLE_READONLY = 16,
  DLX_INCOMPATIBLE_NEGATIVE = 32,
  DLX_INCOMPATIBLE_ZERO = 64,
  DLX_INCOMPATIBLE_GAPS = 128,
  DLX_INCOMPATIBLE_PERMUTED = 256,
  DLX_INCOMPATIBLE_UNALIGNED = 512,
  DLX_INCOMPATIBLE_PACKED = 1024,  /* packed sub-byte elements, but the consumer pads them */
  DLX_INCOMPATIBLE_NULL = 2048,    /* no elements and no address, but the consumer needs one */
  DLX_INCOMPATIBLE_EXTENTS = 4096, /* no elements, and extents that the consumer cannot multiply */
  DLX_COPY_RESOLVES = 1008         /* a plain copy resolves read-only, layout and alignment */
};

/* Return DLX_INCOMPATIBLE_* of a validated tensor for a consumer; 0 = it accepts the tensor
 * unchanged. */
uint32_t dlx_check(const DLTensor* tensor, uint64_t flags, const dlx_capabilities* consumer);

/* Required alignment of the first element, in bytes: for a consumer, or for any. */
int64_t dlx_wanted_alignment(DLDataType dtype, const dlx_capabilities* consumer);
int64_t dlx_natural_alignment(DLDataType dtype);

/* ---- guards in C ----------------------------------------------------------------------------- */

/* An adapter's function that checks several of its guards at once: first without a tensor, then
 * with the validated tensor of its exchange table, which may have no address. 1 = all guards are
 * false, 0 = ask Python. GIL: held. Errors: none. */
typedef int (*dlx_guard_function)(void* array, const DLTensor* borrowed);

/* ---- copy.c: strided copies on the host ------------------------------------------------------ */

/* Copy each element of `from` to the same index of `to`: same shape, dtype and flags, no overlap.
 * Errors: DLX_E_DEVICE _MISMATCH _PACKED. */
int dlx_copy(const DLTensor* from, const DLTensor* to, uint64_t flags);

/* Cast each element of `from` to the dtype of `to`: bool, integers, float16, bfloat16, float32 and
 * float64 to each of these, or to complex64 and complex128; and complex64 and complex128 to each
 * other. As dlx_copy if the dtypes are the same. Errors: as dlx_copy; DLX_E_MISMATCH = dlx_can_cast
 * returns 0. */
int dlx_cast(const DLTensor* from, const DLTensor* to, uint64_t flags);
int dlx_can_cast(DLDataType from, DLDataType to);

/* Copy between packed and padded elements below a byte (one lane, 1 to 7 bits), the first in the
 * lowest bits. The flags say which side is packed; that side is row-major. Unused bits become 0.
 * Errors: DLX_E_DEVICE _MISMATCH _PACKED. */
int dlx_repack(const DLTensor* from, uint64_t from_flags, const DLTensor* to, uint64_t to_flags);

/* ---- indices.c: index arrays of sparse and ragged arrays --------------------------------------
 */

/* Contiguous integers of 32 or 64 bits on the host. Return the number of the first index that is
 * not in [0, end), of the first offset below the one before it, of the first index that is not in
 * [0, end) or that its row has already (or, if `rising`, that does not exceed the one before it;
 * the offsets are checked before), or of the first element whose coordinates do not exceed those
 * before it; -1 = none, -2 = no memory. */
int64_t dlx_find_outside(const DLTensor* indices, int64_t end);
int64_t dlx_find_descent(const DLTensor* offsets);
int64_t dlx_find_repeat(const DLTensor* indptr, const DLTensor* indices, int64_t end, int rising);
int64_t dlx_find_disorder(const DLTensor* const* rows, int32_t ndim);

/* Subtract a number, to new memory of the same dtype and count. */
void dlx_subtract(const DLTensor* from, int64_t minus, const DLTensor* to);

/* ---- write.c: files in memory ---------------------------------------------------------------- */

enum { DLX_MAP_READ, DLX_MAP_WRITE, DLX_MAP_PRIVATE };

/* Map the first `size` bytes of a file: read-only, shared for writing, or private. A large mapping
 * starts at a multiple of the huge page size if possible. Owns: the caller calls dlx_unmap. Errors:
 * NULL with errno. */
void* dlx_map(int fd, int64_t size, int mode);
void dlx_unmap(void* address, int64_t size);

/* Duplicate a descriptor of another process. Owns: the caller owns it. Errors: -1 with errno. */
int dlx_take_descriptor(int32_t pid, int32_t fd);

/* Return 1 if a descriptor refers to this file. */
int dlx_is_file(int fd, uint64_t device, uint64_t inode);

typedef struct {
  int64_t from; /* address in host memory */
  int64_t to;   /* offset in the file */
  int64_t size; /* bytes, more than 0 */
} dlx_run;

/* Write runs of bytes to a file, in ascending order of offsets; small gaps become zeros. `mapping`
 * is NULL or the file's first `size` bytes, mapped with DLX_MAP_WRITE. It gets huge pages if the
 * kernel provides them; from 16 MiB on, two threads fill it. Errors: -1 with errno, EFAULT if
 * memory is unreadable because its file became shorter. */
int dlx_write_runs(int fd, void* mapping, int64_t size, const dlx_run* runs, int64_t count);

/* ---- ring.c: frames in shared memory, from one producer to many readers (Linux) ---------------
 */

enum {
  DLX_RING_READERS = 64,
  DLX_RING_SLOTS = 1024,
  DLX_RING_BYTES = 12544, /* of the control block, which begins as zeros; a multiple of 256 */
  DLX_RING_ENDED = -2
};

/* A slot is below `slots`, the number of a reader below DLX_RING_READERS, whatever the memory
 * contains. A call waits once, for at most `nanoseconds`, and may return early. */

/* Return a slot to write to, after `readers` readers have joined. Errors: -1 = every frame is still
 * held or, without `overwrite`, wanted. */
int dlx_ring_claim(void* ring, int slots, int overwrite, int readers, int64_t nanoseconds);
void dlx_ring_publish(void* ring, int slot);
void dlx_ring_end(void* ring);

/* Join with a number that no other reader has; its first frame is the next one to be published. */
void dlx_ring_join(void* ring, int reader);

/* Hold the next frame, or the `newest` one, and return its slot. Errors: -1 = no frame yet;
 * DLX_RING_ENDED = the producer has ended, and there are no more frames. */
int dlx_ring_next(void* ring, int slots, int reader, int newest, int64_t nanoseconds);

/* Return the number of the frame that a reader holds, from 1, or 0; release the frame. */
uint64_t dlx_ring_held(void* ring, int reader);
void dlx_ring_release(void* ring, int reader);

/* Remove a reader, which may be dead or never have joined. */
void dlx_ring_leave(void* ring, int reader);

/* ---- layout.c: texts ------------------------------------------------------------------------- */

/* Return a sentence for a status, for use as a reason. */
const char* dlx_status_text(int status);

/* Compiler and version of this binary; its flags, without warnings and paths. */
const char* dlx_compiler(void);
const char* dlx_compile_flags(void);

#ifdef __cplusplus
}
#endif

#endif
