/* Strided casts between numbers on the host. Every element is read as an integer of 32 or 64 bits
 * or as a double, which is exact, and rounded when it is written: once, but for integers above 2^53
 * and elements of 16 bits. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* vectors, which clang uses anyway */
#define UNROLL _Pragma("GCC unroll 4")
#else
#define UNROLL
#endif

#include "copy.h"

#include <string.h>

typedef uint8_t boolean;
typedef struct {
  uint16_t bits;
} half, bfloat;
typedef float single;

/* Return the value of a float16 or bfloat16; `most` is the exponent of infinity. */
static inline double widen(uint16_t word, int mantissa, int bias) {
  int exponent = (word & 0x7fff) >> mantissa, most = 2 * bias + 1;
  uint64_t fraction = word & ((1u << mantissa) - 1), bits;
  if (exponent == most) {
    bits = UINT64_C(0x7ff) << 52 | fraction << (52 - mantissa);
  } else {
    uint64_t scale = (uint64_t)(1023 - bias - mantissa + (exponent ? exponent : 1)) << 52;
    double unit, whole = (double)(fraction | (exponent ? 1u << mantissa : 0));
    memcpy(&unit, &scale, sizeof unit);
    whole *= unit;
    memcpy(&bits, &whole, sizeof bits);
  }
  bits |= (uint64_t)(word & 0x8000) << 48;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Round to a float16 or bfloat16: to nearest, ties to even. */
static inline uint16_t narrow(double value, int mantissa, int bias) {
  uint64_t bits, infinity = (uint64_t)(2 * bias + 1) << mantissa;
  memcpy(&bits, &value, sizeof bits);
  uint16_t sign = (uint16_t)(bits >> 48 & 0x8000);
  int exponent = (int)(bits >> 52 & 0x7ff) - 1023 + bias, shift = 52 - mantissa;
  bits &= INT64_MAX;
  if (exponent > 0 && exponent < 2 * bias + 1) { /* overflow carries to infinity */
    bits -= (uint64_t)(1023 - bias) << 52;
    bits += (UINT64_C(1) << (shift - 1)) - 1 + (bits >> shift & 1);
    return (uint16_t)(sign | bits >> shift);
  }
  if (value != value) return (uint16_t)(sign | infinity | 1u << (mantissa - 1));
  if (exponent > 0) return (uint16_t)(sign | infinity);
  shift += 1 - exponent; /* subnormal: the implicit bit is explicit */
  if (shift > 54) return sign;
  bits = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
  bits += (UINT64_C(1) << (shift - 1)) - 1 + (bits >> shift & 1);
  return (uint16_t)(sign | bits >> shift);
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
READ(half, double, widen(x.bits, 10, 15))
READ(bfloat, double, widen(x.bits, 7, 127))
READ(single, double, (double)x)
READ(double, double, x)

/* From integers and a real number. Integers wrap around; the compiler has vectors for 32 bits. */
// clang-format off
#define WRITE(T, from_integer, from_real)                          \
  static inline T T##_small(int32_t x) { return from_integer; }    \
  static inline T T##_int(int64_t x) { return from_integer; }      \
  static inline T T##_uint(uint64_t x) { return from_integer; }    \
  static inline T T##_real(double x) { return from_real; }
// clang-format on

/* A real number out of range becomes the nearest integer, a NaN 0: in C both are undefined. */
#define WRITE_INTEGER(T, low, high, above) \
  WRITE(T, (T)x, x != x ? 0 : x <= (double)(low) ? (T)(low) : x >= above ? (T)(high) : (T)x)

WRITE(boolean, x != 0, x != 0)
WRITE_INTEGER(int8_t, INT8_MIN, INT8_MAX, 0x1p7)
WRITE_INTEGER(int16_t, INT16_MIN, INT16_MAX, 0x1p15)
WRITE_INTEGER(int32_t, INT32_MIN, INT32_MAX, 0x1p31)
WRITE_INTEGER(int64_t, INT64_MIN, INT64_MAX, 0x1p63)
WRITE_INTEGER(uint8_t, 0, UINT8_MAX, 0x1p8)
WRITE_INTEGER(uint16_t, 0, UINT16_MAX, 0x1p16)
WRITE_INTEGER(uint32_t, 0, UINT32_MAX, 0x1p32)
WRITE_INTEGER(uint64_t, 0, UINT64_MAX, 0x1p64)
WRITE(half, (half){narrow((double)x, 10, 15)}, (half){narrow(x, 10, 15)})
WRITE(bfloat, (bfloat){narrow((double)x, 7, 127)}, (bfloat){narrow(x, 7, 127)})
WRITE(single, (single)x, (single)x)
WRITE(double, (double)x, x)

typedef void (*caster)(char* restrict to, const char* restrict from, int64_t n, int64_t to_step,
                       int64_t from_step);

#define LOOP(S, T, to_step, from_step)                         \
  for (int64_t i = 0; i < n; i++) {                            \
    T x = _Generic(read_##S(from),                             \
        double: T##_real,                                      \
        uint64_t: T##_uint,                                    \
        int64_t: T##_int,                                      \
        default: T##_small)(read_##S(from + i * (from_step))); \
    memcpy(to + i * (to_step), &x, sizeof x);                  \
  }

/* Constant steps let the compiler use vectors. It has none for int64_t to reals: unroll these. */
#define CAST(S, T)                                                                                 \
  static void S##_to_##T(char* restrict to, const char* restrict from, int64_t n, int64_t to_step, \
                         int64_t from_step) {                                                      \
    if (to_step != sizeof(T) || from_step != sizeof(S)) {                                          \
      LOOP(S, T, to_step, from_step)                                                               \
    } else if (sizeof(S) == 8 && sizeof(T) >= 4) {                                                 \
      UNROLL LOOP(S, T, (int64_t)sizeof(T), (int64_t)sizeof(S))                                    \
    } else {                                                                                       \
      LOOP(S, T, (int64_t)sizeof(T), (int64_t)sizeof(S))                                           \
    }                                                                                              \
  }

/* The order of find_kind. */
// clang-format off
#define EACH(X, S)                                                                        \
  X(S, boolean) X(S, int8_t) X(S, int16_t) X(S, int32_t) X(S, int64_t) X(S, uint8_t)      \
  X(S, uint16_t) X(S, uint32_t) X(S, uint64_t) X(S, half) X(S, bfloat) X(S, single) X(S, double)
#define ALL(X)                                                                            \
  X(boolean) X(int8_t) X(int16_t) X(int32_t) X(int64_t) X(uint8_t) X(uint16_t) X(uint32_t) \
  X(uint64_t) X(half) X(bfloat) X(single) X(double)
#define CASTS(S) EACH(CAST, S)
#define NAME(S, T) S##_to_##T,
#define ROW(S) {EACH(NAME, S)},

ALL(CASTS)

enum { KINDS = 13 };
static const caster casters[KINDS][KINDS] = {ALL(ROW)};
// clang-format on

/* Return the number of a dtype, or of the parts of a complex one; -1 = not supported. */
static int find_kind(DLDataType dtype) {
  int bits = dtype.code == kDLComplex ? dtype.bits / 2 : dtype.bits;
  int width = bits == 8 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : bits == 64 ? 3 : -1;
  if (dtype.lanes != 1 || width < 0) return -1;
  if (dtype.code == kDLBool) return width == 0 ? 0 : -1;
  if (dtype.code == kDLInt) return 1 + width;
  if (dtype.code == kDLUInt) return 5 + width;
  if (dtype.code == kDLBfloat) return width == 1 ? 10 : -1;
  if (dtype.code != kDLFloat && dtype.code != kDLComplex) return -1;
  return width == 1 ? 9 : width > 1 ? 9 + width : -1;
}

int dlx_can_cast(DLDataType from, DLDataType to) {
  int are_alike = (from.code == kDLComplex) == (to.code == kDLComplex);
  return are_alike && find_kind(from) >= 0 && find_kind(to) >= 0;
}

/* `pair` has both kinds and, for complex numbers, half their sizes. */
static void cast_planes(char* to, const char* from, dlx_axis* axes, int n, int64_t pair) {
  static const dlx_axis single_axis = {1, 0, 0};
  caster cast = casters[pair & 15][pair >> 4 & 15];
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
