"""Build recipe of `dlx._ffi`: the pure-C headers become the cdef, every C file becomes the extension.

cffi reads declarations only; `dlx/_core/headers.py` says how a header becomes one.
`setup.py` says how it is built with sanitizers.
"""

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from cffi import FFI

ROOT = Path(__file__).resolve().parent
C_SRC = ROOT / "c_src"
HEADERS = runpy.run_path(str(ROOT / "dlx" / "_core" / "headers.py"))  # dlx itself cannot be imported before it is built

LIBRARIES = ["dl"] if sys.platform == "linux" else []  # has dlopen before glibc 2.34; nothing of CUDA is linked

_PLATFORM = sorted(str(path.relative_to(ROOT)) for path in (C_SRC / "platform").glob("*.c"))
ADAPTERS = {  # extensions of built-in adapters, which find the frameworks' functions when they run
    "dlx_adapters._dlx_numpy": ["c_src/core/allocate.c", "c_src/core/thread_state.c", "c_src/base/gil.c", *_PLATFORM],
    "dlx_adapters._dlx_tvm_ffi": [],
    "dlx_adapters._dlx_torch": _PLATFORM,
}
"""Names -> sources besides their own."""

# The one way from cffi to CPython: base/module.c adds its builtins to the module object at this address.
_BIND = "int dlx_bind(uintptr_t module);\n"


def compile_flags(system: str = sys.platform) -> list[str]:
    """Return the compiler flags of all extensions, for gcc and clang, or for clang-cl on Windows."""
    if system == "win32":
        return ["/O2", "/clang:-std=c11"]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    # Direct calls into CPython and libc, which take most of a conversion's time; other systems have no PLT.
    return [*flags, "-fno-plt", "-fno-semantic-interposition"] if system == "linux" else flags


def core_flags(system: str = sys.platform) -> list[str]:
    """Return the flags of the core; aligned functions make a conversion's time independent of unrelated code."""
    own = [] if system == "win32" else ["-fvisibility=hidden", "-falign-functions=32"]
    return [*compile_flags(system), *own]


def shown(flags: list[str]) -> str:
    """Return flags as a report shows them: the user's flags first, no warnings, and nothing that may contain a path."""
    words = [*os.environ.get("CFLAGS", "").split(), *flags]
    return " ".join(word for word in words if re.fullmatch(r"-(?!W)[\w+=,.-]+", word))


def adapter_options(name: str) -> dict[str, Any]:
    """Return the sources and options of an adapter's extension, as those of `setuptools.Extension`."""
    return {
        "sources": [f"{name.replace('.', '/')}.c", *ADAPTERS[name]],
        "depends": sorted(str(path.relative_to(ROOT)) for path in C_SRC.rglob("*.h")),
        "include_dirs": ["c_src", "c_src/include"],
        "extra_compile_args": compile_flags(),
        "libraries": LIBRARIES,
    }


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
    extra_compile_args=core_flags(),
    # base/module.c has a PyInit__ffi of its own around cffi's.
    define_macros=[("DLX_COMPILE_FLAGS", f'"{shown(core_flags())}"'), ("PyInit__ffi", "dlx_cffi_module")],
    libraries=LIBRARIES,
    py_limited_api=False,  # vectorcall types and fast calls are outside the limited API on 3.11
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
