"""How a check says that a promise is broken, or that it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlx._support.module import set_module
from dlx._support.reflect import exception_text

__all__ = ["Broken", "NotApplicable", "attempt", "must", "error_line"]


@set_module("dlx.testing")
class Broken(AssertionError):
    """A promise is broken; the text says what was seen."""


@set_module("dlx.testing")
class NotApplicable(Exception):
    """A subject has nothing that the promise is about; the text says what is missing."""


def must(kept: Any, seen: str) -> None:
    """Raise `Broken` with what was seen, unless the promise is kept."""
    if not kept:
        raise Broken(seen)


def attempt(do: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
    """Call a library; return (result, None), or (None, what it raised)."""
    try:
        return do(*args, **keywords), None
    except (KeyboardInterrupt, SystemExit, NotApplicable, Broken):
        raise
    except BaseException as error:  # jax and pyo3 have errors of their own kind
        return None, error.with_traceback(None)


def error_line(error: BaseException | None) -> str:
    """Return an exception in one line."""
    return "nothing" if error is None else " ".join(exception_text(error, 160).split())
