"""Arrow's PyCapsule interface without an Arrow library: valid and invalid structs, created with ctypes."""

from __future__ import annotations

import array
import ctypes
import gc
import json

import pytest
from support.foreign import arrow as made
from support.foreign.arrow import (
    Gives,
    GivesDevice,
    GivesDeviceStream,
    Pair,
    Streams,
    arrow_array,
    column,
    on_device,
    schema,
    stream,
)
from support.processes.concurrent import at_once

import dlx
from dlx import errors
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.stream import Stream

NUMBERS = {
    "c": "int8",
    "C": "uint8",
    "s": "int16",
    "S": "uint16",
    "i": "int32",
    "I": "uint32",
    "l": "int64",
    "L": "uint64",
    "e": "float16",
    "f": "float32",
    "g": "float64",
}


@pytest.fixture(autouse=True)
def released():
    """All structs are released exactly once; tests with exceptions check that themselves."""
    made.alive.clear()
    made.released.clear()
    yield made.released
    if made.alive:
        gc.collect()
    assert made.released["twice"] == 0
    assert not made.alive, "not released"


def values(tensor):
    """Return the values of a host tensor."""
    return memoryview(tensor).tolist()


def memory(text):
    """Return 4 numbers of at most 8 bytes, and their size."""
    return array.array("q", range(4)), dlx.DType(NUMBERS[text]).bits // 8


# ---- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_are_shared_and_read_only(text, released):
    """Every numeric type is shared, from its offset on; the last tensor releases the memory."""
    block, size = memory(text)
    obj = Gives(schema(text), arrow_array(2, None, block, offset=1))
    tensor = dlx.convert(obj, to="dlx", copy=False)
    assert (tensor.dtype.name, tensor.shape, tensor.readonly) == (NUMBERS[text], (2,), True)
    assert tensor.data_ptr == block.buffer_info()[0] + size and obj.asked == 1
    again = dlx.convert(tensor, to="dlx", copy=True)
    assert not released
    del tensor
    assert released == {"array": 1, "schema": 1} and bytes(again) == bytes(block)[size : 3 * size]


def test_a_column_is_planned_and_described_as_an_array(np):
    """A column has the same plan and description as an array of its type."""
    plan = dlx.plan(column(1, 2), to="numpy")
    assert (plan.outcome, plan.leaves) == ("shared", ()) and plan.source.shape == (2,)
    info = dlx.describe(column(1, 2))
    assert (info.dtype.name, info.shape, info.strides, info.readonly) == ("int32", (2,), (1,), True)
    assert info.protocols == ("__arrow_c_array__",) and info.type_name == "support.foreign.arrow.Gives"


def test_empty_columns_need_no_memory(np):
    """An empty column may have a NULL buffer, and a stream no batches."""
    assert dlx.convert(Gives(schema("g"), arrow_array(0, None, None)), to="numpy", copy=False).shape == (0,)
    result = dlx.convert(Streams(stream(schema("f"), [])), to="numpy", copy=False)
    assert result.shape == (0,) and result.dtype == "float32"


@pytest.mark.parametrize("offset", [0, 3, 8, 13])
def test_bools_are_unpacked(np, offset):
    """Packed bools are copied to a byte each; the plan says so, and copy=False refuses."""
    bits = bytearray([0b10110010, 0b01001101, 0b11100001])

    def obj():
        return Gives(schema("b"), arrow_array(9, None, bits, offset=offset))

    expected = [bool(bits[i // 8] >> i % 8 & 1) for i in range(offset, offset + 9)]
    result = dlx.convert(obj(), to="numpy")
    assert result.dtype == bool and result.tolist() == expected and result.flags.writeable
    plan = dlx.plan(obj(), to="numpy")
    assert (plan.outcome, plan.nbytes) == ("copied", 9) and "packed eight to a byte" in plan.steps[0].why
    with pytest.raises(errors.CopyRequiredError, match="packed eight to a byte"):
        dlx.convert(obj(), to="numpy", copy=False)


def test_chunks_are_joined(np, released):
    """Several batches are copied into one array; empty ones are ignored."""
    block = array.array("i", range(6))

    def obj():
        batches = [arrow_array(n, None, block, offset=at) for n, at in ((2, 0), (0, 0), (3, 3))]
        return Streams(stream(schema("i"), batches))

    result = dlx.convert(obj(), to="numpy")
    assert result.tolist() == [0, 1, 3, 4, 5] and result.flags.writeable
    assert released == {"array": 3, "schema": 1, "stream": 1}
    plan = dlx.plan(obj(), to="numpy")
    assert (plan.outcome, plan.nbytes) == ("copied", 20) and "it consists of 2 chunks" in plan.steps[0].why
    with pytest.raises(errors.CopyRequiredError, match="it consists of 2 chunks"):
        dlx.convert(obj(), to="numpy", copy=False)
    one = Streams(stream(schema("i"), [arrow_array(0, None, None), arrow_array(2, None, block, offset=4)]))
    assert dlx.convert(one, to="numpy", copy=False).tolist() == [4, 5]


def lists(size, inner, values_, *, length, offset=0, inner_offset=0, metadata=None):
    """Return an object with fixed-size lists of lists of numbers."""
    count = length + offset
    child = arrow_array((count * size + inner_offset) * inner, None, values_)
    lower = arrow_array(count * size, None, children=[child], offset=inner_offset)
    upper = arrow_array(length, None, children=[lower], offset=offset)
    return Gives(schema(f"+w:{size}", schema(f"+w:{inner}", schema("i")), metadata=metadata), upper)


def test_fixed_size_lists_are_dimensions(np):
    """The offsets of all levels are applied, and the memory is shared."""
    block = array.array("i", range(100))
    result = dlx.convert(lists(3, 2, block, length=2, offset=1, inner_offset=4), to="numpy", copy=False)
    first = (1 * 3 + 4) * 2
    assert result.tolist() == np.arange(first, first + 12).reshape(2, 3, 2).tolist()
    assert result.ctypes.data == block.buffer_info()[0] + 4 * first and not result.flags.writeable


def fixed_shape(block, length, size, **said):
    """Return an object with tensors of a fixed shape."""
    metadata = {
        b"ARROW:extension:name": b"arrow.fixed_shape_tensor",
        b"ARROW:extension:metadata": json.dumps(said).encode(),
    }
    child = arrow_array(length * size, None, block)
    return Gives(schema(f"+w:{size}", schema("i"), metadata=metadata), arrow_array(length, None, children=[child]))


def test_fixed_shape_tensors_are_dimensions(np):
    """Tensors keep their shape and order of dimensions."""
    block = array.array("i", range(12))
    plain = dlx.convert(fixed_shape(block, 2, 6, shape=[2, 3]), to="numpy", copy=False)
    assert plain.tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    turned = dlx.convert(fixed_shape(block, 2, 6, shape=[2, 3], permutation=[1, 0]), to="numpy", copy=False)
    assert turned.tolist() == np.arange(12).reshape(2, 2, 3).transpose(0, 2, 1).tolist()
    assert turned.ctypes.data == block.buffer_info()[0]
    for wrong in ({"shape": [2, 2]}, {"shape": [2, 3], "permutation": [0, 0]}, {"shape": "ab"}, {}):
        with pytest.raises(errors.ProtocolError, match="fixed_shape_tensor are invalid"):
            dlx.convert(fixed_shape(block, 2, 6, **wrong), to="numpy")


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(**columns):
    """Return an object with a struct of columns, (schema, array) each."""
    length = min(each[1].length for each in columns.values()) if columns else 0
    for name, (kind, _) in columns.items():
        kind.name = name.encode()
    kinds, arrays = [each[0] for each in columns.values()], [each[1] for each in columns.values()]
    return Gives(schema("+s", *kinds), arrow_array(length, None, children=arrays))


def test_a_table_is_a_dict_of_columns(np, released):
    """Columns share the table's memory, which is released with the last of them."""
    block = array.array("i", range(4))
    obj = table(a=(schema("i"), arrow_array(3, None, block)), b=(schema("b"), arrow_array(3, None, bytearray([5]))))
    result = dlx.convert([obj], to="numpy")[0]
    assert type(result) is dict and list(result) == ["a", "b"] and obj.asked == 1
    assert result["a"].ctypes.data == block.buffer_info()[0] and result["b"].tolist() == [True, False, True]
    del result["b"]
    assert not released
    result.clear()
    assert released == {"array": 3, "schema": 3}  # the parents release their children


def test_the_offset_of_a_table_is_that_of_its_columns(np):
    """The offset of a table applies to its columns."""
    block = array.array("i", range(9))
    child = arrow_array(8, None, block, offset=1)
    obj = Gives(schema("+s", schema("i", name="x")), arrow_array(3, None, children=[child], offset=2))
    assert dlx.convert(obj, to="numpy", copy=False)["x"].tolist() == [3, 4, 5]


def test_errors_in_a_table_say_the_column(np):
    """The error's path has the column's name; the other columns are not converted."""
    obj = table(a=(schema("i"), arrow_array(1, None, bytearray(4))), t=(schema("u"), arrow_array(1, None, None, None)))
    with pytest.raises(errors.DTypeError, match=r"at obj\['t'\]: DLPack has no text or raw bytes \(string\)"):
        dlx.convert(obj, to="numpy")
    assert dlx.convert(table(), to="numpy") == {}
    arrays = [arrow_array(0, None, None), arrow_array(0, None, None)]
    twice = Gives(schema("+s", schema("i", name="x"), schema("i", name="x")), arrow_array(0, None, children=arrays))
    with pytest.raises(
        errors.LayoutError, match=r"Gives.* at obj\['k'\]: it has two columns named 'x', numbers 0 and 1"
    ):
        dlx.convert({"k": twice}, to="numpy")


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "n": "only nulls",
        "u": "no text or raw bytes (string)",
        "vu": "(string_view)",
        "Z": "(large_binary)",
        "w:7": "(fixed_size_binary[7])",
        "d:5,2": "no decimals (decimal(5,2))",
        "tdD": "no dates, times or durations (date32[day])",
        "tsn:UTC": "(timestamp[ns, tz=UTC])",
        "tts": "(time32[s])",
        "ttu": "(time64[us])",
        "tDm": "(duration[ms])",
        "tin": "(month_day_nano_interval)",
        "+vl": "vary in length (list_view)",
        "+m": "vary in length (map)",
        "+ud:0,1": "no unions (union)",
        "+r": "run-end encoded",
        "?": "no values of this type (of format '?')",
    }.items(),
)
def test_other_types_are_refused_by_name(text, words):
    """The error names the type like Arrow's libraries; for dates the fix names the integer dtype."""
    with pytest.raises(errors.DTypeError) as caught:
        dlx.convert(Gives(schema(text), arrow_array(0, None, None)), to="dlx")
    assert words in str(caught.value)
    if text.startswith("t") and text != "tin":
        assert f"int{32 if text in ('tdD', 'tts') else 64}" in caught.value.fix


def test_dictionaries_and_extensions_are_refused(np):
    """Dictionaries and extensions are refused: their numbers have another meaning."""
    inner = schema("u")
    coded = Gives(schema("i", dictionary=ctypes.pointer(inner)), arrow_array(0, None, None))
    with pytest.raises(errors.DTypeError, match=r"a dictionary array \(dictionary<indices=int32>\)"):
        dlx.convert(coded, to="numpy")
    made.alive.clear()
    meant = schema("c", metadata={b"ARROW:extension:name": b"arrow.bool8"})
    with pytest.raises(errors.DTypeError, match=r"no counterpart of arrow\.bool8"):
        dlx.convert(Gives(meant, arrow_array(0, None, None)), to="numpy")
    other = schema("i", metadata={b"pandas": b"{}"})
    assert dlx.convert(Gives(other, arrow_array(0, None, None)), to="numpy").shape == (0,)


@pytest.mark.parametrize("null_count", [2, -1])
def test_nulls_are_refused_with_their_count(np, null_count):
    """Nulls are counted if the count is unknown; those outside of a slice are ignored."""
    bits, block = bytearray([0b11101011]), array.array("i", range(8))

    def obj(length, offset=0):
        return Gives(schema("i"), arrow_array(length, bits, block, offset=offset, null_count=null_count))

    with pytest.raises(errors.LayoutError, match="it has 2 nulls, which DLPack cannot represent") as caught:
        dlx.convert(obj(8), to="numpy")
    assert ".fill_null(value)" in caught.value.fix
    assert dlx.convert(obj(3, 5), to="numpy", copy=False).tolist() == [5, 6, 7]


def test_streams_that_can_be_read_once_are_refused(released):
    """One-time streams are refused without a call, and the fix names the call."""

    class Reader(Streams):
        def read_all(self):
            pass

    reader = Reader(None)
    with pytest.raises(errors.LayoutError, match="read only once") as caught:
        dlx.convert(reader, to="dlx")
    assert ".read_all()" in caught.value.fix and reader.asked == 0


# ---- hostile ---------------------------------------------------------------------------------------------------------


HUGE = (1 << 63) - 1
HOSTILE = {
    "a length below 0": (lambda: column(1, 2, length=-1), "length is below 0"),
    "an offset below 0": (lambda: column(1, 2, offset=-1), "offset is below 0"),
    "offset and length": (lambda: column(1, 2, offset=HUGE), "do not fit 63 bits"),
    "bytes": (lambda: column(1, 2, length=HUGE // 2), "do not fit 63 bits"),
    "nulls below -1": (lambda: column(1, 2, null_count=-2), "null count"),
    "more nulls than values": (lambda: column(1, 2, null_count=3), "null count"),
    "nulls without a bitmap": (lambda: column(1, 2, null_count=1), "no validity bitmap"),
    "no memory": (lambda: Gives(schema("i"), arrow_array(2, None, None)), "values but no memory"),
    "one buffer": (lambda: Gives(schema("i"), arrow_array(2, None)), "number of buffers"),
    "no buffers": (lambda: column(1, 2, buffers=None), "it has no buffers"),
    "children of numbers": (lambda: column(1, 2, n_children=1), "different numbers of children"),
    "no format": (lambda: Gives(schema("i", format=None), arrow_array(0, None, None)), "format string"),
    "children below 0": (lambda: Gives(schema("+s", n_children=-1), arrow_array(0, None)), "its children"),
    "a missing child": (lambda: Gives(schema("+w:2", None), arrow_array(0, None)), "its children"),
    "a list without a size": (lambda: Gives(schema("+w:", schema("i")), arrow_array(0, None)), "is not a number"),
    "a list of a huge size": (
        lambda: Gives(schema(f"+w:{HUGE}0", schema("i")), arrow_array(0, None)),
        "is not a number",
    ),
    "a list of two": (lambda: Gives(schema("+w:2", schema("i"), schema("i")), arrow_array(0, None)), "has one child"),
    "data without the child": (lambda: Gives(schema("+w:2", schema("i")), arrow_array(2, None)), "numbers of children"),
    "a NULL child": (
        lambda: Gives(schema("+w:2", schema("i")), arrow_array(2, None, children=[None])),
        "a child is missing",
    ),
    "a short child": (
        lambda: Gives(
            schema("+w:2", schema("i")), arrow_array(2, None, children=[arrow_array(3, None, bytearray(12))])
        ),
        "fewer values than its parent",
    ),
    "lists that overflow": (
        lambda: Gives(
            schema(f"+w:{HUGE}", schema("i")), arrow_array(2, None, children=[arrow_array(3, None, bytearray(12))])
        ),
        "number of values does not fit",
    ),
    "a table without its columns": (
        lambda: Gives(schema("+s", schema("i", name="x")), arrow_array(2, None)),
        "numbers of children",
    ),
    "a short column": (
        lambda: table(x=(schema("i"), arrow_array(1, None, bytearray(4))), y=(schema("i"), arrow_array(0, None, None))),
        None,
    ),
    "a dictionary that the type lacks": (
        lambda: column(1, 2, dictionary=ctypes.pointer(arrow_array(0, None))),
        "has a dictionary",
    ),
    "an array that was released": (
        lambda: Gives(schema("i"), arrow_array(0, None, None, release=made.NO_RELEASE)),
        "already used",
    ),
    "a type that was released": (
        lambda: Gives(schema("i", release=made.NO_RELEASE), arrow_array(0, None, None)),
        "already used",
    ),
    "a capsule of another name": (
        lambda: Gives(schema("i"), arrow_array(0, None, None), names=(b"arrow_schema", b"arrow_schema")),
        "expected a capsule named 'arrow_array', found one named 'arrow_schema'",
    ),
    "capsules the wrong way round": (
        lambda: Gives(schema("i"), arrow_array(0, None, None), names=(b"arrow_array", b"arrow_schema")),
        "expected a capsule named 'arrow_schema'",
    ),
    "a stream that fails": (
        lambda: Streams(stream(schema("i"), [arrow_array(1, None, bytearray(4))], fails="no more disk")),
        "its Arrow stream failed: no more disk",
    ),
    "a stream without functions": (
        lambda: Streams(stream(schema("i"), [], get_next=made._GET(0))),
        "no reason given|its Arrow stream failed",
    ),
    "a released stream": (lambda: Streams(stream(schema("i"), [], release=made.NO_RELEASE)), "already used"),
    "batches that differ": (
        lambda: Streams(
            stream(schema("i"), [arrow_array(1, None, bytearray(4)), arrow_array(1, None, None)]),
        ),
        "values but no memory",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_contradicts_itself_is_refused(kind):
    """Structs are validated before their data is read, and released once."""
    make, words = HOSTILE[kind]
    obj = make()
    if words is None:
        dlx.convert(obj, to="dlx")
    else:
        with pytest.raises((errors.ProtocolError, errors.ConsumedError), match=words):
            dlx.convert(obj, to="dlx")
    del obj
    gc.collect()
    made.alive.clear()  # never consumed


@pytest.mark.parametrize("answer", [None, (), (1, 2), [], "ab"])
def test_answers_that_are_no_capsules(answer):
    """A result that is not a capsule is refused by its type."""

    class Wrong:
        def __arrow_c_array__(self, requested_schema=None):
            return answer

    with pytest.raises(errors.ProtocolError, match="expected a"):
        dlx.convert(Wrong(), to="dlx")


def test_a_failing_producer_is_the_cause():
    """The producer's exception is the cause, and it is called once."""
    asked = []

    class Fails:
        def __arrow_c_stream__(self, requested_schema=None):
            asked.append(1)
            raise OSError("no such table")

    with pytest.raises(errors.ConversionError, match="no such table") as caught:
        dlx.convert(Fails(), to="dlx")
    assert isinstance(caught.value.__cause__, OSError) and len(asked) == 1


@pytest.mark.parametrize("name", ["__arrow_c_schema__", "__arrow_c_array", "", "__dlpack__"])
def test_methods_that_arrow_does_not_have(name):
    """Methods that Arrow does not define are not called."""
    with pytest.raises(ValueError, match="is not a method of Arrow"):
        native.arrow_open(object(), name)
    with pytest.raises(TypeError, match="expected the name of a method"):
        native.arrow_open(object(), name.encode())


def test_capsules_are_used_once(released):
    """A second conversion of the same structs is refused, and releases nothing twice."""
    obj = column(1, 2)
    first = dlx.convert(obj, to="dlx")
    with pytest.raises(errors.ConsumedError, match="already used"):
        dlx.convert(obj, to="dlx")
    assert values(first) == [1, 2]
    del first
    assert released == {"array": 1, "schema": 1}


@pytest.mark.unsanitized("freed memory is not returned immediately")
def test_nothing_leaks(python):
    """Repeated conversions and refusals release everything, and memory does not grow."""
    python(
        """
        import gc, sys
        sys.path.insert(0, "tests")
        from support.foreign import arrow as made
        from support.foreign.arrow import Gives, arrow_array, column, schema
        from support.processes.memory import resident
        import dlx
        from dlx._core import native

        def once():
            dlx.convert(column(1, 2, 3), to="dlx")
            for wrong in (lambda: column(1, offset=-1), lambda: Gives(schema("u"), arrow_array(0, None, None))):
                try:
                    dlx.convert(wrong(), to="dlx")
                except dlx.errors.DlxError:
                    pass
            tensor = dlx.convert(bytearray(64), to="arrow")
            native.arrow_open(tensor, "__arrow_c_array__")
            tensor.__arrow_c_array__()

        for _ in range(100):
            once()
        gc.collect()
        before = resident()
        for _ in range(500):
            once()
        gc.collect()
        assert resident() - before < 2 << 20, "memory grew"
        assert not made.alive and native.live() == 0 and made.released["twice"] == 0
        """
    )


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [(1, -1), (1, 0), (3, 0)])
def test_host_memory_by_the_device_method(np, device):
    """The host reads plain and pinned host memory."""
    text, block = made.numbers(1, 2)
    obj = GivesDevice(schema(text), on_device(arrow_array(2, None, block), *device))
    result = dlx.convert(obj, to="numpy", copy=False)
    assert result.tolist() == [1, 2] and result.ctypes.data == block.buffer_info()[0]


def test_the_device_method_comes_first():
    """The device method is preferred: it never moves data between devices."""

    class Both(GivesDevice, Gives):
        pass

    obj = Both(schema("g"), on_device(arrow_array(2, None, 4096), 2, 1))
    tensor = dlx.convert(obj, to="dlx")
    assert tensor.device == dlx.Device("cuda:1") and tensor.readonly and tensor.data_ptr == 4096


def test_device_memory_is_not_read_by_the_host():
    """Counted nulls are accepted; unknown counts, bools and unknown events on a device are refused."""
    bools = GivesDevice(schema("b"), on_device(arrow_array(2, None, 4096), 2))
    with pytest.raises(errors.DeviceError, match="packed in device memory"):
        dlx.convert(bools, to="dlx")
    uncounted = GivesDevice(schema("g"), on_device(arrow_array(2, 4096, 4096, null_count=-1), 2))
    with pytest.raises(errors.ProtocolError, match="null count is -1"):
        dlx.convert(uncounted, to="dlx")
    counted = GivesDevice(schema("g"), on_device(arrow_array(2, 4096, 4096, null_count=1), 2))
    with pytest.raises(errors.LayoutError, match="it has 1 null"):
        dlx.convert(counted, to="dlx")
    wide = schema("+w:4", schema("c"))
    many = [
        arrow_array(1 << 60, None, children=[arrow_array(1 << 62, 4096, 4096, null_count=1 << 62)]) for _ in range(4)
    ]
    with pytest.raises(errors.ProtocolError, match="nulls do not fit 63 bits"):
        dlx.convert(GivesDeviceStream(stream(wide, [on_device(each, 2) for each in many], device=2)), to="dlx")
    for device, event in ((10, 4096), (3, 4096)):
        other = GivesDevice(schema("g"), on_device(arrow_array(2, None, 4096), device, 0, event))
        with pytest.raises(errors.StreamError, match="dlx cannot wait for its event"):
            dlx.convert(other, to="dlx")


@pytest.mark.parametrize("letter", ["i", "b"])
@pytest.mark.parametrize("events", [(4096, 4096), (0, 4096), (4096,)], ids=["two", "the second", "one"])
def test_nothing_is_copied_before_its_event(letter, events):
    """Chunks and bools of pinned memory with a pending event are not copied."""
    block = array.array("i", range(6))
    batches = [on_device(arrow_array(3, None, block), 3, 0, event) for event in events]
    with pytest.raises(errors.StreamError, match="dlx cannot wait for its event"):
        dlx.convert(GivesDeviceStream(stream(schema(letter), batches, device=3)), to="dlx")


@pytest.mark.parametrize("device", [(1, -1), (1, 0), (3, 0)])
def test_device_streams_of_the_host(np, device, released):
    """Device streams of host memory are read like other streams: one batch is shared, several are joined."""
    block = array.array("i", range(6))

    def obj(*parts):
        batches = [on_device(arrow_array(n, None, block, offset=at), *device) for n, at in parts]
        return GivesDeviceStream(stream(schema("i"), batches, device=device[0]))

    assert dlx.convert(obj((2, 0), (3, 3)), to="numpy").tolist() == [0, 1, 3, 4, 5]
    shared = dlx.convert(obj((0, 0), (2, 4)), to="numpy", copy=False)
    assert shared.tolist() == [4, 5] and shared.ctypes.data == block.buffer_info()[0] + 16
    assert dlx.convert(obj(), to="numpy", copy=False).shape == (0,)
    del shared
    assert released == {"array": 4, "schema": 3, "devicestream": 3}


def test_device_streams_of_device_memory():
    """One chunk is shared; several are joined on a CUDA device only, never across devices."""

    def obj(*batches, device=2, **fields):
        return GivesDeviceStream(stream(schema("g"), batches, device=device, **fields))

    def batch(n, device_id=1, device=2):
        return on_device(arrow_array(n, None, 4096 if n else None), device, device_id)

    tensor = dlx.convert(obj(batch(0), batch(2)), to="dlx")
    assert (tensor.device, tensor.data_ptr, tensor.shape) == (dlx.Device("cuda:1"), 4096, (2,))
    with pytest.raises(errors.DeviceError, match="2 chunks of device memory"):
        dlx.convert(obj(batch(1, device=10), batch(2, device=10), device=10), to="dlx")
    with pytest.raises(errors.CopyRequiredError, match="2 chunks"):
        dlx.convert(obj(batch(1), batch(2)), to="dlx", copy=False)
    steps = dlx.plan(obj(batch(1), batch(2)), to="dlx").steps
    assert [step.why for step in steps if step.do == "resolve"] == ["it consists of 2 chunks"]
    with pytest.raises(errors.ProtocolError, match="its batches are on several devices"):
        dlx.convert(obj(batch(1), batch(2, 0)), to="dlx")
    with pytest.raises(errors.ProtocolError, match="failed: lost the device"):
        dlx.convert(obj(batch(1), fails="lost the device"), to="dlx")
    with pytest.raises(errors.StreamError, match="dlx cannot wait for its event"):
        ready = on_device(arrow_array(2, None, 4096), 10, 1, 4096)
        dlx.convert(GivesDeviceStream(stream(schema("g"), [ready], device=10)), to="dlx")


def test_chunks_of_a_device_are_joined_after_their_events(cuda, released):
    """Chunks are joined on a stream of dlx after their events, and kept until the device is finished."""
    device, library, producers, events, addresses = dlx.Device("cuda:0"), cuda._lib, [], [], []
    for values in ([-1.0, 1.0, 2.0], [3.0, 4.0, 5.0]):
        producers.append(cuda.stream())
        addresses.append(cuda.alloc(24))
        events.append(ctypes.c_void_p())
        cuda.poke(addresses[-1], array.array("d", values))
        cuda.stall(producers[-1])
        with driver.at(device):
            cuda.write(producers[-1], addresses[-1], 24)
            assert library.cuEventCreate(ctypes.byref(events[-1]), 2) == 0
            assert library.cuEventRecord(events[-1], ctypes.c_void_p(producers[-1])) == 0
    batches = [
        on_device(arrow_array(2, None, addresses[0], offset=1), 2, 0, ctypes.addressof(events[0])),
        on_device(arrow_array(0, None, None), 2, 0),
        on_device(arrow_array(3, None, addresses[1]), 2, 0, ctypes.addressof(events[1])),
    ]
    cuda.clear_report()
    tensor = dlx.convert(GivesDeviceStream(stream(schema("g"), batches, device=2)), to="dlx")
    assert (tensor.shape, tensor.device, tensor.readonly) == ((5,), device, False)
    assert not cuda.races and not cuda.syncs, cuda.report
    assert driver.readiness_of(tensor) is not None
    dlx.release_pending()
    assert released["array"] == 0
    cuda.resume_all()
    assert array.array("d", cuda.peek(tensor.data_ptr, 40)).tolist() == [1, 2, 3, 4, 5]
    dlx.release_pending()
    assert released["array"] == 3
    del tensor
    with driver.at(device):
        for event in events:
            library.cuEventDestroy_v2(event)


@pytest.mark.parametrize("call", ["cuMemAllocFromPoolAsync", "cuStreamWaitEvent", "cuMemcpyAsync"])
def test_chunks_that_cannot_be_joined_are_released(cuda, released, call):
    """Failed joins release all chunks, for any error of the driver."""
    address = cuda.alloc(16)
    event = ctypes.c_void_p()
    with driver.at(dlx.Device("cuda:0")):
        assert cuda._lib.cuEventCreate(ctypes.byref(event), 2) == 0
    batches = [on_device(arrow_array(1, None, address, offset=i), 2, 0, ctypes.addressof(event)) for i in range(2)]
    cuda.fail(call, 2)
    with pytest.raises(errors.DlxError, match=call):
        dlx.convert(GivesDeviceStream(stream(schema("g"), batches, device=2)), to="dlx")
    dlx.release_pending()
    assert released["array"] == 2


def test_made_like_cudf(cuda):
    """The columns of a device table like cudf's are shared, and wait for its event."""
    event = ctypes.c_void_p()
    producer, address = cuda.stream(), cuda.alloc(1024)
    device = dlx.Device("cuda:0")
    library = cuda._lib
    with driver.at(device):
        assert library.cuEventCreate(ctypes.byref(event), 2) == 0
        assert library.cuEventRecord(event, ctypes.c_void_p(producer)) == 0
    columns = [arrow_array(64, None, address), arrow_array(64, None, address + 512)]
    kind = schema("+s", schema("g", name="x"), schema("l", name="y"))
    whole = on_device(arrow_array(64, None, children=columns), 2, 0, ctypes.addressof(event))
    result = dlx.convert(GivesDevice(kind, whole), to="dlx")
    assert {name: (each.data_ptr - address, each.device, each.readonly) for name, each in result.items()} == {
        "x": (0, device, True),
        "y": (512, device, True),
    }
    assert all(driver.readiness_of(each) is not None for each in result.values())
    result.clear()
    with driver.at(device):
        library.cuEventDestroy_v2(event)


def test_an_event_is_waited_for(cuda):
    """Consumers wait, on the device, for the event of the producer."""
    event = ctypes.c_void_p()
    producer, consumer, address = cuda.stream(), cuda.stream(), cuda.alloc(1024)
    device = dlx.Device("cuda:0")
    cuda.write(producer, address, 1024)
    library = cuda._lib
    with driver.at(device):
        assert library.cuEventCreate(ctypes.byref(event), 2) == 0
        assert library.cuEventRecord(event, ctypes.c_void_p(producer)) == 0
    obj = GivesDevice(schema("g"), on_device(arrow_array(128, None, address), 2, 0, ctypes.addressof(event)))
    tensor = dlx.convert(obj, to="dlx")
    assert cuda.read(consumer, address, 1024)  # nothing has waited yet
    cuda.clear_report()
    driver.wait(driver.readiness_of(tensor), Stream(device, consumer, None))
    assert not cuda.read(consumer, address, 1024)
    del tensor, obj
    with driver.at(device):
        library.cuEventDestroy_v2(event)


# ---- exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 16, 64, 65])
def test_tensors_give_packed_bools(n):
    """Bools are exported as a packed copy with zeros at the end, without an Arrow library."""
    block = bytearray(i % 3 % 2 for i in range(n))
    tensor = dlx.convert(memoryview(block).cast("?"), to="dlx")
    live = native.live()
    data = native.arrow_open(Pair(tensor.__arrow_c_array__()), "__arrow_c_array__")
    assert native.live() == live + 1
    _, shape, _, nulls, _, is_packed, address = native.arrow_column(data, -1)
    assert (shape, nulls, is_packed) == ((n,), 0, True)
    bits = ctypes.string_at(address, (n + 7) // 8) if n else b""
    assert int.from_bytes(bits, "little") == sum(value << i for i, value in enumerate(block))
    assert bytes(native.arrow_tensor(data, -1, True)) == block
    del data
    assert native.live() == live


@pytest.mark.parametrize("dtype", NUMBERS.values())
def test_tensors_give_their_memory(dtype):
    """A `dlx.Tensor` exports its own memory."""
    block = bytearray(64)
    tensor = native.tensor_new(
        ctypes.addressof(ctypes.c_char.from_buffer(block)), (3,), None, dlx.DType(dtype), (1, 0), 0, block
    )
    kind, data = tensor.__arrow_c_array__()
    again = dlx.convert(Pair((kind, data)), to="dlx")
    assert (again.dtype, again.shape, again.data_ptr) == (tensor.dtype, (3,), tensor.data_ptr)
    assert again.readonly and "arrow_schema" in repr(tensor.__arrow_c_schema__())


def test_dimensions_are_fixed_size_lists(np):
    """Each further dimension of a row-major array is a level of lists."""
    source = np.arange(24, dtype="int16").reshape(2, 3, 4)
    target = dlx.convert(source, to="arrow", copy=False)
    assert type(target) is dlx.Tensor and target.readonly and target.data_ptr == source.ctypes.data
    again = dlx.convert(Pair(target.__arrow_c_array__(requested_schema=None)), to="numpy", copy=False)
    assert again.tolist() == source.tolist() and again.ctypes.data == source.ctypes.data
    assert dlx.plan(source, to="arrow").outcome == "shared"
    turned = dlx.convert(source.transpose(), to="arrow")
    assert dlx.plan(source.transpose(), to="arrow").outcome == "copied" and turned.shape == (4, 3, 2)
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 3)):
        empty = dlx.convert(np.empty(shape), to="arrow")
        assert dlx.convert(Pair(empty.__arrow_c_array__()), to="numpy").shape == shape


def test_what_arrow_cannot_hold_is_refused(np):
    """Unsupported arrays are refused by the target, and by the method of other tensors."""
    with pytest.raises(errors.LayoutError, match="0 dimensions"):
        dlx.convert(np.array(1.0), to="arrow")
    with pytest.raises(errors.DTypeError, match="arrow has no dtype complex64"):
        dlx.convert(np.zeros(2, "complex64"), to="arrow")
    for source, error, words in (
        (np.arange(6)[::2], errors.CopyRequiredError, "row-major"),
        (np.array(1.0), errors.LayoutError, "0 dimensions"),
        (np.zeros(2, "complex64"), errors.DTypeError, "no type for DLPack type code 5"),
    ):
        tensor = dlx.convert(source, to="dlx", copy=False)
        with pytest.raises(error, match=words):
            tensor.__arrow_c_array__()
    tensor = native.tensor_new(4096, (2,), None, dlx.DType("int8"), (2, 0), 0, None)
    with pytest.raises(errors.DeviceError):
        tensor.__arrow_c_array__()
    tensor = dlx.convert(b"ab", to="dlx")
    for wrong in ({"args": (1, 2)}, {"args": (), "schema": 1}):
        with pytest.raises(TypeError, match="requested_schema"):
            tensor.__arrow_c_array__(*wrong.pop("args"), **wrong)


def test_capsules_that_nobody_uses_release_the_memory(np):
    """Unused capsules release the memory; used ones release nothing."""
    tensor = dlx.convert(np.arange(3), to="arrow")
    live = native.live()
    pair = tensor.__arrow_c_array__()
    assert native.live() == live + 1
    del pair
    assert native.live() == live
    pair = tensor.__arrow_c_array__()
    result = dlx.convert(Pair(pair), to="dlx")
    del pair
    assert values(result) == [0, 1, 2]


@pytest.mark.parametrize("shape", [(1, 2**31), (0, 2**31), (2, 1, 2**40)])
def test_extents_that_arrow_cannot_hold(shape):
    """Fixed-size lists have 32 bits, which the plan checks. The first extent has 64."""
    tensor = native.tensor_new(4096, shape, None, dlx.DType("int8"), (1, 0), 0, None)
    plan = dlx.plan(tensor, to="arrow")
    assert plan.outcome == "refused" and f"found an extent of {max(shape)}" in str(plan.error)
    with pytest.raises(errors.LayoutError, match="at most 2147483647 values"):
        dlx.convert(tensor, to="arrow")
    long = native.tensor_new(4096, (2**40, 3), None, dlx.DType("int8"), (1, 0), 0, None)
    assert dlx.convert(long, to="arrow").shape == (2**40, 3)


@pytest.mark.slow
def test_lies_do_not_end_the_process(python):
    """Every invalid number, pointer and text, and pairs of them, are refused or read correctly, without a crash."""
    assert "released twice: 0" in python(
        "import sys; sys.path[:0] = ['tests']; from support.foreign import lying_arrow; lying_arrow.run()"
    )


@pytest.mark.slow
def test_streams_that_lie(python):
    """Stream functions that return nothing, fail, or are removed during reading, including `release`, are handled."""
    out = python("import sys; sys.path[:0] = ['tests']; from support.foreign import lying_arrow; lying_arrow.streams()")
    assert int(out.split("streams:")[1]) > 200


@pytest.mark.parametrize(("levels", "width"), [(100, 2), (100, 100), (2, 10**4)])
def test_a_type_with_shared_children_is_read_once(python, levels, width):
    """A type with 2**100 paths to a hundred leaf types is refused quickly, by name."""
    python(
        f"""
        import sys; sys.path[:0] = ["tests"]
        import signal; signal.alarm(60)  # nothing else ends a loop in C
        from support.foreign import arrow
        import dlx
        for call in (dlx.convert, dlx.plan):
            kind = arrow.schema("+l", arrow.shared_types({levels}, {width}))
            try:
                plan = call(arrow.Gives(kind, arrow.arrow_array(0, None)), to="dlx")
                assert plan.outcome == "refused" and "no ragged arrays" in str(plan), plan
            except dlx.errors.LayoutError as error:
                assert "no ragged arrays" in str(error), error
        """
    )


def test_a_wide_type_is_read(np):
    """A table may have any number of columns."""
    block, n = array.array("i", range(4)), 20_000
    types = [schema("i", name=str(i)) for i in range(n)]
    arrays = [arrow_array(4, None, block) for _ in range(n)]
    result = dlx.convert(Gives(schema("+s", *types), arrow_array(4, None, children=arrays)), to="numpy")
    assert len(result) == n and result["19999"].tolist() == [0, 1, 2, 3]


def test_the_target_is_known(np):
    """The target is listed without its library, and creates dlx's Arrow object."""
    with pytest.raises(errors.AdapterNotFoundError, match="Use one of: arrow"):
        dlx.convert(np.arange(2), to="arow")
    assert dlx.convert({"a": np.arange(2)}, to="arrow")["a"].readonly


def test_a_class_that_is_no_key_is_described(np):
    """A class that cannot be a key, because of its metaclass, is described."""

    class Meta(type):
        __hash__ = None

        def __eq__(cls, other):
            return True

    class Series(metaclass=Meta):
        def __arrow_c_array__(self, requested_schema=None):
            return dlx.convert(np.arange(3), to="arrow").__arrow_c_array__()

    found = dlx.describe(Series())
    assert (found.shape, found.protocols) == ((3,), ("__arrow_c_array__",))
    assert dlx.plan(Series(), to="numpy").outcome == "shared"


def test_capsules_that_two_threads_take_at_once():
    """Of two threads, one gets the array and the other an error; nothing leaks or is released twice."""
    live = native.live()
    for _ in range(50):
        pair = Pair(dlx.convert(bytearray(8), to="dlx").__arrow_c_array__())
        found = at_once(*[lambda pair=pair: bytes(dlx.convert(pair, to="dlx"))] * 4)
        assert sorted(map(type, found), key=repr) == [bytes, *[errors.ConsumedError] * 3]
        assert bytes(8) in found
    del pair, found
    gc.collect()
    assert native.live() == live


# ---- leaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.unsanitized("the sanitizers replace the allocator")
def test_no_type_and_no_level_is_left_on_the_heap(python):
    """After a thousand calls, malloc has as many bytes in use as before, for every fate of the capsules.

    An Arrow struct is too small to show in the memory of the process. The types have 64 levels, each with a child.
    """
    python(
        """
        import ctypes, gc, sys
        sys.path[:0] = ["tests"]
        from support.foreign.arrow import _new as new_capsule
        from support.foreign.arrow import Pair
        import dlx
        from dlx._core import native

        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):
            sys.exit(0)  # glibc before 2.33, or no glibc

        class Info(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in
                        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "f", "k")]

        libc.mallinfo2.restype = Info
        block = bytearray(64)
        address = native.buffer_address(memoryview(block))
        new = lambda shape, dtype: native.tensor_new(address, shape, None, dlx.DType(dtype), (1, 0), 0, block)
        deep, flat, bools = new((1,) * 64, "int8"), new((3,), "int32"), new((1,) * 63 + (60,), "bool")
        wide, huge = new((1, 2**31), "int8"), new((1,) * 63 + (2**31,), "int8")
        odd = new((2,), "complex64")

        def refused(call):
            try:
                call()
            except dlx.errors.DlxError:
                return
            raise AssertionError("not refused")

        CALLS = {
            "schema": lambda: [each.__arrow_c_schema__() for each in (deep, flat, bools)],
            "array": lambda: [each.__arrow_c_array__() for each in (deep, flat, bools)],
            "taken": lambda: [native.arrow_open(Pair(each.__arrow_c_array__()), "__arrow_c_array__")
                              for each in (deep, flat, bools)],
            "read": lambda: [native.arrow_schema(native.arrow_open(Pair(each.__arrow_c_array__()), "__arrow_c_array__"))
                             for each in (deep, flat, bools)],
            "gathered": lambda: native.arrow_tensor(native.arrow_open(Pair(flat.__arrow_c_array__()),
                                                                      "__arrow_c_array__"), -1, True),
            "joined": lambda: native.arrow_join(Pair(bools.__arrow_c_array__())),
            "too long": lambda: [refused(each.__arrow_c_array__) for each in (wide, huge)],
            "no dtype": lambda: [refused(odd.__arrow_c_array__), refused(odd.__arrow_c_schema__)],
        }
        for name, call in CALLS.items():
            for _ in range(300):
                call()
            gc.collect()
            before, live = libc.mallinfo2().uordblks, native.live()
            for _ in range(1000):
                call()
            gc.collect()
            grown = libc.mallinfo2().uordblks - before
            assert grown < 16_000 and native.live() == live, (name, grown)
        """
    )


EXTENSION = {b"ARROW:extension:name": b"mylib.kind"}


def extended(levels, at, block):
    """Return (schema, array) of fixed-size lists over numbers; level `at` is an extension type."""
    kind = schema("i", metadata=EXTENSION if at == levels else None)
    data = arrow_array(2 * 2**levels, None, block)
    for level in reversed(range(levels)):
        kind = schema("+w:2", kind, name="x", metadata=EXTENSION if at == level else None)
        data = arrow_array(2 * 2**level, None, children=[data])
    return kind, data


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_an_extension_type_at_any_level_is_no_number(np, levels):
    """An extension type in an array, in chunks and in a table's columns is refused by name, in C and in Python."""
    block = array.array("i", range(64))
    for at in range(levels + 1):
        chunks = lambda: [extended(levels, at, block)[1] for _ in range(2)]  # noqa: B023, E731
        kind = lambda: extended(levels, at, block)[0]  # noqa: B023, E731
        for obj in (Gives(*extended(levels, at, block)), Streams(stream(kind(), chunks()))):
            with pytest.raises(errors.DTypeError, match=r"no counterpart of mylib\.kind"):
                dlx.convert(obj, to="numpy")
        assert native.arrow_join(Streams(stream(kind(), chunks()))) is None
        one, other = extended(levels, at, block), (schema("i", name="plain"), arrow_array(2, None, block))
        table = Gives(schema("+s", one[0], other[0]), arrow_array(2, None, children=[one[1], other[1]]))
        assert native.arrow_columns("__arrow_c_array__", table, True)[0] is None
        made.alive.clear()
    right = Streams(stream(extended(levels, -1, block)[0], [extended(levels, -1, block)[1] for _ in range(2)]))
    assert native.arrow_join(right).shape == (4, *(2,) * levels)
    made.alive.clear()
