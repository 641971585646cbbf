"""`public`, `shorten`: of dlx's own frames a traceback shows where dlx was called, and where the error was raised."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from dlx._core import native
from dlx._core.keywords import check_names
from dlx.errors import DlxError

__all__ = ["REFUSALS", "name_action", "public", "shorten"]

P = ParamSpec("P")
T = TypeVar("T")

REFUSALS = (DlxError, ExceptionGroup, OSError)
"""What says all in its message; any other exception may be a fault of dlx, and keeps its frames."""


def shorten(error: BaseException, *, own: bool = True) -> None:
    """Drop dlx's frames from a traceback, but for the outermost one and the innermost one; others' frames stay.

    Causes keep theirs. It is called where an error is passed on by a bare ``raise``.

    Parameters
    ----------
    error
        It was caught by the function that calls this.
    own
        Whether the frame of that function stays.
    """
    first = error.__traceback__
    if first is None or first.tb_next is None:
        return
    frames: list[tuple[TracebackType, bool]] = []
    innermost: TracebackType | None = None
    frame: TracebackType | None = first.tb_next
    while frame is not None:
        ours = _is_ours(frame)
        if ours:
            innermost = frame
        frames.append((frame, ours))
        frame = frame.tb_next
    kept = [frame for frame, ours in frames if not ours or frame is innermost]
    for one, following in zip(kept, [*kept[1:], None], strict=True):
        one.tb_next = following
    if own:
        first.tb_next = kept[0]
    else:
        error.__traceback__ = kept[0]
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            if isinstance(each, REFUSALS):
                shorten(each, own=False)


def _is_ours(frame: TracebackType) -> bool:
    name = frame.tb_frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] == "dlx"


def public(function: Callable[P, T], learn: Any = None, failed: Any = None, **options: Any) -> Callable[P, T]:
    """Return a function in C around `function`: it says which keyword was meant, and refusals show few frames of dlx.

    Parameters
    ----------
    function
        The Python function.
    learn, failed, **options
        Of `FastPathFunction`, of one that answers in C what it can.
    """
    # From Python 3.14 on annotations are evaluated late and not copied by name; ours are plain strings.
    copied = dict.fromkeys([*functools.WRAPPER_ASSIGNMENTS, "__annotations__"])
    fast = native.FastPathFunction(function, learn, failed, **options)
    return functools.update_wrapper(fast, function, assigned=tuple(copied))


def _complete(function: Any, names: Iterable[str] | None, error: Exception) -> None:
    """Name the function in a refusal and shorten its traceback; say of a wrong call which keyword was meant."""
    if isinstance(error, REFUSALS):
        name_action(error, function.__name__)
        shorten(error)
    elif names and isinstance(error, TypeError) and error.__traceback__ is None:  # the function did not begin
        check_names(function, names)


def name_action(error: BaseException, action: str) -> None:
    """Note which function was called; of nested calls the outermost one is noted last."""
    if isinstance(error, DlxError):
        error.action = action
    elif isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            name_action(each, action)


native.set_refused(_complete)
