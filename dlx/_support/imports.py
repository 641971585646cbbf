"""`when_imported`: call a function with a module after its import.

A finder in `sys.meta_path` wraps the loaders of these modules, and is removed after the last one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

_waiting: dict[str, list[Callable[[Any], None]]] = {}


def when_imported(name: str, function: Callable[[Any], None]) -> None:
    """Call a function with a module, now if it is imported, else after its import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        function(module)
        return
    waiting = _waiting.setdefault(name, [])
    if function not in waiting:
        waiting.append(function)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Loader:
    """A loader that runs a module's loader and then the functions that wait for the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        for function in _waiting.pop(module.__name__, ()):
            function(module)
        if not _waiting:
            with contextlib.suppress(ValueError):  # another thread removed it
                sys.meta_path.remove(_FINDER)


class _Finder:
    """A finder that wraps the loaders of the other finders."""

    def __init__(self) -> None:
        self._asked = threading.local()  # the other finders may call this one

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting or getattr(self._asked, "name", None) == name:
            return None
        self._asked.name = name
        try:
            found = (finder.find_spec(name, path, target) for finder in [*sys.meta_path] if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asked.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


_FINDER: Any = _Finder()
