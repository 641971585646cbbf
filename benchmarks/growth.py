"""Cost of growing work: trees of 10 to 10⁶ leaves, 8 threads at once, copies of 1 MB to 1 GB."""

import gc
import os
import resource
import threading
import time

import dlx
from benchmarks import floor
from benchmarks.measure import compare, race, ratio, verdict

LEAVES = (10, 100, 1000, 10**4, 10**5, 10**6)
EVEN = 1.5  # goal: highest over lowest, for ns of a leaf and for the ratios to the same by hand
THREADS = 8
# Goal: the time of 8 threads relative to one thread with the same work. Also measured: np.copy, and lists by
# comprehensions; threads that need the GIL for all of their work hand it over every 5 ms. Starting 8 threads (about
# 1 ms) is a small part of the work.
STALL = 1.25
COPIES, LISTS = 16, 800  # of all threads together
MEGABYTES = (1, 10, 100, 1000)
COPY = 1.1  # goal: of np.copy's time


def growth(names, *, quick):
    """Measure all three, print them, and say which goals are met."""
    np = names["np"]
    found = _trees(np, names.get("torch"), LEAVES[:4] if quick else LEAVES)
    return [*found, *_threads(np, quick=quick), *_copies(np, MEGABYTES[:2] if quick else MEGABYTES)]


def _trees(np, torch, leaves):
    """Measure lists of more and more arrays, in CPU time: other processes interrupt only long calls.

    First without Python's cyclic garbage collector, then with it, as users run. The collector scans surviving objects
    repeatedly, also by hand: tracked objects (torch's, not dlx's) cost more the more there are.
    """
    cases = [("list -> dlx", lambda x: dlx.convert(x, to="dlx"), lambda x: [dlx.convert(each, to="dlx") for each in x])]
    if torch is not None:
        by_hand = lambda x: [torch.from_numpy(each) for each in x]  # noqa: E731
        cases.append(("list -> torch", lambda x: dlx.convert(x, to="torch"), by_hand))
    compiled = floor.build()
    print("\nTrees, ns of a leaf (in brackets by hand): " + ", ".join(f"{n:,}" for n in leaves) + " leaves")
    found = []
    for what, ours, theirs in cases:
        has_floor = compiled and what == "list -> dlx"
        for collects in (False, True):
            times = {"ns": [], "by_hand": [], "floor": [], "kernel": []}
            passes = []
            for n in leaves:
                source = [np.ones(2, "f4") for _ in range(n)]
                number, rounds = max(1, 2000 // n), 7 if n > 10**5 else 30
                how = {"number": number, "rounds": rounds, "clock": time.thread_time, "collects": collects}
                before = _passes()
                raced = race(lambda s=source, f=ours: f(s), lambda s=source, f=theirs: f(s), **how)
                # A race begins with one collection. The floor has its own race because it creates other objects.
                passes.append((_passes() - before - 1) / (len(raced) * number * (rounds + 1)))
                if has_floor:
                    raced += race(lambda s=source: compiled.list_objects(len(s)), **how)
                for kept, seconds in zip(times.values(), raced, strict=False):
                    kept.append(min(seconds) / n * 1e9)
                if not collects:
                    times["kernel"].append(_in_kernel(lambda s=source, f=ours: f(s), n))
            found.append(_report_growth(what, leaves, times, passes if collects else None))
    return found


def _in_kernel(work, n):
    """Return ns of a leaf in the kernel: it unmaps freed memory, and the next call faults it in."""
    calls = max(3, 3 * 10**6 // n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for _ in range(calls):
        work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_stime - before) / calls / n * 1e9


def _passes():
    """Return the number of runs of the garbage collector."""
    return sum(generation["collections"] for generation in gc.get_stats())


def _report_growth(what, leaves, times, passes):
    """Print and return the growth of a leaf's time; `passes` of the collector per call, None if it is off."""
    figures = {name: values for name, values in times.items() if values}
    each, hand = figures["ns"], figures["by_hand"]
    figures["ratio"] = [one / other for one, other in zip(each, hand, strict=True)]
    cells = " ".join(f"{one:6.0f} ({other:.0f})" for one, other in zip(each, hand, strict=True))
    print(f"{what:<14}{cells}" + ("" if passes is None else "  with the collector"))
    if least := figures.get("floor"):
        print(f"{'  objects only':<14}" + " ".join(f"{one:6.0f}      " for one in least))
        figures["beyond"] = [one - other for one, other in zip(each, least, strict=True)]
    if kernel := figures.pop("kernel", None):
        print(f"{'  in the kernel':<15}" + " ".join(f"{one:5.0f}      " for one in kernel))
        figures["without"] = [one - other for one, other in zip(each, kernel, strict=True)]
    spread = {name: max(values) / min(values) for name, values in figures.items()}
    met = spread["ns"] <= EVEN
    shown = f"ns {spread['ns']:.2f}, by hand {spread['by_hand']:.2f}, their ratio {spread['ratio']:.2f}"
    if least:
        shown += f", objects only {spread['floor']:.2f}, ns beyond these {spread['beyond']:.2f}"
    if kernel:
        shown += f", ns without the kernel's {spread['without']:.2f}"
    if passes is None:
        print(f"  most / least: {shown}  <= {EVEN}  {verdict(met)}")
    else:
        print(f"  most / least: {shown}; passes a call: " + ", ".join(f"{count:.0f}" for count in passes))
        met = None  # the collector's own cost
    shared = {"leaves": list(leaves), "spread": spread, "passes": passes, "kernel": kernel, "met": met}
    return {"what": what} | shared | figures


def _threads(np, *, quick):
    """Measure 8 threads against one: copies, which run without the GIL, and small trees."""
    rounds, found = (3 if quick else 7), []
    big, small = np.ones(4_000_000, "f4"), [np.ones(2, "f4") for _ in range(1000)]
    print(f"\n{THREADS} threads on {os.cpu_count()} cores, time relative to one thread with the same work")
    for what, work, times in (
        ("copies of 16 MB", lambda: dlx.convert(big, to="dlx", copy=True), COPIES),
        ("lists of 1000", lambda: dlx.convert(small, to="dlx"), LISTS),
        ("np.copy of 16 MB", lambda: np.copy(big), COPIES),
        ("lists by hand", lambda: [memoryview(each) for each in small], LISTS),
    ):
        alone, together = race(
            lambda w=work, n=times: _all(w, 1, n), lambda w=work, n=times: _all(w, THREADS, n), rounds=rounds
        )
        figure = compare(together, alone)
        met = figure["ratio"] <= STALL
        print(f"{what:<18}{ratio(figure)}  <= {STALL}  {verdict(met)}")
        found.append({"what": what, "met": met} | figure)
    return found


def _all(work, threads, times):
    """Call `work` a number of times, divided over several threads."""

    def some():
        for _ in range(times // threads):
            work()

    if threads == 1:
        some()
        return
    started = [threading.Thread(target=some) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def _copies(np, megabytes):
    found = []
    print("\nCopies, GB/s of dlx.convert(a, to='dlx', copy=True) and of np.copy(a)")
    for size in megabytes:
        gc.collect()
        array = np.ones(size * 250_000, "f4")
        rounds = {1: 25, 10: 11, 100: 5}.get(size, 3)
        ours, theirs = race(
            lambda a=array: dlx.convert(a, to="dlx", copy=True), lambda a=array: np.copy(a), rounds=rounds
        )
        figure = compare(ours, theirs)
        met = figure["ratio"] <= COPY
        speed = [size / 1e3 / min(times) for times in (ours, theirs)]
        print(f"{size:>5} MB  {speed[0]:5.1f} {speed[1]:5.1f}  {ratio(figure)}  <= {COPY}  {verdict(met)}")
        found.append({"what": "copy", "megabytes": size, "met": met} | figure)
    return found
