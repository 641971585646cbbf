"""The matrix as a page and as a picture; the page is read back as the expectation of the tests."""

from __future__ import annotations

from html import escape

Cells = dict[tuple[str, str, str], str]  # (table, source, target) -> outcome

MEANING = {
    "same": "the object itself: it is in the target framework already",
    "shared": "the same memory",
    "viewed": "the same memory, handed over under another dtype of the same width and viewed as its own again",
    "copied": "a copy; `copy=False` refuses and says why",
    "…Error": "refused, with what was found and what to do (classes of `dlx.errors`)",
    "-": "the source framework has no such dtype",
    "?": "a framework that was not installed",
}
HEAD = """# What becomes of what

Each cell is one call, `dlx.convert(source, to=target)`. It was tried with `copy=None`, `False` and `True`, compared
with what `dlx.plan` had said, with the address before and after, and bit by bit with the values that went in. The cells
show `copy=None`. Memory is aligned to 64 bytes where nothing else is said (jax wants that much; numpy often gives 16).

Made by `make matrix`, and compared by `make test`: a change of behaviour is a change of this page.

![The matrix of dtypes](matrix.svg)
"""


def page(cells: Cells, versions: dict[str, str]) -> str:
    """Return the page, in Markdown."""
    parts = [HEAD, "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".\n"]
    parts.append("\n".join(f"- **{word}**: {meaning}" for word, meaning in MEANING.items()) + "\n")
    for table in dict.fromkeys(table for table, _, _ in cells):
        targets = list(dict.fromkeys(target for t, _, target in cells if t == table))
        parts.append(f"## {table[0].upper()}{table[1:]}\n")
        rows = [["", *targets], ["---"] * (len(targets) + 1)]
        for source in dict.fromkeys(source for t, source, _ in cells if t == table):
            outcomes = [cells[table, source, target] for target in targets]
            if set(outcomes) != {"-"}:
                rows.append([f"`{source}`", *outcomes])
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    return "\n".join(parts)


def read_page(text: str) -> tuple[Cells, dict[str, str]]:
    """Return (cells, versions) of a page."""
    cells: Cells = {}
    versions: dict[str, str] = {}
    table, targets = "", []
    for line in text.splitlines():
        if line.startswith("Versions: "):
            pairs = (part.split() for part in line.removeprefix("Versions: ").rstrip(".").split(", "))
            versions = dict(pairs)
        elif line.startswith("## "):
            table = line[3].lower() + line[4:]
        elif line.startswith("| ") and not line.startswith("| ---"):
            columns = line.strip("| ").split(" | ")
            if line.startswith("| `"):
                source = columns.pop(0).strip("`")
                cells |= {(table, source, target): each for target, each in zip(targets, columns, strict=True)}
            else:
                targets = columns
    return cells, versions


# ---- the picture: one column per pair of frameworks, one row per dtype -----------------------------------------------

_SIZE, _GAP, _LEFT, _TOP = 15, 14, 150, 92
_STYLE = """
svg { font-family: system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 12px; }
.ground { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; }
.same { fill: #d1d9e0; } .shared { fill: #1a7f37; } .viewed { fill: #0969da; } .copied { fill: #d4a72c; }
.refused { fill: #ffffff; stroke: #cf222e; stroke-width: 1.2; }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; } text { fill: #f0f6fc; } .quiet { fill: #9198a1; }
.same { fill: #3d444d; } .shared { fill: #3fb950; } .viewed { fill: #4493f8; } .copied { fill: #d29922; }
.refused { fill: #0d1117; stroke: #f85149; } }
"""


def _kind(outcome: str) -> str:
    return "refused" if outcome.endswith("Error") else outcome


def picture(cells: Cells) -> str:
    """Return the tables of dtypes as one SVG."""
    tables = [table for table in dict.fromkeys(table for table, _, _ in cells) if table.startswith("dtypes")]
    dtypes = list(dict.fromkeys(source for table, source, _ in cells if table in tables))
    targets = list(dict.fromkeys(target for table, _, target in cells if table in tables))
    block = len(targets) * _SIZE + _GAP
    width, height = _LEFT + block * len(tables) + 10, _TOP + len(dtypes) * _SIZE + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>What becomes of each dtype</title><style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for row, dtype in enumerate(dtypes):
        parts.append(f'<text x="{_LEFT - 8}" y="{_TOP + row * _SIZE + 11}" text-anchor="end">{escape(dtype)}</text>')
    for number, table in enumerate(tables):
        x = _LEFT + number * block
        name = table.removeprefix("dtypes out of ")
        parts.append(f'<text x="{x}" y="18" font-weight="600">{name} →</text>')
        for column, target in enumerate(targets):
            at = x + column * _SIZE + 11
            parts.append(f'<text class="quiet" transform="translate({at},{_TOP - 6}) rotate(-90)">{target}</text>')
            for row, dtype in enumerate(dtypes):
                outcome = cells.get((table, dtype, target), "-")
                if outcome not in ("-", "?"):
                    parts.append(
                        f'<rect class="{_kind(outcome)}" x="{x + column * _SIZE + 1}" y="{_TOP + row * _SIZE + 1}" '
                        f'width="{_SIZE - 3}" height="{_SIZE - 3}" rx="2"/>'
                    )
    x, y = _LEFT, height - 24
    for kind in ("shared", "viewed", "copied", "refused", "same"):
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{_SIZE - 3}" height="{_SIZE - 3}" rx="2"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{kind}</text>')
        x += 84
    return "\n".join([*parts, "</svg>", ""])
