"""`public`, `shorten`: of dlx's own frames a traceback shows where dlx was called, and where the error was raised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from dlx._core.keywords import check_names
from dlx.errors import DlxError

__all__ = ["REFUSALS", "public", "shorten"]

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


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that says which keyword was meant, and whose refusals show few frames of dlx."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*args, **keywords)
        except Exception as error:
            if not _without_caller(error) and keywords and isinstance(error, TypeError):
                check_names(function, keywords)
            raise

    return call


def _without_caller(error: Exception) -> bool:
    """Drop the frame of the caller from a traceback, and shorten that of a refusal; False where there is no other.

    The caller must hold no traceback of its own: a cycle through its frame would keep all that the frames hold.
    """
    own = error.__traceback__
    if own is None or own.tb_next is None:
        return False
    error.__traceback__ = own.tb_next
    if isinstance(error, REFUSALS):
        shorten(error)
    return True
