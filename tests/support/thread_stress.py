"""Threads at once: every public call in each, while other threads change what they share.

    python tests/support/thread_stress.py --threads 8 --seconds 60 --seed 1

The calls are those of `soak.py`. Each must give the class of result or of error that it gave alone. Beside them run
calls on containers that threads change meanwhile, views and iterators that threads share, capsules that several threads
claim, of which one must get it, and a thread that changes types, forgets what was learnt (as a plugin that is loaded
makes dlx do) and collects garbage. At the end nothing may be alive. The status is 1 if anything else was found.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import sysconfig
import threading
import time

import soak

import dlx
from dlx._core import native
from dlx._registry.registry import registry

# A thread that makes its own containers finds the same whenever it looks; these belong to all of them.
MAY_FAIL = (dlx.errors.DlxError, RuntimeError, LookupError, ValueError, TypeError)


class Shared:
    """What the threads share, and calls on it, each of which may fail in some ways only."""

    def __init__(self, plain):
        self.plain = list(plain.values())
        self.list = list(self.plain) * 4
        self.dict = {f"k{i}": each for i, each in enumerate(self.plain * 4)}
        self.nested = {"a": self.list, "b": {"c": self.dict, "d": (self.list, self.plain[0])}}
        self.targets = list(plain)
        self.views = {to: dlx.convert(self.nested, to=to, lazy=True) for to in plain}
        self.iterators = {}
        self.claims = []

    def calls(self, draw):
        """Return the calls, as (name, function, the number that is drawn for it)."""
        to = draw.choice(self.targets)
        return {
            "tree": lambda: dlx.convert(self.nested, to=to),
            "plan": lambda: dlx.plan(self.list, to=to),
            "stack": lambda: dlx.stack(self.plain, to) if draw.random() < 0.2 else None,
            "view": lambda: self.viewed(draw, to),
            "change": lambda: self.changed(draw),
            "iterate": lambda: self.iterated(to),
            "claim": lambda: self.claimed(draw),
        }

    def viewed(self, draw, to):
        view = self.views[to]
        list(view["a"])[:2]
        dict(view["b"]["c"])
        view["b"]["d"][0][0]
        if draw.random() < 0.05:
            self.views[to] = dlx.convert(self.nested, to=to, lazy=True)
        if draw.random() < 0.05:
            view["a"].refresh()

    def changed(self, draw):
        self.list.append(draw.choice(self.plain))
        self.dict[f"k{draw.randrange(50)}"] = draw.choice(self.plain)
        if len(self.list) > 30:
            del self.list[draw.randrange(10) :]
        if len(self.dict) > 30:
            self.dict.pop(f"k{draw.randrange(50)}", None)

    def iterated(self, to):
        results = self.iterators.get(to)
        if results is None or next(results, None) is None:
            self.iterators[to] = iter(self.views[to]["a"])

    def claimed(self, draw):
        """Offer a capsule to whoever comes by, and try to claim one; each is claimed once."""
        if not self.claims:
            tensor = dlx.empty((draw.randrange(1, 9),), "uint8")
            self.claims = [
                [tensor.__dlpack__(max_version=draw.choice([None, (1, 0)])), threading.Lock(), 0] for _ in "abcd"
            ]
        offer = draw.choice(self.claims or [None])
        if offer is None:
            return
        try:
            dlx.from_dlpack(offer[0])
        except dlx.errors.ConsumedError:
            if offer[2] != 1:
                time.sleep(0.01)  # the one who got it says so now
            if offer[2] != 1:
                raise AssertionError(f"a capsule was claimed {offer[2]} times") from None
            self.claims = []
            return
        with offer[1]:
            offer[2] += 1


def disturb(stop, draw, failures):
    """Change what dlx has learnt, again and again."""

    class Changing(soak.Producer):
        pass

    memory = dlx.empty((4,), "float32")
    while not stop.is_set():
        try:
            what = draw.randrange(6)
            if what == 0:
                native.routes_clear()
            elif what == 1:
                gc.collect()
            elif what == 2:
                registry._forget()  # as when a plugin is loaded
            elif what == 3:  # a type that is changed, then types that come and go
                Changing.attribute = draw.random()
                dlx.convert(Changing(lambda options: memory.__dlpack__(**options)), to="dlx")
            else:
                for _ in range(20):
                    brief = type("Brief", (soak.Producer,), {})
                    dlx.convert(brief(lambda options: memory.__dlpack__(**options)), to="dlx")
            time.sleep(draw.random() * 0.01)
        except BaseException as error:
            failures.append(error)
            raise


def work(stop, draw, distinct, often, kinds, shared, counts, number, failures):
    """Make calls until the end."""
    names = list(distinct)
    done = 0
    try:
        while not stop.is_set():
            for name in draw.sample(names, 20) + draw.choices(often, k=100):
                kind = soak.kind_of(distinct[name])
                if kind is not kinds[name]:
                    raise AssertionError(f"{name} gave {kind.__name__}, and {kinds[name].__name__} alone")
            for name, call in shared.calls(draw).items():
                try:
                    call()
                except MAY_FAIL as error:
                    if isinstance(error, SystemError):
                        raise
                    counts[name, type(error).__name__] = counts.get((name, type(error).__name__), 0) + 1
            done += 127
    except BaseException as error:
        failures.append(error)
        stop.set()
    counts["calls", number] = done


def stress(threads, seconds, seed, frameworks):
    """Run; return what was found wrong."""
    draw = random.Random(seed)
    frequent, rare = soak.calls(frameworks)
    few, often = dict(draw.sample(rare, min(len(rare), 400)) + frequent), [name for name, _ in frequent]
    for _ in range(2):  # what is learnt once, and what is imported
        kinds = {name: soak.kind_of(call) for name, call in few.items()}
    shared = Shared(soak.arrays(frameworks)[1])
    stop, failures, counts = threading.Event(), [], {}
    running = [threading.Thread(target=disturb, args=(stop, random.Random(seed + 1), failures))]
    running += [
        threading.Thread(
            target=work, args=(stop, random.Random(seed + 2 + n), few, often, kinds, shared, counts, n, failures)
        )
        for n in range(threads)
    ]
    for thread in running:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in running:
        thread.join()
    print(sum(number for (what, _), number in counts.items() if what == "calls"), "calls;",
          {f"{a} {b}": n for (a, b), n in counts.items() if a != "calls"})  # fmt: skip
    return failures


def main(arguments=None):
    """Stress; the status is 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--frameworks", default="numpy,torch", help="beside dlx (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    frameworks = soak.installed(chosen.frameworks)
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(
        f"seed {chosen.seed}; {chosen.threads} threads; the GIL is {'on' if gil else 'off'};", *frameworks, flush=True
    )
    failures = stress(chosen.threads, chosen.seconds, chosen.seed, frameworks)
    if sysconfig.get_config_var("Py_GIL_DISABLED") and getattr(sys, "_is_gil_enabled", lambda: True)() != gil:
        failures.append(RuntimeError("something switched the GIL on"))
    gc.collect()
    gc.collect()
    for failure in failures:
        sys.excepthook(type(failure), failure, failure.__traceback__)
    print(f"{native.live()} managed tensors alive at the end.")
    return 1 if failures or native.live() else 0


if __name__ == "__main__":
    sys.exit(main())
