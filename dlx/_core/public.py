"""`public`: wrap a public function in C, so that its errors name it and hide dlx's internal frames."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from dlx._core import native
from dlx._support.keywords import check_names
from dlx._support.module import set_module
from dlx._support.tracebacks import REFUSALS, name_action, shorten

P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T], fast: Any = None) -> Callable[P, T]:
    """Wrap a public function in C: suggest names for wrong keywords, and hide dlx's frames in its errors."""
    set_module("dlx")(function)
    # Python 3.14 evaluates annotations late and does not copy them by name; ours are strings.
    attributes = dict.fromkeys([*functools.WRAPPER_ASSIGNMENTS, "__annotations__"])
    fast = fast or native.FastPathFunction(function, None, None)
    return functools.update_wrapper(fast, function, assigned=tuple(attributes))


def _complete(function: Any, names: Iterable[str] | None, error: Exception) -> None:
    """Name the function in an error and shorten its traceback; suggest a keyword for an invalid call."""
    if isinstance(error, REFUSALS):
        code = function.__code__
        name_action(error, code.co_name, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        shorten(error)
    elif names and isinstance(error, TypeError) and error.__traceback__ is None:  # raised before the function began
        check_names(function, names)


native.register(refused=_complete)
