"""What was found, for people and programs: a table on a terminal, plain lines in a pipe, JSON, and a page."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import dlx
from dlx.testing.check import CHECKS, Check, Verdict
from dlx.testing.subject import Subject

__all__ = ["ABOUT", "MARKS", "SCHEMA", "Grades", "as_json", "as_page", "as_text"]

SCHEMA = 1
"""Version of what ``--json`` prints."""

ABOUT = (
    "dtypes", "layouts", "read-only", "copies", "versions", "keywords", "errors", "refusals", "lifetimes", "threads",
    "leaks", "contract",
)  # fmt: skip
"""Rows of the table at a glance, in order."""

MARKS = {"keeps": "✓", "breaks": "✗", "excepted": "(✗)", "n/a": "-", "error": "!"}
REFUSES = "✓ʳ"
_COST = {
    "fatal": "the process may die, or memory is unsafe",
    "wrong": "wrong data, or lost rights, without a word",
    "refuses": "what should work is refused",
    "friction": "it costs a detour",
}


@dataclass(frozen=True)
class Grades:
    """Everything found about one subject."""

    subject: Subject
    version: str
    verdicts: tuple[Verdict, ...] = field(default=())

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.subject.name} {self.version}".strip()

    @property
    def status(self) -> int:
        """Exit status: 0 all kept, 1 something is broken, 2 the kit failed."""
        found = {verdict.status for verdict in self.verdicts}
        return 2 if "error" in found else int("breaks" in found)

    def counted(self) -> str:
        """Return how many promises came out how."""
        counts = Counter(verdict.status for verdict in self.verdicts)
        return ", ".join(f"{counts[status]} {status}" for status in MARKS if counts[status])

    def of(self, check: str) -> Verdict | None:
        """Return the verdict of one check, if it was run."""
        return next((verdict for verdict in self.verdicts if verdict.check == check), None)


def ordered(grades: Sequence[Grades]) -> list[Check]:
    """Return the checks that were run on any subject: by kind, then by what they are about."""
    run = {verdict.check for each in grades for verdict in each.verdicts}
    kinds = ("producer", "consumer", "adapter")
    return sorted(
        (check for check in CHECKS.values() if check.name in run),
        key=lambda check: (kinds.index(check.kind), ABOUT.index(check.about)),
    )


def as_text(grades: Grades, *, rich: bool = False) -> None:
    """Print one subject's table: drawn by rich where asked for, else a line for each promise."""
    rows = [(check, grades.of(check.name)) for check in ordered([grades])]
    head = f"{grades.title}: {grades.counted()}"
    if rich:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        colours = {"keeps": "green", "breaks": "bold red", "excepted": "yellow", "n/a": "dim", "error": "bold magenta"}
        table = Table(title=head, title_justify="left", box=None, pad_edge=False)
        for column in ("", "promise", "seen"):
            table.add_column(column)
        for check, verdict in rows:
            assert verdict is not None
            style = colours[verdict.status]
            quiet = "dim" if verdict.status in ("keeps", "n/a") else ""
            table.add_row(
                Text(MARKS[verdict.status], style), Text(f"{check.name}\n  {check.promise}", quiet),
                Text(_seen(verdict), quiet),
            )  # fmt: skip
        Console().print(table)
    else:
        print(head)
        for check, verdict in rows:
            assert verdict is not None
            print(f"{verdict.status:<8} {check.kind:<8} {check.name:<24} {_seen(verdict)}".rstrip())
    for check, verdict in rows:
        if verdict is not None and verdict.status == "breaks":
            print(f"\n{check.name}: {check.promise}\n  {_seen(verdict)}\n")
            print("\n".join(f"    {line}" for line in check.reproduction(grades.subject).splitlines()))
        elif verdict is not None and verdict.status == "error":
            print(f"\n{check.name}: the kit failed\n{verdict.seen}")


def _seen(verdict: Verdict) -> str:
    text = verdict.seen.splitlines()[-1] if verdict.status == "error" else verdict.seen
    return f"{text} (declared: {verdict.reason})" if verdict.status == "excepted" else text


def as_json(grades: Sequence[Grades]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "schema": SCHEMA, "dlx": dlx.__version__, "python": platform.python_version(), "platform": platform.platform(),
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


# ---- the page -------------------------------------------------------------------------------------------------------


def as_page(grades: Sequence[Grades], command: str, picture: str = "") -> str:
    """Return the report in Markdown."""
    today = datetime.now(UTC).date().isoformat()
    libraries = ", ".join(each.title for each in grades)
    page = [
        "# What DLPack libraries keep, and what they break",
        f"Graded on {today} by `{command}` (dlx {dlx.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, no GPU): {libraries}. "
        "Each library is a generic producer, met through `__dlpack__`, `__dlpack_device__` and its `from_dlpack`.",
        "A promise is one sentence of the DLPack specification, of the array API standard, or of plain safety. Each is "
        "tried, none is looked up. `✓` kept, `✓ʳ` kept by refusing with an exception, as the promise allows, `✗` "
        "broken, `-` not applicable. Another version may do better: run it again.",
    ]
    if picture:
        page.append(f"![Which library breaks which promise]({picture})")
    page += ["## At a glance", _glance(grades)]
    for kind, title in (("producer", "What a producer promises"), ("consumer", "What a consumer promises")):
        page += [f"## {title}", _promises(grades, kind)]
    page.append("## What is broken, and how to see it")
    page.append("Each piece of code fails with the versions above, and passes where the promise is kept.")
    for each in grades:
        page += _broken(each)
    return "\n\n".join(page) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _glance(grades: Sequence[Grades]) -> str:
    rows = []
    for kind in ("producer", "consumer", "adapter"):
        for about in ABOUT:
            names = [check.name for check in ordered(grades) if (check.kind, check.about) == (kind, about)]
            if not names:
                continue
            row = [f"{kind}: {about}"]
            for each in grades:
                found = [verdict.status for verdict in each.verdicts if verdict.check in names]
                broken = sum(status in ("breaks", "excepted") for status in found)
                kept = found.count("keeps")
                row.append(f"**✗ {broken}** of {broken + kept}" if broken else "✓" if kept else "-")
            rows.append(row)
    return _table(["", *(each.title for each in grades)], rows)


def _promises(grades: Sequence[Grades], kind: str) -> str:
    rows = []
    for check in ordered(grades):
        if check.kind == kind:
            found = [each.of(check.name) for each in grades]
            marks = ["" if verdict is None else _mark(verdict) for verdict in found]
            rows.append([f"`{check.name}`", check.promise, check.severity, *marks])
    legend = "; ".join(f"*{name}*: {text}" for name, text in _COST.items())
    return f"{_table(['', 'promise', 'costs', *(each.subject.name for each in grades)], rows)}\n\n{legend}."


def _mark(verdict: Verdict) -> str:
    if verdict.status == "keeps" and verdict.seen.startswith("refused"):
        return REFUSES
    return f"**{MARKS['breaks']}**" if verdict.status == "breaks" else MARKS[verdict.status]


def _broken(grades: Grades) -> list[str]:
    page = [f"### {grades.title}"]
    for check in ordered([grades]):
        verdict = grades.of(check.name)
        if verdict is None or verdict.status not in ("breaks", "excepted"):
            continue
        source = f" ({check.see})" if check.see else ""
        page.append(f"**`{check.name}`**: {check.promise}{source}\n\n{_seen(verdict)}")
        page.append(f"```python\n{check.reproduction(grades.subject)}\n```")
    if len(page) == 1:
        page.append("Nothing.")
    return page
