"""Tables of many arrays: folded by their names, common parts of names on their own lines, summed up below."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dlx._support.screen import OUTCOMES, SHORT, Cell, Screen
from dlx._support.text import amount
from dlx.cli.model import Entry, Fold, fold, nbytes_of, totals
from dlx.cli.targets import Outcome

MANY = 24  # with more entries names are folded
MAX_SHOWN = 60  # rows

_REPEATED = re.compile(r".*#['\"]?\]?\.?")  # up to the last number that differs: model.layers.#.


def folds(entries: Sequence[Entry], *, everything: bool, least: int = MANY + 1) -> list[Fold]:
    """Return the rows to show: folded if there are many entries, else one for each."""
    if everything or len(entries) < least:
        return [Fold(entry.path, (entry,)) for entry in entries]
    return fold(entries)


def arrays(
    found: Sequence[Fold],
    columns: Sequence[str],
    cells: Callable[[Fold], Sequence[Cell]],
    screen: Screen,
    *,
    everything: bool,
) -> None:
    """Print a row for each fold; `cells` gives its columns after name and count."""

    def sums(few: Sequence[Fold]) -> list[Cell]:
        size = amount(nbytes_of(few))
        return [size if column == ">bytes" else "" for column in columns]

    rows = list(_rows(found))
    shown = rows if everything else rows[:MAX_SHOWN]
    table = [[name, count, *(cells(few[0]) if len(few) == 1 else sums(few))] for name, count, few in shown]
    screen.table(["/name", ">count", *columns], table)
    hidden = sum(len(few) == 1 for _, _, few in rows[len(shown) :])
    if hidden:
        screen.line((f"… {hidden:,} more rows: --all shows them", "quiet"))


def sums(entries: Iterable[Entry], screen: Screen) -> None:
    """Print the number of arrays and bytes of each dtype on each device."""
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
