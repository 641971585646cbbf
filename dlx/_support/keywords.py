"""Suggest the right name in the error for a misspelt keyword."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import CO_VARKEYWORDS
from typing import Any

from dlx.errors import did_you_mean

__all__ = ["UNCHANGED", "check_names"]

UNCHANGED = "Pass a dtype as dtype=, to convert, plan, stack or open"


def check_names(function: Any, names: Iterable[str]) -> None:
    """Raise a TypeError that suggests a keyword of the function for an unknown name, or lists them."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in names:
        if name in known:
            continue
        meant = f"{UNCHANGED}." if name == "dtype" else did_you_mean(name, known)
        options = known[code.co_argcount :]
        if options and not code.co_flags & CO_VARKEYWORDS:
            meant = meant or f"Use one of: {', '.join(options)}."
        if meant:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {meant}") from None
