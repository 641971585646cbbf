"""`FAST_PATH`, the object `dlx.convert`, which runs conversions in C.

`fast_path.py` binds the functions that learn its pairs; `dlx._api.convert` binds the Python function for other calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlx._core.native import FastPathFunction

FAST_PATH = FastPathFunction(None, None, None)


def borrow_all(objs: Iterable[Any], to: Any) -> list[Any] | None:
    """Return the tensors of all arrays, to read them immediately; None unless the fast path takes them all."""
    tensors = []
    for obj in objs:
        borrowed = FAST_PATH._borrow(obj, to, True)
        if borrowed is None:
            return None
        tensors.append(borrowed)
    return tensors
