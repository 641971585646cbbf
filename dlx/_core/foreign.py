"""Safe inspection of foreign exceptions, values and classes, any of which may raise when inspected.

A failing repr never hides the original error: what cannot be shown is named by its class, and long texts are cut.
Interrupts and `MemoryError` propagate.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from dlx._core.module import set_module

__all__ = [
    "MAX_MESSAGE",
    "TypeCache",
    "class_name",
    "cut",
    "derives",
    "exception_text",
    "is_key",
    "message_of",
    "module_of",
    "safe_repr",
    "type_name",
]

MAX_MESSAGE = 1000
"""Characters of a foreign message that dlx repeats; the exception itself, the `__cause__`, has them all."""

Value = TypeVar("Value")

# Those of `type` itself: a metaclass may answer anything, or raise.
_name = type.__dict__["__name__"].__get__
_qualname = type.__dict__["__qualname__"].__get__
_mro = type.__dict__["__mro__"].__get__
_module = type.__dict__["__module__"].__get__


# ---- exceptions and values -------------------------------------------------------------------------------------------


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters and, where it was longer, how much is missing."""
    length = str.__len__(text)
    kept: str = str.__getitem__(text, slice(0, most))  # of exactly this type, whatever the other one overrides
    return kept if length <= most else f"{kept}... ({length - most:,} more characters)"


def message_of(error: BaseException, most: int = MAX_MESSAGE) -> str:
    """Return what an exception says, cut where it is long; empty where it says nothing."""
    try:
        return cut(str(error), most)
    except MemoryError:
        raise
    except Exception as failure:
        return f"its message cannot be shown ({class_name(type(failure))})"


def exception_text(error: BaseException, most: int = MAX_MESSAGE) -> str:
    """Return an exception as a part of a sentence: its class, and what it says."""
    name, message = class_name(type(error)), message_of(error, most).rstrip(".")
    return f"{name}: {message}" if message else name


def safe_repr(value: object, most: int = 60) -> str:
    """Return a value's repr, cut where it is long; one that has none is named by its class."""
    try:
        return cut(repr(value), most)
    except MemoryError:
        raise
    except Exception:
        return f"<{class_name(type(value))}>"


# ---- classes ---------------------------------------------------------------------------------------------------------


def class_name(kind: type) -> str:
    """Return the name of a class, without its module."""
    return str(_name(kind))


def module_of(kind: type) -> str:
    """Return the name of the module that a class says it is of; empty where it says nothing of use."""
    try:
        module = _module(kind)
    except AttributeError:
        return ""
    return module if type(module) is str else ""


@set_module("dlx.adapter")
def type_name(kind: type) -> str:
    """Return a type's name as a user writes it: ``"numpy.ndarray"``, ``"bytes"``."""
    module, name = module_of(kind), str(_qualname(kind))
    return name if module in ("", "builtins") else f"{module}.{name}"


def is_key(kind: type) -> bool:
    """Return whether a class can be a key: it is equal to itself only, and none of its metaclass's code runs."""
    meta = type(kind)
    return meta is type or (meta.__hash__ is type.__hash__ and meta.__eq__ is type.__eq__)


def derives(kind: type, bases: type | tuple[type, ...]) -> bool:
    """Return `issubclass`, which abstract base classes refuse for a class that is no key: they remember their answers.

    Of such a class only its true bases count.
    """
    if type(kind) is type or is_key(kind):
        return issubclass(kind, bases)
    every = bases if isinstance(bases, tuple) else (bases,)
    return any(cls is base for cls in _mro(kind) for base in every)


class TypeCache(weakref.WeakKeyDictionary[type, Value]):
    """Answers by class, for as long as the class lives; one that cannot be a key is asked anew each time."""

    data: dict[weakref.ref[type], Value]

    def get(self, kind: type, default: Any = None) -> Any:  # Value, or the default
        """Return what is known of a class."""
        if type(kind) is type or is_key(kind):
            return self.data.get(weakref.ref(kind), default)
        return default

    def __getitem__(self, kind: type) -> Value:
        if type(kind) is type or is_key(kind):
            return self.data[weakref.ref(kind)]
        raise KeyError

    def __setitem__(self, kind: type, value: Value) -> None:
        if type(kind) is type or is_key(kind):
            super().__setitem__(kind, value)
