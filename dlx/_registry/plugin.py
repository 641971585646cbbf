"""Plugins, the modules that bring adapters: which there are, what they may give, and the error of a broken one.

Those of dlx are listed in `BUILT_IN`, those of others in entry points (group ``dlx``; the entry's *name* is the root
package of the framework). Nothing in this file loads a plugin: `Loader` does, when its package is needed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from dlx._core.types import DType
from dlx._support.reflect import exception_text, message_of, safe_repr
from dlx._version import __version__
from dlx.adapter.base import API, OLDEST_API, Adapter, Devices, DTypes
from dlx.adapter.declarations import (
    Container,
    FastPath,
    Guard,
    KnownIssue,
    Ownership,
    Placement,
    StreamSupport,
    WriteTracking,
)
from dlx.adapter.gradients import GradSupport
from dlx.errors import DTypeError, PluginError

__all__ = [
    "BUILT_IN",
    "OURS",
    "SOURCES",
    "TRACING",
    "Plugin",
    "allowed",
    "checked",
    "discover",
    "error_of",
    "normalized",
    "own",
    "strict",
]

BUILT_IN = {
    "numpy": "dlx_numpy",
    "torch": "dlx_torch",
    "pytorch": "dlx_torch",
    "jax": "dlx_jax",
    "jaxlib": "dlx_jax",
    "tvm_ffi": "dlx_tvm_ffi",
    "pyarrow": "dlx_pyarrow",
    "cupy": "dlx_cupy",
    "tensorflow": "dlx_tensorflow",
    "paddle": "dlx_paddle",
    "mlx": "dlx_mlx",
    "warp": "dlx_warp",
    "onnxruntime": "dlx_onnxruntime",
    "xarray": "dlx_xarray",
    "pandas": "dlx_pandas",
    "dask": "dlx_dask",
    "ray": "dlx_ray",
}
"""Root package, or another name for it -> module of ours."""

SOURCES = frozenset({"pandas", "xarray", "ray"})
"""Those that are no targets."""

TRACING = ("torch", "pytorch")
"""Names of the framework whose compiler traces Python code, its package first; `dlx._engine.traced` is made for it."""

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
    def loaded(self) -> bool:
        """Whether it needs no loading any more."""
        return bool(self.adapters) or self.broken is not None


# ---- which ones there are --------------------------------------------------------------------------------------------


def own(table: Mapping[str, str]) -> list[Plugin]:
    """Return the plugins of a table {root package: module}, all of dlx's own distribution."""
    modules = {module: functools.partial(importlib.import_module, module) for module in table.values()}
    return [
        Plugin(module, load, OURS, [root for root in table if table[root] == module])
        for module, load in modules.items()
    ]


def discover() -> list[Plugin]:
    """Return the plugins in the entry points of other distributions; load none.

    Two entries with one module, of one distribution, are one plugin.
    """
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
        plugin = found.setdefault((entry.value, normalized(owner)), Plugin(entry.value, entry.load, owner))
        plugin.names.append(entry.name)
    return list(found.values())


def allowed() -> frozenset[str] | None:
    """Return the distributions that ``DLX_LOAD_PLUGINS`` names, normalized; None, where it is not set: all are.

    An empty value leaves out all but dlx's own adapters.
    """
    words = os.environ.get("DLX_LOAD_PLUGINS")
    return None if words is None else frozenset(normalized(word) for word in words.split(",") if word.strip())


def strict() -> bool:
    """Return whether ``DLX_STRICT_PLUGINS`` is set, so that what is wrong with a plugin is raised at once."""
    return os.environ.get("DLX_STRICT_PLUGINS", "0") not in ("", "0")


def normalized(name: str) -> str:
    """Return a distribution's name as package indices compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# ---- what they give --------------------------------------------------------------------------------------------------

_TUPLES: dict[str, type] = {
    "types": str,
    "switches": str,
    "namespaces": str,
    "containers": Container,
    "known_issues": KnownIssue,
}
"""Fact -> type of its elements."""

_PARTS: dict[str, tuple[type, bool]] = {
    "dtypes": (DTypes, False),
    "devices": (Devices, False),
    "fast_path": (FastPath, True),
    "streams": (StreamSupport, True),
    "ownership": (Ownership, True),
    "placement": (Placement, True),
    "writes": (WriteTracking, True),
    "gradients": (GradSupport, True),
}
"""Fact -> its type, and whether it may be None."""

_FAST_PATH: dict[str, type] = {"types": str, "confirmed": str, "owner_bounds": str, "switches": tuple, "guards": Guard}


def checked(plugin: Plugin, answers: Iterable[Any]) -> tuple[Adapter, ...]:
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
        _check_version(plugin, adapter)
        _check_facts(adapter)
        if any(adapter.name == other.name for other in found[:i]):
            raise PluginError(f"it has two adapters named {adapter.name!r}", fix="Give each a name of its own.")
    if plugin.names and not any(_named(name, adapter) for name in plugin.names for adapter in found):
        raise PluginError(
            f"its entry point is named {plugin.names[0]!r}, which is no package of its adapters",
            fix=f'Name it after the package of the arrays: {found[0].package} = "{plugin.module}".',
        )
    return tuple(found)


def _named(name: str, adapter: Adapter) -> bool:
    """Return whether an adapter is found by the name of an entry point: its own, or a package of its types."""
    types = [*adapter.types, *(each for container in adapter.containers for each in container.types)]
    return any(f"{each}.".startswith(f"{name}.") for each in (adapter.name, adapter.package, *types))


def _check_version(plugin: Plugin, adapter: Adapter) -> None:
    spoken = adapter.api
    if not isinstance(spoken, int) or not OLDEST_API <= spoken <= API:
        known = str(API) if OLDEST_API == API else f"{OLDEST_API} to {API}"
        older = isinstance(spoken, int) and spoken < OLDEST_API
        raise PluginError(
            f"adapter {getattr(adapter, 'name', '?')!r} speaks API {spoken}, this dlx speaks {known}",
            fix=f"Update {plugin.distribution if older else OURS}.",
        )


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


# ---- what is wrong with one ------------------------------------------------------------------------------------------


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
    elif _is_of_dlx(cause):
        said = f"was written for another dlx than this one ({__version__}, adapter API {API}): {message_of(cause)}"
        fix = f"Update {OURS} or {plugin.distribution}."
    else:
        said = f"is broken: {' '.join(exception_text(cause, 240).split())}"
        fix = f"Repair or uninstall {plugin.distribution}."
    error = PluginError(f"the adapter plugin {plugin} {said}", fix=fix)
    error.__cause__ = cause
    return error


def _is_of_dlx(cause: BaseException) -> bool:
    """Return whether what a plugin did not find is something of dlx."""
    if isinstance(cause, ImportError):
        name = cause.name
    elif isinstance(cause, AttributeError) and isinstance(cause.obj, ModuleType):
        name = cause.obj.__name__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "dlx"
