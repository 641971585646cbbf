"""Measure the matrix: ``python -m matrix`` prints the page, ``--write docs`` writes page and picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from matrix import measure, render


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m matrix", description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="write matrix.md and matrix.svg there")
    options = parser.parse_args()
    cells = {(table, source, target): outcome for table, source, target, outcome in measure.measured(progress=True)}
    text = render.page(cells, measure.versions())
    wrong = [f"{' / '.join(at)}: {outcome}" for at, outcome in cells.items() if outcome.startswith("WRONG")]
    if wrong:
        print("\n".join(wrong))
        return 1
    if options.write is None:
        print(text)
    else:
        (options.write / "matrix.md").write_text(text)
        (options.write / "matrix.svg").write_text(render.picture(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
