"""An exchange table for tvm_ffi.Tensor, compiled from `_dlx_tvm_ffi.c`."""

from collections.abc import Callable
from typing import Any

def exchange_api(chandle: Callable[[Any], int], address: int | None, maker: object, /) -> object: ...
