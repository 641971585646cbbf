"""The C headers: their folder, and their declarations for cffi.

`build_ffi.py` runs this file before the extension exists, so it imports no compiled module.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ABI = "dlpack_abi.h"
"""DLPack's structs and constants; for users."""

CORE = "dlx.h"
"""The functions of dlx's core, which the extension does not export."""

CUDA = "dlx_cuda.h"
"""The core's CUDA functions, which the extension does not export."""

# Blocks for C++, or for files that include an older dlpack.h; never nested.
_OTHERS = re.compile(r"^#ifdef\b.*?^#(?:else|endif)\b", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^#(?!define DLPACK_\w+ \d).*$", re.MULTILINE)


def get_include() -> str:
    """Return the folder of dlx's C headers, for a compiler's ``-I``.

    ``#include "dlpack_abi.h"`` declares the structs of DLPack 1.3, `DLTensor` and others, before or after any other
    ``dlpack.h``. The functions in ``dlx.h`` are internal: there is no library to link with.

    Examples
    --------
    >>> import dlx, os
    >>> "dlpack_abi.h" in os.listdir(dlx.get_include())
    True
    """
    here = Path(__file__).resolve().parent.parent
    installed = here / "include"
    return str(installed if installed.is_dir() else here.parent / "c_src" / "include")  # the latter in a checkout


def declarations(header: str) -> str:
    """Return the text of a header for cffi's ``cdef``: every ``#ifdef`` is false, every other condition true."""
    text = (Path(get_include()) / header).read_text(encoding="utf-8")
    return _DIRECTIVE.sub("", _OTHERS.sub("#endif", text))


def cffi_builder() -> Any:
    """Return a build-time ``cffi.FFI`` with DLPack's structs, to ``include`` in your project's FFI.

    In your build script::

        ffibuilder = cffi.FFI()
        ffibuilder.include(dlx.cffi_builder())
        ffibuilder.cdef("int scale(DLTensor *tensor, double factor);")
        ffibuilder.set_source(
            "_kernel", '#include "scale.h"', sources=["scale.c"], include_dirs=[".", dlx.get_include()]
        )

    The types are those of `dlx.ffi`: you can pass the result of `dlx.borrow` without a cast. The built extension
    imports dlx when it is loaded. (cffi cannot include a compiled extension such as `dlx.ffi`.)

    Raises
    ------
    ImportError
        If cffi's own parser, pycparser, is missing.

    Examples
    --------
    >>> import dlx
    >>> dlx.cffi_builder().sizeof("DLManagedTensorVersioned")
    80
    """
    from cffi import FFI

    builder = FFI()
    builder.cdef(declarations(ABI))
    # Never compiled: it names the extension that has these types at run time.
    builder.set_source("dlx._ffi", f'#include "{ABI}"\n')
    return builder


get_include.__module__ = cffi_builder.__module__ = "dlx"  # build_ffi.py runs this file without the package
