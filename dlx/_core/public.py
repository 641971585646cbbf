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
    """Return a function of `dlx` in C around another: it names wrong keywords, and its refusals hide dlx's frames."""
    set_module("dlx")(function)
    # From Python 3.14 on annotations are evaluated late and not copied by name; ours are plain strings.
    copied = dict.fromkeys([*functools.WRAPPER_ASSIGNMENTS, "__annotations__"])
    fast = fast or native.FastPathFunction(function, None, None)
    return functools.update_wrapper(fast, function, assigned=tuple(copied))


def _complete(function: Any, names: Iterable[str] | None, error: Exception) -> None:
    """Name the function in a refusal and shorten its traceback; say of a wrong call which keyword was meant."""
    if isinstance(error, REFUSALS):
        name_action(error, function.__name__)
        shorten(error)
    elif names and isinstance(error, TypeError) and error.__traceback__ is None:  # the function did not begin
        check_names(function, names)


native.register(refused=_complete)
