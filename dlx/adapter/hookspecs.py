"""The whole plugin contract on one screen.

A plugin is a module, named ``dlx_<framework>`` by custom, with one entry point in the group ``dlx``. The entry's *name*
is the framework's root package, its value is the module::

    [project.entry-points.dlx]
    mylib = "dlx_mylib"

The module implements one hook, which takes nothing and will never grow arguments. It imports its framework inside
functions only::

    from dlx.adapter import Adapter, Capabilities, DTypes, offer

    class MyLib(Adapter):
        # Facts. All but the first two have defaults.
        name = package = "mylib"         # what users write as the target; what is imported
        install = "pip install mylib"    # for users who do not have it
        types = ("mylib.Array",)         # importable names; `load` makes the first
        namespaces = ("mylib",)          # for dlx.array_namespace
        dtypes = DTypes("mylib", {"float32": "single"})
        # devices = Devices(...)         both ways, as the dtypes
        # arrays = Arrays(...)           immutable, map_chunks, consume, restore, alignment
        # containers = (Container(...),) types that hold other objects
        # known_issues = (KnownIssue(...),)   faults of versions; self.lowered has what they change
        # fast_path = FastPath(...)      what C may use: exchange table, guards, owner
        # streams = StreamSupport(...)   how work on devices is ordered
        # placement = Placement(...)     which arrays stay on their device
        # writes = WriteTracking(...)    how writes are noticed
        # gradients = GradSupport(...)   how gradients are computed
        # is_tracing()                   whether arrays made now become part of a graph

        # As a producer. The defaults speak DLPack.
        # describe(self, obj)            -> Description: what is known, and what blocks the export
        # export(self, obj, *, stream)   -> dlx.Tensor over the memory

        # As a consumer. Without capabilities it is no target.
        def capabilities(self): return Capabilities(dtypes=self.dtypes.known())
        def load(self, tensor): import mylib; return mylib.from_dlpack(tensor)
        # variant(self, wanted)          -> the Adapter for one of several array types

        # copy(self, obj, device)        -> a copy made by the framework

    dlx_adapters = offer(MyLib())        # the hook, as a function that returns these

What hooks return is not checked in conversions: run the conformance kit, ``python -m dlx.testing mylib``, once.
``docs/write-an-adapter.md`` is the tutorial, `dlx.adapter` the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pluggy

from dlx.adapter.base import Adapter

hookspec = pluggy.HookspecMarker("dlx")
hookimpl = pluggy.HookimplMarker("dlx")


def offer(*adapters: Adapter) -> Callable[[], list[Adapter]]:
    """Return the hook of a plugin that has some adapters: ``dlx_adapters = offer(MyLib())``."""

    @hookimpl
    def dlx_adapters() -> list[Adapter]:
        return [*adapters]

    return dlx_adapters


@hookspec
def dlx_adapters() -> Iterable[Adapter]:  # type: ignore[empty-body]
    """Return the adapters of this plugin. Called when the plugin's package is first needed; one answer is kept."""
