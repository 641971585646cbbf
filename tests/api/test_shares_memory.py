"""`dlx.shares_memory`: by addresses, across frameworks, strides considered."""

from __future__ import annotations

import mmap

import pytest

import dlx
from dlx import errors
from dlx._core import native
from examples import examples


def test_across_frameworks(np, torch):
    """One memory seen by two frameworks is shared; a copy is not."""
    a = np.arange(12.0).reshape(3, 4)
    t, d = torch.from_numpy(a), dlx.convert(a, to="dlx")
    for x in (a, t, d, a[1:], t[:, 1], memoryview(a)):
        for y in (a, t, d):
            assert dlx.shares_memory(x, y) and dlx.shares_memory(y, x)
    assert not dlx.shares_memory(a, a.copy()) and not dlx.shares_memory(t.clone(), d)


def test_neighbours_do_not_share(np):
    """Parts of one buffer that do not overlap share nothing; one common byte is enough."""
    block = np.zeros(64, "u1")
    assert not dlx.shares_memory(block[:32], block[32:])
    assert dlx.shares_memory(block[:33], block[32:])
    assert dlx.shares_memory(block[:8].view("f8"), block[7:9])
    assert not dlx.shares_memory(block[:8].view("f8"), block[8:16].view("f8"))


def test_strides_are_considered(np, torch):
    """Rows and columns interleave without meeting; negative and zero strides are understood."""
    x = np.arange(20)
    assert not dlx.shares_memory(x[::2], x[1::2]) and dlx.shares_memory(x[::2], x[::3])
    grid = np.zeros((6, 8))
    assert not dlx.shares_memory(grid[:, :4], grid[:, 4:]) and not dlx.shares_memory(grid[:, 0], grid[:, 1])
    assert dlx.shares_memory(grid[:, 3], grid[2]) and not dlx.shares_memory(grid[::2, 0], grid[1::2, 0])
    assert dlx.shares_memory(x[::-1], x[:1]) and not dlx.shares_memory(x[9::-1], x[10:])
    assert dlx.shares_memory(np.broadcast_to(x[:1], (5,)), x) and not dlx.shares_memory(
        np.broadcast_to(x[:1], (5,)), x[1:]
    )
    t = torch.zeros(4, 6)
    assert not dlx.shares_memory(t[:, ::2], t[:, 1::2]) and dlx.shares_memory(t.T, t[1])


def test_agrees_with_numpy_on_random_strided_views(np):
    """np.shares_memory solves the same question exactly."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    block = np.zeros(4000, "u1")

    def view(draw):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        strides = [draw(st.integers(-9, 9)) * width for _ in shape]
        start = 1600 + draw(st.integers(0, 40)) * width
        return np.ndarray(shape, f"u{width}", block, start, strides)

    @hypothesis.given(st.data())
    @hypothesis.settings(deadline=None, max_examples=examples(500))
    def agree(data):
        a, b = view(data.draw), view(data.draw)
        assert dlx.shares_memory(a, b) is np.shares_memory(a, b)

    agree()


def test_empty_arrays_share_nothing(np):
    """Without an element there is no byte."""
    x = np.zeros(8)
    assert not dlx.shares_memory(x[:0], x) and not dlx.shares_memory(x, x[3:3])


def test_nothing_is_used_up(np):
    """A capsule keeps its name; a buffer can be resized afterwards."""
    block = bytearray(8)
    assert dlx.shares_memory(block, memoryview(block)[4:])
    block.append(1)
    capsule = dlx.convert(np.ones(2), to="dlx").__dlpack__()
    assert not dlx.shares_memory(capsule, np.ones(2))
    assert dlx.convert(capsule, to="numpy").tolist() == [1, 1]


def test_hard_questions_are_answered_on_the_safe_side(np):
    """Where an exact answer would take too long it is True, in bounded time."""
    block = np.zeros(10**6, "u1")
    steps = [4001, 4003, 4007, 4013, 4019, 4021, 4027, 4049]
    a = np.lib.stride_tricks.as_strided(block, (10,) * 8, steps)
    b = np.lib.stride_tricks.as_strided(block[1:], (10,) * 8, [s + 2 for s in steps])
    assert dlx.shares_memory(a, b) is True


def test_the_safe_side_is_that_memory_is_shared(np, monkeypatch):
    """Past the limit an answer may be True where nothing is shared, never False where something is."""
    block = np.zeros(4000, "u1")
    pairs = [
        (([2, 5, 4], [25, 27, 9], 37), ([4, 2], [2, 2], 34)),
        (([4, 2], [28, 10], 5), ([2, 4, 3], [14, 11, 3], 20)),
        (([4, 2], [18, 23], 11), ([3, 3], [28, 29], 20)),
    ]
    for pair in pairs:
        a, b = (np.ndarray(shape, "u1", block, start, steps) for shape, steps, start in pair)
        assert not np.shares_memory(a, b) and not dlx.shares_memory(a, b)
        with monkeypatch.context() as few:
            few.setattr("dlx._api.shares_memory.MAX_STEPS", 1)
            assert dlx.shares_memory(a, b) and dlx.shares_memory(b, a)


def test_packed_elements(np):
    """Two elements of int4 in a byte: what shares a byte shares memory; of an odd number the last byte counts."""
    block = bytearray(64)
    address = native.buffer_address(memoryview(block))

    def packed(at, n):
        return native.tensor_new(address + at, (n,), None, (0, 4, 1), (1, 0), 0, block)

    assert dlx.shares_memory(packed(0, 8), packed(3, 2)) and not dlx.shares_memory(packed(0, 8), packed(4, 8))
    assert dlx.shares_memory(packed(0, 7), packed(3, 2)) and not dlx.shares_memory(packed(0, 6), packed(3, 2))
    assert dlx.shares_memory(packed(0, 9), packed(4, 1)) and dlx.shares_memory(packed(2, 1), memoryview(block)[2:3])
    assert not dlx.shares_memory(packed(0, 8), memoryview(block)[4:])


@pytest.mark.parametrize("kind", [3, 11, 13])
def test_pinned_memory_is_host_memory(kind):
    """Pinned memory of CUDA and of ROCm, and managed memory, have addresses of the host; a device's own have not."""
    block = bytearray(64)
    address = native.buffer_address(memoryview(block))

    def on(device, at=0):
        return native.tensor_new(address + at, (4,), None, (2, 32, 1), (device, 0), 0, block)

    assert dlx.shares_memory(on(kind), on(1)) and dlx.shares_memory(on(1, 8), on(kind))
    assert dlx.shares_memory(on(kind), memoryview(block)) and not dlx.shares_memory(on(kind), on(1, 16))
    assert not dlx.shares_memory(on(10), on(kind)) and not dlx.shares_memory(on(2), on(1))


def test_what_dlpack_cannot_say_still_has_addresses(np):
    """Strides that are no whole elements, dates, records: numpy's arrays of every dtype are compared."""
    records = np.zeros(4, [("a", "i2"), ("b", "f8")])
    assert dlx.shares_memory(records["b"], records) and not dlx.shares_memory(records["a"], records["b"])
    dates = np.zeros(3, "M8[s]")
    assert dlx.shares_memory(dates, dates.view("i8"))


def test_memory_mapped_twice_is_not_known(tmp_path):
    """Two mappings of one file have two addresses: documented as not recognised."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        one, two = mmap.mmap(file.fileno(), 4096), mmap.mmap(file.fileno(), 4096)
    assert dlx.shares_memory(one, one) and not dlx.shares_memory(one, two)


@pytest.mark.parametrize("bad", [1, None, "text", [1], object()])
def test_what_is_no_array_is_an_error(bad):
    """Either argument may be wrong."""
    for pair in ((bad, b"x"), (b"x", bad)):
        with pytest.raises(errors.AdapterNotFoundError):
            dlx.shares_memory(*pair)


def test_what_has_no_memory_is_an_error(torch):
    """Sparse and meta tensors have no bytes in one place."""
    for bad in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(errors.ConversionError):
            dlx.shares_memory(bad, torch.ones(2))


def test_arrays_of_python_objects_have_memory_as_well(np):
    """Their interface gives no width."""
    array = np.array([1, "a", None], object)
    assert dlx.shares_memory(array[1:], array[:2]) and not dlx.shares_memory(array[:1], array[1:])
