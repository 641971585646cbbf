"""Cost as work grows: trees of 10 to 10⁶ leaves, threads side by side, copies of 1 MB to 1 GB."""

import gc
import os
import threading

import dlx
from benchmarks.measure import compare, race, ratio, verdict

LEAVES = (10, 100, 1000, 10**4, 10**5, 10**6)
EVEN = 1.5  # goal: ns of a leaf, most over least, once the same by hand is taken out
THREADS = 8
STALL = 1.5  # goal: the time of 8 threads over that of one that does all of it
MEGABYTES = (1, 10, 100, 1000)
COPY = 1.1  # goal: of np.copy's time


def growth(names, *, quick):
    """Measure all three, print them, and say which goals are met."""
    np = names["np"]
    found = _trees(np, names.get("torch"), LEAVES[:4] if quick else LEAVES)
    return [*found, *_threads(np, quick=quick), *_copies(np, MEGABYTES[:2] if quick else MEGABYTES)]


def _trees(np, torch, leaves):
    """Lists and records of ever more arrays; what grows with the memory of the results grows by hand as well."""
    cases = [("list -> dlx", lambda x: dlx.convert(x, to="dlx"), lambda x: [dlx.convert(each, to="dlx") for each in x])]
    if torch is not None:
        by_hand = lambda x: [torch.from_numpy(each) for each in x]  # noqa: E731
        cases.append(("list -> torch", lambda x: dlx.convert(x, to="torch"), by_hand))
    print("\nTrees, ns of a leaf (in brackets by hand): " + ", ".join(f"{n:,}" for n in leaves) + " leaves")
    found = []
    for what, ours, theirs in cases:
        each, hand = [], []
        for n in leaves:
            source = [np.ones(2, "f4") for _ in range(n)]
            number = max(1, 2000 // n)
            times = race(lambda s=source, f=ours: f(s), lambda s=source, f=theirs: f(s), number=number, rounds=7)
            each.append(min(times[0]) / n * 1e9)
            hand.append(min(times[1]) / n * 1e9)
        ratios = [one / other for one, other in zip(each, hand, strict=True)]
        flat, met = max(each) / min(each), max(ratios) / min(ratios) <= EVEN
        cells = " ".join(f"{one:6.0f} ({other:.0f})" for one, other in zip(each, hand, strict=True))
        print(f"{what:<14}{cells}  max / min {flat:.2f}, of the ratios {max(ratios) / min(ratios):.2f}  {verdict(met)}")
        found.append({"what": what, "leaves": list(leaves), "ns": each, "by_hand": hand, "met": met})
    return found


def _threads(np, *, quick):
    """Copies by 8 threads, which run without the GIL, beside one thread that makes all of them; and small trees."""
    rounds, found = (3 if quick else 7), []
    big, small = np.ones(4_000_000, "f4"), [np.ones(2, "f4") for _ in range(1000)]
    print(f"\n{THREADS} threads on {os.cpu_count()} cores, time over that of one thread with the same work")
    for what, work in (
        ("copies of 16 MB", lambda: dlx.convert(big, to="dlx", copy=True)),
        ("lists of 1000", lambda: dlx.convert(small, to="dlx")),
        ("np.copy of 16 MB", lambda: np.copy(big)),
    ):
        alone, together = race(lambda w=work: _all(w, 1), lambda w=work: _all(w, THREADS), rounds=rounds)
        figure = compare(together, alone)
        met = figure["ratio"] <= STALL
        print(f"{what:<18}{ratio(figure)}  <= {STALL}  {verdict(met)}")
        found.append({"what": what, "met": met} | figure)
    return found


def _all(work, threads, times=16):
    """Do some work so many times, by so many threads."""

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
