"""How a `dlx.Tensor` is pickled and copied: its bytes, out of band where protocol 5 allows, and what describes them."""

from __future__ import annotations

from array import array
from typing import Any

from dlx._core import native
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.types import READ_ONLY, SUBBYTE_PADDED, Device
from dlx.errors import DeviceError

__all__ = ["bytes_of", "dense", "reduced", "tensor_from"]

_HOST = Device("cpu")
_UINT8 = (lib.kDLUInt, 8, 1)


def dense(tensor: Tensor) -> bool:
    """Return whether elements lie without gaps or overlap, in whatever order of dimensions."""
    struct = ffi.cast("DLTensor *", native.tensor_address(tensor))
    return not lib.dlx_layout(struct) & (lib.DLX_LAYOUT_GAPS | lib.DLX_LAYOUT_NEGATIVE | lib.DLX_LAYOUT_ZERO)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a dense tensor of the host as bytes; the view keeps it alive."""
    flags = tensor.flags & READ_ONLY
    return memoryview(native.tensor_new(tensor.data_ptr, (tensor.nbytes,), None, _UINT8, _HOST, flags, tensor))


def reduced(tensor: Tensor, protocol: int) -> tuple[Any, ...]:
    """Return what `Tensor.__reduce_ex__` does.

    Raises
    ------
    DeviceError
        If it is not in host memory.
    """
    if not tensor.is_host:
        raise DeviceError(
            f"only host memory is pickled, and its memory is on {tensor.device}",
            source=repr(tensor),
            fix="Move it first: dlx.convert(tensor, to='dlx', device='cpu').",
        )
    if not dense(tensor):
        tensor = native.tensor_copy(tensor, True)
    from pickle import PickleBuffer

    view = bytes_of(tensor)
    data: Any = PickleBuffer(view) if protocol >= 5 else bytes(view) if tensor.readonly else bytearray(view)
    return tensor_from, (data, tuple(tensor.dtype), tensor.shape, tensor.strides, tensor.flags & SUBBYTE_PADDED)


def tensor_from(
    data: Any, dtype: tuple[int, int, int], shape: tuple[int, ...], strides: tuple[int, ...], flags: int
) -> Tensor:
    """Return a tensor over the bytes that a pickle brought, read-only where these are.

    Raises
    ------
    ValueError, LayoutError, DTypeError
        If the bytes are not those of such a tensor.
    """
    with memoryview(data) as given:
        empty = b"" if given.readonly else bytearray()
        view = given.cast("B") if given.nbytes else memoryview(empty)
    itemsize = max(1, dtype[1] // 8)
    address = native.buffer_address(view)
    if address % min(16, itemsize & -itemsize):  # of a network's frame, say: consumers count on natural alignment
        view = memoryview(bytes(view) if view.readonly else bytearray(view))
        address = native.buffer_address(view)
    numbers = array("q", (0, *dtype, flags, len(shape), *shape, *strides))
    (tensor,) = native.tensors_within(address, view.nbytes, numbers, READ_ONLY if view.readonly else 0, view)
    return tensor
