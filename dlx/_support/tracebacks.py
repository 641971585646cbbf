"""Hide dlx's internal frames in tracebacks, and set the called function in errors."""

from __future__ import annotations

from collections.abc import Container
from types import TracebackType

from dlx.errors import DlxError

__all__ = ["REFUSALS", "name_action", "shorten"]

REFUSALS = (DlxError, ExceptionGroup, OSError)
"""Errors that need no internal frames; other exceptions may be bugs of dlx and keep them."""


def shorten(error: BaseException, *, own: bool = True) -> None:
    """Drop dlx's frames from a traceback, except for the outermost and the innermost one; causes keep theirs.

    The function that catches the error calls this and then a bare ``raise``. `own` keeps its frame.
    """
    first = error.__traceback__
    if first is None or first.tb_next is None:
        return
    frames: list[TracebackType] = []
    frame: TracebackType | None = first.tb_next
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    hidden = {*[frame for frame in frames if _is_ours(frame)][:-1]}
    kept = [frame for frame in frames if frame not in hidden]
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


def name_action(error: BaseException, action: str, parameters: Container[str] | None = None) -> None:
    """Set the called function in an error; the outermost of nested calls sets it last.

    If its `parameters` lack an option that the error suggests, the advice names `dlx.convert`.
    """
    if isinstance(error, DlxError):
        error.action = action
        if parameters is not None and not all(name in parameters for name, _ in error.option):
            error.complete(via="to dlx.convert(x, to=...) first")
    elif isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            name_action(each, action, parameters)
