"""The contents of a source: an `Entry` for each array, and tables of them, folded by names and with totals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dlx._support.screen import Cell, Screen
from dlx._support.text import amount

if TYPE_CHECKING:
    from dlx._core.array_info import ArrayInfo
    from dlx._core.types import DType
    from dlx.errors import DlxError

MANY = 24  # entries up to which names are not folded
MAX_SHOWN = 60  # rows

_REPEATED = re.compile(r".*#['\"]?\]?\.?")  # up to the last number that differs: model.layers.#.


class BadInput(Exception):
    """The input cannot be read: one line for the user, exit status 2."""


class Entry(NamedTuple):
    """One array of a source, known from a header or from the object itself."""

    path: str  # its name in the source; empty if the source is one array
    dtype: DType | None  # None if DLPack has no such dtype
    dtype_name: str  # in the file or framework
    shape: tuple[int, ...] | None  # None if unknown
    nbytes: int | None  # of all elements; None if unknown
    device: str = "file"  # or "cpu", "cuda:0"
    order: str = ""  # "C", "F", or empty if neither or unknown
    offset: int | None = None  # of the data in the file, in bytes; None if the data needs decoding
    swapped: bool = False  # whether its bytes are in the other order
    refused: str = ""  # why it cannot leave its framework or file
    notes: tuple[str, ...] = ()
    info: ArrayInfo | None = None  # of `dlx.describe`
    obj: Any = None  # the object to plan; None for an abstract tensor, or if a header is only listed
    error: DlxError | None = None  # the error of `dlx.convert` or `dlx.open` if there is no object

    @property
    def shown_dtype(self) -> str:
        """DLPack's name of the dtype, if any, or the file's or framework's."""
        return self.dtype_name if self.dtype is None else self.dtype.name


class Source(NamedTuple):
    """A source that the user passed, and its contents."""

    name: str  # as the user wrote it
    kind: str  # ".npy", ".safetensors", "object", "abstract" and so on
    entries: tuple[Entry, ...]  # its arrays, in order
    nbytes: int | None = None  # of the file; None for other sources
    notes: tuple[str, ...] = ()  # about reading it, and its other contents
    metadata: dict[str, str] = {}  # noqa: RUF012 - of a file, never changed

    @property
    def is_one(self) -> bool:
        """Whether it is a single array, not a collection."""
        return len(self.entries) == 1 and not self.entries[0].path


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Return a shape as text."""
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def plural(number: int, word: str) -> str:
    """Return a number and a word, which is in the plural unless the number is 1."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


class Fold(NamedTuple):
    """Entries whose names differ only in numbers."""

    path: str  # the name, with ``#`` for each number that differs
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int | None:
        """Bytes of all entries; None if the bytes of one are unknown."""
        return nbytes_of(self.entries)


_NUMBER = re.compile(r"(?<![^\W_])\d+(?![^\W_])")  # a separate number: layers.12.weight, [3], block_4


def fold(entries: Iterable[Entry]) -> list[Fold]:
    """Group entries with the same dtype, shape and device whose names differ only in numbers."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        key = (_NUMBER.sub("#", entry.path), entry.dtype_name, entry.shape, entry.device, entry.order, entry.refused)
        groups.setdefault(key, []).append(entry)
    return [Fold(_common_path(group), tuple(group)) for group in groups.values()]


def _common_path(group: list[Entry]) -> str:
    """Return the names as one name, with ``#`` for each number that differs."""
    numbers = zip(*(_NUMBER.findall(entry.path) for entry in group), strict=True)
    same = [column[0] if len(set(column)) == 1 else "#" for column in numbers]
    parts = _NUMBER.split(group[0].path)
    return "".join(part + number for part, number in zip(parts, [*same, ""], strict=True))


def totals(entries: Iterable[Entry]) -> list[tuple[str, str, int, int | None]]:
    """Return (dtype, device, arrays, bytes or None) for each dtype and device, most bytes first."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.shape is not None or not entry.refused:  # otherwise it is not an array
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
    """Return the rows to show: folded if there are many entries, otherwise one for each."""
    if everything or len(entries) < least:
        return [Fold(entry.path, (entry,)) for entry in entries]
    return fold(entries)


def show_arrays(found: list[Fold], columns: list[str], cells: Cells, screen: Screen, *, everything: bool) -> None:
    """Print a row for each fold; `cells` returns its columns after name and count."""

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
    """Print the number of arrays and bytes for each dtype and device."""
    found = totals(entries)
    rows: list[list[Cell]] = [[dtype, device, f"{count:,}", amount(size)] for dtype, device, count, size in found]
    if len(rows) > 1:
        known = [size for *_, size in found if size is not None]
        size = f"{'> ' if len(known) < len(found) else ''}{amount(sum(known))}" if known else "?"
        rows.append([("total", "name"), "", f"{sum(count for *_, count, _ in found):,}", (size, "name")])
    screen.table(["dtype", "device", ">arrays", ">bytes"], rows)


def _rows(found: Iterable[Fold]) -> Iterator[tuple[str, str, list[Fold]]]:
    """Yield (name, count, folds) for each line: one fold, or a heading of several whose names begin alike."""
    for (part, times), group in itertools.groupby(found, key=_common_part):
        together = list(group)
        if part and len(together) > 1:
            yield part, f"×{times:,}", together
            yield from ((f"  {each.path[len(part) :]}", "", [each]) for each in together)
            continue
        for each in together:
            yield each.path or "(root)", f"×{len(each.entries):,}" if len(each.entries) > 1 else "", [each]


def _common_part(each: Fold) -> tuple[str, int]:
    """Return the repeated prefix of a fold's name, and its number of repetitions; empty if it is the whole name."""
    match = _REPEATED.match(each.path) if len(each.entries) > 1 else None
    if match is None or match.end() == len(each.path):
        return "", 0
    return match[0], len(each.entries)
