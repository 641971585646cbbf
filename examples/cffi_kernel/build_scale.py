"""Build script of `_scale`: a cffi extension with the types of `dlx.ffi`."""

import cffi

import dlx

ffibuilder = cffi.FFI()
ffibuilder.include(dlx.cffi_builder())
ffibuilder.cdef("int scale(DLTensor *tensor, double factor);")
ffibuilder.set_source(
    "_scale",
    '#include "scale.h"',
    sources=["scale.c"],
    include_dirs=[".", dlx.get_include()],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
