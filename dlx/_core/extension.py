"""The compiled extension: cffi's `ffi` and `lib`. No other module imports `dlx._ffi`.

`lib` has the C functions that touch no Python object, and the numbers of the headers. Builtins that touch Python
objects are in `dlx._core.native`.
"""

from dlx._ffi import ffi, lib

__all__ = ["ffi", "lib"]
