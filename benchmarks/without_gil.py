"""The cost of a free-threaded build for one thread: the same calls in an ordinary and a free-threaded build, in turn.

    python benchmarks/without_gil.py ORDINARY FREE_THREADED

Both are interpreters of the same version that import numpy and dlx, built with --enable-optimizations like packages of
Python: `tests/support/environments/free_threaded.sh FOLDER gil-optimized` and `nogil-optimized`. A figure is
the minimum of many, in nanoseconds. Calls of CPython and numpy alone show their part of the difference.
"""

import subprocess
import sys
import timeit
from pathlib import Path

from measure import verdict

GOAL = 1.10  # the time of a conversion over that in the ordinary build
ROUNDS = 8
CALLS = (  # (what, an expression, whether the goal is for it)
    ("numpy -> dlx", "convert(a, to='dlx')", True),
    ("numpy -> dlx, by position", "convert(a, 'dlx')", True),
    ("dlx -> numpy", "convert(d, to='numpy')", True),
    ("tree -> dlx", "convert(tree, to='dlx')", True),
    ("list -> dlx", "convert(arrays, to='dlx')", True),
    ("dlx -> dlx, the same object", "convert(d, to='dlx')", False),
    ("sum((), start=1)", "sum((), start=1)", False),
    ("sum((), 1)", "sum((), 1)", False),
    ("a.view()", "a.view()", False),
)


def measure(code):
    """Print the minimum nanoseconds of a call in this interpreter."""
    import numpy as np

    from dlx import convert

    names = {"convert": convert, "a": np.arange(4.0), "d": convert(np.arange(4.0), to="dlx")}
    names["arrays"] = [np.arange(4.0) for _ in range(100)]
    names["tree"] = {"a": [np.arange(4.0) for _ in range(10)], "b": np.ones(3)}
    timer = timeit.Timer(code, globals=names)
    number = max(5, int(3e-4 / (timer.timeit(200) / 200)))
    print(1e9 * min(timer.timeit(number) for _ in range(200)) / number)


def main(*pythons):
    """Run every call in both interpreters in turn, each time in a new process; print the times."""
    print("ns of a call in the ordinary build, in the free-threaded one, and their ratio")
    for what, code, is_judged in CALLS:
        found = [[], []]
        for _ in range(ROUNDS):
            for python, kept in zip(pythons, found, strict=True):
                done = subprocess.run([python, __file__, code], stdout=subprocess.PIPE, text=True, check=True)
                kept.append(float(done.stdout))
        with_gil, without = map(min, found)
        outcome = verdict(without <= GOAL * with_gil) if is_judged else ""
        print(f"{what:<28}{with_gil:9.1f}{without:9.1f}{without / with_gil:7.2f}  {outcome}".rstrip(), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*(str(Path(python).absolute()) for python in sys.argv[1:]))
    else:
        measure(sys.argv[1])
