"""`nox -s bench`: dlx, its peers and a floor in C, measured in one process.

Rounds of all cases are interleaved, so that a busy machine slows all of them. A ratio is minimum over minimum, with
its spread: the middle half of the ratios of single rounds.
"""

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path

from benchmarks.batch import batch
from benchmarks.cliffs import cliffs
from benchmarks.columns import columns
from benchmarks.compound import compound
from benchmarks.conversions import conversions, fresh, scene
from benchmarks.copies import copies
from benchmarks.count import count
from benchmarks.cuda import cuda
from benchmarks.files import files
from benchmarks.gradients import gradients
from benchmarks.growth import growth
from benchmarks.imports import fresh_process, imports
from benchmarks.moves import moves
from benchmarks.options import options
from benchmarks.owned import owned
from benchmarks.pairs import page, pairs
from benchmarks.picture import draw, heat_map
from benchmarks.sharing import sharing
from benchmarks.threads import threads
from benchmarks.transforms import transforms
from benchmarks.trees import trees
from benchmarks.using import using
from benchmarks.verbs import verbs
from benchmarks.views import views

PEERS = ("numpy", "torch", "apache-tvm-ffi", "cuda-core", "arraybridge", "optree", "safetensors")
PARTS = (
    "imports",
    "owned",
    "conversions",
    "fresh",
    "where",
    "pairs",
    "copies",
    "trees",
    "verbs",
    "options",
    "views",
    "using",
    "cliffs",
    "gradients",
    "transforms",
    "batch",
    "moves",
    "cuda",
    "files",
    "columns",
    "compound",
    "share",
    "growth",
    "threads",
)


def versions():
    """Return the versions of Python and the installed peers."""
    found = {"python": platform.python_version()}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(parts, *, quick):
    """Run the requested parts; return their results."""
    found = {"versions": versions(), "quick": quick}
    print(", ".join(f"{name} {text}" for name, text in found["versions"].items()))
    if "imports" in parts:
        found["imports"] = imports(rounds=3 if quick else 11)
        found["fresh_process"] = fresh_process(rounds=2 if quick else 6)
    if "owned" in parts:  # before dlx reads the entry points, once
        found["owned"] = owned(quick=quick)
    if "files" in parts:
        found["files"] = files(quick=quick)
    if "columns" in parts:
        found["columns"] = columns(quick=quick)
    if "compound" in parts:
        found["compound"] = compound(quick=quick)
    names, cases = scene()
    if "a" not in names:
        return found
    if "conversions" in parts:
        found["conversions"] = conversions(names, cases, quick=quick)
    if "fresh" in parts:
        found["fresh"] = fresh(names, quick=quick)
    if "where" in parts and "t" in names:
        from benchmarks.where import where  # needs torch

        found["where"] = where(names, quick=quick)
    if "pairs" in parts:
        found["pairs"] = pairs(quick=quick)
    if "copies" in parts:
        found["copies"] = copies(names["np"], (1,) if quick else (1, 10, 100))
    if "trees" in parts and "t" in names:
        found["trees"] = trees(names, quick=quick)
    if "verbs" in parts and "t" in names:
        found["verbs"] = verbs(names, quick=quick)
    if "options" in parts:
        found["options"] = options(names["np"], quick=quick)
    if "views" in parts and "t" in names:
        found["views"] = views(names, quick=quick)
    if "using" in parts and "t" in names:
        found["using"] = using(names, quick=quick)
    if "cliffs" in parts and "t" in names:
        found["cliffs"] = cliffs(names, quick=quick)
    if "gradients" in parts and "t" in names:
        found["gradients"] = gradients(quick=quick)
    if "transforms" in parts and "t" in names:
        found["transforms"] = transforms(quick=quick)
    if "share" in parts:
        found["share"] = sharing(names, quick=quick)
    if "growth" in parts:
        found["growth"] = growth(names, quick=quick)
    if "threads" in parts:
        found["threads"] = threads(names, quick=quick)
    if "cuda" in parts:
        found["cuda"] = cuda(quick=quick)
    if "moves" in parts:
        found["moves"] = moves(quick=quick)
    if "batch" in parts:
        found["batch"] = batch((1, 100) if quick else (1, 10, 100, 1000))
    return found


def main():
    """Run the requested parts and write the requested files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all results")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the conversions, or the pairs if missing")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="update the table of pairs in a page")
    parser.add_argument(
        "--from", metavar="FILE", type=Path, dest="results", help="draw the results of --json; measure nothing"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, small copies only")
    parser.add_argument("--only", metavar="PART", nargs="+", choices=PARTS, default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--count", action="store_true", help="count instructions with valgrind instead")
    options = parser.parse_args()
    if options.results:
        found = json.loads(options.results.read_text(encoding="utf-8"))
    elif options.count:
        found = {"versions": versions(), "count": count()}
    else:
        found = measure(options.only, quick=options.quick)
    if options.svg and not found.keys() & {"conversions", "pairs"}:
        parser.error("--svg needs the results of conversions or pairs")
    if options.markdown and "pairs" not in found:
        parser.error("--markdown needs the results of pairs")
    for path, write in (
        (options.json, lambda: json.dumps(found, indent=1) + "\n"),
        (options.svg, lambda: draw(found) if "conversions" in found else heat_map(found)),
        (options.markdown, lambda: page(options.markdown.read_text(encoding="utf-8"), found["pairs"])),
    ):
        if path:
            path.write_text(write(), encoding="utf-8")
            print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
