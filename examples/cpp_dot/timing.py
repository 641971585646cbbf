"""Print what an argument of `dot` costs beyond an empty call of the same extension, for each framework that is here."""

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
    "torch": ("the slot of its own table, no guard asked", own_slot),
    "tvm_ffi": ("its own export, t.__dlpack__()", lambda x, y: (x.__dlpack__(), y.__dlpack__())),
    "jax": ("its own buffer, memoryview(x)", lambda x, y: (memoryview(x), memoryview(y))),
}


def nanoseconds(function: Callable[..., Any], x: Any, y: Any) -> float:
    """Return the least time of a call, of many short runs: a busy machine disturbs some of them."""
    timer = timeit.Timer("function(x, y)", globals={"function": function, "x": x, "y": y})
    number = max(timer.autorange()[0] // 10_000, 1)
    return min(timer.repeat(2000, number)) / number * 1e9


def main() -> None:
    """Print a line for each framework."""
    arrays = {"dlx": (dlx.empty(3, "float32"), dlx.empty(3, "float32"))}
    for name, make in MAKE.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        arrays[name] = make(module), make(module)
    print("ns an argument, over the call itself; beside it what the framework takes by itself")
    for name, (x, y) in arrays.items():
        empty = nanoseconds(nothing, x, y)
        line = f"{name:8} {(nanoseconds(dot, x, y) - empty) / 2:8.0f}"
        if name in OWN:
            what, own = OWN[name]
            line += f" {(nanoseconds(own, x, y) - empty) / 2:8.0f}  {what}"
        print(line)


if __name__ == "__main__":
    main()
