"""`dlx plan`: what `dlx.convert` would do with each array of a source, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dlx._core.types import Device
from dlx._support.screen import OUTCOMES, Cell, Screen
from dlx._support.text import amount
from dlx.cli import targets
from dlx.cli.arguments import COPY
from dlx.cli.model import Entry, Fold, Source, counted, extents, nbytes_of
from dlx.cli.render import tables
from dlx.cli.sources import open_sources
from dlx.cli.targets import Outcome

__all__ = ["run"]


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the plan of every source for every target."""
    sources, errors = open_sources(arguments.sources, screen, arguments.readonly)
    options = {
        "device": None if arguments.device is None else Device(arguments.device),
        "copy": next(value for value, word in COPY.items() if word == arguments.copy),
        "readonly": arguments.readonly,
        "detach": arguments.detach,
    }
    with screen.working("importing targets"):
        names = targets.chosen(arguments.to)
    given = _written(arguments)
    documents: list[dict[str, Any]] = []
    refused = 0
    for number, source in enumerate(sources):
        plans = {
            name: [
                targets.outcome(each, name, **options)
                for each in screen.progress(source.entries, f"planning for {name}", len(source.entries))
            ]
            for name in names
        }
        refused += sum(each.outcome == "refused" for planned in plans.values() for each in planned)
        if number:
            screen.line("")
        if source.is_one and len(names) > 1:
            screen.heading(source.name, ", ".join(filter(None, (_what(source), given))))
            tables.outcomes([planned[0] for planned in plans.values()], screen)
        else:
            for i, (name, planned) in enumerate(plans.items()):
                if i:
                    screen.line("")
                _show(source, name, planned, given, arguments.all, screen)
        if screen.as_json:
            head = {"name": source.name, "kind": source.kind}
            documents += [head | {"target": name, "arrays": _rows(source, each)} for name, each in plans.items()]
    screen.document({"options": options, "plans": documents}, errors)
    return 2 if errors else 1 if arguments.strict and refused else 0


def _what(source: Source) -> str:
    entry = source.entries[0]
    return "an abstract tensor" if source.kind == "abstract" else f"{entry.shown_dtype}{extents(entry.shape)}"


def _written(arguments: argparse.Namespace) -> str:
    """Return the options that were set, as on the command line."""
    words = [f"--device {arguments.device}"] if arguments.device else []
    words += [f"--copy {arguments.copy}"] if arguments.copy != "auto" else []
    words += [f"--readonly {arguments.readonly}"] if arguments.readonly != "copy" else []
    return " ".join([*words, "--detach"] if arguments.detach else words)


def _show(
    source: Source, target: str, planned: Sequence[Outcome], given: str, everything: bool, screen: Screen
) -> None:
    what = _what(source) if source.is_one else counted(len(planned), "array")
    screen.heading(f"{source.name} → {target}", ", ".join(filter(None, (what, given))))
    if source.is_one:
        _show_one(planned[0], screen)
        return
    fates = {id(entry): each for entry, each in zip(source.entries, planned, strict=True)}
    reasons = list(dict.fromkeys(reason for each in planned if (reason := each.shown())))

    def cells(fold: Fold) -> list[Cell]:
        entry, fate = fold.entries[0], fates[id(fold.entries[0])]
        mark = f" [{reasons.index(fate.shown()) + 1}]" if fate.shown() else ""
        return [entry.shown_dtype, extents(entry.shape), (f"{fate.outcome}{mark}", OUTCOMES[fate.outcome])]

    folds = _folds(source.entries, planned, everything)
    tables.arrays(folds, ["dtype", "shape", "outcome"], cells, lambda _: ["", "", ""], screen, everything=everything)
    screen.line("")
    screen.facts([(f"[{number}]", reason) for number, reason in enumerate(reasons[: tables.MAX_SHOWN], 1)])
    if reasons:
        screen.line("")
    screen.line(_summary(planned))


def _show_one(planned: Outcome, screen: Screen) -> None:
    rows: list[tuple[str, Cell]] = [("outcome", (planned.outcome, OUTCOMES[planned.outcome]))]
    if planned.why():
        rows.append(("why", planned.why(targets.on_the_command_line)))
    if planned.nbytes != 0:
        rows.append(("copied", amount(planned.nbytes)))
    if planned.error:
        rows.append(("error", f"dlx.errors.{type(planned.error).__name__}"))
    if planned.advice():
        rows.append(("fix", planned.advice()))
    screen.facts(rows)


def _folds(entries: Sequence[Entry], planned: Sequence[Outcome], everything: bool) -> list[Fold]:
    """Return a fold for each kind of name and outcome, in the order of the source."""
    apart: dict[tuple[str, str], list[Entry]] = {}
    for entry, fate in zip(entries, planned, strict=True):
        apart.setdefault((fate.outcome, fate.shown()), []).append(entry)
    at = {id(entry): number for number, entry in enumerate(entries)}
    everything = everything or len(entries) <= tables.MANY
    found = [fold for group in apart.values() for fold in tables.folds(group, everything=everything, least=1)]
    return sorted(found, key=lambda fold: at[id(fold.entries[0])])


def _summary(planned: Sequence[Outcome]) -> str:
    nbytes = nbytes_of(planned)
    counts = {word: sum(each.outcome == word for each in planned) for word in OUTCOMES}
    parts = [
        f"{count:,} {word}" + f" ({amount(nbytes)})" * (word == "copied" and nbytes is not None)
        for word, count in counts.items()
        if count
    ]
    return ", ".join(parts if counts["copied"] else [*parts, "nothing copied"])


def _rows(source: Source, planned: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the outcomes as JSON has them."""
    return [
        {"path": entry.path, "dtype": entry.dtype.name if entry.dtype else None, "shape": entry.shape} | each.document()
        for entry, each in zip(source.entries, planned, strict=True)
    ]
