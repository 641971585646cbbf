"""DLTensor structs for tests, and the core's expected answers, by brute force over every index."""

from itertools import product
from math import prod
from weakref import WeakKeyDictionary

from dlx._core import types as abi
from dlx._core.native import ffi, lib

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
READ_ONLY, IS_COPIED, PADDED = abi.READ_ONLY, abi.IS_COPIED, abi.SUBBYTE_PADDED
FLOAT32, INT8, INT4, FLOAT4 = (2, 32, 1), (0, 8, 1), (0, 4, 1), (17, 4, 1)
ADDRESS = 0x10000  # never read

_kept = WeakKeyDictionary()


def dltensor(shape=(), strides=None, dtype=FLOAT32, *, device=(1, 0), address=ADDRESS, byte_offset=0, ndim=None):
    """Return a DLTensor that keeps its shape and strides alive; without a shape the pointer is NULL."""
    numbers = [ffi.NULL if values is None else ffi.new("int64_t[]", list(values)) for values in (shape, strides)]
    tensor = ffi.new("DLTensor*")
    tensor.data = ffi.cast("void*", address)
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = len(shape or ()) if ndim is None else ndim
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = dtype
    tensor.shape, tensor.strides = numbers
    tensor.byte_offset = byte_offset
    _kept[tensor] = numbers
    return tensor


def row_major(shape):
    """Return compact row-major strides in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def offsets(shape, strides):
    """Return the offset of every element from the first, in elements, row-major over the indices."""
    strides = row_major(shape) if strides is None else strides
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))]


def item_bits(dtype, flags=0):
    """Return the bits from one element to the next."""
    bits = dtype[1] * dtype[2]
    return -(-bits // 8) * 8 if flags & PADDED else bits


def extent(shape, strides, dtype, flags=0):
    """Return the byte range that the elements touch."""
    bits = item_bits(dtype, flags)
    at = offsets(shape, strides)
    if not at:
        return 0, 0
    return min(at) * bits // 8, -(-(max(at) + 1) * bits // 8)


def layout(shape, strides):
    """Return the DLX_LAYOUT_* features."""
    if strides is None or prod(shape) < 2:
        return 0
    counted = [(e, s) for e, s in zip(shape, strides, strict=True) if e > 1]
    moving = [(e, abs(s)) for e, s in counted if s != 0]
    steps = [s for _, s in moving]
    places = offsets([e for e, _ in moving], steps)
    found = lib.DLX_LAYOUT_NEGATIVE if any(s < 0 for _, s in counted) else 0
    found |= lib.DLX_LAYOUT_ZERO if len(moving) < len(counted) else 0
    found |= lib.DLX_LAYOUT_PERMUTED if steps != sorted(steps, reverse=True) else 0
    found |= lib.DLX_LAYOUT_GAPS if sorted(places) != list(range(len(places))) else 0
    return found
