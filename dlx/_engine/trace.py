"""`dlx.trace` records conversions by the caller's line; `DLX_WARN_COPIES` warns of large copies.

The fast path knows no traces: while a trace is active, no pair is learned, and all conversions take the Python path.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dlx._core import native
from dlx._support.display import Shown, columns, table
from dlx._support.locks import lock_of
from dlx._support.module import set_module
from dlx._support.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

    from dlx._engine.plan import Step


@set_module("dlx")
class TraceRecord(NamedTuple):
    """Equal conversions by one line of the caller's code.

    Attributes
    ----------
    file, line, function
        Where the caller called dlx.
    source
        Description of the array; each shape has its own record.
    target
        The target framework.
    outcome
        ``"same"``, ``"shared"``, ``"copied"``, or ``"moved"`` to another device.
    why
        The reasons of all steps.
    times
        Number of conversions.
    nbytes
        Bytes copied or moved by all of them.
    """

    file: str
    line: int
    function: str
    source: str
    target: str
    outcome: str
    why: tuple[str, ...]
    times: int
    nbytes: int


@set_module("dlx")
class Trace(Shown):
    """Records of conversions in all threads while this context is active.

    It prints as a table, also in notebooks. Programs read `records` or `json`.

    Examples
    --------
    >>> import dlx
    >>> with dlx.trace() as seen:
    ...     tensor = dlx.convert(b"abc", to="dlx", copy=True)
    >>> [(record.outcome, record.nbytes) for record in seen.records]
    [('copied', 3)]
    """

    def __init__(self) -> None:
        self._lock: threading.RLock | None = None
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._nbytes: Counter[tuple[Any, ...]] = Counter()

    def __enter__(self) -> Trace:
        """Begin to record. A trace that is entered again continues its counts.

        Raises
        ------
        RuntimeError
            If the trace is active.
        """
        _change(self, entered=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _change(self, entered=False)

    def note(self, key: tuple[Any, ...], nbytes: int) -> None:
        """Count one conversion."""
        with lock_of(self):
            self._counts[key] += 1
            self._nbytes[key] += nbytes

    @property
    def records(self) -> list[TraceRecord]:
        """Records, sorted by bytes in descending order."""
        with lock_of(self):
            found = [TraceRecord(*(*key, times, self._nbytes[key])) for key, times in self._counts.items()]
        return sorted(found, key=lambda record: (-record.nbytes, record.file, record.line))

    @property
    def nbytes(self) -> int:
        """Total number of bytes copied and moved."""
        return sum(record.nbytes for record in self.records)

    def json(self) -> str:
        """Return the records as JSON: a list of objects with the fields of `TraceRecord`."""
        import json

        return json.dumps([record._asdict() for record in self.records], indent=2)

    def _head(self) -> str:
        times = sum(record.times for record in self.records)
        return f"{amount(self.nbytes)} copied or moved by {times} conversion{'s' * (times != 1)}"

    def __str__(self) -> str:
        return "\n".join([self._head(), *columns([self._row(record) for record in self.records], indent="")])

    __repr__ = __str__

    def _table(self) -> str:
        names = ("where", "times", "outcome", "bytes", "what", "why")
        return table(self._head(), names, [self._row(record) for record in self.records])

    @staticmethod
    def _row(record: TraceRecord) -> tuple[str, ...]:
        from pathlib import Path

        where = f"{Path(record.file).name}:{record.line} {record.function}"
        size = amount(record.nbytes) if record.nbytes else ""
        what = f"{record.source} -> {record.target}"
        return where, f"{record.times} x", record.outcome, size, what, "; ".join(record.why)


@set_module("dlx")
def trace() -> Trace:
    """Return a context that records what dlx shares, copies and moves, by the calling line of code.

    Returns
    -------
    Trace
        Enter it by ``with``. It prints as a table; `Trace.records` are its rows.

    Notes
    -----
    All threads are recorded. Conversions are slower in the context, because they do not use the fast path in C.

    Examples
    --------
    >>> import dlx
    >>> with dlx.trace() as seen:
    ...     tensor = dlx.convert(bytearray(2), to="dlx")
    >>> seen.records[0].outcome
    'shared'
    """
    return Trace()


class _Warner:
    """Warns of copies of at least `least` bytes, once for each line of the caller's code."""

    def __init__(self, least: int) -> None:
        self.least, self._warned = least, set[tuple[str, int]]()

    def note(self, key: tuple[Any, ...], nbytes: int) -> None:
        """Warn of a large copy, once per line."""
        file, line, _, source, target, outcome, why = key
        if outcome not in ("copied", "moved") or nbytes < self.least or (file, line) in self._warned:
            return
        import warnings

        self._warned.add((file, line))
        text = f"dlx {outcome} {amount(nbytes)} here: {source} -> {target}: {'; '.join(why)}"
        warnings.warn_explicit(text, UserWarning, file, line)


observers: list[Any] = []
"""Active traces and warners; the list is replaced, never mutated."""


class _Change:
    """Holder of the lock of `observers`."""

    _lock: threading.RLock | None = None


_changing = _Change()


def _change(trace: Trace, *, entered: bool) -> None:
    global observers
    with lock_of(_changing):
        others = [each for each in observers if each is not trace]
        if entered and len(others) < len(observers):
            raise RuntimeError("cannot enter this trace: it is active already. Make another one: dlx.trace().")
        observers = [*others, trace] if entered else others
    native.routes_clear()


def record(source: Any, target: str, outcome: str, steps: Iterable[Step], nbytes: int) -> None:
    """Pass one conversion to the observers, unless an adapter makes it as a part of another one."""
    frame, is_part = _caller()
    if is_part:
        return
    site = ("<unknown>", 0, "") if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    if outcome == "copied" and any(step.do == "move" for step in steps):
        outcome = "moved"
    key = (*site, str(source), target, outcome, tuple(step.reason() for step in steps))
    for observer in observers:
        observer.note(key, nbytes)


def _caller() -> tuple[FrameType | None, bool]:
    """Return the nearest frame outside of dlx and its adapters, and whether dlx has called an adapter after it."""
    frame: FrameType | None = sys._getframe(1)
    roots = []
    while frame is not None:
        roots.append(frame.f_globals.get("__name__", "").partition(".")[0])
        if roots[-1] not in ("dlx", "dlx_adapters"):
            break
        frame = frame.f_back
    return frame, "dlx_adapters" in roots and "dlx" in roots[roots.index("dlx_adapters") :]


def _threshold(text: str) -> int:
    """Parse a number of bytes: ``"1MiB"``, ``"64k"``, ``"1000"``."""
    import re

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"DLX_WARN_COPIES={text!r} is not a number of bytes. Set it to a number, such as 1MiB.")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


if os.environ.get("DLX_WARN_COPIES", "0") not in ("", "0"):
    observers = [_Warner(_threshold(os.environ["DLX_WARN_COPIES"]))]
