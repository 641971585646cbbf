"""`FAST_PATH`: the one object by which Python reaches conversions in C. It is `dlx.convert`.

`fast_path.py` gives it the functions that learn its pairs, `dlx._api.convert` the Python function that it leaves calls
to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlx._core.native import FastPathFunction

FAST_PATH = FastPathFunction(None, None, None)


def borrow_all(objs: Iterable[Any], to: Any) -> list[Any] | None:
    """Return what the fast path exports for each array, for reading at once; None unless it takes them all."""
    found = []
    for obj in objs:
        borrowed = FAST_PATH._borrow(obj, to, True)
        if borrowed is None:
            return None
        found.append(borrowed)
    return found
