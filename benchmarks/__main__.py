"""`make bench`: ratios of dlx to the frameworks' own functions, measured in one process.

Rounds of both sides are interleaved, so that a busy machine slows both. A ratio is minimum over minimum; beside it
stands its spread, the middle half of the ratios of single rounds. `--json FILE` writes everything that was measured.
"""

import argparse
import gc
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import dlx
from dlx import native

SIZES = (1, 10, 100)  # megabytes
FRAMEWORKS = ("numpy", "torch", "cupy", "jax", "tensorflow", "paddle", "mlx", "pyarrow", "PIL", "ml_dtypes", "tvm_ffi")
CONTIGUOUS, STRIDED = 1.1, 1.3  # goals for copies: at most this multiple of numpy's time
IMPORT_MS = 30.0


def peer(name):
    """Return a module, or None with a word about it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"note: {name} is not installed; comparisons with it are skipped")
        return None


def race(*functions, number=1, rounds=7):
    """Return the seconds per call of each function in every round, rounds interleaved; a first round warms up."""
    times = [[] for _ in functions]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds + 1):
            for function, kept in zip(functions, times, strict=True):
                start = time.perf_counter()
                for _ in range(number):
                    function()
                kept.append((time.perf_counter() - start) / number)
    finally:
        gc.enable()
    return [kept[1:] for kept in times]


def compare(ours, theirs):
    """Return the minimums, their ratio, and the middle half of the ratios of single rounds."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"ours": min(ours), "theirs": min(theirs), "ratio": min(ours) / min(theirs), "spread": [low, high]}


def verdict(met):
    """Return a goal's outcome as text."""
    return "met" if met else "MISSED"


def ratio(figure):
    """Return one ratio as text, its spread in brackets."""
    return f"{figure['ratio']:.2f} [{figure['spread'][0]:.2f} {figure['spread'][1]:.2f}]"


# ---- copies ----------------------------------------------------------------------------------------------------------


def layouts(np, dtype, megabytes):
    """Give (name, array, goal), each with `megabytes` of elements."""
    items = megabytes * 10**6 // np.dtype(dtype).itemsize
    rows = columns = int(items**0.5)
    twice = np.arange(rows * columns * 2).astype(dtype)
    whole = twice[: rows * columns].reshape(rows, columns)
    (readonly := whole.view()).flags.writeable = False
    yield "contiguous", whole, CONTIGUOUS
    yield "read-only", readonly, CONTIGUOUS
    yield "transposed", whole.T, CONTIGUOUS
    yield "F-order", np.asfortranarray(whole), CONTIGUOUS
    yield "[:, ::2]", twice.reshape(rows, columns * 2)[:, ::2], STRIDED
    yield "[::-1]", whole[::-1], STRIDED
    yield "[:, ::-1]", whole[:, ::-1], STRIDED
    yield "to rows", whole.T, STRIDED


def copies(np):
    """Measure copies that keep the order of dimensions, and the row-major copy that some consumers need."""
    print("\nCopies: time of dlx.convert(a, to='dlx', copy=True) over np.copy(a); after it that of its C part alone.")
    print("to rows: the C part alone, for a consumer of row-major tensors, over np.ascontiguousarray(a)")
    print(f"{'layout':<12}{'dtype':<9}" + "".join(f"{f'{size} MB':<25}" for size in SIZES) + "goal    result  C part")
    found = {}
    for dtype in ("float32", "uint8", "float64"):
        for size in SIZES:
            for layout, array, goal in layouts(np, dtype, size):
                key = {"layout": layout, "dtype": dtype, "megabytes": size, "goal": goal}
                found[layout, dtype, size] = key | _copy(np, layout, array, rounds={1: 25, 10: 11, 100: 5}[size])
    for layout, dtype in dict.fromkeys((layout, dtype) for layout, dtype, _ in found):
        row = [found[layout, dtype, size] for size in SIZES]
        met = [verdict(all(figure[key] <= figure["goal"] for figure in row)) for key in ("ratio", "core")]
        cells = "".join(f"{ratio(figure)} {figure['core']:.2f}".ljust(25) for figure in row)
        print(f"{layout:<12}{dtype:<9}{cells}<= {row[0]['goal']:<5}{met[0]:<8}{met[1]}")
    return list(found.values())


def _copy(np, layout, array, rounds):
    tensor = dlx.convert(array, to="dlx")
    if layout == "to rows":
        core, own = race(lambda: native.tensor_copy(tensor, False), lambda: np.ascontiguousarray(array), rounds=rounds)
        return compare(core, own) | {"core": min(core) / min(own)}
    whole, core, own = race(
        lambda: dlx.convert(array, to="dlx", copy=True),
        lambda: native.tensor_copy(tensor, True),
        lambda: np.copy(array),
        rounds=rounds,
    )
    return compare(whole, own) | {"core": min(core) / min(own)}


# ---- calls -----------------------------------------------------------------------------------------------------------


def calls(np, torch, tvm_ffi):
    """Measure single conversions of a small array that share memory; there is no goal yet for the road in Python."""
    print("\nCalls: time of dlx.convert on a float32 array of shape (4, 4) over the framework's own function")
    print(f"{'conversion':<18}{'dlx µs':>8}  {'own function':<20}{'own µs':>8}  {'ratio':<20}goal")
    array = np.ones((4, 4), np.float32)
    races = [("numpy -> dlx", array, "dlx", "np.from_dlpack", lambda: np.from_dlpack(array))]
    if torch is not None:
        tensor = torch.ones(4, 4)
        races += [
            ("numpy -> torch", array, "torch", "torch.from_numpy", lambda: torch.from_numpy(array)),
            ("numpy -> torch", array, "torch", "torch.from_dlpack", lambda: torch.from_dlpack(array)),
            ("torch -> numpy", tensor, "numpy", "t.numpy", lambda: tensor.numpy()),
            ("torch -> numpy", tensor, "numpy", "np.from_dlpack", lambda: np.from_dlpack(tensor)),
        ]
        if tvm_ffi is not None:
            races.append(("torch -> dlx", tensor, "dlx", "tvm_ffi.from_dlpack", lambda: tvm_ffi.from_dlpack(tensor)))
    found = []
    for name, obj, to, own, function in races:
        figure = compare(*race(lambda obj=obj, to=to: dlx.convert(obj, to=to), function, number=2000, rounds=9))
        found.append({"conversion": name, "own": own} | figure)
        mine, other = figure["ours"] * 1e6, figure["theirs"] * 1e6
        print(f"{name:<18}{mine:>8.2f}  {own:<20}{other:>8.2f}  {ratio(figure):<20}none")
    return found


# ---- import ----------------------------------------------------------------------------------------------------------


def imports():
    """Measure `import dlx` over bare Python, in processes of their own, and list the frameworks that came with it."""
    loaded = f"print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    codes = {"bare": "import sys", "import dlx": "import sys, dlx", "dlx.convert": "import sys, dlx; dlx.convert"}
    times = {name: [] for name in codes}
    frameworks = {}
    for _ in range(11):
        for name, code in codes.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", f"{code}; {loaded}"], capture_output=True, text=True, check=True
            )
            times[name].append((time.perf_counter() - start) * 1000)
            frameworks[name] = done.stdout.strip()
    found = {"bare_ms": (bare := min(times["bare"]))}
    print(f"\nImport: milliseconds over bare Python ({bare:.1f} ms), and the frameworks imported")
    for name in ("import dlx", "dlx.convert"):
        over = min(times[name]) - bare
        spread = statistics.median(times[name]) - bare - over
        found[name] = {"over_ms": over, "spread_ms": spread, "frameworks": frameworks[name]}
        goal = "none"
        if name == "import dlx":  # names are loaded lazily: what comes with the first one is shown beside it
            goal = f"<= {IMPORT_MS:.0f}, no framework  {verdict(over <= IMPORT_MS and frameworks[name] == '[]')}"
        print(f"{name:<13}{over:5.1f} (median +{spread:.1f})  {frameworks[name]}  goal {goal}")
    return found


def main():
    """Run all measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")
    options = parser.parse_args()
    np, torch, tvm_ffi = peer("numpy"), peer("torch"), peer("tvm_ffi")
    versions = {module.__name__: module.__version__ for module in (np, torch, tvm_ffi) if module is not None}
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {text}" for name, text in versions.items()))
    print("A ratio is minimum over minimum; in brackets the middle half of the ratios of single rounds.")
    results = {"python": platform.python_version(), "versions": versions, "import": imports()}
    if np is not None:
        results["calls"] = calls(np, torch, tvm_ffi)
        results["copies"] = copies(np)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
