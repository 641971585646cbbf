"""Two threads that convert separate arrays, compared with one: shared state must not slow them down.

Runs are short, and one thread, two threads, and two processes take turns. Each figure is the best of many, since a busy
machine seldom has two free cores. Processes share nothing: if they miss 2, the machine is the reason, not threads.
`python benchmarks/shared_lines.py` shows the cache lines that both threads use and one writes.
"""

import multiprocessing
import sys
import threading
import time
import timeit

from benchmarks.measure import verdict

FASTER = 1.8  # goal: the rate of two threads relative to one


def threads(names, *, quick):
    """Measure conversions and numpy's functions; print the rates and say which goals are met."""
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        print("\nThreads: skipped, since they take turns with the GIL; run `python3.14t -m benchmarks --only threads`")
        return []
    print("\nTwo threads with separate arrays, times the rate of one (of two processes; ns of a call in one)")
    found = []
    for what, code, source, number in _cases(names):
        rates = {"one": 0.0, "threads": 0.0, "processes": 0.0}
        with _Processes(names, code, source, number) as processes:
            for _ in range(10 if quick else 80):
                rates["one"] = max(rates["one"], _rate(names, code, source, 1, number))
                rates["threads"] = max(rates["threads"], _rate(names, code, source, 2, number))
                rates["processes"] = max(rates["processes"], processes.rate())
        ratio, apart = rates["threads"] / rates["one"], rates["processes"] / rates["one"]
        met = ratio >= FASTER if "->" in what else None
        shown = f"{what:<16}{ratio:5.2f} ({apart:.2f}; {1e9 / rates['one']:.0f})"
        print(shown + ("" if met is None else f"  >= {FASTER}  {verdict(met)}"))
        found.append({"what": what, "ratio": ratio, "processes": apart, "ns": 1e9 / rates["one"], "met": met})
    return found


def _cases(names):
    """Return (name, expression, code that creates its array `a`, repetitions)."""
    array, tree = "np.arange(4.0)", "{'a': [np.arange(4.0) for _ in range(10)], 'b': np.ones(3)}"
    cases = [
        ("numpy -> dlx", "convert(a, to='dlx')", array, 40_000),
        ("dlx -> numpy", "convert(a, to='numpy')", f"convert({array}, to='dlx')", 40_000),
        ("tree -> dlx", "convert(a, to='dlx')", tree, 4000),
        ("list -> dlx", "convert(a, to='dlx')", "[np.arange(4.0) for _ in range(100)]", 400),
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
    """Return the calls per second of n threads together, which begin at once."""
    spans, ready = [(0.0, 0.0)] * n, [False] * n

    def work(i):
        spans[i] = _span(names, code, source, number, i, ready)

    started = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return _together(spans, number)


def _span(names, code, source, number, i, ready):
    """Run the code as the i-th of several that begin at once; return the start and end times."""
    own = dict(names)  # separate code: threads count references to constants and closures of one function
    own["a"] = eval(source, own)
    timer = timeit.Timer(code, globals=own)
    timer.timeit(10)
    ready[i] = True
    while not all(ready):  # busy waiting, so that all begin at once
        pass
    begun = time.perf_counter()
    timer.timeit(number)
    return begun, time.perf_counter()


def _together(spans, number):
    """Return the calls per second of all, from the first start to the last end."""
    return len(spans) * number / (max(ended for _, ended in spans) - min(begun for begun, _ in spans))


class _Processes:
    """Two processes that run the code on request, in one thread each, as _rate does."""

    def __init__(self, names, code, source, number):
        start = multiprocessing.get_context("fork")  # no thread is running
        self.number, self.ready = number, start.RawArray("b", 2)
        self.pipes = [start.Pipe() for _ in range(2)]
        arguments = [(pipe[1], names, code, source, number, i, self.ready) for i, pipe in enumerate(self.pipes)]
        self.running = [start.Process(target=_serve, args=each, daemon=True) for each in arguments]

    def __enter__(self):
        for process in self.running:
            process.start()
        return self

    def __exit__(self, *error):
        for pipe, _ in self.pipes:
            pipe.send(False)
        for process in self.running:
            process.join()

    def rate(self):
        """Return the calls per second of both together."""
        self.ready[:] = [False, False]
        for pipe, _ in self.pipes:
            pipe.send(True)
        return _together([pipe.recv() for pipe, _ in self.pipes], self.number)


def _serve(pipe, names, code, source, number, i, ready):
    """Run the code for each True from a pipe and send the times; end on False."""

    def work():
        pipe.send(_span(names, code, source, number, i, ready))

    while pipe.recv():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
