"""Two threads that convert arrays of their own, over one: what they share must not slow them down.

Runs are short, and one thread and two take turns; each figure is the best of many, since a busy machine seldom gives
two cores to anybody. `python benchmarks/shared_lines.py` shows the cache lines that both use and one writes.
"""

import sys
import threading
import time
import timeit

from benchmarks.measure import verdict

FASTER = 1.8  # goal: the rate of two threads over that of one


def threads(names, *, quick):
    """Measure conversions and, beside them, numpy's own calls; print the rates and say which goals are met."""
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        print(
            "\nThreads: left out, since they take turns where the GIL is on; `python3.14t -m benchmarks --only threads`"
        )
        return []
    print("\nTwo threads with arrays of their own, times the rate of one (in brackets ns of a call in one)")
    found = []
    for what, code, source, number in _cases(names):
        rates = {1: 0.0, 2: 0.0}
        for _ in range(10 if quick else 80):
            for n in rates:
                rates[n] = max(rates[n], _rate(names, code, source, n, number))
        ratio = rates[2] / rates[1]
        met = ratio >= FASTER if "->" in what else None
        print(
            f"{what:<16}{ratio:5.2f} ({1e9 / rates[1]:.0f})" + ("" if met is None else f"  >= {FASTER}  {verdict(met)}")
        )
        found.append({"what": what, "ratio": ratio, "ns": 1e9 / rates[1], "met": met})
    return found


def _cases(names):
    """Return (what, an expression, what makes its array `a`, how often it is repeated)."""
    array, tree = "np.arange(4.0)", "{'a': [np.arange(4.0) for _ in range(10)], 'b': np.ones(3)}"
    cases = [
        ("numpy -> dlx", "convert(a, to='dlx')", array, 40_000),
        ("dlx -> numpy", "convert(a, to='numpy')", f"convert({array}, to='dlx')", 40_000),
        ("tree -> dlx", "convert(a, to='dlx')", tree, 4000),
        ("a.view()", "a.view()", array, 40_000),
        ("memoryview(a)", "memoryview(a)", array, 40_000),
    ]
    if "t" in names:
        cases[3:3] = [
            ("numpy -> torch", "convert(a, to='torch')", array, 8000),
            ("torch -> numpy", "convert(a, to='numpy')", f"convert({array}, to='torch')", 8000),
            ("torch's own", "torch.from_numpy(a)", array, 8000),
        ]
    return cases


def _rate(names, code, source, n, number):
    """Return the calls a second of n threads together, which begin at once."""
    begun, ended, ready = [0.0] * n, [0.0] * n, [False] * n

    def work(i):
        own = dict(names)  # and code of its own: threads count references to constants and closures of one function
        own["a"] = eval(source, own)
        timer = timeit.Timer(code, globals=own)
        timer.timeit(10)
        ready[i] = True
        while not all(ready):  # awake, so that both begin at once
            pass
        begun[i] = time.perf_counter()
        timer.timeit(number)
        ended[i] = time.perf_counter()

    started = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return n * number / (max(ended) - min(begun))
