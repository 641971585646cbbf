"""Where the time of a conversion out of torch goes: the adapter's guards are taken away one by one.

This is for measuring only. A lane without its guards gives wrong values or dangling memory.
"""

import dlx
from benchmarks.measure import round_robin
from dlx import native
from dlx.registry import registry

WITHOUT = {
    "requires_grad": lambda torch: _without(torch, "requires_grad"),
    "is_neg()": lambda torch: _without(torch, "is_neg"),
    "resizable()": lambda torch: _without(torch, "resizable"),
    "the storage object, resizable()": lambda torch: {"owner": "", **_without(torch, "resizable")},
    "the look at forward-mode AD": lambda torch: {"switches": ()},
    "all of them": lambda torch: {"owner": "", "guards": (), "switches": ()},
}


def _without(torch, ask):
    return {"guards": tuple(guard for guard in torch.guards if guard.ask != ask)}


def where(names, *, quick):
    """Measure both conversions with and without each guard, in turn, and print what each costs."""
    torch = registry.target("torch")
    rounds = 7 if quick else 40
    codes = ['dlx.convert(t, to="numpy")', 'dlx.convert(t, to="dlx")']
    variants = {"": {}} | {name: change(torch) for name, change in WITHOUT.items()}
    times = {(name, code): [] for name in variants for code in codes}
    for _ in range(rounds):
        for name, change in variants.items():
            with _changed(torch, change):
                for code, taken in round_robin(codes, names, seconds=0.001, rounds=3).items():
                    times[name, code].append(min(taken))
    print(f"\nWhere the time goes, ns: with everything, and how much less without one thing; minimum of {rounds} rounds")
    print(f"{'':<36}" + "".join(f"{code:<30}" for code in codes))
    found = {}
    for name in variants:
        least = {code: min(times[name, code]) for code in codes}
        whole = {code: min(times["", code]) for code in codes}
        cells = [f"{least[code]:.0f}" if not name else f"{least[code] - whole[code]:+.0f}" for code in codes]
        print(f"{f'without {name}' if name else 'with everything':<36}" + "".join(f"{cell:<30}" for cell in cells))
        found[name or "everything"] = least
    return found


class _changed:  # noqa: N801  (reads as a word)
    def __init__(self, adapter, change):
        self.adapter, self.change = adapter, change

    def __enter__(self):
        for name, value in self.change.items():
            setattr(self.adapter, name, value)
        native.routes_clear()

    def __exit__(self, *error):
        for name in self.change:
            delattr(self.adapter, name)  # the class's own data show again
        native.routes_clear()


assert dlx.convert is not None  # the lane is learnt anew after each change
