"""Modules with ``from_dlpack`` as targets. A probe determines their capabilities.

The probe passes small arrays to ``from_dlpack`` and checks the results. It avoids inputs that crash consumers: negative
strides, addresses below the dtype's alignment, dtype codes newer than bfloat16.
"""

from __future__ import annotations

import functools
import importlib
import itertools
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
"""Modules with ``from_dlpack`` -> their names for pip."""

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_LAYOUTS = {Layout.PERMUTED: ((3, 2), (1, 3)), Layout.GAPS: ((2, 2), (6, 2)), Layout.ZERO: ((2, 3), (0, 1))}
_NDIMS = (3, 8, 16, 32, 64)
_SPARE = 64  # number of elements of the probe's memory


class ModuleAdapter(Adapter):
    """The adapter of a module with ``from_dlpack``; `generic` is the adapter of its arrays."""

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
    """Return a module that is imported already, or import it if `INSTALL` lists it; or None.

    Other names are not imported: a typing error could run a module of the working directory.
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
            return None
        raise
    return sys.modules.get(name)


def is_missing(package: str, error: BaseException | None) -> bool:
    """Return whether an import failed because the package or its parent is missing, not broken."""
    return isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}.")


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing its parents, as `importlib.util.find_spec` would.

    If only an import of a parent can tell, it counts as installed.
    """
    path: Sequence[str] | None = None
    for name in itertools.accumulate(package.split("."), "{}.{}".format):
        if name in sys.modules:
            module: ModuleType | None = sys.modules[name]
            path = getattr(module, "__path__", None)
            if module is None:  # blocked
                return False
        else:
            try:
                found = (each.find_spec(name, path) for each in sys.meta_path if hasattr(each, "find_spec"))
                spec = next((each for each in found if each is not None), None)
            except KeyError:  # a namespace package; importlib needs its parent
                return True
            if spec is None:
                return False
            path = spec.submodule_search_locations
        if path is None:  # no package, but it may define submodules
            return True
    return True


def import_framework(package: str, target: str, install: str) -> None:
    """Import a target's package; errors name the command that installs it."""
    try:
        importlib.import_module(package)
    except MemoryError:
        raise
    except Exception as error:  # a damaged installation may raise any class
        if sys.is_finalizing():
            why = f"{package} cannot be imported while Python exits"
            raise FrameworkNotInstalledError(why, target=target, fix="Convert earlier.") from error
        if is_missing(package, error):
            fix = f"Install it: {install}."
            raise FrameworkNotInstalledError(f"{package} is not installed", target=target, fix=fix) from error
        reason, fix = f"{package} is installed but fails to import:", "Repair its installation."
        raise foreign_error(reason, error, FrameworkNotInstalledError, target=target, fix=fix) from error


def probe_module(module: ModuleType, generic: Adapter) -> ModuleAdapter:
    """Return the adapter of a module; this calls its ``from_dlpack`` about 30 times."""
    probe = _Probe(module)
    dtypes = frozenset(name for name in _DTYPES if probe.accepts(name))
    if not dtypes:
        reason = f"{module.__name__}.from_dlpack accepts no array in host memory: {probe.why}"
        raise AdapterNotFoundError(reason, target=module.__name__, fix="Convert to a framework that it accepts.")
    default = "float32" if "float32" in dtypes else min(dtypes)
    shares = all(probe.accepts(name, sharing=True) for name in dtypes)  # via numpy, it may copy some
    accepts = functools.partial(probe.accepts, default, sharing=shares)
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
    """Passes arrays to a module and checks the results."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.kind: type = object
        self.why = ""  # reason of the last rejection

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
        """Return whether the module returns an equal array; with `sharing`, in the same memory. `shift` in elements."""
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
            self.why = f"it returns {back} for {source}"
        elif _elements(back) != _elements(source):
            self.why = f"it returns different values for {source}"
        elif (sharing and back.data_ptr != source.data_ptr) or (readonly and not back.readonly):
            self.why = "it copies the array, or ignores the read-only flag"
        else:
            return True
        return False


def _elements(tensor: Tensor) -> bytes:
    compact = native.tensor_copy(tensor, False)
    return bytes(ffi.buffer(ffi.cast("char *", compact.data_ptr), compact.nbytes))
