"""`set_module`: say in which public module a class or a function is found; `restore_modules`: keep one copy of each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeVar

__all__ = ["restore_modules", "set_module"]

T = TypeVar("T")
_DLX = sys.modules["dlx"]


def set_module(name: str) -> Callable[[T], T]:
    """Return a decorator that sets ``__module__``, which names, pickles and error messages show."""

    def decorate(defined: T) -> T:
        defined.__module__ = name
        return defined

    return decorate


def restore_modules() -> None:
    """Put dlx's modules back where they were taken out of ``sys.modules``.

    `unittest.mock.patch.dict` takes out what was imported meanwhile. Imported again, a module would have other classes,
    which nothing that is loaded already knows.
    """
    if sys.modules.get("dlx") is _DLX:
        for module in _below(_DLX):
            sys.modules.setdefault(module.__name__, module)


def _below(package: ModuleType) -> Iterator[ModuleType]:
    """Give the modules of a package that were loaded, and those of its packages."""
    for name, value in [*vars(package).items()]:
        if type(value) is ModuleType and value.__name__ == f"{package.__name__}.{name}":
            yield value
            yield from _below(value)
