"""The whole plugin contract on one screen.

A plugin is a module, named ``dlx_<framework>`` by custom, with one entry point in the group ``dlx`` whose *name* is the
framework's root package (``mylib``) and whose value is the module::

    [project.entry-points.dlx]
    mylib = "dlx_mylib"

The module implements the one hook below and imports its framework only inside functions::

    import dlx
    from dlx.adapter import Adapter

    class MyLib(Adapter):
        api = 1
        name = package = "mylib"
        types = ("mylib.Array",)

    @dlx.hookimpl
    def dlx_adapters():
        return [MyLib()]

This hook will never grow arguments, and there will be no second one; what grows is `dlx.adapter.Adapter`, whose `api`
number says which contract an adapter speaks. The whole of it is in ``docs/write-an-adapter.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

hookspec = pluggy.HookspecMarker("dlx")
hookimpl = pluggy.HookimplMarker("dlx")


@hookspec
def dlx_adapters() -> Iterable[Any]:  # type: ignore[empty-body]
    """Return the adapters of this plugin, instances of `dlx.adapter.Adapter`.

    Called when the plugin's package is first needed; one answer is kept.
    """
