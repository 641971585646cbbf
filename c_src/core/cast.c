/* Strided casts between numbers on the host. Every element is read as an integer of 32 or 64 bits,
 * a float or a double, which is exact, and rounded when it is written: once, but for integers above
 * 2^53. Numbers have no branches, so that the compiler finds vectors. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math", \
                     "no-thread-jumps") /* vectors, which clang uses anyway */
#define UNROLL _Pragma("GCC unroll 4")
#define APART __attribute__((optimize("no-tree-vectorize")))
#else
#define UNROLL
#define APART
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

static inline float widen_half(uint32_t x) {
  uint32_t exponent = x & 0x7c00, normal = ((x & 0x7fff) << 13) + (112u << 23);
  uint32_t small = bits_of((float)(int32_t)(x & 0x3ff) * 0x1p-24f); /* without subnormal floats */
  normal |= exponent == 0x7c00 ? 0x7f800000 : 0;
  normal |= (x & 0x7fff) > 0x7c00 ? 0x400000 : 0; /* a quiet NaN, as processors make it */
  return float_of((exponent ? normal : small) | (x & 0x8000) << 16);
}

/* Round to nearest, ties to even; a sum rounds subnormal numbers. */
static inline uint16_t narrow_half(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000;
  bits &= INT32_MAX;
  uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  uint32_t small = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  uint32_t found = bits < 113u << 23 ? small : normal > 0x7c00 ? 0x7c00 : normal;
  return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 | (bits >> 13 & 0x3ff) : found));
}

static inline uint16_t narrow_bfloat(float value) {
  uint32_t bits = bits_of(value), found = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & INT32_MAX) > 0x7f800000 ? (bits >> 16 & 0x8000) | 0x7fc0 : found);
}

/* Round a double at once. The last bit of `unit` is the smallest subnormal number. */
static inline uint16_t narrow(double value, int mantissa, int bias, double unit) {
  uint64_t bits, least, sum, rest = (uint64_t)(1023 - bias) << 52;
  memcpy(&bits, &value, sizeof bits);
  memcpy(&least, &unit, sizeof least);
  uint64_t sign = bits >> 48 & 0x8000;
  bits &= INT64_MAX;
  int shift = 52 - mantissa;
  uint64_t half_bit = (UINT64_C(1) << (shift - 1)) - 1 + (bits >> shift & 1);
  int64_t normal = (int64_t)((bits - rest + half_bit) >> shift);
  int64_t infinity = (int64_t)(2 * bias + 1) << mantissa, first = (int64_t)(1024 - bias) << 52;
  double positive;
  memcpy(&positive, &bits, sizeof positive);
  positive += unit;
  memcpy(&sum, &positive, sizeof sum);
  normal = normal > infinity ? infinity : normal;
  int64_t found = (int64_t)bits < first ? (int64_t)(sum - least) : normal;
  found = value == value ? found : infinity | 1 << (mantissa - 1);
  return (uint16_t)(sign | (uint64_t)found);
}

#define READ(T, W, value)                    \
  static inline W read_##T(const char* at) { \
    T x;                                     \
    memcpy(&x, at, sizeof x);                \
    return value;                            \
  }

READ(boolean, int32_t, x != 0)
READ(int8_t, int32_t, x)
READ(int16_t, int32_t, x)
READ(int32_t, int32_t, x)
READ(int64_t, int64_t, x)
READ(uint8_t, int32_t, x)
READ(uint16_t, int32_t, x)
READ(uint32_t, int64_t, x)
READ(uint64_t, uint64_t, x)
READ(half, float, widen_half(x.bits))
READ(bfloat, float, float_of((uint32_t)x.bits << 16))
READ(single, float, x)
READ(double, double, x)

/* From integers and real numbers. Integers wrap around; the compiler has vectors for 32 bits. */
// clang-format off
#define WRITE(T, from_integer, from_real, from_float)              \
  static inline T T##_small(int32_t x) { return from_integer; }    \
  static inline T T##_int(int64_t x) { return from_integer; }      \
  static inline T T##_uint(uint64_t x) { return from_integer; }    \
  static inline T T##_real(double x) { return from_real; }         \
  static inline T T##_float(float x) { return from_float; }
// clang-format on

/* A real number out of range becomes the nearest integer, a NaN 0: in C both are undefined. */
#define CLAMP(name, R, I)                              \
  static inline I name(R x, double low, double high) { \
    x = x == x ? x : 0;                                \
    x = x > (R)low ? x : (R)low;                       \
    return (I)(x < (R)high ? x : (R)high);             \
  }
CLAMP(clamp_float, float, int32_t)
CLAMP(clamp, double, int32_t)
CLAMP(clamp_wide, double, int64_t)

#define WRITE_SMALL(T, low, high) \
  WRITE(T, (T)x, (T)clamp(x, low, high), (T)clamp_float(x, low, high))
WRITE(boolean, x != 0, x != 0, x != 0)
WRITE_SMALL(int8_t, INT8_MIN, INT8_MAX)
WRITE_SMALL(int16_t, INT16_MIN, INT16_MAX)
WRITE(int32_t, (int32_t)x, clamp(x, INT32_MIN, INT32_MAX),
      x >= 0x1p31f ? INT32_MAX : clamp_float(x, INT32_MIN, 0x1.fffffep30))
WRITE(int64_t, (int64_t)x,
      __builtin_fabs(x) < 0x1p63 ? (int64_t)x
      : x != x                   ? 0
      : x < 0                    ? INT64_MIN
                                 : INT64_MAX,
      int64_t_real(x))
WRITE_SMALL(uint8_t, 0, UINT8_MAX)
WRITE_SMALL(uint16_t, 0, UINT16_MAX)
WRITE(uint32_t, (uint32_t)x, (uint32_t)clamp_wide(x, 0, UINT32_MAX), uint32_t_real(x))
WRITE(uint64_t, (uint64_t)x,
      !(x > 0)      ? 0
      : x >= 0x1p64 ? UINT64_MAX
                    : (uint64_t)x,
      uint64_t_real(x))
WRITE(half, (half){narrow_half((float)x)}, (half){narrow(x, 10, 15, 0x1p28)},
      (half){narrow_half(x)})
WRITE(bfloat, (bfloat){narrow((double)x, 7, 127, 0x1p-81)}, (bfloat){narrow(x, 7, 127, 0x1p-81)},
      (bfloat){narrow_bfloat(x)})
WRITE(single, (single)x, (single)x, x)
WRITE(double, (double)x, x, (double)x)

typedef void (*caster)(char* restrict to, const char* restrict from, int64_t n, int64_t to_step,
                       int64_t from_step);

#define LOOP(S, T, to_step, from_step)                         \
  for (int64_t i = 0; i < n; i++) {                            \
    T x = _Generic(read_##S(from),                             \
        double: T##_real,                                      \
        float: T##_float,                                      \
        uint64_t: T##_uint,                                    \
        int64_t: T##_int,                                      \
        default: T##_small)(read_##S(from + i * (from_step))); \
    memcpy(to + i * (to_step), &x, sizeof x);                  \
  }

/* Constant steps let the compiler use vectors. It has none for int64_t to reals: unroll these. */
#define CAST(S, T, set)                                                                     \
  TARGET_##set static void S##_to_##T##set(char* restrict to, const char* restrict from,    \
                                           int64_t n, int64_t to_step, int64_t from_step) { \
    if (to_step != sizeof(T) || from_step != sizeof(S)) {                                   \
      S##_to_##T##_apart(to, from, n, to_step, from_step);                                  \
    } else if (sizeof(S) == 8 && sizeof(T) >= 4) {                                          \
      UNROLL LOOP(S, T, (int64_t)sizeof(T), (int64_t)sizeof(S))                             \
    } else {                                                                                \
      LOOP(S, T, (int64_t)sizeof(T), (int64_t)sizeof(S))                                    \
    }                                                                                       \
  }

#define CAST_APART(S, T, set)                                                                   \
  APART static void S##_to_##T##_apart(char* restrict to, const char* restrict from, int64_t n, \
                                       int64_t to_step, int64_t from_step) {                    \
    LOOP(S, T, to_step, from_step)                                                              \
  }

#define TARGET_usual
#define TARGET_wide DLX_WIDE_VECTORS

/* The order of EACH and ALL. */
enum { BOOL, INT8, UINT8 = 5, HALF = 9, BFLOAT, SINGLE, DOUBLE, KINDS };

// clang-format off
#define EACH(X, S, set)                                                                         \
  X(S, boolean, set) X(S, int8_t, set) X(S, int16_t, set) X(S, int32_t, set) X(S, int64_t, set) \
  X(S, uint8_t, set) X(S, uint16_t, set) X(S, uint32_t, set) X(S, uint64_t, set)                \
  X(S, half, set) X(S, bfloat, set) X(S, single, set) X(S, double, set)
#define ALL(X, set)                                                                              \
  X(boolean, set) X(int8_t, set) X(int16_t, set) X(int32_t, set) X(int64_t, set) X(uint8_t, set) \
  X(uint16_t, set) X(uint32_t, set) X(uint64_t, set) X(half, set) X(bfloat, set) X(single, set)  \
  X(double, set)
#define CASTS(S, set) EACH(CAST, S, set)
#define CASTS_APART(S, set) EACH(CAST_APART, S, set)
#define NAME(S, T, set) S##_to_##T##set,
#define ROW(S, set) {EACH(NAME, S, set)},

ALL(CASTS_APART, )
ALL(CASTS, usual)
DLX_WITH_WIDE(ALL(CASTS, wide))

static const caster casters[][KINDS][KINDS] = {{ALL(ROW, usual)}, DLX_WITH_WIDE({ALL(ROW, wide)})};
// clang-format on

#ifdef DLX_HALF_VECTORS
#include <immintrin.h>

/* Eight elements at a time, with the same results; the compiler does not find the instructions. */
#define CAST_EIGHT(S, T, convert)                                                                  \
  DLX_HALF_VECTORS static void S##_to_##T##_by_eight(char* restrict to, const char* restrict from, \
                                                     int64_t n, int64_t to_step,                   \
                                                     int64_t from_step) {                          \
    int is_run = to_step == sizeof(T) && from_step == sizeof(S);                                   \
    for (; is_run && n >= 8; n -= 8, to += 8 * sizeof(T), from += 8 * sizeof(S)) convert;          \
    S##_to_##T##wide(to, from, n, to_step, from_step);                                             \
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
  int are_alike = (from.code == kDLComplex) == (to.code == kDLComplex);
  return are_alike && find_kind(from) >= 0 && find_kind(to) >= 0;
}

static caster find_caster(int64_t from, int64_t to) {
#ifdef DLX_HALF_VECTORS
  int is_single = from == SINGLE && DLX_HAS_HALVES;
  if (from == HALF && to == SINGLE && DLX_HAS_HALVES) return half_to_single_by_eight;
  if (is_single && to == HALF) return single_to_half_by_eight;
  if (is_single && to == UINT8) return single_to_uint8_t_by_eight;
#endif
  return casters[DLX_HAS_WIDE][from][to];
}

/* `pair` has both kinds and, for complex numbers, half their sizes. */
static void cast_planes(char* to, const char* from, dlx_axis* axes, int n, int64_t pair) {
  static const dlx_axis single_axis = {1, 0, 0};
  caster cast = find_caster(pair & 15, pair >> 4 & 15);
  int64_t from_half = pair >> 8 & 15, to_half = pair >> 12 & 15, index[DLX_MAX_NDIM] = {0};
  const dlx_axis* inner = n > 0 ? &axes[n - 1] : &single_axis;
  do {
    cast(to, from, inner->extent, inner->to, inner->from);
    if (to_half) cast(to + to_half, from + from_half, inner->extent, inner->to, inner->from);
  } while (dlx_next(axes, n - 1, index, &to, &from));
}

int dlx_cast(const DLTensor* from, const DLTensor* to, uint64_t flags) {
  DLTensor alike = *to;
  alike.dtype = from->dtype;
  int status = dlx_check_alike(from, &alike);
  if (status != DLX_OK || memcmp(&from->dtype, &to->dtype, sizeof to->dtype) == 0)
    return status == DLX_OK ? dlx_copy(from, to, flags) : status;
  if (!dlx_can_cast(from->dtype, to->dtype)) return DLX_E_MISMATCH;
  int64_t from_item = from->dtype.bits / 8, to_item = to->dtype.bits / 8;
  int64_t pair = find_kind(from->dtype) | find_kind(to->dtype) << 4;
  if (from->dtype.code == kDLComplex) pair |= from_item / 2 << 8 | to_item / 2 << 12;
  dlx_axis axes[DLX_MAX_NDIM];
  int n = dlx_find_axes(from, to, from_item, to_item, axes);
  if (dlx_size(from) == 0) return DLX_OK;
  int64_t nbytes = dlx_size(from) * (from_item + to_item);
  int is_run = n && axes[n - 1].from == from_item && axes[n - 1].to == to_item;
  dlx_copy_in_parts(cast_planes, (char*)to->data + to->byte_offset,
                    (const char*)from->data + from->byte_offset, axes, n,
                    is_run ? nbytes / 4 /* threads pay later */ : nbytes, pair);
  return DLX_OK;
}
