"""`FAST_PATH`: the one object by which Python reaches conversions in C. It is `dlx.convert`.

`fast_path.py` gives it the functions that fill its routes, `dlx._api.convert` the Python function that it leaves calls
to.
"""

from __future__ import annotations

from dlx._core.native import FastPathFunction

__all__ = ["FAST_PATH"]

FAST_PATH = FastPathFunction(None, None, None)
