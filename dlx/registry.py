"""Which adapter knows a type, and which one a target names. Nothing is loaded until its package is asked for or there.

Our adapters stand in one table, strangers' in entry points (group ``dlx``; the entry's *name* is the framework's root
package). The same function loads both. A broken one is remembered and raised only when it is needed.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pluggy

from dlx import hookspecs, native, strangers
from dlx.abi import Device
from dlx.adapter import API, Adapter, Container, look_up
from dlx.errors import AdapterNotFoundError, FrameworkNotInstalledError, PluginError
from dlx.stream import handle_of

__all__ = ["BUILT_IN", "Plugin", "Registry", "adapters", "registry"]

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


@dataclass
class Plugin:
    """One module that may hold adapters: where it is, and what became of it."""

    module: str
    load: Callable[[], ModuleType]
    distribution: str
    adapters: tuple[Adapter, ...] = ()
    loaded: bool = False
    broken: Exception | None = None


class Registry:
    """Finds adapters by type, name, module or array type; loads their plugins when first needed."""

    def __init__(self, built_in: dict[str, str] | None = None) -> None:
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager("dlx")
        self._manager.add_hookspecs(hookspecs)
        self._plugins: dict[str, Plugin] = {}  # by root package or alias
        self._scanned = False
        self.generation = 0  # counts the plugins loaded: who caches answers by type looks here
        self._producers: weakref.WeakKeyDictionary[type, Adapter] = weakref.WeakKeyDictionary()
        modules: dict[str, Plugin] = {}
        for root, module in (BUILT_IN if built_in is None else built_in).items():
            load = _importer(module)
            self._plugins[root] = modules.setdefault(module, Plugin(module, load, "dlx"))

    # ---- plugins ----------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Read the entry points, once. Loads nothing."""
        with self._lock:
            if self._scanned:
                return
            from importlib.metadata import entry_points  # 40 ms: only when something unknown turns up

            try:
                entries = list(entry_points(group="dlx"))
            except Exception as error:  # some distribution's metadata is broken: nothing of ours is
                broken = Plugin(
                    "entry points", _importer("dlx"), "an installed distribution", loaded=True, broken=error
                )
                self._plugins["(entry points)"] = broken
                entries = []
            modules = {plugin.module: plugin for plugin in self._plugins.values()}
            for entry in entries:
                owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
                known = self._plugins.get(entry.name)
                if known is None:
                    # One module may answer to several names, as jax does to jaxlib.
                    plugin = modules.setdefault(entry.value, Plugin(entry.value, entry.load, owner))
                    self._plugins[entry.name] = plugin
                elif known.module != entry.value:  # ours and the first one found stay; the other is remembered
                    clash = f"{owner} offers an adapter for {entry.name!r}, which {known.distribution} already has"
                    self._plugins[f"{entry.name} ({owner})"] = Plugin(
                        entry.value, entry.load, owner, loaded=True, broken=ValueError(clash)
                    )
            self._scanned = True

    def load(self, root: str) -> Plugin:
        """Load the plugin for a root package, once; what goes wrong is remembered in it."""
        plugin = self._plugins[root]
        if plugin.loaded:
            return plugin
        try:
            module = plugin.load()  # outside of our lock: importing takes locks of its own
            with self._lock:
                if not plugin.loaded:
                    plugin.adapters = self._collect(plugin, module)
                    plugin.loaded = True
                    self.generation += 1
                    native.routes_clear()
        except Exception as error:  # whatever a plugin does wrong stays its own
            with self._lock:
                if not plugin.loaded:
                    plugin.broken, plugin.loaded = error, True
        return plugin

    def _collect(self, plugin: Plugin, module: ModuleType) -> tuple[Adapter, ...]:
        self._manager.register(module, name=plugin.module)
        others = [other for other in self._manager.get_plugins() if other is not module]
        hook = self._manager.subset_hook_caller("dlx_adapters", others)
        found = [adapter for adapters in hook() for adapter in adapters]
        if not found:
            raise PluginError(f"{plugin.module} has no adapters", fix="Mark its dlx_adapters with @dlx.hookimpl.")
        for adapter in found:
            if not isinstance(adapter, Adapter):
                raise PluginError(f"{plugin.module} gave {adapter!r}", fix="Give instances of dlx.adapter.Adapter.")
            if adapter.api != API:
                raise PluginError(
                    f"adapter {adapter.name!r} speaks API {adapter.api}, this dlx speaks {API}",
                    fix=f"Update {plugin.distribution} or dlx.",
                )
        return tuple(found)

    def adapters(self) -> Iterator[Adapter]:
        """Give the adapters that are loaded, `dlx.Tensor`'s first."""
        yield strangers.TENSOR
        seen: set[int] = set()
        for plugin in list(self._plugins.values()):
            if id(plugin) not in seen:
                seen.add(id(plugin))
                yield from plugin.adapters

    def plugins(self) -> dict[str, Plugin]:
        """Return every known plugin by root package or alias; entry points are scanned, nothing is loaded."""
        self.scan()
        return dict(self._plugins)

    def stream_keeper(self, device_id: int, handle: int) -> Any:
        """Return an object that keeps a CUDA stream alive: the current stream of whoever works on it; None for others.

        A consumer names the handle of its current stream when it takes a `dlx.Tensor`. The stream is used once more
        when it lets go, and must live until then.
        """
        device = Device(native.lib.kDLCUDA, device_id)
        for adapter in self.adapters():
            if type(adapter).work_stream is not Adapter.work_stream and look_up(adapter.package) is not None:
                current = adapter.work_stream(device)
                if current is not None and handle_of(current) == handle:
                    return current
        return None

    # ---- producers --------------------------------------------------------------------------------------------------

    def producer(self, obj: Any) -> Adapter | None:
        """Return the adapter that knows an object as an array, a stranger's included; None where none does.

        Raises
        ------
        PluginError
            If the plugin that should know its type is broken.
        """
        kind = type(obj)
        adapter = self._producers.get(kind)
        if adapter is None:
            adapter = self._find(kind)
            if adapter is None:
                return strangers.stranger(obj)  # not kept: the type may learn a protocol later
            self._producers[kind] = adapter
        return adapter

    def knows(self, kind: type) -> Adapter | None:
        """Return the adapter that lists a type or a base of it, strangers' left out; None where none does."""
        return self._producers.get(kind) or self._find(kind)

    def _find(self, kind: type) -> Adapter | None:
        roots = {str(cls.__module__).partition(".")[0] for cls in kind.__mro__} - {"builtins"}
        top = str(kind.__module__).partition(".")[0]
        if top not in self._plugins and top not in sys.stdlib_module_names:
            self.scan()
        broken: list[Plugin] = []
        for root in sorted(roots & self._plugins.keys()):
            plugin = self.load(root)
            if plugin.broken is not None:
                broken.append(plugin)
        owner = self._owner(kind)
        if owner is None and broken and _looks_like_an_array(kind):
            raise _broken(broken[0])
        return owner

    def _owner(self, kind: type) -> Adapter | None:
        """The adapter whose type comes first in the method resolution order; virtual subclasses last."""
        listed = [(adapter, _classes(adapter)) for adapter in self.adapters()]
        for cls in kind.__mro__:
            for adapter, classes in listed:
                if cls in classes:
                    return adapter
        for adapter, classes in listed:
            if any(issubclass(kind, cls) for cls in classes):
                return adapter
        return None

    # ---- containers -------------------------------------------------------------------------------------------------

    def container(self, kind: type) -> Container | None:
        """Return the row that an adapter declares for a type or its nearest base; None where none does."""
        self.knows(kind)  # its package's adapters are loaded now
        for root in list(self._plugins):  # a package without an adapter may hold another's arrays: tensordict, h5py
            if root in sys.modules:
                self.load(root)
        rows = [(look_up(name), row) for adapter in self.adapters() for row in adapter.containers for name in row.types]
        return next((row for cls in kind.__mro__ for listed, row in rows if listed is cls), None)

    # ---- targets ----------------------------------------------------------------------------------------------------

    def target(self, to: Any) -> Adapter:
        """Return the adapter that a target names, its framework imported.

        Parameters
        ----------
        to
            A name (``"torch"``), a module, or an array type that an adapter lists.

        Raises
        ------
        AdapterNotFoundError
            If there is no such target.
        FrameworkNotInstalledError
            If the framework is not there or fails to import.
        PluginError
            If the adapter's plugin is broken.
        """
        if isinstance(to, str):
            return self._named(to, to)
        if isinstance(to, ModuleType):
            return self._named(to.__name__.partition(".")[0], f"module {to.__name__}")
        if isinstance(to, type):
            adapter = self._find(to)
            if adapter is not None:
                adapter = adapter.narrowed(to).current()
            if adapter is not None and _can_be_target(adapter) and to in adapter.classes():
                return adapter
            fix = f"Say to={adapter.package.partition('.')[0]!r}." if adapter is not None else self._known()
            raise AdapterNotFoundError(f"no adapter lists the type {to.__module__}.{to.__qualname__}", fix=fix)
        raise TypeError(f"to must be a name, a module or an array type, found {type(to).__name__}")

    def _named(self, name: str, shown: str) -> Adapter:
        if name == strangers.TENSOR.name:
            return strangers.TENSOR
        if name not in self._plugins:
            self.scan()
        if name not in self._plugins:
            raise AdapterNotFoundError(f"there is no target {shown!r}", target=name, fix=self._known())
        plugin = self.load(name)
        if plugin.broken is not None:
            raise _broken(plugin)
        for adapter in sorted(plugin.adapters, key=lambda adapter: adapter.name != name):
            _import(adapter)
            target = adapter.current()
            if _can_be_target(target, plugin):
                return target
        raise AdapterNotFoundError(f"{name!r} can be read but is no target", target=name, fix=self._known())

    def _known(self) -> str:
        return f"Known targets: {', '.join(sorted(['dlx', *self.plugins()]))}."


def _importer(module: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(module)


def _broken(plugin: Plugin) -> PluginError:
    cause = plugin.broken
    error = PluginError(
        f"the adapter plugin {plugin.module} ({plugin.distribution}) is broken: {type(cause).__name__}: {cause}",
        fix="Repair or uninstall it.",
    )
    error.__cause__ = cause
    return error


def _can_be_target(adapter: Adapter, plugin: Plugin | None = None) -> bool:
    """Return whether an adapter takes arrays."""
    try:
        if adapter.capabilities is None:
            return False
        adapter.capabilities_address()
    except Exception as error:
        raise PluginError(
            f"the {adapter.name} adapter cannot state what it accepts: {type(error).__name__}: {error}".rstrip("."),
            target=adapter.name,
            fix=f"Repair {plugin.distribution if plugin is not None else 'its plugin'}.",
        ) from error
    return True


def _classes(adapter: Adapter) -> tuple[type, ...]:
    try:
        return adapter.classes()
    except Exception:  # a package that fails to look one of its own names up has no such type
        return ()


def _looks_like_an_array(kind: type) -> bool:
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__", "__array__"))


def _import(adapter: Adapter) -> None:
    """Import an adapter's framework, which is a target."""
    if look_up(adapter.package) is not None:
        return
    try:
        importlib.import_module(adapter.package)
    except ModuleNotFoundError as error:
        if error.name != adapter.package:
            raise _failed(adapter, error) from error
        install = adapter.install or f"pip install {adapter.package}"
        raise FrameworkNotInstalledError(
            f"{adapter.package} is not installed", target=adapter.name, fix=f"Install it: {install}."
        ) from error
    except Exception as error:  # a half-installed framework raises OSError, RuntimeError, anything
        raise _failed(adapter, error) from error


def _failed(adapter: Adapter, error: Exception) -> FrameworkNotInstalledError:
    return FrameworkNotInstalledError(
        f"{adapter.package} is installed but fails to import: {type(error).__name__}: {error}",
        target=adapter.name,
        fix="Repair its installation.",
    )


registry = Registry()
"""The registry of this process."""

native.set_stream_keeper(registry.stream_keeper)


def adapters() -> dict[str, Adapter]:
    """Return every adapter that is found, by name: dlx's own first, then those of plugins. No framework is imported.

    What an adapter says of its framework (`Adapter.dtype_to`, `Adapter.dtype_from`, `Adapter.capabilities`,
    `Adapter.lowered`) needs the framework imported. A plugin that cannot be loaded is left out.

    Examples
    --------
    >>> import dlx, numpy
    >>> dlx.adapters()["numpy"].dtype_to(dlx.DType("float32"))
    dtype('float32')
    """
    for root in registry.plugins():
        registry.load(root)
    found: dict[str, Adapter] = {}
    for adapter in registry.adapters():
        found.setdefault(adapter.name, adapter)
    return found
