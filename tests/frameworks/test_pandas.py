"""pandas as a source: numpy columns are shared, others use Arrow, and a frame is a dict of its columns."""

from __future__ import annotations

import gc
import itertools
import sys

import pytest
from support.arrays.agreement import facts, slow
from support.processes.calls import called

import dlx
from dlx import errors

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")


class Ours(pd.Series):
    """A subclass from another package."""


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex128"])
def test_numbers_and_bools_are_shared_read_only(dtype):
    """Numbers are shared on both paths, and outlive the Series."""
    series = pd.Series(np.arange(4).astype(dtype))
    own = series.to_numpy()
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        result = convert(series, to="numpy", copy=False)
        assert result.ctypes.data == own.ctypes.data and result.dtype == own.dtype and not result.flags.writeable
    expected = own.tolist()
    del series, own
    gc.collect()
    assert result.tolist() == expected


def test_nan_is_a_number():
    """Numpy's floats have no nulls: NaN is preserved, like in pandas' ``.to_numpy()``."""
    series = pd.Series([1.0, np.nan, 3.0])
    result = dlx.convert(series, to="numpy", copy=False)
    assert np.array_equal(result, series.to_numpy(), equal_nan=True)


def test_a_part_of_a_matrix_has_gaps_and_is_shared():
    """The columns of a frame over one array are adjacent; Arrow would copy them."""
    matrix = np.arange(6.0).reshape(3, 2)
    frame = pd.DataFrame(matrix, columns=["a", "b"], copy=False)
    result = dlx.convert(frame, to="numpy", copy=False)
    assert result["b"].tolist() == [1.0, 3.0, 5.0]
    assert result["b"].ctypes.data == frame["b"].to_numpy().ctypes.data
    assert dlx.convert(pd.Series(np.arange(6.0))[::-2], to="numpy", copy=False).tolist() == [5.0, 3.0, 1.0]


def test_torch_and_copies_get_memory_of_their_own():
    """Writable results are copies."""
    pytest.importorskip("torch")
    series = pd.Series([1.5, 2.5])
    dlx.convert(series, to="torch")[0] = 9
    dlx.convert(series, to="numpy", copy=True)[0] = 9
    assert series.tolist() == [1.5, 2.5]
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(series, to="torch", copy=False)
    with pytest.raises(ValueError, match="read-only"):
        dlx.convert(series, to="numpy")[0] = 9


def test_a_frame_is_a_dict_of_its_columns():
    """Columns keep their names, including numbers; the index is not a column."""
    frame = pd.DataFrame({"x": [1.5, 2.5], 7: [1, 2], "b": [True, False]}, index=["p", "q"])
    result = dlx.convert({"f": frame}, to="numpy")["f"]
    assert {name: column.tolist() for name, column in result.items()} == {
        "x": [1.5, 2.5],
        7: [1, 2],
        "b": [True, False],
    }
    plan = dlx.plan(frame, to="numpy", copy=False)
    assert plan.ok and [leaf.path for leaf in plan.leaves] == ["obj['x']", "obj[7]", "obj['b']"]
    view = dlx.convert(frame, to="numpy", lazy=True)
    assert list(view) == ["x", 7, "b"] and view[7].tolist() == [1, 2]
    assert dlx.convert({"f": pd.DataFrame()}, to="numpy") == {"f": {}}


@pytest.mark.parametrize("to", ["numpy", "torch", "dlx"])
def test_frames_take_the_fast_path(to):
    """Both paths return the same columns, or the same error."""
    pytest.importorskip(to)
    numbers = pd.DataFrame({"x": [1.5, 2.5], 7: np.array([1, 2], "i2"), "b": [True, False]})
    frames = {"numbers": numbers, "rows": numbers.iloc[1:], "matrix": pd.DataFrame(np.ones((2, 3)))}
    frames |= {"text": numbers.assign(t=["a", "b"]), "empty": pd.DataFrame(), "twice": numbers[["x", "x"]]}

    def outcome(convert, frame, options):
        try:
            found = convert(frame, to=to, **options)
        except errors.DlxError as error:
            return type(error), str(error)
        sources = dict(frame.items())
        return [(name, *facts(column, sources[name])) for name, column in found.items()]

    for name, frame in frames.items():
        for options in ({}, {"copy": False}, {"copy": True}, {"readonly": "error"}):
            first, warm, other = (outcome(convert, frame, options) for convert in (dlx.convert, dlx.convert, slow))
            assert first == other and warm == other, (name, options)
    assert "convert_tree" not in called(dlx.convert, numbers, to)


def test_two_columns_of_one_name_are_refused():
    """Columns of the same name are refused: one would be lost."""
    reason = "cannot convert pandas.DataFrame to 'numpy': it has several columns named 'a'"
    with pytest.raises(errors.LayoutError, match=reason):
        dlx.convert(pd.DataFrame([[1, 2]], columns=["a", "a"]), to="numpy")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: pd.Series([1, None], dtype="Int64"), errors.LayoutError),
        (lambda: pd.Series(["a", "b"]), errors.DTypeError),
        (lambda: pd.Series([1, 2], dtype=object), errors.DTypeError),
        (lambda: pd.Series(pd.to_datetime(["2026-01-01"])), errors.DTypeError),
        (lambda: pd.Series(["a"], dtype="category"), errors.DTypeError),
    ],
    ids=["nulls", "text", "objects", "dates", "categories"],
)
def test_what_is_no_array_of_numbers_is_refused(make, error):
    """Other columns are refused, in a frame with their path."""
    pytest.importorskip("pyarrow")
    with pytest.raises(error) as caught:
        dlx.convert(make(), to="numpy")
    assert caught.value.fix
    with pytest.raises(error) as caught:
        dlx.convert(pd.DataFrame({"c": make()}), to="numpy")
    assert caught.value.where == "obj['c']"


def decimals():
    """Return a pyarrow type."""
    return pytest.importorskip("pyarrow").decimal128(22, 2)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: pd.Series(np.ones(2, "g")), ".astype('float64')"),
        (lambda: pd.Series(np.ones(2, "G")), ".astype('complex128')"),
        (lambda: pd.Series(np.arange(2.0).astype(">f8")), ".astype(x.dtype.newbyteorder('='))"),
        (lambda: pd.Series(pd.arrays.SparseArray([0, 1.5])), ".sparse.to_dense()"),
        (lambda: pd.Series(pd.period_range("2026-01", periods=2, freq="M")), ".astype('int64')"),
        (lambda: pd.Series([1, 2]).astype(pd.ArrowDtype(decimals())), ".astype('float64')"),
        (lambda: Ours(pd.to_datetime(["2026-01-01"])), ".astype('int64')"),
    ],
    ids=["longdouble", "clongdouble", "big-endian", "sparse", "period", "decimal", "subclass"],
)
def test_the_remedy_of_a_refusal_is_pandas_own_and_works(make, call):
    """The error is about the Series and the requested target, on both paths, and its fix works."""
    pytest.importorskip("pyarrow")
    series = make()
    if np.dtype("g").itemsize == 8 and getattr(series.dtype, "char", "") in tuple("gG"):
        pytest.skip("long double is double here")
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        with pytest.raises(errors.DTypeError) as caught:
            convert(series, to="numpy")
        assert f"{type(series).__name__} (" in caught.value.source and caught.value.target == "numpy"
        assert caught.value.fix.startswith(f"Call {call} first")
    numbers = eval(f"x{call}", {"x": series})
    assert dlx.convert(numbers, to="numpy", copy=False).tolist() == numbers.tolist()


def test_both_ends_of_an_interval_are_named():
    """The fix of an interval names both of its arrays."""
    pytest.importorskip("pyarrow")
    series = pd.Series(pd.interval_range(0, 2))
    with pytest.raises(errors.DTypeError) as caught:
        dlx.convert(series, to="numpy")
    assert ".array.left.to_numpy()" in caught.value.fix
    assert dlx.convert(series.array.left.to_numpy(), to="numpy").tolist() == [0, 1]


def test_nullable_numbers_without_nulls_come_by_arrow():
    """They are shared if Arrow shares them."""
    pytest.importorskip("pyarrow")
    assert dlx.convert(pd.Series([1, 2], dtype="Int64"), to="numpy").tolist() == [1, 2]
    assert dlx.convert(pd.Series([True, False], dtype="boolean"), to="numpy").tolist() == [True, False]
    arrow = pd.Series([1.5, 2.5], dtype="double[pyarrow]")
    assert dlx.convert(arrow, to="numpy", copy=False).tolist() == [1.5, 2.5]


def test_without_pyarrow_numbers_still_cross(python):
    """Numbers convert without Arrow, and the error for other columns names pyarrow."""
    said = python(
        """
        import sys
        sys.modules["pyarrow"] = None
        import pandas as pd, dlx
        print(dlx.convert(pd.DataFrame({"x": [1.5, 2.5]}), to="numpy")["x"].tolist())
        try:
            dlx.convert(pd.Series([1, None], dtype="Int64"), to="numpy")
        except dlx.errors.ConversionError as error:
            print("pyarrow" in str(error))
        """
    )
    assert said.split("\n")[:2] == ["[1.5, 2.5]", "True"]


def test_without_the_attribute_that_is_read_arrow_serves(monkeypatch):
    """Without pandas' private attribute everything works through Arrow."""
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"x": [1.5, 2.5]})
    dlx.convert(frame, to="numpy")
    monkeypatch.setattr(sys.modules["dlx_adapters.dlx_pandas"], "getattr", lambda *_: None, raising=False)
    result = dlx.convert.__wrapped__(frame["x"], to="numpy", copy=False)
    assert result.tolist() == [1.5, 2.5] and not result.flags.writeable


def test_pandas_is_no_target():
    """By name, module, type or example, the error names the call that makes a Series of the result."""
    pa = pytest.importorskip("pyarrow")
    lists = pd.Series(pa.array([[1.0]]), dtype=pd.ArrowDtype(pa.list_(pa.float64())))
    targets = [{"to": each} for each in ("pandas", pd, pd.Series, pd.DataFrame)]
    for options in (*targets, {"like": pd.Series([1.0])}, {"like": lists}):
        with pytest.raises(errors.AdapterNotFoundError, match="'pandas' is a source, but not a target") as caught:
            dlx.convert(np.ones(2), **options)
        call = caught.value.fix.removeprefix("Call ").removesuffix(".")
        assert eval(call, {"pandas": pd, "dlx": dlx, "x": np.ones(2)}).tolist() == [1.0, 1.0]
    with pytest.raises(errors.AdapterNotFoundError) as caught:
        dlx.convert(np.ones(2), to="nothing")
    assert "pandas" not in caught.value.fix


def test_stacked_frames_read_the_blocks():
    """Frames of one dtype or several, views, copies, reordered and inserted columns stack as their columns do."""
    rng = np.random.default_rng(0)
    square = pd.DataFrame(rng.integers(0, 9, (5, 4)), columns=list("abcd"))
    mixed = square.assign(b=square["b"] * 0.5, d=square["d"] > 4, e=square["a"].astype("int8"))
    frames = [
        *(square, mixed, square[["d", "a"]], mixed[["e", "b", "a"]], square[::-1], square[::2], mixed.iloc[1:3, 1:]),
        *(square.T, mixed.drop(columns="c"), square.iloc[:0], square.iloc[:, :1], square.copy()),
        square.set_axis(pd.MultiIndex.from_product([[0, 1], ["x", "y"]]), axis=1),
        mixed.assign(n=pd.array([1, 2, 3, 4, 5], dtype="Int64")),  # not a numpy array: read one by one
        square.astype({"a": "float32"}),
    ]
    inserted = square.copy()
    inserted.insert(1, "z", rng.random(5))
    for frame in [*frames, inserted]:
        for dtype, options in itertools.product(("float32", "int16"), ({"axis": 1}, {})):
            expected = np.stack([frame.iloc[:, i].to_numpy() for i in range(frame.shape[1])], 1).astype(dtype)
            found = dlx.stack(frame, "numpy", dtype=dtype, **options)
            assert np.array_equal(found if options else found.T, expected) and found.dtype == expected.dtype
    before = square.to_numpy().copy()
    dlx.stack(square, "numpy", axis=1)[:] = 0
    assert np.array_equal(square.to_numpy(), before)
    with pytest.raises(errors.LayoutError, match="several columns named 'a'"):
        dlx.stack(square[["a", "a"]], "numpy")
    with pytest.raises(errors.DTypeError, match=r"arrays\['t'\]"):
        dlx.stack(square.assign(t="x"), "numpy", dtype="float32")
