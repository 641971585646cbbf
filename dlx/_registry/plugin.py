"""Plugins, the modules that bring adapters: which there are, what they may give, and the error of a broken one."""

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
    """What dlx knows of a framework that it has an adapter for, before that is loaded."""

    module: str
    install: str  # what pip installs
    names: tuple[str, ...] = ()  # other names that users write, or root packages of its types
    short: str = ""  # the name by which users import it; no target, but understood
    is_target: bool = True
    is_traced: bool = False  # whether its compiler traces Python code; `dlx._engine.traced` is made for one


FRAMEWORKS = {
    "numpy": Framework("dlx_numpy", "numpy", short="np"),
    "torch": Framework("dlx_torch", "torch", ("pytorch",), short="pt", is_traced=True),
    "jax": Framework("dlx_jax", "jax", ("jaxlib",), short="jnp"),
    "tvm_ffi": Framework("dlx_tvm_ffi", "apache-tvm-ffi"),
    "pyarrow": Framework("dlx_pyarrow", "pyarrow", short="pa"),
    "cupy": Framework("dlx_cupy", "cupy-cuda12x", short="cp"),
    "tensorflow": Framework("dlx_tensorflow", "tensorflow", short="tf"),
    "paddle": Framework("dlx_paddle", "paddlepaddle"),
    "mlx": Framework("dlx_mlx", "'mlx[cpu]'", short="mx"),
    "warp": Framework("dlx_warp", "warp-lang", short="wp"),
    "onnxruntime": Framework("dlx_onnxruntime", "onnxruntime"),
    "xarray": Framework("dlx_xarray", "xarray", is_target=False),
    "pandas": Framework("dlx_pandas", "pandas", is_target=False),
    "dask": Framework("dlx_dask", "'dask[array]'"),
    "ray": Framework("dlx_ray", "ray", is_target=False),
}
"""Root package -> what dlx knows of it. pyproject.toml lists the modules, too."""

BUILT_IN = {name: row.module for root, row in FRAMEWORKS.items() for name in (root, *row.names)}
"""Root package, or another name for it -> module of ours."""

TRACING = tuple(name for root, row in FRAMEWORKS.items() if row.is_traced for name in (root, *row.names))
"""Names of the framework whose compiler traces Python code, its package first."""

OURS = "dlxarray"


@dataclass(eq=False)
class Plugin:
    """One module that brings adapters, installed by one distribution."""

    module: str  # the entry point's value
    load: Callable[[], Any]  # imports it, and gives what the entry point names
    distribution: str
    names: list[str] = field(default_factory=list)  # of its entries: root packages whose adapters it has
    adapters: tuple[Adapter, ...] = ()
    broken: BaseException | None = None  # why it cannot be used
    notes: list[str] = field(default_factory=list)  # problems that are no reason to refuse it
    loading: set[tuple[int, int]] = field(default_factory=set)  # (process, thread) of those that are loading it

    def __str__(self) -> str:
        return f"{self.module} ({self.distribution})"

    @property
    def is_loaded(self) -> bool:
        """Whether it needs no loading any more."""
        return bool(self.adapters) or self.broken is not None


def list_built_in(table: Mapping[str, str]) -> list[Plugin]:
    """Return the plugins of a table {root package: module}, all of dlx's own distribution."""
    modules = {module: functools.partial(importlib.import_module, module) for module in table.values()}
    return [
        Plugin(module, load, OURS, [root for root in table if table[root] == module])
        for module, load in modules.items()
    ]


def install_of(adapter: Adapter) -> str:
    """Return the command that installs the framework of an adapter."""
    row = FRAMEWORKS.get(adapter.package.partition(".")[0])
    return adapter.install or f"pip install {adapter.package if row is None else row.install}"


def discover() -> list[Plugin]:
    """Return the plugins in entry points of other distributions; entries with one module are one plugin."""
    from importlib.metadata import entry_points  # 40 ms: only when something unknown turns up

    try:
        entries = list(entry_points(group="dlx"))
    except MemoryError:
        raise
    except Exception as error:  # some distribution's metadata is broken: nothing of ours is
        return [Plugin("entry points", object, "metadata", ["(entry points)"], broken=error)]
    found: dict[tuple[str, str], Plugin] = {}
    for entry in entries:
        owner = (entry.dist and entry.dist.name) or "an unknown distribution"
        plugin = found.setdefault((entry.value, normalize_name(owner)), Plugin(entry.value, entry.load, owner))
        plugin.names.append(entry.name)
    return list(found.values())


def read_allowed() -> frozenset[str] | None:
    """Return the distributions that ``DLX_LOAD_PLUGINS`` names, normalized; None if it is not set: all are allowed."""
    words = os.environ.get("DLX_LOAD_PLUGINS")
    return None if words is None else frozenset(normalize_name(word) for word in words.split(",") if word.strip())


def is_strict() -> bool:
    """Return whether ``DLX_STRICT_PLUGINS`` is set, so that what is wrong with a plugin is raised at once."""
    return os.environ.get("DLX_STRICT_PLUGINS", "0") not in ("", "0")


def normalize_name(name: str) -> str:
    """Return a distribution's name as package indices compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# ---- what they give --------------------------------------------------------------------------------------------------

_TUPLES: dict[str, type] = {"types": str, "namespaces": str, "containers": Container, "known_issues": KnownIssue}
"""Fact -> type of its elements."""

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
"""Fact -> its type, and whether it may be None."""

_FAST_PATH: dict[str, type] = {"types": str, "checked_dtypes": str, "conditions": tuple, "guards": Guard}


def check_adapters(plugin: Plugin, answers: Iterable[Any]) -> tuple[Adapter, ...]:
    """Return the adapters that a plugin's hooks gave, or raise a `PluginError` that says what is wrong with them."""
    found: list[Any] = []
    for answer in answers:
        if isinstance(answer, Adapter) or not isinstance(answer, Iterable):
            raise PluginError(f"its dlx_adapters gave {safe_repr(answer)}", fix="Give a list of adapters.")
        found += answer
    if not found:
        raise PluginError("its dlx_adapters gave no adapters", fix="Give a list of them.")
    for i, adapter in enumerate(found):
        if not isinstance(adapter, Adapter):
            shown, fix = safe_repr(adapter), "Give instances of dlx.adapter.Adapter."
            if isinstance(adapter, type):
                shown, fix = f"the class {adapter.__name__}", f"Give an instance: {adapter.__name__}()."
            raise PluginError(f"its dlx_adapters gave {shown}", fix=fix)
        _check_facts(adapter)
        if any(adapter.name == other.name for other in found[:i]):
            raise PluginError(f"it has two adapters named {adapter.name!r}", fix="Give each a name of its own.")
    if plugin.names and not any(_matches_entry(name, adapter) for name in plugin.names for adapter in found):
        raise PluginError(
            f"its entry point is named {plugin.names[0]!r}, which is no package of its adapters",
            fix=f'Name it after the package of the arrays: {found[0].package} = "{plugin.module}".',
        )
    return tuple(found)


def _matches_entry(name: str, adapter: Adapter) -> bool:
    """Return whether an adapter is found by the name of an entry point: its own, or a package of its types."""
    types = [*adapter.types, *(each for container in adapter.containers for each in container.types)]
    return any(f"{each}.".startswith(f"{name}.") for each in (adapter.name, adapter.package, *types))


def _check_facts(adapter: Adapter) -> None:
    """Check the facts that dlx reads as data; those that are computed may need the framework, and are not asked for."""
    shown = f"its adapter {type(adapter).__name__}"
    for fact in ("name", "package"):
        value = inspect.getattr_static(adapter, fact, None)
        if not isinstance(value, str) or not value:
            raise PluginError(f"{shown} has no {fact}", fix=f'Set it: {fact} = "mylib".')
    if adapter.name == "dlx":
        raise PluginError(f"{shown} is named 'dlx', which is dlx itself", fix="Give it another name.")
    named = f"its adapter {adapter.name!r}"
    for fact, kind in _TUPLES.items():
        _check_tuple(inspect.getattr_static(adapter, fact), kind, f"the {fact} of {named}")
    for fact, (kind, may_lack) in _PARTS.items():
        part = inspect.getattr_static(adapter, fact)
        if not (hasattr(part, "__get__") or isinstance(part, kind) or (may_lack and part is None)):
            raise PluginError(f"the {fact} of {named} are {safe_repr(part)}", fix=f"Give {kind.__name__}(...).")
    path = inspect.getattr_static(adapter, "fast_path")
    if isinstance(path, FastPath):
        for fact, kind in _FAST_PATH.items():
            _check_tuple(getattr(path, fact), kind, f"the fast_path.{fact} of {named}")
    dtypes = inspect.getattr_static(adapter, "dtypes")
    for fact in ("names", "extension", "storage"):
        table = inspect.getattr_static(dtypes, fact, {})
        if hasattr(table, "__get__"):
            continue
        try:
            for name in table:
                DType(name)
        except (TypeError, DTypeError) as error:
            raise PluginError(f"the dtypes.{fact} of {named} cannot be read: {message_of(error)}") from error


def _check_tuple(value: Any, kind: type, shown: str) -> None:
    if hasattr(value, "__get__"):
        return
    if not isinstance(value, tuple) or not all(isinstance(each, kind) for each in value):
        raise PluginError(f"{shown} are {safe_repr(value)}", fix=f"Give a tuple of {kind.__name__}.")


def error_of(plugin: Plugin) -> PluginError:
    """Return the error for a plugin that cannot be used: one sentence, one fix, and the cause."""
    cause = plugin.broken
    assert cause is not None
    module = plugin.module.partition(":")[0].strip()
    missing = getattr(cause, "name", None)
    if isinstance(cause, PluginError):
        said, fix = f"is refused: {cause.reason}", cause.fix
    elif isinstance(cause, ModuleNotFoundError) and missing and f"{module}.".startswith(f"{missing}."):
        said = f"is gone: its entry point names the module {module}, and there is none"
        fix = f"Install {OURS} again." if plugin.distribution == OURS else f"Uninstall or repair {plugin.distribution}."
    elif _lacks_dlx_name(cause):
        said = f"was written for another dlx than this one ({__version__}): {message_of(cause)}"
        fix = f"Update {OURS} or {plugin.distribution}."
    else:
        said = f"is broken: {' '.join(exception_text(cause, 240).split())}"
        fix = f"Repair or uninstall {plugin.distribution}."
    error = PluginError(f"the adapter plugin {plugin} {said}", fix=fix)
    error.__cause__ = cause
    return error


def _lacks_dlx_name(cause: BaseException) -> bool:
    """Return whether what a plugin did not find is something of dlx."""
    if isinstance(cause, ImportError):
        name = cause.name
    elif isinstance(cause, AttributeError) and isinstance(cause.obj, ModuleType):
        name = cause.obj.__name__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "dlx"
