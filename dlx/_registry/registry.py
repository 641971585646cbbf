"""`Registry`, which finds the adapters of types and targets, and loads plugins on demand."""

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
from dlx._registry.compound import handler_of
from dlx._registry.loader import Loader
from dlx._registry.plugin import BUILT_IN, FRAMEWORKS, OURS, SOURCES, Plugin, error_of, install_of, normalize_name
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
    module_of,
    packages,
    packages_of,
    type_name,
)
from dlx.adapter.base import Adapter, Compound, Container, classes_of, look_up
from dlx.errors import AdapterNotFoundError, DlxError, PluginError, did_you_mean

CONVERT_CONTENTS = "Convert an array that it holds."
NOT_INSPECTED = "its type cannot be inspected:"
_PROTOCOLS = ("__dlpack__", "__array_interface__", "__array__")
_SHORT = {row.short: root for root, row in FRAMEWORKS.items() if row.short}
_NO_PLUGINS = {"dlx", *sys.stdlib_module_names}
_OWN: dict[str, Adapter] = {each.name: each for each in (generic.TENSOR, generic.ARROW_TARGET)}


class Registry:
    """Finds the adapters of types and targets, among the plugins of its `Loader`."""

    def __init__(self, built_in: Mapping[str, str] = BUILT_IN) -> None:
        self.generation = 0  # incremented when the caches are cleared
        self._loader = Loader(built_in, self._forget)
        self._modules: dict[ModuleType, Adapter] = {}
        self._packages: dict[Adapter, ModuleType] = {}  # the module that each adapter has used
        self._forget()

    def __reduce__(self) -> str:
        return "registry"  # by name, for functions of `dlx.using` in other processes

    def _forget(self) -> None:
        """Clear the caches by replacing them: look-ups in progress write to the old ones."""
        self._kinds: tuple[int, object, TypeCache[Any]] = 0, None, TypeCache()
        self._targets: dict[Any, tuple[Target, ModuleType | None]] = {}
        self._ready: dict[Any, Target | None] = {}  # by adapter, array type and switch values
        with lock_of(self._loader):  # threads may clear simultaneously
            self.generation += 1  # last: with the new number, no old entry is found
        native.routes_clear()

    def _renew(self, adapter: Adapter) -> None:
        """Clear an adapter's cached properties if its package is a different module now, such as a mock."""
        package = sys.modules.get(adapter.package)
        if package is None or self._packages.setdefault(adapter, package) is package:
            return
        for part in (adapter, *(inspect.getattr_static(adapter, name) for name in ("dtypes", "devices"))):
            cache: dict[str, Any] = getattr(part, "__dict__", {})
            for name in [*cache]:
                if isinstance(inspect.getattr_static(type(part), name, None), functools.cached_property):
                    cache.pop(name, None)
        self._packages[adapter] = package
        self._forget()

    def adapters(self) -> Iterator[Adapter]:
        """Yield the loaded adapters: first for `dlx.Tensor`, last for modules without a plugin."""
        yield generic.TENSOR
        for plugin in self._loader.list_plugins():
            yield from plugin.adapters
        yield from (each for each in [*self._modules.values()] if isinstance(each, modules.ModuleAdapter))

    def iterate_package(self, module: str) -> Iterator[Adapter]:
        """Yield the adapters of a module's package, and those with dtypes from there (numpy's from ml_dtypes)."""
        loader = self._loader
        for root in packages(module):
            if loader.has(root):
                yield from loader.require(root).adapters
        root = next(packages(module))
        for adapter in self.adapters():
            if any(name.startswith(f"{root}.") for name in adapter.dtypes.extension.values()):
                yield adapter

    def iterate_imported(self) -> Iterator[Adapter]:
        """Yield the adapters of all imported frameworks."""
        for root in [root for root in self._loader.plugins if root in sys.modules]:
            yield from self._loader.require(root).adapters

    def load_all(self) -> dict[str, Plugin]:
        """Load all plugins and return them by root package and other names."""
        self._loader.scan()
        return {root: self._loader.load(root) for root in list(self._loader.plugins)}

    def describe_excluded(self) -> list[str]:
        """Return a sentence for each framework whose plugin ``DLX_LOAD_PLUGINS`` excludes."""
        return list(self._loader.excluded.values())

    def remark(self, adapter: Adapter, sentence: str) -> None:
        """Record a minor problem of an adapter for listings and `dlx doctor`."""
        plugin = self._loader.plugin_of(adapter)
        if plugin is not None and sentence not in plugin.notes:
            plugin.notes.append(sentence)

    def stream_keeper(self, device_id: int, handle: int) -> Any:
        """Return an object that keeps a framework's current CUDA stream alive, or None for other streams."""
        device = Device(native.lib.kDLCUDA, device_id)
        borrowed = with_keeper(Stream(device, handle))
        if borrowed.keep is not None:
            return borrowed.keep
        for adapter in self.adapters():
            get_current = adapter.streams.current if adapter.streams is not None else None
            if get_current is not None and look_up(adapter.package) is not None:
                try:
                    current = get_current(device)
                    if current is not None and handle_of(current) == handle:
                        return current
                except MemoryError:
                    raise
                except Exception:  # the framework has no working device
                    continue
        return None

    def kinds(self) -> TypeCache[Any]:
        """Return the cache of `lookup.kind`; clear it if modules were imported or types registered with an ABC."""
        n_modules, token, kinds = self._kinds
        if n_modules != len(sys.modules) or token != get_cache_token():
            _, _, kinds = self._kinds = len(sys.modules), get_cache_token(), TypeCache()
        return kinds

    def owner(self, kind: type) -> Adapter | None:
        """Return the adapter that lists a type or one of its bases, or None."""
        loader, roots = self._loader, packages_of(kind)
        foreign = {root for root in roots if "." not in root} - _NO_PLUGINS
        for root in foreign:
            loader.has(root)
        needed = [loader.require(root) for root in sorted(roots & loader.plugins.keys())]
        owner = self._find_owner(kind)
        if owner is None and foreign:
            # It may be a virtual subclass of a type whose plugin is not loaded yet.
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
        """Return the error of a broken plugin for one of the packages, or None."""
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
        """Return the adapter whose type is first in the method resolution order; virtual subclasses are last."""
        listed = [(adapter, self._classes(adapter)) for adapter in self.adapters()]
        for cls in kind.__mro__:
            for adapter, classes in listed:
                if any(cls is each for each in classes):  # a metaclass may define ==
                    return adapter
        return next((adapter for adapter, classes in listed if derives(kind, classes)), None)

    def _classes(self, adapter: Adapter) -> tuple[type, ...]:
        try:
            return classes_of(adapter)
        except MemoryError:
            raise
        except Exception as error:  # module __getattr__ raises
            self.remark(adapter, f"looking up the types of {adapter.name!r} failed: {exception_text(error)}")
            return ()

    def declared_handlers(self, kind: type) -> list[Container]:
        """Return the handlers that adapters declare for a type or its nearest base."""
        self._loader.load_imported()  # packages may contain other's arrays: tensordict, h5py
        handlers = [
            (look_up(name), handler, adapter)
            for adapter in self.adapters()
            for handler in adapter.containers
            for name in handler.types
        ]
        nearest = next((cls for cls in kind.__mro__ if any(listed is cls for listed, *_ in handlers)), None)
        found = [row[1:] for row in handlers if nearest is not None and row[0] is nearest]
        return [handler_of(*row) if isinstance(row[0], Compound) else row[0] for row in found]

    def target(self, to: Any) -> Target:
        """Return the target for `to` of `dlx.convert`; import its framework."""
        targets, kind = self._targets, to if isinstance(to, type) else None
        cacheable = type(to) in (str, ModuleType) or (kind is not None and is_key(kind))
        if cacheable and (known := targets.get(to)):
            target, module = known
            source = target.source
            if sys.modules.get(source.package) is module:
                current = target if not source.dtypes.switches or target.is_current() else self.ready(source, kind)
                if current is not None:
                    return current
        target = self._by_name(to) if kind is None else self._by_type(kind)
        if cacheable:
            targets[to] = target, sys.modules.get(target.source.package)
        return target

    def find_unimported(self, name: str) -> Target | None:
        """Return a target for host arrays whose framework is not imported, or None if only the framework can tell."""
        plugin = self._loader.require(name) if self._loader.has(name) else None
        adapter = next((each for each in plugin.adapters if each.name == name), None) if plugin is not None else None
        if adapter is None or adapter.package in sys.modules:
            return None
        try:
            stated = adapter.capabilities()
            lowered = (pair for issue in adapter.known_issues for pair in issue.lowers.items())
            if stated is None or any(getattr(stated, field, value) != value for field, value in lowered):
                return None
            target = Target(adapter, stated, adapter, None)
        except MemoryError:
            raise
        except Exception:
            return None
        return None if target.varies or adapter.dtypes.switches else target

    def _by_type(self, kind: type) -> Target:
        """Return the target that creates arrays of a type."""
        with foreign_errors(NOT_INSPECTED, AdapterNotFoundError, source=type_name(kind)):
            adapter = self.owner(kind)
        if adapter is not None:
            target = self.ready(adapter, kind)
            if target is not None and kind in self._classes(target.adapter)[:1]:  # the result of `load`
                return target
        if (adapter is None or self.ready(adapter) is None) and (error := find_source(module_of(kind))):
            raise error
        if adapter is not None and kind in self._classes(adapter):
            fix = f"Pass to={self._name_of(adapter)!r}."
            raise AdapterNotFoundError(f"{type_name(kind)} cannot be a target", fix=fix)
        fix = self._list_targets() if adapter is None else f"Pass to={self._name_of(adapter)!r}."
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
            if misnamed := self._find_misnamed(name) or find_source(name):
                raise misnamed
            known = self._list_targets()
            hint = f"{loader.excluded[name]}." if name in loader.excluded else _guess(name, self._target_names())
            fix = f"{hint} {known}".strip()
            raise AdapterNotFoundError(f"unknown target {shown!r}", target=name, fix=fix)
        plugin = loader.require(name)
        if plugin.broken is not None:
            raise error_of(plugin)
        if not plugin.is_loaded:
            why = f"the adapter for {name!r} is being loaded, and this call (from a signal handler?) interrupts that"
            raise PluginError(why, target=name, fix="Convert an array to it earlier.")
        for adapter in sorted(plugin.adapters, key=lambda adapter: adapter.name != name):
            _import(adapter)
            target = self.ready(adapter)
            if target is not None:
                return target
        if error := find_source(name):
            raise error
        raise AdapterNotFoundError(f"{name!r} is a source, but not a target", target=name, fix=self._list_targets())

    def _by_module(self, to: str | ModuleType) -> Target | None:
        """Return the target for a module with ``from_dlpack``, or None."""
        module = modules.import_known(to) if isinstance(to, str) else to
        if module is None or not callable(getattr(module, "from_dlpack", None)):
            return None
        if module not in self._modules:
            created = modules.probe_module(module, generic.DLPACK)
            known = self.owner(created.kind)  # a module around a framework: array_api_compat.torch
            self._modules.setdefault(module, created if known is None or self.ready(known) is None else known)
            self._forget()
        return self.ready(self._modules[module])

    def ready(self, adapter: Adapter, kind: type | None = None) -> Target | None:
        """Return the target of an adapter for one array type or all; None if the adapter cannot be a target."""
        self._renew(adapter)
        try:
            switches = switches_of(adapter)
            key, known = (adapter, kind, switches), self._ready  # other threads replace it
            if key not in known:
                created = target_of(adapter, kind)
                if switches_of(adapter) != switches:  # another thread has changed them
                    return created
                if created is not None:
                    created.switches = switches
                return known.setdefault(key, created)
            return known[key]
        except (DlxError, MemoryError):
            raise
        except Exception as error:
            plugin = self._loader.plugin_of(adapter)
            what = f"the {adapter.name} adapter cannot return its capabilities:"
            owner = plugin.distribution if plugin is not None else "its plugin"
            raise foreign_error(what, error, PluginError, target=adapter.name, fix=f"Repair {owner}.") from error

    def _name_of(self, adapter: Adapter) -> str:
        """Return the target name of an adapter's framework."""
        plugin = self._loader.plugin_of(adapter)
        return adapter.name if plugin is None or adapter.name in self._loader.plugins else plugin.names[0]

    def _list_targets(self) -> str:
        return f"Use one of: {', '.join(self._target_names())}."

    def _target_names(self) -> list[str]:
        self._loader.scan()
        return sorted({*_OWN, *filter(str.isidentifier, self._loader.plugins)} - (SOURCES.keys() & FRAMEWORKS))


def find_source(name: str) -> AdapterNotFoundError | None:
    """Return the error for a library or module that is a source, but not a target; None for others."""
    root = name.partition(".")[0]
    if root not in SOURCES:
        return None
    return AdapterNotFoundError(f"{root!r} is a source, but not a target", target=name, fix=f"Call {SOURCES[root]}.")


def _guess(name: str, names: list[str]) -> str:
    """Return a hint which target an unknown name may mean, or ``""``."""
    if _is_valid(Device, name):
        return f"It is a device: pass device={name!r}, and the framework as to=."
    word = name.lower().replace("-", "_").partition(".")[0]
    long = _SHORT.get(word, word)
    if long in names:
        return f"Did you mean {long!r}?"
    return f"{long} has no adapter." if word in _SHORT else did_you_mean(word, names)


def _is_valid(kind: type[Device] | type[DType], obj: Any) -> bool:
    """Return whether an object or a name is a valid device or dtype."""
    try:
        kind(obj)
    except (DlxError, TypeError, ValueError):
        return False
    return True


def _describe_invalid(to: Any) -> str:
    """Return the type of an invalid target, with a fix if it is a device or dtype."""
    shown = type_name(type(to))
    if type(to) in (int, tuple, list):  # these can also be devices and dtypes
        return shown
    if _is_valid(Device, to):
        return f"{shown}. Pass a device as device="
    return f"{shown}. {UNCHANGED}" if _is_valid(DType, to) else shown


def _import(adapter: Adapter) -> None:
    """Import the framework of a target, unless it is imported already."""
    found = look_up(adapter.package)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return  # otherwise wait for another thread's import
    modules.import_framework(adapter.package, adapter.name, install_of(adapter))


registry = Registry()
"""The registry of this process."""

native.register(stream_keeper=registry.stream_keeper)
