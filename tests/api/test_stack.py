"""`dlx.stack`: everything is compared first, then one allocation and one copy each."""

from __future__ import annotations

import gc
import importlib

import pytest

import dlx
from dlx import errors
from dlx._core import native


def test_arrays_of_any_framework_become_one_new_array(np, torch):
    """The result has the target's type, one dimension more, and shares memory with nothing."""
    rows = [np.arange(6, dtype="f4").reshape(2, 3), torch.ones(2, 3), dlx.convert(np.zeros((2, 3), "f4"), to="dlx")]
    for target, kind in (("torch", torch.Tensor), ("numpy", np.ndarray), ("dlx", dlx.Tensor)):
        result = dlx.stack(rows, to=target)
        assert type(result) is kind and tuple(result.shape) == (3, 2, 3)
        array = np.asarray(dlx.convert(result, to="numpy"))
        assert array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable
        assert (array == np.stack([np.asarray(row) for row in rows])).all()
        assert not any(dlx.shares_memory(result, row) for row in rows)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float32", "float64", "complex128"])
def test_shapes_and_dtypes(np, shape, dtype):
    """Scalars, empty arrays and every width, strided in every way."""
    base = np.arange(np.prod((7, *shape), dtype=int)).reshape(7, *shape).astype(dtype)
    rows = [base[i] if shape else np.array(base[i]) for i in range(7)]
    assert (dlx.stack(rows, to="numpy") == np.stack(rows)).all()
    assert dlx.stack(rows, to="numpy").shape == (7, *shape)
    for view in (lambda x: x[..., ::-1], lambda x: x.T, lambda x: x[..., ::2]):
        if shape:
            odd = [view(row) for row in rows]
            assert (dlx.stack(odd, to="numpy") == np.stack(odd)).all()
            assert (dlx.stack([odd[0], np.ascontiguousarray(odd[1])], to="numpy") == np.stack(odd[:2])).all()


def test_the_odd_one_is_named_before_anything_is_allocated(np, torch):
    """Shape, dtype and device of each are compared with the first's; the error names the index and both values."""
    good = [np.ones(3, "f4") for _ in range(5)]

    for odd, kind, words in (
        (np.ones(4, "f4"), errors.LayoutError, r"\(4,\).*\(3,\)"),
        (np.ones((3, 1), "f4"), errors.LayoutError, r"\(3, 1\).*\(3,\)"),
        (np.ones(3, "f8"), errors.DTypeError, "float64.*float32"),
        (torch.ones(3, dtype=torch.float16), errors.DTypeError, "float16.*float32"),
    ):
        with pytest.raises(kind, match=rf"at arrays\[3\]: .*{words}") as caught:
            dlx.stack([*good[:3], odd, *good[3:]], to="torch")
        assert caught.value.where == "arrays[3]"


def test_devices_are_told_apart_by_their_number():
    """Type and id of the device are compared; memory that the host cannot read is refused, not read."""
    one, other = (dlx.from_pointer(4096, (2,), "float32", device=f"cuda:{i}") for i in range(2))
    for rows in ([one, one, other], [dlx.convert(bytearray(2), to="dlx"), dlx.convert(b"ab", to="dlx"), other]):
        with pytest.raises(errors.DlxError) as caught:
            dlx.stack(rows, to="dlx")
        assert caught.value.where == "arrays[2]"
    with pytest.raises(errors.DeviceError, match="cannot stack 2 arrays to 'dlx'"):
        dlx.stack([one, one], to="dlx")


def test_an_array_that_cannot_be_read_is_named(np, torch):
    """The refusal of an array names it, and has a fix for `stack`."""
    with pytest.raises(errors.ConversionError, match=r"at arrays\[1\]: .*grad.*to dlx.convert") as caught:
        dlx.stack([torch.ones(2), torch.ones(2, requires_grad=True)], to="numpy")
    assert caught.value.where == "arrays[1]" and caught.value.target == "numpy"
    for bad in ("text", [object()], None):
        with pytest.raises(errors.AdapterNotFoundError, match=r"at arrays\[1\]"):
            dlx.stack([np.ones(1), bad], to="numpy")
    with pytest.raises(ValueError, match="at least one"):
        dlx.stack([], to="numpy")
    with pytest.raises(errors.AdapterNotFoundError, match="unknown target"):
        dlx.stack([np.ones(1)], to="nosuch")


@pytest.mark.numpy("2.0")
def test_what_the_target_cannot_hold_is_refused_before_memory_is_allocated(np):
    """One dimension too many, or too many bytes."""
    deep = np.ones((1,) * 64)
    with pytest.raises(errors.DlxError):
        dlx.stack([deep, deep], to="numpy")
    huge = np.broadcast_to(np.float32(1), (1 << 40,))
    with pytest.raises((errors.DlxError, MemoryError)):
        dlx.stack([huge] * 1000, to="numpy")


def test_the_same_array_twice_is_two_rows_and_asked_once(np):
    """The list may contain a single-use producer twice."""
    calls = []

    class Once:
        def __dlpack__(self, *, max_version=None):
            calls.append(1)
            return dlx.convert(np.ones(2), to="dlx").__dlpack__(max_version=max_version)

    once = Once()
    assert dlx.stack([once, np.zeros(2), once], to="numpy").tolist() == [[1, 1], [0, 0], [1, 1]]
    assert calls == [1]


def test_capsules_and_generators(np):
    """Any iterable is taken; a capsule is only looked at, so it can still be used."""
    capsule = dlx.convert(np.ones(2), to="dlx").__dlpack__()
    assert dlx.stack((x for x in (capsule, np.zeros(2))), to="numpy").tolist() == [[1, 1], [0, 0]]
    assert dlx.convert(capsule, to="numpy").tolist() == [1, 1]


def test_read_only_and_bits_survive(np):
    """A read-only source gives a writable result; NaN payloads and signed zeros are kept."""
    bits = np.array([0x7FC00001, 0x80000000, 0xFFC12345], "u4").view("f4")
    bits.flags.writeable = False
    result = dlx.stack([bits, bits], to="numpy")
    assert result.flags.writeable and (result.view("u4") == bits.view("u4")).all()


def test_stack_leaks_nothing(np):
    """Neither success nor failure leaks a managed tensor."""
    gc.collect()
    live = native.live()
    rows = [np.ones(3), dlx.convert(np.ones(3), to="dlx")]
    for _ in range(50):
        dlx.stack(rows, to="numpy")
        for bad in (np.ones(4), np.array(["x"]), "text"):
            with pytest.raises(errors.DlxError):
                dlx.stack([*rows, bad], to="numpy")
    del rows
    gc.collect()
    assert native.live() == live


def test_the_way_in_c_gives_what_the_python_path_gives(np, torch, monkeypatch):
    """Rows of any layout and kind, results and errors alike; other arrays take the Python path."""
    module = importlib.import_module("dlx._api.stack")
    grid = np.arange(24, dtype="f4").reshape(4, 6)
    read_only = grid[0].copy()
    read_only.flags.writeable = False
    pinned = dlx.from_pointer(4096, (2,), "float32", device="cuda:0")

    class Own:
        """An array that only has `__dlpack__`."""

        def __dlpack__(self, **options):
            return grid[0].__dlpack__(**options)

    lists = {
        "rows": [*grid],
        "strided": [grid[0, ::-1], grid[1], read_only],
        "columns": [*grid.T],
        "mixed": [grid[0], torch.ones(6), dlx.convert(grid[1], to="dlx"), torch.ones(6)],
        "buffers": [b"abc", bytearray(b"def"), memoryview(b"ghi")],
        "scalars": [np.float32(1), np.array(1, "f4")],
        "own": [grid[0], Own()],
        "twice": [grid[0], grid[0]],
        "empty": [np.ones((0, 3)), np.ones((0, 3))],
        "shapes": [grid[0], grid[1, :3]],
        "dtypes": [grid[0], grid[0].astype("f8")],
        "gradient": [torch.ones(2), torch.ones(2, requires_grad=True)],
        "device": [pinned, pinned],
        "odd device": [grid[0, :2], pinned],
        "no array": [grid[0], "text"],
        "deep": [np.ones((1,) * 64)] * 2,
        "packed": [dlx.from_pointer(grid.ctypes.data, (3,), "int4", owner=grid)] * 2,
        "huge": [np.broadcast_to(np.float32(1), (1 << 60,))] * 64,
    }

    def outcome(arrays, to):
        try:
            result = dlx.stack(arrays, to=to)
        except Exception as error:
            return type(error), str(error), getattr(error, "path", None), getattr(error, "fix", None)
        tensor = dlx.convert(result, to="dlx")
        memory = dlx.ffi.buffer(dlx.ffi.cast("char *", tensor.data_ptr), tensor.nbytes)[:]
        strides = tensor.strides if memory else None  # of no element they mean nothing
        return type(result), tensor.dtype, tensor.shape, strides, tensor.flags, memory

    in_c, taken = module._stack_plainly, []
    for name, arrays in lists.items():
        for to in ("numpy", "torch", "dlx"):
            monkeypatch.setattr(
                module, "_stack_plainly", lambda *args, name=name: taken.append((name, in_c(*args))) or taken[-1][1]
            )
            quick = outcome(arrays, to)
            monkeypatch.setattr(module, "_stack_plainly", lambda *args: None)
            assert quick == outcome(arrays, to), (name, to)
    answered = {name for name, result in taken if result is not None}
    assert answered == {"rows", "strided", "columns", "mixed", "buffers", "twice", "empty", "deep"}


class Written:
    """An object whose array interface serializes its elements, like pillow's images."""

    def __init__(self, array, **more):
        self.array, self.more, self.asked = array, more, 0

    @property
    def __array_interface__(self):
        self.asked += 1
        interface = {"shape": self.array.shape, "typestr": self.array.dtype.str, "version": 3}
        return interface | {"data": self.array.tobytes()} | self.more


def test_what_writes_its_elements_out_is_asked_once(np, torch):
    """Each `__array_interface__` is read once, even if only some have strides."""
    arrays = [np.arange(6, dtype="u2").reshape(2, 3) * i for i in range(4)]
    for more in ({}, {"strides": None}):
        for target in ("torch", "numpy", "dlx"):
            rows = [Written(array, **more) for array in arrays]
            result = dlx.stack(rows, to=target)
            assert (np.asarray(dlx.convert(result, to="numpy")) == np.stack(arrays)).all()
            assert [row.asked for row in rows] == [1] * 4
    assert dlx.stack([Written(np.zeros((0, 2), "f4"))] * 2, to="numpy").shape == (2, 0, 2)
    twice = Written(arrays[1])
    assert (dlx.stack([twice, twice], to="numpy") == np.stack([arrays[1]] * 2)).all() and twice.asked == 1
    mixed = [Written(arrays[0]), Written(arrays[1], strides=(6, 2), data=(arrays[1].ctypes.data, False))]
    assert (dlx.stack(mixed, to="numpy") == np.stack(arrays[:2])).all()


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"shape": (3, 2)}, r"at arrays\[1\]: .*\(3, 2\).*\(2, 3\)"),
        ({"typestr": "<i2"}, r"at arrays\[1\]: .*int16.*uint16"),
        ({"data": b"short"}, r"at arrays\[1\]: .*5 bytes does not hold 12"),
        ({"mask": b"1"}, r"at arrays\[1\]: .*mask"),
        ({"shape": 5}, r"at arrays\[1\]: .*incomplete"),
    ],
)
def test_what_is_written_out_otherwise_is_refused_with_its_place(np, odd, words):
    """The error is the same as for a single array, and nothing leaks."""
    live = native.live()
    array = np.ones((2, 3), "u2")
    with pytest.raises(errors.DlxError, match=words):
        dlx.stack([Written(array), Written(array, **odd)], to="numpy")
    gc.collect()
    assert native.live() == live


def test_one_array_that_is_written_out(np):
    """It is stacked once."""
    assert dlx.stack([Written(np.ones((2, 3), "u2"))], to="numpy").shape == (1, 2, 3)


@pytest.mark.parametrize("kind", ["dict", "view", "pandas"])
def test_errors_name_the_keys_of_a_mapping(np, kind):
    """Columns are found by their names, not by numbers that are in no mapping."""
    columns = {"x": np.ones(3, "f4"), "y": np.ones(3, "f8")}
    if kind == "pandas":
        columns = pytest.importorskip("pandas").DataFrame(columns)
    with pytest.raises(errors.DTypeError) as caught:
        dlx.stack(dlx.convert(columns, to="dlx", lazy=True) if kind == "view" else columns, to="numpy")
    assert caught.value.path == ("y",)
    assert "at arrays['y']: its dtype is float64, but arrays['x'] has float32" in str(caught.value)
