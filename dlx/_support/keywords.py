"""The error for a misspelt keyword, which names the one that was meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlx.errors import did_you_mean

__all__ = ["UNCHANGED", "check_names"]

UNCHANGED = "A conversion changes no dtype: change it in the framework, before or after"


def check_names(function: Any, names: Iterable[str]) -> None:
    """Raise a TypeError for a name that is like a keyword of a function; Python 3.13 itself does so."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in names:
        if name in known:
            continue
        if meant := f"{UNCHANGED}." if name == "dtype" else did_you_mean(name, known):
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {meant}") from None
