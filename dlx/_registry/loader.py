"""Loading plugins: once, when first needed. Two adapters for one name or one type are refused or ranked here."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pluggy

from dlx._core import native
from dlx._core.foreign import TypeCache
from dlx._core.locks import lock_of
from dlx._registry import generic
from dlx._registry import plugin as plugins
from dlx._registry.plugin import BUILT_IN, Plugin
from dlx.adapter import hookspecs
from dlx.adapter.base import Adapter
from dlx.errors import PluginError

__all__ = ["Loader"]


class Loader:
    """The plugins that there are, by root package, and the adapters of those that were needed."""

    def __init__(self, built_in: dict[str, str] | None = None) -> None:
        self._lock: threading.RLock | None = None
        self._manager = pluggy.PluginManager("dlx")
        self._manager.add_hookspecs(hookspecs)
        self._plugins: dict[str, Plugin] = plugins.own(BUILT_IN if built_in is None else built_in)  # by root or alias
        self._rivals: dict[str, list[str]] = {}  # root -> keys of further plugins for it
        self._left_out: dict[str, str] = {}  # root -> distribution that DLX_LOAD_PLUGINS leaves out
        # Whose plugins are chosen by name is asked before ours, which they may replace.
        self._scanned = False
        self._scans_first = bool(plugins.allowed())
        self.generation = 0  # counts the plugins loaded: who caches answers by type looks here
        self._producers: TypeCache[Adapter] = TypeCache()

    def scan(self) -> None:
        """Read the entry points, once. Loads nothing."""
        with lock_of(self):
            if self._scanned:
                return
            allowed = plugins.allowed()
            unknown = set(allowed or ()) - {plugins.OURS}
            for root, plugin in plugins.discover():
                owner = plugins.normalized(plugin.distribution)
                unknown.discard(owner)
                if allowed is not None and owner not in allowed and plugin.broken is None:
                    self._left_out.setdefault(root, plugin.distribution)
                else:
                    self._enter(root, plugin, chosen=allowed is not None)
            for name in sorted(unknown):
                error = PluginError(f"DLX_LOAD_PLUGINS names {name!r}, and no such distribution offers adapters")
                self._plugins[f"({name})"] = Plugin("none", _nothing, name, loaded=True, broken=error)
            self._scanned = True

    def _enter(self, root: str, plugin: Plugin, *, chosen: bool) -> None:
        """Give a plugin its root package; beside one of ours it is refused, unless the user has chosen it."""
        known = self._plugins.get(root)
        if known is None:
            self._plugins[root] = plugin
        elif known.distribution == plugins.OURS and not chosen:
            clash = PluginError(
                f"{plugin.distribution} offers an adapter for {root!r}, which {known.distribution} already has",
                fix=f"Uninstall {plugin.distribution}, or choose it: DLX_LOAD_PLUGINS={plugin.distribution}.",
            )
            refused = Plugin(plugin.module, plugin.load, plugin.distribution, loaded=True, broken=clash)
            self._beside(root, refused)
        elif known.distribution == plugins.OURS:
            for name in known.names:
                self._plugins[name] = plugin
        elif known is not plugin:
            self._beside(root, plugin)

    def _beside(self, root: str, plugin: Plugin) -> None:
        key = f"{root} ({plugin.distribution})"
        self._plugins[key] = plugin
        self._rivals.setdefault(root, []).append(key)

    def load(self, key: str) -> Plugin:
        """Load the plugin for a root package, once; what goes wrong is remembered in it."""
        plugin = self._plugins[key]
        me = os.getpid(), threading.get_ident()  # a thread of a forked child may have the number of one of its parent
        if plugin.loaded or me in plugin.loading:  # a plugin that converts something while it is loaded
            return plugin
        plugin.loading.add(me)
        start, before = time.perf_counter(), set(sys.modules)
        try:
            module = plugin.load()  # outside of our lock: importing takes locks of its own
            seconds = time.perf_counter() - start
            found = self._collect(plugin, module)
            frameworks = {adapter.package.partition(".")[0] for adapter in found} | self._plugins.keys()
            eager = frameworks & sys.modules.keys() - before
            self._load_homes(plugin, found)
            with lock_of(self):
                if not plugin.loaded:
                    if eager:
                        note = plugins.eager_note(plugin, eager, seconds)
                        if plugins.strict():
                            raise PluginError(note)
                        plugin.notes.append(note)
                    plugin.adapters = self._settled(plugin, found)
                    plugin.loaded = True
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # whatever a plugin does wrong stays its own
            with lock_of(self):
                if not plugin.loaded:
                    plugin.broken, plugin.loaded = error, True
        finally:
            plugin.loading.discard(me)
            self._forget()
        return plugin

    def _forget(self) -> None:
        with lock_of(self):
            self.generation += 1
            self._producers.clear()
            native.routes_clear()

    def _collect(self, plugin: Plugin, module: ModuleType) -> tuple[Adapter, ...]:
        """Ask a plugin's hook. Two threads at a time may both ask; one answer is kept."""
        with lock_of(self):
            if not self._manager.is_registered(module):
                self._manager.register(module)
            others = [other for other in self._manager.get_plugins() if other is not module]
            hook = self._manager.subset_hook_caller("dlx_adapters", others)
        if not hook.get_hookimpls():
            fix = "Mark the function dlx_adapters with @dlx.hookimpl."
            if not isinstance(module, ModuleType):
                fix = f'Name the module in its entry point: {plugin.names[0]} = "{plugin.module.partition(":")[0]}".'
            raise PluginError("it has no hook dlx_adapters", fix=fix)
        return plugins.checked(plugin, hook())

    def _load_homes(self, plugin: Plugin, found: tuple[Adapter, ...]) -> None:
        """Load the plugins of other root packages whose names or types a new one claims, so that they are compared."""
        for root in {claim.partition(".")[0] for adapter in found for claim in _claims(adapter)}:
            if root in self._plugins and root not in plugin.names:
                self.load(root)

    def _settled(self, plugin: Plugin, found: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
        """Return those of a plugin's adapters that no other plugin's is preferred to.

        Raises
        ------
        PluginError
            If another one has the same name or type, and nothing says which is to be taken.
        """
        kept = list(found)
        for other in self._unique():
            for theirs in other.adapters if other is not plugin else ():
                for mine in found:
                    both = sorted(_claims(mine) & _claims(theirs))
                    if mine not in kept or theirs not in other.adapters or not both:
                        continue
                    if mine.priority == theirs.priority or plugins.OURS in (plugin.distribution, other.distribution):
                        self._dispute(plugin, other, both[0])
                    elif mine.priority < theirs.priority:
                        kept.remove(mine)
                        plugin.notes.append(_overruled(plugin, mine, other, theirs, both[0]))
                    else:
                        other.adapters = tuple(each for each in other.adapters if each is not theirs)
                        other.notes.append(_overruled(other, theirs, plugin, mine, both[0]))
        return tuple(kept)

    def _dispute(self, plugin: Plugin, other: Plugin, claim: str) -> None:
        """Refuse a plugin, and another one too, unless the name or type lies in a package that is the other's.

        Ours are never refused: only `DLX_LOAD_PLUGINS` replaces them, whatever the priorities.
        """
        what = f"the type {claim}" if "." in claim else f"the name {claim!r}"
        if plugins.OURS in (plugin.distribution, other.distribution):
            third_party = other if plugin.distribution == plugins.OURS else plugin
            error = PluginError(
                f"{third_party.distribution} has an adapter for {what}, which dlx has itself",
                fix=f"Uninstall or repair {third_party.distribution}.",
            )
            if third_party is plugin:
                raise error
            other.broken, other.adapters = error, ()
            return
        error = PluginError(
            f"{plugin.distribution} ({plugin.module}) and {other.distribution} ({other.module}) both have an adapter "
            f"for {what}, with the same priority",
            fix="Uninstall one, give one a higher priority, or name the distributions to load in DLX_LOAD_PLUGINS.",
        )
        root = claim.partition(".")[0]
        mine, theirs = root in plugin.names, root in other.names
        if mine >= theirs:
            other.broken, other.adapters = error, ()
        if theirs >= mine:
            raise error

    def remark(self, adapter: Adapter, sentence: str) -> None:
        """Record a problem of an adapter that can still be used; listings and `dlx doctor` show it."""
        for plugin in self._unique():
            if adapter in plugin.adapters and sentence not in plugin.notes:
                plugin.notes.append(sentence)

    def left_out(self) -> list[str]:
        """Return a sentence for each framework whose plugin ``DLX_LOAD_PLUGINS`` leaves out."""
        return [f"DLX_LOAD_PLUGINS leaves {owner} out, which has {root!r}" for root, owner in self._left_out.items()]

    def _unique(self) -> list[Plugin]:
        return list(dict.fromkeys(self._plugins.values()))

    def _keys(self, root: str) -> list[str]:
        return [root, *self._rivals.get(root, ())] if root in self._plugins else []

    def _load_all(self, root: str) -> list[Plugin]:
        """Load every plugin for a root package.

        Raises
        ------
        PluginError
            If one is broken and ``DLX_STRICT_PLUGINS`` is set.
        """
        if root not in self._rivals and (only := self._plugins[root]).loaded and only.broken is None:
            return [only]
        found = [self.load(key) for key in self._keys(root)]
        for plugin in found:
            if plugin.broken is not None and plugins.strict():
                raise plugins.error_of(plugin)
        return found

    def adapters(self) -> Iterator[Adapter]:
        """Give the adapters that are loaded, `dlx.Tensor`'s first."""
        yield generic.TENSOR
        for plugin in self._unique():
            yield from plugin.adapters

    def plugins(self) -> dict[str, Plugin]:
        """Return every known plugin by root package or alias; entry points are scanned, nothing is loaded."""
        self.scan()
        return dict(self._plugins)


def _nothing() -> ModuleType:
    raise ImportError("there is nothing to load")


def _claims(adapter: Adapter) -> set[str]:
    """Return what only one adapter can have: its name, its types, the types of its containers."""
    return {adapter.name, *adapter.types, *(name for handler in adapter.containers for name in handler.types)}


def _overruled(plugin: Plugin, loser: Adapter, by: Plugin, winner: Adapter, claim: str) -> str:
    return (
        f"the adapter {loser.name!r} of {plugin} is set aside: {by} has one for {claim} too, "
        f"with priority {winner.priority} over {loser.priority}"
    )
