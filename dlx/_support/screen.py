"""Print a command's result: tables that fit the terminal, aligned text in a pipe, or JSON.

Text from files is never interpreted as markup or control characters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar
from unicodedata import combining, east_asian_width

from dlx._support.reflect import message_of
from dlx._support.stdout import complain, has_colors, head
from dlx._support.text import one_line

__all__ = ["OUTCOMES", "SHORT", "Cell", "Screen"]

SLOW = 1.0  # seconds until a progress bar appears
SHORT = 20  # characters; columns of shorter texts are not wrapped

T = TypeVar("T")

Cell = str | tuple[str, str]
"""Text, or text with one of the styles below."""

_Span = tuple[str, str]  # text on one line, and its style

_STYLES = {"good": 32, "warn": 33, "bad": 31, "quiet": 2, "name": 1}  # ANSI, for dark and light
OUTCOMES = {"same": "good", "shared": "good", "viewed": "good", "copied": "warn", "refused": "bad", "unknown": "quiet"}


class Screen:
    """One command's output, on stdout by default; with `as_json` only `document` prints.

    `width` draws as on a terminal with that many columns; None: the width of the file, if it is a terminal.
    """

    def __init__(
        self, command: str, *, as_json: bool = False, file: TextIO | None = None, width: int | None = None
    ) -> None:
        self.command = command
        self.as_json = as_json
        self._file = file or sys.stdout
        if file is None and hasattr(self._file, "reconfigure"):
            self._file.reconfigure(errors="backslashreplace")  # a C locale lacks most characters
        self._has_output = False
        self._width = width or _columns(self._file)
        self._is_colored = self._width is not None and has_colors(is_terminal=True)

    @property
    def plain(self) -> bool:
        """Whether the output has no colours and no wrapping, as in a pipe."""
        return self._width is None

    def document(self, data: dict[str, Any], errors: Sequence[Exception] = ()) -> None:
        """Print the result as JSON if `as_json`, and the errors on stderr."""
        shown = [{"kind": type(error).__name__, "message": one_line(message_of(error, 1400), 1500)} for error in errors]
        if self.as_json:
            named = {"errors": shown} if shown else {}
            import json

            print(json.dumps({**head(self.command), **data, **named}, indent=2, default=str), file=self._file)
        self.flush()
        for each in shown:
            complain(self.command, each["message"])

    def line(self, *cells: Cell) -> None:
        """Print one line of text."""
        for line in _fold(map(_style, cells), self._width):
            self._print(line)

    def block(self, text: str) -> None:
        """Print lines unchanged."""
        self._print([(text, "")])

    def heading(self, text: str, rest: str = "") -> None:
        """Print the title of a section, after an empty line unless it is the first output."""
        if self._has_output:
            self.line("")
        self.line((text, "name"), *([("  ", ""), (rest, "quiet")] if rest else []))

    def facts(self, rows: Sequence[tuple[str, Cell]]) -> None:
        """Print names with their values."""
        self._rows(["", ""], [[(f"  {one_line(name)}", "quiet"), _style(value)] for name, value in rows])

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table without its empty columns, except for the first.

        Columns named ``>...`` are aligned to the right; columns named ``/...`` are broken at dots and brackets. A
        narrow terminal shows each row as its first cell, with the other cells and their names below.
        """
        styled = [[*map(_style, row)] for row in rows]
        kept = [i for i in range(len(columns)) if i == 0 or any(row[i][0] for row in styled)]
        if styled:
            self._rows([columns[i] for i in kept], [[row[i] for i in kept] for row in styled])

    def _rows(self, columns: Sequence[str], rows: Sequence[Sequence[_Span]]) -> None:
        """Print rows below the names of their columns, if any."""
        names = [column.lstrip(">/") for column in columns]
        widths = [max(map(_width, [name, *(row[i][0] for row in rows)])) for i, name in enumerate(names)]
        gaps = (3, 2, 1) if self._width is not None and any(names) else ()
        gap = next((each for each in gaps if sum(widths) + each * (len(names) - 1) <= (self._width or 0)), 2)
        if not self._fit(columns, widths, gap):
            self._print_stacked(names, rows)
            return
        if any(names):
            self._row(columns, [(name, "quiet") for name in names], widths, gap)
            if self._width is not None:
                self._print([("─" * (sum(widths) + gap * (len(names) - 1)), "quiet")])
        for row in rows:
            self._row(columns, row, widths, gap)

    def _fit(self, columns: Sequence[str], widths: list[int], gap: int) -> bool:
        """Shrink columns, widest first; return whether they fit the terminal."""
        too_much = 0 if self._width is None else sum(widths) + gap * (len(widths) - 1) - self._width
        least = [width if name[:1] == ">" else min(width, SHORT) for name, width in zip(columns, widths, strict=True)]
        if too_much > sum(widths) - sum(least):
            return False
        for _ in range(too_much):
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
        return True

    def _row(self, columns: Sequence[str], row: Sequence[_Span], widths: Sequence[int], gap: int) -> None:
        parts = [
            _fold([cell], self._width and width, is_name=column[:1] == "/")
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        for cells in itertools.zip_longest(*parts, fillvalue=[]):
            line: list[_Span] = []
            for column, cell, width in zip(columns, cells, widths, strict=True):
                room = [(" " * (width - sum(_width(text) for text, _ in cell)), "")]
                line += [*(room + cell if column[:1] == ">" else cell + room), (" " * gap, "")]
            self._print(line)

    def _print_stacked(self, names: Sequence[str], rows: Sequence[Sequence[_Span]]) -> None:
        for first, *others in rows:
            self.line(first)
            named = [pair for pair in zip(names[1:], others, strict=True) if pair[1][0]]
            spans = [span for name, cell in named for span in ((f"{name} ".lstrip(), "quiet"), cell, ("  ", ""))]
            for line in _fold(spans, self._width and self._width - 2):
                self._print([("  ", ""), *line])

    def _print(self, line: Sequence[_Span]) -> None:
        if self.as_json:
            return
        text = ""
        for style, group in itertools.groupby(line, key=lambda span: span[1]):
            part = "".join(part for part, _ in group)
            text += f"\x1b[{_STYLES[style]}m{part}\x1b[0m" if style and self._is_colored else part
        print(text.rstrip(" "), file=self._file)
        self._has_output = True

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a progress message on the terminal's stderr."""
        if not self._is_watched():
            yield
            return
        with _console().status(one_line(text)):
            yield

    def progress(self, items: Iterable[T], text: str, total: int) -> Iterable[T]:
        """Return the items, with a progress bar on the terminal's stderr while they are iterated."""
        if not self._is_watched() or total < 2:
            return items
        from rich.progress import track

        return track(items, one_line(text), total, console=_console(), transient=True)

    @contextlib.contextmanager
    def bytes_done(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes for a bar on the terminal's stderr, shown after `SLOW` seconds."""
        if not self._is_watched():
            yield lambda _: None
            return
        start, done = time.monotonic(), 0
        bar: Any = None

        def advance(count: int) -> None:
            nonlocal done, bar
            done += count
            if bar is None and time.monotonic() - start >= SLOW:
                from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

                label = TextColumn("{task.description}", markup=False)
                columns = (label, BarColumn(), DownloadColumn(True), TimeRemainingColumn())
                bar = Progress(*columns, console=_console(), transient=True)
                bar.add_task(one_line(text), total=total)
                bar.start()
            if bar is not None:
                bar.update(0, completed=done)  # its only task

        try:
            yield advance
        finally:
            if bar is not None:
                bar.stop()

    def _is_watched(self) -> bool:
        return not self.as_json and sys.stderr.isatty()

    def flush(self) -> None:
        """Flush the output, so that a closed pipe raises here."""
        self._file.flush()


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True, markup=False)


def _columns(file: TextIO) -> int | None:
    """Return the width of a terminal, None for a pipe."""
    if not (file.isatty() or os.environ.get("FORCE_COLOR")):
        return None
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or None
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


def _style(cell: Cell) -> _Span:
    """Return the text of a cell on one line, and its style."""
    text, style = (cell, "") if isinstance(cell, str) else cell
    return one_line(text), style


def _width(text: str) -> int:
    """Return the width of a text in terminal columns: two for East Asian characters, none for combining accents."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def _fold(cells: Iterable[_Span], width: int | None, *, is_name: bool = False) -> list[list[_Span]]:
    """Wrap text to a width between words; wrap a name after dots and brackets."""
    if width is None:
        return [[*cells]]
    lines: list[list[_Span]] = [[]]
    used = indent = 0
    for text, style in cells:
        if is_name:
            indent = len(text) - len(text.lstrip()) + 2
        for piece in re.findall(r".+?(?:[./\]]|$)" if is_name else r"\s*\S+\s*|\s+", text):
            while used + _width(piece.rstrip()) > width:
                if used <= indent:  # longer than a line
                    fitting = [end for end in range(1, len(piece)) if used + _width(piece[:end]) <= width] or [1]
                    lines[-1].append((piece[: fitting[-1]], style))
                    piece = piece[fitting[-1] :]
                lines[-1][-1] = (lines[-1][-1][0].rstrip(), lines[-1][-1][1])
                lines.append([(" " * indent, "")])
                used = indent
            lines[-1].append((piece, style))
            used += _width(piece)
    return lines
