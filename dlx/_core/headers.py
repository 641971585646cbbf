"""The C headers: where they are, and what cffi reads of them.

Nothing compiled is needed here: `build_ffi.py` runs this file, too. The text that cffi parses is what a C compiler sees
that has included nothing before.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ABI = "dlpack_abi.h"
"""The structs and constants of DLPack: for everybody."""

CORE = "dlx.h"
"""The functions of dlx's own core, which are not exported from the extension."""

CUDA = "dlx_cuda.h"
"""The same for what goes through the CUDA driver."""

# What is for C++, or for a file that has included an older dlpack.h; never nested.
_OTHERS = re.compile(r"^#ifdef\b.*?^#(?:else|endif)\b", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^#(?!define DLPACK_\w+ \d).*$", re.MULTILINE)


def get_include() -> str:
    """Return the folder of dlx's C headers, for a compiler's ``-I``.

    ``#include "dlpack_abi.h"`` gives the structs of DLPack 1.3, `DLTensor` and others, before or after any other
    ``dlpack.h``. The functions in ``dlx.h`` are the core's own: there is nothing to link them against.

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
    """Return a build-time ``cffi.FFI`` that knows the structs of DLPack, for ``include`` in another project's own.

    In the project's build script::

        ffibuilder = cffi.FFI()
        ffibuilder.include(dlx.cffi_builder())
        ffibuilder.cdef("int scale(DLTensor *tensor, double factor);")
        ffibuilder.set_source(
            "_kernel", '#include "scale.h"', sources=["scale.c"], include_dirs=[".", dlx.get_include()]
        )

    The types are then those of `dlx.ffi`: what `dlx.borrow` gives can be passed on without a cast. The built extension
    imports dlx when it is loaded. (cffi cannot include an extension that is already compiled, such as `dlx.ffi`.)

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
    # Never compiled: it tells an including FFI which extension has these types when the program runs.
    builder.set_source("dlx._ffi", f'#include "{ABI}"\n')
    return builder


get_include.__module__ = cffi_builder.__module__ = "dlx"  # build_ffi.py runs this file without the package
