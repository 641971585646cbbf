"""Many arrays on one screen: folded by their names, what repeats under a line of its own, summed up below."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dlx._support.screen import OUTCOMES, SHORT, Cell, Screen
from dlx._support.text import amount
from dlx.cli.model import Entry, Fold, fold, totals
from dlx.cli.targets import Outcome

__all__ = ["MANY", "MAX_SHOWN", "arrays", "folds", "outcomes", "sums"]

MANY = 24  # entries from which on names are folded
MAX_SHOWN = 60  # rows

_REPEATED = re.compile(r".*#['\"]?\]?\.?")  # up to the last number that differs: model.layers.#.


@dataclass(frozen=True)
class Row:
    """One line: a fold, or the part that several folds repeat."""

    name: str
    count: str
    folds: tuple[Fold, ...]

    @property
    def fold(self) -> Fold | None:
        """The only one, None on the line above several."""
        return self.folds[0] if len(self.folds) == 1 else None


def folds(entries: Sequence[Entry], *, everything: bool, least: int = MANY + 1) -> list[Fold]:
    """Return what is shown as one row: all that is alike where there is much, else each entry for itself."""
    if everything or len(entries) < least:
        return [Fold(entry.path, (entry,)) for entry in entries]
    return fold(entries)


def arrays(
    found: Sequence[Fold],
    columns: Sequence[str],
    cells: Callable[[Fold], Sequence[Cell]],
    head: Callable[[Sequence[Fold]], Sequence[Cell]],
    screen: Screen,
    *,
    everything: bool,
) -> None:
    """Print a row for each fold; `cells` gives its columns after name and count, `head` those above several."""
    rows = list(_rows(found))
    shown = rows if everything else rows[:MAX_SHOWN]
    table = [[row.name, row.count, *(cells(row.fold) if row.fold is not None else head(row.folds))] for row in shown]
    screen.table(["/name", ">count", *columns], table)
    hidden = sum(len(row.folds) for row in rows[len(shown) :] if row.fold is not None)
    if hidden:
        screen.line((f"… {hidden:,} more rows: --all shows them", "quiet"))


def sums(entries: Iterable[Entry], screen: Screen) -> None:
    """Print how many arrays and bytes there are of each dtype on each device."""
    found = totals(entries)
    rows: list[list[Cell]] = [[dtype, device, f"{count:,}", amount(size)] for dtype, device, count, size in found]
    if len(rows) > 1:
        known = [size for *_, size in found if size is not None]
        size = f"{'> ' if len(known) < len(found) else ''}{amount(sum(known))}" if known else "?"
        rows.append([("total", "name"), "", f"{sum(count for *_, count, _ in found):,}", (size, "name")])
    screen.table(["dtype", "device", ">arrays", ">bytes"], rows)


def outcomes(found: Sequence[Outcome], screen: Screen) -> None:
    """Print the outcome of one array for each target; a long reason is written once."""
    rows: list[list[Cell]] = []
    firsts: dict[str, str] = {}
    for each in found:
        why = each.shown()
        first = firsts.setdefault(why, each.target)
        again = first != each.target and len(why) > SHORT
        copied = amount(each.nbytes) if each.nbytes != 0 else ""
        rows.append([each.target, (each.outcome, OUTCOMES[each.outcome]), copied, f"as for {first}" if again else why])
    screen.table(["to", "outcome", ">bytes copied", "why"], rows)


def _rows(found: Iterable[Fold]) -> Iterable[Row]:
    for (part, _), group in itertools.groupby(found, key=_part):
        together = tuple(group)
        if not part or len(together) == 1:
            yield from (Row(each.path or "(root)", _times(each), (each,)) for each in together)
            continue
        yield Row(part, _times(together[0]), together)
        yield from (Row(f"  {each.path[len(part) :]}", "", (each,)) for each in together)


def _part(each: Fold) -> tuple[str, int]:
    """Return the part of a fold's name that repeats, and how often; nothing where no name is left behind it."""
    match = _REPEATED.match(each.path) if len(each.entries) > 1 else None
    if match is None or match.end() == len(each.path):
        return "", 0
    return match[0], len(each.entries)


def _times(each: Fold) -> str:
    return f"×{len(each.entries):,}" if len(each.entries) > 1 else ""
