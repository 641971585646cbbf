"""Count the Python calls of one conversion, and the files of dlx in which they are.

Run it from the root of a checkout: ``python docs/tools/calls.py``. Every call that `sys.setprofile` reports counts,
also calls of a framework's Python functions.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def count_calls(function: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Return the calls of a function as ``"file:name"``, and their files of dlx, in the order of calls.

    The shortest of three runs counts, without the garbage collector, because a run may fill a cache.
    """
    is_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return min((_count_once(function) for _ in range(3)), key=lambda found: len(found[0]))
    finally:
        if is_enabled:
            gc.enable()


def _count_once(function: Callable[[], Any]) -> tuple[list[str], list[str]]:
    calls: list[str] = []
    files: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is not function.__code__:
            path = Path(frame.f_code.co_filename)
            calls.append(f"{path.name}:{frame.f_code.co_name}")
            if path.is_relative_to(ROOT / "dlx") or path.is_relative_to(ROOT / "dlx_adapters"):
                files.append(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls, list(dict.fromkeys(files))


class Producer:
    """An array without an adapter: ``__dlpack__`` and ``__dlpack_device__`` in Python."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device


def count_conversion(
    source: Callable[[Any], Any] = lambda array: array, *, by_python: bool = True
) -> tuple[list[str], list[str]]:
    """Return the calls and files of ``source(numpy array)`` to torch; `by_python` skips the fast path."""
    import numpy as np
    import torch  # noqa: F401

    import dlx

    array, fast = source(np.ones(3)), dlx.convert
    convert = fast.__wrapped__ if by_python else fast
    for _ in range(2):  # the first loads plugins, the second fills the caches
        convert(array, to="torch")
    return count_calls(lambda: convert(array, to="torch"))


def main() -> None:
    """Print the calls of three conversions, and their number."""
    for calls, files in (count_conversion(), count_conversion(Producer), count_conversion(Producer, by_python=False)):
        print(*calls, sep="\n")
        print(f"{len(calls)} Python calls in {len(files)} files of dlx: {', '.join(files)}\n")


if __name__ == "__main__":
    main()
