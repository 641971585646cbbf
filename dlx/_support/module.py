"""`set_module`: the module that a public name shows; `restore_modules`: keep one copy of each module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeVar

__all__ = ["restore_modules", "set_module"]

T = TypeVar("T")
_DLX = sys.modules["dlx"]


def set_module(name: str) -> Callable[[T], T]:
    """Return a decorator that sets ``__module__``; `help` then shows annotations, also of methods, without quotes."""

    def decorate(defined: T) -> T:
        defined.__module__ = name
        for function in (defined, getattr(defined, "__new__", None), *vars(defined).values()):
            function = getattr(function, "fget", None) or getattr(function, "__func__", function)
            if isinstance(function, FunctionType):
                function.__annotations__ = {key: _written(each) for key, each in function.__annotations__.items()}
        return defined

    return decorate


class _Written(str):
    """An annotation whose repr is its text, since `inspect.signature` shows reprs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _written(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Written(text) if isinstance(text, str) else annotation


def restore_modules() -> None:
    """Put dlx's modules back into ``sys.modules``, from which `unittest.mock.patch.dict` removes late ones.

    Imported again, a module would have other classes, which the loaded modules do not know.
    """
    if sys.modules.get("dlx") is _DLX:
        for module in _below(_DLX):
            sys.modules.setdefault(module.__name__, module)


def _below(package: ModuleType) -> Iterator[ModuleType]:
    """Give the loaded modules of a package and of its packages."""
    for name, value in [*vars(package).items()]:
        if type(value) is ModuleType and value.__name__ == f"{package.__name__}.{name}":
            yield value
            yield from _below(value)
