"""The parts of a conversion from torch: each is removed in turn, and the time without it measured.

For measuring only. A fast path without its guards returns wrong values or dangling memory.
"""

import contextlib
from dataclasses import replace

from benchmarks.measure import round_robin
from dlx._core import native
from dlx._registry.registry import registry

TORCH = registry.target("torch").adapter
ANSWERED = (TORCH.fast_path.guard_function() or (None, frozenset()))[1]
CODES = ('dlx.convert(t, to="numpy")', 'dlx.convert(t, to="dlx")')


def where(names, *, quick):
    """Measure both conversions with and without each part, in turn, and print the cost of each."""
    owner = {"owner": ""}
    variants = {
        "": {},
        "resizable()": _without("resizable"),
        "resizable() and the storage object": owner | _without("resizable"),
        "the look at forward-mode AD": {"conditions": ()},
        "the guards in C": {"guard_function": lambda: (None, ANSWERED)},
        "the guards in C, asked through Python": {"guard_function": lambda: None},
        "all of these": owner | {"guards": (), "conditions": (), "guard_function": lambda: (None, ANSWERED)},
    }
    rounds = 7 if quick else 40
    times = {(name, code): [] for name in variants for code in CODES}
    for _ in range(rounds):
        for name, change in variants.items():
            with _change_adapter(change):
                for code, ns in round_robin(CODES, names, seconds=0.001, rounds=3).items():
                    times[name, code].append(min(ns))
    least = {name: {code: min(times[name, code]) for code in CODES} for name in variants}
    print(
        f"\nWhere the time goes, ns: with everything, and the difference without one part; minimum of {rounds} rounds"
    )
    print(f"{'':<44}" + "".join(f"{code:<30}" for code in CODES))
    for name, found in least.items():
        cells = [f"{found[code] - least[''][code]:+.0f}" if name else f"{found[code]:.0f}" for code in CODES]
        print(f"{f'without {name}' if name else 'with everything':<44}" + "".join(f"{cell:<30}" for cell in cells))
    return least


def _without(ask):
    return {"guards": tuple(guard for guard in TORCH.fast_path.guards if guard.ask != ask)}


@contextlib.contextmanager
def _change_adapter(change):
    """Change the adapter's data, and let the fast path learn it again."""
    before = TORCH.fast_path
    TORCH.fast_path = replace(before, **change)
    native.routes_clear()
    try:
        yield
    finally:
        TORCH.fast_path = before
        native.routes_clear()
