"""Arrow tables: the fast path reads their columns in C, and exports each table once."""

import gc

import pytest
from support.arrays.agreement import facts, slow
from support.foreign import arrow as made

import dlx
from dlx import errors
from dlx._core import native
from dlx._engine import fast_path

in_c = native.FastPathFunction(lambda *args, **options: NotImplemented, fast_path.learn, fast_path.consumer_failed)
OPTIONS = ({}, {"copy": False}, {"copy": True}, {"readonly": "error"}, {"readonly": "share"}, {"device": "cpu"})


def _tensors(pa):
    return pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [1]), pa.array([[1]], pa.list_(pa.int8(), 1))
    )


TAKEN = {
    "numbers": lambda pa: pa.table({"x": [1.5, 2.5], "i": pa.array([1, 2], pa.int16())}),
    "slice": lambda pa: pa.table({"x": [1.5, 2.5, 3.5], "i": [1, 2, 3]}).slice(1),
    "batch": lambda pa: pa.record_batch({"x": [1.5, 2.5], "h": pa.array([1, 2], pa.uint8())}),
    "no rows": lambda pa: pa.table({"x": pa.array([], pa.float32())}),
    "no batches": lambda pa: pa.schema({"x": pa.float32()}).empty_table(),
    "lists": lambda pa: pa.table({"x": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))}),
    "notes": lambda pa: pa.table(
        [pa.array([1, 2])], pa.schema([pa.field("x", pa.int64(), metadata={"unit": "m", "": ""})], {"of": "a table"})
    ),
    "no name": lambda pa: pa.table([pa.array([1, 2]), pa.array([3, 4])], ["", "é"]),
    "filled": lambda pa: pa.table({"x": pa.array([1, None, 3])}).slice(2),
}
JOINED = {
    "chunks": lambda pa: pa.table({"x": pa.chunked_array([[1.5], [2.5]]), "i": pa.chunked_array([[1, 2]])}),
    "bools": lambda pa: pa.table({"b": [True, False, True], "x": [1.0, 2.0, 3.0]}).slice(1),
    "chunks of lists": lambda pa: pa.concat_tables([TAKEN["lists"](pa)] * 2),
}
LEFT = {
    "nulls": lambda pa: pa.table({"x": [1.5, None], "b": [True, False]}),
    "text": lambda pa: pa.table({"b": [True, False], "x": ["a", "b"]}),
    "times": lambda pa: pa.table({"x": pa.array([0, 1], pa.timestamp("s"))}),
    "dictionary": lambda pa: pa.table({"x": pa.array(["a", "b"]).dictionary_encode()}),
    "extension": lambda pa: pa.table(
        [pa.array([1])], pa.schema([pa.field("x", pa.int64(), metadata={"": "", "ARROW:extension:name": "mine"})])
    ),
    "tensors": lambda pa: pa.table({"x": _tensors(pa)}),
    "twice": lambda pa: pa.table([pa.array([1]), pa.array([2])], ["x", "x"]),
    "struct": lambda pa: pa.table({"x": pa.array([{"y": 1}])}),
    "no columns": lambda pa: pa.table({}),
}


@pytest.fixture
def released():
    """Count the releases by kind of struct; check that each struct is released exactly once."""
    made.alive.clear()
    made.released.clear()
    yield made.released
    assert made.released["twice"] == 0 and not made.alive


def outcome(convert, table, to, options):
    """Return the result of a conversion, column by column, or its error."""
    try:
        result = convert(table, to=to, **options)
    except errors.DlxError as error:
        return type(error), str(error)
    source = dlx.convert(table, to="dlx", copy=None)
    assert type(result) is dict
    return [(name, facts(column, source[name])[:6]) for name, column in result.items()], [
        dlx.convert(column, to="numpy").tolist() for column in result.values()
    ]


@pytest.mark.parametrize("to", ["numpy", "torch", "dlx", "jax", "pyarrow", "arrow"])
@pytest.mark.parametrize("name", [*TAKEN, *JOINED, *LEFT])
def test_both_paths_agree(name, to):
    """With all options. The fast path converts tables of numbers, but leaves joins under `copy=` to Python."""
    pa = pytest.importorskip("pyarrow")
    if to not in ("dlx", "arrow"):
        pytest.importorskip(to)
    table = {**TAKEN, **JOINED, **LEFT}[name](pa)
    for options in OPTIONS:
        first, warm, other = (outcome(convert, table, to, options) for convert in (dlx.convert, dlx.convert, slow))
        assert first == other and warm == other, options
    assert (in_c(table, to="numpy") is not NotImplemented) == (name not in LEFT)
    for options in ({"copy": True}, {"copy": False}):
        assert (in_c(table, to="numpy", **options) is not NotImplemented) == (name in TAKEN)


@pytest.mark.parametrize("to", ["numpy", "torch", "dlx", "pyarrow"])
@pytest.mark.parametrize("name", [*TAKEN, *JOINED, *LEFT])
def test_a_table_with_other_options_agrees(name, to):
    """With dtype=, columns of numbers are cast without a plan; a trace plans each column."""
    pa = pytest.importorskip("pyarrow")
    if to != "dlx":
        pytest.importorskip(to)
    table = {**TAKEN, **JOINED, **LEFT}[name](pa)
    for options in (
        {"dtype": "float32"},
        {"dtype": {"int64": "int32", "bool": "uint8"}, "errors": "pass"},
        {"dtype": "bfloat16", "errors": "collect"},
        {"strict": True},
        {"errors": "pass"},
        {"errors": "collect", "readonly": "share"},
        {"errors": "pass", "copy": False},
    ):
        found = seen(table, to, options)
        with dlx.trace():
            assert found == seen(table, to, options), options


def seen(table, to, options):
    """Return the columns of a result with their type, or the error."""
    try:
        result = dlx.convert(table, to=to, **options)
    except (errors.DlxError, ExceptionGroup) as error:
        return type(error), str(error), [str(each) for each in getattr(error, "exceptions", ())]
    kinds = [getattr(each, "dtype", getattr(each, "type", None)) for each in result.values()]
    return list(result), [*map(type, result.values())], [*map(str, kinds)], [*map(str, result.values())]


def table(*columns, kind=made.Gives, **fields):
    """Return an object with a table of columns of three numbers; `fields` are of its first one."""
    text, block = made.numbers(1, 2, 3)
    arrays = [made.arrow_array(3, None, block, **(fields if i == 0 else {})) for i in range(len(columns))]
    schema = made.schema("+s", *(made.schema(text, name=name) for name in columns))
    whole = made.arrow_array(3, None, children=arrays)
    return kind(schema, whole) if kind is made.Gives else kind(made.stream(schema, [whole]))


@pytest.mark.parametrize("kind", [made.Gives, made.Streams])
def test_it_is_asked_once(np, kind, released):
    """The Python path gets the exported stream, and raises the error."""
    for _ in range(2):  # the second time there is a route
        obj = table("a", "b", kind=kind)
        assert [each.tolist() for each in dlx.convert(obj, to="numpy").values()] == [[1, 2, 3]] * 2 and obj.asked == 1
        nulls = table(
            "a", "b", kind=kind, null_count=1, buffers=made.arrow_array(3, bytearray([5]), bytearray(12)).buffers
        )
        with pytest.raises(errors.LayoutError, match=r"at obj\['a'\]: it has 1 null"):
            dlx.convert(nulls, to="numpy")
        assert nulls.asked == 1
        wrong = table("a", "b", kind=kind, offset=-1)
        with pytest.raises(errors.ProtocolError, match="its offset is below 0"):
            dlx.convert(wrong, to="numpy")
        assert wrong.asked == 1
        twice = table("a", "a", kind=kind)
        with pytest.raises(errors.LayoutError, match="two columns named 'a', numbers 0 and 1"):
            dlx.convert(twice, to="numpy")
        assert twice.asked == 1
        for options in ({"errors": "pass"}, {"dtype": "float32", "errors": "pass"}):
            mixed = table(
                "a", "b", kind=kind, null_count=1, buffers=made.arrow_array(3, bytearray([5]), bytearray(12)).buffers
            )
            assert dlx.convert(mixed, to="numpy", **options) is mixed and mixed.asked == 1  # it has no columns by name
            numbers = table("a", "b", kind=kind)
            assert type(dlx.convert(numbers, to="numpy", **options)["a"]) is np.ndarray and numbers.asked == 1
    made.alive.clear()  # of the array that lent its buffers


def test_a_column_is_asked_once_by_a_type_that_gives_tables(np, released):
    """The Python path creates the array from the fast path's export."""
    dlx.convert(table("a"), to="numpy")
    one = made.column(1, 2)
    assert dlx.convert(one, to="numpy").tolist() == [1, 2] and one.asked == 1
    with pytest.raises(errors.ConsumedError):  # its capsules were used
        dlx.convert(one, to="numpy")
    assert one.asked == 2


def test_what_a_method_raises_is_raised_once():
    """Errors go to the Python path; interrupts end the call."""
    asked = []

    class Fails:
        def __arrow_c_stream__(self, requested_schema=None):
            asked.append(1)
            raise self.error

    for raised, expected in (
        (OSError("no such table"), errors.ConversionError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        Fails.error = raised
        for _ in range(2):
            with pytest.raises(expected):
                dlx.convert(Fails(), to="dlx")
    assert len(asked) == 4


def test_memory_goes_with_the_last_column(np, released):
    """A result keeps the table's memory alive, even if the others are released."""
    result = dlx.convert(table("a", "b"), to="numpy", copy=False)
    del result["a"]
    assert not released and result["b"].tolist() == [1, 2, 3] and not result["b"].flags.writeable
    result.clear()
    assert released == {"array": 3, "schema": 3}


def test_nothing_is_copied_beside_what_is_refused(python):
    """A column is joined only after all others were accepted; here, joining would read an invalid address."""
    python(
        """
        import sys
        sys.path[:0] = ["tests"]
        from support.foreign import arrow as made
        import dlx
        for _ in range(2):
            kinds = made.schema("b", name="b"), made.schema("u", name="t")
            columns = made.arrow_array(9, None, 4096), made.arrow_array(9, None, 4096, 4096)
            table = made.Gives(made.schema("+s", *kinds), made.arrow_array(9, None, children=columns))
            try:
                dlx.convert(table, to="dlx")
            except dlx.errors.DTypeError as error:
                assert table.asked == 1 and "at obj['t']" in str(error)
            else:
                raise AssertionError("it was converted")
        """
    )


def test_one_array_is_wanted():
    """`from_dlpack` refuses containers, whether or not `convert` knows their type."""
    pa = pytest.importorskip("pyarrow")
    source = pa.table({"x": [1.5]})
    for _ in range(2):
        with pytest.raises(errors.AdapterNotFoundError, match="not one array"):
            dlx.from_dlpack(source)
        assert dlx.convert(source, to="dlx")["x"].shape == (1,)


def test_a_trace_sees_every_column():
    """With a trace, the Python path records each column."""
    pa = pytest.importorskip("pyarrow")
    source = pa.table({"x": [1.5], "b": [True]})
    dlx.convert(source, to="dlx")
    with dlx.trace() as trace:
        dlx.convert(source, to="dlx")
    assert len(trace.records) == 2 and sum(each.nbytes for each in trace.records) == 1


def test_nothing_leaks():
    """Neither accepted nor refused columns leak."""
    pa = pytest.importorskip("pyarrow")
    gc.collect()  # garbage of other tests
    before = pa.total_allocated_bytes()
    for make in (*TAKEN.values(), *JOINED.values(), *LEFT.values()):
        for options in OPTIONS:
            outcome(dlx.convert, make(pa), "dlx", options)
    gc.collect()
    assert pa.total_allocated_bytes() == before
