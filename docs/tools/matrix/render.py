"""Write the matrix as a page and a picture, and read the page, which is the tests' expectation."""

from __future__ import annotations

from dlx.cli.commands.dtypes import picture as draw_dtypes
from matrix.sources import FURTHER

START = "dtypes out of "

Cells = dict[tuple[str, str, str], str]  # (table, source, target) -> outcome

MEANING = {
    "same": "the object itself, which is already an array of the target",
    "shared": "the same memory",
    "viewed": "the same memory, passed under another dtype of the same width and viewed as the original one",
    "copied": "a copy; `copy=False` raises an error with the reason",
    "tree": "a container without arrays, which passes through",
    "…Error": "refused with a reason and a fix (classes of `dlx.errors`)",
    "-": "the source framework has no such dtype",
    "?": "not measured: the two are in separate environments",
}
HEAD = """# Dtypes and odd sources

Each cell is the result of `dlx.convert(source, to=target)`, called with `copy=None`, `False` and `True`. The result was
compared with `dlx.plan`, with the address of the source, and with each of its bits. The cells show `copy=None`.
Memory is aligned to 64 bytes unless a row says otherwise (jax requires 64; numpy often allocates with 16).

`nox -s matrix` writes this page, and `make test SLOW=1` compares it with the installed frameworks. tensorflow, paddle,
mlx, warp and onnxruntime were measured with dlx and numpy in the environments of `nox -s frameworks`.

![The matrix of dtypes](matrix.svg)
"""


def format_page(cells: Cells, versions: dict[str, str]) -> str:
    """Return the page in Markdown."""
    parts = [HEAD, "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".\n"]
    parts.append("\n".join(f"- **{word}**: {meaning}" for word, meaning in MEANING.items()) + "\n")
    for table in dict.fromkeys(table for table, _, _ in cells):
        targets = list(dict.fromkeys(target for t, _, target in cells if t == table))
        parts.append(f"## {table[0].upper()}{table[1:]}\n")
        rows = [["", *targets], ["---"] * (len(targets) + 1)]
        for source in dict.fromkeys(source for t, source, _ in cells if t == table):
            outcomes = [cells.get((table, source, target), "?") for target in targets]
            if not set(outcomes) <= {"-", "?"}:
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
            named = line.removeprefix("Versions: ").rstrip(".").split(", ")
            versions = dict(pair.split() for pair in named if pair)  # empty without frameworks
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


def is_further(at: tuple[str, str, str]) -> bool:
    """Return whether a cell is about a framework with a separate environment."""
    table, _, target = at
    return target in FURTHER or table.removeprefix(START) in FURTHER


def draw_picture(cells: Cells) -> str:
    """Return the tables of dtypes as one SVG."""
    return draw_dtypes(
        {(t.removeprefix(START), source, to): each for (t, source, to), each in cells.items() if t.startswith(START)}
    )
