/* Strided casts between numbers on the host. Every element is read as a number of C, which is
 * exact, and rounded when it is written: once, but for integers above 2^53. Numbers have no
 * branches, so that the compiler finds vectors. */

#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
/* Vectors, which clang uses anyway, and no branches; the time of a loop depends on its address. */
#pragma GCC optimize("O3", "align-loops=32", "no-trapping-math", "no-thread-jumps", "no-tree-pre")
#define PRAGMA(text) _Pragma(#text)
#else
#define PRAGMA(text)
#endif

#include "copy.h"
#include "platform/platform.h"

#include <string.h>

typedef uint8_t boolean;
typedef struct {
  uint16_t bits;
} half, bfloat;
typedef float single;

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float widen_half(half x) {
  uint32_t bits = x.bits, exponent = bits & 0x7c00, normal = ((bits & 0x7fff) << 13) + (112u << 23);
  uint32_t small = bits_of((float)(int32_t)(bits & 0x3ff) * 0x1p-24f); /* no subnormal floats */
  normal |= exponent == 0x7c00 ? 0x7f800000 : 0;
  normal |= (bits & 0x7fff) > 0x7c00 ? 0x400000 : 0; /* a quiet NaN, as processors make it */
  return float_of((exponent ? normal : small) | (bits & 0x8000) << 16);
}

static inline float widen_bfloat(bfloat x) {
  return float_of((uint32_t)x.bits << 16);
}

/* Round to nearest, ties to even; a sum rounds subnormal numbers. */
static inline half narrow_half(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000;
  bits &= INT32_MAX;
  uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  uint32_t small = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  uint32_t found = bits < 113u << 23 ? small : normal > 0x7c00 ? 0x7c00 : normal;
  return (half){(uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 | (bits >> 13 & 0x3ff) : found))};
}

static inline bfloat narrow_bfloat(float value) {
  uint32_t bits = bits_of(value), found = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bfloat){(uint16_t)(value == value ? found : (bits >> 16 & 0x8000) | 0x7fc0)};
}

/* Return a float that is rounded to a half or bfloat as the double would be: its last bit of 13 is
 * also set if any bit after it was. */
static inline float shorten(double value) {
  const uint64_t rest = (UINT64_C(1) << 40) - 1;
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits = (bits | ((bits & rest) + rest)) & ~rest;
  memcpy(&value, &bits, sizeof bits);
  return (float)value;
}

/* Return an integer of 64 bits as a double; unlike for C's conversion, there are vectors. */
static inline double add_halves(double high, uint32_t low) {
  return high * 0x1p32 + (double)low;
}

/* A real number out of range becomes the nearest integer, a NaN 0: in C both are undefined. */
#define CLAMP(name, R)                            \
  static inline R name(R x, R low, R high) {      \
    R found = x > low ? x : low; /* a NaN: low */ \
    found = found < high ? found : high;          \
    return x == x ? found : 0;                    \
  }
CLAMP(clamp, double)
CLAMP(clamp_float, float)

static inline int32_t clamp_int32(float x) {
  return x >= 0x1p31f ? INT32_MAX : (int32_t)clamp_float(x, INT32_MIN, 0x1.fffffep30f);
}

static inline int64_t clamp_int64(double x) {
  return __builtin_fabs(x) < 0x1p63 ? (int64_t)x : x != x ? 0 : x < 0 ? INT64_MIN : INT64_MAX;
}

static inline uint64_t clamp_uint64(double x) {
  return !(x > 0) ? 0 : x >= 0x1p64 ? UINT64_MAX : (uint64_t)x;
}

// clang-format off
/* A number x as each type. Integers wrap around. */
#define INTEGER(T, x, from_double, from_float) \
  _Generic(x, double: (T)from_double, float: (T)from_float, default: (T)(x))
#define SMALL(T, x, low, high) \
  INTEGER(T, x, (int32_t)clamp((double)(x), low, high), \
          (int32_t)clamp_float((float)(x), low, high))
#define LARGE(T, x, from_double) INTEGER(T, x, from_double, from_double)

#define TO_boolean(x) ((x) != 0)
#define TO_int8_t(x) SMALL(int8_t, x, INT8_MIN, INT8_MAX)
#define TO_int16_t(x) SMALL(int16_t, x, INT16_MIN, INT16_MAX)
#define TO_int32_t(x) \
  INTEGER(int32_t, x, clamp((double)(x), INT32_MIN, INT32_MAX), clamp_int32((float)(x)))
#define TO_int64_t(x) LARGE(int64_t, x, clamp_int64((double)(x)))
#define TO_uint8_t(x) SMALL(uint8_t, x, 0, UINT8_MAX)
#define TO_uint16_t(x) SMALL(uint16_t, x, 0, UINT16_MAX)
#define TO_uint32_t(x) LARGE(uint32_t, x, clamp((double)(x), 0, UINT32_MAX))
#define TO_uint64_t(x) LARGE(uint64_t, x, clamp_uint64((double)(x)))
#define TO_half(x) narrow_half(_Generic(x, double: shorten((double)(x)), default: (float)(x)))
#define TO_bfloat(x)                                                                       \
  narrow_bfloat(_Generic(x,                                                                \
    int64_t: shorten(add_halves((int32_t)((int64_t)(x) >> 32), (uint32_t)(x))),            \
    uint64_t: shorten(add_halves((uint32_t)((uint64_t)(x) >> 32), (uint32_t)(x))),         \
    float: (float)(x), default: shorten((double)(x))))
#define TO_single(x) ((single)(x))
#define TO_double(x) ((double)(x))

/* Three sets of functions: for elements apart; for runs of them, whose constant steps let the
 * compiler use vectors; and the same with vectors of 32 bytes. */
#define FOR_apart
#define FOR_run
#define FOR_wide DLX_WIDE_VECTORS
enum { apart, run, wide };

#define CASTER(name)                                                                         \
  void name(char* restrict to, const char* restrict from, int64_t n, int64_t to_step,        \
            int64_t from_step)
typedef CASTER(caster);

/* Few loops from 8 bytes to as many have vectors: unroll these. */
#define CAST(S, read, T, set)                                                                \
  FOR_##set static CASTER(S##_to_##T##_##set) {                                              \
    to_step = set == apart ? to_step : (int64_t)sizeof(T);                                   \
    from_step = set == apart ? from_step : (int64_t)sizeof(S);                               \
    PRAGMA(GCC unroll(sizeof(S) == 8 && sizeof(T) >= 4 ? 4 : 1))                             \
    for (int64_t i = 0; i < n; i++) {                                                        \
      S x;                                                                                   \
      memcpy(&x, from + i * from_step, sizeof x);                                            \
      __typeof__(read(x)) number = read(x);                                                 \
      T made = TO_##T(number);                                                               \
      memcpy(to + i * to_step, &made, sizeof made);                                          \
    }                                                                                        \
  }

/* The order of ALL, which has the operator or function that reads each type, and of EACH. */
enum { BOOL, INT8, UINT8 = 5, HALF = 9, BFLOAT, SINGLE, DOUBLE, KINDS };

#define ALL(X, set)                                                                          \
  X(boolean, !!, set) X(int8_t, +, set) X(int16_t, +, set) X(int32_t, +, set)                \
  X(int64_t, +, set) X(uint8_t, +, set) X(uint16_t, +, set) X(uint32_t, +, set)              \
  X(uint64_t, +, set) X(half, widen_half, set) X(bfloat, widen_bfloat, set)                  \
  X(single, +, set) X(double, +, set)
#define EACH(X, S, read, set)                                                                \
  X(S, read, boolean, set) X(S, read, int8_t, set) X(S, read, int16_t, set)                  \
  X(S, read, int32_t, set) X(S, read, int64_t, set) X(S, read, uint8_t, set)                 \
  X(S, read, uint16_t, set) X(S, read, uint32_t, set) X(S, read, uint64_t, set)              \
  X(S, read, half, set) X(S, read, bfloat, set) X(S, read, single, set) X(S, read, double, set)
#define CASTS(S, read, set) EACH(CAST, S, read, set)
#define NAME(S, read, T, set) S##_to_##T##_##set,
#define NAMES(S, read, set) {EACH(NAME, S, read, set)},

ALL(CASTS, apart)
ALL(CASTS, run)
DLX_WITH_WIDE(ALL(CASTS, wide))

static caster* const casters[][KINDS][KINDS] = {
    {ALL(NAMES, apart)}, {ALL(NAMES, run)}, DLX_WITH_WIDE({ALL(NAMES, wide)})};
// clang-format on

#ifdef DLX_HALF_VECTORS
#include <immintrin.h>

/* Eight elements at a time, with the same results; the compiler does not find the instructions. */
#define CAST_EIGHT(S, T, convert)                                               \
  DLX_HALF_VECTORS static CASTER(S##_to_##T##_by_eight) {                       \
    for (; n >= 8; n -= 8, to += 8 * sizeof(T), from += 8 * sizeof(S)) convert; \
    S##_to_##T##_wide(to, from, n, to_step, from_step);                         \
  }
CAST_EIGHT(half, single,
           _mm256_storeu_ps((void*)to, _mm256_cvtph_ps(_mm_loadu_si128((const void*)from))))
CAST_EIGHT(single, half,
           _mm_storeu_si128((void*)to, _mm256_cvtps_ph(_mm256_loadu_ps((const void*)from), 0)))

DLX_HALF_VECTORS static inline void narrow_eight(char* to, const char* from) {
  __m256 x = _mm256_max_ps(_mm256_loadu_ps((const void*)from), _mm256_setzero_ps()); /* NaN: 0 */
  __m256i whole = _mm256_cvttps_epi32(_mm256_min_ps(x, _mm256_set1_ps(255)));
  __m128i high = _mm256_extracti128_si256(whole, 1);
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), high);
  _mm_storel_epi64((void*)to, _mm_packus_epi16(words, words));
}
CAST_EIGHT(single, uint8_t, narrow_eight(to, from))
#endif

/* Return the number of a dtype, or of the parts of a complex one; -1 = not supported. */
static int find_kind(DLDataType dtype) {
  int bits = dtype.code == kDLComplex ? dtype.bits / 2 : dtype.bits;
  int width = bits == 8 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : bits == 64 ? 3 : -1;
  if (dtype.lanes != 1 || width < 0) return -1;
  if (dtype.code == kDLBool) return width == 0 ? BOOL : -1;
  if (dtype.code == kDLInt) return INT8 + width;
  if (dtype.code == kDLUInt) return UINT8 + width;
  if (dtype.code == kDLBfloat) return width == 1 ? BFLOAT : -1;
  if (dtype.code != kDLFloat && dtype.code != kDLComplex) return -1;
  return width == 0 ? -1 : width == 1 ? HALF : width == 2 ? SINGLE : DOUBLE;
}

int dlx_can_cast(DLDataType from, DLDataType to) {
  int keeps_parts = from.code != kDLComplex || to.code == kDLComplex;
  return keeps_parts && find_kind(from) >= 0 && find_kind(to) >= 0;
}

static caster* find_caster(int from, int to, int is_run) {
  if (!is_run) return casters[apart][from][to];
#ifdef DLX_HALF_VECTORS
  int is_single = from == SINGLE && DLX_HAS_HALVES;
  if (from == HALF && to == SINGLE && DLX_HAS_HALVES) return half_to_single_by_eight;
  if (is_single && to == HALF) return single_to_half_by_eight;
  if (is_single && to == UINT8) return single_to_uint8_t_by_eight;
#endif
  return casters[DLX_HAS_WIDE ? wide : run][from][to];
}

typedef struct {
  caster* cast;
  int64_t parts, from_part, to_part; /* of complex numbers, which are not one run */
} job;

static void cast_planes(char* to, const char* from, dlx_axis* axes, int n, int64_t address) {
  const job* j = (const job*)(intptr_t)address;
  const dlx_axis* inner = &axes[n - 1];
  int64_t index[DLX_MAX_NDIM] = {0};
  do {
    for (int64_t k = 0; k < j->parts; k++)
      j->cast(to + k * j->to_part, from + k * j->from_part, inner->extent, inner->to, inner->from);
  } while (dlx_next(axes, n - 1, index, &to, &from));
}

/* Cast to the real parts of complex numbers, and set the imaginary parts to 0. */
static int cast_to_parts(const DLTensor* from, const DLTensor* to, uint64_t flags) {
  static const double nothing;
  int64_t twice[DLX_MAX_NDIM], never[DLX_MAX_NDIM] = {0};
  for (int32_t d = 0; d < to->ndim; d++) twice[d] = 2 * to->strides[d];
  DLTensor part = *to, zero;
  part.dtype = (DLDataType){kDLFloat, to->dtype.bits / 2, 1};
  part.strides = twice;
  zero = part;
  zero.data = (void*)&nothing;
  zero.byte_offset = 0;
  zero.strides = never;
  int status = dlx_cast(from, &part, flags);
  part.byte_offset += part.dtype.bits / 8;
  return status == DLX_OK ? dlx_copy(&zero, &part, flags) : status;
}

int dlx_cast(const DLTensor* from, const DLTensor* to, uint64_t flags) {
  DLTensor alike = *to;
  alike.dtype = from->dtype;
  int status = dlx_check_alike(from, &alike);
  if (status != DLX_OK || memcmp(&from->dtype, &to->dtype, sizeof to->dtype) == 0)
    return status == DLX_OK ? dlx_copy(from, to, flags) : status;
  if (!dlx_can_cast(from->dtype, to->dtype)) return DLX_E_MISMATCH;
  if (to->dtype.code == kDLComplex && from->dtype.code != kDLComplex)
    return cast_to_parts(from, to, flags);
  int64_t from_item = from->dtype.bits / 8, to_item = to->dtype.bits / 8;
  int64_t nbytes = dlx_size(from) * (from_item + to_item);
  if (nbytes == 0) return DLX_OK;
  int parts = from->dtype.code == kDLComplex ? 2 : 1;
  job j = {NULL, parts, from_item / parts, to_item / parts};
  dlx_axis axes[DLX_MAX_NDIM];
  int n = dlx_find_axes(from, to, from_item, to_item, axes);
  if (n == 0) axes[n++] = (dlx_axis){1, from_item, to_item};
  dlx_axis* inner = &axes[n - 1];
  int is_run = inner->from == from_item && inner->to == to_item;
  if (is_run) {
    *inner = (dlx_axis){inner->extent * parts, j.from_part, j.to_part};
    j.parts = 1;
  }
  j.cast = find_caster(find_kind(from->dtype), find_kind(to->dtype), is_run);
  dlx_copy_in_parts(cast_planes, (char*)to->data + to->byte_offset,
                    (const char*)from->data + from->byte_offset, axes, n, nbytes,
                    (int64_t)(intptr_t)&j);
  return DLX_OK;
}
