"""The matrix as a page and as a picture; the page is read back as the expectation of the tests."""

from __future__ import annotations

from dlx.cli.commands.dtypes import picture as drawn
from matrix.sources import FURTHER

START = "dtypes out of "

Cells = dict[tuple[str, str, str], str]  # (table, source, target) -> outcome

MEANING = {
    "same": "the object itself: it is in the target framework already",
    "shared": "the same memory",
    "viewed": "the same memory, handed over under another dtype of the same width and viewed as its own again",
    "copied": "a copy; `copy=False` refuses and says why",
    "tree": "a container without arrays: what is in it passes through",
    "…Error": "refused, with what was found and what to do (classes of `dlx.errors`)",
    "-": "the source framework has no such dtype",
    "?": "not tried: the two do not live in one environment",
}
HEAD = """# What becomes of what

Each cell is one call, `dlx.convert(source, to=target)`. It was tried with `copy=None`, `False` and `True`, compared
with what `dlx.plan` had said, with the address before and after, and bit by bit with the values that went in. The cells
show `copy=None`. Memory is aligned to 64 bytes where nothing else is said (jax wants that much; numpy often gives 16).

Made by `nox -s matrix`, and compared by `make test SLOW=1`: a change of behaviour is a change of this page. tensorflow,
paddle, mlx, warp and onnxruntime were tried in the environments that `nox -s frameworks` keeps, beside dlx and
numpy.

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
            versions = dict(pair.split() for pair in named if pair)  # none without a framework
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
    """Return whether a cell is about a framework that lives in an environment of its own."""
    table, _, target = at
    return target in FURTHER or table.removeprefix(START) in FURTHER


def picture(cells: Cells) -> str:
    """Return the tables of dtypes as one SVG."""
    return drawn(
        {(t.removeprefix(START), source, to): each for (t, source, to), each in cells.items() if t.startswith(START)}
    )
