"""`dlx plan`: show whether `dlx.convert` would share, copy or refuse each array of a source, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dlx._core.types import Device, DType
from dlx._support.screen import OUTCOMES, Cell, Screen
from dlx._support.text import amount
from dlx.cli import model, targets
from dlx.cli.arguments import COPY
from dlx.cli.model import Entry, Fold, Source, nbytes_of, plural, shape_text
from dlx.cli.sources import open_sources
from dlx.cli.targets import Outcome


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the plan of every source for every target."""
    sources, errors = open_sources(arguments.sources, screen, arguments.readonly, arguments.only, arguments.skip)
    options = {
        "device": None if arguments.device is None else Device(arguments.device),
        "copy": next(value for value, word in COPY.items() if word == arguments.copy),
        "readonly": arguments.readonly,
        "detach": arguments.detach,
    }
    if arguments.dtype is not None:
        options["dtype"] = changes = arguments.dtype
        for each in (changes,) if isinstance(changes, str) else (*changes, *changes.values()):
            DType(each)  # raises, for an unknown one
    with screen.working("importing targets"):
        names = targets.parse_targets(arguments.to, load=False)
    planners = [targets.Planner(name, **options) for name in names]
    documents: list[dict[str, Any]] = []
    refused = 0
    for source in sources:
        plans = {
            each.target: [
                *map(each.outcome, screen.progress(source.entries, f"planning for {each.target}", len(source.entries)))
            ]
            for each in planners
        }
        refused += sum(each.outcome == "refused" for planned in plans.values() for each in planned)
        about = ", ".join(filter(None, (_summarize(source), _format_options(arguments))))
        if source.is_one and len(names) > 1:
            screen.heading(source.name, about)
            targets.show([planned[0] for planned in plans.values()], screen)
        else:
            for name, planned in plans.items():
                screen.heading(f"{source.name} → {name}", about)
                if source.is_one:
                    _show_one(planned[0], screen)
                else:
                    _show_many(source.entries, planned, arguments.all, screen)
        for name, planned in plans.items() if screen.as_json else ():
            arrays = [_document(*each) for each in zip(source.entries, planned, strict=True)]
            documents.append({"name": source.name, "kind": source.kind, "target": name, "arrays": arrays})
    targets.show_notes(planners, screen)
    screen.document({"options": options, "plans": documents}, errors)
    return 2 if errors else 1 if arguments.strict and refused else 0


def _summarize(source: Source) -> str:
    if not source.is_one:
        return plural(len(source.entries), "array")
    entry = source.entries[0]
    return "an abstract tensor" if source.kind == "abstract" else f"{entry.shown_dtype}{shape_text(entry.shape)}"


def _format_options(arguments: argparse.Namespace) -> str:
    """Return the options that the user passed, as on the command line."""
    defaults = {"device": None, "copy": "auto", "readonly": "copy", "dtype": None}
    values = {name: getattr(arguments, name) for name, each in defaults.items() if getattr(arguments, name) != each}
    words = [
        targets.command_option(name, value) if name == "dtype" else f"--{name} {value}"
        for name, value in values.items()
    ]
    return " ".join([*words, "--detach"] if arguments.detach else words)


def _document(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    dtype = entry.dtype.name if entry.dtype else None
    return {"path": entry.path, "dtype": dtype, "shape": entry.shape} | outcome.document()


def _show_one(planned: Outcome, screen: Screen) -> None:
    rows: list[tuple[str, Cell]] = [("outcome", (planned.outcome, OUTCOMES[planned.outcome]))]
    if planned.why():
        rows.append(("why", planned.why(targets.command_option)))
    if planned.nbytes != 0:
        rows.append(("copied", amount(planned.nbytes)))
    if planned.error:
        rows.append(("error", f"dlx.errors.{type(planned.error).__name__}"))
    if planned.advice():
        rows.append(("fix", planned.advice()))
    screen.facts(rows)


def _show_many(entries: Sequence[Entry], planned: Sequence[Outcome], everything: bool, screen: Screen) -> None:
    outcomes = {id(entry): each for entry, each in zip(entries, planned, strict=True)}
    reasons = list(dict.fromkeys(reason for each in planned if (reason := each.short_text())))

    def cells(fold: Fold) -> list[Cell]:
        entry, found = fold.entries[0], outcomes[id(fold.entries[0])]
        mark = f" [{reasons.index(found.short_text()) + 1}]" if found.short_text() else ""
        return [entry.shown_dtype, shape_text(entry.shape), (f"{found.outcome}{mark}", OUTCOMES[found.outcome])]

    apart: dict[tuple[str, str], list[Entry]] = {}  # entries with the same outcome are folded together
    for entry, each in zip(entries, planned, strict=True):
        apart.setdefault((each.outcome, each.short_text()), []).append(entry)
    each_alone = everything or len(entries) <= model.MANY
    shown = [fold for group in apart.values() for fold in model.folds(group, everything=each_alone, least=1)]
    at = {id(entry): number for number, entry in enumerate(entries)}
    shown.sort(key=lambda fold: at[id(fold.entries[0])])
    model.show_arrays(shown, ["dtype", "shape", "outcome"], cells, screen, everything=everything)
    screen.line("")
    screen.facts([(f"[{number}]", reason) for number, reason in enumerate(reasons[: model.MAX_SHOWN], 1)])
    if reasons:
        screen.line("")
    nbytes = nbytes_of(planned)
    counts = {word: sum(each.outcome == word for each in planned) for word in OUTCOMES}
    parts = [
        f"{count:,} {word}" + f" ({amount(nbytes)})" * (word == "copied" and nbytes is not None)
        for word, count in counts.items()
        if count
    ]
    screen.line(", ".join(parts if counts["copied"] else [*parts, "nothing copied"]))
