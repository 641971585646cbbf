"""NumPy arrays of every dtype and layout that other frameworks have, too."""

from __future__ import annotations

import dlx

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""Every dtype that numpy and torch both know."""


def fill(np, dtype, shape):
    """Return a row-major array of arbitrary bits, including NaN payloads."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(7).integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        raw &= 1
    return raw.view(dtype).reshape(shape)


def strided(np, dtype, shape, strides):
    """Return a writable array over fresh memory with these strides (in elements)."""
    block = fill(np, dtype, (4096,))
    return np.lib.stride_tricks.as_strided(block, shape, [step * block.itemsize for step in strides])


LAYOUTS = {
    "0-d": lambda np, dtype: fill(np, dtype, ()),
    "1-d": lambda np, dtype: fill(np, dtype, (7,)),
    "3-d": lambda np, dtype: fill(np, dtype, (2, 3, 4)),
    "F-order": lambda np, dtype: np.asfortranarray(fill(np, dtype, (3, 4))),
    "transposed": lambda np, dtype: fill(np, dtype, (2, 3, 4)).transpose(2, 0, 1),
    "sliced": lambda np, dtype: fill(np, dtype, (6, 7))[1::2, 2:6:3],
    "offset": lambda np, dtype: fill(np, dtype, (9,))[5:],
    "diagonal": lambda np, dtype: strided(np, dtype, (4,), (5,)),
    "broadcast": lambda np, dtype: strided(np, dtype, (3, 4), (0, 1)),
    "broadcast to the last": lambda np, dtype: strided(np, dtype, (3, 4), (1, 0)),
    "overlapping": lambda np, dtype: strided(np, dtype, (4, 3), (1, 1)),
    "size 1, odd stride": lambda np, dtype: strided(np, dtype, (1, 4, 1), (999, 1, 77)),
    "one element, odd strides": lambda np, dtype: strided(np, dtype, (1, 1), (-5, 123)),
    "size 1, negative stride": lambda np, dtype: strided(np, dtype, (1, 4), (-7, 1)),
    "size 1, zero stride": lambda np, dtype: strided(np, dtype, (1, 4), (0, 1)),
    "20-d": lambda np, dtype: fill(np, dtype, (1, 2) * 3 + (1,) * 14),
}


def address(array):
    """Return the address of an array, from numpy, torch, dlx, or `dlx.describe`."""
    if hasattr(array, "data_ptr"):
        return array.data_ptr() if callable(array.data_ptr) else array.data_ptr
    if hasattr(array, "__array_interface__"):
        return array.__array_interface__["data"][0]
    return dlx.describe(array).address


def same(np, array, other):
    """Return True if two numpy arrays have the same dtype, shape and bits."""
    return (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes())
