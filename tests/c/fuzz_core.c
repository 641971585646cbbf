/* Fuzz targets for the pure core: results are compared with simple reference implementations. The
 * first byte of an input selects the target, the others become tensors and operations; edge values
 * are common. Every block has exactly the required size, so that the address sanitizer finds reads
 * and writes outside it.
 *
 * clang's libFuzzer can run it. With -DALONE, any compiler builds a program that runs a corpus and
 * seeded mutations of it. tests/support/stress/fuzz_core.py builds and runs both. */

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arrow.h"
#include "core/copy.h"

__extension__ typedef __int128 wide; /* holds every product of two 64-bit numbers */

#define HOLDS(condition) ((condition) ? (void)0 : broken(#condition, __LINE__))

_Noreturn static void broken(const char* condition, int line) {
  fprintf(stderr, "fuzz_core.c:%d: does not hold: %s\n", line, condition);
  abort();
}

/* ---- the input ------------------------------------------------------------------------------- */

static const uint8_t *at, *end;

/* Return the next byte; after the end of the input, ones. */
static unsigned byte(void) {
  return at < end ? *at++ : 1;
}

static uint64_t raw(void) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++) value = value << 8 | byte();
  return value;
}

/* Small, or near a power of two, or near a part of 2^63, or anything. */
static int64_t number(void) {
  unsigned kind = byte();
  if (kind < 96) return kind % 6;
  if (kind < 128) return kind - 96;
  if (kind < 160) return -(int64_t)(kind - 127);
  if (kind < 232) {
    unsigned power = byte();
    uint64_t value = kind < 208 ? (uint64_t)1 << power % 64 : (uint64_t)INT64_MAX / (power + 1);
    return (int64_t)((kind & 8 ? -value : value) + kind % 8 - 4);
  }
  return (int64_t)raw();
}

static void* kept[64]; /* memory of this input */
static int n_kept;

static void* fresh(size_t bytes) {
  HOLDS(n_kept < 64);
  void* block = malloc(bytes);
  HOLDS(block != NULL);
  return kept[n_kept++] = block;
}

static int64_t* numbers(int32_t count) {
  int64_t* values = fresh((size_t)count * sizeof *values);
  for (int32_t i = 0; i < count; i++) values[i] = number();
  return values;
}

/* Return strides without overlap: dimensions in any order, with signs, gaps, and any stride for
 * extents of 1, as chosen by the input; ones in the input mean row-major. */
static int64_t* laid_out(int32_t ndim, const int64_t* shape) {
  int64_t* strides = fresh((size_t)ndim * sizeof *strides);
  char is_done[DLX_MAX_NDIM] = {0};
  uint64_t step = 1; /* may wrap, for dlx_validate to reject */
  for (int32_t left = ndim; left > 0; left--) {
    unsigned kind = byte();
    int32_t d = ndim - 1;
    for (int32_t skip = (int32_t)(kind >> 4) % left; is_done[d] || skip-- > 0;) d--;
    is_done[d] = 1;
    strides[d] = (int64_t)(kind & 2 ? -step : step);
    if (shape[d] == 1 && kind & 4) strides[d] = number();
    if (shape[d] > 0) step *= (uint64_t)shape[d];
    if (kind & 8) step += byte();
  }
  return strides;
}

static DLDataType dtype(void) {
  static const uint8_t bits[] = {8, 32, 64, 16, 4, 1, 6, 2, 3, 5, 7, 128, 24, 0, 255, 12};
  static const uint16_t lanes[] = {2, 3, 4, 0, 5, 8, 16, UINT16_MAX};
  unsigned kind = byte(), many = byte(), code = byte() % 20;
  return (DLDataType){(uint8_t)code, kind < 240 ? bits[kind % 16] : (uint8_t)byte(),
                      many < 192 ? 1 : lanes[many % 8]};
}

static uint64_t flag_bits(void) {
  unsigned kind = byte();
  return kind < 224 ? kind % 8 : raw();
}

static DLDevice device(void) {
  unsigned kind = byte();
  int32_t type = kind < 160 ? kDLCPU : kind < 240 ? (int32_t)(kind % 20) : (int32_t)raw();
  return (DLDevice){type, kind < 160 ? 0 : (int32_t)byte()};
}

/* A valid or invalid tensor over memory that is never accessed. */
static DLTensor any_tensor(void) {
  static const int32_t odd_ranks[] = {DLX_MAX_NDIM, DLX_MAX_NDIM + 1, -1, INT32_MAX, INT32_MIN, 64};
  unsigned rank = byte(), kind = byte(), place = byte();
  DLTensor t = {.dtype = dtype()};
  t.device = device();
  t.ndim = rank < 224 ? (int32_t)(rank % 7) : odd_ranks[rank % 6];
  int32_t count = t.ndim < 0 || t.ndim > DLX_MAX_NDIM ? 1 : t.ndim;
  if (kind < 248) t.shape = numbers(count);
  if (kind % 4 == 0) t.strides = numbers(count);
  if (kind % 4 == 1 && t.shape && t.ndim == count) {
    t.strides = laid_out(count, t.shape);
    if (kind & 4 && count) t.strides[(int32_t)byte() % count] = number();
  }
  t.data = (void*)(uintptr_t)(place < 192 ? place << 8 : place < 200 ? 0 : (uint64_t)number());
  if (place & 1) t.byte_offset = (uint64_t)number();
  return t;
}

/* ---- references ------------------------------------------------------------------------------ */

typedef struct {
  int status; /* of dlx_validate; the rest is set for DLX_OK */
  int64_t size;
  wide nbytes, low, high;
} facts;

static int is_address(int32_t type) {
  return type == kDLCPU || type == kDLCUDA || type == kDLCUDAHost || type == kDLROCM ||
         type == kDLROCMHost || type == kDLCUDAManaged;
}

static wide whole_bytes(wide bits) { /* rounds away from 0 */
  return bits < 0 ? -((7 - bits) / 8) : (bits + 7) / 8;
}

static int is_empty(const DLTensor* t) {
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0) return 1;
  }
  return 0;
}

static facts look_at(const DLTensor* t, uint64_t flags) {
  wide most = INT64_MAX, size = 1, low = 0, high = 0, bits = (wide)t->dtype.bits * t->dtype.lanes;
  wide data = (uintptr_t)t->data, first = data + t->byte_offset;
  int is_real = is_address(t->device.device_type);
  int is_sound = t->byte_offset == 0 || (is_real ? first <= UINT64_MAX && first >> 56 == data >> 56
                                                 : first - data <= most);
  if (t->ndim < 0 || t->ndim > 128) return (facts){.status = DLX_E_NDIM};
  if (t->ndim && t->shape == NULL) return (facts){.status = DLX_E_SHAPE};
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0) return (facts){.status = DLX_E_SHAPE};
  }
  if (bits == 0) return (facts){.status = DLX_E_DTYPE};
  if (bits % 8 && flags > 7) return (facts){.status = DLX_E_FLAGS};
  if (is_empty(t)) return (facts){.status = is_sound ? DLX_OK : DLX_E_OVERFLOW};
  if (t->data == NULL) return (facts){.status = DLX_E_NULL};
  if (bits % 8 && flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) bits += 8 - bits % 8;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    wide step = t->strides ? t->strides[i] : size, reach = (t->shape[i] - 1) * step;
    size *= t->shape[i];
    *(reach < 0 ? &low : &high) += reach;
    if (size > most || high > most || -low > most || step == INT64_MIN)
      return (facts){.status = DLX_E_OVERFLOW};
  }
  low *= bits, high = (high + 1) * bits;
  is_sound &=
      !is_real || (data <= most && first + whole_bytes(low) >= 0 && first + high / 8 + 1 <= most);
  if (size * bits > most || high > most || -low > most || !is_sound)
    return (facts){.status = DLX_E_OVERFLOW};
  return (facts){DLX_OK, (int64_t)size, whole_bytes(size * bits), whole_bytes(low),
                 whole_bytes(high)};
}

/* The offset of an element from the first one, by its row-major index. */
static int64_t offset_of(const DLTensor* t, int64_t index) {
  int64_t offset = 0, below = 1;
  for (int32_t d = t->ndim - 1; d >= 0; d--) {
    offset += index % t->shape[d] * (t->strides ? t->strides[d] : below);
    index /= t->shape[d];
    below *= t->shape[d];
  }
  return offset;
}

static int64_t magnitude(int64_t value) {
  return value < 0 ? -value : value;
}

static uint32_t layout_of(const DLTensor* t, int64_t size) {
  uint32_t features = 0;
  int64_t compact = 1;
  if (t->strides == NULL || size < 2) return 0;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 1) continue;
    if (t->strides[i] < 0) features |= DLX_LAYOUT_NEGATIVE;
    if (t->strides[i] == 0) features |= DLX_LAYOUT_ZERO;
    for (int32_t j = 0; j < i; j++) {
      if (t->shape[j] != 1 && t->strides[j] && t->strides[i] &&
          magnitude(t->strides[j]) < magnitude(t->strides[i]))
        features |= DLX_LAYOUT_PERMUTED;
    }
  }
  char is_done[DLX_MAX_NDIM] = {0};
  for (;;) { /* find the dimension that continues from the last one */
    int32_t next = -1, left = 0;
    for (int32_t i = 0; i < t->ndim; i++) {
      if (is_done[i] || t->shape[i] == 1 || t->strides[i] == 0) continue;
      left = 1;
      if (magnitude(t->strides[i]) == compact) next = i;
    }
    if (next < 0) return left ? features | DLX_LAYOUT_GAPS : features;
    is_done[next] = 1;
    compact *= t->shape[next];
  }
}

/* ---- layout.c -------------------------------------------------------------------------------- */

/* Check the references again, by visiting all elements of a small tensor. */
static void walk(const DLTensor* t, uint64_t flags, const facts* f) {
  int64_t bits = t->dtype.bits * t->dtype.lanes, low = 0, high = 0;
  int is_dense = 1, is_broadcast = 0;
  if (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) bits = (bits + 7) / 8 * 8;
  char is_used[256] = {0};
  for (int64_t i = 0; i < f->size; i++) {
    int64_t offset = offset_of(t, i);
    if (offset * bits < low) low = offset * bits;
    if (offset * bits + bits > high) high = offset * bits + bits;
  }
  HOLDS(whole_bytes(low) == f->low && whole_bytes(high) == f->high);
  for (int32_t d = 0; t->strides && d < t->ndim; d++)
    is_broadcast |= t->shape[d] > 1 && t->strides[d] == 0;
  if (is_broadcast) return;
  for (int64_t i = 0; i < f->size; i++) { /* dense: each element is used once */
    int64_t from_lowest = offset_of(t, i) - low / bits;
    if (from_lowest >= f->size || is_used[from_lowest]++) is_dense = 0;
    if (from_lowest >= f->size) break;
  }
  HOLDS(is_dense == !(layout_of(t, f->size) & DLX_LAYOUT_GAPS));
}

static void target_layout(void) {
  static const uint32_t alignments[] = {1, 2, 4, 8, 16, 64, 256, 4096};
  DLTensor t = any_tensor();
  uint64_t flags = flag_bits();
  uint32_t alignment = alignments[byte() % 8];
  facts f = look_at(&t, flags);
  int status = dlx_validate(&t, flags), is_plain = dlx_is_plain(&t, alignment);
  HOLDS(status == f.status);
  HOLDS(strcmp(dlx_status_text(status), "unknown status") != 0);
  HOLDS(!is_plain ||
        (status == DLX_OK && (uintptr_t)t.data % alignment == 0 && (t.strides || !t.ndim) &&
         t.byte_offset == 0 && layout_of(&t, f.size) == 0 && f.size > 0));
  if (status != DLX_OK) return;

  int64_t low, high, bits = t.dtype.bits * t.dtype.lanes;
  int is_padded = (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) != 0;
  HOLDS(dlx_itemsize(t.dtype, flags) == (bits % 8 && !is_padded ? 0 : whole_bytes(bits)));
  HOLDS(dlx_size(&t) == f.size);
  HOLDS(dlx_nbytes(&t, flags) == f.nbytes);
  dlx_extent(&t, flags, &low, &high);
  HOLDS(low == f.low && high == f.high);
  HOLDS(dlx_layout(&t) == layout_of(&t, f.size));
  if (f.size > 0 && f.size <= 256) walk(&t, flags, &f);

  int has_odd = 0;
  for (int32_t i = 0; t.strides && f.size == 0 && i < t.ndim; i++)
    has_odd |= t.strides[i] < 0 || (wide)t.strides[i] * t.shape[i] > INT64_MAX;
  for (int32_t i = 0; t.strides && f.size > 0 && i < t.ndim; i++)
    has_odd |= (wide)magnitude(t.strides[i]) * bits > INT64_MAX;
  HOLDS(dlx_has_odd_strides(&t) == has_odd);

  t.strides = fresh((size_t)t.ndim * sizeof *t.strides);
  dlx_compact_strides(t.ndim, t.shape, t.strides);
  int64_t below = 1;
  for (int32_t i = t.ndim - 1; f.size > 0 && i >= 0; below *= t.shape[i--])
    HOLDS(t.strides[i] == below);
  HOLDS(!dlx_has_odd_strides(&t));
  if (f.size > 0 && f.nbytes < INT64_MAX / 16 && bits % 8 == 0 && t.byte_offset == 0 &&
      t.device.device_type == kDLCPU && (uintptr_t)t.data < INT64_MAX / 2)
    HOLDS(dlx_is_plain(&t, 1));
}

/* ---- managed.c and legacy.c: import and export ----------------------------------------------- */

static void count_release(void* owner) {
  ++*(int64_t*)owner;
}

static int same_numbers(const int64_t* a, const int64_t* b, int32_t count) {
  while (count > 0 && a[count - 1] == b[count - 1]) count--;
  return count == 0;
}

static void same_tensor(const DLTensor* a, const DLTensor* b) {
  HOLDS(a->data == b->data && a->byte_offset == b->byte_offset && a->ndim == b->ndim);
  HOLDS(memcmp(&a->device, &b->device, sizeof a->device) == 0);
  HOLDS(memcmp(&a->dtype, &b->dtype, sizeof a->dtype) == 0);
  HOLDS(same_numbers(a->shape, b->shape, a->ndim));
  HOLDS(same_numbers(a->strides, b->strides, a->ndim));
}

/* The expected managed tensor over `like`; copies its arrays. */
static DLTensor snapshot(const DLTensor* like) {
  DLTensor t = *like;
  size_t bytes = (size_t)t.ndim * sizeof *t.shape;
  t.shape = bytes ? memcpy(fresh(bytes), like->shape, bytes) : fresh(0);
  t.strides = fresh(bytes);
  if (like->strides && dlx_size(like) == 0 && !dlx_has_odd_strides(like)) {
    if (bytes) memcpy(t.strides, like->strides, bytes);
  } else if (like->strides && dlx_size(like) > 0) {
    wide bits_each = t.dtype.bits * t.dtype.lanes, next = 1;
    for (int32_t i = t.ndim - 1; i >= 0; i--) {
      t.strides[i] = like->strides[i];
      if (t.shape[i] == 1 && (wide)magnitude(t.strides[i]) * bits_each > INT64_MAX)
        t.strides[i] = (int64_t)next;
      next = (wide)t.strides[i] * t.shape[i];
      if ((next < 0 ? -next : next) * bits_each > INT64_MAX) next = 1;
    }
  } else {
    dlx_compact_strides(t.ndim, t.shape, t.strides);
  }
  if (is_address(t.device.device_type)) {
    t.data = t.data ? (void*)((uintptr_t)t.data + t.byte_offset) : NULL;
    t.byte_offset = 0;
  }
  return t;
}

/* The producer changes its arrays after the hand-over. */
static void scribble(const DLTensor* t) {
  for (int32_t i = 0; i < t->ndim; i++) {
    t->shape[i] = -77;
    if (t->strides) t->strides[i] = -78;
  }
}

static void target_make(void) {
  DLTensor t = any_tensor();
  uint64_t flags = flag_bits(), other_flags = flag_bits();
  unsigned way = byte(), wrong_version = byte();
  int64_t released = 0;
  int status = look_at(&t, way % 3 == 2 ? 0 : flags).status;
  DLManagedTensorVersioned *made = NULL, *again,
                           versioned = {{1, way}, &released, dlx_count_managed, flags, t};
  DLManagedTensor legacy = {t, &released, dlx_count_legacy}, *shell;
  int is_owed = way % 3 == 0 || way < 192;
  if (!is_owed) versioned.deleter = NULL, legacy.deleter = NULL;
  if (way % 3 == 2) flags = 0; /* the legacy struct has no flags */
  if (way % 3 == 1 && wrong_version > 250) {
    versioned.version.major = wrong_version - 250 + 1;
    status = DLX_E_VERSION;
  }
  DLTensor wanted = status == DLX_OK ? snapshot(&t) : t;
  int got = way % 3 == 0   ? dlx_managed_new(&t, flags, &released, count_release, &made)
            : way % 3 == 1 ? dlx_managed_adopt(&versioned, &made)
                           : dlx_legacy_adopt(&legacy, &made);
  HOLDS(got == status);
  HOLDS(dlx_live() == (status == DLX_OK));
  HOLDS(released == 0);
  if (status != DLX_OK) {
    HOLDS(made == NULL);
    return;
  }
  scribble(&t);
  same_tensor(&made->dl_tensor, &wanted);
  /* Import clears a flag that has no meaning for whole bytes. */
  if (way % 3 == 1 && dlx_itemsize(t.dtype, 0))
    flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  HOLDS(made->version.major == 1 && made->version.minor == 3 && made->flags == flags);
  HOLDS(made->manager_ctx != NULL && made->deleter != NULL);
  HOLDS(!dlx_has_odd_strides(&made->dl_tensor));
  HOLDS(dlx_validate(&made->dl_tensor, flags) == DLX_OK);

  status = look_at(&t, other_flags).status; /* now invalid, except for rank 0 */
  HOLDS(dlx_managed_share(made, &t, other_flags, &again) == status);
  if (status == DLX_OK) dlx_managed_release(again);

  HOLDS(dlx_managed_share(made, NULL, other_flags, &again) == DLX_OK);
  same_tensor(&again->dl_tensor, &wanted);
  HOLDS(again->flags == other_flags);
  dlx_managed_release(made);
  made = again;
  HOLDS(released == 0 && dlx_legacy_export(made, &shell) == DLX_OK);
  same_tensor(&shell->dl_tensor, &wanted);
  HOLDS(shell->manager_ctx != NULL && shell->deleter != NULL);
  if (look_at(&shell->dl_tensor, 0).status == DLX_OK) { /* and back, like another program */
    HOLDS(dlx_legacy_adopt(shell, &again) == DLX_OK);
    same_tensor(&again->dl_tensor, &wanted);
    HOLDS(again->flags == 0 && released == 0);
    dlx_managed_release(again);
  } else {
    dlx_legacy_release(shell);
  }
  HOLDS(released == is_owed);
}

/* Allocate memory like a tensor; only its shape and dtype must be valid. */
static void target_empty(void) {
  static char memory[DLX_ALIGNMENT];
  DLTensor t = any_tensor();
  uint64_t flags = flag_bits();
  unsigned kind = byte();
  int keeps_order = kind % 2;
  DLTensor compact = {memory, {kDLCPU, 0}, t.ndim, t.dtype, t.shape, NULL, 0};
  facts f = look_at(&compact, flags);
  DLManagedTensorVersioned* made = NULL;
  if (keeps_order && look_at(&t, flags).status != DLX_OK) return; /* strides are trusted */
  if (f.status == DLX_OK && f.nbytes > (kind < 248 ? 1 << 16 : 1 << 23)) return; /* rarely large */
  int status = dlx_managed_empty(&t, flags, keeps_order, &made);
  HOLDS(status == f.status);
  HOLDS(dlx_live() == (status == DLX_OK));
  if (status != DLX_OK) return;
  const DLTensor* m = &made->dl_tensor;
  HOLDS(m->ndim == t.ndim && same_numbers(m->shape, t.shape, t.ndim) && made->flags == flags);
  HOLDS(memcmp(&m->dtype, &t.dtype, sizeof t.dtype) == 0);
  HOLDS(m->device.device_type == kDLCPU && m->device.device_id == 0 && m->byte_offset == 0);
  HOLDS((uintptr_t)m->data % DLX_ALIGNMENT == 0 && (m->data != NULL) == (f.size > 0));
  HOLDS(!dlx_has_odd_strides(m));
  if (m->data) ((char*)m->data)[0] = ((char*)m->data)[f.nbytes - 1] = 1;
  int is_ordered = keeps_order && !(layout_of(&t, f.size) & DLX_LAYOUT_ZERO);
  HOLDS((layout_of(m, f.size) & ~(is_ordered ? DLX_LAYOUT_PERMUTED : 0u)) == 0);
  for (int32_t i = 0; is_ordered && t.strides && f.size > 1 && i < t.ndim; i++) {
    for (int32_t j = 0; j < t.ndim; j++) {
      if (t.shape[i] > 1 && t.shape[j] > 1 && magnitude(t.strides[i]) > magnitude(t.strides[j]))
        HOLDS(m->strides[i] > m->strides[j]);
    }
  }
  dlx_managed_release(made);
}

/* ---- managed.c: owners and releases ---------------------------------------------------------- */

enum { NODES = 128, NOBODY = -1 };

typedef enum { OWNER, VERSIONED, LEGACY, SHARE, NESTED, UNOWNED } way; /* how a node was created */

typedef struct {
  DLManagedTensorVersioned* managed;
  DLManagedTensor* shell; /* the handle of an exported node */
  way way;
  int handles; /* counts that the program holds */
  int shares;  /* live nodes that this one owns */
  int parent;  /* the node, */
  int foreign; /* or the foreign object, that it owns; both may be NOBODY */
  int is_held, is_abandoned;
} node;

static node nodes[NODES];
static int n_nodes, live;
/* Actual and expected releases of each foreign object; -1 = never. */
static int64_t released[NODES], expected[NODES];
static DLManagedTensorVersioned versioned[NODES];
static DLManagedTensor legacy[NODES];

static void let_go(node* n);

static void lose_count(node* n) {
  if (n->handles + n->shares > 0) return;
  if (!n->is_abandoned) live--;
  let_go(n);
}

static void let_go(node* n) {
  node* parent = n->parent == NOBODY ? NULL : &nodes[n->parent];
  if (n->foreign != NOBODY) expected[n->foreign]++;
  n->parent = n->foreign = NOBODY;
  if (parent) {
    parent->shares--;
    lose_count(parent);
  }
}

static void release_made(void* made) {
  dlx_managed_release(made);
}

static void* release_handle(void* of) {
  node* n = of;
  DLManagedTensor* shell = n->shell;
  n->shell = NULL;
  n->handles--;
  lose_count(n);
  shell ? dlx_legacy_release(shell) : dlx_managed_release(n->managed);
  return NULL;
}

static void make_node(unsigned operation, node* parent) {
  static int64_t shape[] = {2, 3};
  static char memory[24];
  int i = n_nodes++, status;
  node* n = &nodes[i];
  DLTensor t = {memory, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0};
  DLManagedTensorVersioned** out = &n->managed;
  *n = (node){.handles = 1, .parent = NOBODY, .foreign = NOBODY};
  versioned[i] = (DLManagedTensorVersioned){{1, 0}, &released[i], dlx_count_managed, 0, t};
  legacy[i] = (DLManagedTensor){t, &released[i], dlx_count_legacy};
  if (parent) {
    n->way = operation == 6 ? NESTED : SHARE;
    status = operation == 4   ? dlx_managed_share(parent->managed, &t, 0, out)
             : operation == 5 ? dlx_managed_share(parent->managed, NULL, 0, out)
                              : dlx_managed_new(&t, 0, parent->managed, release_made, out);
    n->parent = (int)(parent - nodes);
    parent->shares++;
    if (operation == 6) parent->handles--; /* now the owner's */
  } else {
    n->way = operation == 1 ? VERSIONED : operation == 2 ? LEGACY : OWNER;
    n->foreign = i;
    status = operation == 0   ? dlx_managed_new(&t, 0, &released[i], count_release, out)
             : operation == 1 ? dlx_managed_adopt(&versioned[i], out)
             : operation == 2 ? dlx_legacy_adopt(&legacy[i], out)
                              : dlx_managed_new(&t, 0, NULL, NULL, out);
    if (operation == 3 && i % 4 == 3) {
      n->way = UNOWNED;
      n->foreign = NOBODY;
    } else if (operation == 3) {
      dlx_managed_own(n->managed, &released[i], count_release);
    }
  }
  HOLDS(status == DLX_OK);
  live++;
}

static void abandon(node* n) {
  if (n->handles + n->shares > 1) {
    n->is_abandoned = 1;
    live--;
    let_go(n);
  }
  n->handles--;
  lose_count(n);
  dlx_managed_abandon(n->managed);
}

static void disown(node* n) {
  int is_sole = n->handles + n->shares == 1, thing = n->foreign;
  void* owner = n->parent != NOBODY   ? (void*)nodes[n->parent].managed
                : n->way == VERSIONED ? (void*)&versioned[thing]
                : n->way == LEGACY    ? (void*)&legacy[thing]
                                      : (void*)&released[thing];
  void *counted = dlx_managed_owner(n->managed, count_release),
       *nested = dlx_managed_owner(n->managed, release_made);
  HOLDS(counted == (n->way == OWNER ? owner : NULL));
  HOLDS(nested == (n->way == NESTED ? owner : NULL));
  HOLDS(dlx_managed_owner(n->managed, NULL) == owner);
  HOLDS(dlx_managed_is_sole(n->managed) == is_sole);
  if (!is_sole) return;
  dlx_managed_own(n->managed, NULL, NULL);
  if (n->parent != NOBODY) { /* the program owns the count again */
    nodes[n->parent].shares--;
    nodes[n->parent].handles++;
  } else {
    released[thing] = expected[thing] = -1;
  }
  n->parent = n->foreign = NOBODY;
  release_handle(n);
}

static void operate(unsigned operation, node* n, int* may_run_thread) {
  pthread_t thread;
  if (operation == 9 && *may_run_thread) {
    *may_run_thread = 0;
    HOLDS(pthread_create(&thread, NULL, release_handle, n) == 0);
    HOLDS(pthread_join(thread, NULL) == 0);
  } else if (operation >= 7 && operation < 10) {
    release_handle(n);
  } else if (n->is_abandoned) {
    return; /* only its deleter may be called */
  } else if (operation < 7) {
    if (n_nodes == NODES || (operation == 6 && n->shell && n->handles == 1)) return;
    make_node(operation, n);
  } else if (operation == 10) {
    int is_sole = n->handles + n->shares == 1;
    dlx_managed_hold(n->managed);
    n->handles++;
    n->is_held |= is_sole;
  } else if (operation < 13) { /* the consumer may have released its count, or not */
    if (n->is_held && !(n->shell && n->handles == 1)) abandon(n);
  } else if (operation == 13) {
    if (n->shell == NULL) HOLDS(dlx_legacy_export(n->managed, &n->shell) == DLX_OK);
  } else if (n->way != UNOWNED) {
    disown(n);
  }
}

static void target_owners(void) {
  int may_run_thread = byte() > 250; /* rarely and once, since it takes long */
  n_nodes = live = 0;
  memset(released, 0, sizeof released), memset(expected, 0, sizeof expected);
  while (at < end) {
    unsigned operation = byte() % 16;
    if (operation < 4) {
      if (n_nodes < NODES) make_node(operation, NULL);
    } else if (n_nodes) {
      node* n = &nodes[n_nodes - 1 - (int)byte() % n_nodes];
      if (n->handles) operate(operation, n, &may_run_thread);
    }
    HOLDS(memcmp(released, expected, sizeof released) == 0);
    HOLDS(dlx_live() == live);
  }
  for (int i = 0; i < n_nodes; i++) {
    while (nodes[i].handles) release_handle(&nodes[i]);
  }
  HOLDS(memcmp(released, expected, sizeof released) == 0);
  for (int i = 0; i < n_nodes; i++) /* owners are released once, or returned */
    HOLDS(released[i] == (nodes[i].way < SHARE ? (released[i] == -1 ? -1 : 1) : 0));
}

/* ---- check.c --------------------------------------------------------------------------------- */

static dlx_capabilities any_consumer(DLDataType likely) {
  static const uint32_t alignments[] = {0, 1, 2, 4, 16, 64, 256, 3};
  unsigned devices = byte(), takes = byte(), extents = byte(), rank = byte(), align = byte();
  dlx_capabilities c = {
      .layouts = extents >> 3 & 15,
      .min_ndim = (int32_t)(rank % 8 == 7),
      .max_ndim = rank < 128 ? 64 : (int32_t)(rank % 8),
      .keeps_readonly = takes & 1,
      .takes_packed = takes >> 1 & 1,
      .takes_padded = takes >> 2 & 1,
      .takes_null = takes >> 3 & 1,
      .empty_extents = (int32_t)(extents % 8),
  };
  c.device_types = devices < 64    ? UINT32_MAX
                   : devices < 160 ? 1u << kDLCPU | 1u << kDLCUDA
                                   : (uint32_t)raw();
  c.min_alignment = align < 240 ? alignments[align % 8] : (uint32_t)raw() | 1;
  c.n_dtypes = takes < 128 ? -1 : (int32_t)(byte() % 65);
  for (int32_t i = 0; i < c.n_dtypes; i++) {
    DLDataType d = byte() & 1 ? likely : dtype();
    c.dtypes[i] = d.code | (uint32_t)d.bits << 8 | (uint32_t)d.lanes << 16;
    if (at == end) break;
  }
  return c;
}

static int takes_extents(const DLTensor* t, const dlx_capabilities* c) {
  int in_bytes = (c->empty_extents & DLX_EXTENTS_BYTES) != 0;
  wide most = in_bytes ? INT64_MAX : (wide)UINT64_MAX;
  wide product = in_bytes ? whole_bytes((wide)t->dtype.bits * t->dtype.lanes) : 1;
  for (int32_t i = 0; c->empty_extents && i < t->ndim; i++) {
    if (t->shape[i] == 0 && c->empty_extents & DLX_EXTENTS_LEADING) break;
    if (t->shape[i]) product *= t->shape[i];
    if (product > most) return 0;
  }
  return 1;
}

static int64_t alignment_of(DLDataType d) {
  int64_t bits = d.code == kDLComplex ? d.bits / 2 : d.bits;
  return bits == 16 ? 2 : bits == 32 ? 4 : bits == 64 ? 8 : bits == 128 ? 16 : 1;
}

static void target_check(void) {
  DLTensor t = any_tensor();
  uint64_t flags = flag_bits();
  dlx_capabilities c = any_consumer(t.dtype);
  facts f = look_at(&t, flags);
  if (f.status != DLX_OK) return;
  uint32_t wanted = 0, unheld = layout_of(&t, f.size) & ~c.layouts;
  int is_padded = (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) != 0;
  int is_whole = t.dtype.bits * t.dtype.lanes % 8 == 0, takes = c.device_types == UINT32_MAX;
  for (int32_t i = 0; i < 32; i++)
    takes |= i == t.device.device_type && c.device_types & (uint32_t)1 << i;
  if (!takes) wanted |= DLX_INCOMPATIBLE_DEVICE;
  takes = c.n_dtypes < 0;
  for (int32_t i = 0; i < c.n_dtypes; i++)
    takes |= (c.dtypes[i] & 255) == t.dtype.code && (c.dtypes[i] >> 8 & 255) == t.dtype.bits &&
             c.dtypes[i] >> 16 == t.dtype.lanes;
  if (!takes) wanted |= DLX_INCOMPATIBLE_DTYPE;
  if (t.ndim < c.min_ndim || t.ndim > c.max_ndim) wanted |= DLX_INCOMPATIBLE_NDIM;
  if (!is_whole && is_padded && !c.takes_padded) wanted |= DLX_INCOMPATIBLE_PADDED;
  if (!is_whole && !is_padded && !c.takes_packed) wanted |= DLX_INCOMPATIBLE_PACKED;
  int64_t alignment = c.min_alignment ? c.min_alignment : alignment_of(t.dtype);
  HOLDS(dlx_natural_alignment(t.dtype) == alignment_of(t.dtype));
  HOLDS(dlx_wanted_alignment(t.dtype, &c) == alignment);
  if (f.size == 0) {
    if (t.data == NULL && !c.takes_null) wanted |= DLX_INCOMPATIBLE_NULL;
    if (!takes_extents(&t, &c)) wanted |= DLX_INCOMPATIBLE_EXTENTS;
  } else {
    if (flags & DLPACK_FLAG_BITMASK_READ_ONLY && !c.keeps_readonly)
      wanted |= DLX_INCOMPATIBLE_READONLY;
    if (unheld & DLX_LAYOUT_NEGATIVE) wanted |= DLX_INCOMPATIBLE_NEGATIVE;
    if (unheld & DLX_LAYOUT_ZERO) wanted |= DLX_INCOMPATIBLE_ZERO;
    if (unheld & DLX_LAYOUT_GAPS) wanted |= DLX_INCOMPATIBLE_GAPS;
    if (unheld & DLX_LAYOUT_PERMUTED) wanted |= DLX_INCOMPATIBLE_PERMUTED;
    if (is_address(t.device.device_type) && ((wide)(uintptr_t)t.data + t.byte_offset) % alignment)
      wanted |= DLX_INCOMPATIBLE_UNALIGNED;
  }
  HOLDS(dlx_check(&t, flags, &c) == wanted);
}

/* ---- copy.c and repack.c --------------------------------------------------------------------- */

typedef struct {
  uint8_t *memory, *before, *first; /* the bytes of a tensor, a copy of them; element 0 */
  size_t bytes;
  int64_t bits; /* of one element in memory */
} block;

/* Allocate and fill memory for `t`. Returns 0 if it is too large. */
static int place(DLTensor* t, int64_t size, uint64_t flags, block* b) {
  int64_t low = 0, high = 0, front = byte() % 16, offset = byte() % 2 ? 0 : front;
  b->bits = t->dtype.bits * t->dtype.lanes;
  if (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) b->bits = (b->bits + 7) / 8 * 8;
  for (int64_t i = 0; i < size; i++) {
    int64_t bit = offset_of(t, i) * b->bits;
    if (bit < low) low = bit;
    if (bit + b->bits > high) high = bit + b->bits;
  }
  low = (int64_t)whole_bytes(low), high = (int64_t)whole_bytes(high);
  if (high - low > 1 << 16) return 0;
  b->bytes = (size_t)(front + high - low);
  b->memory = fresh(b->bytes), b->before = fresh(b->bytes);
  for (size_t i = 0; i < b->bytes; i++) b->memory[i] = (uint8_t)(i * 2654435761u >> 11);
  memcpy(b->before, b->memory, b->bytes);
  b->first = b->memory + front - low;
  t->data = b->first - offset;
  t->byte_offset = (uint64_t)offset;
  return 1;
}

static void is_as_before(const block* b) {
  HOLDS(memcmp(b->memory, b->before, b->bytes) == 0);
}

static int is_sound(DLTensor t) { /* except for its memory, packed or padded */
  t.data = &t;
  return look_at(&t, DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED).status == DLX_OK;
}

/* A shape with some elements, and any strides of the source. */
static int64_t small_tensor(DLTensor* t) {
  unsigned rank = byte(), kind = byte();
  int64_t size = 1;
  *t = (DLTensor){.dtype = dtype(), .device = {kDLCPU, 0}};
  t->ndim = rank < 250 ? (int32_t)(rank % 6) : DLX_MAX_NDIM;
  t->shape = fresh((size_t)t->ndim * sizeof *t->shape);
  for (int32_t i = 0; i < t->ndim; i++) {
    unsigned extent = byte();
    t->shape[i] = extent < 192 ? extent % 6 : extent - 186;
    size *= t->shape[i];
    if (size > 1536) return -1;
  }
  t->strides = kind % 4 == 0   ? NULL
               : kind % 4 == 3 ? numbers(t->ndim)
                               : laid_out(t->ndim, t->shape);
  return is_sound(*t) ? size : -1;
}

static int bit_of(const uint8_t* first, int64_t bit) {
  return first[bit / 8] >> bit % 8 & 1;
}

static void target_copy(void) {
  DLTensor from, to;
  block source, target;
  int64_t size = small_tensor(&from);
  uint64_t flags = flag_bits();
  unsigned kind = byte(), odd = byte();
  if (size < 0) return;
  to = from;
  to.strides = kind % 4 ? laid_out(to.ndim, to.shape) : NULL;
  if (!is_sound(to)) return;
  if (!place(&from, size, flags, &source) || !place(&to, size, flags, &target)) return;
  int wanted = DLX_OK;
  if (odd >= 250) {
    to.shape = memcpy(fresh((size_t)to.ndim * sizeof *to.shape), from.shape,
                      (size_t)to.ndim * sizeof *to.shape);
    wanted = DLX_E_MISMATCH;
    if (odd < 252) {
      *(odd == 250 ? &from : &to) = (DLTensor){.device = {kDLCUDA, 0}};
      wanted = DLX_E_DEVICE;
    } else if (odd == 252) {
      to.dtype.lanes++;
    } else if (odd == 253 || to.ndim == 0) {
      to.dtype.code ^= 1;
    } else if (odd == 254) {
      to.shape[to.ndim - 1]++;
    } else {
      to.ndim--;
    }
  } else if (source.bits % 8 && size > 0 && (layout_of(&from, size) || layout_of(&to, size))) {
    wanted = DLX_E_PACKED;
  }
  if (wanted == DLX_OK && source.bits % 8) {
    memcpy(target.before + (target.first - target.memory), source.first,
           (size_t)whole_bytes(size * source.bits));
  } else if (wanted == DLX_OK) {
    int64_t item = source.bits / 8;
    for (int64_t i = 0; i < size; i++)
      memcpy(target.before + (target.first - target.memory) + offset_of(&to, i) * item,
             source.first + offset_of(&from, i) * item, (size_t)item);
  }
  HOLDS(dlx_copy(&from, &to, flags) == wanted);
  is_as_before(&source);
  is_as_before(&target);
}

static void target_repack(void) {
  const uint64_t padded = DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED;
  DLTensor from, dense, to;
  block source, packed, target;
  int64_t size = small_tensor(&from);
  unsigned kind = byte();
  if (size < 0) return;
  if (kind < 250) from.dtype.bits = (uint8_t)(kind % 7 + 1), from.dtype.lanes = 1;
  dense = to = from;
  if (kind < 192) { /* row-major; otherwise any */
    dense.strides = NULL;
  } else {
    dense.strides = laid_out(dense.ndim, dense.shape);
  }
  to.strides = laid_out(to.ndim, to.shape);
  if (!place(&from, size, padded, &source) || !place(&dense, size, 0, &packed) ||
      !place(&to, size, padded, &target))
    return;
  int64_t bits = dense.dtype.bits, all = bits * size;
  int wanted =
      bits >= 8 || dense.dtype.lanes != 1 || layout_of(&dense, size) ? DLX_E_PACKED : DLX_OK;
  HOLDS(dlx_repack(&from, padded, &to, padded) == DLX_E_PACKED);
  HOLDS(dlx_repack(&(DLTensor){.device = {kDLCUDA, 0}}, padded, &dense, 0) == DLX_E_DEVICE);
  HOLDS(dlx_repack(&(DLTensor){.device = {kDLCPU, 0}}, padded, &dense, 0) == DLX_E_MISMATCH);
  HOLDS(dlx_repack(&dense, 0, &dense, 0) == DLX_E_PACKED);
  HOLDS(dlx_repack(&from, padded, &dense, 0) == wanted);
  is_as_before(&source);
  if (wanted != DLX_OK) {
    is_as_before(&packed);
    return;
  }
  for (int64_t bit = 0; bit < all; bit++)
    HOLDS(bit_of(packed.first, bit) ==
          (source.first[offset_of(&from, bit / bits)] >> bit % bits & 1));
  for (int64_t bit = all; bit % 8; bit++) HOLDS(!bit_of(packed.first, bit));
  HOLDS(memcmp(packed.memory, packed.before, (size_t)(packed.first - packed.memory)) == 0);
  memcpy(packed.before, packed.memory, packed.bytes);
  for (int64_t i = 0; i < size; i++)
    target.before[target.first - target.memory + offset_of(&to, i)] =
        (uint8_t)(source.first[offset_of(&from, i)] & ((1 << bits) - 1));
  HOLDS(dlx_repack(&dense, 0, &to, padded) == DLX_OK);
  is_as_before(&packed);
  is_as_before(&target);
}

/* ---- Arrow's structs: valid ones over memory of the exact size, then with one lie ------------ */

enum { MOST_LEVELS = 4, MOST_BATCHES = 3, MOST_ARRAYS = 64 };

static struct ArrowSchema types[MOST_ARRAYS];
static struct ArrowArray arrays[MOST_ARRAYS];
static int n_types, n_arrays, n_owed, n_released;

static void release_type(struct ArrowSchema* type) {
  HOLDS(type->release == release_type); /* released once */
  type->release = NULL;
  n_released++;
}

static void release_array(struct ArrowArray* node) {
  HOLDS(node->release == release_array);
  node->release = NULL;
  n_released++;
}

static struct ArrowSchema* new_type(const char* format, struct ArrowSchema* child) {
  HOLDS(n_types < MOST_ARRAYS);
  struct ArrowSchema* type = &types[n_types++];
  *type = (struct ArrowSchema){.format = format, .name = ""};
  if (child == NULL) return type;
  type->n_children = 1;
  type->children = fresh(sizeof *type->children);
  type->children[0] = child;
  return type;
}

static struct ArrowArray* new_array(int64_t length, int64_t offset, int64_t n_buffers) {
  HOLDS(n_arrays < MOST_ARRAYS);
  struct ArrowArray* node = &arrays[n_arrays++];
  *node = (struct ArrowArray){.length = length, .offset = offset, .n_buffers = n_buffers};
  node->buffers = fresh((size_t)n_buffers * sizeof *node->buffers);
  for (int64_t i = 0; i < n_buffers; i++) node->buffers[i] = NULL;
  return node;
}

/* Random bytes, exactly as many as the bits need. */
static uint8_t* bitmap(int64_t bits) {
  size_t bytes = (size_t)((bits + 7) / 8);
  uint8_t* block = fresh(bytes ? bytes : 1);
  unsigned kind = byte(), value = byte();
  for (size_t i = 0; i < bytes; i++) block[i] = (uint8_t)(kind < 128 ? 0xff : value * (i + 1));
  return block;
}

static int bit_is_set(const uint8_t* bits, int64_t i) {
  return bits[i / 8] >> i % 8 & 1;
}

/* Expected values of a column, computed element by element. */
typedef struct {
  int32_t n_lists, is_bits;
  int64_t sizes[MOST_LEVELS], item, rows, n_nulls, n_chunks;
  const uint8_t* first; /* of the first chunk */
  uint8_t values[4096]; /* all elements; bools have a byte each */
  size_t n_bytes;
} arrow_facts;

/* Create the arrays of one batch, outermost first, and record the expected values; NULL = too
 * large. */
static struct ArrowArray* new_batch(arrow_facts* facts, struct ArrowArray* parents) {
  struct ArrowArray* outermost = NULL;
  int64_t rows = byte() % 5, from = 0, count = rows, nulls = 0;
  if (parents) {
    *parents = (struct ArrowArray){.length = rows, .offset = byte() % 3, .n_buffers = 1};
    parents->buffers = fresh(sizeof *parents->buffers);
    parents->buffers[0] = NULL;
    from = parents->offset;
  }
  struct ArrowArray** slot = &outermost;
  for (int32_t level = 0; level <= facts->n_lists; level++) {
    int is_values = level == facts->n_lists;
    int64_t offset = byte() % 10;
    int64_t more = level == 0 && !parents ? 0 : byte() % 2; /* values that the parent skips */
    struct ArrowArray* node = new_array(from + count + more, offset, is_values ? 2 : 1);
    int64_t start = offset + from;
    unsigned valid = byte();
    if (valid >= 160) {
      const uint8_t* bits = node->buffers[0] = bitmap(offset + node->length);
      int64_t here = 0, all = 0;
      for (int64_t i = 0; i < count; i++) here += !bit_is_set(bits, start + i);
      for (int64_t i = 0; i < node->length; i++) all += !bit_is_set(bits, offset + i);
      node->null_count = valid & 1 ? all : -1;
      if (nulls == 0) nulls = here;
    }
    if (is_values) {
      int64_t end_of = start + (node->length - from), bytes = end_of * facts->item;
      if (facts->is_bits) bytes = (end_of + 7) / 8;
      if (bytes > 4000) return NULL;
      uint8_t* block = fresh(bytes ? (size_t)bytes : 1);
      for (int64_t i = 0; i < bytes; i++) block[i] = (uint8_t)(i * 37 + 11);
      if (bytes) node->buffers[1] = block;
      if (count && facts->n_chunks++ == 0)
        facts->first = block + (facts->is_bits ? start / 8 : start * facts->item);
      for (int64_t i = start; i < start + count; i++) {
        if (facts->n_bytes + 8 > sizeof facts->values) return NULL;
        if (facts->is_bits) {
          facts->values[facts->n_bytes++] = (uint8_t)bit_is_set(block, i);
        } else {
          memcpy(facts->values + facts->n_bytes, block + i * facts->item, (size_t)facts->item);
          facts->n_bytes += (size_t)facts->item;
        }
      }
    } else {
      node->n_children = 1;
      node->children = fresh(sizeof *node->children);
      from = start * facts->sizes[level];
      count *= facts->sizes[level];
      if (from + count > 2000) return NULL;
    }
    *slot = node;
    if (!is_values) slot = &node->children[0];
  }
  facts->rows += rows;
  facts->n_nulls += nulls;
  return outermost;
}

/* Change one number or pointer of a node; the result may be valid or not. */
static void lie_about(struct ArrowArray* node) {
  switch (byte() % 8) {
    case 0:
      node->length = number();
      break;
    case 1:
      node->offset = number();
      break;
    case 2:
      node->null_count = number();
      break;
    case 3:
      node->n_buffers = number();
      break;
    case 4:
      node->n_children = number();
      break;
    case 5:
      node->buffers = NULL;
      break;
    case 6:
      node->children = NULL;
      break;
    default:
      node->dictionary = node;
      break;
  }
}

typedef struct {
  struct ArrowArrayStream stream;
  int n, next, fails_at;
} script;

static int script_schema(struct ArrowArrayStream* stream, struct ArrowSchema* out) {
  script* self = stream->private_data;
  if (self->fails_at == 0) return 5;
  *out = types[n_types - 1];
  types[n_types - 1].release = NULL;
  n_owed++;
  return 0;
}

static struct ArrowArray batches[MOST_BATCHES];

static int script_next(struct ArrowArrayStream* stream, struct ArrowArray* out) {
  script* self = stream->private_data;
  if (self->next + 1 == self->fails_at) return 5;
  out->release = NULL;
  if (self->next == self->n) return 0;
  *out = batches[self->next++];
  n_owed++;
  return 0;
}

static void script_release(struct ArrowArrayStream* stream) {
  stream->release = NULL;
}

static void target_arrow(void) {
  static const char letters[][2] = {"c", "C", "s", "S", "i", "I", "l",
                                    "L", "e", "f", "g", "b", "u"};
  static const int8_t items[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 1, 0};
  static arrow_facts facts;
  static char formats[MOST_LEVELS][32];
  facts = (arrow_facts){0};
  n_types = n_arrays = n_owed = n_released = 0;
  unsigned kind = byte(), how = byte(), letter = byte() % 13,
           batch_count = byte() % (MOST_BATCHES + 1);
  int is_table = kind & 1, lies = how >= 200, fails = how >= 180 && !lies;
  facts.n_lists = (int32_t)(kind >> 1) % MOST_LEVELS;
  facts.item = items[letter];
  facts.is_bits = letters[letter][0] == 'b';
  struct ArrowSchema* type = new_type(letters[letter], NULL);
  for (int32_t i = facts.n_lists; i-- > 0;) {
    facts.sizes[i] = byte() % 4;
    snprintf(formats[i], sizeof formats[i], "+w:%d", (int)facts.sizes[i]);
    type = new_type(formats[i], type);
  }
  if (is_table) type = new_type("+s", type);
  for (unsigned i = 0; i < batch_count; i++) {
    struct ArrowArray parent, *column = new_batch(&facts, is_table ? &parent : NULL);
    if (column == NULL) return;
    batches[i] = is_table ? parent : *column;
    if (is_table) {
      batches[i].n_children = 1;
      batches[i].children = fresh(sizeof column);
      batches[i].children[0] = column;
    }
    batches[i].release = release_array;
  }
  if (facts.item == 0) facts.n_chunks = facts.n_nulls = 0;
  if (lies && n_arrays && byte() % 2) lie_about(&arrays[byte() % (unsigned)n_arrays]);
  if (lies && batch_count) lie_about(&batches[byte() % batch_count]);
  if (lies && byte() % 8 == 0) types[byte() % (unsigned)n_types].n_children = number() % 2;
  /* A bitmap may be shorter than the lie claims: remove it. */
  for (int i = 0; lies && i < n_arrays; i++) {
    if (arrays[i].buffers) arrays[i].buffers[0] = NULL;
  }
  for (unsigned i = 0; lies && i < batch_count; i++) {
    if (batches[i].buffers) batches[i].buffers[0] = NULL;
  }

  types[n_types - 1].release = release_type;
  script self = {.n = (int)batch_count, .fails_at = fails ? (int)(how % 5) : -1};
  self.stream = (struct ArrowArrayStream){script_schema, script_next, NULL, script_release, &self};
  dlx_arrow* data = dlx_arrow_new();
  dlx_arrow_stream stream = {1, {self.stream}};
  char why[8] = "why";
  int status = dlx_arrow_read(data, &stream, why, sizeof why);
  HOLDS(stream.of.host.release == NULL && why[0] == '\0');
  int must_fail = self.fails_at >= 0 && self.fails_at <= (int)batch_count + 1;
  HOLDS(status == (must_fail ? DLX_E_ARROW : DLX_OK));
  dlx_arrow_column column;
  dlx_arrow_fault fault;
  if (status == DLX_OK) {
    int64_t number_of = is_table ? 0 : DLX_ARROW_WHOLE;
    status = dlx_arrow_describe(data, number_of, &column, &fault);
    HOLDS(lies ? status == DLX_OK || status == DLX_E_ARROW : status == DLX_OK);
    if (is_table) HOLDS(dlx_arrow_describe(data, byte() + 1, &column, &fault) == DLX_E_ARROW);
    if (!lies) {
      HOLDS(dlx_arrow_describe(data, number_of, &column, &fault) == DLX_OK);
      HOLDS(column.is_numbers == (facts.item != 0) && column.shape[0] == facts.rows);
      if (column.is_numbers) {
        HOLDS(column.ndim == facts.n_lists + 1 && column.is_packed == facts.is_bits);
        for (int32_t i = 0; i < facts.n_lists; i++) HOLDS(column.shape[i + 1] == facts.sizes[i]);
        HOLDS(column.n_nulls == facts.n_nulls && column.n_chunks == facts.n_chunks);
        HOLDS(facts.n_chunks == 0 || column.data == facts.first);
        DLManagedTensorVersioned* made;
        HOLDS(dlx_arrow_gather(data, number_of, &column, &made) == DLX_OK);
        HOLDS(facts.n_bytes == 0 || memcmp(made->dl_tensor.data, facts.values, facts.n_bytes) == 0);
        dlx_managed_release(made);
        if (facts.n_chunks < 2 && !facts.is_bits) {
          HOLDS(dlx_arrow_share(data, &column, &made) == DLX_OK);
          dlx_arrow_drop(data);
          HOLDS(n_released == 0 && made->flags == DLPACK_FLAG_BITMASK_READ_ONLY);
          HOLDS(facts.n_bytes == 0 ||
                memcmp(made->dl_tensor.data, facts.values, facts.n_bytes) == 0);
          dlx_managed_release(made);
          data = NULL;
        }
      }
    }
  }
  if (data) dlx_arrow_drop(data);
  HOLDS(n_released == n_owed);
}

/* Export a tensor to Arrow's structs, and import it again. */
static void target_arrow_out(void) {
  DLTensor like;
  DLManagedTensorVersioned *made, *again;
  int64_t size = small_tensor(&like);
  if (size < 0 || size == 0 || byte() % 16 == 0) return;
  like.strides = NULL;
  like.data = &like;
  int status = dlx_managed_empty(&like, 0, 0, &made);
  if (status != DLX_OK) return;
  memset(made->dl_tensor.data, 7, (size_t)((size * like.dtype.bits * like.dtype.lanes + 7) / 8));
  struct ArrowSchema type;
  struct ArrowArray array;
  int wanted = dlx_arrow_export_schema(&made->dl_tensor, &type);
  HOLDS(dlx_arrow_export_array(made, &array) == wanted);
  dlx_managed_release(made);
  if (wanted != DLX_OK) return;
  dlx_arrow* data = dlx_arrow_new();
  HOLDS(dlx_arrow_move_schema(data, &type) == DLX_OK);
  HOLDS(dlx_arrow_move_schema(data, &type) == DLX_E_CONSUMED);
  HOLDS(dlx_arrow_move_array(data, &array, 0) == DLX_OK);
  HOLDS(dlx_arrow_move_array(data, &array, 0) == DLX_E_CONSUMED);
  dlx_arrow_column column;
  dlx_arrow_fault fault;
  HOLDS(dlx_arrow_describe(data, DLX_ARROW_WHOLE, &column, &fault) == DLX_OK);
  HOLDS(column.ndim == like.ndim && column.dtype.bits == like.dtype.bits);
  HOLDS(column.n_nulls == 0 && column.n_chunks == 1);
  for (int32_t i = 0; i < like.ndim; i++) HOLDS(column.shape[i] == like.shape[i]);
  if (like.dtype.code == kDLBool) { /* exported as bits */
    HOLDS(dlx_arrow_gather(data, DLX_ARROW_WHOLE, &column, &again) == DLX_OK);
  } else {
    HOLDS(dlx_arrow_share(data, &column, &again) == DLX_OK);
  }
  dlx_arrow_drop(data);
  HOLDS(*(uint8_t*)again->dl_tensor.data == (like.dtype.code == kDLBool ? 1 : 7));
  dlx_managed_release(again);
}

/* ---- running --------------------------------------------------------------------------------- */

static const struct {
  const char* name;
  void (*run)(void);
} targets[] = {{"layout", target_layout}, {"make", target_make},   {"empty", target_empty},
               {"owners", target_owners}, {"check", target_check}, {"copy", target_copy},
               {"repack", target_repack}, {"arrow", target_arrow}, {"arrow_out", target_arrow_out}};

enum { TARGETS = sizeof targets / sizeof *targets };

static unsigned long long runs[TARGETS];
static const char* only; /* set by FUZZ_TARGET: run only this target */

static void tell_runs(void) {
  for (int i = 0; i < TARGETS; i++) fprintf(stderr, "%-9s %12llu runs\n", targets[i].name, runs[i]);
}

int LLVMFuzzerInitialize(int* argc, char*** argv);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int LLVMFuzzerInitialize(int* argc, char*** argv) {
  (void)argc, (void)argv;
  only = getenv("FUZZ_TARGET");
  return atexit(tell_runs);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  at = data, end = data + size;
  unsigned target = byte() % TARGETS;
  if (only && strcmp(only, targets[target].name) != 0) return 0;
  runs[target]++;
  targets[target].run();
  HOLDS(dlx_live() == 0);
  while (n_kept) free(kept[--n_kept]);
  return 0;
}

#ifdef ALONE

/* The sanitizers' errors also call show_input. */
const char* __asan_default_options(void);
const char* __ubsan_default_options(void);
const char* __asan_default_options(void) {
  return "abort_on_error=1";
}
const char* __ubsan_default_options(void) {
  return "abort_on_error=1";
}

enum { LONGEST = 256 };

static uint8_t input[LONGEST];
static size_t n_input;

static void show_input(int unused) {
  (void)unused;
  fprintf(stderr, "the input: ");
  for (size_t i = 0; i < n_input; i++) fprintf(stderr, "%02x", input[i]);
  fprintf(stderr, "\n");
}

static uint64_t state;

static uint32_t below(uint32_t limit) { /* xorshift64* */
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return (uint32_t)(state * 0x2545F4914F6CDD1Du >> 32) % limit;
}

static void mutate(void) {
  for (uint32_t change = below(4) + 1; change > 0; change--) {
    size_t place = n_input ? below((uint32_t)n_input) : 0;
    if (below(4) == 0 && n_input < LONGEST) {
      memmove(input + place + 1, input + place, n_input++ - place);
      input[place] = (uint8_t)below(256);
    } else if (below(6) == 0 && n_input > 1) {
      memmove(input + place, input + place + 1, --n_input - place);
    } else if (n_input) {
      input[place] = below(2) ? (uint8_t)below(256) : input[place] ^ 1u << below(8);
    }
  }
}

/* fuzz_core CORPUS MUTATIONS SEED: a corpus line is an input in hexadecimal, and a note. */
int main(int argc, char** argv) {
  static char line[2 * LONGEST + 100];
  static uint8_t corpus[4096][LONGEST];
  static size_t lengths[4096];
  uint32_t n = 0;
  FILE* file = argc == 4 ? fopen(argv[1], "r") : NULL;
  if (file == NULL) return 2;
  signal(SIGABRT, show_input);
  LLVMFuzzerInitialize(NULL, NULL);
  for (; n < 4096 && fgets(line, sizeof line, file); n++) {
    unsigned value;
    for (n_input = 0; sscanf(line + 2 * n_input, "%2x", &value) == 1;)
      input[n_input++] = (uint8_t)value;
    memcpy(corpus[n], input, lengths[n] = n_input);
    LLVMFuzzerTestOneInput(input, n_input);
  }
  fclose(file);
  state = strtoull(argv[3], NULL, 10) + 1;
  for (long left = strtol(argv[2], NULL, 10); left > 0 && n > 0; left--) {
    uint32_t chosen = below(n);
    memcpy(input, corpus[chosen], n_input = lengths[chosen]);
    mutate();
    LLVMFuzzerTestOneInput(input, n_input);
  }
  return 0;
}

#endif
