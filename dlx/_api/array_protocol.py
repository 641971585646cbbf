"""What numpy asks of `dlx.Tensor`: ``__array__``, and ``__array_interface__`` for those who read that by themselves."""

from __future__ import annotations

import sys
from typing import Any

from dlx._core import native
from dlx._core.native import Tensor, lib
from dlx._core.types import host_readable
from dlx.errors import CopyRequiredError, DeviceError

__all__ = ["as_array", "as_interface"]

_KINDS = {lib.kDLInt: "i", lib.kDLUInt: "u", lib.kDLFloat: "f", lib.kDLComplex: "c", lib.kDLBool: "b"}


def as_array(tensor: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """Return a numpy array over a tensor's memory, as `numpy.asarray` wants it.

    Raises
    ------
    DeviceError
        If it is device memory: numpy would move it unseen.
    CopyRequiredError
        If ``copy=False``, and numpy cannot hold the memory as it is, or another dtype is wanted.
    """
    from dlx._api.convert import convert

    if not host_readable(tensor.device):
        raise DeviceError(
            f"it is on {tensor.device}, and __array__ moves nothing",
            source="dlx.Tensor",
            target="numpy",
            fix="Call dlx.convert(tensor, to='numpy'), which copies it to the host.",
        )
    array = convert(tensor, to="numpy", copy=True if copy and dtype is None else False if copy is False else None)
    if dtype is None or (array.dtype == dtype and not copy):
        return array
    if copy is False:
        raise CopyRequiredError(f"its dtype is {array.dtype}, and {dtype} was asked for", option=(("copy", None),))
    return array.astype(dtype)


def as_interface(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's ``__array_interface__``; strides are always said, so that nobody asks for plain bytes."""
    try:
        view = memoryview(tensor)
    except BufferError as error:
        raise AttributeError(f"dlx.Tensor has no __array_interface__ here: {error}") from None
    order = "|" if view.itemsize == 1 else "<" if sys.byteorder == "little" else ">"
    return {
        "version": 3,
        "shape": view.shape,
        "strides": view.strides,
        "typestr": f"{order}{_KINDS[tensor.dtype.code]}{view.itemsize}",
        "data": (native.buffer_address(view), view.readonly),
    }


native.set_tensor_array(as_array, as_interface)
