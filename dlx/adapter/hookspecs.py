"""The plugin hook, and an overview of the adapter contract.

A plugin is a module, by convention named ``dlx_<framework>``, with one entry point in the group ``dlx``. The name of
the entry point is the framework's root package, its value is the module::

    [project.entry-points.dlx]
    mylib = "dlx_mylib"

The module implements one hook without arguments. It imports its framework only inside functions::

    from dlx.adapter import Adapter, Capabilities, DTypes, offer

    class MyLib(Adapter):
        # Attributes. All except the first two have defaults.
        name = package = "mylib"         # the target's name; the package to import
        install = "pip install mylib"    # shown if it is missing
        types = ("mylib.Array",)         # importable names; `load` returns the first
        namespaces = ("mylib",)          # for dlx.array_namespace
        dtypes = DTypes("mylib", {"float32": "single"})
        # devices = Devices(...)         conversion of devices
        # arrays = Arrays(...)           immutable, map_chunks, consume, restore, alignment
        # containers = (Container(...),) container types
        # known_issues = (KnownIssue(...),)   faults; self.lowered has their changes
        # fast_path = FastPath(...)      exchange table, guards, owner for C
        # streams = StreamSupport(...)   how streams are synchronized
        # placement = Placement(...)     which arrays stay on their device
        # writes = WriteTracking(...)    how writes are detected
        # gradients = GradSupport(...)   how gradients are computed
        # is_tracing()                   whether new arrays become part of a graph

        # As a producer. The defaults use DLPack.
        # describe(self, obj)            -> Description, with blockers
        # export(self, obj, *, stream)   -> dlx.Tensor over the memory

        # As a consumer. Without capabilities it cannot be a target.
        def capabilities(self): return Capabilities(dtypes=self.dtypes.known())
        def load(self, tensor): import mylib; return mylib.from_dlpack(tensor)
        # variant(self, wanted)          -> the Adapter for one of several array types

        # copy(self, obj, device)        -> a copy made by the framework

    dlx_adapters = offer(MyLib())        # the hook

Conversions do not check the results of an adapter: test it with the conformance kit, ``python -m dlx.testing mylib``.
``docs/write-an-adapter.md`` is the tutorial, `dlx.adapter` the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pluggy

from dlx.adapter.base import Adapter

hookspec = pluggy.HookspecMarker("dlx")
hookimpl = pluggy.HookimplMarker("dlx")


def offer(*adapters: Adapter) -> Callable[[], list[Adapter]]:
    """Return the hook of a plugin with these adapters: ``dlx_adapters = offer(MyLib())``."""

    @hookimpl
    def dlx_adapters() -> list[Adapter]:
        return [*adapters]

    return dlx_adapters


@hookspec
def dlx_adapters() -> Iterable[Adapter]:  # type: ignore[empty-body]
    """Return the adapters of this plugin. Called once, when the plugin's package is first needed."""
