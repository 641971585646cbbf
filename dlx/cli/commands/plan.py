"""`dlx plan`: what `dlx.convert` would do with each array of a source, and why."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import dlx
from dlx.cli import targets
from dlx.cli.model import Entry, Fold, Source, amount, counted, extents, nbytes_of
from dlx.cli.render import tables
from dlx.cli.render.screen import OUTCOMES, Cell, Screen
from dlx.cli.sources.files import open_source
from dlx.cli.targets import Outcome

__all__ = ["run"]

_COPY = {"auto": None, "never": False, "always": True}


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the plan of every source for every target."""
    sources = [open_source(name, screen) for name in arguments.sources]
    options = {
        "device": None if arguments.device is None else dlx.Device(arguments.device),
        "copy": _COPY[arguments.copy],
        "readonly": arguments.readonly,
        "detach": arguments.detach,
    }
    with screen.working("importing targets"):
        names = targets.chosen(arguments.to)
    given = _given(arguments)
    documents: list[dict[str, Any]] = []
    refused = 0
    for number, source in enumerate(sources):
        plans = {
            name: [
                targets.outcome(each, name, mapped=arguments.mapped, **options)
                for each in screen.progress(source.entries, f"planning for {name}", len(source.entries))
            ]
            for name in names
        }
        refused += sum(each.outcome == "refused" for planned in plans.values() for each in planned)
        if number:
            screen.line("")
        if _is_one(source) and len(names) > 1:
            screen.heading(source.name, ", ".join(filter(None, (_what(source), given))))
            tables.outcomes([_in_options(planned[0]) for planned in plans.values()], screen)
        else:
            for place, (name, planned) in enumerate(plans.items()):
                if place:
                    screen.line("")
                _show(source, name, [_in_options(each) for each in planned], given, arguments.all, screen)
        if screen.as_json:
            documents += [_document(source, name, planned) for name, planned in plans.items()]
    screen.document({"options": {**options, "mapped": arguments.mapped}, "plans": documents})
    return 1 if arguments.strict and refused else 0


def _is_one(source: Source) -> bool:
    return len(source.entries) == 1 and not source.entries[0].path


def _what(source: Source) -> str:
    entry = source.entries[0]
    if source.kind == "sketch":
        return "a sketch"
    return f"{entry.dtype.name if entry.dtype is not None else entry.dtype_name}{extents(entry.shape)}"


def _given(arguments: argparse.Namespace) -> str:
    """Return the options that were given, as they are written on the command line."""
    words = ["--mapped"] if arguments.mapped else []
    words += [f"--device {arguments.device}"] if arguments.device else []
    words += [f"--copy {arguments.copy}"] if arguments.copy != "auto" else []
    words += [f"--readonly {arguments.readonly}"] if arguments.readonly != "copy" else []
    return " ".join([*words, "--detach"] if arguments.detach else words)


_OPTION = re.compile(r"\b(copy|readonly|detach|device)=('\w+'|True|False)")
_VALUES = {"copy=False": "--copy never", "copy=True": "--copy always", "detach=True": "--detach"}


def _in_options(found: Outcome) -> Outcome:
    """Replace arguments of `dlx.convert` in a text by the options of this command."""

    def said(match: re.Match[str]) -> str:
        return _VALUES.get(match[0]) or f"--{match[1]} {match[2].strip(chr(39))}"

    return dataclasses.replace(found, why=_OPTION.sub(said, found.why), fix=_OPTION.sub(said, found.fix))


def _show(
    source: Source, target: str, planned: Sequence[Outcome], given: str, everything: bool, screen: Screen
) -> None:
    what = _what(source) if _is_one(source) else counted(len(planned), "array")
    screen.heading(f"{source.name} → {target}", ", ".join(filter(None, (what, given))))
    if _is_one(source):
        _show_one(planned[0], screen)
        return
    fates = {id(entry): each for entry, each in zip(source.entries, planned, strict=True)}
    reasons = list(dict.fromkeys(reason for each in planned if (reason := _reason(each))))

    def cells(fold: Fold) -> list[Cell]:
        entry, fate = fold.entries[0], fates[id(fold.entries[0])]
        mark = f" [{reasons.index(_reason(fate)) + 1}]" if _reason(fate) else ""
        dtype = entry.dtype.name if entry.dtype is not None else entry.dtype_name
        return [dtype, extents(entry.shape), (f"{fate.outcome}{mark}", OUTCOMES[fate.outcome])]

    folds = _folds(source.entries, planned, everything)
    tables.arrays(folds, ["dtype", "shape", "outcome"], cells, lambda _: ["", "", ""], screen, everything=everything)
    screen.line("")
    screen.facts([(f"[{number}]", reason) for number, reason in enumerate(reasons[: tables.MAX_SHOWN], 1)])
    if reasons:
        screen.line("")
    screen.line(_summary(planned))


def _show_one(planned: Outcome, screen: Screen) -> None:
    rows: list[tuple[str, Cell]] = [("outcome", (planned.outcome, OUTCOMES[planned.outcome]))]
    if planned.why:
        rows.append(("why", planned.why))
    if planned.nbytes != 0:
        rows.append(("copied", amount(planned.nbytes)))
    if planned.error:
        rows.append(("error", f"dlx.errors.{planned.error}"))
    if planned.fix:
        rows.append(("fix", planned.fix))
    screen.facts(rows)


def _folds(entries: Sequence[Entry], planned: Sequence[Outcome], everything: bool) -> list[Fold]:
    """Return one fold per row: entries with the same kind of name and the same outcome, in the order of the source."""
    apart: dict[tuple[str, str], list[Entry]] = {}
    for entry, fate in zip(entries, planned, strict=True):
        apart.setdefault((fate.outcome, _reason(fate)), []).append(entry)
    at = {id(entry): number for number, entry in enumerate(entries)}
    everything = everything or len(entries) <= tables.MANY
    found = [fold for group in apart.values() for fold in tables.folds(group, everything=everything, least=1)]
    return sorted(found, key=lambda fold: at[id(fold.entries[0])])


def _reason(fate: Outcome) -> str:
    return f"{targets.brief(fate.why, many=True)}. {fate.fix}".rstrip(". ")


def _summary(planned: Sequence[Outcome]) -> str:
    nbytes = nbytes_of(planned)
    counts = {word: sum(each.outcome == word for each in planned) for word in OUTCOMES}
    parts = [
        f"{count:,} {word}" + f" ({amount(nbytes)})" * (word == "copied" and nbytes is not None)
        for word, count in counts.items()
        if count
    ]
    return ", ".join(parts if counts["copied"] else [*parts, "nothing copied"])


def _document(source: Source, target: str, planned: Sequence[Outcome]) -> dict[str, Any]:
    arrays = [
        {"path": entry.path, "dtype": entry.dtype.name if entry.dtype else None, "shape": entry.shape}
        | dataclasses.asdict(each)
        for entry, each in zip(source.entries, planned, strict=True)
    ]
    return {"name": source.name, "kind": source.kind, "target": target, "arrays": arrays}
