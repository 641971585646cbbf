"""Count the Python calls that one conversion makes, and the files of dlx that they are in.

Run it from the root of a checkout: ``python docs/tools/calls.py``. What `sys.setprofile` reports as a call counts, a
framework's own Python functions included; files are those of dlx and its adapters.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def count_calls(function: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Return the calls of a function, as ``"file:name"``, and the files of dlx among them, in the order of calls.

    Those of the shortest of three runs, without the collector: a run may be the one that learns something anew.
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
            if path.is_relative_to(ROOT / "dlx") or path.is_relative_to(ROOT / "adapters"):
                files.append(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls, list(dict.fromkeys(files))


class Producer:
    """An array of a library that dlx has no adapter for: ``__dlpack__`` and ``__dlpack_device__``, in Python."""

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
    """Return the calls and files of what ``source(numpy array)`` gives on its way to torch.

    `by_python`: outside of the fast path.
    """
    import numpy as np
    import torch  # noqa: F401

    import dlx

    array, fast = source(np.ones(3)), dlx.convert
    convert = fast.__wrapped__ if by_python else fast
    for _ in range(2):  # plugins are loaded by the first; what is looked up once is known after the second
        convert(array, to="torch")
    return count_calls(lambda: convert(array, to="torch"))


def main() -> None:
    """Print the calls of each, and how many they are."""
    for calls, files in (count_conversion(), count_conversion(Producer), count_conversion(Producer, by_python=False)):
        print(*calls, sep="\n")
        print(f"{len(calls)} Python calls in {len(files)} files of dlx: {', '.join(files)}\n")


if __name__ == "__main__":
    main()
