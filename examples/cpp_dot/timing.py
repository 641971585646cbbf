"""Print the cost of an argument of `dot` over an empty call of the same extension, for each installed framework."""

import importlib
import timeit
from collections.abc import Callable
from typing import Any

from dot import dot, nothing, own_slot

import dlx

MAKE: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda module: module.ones(3, module.float32),
    "torch": lambda module: module.ones(3),
    "tvm_ffi": lambda module: module.from_dlpack(dlx.empty(3, "float32")),
    "jax": lambda module: module.numpy.ones(3),
}

OWN: dict[str, tuple[str, Callable[..., Any]]] = {
    "torch": ("the slot of its table, without guards", own_slot),
    "tvm_ffi": ("its export, t.__dlpack__()", lambda x, y: (x.__dlpack__(), y.__dlpack__())),
    "jax": ("its buffer, memoryview(x)", lambda x, y: (memoryview(x), memoryview(y))),
}


def nanoseconds(x: Any, y: Any, *functions: Callable[..., Any]) -> list[float]:
    """Return the minimum time of a call of each function, from many short runs in turn."""
    timers = [timeit.Timer("f(x, y)", globals={"f": f, "x": x, "y": y}) for f in functions]
    numbers = [max(timer.autorange()[0] // 10_000, 1) for timer in timers]
    runs = [[timer.timeit(n) / n for timer, n in zip(timers, numbers, strict=True)] for _ in range(4000)]
    return [min(times) * 1e9 for times in zip(*runs, strict=True)]


def main() -> None:
    """Print a line for each framework."""
    arrays = {"dlx": (dlx.empty(3, "float32"), dlx.empty(3, "float32"))}
    for name, make in MAKE.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        arrays[name] = make(module), make(module)
    print("ns per argument over an empty call: dlx, and the framework without dlx")
    for name, (x, y) in arrays.items():
        what, own = OWN.get(name, ("", nothing))
        empty, ours, theirs = nanoseconds(x, y, nothing, dot, own)
        print(f"{name:8} {(ours - empty) / 2:8.0f}" + (f" {(theirs - empty) / 2:8.0f}  {what}" if what else ""))


if __name__ == "__main__":
    main()
