"""`set_module`: say in which public module a class or a function is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["set_module"]

T = TypeVar("T")


def set_module(name: str) -> Callable[[T], T]:
    """Return a decorator that sets ``__module__``, which names, pickles and error messages show."""

    def decorate(defined: T) -> T:
        defined.__module__ = name
        return defined

    return decorate
