"""`dlx bench`: what conversions cost on this machine, beside the consumer's own `from_dlpack`."""

from __future__ import annotations

import argparse
import timeit
import warnings
from collections.abc import Callable
from typing import Any

import dlx
from dlx.cli import targets
from dlx.cli.dtypes import array_of
from dlx.cli.entries import BadInput, amount, one_line
from dlx.cli.screen import OUTCOMES, Cell, Screen
from dlx.registry import registry

__all__ = ["run"]

SMALL = (64,)
LARGE = (4 << 20,)  # float32: 16 MiB, more than most caches of one core hold


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure every pair, one after the other."""
    rounds = 3 if arguments.quick else 15
    with screen.working("importing frameworks"):
        pairs = _pairs(arguments.pairs)
    rows = [_measured(*pair, rounds) for pair in screen.progress(pairs, "measuring", len(pairs))]
    cells: list[list[Cell]] = [
        [
            f"{each['from']} → {each['to']}",
            (each["outcome"], OUTCOMES[each["outcome"]]),
            _time(each["convert_ns"]),
            _time(each["from_dlpack_ns"]),
            f"{each['copy_bytes_per_ns']:.1f} GB/s" if each["copy_bytes_per_ns"] else "",
        ]
        for each in rows
    ]
    screen.table(["pair", "outcome", ">dlx.convert", ">its from_dlpack", ">copy=True"], cells)
    screen.line("")
    screen.line(
        (
            f"float32; times: {SMALL[0]} elements, best of {rounds}; copies: {amount(4 * LARGE[0])} of fresh memory",
            "quiet",
        )
    )
    screen.document({"rounds": rounds, "pairs": rows})
    return 0


def _pairs(words: str | None) -> list[tuple[str, str]]:
    if words is None:
        names = targets.chosen(None)
        return [(origin, goal) for origin in names for goal in names if origin != goal]
    found = []
    for word in words.split(","):
        origin, colon, goal = word.strip().partition(":")
        if not colon or not origin or not goal:
            raise BadInput(f"{one_line(word)!r} is no pair: say for instance numpy:torch")
        origin, goal = targets.chosen(f"{origin},{goal}")
        found.append((origin, goal))
    return found


def _measured(origin: str, goal: str, rounds: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = array_of(origin, "float32", SMALL)
        outcome = dlx.plan(array, to=goal).outcome
        own = _own(goal)
        return {
            "from": origin,
            "to": goal,
            "outcome": outcome,
            "convert_ns": _best(lambda: dlx.convert(array, to=goal), rounds) if outcome != "refused" else None,
            "from_dlpack_ns": _best(lambda: own(array), rounds) if own is not None else None,
            "copy_bytes_per_ns": _copies(origin, goal, rounds),
        }


def _own(goal: str) -> Callable[[Any], Any] | None:
    """Return the consumer's own `from_dlpack`, where it has one in one of the usual places."""
    module = registry.target(goal).module()
    if goal == "dlx":
        return None
    for place in (module, getattr(module, "dlpack", None)):
        function = getattr(place, "from_dlpack", None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    return None


def _best(call: Callable[[], Any], rounds: int) -> float | None:
    """Return nanoseconds of one call, the best of some rounds of a few milliseconds each; None if it fails."""
    try:
        call()
    except Exception:  # the consumer takes no such array by itself
        return None
    timer = timeit.Timer(call)
    number = 1
    while timer.timeit(number) < 0.002:
        number *= 2
    return min(timer.repeat(rounds, number)) / number * 1e9


def _copies(origin: str, goal: str, rounds: int) -> float | None:
    array = array_of(origin, "float32", LARGE)
    best = _best(lambda: dlx.convert(array, to=goal, copy=True), max(rounds // 3, 2))
    return None if best is None else 4 * LARGE[0] / best


def _time(nanoseconds: float | None) -> str:
    if nanoseconds is None:
        return ""
    return f"{nanoseconds:.0f} ns" if nanoseconds < 10_000 else f"{nanoseconds / 1000:.1f} µs"
