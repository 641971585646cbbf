"""`dlx plan`: what `dlx.convert` would do with each array of a source, and why."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import dlx
from dlx.cli import targets
from dlx.cli.entries import Entry, Source, amount, counted, extents, fold
from dlx.cli.files import open_source
from dlx.cli.inspection import MOST
from dlx.cli.screen import OUTCOMES, Cell, Screen
from dlx.cli.targets import Outcome

__all__ = ["run"]

_ADDRESS = re.compile(r", found address 0x[0-9a-f]+")  # differs from array to array, and from run to run
_COPY = {"auto": None, "never": False, "always": True}


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the plan of every source for every target."""
    sources = [open_source(name) for name in arguments.sources]
    options = {
        "device": None if arguments.device is None else dlx.Device(arguments.device),
        "copy": _COPY[arguments.copy],
        "readonly": arguments.readonly,
        "detach": arguments.detach,
    }
    with screen.working("importing targets"):
        names = targets.chosen(arguments.to)
    documents: list[dict[str, Any]] = []
    refused = 0
    for source in sources:
        for name in names:
            with screen.working("planning"):
                planned = [targets.outcome(each, name, mapped=arguments.mapped, **options) for each in source.entries]
            refused += sum(each.outcome == "refused" for each in planned)
            if documents:
                screen.line("")
            _show(source, name, planned, arguments.all, screen)
            documents.append(_document(source, name, planned))
    screen.document({"options": {**options, "mapped": arguments.mapped}, "plans": documents})
    return 1 if arguments.strict and refused else 0


def _show(source: Source, target: str, planned: Sequence[Outcome], everything: bool, screen: Screen) -> None:
    if len(planned) == 1 and not source.entries[0].path:
        _show_one(source, source.entries[0], planned[0], screen)
        return
    screen.heading(f"{source.name} → {target}", counted(len(planned), "array"))
    rows, reasons = _rows(source.entries, planned, everything)
    shown = rows if everything else rows[:MOST]
    screen.table(["name", ">count", "dtype", "shape", "outcome"], shown)
    if len(shown) < len(rows):
        screen.line((f"… {len(rows) - len(shown)} more rows: --all shows them", "quiet"))
    screen.line("")
    screen.facts([(f"[{number}]", reason) for number, reason in enumerate(reasons[:MOST], 1)])
    if reasons:
        screen.line("")
    screen.line(_summary(planned))


def _show_one(source: Source, entry: Entry, planned: Outcome, screen: Screen) -> None:
    what = f"{entry.dtype.name if entry.dtype is not None else entry.dtype_name}{extents(entry.shape)}"
    screen.heading(f"{source.name} → {planned.target}", what if what != source.name else "")
    rows: list[tuple[str, Cell]] = [("outcome", (planned.outcome, OUTCOMES[planned.outcome]))]
    if planned.why:
        rows.append(("why", planned.why))
    if planned.nbytes:
        rows.append(("copied", amount(planned.nbytes)))
    if planned.error:
        rows.append(("error", f"dlx.errors.{planned.error}"))
    if planned.fix:
        rows.append(("fix", planned.fix))
    screen.facts(rows)


def _rows(entries: Sequence[Entry], planned: Sequence[Outcome], everything: bool) -> tuple[list[list[Cell]], list[str]]:
    """Return (rows, reasons): what has the same kind of name and the same fate is one row, which names its reason."""
    fates = {id(entry): each for entry, each in zip(entries, planned, strict=True)}
    reasons: list[str] = []
    apart: dict[str, list[Entry]] = {}
    for entry in entries:
        fate = fates[id(entry)]
        apart.setdefault(f"{fate.outcome} {_ADDRESS.sub('', fate.why)}", []).append(entry)
    if everything:
        groups = [(entry.path, [entry]) for entry in entries]
    else:
        groups = [(each.path, list(each.entries)) for group in apart.values() for each in fold(group)]
    rows: list[list[Cell]] = []
    for path, group in groups:
        first, fate = group[0], fates[id(group[0])]
        reason = f"{_ADDRESS.sub('', fate.why)}. {fate.fix}".rstrip(". ")
        if reason and reason not in reasons:
            reasons.append(reason)
        mark = f" [{reasons.index(reason) + 1}]" if reason else ""
        count = f"×{len(group)}" if len(group) > 1 else ""
        dtype = first.dtype.name if first.dtype is not None else first.dtype_name
        rows.append([path, count, dtype, extents(first.shape), (f"{fate.outcome}{mark}", OUTCOMES[fate.outcome])])
    return rows, reasons


def _summary(planned: Sequence[Outcome]) -> str:
    nbytes = sum(each.nbytes for each in planned)
    counts = {word: sum(each.outcome == word for each in planned) for word in OUTCOMES}
    parts = [f"{count} {word}" + f" ({amount(nbytes)})" * (word == "copied") for word, count in counts.items() if count]
    return ", ".join(parts if counts["copied"] else [*parts, "nothing copied"])


def _document(source: Source, target: str, planned: Sequence[Outcome]) -> dict[str, Any]:
    arrays = [
        {"path": entry.path, "dtype": entry.dtype.name if entry.dtype else None, "shape": entry.shape}
        | dataclasses.asdict(each)
        for entry, each in zip(source.entries, planned, strict=True)
    ]
    return {"name": source.name, "kind": source.kind, "target": target, "arrays": arrays}
