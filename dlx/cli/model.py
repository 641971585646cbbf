"""What a source holds: one entry per array; tables of many, folded by their names and summed up."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.types import DType
from dlx._support.screen import Cell, Screen
from dlx._support.text import amount
from dlx.errors import DlxError

MANY = 24  # with more entries names are folded
MAX_SHOWN = 60  # rows

_REPEATED = re.compile(r".*#['\"]?\]?\.?")  # up to the last number that differs: model.layers.#.


class BadInput(Exception):
    """The input cannot be read: one line for the user, exit status 2."""


@dataclass(frozen=True)
class Entry:
    """One array of a source, known from a header or from the object itself."""

    path: str  # its name inside the source; empty if the source is one array
    dtype: DType | None  # None if DLPack has none
    dtype_name: str  # the word of the file or the framework
    shape: tuple[int, ...] | None  # None if unknown
    nbytes: int | None  # of all elements; None if unknown
    device: str = "file"  # else "cpu", "cuda:0"
    order: str = ""  # "C", "F", or empty if neither or unknown
    offset: int | None = None  # of the data in the file, in bytes; None if it is stored in another form
    swapped: bool = False  # whether its bytes are in the other order
    refused: str = ""  # why it is no array outside of its own framework
    notes: tuple[str, ...] = ()
    info: ArrayInfo | None = None  # by `dlx.describe`
    obj: Any = None  # the object that is planned; None for an abstract tensor, and in a header that is only listed
    error: DlxError | None = None  # if there is no object: the error that `dlx.convert` or `dlx.open` raises

    @property
    def shown_dtype(self) -> str:
        """Name of its dtype: DLPack's, else its own."""
        return self.dtype_name if self.dtype is None else self.dtype.name


@dataclass(frozen=True)
class Source:
    """One argument of the command line, read."""

    name: str  # as the user wrote it
    kind: str  # ".npy", ".safetensors", "object", "abstract" and so on
    entries: tuple[Entry, ...]  # its arrays, in order
    nbytes: int | None = None  # of the file; None for objects
    notes: tuple[str, ...] = ()  # how it was read, and what else it holds
    metadata: dict[str, str] = field(default_factory=dict)  # of a file

    @property
    def is_one(self) -> bool:
        """Whether it is one array, not a collection."""
        return len(self.entries) == 1 and not self.entries[0].path


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Return a shape as text."""
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def plural(number: int, word: str) -> str:
    """Return a number with the word that it counts, in the plural for several."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


@dataclass(frozen=True)
class Fold:
    """Entries whose names differ only in numbers."""

    path: str  # the name, each number that differs as ``#``
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int | None:
        """Bytes of all entries; None if those of one are unknown."""
        return nbytes_of(self.entries)


_NUMBER = re.compile(r"(?<![^\W_])\d+(?![^\W_])")  # a number that stands alone: layers.12.weight, [3], block_4


def fold(entries: Iterable[Entry]) -> list[Fold]:
    """Group entries with the same dtype, shape and device, and names that are alike but for numbers."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        key = (_NUMBER.sub("#", entry.path), entry.dtype_name, entry.shape, entry.device, entry.order, entry.refused)
        groups.setdefault(key, []).append(entry)
    return [Fold(_common_path(group), tuple(group)) for group in groups.values()]


def _common_path(group: list[Entry]) -> str:
    """Return the names as one, each number that differs as ``#``."""
    numbers = zip(*(_NUMBER.findall(entry.path) for entry in group), strict=True)
    same = [column[0] if len(set(column)) == 1 else "#" for column in numbers]
    parts = _NUMBER.split(group[0].path)
    return "".join(part + number for part, number in zip(parts, [*same, ""], strict=True))


def totals(entries: Iterable[Entry]) -> list[tuple[str, str, int, int | None]]:
    """Return (dtype, device, arrays, bytes or None) of each pair that occurs, most bytes first."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.shape is not None or not entry.refused:  # else it is no array at all
            groups.setdefault((entry.shown_dtype, entry.device), []).append(entry)
    rows = [(*key, len(group), nbytes_of(group)) for key, group in groups.items()]
    return sorted(rows, key=lambda row: -(row[3] or 0))


def nbytes_of(entries: Iterable[Any]) -> int | None:
    """Return the sum of ``.nbytes``; None if one is None."""
    sizes = [entry.nbytes for entry in entries]
    return None if None in sizes else sum(sizes)


# ---- tables of many arrays -------------------------------------------------------------------------------------------

Cells = Callable[[Fold], Sequence[Cell]]


def folds(entries: Sequence[Entry], *, everything: bool, least: int = MANY + 1) -> list[Fold]:
    """Return the rows to show: folded if there are many entries, else one for each."""
    if everything or len(entries) < least:
        return [Fold(entry.path, (entry,)) for entry in entries]
    return fold(entries)


def show_arrays(found: list[Fold], columns: list[str], cells: Cells, screen: Screen, *, everything: bool) -> None:
    """Print a row for each fold; `cells` gives its columns after name and count."""

    def total_cells(few: Sequence[Fold]) -> list[Cell]:
        size = amount(nbytes_of(few))
        return [size if column == ">bytes" else "" for column in columns]

    rows = list(_rows(found))
    shown = rows if everything else rows[:MAX_SHOWN]
    table = [[name, count, *(cells(few[0]) if len(few) == 1 else total_cells(few))] for name, count, few in shown]
    screen.table(["/name", ">count", *columns], table)
    hidden = sum(len(few) == 1 for _, _, few in rows[len(shown) :])
    if hidden:
        screen.line((f"… {hidden:,} more rows: --all shows them", "quiet"))


def show_sums(entries: Iterable[Entry], screen: Screen) -> None:
    """Print the number of arrays and bytes of each dtype on each device."""
    found = totals(entries)
    rows: list[list[Cell]] = [[dtype, device, f"{count:,}", amount(size)] for dtype, device, count, size in found]
    if len(rows) > 1:
        known = [size for *_, size in found if size is not None]
        size = f"{'> ' if len(known) < len(found) else ''}{amount(sum(known))}" if known else "?"
        rows.append([("total", "name"), "", f"{sum(count for *_, count, _ in found):,}", (size, "name")])
    screen.table(["dtype", "device", ">arrays", ">bytes"], rows)


def _rows(found: Iterable[Fold]) -> Iterator[tuple[str, str, list[Fold]]]:
    """Give (name, count, folds) of each line: one fold, or the several below it whose names begin alike."""
    for (part, times), group in itertools.groupby(found, key=_common_part):
        together = list(group)
        if part and len(together) > 1:
            yield part, f"×{times:,}", together
            yield from ((f"  {each.path[len(part) :]}", "", [each]) for each in together)
            continue
        for each in together:
            yield each.path or "(root)", f"×{len(each.entries):,}" if len(each.entries) > 1 else "", [each]


def _common_part(each: Fold) -> tuple[str, int]:
    """Return the part of a fold's name that repeats, and how often; empty if no name is left behind it."""
    match = _REPEATED.match(each.path) if len(each.entries) > 1 else None
    if match is None or match.end() == len(each.path):
        return "", 0
    return match[0], len(each.entries)
