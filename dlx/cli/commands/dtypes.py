"""`dlx dtypes` and `dlx matrix`: show every dtype, each framework's name for it, and the outcome of its conversion."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dlx._api import convert as api
from dlx._core.types import DType
from dlx._registry.listing import adapters, can_be_target
from dlx._support.display import COLORS
from dlx._support.screen import OUTCOMES, Cell, Screen
from dlx._support.svg import box, legend, page, text
from dlx.adapter.base import Adapter
from dlx.cli import targets
from dlx.cli.model import BadInput
from dlx.errors import DlxError

_SIZE, _GAP, _LEFT, _TOP = 15, 14, 150, 92
_IN_A_ROW = 4  # frameworks; as wide as a page of the documentation
_LIGHT, _DARK = COLORS["refused"]
_REFUSED = f"#ffffff; stroke: {_LIGHT}; stroke-width: 1.2", f"#0d1117; stroke: {_DARK}"
_FILLS = {**COLORS, "refused": _REFUSED}
_MARKS = {"same": "=", "shared": "✓", "viewed": "≈", "copied": "c", "refused": "✗", "": "·"}


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Show the adapters' names for dtypes, or with frameworks imported, the plans of conversions."""
    if arguments.live or arguments.origin is not None or arguments.to is not None:
        return _run_live(arguments, screen)
    chosen = {name: each for name, each in adapters().items() if can_be_target(each) and name != "dlx"}
    rows: list[list[Cell]] = []
    documents = []
    own: dict[str, list[str]] = {}
    for name in _names(chosen.values()):
        dtype, size = DType(name), DType(name).bits * DType(name).lanes
        words = {framework: adapter.dtypes.native_name(name) for framework, adapter in chosen.items()}
        rows.append([*_head(name), *(_mark(word, name) for word in words.values())])
        itemsize = size / 8 if size % 8 else size // 8
        documents.append({"name": name, "dlpack_dtype": list(dtype), "itemsize": itemsize, "words": words})
        for framework, word in words.items():
            if word not in ("", name, f"ml_dtypes.{name}"):
                own.setdefault(framework, []).append(f"{name} is {word}")
    screen.table(["dtype", "DLPack", *chosen], rows)
    screen.line("")
    screen.facts([(f"* {framework}", ", ".join(words)) for framework, words in own.items()])
    screen.line("")
    screen.line(("DLPack: (code, bits, lanes)   ✓ the same name   · no such dtype", "quiet"))
    screen.line(("m the same name in ml_dtypes   * another name, see above", "quiet"))
    screen.line(("conversions between frameworks: dlx matrix", "quiet"))
    screen.document({"dtypes": documents})
    return 0


def _names(adapters: Iterable[Adapter]) -> list[str]:
    """Return the names of all dtypes; dtypes of plugins are last."""
    listed = [dtype.name for dtype in DType.all()]
    return [*listed, *sorted({name for adapter in adapters for name in adapter.dtypes.names} - {*listed})]


def _head(name: str) -> list[Cell]:
    """Return the first cells of a dtype's row."""
    return [(name, "name"), str(tuple(DType(name)))]


def _mark(word: str, name: str) -> Cell:
    """Return the mark for a framework's name of a dtype: dlx's name, ml_dtypes' name, another, or none."""
    if not word:
        return ("·", "quiet")
    return ("✓", "good") if word == name else ("m", "good") if word == f"ml_dtypes.{name}" else "*"


# ---- live ------------------------------------------------------------------------------------------------------------


def _run_live(arguments: argparse.Namespace, screen: Screen) -> int:
    with screen.working("importing frameworks"):
        origins, goals = targets.parse_targets(arguments.origin), targets.parse_targets(arguments.to)
    found = adapters()
    names = _names(found[name] for name in {*origins, *goals})
    both = [(origin, dtype) for origin in origins for dtype in names]
    cells = {
        (origin, dtype, goal): outcome
        for origin, dtype in screen.progress(both, "planning every dtype", len(both))
        for goal, outcome in _outcomes(origin, dtype, goals).items()
    }
    if arguments.svg:
        try:
            Path(arguments.svg).write_text(picture({k: v["outcome"] for k, v in cells.items()}), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{arguments.svg}: {error.strerror}") from error
        screen.line(f"wrote {arguments.svg}")
    elif len(origins) == len(goals) == 1:
        _show_pair(origins[0], goals[0], cells, screen)
    else:
        _show_matrix(origins, goals, cells, screen)
    documents = [{"from": origin, "dtype": dtype, "to": goal, **cell} for (origin, dtype, goal), cell in cells.items()]
    screen.document({"cells": documents})
    return 0


def _outcomes(origin: str, dtype: str, goals: list[str]) -> dict[str, dict[str, str]]:
    """Plan an array of one dtype for each goal; empty outcomes if its framework has no such dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks warn about experimental dtypes
        try:
            array = targets.array_of(origin, dtype)
        except (DlxError, TypeError, ValueError, RuntimeError):
            return {goal: {"outcome": "", "why": "", "brief": ""} for goal in goals}
        return {goal: _cell(array, goal) for goal in goals}


def _cell(array: Any, goal: str) -> dict[str, str]:
    plan = api.plan(array, to=goal)
    error = targets.refusal(plan)
    if error is not None:
        return {"outcome": "refused", "why": error.reason, "brief": error.brief, "error": type(error).__name__}
    viewed = plan.outcome == "shared" and any(step.do == "view" for step in plan.steps)
    reasons = [step.reason() for step in plan.steps]
    return {"outcome": "viewed" if viewed else plan.outcome, "why": "; ".join(reasons), "brief": "".join(reasons[:1])}


def _show_pair(origin: str, goal: str, cells: dict[Any, dict[str, str]], screen: Screen) -> None:
    screen.heading(f"{origin} → {goal}")
    rows: list[list[Cell]] = []
    absent = []
    for (_, name, _), cell in cells.items():
        if outcome := cell["outcome"]:
            rows.append([*_head(name), (outcome, OUTCOMES[outcome]), cell["brief"]])
        else:
            absent.append(name)
    screen.table(["dtype", "DLPack", "outcome", "why"], rows)
    if absent:
        screen.line("")
        screen.line((f"no such dtype in {origin}: {', '.join(absent)}", "quiet"))


def _show_matrix(origins: list[str], goals: list[str], cells: dict[Any, dict[str, str]], screen: Screen) -> None:
    for origin in origins:
        screen.heading(f"from {origin}", "to …")
        rows: list[list[Cell]] = []
        for name in dict.fromkeys(name for _, name, _ in cells):
            found = [cells[origin, name, goal]["outcome"] for goal in goals]
            if any(found):
                rows.append([*_head(name), *((_MARKS[each], OUTCOMES.get(each, "quiet")) for each in found)])
        screen.table(["dtype", "DLPack", *goals], rows)
    screen.line("")
    screen.line(("= the same object   ✓ shared   ≈ shared, viewed as another dtype of the same width", "quiet"))
    screen.line(("c copied   ✗ refused   · no such dtype", "quiet"))


def picture(cells: Mapping[tuple[str, str, str], str]) -> str:
    """Draw {(framework, dtype, target): outcome} as an SVG; an outcome may be empty, or the name of an error."""
    frameworks, _, targets = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    block = len(targets) * _SIZE + _GAP
    shown = {key: outcome for key, outcome in cells.items() if outcome not in ("", "-", "?")}
    parts, top = [], 0
    for start in range(0, len(frameworks), _IN_A_ROW):
        names = frameworks[start : start + _IN_A_ROW]
        dtypes = list(dict.fromkeys(dtype for name, dtype, _ in shown if name in names))
        top += _TOP
        for row, dtype in enumerate(dtypes):
            parts.append(text(_LEFT - 8, top + row * _SIZE + 11, dtype, 'text-anchor="end"'))
        for left, name in zip(range(_LEFT, _LEFT + block * len(names), block), names, strict=True):
            parts.append(text(left, top - _TOP + 18, f"{name} →", 'font-weight="600"'))
            for x, target in zip(range(left, left + block - _GAP, _SIZE), targets, strict=True):
                at = f"translate({x + 11},{top - 6}) rotate(-90)"
                parts.append(text(0, 0, target, f'class="quiet" transform="{at}"'))
                for row, dtype in enumerate(dtypes):
                    if outcome := shown.get((name, dtype, target)):
                        kind = "refused" if outcome.endswith("Error") else outcome
                        parts.append(box(x + 1, top + row * _SIZE + 1, _SIZE - 3, _SIZE - 3, kind))
        top += len(dtypes) * _SIZE + _GAP
    parts += legend(_LEFT, top, {kind: kind for kind in _FILLS})
    size = (_LEFT + block * min(len(frameworks), _IN_A_ROW) + 10, top + 28)
    return page(size, "Conversions of each dtype", _FILLS, parts)
