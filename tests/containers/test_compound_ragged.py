"""Ragged arrays are converted as one array: Arrow lists, jagged tensors, awkward arrays."""

from __future__ import annotations

import re

import pytest
from support.errors import advice

import dlx
from dlx._engine import compound
from dlx.errors import CopyRequiredError, DlxError, DTypeError, LayoutError, ReadOnlyError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch announces its tensors

ROWS = [[1, 2], [], [3, 4, 5], [], [6]]


def lib(name):
    """Return a library, or skip."""
    return pytest.importorskip(name)


def arrow(rows=ROWS, kind=None):
    """Return a pyarrow array of lists."""
    return pa.array(rows, kind or pa.list_(pa.int64()))


def jagged(rows=ROWS):
    """Return a jagged tensor, made by torch."""
    return torch.nested.nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def listed(obj):
    """Return the rows of a ragged array of any framework as lists."""
    if isinstance(obj, torch.Tensor):
        return [row.tolist() for row in obj.unbind()]
    return obj.to_pylist() if isinstance(obj, pa.Array | pa.ChunkedArray) else obj.to_list()


SOURCES = {
    "arrow": arrow,
    "large": lambda: arrow(kind=pa.large_list(pa.int64())),
    "sliced": lambda: arrow([[9], *ROWS, [8, 8]])[1:-1],
    "chunks": lambda: pa.chunked_array([ROWS[:2], [], ROWS[2:]], pa.list_(pa.int64())),
    "one chunk": lambda: pa.chunked_array([arrow()]),
    "jagged": jagged,
    "polars": lambda: lib("polars").Series(ROWS),
    "pandas": lambda: lib("pandas").Series(arrow(), dtype=lib("pandas").ArrowDtype(arrow().type)),
    "awkward": lambda: lib("awkward").Array(ROWS),
    "awkward, of Arrow": lambda: lib("awkward").from_arrow(arrow()),  # may have nulls, and has none
    "awkward, sliced": lambda: lib("awkward").Array([[9], *ROWS])[1:],
}


@pytest.mark.parametrize("to", ["torch", "pyarrow", "awkward"])
@pytest.mark.parametrize("name", SOURCES)
def test_rows_survive(name, to):
    """Every source gives equal rows in every target, there and back, and the plan agrees."""
    lib(to)
    source = SOURCES[name]()
    plan, made = dlx.plan(source, to), dlx.convert(source, to)
    assert plan and listed(made) == ROWS
    assert (plan.outcome == "same") is (made is source)
    back = dlx.convert(made, "pyarrow")
    assert listed(back) == ROWS and dlx.plan(made, to).outcome == "same"
    assert listed(plan.run()) == ROWS


def test_values_and_offsets_are_shared():
    """Nothing is copied between Arrow and torch, in either direction, where the memory may be written to."""
    source = arrow()
    made = dlx.convert(source, "torch", readonly="share", copy=False)
    _, offsets, _, values = (buffer and buffer.address for buffer in source.buffers())
    assert (made.values().data_ptr(), made.offsets().data_ptr()) == (values, offsets)
    assert made.offsets().dtype == torch.int32
    back = dlx.convert(made, "pyarrow", copy=False)
    assert [buffer and buffer.address for buffer in back.buffers()] == [None, offsets, None, values]
    assert type(dlx.convert(jagged(), "pyarrow")) is pa.LargeListArray
    assert dlx.shares_memory(source, made) and not dlx.shares_memory(made, arrow())


def test_memory_of_arrow_stays_constant():
    """Without readonly="share", a tensor over Arrow's memory is a copy."""
    source = arrow()
    made = dlx.convert(source, "torch")
    made.values().fill_(0)
    assert listed(source) == ROWS
    with pytest.raises(DlxError, match="read-only"):
        dlx.convert(source, "torch", copy=False)


def test_changes_of_offsets_are_steps():
    """A slice needs other offsets, and chunks are joined: the plan says so, and copy=False refuses."""
    sliced, chunks = SOURCES["sliced"](), SOURCES["chunks"]()
    for source, why in ((sliced, "offsets: it begins with 1, not 0"), (chunks, "offsets: it consists of 2 chunks")):
        assert why in str(dlx.plan(source, "torch"))
        with pytest.raises(CopyRequiredError):
            dlx.convert(source, "torch", copy=False, readonly="share")


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[1]]])
@pytest.mark.parametrize("end", [0, 1])
def test_empty_rows_and_arrays(rows, end):
    """Empty arrays and empty rows survive."""
    for source in (arrow(rows), pa.chunked_array([rows], pa.list_(pa.int64())), arrow([[7], *rows])[1:]):
        assert listed(dlx.convert(dlx.convert(source, "torch"), "pyarrow")) == rows
    assert len(dlx.parts(pa.chunked_array([], pa.list_(pa.int8())), "numpy")["offsets"]) == 1


def test_other_values():
    """Values of other dtypes and with inner dimensions, and bools, which are unpacked."""
    for kind, rows in (
        (pa.bool_(), [[True, False], [], [True]]),
        (pa.float16(), [[1.5], [2.5, 3.5]]),
        (pa.list_(pa.float32(), 2), [[[1.0, 2.0]], [], [[3.0, 4.0], [5.0, 6.0]]]),
    ):
        source = pa.array(rows, pa.list_(kind))
        made = dlx.convert(source, "torch")
        assert listed(made) == rows and listed(dlx.convert(made, "pyarrow")) == rows


def test_nulls_and_others_are_refused_with_the_place():
    """Nulls are refused by row, or at the values; text at the values; two levels by targets with one level."""
    cases = (
        ([[1], None, [2]], None, LayoutError, r"its row 1 is null"),
        ([[1], [None]], None, LayoutError, r"at obj.values: it has 1 null"),
        ([["a"]], pa.list_(pa.string()), DTypeError, r"at obj.values: .*text"),
        (
            [[[1], []]],
            pa.list_(pa.list_(pa.int64())),
            LayoutError,
            r"at obj.values: torch supports ragged .*dlx\.parts",
        ),
    )
    for rows, kind, error, words in cases:
        for source in (arrow(rows, kind), pa.chunked_array([arrow(rows, kind)])):
            with pytest.raises(error, match=words):
                dlx.convert(source, "torch")
            assert not dlx.plan(source, "torch")
    with pytest.raises(LayoutError, match="row 2 is null"):
        dlx.convert(pa.chunked_array([[[1], [2]], [None]], pa.list_(pa.int8())), "torch")
    with pytest.raises(LayoutError, match=r"numpy has no ragged arrays.*dlx\.parts\(x, to='numpy'\)"):
        dlx.convert(arrow(), "numpy")
    with pytest.raises(LayoutError, match="do not rise"):
        dlx.convert(torch.nested.nested_tensor_from_jagged(torch.ones(5), torch.tensor([0, 2])), "pyarrow")


def test_null_rows_are_described():
    """As a flat column with nulls is; only a conversion refuses them."""
    calls = (
        lambda x: dlx.parts(x, "numpy"),
        lambda x: dlx.stack(x, "numpy"),
        lambda x: dlx.convert(x, "torch"),  # which has one level only
    )
    nested = pa.array([[[1], None]])
    for source in (arrow([[1], None, [2]]), pa.chunked_array([[[1]], [None]]), nested):
        info = dlx.describe(source)
        assert info.dtype.name == "int64" and info.notes == ("ragged: values, offsets",)
        assert dlx.shares_memory(source, source)
        for call in calls[: 2 if source is nested else 3]:
            fix = r"\.flatten\(\)\.drop_null\(\), and keep" if source is nested else r"\.drop_null\(\)\."
            with pytest.raises(LayoutError, match=rf"its row \d is null. Call {fix}") as caught:
                call(source)
            assert re.match(r"cannot (split|stack|convert) pyarrow\.lib\.\w+", str(caught.value))


def test_the_fix_for_values_in_lists_works_on_the_lists():
    """It flattens the lists first: the array of lists has no nulls and no text itself."""
    pairs = [[1.0, None], [2.0, 3.0]]
    inner = pa.list_(pa.float64(), 2)
    sources = [
        *(
            pa.array(pairs),
            pa.chunked_array([pairs[:1], pairs[1:]]),
            pa.array([pairs]),
            pa.array([pairs], pa.list_(inner)),
        ),
        *(
            pa.array([[None, [1.0]]]),
            pa.array([["a"]]),
            pa.array([[["a", "b"]]]),
            pa.array([[0]], pa.list_(pa.timestamp("us"))),
        ),
    ]
    for name in ("polars", "pandas"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        kind = {} if name == "polars" else {"dtype": module.ArrowDtype(pa.list_(pa.float64()))}
        sources.append(module.Series(pairs if name == "polars" else pa.array(pairs), **kind))
    for x in sources:
        for call in (dlx.parts, dlx.stack):
            with pytest.raises((LayoutError, DTypeError)) as caught:
                call(x, "numpy")
            chain = re.match(r"(?:Call|Convert its) ([.\w()\[\]'{}!]+)", caught.value.fix)[1].rstrip(".")
            found = eval(f"x{chain}", {"x": x, "value": 0.0})
            assert dlx.parts(found, "numpy") if "drop_null" in chain else dlx.convert(found, "numpy").ndim == 1


@pytest.mark.parametrize("rows", ([[1, None], [2]], [[1], None], [["a"], ["b"]], [[[1, None]], [[2]]]))
def test_the_fix_for_lists_names_the_column(rows):
    """Frames of libraries without an adapter give the column to pyarrow, by its name."""
    table = pa.table({"n": [1.0, 2.0], "l": rows})
    for frame in (lib("narwhals").from_native(table), lib("duckdb").from_arrow(table)):
        with pytest.raises(DlxError, match=r"\['l'\], (?:call|convert) ") as caught:
            dlx.convert(frame, "awkward" if isinstance(rows[0][0], list) else "torch")
        (result, *_) = advice.tried(caught.value.fix, frame)
        assert dlx.plan(result, "awkward").ok, caught.value.fix


def test_empty_columns_share_nothing():
    """They have no memory: dlx makes their offsets for each call."""
    empty = pa.array([], pa.list_(pa.int64())), pa.chunked_array([], pa.list_(pa.int64()))
    for one in empty:
        assert not any(dlx.shares_memory(one, other) for other in empty)
        assert dlx.convert(one, "torch", copy=False).size(0) == 0


def test_list_views_name_an_advice_that_works():
    """Their offsets alone do not say where a row ends."""
    views = pa.array(ROWS, pa.list_view(pa.int64()))
    with pytest.raises(DTypeError, match=r"Convert its \.flatten\(\) and \.sizes separately\."):
        dlx.convert(views, "torch")
    rows = dlx.convert(views.flatten(), "torch").split(dlx.convert(views.sizes, "torch").tolist())
    assert [row.tolist() for row in rows] == ROWS


@pytest.mark.parametrize("options", [{"copy": True}, {"dtype": "float64"}, {"detach": True}], ids=str)
def test_a_jagged_tensor_keeps_the_length_to_which_torch_pads(options):
    """Torch stores the longest length, and pads to the number of all values without it."""
    for rows in ([torch.ones(2), torch.ones(3)], [torch.ones(2, 3), torch.ones(3, 3)]):
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        assert dlx.convert(x, "torch", **options).to_padded_tensor(0).shape == x.to_padded_tensor(0).shape
    x = torch.nested.nested_tensor_from_jagged(torch.ones(5), torch.tensor([0, 2, 5]))
    assert dlx.convert(x, "torch", **options).to_padded_tensor(0).shape == x.to_padded_tensor(0).shape


def test_a_write_to_a_copy_names_the_type_of_the_caller():
    """The array or table, not a class of dlx."""
    lists, numbers = pa.array([[1.0, 2], [3]]), pa.array([1.0, 2])
    for source, write, name in (
        (lists, lambda x: x.values().mul_(2), r"pyarrow\.lib\.ListArray to 'torch' at x\.values"),
        (pa.table({"a": lists}), lambda x: x["a"].values().mul_(2), r"pyarrow\.lib\.Table to .* at x\['a'\]\.values"),
        (pa.table({"a": numbers}), lambda x: x["a"].mul_(2), r"pyarrow\.lib\.Table to 'torch' at x\['a'\]"),
    ):
        with pytest.raises(ReadOnlyError, match=rf"^cannot convert {name}: the function wrote to a copy"):
            dlx.using("torch")(write)(source)


def test_nested_lists():
    """Pyarrow and awkward take lists of lists; dlx.parts gives the arrays of every level."""
    rows = [[[1, 2], []], [], [[3]]]
    source = arrow(rows, pa.list_(pa.list_(pa.int64())))
    found = dlx.parts(source, "torch")
    assert found["offsets"].tolist() == [0, 2, 2, 3] and found["values"]["offsets"].tolist() == [0, 2, 2, 3]
    ak = lib("awkward")
    made = dlx.convert(source, "awkward", copy=False)
    assert made.to_list() == rows and dlx.convert(made, "pyarrow", copy=False).to_pylist() == rows
    assert dlx.convert(ak.Array(rows), "pyarrow").to_pylist() == rows


def missing_in(x):
    """Return the number of missing values of an array of awkward, or of a masked array of numpy."""
    if isinstance(x, np.ma.MaskedArray):
        return int(np.ma.count_masked(x))
    return str(getattr(x, "type", "")).count("?") + str(getattr(x, "type", "")).count("option")


def fixes(x, to):
    """Follow the advice of refusals that suits the array; return the fixes, and the result."""
    found = []
    while len(found) < 4:
        plan = dlx.plan(x, to)
        try:
            return found, dlx.convert(x, to)
        except DlxError as error:
            assert str(plan.error) == str(error)
            found.append(error.fix)
            if error.option:
                return found, dlx.convert(x, to, **dict(error.option))
            results = advice.tried(error.fix, x)
            x = next((each for each in results if missing_in(each) == 0), results[0])
    raise AssertionError(found)


def test_the_fixes_of_jagged_tensors_work():
    """Of transposed ones, of those with gaps, and of a dtype that awkward lacks."""
    rows = [torch.arange(2.0 * n).reshape(n, 2) for n in (1, 3)]
    whole = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found, made = fixes(whole.transpose(1, 2), "pyarrow")
    assert found == ["Call .transpose(1, 2) first."] and listed(made) == listed(whole)
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1])
    gaps = torch.nested.narrow(torch.arange(12.0).reshape(3, 4), 1, starts, lengths, layout=torch.jagged)
    found, made = fixes(gaps, "pyarrow")
    assert found == ["Call .contiguous() first."] and listed(made) == [[0, 1], [5, 6, 7], [8]]
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        found, made = fixes(whole.to(dtype), lib("awkward").__name__)
        assert found == [f"Pass dtype={{{name!r}: 'float32'}}."] and listed(made) == listed(whole.to(dtype).float())
    with pytest.raises(DTypeError, match=r"no ragged arrays of bfloat16. Pass dtype=\{'float64': 'float32'\}"):
        dlx.convert(pa.array([[1.0]]), "awkward", dtype="bfloat16")


def test_the_fixes_of_awkward_arrays_work():
    """Of missing values and rows; rows without any element have a dtype."""
    ak = lib("awkward")
    for rows, whole in (
        ([[1.0, None], [2.0]], [[1], [2]]),
        ([[1.0], None, [2.0, 3.0]], [[1], [2, 3]]),
        ([[[1.0], None]], [[[1]]]),
        ([None, [[1.0], None]], [[[1]]]),
        ([[], []], [[], []]),
    ):
        found, made = fixes(ak.Array(rows), "pyarrow")
        assert made.to_pylist() == whole and bool(found) is (rows != whole), found
    for x in (ak.Array([]), ak.Array([1.0, 2.0]), ak.to_regular(ak.Array([[1, 2]]))):
        found, made = fixes(x, "numpy")
        assert made.tolist() == x.to_list() and len(found) == 1
    assert fixes(ak.Array([1.0, None]), "numpy")[1].tolist() == [1]
    with pytest.raises(DlxError, match=r"convert its fields one by one\.$"):
        dlx.convert(ak.Array([[{"x": 1}]]), "torch")
    assert listed(dlx.convert(ak.Array([[{"x": 1}]])["x"], "torch")) == [[1]]


def test_awkward_arrays_of_other_kinds():
    """Text, records, missing values and unordered rows are refused; regular arrays are no ragged ones."""
    ak = lib("awkward")
    for array, words in (
        (ak.Array([["a"], []]), "not numbers"),
        (ak.Array([[{"x": 1}]]), "not numbers"),
        (ak.Array([[1, None]]), "not numbers"),
        (ak.Array(ROWS)[[2, 0]], "to_packed"),
        (ak.Array(["ab"]), "to_numpy"),
        (ak.Array([[1], None]), "to_numpy"),
        (ak.to_regular(ak.Array([[1, 2]])), "to_numpy"),
    ):
        with pytest.raises(DlxError, match=words):
            dlx.convert(array, "torch")
    assert listed(dlx.convert(ak.to_packed(ak.Array(ROWS)[[2, 0]]), "torch")) == [[3, 4, 5], [1, 2]]


def test_in_tables_trees_and_functions():
    """Columns of tables, elements of trees and views, arguments and results are ragged arrays, too."""
    table = pa.table({"a": arrow(), "x": np.arange(5.0)})
    made = dlx.convert([table], "torch")[0]
    assert listed(made["a"]) == ROWS and made["x"].tolist() == [0, 1, 2, 3, 4]
    assert listed(dlx.convert({"a": arrow()}, "torch", lazy=True)["a"]) == ROWS
    doubled = dlx.using("torch")(lambda x: x * 2)(arrow())
    assert type(doubled) is pa.ListArray and doubled.to_pylist() == [[2 * each for each in row] for row in ROWS]
    with dlx.share({"a": arrow()}) as handle:
        assert listed(dlx.attach(handle, "torch", readonly="share")["a"]) == ROWS
        assert listed(dlx.attach(handle, "pyarrow")["a"]) == ROWS
    info = dlx.describe(arrow())
    assert info.notes == ("ragged: values, offsets",) and info.dtype.name == "int64" and info.readonly


def test_inconsistent_arrow_data_is_refused(python):
    """Offsets that descend, or point behind the values, are refused before anything reads them."""
    code = """
import ctypes, dlx, pyarrow as pa
from dlx.errors import DlxError
def damaged(offsets, bits=32):
    kind, number = (pa.list_, ctypes.c_int32) if bits == 32 else (pa.large_list, ctypes.c_int64)
    make = pa.ListArray if bits == 32 else pa.LargeListArray
    memory = (number * len(offsets))()
    buffers = [None, pa.py_buffer(memory)]
    array = make.from_buffers(kind(pa.int64()), len(offsets) - 1, buffers, children=[pa.array([1, 2, 3])])
    memory[:] = offsets  # after pyarrow's own check
    return array
for offsets in ([0, 2, 1, 3], [0, 1, 4], [-1, 1, 2], [3, 0], [0, 2**31 - 1], [2**30, 2**31 - 1]):
    for bits in (32, 64):
        for to in ("torch", "pyarrow", "dlx"):
            array = damaged(offsets, bits)
            for make in (lambda: dlx.parts(array, to), lambda: dlx.convert(pa.chunked_array([array]), "torch")):
                try:
                    print("not refused", offsets, make())
                except DlxError as error:
                    assert "inconsistent" in str(error), error
assert dlx.parts(damaged([1, 2, 2]), "torch")["offsets"].tolist() == [0, 1, 1]
"""
    assert python(code) == ""


def test_values_outlive_their_source():
    """The parts keep Arrow's data alive, also without any batch."""
    found = dlx.parts(pa.chunked_array([], pa.list_(pa.int64())), "dlx")
    more = dlx.parts(arrow(), "dlx")
    assert found["values"].shape == (0,) and list(memoryview(more["values"])) == [1, 2, 3, 4, 5, 6]


def test_a_null_of_the_struct_is_a_null_of_its_lists(python):
    """The lists of a struct may have no bitmap; the row is named, and the first one if both have nulls."""
    code = """
import dlx, pyarrow as pa
from dlx.errors import LayoutError
class Struct:
    def __init__(self, array):
        self.array = array
    def __arrow_c_array__(self, requested_schema=None):
        return self.array.__arrow_c_array__(requested_schema)
for lists in ([[1, 2], [3], [], [4, 5]], [[1, 2], [3], None, [4]], [None, [3], [], [4]]):
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int32())):
        rows = pa.array(lists, kind)
        for masked in ([1], [3], [1, 2], []):
            mask = pa.array([i in masked for i in range(4)])
            whole = pa.StructArray.from_arrays([rows], ["l"], mask=mask)
            for skip in (0, 1):
                nulls = [i - skip for i in range(skip, 4) if lists[i] is None]
                first = ([i - skip for i in masked if i >= skip] or nulls or [None])[0]  # the struct's first
                try:
                    found = dlx.convert(Struct(whole[skip:]), to="pyarrow")["l"]
                except LayoutError as error:
                    assert f"row {first} is null" in str(error), error
                else:
                    assert first is None and found.to_pylist() == lists[skip:], found
"""
    assert python(code) == ""


def test_index_arrays_at_any_address(python):
    """Offsets and indices need no alignment."""
    code = """
import dlx, numpy as np, pyarrow as pa
for number, kind, make in ((np.int32, pa.list_, pa.ListArray), (np.int64, pa.large_list, pa.LargeListArray)):
    memory = bytearray(1 + 1001 * np.dtype(number).itemsize)
    offsets = np.frombuffer(memory, number, offset=1)
    offsets[:] = np.arange(1001) * 3
    buffers = [None, pa.py_buffer(memory)[1:]]
    array = make.from_buffers(kind(pa.int64()), 1000, buffers, children=[pa.array(range(3000))])
    for source in (array, array[1:], pa.chunked_array([array, array[3:]])):
        found = dlx.parts(source, "numpy")
        assert (np.diff(found["offsets"]) == 3).all() and found["values"][:3].tolist() == source[0].as_py()
"""
    assert python(code) == ""


def test_stack_names_what_it_cannot_stack():
    """Nested lists of several lengths; `parts` takes them."""
    for nested in (pa.array([[[1], [2, 3]], [[4]]]), pa.chunked_array([[[[1]]], [[[2, 3], [4]]]])):
        with pytest.raises(LayoutError, match=r"cannot stack pyarrow\.lib\.\w+ to '\w+': its lists are nested"):
            dlx.stack(nested, "numpy", pad=0)
        assert "offsets" in dlx.parts(nested, "numpy")["values"]


def test_the_bound_of_indices():
    """No index exceeds it: an extent, or the number of elements of a ragged array."""
    parts = {"values": np.zeros(5), "offsets": np.array([0, 5])}
    assert compound._bound_of(parts) == 5
    assert compound._bound_of({"data": np.zeros(2), "coords": np.zeros((2, 2), int), "shape": (9, 3)}) == 9
