"""``__array__`` and ``__array_interface__`` of `dlx.Tensor`."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from dlx._core.extension import lib
from dlx._core.types import DType
from dlx.errors import CopyRequiredError, DeviceError

_KINDS = {lib.kDLInt: "i", lib.kDLUInt: "u", lib.kDLFloat: "f", lib.kDLComplex: "c", lib.kDLBool: "b"}
_NUMPY = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")


@functools.cache
def typestr(dtype: Any) -> str | None:
    """Return the name of a `DType` in numpy's array interface and .npy files (``"<f4"``), or None."""
    if _NUMPY.fullmatch(dtype.name) is None:
        return None
    size = dtype.bits // 8
    order = "|" if size == 1 else "<" if sys.byteorder == "little" else ">"
    return f"{order}{_KINDS[dtype.code]}{size}"


NUMBERS = {name[1:]: each for each in DType.all() if (name := typestr(each)) is not None}
"""Names of the dtypes in array interfaces and .npy files, without the byte order (``"f4"``)."""


def as_array(tensor: Any, /, dtype: Any = None, copy: bool | None = None) -> Any:
    """Return a numpy array over a tensor's memory, for `numpy.asarray`."""
    if not lib.dlx_host_readable(tensor.device[0]):
        raise DeviceError(
            f"it is on {tensor.device}, and __array__ cannot move it",
            source="dlx.Tensor",
            target="numpy",
            fix="Call dlx.convert(tensor, to='numpy'), which copies it to the host.",
        )
    copied = True if copy and dtype is None else False if copy is False else None
    array = sys.modules["dlx"].convert(tensor, to="numpy", copy=copied)  # the core imports no public module
    if dtype is None or (array.dtype == dtype and not copy):
        return array
    if copy is False:
        raise CopyRequiredError(f"its dtype is {array.dtype}, not {dtype}", option=(("copy", None),))
    return array.astype(dtype)


def as_interface(address_of: Callable[[memoryview], int], tensor: Any) -> dict[str, Any]:
    """Return a tensor's ``__array_interface__``, always with strides: without them numpy requests flat bytes."""
    try:
        view = memoryview(tensor)
    except BufferError as error:
        raise AttributeError(f"this dlx.Tensor has no __array_interface__: {error}") from None
    return {
        "version": 3,
        "shape": view.shape,
        "strides": view.strides,
        "typestr": typestr(tensor.dtype),
        "data": (address_of(view), view.readonly),
    }
