"""Write the page and the picture of conformance: ``python -m conformance docs/conformance.md GRADES.json...``.

``python -m dlx.testing --json`` prints the grades, in this or another environment.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlx import __version__
from dlx._support.svg import box, legend, page, text
from dlx.testing.check import KINDS, Check
from dlx.testing.report import ABOUT, MARKS, SCHEMA, sort_checks

REFUSES = "✓ʳ"
COST = {
    "fatal": "the process may crash, or memory is unsafe",
    "wrong": "wrong data or wrong write access, without an error",
    "refuses": "a valid call is refused",
    "friction": "a detour is needed",
}


class Library:
    """The grades of one library, from a document of the kit."""

    def __init__(self, subject: dict[str, Any]) -> None:
        self.name = subject["name"]
        self.title = f"{self.name} {subject['version']}".strip()
        self.verdicts: dict[str, dict[str, Any]] = {row["check"]: row for row in subject["verdicts"]}


def read(document: dict[str, Any]) -> list[Library]:
    """Return the libraries of a document of the kit."""
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema {document.get('schema')!r}, expected {SCHEMA}")
    return [Library(each) for each in document["subjects"]]


def list_checks(libraries: Sequence[Library]) -> list[Check]:
    """Return the checks of all libraries, in order."""
    return sort_checks({name for each in libraries for name in each.verdicts})


# ---- the page -------------------------------------------------------------------------------------------------------


def as_page(libraries: Sequence[Library], picture: str) -> str:
    """Return the report in Markdown."""
    today = datetime.now(UTC).date().isoformat()
    titles = ", ".join(each.title for each in libraries)
    parts = [
        "# Which DLPack promises libraries keep",
        f"Graded on {today} by `python -m dlx.testing --json` (dlx {__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, no GPU): {titles}. "
        "Each library is tested as a generic producer and consumer: `__dlpack__`, `__dlpack_device__`, `from_dlpack`.",
        "A promise is one sentence of the DLPack specification or the array API standard, or a rule of memory safety. "
        "Every result comes from a test. `✓` kept, `✓ʳ` kept by an exception, if the promise allows one, `✗` broken, "
        "`-` not applicable. Other versions may differ: [grade your version](how-to/grade-a-library.md).",
    ]
    parts += [f"![Which library breaks which promise]({picture})", "## At a glance", _glance(libraries)]
    for kind, title in (
        ("producer", "What a producer promises"),
        ("consumer", "What a consumer promises"),
        ("adapter", "What an adapter of dlx promises"),
    ):
        if not any(check.kind == kind for check in list_checks(libraries)):
            continue
        parts += [f"## {title}", _promises(libraries, kind)]
    parts.append("## Broken promises, with code")
    parts.append("Each program fails with the versions above, and passes if the promise is kept.")
    for each in libraries:
        parts += _broken(each)
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _glance(libraries: Sequence[Library]) -> str:
    rows = []
    for kind in KINDS:
        for about in ABOUT:
            names = [check.name for check in list_checks(libraries) if (check.kind, check.about) == (kind, about)]
            if not names:
                continue
            row = [f"{kind}: {about}"]
            for each in libraries:
                found = [row["status"] for name, row in each.verdicts.items() if name in names]
                broken = sum(status in ("breaks", "excepted") for status in found)
                kept = found.count("keeps")
                row.append(f"**✗ {broken}** of {broken + kept}" if broken else "✓" if kept else "-")
            rows.append(row)
    return _table(["", *(each.title for each in libraries)], rows)


def _promises(libraries: Sequence[Library], kind: str) -> str:
    rows = []
    for check in list_checks(libraries):
        if check.kind == kind:
            marks = [_mark(each.verdicts.get(check.name)) for each in libraries]
            rows.append([f"`{check.name}`", check.promise, check.severity, *marks])
    legend = "; ".join(f"*{name}*: {text}" for name, text in COST.items())
    promise = '<span class="sentence">promise</span>'  # a wide column on the site
    return f"{_table(['', promise, 'costs', *(each.name for each in libraries)], rows)}\n\n{legend}."


def _mark(verdict: dict[str, Any] | None) -> str:
    if verdict is None:
        return ""
    if verdict["status"] == "keeps" and verdict["seen"].startswith("refused"):
        return REFUSES
    mark = MARKS[verdict["status"]]
    return f"**{mark}**" if verdict["status"] == "breaks" else mark


def _mark_names(sentence: str) -> str:
    """Mark names with double underscores as code, because Markdown makes them bold."""
    parts = sentence.split("`")
    parts[::2] = [re.sub(r"[\w.]*__\w+__\w*(\(\))?", r"`\g<0>`", each) for each in parts[::2]]
    return "`".join(parts)


def _broken(library: Library) -> list[str]:
    parts = [f"### {library.title}"]
    for check in sort_checks(library.verdicts):
        verdict = library.verdicts[check.name]
        if verdict["status"] not in ("breaks", "excepted"):
            continue
        source = f" ({check.see})" if check.see else ""
        declared = f" (declared: {verdict['reason']})" if verdict["status"] == "excepted" else ""
        parts.append(
            f"**`{check.name}`**: {_mark_names(check.promise + source)}\n\n{_mark_names(verdict['seen'] + declared)}"
        )
        parts.append(f"```python\n{verdict['reproduction']}\n```")
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


def as_picture(libraries: Sequence[Library]) -> str:
    """Return one SVG of the libraries and their broken promises, coloured by severity."""
    checks = [check for check in list_checks(libraries) if check.kind != "adapter"]
    columns = [[check for check in checks if check.kind == kind] for kind in ("producer", "consumer")]
    parts, top = [], 0
    for column in filter(None, columns):
        parts.append(text(12, top + 22, f"as a {column[0].kind}", 'font-weight="600"'))
        for i, each in enumerate(libraries):
            at = f'transform="translate({_LEFT + i * _WIDE + 16},{top + _TOP - 8}) rotate(-55)"'
            parts.append(text(0, 0, each.title[:22], at))
        y, about = top + _TOP, ""
        for check in column:
            if check.about != about:
                about = check.about
                parts.append(text(12, y + 12, about, 'class="quiet"'))
                y += _SIZE
            parts.append(text(_LEFT - 8, y + 12, check.name, 'text-anchor="end"'))
            for i, each in enumerate(libraries):
                if check.name in each.verdicts:
                    status = each.verdicts[check.name]["status"]
                    kind = {"breaks": check.severity, "excepted": check.severity, "keeps": "keeps"}
                    hint = f"{each.title}, {check.name}: {status}"
                    mark = kind.get(status, "na")
                    parts.append(box(_LEFT + i * _WIDE + 2, y + 1, _WIDE - 4, _SIZE - 3, mark, hint))
            y += _SIZE
        top = y + 24
    broken = {severity: f"broken: {severity}" for severity in COST}
    parts += legend(12, top, {"keeps": "kept", **broken, "na": "not applicable"})
    width = max(_LEFT + _WIDE * len(libraries) + 96, 740)  # for the slanted last name, and for the legend
    return page((width, top + 30), "Which library breaks which promise", _FILLS, parts)


def main() -> int:
    """Write both files; return 2 if the kit failed in a check."""
    target, *files = map(Path, sys.argv[1:])
    libraries = [each for file in files for each in read(json.loads(file.read_text(encoding="utf-8")))]
    target.write_text(as_page(libraries, target.with_suffix(".svg").name), encoding="utf-8")
    target.with_suffix(".svg").write_text(as_picture(libraries), encoding="utf-8")
    print(f"{target}: {len(libraries)} libraries, {len(list_checks(libraries))} promises")
    return 2 if any(row["status"] == "error" for each in libraries for row in each.verdicts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
