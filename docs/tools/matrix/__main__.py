"""Measure the matrix: ``python -m matrix`` prints the page, ``--write docs`` writes page and picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from matrix import measure, render
from matrix.sources import FRAMEWORKS, FURTHER


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m matrix", description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="write matrix.md and matrix.svg there")
    parser.add_argument("--further", action="store_true", help="measure the frameworks that have separate environments")
    options = parser.parse_args()
    measure_cells, names = (measure.measure_further, FURTHER) if options.further else (measure.measure_all, FRAMEWORKS)
    cells = {(table, source, target): outcome for table, source, target, outcome in measure_cells(progress=True)}
    wrong = [f"{' / '.join(at)}: {outcome}" for at, outcome in cells.items() if outcome.startswith("WRONG")]
    if wrong:
        print("\n".join(wrong))
        return 1
    versions = measure.read_versions(names)
    if options.write is None:
        print(render.format_page(cells, versions))
    else:
        written, known = render.read_page((options.write / "matrix.md").read_text())
        if options.further:
            cells = written | cells
        else:  # keep the cells of the further frameworks
            cells |= {at: each for at, each in written.items() if render.is_further(at)}
        versions = {name: (known | versions)[name] for name in (*FRAMEWORKS, *FURTHER) if name in known | versions}
        (options.write / "matrix.md").write_text(render.format_page(cells, versions))
        (options.write / "matrix.svg").write_text(render.draw_picture(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
