"""`adapters`, the listing of all adapters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from dlx._registry.plugin import error_of, is_strict
from dlx._registry.registry import registry
from dlx._support.display import Shown, columns, table
from dlx._support.module import set_module
from dlx._support.text import one_line
from dlx.adapter.base import Adapter, version_of
from dlx.errors import PluginError


@set_module("dlx")
class Adapters(Shown, dict[str, Adapter]):
    """Adapters by name.

    Attributes
    ----------
    broken
        ``{"module (distribution)": PluginError}``: broken plugins.
    notes
        Sentences about usable plugins with problems, and about ignored plugins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: dict[str, PluginError] = {}
        self.notes: list[str] = []

    def __repr__(self) -> str:
        return "\n".join([f"<dlx.Adapters of {self._head()}>", *columns(self._rows())])

    def _head(self) -> str:
        broken = f", {len(self.broken)} broken" if self.broken else ""
        return f"{len(self)} frameworks{broken}"

    def _rows(self) -> list[list[str]]:
        """Return the names and versions of the frameworks, then the broken plugins."""
        rows = [[name, f"{adapter.package} {_read_version(adapter)}"] for name, adapter in self.items()]
        return rows + [[one_line(name), f"broken: {one_line(str(error))}"] for name, error in self.broken.items()]

    def _table(self) -> str:
        return table(self._head(), ("name", "package"), self._rows())

    def __rich_repr__(self) -> Iterator[Any]:
        yield dict(self._rows())


def _read_version(adapter: Adapter) -> str:
    """Return the version of a framework without importing it."""
    if sys.modules.get(adapter.package) is None:
        return "(not imported)"
    try:
        return version_of(adapter)
    except MemoryError:
        raise
    except Exception:
        return "(version unknown)"


@set_module("dlx")
def adapters() -> Adapters:
    """Return all adapters by name, first the built-in ones, without importing frameworks.

    `Adapter.dtypes`, `Adapter.devices`, `Adapter.capabilities` and `Adapter.lowered` require the imported framework.

    Returns
    -------
    Adapters
        A dict of the adapters; its attribute ``broken`` contains the plugins that could not be loaded.

    Raises
    ------
    PluginError
        If a plugin is broken and ``DLX_STRICT_PLUGINS`` is set.

    Examples
    --------
    >>> import dlx, numpy
    >>> dlx.adapters()["numpy"].dtypes.to_native(dlx.DType("float32"))
    dtype('float32')
    """
    plugins = dict.fromkeys(registry.load_all().values())
    found = Adapters()
    found.update({adapter.name: adapter for adapter in registry.adapters()})
    found.notes += registry.describe_excluded()
    for plugin in plugins:
        found.notes += plugin.notes
        if plugin.broken is not None:
            found.broken[str(plugin)] = error_of(plugin)
            if is_strict():
                raise found.broken[str(plugin)]
    return found


def can_be_target(adapter: Adapter) -> bool:
    """Return whether an adapter declares capabilities, without importing its framework."""
    return type(adapter).capabilities is not Adapter.capabilities
