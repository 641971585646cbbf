"""`set_module` sets the public module of a name; `restore_modules` keeps one copy of each module."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType

__all__ = ["restore_modules", "set_module"]

TYPE_CHECKING = False  # see `dlx`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    T = TypeVar("T")
_DLX = sys.modules["dlx"]


def set_module(name: str) -> Callable[[T], T]:
    """Return a decorator that sets ``__module__``, and shows annotations in `help` without quotes."""

    def decorate(defined: T) -> T:
        defined.__module__ = name
        for function in (defined, getattr(defined, "__new__", None), *vars(defined).values()):
            function = getattr(function, "fget", None) or getattr(function, "__func__", function)
            if isinstance(function, FunctionType):
                function.__annotations__ = {key: _unquote(each) for key, each in function.__annotations__.items()}
        return defined

    return decorate


class _Unquoted(str):
    """An annotation whose repr is its text, since `inspect.signature` shows reprs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _unquote(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Unquoted(text) if isinstance(text, str) else annotation


def restore_modules() -> None:
    """Put modules back into ``sys.modules`` that `unittest.mock.patch.dict` has removed.

    A second import would define other classes than those that the loaded modules use.
    """
    if sys.modules.get("dlx") is _DLX:
        for module in _iter_modules(_DLX):
            sys.modules.setdefault(module.__name__, module)


def _iter_modules(package: ModuleType) -> Iterator[ModuleType]:
    """Yield the loaded modules of a package and its subpackages."""
    for name, value in [*vars(package).items()]:
        if type(value) is ModuleType and value.__name__ == f"{package.__name__}.{name}":
            yield value
            yield from _iter_modules(value)
