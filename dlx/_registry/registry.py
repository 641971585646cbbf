"""Which adapter knows a type, and which one a target names. Plugins are loaded when their package is needed."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import get_cache_token
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

from dlx._core import native
from dlx._core.stream import Stream, handle_of, with_keeper
from dlx._core.types import Device, DType
from dlx._registry import generic, modules
from dlx._registry.loader import Loader
from dlx._registry.plugin import BUILT_IN, FRAMEWORKS, OURS, Plugin, error_of, install_of, normalize_name
from dlx._registry.target import Target, switches_of, target_of
from dlx._support.keywords import UNCHANGED
from dlx._support.locks import lock_of
from dlx._support.reflect import (
    TypeCache,
    derives,
    exception_text,
    foreign_error,
    foreign_errors,
    is_key,
    packages,
    packages_of,
    type_name,
)
from dlx.adapter.base import Adapter, Container, classes_of, look_up
from dlx.errors import AdapterNotFoundError, DlxError, PluginError, did_you_mean

CONVERT_CONTENTS = "Convert an array that it holds."  # what to do about an object that is no array
NOT_INSPECTED = "its type cannot be looked at:"
_PROTOCOLS = ("__dlpack__", "__array_interface__", "__array__")
_SHORT = {row.short: root for root, row in FRAMEWORKS.items() if row.short}
_NO_PLUGINS = {"dlx", *sys.stdlib_module_names}
_OWN: dict[str, Adapter] = {
    each.name: each for each in (generic.TENSOR, generic.ARROW_TARGET)
}  # targets without a plugin


class Registry:
    """Says which adapter knows a type, and which one a target names. Its `Loader` has the plugins."""

    def __init__(self, built_in: Mapping[str, str] = BUILT_IN) -> None:
        self.generation = 0  # changes whenever a plugin is loaded, and what was cached is dropped
        self._loader = Loader(built_in, self._forget)
        self._modules: dict[ModuleType, Adapter] = {}  # those that became targets, without a plugin
        self._packages: dict[Adapter, ModuleType] = {}  # what each adapter has looked at
        self._forget()

    def __reduce__(self) -> str:
        return "registry"  # by name: a process has one, and a function under `dlx.using` may be sent to another process

    def _forget(self) -> None:
        """Drop what was cached. A look-up that is still running keeps its answer in what is dropped."""
        self._kinds: tuple[int, object, TypeCache[Any]] = 0, None, TypeCache()
        self._targets: dict[Any, tuple[Target, ModuleType | None]] = {}
        self._ready: dict[Any, Target | None] = {}  # by adapter, array type and values of its switches
        with lock_of(self._loader):  # two may drop at once
            self.generation += 1  # last: who sees it finds nothing old
        native.routes_clear()

    def _renew(self, adapter: Adapter) -> None:
        """Drop what an adapter has computed if its package is another module now: a mock says nothing of torch."""
        package = sys.modules.get(adapter.package)
        if package is None or self._packages.setdefault(adapter, package) is package:
            return
        for part in (adapter, *(inspect.getattr_static(adapter, name) for name in ("dtypes", "devices"))):
            kept: dict[str, Any] = getattr(part, "__dict__", {})  # a mapping may stand for the dtypes
            for name in [*kept]:
                if isinstance(inspect.getattr_static(type(part), name, None), functools.cached_property):
                    kept.pop(name, None)
        self._packages[adapter] = package
        self._forget()

    def adapters(self) -> Iterator[Adapter]:
        """Give the adapters that are loaded, `dlx.Tensor`'s first, those of mere modules last."""
        yield generic.TENSOR
        for plugin in self._loader.list_plugins():
            yield from plugin.adapters
        yield from (each for each in [*self._modules.values()] if isinstance(each, modules.ModuleAdapter))

    def iterate_package(self, module: str) -> Iterator[Adapter]:
        """Give the adapters of a module's package, and those whose dtypes come from there (numpy's of ml_dtypes)."""
        loader = self._loader
        for root in packages(module):
            if loader.has(root):
                yield from loader.require(root).adapters
        root = next(packages(module))
        for adapter in self.adapters():
            if any(name.startswith(f"{root}.") for name in adapter.dtypes.extension.values()):
                yield adapter

    def iterate_imported(self) -> Iterator[Adapter]:
        """Give the adapters of all frameworks that are imported."""
        for root in [root for root in self._loader.plugins if root in sys.modules]:
            yield from self._loader.require(root).adapters

    def load_all(self) -> dict[str, Plugin]:
        """Load every plugin; return them by root package, other names included."""
        self._loader.scan()
        return {root: self._loader.load(root) for root in list(self._loader.plugins)}

    def describe_excluded(self) -> list[str]:
        """Return a sentence for each framework whose plugin ``DLX_LOAD_PLUGINS`` leaves out."""
        return list(self._loader.excluded.values())

    def remark(self, adapter: Adapter, sentence: str) -> None:
        """Record a problem of an adapter that can still be used; listings and `dlx doctor` show it."""
        plugin = self._loader.plugin_of(adapter)
        if plugin is not None and sentence not in plugin.notes:
            plugin.notes.append(sentence)

    def stream_keeper(self, device_id: int, handle: int) -> Any:
        """Return an object that keeps a framework's current CUDA stream alive until release; None for other streams."""
        device = Device(native.lib.kDLCUDA, device_id)
        borrowed = with_keeper(Stream(device, handle))
        if borrowed.keep is not None:
            return borrowed.keep
        for adapter in self.adapters():
            asked = adapter.streams.current if adapter.streams is not None else None
            if asked is not None and look_up(adapter.package) is not None:
                try:
                    current = asked(device)
                    if current is not None and handle_of(current) == handle:
                        return current
                except MemoryError:
                    raise
                except Exception:  # imported, and of no use on this machine: another may know
                    continue
        return None

    def kinds(self) -> TypeCache[Any]:
        """Return the answers of `lookup.kind`, dropped when a module or an abstract base class may claim a type."""
        n_modules, token, kinds = self._kinds
        if n_modules != len(sys.modules) or token != get_cache_token():
            _, _, kinds = self._kinds = len(sys.modules), get_cache_token(), TypeCache()
        return kinds

    def owner(self, kind: type) -> Adapter | None:
        """Return the adapter that lists a type or a base of it; None if there is none."""
        loader, roots = self._loader, packages_of(kind)
        foreign = {root for root in roots if "." not in root} - _NO_PLUGINS
        for root in foreign:
            loader.has(root)
        needed = [loader.require(root) for root in sorted(roots & loader.plugins.keys())]
        owner = self._find_owner(kind)
        if owner is None and foreign:
            # It may be registered as an array of a package that is imported, whose plugin is not loaded yet.
            before = self.generation
            loader.load_imported()
            owner = self._find_owner(kind) if self.generation != before else None
        broken = [plugin for plugin in needed if plugin.broken is not None]
        if owner is not None:
            self._renew(owner)
        if owner is None and broken and any(hasattr(kind, name) for name in _PROTOCOLS):
            raise error_of(broken[0])
        return owner

    def broken_for(self, roots: Iterable[str]) -> PluginError | None:
        """Return the error of a plugin for one of some packages that cannot be used; None if there is none."""
        roots = sorted(roots)
        found = (self._loader.plugins.get(root) for root in roots)
        broken = (plugin for plugin in found if plugin is not None and plugin.broken is not None)
        error = next((error_of(plugin) for plugin in broken if plugin.distribution != OURS), None)
        return error or next(filter(None, map(self._find_misnamed, roots)), None)

    def _find_misnamed(self, root: str) -> PluginError | None:
        """Return the error of a broken plugin of a distribution named after a package, ``dlx-lib`` or ``lib``."""
        if root.partition(".")[0] in _NO_PLUGINS:
            return None
        for name, plugin in list(self._loader.plugins.items()):
            owner = normalize_name(plugin.distribution)
            if plugin.distribution == OURS or owner.removeprefix("dlx-") != normalize_name(root):
                continue
            if normalize_name(name) == owner:
                self._loader.load(name)
            if plugin.broken is not None:
                return error_of(plugin)
        return None

    def _find_owner(self, kind: type) -> Adapter | None:
        """The adapter whose type comes first in the method resolution order; virtual subclasses last."""
        listed = [(adapter, self._classes(adapter)) for adapter in self.adapters()]
        for cls in kind.__mro__:
            for adapter, classes in listed:
                if any(cls is each for each in classes):  # a metaclass may call its classes equal to anything
                    return adapter
        return next((adapter for adapter, classes in listed if derives(kind, classes)), None)

    def _classes(self, adapter: Adapter) -> tuple[type, ...]:
        try:
            return classes_of(adapter)
        except MemoryError:
            raise
        except Exception as error:  # a package that fails to look one of its own names up has no such type
            self.remark(adapter, f"the types of {adapter.name!r} cannot be looked up: {exception_text(error)}")
            return ()

    def declared_handler(self, kind: type) -> Container | None:
        """Return the handler that an adapter declares for a type or its nearest base; None if there is none."""
        self._loader.load_imported()  # a package without arrays may hold another's: tensordict, h5py
        handlers = [
            (look_up(name), handler)
            for adapter in self.adapters()
            for handler in adapter.containers
            for name in handler.types
        ]
        return next((handler for cls in kind.__mro__ for listed, handler in handlers if listed is cls), None)

    def target(self, to: Any) -> Target:
        """Return the target that a caller names, its framework imported: `to` as in `dlx.convert`."""
        targets, kind = self._targets, to if isinstance(to, type) else None
        cacheable = type(to) in (str, ModuleType) or (kind is not None and is_key(kind))
        if cacheable and (known := targets.get(to)):
            target, module = known
            source = target.source
            if sys.modules.get(source.package) is module:  # else it is imported anew
                current = (
                    target if not source.dtypes.switches or target.has_same_switches() else self.ready(source, kind)
                )
                if current is not None:
                    return current
        target = self._by_name(to) if kind is None else self._by_type(kind)
        if cacheable:
            targets[to] = target, sys.modules.get(target.source.package)
        return target

    def _by_type(self, kind: type) -> Target:
        """Return the target that makes arrays of a type."""
        with foreign_errors(NOT_INSPECTED, AdapterNotFoundError, source=type_name(kind)):
            adapter = self.owner(kind)
        if adapter is not None:
            target = self.ready(adapter, kind)
            if target is not None and kind in self._classes(target.adapter)[:1]:  # what `load` makes
                return target
            if kind in self._classes(adapter):
                fix = f"Say to={self._name_of(adapter)!r}."
                raise AdapterNotFoundError(f"{type_name(kind)} cannot be a target", fix=fix)
        fix = self._list_targets() if adapter is None else f"Say to={self._name_of(adapter)!r}."
        raise AdapterNotFoundError(f"no adapter lists the type {type_name(kind)}", fix=fix)

    def _by_name(self, to: Any) -> Target:
        """Return the target of a name or a module."""
        loader, name, shown = self._loader, to, to
        if isinstance(to, ModuleType):
            names = [*packages(to.__name__)]
            shown = f"module {to.__name__}"
            name = names[0] if loader.has(names[0]) else next(filter(loader.has, reversed(names)), names[0])
        elif not isinstance(to, str):
            raise TypeError(f"to must be a name, a module or an array type, found {_describe_invalid(to)}")
        if name in _OWN:
            return cast("Target", self.ready(_OWN[name]))
        if not loader.has(name):
            target = self._by_module(to)
            if target is not None:
                return target
            if misnamed := self._find_misnamed(name):
                raise misnamed
            known = self._list_targets()
            hint = f"{loader.excluded[name]}." if name in loader.excluded else _guess(name, self._target_names())
            fix = f"{hint} {known}".strip()
            raise AdapterNotFoundError(f"there is no target {shown!r}", target=name, fix=fix)
        plugin = loader.require(name)
        if plugin.broken is not None:
            raise error_of(plugin)
        if not plugin.is_loaded:
            why = f"the adapter for {name!r} is being loaded, and this call interrupts that, as a signal handler may"
            raise PluginError(why, target=name, fix="Convert something to it before.")
        for adapter in sorted(plugin.adapters, key=lambda adapter: adapter.name != name):
            _import(adapter)
            target = self.ready(adapter)
            if target is not None:
                return target
        raise AdapterNotFoundError(f"{name!r} can be read but is no target", target=name, fix=self._list_targets())

    def _by_module(self, to: str | ModuleType) -> Target | None:
        """Return the target that a module with ``from_dlpack`` is; None where there is none of it."""
        module = modules.import_known(to) if isinstance(to, str) else to
        if module is None or not callable(getattr(module, "from_dlpack", None)):
            return None
        if module not in self._modules:
            made = modules.probe_module(module, generic.DLPACK)
            known = self.owner(made.kind)  # a module around a framework: array_api_compat.torch
            self._modules.setdefault(module, made if known is None or self.ready(known) is None else known)
            self._forget()
        return self.ready(self._modules[module])

    def ready(self, adapter: Adapter, kind: type | None = None) -> Target | None:
        """Return an adapter as a target, for one array type or for all; None where its framework takes no arrays."""
        self._renew(adapter)
        try:
            switches = switches_of(adapter)
            key = adapter, kind, switches
            if key not in self._ready:
                made = target_of(adapter, kind)
                if switches_of(adapter) != switches:  # another thread has switched meanwhile
                    return made
                if made is not None:
                    made.switches = switches
                return self._ready.setdefault(key, made)  # another thread may have made it meanwhile
            return self._ready[key]
        except (DlxError, MemoryError):
            raise
        except Exception as error:
            plugin = self._loader.plugin_of(adapter)
            what = f"the {adapter.name} adapter cannot state what it accepts:"
            owner = plugin.distribution if plugin is not None else "its plugin"
            raise foreign_error(what, error, PluginError, target=adapter.name, fix=f"Repair {owner}.") from error

    def _name_of(self, adapter: Adapter) -> str:
        """Return what users write for an adapter's framework."""
        plugin = self._loader.plugin_of(adapter)
        return adapter.name if plugin is None or adapter.name in self._loader.plugins else plugin.names[0]

    def _list_targets(self) -> str:
        return f"Known targets: {', '.join(self._target_names())}."

    def _target_names(self) -> list[str]:
        self._loader.scan()
        sources = {root for root, row in FRAMEWORKS.items() if not row.is_target}
        return sorted({*_OWN, *(name for name in self._loader.plugins if "(" not in name)} - sources)


def _guess(name: str, names: list[str]) -> str:
    """Return a sentence on the target that an unknown name may mean, or nothing."""
    if _is_valid(Device, name):
        return f"It is a device: say device={name!r}, and the framework in to=."
    word = name.lower().replace("-", "_").partition(".")[0]
    long = _SHORT.get(word, word)
    if long in names:
        return f"Did you mean {long!r}?"
    return f"{long} has no adapter here." if word in _SHORT else did_you_mean(word, names)


def _is_valid(kind: type[Device] | type[DType], obj: Any) -> bool:
    """Return whether an object or a name stands for a device or a dtype."""
    try:
        kind(obj)
    except (DlxError, TypeError, ValueError):
        return False
    return True


def _describe_invalid(to: Any) -> str:
    """Return the type of what is no target, and what to do where it is a device or a dtype."""
    shown = type_name(type(to))
    if type(to) in (int, tuple, list):  # which a device or a dtype can be written as
        return shown
    if _is_valid(Device, to):
        return f"{shown}. Say device= for a device"
    return f"{shown}. {UNCHANGED}" if _is_valid(DType, to) else shown


def _import(adapter: Adapter) -> None:
    """Import the framework of a target, unless it is there."""
    found = look_up(adapter.package)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return  # else another thread is importing it, and is waited for
    modules.import_framework(adapter.package, adapter.name, install_of(adapter))


registry = Registry()
"""The registry of this process."""

native.register(stream_keeper=registry.stream_keeper)
