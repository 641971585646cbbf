"""The fast path for a type of a plugin, compared with numpy: a subclass of ndarray, found by an entry point.

This module is both the "framework" with the array type and its plugin. dlx finds the plugin through the metadata of a
distribution that exists during the measurement.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import dlx
from benchmarks.measure import compare, peer, ratio, round_robin, verdict

LIMIT = 1.10
_NAME = "benchmarks.owned"


@dlx.hookimpl
def dlx_adapters():
    """Return the plugin's adapter, which is numpy's for a subclass of its arrays."""
    from dlx_adapters import dlx_numpy

    class Owner(dlx_numpy.NumpyAdapter):
        """The subclass; it exports by numpy's exchange table, and imports by `load`."""

        api = 1
        name = package = _NAME
        types = (f"{_NAME}.Array",)
        containers = ()
        # Skip numpy's guards for subclasses with a __dict__: these arrays have no mask and no unit.
        fast_path = replace(dlx_numpy.NumpyAdapter.fast_path, types=types, guards=(), imports=False)

        def module(self):
            return sys.modules["numpy"]

        def load(self, tensor):
            return super().load(tensor).view(sys.modules[_NAME].Array)

    return [Owner()]


def owned(*, quick):
    """Measure each target for an array of the subclass and for a numpy array; print and return the ratios."""
    np = peer("numpy")
    if np is None:
        return []
    global Array
    Array = type("Array", (np.ndarray,), {"__module__": _NAME})
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / "benchmarks_owned-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmarks-owned\nVersion: 1\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[dlx]\n{_NAME} = {_NAME}\n", encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            array = np.arange(6, dtype="f4").reshape(2, 3)
            names = {"convert": dlx.convert, "a": array, "o": array.view(Array)}
            assert dlx.describe(names["o"]).framework == _NAME, dlx.adapters().broken
            return _measure_targets(names, quick=quick)
        finally:
            sys.path.remove(folder)


def _measure_targets(names, *, quick):
    targets = [to for to in ("torch", "dlx") if to == "dlx" or peer(to) is not None]
    codes = {to: (f'convert(o, to="{to}")', f'convert(a, to="{to}")') for to in targets}
    seconds, rounds = (0.001, 9) if quick else (0.003, 60)
    times = round_robin([code for pair in codes.values() for code in pair], names, seconds=seconds, rounds=rounds)
    print("\nA type that a plugin owns, ns: o is a subclass of ndarray with its own adapter; a is a numpy array")
    found = []
    for to, (ours, theirs) in codes.items():
        figure = compare(times[ours], times[theirs])
        met = figure["ratio"] <= LIMIT
        print(
            f"{figure['ours']:7.0f}  {ours:<26}/ {figure['theirs']:4.0f}  {theirs:<26}{ratio(figure):<20}"
            f"<= {LIMIT:<6}{verdict(met)}"
        )
        found.append({"to": to, "of": ours, "over": theirs, "limit": LIMIT, "met": met} | figure)
    return found
