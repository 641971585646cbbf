"""Targets that are modules: any with ``from_dlpack``, as far as a probe has shown what it takes.

A probe passes small arrays to ``from_dlpack`` and reads what comes back. It passes nothing that consumers are known to
die of: no negative strides, no address below the dtype's alignment, no code that came after bfloat16.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dlx._core import native
from dlx._core.extension import ffi
from dlx._core.native import Tensor
from dlx._core.types import HOST, DType
from dlx._protocols import dlpack
from dlx._protocols.pointer import empty
from dlx._support.reflect import exception_text, foreign_error
from dlx.adapter.base import Adapter, Description, DTypes, over_memory
from dlx.adapter.declarations import Capabilities, Layout
from dlx.errors import AdapterNotFoundError, FrameworkNotInstalledError

INSTALL = {"array_api_strict": "array-api-strict", "dpnp": "dpnp", "ndonnx": "ndonnx"}
"""Modules that are known to have ``from_dlpack`` -> what pip calls them."""

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_LAYOUTS = {Layout.PERMUTED: ((3, 2), (1, 3)), Layout.GAPS: ((2, 2), (6, 2)), Layout.ZERO: ((2, 3), (0, 1))}
_NDIMS = (3, 8, 16, 32, 64)
_SPARE = 64  # elements of a probe's memory


class ModuleAdapter(Adapter):
    """A module with ``from_dlpack``, as `probe_module` has found it; `generic` is the adapter of ``__dlpack__``."""

    def __init__(self, module: ModuleType, kind: type, capabilities: Capabilities, generic: Adapter) -> None:
        self.name = self.package = module.__name__
        self.kind, self._capabilities, self.generic = kind, capabilities, generic
        self._classes = (kind,)
        names = {name: name for name in capabilities.dtypes or ()}
        if not hasattr(module, "bool"):
            names |= {name: "bool_" for name in names if name == "bool"}
        self.dtypes = DTypes(self.package, names)

    def describe(self, obj: Any) -> Description:
        return self.generic.describe(obj)._replace(info=None)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, tensor: Tensor) -> Any:
        return sys.modules[self.package].from_dlpack(tensor)


def import_known(name: str) -> ModuleType | None:
    """Return the module of a name that is imported already, or is known in `INSTALL`; None if there is none.

    No other name is imported: it may be a mistyped one, and any module of the working folder would run.
    """
    root = name.partition(".")[0]
    if name in sys.modules and root not in sys.stdlib_module_names and root != "__main__":
        return sys.modules[name]
    if root not in INSTALL:
        return None
    install = f"pip install {INSTALL[root]}"
    import_framework(root, name, install)
    try:
        import_framework(name, name, install)
    except FrameworkNotInstalledError as error:
        if is_missing(name, error.__cause__):
            return None  # the package is there and has no such module
        raise
    return sys.modules.get(name)


def is_missing(package: str, error: BaseException | None) -> bool:
    """Return whether an import of a package failed since it, or a parent of it, is not there; else it is broken."""
    return isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}.")


def import_framework(package: str, target: str, install: str) -> None:
    """Import the package of a target; `install` is the command that installs it."""
    try:
        importlib.import_module(package)
    except MemoryError:
        raise
    except Exception as error:  # a half-installed framework raises OSError, RuntimeError, anything
        if sys.is_finalizing():
            said = f"{package} is gone, and cannot be imported while Python ends"
            raise FrameworkNotInstalledError(said, target=target, fix="Convert it earlier.") from error
        if is_missing(package, error):
            fix = f"Install it: {install}."
            raise FrameworkNotInstalledError(f"{package} is not installed", target=target, fix=fix) from error
        what, fix = f"{package} is installed but fails to import:", "Repair its installation."
        raise foreign_error(what, error, FrameworkNotInstalledError, target=target, fix=fix) from error


def probe_module(module: ModuleType, generic: Adapter) -> ModuleAdapter:
    """Return the adapter of a module with ``from_dlpack``, which is called some thirty times."""
    probe = _Probe(module)
    dtypes = frozenset(name for name in _DTYPES if probe.accepts(name))
    if not dtypes:
        reason = f"{module.__name__}.from_dlpack takes no array in host memory: {probe.why}"
        raise AdapterNotFoundError(reason, target=module.__name__, fix="Convert to a framework that it imports from.")
    plain = "float32" if "float32" in dtypes else min(dtypes)
    shares = all(probe.accepts(name, sharing=True) for name in dtypes)  # one that goes by numpy may copy some
    accepts = functools.partial(probe.accepts, plain, sharing=shares)
    capabilities = Capabilities(
        dtypes=dtypes,
        layouts=sum(layout for layout, (shape, strides) in _LAYOUTS.items() if accepts(shape, strides)),
        min_alignment=0 if accepts(shift=1) else 64,
        ndims=(0 if accepts(()) else 1, max([2, *(ndim for ndim in _NDIMS if accepts((1,) * ndim))])),
        keeps_readonly=accepts(readonly=True),
        copies=not shares,
        empty_extents="addressed",
    )
    return ModuleAdapter(module, probe.kind, capabilities, generic)


class _Probe:
    """What a module makes of arrays that are passed to it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.kind: type = object
        self.why = ""  # it did not take the last one that it did not take

    def accepts(
        self,
        name: str,
        shape: Sequence[int] = (2, 3),
        strides: Sequence[int] | None = None,
        *,
        shift: int = 0,
        readonly: bool = False,
        sharing: bool = False,
    ) -> bool:
        """Return whether an array comes back as it was; `sharing`: in the same memory; `shift`ed by elements."""
        dtype = DType(name)
        memory = empty((_SPARE,), name)
        data = ffi.cast("unsigned char *", memory.data_ptr)
        for i in range(memory.nbytes):
            data[i] = i % 2 if name == "bool" else i % 61 + 1
        address = memory.data_ptr + shift * dtype.bits // 8
        source = over_memory(address, shape, strides, dtype, HOST, readonly=readonly, owner=memory)
        try:
            array = self.module.from_dlpack(source)
            back = dlpack.export(array)
        except MemoryError:
            raise
        except Exception as error:
            self.why = exception_text(error)
            return False
        self.kind = type(array)
        if not (back.device == HOST and (back.dtype, back.shape) == (source.dtype, source.shape)):
            self.why = f"{source} comes back as {back}"
        elif _elements(back) != _elements(source):
            self.why = f"{source} comes back with other values"
        elif (sharing and back.data_ptr != source.data_ptr) or (readonly and not back.readonly):
            self.why = "it is copied, or may be written to"
        else:
            return True
        return False


def _elements(tensor: Tensor) -> bytes:
    compact = native.tensor_copy(tensor, False)
    return bytes(ffi.buffer(ffi.cast("char *", compact.data_ptr), compact.nbytes))
