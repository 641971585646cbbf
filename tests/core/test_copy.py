"""Strided copies on the host agree with numpy; unsupported copies are rejected."""

import itertools
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.examples import examples, product, shapes
from support.arrays.reference import FLOAT4, FLOAT32, INT4, INT8, IS_COPIED, PADDED, READ_ONLY, dltensor, row_major

from dlx import errors
from dlx._core import native
from dlx._core.native import ffi, lib

# itemsize -> dtype
DTYPES = {1: INT8, 2: (2, 16, 1), 4: FLOAT32, 8: (2, 64, 1), 16: (5, 128, 1)}
DTYPES |= {3: (1, 8, 3), 12: (2, 32, 3), 24: (2, 64, 3)}
thorough = settings(deadline=None, max_examples=examples(250))


def pattern(nbytes, skip=0):
    """Return a buffer in which adjacent elements differ; ignore its first `skip` bytes."""
    return bytearray((i * 167 + i // 251) % 256 for i in range(nbytes + skip))


def address_of(array):
    """Return the address of a numpy array's first element."""
    return array.__array_interface__["data"][0]


def tensor_of(array, item, *, device=(1, 0), flags=0):
    """Return a dlx.Tensor over a numpy array whose strides are whole elements."""
    strides = [step // item for step in array.strides]
    return native.tensor_new(address_of(array), array.shape, strides, DTYPES[item], device, flags, array)


def content(np, tensor, item):
    """Return the elements of a compact dlx.Tensor, in row-major order of the indices."""
    memory = ffi.buffer(ffi.cast("char*", tensor.data_ptr), tensor.nbytes) if tensor.nbytes else b""
    strides = [step * item for step in tensor.strides]
    return np.ndarray(tensor.shape, f"V{item}", memory, strides=strides).tobytes()


FIRST = product(sorted(DTYPES), range(6), range(8))
SHAPES = shapes(range(6), 5)
CUTS = [st.tuples(*[product([1, 1, 2, 3], range(3), range(3), [1, -1])] * ndim) for ndim in range(7)]
ORDERS = [st.sampled_from([*itertools.permutations(range(ndim))]) for ndim in range(7)]
ADDED = st.sampled_from([None] * 24 + [*itertools.product(range(6), range(4))])


@st.composite
def views(draw, *, broadcast=True, item=None, shape=None):
    """Draw (item, a numpy view): permuted, sliced with steps of both signs, broadcast, offset, misaligned."""
    np = pytest.importorskip("numpy")
    item, ndim, skip = draw(FIRST) if item is None else (item, *draw(FIRST)[1:])
    shape = draw(SHAPES[ndim]) if shape is None else shape
    slices, base = [], []
    for extent, (step, before, after, turn) in zip(shape, draw(CUTS[len(shape)]), strict=True):
        base.append(before + max((extent - 1) * step + 1, 0) + after)
        slices.append((slice(before, before + max((extent - 1) * step + 1, 0), step), slice(None, None, turn)))
    order = draw(ORDERS[len(shape)])
    nbytes = item
    for extent in base:
        nbytes *= extent
    memory = np.frombuffer(pattern(nbytes, skip), f"V{item}", offset=skip, count=nbytes // item)
    view = memory.reshape([base[axis] for axis in order]).transpose([order.index(axis) for axis in range(len(shape))])
    view = view[(..., *(cut for cut, _ in slices))][(..., *(turn for _, turn in slices))]
    if broadcast and (added := draw(ADDED)):
        axis, extent = added[0] % (view.ndim + 1), added[1]
        wide = (*view.shape[:axis], extent, *view.shape[axis:])
        view = np.broadcast_to(np.expand_dims(view, axis), wide)
    return item, view


@thorough
@given(views(), st.booleans())
def test_copies_hold_the_same_elements(case, keep_order):
    """A copy of any layout has each element at its index."""
    np = pytest.importorskip("numpy")
    item, view = case
    copy = native.tensor_copy(tensor_of(view, item), keep_order)
    assert copy.shape == view.shape
    assert content(np, copy, item) == view.tobytes()


@thorough
@given(views())
def test_copies_are_row_major(case):
    """Without keep_order the copy is row-major."""
    item, view = case
    copy = native.tensor_copy(tensor_of(view, item), False)
    if view.size:
        assert copy.strides == row_major(view.shape)


@thorough
@given(views(broadcast=False))
def test_copies_keep_the_order(case):
    """With keep_order, the copy has the dimension order of numpy's order 'K'."""
    np = pytest.importorskip("numpy")
    item, view = case
    copy = native.tensor_copy(tensor_of(view, item), True)
    wanted = np.copy(view, order="K")
    if view.size:
        pairs = zip(view.shape, copy.strides, wanted.strides, strict=True)
        assert all(extent == 1 or ours * item == theirs for extent, ours, theirs in pairs)


@thorough
@given(st.data())
def test_copies_between_two_layouts(data):
    """A copy to a strided destination has each element at its index, and leaves the gaps unchanged."""
    np = pytest.importorskip("numpy")
    item, source = data.draw(views())
    _, target = data.draw(views(broadcast=False, item=item, shape=source.shape))
    whole = target
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    expected = whole.copy()
    if target.size:  # the same view of the expected memory
        offset = address_of(target) - address_of(whole)
        np.ndarray(target.shape, target.dtype, expected, offset, target.strides)[...] = source
    described = [
        dltensor(a.shape, [s // item for s in a.strides], DTYPES[item], address=address_of(a)) for a in (source, target)
    ]
    assert lib.dlx_copy(*described, 0) == lib.DLX_OK
    assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize("item", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(100, 70), (33, 31), (32, 64), (2, 200), (200, 2), (65, 1)])
def test_transposes_beyond_a_tile(np, shape, item):
    """A transpose of several tiles, including partial ones, is exact."""
    size = shape[0] * shape[1] * item
    view = np.frombuffer(pattern(size), f"V{item}").reshape(shape).T
    assert content(np, native.tensor_copy(tensor_of(view, item), False), item) == view.tobytes()


@pytest.mark.few(30)
@pytest.mark.parametrize("item", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("turn", [slice(None), slice(None, None, -1), slice(1, None, 2)], ids=["all", "back", "odd"])
def test_permutations_beyond_a_tile(np, order, turn, item):
    """Three dimensions larger than a tile are exact in every order, with negative and other steps."""
    view = np.frombuffer(pattern(40 * 33 * 35 * item), f"V{item}").reshape(40, 33, 35).transpose(order)[turn, :, turn]
    assert content(np, native.tensor_copy(tensor_of(view, item), False), item) == view.tobytes()


@pytest.mark.parametrize("ndim", [7, 30, pytest.param(64, marks=pytest.mark.numpy("2.0"))])
def test_many_dimensions(np, ndim):
    """Dimensions outside the two inner loops are visited, too."""
    shape = [2] * 6 + [1] * (ndim - 6)
    view = np.frombuffer(pattern(64 * 4), "V4").reshape(shape).transpose(range(ndim)[::-1])
    assert content(np, native.tensor_copy(tensor_of(view, 4), False), 4) == view.tobytes()


def over(nbytes, shape, strides, dtype, *, device=(1, 0), flags=0, at=0):
    """Return (a dlx.Tensor over new pattern memory, that memory)."""
    memory = pattern(nbytes)
    address = native.buffer_address(memoryview(memory)) + at
    return native.tensor_new(address, shape, strides, dtype, device, flags, memory), memory


def read(tensor):
    """Return the bytes of a contiguous dlx.Tensor."""
    return bytes(ffi.buffer(ffi.cast("char*", tensor.data_ptr), tensor.nbytes))


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize(("shape", "nbytes"), [((4, 2), 4), ((3,), 2), ((), 1), ((5, 1), 3), ((1, 1), 1)])
def test_packed_contiguous_elements_are_copied(shape, nbytes, keep_order):
    """Contiguous packed elements below a byte are copied, including a partial last byte."""
    tensor, memory = over(64, shape, None, INT4)
    copy = native.tensor_copy(tensor, keep_order)
    assert copy.nbytes == nbytes
    assert read(copy) == memory[:nbytes]


@pytest.mark.parametrize("keep_order", [False, True])
@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 2), (1, 4)), ((4,), (2,)), ((4,), (-1,)), ((4,), (0,)), ((2, 2), (3, 1))]
)
def test_packed_elements_are_refused_otherwise(shape, strides, keep_order):
    """Other packed elements cannot be copied."""
    tensor, _ = over(64, shape, strides, FLOAT4, at=32)
    with pytest.raises(errors.LayoutError):
        native.tensor_copy(tensor, keep_order)


def test_padded_elements_are_copied_one_by_one():
    """Padded elements below a byte have a byte each, and stay padded."""
    tensor, memory = over(64, (3, 2), (1, 3), INT4, flags=PADDED)
    copy = native.tensor_copy(tensor, False)
    assert copy.flags == PADDED
    assert read(copy) == bytes(memory[i] for i in (0, 3, 1, 4, 2, 5))


@pytest.mark.parametrize("flags", [READ_ONLY, IS_COPIED, READ_ONLY | IS_COPIED])
def test_copies_are_writable(flags):
    """A copy is writable and not marked as copied."""
    tensor, _ = over(64, (4,), None, FLOAT32, flags=flags)
    assert native.tensor_copy(tensor, True).flags == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2**40), (0, 2**62, 2**62)])
@pytest.mark.parametrize("keep_order", [False, True])
def test_copies_of_nothing(shape, keep_order):
    """A copy of an empty tensor is empty and has no memory."""
    tensor = native.tensor_new(0, shape, None, FLOAT32, (1, 0), 0, None)
    copy = native.tensor_copy(tensor, keep_order)
    assert (copy.shape, copy.nbytes) == (shape, 0)


@pytest.mark.parametrize("kind", [3, 11])
def test_copies_are_plain_host_memory(kind):
    """A copy of pinned memory is ordinary host memory."""
    tensor, memory = over(64, (4,), None, FLOAT32, device=(kind, 1))
    copy = native.tensor_copy(tensor, False)
    assert copy.device == (1, 0)
    assert read(copy) == memory[:16]


@pytest.mark.parametrize("kind", [2, 4, 8, 10, 13, 99])
def test_device_memory_is_not_touched(kind):
    """Memory that the host cannot read is rejected at any address."""
    tensor = native.tensor_new(8, (4,), None, FLOAT32, (kind, 0), 0, None)
    with pytest.raises(errors.DeviceError):
        native.tensor_copy(tensor, False)
    host = dltensor((0,))
    device = dltensor((0,), device=(kind, 0))
    assert lib.dlx_copy(host, device, 0) == lib.dlx_copy(device, host, 0) == lib.DLX_E_DEVICE


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (2, 4)},
        {"shape": (2,)},
        {"shape": (2, 3, 1)},
        {"shape": (3, 2)},
        {"dtype": (0, 32, 1)},
        {"dtype": (2, 64, 1)},
        {"dtype": (2, 32, 2)},
    ],
    ids=str,
)
def test_mismatches_are_refused(other):
    """Nothing is written if shapes or dtypes differ."""
    tensor = dltensor((2, 3))
    assert lib.dlx_copy(tensor, dltensor(**{"shape": (2, 3), **other}), 0) == lib.DLX_E_MISMATCH


def test_too_much_is_a_memory_error():
    """A copy of a broadcast tensor that is too large raises MemoryError, without a leak."""
    tensor, _ = over(64, (2**52,), (0,), FLOAT32)
    with pytest.raises(MemoryError):
        native.tensor_copy(tensor, False)


def test_other_threads_run_during_a_copy():
    """The GIL is released during a copy: this thread continues."""
    side = 4096
    memory = bytearray(side * side)
    address = native.buffer_address(memoryview(memory))
    tensor = native.tensor_new(address, (side, side), (1, side), INT8, (1, 0), 0, memory)
    is_copying = is_seen = False

    def copy():
        nonlocal is_copying
        for _ in range(200):  # a busy machine may not schedule this thread at first
            is_copying = True
            native.tensor_copy(tensor, False)
            is_copying = False
            if is_seen:
                break

    worker = threading.Thread(target=copy)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the worker keeps the GIL unless the copy releases it
    try:
        worker.start()
        while worker.is_alive() and not is_seen:
            is_seen = is_copying
            time.sleep(0.0005)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert is_seen


@pytest.mark.parametrize("arguments", [(), (None, True), (1,), ("x", False, 1)])
def test_copy_wants_a_tensor_and_a_bool(arguments):
    """A wrong call raises TypeError."""
    with pytest.raises(TypeError):
        native.tensor_copy(*arguments)
