"""`tensors_unpack`: packed numbers describe tensors in a piece of memory, and all are checked."""

from __future__ import annotations

import itertools
import math
import struct

import pytest

import dlx
from dlx import errors
from dlx._core import native

SIZE = 64
HUGE = (1 << 63) - 1
REFUSED = (ValueError, errors.DlxError, OverflowError)


def packed(shape, *, offset=0, dtype=(0, 32, 1), flags=0, strides=None, **fields):
    """Return the numbers of a tensor; `fields` replace valid ones."""
    said = {"ndim": len(shape), "row_major": int(strides is None), "zero": 0, **fields}
    head = struct.pack("=qBBHBBBB", offset, *dtype, said["ndim"], flags, said["row_major"], said["zero"])
    return head + struct.pack(f"={len(shape)}q", *shape) + struct.pack(f"={len(strides or ())}q", *(strides or ()))


@pytest.fixture
def memory():
    """64 bytes, each its index."""
    return bytearray(range(SIZE))


def within(memory, *numbers, size=SIZE):
    """Return the tensors that numbers describe."""
    address = native.buffer_address(memoryview(memory))
    return native.tensors_unpack(address, size, b"".join(numbers), 0, memory)


SHAPES = [(), (1,), (4,), (16,), (17,), (2, 3), (4, 4), (1, 1, 5), (0,), (3, 0)]
WIDTHS = [(0, 8, 1), (0, 16, 1), (0, 32, 1), (0, 64, 1), (2, 32, 2), (5, 128, 1)]


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_the_last_byte_is_the_last(memory, dtype, is_plain):
    """Every offset with every shape, row-major or strided: a tensor that ends after the memory is rejected."""
    item = dtype[1] * dtype[2] // 8
    for offset, shape in itertools.product(range(-1, SIZE + 2), SHAPES):
        strides = None if is_plain else [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        numbers = packed(shape, offset=offset, dtype=dtype, strides=strides)
        nbytes = math.prod(shape) * item
        if 0 <= offset <= SIZE and offset + nbytes <= SIZE:
            (tensor,) = within(memory, numbers)
            first = native.buffer_address(memoryview(memory))
            assert (tensor.shape, tensor.data_ptr - first, tensor.nbytes) == (shape, offset, nbytes)
        else:
            with pytest.raises(REFUSED):
                within(memory, numbers)


@pytest.mark.parametrize("offset", [0, 1, 8, 60, 63, 64])
@pytest.mark.parametrize(
    "shape",
    [(HUGE,), (HUGE // 4,), (1 << 61,), (1 << 31, 1 << 31), (1 << 32, 1 << 32), (2, HUGE), (HUGE, 2), (-1,), (2, -3)],
)
def test_extents_that_overflow(memory, offset, shape):
    """A product of extents that overflows is rejected."""
    for dtype in WIDTHS:
        with pytest.raises(REFUSED):
            within(memory, packed(shape, offset=offset, dtype=dtype))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((4,), [-1], 0), ((4,), [-1], 11), ((4,), [5], 4), ((2, 2), [16, 1], 0), ((2,), [HUGE], 0), ((2,), [-HUGE], 0)],
)
def test_strides_that_leave_the_memory(memory, shape, strides, offset):
    """At either end."""
    with pytest.raises(REFUSED):
        within(memory, packed(shape, strides=strides, offset=offset))


def test_strides_that_stay_inside(memory):
    """Strides may reach the first and the last byte."""
    (back,) = within(memory, packed((4,), strides=[-1], offset=12))
    assert dlx.convert(back, to="dlx", copy=True).tobytes() == b"".join(memory[i : i + 4] for i in (12, 8, 4, 0))
    (wide,) = within(memory, packed((4,), strides=[5], offset=0))
    assert wide.strides == (5,) and wide.tobytes() == b"".join(memory[i : i + 4] for i in (0, 20, 40, 60))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ndim": 65}, {"ndim": 255}, {"ndim": 3}, {"row_major": 2}, {"row_major": 0}, {"zero": 1}, {"flags": 1},
        {"flags": 2}, {"flags": 8}, {"flags": 255}, {"dtype": (3, 64, 1)}, {"dtype": (0, 0, 1)}, {"dtype": (0, 8, 0)},
        {"offset": -HUGE - 1}, {"offset": HUGE}, {"offset": SIZE + 1},
    ],
)  # fmt: skip
def test_each_field_is_checked(memory, wrong):
    """Alone, and after a valid tensor, which is not created either."""
    good = packed((2,))
    for numbers in ((packed((2,), **wrong),), (good, packed((2,), **wrong))):
        with pytest.raises(REFUSED):
            within(memory, *numbers)
    for cut in (8, 16):
        with pytest.raises(REFUSED):
            within(memory, good, good[:-cut])


def test_a_size_below_0_is_refused(memory):
    """A size that is smaller than the tensors is refused, too."""
    for size in (-1, 0, 7):
        with pytest.raises(REFUSED):
            within(memory, packed((2,)), size=size)
