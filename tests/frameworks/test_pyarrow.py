"""pyarrow as source and target: numbers are shared, bools and chunks copied, other types refused by name."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry

pa = pytest.importorskip("pyarrow")

NUMBERS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def counted(dtype, n=6):
    """Return an Array of 0, 1, 2, ..."""
    return pa.array(range(n), pa.int64()).cast(getattr(pa, dtype)())


def lists(values, size, kind=None):
    """Return an array of fixed-size lists."""
    return pa.array(values, pa.list_(kind or pa.int32(), size))


def tensors(values, shape, order=None):
    """Return an array of fixed-shape tensors."""
    kind = pa.fixed_shape_tensor(pa.int32(), shape, permutation=order)
    return pa.ExtensionArray.from_storage(kind, lists(values, len(values[0])))


def address(array):
    """Return the address of an Array's first number."""
    return array.buffers()[1].address + array.offset * array.type.bit_width // 8


def values(result):
    """Return the values of a result as nested lists."""
    return dlx.convert(result, to="numpy").tolist()


# ---- out of pyarrow: shared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_are_shared_and_read_only(np, dtype):
    """Every primitive type is shared, including slices, and read-only."""
    source = counted(dtype)
    for array in (source, source[2:], source[1:1], source[5:]):
        result = dlx.convert(array, to="numpy", copy=False)
        assert result.tolist() == array.to_pylist() and str(result.dtype) == dtype
        assert dlx.plan(array, to="numpy").outcome == "shared"
        if len(array):
            assert not result.flags.writeable
            assert result.ctypes.data == address(array) == dlx.describe(array).address
    info = dlx.describe(source[2:])
    assert (info.shape, info.strides, info.readonly, info.dtype) == ((4,), (1,), True, dlx.DType(dtype))
    assert info.nbytes == 4 * source.type.bit_width // 8


@pytest.mark.parametrize("dtype", NUMBERS)
def test_the_fast_path_says_what_arrow_says(dtype):
    """Both paths return the tensor of the Arrow interface, for every kind of capsule."""
    source = counted(dtype)
    for array in (source, source[2:], source[1:1], source[5:], pa.chunked_array([source])):
        method = "__arrow_c_array__" if isinstance(array, pa.Array) else "__arrow_c_stream__"
        told = native.arrow_tensor(native.arrow_open(array, method), -1, False)
        for tensor in (dlx.convert(array, to="dlx", copy=False), dlx.convert.__wrapped__(array, to="dlx", copy=False)):
            assert (tensor.shape, tensor.strides, tensor.dtype) == (told.shape, told.strides, told.dtype)
            assert (tensor.device, tensor.readonly, tensor.data_ptr) == (told.device, True, told.data_ptr)
    with pytest.raises(errors.LayoutError, match="1 null"):
        dlx.convert(pa.array([0, None], source.type), to="dlx")


def test_torch_gets_a_copy(torch):
    """Torch tensors are writable, and arrow arrays must not change: they are copied."""
    source = counted("int32")
    dlx.convert(source, to="torch").fill_(9)
    assert source.to_pylist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(errors.ReadOnlyError, match="read-only"):
        dlx.convert(source, to="torch", copy=False)


def test_one_chunk_is_shared(np):
    """A ChunkedArray of one chunk is that chunk; without chunks it is empty."""
    chunk = counted("int32")[1:]
    result = dlx.convert(pa.chunked_array([chunk]), to="numpy", copy=False)
    assert result.tolist() == [1, 2, 3, 4, 5] and result.ctypes.data == address(chunk)
    for empty in (pa.chunked_array([], pa.int32()), pa.chunked_array([chunk[:0], chunk[:0]])):
        result = dlx.convert(empty, to="numpy")
        assert result.shape == (0,) and result.dtype == "int32"


def test_fixed_size_lists_are_dimensions(np):
    """Each level of fixed-size lists is a dimension, and shared."""
    source = lists([[1, 2], [3, 4], [5, 6]], 2)
    result = dlx.convert(source[1:], to="numpy", copy=False)
    assert result.tolist() == [[3, 4], [5, 6]] and result.ctypes.data == address(source.values) + 8
    nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.int8(), 2), 2))
    assert dlx.convert(nested[1:], to="numpy", copy=False).tolist() == [[[5, 6], [7, 8]]]
    assert dlx.convert(nested[1:].flatten()[1:], to="numpy", copy=False).tolist() == [[7, 8]]
    assert dlx.convert(lists([[], []], 0), to="numpy").shape == (2, 0)
    assert dlx.convert(lists([], 3), to="numpy").shape == (0, 3)


@pytest.mark.parametrize("order", [None, [0, 1], [1, 0]])
def test_fixed_shape_tensors_are_dimensions(np, order):
    """An array of tensors is one tensor with pyarrow's order of dimensions."""
    source = tensors([list(range(6)), list(range(6, 12))], [2, 3], order)
    for array in (source, source[1:]):
        result = dlx.convert(array, to="numpy", copy=False)
        assert result.tolist() == array.to_tensor().to_numpy().tolist() and not result.flags.writeable
        info = dlx.describe(array)
        assert (info.shape, info.strides) == (result.shape, tuple(step // 4 for step in result.strides))
        assert info.address == result.ctypes.data == address(array.storage.flatten())


@pytest.mark.parametrize("readonly", [False, True])
def test_tensors_are_shared(np, readonly):
    """A Tensor is shared with any strides, and keeps its read-only flag."""
    source = np.arange(12.0).reshape(3, 4)[:, ::2]
    source.flags.writeable = not readonly
    tensor = pa.Tensor.from_numpy(source)
    result = dlx.convert(tensor, to="numpy", copy=False)
    assert result.tolist() == source.tolist() and result.strides == source.strides
    assert result.ctypes.data == source.ctypes.data and result.flags.writeable is not readonly
    assert dlx.describe(tensor).readonly is readonly and dlx.plan(tensor, to="numpy").outcome == "shared"


# ---- out of pyarrow: reported copies ---------------------------------------------------------------------------------


def test_several_chunks_are_combined(np):
    """Chunks are joined with one copy, which the plan reports and copy=False refuses."""
    source = pa.chunked_array([counted("int32"), counted("int32")[4:]])
    result = dlx.convert(source, to="numpy")
    assert result.tolist() == [0, 1, 2, 3, 4, 5, 4, 5] and result.flags.writeable
    plan = dlx.plan(source, to="numpy")
    assert (plan.outcome, plan.nbytes) == ("copied", 32) and "2 chunks" in plan.steps[0].why
    with pytest.raises(errors.CopyRequiredError, match="it consists of 2 chunks"):
        dlx.convert(source, to="numpy", copy=False)
    pairs = pa.chunked_array([lists([[1, 2]], 2), lists([[3, 4], [5, 6]], 2)])
    assert dlx.convert(pairs, to="numpy").tolist() == [[1, 2], [3, 4], [5, 6]]
    blocks = pa.chunked_array([tensors([[1, 2, 3, 4]], [2, 2], [1, 0])] * 2)
    assert dlx.convert(blocks, to="numpy").tolist() == [[[1, 3], [2, 4]]] * 2


def test_bools_are_unpacked(np):
    """Packed bools are unpacked with one copy."""
    whole = [i % 3 == 0 for i in range(21)]
    for source in (
        pa.array(whole),
        pa.array(whole)[3:],
        pa.chunked_array([whole[:5], whole[5:]]),
        pa.chunked_array([whole])[9:],
        pa.chunked_array([], pa.bool_()),
        lists([[True, False, True]] * 7, 3, pa.bool_())[2:],
    ):
        result = dlx.convert(source, to="numpy")
        assert result.dtype == bool and result.tolist() == source.to_pylist()
        plan = dlx.plan(source, to="numpy")
        assert plan.outcome == "copied" and plan.nbytes == result.size and plan.source.dtype == dlx.DType("bool")
        if not len(source):
            continue
        with pytest.raises(errors.CopyRequiredError, match="packed eight to a byte"):
            dlx.convert(source, to="numpy", copy=False)


# ---- out of pyarrow: refused -----------------------------------------------------------------------------------------


NULLS = {
    "array": (lambda: pa.array([1, None, None]), 2),
    "slice": (lambda: pa.array([1, None, None])[2:], 1),
    "bools": (lambda: pa.array([True, None]), 1),
    "chunks": (lambda: pa.chunked_array([[1, None], [None, 2], [3]]), 2),
    "lists": (lambda: pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), 1),
    "inside of lists": (lambda: pa.array([[1, None], [None, 2]], pa.list_(pa.int32(), 2)), 2),
    "inside of tensors": (lambda: tensors([[1, None], [None, None]], [2]), 3),
    "inside of chunks": (lambda: pa.chunked_array([lists([[1, 2]], 2), lists([[1, None]], 2)]), 1),
}


@pytest.mark.parametrize("target", ["numpy", "torch", "dlx", "pyarrow.Tensor"])
@pytest.mark.parametrize("kind", NULLS)
def test_nulls_are_refused_with_their_count(kind, target):
    """Nulls are refused with their number and a fix."""
    pytest.importorskip(target.partition(".")[0])
    make, count = NULLS[kind]
    to = pa.Tensor if target == "pyarrow.Tensor" else target
    with pytest.raises(errors.LayoutError, match=f"it has {count} nulls?, ") as caught:
        dlx.convert(make(), to=to)
    assert ".fill_null(value)" in caught.value.fix
    assert str(dlx.plan(make(), to=to).error) == str(caught.value)


def test_a_slice_without_nulls_is_shared(np):
    """Nulls outside of the slice are ignored."""
    source = pa.array([1, None, 3, 4])[2:]
    assert dlx.convert(source, to="numpy", copy=False).tolist() == [3, 4]


def test_defect_nulls_inside_of_tensors_get_out(np):
    """Pyarrow exports a number for a null inside a tensor."""
    source = tensors([[1, None]], [2])
    try:
        given = dlx.convert(source.__dlpack__(max_version=(1, 0)), to="numpy").tolist()
    except (pa.ArrowException, AttributeError, TypeError):
        pytest.skip("this pyarrow refuses")
    assert given[0][0] == 1 and given[0][1] is not None


def run_end_encoded():
    """Return a run-end encoded array."""
    return pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([1.0]))


def union():
    """Return a union array."""
    return pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array([1.0, 2.0])])


REFUSED = {
    "timestamp": (lambda: pa.array([1], pa.timestamp("s")), "no dates", ".cast('int64')"),
    "date32": (lambda: pa.array([1], pa.date32()), "no dates", ".cast('int32')"),
    "time64": (lambda: pa.array([1], pa.time64("us")), "no dates", ".cast('int64')"),
    "duration": (lambda: pa.array([1], pa.duration("s")), "no dates", ".cast('int64')"),
    "interval": (lambda: pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "no dates", "separately"),
    "decimal": (lambda: pa.array([1], pa.decimal128(5)), "no decimals", ".cast('float64')"),
    "string": (lambda: pa.array(["a"]), "no text", ".dictionary_encode().indices"),
    "large string": (lambda: pa.array(["a"], pa.large_string()), "no text", ".dictionary_encode().indices"),
    "binary": (lambda: pa.array([b"a"]), "raw bytes", ".dictionary_encode().indices"),
    "fixed binary": (lambda: pa.array([b"a"], pa.binary(1)), "raw bytes", ".dictionary_encode().indices"),
    "dictionary": (lambda: pa.array(["a"]).dictionary_encode(), "dictionary array", ".indices"),
    "runs": (run_end_encoded, "run-end encoded", "run_end_decode"),
    "list view": (lambda: pa.array([[1]], pa.list_view(pa.int64())), "vary in length", ".flatten()"),
    "map": (lambda: pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8())), "vary in length", ".keys, .items"),
    "union": (union, "no unions", ".field(0)"),
    "struct": (lambda: pa.array([{"a": 1}]), "no structures", "its .flatten()[0]"),
    "null": (lambda: pa.nulls(2), "only nulls", ".fill_null(value)"),
    "no nulls": (lambda: pa.nulls(0), "only nulls", ".fill_null(value)"),
    "lists of text": (lambda: lists([["a"]], 1, pa.string()), "no text", ".flatten().dictionary_encode().indices"),
    "chunks of text": (lambda: pa.chunked_array([["a"], ["b"]]), "no text", ".combine_chunks().dictionary_encode()"),
}


@pytest.mark.parametrize("target", ["numpy", "dlx"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_number_is_refused(kind, target):
    """Other types are refused by name with a fix, described, planned, and unchanged inside pyarrow."""
    pytest.importorskip(target)
    make, reason, fix = REFUSED[kind]
    source = make()
    with pytest.raises(errors.DTypeError, match=reason) as caught:
        dlx.convert(source, to=target)
    assert fix in caught.value.fix and str(source.type) in str(caught.value)
    assert str(dlx.plan(source, to=target).error) == str(caught.value)
    assert dlx.describe(source).shape[0] == len(source) and dlx.describe(source).dtype is None
    assert dlx.convert(source, to="pyarrow") is source


def test_what_the_fixes_say_works(np):
    """The calls in the fixes lead to an array."""
    import pyarrow.compute as compute

    numbers = {
        "timestamp": lambda x: x.view("int64"),
        "date32": lambda x: x.view("int32"),
        "decimal": lambda x: x.cast("float64"),
        "dictionary": lambda x: x.indices,
        "runs": compute.run_end_decode,
        "list view": lambda x: x.flatten(),
        "union": lambda x: x.field(1),
        "struct": lambda x: x.flatten()[0],
        "null": lambda x: x.cast("int8").fill_null(1),
    }
    for kind, resolution in numbers.items():
        assert dlx.convert(resolution(REFUSED[kind][0]()), to="numpy").ndim == 1
    assert dlx.convert(pa.array([1, None]).fill_null(0), to="numpy").tolist() == [1, 0]
    assert dlx.convert(pa.array([1, None]).drop_null(), to="numpy").tolist() == [1]


def test_the_fixes_of_nested_types_lose_no_rows(np):
    """The field of a structure keeps its nulls; the offsets of sliced lists fit the values that are named with them."""
    structs = pa.StructArray.from_arrays([pa.array([1, 2])], ["a"], mask=pa.array([False, True]))
    pairs = pa.array([[[1], [2, 3]], [[4], []], [[5, 6], [7]]], pa.list_(pa.list_(pa.int32()), 2))[1:]
    for source in (structs, pa.chunked_array([structs])):
        with pytest.raises(errors.DTypeError) as caught:
            dlx.convert(source, to="numpy")
        assert ".flatten()[0]" in caught.value.fix and source.flatten()[0].null_count == 1
    with pytest.raises(errors.DTypeError) as caught:
        dlx.convert(pairs, to="numpy")
    assert "convert .flatten().values and .flatten().offsets" in caught.value.fix
    items, offsets = (dlx.convert(each, to="numpy") for each in (pairs.flatten().values, pairs.flatten().offsets))
    rows = [items[i:j].tolist() for i, j in itertools.pairwise(offsets)]
    assert rows == [[4], [], [5, 6], [7]]


def test_extension_types_are_refused(np):
    """Extension types differ from their storage, which the user can convert explicitly."""
    kind = pa.bool8() if hasattr(pa, "bool8") else pytest.skip("no bool8")
    source = pa.ExtensionArray.from_storage(kind, pa.array([1, 0, 2], pa.int8()))
    with pytest.raises(errors.DTypeError, match="no counterpart") as caught:
        dlx.convert(source, to="numpy")
    assert ".storage" in caught.value.fix
    assert dlx.convert(source.storage, to="numpy", copy=False).tolist() == [1, 0, 2]


def test_sparse_tensors_are_refused(np):
    """The fix of sparse tensors makes them dense."""
    dense = np.eye(2)
    for kind in (pa.SparseCOOTensor, pa.SparseCSRMatrix, pa.SparseCSCMatrix, pa.SparseCSFTensor):
        source = kind.from_dense_numpy(dense)
        with pytest.raises(errors.LayoutError, match="sparse") as caught:
            dlx.convert(source, to="numpy")
        assert ".to_tensor()" in caught.value.fix
        assert values(source.to_tensor()) == dense.tolist()


# ---- into pyarrow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
def test_one_dimension_is_an_array(np, dtype):
    """One compact dimension becomes an Array over the same memory."""
    source = np.arange(9).astype(dtype)[2:]
    result = dlx.convert(source, to="pyarrow", copy=False)
    assert isinstance(result, pa.Array) and result.type == getattr(pa, dtype)()
    assert result.to_pylist() == source.tolist() and address(result) == source.ctypes.data
    result.validate(full=True)
    plan = dlx.plan(source, to="pyarrow")
    assert plan.outcome == "shared" and "do not write to the source" in plan.steps[0].why
    assert result.null_count == 0 and not result.buffers()[1].is_mutable


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("layout", ["C", "F", "gaps", "broadcast", "0-d", "size 1"])
def test_other_dimensions_are_tensors(np, layout, readonly):
    """Other numbers of dimensions become a Tensor with the same strides and read-only flag."""
    base = np.arange(12, dtype="int32").reshape(3, 4)
    source = {
        "C": base,
        "F": np.asfortranarray(base),
        "gaps": base[:, ::2],
        "broadcast": np.broadcast_to(base[:1], (3, 4)),
        "0-d": base[1, 1, ...],
        "size 1": base[::-1][:1][::-1],
    }[layout]
    if readonly or layout == "broadcast":
        source.flags.writeable = False
    result = dlx.convert(source, to="pyarrow", copy=False)
    assert type(result) is pa.Tensor and result.shape == source.shape
    assert result.to_numpy().tolist() == source.tolist() and result.is_mutable == source.flags.writeable
    assert result.to_numpy().ctypes.data == source.ctypes.data
    assert dlx.plan(source, to="pyarrow").steps == ()


def test_layouts_that_pyarrow_cannot_hold_are_copied(np):
    """Negative strides, and gaps in one dimension, are copied, or refused with the strides."""
    base = np.arange(12, dtype="int32").reshape(3, 4)
    for source in (base[::-1], base[:, 0], base[0, ::-1], np.broadcast_to(base[0, 0], (3,))):
        result = dlx.convert(source, to="pyarrow")
        assert values(result) == source.tolist() and isinstance(result, pa.Array) is (source.ndim == 1)
        assert dlx.plan(source, to="pyarrow").outcome == "copied"
        with pytest.raises(errors.CopyRequiredError, match="pyarrow arrays cannot have"):
            dlx.convert(source, to="pyarrow", copy=False)
    unaligned = np.zeros(17, "uint8")[1:].view("int32")
    result = dlx.convert(unaligned, to="pyarrow")
    assert address(result) % 4 == 0 and result.to_pylist() == [0] * 4


def test_the_type_may_be_asked_for(np):
    """to=pyarrow.Array and to=pyarrow.Tensor return that type, or raise."""
    line, square = np.arange(4.0), np.arange(4.0).reshape(2, 2)
    assert isinstance(dlx.convert(line, to=pa.Array, copy=False), pa.Array)
    assert isinstance(dlx.convert(line[::2], to=pa.Tensor, copy=False), pa.Tensor)
    assert isinstance(dlx.convert(square, to=pa.Tensor, copy=False), pa.Tensor)
    with pytest.raises(errors.LayoutError, match=r"pyarrow\.Array cannot hold 2 dimensions"):
        dlx.convert(square, to=pa.Array)
    with pytest.raises(errors.AdapterNotFoundError, match="cannot be a target"):
        dlx.convert(line, to=pa.ChunkedArray)
    array = counted("int32")
    assert dlx.convert(array, to=pa.Array) is array
    other = dlx.convert(array, to=pa.Tensor, copy=False)
    assert type(other) is pa.Tensor and not other.is_mutable
    again = dlx.convert(other, to=pa.Array, copy=False)
    assert again.equals(array) and address(again) == address(array)
    assert dlx.convert(pa.chunked_array([array]), to=pa.Array, copy=False).equals(array)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_arrays_without_elements(np, shape):
    """Empty arrays convert with any strides."""
    source = np.empty(shape, "int16")[::-1]
    result = dlx.convert(source, to="pyarrow", copy=False)
    assert values(result) == source.tolist() and dlx.describe(result).shape == shape
    assert dlx.describe(result).dtype == dlx.DType("int16")


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16", "float8_e4m3fn", "int4", "float32x4", "complex32"])
def test_dtypes_that_pyarrow_lacks(dtype):
    """Unsupported dtypes are refused by name before pyarrow is called."""
    block = dlx.convert(bytearray(64), to="dlx", copy=True)
    source = native.tensor_new(block.data_ptr, (2,), None, dlx.DType(dtype), (1, 0), 0, block)
    with pytest.raises(errors.DTypeError, match=f"pyarrow has no dtype {dtype}"):
        dlx.convert(source, to="pyarrow")


def bools(np, n, seed=5):
    """Return n random numpy bools."""
    return np.random.default_rng(seed).random(n) > 0.5


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
@pytest.mark.parametrize("to", ["pyarrow", "Array"])
def test_bools_are_packed(np, to, n):
    """Bools are packed with a copy; padding bits are zero, and later writes to the source have no effect."""
    to = getattr(pa, to, to)
    for cut in (slice(None), slice(3, None), slice(None, None, 2), slice(None, None, -1)):
        source = bools(np, n)[cut]
        result, expected = dlx.convert(source, to=to), source.tolist()
        source[:] = ~source
        assert type(result) is pa.BooleanArray and result.to_pylist() == expected and result.null_count == 0
        result.validate(full=True)
        packed = np.packbits(np.array(expected, bool), bitorder="little").tobytes()
        assert not expected or result.buffers()[1].to_pybytes()[: len(packed)] == packed
        assert dlx.convert(result, to="numpy").tolist() == expected


@pytest.mark.parametrize("to", ["pyarrow", "Array", "arrow"])
@pytest.mark.parametrize("source", ["numpy", "torch", "dlx", "jax"])
def test_packing_is_a_copy_that_the_plan_reports(np, source, to):
    """The first call, later calls, trees and views report the copy; copy=False refuses each."""
    if source in ("torch", "jax"):
        pytest.importorskip(source)
    to = getattr(pa, to, to)
    for _ in range(3):
        array = dlx.convert(bools(np, 11), to=source)
        plan = dlx.plan(array, to=to)
        assert plan.outcome == "copied" and "packs bools eight to a byte" in plan.steps[-1].why
        assert plan.nbytes == 11 and len(plan.steps) == 1
        assert dlx.plan([array], to=to).leaves[0].outcome == "copied"
        assert dlx.plan(array, to=to, copy=False).outcome == "refused"
        for obj, options in ((array, {}), ([array], {}), ([array], {"lazy": True})):
            with pytest.raises(errors.CopyRequiredError, match="packs bools eight to a byte"):
                dlx.convert(obj, to=to, copy=False, **options)[0]
        for options in ({}, {"copy": True}):
            result = dlx.convert(array, to=to, **options)
            assert pa.array(result).to_pylist() == bools(np, 11).tolist()


def test_packed_bools_in_containers(np):
    """Bools are packed in trees, views, columns and stacks."""
    array = bools(np, 20)
    expected = array.tolist()
    assert dlx.convert({"a": [array, array]}, to="pyarrow")["a"][1].to_pylist() == expected
    view = dlx.convert({"a": array}, to="pyarrow", lazy=True)
    assert view["a"].to_pylist() == expected and view.materialize()["a"].to_pylist() == expected
    table = pa.table({"x": [1, 2], "flag": [True, False]})
    columns = dlx.convert(dlx.convert(table, to="numpy"), to="pyarrow")
    assert columns["flag"].to_pylist() == [True, False] and columns["x"].to_pylist() == [1, 2]
    assert dlx.stack([np.array(True), np.array(False)], to="pyarrow").to_pylist() == [True, False]
    assert dlx.stack([array, array], to="arrow").shape == (2, 20)
    assert pa.array(dlx.stack([array, array], to="arrow")).to_pylist() == [expected] * 2


def test_bools_of_the_array_interface_are_packed(np):
    """A `dlx.Tensor` packs its bools for Arrow consumers: any rank, and any byte except 0 is true."""
    source = bools(np, 60).reshape(3, 4, 5)
    for tensor in (dlx.convert(source, to="dlx", copy=False), dlx.convert(source, to="arrow")):
        result = pa.array(tensor)
        result.validate(full=True)
        assert result.to_pylist() == source.tolist()
        assert result.flatten().flatten().buffers()[1].size == 8
    odd = np.array([0, 1, 2, 255, 0, 128, 0, 0, 7], "uint8").view(bool)
    assert pa.array(dlx.convert(odd, to="dlx")).to_pylist() == [x != 0 for x in odd.view("uint8").tolist()]
    kept = dlx.convert(source, to="arrow")
    before = source.tolist()
    source[:] = ~source
    assert pa.array(kept).to_pylist() == before and dlx.convert(kept, to="numpy").tolist() == before


@pytest.mark.parametrize("to", ["pyarrow", "Tensor"])
def test_tensors_of_bools_are_refused(np, to):
    """pyarrow.Tensor has no bools; the fix works."""
    source, to = np.array([[True, False]]), getattr(pa, to, to)
    with pytest.raises(errors.DTypeError, match=r"pyarrow\.Tensor has no bools") as caught:
        dlx.convert(source, to=to)
    assert str(dlx.plan(source, to=to).error) == str(caught.value) and "as uint8" in caught.value.fix
    assert values(dlx.convert(source.view("uint8"), to=to, copy=False)) == [[1, 0]]
    assert dlx.convert(source.reshape(-1), to="pyarrow").to_pylist() == [True, False]


def test_copy_true_is_memory_of_its_own(np):
    """Later writes to the source do not change a copy."""
    for source in (np.arange(4), np.arange(4).reshape(2, 2)):
        result, before = dlx.convert(source, to="pyarrow", copy=True), source.tolist()
        source[...] = 9
        assert values(result) == before


# ---- inside pyarrow, words, lifetime ---------------------------------------------------------------------------------


def test_pyarrow_stays_itself(np):
    """A pyarrow array is the result itself; copy=True copies it."""
    for source in (counted("int8"), pa.array(["a"]), pa.chunked_array([[1], [2]]), pa.Tensor.from_numpy(np.eye(2))):
        assert dlx.convert(source, to="pyarrow") is source and dlx.plan(source, to="pyarrow").outcome == "same"
        assert dlx.convert(source, to=pa, copy=False, readonly="error") is source
    source = counted("int8")
    copied = dlx.convert(source, to="pyarrow", copy=True)
    assert copied.equals(source) and address(copied) != address(source)


def test_names_of_pyarrow(np):
    """The name, the package and like= are the same target."""
    for to in ("pyarrow", pa):
        assert isinstance(dlx.convert(np.zeros(2), to=to), pa.Array)
    for like in (counted("int8"), pa.chunked_array([[1]])):
        assert isinstance(dlx.convert(np.zeros(2), like=like), pa.Array)
    assert type(dlx.convert(np.zeros((2, 2)), like=pa.Tensor.from_numpy(np.eye(2)))) is pa.Tensor


def test_dtypes_and_devices_both_ways():
    """Every dtype of the adapter exists in pyarrow, in both directions; only the host is a device."""
    adapter = registry.target("pyarrow").adapter
    dtypes, devices = adapter.dtypes, adapter.devices
    for name in dtypes.names:
        kind = dtypes.to_native(dlx.DType(name))
        assert kind == getattr(pa, dtypes.names[name])() and dtypes.from_native(kind) == dlx.DType(name)
    assert dtypes.from_native(pa.string()) is None
    assert devices.from_native(devices.to_native(dlx.Device("cpu"))) == (1, 0)
    with pytest.raises(errors.DeviceError, match="supports only host memory, not cuda"):
        devices.to_native(dlx.Device("cuda"))


def test_memory_lives_as_long_as_it_is_used(np):
    """The memory lives exactly as long as its users, in both directions."""
    live = native.live()
    for shape in ((6,), (2, 3)):
        base = np.arange(6.0)
        alive = weakref.ref(base)
        result = dlx.convert(base.reshape(shape), to="pyarrow", copy=False)
        del base
        gc.collect()
        part = result[2:] if isinstance(result, pa.Array) else result
        del result
        assert alive() is not None and values(part)[-1] in (5.0, [3.0, 4.0, 5.0])
        del part
        gc.collect()
        assert alive() is None and native.live() == live
    before = pa.total_allocated_bytes()
    source = pa.array(range(100_000), pa.int64())
    result = dlx.convert(source, to="numpy")
    combined = dlx.convert(pa.chunked_array([source, source]), to="numpy")
    del source
    assert result[99_999] == combined[199_999] == 99_999 and pa.total_allocated_bytes() >= before + 800_000
    del result, combined
    assert pa.total_allocated_bytes() == before and native.live() == live


def test_results_live_at_exit(python):
    """Arrays that are alive at the interpreter's exit do no harm."""
    pytest.importorskip("numpy")
    out = python(
        """
        import numpy as np, pyarrow as pa, dlx
        kept = [dlx.convert(np.arange(6.0), to="pyarrow"), dlx.convert(np.eye(2), to="pyarrow")]
        kept += [dlx.convert(pa.array([1, 2]), to="numpy"), kept]
        print("done")
        """,
        args=(),
    )
    assert out == "done\n"


def test_pyarrow_without_numpy(python):
    """Numpy is not necessary, unless pyarrow needs it."""
    if registry.target("pyarrow").adapter.lowered.get("tensors_by"):
        pytest.skip("this pyarrow needs numpy")
    out = python(
        """
        import sys
        sys.modules["numpy"] = None
        import dlx, pyarrow as pa
        print(bytes(dlx.convert(pa.array([1, 2], pa.uint8()), to="dlx")), end=" ")
        print(dlx.convert(pa.array([True, False]), to="dlx"), end=" ")
        print(dlx.convert(bytearray(b"abc"), to="pyarrow").to_pylist(), end=" ")
        print(dlx.convert(memoryview(bytearray(4)).cast("B", (2, 2)), to="pyarrow").shape)
        """,
        args=(),
    )
    assert out == "b'\\x01\\x02' dlx.Tensor(bool[2], cpu, [True, False]) [97, 98, 99] (2, 2)\n"


def test_an_array_has_one_dimension(np):
    """pyarrow.Array has exactly one dimension; the plan says so."""
    for shape in ((), (1, 1)):
        with pytest.raises(errors.LayoutError, match=f"cannot hold {len(shape)} dimensions"):
            dlx.convert(np.zeros(shape, "f4"), to=pa.Array)
        assert type(dlx.plan(np.zeros(shape, "f4"), to=pa.Array).error) is errors.LayoutError


class Unhashable(pa.ExtensionType):
    """A user's type with __eq__, and therefore without __hash__."""

    def __init__(self):
        super().__init__(pa.int32(), "dlx.unhashable")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls()

    def __eq__(self, other):
        return isinstance(other, Unhashable)

    __hash__ = None


def test_extension_types_are_refused_by_name():
    """Only the storage of a user's type matters."""
    source = pa.ExtensionArray.from_storage(Unhashable(), pa.array([1, 2], pa.int32()))
    with pytest.raises(errors.DTypeError, match=r"Convert its \.storage"):
        dlx.convert(source, to="dlx")
    assert dlx.describe(source).dtype is None
    assert dlx.convert(source.storage, to="dlx").shape == (2,)


def test_nulls_inside_of_lists_are_filled_inside():
    """The fix fills nulls at inner levels."""
    source = pa.array([[1, None]], pa.list_(pa.int32(), 2))
    with pytest.raises(errors.LayoutError, match=r"\.flatten\(\)\.fill_null"):
        dlx.convert(source, to="dlx")
    assert dlx.convert(source.flatten().fill_null(0), to="dlx").shape == (2,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pa.array([1, None, 3]),
        lambda: pa.array(["a", "b"]),
        lambda: pa.array([True, False]),
        lambda: pa.chunked_array([[1.0], [2.0]]),
        lambda: pa.array([[1, 2]], pa.list_(pa.int32(), 2)),
    ],
)
def test_copies_inside_of_pyarrow_are_pyarrows_own(make):
    """copy=True returns the same kind of array with the same contents, in other memory."""
    source = make()
    result = dlx.convert(source, to="pyarrow", copy=True)
    assert result.equals(source) and result.type == source.type and type(result) is type(source)
    buffers = [chunk.buffers()[-1].address for chunk in getattr(source, "chunks", [source])]
    assert [chunk.buffers()[-1].address for chunk in getattr(result, "chunks", [result])] != buffers
    assert dlx.plan(source, to="pyarrow", copy=True).outcome == "copied"


def test_memory_of_what_cannot_cross_is_compared(np):
    """Shared memory is detected even for bools and nulls, which convert only by a copy or not at all."""
    bools, nulls = pa.array([True, False]), pa.array([1.0, None])
    assert dlx.shares_memory(bools, bools) and dlx.shares_memory(nulls, nulls)
    assert not dlx.shares_memory(nulls, np.zeros(4))


@pytest.mark.parametrize("names", [None, ["rows", "columns"]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_copy_of_a_tensor_keeps_the_names_of_its_dimensions(np, names, order):
    """copy=True inside pyarrow keeps names, memory order and values, at the root and in a tree."""
    source = pa.Tensor.from_numpy(np.asarray(np.arange(6.0).reshape(2, 3), order=order), dim_names=names)
    for copy in (dlx.convert(source, to="pyarrow", copy=True), dlx.convert([source], to=pa.Tensor, copy=True)[0]):
        assert copy is not source and copy.dim_names == source.dim_names and copy.strides == source.strides
        assert values(copy) == values(source) and copy.equals(source)
        assert copy.to_numpy().ctypes.data != source.to_numpy().ctypes.data
    assert dlx.convert(source, to="pyarrow") is source


class Marked(pa.ExtensionType):
    """An extension type over int32."""

    def __init__(self):
        super().__init__(pa.int32(), "dlx.tests.marked")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls()


def test_an_extension_type_inside_of_lists_is_refused_everywhere(np):
    """Chunks and tables of extension types are refused, never converted as their storage."""
    inner = pa.ExtensionArray.from_storage(Marked(), pa.array(range(8), pa.int32()))
    lists_ = pa.FixedSizeListArray.from_arrays(inner, 2)
    deeper = pa.FixedSizeListArray.from_arrays(lists_, 2)
    for column in (inner, lists_, deeper):
        for chunks in ([column], [column, column]):
            chunked = pa.chunked_array(chunks)
            for obj in (column, chunked, pa.table({"x": chunked}), [chunked], {"a": column}):
                for _ in range(2):  # the first time through Python
                    with pytest.raises(errors.DTypeError, match="marked"):
                        dlx.convert(obj, to="numpy")


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"copy": True}])
@pytest.mark.parametrize("make", [lambda: pa.array([], pa.bool_()), lambda: pa.chunked_array([], pa.bool_())])
def test_bools_without_elements_are_planned_as_they_are_converted(make, options):
    """Nothing is copied, so that `copy=False` works, in a plan, too."""
    plan = dlx.plan([make()], "dlx", **options)
    assert plan.error is None and plan.nbytes == 0
    assert dlx.convert([make()], to="dlx", **options)[0].shape == (0,)
