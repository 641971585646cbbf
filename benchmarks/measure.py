"""Timing functions: cases take turns, round after round, so that a busy machine slows all of them."""

import gc
import importlib
import statistics
import time
import timeit


def peer(name):
    """Return a module, or print a note and return None."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"note: skipping {name}: {error}")
        return None


def race(*functions, number=1, rounds=7, clock=time.perf_counter, collects=False):
    """Return the seconds per call of each function in every round, rounds interleaved; a first round warms up.

    `collects`: whether Python's cyclic garbage collector is on.
    """
    times = [[] for _ in functions]
    gc.collect()
    if not collects:
        gc.disable()
    try:
        for _ in range(rounds + 1):
            for function, kept in zip(functions, times, strict=True):
                start = clock()
                for _ in range(number):
                    function()
                kept.append((clock() - start) / number)
    finally:
        gc.enable()
    return [kept[1:] for kept in times]


def round_robin(codes, names, *, seconds, rounds):
    """Return {code: nanoseconds per call in every round} for expressions over `names`.

    Each round runs every expression for about `seconds`, in a compiled loop without the call of a wrapper.
    """
    # timeit disables the gc; CPU time excludes interruptions
    timers = {code: timeit.Timer(code, timer=time.thread_time, globals=names) for code in codes}
    numbers = {}
    for code, timer in timers.items():
        timer.timeit(100)
        once = min(timer.repeat(3, 100)) / 100
        numbers[code] = max(10, int(seconds / once))
    times = {code: [] for code in codes}
    for _ in range(rounds):
        for code, timer in timers.items():
            times[code].append(timer.timeit(numbers[code]) / numbers[code] * 1e9)
    return times


def compare(ours, theirs):
    """Return the minimums, their ratio, and the middle half of the ratios of single rounds."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"ours": min(ours), "theirs": min(theirs), "ratio": min(ours) / min(theirs), "spread": [low, high]}


def verdict(met):
    """Return whether a goal is met as text."""
    return "met" if met else "MISSED"


def ratio(figure):
    """Return a ratio as text, with its spread in brackets."""
    return f"{figure['ratio']:.2f} [{figure['spread'][0]:.2f} {figure['spread'][1]:.2f}]"
