"""What a user sees: tables drawn by rich on a terminal, plain aligned text in a pipe, JSON where asked for.

Text that comes from files is never taken for markup, nor for control characters.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar
from unicodedata import combining, east_asian_width

from dlx._support.reflect import message_of
from dlx._support.stdout import complain, head
from dlx._support.text import one_line

__all__ = ["OUTCOMES", "SHORT", "Cell", "Screen", "failure"]

SLOW = 1.0  # seconds, from which on a bar shows how far a command is
SHORT = 20  # characters: a column of nothing longer is not wrapped

T = TypeVar("T")

Cell = str | tuple[str, str]
"""Text, or text with one of the styles below."""

_STYLES = {  # ANSI names, which a terminal draws readable on its own ground, dark or light
    "good": "green",
    "warn": "yellow",
    "bad": "red",
    "quiet": "dim",
    "name": "bold",
    "": "",
}
OUTCOMES = {"same": "good", "shared": "good", "viewed": "good", "copied": "warn", "refused": "bad", "unknown": "quiet"}


class Screen:
    """One command's output, on stdout if no file is named; under `as_json` only `document` prints.

    `console` is a rich console to draw on, for pictures of the screen.
    """

    def __init__(self, command: str, *, as_json: bool = False, file: TextIO | None = None, console: Any = None) -> None:
        self.command = command
        self.as_json = as_json
        self._file = file or sys.stdout
        if file is None and hasattr(self._file, "reconfigure"):
            self._file.reconfigure(errors="backslashreplace")  # a C locale cannot say everything
        self._console = console if console is not None else self._terminal()

    def _terminal(self) -> Any:
        if self.as_json or not (self._file.isatty() or os.environ.get("FORCE_COLOR")):
            return None
        from rich.console import Console

        console = Console(file=self._file, width=self._columns(), highlight=False, markup=False, emoji=False)
        console.on_broken_pipe = _raise  # type: ignore[method-assign]  # coloured output in a pipe: see `main`
        return console

    def _columns(self) -> int | None:
        """Return how wide the terminal is that is written to: rich asks descriptors 0 to 2, which may be others."""
        if os.environ.get("COLUMNS", "").isdecimal():
            return None  # as the user says, and rich knows
        try:
            return os.get_terminal_size(self._file.fileno()).columns or None
        except (AttributeError, OSError, ValueError):
            return None

    @property
    def plain(self) -> bool:
        """Whether rich does not draw."""
        return self._console is None

    def document(self, data: dict[str, Any], errors: Sequence[Exception] = ()) -> None:
        """Print the command's result as JSON, if that was asked for; errors are printed on stderr, in any case."""
        said = [failure(error) for error in errors]
        if self.as_json:
            named = {"errors": said} if said else {}
            print(json.dumps({**head(self.command), **data, **named}, indent=2, default=str), file=self._file)
        self.flush()
        for each in said:
            complain(self.command, each["message"])

    def line(self, *cells: Cell) -> None:
        """Print one line of text."""
        if self.as_json:
            return
        if self._console is None:
            self._print("".join(_text(cell) for cell in cells))
        else:
            self._console.print(_rich(cells), soft_wrap=False)

    def block(self, text: str) -> None:
        """Print lines as they are, neither wrapped nor styled."""
        if not self.as_json:
            self._print(text) if self._console is None else self._console.print(text, soft_wrap=True)

    def heading(self, text: str, rest: str = "") -> None:
        """Print a line that begins a part."""
        self.line((one_line(text), "name"), *([("  " + one_line(rest), "quiet")] if rest else []))

    def facts(self, rows: Sequence[tuple[str, Cell]]) -> None:
        """Print names with their values."""
        if self.as_json or not rows:
            return
        if self._console is None:
            self._plain_table(["", ""], [[f"  {_text(name)}", value] for name, value in rows])
            return
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(_rich(["  ", name]), _rich([value]))
        self._console.print(table)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table without its empty columns, but always with the first.

        A column whose name begins with ``>`` is aligned to the right; one whose name begins with ``/`` holds names with
        dots or brackets, and is broken there.
        """
        if self.as_json or not rows:
            return
        kept = [i for i in range(len(columns)) if i == 0 or any(_text(row[i]) for row in rows)]
        columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
        if self._console is None:
            self._plain_table(columns, rows)
            return
        from rich import box
        from rich.table import Table

        widths = _widths(columns, rows)
        between = len(columns) - 1
        least = [
            width if name[:1] == ">" or width <= SHORT else min(width, SHORT)
            for name, width in zip(columns, widths, strict=True)
        ]
        if sum(least) + between > self._console.width:
            self._stacked(columns, rows)
            return
        fitting = [gap for gap in (2, 1, 0) if sum(widths) + between * (gap + 1) <= self._console.width]
        gap = fitting[0] if fitting else 1  # beside one column that the frame has
        table = Table(
            box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", pad_edge=False, show_edge=False,
            padding=(0, gap, 0, 0),
        )  # fmt: skip
        for name, width, narrowest in zip(columns, widths, least, strict=True):
            justify: Any = "right" if name[:1] == ">" else "left"
            table.add_column(
                _bare(name), justify=justify, no_wrap=narrowest == width, overflow="fold", min_width=narrowest
            )
        for row in rows:
            pairs = zip(row, columns, strict=True)
            table.add_row(*(_Name(_text(cell)) if name[:1] == "/" else _rich([cell]) for cell, name in pairs))
        self._console.print(table)

    def _stacked(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table that has no room side by side: a line for each row's first cell, the others named below it."""
        from rich.padding import Padding

        for first, *others in rows:
            self._console.print(_rich([first]), soft_wrap=False, overflow="fold")
            named = ((_bare(name), each) for name, each in zip(columns[1:], others, strict=True) if _text(each))
            cells: list[Cell] = []
            for name, each in named:
                cells += [("  " * bool(cells) + name + " ", "quiet"), each]
            self._console.print(Padding(_rich(cells), (0, 0, 0, 2)))

    def _plain_table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        names = [[*map(_bare, columns)]] if any(columns) else []
        lines = [*names, *([_text(cell) for cell in row] for row in rows)]
        widths = _widths(columns, rows)
        for line in lines:
            pairs = zip(line, widths, columns, strict=True)
            cells = (_padded(text, width, right=name[:1] == ">") for text, width, name in pairs)
            self._print("  ".join(cells).rstrip())

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a progress message on the terminal's stderr."""
        if not self._is_watched():
            yield
            return
        from rich.console import Console

        with Console(stderr=True, markup=False).status(one_line(text)):
            yield

    def progress(self, items: Iterable[T], text: str, total: int) -> Iterable[T]:
        """Give items one by one, with a bar on the terminal's stderr; it is wiped out in the end."""
        if not self._is_watched() or total < 2:
            return items
        from rich.console import Console
        from rich.progress import track

        return track(items, one_line(text), total, console=Console(stderr=True, markup=False), transient=True)

    @contextlib.contextmanager
    def bytes_done(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Give a function that is told how many bytes were done: a bar on the terminal's stderr, from `SLOW` on."""
        if not self._is_watched():
            yield lambda _: None
            return
        begun, done = time.monotonic(), 0
        bar: Any = None
        task: Any = None

        def advance(count: int) -> None:
            nonlocal done, bar, task
            done += count
            if bar is None and time.monotonic() - begun >= SLOW:
                from rich.console import Console
                from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

                columns = (
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    DownloadColumn(True),
                    TimeRemainingColumn(),
                )
                bar = Progress(*columns, console=Console(stderr=True, markup=False), transient=True)
                task = bar.add_task(one_line(text), total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)

        try:
            yield advance
        finally:
            if bar is not None:
                bar.stop()

    def _is_watched(self) -> bool:
        return not self.as_json and sys.stderr.isatty()

    def flush(self) -> None:
        """Flush, so that a closed pipe is noticed here."""
        self._file.flush()

    def _print(self, text: str) -> None:
        print(text, file=self._file)


def failure(error: Exception) -> dict[str, str]:
    """Return the class and the text of an error, on one line."""
    return {"kind": type(error).__name__, "message": one_line(message_of(error, 1400), 1500)}


def _widths(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
    return [max(len(_bare(name)), *(_width(_text(row[i])) for row in rows)) for i, name in enumerate(columns)]


def _width(text: str) -> int:
    """Return the columns of a terminal that a text takes: those of East Asia take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def _padded(text: str, width: int, *, right: bool = False) -> str:
    gap = " " * (width - _width(text))
    return gap + text if right else text + gap


def _bare(column: str) -> str:
    return column.lstrip(">/")


def _raise() -> None:
    raise  # rich calls this while it handles a BrokenPipeError


class _Name:
    """A name with dots and brackets, as rich draws it: broken behind them where it is too long, not in a word."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement(min(len(self.text), SHORT), len(self.text))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        indent = len(self.text) - len(self.text.lstrip())
        line, lines = "", []
        for part in re.findall(r".+?(?:[./\]]|$)", self.text):
            if line.strip() and len(line) + len(part) > options.max_width:
                lines.append(line)
                line = " " * (indent + 2)
            line += part
        yield Text("\n".join([*lines, line]), overflow="fold")


def _text(cell: Cell) -> str:
    return one_line(cell if isinstance(cell, str) else cell[0])


def _rich(cells: Sequence[Cell]) -> Any:
    from rich.text import Text

    return Text.assemble(*((_text(cell), "" if isinstance(cell, str) else _STYLES[cell[1]]) for cell in cells))
