"""Arrow's PyCapsule interface with real libraries: round trips by value and address, in both directions."""

from __future__ import annotations

import gc
from decimal import Decimal

import pytest

import dlx
from dlx import errors

pa = pytest.importorskip("pyarrow")
if not hasattr(pa.RecordBatch, "__arrow_c_stream__"):
    pytest.skip("this pyarrow lacks parts of the interface", allow_module_level=True)

FLOATS, BOOLS = [1.5, 2.5, 3.5], [True, False, True]


def arrow_table():
    """Return a pyarrow table with two columns."""
    return pa.table({"x": pa.array(FLOATS), "b": pa.array(BOOLS)})


def of_pandas():
    """Return a pandas data frame."""
    pandas = pytest.importorskip("pandas")
    if not hasattr(pandas.Series, "__arrow_c_stream__"):
        pytest.skip("this pandas has no Arrow columns")
    return pandas.DataFrame({"x": FLOATS, "b": BOOLS})


def of_polars():
    """Return a polars data frame."""
    return pytest.importorskip("polars").DataFrame({"x": FLOATS, "b": BOOLS})


def of_narwhals():
    """Return a narwhals data frame."""
    return pytest.importorskip("narwhals").from_native(of_polars())


def of_duckdb():
    """Return a duckdb result."""
    duckdb = pytest.importorskip("duckdb")
    return duckdb.sql("select * from (values (1.5::double, true), (2.5, false), (3.5, true)) as t(x, b)")


FRAMES = {
    "pyarrow.Table": arrow_table,
    "pyarrow.RecordBatch": lambda: arrow_table().to_batches()[0],
    "pandas": of_pandas,
    "polars": of_polars,
    "narwhals": of_narwhals,
    "duckdb": of_duckdb,
    "nanoarrow": lambda: pytest.importorskip("nanoarrow").Array(arrow_table().to_batches()[0]),
}
SERIES = {
    "pyarrow.Array": lambda: arrow_table()["x"].chunk(0),
    "pyarrow.ChunkedArray": lambda: arrow_table()["x"],
    "pandas": lambda: of_pandas()["x"],
    "polars": lambda: of_polars()["x"],
    "narwhals": lambda: of_narwhals()["x"],
    "nanoarrow": lambda: pytest.importorskip("nanoarrow").Array(arrow_table()["x"].chunk(0)),
    "nanoarrow's C array": lambda: pytest.importorskip("nanoarrow").c_array(arrow_table()["x"].chunk(0)),
}


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("target", ["numpy", "torch", "dlx"])
def test_data_frames_are_dicts_of_columns(kind, target):
    """Data frames become dicts of their columns, also inside other containers; bools are unpacked."""
    pytest.importorskip(target)
    frame = FRAMES[kind]()
    result = dlx.convert([frame], to=target)[0]
    assert type(result) is dict and list(result) == ["x", "b"]
    for name, expected in (("x", FLOATS), ("b", BOOLS)):
        assert dlx.describe(result[name]).framework == target
        assert dlx.convert(result[name], to="numpy").tolist() == expected if target != "dlx" else True
    plan = dlx.plan(FRAMES[kind](), to="numpy")
    assert plan.outcome == "tree" and [leaf.path for leaf in plan.leaves] == ["obj['x']", "obj['b']"]


@pytest.mark.parametrize("kind", SERIES)
def test_columns_are_shared(np, kind):
    """A numeric column is shared with the library, read-only."""
    column = SERIES[kind]()
    result = dlx.convert(column, to="numpy", copy=False)
    assert result.tolist() == FLOATS and not result.flags.writeable
    own = pa.chunked_array(column).chunk(0) if hasattr(column, "__arrow_c_stream__") else pa.array(column)
    assert result.ctypes.data == own.buffers()[1].address + 8 * own.offset
    again = dlx.convert(column, to="numpy", copy=True)
    assert again.flags.writeable and not dlx.shares_memory(again, result)
    del column, own
    gc.collect()
    assert result.tolist() == FLOATS
    assert dlx.convert({"a": SERIES[kind]()}, to="numpy")["a"].tolist() == FLOATS


def chunked_polars():
    """Return a polars series in two chunks."""
    polars = pytest.importorskip("polars")
    return polars.concat([polars.Series([1.5, 2.5]), polars.Series([3.5])], rechunk=False)


CHUNKED = {
    "pyarrow": lambda: pa.chunked_array([[1.5, 2.5], [3.5]]),
    "polars": chunked_polars,
    "narwhals": lambda: pytest.importorskip("narwhals").from_native(chunked_polars(), series_only=True),
    "pandas": lambda: pytest.importorskip("pandas").Series(
        pytest.importorskip("pandas").arrays.ArrowExtensionArray(pa.chunked_array([[1.5, 2.5], [3.5]]))
    ),
}


@pytest.mark.parametrize("kind", CHUNKED)
def test_chunks_are_joined_and_never_in_silence(np, kind):
    """Joined chunks are a reported copy, even if the library's ``__arrow_c_array__`` would join them."""
    column = CHUNKED[kind]()
    for _ in range(2):  # the second time through the fast path
        with pytest.raises(errors.CopyRequiredError, match="2 chunks"):
            dlx.convert(column, to="numpy", copy=False)
    assert dlx.convert(column, to="numpy").tolist() == FLOATS
    assert dlx.plan(column, to="numpy").outcome == "copied"


def test_results_of_duckdb(np):
    """Each conversion runs the query; one chunk is shared, even if empty, and several are copied."""
    duckdb = pytest.importorskip("duckdb")
    result = dlx.convert(duckdb.sql("select 1.5::double as x, 7::int as i"), to="numpy", copy=False)
    assert result["x"].tolist() == [1.5] and result["i"].dtype == "int32"
    assert not any(each.flags.writeable for each in result.values())
    own = dlx.convert(duckdb.sql("select 1.5::double as x"), to="numpy", copy=True)["x"]
    assert own.flags.writeable
    empty = dlx.convert(duckdb.sql("select 1.5::double as x where false"), to="numpy", copy=False)["x"]
    assert empty.shape == (0,) and empty.dtype == "float64"
    long = duckdb.sql("select range::double as x from range(2000000)")
    with pytest.raises(errors.CopyRequiredError, match=r"chunks.*obj\['x'\]|obj\['x'\].*chunks"):
        dlx.convert(long, to="numpy", copy=False)
    assert np.array_equal(dlx.convert(long, to="numpy")["x"], np.arange(2000000.0))
    with pytest.raises(errors.LayoutError, match="1 null"):
        dlx.convert(duckdb.sql("select null::double as x"), to="numpy")
    rows = duckdb.sql("select range::double as x from range(3)")
    assert dlx.convert([rows], to="numpy")[0]["x"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_slices_and_jax(kind):
    """A slice of a column works on the fast path and off it; jax accepts it."""
    pytest.importorskip("jax")
    column = SERIES[kind]()[1:]
    assert dlx.convert(column, to="numpy").tolist() == FLOATS[1:]
    floats = column.astype("float32") if kind == "pandas" else column.cast(pytest.importorskip("polars").Float32)
    assert dlx.convert(floats, to="jax").tolist() == FLOATS[1:]


def test_what_the_fixes_say_works(np):
    """The calls in the fixes for nulls, dates and categories lead to arrays."""
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    of_pandas()
    for source, fixed in (
        (polars.Series([1, None]), lambda x: x.fill_null(0)),
        (polars.Series([1, None]), lambda x: x.drop_nulls()),
        (pandas.Series([1, None], dtype="Int64"), lambda x: x.fillna(0)),
        (pandas.Series([1, None], dtype="Int64"), lambda x: x.dropna()),
        (polars.Series(["a"]).cast(polars.Categorical), lambda x: x.to_physical()),
        (polars.Series(["2026-01-01"]).str.to_date(), lambda x: x.to_physical()),
        (pandas.Series(pandas.to_datetime(["2026-01-01"])), lambda x: x.astype("int64")),
        (pandas.Series(["a"], dtype="category"), lambda x: x.cat.codes),
        (arrow_table().to_reader(), lambda x: x.read_all()["x"]),
    ):
        with pytest.raises((errors.LayoutError, errors.DTypeError)) as caught:
            dlx.convert(source, to="numpy")
        result = fixed(source)
        assert dlx.convert(result, to="numpy").ndim == 1
        assert caught.value.fix


def test_polars_arrays_are_dimensions(np):
    """Polars' fixed-size lists become dimensions, and back."""
    polars = pytest.importorskip("polars")
    series = polars.Series([[1, 2], [3, 4]], dtype=polars.Array(polars.Int64, 2))
    assert dlx.convert(series, to="numpy", copy=False).tolist() == [[1, 2], [3, 4]]
    cube = np.arange(12.0).reshape(2, 3, 2)
    back = polars.Series(dlx.convert(cube, to="arrow"))
    assert back.shape == (2,) and back.to_list() == cube.tolist()


def test_the_target_is_taken_by_the_libraries(np):
    """Libraries accept the result of to="arrow", and a `dlx.Tensor`, without a copy."""
    source = np.arange(6, dtype="int32")[1:]
    target = dlx.convert(source, to="arrow", copy=False)
    taken = pa.array(target)
    assert taken.to_pylist() == source.tolist() and taken.buffers()[1].address == source.ctypes.data
    assert pa.array(dlx.convert(source, to="dlx")).equals(taken)
    nested = pa.array(dlx.convert(np.arange(6).reshape(3, 2), to="arrow"))
    assert nested.type == pa.list_(pa.int64(), 2) and nested.to_pylist() == [[0, 1], [2, 3], [4, 5]]
    nested.validate(full=True)
    for package in ("nanoarrow", "polars"):
        library = pytest.importorskip(package)
        made = (library.Array if package == "nanoarrow" else library.Series)(target)
        assert dlx.convert(made, to="numpy").tolist() == source.tolist()


def test_memory_goes_with_the_last_user(np):
    """The memory is freed with the last user; a column keeps its whole batch."""
    before = pa.total_allocated_bytes()
    table = pa.table({"x": pa.array(range(10_000), pa.int64()), "y": pa.array(range(10_000), pa.int64())})
    result = dlx.convert(table, to="numpy")
    del table, result["y"]
    gc.collect()
    assert pa.total_allocated_bytes() >= before + 160_000 and result["x"][9_999] == 9_999
    result.clear()
    assert pa.total_allocated_bytes() <= before


def test_fixes_for_polars_are_calls_that_polars_has():
    """Text and decimals are refused, and the call in the fix works."""
    pl = pytest.importorskip("polars")
    cases = {
        ".cast(pl.Categorical).to_physical()": (pl.Series(["a", "b"]), [0, 1]),
        ".cast(pl.Float64)": (pl.Series([Decimal("1.5")]), [1.5]),
    }
    for call, (series, values) in cases.items():
        with pytest.raises(dlx.errors.DTypeError) as caught:
            dlx.convert(series, to="numpy")
        assert call in caught.value.fix
        result = dlx.convert(eval(f"x{call}", {"x": series, "pl": pl}), to="numpy")
        assert result.tolist() == values
