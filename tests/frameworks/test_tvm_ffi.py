"""tvm_ffi.Tensor as source and target: every dtype and layout is shared, except for flags that it loses."""

from __future__ import annotations

import ctypes
import gc

import pytest

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry

tvm_ffi = pytest.importorskip("tvm_ffi")

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
    *("float4_e2m1fnx2", "int4", "uint4", "int2", "uint2", "int1", "uint1", "float32x4", "boolx4", "int128"),
)
COMPLEX = ("complex32", "complex64", "complex128")
LAYOUTS = {
    "0-d": ((), None),
    "1-d": ((7,), None),
    "3-d": ((2, 3, 4), None),
    "transposed": ((3, 2), (1, 3)),
    "gaps": ((2, 2), (4, 2)),
    "negative": ((4,), (-1,)),
    "broadcast": ((3, 4), (0, 1)),
    "overlapping": ((4, 3), (1, 1)),
    "odd strides of 1": ((1, 4, 1), (-7, 1, 999)),
    "no elements": ((0, 3), None),
}


def tensor(dtype="float32", shape=(4,), strides=None, offset=0, flags=0, device=(1, 0)):
    """Return a dlx.Tensor of any dtype and layout in the middle of consecutive bytes."""
    block = dlx.convert(bytearray(range(256)) * 8, to="dlx", copy=True)
    address = block.data_ptr + 1024 + offset
    return native.tensor_new(address, shape, strides, dlx.DType(dtype), device, flags, block)


# ---- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX])
def test_every_dtype_is_shared_both_ways(dtype):
    """Every dtype of DLPack is shared in both directions, including lanes and packed elements."""
    source = tensor(dtype)
    result = dlx.convert(source, to="tvm_ffi", copy=False)
    assert type(result) is tvm_ffi.Tensor and result.data_ptr() == source.data_ptr
    back = dlx.convert(result, to="dlx", copy=False)
    assert (back.dtype, back.shape, back.data_ptr) == (source.dtype, source.shape, source.data_ptr)
    assert dlx.plan(source, to="tvm_ffi").outcome == dlx.plan(result, to="dlx").outcome == "shared"
    info = dlx.describe(result)
    assert (info.dtype, info.nbytes, info.address) == (source.dtype, source.nbytes, source.data_ptr)
    if dtype not in COMPLEX:
        assert result.dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_shared_both_ways(layout):
    """Strides of any kind and any alignment are shared."""
    shape, strides = LAYOUTS[layout]
    for offset in (0, 1):
        source = tensor("float32", shape, strides, offset)
        result = dlx.convert(source, to="tvm_ffi", copy=False)
        assert (tuple(result.shape), tuple(result.strides)) == (source.shape, source.strides)
        back = dlx.convert(result, to="dlx", copy=False)
        assert (back.data_ptr, back.strides) == (source.data_ptr, source.strides)


def test_numpy_both_ways(np):
    """A numpy array stays shared and writable in both directions."""
    source = np.arange(6.0).reshape(2, 3)[:, ::-1]
    result = dlx.convert(source, to="tvm_ffi", copy=False)
    back = dlx.convert(result, to="numpy", copy=False)
    back[0, 0] = 99
    assert source[0, 0] == 99 and np.shares_memory(source, back)


def test_torch_both_ways(torch):
    """A torch tensor stays shared in both directions."""
    source = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    back = dlx.convert(dlx.convert(source, to="tvm_ffi", copy=False), to="torch", copy=False)
    assert back.equal(source) and back.data_ptr() == source.data_ptr()


def test_a_function_sees_the_values(np):
    """A packed function receives the tensor unchanged."""

    @tvm_ffi.register_global_func("dlx.test.shape", override=True)
    def shape(x):
        return [*x.shape, x.data_ptr()]

    source = np.zeros((2, 3))
    result = dlx.convert(source, to="tvm_ffi")
    try:
        assert list(tvm_ffi.get_global_func("dlx.test.shape")(result)) == [2, 3, source.ctypes.data]
    finally:
        tvm_ffi.remove_global_func("dlx.test.shape")


# ---- flags and dtypes that it loses ----------------------------------------------------------------------------------


def test_read_only_memory_is_copied(np):
    """A tvm_ffi.Tensor has no read-only flag, so it gets a copy, or an error."""
    source = np.arange(4.0)
    source.flags.writeable = False
    result = dlx.convert(source, to="tvm_ffi")
    assert result.data_ptr() != source.ctypes.data and dlx.plan(source, to="tvm_ffi").outcome == "copied"
    for options in ({"copy": False}, {"readonly": "error"}):
        with pytest.raises(errors.ReadOnlyError, match="tvm_ffi tensors are always writable"):
            dlx.convert(source, to="tvm_ffi", **options)
    assert dlx.convert(source, to="tvm_ffi", readonly="share").data_ptr() == source.ctypes.data


def test_defect_read_only_is_forgotten():
    """tvm_ffi's own import of read-only memory is exported as writable."""
    source = tensor(flags=1)
    taken = tvm_ffi.from_dlpack(source)
    assert taken.data_ptr() == source.data_ptr
    forgets = not registry.target("tvm_ffi").capabilities.keeps_readonly
    assert dlx.convert(taken, to="dlx").readonly is not forgets


def test_padded_elements_are_packed():
    """tvm_ffi refuses padded elements, which it would read as packed; dlx packs them."""
    source = tensor("int4", flags=4)
    with pytest.raises(errors.CopyRequiredError, match="int4 elements take one byte each, but tvm_ffi packs them"):
        dlx.convert(source, to="tvm_ffi", copy=False)
    assert dlx.convert(dlx.convert(source, to="tvm_ffi"), to="dlx").flags == 0
    with pytest.raises((errors.ConversionError, ValueError, RuntimeError)):
        tvm_ffi.from_dlpack(source)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_defect_complex_has_no_word(dtype):
    """tvm_ffi stores complex elements but raises for their dtype."""
    result = dlx.convert(tensor(dtype), to="tvm_ffi")
    with pytest.raises(ValueError, match="type_code"):
        result.dtype
    with pytest.raises(errors.DTypeError, match=f"no dtype object for {dtype}"):
        registry.target("tvm_ffi").adapter.dtypes.to_native(dlx.DType(dtype))
    assert dlx.describe(result).dtype == dlx.DType(dtype)


def test_defect_legacy_by_version():
    """For version 0.8 it raises AttributeError; dlx requests version 1. Without one it returns a legacy capsule."""
    source = dlx.convert(tensor(), to="tvm_ffi")
    with pytest.raises(AttributeError):
        source.__dlpack__(max_version=(0, 8))
    for capsule in (source.__dlpack__(), source.__dlpack__(max_version=(1, 0))):
        assert dlx.convert(capsule, to="dlx").data_ptr == source.data_ptr()


def test_defect_other_major_versions_are_imported(counting):
    """tvm_ffi accepts a capsule of major version 2; dlx refuses it before."""
    capsule = counting.capsule(version=(2, 0))
    with pytest.raises(errors.ProtocolError, match=r"DLPack 2\.0"):
        dlx.convert(capsule, to="tvm_ffi")
    before = counting.deleted
    del capsule
    assert counting.deleted == before + 1
    try:
        tvm_ffi.from_dlpack(counting.capsule(version=(2, 0)))
    except (BufferError, ValueError, RuntimeError):
        pytest.skip("this tvm_ffi checks")


EMPTY = """
import dlx, tvm_ffi
from dlx import errors
moved = tvm_ffi.from_dlpack(dlx.convert(bytearray(8), to="dlx"))
tvm_ffi.Tensor.__new__(tvm_ffi.Tensor).__move_handle_from__(moved)
for gone in (moved, tvm_ffi.Tensor.__new__(tvm_ffi.Tensor)):
    for target in ("dlx", "numpy"):
        try:
            dlx.convert(gone, to=target)
        except (errors.LayoutError, errors.FrameworkNotInstalledError) as error:
            assert target == "numpy" or "it has no handle" in error.reason
            assert str(dlx.plan(gone, to=target).error) == str(error)
        else:
            raise AssertionError
    for options in ({}, {"copy": True}, {"device": "cuda"}):
        plan = dlx.plan(gone, to="tvm_ffi", **options)
        assert plan.outcome == ("refused" if options else "same")
    assert dlx.describe(gone).shape is None
print("alive")
"""


def test_tensors_without_a_handle(python):
    """A tensor whose handle was moved away crashes on access; dlx does not access it."""
    assert python(EMPTY, args=(), imported=True) == "alive\n"


@pytest.mark.parametrize("device", [(2, 0), (8, 0), (10, 1), (14, 0), (99, 0)])
def test_other_devices_are_refused(device):
    """Tensors of other devices are refused by name."""
    source = tvm_ffi.from_dlpack(tensor(device=device))
    with pytest.raises(errors.DeviceError, match=dlx.Device(device).name):
        dlx.convert(source, to="numpy" if device[0] == 2 else "tvm_ffi", copy=True)


def test_pinned_memory_is_kept():
    """Pinned host memory is shared and stays pinned."""
    source = tensor(device=(3, 0))
    result = dlx.convert(source, to="tvm_ffi", copy=False)
    assert result.data_ptr() == source.data_ptr and result.__dlpack_device__() == (3, 0)


# ---- inside tvm_ffi, words, lifetime ---------------------------------------------------------------------------------


def test_tvm_ffi_stays_itself():
    """A tvm_ffi tensor is the result itself; copy=True copies it."""
    source = dlx.convert(tensor(), to="tvm_ffi")
    assert dlx.convert(source, to="tvm_ffi") is source
    assert dlx.convert(source, to="tvm_ffi", copy=False, readonly="error") is source
    copied = dlx.convert(source, to="tvm_ffi", copy=True)
    assert type(copied) is tvm_ffi.Tensor and copied.data_ptr() != source.data_ptr()
    assert ctypes.string_at(copied.data_ptr(), 16) == ctypes.string_at(source.data_ptr(), 16)


def test_names_of_tvm_ffi():
    """The name, the package and the type are the same target."""
    for to in ("tvm_ffi", tvm_ffi, tvm_ffi.Tensor):
        assert type(dlx.convert(bytearray(4), to=to)) is tvm_ffi.Tensor
    assert type(dlx.convert(bytearray(4), like=dlx.convert(b"x", to="tvm_ffi"))) is tvm_ffi.Tensor


def test_dtypes_and_devices_both_ways():
    """Every dtype of the adapter, and the host, exist in tvm_ffi, in both directions."""
    adapter = registry.target("tvm_ffi").adapter
    assert {name for name in DTYPES if dlx.DType(name).lanes == 1} - {"int128"} <= set(adapter.dtypes.names)
    for name in (*adapter.dtypes.names, "float32x4", "int128"):
        word = adapter.dtypes.to_native(dlx.DType(name))
        assert word == name and adapter.dtypes.from_native(word) == dlx.DType(name)
    device = adapter.devices.to_native(dlx.Device("cpu"))
    assert device == tvm_ffi.device("cpu") and adapter.devices.from_native(device) == (1, 0)
    assert adapter.devices.from_native(tvm_ffi.device("cuda", 1)) == (2, 1)
    with pytest.raises(errors.DeviceError):
        adapter.devices.to_native(dlx.Device("rocm"))


def test_the_result_keeps_the_source():
    """The memory lives as long as the tensor, and is released once."""
    live = native.live()
    results = [dlx.convert(dlx.convert(bytearray(8), to="dlx"), to="tvm_ffi") for _ in range(50)]
    assert native.live() > live
    backs = [dlx.convert(result, to="dlx") for result in results]
    del results
    gc.collect()
    assert [bytes(back) for back in backs] == [bytes(8)] * 50
    del backs
    gc.collect()
    assert native.live() == live


def test_results_live_at_exit(python):
    """Tensors that are alive at the interpreter's exit do no harm."""
    out = python(
        """
        import gc
        gc.unfreeze()
        import dlx, tvm_ffi
        kept = dlx.convert(bytearray(64), to="tvm_ffi")
        loop = [kept, dlx.convert(kept, to="dlx")]; loop.append(loop)
        print("done")
        """,
        args=(),
        imported=True,
    )
    assert out == "done\n"
