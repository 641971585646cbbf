"""What a source holds: one entry per array, folded and summed up where there are many."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.types import DType
from dlx.errors import DlxError

__all__ = [
    *("BadInput", "Entry", "Fold", "Source"),
    *("aligned_to", "counted", "extents", "fold", "nbytes_of", "totals"),
]


class BadInput(Exception):
    """The input cannot be read as what it is said to be: one line for the user, exit status 2."""


@dataclass(frozen=True)
class Entry:
    """One array of a source, known from a header or from the object itself."""

    path: str  # its name inside the source; empty where the source is one array
    dtype: DType | None  # as DLPack says it; None where DLPack has none
    dtype_name: str  # the word of the file or the framework
    shape: tuple[int, ...] | None  # None where unknown
    nbytes: int | None  # of all elements; None where unknown
    device: str = "file"  # where it is otherwise: "cpu", "cuda:0"
    order: str = ""  # "C", "F", or empty where neither or unknown
    offset: int | None = None  # of the data in the file, in bytes; None where it is not there as it is
    swapped: bool = False  # whether its bytes are in the other order
    refused: str = ""  # why it is no array outside of its own framework
    notes: tuple[str, ...] = ()
    info: ArrayInfo | None = None  # what `dlx.describe` says of the object
    obj: Any = None  # the object that is planned; None for an abstract tensor, and in a header that is only listed
    error: DlxError | None = None  # if there is no object: the error that `dlx.convert` or `dlx.open` raises

    @property
    def shown_dtype(self) -> str:
        """Name of its dtype: DLPack's, else its own."""
        return self.dtype_name if self.dtype is None else self.dtype.name


@dataclass(frozen=True)
class Source:
    """What one argument of the command line stands for."""

    name: str  # as the user wrote it
    kind: str  # ".npy", ".safetensors", "object", "abstract" and so on
    entries: tuple[Entry, ...]  # its arrays, in order
    nbytes: int | None = None  # of the file; None for objects
    notes: tuple[str, ...] = ()  # how it was read, and what else it holds
    metadata: dict[str, str] = field(default_factory=dict)  # text that a file carries about itself

    @property
    def is_one(self) -> bool:
        """Whether it is one array, not a collection."""
        return len(self.entries) == 1 and not self.entries[0].path


def aligned_to(offset: int) -> int:
    """Return the largest power of two, up to a page, that an offset is a multiple of."""
    return min(offset & -offset, 4096) if offset else 4096


def extents(shape: tuple[int, ...] | None) -> str:
    """Return a shape as text."""
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def counted(number: int, display_name: str) -> str:
    """Return a number with the word that it counts, in the plural where there are several."""
    return f"{number:,} {display_name}" if number == 1 else f"{number:,} {display_name}s"


@dataclass(frozen=True)
class Fold:
    """Entries that differ in the numbers of their names only."""

    path: str  # the name, each number that differs as ``#``
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int | None:
        """Bytes of all of them; None where those of one are unknown."""
        return nbytes_of(self.entries)


_NUMBER = re.compile(r"(?<![^\W_])\d+(?![^\W_])")  # a number that stands alone: layers.12.weight, [3], block_4


def fold(entries: Iterable[Entry]) -> list[Fold]:
    """Put entries together that have the same dtype, shape and device, and names alike but for numbers."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        key = (_NUMBER.sub("#", entry.path), entry.dtype_name, entry.shape, entry.device, entry.order, entry.refused)
        groups.setdefault(key, []).append(entry)
    return [Fold(_common(key[0], group), tuple(group)) for key, group in groups.items()]


def _common(pattern: str, group: list[Entry]) -> str:
    """Return the pattern with those numbers written out that are the same in every name."""
    numbers = zip(*(_NUMBER.findall(entry.path) for entry in group), strict=True)
    same = [column[0] if len(set(column)) == 1 else "#" for column in numbers]
    parts = _NUMBER.split(group[0].path)
    return "".join(part + number for part, number in zip(parts, [*same, ""], strict=True))


def totals(entries: Iterable[Entry]) -> list[tuple[str, str, int, int | None]]:
    """Return (dtype, device, arrays, bytes) of each pair that occurs, most bytes first.

    Bytes are None where those of an array are unknown; what is no array at all is not counted.
    """
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.shape is not None or not entry.refused:
            groups.setdefault((entry.shown_dtype, entry.device), []).append(entry)
    rows = [(*key, len(group), nbytes_of(group)) for key, group in groups.items()]
    return sorted(rows, key=lambda row: -(row[3] or 0))


def nbytes_of(entries: Iterable[Any]) -> int | None:
    """Return the ``.nbytes`` of all; None where those of one are unknown."""
    total = 0
    for entry in entries:
        if entry.nbytes is None:
            return None
        total += entry.nbytes
    return total
