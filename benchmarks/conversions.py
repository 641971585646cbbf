"""Single conversions of a small array that share memory: dlx, its peers and a floor in C.

Each time includes the whole expression and the release of its result; all cases take turns in one process. Both
`dlx.convert` and `torch.from_numpy` pay for the look-up in their module; `convert` and its floor do not.
"""

import gc
import statistics
import sys
import time
from dataclasses import dataclass

import dlx
from benchmarks import floor
from benchmarks.measure import compare, peer, ratio, round_robin, verdict

ADDED_NS = 60.0  # limit of `convert` over its floor
SETUP = "a: numpy float32 (2, 3); t: the same in torch; d: in dlx; v: in tvm_ffi"


@dataclass(frozen=True)
class Case:
    """An expression of a pair: `kind` is floor, dlx, bare (without the look-up in the module), own or peer."""

    pair: str
    kind: str
    code: str


# Peers of each pair; the floor of a pair is called with its source.
PAIRS = {
    "numpy → torch": ("a", "torch", ["torch.from_numpy(a)", "torch.from_dlpack(a)", "torch.asarray(a)"]),
    "torch → numpy": ("t", "numpy", ["t.numpy()", "np.from_dlpack(t)", "np.asarray(t)"]),
    "torch → dlx": ("t", "dlx", ["tvm_ffi.from_dlpack(t)", "View.from_dlpack(t, -1)"]),
    "numpy → dlx": ("a", "dlx", ["tvm_ffi.from_dlpack(a)", "View.from_dlpack(a, -1)"]),
    "dlx → numpy": ("d", "numpy", ["np.from_dlpack(d)", "np.from_dlpack(v)"]),
    "dlx → torch": ("d", "torch", ["torch.from_dlpack(d)", "torch.from_dlpack(v)"]),
}
BRIDGE = {
    "numpy → torch": 'ab.convert_memory(a, "numpy", "torch", ab.HOST)',
    "torch → numpy": 'ab.convert_memory(t, "torch", "numpy", ab.HOST)',
}
OWN = {"np.from_dlpack(d)", "torch.from_dlpack(d)"}  # others' functions on a dlx tensor: not the fast path

# (pair, measured case, compared with, at most)
GOALS = [
    ("numpy → torch", "dlx", "torch.from_numpy(a)", 1.0),
    ("numpy → torch", "dlx", "torch.from_dlpack(a)", 0.40),
    ("torch → numpy", "dlx", "t.numpy()", 0.65),
    ("torch → numpy", "dlx", "np.from_dlpack(t)", 0.17),
    ("torch → dlx", "dlx", "tvm_ffi.from_dlpack(t)", 1.0),
    ("dlx → numpy", "dlx", "np.from_dlpack(v)", 1.0),
    ("dlx → torch", "dlx", "torch.from_dlpack(v)", 1.0),
    ("dlx → numpy", "np.from_dlpack(d)", "np.from_dlpack(v)", 1.0),
    ("dlx → torch", "torch.from_dlpack(d)", "torch.from_dlpack(v)", 1.0),
]


def scene():
    """Return (names, cases) of the installed frameworks, after trying each expression once."""
    np, torch, tvm_ffi = peer("numpy"), peer("torch"), peer("tvm_ffi")
    names = {
        "dlx": dlx,
        "convert": dlx.convert,
        "np": np,
        "torch": torch,
        "tvm_ffi": tvm_ffi,
        "ab": peer("arraybridge"),
    }
    view = peer("cuda.core.utils")
    names["View"] = view and view.StridedMemoryView
    if np is not None:
        names["a"] = np.arange(6, dtype="f4").reshape(2, 3)
        names["d"] = dlx.convert(names["a"], to="dlx")
        names["v"] = tvm_ffi and tvm_ffi.from_dlpack(names["a"])
    if torch is not None:
        names["t"] = torch.zeros(2, 3)
    types = {"a": getattr(np, "ndarray", None), "t": getattr(torch, "Tensor", None), "d": dlx.Tensor}
    targets = {"numpy": types["a"], "torch": types["t"], "dlx": dlx.Tensor}
    names = {name: value for name, value in names.items() if value is not None}
    built = floor.build()
    cases = []
    for pair, (source, to, peers) in PAIRS.items():
        call = f'convert({source}, to="{to}")'
        mine = [Case(pair, "bare", call), Case(pair, "dlx", f"dlx.{call}")]
        if built is not None and source in names and targets[to] is not None:
            name = sys.intern("floor_" + pair.replace(" → ", "_to_"))  # interned: found in globals as fast as any name
            try:
                names[name] = floor.floor_of(built, types[source], targets[to])
            except (TypeError, AttributeError) as error:
                print(f"note: no floor for {pair}: {error}")
            mine.insert(0, Case(pair, "floor", f"{name}({source})"))
        theirs = [*peers, BRIDGE[pair]] if pair in BRIDGE else peers
        mine += [Case(pair, "own" if code in OWN else "peer", code) for code in theirs]
        cases += [case for case in mine if _works(case.code, names)]
    return names | {"_floor": built}, cases


def _works(code, names):
    try:
        eval(code, names)
    except NameError:
        return False  # the note about the missing peer is already printed
    except Exception as error:
        print(f"note: skipping {code}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return False
    return True


def conversions(names, cases, *, quick):
    """Measure all cases in turn, print them, and say which goals are met."""
    seconds, rounds = (0.001, 9) if quick else (0.003, 60)
    times = round_robin([case.code for case in cases], names, seconds=seconds, rounds=rounds)
    print(f"\nConversions, ns: minimum of {rounds} rounds [middle half]; ratio of dlx to it. {SETUP}")
    pair, found = None, []
    by_kind = {(case.pair, case.kind): case.code for case in cases}
    for case in cases:
        ns = times[case.code]
        low, middle, high = statistics.quantiles(ns, n=4)
        figure = {"pair": case.pair, "kind": case.kind, "code": case.code, "ns": min(ns), "middle_half": [low, high]}
        figure["median"] = middle
        if case.pair != pair:
            print(f"-- {case.pair}")
        text = ""
        ours = by_kind.get((case.pair, "dlx"))
        if case.kind in ("own", "peer") and ours is not None:
            figure |= (compared := compare(times[ours], ns))
            text = ratio(compared)
        pair = case.pair
        print(f"{min(ns):7.0f} [{low:6.0f} {high:6.0f}]  {case.kind:<6}{case.code:<50}{text}")
        found.append(figure)
    return {"cases": found, "goals": goals(times, by_kind)}


def goals(times, by_kind):
    """Compare with the goals, print and return them."""
    print("\nGoals: ratio of minimums [middle half of the ratios of single rounds]")
    found = []
    for pair, ours, theirs, limit in GOALS:
        ours = by_kind.get((pair, ours), ours)
        if ours in times and theirs in times:
            figure = compare(times[ours], times[theirs])
            met = figure["ratio"] <= limit
            print(f"{pair:<14}{ours:<30}/ {theirs:<26}{ratio(figure):<20}<= {limit:<6}{verdict(met)}")
            found.append({"pair": pair, "of": ours, "over": theirs, "limit": limit, "met": met} | figure)
    for pair in PAIRS:
        ours, low = by_kind.get((pair, "bare")), by_kind.get((pair, "floor"))
        if ours is not None and low is not None:
            added = min(times[ours]) - min(times[low])
            spread = statistics.quantiles([a - b for a, b in zip(times[ours], times[low], strict=True)], n=4)
            met = added <= ADDED_NS
            text = f"{added:.0f} [{spread[0]:.0f} {spread[2]:.0f}] ns"
            print(f"{pair:<14}{ours:<30}- {low:<26}{text:<20}<= {ADDED_NS:<6.0f}{verdict(met)}")
            found.append({"pair": pair, "of": ours, "minus": low, "limit": ADDED_NS, "met": met, "added_ns": added})
    return found


def fresh(names, *, quick):
    """Measure the first conversion of a storage, which also prevents that it is resized.

    Creating tensors, and dropping them and the results, is not timed.
    """
    if "torch" not in names:
        return []
    rounds, many = (9, 500) if quick else (60, 1000)
    codes = ["t.numpy()", 'dlx.convert(t, to="numpy")', 'dlx.convert(t, to="dlx")', "np.from_dlpack(t)"]
    codes += [f"{name}(t)" for name in ("floor_torch_to_numpy",) if name in names]
    loops = {code: eval(f"lambda ts: [{code} for t in ts]", names) for code in codes}
    times = {code: [] for code in codes}
    again = {code: [] for code in codes}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for code, loop in loops.items():
                tensors = [names["torch"].empty(2, 3) for _ in range(many)]
                for kept in (times, again):
                    start = time.perf_counter()
                    results = loop(tensors)
                    kept[code].append((time.perf_counter() - start) / many * 1e9)
                    del results
                del tensors
    finally:
        gc.enable()
    print(f"\nFresh tensors, ns: {many} of torch.empty(2, 3), the results kept; creating and dropping are not timed")
    print(f"{'first':>8}{'again':>8}  ratio of first to t.numpy(), ratio of again")
    found = []
    for code in codes:
        one, two = compare(times[code], times[codes[0]]), compare(again[code], again[codes[0]])
        print(f"{one['ours']:8.0f}{two['ours']:8.0f}  {code:<30}{ratio(one):<20}{ratio(two)}")
        found.append({"code": code, "first_ns": one["ours"], "again_ns": two["ours"], "first": one, "again": two})
    return found
