"""Build recipe of `dlx._ffi`: the pure-C headers become the cdef, every C file becomes the extension.

cffi reads declarations only; `dlx/_core/headers.py` says how a header becomes one.
`setup.py` says how it is built with sanitizers.
"""

import os
import re
import runpy
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
C_SRC = ROOT / "c_src"
HEADERS = runpy.run_path(str(ROOT / "dlx" / "_core" / "headers.py"))  # dlx itself cannot be imported before it is built

# The one way from cffi to CPython: base/module.c adds its builtins to the module object at this address.
_BIND = "int dlx_bind(uintptr_t module);\n"


def compile_flags() -> list[str]:
    """Return the compiler flags."""
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
    # Direct calls into CPython and libc, which take most of a conversion's time.
    flags += ["-fno-plt", "-fno-semantic-interposition"]
    # Makes a conversion's time independent of unrelated code: torch -> numpy gets 8 % faster.
    flags.append("-falign-functions=32")
    return flags


def shown(flags: list[str]) -> str:
    """Return flags as a report shows them: the user's flags first, no warnings, and nothing that may contain a path."""
    words = [*os.environ.get("CFLAGS", "").split(), *flags]
    return " ".join(word for word in words if re.fullmatch(r"-(?!W)[\w+=,.-]+", word))


ffibuilder = FFI()
for name in (HEADERS["ABI"], HEADERS["CORE"], HEADERS["CUDA"]):
    ffibuilder.cdef(HEADERS["declarations"](name))
ffibuilder.cdef(_BIND)
ffibuilder.set_source(
    "dlx._ffi",
    '#include "dlx_cuda.h"\n' + _BIND,
    # Relative to the project root: setuptools refuses absolute paths in an sdist.
    sources=sorted(str(path.relative_to(ROOT)) for path in C_SRC.rglob("*.c")),
    depends=sorted(str(path.relative_to(ROOT)) for path in C_SRC.rglob("*.h")),
    include_dirs=["c_src", "c_src/include"],
    extra_compile_args=compile_flags(),
    # base/module.c has a PyInit__ffi of its own around cffi's.
    define_macros=[("DLX_COMPILE_FLAGS", f'"{shown(compile_flags())}"'), ("PyInit__ffi", "dlx_cffi_module")],
    libraries=["dl"],  # where dlopen lives before glibc 2.34; nothing of CUDA is linked
    py_limited_api=False,  # vectorcall types and fast calls are outside the limited API on 3.11
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
