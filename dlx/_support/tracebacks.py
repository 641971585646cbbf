"""Hide dlx's internal frames in tracebacks; name the function that was called in errors."""

from __future__ import annotations

from types import TracebackType

from dlx.errors import DlxError

__all__ = ["REFUSALS", "name_action", "shorten"]

REFUSALS = (DlxError, ExceptionGroup, OSError)
"""Errors whose message says all; any other exception may be a fault of dlx, and keeps its frames."""


def shorten(error: BaseException, *, own: bool = True) -> None:
    """Drop dlx's frames from a traceback, except for the outermost and the innermost one; causes keep theirs.

    The function that caught the error calls this and passes the error on by a bare ``raise``. `own` keeps its frame.
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


def name_action(error: BaseException, action: str) -> None:
    """Note the called function in an error; of nested calls the outermost one is noted last."""
    if isinstance(error, DlxError):
        error.action = action
    elif isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            name_action(each, action)
