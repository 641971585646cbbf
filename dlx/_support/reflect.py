"""Safe inspection of foreign exceptions, values and classes, any of which may raise when inspected.

A failing repr never hides the original error. Only the first line of a message is shown, without library paths; the
rest is often C++ frames. Interrupts and `MemoryError` propagate.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, TypeVar

from dlx._support.module import set_module
from dlx.errors import ConversionError, DlxError, class_name, safe_repr, truncate

__all__ = [
    "MAX_MESSAGE", "TypeCache", "class_name", "derives", "exception_text", "find_in", "first_line",
    "foreign_error", "foreign_errors", "is_key", "message_of", "module_of", "packages", "packages_of",
    "safe_repr", "truncate", "type_name",
]  # fmt: skip

MAX_MESSAGE = 1000
"""Characters of a foreign message that dlx quotes; the `__cause__` has the whole message."""

_PART = r"[^/\s:'\"()<>,]+"
_FOLDERS = re.compile(
    rf"(?<![\w./])(?:[A-Za-z]:)?/(?:(?:{_PART}/)*(?:site|dist)-packages/"
    rf"|(?:{_PART}/)+(?={_PART}\.(?:so|dylib|dll|pyd|py|pyx|c|cc|cpp|cu|cuh|h|hpp|rs)\b))"
)
"""The folders of a library or a source file."""

Value = TypeVar("Value")

# Descriptors of `type`, since a metaclass may override these, or raise.
_qualname = type.__dict__["__qualname__"].__get__
_mro = type.__dict__["__mro__"].__get__
_module = type.__dict__["__module__"].__get__


# ---- exceptions and values -------------------------------------------------------------------------------------------


def first_line(text: str) -> str:
    """Return the first non-blank line of a message, without the folders of libraries."""
    line = str.lstrip(text).partition("\n")[0].rstrip()
    return _FOLDERS.sub("", line) if "/" in line else line


def message_of(error: BaseException, most: int = MAX_MESSAGE) -> str:
    """Return the first line of an exception's message, truncated."""
    try:
        return truncate(first_line(str(error)), most)
    except MemoryError:
        raise
    except Exception as failure:
        return f"its message cannot be shown ({class_name(type(failure))})"


def find_in(error: BaseException, pattern: str) -> str:
    """Return the first group of a pattern in the whole message of an exception; empty without a match."""
    try:
        found = re.search(pattern, str(error))
    except MemoryError:
        raise
    except Exception:  # its message cannot be shown
        return ""
    return found[1] if found else ""


def exception_text(error: BaseException, most: int = MAX_MESSAGE) -> str:
    """Return the class and message of an exception for use in a sentence."""
    name, message = class_name(type(error)), message_of(error, most)
    return f"{name}: {message}" if message else name


def foreign_error(what: str, cause: Exception | None, kind: type[DlxError] = ConversionError, **parts: Any) -> DlxError:
    """Return an error of dlx for a foreign exception, whose text ends the sentence `what` (``"torch failed:"``).

    The cause is None for a failure without an exception. A `MemoryError` is raised again unchanged.
    """
    if isinstance(cause, MemoryError):
        try:
            raise cause
        finally:
            del cause  # break the cycle with this frame
    text = cause and f"{class_name(type(cause))}: {message_of(cause) or 'without a message'}"
    error = kind(f"{what} {text or 'without a reason'}", **parts)
    error.__cause__ = cause
    return error


class foreign_errors:  # noqa: N801
    """A context that turns exceptions of foreign code into errors of dlx, and completes errors of dlx."""

    def __init__(self, what: str, kind: type[DlxError] = ConversionError, **parts: Any) -> None:
        self._what, self._kind, self._parts = what, kind, parts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, DlxError):
            error.complete(**self._parts)
        elif isinstance(error, Exception) and not isinstance(error, MemoryError):
            raise foreign_error(self._what, error, self._kind, **self._parts) from error


# ---- classes ---------------------------------------------------------------------------------------------------------


def module_of(kind: type) -> str:
    """Return the name of a class's module; empty if it is unusable."""
    try:
        module = _module(kind)
        if type(module) is not str and class_name(type(module)) == "pybind11_static_property":  # DALI renames classes
            module = module.__get__(kind, kind)
    except (AttributeError, TypeError):
        return ""
    return module if type(module) is str else ""


def packages(module: str) -> Iterator[str]:
    """Yield a module's root package, then each package below it, since a framework may be in a namespace package."""
    return accumulate(module.split("."), "{}.{}".format)


def packages_of(kind: type) -> frozenset[str]:
    """Return the packages of a class and its bases, with all parent packages."""
    return frozenset(each for cls in kind.__mro__ if cls is not object for each in packages(module_of(cls)))


@set_module("dlx.adapter")
def type_name(kind: type) -> str:
    """Return a type's name as a user writes it: ``"numpy.ndarray"``, ``"bytes"``."""
    module, name = module_of(kind), str(_qualname(kind))
    return name if module in ("", "builtins") else f"{module}.{name}"


def is_key(kind: type) -> bool:
    """Return whether a class can be a key: it equals only itself, and no code of its metaclass runs."""
    meta = type(kind)
    return meta is type or (meta.__hash__ is type.__hash__ and meta.__eq__ is type.__eq__)


def derives(kind: type, bases: type | tuple[type, ...]) -> bool:
    """Return `issubclass(kind, bases)`; if `kind` is not a key, only by its MRO: abstract base classes refuse it."""
    if is_key(kind):
        return issubclass(kind, bases)
    every = bases if isinstance(bases, tuple) else (bases,)
    return any(cls is base for cls in _mro(kind) for base in every)


class TypeCache(dict["weakref.ref[type] | None", Value]):
    """Values by weak reference to a class; they live as long as the class."""

    def keep(self, kind: type, value: Value) -> Value:
        """Return the value, and keep it if the class `is_key`."""
        if is_key(kind):
            self[weakref.ref(kind, self._drop)] = value
        return value

    def find(self, kind: type) -> Value | None:
        """Return the value of a class, or None."""
        return self.get(weakref.ref(kind)) if type(kind) is type or is_key(kind) else None

    @property
    def _drop(self) -> Any:
        """Callback for a deleted class; it does not keep the cache alive."""
        cache = weakref.ref(self)

        def drop(dead: weakref.ref[type]) -> None:
            values = cache()
            if values is not None:
                values.pop(dead, None)

        return drop
