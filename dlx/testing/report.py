"""Print grades: as a table on a terminal, as lines in a pipe, or as JSON."""

from __future__ import annotations

import platform
import textwrap
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from dlx._support.screen import Cell, Screen
from dlx._version import __version__
from dlx.testing.check import CHECKS, KINDS, Check, Verdict
from dlx.testing.subject import Subject

SCHEMA = 1
"""Version of the document of ``--json``."""

ABOUT = (
    "dtypes", "layouts", "read-only", "copies", "versions", "keywords", "errors", "refusals", "lifetimes", "threads",
    "leaks", "contract",
)  # fmt: skip
"""Rows of the summary table, in order."""

MARKS = {"keeps": "✓", "breaks": "✗", "excepted": "(✗)", "n/a": "-", "error": "!"}
_STYLES = {"keeps": "good", "breaks": "bad", "excepted": "warn", "n/a": "quiet", "error": "bad"}


@dataclass(frozen=True)
class Grades:
    """The verdicts on one subject."""

    subject: Subject
    version: str
    verdicts: tuple[Verdict, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 0 all kept, 1 a promise is broken, 2 the kit failed."""
        found = {verdict.status for verdict in self.verdicts}
        return 2 if "error" in found else int("breaks" in found)


def sort_checks(names: Container[str]) -> list[Check]:
    """Return the named checks, sorted by kind, then by row of the table."""
    named = (check for check in CHECKS.values() if check.name in names)
    return sorted(named, key=lambda check: (KINDS.index(check.kind), ABOUT.index(check.about)))


def print_grades(grades: Grades, screen: Screen) -> None:
    """Print each promise, then the code that shows each fault."""
    verdicts = {verdict.check: verdict for verdict in grades.verdicts}
    found = [(check, verdicts[check.name]) for check in sort_checks(verdicts)]
    counts = Counter(verdict.status for verdict in grades.verdicts)
    counted = ", ".join(f"{counts[status]} {status}" for status in MARKS if counts[status])
    screen.heading(f"{f'{grades.subject.name} {grades.version}'.strip()}: {counted}")
    rows: list[list[Cell]] = []
    for check, verdict in found:
        mark = (MARKS[verdict.status], _STYLES[verdict.status])
        rows.append([mark, f"{check.name}: {check.promise}", _format_verdict(verdict)])
        if screen.plain:
            screen.block(f"{verdict.status:<8} {check.kind:<8} {check.name:<24} {_format_verdict(verdict)}".rstrip())
    if not screen.plain:
        screen.table(["", "promise", "seen"], rows)
    for check, verdict in found:
        if verdict.status == "breaks":
            code = textwrap.indent(check.reproduction(grades.subject), "    ")
            screen.block(f"\n{check.name}: {check.promise}\n  {_format_verdict(verdict)}\n\n{code}")
        elif verdict.status == "error":
            screen.block(f"\n{check.explain(grades.subject, verdict)}")


def _format_verdict(verdict: Verdict) -> str:
    seen = verdict.seen.splitlines()[-1] if verdict.status == "error" else verdict.seen
    return f"{seen} (declared: {verdict.reason})" if verdict.status == "excepted" else seen


def convert_to_json(grades: Sequence[Grades]) -> dict[str, Any]:
    """Return all grades as plain data; `docs/tools/conformance.py` renders it as a page."""
    return {
        "schema": SCHEMA, "dlx": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "date": datetime.now(UTC).date().isoformat(),
        "subjects": [
            {"name": each.subject.name, "version": each.version, "verdicts": [_row(each, v) for v in each.verdicts]}
            for each in grades
        ],
    }  # fmt: skip


def _row(grades: Grades, verdict: Verdict) -> dict[str, Any]:
    check = CHECKS[verdict.check]
    facts = {name: getattr(check, name) for name in ("promise", "kind", "about", "severity", "see")}
    broken = {"reproduction": check.reproduction(grades.subject)} if verdict.status in ("breaks", "excepted") else {}
    return asdict(verdict) | facts | broken
