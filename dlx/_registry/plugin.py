"""Plugins: the table of built-in ones, discovery, validation of their adapters, and their errors."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from dlx._core.types import DType
from dlx._support.reflect import exception_text, message_of, safe_repr
from dlx._version import __version__
from dlx.adapter.base import Adapter, Devices, DTypes
from dlx.adapter.declarations import (
    Arrays,
    Compound,
    Container,
    FastPath,
    Guard,
    KnownIssue,
    Placement,
    StreamSupport,
    WriteTracking,
)
from dlx.adapter.gradients import GradSupport
from dlx.errors import DTypeError, PluginError


class Framework(NamedTuple):
    """Data about a built-in adapter, available before it is loaded."""

    module: str
    install: str
    names: tuple[str, ...] = ()  # other target names, or root packages of its types
    short: str = ""  # usual import alias, for hints only
    is_traced: bool = False  # whether its compiler traces Python code; `dlx._engine.traced` supports one


FRAMEWORKS = {
    "numpy": Framework("dlx_adapters.dlx_numpy", "numpy", short="np"),
    "torch": Framework("dlx_adapters.dlx_torch", "torch", ("pytorch",), short="pt", is_traced=True),
    "jax": Framework("dlx_adapters.dlx_jax", "jax", ("jaxlib",), short="jnp"),
    "tvm_ffi": Framework("dlx_adapters.dlx_tvm_ffi", "apache-tvm-ffi"),
    "pyarrow": Framework("dlx_adapters.dlx_pyarrow", "pyarrow", short="pa"),
    "cupy": Framework("dlx_adapters.dlx_cupy", "cupy-cuda12x", short="cp"),
    "tensorflow": Framework("dlx_adapters.dlx_tensorflow", "tensorflow", short="tf"),
    "paddle": Framework("dlx_adapters.dlx_paddle", "paddlepaddle"),
    "mlx": Framework("dlx_adapters.dlx_mlx", "'mlx[cpu]'", short="mx"),
    "warp": Framework("dlx_adapters.dlx_warp", "warp-lang", short="wp"),
    "onnxruntime": Framework("dlx_adapters.dlx_onnxruntime", "onnxruntime"),
    "xarray": Framework("dlx_adapters.dlx_xarray", "xarray"),
    "pandas": Framework("dlx_adapters.dlx_pandas", "pandas"),
    "dask": Framework("dlx_adapters.dlx_dask", "'dask[array]'"),
    "openvino": Framework("dlx_adapters.dlx_openvino", "openvino", short="ov"),
    "nvidia.dali": Framework("dlx_adapters.dlx_dali", "nvidia-dali-cuda120", ("dali",)),
    "scipy": Framework("dlx_adapters.dlx_scipy", "scipy"),
    "sparse": Framework("dlx_adapters.dlx_scipy", "sparse"),
    "awkward": Framework("dlx_adapters.dlx_scipy", "awkward", short="ak"),
    "ray": Framework("dlx_adapters.dlx_ray", "ray"),
}
"""Root package -> data about its adapter."""

SOURCES = {
    "pandas": "pandas.Series",
    "polars": "polars.Series",
    "xarray": "xarray.DataArray",
    "ray": "ray.put",
    "PIL": "PIL.Image.fromarray",
    "pillow": "PIL.Image.fromarray",
    "h5py": "create_dataset of a group",
}
"""Packages that are sources, but not targets -> what makes their objects from a numpy array."""

BUILT_IN = {name: row.module for root, row in FRAMEWORKS.items() for name in (root, *row.names)}
"""Root package, or another name of it -> built-in module."""

TRACING = tuple(name for root, row in FRAMEWORKS.items() if row.is_traced for name in (root, *row.names))
"""Names of the framework whose compiler traces Python code, its package first."""

OURS = "dlxarray"


@dataclass(eq=False)
class Plugin:
    """A module with adapters, installed by a distribution."""

    module: str  # value of the entry point
    load: Callable[[], Any]  # imports and returns the object of the entry point
    distribution: str
    names: list[str] = field(default_factory=list)  # of its entry points: root packages of its adapters
    adapters: tuple[Adapter, ...] = ()
    broken: BaseException | None = None
    notes: list[str] = field(default_factory=list)
    loading: set[tuple[int, int]] = field(default_factory=set)  # (process, thread) of loads in progress

    def __str__(self) -> str:
        return f"{self.module} ({self.distribution})"

    @property
    def is_loaded(self) -> bool:
        """Whether it was loaded or failed to load."""
        return bool(self.adapters) or self.broken is not None


def list_built_in(table: Mapping[str, str]) -> list[Plugin]:
    """Return the plugins of dlx's distribution for a table {root package: module}."""
    modules = {module: functools.partial(importlib.import_module, module) for module in table.values()}
    return [
        Plugin(module, load, OURS, [root for root in table if table[root] == module])
        for module, load in modules.items()
    ]


def install_of(adapter: Adapter) -> str:
    """Return the command that installs an adapter's framework."""
    row = FRAMEWORKS.get(adapter.package.partition(".")[0])
    return adapter.install or f"pip install {adapter.package if row is None else row.install}"


def discover() -> list[Plugin]:
    """Return the plugins of installed distributions; entry points with the same module are one plugin."""
    from importlib.metadata import entry_points  # takes 40 ms

    try:
        entries = list(entry_points(group="dlx"))
    except MemoryError:
        raise
    except Exception as error:
        return [Plugin("entry points", object, "metadata", ["(entry points)"], broken=error)]
    found: dict[tuple[str, str], Plugin] = {}
    for entry in entries:
        owner = (entry.dist and entry.dist.name) or "an unknown distribution"
        plugin = found.setdefault((entry.value, normalize_name(owner)), Plugin(entry.value, entry.load, owner))
        plugin.names.append(entry.name)
    return list(found.values())


def read_allowed() -> frozenset[str] | None:
    """Return the distributions in ``DLX_LOAD_PLUGINS``, with normalized names; None if unset: all are allowed."""
    words = os.environ.get("DLX_LOAD_PLUGINS")
    return None if words is None else frozenset(normalize_name(word) for word in words.split(",") if word.strip())


def is_strict() -> bool:
    """Return whether ``DLX_STRICT_PLUGINS`` is set: errors of plugins are raised immediately."""
    return os.environ.get("DLX_STRICT_PLUGINS", "0") not in ("", "0")


def normalize_name(name: str) -> str:
    """Return a distribution's name in normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# ---- validation of adapters ------------------------------------------------------------------------------------------

_TUPLES: dict[str, Any] = {
    "types": str,
    "namespaces": str,
    "containers": (Container, Compound),
    "known_issues": KnownIssue,
}
"""Attribute -> types of its elements."""

_PARTS: dict[str, tuple[type, bool]] = {
    "dtypes": (DTypes, False),
    "devices": (Devices, False),
    "arrays": (Arrays, False),
    "fast_path": (FastPath, True),
    "streams": (StreamSupport, True),
    "placement": (Placement, True),
    "writes": (WriteTracking, True),
    "gradients": (GradSupport, True),
}
"""Attribute -> its type, and whether it may be None."""

_FAST_PATH: dict[str, type] = {"types": str, "checked_dtypes": str, "conditions": tuple, "guards": Guard}


def check_adapters(plugin: Plugin, results: Iterable[Any]) -> tuple[Adapter, ...]:
    """Return the adapters from the results of a plugin's hooks, or raise `PluginError` if one is invalid."""
    found: list[Any] = []
    for result in results:
        if isinstance(result, Adapter) or not isinstance(result, Iterable):
            raise PluginError(f"its dlx_adapters returned {safe_repr(result)}", fix="Return a list of adapters.")
        found += result
    if not found:
        raise PluginError("its dlx_adapters returned no adapters", fix="Return a list of adapters.")
    for i, adapter in enumerate(found):
        if not isinstance(adapter, Adapter):
            shown, fix = safe_repr(adapter), "Return instances of dlx.adapter.Adapter."
            if isinstance(adapter, type):
                shown, fix = f"the class {adapter.__name__}", f"Return an instance: {adapter.__name__}()."
            raise PluginError(f"its dlx_adapters returned {shown}", fix=fix)
        _check_attributes(adapter)
        if any(adapter.name == other.name for other in found[:i]):
            raise PluginError(f"it has two adapters named {adapter.name!r}", fix="Give each a different name.")
    if plugin.names and not any(_matches_entry(name, adapter) for name in plugin.names for adapter in found):
        raise PluginError(
            f"its entry point is named {plugin.names[0]!r}, which is not a package of its adapters",
            fix=f'Name it after the package of the arrays: {found[0].package} = "{plugin.module}".',
        )
    return tuple(found)


def _matches_entry(name: str, adapter: Adapter) -> bool:
    """Return whether an entry point's name is an adapter's name or a package of its types."""
    types = [*adapter.types, *(each for container in adapter.containers for each in container.types)]
    return any(f"{each}.".startswith(f"{name}.") for each in (adapter.name, adapter.package, *types))


def _check_attributes(adapter: Adapter) -> None:
    """Check the attributes that are data; properties are skipped because they may need the framework."""
    shown = f"its adapter {type(adapter).__name__}"
    for attribute in ("name", "package"):
        value = inspect.getattr_static(adapter, attribute, None)
        if not isinstance(value, str) or not value:
            raise PluginError(f"{shown} has no {attribute}", fix=f'Set it: {attribute} = "mylib".')
    if adapter.name == "dlx":
        raise PluginError(f"{shown} has the reserved name 'dlx'", fix="Give it another name.")
    named = f"its adapter {adapter.name!r}"
    for attribute, kind in _TUPLES.items():
        _check_tuple(inspect.getattr_static(adapter, attribute), kind, f"{attribute} of {named}")
    for attribute, (kind, is_optional) in _PARTS.items():
        part = inspect.getattr_static(adapter, attribute)
        if not (hasattr(part, "__get__") or isinstance(part, kind) or (is_optional and part is None)):
            raise PluginError(f"{attribute} of {named} is {safe_repr(part)}", fix=f"Use {kind.__name__}(...).")
    path = inspect.getattr_static(adapter, "fast_path")
    if isinstance(path, FastPath):
        for attribute, kind in _FAST_PATH.items():
            _check_tuple(getattr(path, attribute), kind, f"fast_path.{attribute} of {named}")
    dtypes = inspect.getattr_static(adapter, "dtypes")
    for attribute in ("names", "extension", "storage"):
        table = inspect.getattr_static(dtypes, attribute, {})
        if hasattr(table, "__get__"):
            continue
        try:
            for name in table:
                DType(name)
        except (TypeError, DTypeError) as error:
            raise PluginError(f"dtypes.{attribute} of {named} is invalid: {message_of(error)}") from error


def _check_tuple(value: Any, kinds: Any, shown: str) -> None:
    if hasattr(value, "__get__"):
        return
    if not isinstance(value, tuple) or not all(isinstance(each, kinds) for each in value):
        name = (kinds[0] if isinstance(kinds, tuple) else kinds).__name__
        raise PluginError(f"{shown} is {safe_repr(value)}", fix=f"Use a tuple of {name}.")


def error_of(plugin: Plugin) -> PluginError:
    """Return the error for a broken plugin, with its cause and a fix."""
    cause = plugin.broken
    assert cause is not None
    module = plugin.module.partition(":")[0].strip()
    missing = getattr(cause, "name", None)
    if isinstance(cause, PluginError):
        problem, fix = f"is refused: {cause.reason}", cause.fix
    elif isinstance(cause, ModuleNotFoundError) and missing and f"{module}.".startswith(f"{missing}."):
        problem = f"is missing: its entry point names the module {module}, which does not exist"
        fix = f"Install {OURS} again." if plugin.distribution == OURS else f"Uninstall or repair {plugin.distribution}."
    elif _lacks_dlx_name(cause):
        problem = f"expects a different version of dlx (installed: {__version__}): {message_of(cause)}"
        fix = f"Update {OURS} or {plugin.distribution}."
    else:
        problem = f"is broken: {' '.join(exception_text(cause, 240).split())}"
        fix = f"Repair or uninstall {plugin.distribution}."
    error = PluginError(f"the adapter plugin {plugin} {problem}", fix=fix)
    error.__cause__ = cause
    return error


def _lacks_dlx_name(cause: BaseException) -> bool:
    """Return whether an import or attribute error is about a name in dlx."""
    if isinstance(cause, ImportError):
        name = cause.name
    elif isinstance(cause, AttributeError) and isinstance(cause.obj, ModuleType):
        name = cause.obj.__name__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "dlx"
