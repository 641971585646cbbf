"""`Loader`, which finds plugins and loads each one once."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType

import pluggy

from dlx._registry import plugin as plugins
from dlx._registry.plugin import OURS, Plugin, error_of
from dlx._support.locks import lock_of
from dlx._support.module import restore_modules
from dlx.adapter import hookspecs
from dlx.adapter.base import Adapter
from dlx.errors import PluginError


class Loader:
    """Finds plugins, loads them on demand, calls `on_change` after each, and records errors."""

    def __init__(self, built_in: Mapping[str, str], on_change: Callable[[], None]) -> None:
        self._lock: threading.RLock | None = None
        self._on_change = on_change
        self._scanned = False
        self._scans_first = bool(plugins.read_allowed())  # selected plugins may replace built-in ones
        # By root package and other names; ``"root (distribution)"`` if another plugin has the root.
        self.plugins = {root: plugin for plugin in plugins.list_built_in(built_in) for root in plugin.names}
        self.excluded: dict[str, str] = {}  # root package -> sentence about ``DLX_LOAD_PLUGINS``

    def has(self, root: str) -> bool:
        """Return whether a root package has a plugin; read the entry points if necessary."""
        if self._scans_first or root not in self.plugins:
            self.scan()
        return root in self.plugins

    def scan(self) -> None:
        """Read the entry points once, without loading plugins."""
        with lock_of(self):
            if self._scanned:
                return
            allowed = plugins.read_allowed()
            unknown = set(allowed or ()) - {OURS}
            found = dict(self.plugins)
            for plugin in plugins.discover():
                owner = plugins.normalize_name(plugin.distribution)
                unknown.discard(owner)
                if allowed is None or owner in allowed or plugin.broken is not None:
                    _add_plugin(plugin, found, chosen=allowed is not None)
                else:
                    why = f"DLX_LOAD_PLUGINS={os.environ['DLX_LOAD_PLUGINS']!r} excludes {plugin.distribution}"
                    self.excluded |= {root: f"{why}, which provides {root!r}" for root in plugin.names}
            for name in sorted(unknown):
                reason = f"DLX_LOAD_PLUGINS names {name!r}, but no such distribution has adapters"
                error = PluginError(reason, fix="Correct DLX_LOAD_PLUGINS, or install it.")
                found[f"({name})"] = Plugin("none", object, name, broken=error)
            self.plugins.update(found)
            self._scanned = True

    def load(self, root: str) -> Plugin:
        """Load a plugin once and return it, with the error if it is broken."""
        plugin = self.plugins[root]
        me = os.getpid(), threading.get_ident()  # a forked child may reuse thread ids
        if plugin.is_loaded or me in plugin.loading:  # its import may convert arrays
            return plugin
        collects = gc.isenabled()
        try:
            gc.disable()  # as in dlx/__init__.py
            plugin.loading.add(me)  # inside `try`, because an interrupt may follow
            adapters = self._load_adapters(plugin)  # without our lock: imports take other locks
            for root in {claim.partition(".")[0] for claim in _claims(adapters)} & self.plugins.keys():
                self.load(root)  # the package's plugin has precedence over others that claim its types
            with lock_of(self):
                if not plugin.is_loaded:
                    self._check_claims(plugin, adapters)
                    plugin.adapters = adapters
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # a broken plugin must not affect others
            with lock_of(self):
                if not plugin.is_loaded:
                    plugin.broken = error
        finally:
            if collects:
                gc.enable()
            plugin.loading.discard(me)
            with lock_of(self):
                self._on_change()
        return plugin

    def require(self, root: str) -> Plugin:
        """Load the plugin for a root package; with ``DLX_STRICT_PLUGINS``, raise the error of any broken one."""
        plugin = self.load(root)
        if plugins.is_strict():
            for each in self.list_plugins():
                if each.broken is not None and root in each.names:
                    raise error_of(each)
        return plugin

    def load_imported(self) -> None:
        """Load the plugins of all imported packages."""
        for root, plugin in list(self.plugins.items()):
            if root in sys.modules and not plugin.is_loaded:
                self.require(root)

    def list_plugins(self) -> list[Plugin]:
        """Return all known plugins."""
        return list(dict.fromkeys(list(self.plugins.values())))  # at once: another thread may be scanning

    def plugin_of(self, adapter: Adapter) -> Plugin | None:
        """Return the plugin that contains an adapter."""
        return next((plugin for plugin in self.list_plugins() if adapter in plugin.adapters), None)

    def _load_adapters(self, plugin: Plugin) -> tuple[Adapter, ...]:
        """Import a plugin and call its hook. Two threads may do both; `load` keeps one result."""
        restore_modules()
        start, before = time.perf_counter(), set(sys.modules)
        module = plugin.load()
        seconds = time.perf_counter() - start
        manager = pluggy.PluginManager("dlx")
        manager.add_hookspecs(hookspecs)
        manager.register(module)
        if not manager.hook.dlx_adapters.get_hookimpls():
            fix = "Mark the function dlx_adapters with @dlx.hookimpl."
            if not isinstance(module, ModuleType):
                fix = f'Name the module in its entry point: {plugin.names[0]} = "{plugin.module.partition(":")[0]}".'
            raise PluginError("it has no hook dlx_adapters", fix=fix)
        adapters = plugins.check_adapters(plugin, manager.hook.dlx_adapters())
        frameworks = {adapter.package.partition(".")[0] for adapter in adapters} | set(self.plugins)
        if eager := " and ".join(sorted(frameworks & (set(sys.modules) - before))):
            reason = f"{plugin} imports {eager} when it is loaded ({seconds * 1e3:.0f} ms, also for every listing)"
            fix = f"Import {eager} only inside functions, and keep the plugin out of its framework's package."
            if plugins.is_strict():
                raise PluginError(reason, fix=fix)
            plugin.notes[:] = [f"{reason}. {fix}"]
        return adapters

    def _check_claims(self, plugin: Plugin, adapters: Iterable[Adapter]) -> None:
        """Refuse a plugin that claims a name or type of another one; the first or the built-in one keeps it."""
        owners = {claim: other for other in self.list_plugins() for claim in _claims(other.adapters)}
        for claim in sorted(_claims(adapters) & owners.keys()):
            if plugin.distribution != OURS:
                raise _conflict(owners[claim], plugin, claim)
            other = owners[claim]
            other.broken, other.adapters = _conflict(plugin, other, claim), ()


def _add_plugin(plugin: Plugin, found: dict[str, Plugin], *, chosen: bool) -> None:
    """Register a plugin; refuse it for a built-in package unless selected, and refuse both of two other plugins."""
    for root in plugin.names:
        known = found.setdefault(root, plugin)
        if known.distribution == OURS and chosen:
            found |= dict.fromkeys(known.names, plugin)
        elif known is not plugin:
            plugin.broken = _conflict(known, plugin, root)
            if known.distribution != OURS:
                known.broken = plugin.broken
            found[f"{root} ({plugin.distribution})"] = plugin


def _conflict(one: Plugin, refused: Plugin, claim: str) -> PluginError:
    return PluginError(
        f"{one} and {refused} both have an adapter for {claim!r}",
        fix=f"Uninstall {refused.distribution}, or set DLX_LOAD_PLUGINS to the distributions to use.",
    )


def _claims(adapters: Iterable[Adapter]) -> set[str]:
    """Return what only one adapter may have: names, types, container types."""
    return {
        claim
        for adapter in adapters
        for claims in ([adapter.name], adapter.types, *(container.types for container in adapter.containers))
        for claim in claims
    }
