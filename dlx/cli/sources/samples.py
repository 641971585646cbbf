"""Arrays of any framework and dtype, made to be planned and measured."""

from __future__ import annotations

from typing import Any

from dlx._api import convert as api
from dlx._core.extension import ffi
from dlx._protocols.pointer import empty

__all__ = ["array_of"]


def array_of(framework: str, dtype: str, shape: tuple[int, ...] = (6,)) -> Any:
    """Return an array of a framework with a dtype, whose memory is aligned to 64 bytes, or raise what says no."""
    aligned = empty(shape, dtype, device="cpu")
    nbytes = max(aligned.nbytes, 1)
    ffi.memmove(ffi.cast("void *", aligned.data_ptr), bytes(nbytes), nbytes)  # bools must be 0 or 1
    if framework == "dlx":
        return aligned
    return api.convert(aligned, to=framework)
