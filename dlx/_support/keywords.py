"""Suggest the right name in the error for a misspelt keyword."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlx.errors import did_you_mean

__all__ = ["UNCHANGED", "check_names"]

UNCHANGED = "Pass a dtype as dtype=, to convert, plan, stack or open"


def check_names(function: Any, names: Iterable[str]) -> None:
    """Raise a TypeError for a name similar to a keyword of a function, as Python 3.13 does itself."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in names:
        if name in known:
            continue
        if meant := f"{UNCHANGED}." if name == "dtype" else did_you_mean(name, known):
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {meant}") from None
