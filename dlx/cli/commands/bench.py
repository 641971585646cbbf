"""`dlx bench`: what conversions cost on this machine, beside the consumer's own `from_dlpack`."""

from __future__ import annotations

import argparse
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from dlx._api import convert as api
from dlx._registry.registry import registry
from dlx._support.screen import OUTCOMES, Cell, Screen
from dlx._support.text import amount, one_line
from dlx.cli import targets
from dlx.cli.model import BadInput
from dlx.cli.sources.samples import array_of
from dlx.errors import DlxError

__all__ = ["run"]

SMALL = (64,)
LARGE = (4 << 20,)  # float32: 16 MiB, more than most caches of one core hold


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure every pair, one after the other."""
    rounds, singles = (3, 300) if arguments.quick else (15, 3000)
    with screen.working("importing frameworks"):
        pairs = _pairs(arguments.pairs)
    rows = [_measured(*pair, rounds, singles) for pair in screen.progress(pairs, "measuring", len(pairs))]
    cells: list[list[Cell]] = [
        [
            f"{each['from']} → {each['to']}",
            (each["outcome"], OUTCOMES[each["outcome"]]),
            *(_time(each[f"{key}_ns"]) for key in ("first", "convert", "p50", "p99", "from_dlpack")),
            f"{each['copy_bytes_per_ns']:.1f}" if each["copy_bytes_per_ns"] else "",
        ]
        for each in rows
    ]
    screen.table(["pair", "outcome", ">first", ">mean", ">p50", ">p99", ">from_dlpack", ">copy"], cells)
    screen.line("")
    screen.line((f"dlx.convert of {SMALL[0]} float32 elements, in microseconds", "quiet"))
    screen.facts(
        [
            ("first", "the very first call"),
            ("mean", f"of a call, in the best of {rounds} rounds"),
            ("p50, p99", f"what half, and 99 of 100, of {singles:,} single calls stay below"),
            ("from_dlpack", "mean of the target's own function, which may check less"),
            ("copy", f"dlx.convert(..., copy=True) of {amount(4 * LARGE[0])}, in GB/s, the best"),
        ]
    )
    screen.document({"rounds": rounds, "pairs": rows})
    return 0


def _pairs(words: str | None) -> list[tuple[str, str]]:
    if words is None:
        names = targets.chosen(",".join(targets.installed()))  # which imports them
        return [(origin, goal) for origin in names for goal in names if origin != goal]
    found = []
    for word in words.split(","):
        origin, colon, goal = word.strip().partition(":")
        if not colon or not origin or not goal:
            raise BadInput(f"{one_line(word)!r} is no pair: say for instance numpy:torch")
        if "all" in (origin, goal):
            raise BadInput("a pair has two names; without --pairs all are measured")
        (origin,), (goal,) = targets.chosen(origin), targets.chosen(goal)
        found.append((origin, goal))
    return found


def _measured(origin: str, goal: str, rounds: int, singles: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = array_of(origin, "float32", SMALL)
        first = next(_singly(lambda: api.convert(array, to=goal), 1), None)
        outcome = api.plan(array, to=goal).outcome
        times = sorted(_singly(lambda: api.convert(array, to=goal), singles))
        own = _own(goal)
        return {
            "from": origin,
            "to": goal,
            "outcome": outcome,
            "first_ns": first,
            "convert_ns": _best(lambda: api.convert(array, to=goal), rounds) if outcome != "refused" else None,
            "p50_ns": times[len(times) // 2] if times else None,
            "p99_ns": times[len(times) * 99 // 100] if times else None,
            "from_dlpack_ns": _best(lambda: own(array), rounds) if own is not None else None,
            "copy_bytes_per_ns": _copies(origin, goal, rounds),
        }


def _own(goal: str) -> Callable[[Any], Any] | None:
    """Return the consumer's own `from_dlpack`, where it has one by one of the usual names."""
    module = sys.modules[registry.target(goal).adapter.package]
    if goal == "dlx":
        return None
    for holder in (module, getattr(module, "dlpack", None)):
        function = getattr(holder, "from_dlpack", None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    return None


def _best(call: Callable[[], Any], rounds: int) -> float | None:
    """Return nanoseconds of one call, the best of some rounds of a few milliseconds each; None if it fails."""
    try:
        call()
    except MemoryError:
        raise
    except Exception:  # the consumer takes no such array by itself
        return None
    timer = timeit.Timer(call)
    number = 1
    while timer.timeit(number) < 0.002:
        number *= 2
    return min(timer.repeat(rounds, number)) / number * 1e9


def _singly(call: Callable[[], Any], count: int) -> Iterator[int]:
    """Give nanoseconds of single calls, without those that the clock itself takes; nothing if it fails."""
    clock = time.perf_counter_ns
    cost = min(-(clock() - clock()) for _ in range(100))
    for _ in range(count):
        start = clock()
        try:
            call()
        except DlxError:
            return
        yield max(clock() - start - cost, 0)


def _copies(origin: str, goal: str, rounds: int) -> float | None:
    array = array_of(origin, "float32", LARGE)
    best = _best(lambda: api.convert(array, to=goal, copy=True), max(rounds // 3, 2))
    return None if best is None else 4 * LARGE[0] / best


def _time(nanoseconds: float | None) -> str:
    if nanoseconds is None:
        return ""
    micro = nanoseconds / 1000
    return f"{micro:.2f}" if micro < 10 else f"{micro:.1f}" if micro < 100 else f"{micro:,.0f}"
