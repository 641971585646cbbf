"""What was found, for people and programs: a table on a terminal, plain lines in a pipe, JSON, a page and a picture."""

from __future__ import annotations

import platform
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from dlx._support.screen import Cell, Screen
from dlx._support.svg import box, legend, page, text
from dlx._version import __version__
from dlx.testing.check import CHECKS, KINDS, Check, Verdict
from dlx.testing.subject import Subject

__all__ = ["ABOUT", "SCHEMA", "Grades", "as_json", "as_page", "as_picture", "as_text", "from_json", "ordered"]

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
    "wrong": "wrong data, or lost rights, silently",
    "refuses": "what should work is refused",
    "friction": "it costs a detour",
}


@dataclass(frozen=True)
class Grades:
    """Everything found about one subject."""

    subject: Subject
    version: str
    verdicts: tuple[Verdict, ...] = field(default=())
    code: Mapping[str, str] = field(default_factory=dict)  # what shows a broken promise, where it was made elsewhere

    def reproduction(self, check: Check) -> str:
        """Return code that shows how a promise is broken."""
        return self.code.get(check.name) or check.reproduction(self.subject)

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
    return sorted(
        (check for check in CHECKS.values() if check.name in run),
        key=lambda check: (KINDS.index(check.kind), ABOUT.index(check.about)),
    )


_STYLES = {"keeps": "good", "breaks": "bad", "excepted": "warn", "n/a": "quiet", "error": "bad"}


def as_text(grades: Grades, screen: Screen) -> None:
    """Show a table on a terminal, else a line for each promise; then the code that shows what is broken."""
    found = [(check, verdict) for check in ordered([grades]) if (verdict := grades.of(check.name)) is not None]
    screen.heading(f"{grades.title}: {grades.counted()}")
    if screen.plain:
        for check, verdict in found:
            screen.block(f"{verdict.status:<8} {check.kind:<8} {check.name:<24} {_seen(verdict)}".rstrip())
    else:
        rows: list[list[Cell]] = [
            [(MARKS[verdict.status], _STYLES[verdict.status]), f"{check.name}: {check.promise}", _seen(verdict)]
            for check, verdict in found
        ]
        screen.table(["", "promise", "seen"], rows)
    for check, verdict in found:
        if verdict.status == "breaks":
            code = textwrap.indent(grades.reproduction(check), "    ")
            screen.block(f"\n{check.name}: {check.promise}\n  {_seen(verdict)}\n\n{code}")
        elif verdict.status == "error":
            screen.block(f"\n{check.name}: the kit failed, which says nothing of {grades.subject.name}\n{verdict.seen}")


def _seen(verdict: Verdict) -> str:
    seen = verdict.seen.splitlines()[-1] if verdict.status == "error" else verdict.seen
    return f"{seen} (declared: {verdict.reason})" if verdict.status == "excepted" else seen


def as_json(grades: Sequence[Grades]) -> dict[str, Any]:
    """Return everything as plain data."""
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
    broken = {"reproduction": grades.reproduction(check)} if verdict.status in ("breaks", "excepted") else {}
    return asdict(verdict) | facts | broken


def from_json(document: Mapping[str, Any]) -> list[Grades]:
    """Return the grades in what `as_json` gave, in another environment perhaps.

    Raises
    ------
    ValueError
        If it is of another version.
    """
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema {document.get('schema')!r}, expected {SCHEMA}")
    names = [each.name for each in fields(Verdict)]
    found = []
    for each in document["subjects"]:
        verdicts = tuple(Verdict(**{name: row[name] for name in names}) for row in each["verdicts"])
        code = {row["check"]: row["reproduction"] for row in each["verdicts"] if "reproduction" in row}
        found.append(Grades(Subject(each["name"]), each["version"], verdicts, code))
    return found


# ---- the page -------------------------------------------------------------------------------------------------------


def as_page(grades: Sequence[Grades], command: str, picture: str = "") -> str:
    """Return the report in Markdown."""
    today = datetime.now(UTC).date().isoformat()
    libraries = ", ".join(each.title for each in grades)
    parts = [
        "# What DLPack libraries keep, and what they break",
        f"Graded on {today} by `{command}` (dlx {__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, no GPU): {libraries}. "
        "Each library is a generic producer, met through `__dlpack__`, `__dlpack_device__` and its `from_dlpack`.",
        "A promise is one sentence of the DLPack specification, of the array API standard, or of plain safety. Each is "
        "tried, none is looked up. `✓` kept, `✓ʳ` kept by refusing with an exception, as the promise allows, `✗` "
        "broken, `-` not applicable. Another version may do better: run it again.",
    ]
    if picture:
        parts.append(f"![Which library breaks which promise]({picture})")
    parts += ["## At a glance", _glance(grades)]
    for kind, title in (
        ("producer", "What a producer promises"),
        ("consumer", "What a consumer promises"),
        ("adapter", "What an adapter of dlx promises"),
    ):
        if not any(check.kind == kind for check in ordered(grades)):
            continue
        parts += [f"## {title}", _promises(grades, kind)]
    parts.append("## What is broken, and how to see it")
    parts.append("Each piece of code fails with the versions above, and passes where the promise is kept.")
    for each in grades:
        parts += _broken(each)
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _glance(grades: Sequence[Grades]) -> str:
    rows = []
    for kind in KINDS:
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
    promise = '<span class="sentence">promise</span>'  # which the site keeps wide
    return f"{_table(['', promise, 'costs', *(each.subject.name for each in grades)], rows)}\n\n{legend}."


def _mark(verdict: Verdict) -> str:
    if verdict.status == "keeps" and verdict.seen.startswith("refused"):
        return REFUSES
    return f"**{MARKS['breaks']}**" if verdict.status == "breaks" else MARKS[verdict.status]


def _marked(sentence: str) -> str:
    """Mark names with double underscores as code, which Markdown takes for bold words else."""
    parts = sentence.split("`")
    parts[::2] = [re.sub(r"[\w.]*__\w+__\w*(\(\))?", r"`\g<0>`", each) for each in parts[::2]]
    return "`".join(parts)


def _broken(grades: Grades) -> list[str]:
    parts = [f"### {grades.title}"]
    for check in ordered([grades]):
        verdict = grades.of(check.name)
        if verdict is None or verdict.status not in ("breaks", "excepted"):
            continue
        source = f" ({check.see})" if check.see else ""
        parts.append(f"**`{check.name}`**: {_marked(check.promise + source)}\n\n{_marked(_seen(verdict))}")
        parts.append(f"```python\n{grades.reproduction(check)}\n```")
    if len(parts) == 1:
        parts.append("Nothing.")
    return parts


# ---- the picture ----------------------------------------------------------------------------------------------------

_SIZE, _LEFT, _TOP, _WIDE = 17, 190, 136, 24
_FILLS = {
    "keeps": ("#aceebb", "#1f6f34"),
    "fatal": ("#a40e26", "#ff4d43; stroke: #ffd8d3"),
    "wrong": ("#e5534b", "#a8322c"),
    "refuses": ("#d4a72c", "#d29922"),
    "friction": ("#f2d98a", "#8a6d1d"),
    "na": ("#eaeef2", "#21262d"),
}


def as_picture(grades: Sequence[Grades]) -> str:
    """Return which library breaks which promise as one SVG; colours say what a broken one costs."""
    checks = [check for check in ordered(grades) if check.kind != "adapter"]
    columns = [[check for check in checks if check.kind == kind] for kind in ("producer", "consumer")]
    columns = [column for column in columns if column]
    block = _LEFT + _WIDE * len(grades) + 86  # the last name leans over
    rows = max((len(column) + len({check.about for check in column}) for column in columns), default=0)
    width, height = block * len(columns) + 10, _TOP + rows * _SIZE + 46
    parts = []
    for number, column in enumerate(columns):
        left = number * block + _LEFT
        parts.append(text(number * block + 12, 22, f"as a {column[0].kind}", 'font-weight="600"'))
        for i, each in enumerate(grades):
            at = f'transform="translate({left + i * _WIDE + 16},{_TOP - 8}) rotate(-55)"'
            parts.append(text(0, 0, each.title[:22], at))
        y, about = _TOP, ""
        for check in column:
            if check.about != about:
                about = check.about
                parts.append(text(number * block + 12, y + 12, about, 'class="quiet"'))
                y += _SIZE
            parts.append(text(left - 8, y + 12, check.name, 'text-anchor="end"'))
            for i, each in enumerate(grades):
                verdict = each.of(check.name)
                if verdict is not None:
                    kind = {"breaks": check.severity, "excepted": check.severity, "keeps": "keeps"}
                    hint = f"{each.title}, {check.name}: {verdict.status}"
                    mark = kind.get(verdict.status, "na")
                    parts.append(box(left + i * _WIDE + 2, y + 1, _WIDE - 4, _SIZE - 3, mark, hint))
            y += _SIZE
    broken = {severity: f"broken: {severity}" for severity in _COST}
    parts += legend(12, height - 26, {"keeps": "kept", **broken, "na": "not applicable"})
    return page((width, height), "Which library breaks which promise", _FILLS, parts)
