"""Any array of numpy, into each other framework and back: the same bits, as planned, or the planned refusal."""

from __future__ import annotations

import gc
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlx
from dlx import errors, native

np = pytest.importorskip("numpy")

DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")
MOST = 11**4 * 16  # bytes that the largest array is cut out of


@st.composite
def arrays(draw):
    """Return an array of random bits: any step, offset, order and flag."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=4)))
    memory = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, MOST + 256, np.uint8)
    if dtype.kind == "b":
        memory &= 1
    start = -memory.ctypes.data % 64 + draw(st.sampled_from([0, 0, 1, 2, 8, 16]))
    whole = tuple(2 * extent + 1 for extent in shape)
    array = memory[start : start + math.prod(whole) * dtype.itemsize].view(dtype).reshape(whole)
    for axis, extent in enumerate(shape):
        step = draw(st.sampled_from([1, 2, -1, -2]))
        array = array[(slice(None),) * axis + (slice(None, None, step), ...)]
        array = array[(slice(None),) * axis + (slice(0, extent), ...)]
    if draw(st.booleans()):  # compact, at the same alignment
        array = memory[start : start + array.nbytes].view(dtype).reshape(shape)
    array = array.T if draw(st.booleans()) else array
    array.flags.writeable = draw(st.booleans())
    return array


def goes_as_planned(source, target):
    """Convert there and back, and compare bits, addresses and flags with the plan."""
    plan = dlx.plan(source, to=target)
    if plan.outcome == "refused":
        with pytest.raises(type(plan.error)) as caught:
            dlx.convert(source, to=target)
        assert str(caught.value) == str(plan.error)
        return
    there = dlx.convert(source, to=target)
    tensor, back = dlx.convert(there, to="dlx"), dlx.convert(there, to="numpy")
    assert (back.tobytes(), back.dtype, back.shape) == (source.tobytes(), source.dtype, source.shape)
    if not source.size:
        return
    shared = tensor.data_ptr == source.ctypes.data
    assert shared is (plan.outcome == "shared")
    assert source.flags.writeable or not (shared and back.flags.writeable)
    if shared:
        assert dlx.convert(dlx.convert(source, to=target, copy=False), to="dlx").data_ptr == source.ctypes.data
    else:
        with pytest.raises((errors.CopyRequiredError, errors.ReadOnlyError)):
            dlx.convert(source, to=target, copy=False)


@pytest.mark.parametrize("target", ["torch", "jax", "tvm_ffi", "pyarrow", "pyarrow.Tensor"])
def test_there_and_back(target):
    """The same bits, dtype and shape; shared or copied as planned; read-only never becomes writable; no leak."""
    package = pytest.importorskip(target.partition(".")[0])
    to = package.Tensor if target == "pyarrow.Tensor" else target

    @settings(deadline=None, max_examples=300)
    @given(arrays())
    def holds(source):
        goes_as_planned(source, to)

    live = native.live()
    if target == "jax":
        with package.enable_x64(True):
            holds()
        holds()
    else:
        holds()
    gc.collect()  # errors that were caught hold their frames
    assert native.live() == live
