"""Which adapter knows a type, and which one a target names.

Nothing is loaded until its package is asked for or imported. A broken plugin is remembered, and raised only when it is
needed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from dlx._core import native
from dlx._core.foreign import derives, exception_text, module_of, type_name
from dlx._core.module import set_module
from dlx._core.stream import Stream, handle_of, kept
from dlx._core.types import Device
from dlx._registry import generic
from dlx._registry import plugin as plugins
from dlx._registry.loader import Loader
from dlx._registry.plugin import BUILT_IN, Plugin
from dlx.adapter.base import Adapter, Container, look_up
from dlx.errors import AdapterNotFoundError, DlxError, FrameworkNotInstalledError, PluginError

__all__ = ["BUILT_IN", "Adapters", "Plugin", "Registry", "adapters", "registry"]


class Registry(Loader):
    """Finds adapters by type, name, module or array type; loads their plugins when first needed."""

    def stream_keeper(self, device_id: int, handle: int) -> Any:
        """Return an object that keeps a CUDA stream alive: a framework's current stream; None for others.

        A consumer names the handle of its current stream when it takes a `dlx.Tensor`. The stream is used once more at
        release, and must live until then.
        """
        device = Device(native.lib.kDLCUDA, device_id)
        borrowed = kept(Stream(device, handle))
        if borrowed.keep is not None:
            return borrowed.keep
        for adapter in self.adapters():
            if type(adapter).work_stream is not Adapter.work_stream and look_up(adapter.package) is not None:
                try:
                    current = adapter.work_stream(device)
                    if current is not None and handle_of(current) == handle:
                        return current
                except MemoryError:
                    raise
                except Exception:  # imported, and of no use on this machine: another may know
                    continue
        return None

    # ---- producers --------------------------------------------------------------------------------------------------

    def producer(self, obj: Any) -> Adapter | None:
        """Return the adapter that knows an object as an array, a generic producer's included; None where none does.

        Raises
        ------
        PluginError
            If the plugin that should know its type is broken.
        """
        kind = type(obj)
        adapter: Adapter | None = self._producers.get(kind)
        if adapter is None:
            adapter = self._find(kind)
            if adapter is None:
                return generic.generic_adapter(obj)  # not kept: the type may learn a protocol later
            self._producers[kind] = adapter
        return adapter

    def knows(self, kind: type) -> Adapter | None:
        """Return the adapter that lists a type or a base of it, generic producers' left out; None where none does."""
        return self._producers.get(kind) or self._find(kind)

    def _find(self, kind: type) -> Adapter | None:
        roots = {root for cls in kind.__mro__ for root in _packages(module_of(cls))} - {"", "builtins"}
        top = module_of(kind).partition(".")[0]
        foreign = top not in sys.stdlib_module_names
        if self._scans_first or (top not in self._plugins and foreign):
            self.scan()
        broken = [
            plugin
            for root in sorted(roots & self._plugins.keys())
            for plugin in self._load_all(root)
            if plugin.broken is not None
        ]
        owner = self._owner(kind)
        if owner is None and foreign:
            # A type may have been registered as an array of a package that is imported, whose plugin is not loaded yet.
            there = list(self._plugins.items())  # another thread may be scanning
            late = [root for root, plugin in there if root in sys.modules and not plugin.loaded]
            for root in late:
                self._load_all(root)
            owner = self._owner(kind) if late else None
        if owner is None and broken and _looks_like_an_array(kind):
            raise plugins.error_of(broken[0])
        return owner

    def broken_for(self, kind: type) -> PluginError | None:
        """Return the error of a plugin for a type's package that is loaded and cannot be used; None where none is."""
        for root in _packages(module_of(kind)):
            for plugin in (self._plugins[key] for key in self._keys(root)):
                if plugin.broken is not None and plugin.distribution != plugins.OURS:
                    return plugins.error_of(plugin)
        return None

    def _owner(self, kind: type) -> Adapter | None:
        """The adapter whose type comes first in the method resolution order; virtual subclasses last."""
        listed = [(adapter, _classes(adapter)) for adapter in self.adapters()]
        for cls in kind.__mro__:
            for adapter, classes in listed:
                if cls in classes:
                    return adapter
        for adapter, classes in listed:
            if derives(kind, classes):
                return adapter
        return None

    # ---- containers -------------------------------------------------------------------------------------------------

    def container(self, kind: type) -> Container | None:
        """Return the handler that an adapter declares for a type or its nearest base; None where none does."""
        self.knows(kind)  # its package's adapters are loaded now
        for root in list(self._plugins):  # a package without an adapter may hold another's arrays: tensordict, h5py
            if root in sys.modules:
                self.load(root)
        handlers = [
            (look_up(name), handler)
            for adapter in self.adapters()
            for handler in adapter.containers
            for name in handler.types
        ]
        return next((handler for cls in kind.__mro__ for listed, handler in handlers if listed is cls), None)

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
            names = list(_packages(to.__name__))
            known = [name for name in names if name in self.plugins()] if names[0] not in self._plugins else names[:1]
            return self._named(known[-1] if known else names[0], f"module {to.__name__}")
        if isinstance(to, type):
            adapter = self._find(to)
            target = None if adapter is None else self.ready(adapter, to)
            if target is not None and to in _classes(target):
                return target
            fix = f"Say to={self._name_of(adapter)!r}." if adapter is not None else self._known()
            raise AdapterNotFoundError(f"no adapter lists the type {type_name(to)}", fix=fix)
        raise TypeError(f"to must be a name, a module or an array type, found {type(to).__name__}")

    def _name_of(self, adapter: Adapter) -> str:
        """Return what users write for an adapter's framework."""
        return next(
            name for name in (adapter.name, adapter.package, adapter.package.partition(".")[0]) if self._keys(name)
        )

    def ready(self, adapter: Adapter, kind: type | None = None) -> Adapter | None:
        """Return the adapter to ask in one conversion; None where its framework takes no arrays.

        Raises
        ------
        PluginError
            If it fails to say.
        """
        try:
            target = (adapter if kind is None else adapter.narrowed(kind)).current()
            if target.capabilities is None:
                return None
            target.capabilities_address()
            return target
        except (DlxError, MemoryError):
            raise
        except Exception as error:
            owner = next((plugin.distribution for plugin in self._unique() if adapter in plugin.adapters), "its plugin")
            raise PluginError(
                f"the {adapter.name} adapter cannot state what it accepts: {exception_text(error)}",
                target=adapter.name,
                fix=f"Repair {owner}.",
            ) from error

    def _named(self, name: str, shown: str) -> Adapter:
        if name == generic.TENSOR.name:
            return generic.TENSOR
        if name not in self._plugins or self._scans_first:
            self.scan()
        if name not in self._plugins:
            fix = self._known()
            if name in self._left_out:
                fix = f"DLX_LOAD_PLUGINS={os.environ['DLX_LOAD_PLUGINS']!r} leaves {self._left_out[name]} out. {fix}"
            raise AdapterNotFoundError(f"there is no target {shown!r}", target=name, fix=fix)
        found = self._load_all(name)
        offered = [adapter for plugin in found for adapter in plugin.adapters]
        for adapter in sorted(offered, key=lambda adapter: adapter.name != name):
            _import(adapter)
            target = self.ready(adapter)
            if target is not None:
                return target
        for plugin in found:
            if plugin.broken is not None:
                raise plugins.error_of(plugin)
        raise AdapterNotFoundError(f"{name!r} can be read but is no target", target=name, fix=self._known())

    def _known(self) -> str:
        known = [name for name in self.plugins() if "(" not in name]
        return f"Known targets: {', '.join(sorted(['dlx', *known]))}."


def _packages(module: str) -> Iterator[str]:
    """Give a module's root package, then the packages below it: a framework may live in a namespace package."""
    end = module.find(".")
    while end >= 0:
        yield module[:end]
        end = module.find(".", end + 1)
    yield module


def _classes(adapter: Adapter) -> tuple[type, ...]:
    try:
        return adapter.classes()
    except MemoryError:
        raise
    except Exception as error:  # a package that fails to look one of its own names up has no such type
        registry.remark(adapter, f"the types of {adapter.name!r} cannot be looked up: {exception_text(error)}")
        return ()


def _looks_like_an_array(kind: type) -> bool:
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__", "__array__"))


def _import(adapter: Adapter) -> None:
    """Import an adapter's framework, which is a target."""
    found = look_up(adapter.package)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return  # else another thread is importing it, and is waited for
    try:
        importlib.import_module(adapter.package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{adapter.package}.".startswith(f"{error.name}."):
            raise _failed(adapter, error) from error
        install = adapter.install or f"pip install {adapter.package}"
        raise FrameworkNotInstalledError(
            f"{adapter.package} is not installed", target=adapter.name, fix=f"Install it: {install}."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a half-installed framework raises OSError, RuntimeError, anything
        raise _failed(adapter, error) from error


def _failed(adapter: Adapter, error: Exception) -> FrameworkNotInstalledError:
    return FrameworkNotInstalledError(
        f"{adapter.package} is installed but fails to import: {exception_text(error)}",
        target=adapter.name,
        fix="Repair its installation.",
    )


registry = Registry()
"""The registry of this process."""

native.set_stream_keeper(registry.stream_keeper)


@set_module("dlx")
class Adapters(dict[str, Adapter]):
    """Adapters by name.

    Attributes
    ----------
    broken
        ``{"module (distribution)": PluginError}``: plugins that were found and cannot be used.
    notes
        Sentences about plugins that can be used and should be mended, were set aside for others, or were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: dict[str, PluginError] = {}
        self.notes: list[str] = []


@set_module("dlx")
def adapters() -> Adapters:
    """Return every adapter that is found, by name: dlx's own first, then those of plugins. No framework is imported.

    What an adapter says of its framework (`Adapter.dtype_to`, `Adapter.dtype_from`, `Adapter.capabilities`,
    `Adapter.lowered`) needs the framework imported. A plugin that cannot be loaded is left out; it is in ``.broken`` of
    what comes back.

    Raises
    ------
    PluginError
        If a plugin is broken and ``DLX_STRICT_PLUGINS`` is set.

    Examples
    --------
    >>> import dlx, numpy
    >>> dlx.adapters()["numpy"].dtype_to(dlx.DType("float32"))
    dtype('float32')
    """
    for key in registry.plugins():
        registry.load(key)
    found = Adapters()
    for adapter in registry.adapters():
        found.setdefault(adapter.name, adapter)
    found.notes += registry.left_out()
    for plugin in dict.fromkeys(registry.plugins().values()):
        found.notes += plugin.notes
        if plugin.broken is not None:
            found.broken[str(plugin)] = plugins.error_of(plugin)
            if plugins.strict():
                raise found.broken[str(plugin)]
    return found
