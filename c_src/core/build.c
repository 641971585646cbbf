/* How this binary was built, for reports. */

#include "dlx.h"

#ifndef DLX_COMPILE_FLAGS /* given by build_ffi.py */
#define DLX_COMPILE_FLAGS ""
#endif

const char* dlx_compiler(void) {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "a compiler that dlx does not know";
#endif
}

const char* dlx_compile_flags(void) {
  return DLX_COMPILE_FLAGS;
}
