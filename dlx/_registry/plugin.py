"""Plugins, the modules that bring adapters: which there are, whether one may be used, and what is wrong with it.

Those of dlx stand in `BUILT_IN`, those of others in entry points (group ``dlx``; the entry's *name* is the root package
of the framework). Nothing in this file loads a plugin: `Loader` does, when its package is needed.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from dlx._core.foreign import exception_text, message_of, safe_repr
from dlx._core.types import DType
from dlx._registry.answers import checked_adapter
from dlx._version import __version__
from dlx.adapter.base import API, OLDEST_API, Adapter
from dlx.adapter.declarations import Container, Defect, Guard
from dlx.errors import DTypeError, PluginError

__all__ = [
    "BUILT_IN",
    "Plugin",
    "allowed",
    "checked",
    "discover",
    "eager_note",
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
}
"""Root package, or another name for it -> module of ours."""

OURS = "dlx"


@dataclass(eq=False)
class Plugin:
    """One module that may hold adapters: where it is, and what became of it.

    Attributes
    ----------
    module
        The entry point's value, a module's name.
    load
        Imports it.
    distribution
        Who installed it; ``"dlx"`` for ours.
    adapters
        What it gave, as far as no other plugin is preferred.
    loaded
        Whether it was asked.
    broken
        What went wrong, or None.
    notes
        Sentences for its author or user: problems that are no reason to refuse it.
    names
        The entries' names: root packages whose adapters are here.
    loading
        Threads that are currently loading it, as (process, thread).
    """

    module: str
    load: Callable[[], ModuleType]
    distribution: str
    adapters: tuple[Adapter, ...] = ()
    loaded: bool = False
    broken: BaseException | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    loading: set[tuple[int, int]] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.module} ({self.distribution})"


# ---- which ones there are --------------------------------------------------------------------------------------------


def own(table: Mapping[str, str]) -> dict[str, Plugin]:
    """Return the plugins of a table {root package: module}, all of dlx's own distribution."""
    modules: dict[str, Plugin] = {}
    found = {}
    for root, module in table.items():
        found[root] = plugin = modules.setdefault(module, Plugin(module, _importer(module), OURS))
        plugin.names.append(root)
    return found


def discover() -> Iterator[tuple[str, Plugin]]:
    """Give (entry's name, plugin) for the entry points of other distributions; load none.

    Two entries with one module, of one distribution, are one plugin.
    """
    from importlib.metadata import entry_points  # 40 ms: only when something unknown turns up

    try:
        entries = list(entry_points(group="dlx"))
    except MemoryError:
        raise
    except Exception as error:  # some distribution's metadata is broken: nothing of ours is
        yield "(entry points)", Plugin("entry points", _importer("dlx"), "metadata", loaded=True, broken=error)
        return
    found: dict[tuple[str, str], Plugin] = {}
    for entry in entries:
        owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
        plugin = found.setdefault((entry.value, normalized(owner)), Plugin(entry.value, entry.load, owner))
        plugin.names.append(entry.name)
        yield entry.name, plugin


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


def _importer(module: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(module)


# ---- what they give --------------------------------------------------------------------------------------------------


def checked(plugin: Plugin, answers: Iterable[Any]) -> tuple[Adapter, ...]:
    """Return the adapters that a plugin's hooks gave.

    Raises
    ------
    PluginError
        If there is none, or one that cannot be used; the sentence says which, and what to do.
    """
    found: list[Adapter] = []
    for answer in answers:
        if isinstance(answer, Adapter) or not isinstance(answer, Iterable):
            raise PluginError(f"its dlx_adapters gave {safe_repr(answer)}", fix="Give a list of adapters.")
        found += answer
    if not found:
        raise PluginError("its dlx_adapters gave no adapters", fix="Give a list of them.")
    names: set[str] = set()
    for adapter in found:
        if isinstance(adapter, type) and issubclass(adapter, Adapter):
            raise PluginError(
                f"its dlx_adapters gave the class {adapter.__name__}", fix=f"Give an instance: {adapter.__name__}()."
            )
        if not isinstance(adapter, Adapter):
            raise PluginError(
                f"its dlx_adapters gave {safe_repr(adapter)}", fix="Give instances of dlx.adapter.Adapter."
            )
        _check_version(plugin, adapter)
        _check_facts(adapter)
        if adapter.name in names:
            raise PluginError(f"it has two adapters named {adapter.name!r}", fix="Give each a name of its own.")
        names.add(adapter.name)
    return tuple(found if plugin.distribution == OURS else map(checked_adapter, found))


def _check_version(plugin: Plugin, adapter: Adapter) -> None:
    spoken = adapter.api
    if not isinstance(spoken, int) or not OLDEST_API <= spoken <= API:
        known = str(API) if OLDEST_API == API else f"{OLDEST_API} to {API}"
        older = isinstance(spoken, int) and spoken < OLDEST_API
        raise PluginError(
            f"adapter {getattr(adapter, 'name', '?')!r} speaks API {spoken}, this dlx speaks {known}",
            fix=f"Update {plugin.distribution if older else 'dlx'}.",
        )


_LISTS: dict[str, type] = {
    "types": str,
    "fast_path_types": str,
    "confirmed": str,
    "depends_on": str,
    "owner_bounds": str,
    "switches": tuple,
    "guards": Guard,
    "containers": Container,
    "defects": Defect,
}
_TABLES = ("dtypes", "extension_dtypes", "storage_dtypes")


def _check_facts(adapter: Adapter) -> None:
    """Look at the facts that dlx reads as data; those that are computed are not asked for, nothing is imported."""
    shown = type(adapter).__name__
    for fact in ("name", "package"):
        if not isinstance(_plain(adapter, fact), str) or not getattr(adapter, fact):
            raise PluginError(f"its adapter {shown} has no {fact}", fix=f'Set it: {fact} = "mylib".')
    if not isinstance(adapter.priority, int):
        raise PluginError(f"the priority of its adapter {shown} is {safe_repr(adapter.priority)}", fix="Give an int.")
    if adapter.is_own:
        raise PluginError(f"its adapter {shown} says that its arrays are dlx.Tensor", fix="Leave is_own out.")
    if adapter.name == OURS:
        raise PluginError(f"its adapter {shown} is named 'dlx', which is dlx itself", fix="Give it another name.")
    for fact, kind in _LISTS.items():
        value = _plain(adapter, fact)
        if value is not _COMPUTED and not (isinstance(value, tuple) and all(isinstance(each, kind) for each in value)):
            raise PluginError(
                f"the {fact} of its adapter {adapter.name!r} are {safe_repr(value)}",
                fix=f"Give a tuple of {kind.__name__}.",
            )
    for fact in _TABLES:
        value = _plain(adapter, fact)
        if value is _COMPUTED:
            continue
        try:
            for name in value:
                DType(name)
        except (TypeError, DTypeError) as error:
            raise PluginError(
                f"the {fact} of its adapter {adapter.name!r} cannot be read: {message_of(error)}"
            ) from error


_COMPUTED = object()


def _plain(adapter: Adapter, fact: str) -> Any:
    """Return a fact that is plain data; `_COMPUTED` for a property, which may need the framework."""
    for cls in type(adapter).__mro__:
        if fact in cls.__dict__:
            return _COMPUTED if hasattr(cls.__dict__[fact], "__get__") else getattr(adapter, fact)
    return adapter.__dict__.get(fact)


# ---- what is wrong with one ------------------------------------------------------------------------------------------


def error_of(plugin: Plugin) -> PluginError:
    """Return the error for a plugin that cannot be used: one sentence, one fix, and the cause."""
    cause = plugin.broken
    assert cause is not None
    reason, fix = _explained(plugin, cause)
    error = PluginError(f"the adapter plugin {plugin} {reason}", fix=fix)
    error.__cause__ = cause
    return error


def _explained(plugin: Plugin, cause: BaseException) -> tuple[str, str]:
    if isinstance(cause, PluginError):
        return f"is refused: {cause.reason}", cause.fix
    missing = getattr(cause, "name", None)
    module = plugin.module.partition(":")[0].strip()
    if isinstance(cause, ModuleNotFoundError) and missing and f"{module}.".startswith(f"{missing}."):
        return (
            f"is gone: its entry point names the module {module}, and there is none",
            "Install dlx again." if plugin.distribution == OURS else f"Uninstall or repair {plugin.distribution}.",
        )
    if isinstance(cause, ImportError | AttributeError) and _is_of_dlx(cause):
        return (
            f"was written for another dlx than this one ({__version__}, adapter API {API}): {message_of(cause)}",
            f"Update dlx or {plugin.distribution}.",
        )
    said = " ".join(exception_text(cause, 240).split())
    return f"is broken: {said}", f"Repair or uninstall {plugin.distribution}."


def _is_of_dlx(cause: ImportError | AttributeError) -> bool:
    """Return whether what an import did not find is something of dlx."""
    name = cause.name if isinstance(cause, ImportError) else getattr(cause.obj, "__name__", None)
    if isinstance(cause, AttributeError) and not isinstance(cause.obj, ModuleType):
        return False
    return isinstance(name, str) and name.partition(".")[0] == "dlx"


def eager_note(plugin: Plugin, imported: Iterable[str], seconds: float) -> str:
    """Return the sentence for a plugin that imports frameworks when it is loaded."""
    names = " and ".join(sorted(imported))
    return (
        f"loading {plugin} imports {names}, which took {seconds * 1e3:.0f} ms and happens in every listing: "
        f"import {names} inside functions only, and keep the plugin out of its framework's package"
    )
