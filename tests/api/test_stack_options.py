"""The options of `dlx.stack`: axis, dtype and pad; numbers, lists of numbers, and data frames."""

from __future__ import annotations

import array
import gc
import importlib
import importlib.util
import itertools
import random

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx._engine.seam import FAST_PATH


def as_numpy(x):
    """Return any array as numpy's."""
    return dlx.convert(x, "numpy")


@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "dlx"])
def test_any_axis_like_numpy(np, torch, target):
    """Positive and negative axes, any layout and framework of the rows."""
    pytest.importorskip(target)
    x = np.arange(24, dtype="f4").reshape(2, 3, 4)
    rows = [x, torch.from_numpy(x + 1), (x + 2)[:, ::-1][:, ::-1], np.asfortranarray(x), dlx.convert(x, "dlx")]
    for axis in range(-4, 4):
        found = as_numpy(dlx.stack(rows, target, axis=axis))
        assert (found == np.stack([as_numpy(row) for row in rows], axis)).all()
    for axis in (4, -5):
        with pytest.raises(ValueError, match=f"axis must be from -4 to 3 for these arrays, found {axis}"):
            dlx.stack(rows, target, axis=axis)
    assert as_numpy(dlx.stack([np.float32(1), np.float32(2)], target, axis=-1)).tolist() == [1, 2]


def test_one_dtype_for_all(np, torch):
    """Integers, bools and other floats are cast; a mapping changes only what it names."""
    rows = [np.arange(3), np.ones(3, "f2"), torch.tensor([True, False, True]), np.arange(3, dtype=">i2")]
    for dtype in (
        "float32",
        "int16",
        "float64",
        "bfloat16" if dlx.plan(rows[0], "numpy", dtype={"int64": "bfloat16"}) else "int8",
    ):
        found = dlx.stack(rows, "numpy", dtype=dtype)
        assert str(dlx.DType(found.dtype)) == dtype
        assert found.astype("f4").tolist() == [[0, 1, 2], [1, 1, 1], [1, 0, 1], [0, 1, 2]]
    assert dlx.stack(rows[:2], "numpy", dtype={"int64": "float16"}).dtype == np.float16
    with pytest.raises(
        errors.DTypeError, match=r"at arrays\[1\]: its dtype is float16, .* has int64. Pass dtype='float64'"
    ):
        dlx.stack(rows[:2], "numpy")
    with pytest.raises(errors.DTypeError, match=r"at arrays\[1\]"):
        dlx.stack(rows[:2], "numpy", dtype={"int64": "int8"})
    ml_dtypes = pytest.importorskip("ml_dtypes")
    small = [np.ones(2, ml_dtypes.float8_e5m2), np.zeros(2)]
    assert dlx.stack(small, "numpy", dtype="float32").tolist() == [[1, 1], [0, 0]]


def test_the_dtype_that_an_error_names_loses_nothing(np):
    """It holds the values of all rows, as far as a dtype can; the advice works."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32"]
    names += ["float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]

    def limits(name):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        if dtype.kind in "iu":
            return np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        if dtype.kind == "b":
            return np.array([False, True])
        part = dtype if dtype.kind == "f" else np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
        info = ml_dtypes.finfo(part)
        return np.array([info.max, info.smallest_subnormal if name != "float8_e8m0fnu" else info.tiny]).astype(dtype)

    for some in [*itertools.product(names, repeat=2), *itertools.product(names[::3], names[1::3], names[2::3])]:
        rows = [limits(name) for name in some]
        if len(set(some)) == 1:
            continue
        with pytest.raises(errors.DTypeError) as failed:
            dlx.stack(rows, "numpy")
        ((_, advised),) = failed.value.option
        made = dlx.stack(rows, "numpy", dtype=advised)
        if all(hasattr(np, name) for name in some):
            assert advised == np.result_type(*some).name
        if "rounds integers" in failed.value.fix:
            assert advised in ("float64", "complex128") and any(name in ("int64", "uint64") for name in some)
            continue
        for row, old in zip(made, rows, strict=True):
            back = [complex(x) if row.dtype.kind == "c" else x.item() for x in row]
            assert back == [complex(x) if row.dtype.kind == "c" else x.item() for x in old], (some, advised)


def test_padding_in_every_dimension(np):
    """Each row is at the start of its place; the number of dimensions must be the same."""
    rng = random.Random(1)
    for ndim, dtype in itertools.product((1, 2, 3), (None, "float32", "int8")):
        rows = [
            np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
            for shape in ([rng.randrange(4) for _ in range(ndim)] for _ in range(5))
        ]
        shape = np.max([row.shape for row in rows], 0)
        expected = np.full((5, *shape), -1, dtype or "i8")
        for place, row in zip(expected, rows, strict=True):
            place[tuple(map(slice, row.shape))] = row
        for axis in range(ndim + 1):
            found = dlx.stack(rows, "numpy", pad=-1, dtype=dtype, axis=axis)
            assert np.array_equal(found, np.moveaxis(expected, 0, axis)) and found.dtype == expected.dtype
    with pytest.raises(errors.LayoutError, match=r"at arrays\[1\]: its shape is \(2,\), .* has \(3,\). Pass pad=0."):
        dlx.stack([[1, 2, 3], [4, 5]], "numpy")
    with pytest.raises(errors.LayoutError, match="Pass arrays of one shape"):
        dlx.stack([np.ones(3), np.ones((3, 3))], "numpy", pad=0)
    assert np.isnan(dlx.stack([np.ones(1), np.ones(2)], "numpy", pad=float("nan"))[0, 1])


def test_the_number_that_pads(np):
    """It is a value of the result's dtype; another object is refused, even if nothing is padded."""
    rows = [np.arange(1), np.arange(3)]
    for dtype, numbers in (
        ("int8", (0, -128, np.int64(7), True, 2.0)),
        ("uint64", (0, np.uint8(255))),
        ("bool", (0, 1, True)),
        ("float16", (0, 0.5, np.float32(2), -1, float("inf"))),
        ("complex64", (0, 1.5, 2j, np.complex64(1j), True)),
    ):
        for number in numbers:
            wanted = np.full((2, 3), number, dtype)
            wanted[0, :1], wanted[1] = rows[0], rows[1]
            for options in ({"to": "numpy"}, {"out": np.zeros((2, 3), dtype)}):
                found = dlx.stack(rows, pad=number, dtype=dtype, **options)
                assert found.dtype == wanted.dtype and np.array_equal(found, wanted), (dtype, number)
    for dtype, number in (("int8", 128), ("int8", float("nan")), ("int8", 0.5), ("uint8", -1), ("bool", 2),
                          ("float32", 1j), ("int64", 1 << 63), ("int64", float("inf"))):  # fmt: skip
        with pytest.raises(errors.DTypeError, match=f"is not a value of {dtype}"):
            dlx.stack(rows, "numpy", pad=number, dtype=dtype)
    assert dlx.stack([[1j], [2j, 3]], "numpy", pad=0).tolist() == [[1j, 0], [2j, 3]]
    for invalid in ("0", [1], np.ones(2), object()):
        for arrays in (rows, rows[:1], [1, 2]):
            with pytest.raises(TypeError, match="pad must be a number"):
                dlx.stack(arrays, "numpy", pad=invalid)


def test_numbers(np, torch):
    """Python's numbers have numpy's dtypes, and lists of them are rows."""
    for numbers in ([1, 2], [1.5, 2], [True, False], [True, 2], [1, 2j, True]):
        for target in ("numpy", "torch", "dlx"):
            found = as_numpy(dlx.stack(numbers, target))
            assert found.tolist() == numbers and found.dtype == np.array(numbers).dtype
    assert dlx.stack([1.0, 2], "torch", dtype="float32").dtype == torch.float32
    assert dlx.stack([[1, 2], [3, 4]], "numpy").tolist() == [[1, 2], [3, 4]]
    assert dlx.stack([[[1], [2]], ((3,), (4,))], "numpy", axis=1).shape == (2, 2, 1)
    assert dlx.stack([np.ones(2), [1.0, 2.0]], "numpy").tolist() == [[1, 1], [1, 2]]
    assert dlx.stack([np.float64(1), 2.0], "numpy").tolist() == [1, 2]
    assert dlx.stack(range(3), "numpy").tolist() == [0, 1, 2]
    out = torch.zeros(2)
    assert dlx.stack([1.5, 2], out=out, dtype="float32") is out and out.tolist() == [1.5, 2]
    for odd in ([1, "2"], [[1], [object()]], [1, None], [[1, [2]], [3]]):
        with pytest.raises(errors.DlxError, match=r"at arrays\["):
            dlx.stack(odd, "numpy")
    with pytest.raises(errors.DTypeError, match="fit neither int64"):
        dlx.stack([1 << 64], "numpy")
    pytest.importorskip("jax")
    with pytest.raises(errors.DTypeError, match="x64 is off"):
        dlx.stack([1.5], "jax")
    assert dlx.stack([1.5], "jax", dtype="float32").dtype == np.float32


def test_frames_become_matrices(np):
    """Columns of several dtypes in one cast; text names its column."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"i": [1, 2], "x": [1.5, 2.5], "b": [True, False]})
    libraries = [lambda f: f]
    for name, make in (("polars", "from_pandas"), ("pyarrow", "table")):
        module = pytest.importorskip(name)
        libraries.append(module.Table.from_pandas if make == "table" else getattr(module, make))
    for make in libraries:
        found = dlx.stack(make(frame), "torch", axis=1, dtype="float32")
        assert found.tolist() == [[1, 1.5, 1], [2, 2.5, 0]]
        with pytest.raises(errors.DTypeError, match=r"at arrays\['x'\]: .*Pass dtype='float64'"):
            dlx.stack(make(frame), "torch", axis=1)
        with pytest.raises(errors.DTypeError, match=r"at arrays\['t'\]"):
            dlx.stack(make(frame.assign(t=["a", "b"])), "torch", axis=1, dtype="float32")


def test_a_frame_over_one_matrix(np):
    """The result is new memory of dlx, aligned as documented, in any order of the matrix and with a cast."""
    pandas = pytest.importorskip("pandas")
    for order, dtype in itertools.product("CF", (None, "float32")):
        for _ in range(5):
            x = np.asarray(np.random.default_rng(0).random((7, 3)), order=order)
            found = dlx.stack(pandas.DataFrame(x, copy=False), "numpy", axis=1, dtype=dtype)
            assert np.array_equal(found, x.astype(dtype or "f8")) and found.flags.writeable
            assert found.ctypes.data % 256 == 0 and not np.may_share_memory(found, x)
            assert found.flags.f_contiguous  # the values of a column are adjacent


@pytest.mark.parametrize("to", ["numpy", "torch", "jax", "dlx", "tvm_ffi", "pyarrow", "nothing"])
@pytest.mark.parametrize("kind", ["f8", "f4", "f2", "i8", "u1", "?", "c8", ">f4", "g", "O", "M8[ns]"])
def test_a_matrix_is_copied_in_c_as_in_python(np, to, kind):
    """A frame of one matrix, and parts of it: values, order and errors are those of the path that a trace takes."""
    pandas = pytest.importorskip("pandas")
    if to not in ("dlx", "nothing"):
        pytest.importorskip(to)

    def stack(frame, dtype):
        try:
            found = dlx.stack(frame, to, axis=1, dtype=dtype)
        except (errors.DlxError, ValueError) as error:
            return type(error), str(error)
        found = np.asarray(dlx.convert(found, "dlx"))
        return found.dtype, found.strides, found.tolist()

    for order, dtype in itertools.product("CF", (None, "float32", "complex64", "uint8")):
        matrix = np.asarray(np.arange(24).reshape(6, 4).astype(kind), order=order)
        frame = pandas.DataFrame(matrix, copy=False)
        for part in (
            frame,
            frame[1:5],
            frame[::-2],
            frame.iloc[:, 1:3],
            frame.iloc[:, :1],
            frame[:0],
            frame.iloc[:, :0],
        ):
            quick = stack(part, dtype)
            with dlx.trace():
                assert stack(part, dtype) == quick, (order, dtype, part)
    if kind == "f8" and to in ("numpy", "torch", "dlx", "tvm_ffi"):
        assert FAST_PATH._open_frame(pandas.DataFrame(matrix.copy("C")), to)[0] is not None
    frame.columns = list("aabc")
    with pytest.raises(errors.DlxError):
        dlx.stack(frame, to, axis=1)


def test_blocks_of_a_frame(np):
    """Blocks of any dtype and place, reversed, sliced and with inserted columns, into new arrays and `out`."""
    pandas, rng = pytest.importorskip("pandas"), np.random.default_rng(0)
    kinds = ["f8", "f4", "i8", "u1", "?", "f2"]
    for _ in range(60):
        n, width = int(rng.choice([0, 1, 5])), int(rng.integers(1, 9))
        draw = lambda n=n: (rng.random(n) * 100).astype(rng.choice(kinds))  # noqa: E731
        frame = pandas.DataFrame({f"c{i}": draw() for i in range(width)})
        frame.insert(int(rng.integers(width + 1)), "new", draw())
        frame = frame.iloc[:, ::-1] if rng.random() < 0.3 else frame
        frame = frame[list(rng.permutation(frame.columns))] if rng.random() < 0.5 else frame
        for axis, to, dtype in ((0, "torch", "float32"), (1, "numpy", "float64"), (1, "jax", "float32")):
            wanted = np.stack([frame[name].to_numpy().astype(dtype) for name in frame], axis)
            if to != "jax" or importlib.util.find_spec("jax"):
                found = np.asarray(dlx.stack(frame, to, axis=axis, dtype=dtype))
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and (found == wanted).all()
            out = np.zeros(tuple(2 * extent for extent in wanted.shape), dtype)[::2, ::2]
            assert dlx.stack(frame, axis=axis, dtype=dtype, out=out) is out and (out == wanted).all()
        odd = next((name for name in frame if frame[name].dtype != frame.iloc[:, 0].dtype), None)
        if odd is not None:
            with pytest.raises(errors.DTypeError) as caught:
                dlx.stack(frame, "numpy")
            assert caught.value.path == (odd,)


def test_a_mapping_of_columns(np):
    """A dict of arrays is a frame; a matrix goes into memory that is there."""
    columns = {"a": np.arange(3), "b": np.ones(3, "f4")}
    assert dlx.stack(columns, "numpy", axis=1, dtype="float32").tolist() == [[0, 1], [1, 1], [2, 1]]
    for out in (np.zeros((3, 2), "f4"), np.zeros((2, 3), "f4").T, np.zeros((3, 4), "f4")[:, ::2]):
        assert dlx.stack(columns, out=out, axis=1, dtype="float32") is out
        assert out.tolist() == [[0, 1], [1, 1], [2, 1]]
    many = [np.arange(2000.0) + i for i in range(50)]
    assert (dlx.stack(many, out=np.zeros((2000, 50), "f4"), axis=1, dtype="float32") == np.stack(many, 1)).all()


def test_list_columns(np, torch):
    """Lists of one length are one array over the column's values; others are rows, padded if the call says so."""
    pa = pytest.importorskip("pyarrow")
    for kind in (pa.list_, pa.large_list):
        column = pa.array([[1, 2], [3, 4], [5, 6]], kind(pa.int64()))
        found = dlx.stack(column, "numpy")
        assert found.tolist() == column.to_pylist() and dlx.shares_memory(found, column.values)
        assert not found.flags.writeable and dlx.stack(column, "torch").tolist() == column.to_pylist()
        assert dlx.stack(column[1:], "numpy", axis=1).tolist() == [[3, 5], [4, 6]]
        assert dlx.stack(column, "torch", dtype="float32").tolist() == column.to_pylist()
        assert dlx.stack(column, out=np.zeros((3, 2), "i8"))[2].tolist() == [5, 6]
        nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], kind(kind(pa.int64())))
        assert dlx.stack(nested, "numpy").tolist() == nested.to_pylist()
        ragged = pa.array([[1, 2], [], [3]], kind(pa.int64()))
        assert dlx.stack(ragged, "numpy", pad=-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
        with pytest.raises(errors.LayoutError, match=r"at arrays\[1\]: .*Pass pad=0"):
            dlx.stack(ragged, "numpy")
        with pytest.raises(errors.LayoutError, match="nested and differ"):
            dlx.stack(pa.array([[[1]], [[1, 2]]], kind(kind(pa.int64()))), "numpy")
        with pytest.raises(errors.LayoutError, match="null"):
            dlx.stack(pa.array([[1, 2], None], kind(pa.int64())), "numpy")
        with pytest.raises(ValueError, match="at least one"):
            dlx.stack(column[:0], "numpy")
        empty = pa.array([[], []], kind(pa.float64()))
        assert dlx.stack(empty, "numpy").shape == (2, 0)
    many = pa.chunked_array([[[1.0, 2.0]], [[3.0, 4.0]]])
    assert dlx.stack(many, "numpy").tolist() == [[1, 2], [3, 4]]


def test_objects_that_are_arrays(np):
    """An object array of equal arrays is a list of them."""
    objects = np.empty(3, object)
    objects[:] = [np.arange(4.0) + i for i in range(3)]
    assert (dlx.stack(objects, "numpy") == np.stack(list(objects))).all()


def test_device_memory_needs_a_driver():
    """Whatever the options; see tests/cuda/test_cuda_stack.py."""
    for options in ({}, {"axis": 1}, {"pad": 0}):
        rows = [dlx.from_pointer(4096, (2,), "float32", device="cuda:0")] * 2
        with pytest.raises(errors.DeviceError, match="there is no CUDA driver here"):
            dlx.stack(rows, "dlx", **options)


def test_nothing_leaks(np):
    """Neither results nor errors keep memory."""
    gc.collect()
    live = native.live()
    for options in ({"axis": 1}, {"pad": 0}, {"dtype": "int8"}):
        dlx.stack([np.ones(3), np.ones(3)], "numpy", **options)
        with pytest.raises(errors.DlxError):
            dlx.stack([np.ones(3), "text"], "numpy", **options)
    gc.collect()
    assert native.live() == live


def test_elements_below_a_byte(python):
    """Packed and padded rows, along each axis and into outputs of both kinds, in a process of its own."""
    code = """
import itertools, ml_dtypes, numpy as np, dlx
from dlx.errors import DlxError
def as_numpy(x):
    return np.asarray(dlx.convert(x, to="numpy")).astype("f4")
for name, shape in itertools.product(("int4", "uint2", "float4_e2m1fn"), ((3, 4), (300, 501), (5, 3))):
    values = (np.arange(shape[0] * shape[1]).reshape(shape) % 2).astype(getattr(ml_dtypes, name))
    wanted = values.astype("f4")
    padded = dlx.convert(values, to="dlx")
    packed = dlx.empty(shape, name)
    dlx.convert(values, out=packed)  # padded to packed
    assert (as_numpy(packed) == wanted).all()
    again = np.zeros_like(values)
    assert (dlx.convert(packed, out=again).astype("f4") == wanted).all()
    for rows in ([padded] * 3, [packed] * 3, [values, packed, padded]):
        for axis in range(-3, 3):
            for to in ("dlx", "numpy"):
                if axis == 0 and (rows[0] is values or (rows[0] is packed and shape == (5, 3))):
                    continue  # refused: mixed rows, and rows that end inside a byte
                assert (as_numpy(dlx.stack(rows, to=to, axis=axis)) == np.stack([wanted] * 3, axis)).all(), (name, axis)
        whole = np.zeros((3, *shape), values.dtype)
        assert (dlx.stack(rows, out=whole).astype("f4") == wanted).all()
        try:
            dlx.stack(rows, out=dlx.empty((3, *shape), name))
        except DlxError as error:
            assert "packed" in error.reason, error
    try:
        dlx.stack([padded, dlx.convert(values[:2], to="dlx")], to="dlx", pad=0)
    except DlxError as error:
        assert "pad=0" in error.reason, error
"""
    assert python(code) == ""


def test_lists_with_nulls_are_refused_for_the_target_of_the_call(torch):
    """The error of a list column names the target or `out`, and the place inside the argument `arrays`."""
    np, pa = pytest.importorskip("numpy"), pytest.importorskip("pyarrow")
    columns = {"its row 1 is null": [[1, 2], None], "1 null": [[1, None], [2, 3]], "nested": [[[1]], [[2], [3, 4]]]}
    for reason, rows in columns.items():
        for column, options in itertools.product(
            (pa.array(rows), pa.chunked_array([rows[:1], rows[1:]])), ({"to": "torch"}, {"out": np.zeros((2, 2))})
        ):
            with pytest.raises(errors.LayoutError, match=reason) as refused:
                dlx.stack(column, **options)
            target = options.get("to", "numpy.ndarray")
            assert f"to '{target}'" in str(refused.value) and (refused.value.root or "arrays") == "arrays"
            assert ("at arrays.values:" in str(refused.value)) == (reason == "1 null")
    polars = pytest.importorskip("polars")
    with pytest.raises(errors.DlxError, match=r"at arrays\['a'\]: it consists of several arrays \(ragged\)") as refused:
        dlx.stack({"a": polars.Series([[1], [2, 3]])}, "torch")
    assert refused.value.fix == "Pass one of dlx.parts(x)."


def test_the_dtype_that_a_refusal_names_is_one_of_stack():
    """The fix is an option of stack, and works: for frames, lists, numbers and any axis."""
    np, jax = pytest.importorskip("numpy"), pytest.importorskip("jax")
    pa, ml_dtypes = pytest.importorskip("pyarrow"), pytest.importorskip("ml_dtypes")
    if jax.config.jax_enable_x64:
        pytest.skip("needs jax without x64")
    sources = {
        "rows": [np.ones(2), np.ones(2)],
        "integers": [np.arange(2), np.arange(2)],
        "unsigned": [np.arange(2, dtype="u8")] * 2,
        "complex": [np.ones(2, "c16")] * 2,
        "frame": pa.table({"a": [1.5], "b": [2.5]}),
        "lists": pa.array([[1, 2], [3, 4]]),
        "numbers": [1, 2],
        "nested": [[1.5, 2], [3.5, 4]],
        "one width": [np.ones(2, ml_dtypes.bfloat16)] * 2,
    }
    for (name, x), axis in itertools.product(sources.items(), (0, -1)):
        to = "pyarrow" if name == "one width" else "jax"
        with pytest.raises(errors.DTypeError) as refused:
            dlx.stack(x, to, axis=axis)
        option = dict(refused.value.option)
        assert refused.value.fix.startswith(f"Pass dtype={option['dtype']!r}.")
        found = dlx.stack(x, to, axis=axis, **option)
        expected = dlx.stack(x, "numpy", axis=axis)
        assert np.array_equal(dlx.convert(found, "numpy"), np.asarray(expected, dlx.convert(found, "numpy").dtype))


def stacked_or_error(arrays, options):
    """Return numpy's array, or the exception."""
    try:
        return dlx.stack(arrays, "numpy", **options)
    except Exception as error:
        return error


@pytest.mark.parametrize("kind", ["list_", "large_list", "nested"])
def test_a_list_column_is_stacked_as_its_rows(np, kind):
    """With each option, also where it is refused; 200 columns of lists of several lengths."""
    library = pytest.importorskip("torch" if kind == "nested" else "pyarrow")
    random = np.random.default_rng(46)
    for _ in range(200):
        lengths = random.integers(0, 4, random.integers(1, 7))
        values = random.integers(-9, 9, (lengths.sum(), 2)[: random.integers(1, 3)])
        values = values.astype(random.choice(["int16", "int64", "float32", "float64"]))
        offsets = np.concatenate([[0], lengths.cumsum()])
        rows = [values[a:b] for a, b in itertools.pairwise(offsets)]
        if kind == "nested":
            column = library.nested.nested_tensor_from_jagged(library.from_numpy(values), library.from_numpy(offsets))
        else:
            values = values[..., 0] if values.ndim == 2 else values
            rows = [values[a:b] for a, b in itertools.pairwise(offsets)]
            lists = getattr(library, kind)(library.from_numpy_dtype(values.dtype))
            column = library.array([[1], *map(list, rows), [2]], lists)[1:-1]
        options = {"pad": random.choice([None, 0, -1, 1.5, 300]), "axis": int(random.integers(-2, 2))}
        options["dtype"] = random.choice([None, "int8", "float16", "complex64" if kind == "nested" else "int64", "no"])
        options = {name: value for name, value in options.items() if value is not None}
        found, expected = [stacked_or_error(x, options) for x in (column, rows)]
        assert type(found) is type(expected), (rows, options, found, expected)
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype and np.array_equal(found, expected), (rows, options)
        elif isinstance(expected, errors.LayoutError):
            assert (found.reason, found.path, found.option) == (expected.reason, expected.path, expected.option)


def test_empty_lists_are_empty_rows(np):
    """An empty list has the dtype of the other rows; lists that are all empty are float64, as in numpy."""
    for rows in ([[1, 2], []], [[], [1, 2], []], [[], [1.5]], [[True], []], [[], [1j]], [(), np.arange(3, dtype="i2")]):
        found = as_numpy(dlx.stack(rows, "numpy", pad=0))
        rows = [np.asarray(row) for row in rows]
        full = next(row for row in rows if len(row))
        assert found.dtype == full.dtype and found.shape == (len(rows), max(map(len, rows)))
        for row, padded in zip(rows, found, strict=True):
            assert (padded[: len(row)] == row).all() and not padded[len(row) :].any()
    for rows in ([[], []], [[]], [[[], []], [[], []]]):
        found = as_numpy(dlx.stack(rows, "numpy"))
        assert found.shape == np.array(rows).shape and found.dtype == np.float64
    with pytest.raises(errors.LayoutError, match=r"at arrays\[1\]: its shape is \(0,\).*Pass pad=0\."):
        dlx.stack([[1], []], "numpy")
    with pytest.raises(errors.AdapterNotFoundError, match=r"arrays\[1\]"):
        dlx.stack([[], "x"], "numpy")


def test_a_column_of_numbers_keeps_its_dtype(np):
    """Its elements are Python numbers, or scalars that are no arrays."""
    for letter, name in (("f", "float32"), ("b", "int8"), ("Q", "uint64")):
        column = array.array(letter, [1, 2, 3])
        found = dlx.stack(column, "numpy")
        assert found.dtype == name and found.tolist() == [1, 2, 3] and not np.shares_memory(found, np.asarray(column))
        assert dlx.stack(column, "numpy", dtype="float64").dtype == "float64"
    assert dlx.stack(b"ab", "numpy").dtype == np.uint8 and dlx.stack(memoryview(b"ab"), "numpy").tolist() == [97, 98]
    tensor = dlx.convert(np.arange(6, dtype="i2").reshape(2, 3), "dlx")
    assert (dlx.stack(tensor, "numpy", axis=1) == np.arange(6).reshape(2, 3).T).all()
    pa, pd, pl = (
        importlib.import_module(x) if importlib.util.find_spec(x) else None for x in ("pyarrow", "pandas", "polars")
    )
    columns = [
        pa and pa.array([1, 2], pa.int8()),
        pd and pd.Series([1, 2], dtype="int8"),
        pl and pl.Series([1, 2], dtype=pl.Int8),
    ]
    for column in filter(lambda each: each is not None, columns):
        assert dlx.stack(column, "numpy").dtype == np.int8
    if pa:
        with pytest.raises(errors.DlxError, match=r"1 null.*Call \.fill_null"):
            dlx.stack(pa.array([1, None]), "numpy")


def test_advice_of_options_works(np):
    """The advice of a refusal, applied literally, helps."""
    rows = [np.ones(2), np.ones(2)]
    with pytest.raises(errors.DTypeError, match="Pass dtype='float16'"):
        dlx.stack(rows, out=np.empty((2, 2), "f2"), dtype="float32")
    out = np.empty((2, 2), "f2")
    assert (dlx.stack(rows, out=out, dtype="float16") == 1).all()
    with pytest.raises(errors.DTypeError, match=r"Pass dtype=.'float64': 'float16'"):
        dlx.convert(np.ones((2, 2)), out=out, dtype="float32")
    assert (dlx.convert(np.full((2, 2), 3.0), out=out, dtype={"float64": "float16"}) == 3).all()


def test_nested_lists_and_large_numbers(np):
    """Inner lists are padded, too; integers beyond int64 are uint64, as in numpy."""
    found = dlx.stack([[[1, 2], [3]], [[4]]], "numpy", pad=7)
    assert found.tolist() == [[[1, 2], [3, 7]], [[4, 7], [7, 7]]]
    found = dlx.stack([[[1, 2], [3]], [[4]]], "numpy", pad=0.5, dtype="float32")
    assert found.tolist() == [[[1, 2], [3, 0.5]], [[4, 0.5], [0.5, 0.5]]] and found.dtype == np.float32
    assert dlx.stack([2**64 - 1, 1], "numpy").dtype == np.uint64
    found = dlx.stack([np.array([1], "u8"), np.array([1, 2], "u8")], "numpy", pad=2**64 - 1)
    assert found[0, 1] == 2**64 - 1
    for numbers in ([2**64], [-1, 2**63]):
        with pytest.raises(errors.DTypeError, match="fit neither int64 nor uint64"):
            dlx.stack(numbers, "numpy")
    with pytest.raises(errors.LayoutError, match=r"to 'numpy' at arrays\[0\]\[1\].*Pass pad=0"):
        dlx.stack([[[1, 2], [3]], [[4]]], "numpy")
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        dlx.stack([np.ones(2)], "numpy", axis="0")


def test_lists_are_stacked_as_their_arrays(np):
    """Lists of Python numbers, and of scalars of numpy, nested or of several lengths; 300 generated cases."""
    assert dlx.stack([True, 2, 2.5], "numpy").tolist() == [1, 2, 2.5]
    random_ = random.Random(46)
    draws = {
        "bool": lambda: random_.random() < 0.5,
        "int": lambda: random_.randrange(-9, 9),
        "float": random_.random,
        "mixed": lambda: random_.choice([1, 2.5]),
        "complex": lambda: complex(1, random_.random()),
        "large": lambda: 2**63 + random_.randrange(9),
        **{name: lambda name=name: np.dtype(name).type(random_.randrange(2)) for name in ("f4", "f8", "i2", "u8", "?")},
    }
    for _ in range(300):
        name = random_.choice([*draws])
        draw, least = draws[name], 2 if name == "mixed" else 1  # a list of one dimension may be mixed
        shape = [random_.randrange(1, 4) for _ in range(random_.randrange(least, 4 if least == 1 else 3))]

        def make(shape):
            return [make(shape[1:]) for _ in range(shape[0])] if shape else draw()  # noqa: B023

        lists, options = make(shape), {"axis": random_.randrange(len(shape))}
        if len(shape) > 1 and random_.random() < 0.5:
            lists[0] = lists[0] * 2
            options["pad"] = 1
        if random_.random() < 0.5:
            options["dtype"] = random_.choice(["float32", "complex64"])
        if random_.random() < 0.2:
            lists = [tuple(each) if type(each) is list else each for each in lists]
        found = stacked_or_error(lists, options)
        arrays = [np.asarray(each) for each in lists]
        expected = stacked_or_error(arrays, options)
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype and np.array_equal(found, expected), (lists, options)
        else:
            assert type(found) is type(expected), (lists, options, found, expected)


def test_a_list_that_contains_itself(np):
    """It is refused, as lists of more dimensions than DLPack has."""
    rows = []
    rows.append(rows)
    with pytest.raises(errors.LayoutError, match="cannot stack list to 'numpy': its lists are nested deeper than"):
        dlx.stack(rows, "numpy")
    rows.clear()


@pytest.mark.parametrize("dtype", ["float8_e5m2", "int4"])
def test_a_dtype_that_only_frameworks_cast_to(np, dtype):
    """A list has no framework of its own: the target casts it, if it can; numpy's arrays have."""
    pytest.importorskip("ml_dtypes")
    rows = [[1, 2], [3, 4]]
    match = r"casts int64 to .*\. Make an array of it first, such as numpy.asarray"
    with pytest.raises(errors.DTypeError, match=match):
        dlx.stack(rows, "dlx", dtype=dtype)
    for arrays in (rows, [np.asarray(row) for row in rows]):
        assert dlx.stack(arrays, "numpy", dtype=dtype).astype("f4").tolist() == rows


@pytest.mark.parametrize("make", ["table", "list"])
def test_a_cast_that_nothing_makes_names_the_array(make):
    """The error names the column and the caller's target, not a tensor of dlx."""
    pa = pytest.importorskip("pyarrow")
    columns = {"a": pa.array([1.0]), "b": pa.array([2.0])}
    source, where = (pa.table(columns), r"\['a'\]") if make == "table" else ([*columns.values()], r"\[0\]")
    with pytest.raises(errors.DTypeError, match=rf"^cannot stack 2 arrays to 'numpy' at arrays{where}: neither its"):
        dlx.stack(source, "numpy", dtype="int4")
