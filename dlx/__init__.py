"""dlx moves arrays between frameworks in one call, sharing memory wherever that is safe.

>>> import dlx
>>> dlx.plan(b"abc", to="dlx").outcome
'shared'

Names are loaded when they are first used; importing dlx imports no framework and scans no plugins.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "dlx needs the GIL, and this free-threaded Python runs without it: run it with PYTHON_GIL=1 in its "
        "environment, or as `python -X gil=1`"
    )

if TYPE_CHECKING:
    from dlx import adapter, ctypes, errors
    from dlx import typing as typing
    from dlx.abi import Device, DType
    from dlx.conversion import describe, plan
    from dlx.cuda import devices, release_pending
    from dlx.doors import borrow, empty, from_dlpack, from_managed, from_pointer, to_capsule
    from dlx.functions import using
    from dlx.headers import cffi_builder, get_include
    from dlx.hookspecs import hookimpl
    from dlx.leaf import Plan
    from dlx.native import ffi
    from dlx.overlap import shares_memory
    from dlx.registry import adapters
    from dlx.signatures import convert, stack
    from dlx.tensor import ArrayInfo, Tensor
    from dlx.typing import SupportsDLPack

__version__ = "0.1.0.dev0"

__all__ = [
    "convert",
    "plan",
    "describe",
    "stack",
    "shares_memory",
    "adapters",
    "using",
    "ArrayInfo",
    "Device",
    "DType",
    "Plan",
    "SupportsDLPack",
    "Tensor",
    "from_dlpack",
    "empty",
    "to_capsule",
    "from_pointer",
    "from_managed",
    "borrow",
    "devices",
    "release_pending",
    "ffi",
    "cffi_builder",
    "get_include",
    "ctypes",
    "hookimpl",
    "adapter",
    "errors",
    "__version__",
]

# Where each public name lives; None: the name is a module.
_HOMES = {
    "convert": "conversion",
    "plan": "conversion",
    "describe": "conversion",
    "stack": "stacking",
    "shares_memory": "overlap",
    "adapters": "registry",
    "using": "functions",
    "ArrayInfo": "tensor",
    "Device": "abi",
    "DType": "abi",
    "Plan": "leaf",
    "SupportsDLPack": "typing",
    "Tensor": "tensor",
    "from_dlpack": "doors",
    "empty": "doors",
    "to_capsule": "doors",
    "from_pointer": "doors",
    "from_managed": "doors",
    "borrow": "doors",
    "devices": "cuda",
    "release_pending": "cuda",
    "ffi": "native",
    "cffi_builder": "headers",
    "get_include": "headers",
    "ctypes": None,
    "hookimpl": "hookspecs",
    "adapter": None,
    "errors": None,
    "typing": None,  # not in __all__: `from dlx import *` would hide Python's own
}


if not TYPE_CHECKING:  # to a checker every name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'dlx' has no attribute {name!r}")
        value = globals()[name] = _load(name)
        if name == "convert":
            _settle()
        return value


def _load(name: str) -> Any:
    home = _HOMES[name]
    module = importlib.import_module(f"dlx.{home or name}")
    return module if home is None else getattr(module, name)


def _settle() -> None:
    """Load what is left, and take __getattr__ away.

    CPython does not specialise look-ups in a module that has one, which would cost every `dlx.convert` some 30 ns.
    """
    try:
        for name in _HOMES.keys() - globals().keys():
            globals()[name] = _load(name)
    except ImportError:  # a Python without ctypes, say: the other names go on being looked up one by one
        return
    globals().pop("__getattr__", None)


def __dir__() -> list[str]:
    return sorted(__all__)
