"""`dlx.shares_memory`: by addresses, across frameworks, strides considered."""

from __future__ import annotations

import array
import ctypes
import datetime
import mmap

import pytest
from support.arrays.examples import examples

import dlx
from dlx import errors
from dlx._api import shares_memory as module
from dlx._core import native


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
    """Arrays without elements share no byte."""
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
    """If an exact answer would take too long, the result is True, in bounded time."""
    block = np.zeros(10**6, "u1")
    steps = [4001, 4003, 4007, 4013, 4019, 4021, 4027, 4049]
    a = np.lib.stride_tricks.as_strided(block, (10,) * 8, steps)
    b = np.lib.stride_tricks.as_strided(block[1:], (10,) * 8, [s + 2 for s in steps])
    assert dlx.shares_memory(a, b) is True


def test_the_safe_side_is_that_memory_is_shared(np, monkeypatch):
    """Past the limit, the result may be True for separate memory, but never False for shared memory."""
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
    """int4 arrays share memory if they share a byte; the last byte of an odd number counts."""
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
    """Pinned memory of CUDA and ROCm and managed memory have host addresses; device memory does not."""
    block = bytearray(64)
    address = native.buffer_address(memoryview(block))

    def on(device, at=0):
        return native.tensor_new(address + at, (4,), None, (2, 32, 1), (device, 0), 0, block)

    assert dlx.shares_memory(on(kind), on(1)) and dlx.shares_memory(on(1, 8), on(kind))
    assert dlx.shares_memory(on(kind), memoryview(block)) and not dlx.shares_memory(on(kind), on(1, 16))
    assert not dlx.shares_memory(on(10), on(kind)) and not dlx.shares_memory(on(2), on(1))


def test_what_dlpack_cannot_say_still_has_addresses(np):
    """Arrays of every numpy dtype are compared: dates, records, strides of fractional elements."""
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
    """Meta tensors have no bytes; the parts of tensors with dense dimensions have."""
    hybrid = torch.eye(2).to_sparse(1)
    assert dlx.shares_memory(hybrid, hybrid) and not dlx.shares_memory(hybrid, torch.eye(2).to_sparse(1))
    for bad in (torch.ones(2, device="meta"),):
        with pytest.raises(errors.ConversionError):
            dlx.shares_memory(bad, torch.ones(2))


@pytest.mark.parametrize("dtype", ["U3", "S3", "V5", "M8[s]", "O", "g", "i4,f8", "T"])
def test_elements_without_a_dtype_have_all_their_bytes(np, dtype):
    """Text counts letters in numpy's typestr, and a StringDType has no number there: the last byte is shared, too."""
    if dtype == "T" and not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this numpy has no StringDType")
    array = np.zeros(2, np.dtypes.StringDType() if dtype == "T" else dtype)
    start, nbytes = array.ctypes.data, array.nbytes
    last, after = (dlx.from_pointer(start + at, (1,), "uint8", owner=array) for at in (nbytes - 1, nbytes))
    assert dlx.shares_memory(array, last) and dlx.shares_memory(last, array)
    assert not dlx.shares_memory(array, after)


def test_arrays_of_python_objects_have_memory_as_well(np):
    """Their interface gives no width."""
    array = np.array([1, "a", None], object)
    assert dlx.shares_memory(array[1:], array[:2]) and not dlx.shares_memory(array[:1], array[1:])


def python_path(a, b, monkeypatch):
    """The answer, or the error, of the whole examination."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_overlap", lambda a, b: None)
        return answer(a, b)


def answer(a, b):
    """Return the result of `shares_memory`, or the class and text of its error."""
    try:
        return dlx.shares_memory(a, b)
    except errors.DlxError as error:
        return type(error), str(error)


def buffers_of_one_block():
    """Return objects with buffers over the same 24 bytes, or over other memory; the owner is the last."""
    block = bytearray(range(24))
    view = memoryview(block)

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))

    class Either(ctypes.Union):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))

    closed = memoryview(block)
    closed.release()
    return {
        "all": view,
        "read-only": view.toreadonly(),
        "begin": view[:8],
        "end": view[8:],
        "nothing": view[8:8],
        "even": view[::2],
        "odd": view[1::2],
        "reversed": view[::-1],
        "middle, reversed": view[12:8:-1],
        "numbers": view.cast("f"),
        "table": view.cast("B", (4, 6)),
        "scalar": view[:8].cast("B").cast("d", ()),
        "letters": view.cast("c"),
        "released": closed,
        "floats of C": (ctypes.c_float * 2).from_buffer(block, 8),
        "a table of C": (ctypes.c_short * 2 * 3).from_buffer(block, 4),
        "nothing of C": (ctypes.c_float * 0)(),
        "structures": (Pair * 2).from_buffer(block),
        "unions": (Either * 2).from_buffer(block),
        "other byte order": (ctypes.c_int.__ctype_be__ * 2).from_buffer(block),
        "other": array.array("i", [1, 2]),
        "empty": array.array("i"),
        "text": (ctypes.c_wchar * 2)("a", "b"),
        "block": block,
    }


def test_buffers_are_looked_at_alike(monkeypatch):
    """For any buffer, C and the complete Python path have the same result or error."""
    some = buffers_of_one_block()
    for a in some.values():
        for b in some.values():
            expected = python_path(a, b, monkeypatch)
            assert answer(a, b) == expected
            assert module._overlap(a, b) in (None, expected)
    assert module._overlap(some["floats of C"], some["end"]) is True
    assert module._overlap(some["floats of C"], some["begin"]) is False


def test_a_buffer_is_held_for_the_call_only():
    """A bytearray with an exported buffer cannot grow."""
    block = bytearray(8)
    assert dlx.shares_memory(block, block) and dlx.shares_memory(memoryview(block), block)
    block.extend(b"more")
    with mmap.mmap(-1, 64) as pages:
        assert dlx.shares_memory(pages, pages)  # and one with a buffer cannot be closed


def test_arrays_of_jax_are_looked_at_alike(np, monkeypatch):
    """Both paths agree on jax arrays without a buffer format, without elements, or deleted."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    one = jnp.arange(6, dtype="float32")
    gone = jnp.ones(3)
    gone.delete()
    given = jnp.arange(6, dtype="float32") + 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    some = [
        one,
        jnp.ones((2, 3)),
        dlx.convert(one, to="numpy"),
        dlx.convert(one, to="numpy")[::2],
        memoryview(one),
        jnp.zeros((0, 3)),
        jnp.zeros(2, "bfloat16"),
        jnp.zeros(2, "bool"),
        jnp.zeros((), "complex64"),
        jnp.zeros(4, "int4"),
        jax.random.key(0),
        gone,
        given,
    ]
    for a in some:
        for b in some:
            expected = python_path(a, b, monkeypatch)
            assert answer(a, b) == expected
            assert module._overlap(a, b) in (None, expected)
    assert module._overlap(one, some[2]) is True and module._overlap(one, some[1]) is False


def test_columns_of_arrow(np):
    """Each chunk counts, and bools are bits: compared with the addresses of the slices."""
    pa = pytest.importorskip("pyarrow")
    block = np.zeros(64, "u1")
    buffer = pa.py_buffer(block)

    def part(kind, start, n):
        bits = kind.bit_width
        column = pa.Array.from_buffers(kind, 8 * len(block) // bits, [None, buffer]).slice(start, n)
        return column, {*range(start * bits // 8, ((start + n) * bits + 7) // 8)}

    kinds = pa.bool_(), pa.int8(), pa.int32()
    parts = [part(kind, start, n) for kind in kinds for start in (0, 8, 13) for n in (1, 3)]
    cases = [*parts]
    for (one, its), (other, others) in zip(parts, parts[2:], strict=False):
        if one.type == other.type:
            cases.append((pa.chunked_array([one, other]), its | others))
            cases.append((pa.chunked_array([one.slice(0, 0), other]), others))
    cases.append((pa.ListArray.from_arrays([0, 2, 3], part(pa.int8(), 20, 3)[0]), {20, 21, 22}))
    lists = [pa.ListArray.from_arrays([0, 1], part(pa.int8(), start, 1)[0]) for start in (40, 50)]
    cases.append((pa.chunked_array(lists), {40, 50}))
    for one, its in [*cases, (block, {*range(64)}), (block[50:51], {50})]:
        for other, others in cases:
            assert dlx.shares_memory(one, other) == bool(its & others), (one, other)


def test_memory_that_conversions_share_without_arrow(np):
    """Bools of pandas and tensors of pyarrow are not what Arrow's interface would export."""
    pandas, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    series, tensor = pandas.Series(np.arange(16) % 3 == 0), pa.Tensor.from_numpy(np.ones((4, 3)))
    for obj, values in ((series, series.to_numpy()), (tensor, tensor.to_numpy())):
        assert dlx.plan(obj, to="numpy").outcome == "shared"
        for each in (obj, values, values[::2], values[1:2], dlx.convert(obj, to="dlx")):
            assert dlx.shares_memory(obj, each) and dlx.shares_memory(each, obj)
        assert not dlx.shares_memory(obj, values.copy())
    with pytest.raises(errors.DTypeError, match="its values are Python objects"):
        dlx.shares_memory(pandas.Series([True, None]), series)
    with pytest.raises(errors.DTypeError, match="DLPack has no text"):
        dlx.shares_memory(pandas.Series(["a"]), series)


def test_columns_without_numbers_are_refused():
    """Text, dates and so on have no memory that a tensor shares."""
    polars, pa = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    for values in (["a", "b"], [b"a"], [None, None], [datetime.date(2020, 1, 1)]):
        for column in (polars.Series(values), pa.array(values)):
            with pytest.raises(errors.DlxError, match=r"^cannot compare the memory of"):
                dlx.shares_memory(column, column)
