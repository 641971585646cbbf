#ifndef DLX_DTYPES_H_
#define DLX_DTYPES_H_

/* The dtypes that other protocols support, too. */

#include "dlx.h"

/* DLPack's code and bits; the buffer format (PEP 3118) that dlx writes; Arrow's format, 0 = none;
 * numpy's type number, if `long` has 64 bits. */
#define DLX_DTYPES(DTYPE)                \
  DTYPE(kDLBool, 8, "?", 'b', 0)         \
  DTYPE(kDLInt, 8, "b", 'c', 1)          \
  DTYPE(kDLUInt, 8, "B", 'C', 2)         \
  DTYPE(kDLInt, 16, "h", 's', 3)         \
  DTYPE(kDLUInt, 16, "H", 'S', 4)        \
  DTYPE(kDLInt, 32, "i", 'i', 5)         \
  DTYPE(kDLUInt, 32, "I", 'I', 6)        \
  DTYPE(kDLInt, 64, "l", 'l', 7)         \
  DTYPE(kDLUInt, 64, "L", 'L', 8)        \
  DTYPE(kDLFloat, 32, "f", 'f', 11)      \
  DTYPE(kDLFloat, 64, "d", 'g', 12)      \
  DTYPE(kDLComplex, 64, "Zf", '\0', 14)  \
  DTYPE(kDLComplex, 128, "Zd", '\0', 15) \
  DTYPE(kDLFloat, 16, "e", 'e', 23)

#endif
