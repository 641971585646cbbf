"""Keywords that a function does not have: the error says which one was meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlx.errors import did_you_mean

__all__ = ["UNCHANGED", "check_names"]

UNCHANGED = "A conversion changes no dtype: change it in the framework, before or after"


def check_names(function: Any, names: Iterable[str]) -> None:
    """Raise the TypeError for a keyword that a function does not have, with the one that was meant.

    Python 3.13 says that itself, of functions in Python.

    Raises
    ------
    TypeError
        If there is such a keyword, and one that is like it.
    """
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in names:
        if name in known:
            continue
        if meant := f"{UNCHANGED}." if name == "dtype" else did_you_mean(name, known):
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}. {meant}") from None
