"""Lazy views: creating one, repeated access, iterating, and the containers of tvm_ffi."""

import sys
import timeit

import dlx
from benchmarks.measure import compare, peer, ratio, round_robin, verdict

SIZES = (10, 1000, 10**6)
MAKING_NS, AGAIN_NS, FLAT, FASTER = 1000.0, 100.0, 1.5, 10.0
LINEAR = 2.0  # 10,000 tensors exceed the caches; a scan per element would give 10


def views(names, *, quick):
    """Measure lazy views of lists and dicts of numpy arrays, print them, and say which goals are met."""
    np, torch = names["np"], names["torch"]
    scene = {"dlx": dlx}
    for n in SIZES:
        arrays = [np.ones(2, "f4") for _ in range(min(n, 1000))] * max(1, n // 1000)
        words = [sys.intern(f"k{i}") for i in range(n)]  # interned like words in code
        for name, source, middle in (("l", arrays, n // 2), ("d", dict(zip(words, arrays, strict=True)), f"k{n // 2}")):
            scene |= {f"{name}{n}": source, f"v{name}{n}": dlx.convert(source, to="torch", lazy=True)}
            scene[f"v{name}{n}"][middle]
    make = {(k, n): f'dlx.convert({k}{n}, to="torch", lazy=True)' for k in "ld" for n in SIZES}
    again = {("l", n): f"vl{n}[{n // 2}]" for n in SIZES} | {("d", n): f"vd{n}['k{n // 2}']" for n in SIZES}
    seconds, rounds = (0.001, 9) if quick else (0.003, 40)
    times = round_robin([*make.values(), *again.values()], scene, seconds=seconds, rounds=rounds)
    print(f"\nLazy views, ns: minimum of {rounds} rounds, for n = {', '.join(f'{n:,}' for n in SIZES)}")
    found = []
    for what, codes, limit in (("make", make, MAKING_NS), ("again", again, AGAIN_NS)):
        for kind in "ld":
            least = [min(times[codes[kind, n]]) for n in SIZES]
            flat = max(least) / min(least)
            met = max(least) <= limit and (what == "make" or flat <= FLAT)
            text = " ".join(f"{ns:7.0f}" for ns in least)
            print(f"{what} of a {'list' if kind == 'l' else 'dict'}: {text}  max / min {flat:.2f}  {verdict(met)}")
            found.append({"what": what, "kind": kind, "ns": least, "flat": flat, "limit": limit, "met": met})
    return [*found, *_iterating(np, torch, quick=quick)]


def _iterating(np, torch, *, quick):
    """Measure a whole iteration of first accesses, including the release of the views."""
    sizes, rounds = (1000, 10_000), 3 if quick else 7
    tvm_ffi = peer("tvm_ffi")
    codes = {n: f'for x in dlx.convert(a{n}, to="torch", lazy=True): pass' for n in sizes}
    scene = {"dlx": dlx} | {f"a{n}": [np.ones(2, "f4") for _ in range(n)] for n in sizes}
    if tvm_ffi is not None:
        scene["tagged"] = tvm_ffi.get_global_func("testing.echo")([torch.ones(2) for _ in range(sizes[-1])])
        codes["tvm_ffi"] = "for x in tagged: pass"
    timers = {name: timeit.Timer(code, globals=scene) for name, code in codes.items()}
    times = {name: [] for name in codes}
    for _ in range(rounds + 1):
        for name, timer in timers.items():
            repeats = 5 if name != "tvm_ffi" else 1
            times[name].append(min(timer.repeat(repeats, 1)) / (name if name in sizes else sizes[-1]) * 1e9)
    each = {name: min(ns[1:]) for name, ns in times.items()}
    print("iterating, ns per element: " + ", ".join(f"{name} {ns:.0f}" for name, ns in each.items()))
    found = [{"what": "iterate", "ns": each}]
    if tvm_ffi is not None:
        figure = compare(times["tvm_ffi"][1:], times[sizes[-1]][1:])
        met = figure["ratio"] >= FASTER
        print(f"tvm_ffi / dlx, 10,000 elements: {ratio(figure)}  >= {FASTER:.0f}  {verdict(met)}")
        found.append({"what": "faster", "met": met} | figure)
    linear = each[sizes[-1]] / each[sizes[0]]
    print(f"ns per element, 10,000 / 1,000: {linear:.2f}  <= {LINEAR:.0f}  {verdict(linear <= LINEAR)}")
    found.append({"what": "linear", "ratio": linear, "met": linear <= LINEAR})
    return found
