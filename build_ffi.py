"""Build recipe of `dlx._ffi`: the pure-C headers become the cdef, every C file becomes the extension.

cffi reads declarations only, so the two headers hold nothing else: include guards, `#include`, `#endif` and the
functions. This file removes exactly those directive lines; anything cleverer fails the build by itself.
Set DLX_SANITIZE=1 to build with the address and undefined-behaviour sanitizers.
"""

import os
import re
from pathlib import Path

from cffi import FFI

C_SRC = Path(__file__).resolve().parent / "c_src"
HEADERS = ("dlpack_abi.h", "dlx.h")

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:ifndef|define \w+_H_|include|endif)\b.*$", re.MULTILINE)

# The one door from cffi to CPython: py_module.c adds its builtins to the module object at this address.
_BIND = "int dlx_bind(uintptr_t module);\n"


def declarations(header: str) -> str:
    """Return the text of one header without its guard and include lines."""
    return _DIRECTIVE.sub("", (C_SRC / header).read_text(encoding="utf-8"))


def compile_flags() -> list[str]:
    """Return the compiler flags; sanitizers are opt-in."""
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
    if os.environ.get("DLX_SANITIZE") == "1":
        flags += ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]
    return flags


sanitize = ["-fsanitize=address,undefined"] if os.environ.get("DLX_SANITIZE") == "1" else []
ffibuilder = FFI()
for name in HEADERS:
    ffibuilder.cdef(declarations(name))
ffibuilder.cdef(_BIND)
ffibuilder.set_source(
    "dlx._ffi",
    '#include "dlx.h"\n' + _BIND,
    # Relative to the project root: setuptools refuses absolute paths in an sdist.
    sources=sorted(f"c_src/{path.name}" for path in C_SRC.glob("*.c")),
    depends=sorted(f"c_src/{path.name}" for path in C_SRC.glob("*.h")),
    include_dirs=["c_src"],
    extra_compile_args=compile_flags(),
    extra_link_args=sanitize,
    py_limited_api=False,  # vectorcall types and fast calls are outside the limited API on 3.11
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
