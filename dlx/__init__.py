"""Convert arrays between frameworks in one call, sharing memory if that is safe.

>>> import dlx
>>> dlx.plan(b"abc", to="dlx").outcome
'shared'

Names are loaded at their first use; ``import dlx`` imports no framework and scans no plugins.
"""

from __future__ import annotations

import importlib
import sys

from dlx._support.late import load_name
from dlx._version import __version__

# False, without an import of `typing`, which takes as long as Python to start. jedi skips what follows a literal False.
TYPE_CHECKING = bool()  # noqa: UP018
if TYPE_CHECKING:
    from typing import Any

    from dlx import adapter, ctypes, errors
    from dlx import typing as typing
    from dlx._api.array_namespace import array_namespace
    from dlx._api.c_interop import borrow, empty, exchange_api, from_dlpack, to_capsule
    from dlx._api.convert import plan
    from dlx._api.describe import describe
    from dlx._api.parts import parts
    from dlx._api.save import save
    from dlx._api.share import ring
    from dlx._api.shares_memory import shares_memory
    from dlx._api.signatures import attach, convert, share, stack
    from dlx._api.signatures import open as open
    from dlx._core.array_info import ArrayInfo
    from dlx._core.cuda import devices, release_pending
    from dlx._core.headers import cffi_builder, get_include
    from dlx._core.native import ffi
    from dlx._core.tensor import Tensor
    from dlx._core.types import Device, DType
    from dlx._engine.plan import Plan
    from dlx._engine.trace import Trace, trace
    from dlx._protocols.pointer import from_managed, from_pointer
    from dlx._registry.listing import adapters
    from dlx._using.decorator import using
    from dlx.adapter.hookspecs import hookimpl
    from dlx.typing import SupportsDLPack

__all__ = [
    "convert", "plan", "describe", "parts", "stack", "save", "share", "attach", "ring", "shares_memory",
    "array_namespace", "adapters", "using", "trace", "Trace", "ArrayInfo", "Device", "DType", "Plan", "SupportsDLPack",
    "Tensor", "from_dlpack", "empty", "to_capsule", "from_pointer", "from_managed", "borrow", "exchange_api", "devices",
    "release_pending", "ffi", "cffi_builder", "get_include", "ctypes", "hookimpl", "adapter", "errors", "__version__",
]  # fmt: skip

# The public names of each module. `open` and `typing` are not in __all__: `from dlx import *` would hide Python's own.
_NAMES = {
    "_api.array_namespace": ("array_namespace",),
    "_api.c_interop": ("borrow", "empty", "exchange_api", "from_dlpack", "to_capsule"),
    "_api.convert": ("convert", "plan"),
    "_api.describe": ("describe",),
    "_api.open": ("open",),
    "_api.parts": ("parts",),
    "_api.save": ("save",),
    "_api.share": ("attach", "ring", "share"),
    "_api.shares_memory": ("shares_memory",),
    "_api.stack": ("stack",),
    "_core.array_info": ("ArrayInfo",),
    "_core.cuda": ("devices", "release_pending"),
    "_core.headers": ("cffi_builder", "get_include"),
    "_core.native": ("ffi",),  # it raises in a second interpreter
    "_core.tensor": ("Tensor",),
    "_engine.plan": ("Plan",),
    "_engine.trace": ("Trace", "trace"),
    "_protocols.pointer": ("from_managed", "from_pointer"),
    "_registry.listing": ("adapters",),
    "_registry.dtypes_and_devices": ("DType", "Device"),
    "_using.decorator": ("using",),
    "adapter.hookspecs": ("hookimpl",),
    "typing": ("SupportsDLPack",),
    "": ("adapter", "ctypes", "errors", "typing"),  # modules
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would accept any name

    class _Name:
        """A name that is loaded at its first access, on the module's temporary class."""

        def __init__(self, name: str) -> None:
            self.name, self.is_kept = name, name != "convert"

        def __get__(self, module: Any, kind: Any) -> Any:
            value = _load(self.name)
            if not self.is_kept:  # one call must not wait for `_settle`
                self.is_kept = True
                return value
            globals()[self.name] = value
            try:  # noqa: SIM105 - `contextlib` would make the import longer
                delattr(_Module, self.name)
            except AttributeError:  # another thread has deleted it
                pass
            if self.name == "convert":
                _settle()
            return value

    def _refuse_name(module: Any, name: str) -> Any:
        text = f"module 'dlx' has no attribute {name!r}"
        if not name.startswith("_"):
            from dlx._support.installation import find_conflict

            conflict = find_conflict()  # the name may be the other project's
            text += f": {conflict}" if conflict else ""
        raise AttributeError(text, name=name, obj=module)

    # A module `__getattr__` would make each `dlx.convert` 50 ns slower.
    _Module = type(
        "module",
        (type(sys),),
        {
            **{name: _Name(name) for name in _MODULES},
            "__getattribute__": object.__getattribute__,
            "__getattr__": _refuse_name,
            "__reduce__": lambda module: (importlib.import_module, (module.__name__,)),  # for cloudpickle
        },
    )
    sys.modules[__name__].__class__ = _Module


def _settle() -> None:
    """Load all other names and make this an ordinary module.

    CPython specializes lookups in ordinary modules only, which saves about 30 ns per `dlx.convert`.
    """
    try:
        for name in _MODULES.keys() - globals().keys():
            globals()[name] = _load(name)
    except ImportError:  # such as a Python without ctypes: names stay late
        return
    sys.modules[__name__].__class__ = type(sys)


def _load(name: str) -> Any:
    if not _MODULES[name]:
        return importlib.import_module(f"dlx.{name}")
    found = load_name(f"dlx.{_MODULES[name]}", name)
    if hasattr(found, "__wrapped__"):  # torch.compile must not trace calls from C
        load_name("dlx._engine.traced", "skip_frames")(found.__wrapped__)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


if "IPython" in sys.modules:
    load_name("dlx._api.notebook", "install")(_settle)
