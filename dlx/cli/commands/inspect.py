"""`dlx inspect`: describe arrays, and show which targets accept them."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from dlx._support.screen import OUTCOMES, Cell, Screen
from dlx._support.text import amount
from dlx.cli.model import Entry, Fold, Source, folds, nbytes_of, plural, shape_text, show_arrays, show_sums, totals
from dlx.cli.sources import open_sources

if TYPE_CHECKING:
    from dlx.cli.targets import Outcome, Planner

REASONS = 3  # shown for each outcome and target

_LAYOUTS = {"C": "C-contiguous", "F": "F-contiguous", "strided": "not contiguous", "": "?"}
_SHORT_LAYOUTS = {"F": ["F-order"], "strided": ["strided"]}


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show each source, and the totals of several."""
    sources, errors = open_sources(
        arguments.sources, screen, "copy" if arguments.to else None, arguments.only, arguments.skip
    )
    planners: list[Planner] = []
    documents, hint = [], False
    for source in sources:
        default = "all" if source.kind in ("object", "abstract") and len(source.entries) == 1 else "none"
        if arguments.to is None and default == "none":
            planners = []
        else:
            from dlx.cli import targets

            with screen.working("importing targets"):
                names = targets.parse_targets(arguments.to, default, none=True, load=False)
            planners = [targets.Planner(name) for name in names]
        if source.is_one:
            arrays = _show_one(source, planners, screen)
        else:
            arrays = _show_many(source, planners, arguments.all, screen)
        facts = {"name": source.name, "kind": source.kind, "bytes": source.nbytes}
        documents.append({**facts, "notes": source.notes, "metadata": source.metadata, "arrays": arrays})
        hint = hint or (not planners and arguments.to is None)
    everything = [entry for source in sources for entry in source.entries]
    if len(sources) > 1:
        screen.heading("in all", plural(len(sources), "source"))
        show_sums(everything, screen)
    if hint:
        it = "it" if len(sources) == 1 else "them"
        screen.line("")
        screen.line((f"to see which targets accept {it}: --to torch,numpy or --to all (imports them)", "quiet"))
    sums = [dict(zip(("dtype", "device", "arrays", "bytes"), row, strict=True)) for row in totals(everything)]
    screen.document({"sources": documents, "totals": sums}, errors)
    return 2 if errors else 0


def _document(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON."""
    info = entry.info
    dtype, number = (None, None) if entry.dtype is None else (entry.dtype.name, list(entry.dtype))
    document: dict[str, Any] = {
        "path": entry.path, "dtype": dtype, "dtype_name": entry.dtype_name, "dlpack_dtype": number,
        "shape": entry.shape, "nbytes": entry.nbytes, "device": entry.device, "layout": entry.order or None,
        "offset": entry.offset, "byte_order_swapped": entry.swapped, "refused": entry.refused or None,
        "notes": entry.notes,
    }  # fmt: skip
    if info is not None:
        names = ("framework", "strides", "readonly", "address", "alignment", "owner", "protocols")
        document |= {"type": info.type_name} | {name: getattr(info, name) for name in names}
    return document


# ---- one array -------------------------------------------------------------------------------------------------------


def _show_one(source: Source, planners: list[Planner], screen: Screen) -> list[dict[str, Any]]:
    entry = source.entries[0]
    capsule = {}
    if entry.info is not None:
        from dlx.cli.objects import capsule_facts

        capsule = capsule_facts(entry.obj)
    screen.heading(source.name, entry.info.type_name if entry.info is not None else source.kind)
    screen.facts(_facts(source, entry, capsule))
    outcomes = []
    if planners:
        from dlx.cli import targets

        with screen.working("planning"):
            outcomes = [each.outcome(entry) for each in planners]
        screen.line("")
        targets.show(outcomes, screen)
        targets.show_notes(planners, screen)
    own = {"capsule": capsule} if entry.info is not None else {}
    return [_document(entry) | own | {"targets": [each.document() for each in outcomes]}]


def _facts(source: Source, entry: Entry, capsule: dict[str, Any]) -> list[tuple[str, Cell]]:
    info = entry.info
    rows: list[tuple[str, Cell]] = [("dtype", _dtype(entry)), ("shape", shape_text(entry.shape))]
    if info is None:
        rows.append(("layout", _LAYOUTS.get(entry.order, "?")))
    elif info.strides is not None:
        rows.append(("strides", f"{shape_text(info.strides)} elements, {_LAYOUTS[entry.order]}"))
    elif info.shape is not None:
        rows.append(("strides", "none, or not a multiple of the item size"))
    size = amount(entry.nbytes)
    rows.append(("bytes", f"{size} ({entry.nbytes:,})" if entry.nbytes is not None and entry.nbytes > 1023 else size))
    device = info.device if info is not None else None
    dlpack = "" if device is None else f"  (DLPack type {device.type}, id {device.id})"
    rows.append(("device", f"{device or entry.device}{dlpack}"))
    if info is not None:
        aligned = "?" if info.address is None else "none"
        if info.address:
            aligned = f"{info.address:#x}, aligned to {info.alignment} bytes"
        rows += [
            ("read-only", "yes" if info.readonly else "no"),
            ("address", aligned),
            ("owner", info.owner or "?"),
            ("protocols", ", ".join(info.protocols) or "none"),
            ("capsule", _capsule(capsule)),
        ]
        if info.notes:
            rows.append(("notes", ", ".join(info.notes)))
    elif entry.offset is not None:
        aligned = str(min(entry.offset & -entry.offset or 4096, 4096))  # a power of two, up to a page
        rows.append(("data", f"from byte {entry.offset} of the file, aligned to {aligned} bytes"))
    if entry.refused:
        rows.append(("refused", (entry.refused, "bad")))
    return rows + [("note", note) for note in (*source.notes, *(entry.notes if info is None else ()))]


def _dtype(entry: Entry) -> Cell:
    if entry.dtype is None:
        return f"{entry.dtype_name}, for which DLPack has no dtype"
    code, bits, lanes = entry.dtype
    own = f", named {entry.dtype_name!r} there" if entry.dtype_name not in (entry.dtype.name, "?") else ""
    return f"{entry.dtype.name}{own}  (DLPack code {code}, {bits} bits, {lanes} lane{'s' * (lanes != 1)})"


def _capsule(facts: dict[str, Any]) -> str:
    if not facts:
        return "none: it has no __dlpack__"
    if "refused" in facts:
        return f"refused: {facts['refused']}"
    if facts["version"] is None:
        return f"{facts['name']} (legacy: no version, no flags)"
    version = ".".join(map(str, facts["version"]))
    return f"{facts['name']} {version}, flags {' '.join(facts['flags']) or 'none'}"


# ---- many ------------------------------------------------------------------------------------------------------------


def _show_many(source: Source, planners: list[Planner], everything: bool, screen: Screen) -> list[dict[str, Any]]:
    entries = source.entries
    size = f", file of {amount(source.nbytes)}" if source.nbytes is not None else ""
    screen.heading(source.name, f"{source.kind}, {plural(len(entries), 'array')}{size}")
    shown = folds(entries, everything=everything)
    show_arrays(shown, ["dtype", "shape", ">bytes", "note"], _cells, screen, everything=everything)
    screen.line("")
    show_sums(entries, screen)
    if source.notes or source.metadata:
        screen.line("")
    for note in source.notes:
        screen.line((f"note: {note}", "quiet"))
    if source.metadata:
        screen.line(("metadata", "quiet"))
        screen.facts([(key[:30], value[:200]) for key, value in source.metadata.items()])
    documents = [_document(entry) for entry in entries] if screen.as_json else []
    if planners:
        from dlx.cli import targets

        planned = [
            [planner.outcome(each) for planner in planners]
            for each in screen.progress(entries, "planning", len(entries))
        ]
        for document, outcomes in zip(documents, planned, strict=screen.as_json):
            document["targets"] = [each.document() for each in outcomes]
        screen.line("")
        _show_outcomes(list(zip(*planned, strict=True)), screen)
        targets.show_notes(planners, screen)
    return documents


def _cells(fold: Fold) -> list[Cell]:
    entry = fold.entries[0]
    readonly = ["read-only"] if entry.info is not None and entry.info.readonly else []
    notes = ", ".join([*_SHORT_LAYOUTS.get(entry.order, []), *readonly, *entry.notes])
    note: Cell = (entry.refused, "bad") if entry.refused else notes
    return [entry.shown_dtype, shape_text(entry.shape), amount(fold.nbytes), note]


def _show_outcomes(columns: list[tuple[Outcome, ...]], screen: Screen) -> None:
    """Print the outcomes for each target, and the most frequent reasons."""
    rows: list[list[Cell]] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    more = 0
    for outcomes in columns:
        target, counts = outcomes[0].target, Counter(each.outcome for each in outcomes)
        refused = (str(counts["refused"]), "bad" if counts["refused"] else "")
        copies = (str(counts["copied"]), "warn" if counts["copied"] else "")
        rows.append([target, str(counts["same"] + counts["shared"]), copies, amount(nbytes_of(outcomes)), refused])
        for word in ("refused", "copied"):
            why = Counter(each.why(brief=True) for each in outcomes if each.outcome == word)
            more += max(len(why) - REASONS, 0)
            for text, _ in why.most_common(REASONS):
                reasons.setdefault((word, text), []).append(target)
    screen.table(["to", ">shared", ">copied", ">bytes copied", ">refused"], rows)
    if reasons:
        screen.line("")
        rows = [[(word, OUTCOMES[word]), ", ".join(names), text] for (word, text), names in reasons.items()]
        screen.table(["outcome", "to", "why"], rows)
    if more:
        screen.line(("these are the most frequent; dlx plan shows every reason", "quiet"))
