"""Dtypes beyond numpy's: exact bits in every direction, packed or padded, or refused by name."""

import subprocess
import sys
import textwrap
import types
from types import MappingProxyType

import pytest
from support.arrays.agreement import agree
from support.arrays.reference import PADDED, offsets
from support.plugins.registries import use

import dlx
from dlx import errors
from dlx._core import native
from dlx._core.native import ffi
from dlx._registry.registry import Registry, registry
from dlx.adapter import Adapter, Capabilities, DTypes, Layout

# Dtypes of ml_dtypes of a byte or more, and the frameworks besides numpy that support them.
WIDE = {
    "bfloat16": {"torch", "jax"},
    "complex32": {"torch"},
    "float8_e3m4": {"jax"},
    "float8_e4m3": {"jax"},
    "float8_e4m3b11fnuz": {"jax"},
    "float8_e4m3fn": {"torch", "jax"},
    "float8_e4m3fnuz": {"torch", "jax"},
    "float8_e5m2": {"torch", "jax"},
    "float8_e5m2fnuz": {"torch", "jax"},
    "float8_e8m0fnu": {"torch", "jax"},
}
NARROW = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
NARROW |= {"float6_e2m3fn": 6, "float6_e3m2fn": 6}


@pytest.fixture
def ml(np):
    """ml_dtypes, or a skip."""
    return pytest.importorskip("ml_dtypes")


def every_value(np, ml, name):
    """Return an array of one dtype with every pattern of its bits that one or two bytes can have."""
    kind = getattr(ml, name, None)
    if kind is None:
        pytest.skip(f"this ml_dtypes has no {name}")
    if name in NARROW:
        return np.arange(1 << NARROW[name], dtype=np.uint8).view(kind)
    size = np.dtype(kind).itemsize
    if size == 1:
        return np.arange(256, dtype=np.uint8).view(kind)
    return np.arange(65536, dtype=np.uint16).view(kind)


def bits(array):
    """Return the bytes of an array in the order of its elements."""
    return array.view(f"u{array.itemsize}").tobytes()


def test_describe_says_the_dtype(np, ml):
    """`describe` and DType agree on every dtype of ml_dtypes that DLPack can represent."""
    for name in [*WIDE, *NARROW]:
        array = every_value(np, ml, name)
        assert dlx.describe(array).dtype == dlx.DType(name)
        assert dlx.describe(dlx.convert(array, to="dlx")).dtype == dlx.DType(name)


@pytest.mark.parametrize("framework", ["torch", "jax", "tvm_ffi", "dlx"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_dtypes_cross_bit_for_bit(np, ml, framework, name):
    """Each dtype reaches each framework that has it, and comes back in place; NaN payloads included."""
    if framework != "dlx":
        pytest.importorskip(framework)
    array = every_value(np, ml, name)
    if framework in ("torch", "jax") and framework not in WIDE[name]:
        with pytest.raises(errors.DTypeError, match=f"{framework} has no dtype {name}"):
            dlx.convert(array, to=framework)
        return
    there = dlx.convert(array, to=framework)
    assert dlx.describe(there).dtype == dlx.DType(name)
    back = dlx.convert(there, to="numpy", copy=False)
    assert back.dtype == array.dtype and bits(back) == bits(array)
    if framework != "jax":  # which wants 64 bytes
        assert back.ctypes.data == array.ctypes.data
    steps = dlx.plan(there, to="numpy").steps
    if "view" in {step.do for step in steps}:
        assert any(step.why.endswith(f"and views it as {name}") for step in steps)


@pytest.mark.parametrize("name", WIDE)
def test_frameworks_get_the_right_numbers(np, ml, name):
    """The other framework reads the same numbers as ml_dtypes."""
    array = every_value(np, ml, name)
    for framework in WIDE[name] & {"torch", "jax"}:
        pytest.importorskip(framework)
        there = dlx.convert(array, to=framework)
        if framework == "torch" and name == "complex32":
            assert bits(np.asarray(there.real)) == bits(array.real) or np.isnan(array.real).any()
            continue
        wide = there.float().numpy() if framework == "torch" else np.asarray(there).astype(np.float32)
        assert np.array_equal(wide, array.astype(np.float32), equal_nan=True)


def test_layouts_and_readonly_of_extension_dtypes(np, ml, torch):
    """Strides, offsets and the read-only flag are kept, like for numpy's dtypes."""
    array = np.arange(48, dtype=np.uint16).view(ml.bfloat16).reshape(6, 8)[1:, ::2].T
    tensor = dlx.convert(array, to="torch", copy=False)
    assert tensor.stride() == (2, 8) and tensor.data_ptr() == array.ctypes.data
    back = dlx.convert(dlx.convert(array[::-1], to="dlx"), to="numpy", copy=False)
    assert back.strides == array[::-1].strides and bits(back) == bits(array[::-1])
    array.flags.writeable = False
    with pytest.raises(errors.ReadOnlyError):
        dlx.convert(array, to="torch", copy=False)
    assert not dlx.convert(dlx.convert(array, to="dlx"), to="numpy").flags.writeable
    tensor[0, 0] = 7
    assert array[0, 0] == 7


def test_scalars_and_other_byte_orders_of_extension_dtypes(np, ml, torch):
    """A scalar of ml_dtypes becomes a 0-d tensor; a graph, empty and 0-d tensors are converted unchanged."""
    assert dlx.convert(ml.bfloat16(1.5), to="torch").item() == 1.5
    assert dlx.convert(torch.tensor(1.5, dtype=torch.bfloat16), to="numpy").shape == ()
    assert dlx.convert(torch.empty((0, 3), dtype=torch.bfloat16), to="numpy").dtype == ml.bfloat16


def test_what_dlpack_cannot_say_is_refused(np, ml):
    """A dtype of ml_dtypes without a DLPack number is refused with a way out."""
    kind = getattr(ml, "bcomplex32", None)
    if kind is None:
        pytest.skip("this ml_dtypes has no bcomplex32")
    with pytest.raises(errors.DTypeError, match="View it as an integer of 32 bits first"):
        dlx.convert(np.zeros(2, kind), to="dlx")


# ---- elements of less than a byte ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NARROW)
def test_narrow_arrays_are_padded(np, ml, name):
    """Numpy stores one element per byte: the flag says so, and round trips share memory."""
    array = every_value(np, ml, name)
    tensor = dlx.convert(array, to="dlx", copy=False)
    assert tensor.flags & PADDED and tensor.nbytes == array.nbytes and tensor.data_ptr == array.ctypes.data
    back = dlx.convert(tensor, to="numpy", copy=False)
    assert back.dtype == array.dtype and back.ctypes.data == array.ctypes.data
    assert not dlx.convert(array[:0], to="dlx").nbytes


@pytest.mark.parametrize("name", NARROW)
def test_narrow_arrays_are_packed_and_unpacked(np, ml, name):
    """Every value survives a framework that packs; both directions are reported copies."""
    pytest.importorskip("tvm_ffi")
    array = every_value(np, ml, name)
    for source in (array, array[::-1], np.stack([array] * 3)[:, 1:].T, array[:1].reshape(())):
        with pytest.raises(errors.CopyRequiredError, match=f"{name} elements take one byte each, but tvm_ffi packs"):
            dlx.convert(source, to="tvm_ffi", copy=False)
        packed = dlx.convert(source, to="tvm_ffi")
        assert dlx.describe(packed).nbytes == (source.size * NARROW[name] + 7) // 8
        with pytest.raises(errors.CopyRequiredError, match=f"{name} elements are packed, but numpy needs one"):
            dlx.convert(packed, to="numpy", copy=False)
        assert dlx.plan(packed, to="numpy").outcome == "copied"
        back = dlx.convert(packed, to="numpy")
        assert back.dtype == source.dtype and back.shape == source.shape and bits(back) == bits(source)


@pytest.mark.parametrize("name", ["int2", "int4", "uint2", "uint4", "float4_e2m1fn"])
def test_narrow_arrays_of_jax(np, ml, name):
    """Jax packs four or two in a byte; numpy gets one per byte, with the same values."""
    jax = pytest.importorskip("jax")
    array = every_value(np, ml, name)
    back = dlx.convert(jax.numpy.asarray(array), to="numpy")
    assert back.dtype == array.dtype and bits(back) == bits(array)


@pytest.mark.parametrize("width", range(1, 8))
@pytest.mark.parametrize("shape", [(0,), (), (1,), (7,), (8,), (9,), (3, 5), (2, 3, 4), (5, 0)])
def test_repacking_agrees_with_a_reference(width, shape):
    """dlx_repack against one big integer: element i lies in the bits from i * width on."""
    size = len(offsets(shape, None))
    values = [(i * 37 + 11) % (1 << width) for i in range(size)]
    whole = sum(value << at * width for at, value in enumerate(values))
    nbytes = (size * width + 7) // 8
    packed = bytearray(whole.to_bytes(nbytes, "little"))
    dense = native.tensor_new(at(packed), shape, None, (1, width, 1), (1, 0), 0, packed)
    loose = native.tensor_repack(dense)
    assert loose.flags == PADDED and bytes_of(loose, size) == bytes(values)
    dirty = bytearray(value | (0xFF << width & 0xFF) for value in values)  # bits above do not count
    again = native.tensor_repack(native.tensor_new(at(dirty), shape, None, (1, width, 1), (1, 0), PADDED, dirty))
    assert again.flags == 0 and bytes_of(again, nbytes) == bytes(packed)


def at(memory):
    """Return the address of a bytearray, 0 of an empty one."""
    return native.buffer_address(memoryview(memory)) if memory else 0


def bytes_of(tensor, count):
    """Return the bytes of a compact tensor."""
    return bytes(ffi.buffer(ffi.cast("char *", tensor.data_ptr), count)) if count else b""


@pytest.mark.parametrize("strides", [(1, 3), (-3, 1), (0, 1), (7, 2), (-3, -1)])
def test_repacking_follows_strides(strides):
    """The padded side may lie in any way."""
    room = bytearray(i % 16 for i in range(64))
    start = 32
    loose = native.tensor_new(at(room) + start, (3, 3), strides, (1, 4, 1), (1, 0), PADDED, room)
    values = [room[start + offset] for offset in offsets((3, 3), strides)]
    dense = native.tensor_repack(loose)
    whole = sum(value << i * 4 for i, value in enumerate(values))
    assert bytes_of(dense, 5) == whole.to_bytes(5, "little")


def test_what_cannot_be_repacked():
    """Several lanes, whole bytes, a strided packed side: a status, and nothing is written."""
    room = bytearray(64)
    for dtype, flags, strides in [
        ((1, 4, 3), 0, None),
        ((1, 8, 1), PADDED, None),
        ((1, 4, 1), 0, (2,)),
        ((1, 12, 1), 0, None),
    ]:
        tensor = native.tensor_new(at(room), (2,), strides, dtype, (1, 0), flags, room)
        with pytest.raises(errors.LayoutError):
            native.tensor_repack(tensor)
    assert not any(room)


# ---- missing ml_dtypes, registration in numpy, consumers with fewer dtypes ------------------------------------------


def test_without_ml_dtypes(python, np):
    """Its absence is one clear error that names it; everything else works."""
    python("""
        import sys
        sys.modules["ml_dtypes"] = None
        import dlx, numpy as np
        source = dlx.from_pointer(dlx.ffi.new("short[4]"), (4,), "bfloat16")
        plan = dlx.plan(source, to="numpy")
        assert plan.outcome == "refused"
        try:
            dlx.convert(source, to="numpy")
        except dlx.errors.DTypeError as error:
            assert "ml_dtypes, which provides it, is not installed" in str(error), error
            assert "pip install ml_dtypes" in str(error) and str(error) == str(plan.error)
        else:
            raise SystemExit("no error")
        assert dlx.convert(dlx.convert(np.ones(3), to="dlx"), to="numpy").sum() == 3
    """)


def test_numpy_is_told_where_it_can_be(np, ml, monkeypatch):
    """From numpy 2.5 on, from_dlpack accepts registered dtypes, so no view is needed."""
    if not hasattr(np.dtypes, "register_dlpack_dtype"):
        pytest.skip(f"numpy {np.__version__} has no register_dlpack_dtype")
    array = np.arange(7, dtype=np.uint16).view(ml.bfloat16)
    tensor = dlx.convert(array, to="dlx")
    assert dlx.plan(tensor, to="numpy").steps == ()
    assert dlx.convert(tensor, to="numpy").dtype == ml.bfloat16
    assert np.from_dlpack(tensor).dtype == ml.bfloat16
    assert "int4" in registry.target("numpy").adapter.dtypes.storage  # one byte each, which numpy cannot register


@pytest.mark.parametrize("name", WIDE)
def test_dtypes_of_ml_dtypes_take_the_fast_path(np, ml, name):
    """Both paths agree, with and without a registration in numpy."""
    if not hasattr(ml, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    tensor = dlx.convert(every_value(np, ml, name), to="dlx")
    for options in ({}, {"copy": False}, {"copy": True}):
        agree(lambda: tensor, "numpy", **options)
    assert type(dlx.convert._borrow(tensor, "numpy")) is dlx.Tensor
    assert dlx.convert(tensor, to="numpy").dtype == getattr(ml, name)


def test_somebody_else_registered_first(python, np, ml):
    """If another library registered a dtype for the same numbers, dlx views, and keeps that registration."""
    if not hasattr(np.dtypes, "register_dlpack_dtype"):
        pytest.skip(f"numpy {np.__version__} has no register_dlpack_dtype")
    python("""
        import numpy as np, ml_dtypes, dlx
        np.dtypes.register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16).newbyteorder())
        array = np.arange(7, dtype=np.uint16).view(ml_dtypes.bfloat16)
        back = dlx.convert(dlx.convert(array, to="dlx"), to="numpy")
        assert back.dtype == ml_dtypes.bfloat16 and back.tobytes() == array.tobytes()
    """)


class Words:
    """An array of a framework that knows bool, and takes it as bytes only."""

    def __init__(self, tensor, dtype="uint8"):
        self.tensor, self.dtype = tensor, dtype

    def view(self, dtype):
        return Words(self.tensor, dtype)


class OnlyBytes(Adapter):
    """Its adapter: it takes uint8 and nothing else, wants an address, and pads."""

    name = package = "onlybytes"
    types = ("onlybytes.Words",)
    dtypes = DTypes("onlybytes", {"uint8": "u8", "bool": "b1"}, storage={"bool": "uint8"})
    fields = MappingProxyType({})

    def capabilities(self):
        return Capabilities(
            dtypes=frozenset({"uint8", "bool"}), layouts=Layout.ANY, min_alignment=1, keeps_readonly=True, **self.fields
        )

    def load(self, tensor):
        assert tensor.dtype == dlx.DType("uint8")
        return Words(tensor)


@pytest.fixture
def onlybytes(monkeypatch):
    """That framework, imported, and its adapter registered."""
    package = types.ModuleType("onlybytes")
    package.__version__, package.Words, package.u8, package.b1 = "1.0", Words, "uint8", "bool"
    monkeypatch.setitem(sys.modules, "onlybytes", package)
    adapter, plugin = OnlyBytes(), types.ModuleType("dlx_onlybytes")
    plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(lambda: [adapter])
    monkeypatch.setitem(sys.modules, "dlx_onlybytes", plugin)
    use(Registry({"onlybytes": "dlx_onlybytes"}), monkeypatch.setattr)
    native.routes_clear()
    yield adapter
    native.routes_clear()


def test_bool_towards_a_consumer_of_bytes(onlybytes):
    """Bool is handed over as uint8 and comes out as bool: same bytes, true dtype."""
    source = dlx.from_pointer(ffi.new("char[3]", b"\1\0\1"), (3,), "bool")
    result = dlx.convert(source, to="onlybytes", copy=False)
    assert result.dtype == "bool" and result.tensor.data_ptr == source.data_ptr
    assert dlx.convert(b"abc", to="onlybytes").dtype == "uint8"
    assert [step.do for step in dlx.plan(source, to="onlybytes").steps] == ["view"]


def test_a_consumer_that_wants_an_address(onlybytes, monkeypatch):
    """An array without elements and address gets an address, without a copy."""
    monkeypatch.setattr(OnlyBytes, "fields", {"empty_extents": "addressed"})
    source = dlx.from_pointer(0, (0, 3), "bool")
    plan = dlx.plan(source, to="onlybytes", copy=False)
    result = dlx.convert(source, to="onlybytes", copy=False)
    assert plan.outcome == "shared" and result.tensor.data_ptr != 0 and result.tensor.shape == (0, 3)
    assert dlx.convert(source, to="onlybytes", copy=True).tensor.data_ptr != 0
    assert dlx.convert([source, b""], to="onlybytes", copy=True)[0].tensor.data_ptr != 0
    assert dlx.convert(dlx.empty((0, 3), "int8"), to="onlybytes", dtype={"int8": "uint8"}).tensor.data_ptr != 0


def test_capabilities_are_checked():
    """An invalid declaration raises immediately."""
    with pytest.raises(ValueError, match="subbyte must be"):
        Capabilities(dtypes=None, subbyte="dense")
    with pytest.raises(ValueError, match="must not overlap"):
        Capabilities(dtypes=frozenset({"int64"}), refusals={"int64": ("it would narrow it", "")})
    for alignment in (512, 257, 48, -1):
        with pytest.raises(ValueError, match="min_alignment must be 0 or a power of 2 up to 256"):
            Capabilities(dtypes=None, min_alignment=alignment)
    assert Capabilities(dtypes=None, min_alignment=256).min_alignment == 256


def test_every_adapter_maps_its_dtypes_both_ways():
    """to_native and from_native are inverse on every dtype that an adapter knows."""
    for name in ("numpy", "torch", "jax", "tvm_ffi", "pyarrow"):
        try:
            dtypes = registry.target(name).adapter.dtypes
        except errors.FrameworkNotInstalledError:
            continue
        for known in dtypes.known():
            assert dtypes.from_native(dtypes.to_native(dlx.DType(known))) == dlx.DType(known), (name, known)


def test_the_core_needs_no_ml_dtypes():
    """Importing dlx imports neither numpy nor ml_dtypes."""
    code = "import dlx, sys; dlx.convert(b'abc', to='dlx'); assert not {'numpy', 'ml_dtypes'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# ---- special cases --------------------------------------------------------------------------------------------------


def test_a_subclass_that_lies_about_itself(np, ml, torch):
    """Shape, strides and dtype come from numpy, not from a subclass's overrides."""

    class Liar(np.ndarray):
        shape = property(lambda self: (99,))
        strides = property(lambda self: (8,))
        size = property(lambda self: 99)

    for dtype in (ml.bfloat16, np.float32):
        liar = np.zeros(3, dtype).view(Liar)
        assert tuple(dlx.convert(liar, to="torch").shape) == (3,) and dlx.describe(liar).shape == (3,)


@pytest.mark.parametrize("make", ["np.zeros((0, 3), ml.int4)", "np.zeros(0, '>f4')", "np.zeros((0, 2), 'i1,f4')['f1']"])
def test_where_there_is_no_element_there_is_no_copy(np, ml, make):
    """copy=False accepts an array without elements, even if its layout would need a copy."""
    source = eval(make)
    for target in ("dlx", "tvm_ffi"):
        if target == "tvm_ffi":
            pytest.importorskip("tvm_ffi")
        plan = dlx.plan(source, to=target, copy=False)
        assert plan.outcome == "shared" and plan.nbytes == 0
        assert dlx.describe(dlx.convert(source, to=target, copy=False)).shape == source.shape


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_load_raises_leaves_the_capsule_whole(onlybytes, monkeypatch, error):
    """A claimed capsule is restored, also after Ctrl-C."""

    def load(self, tensor):
        raise error("now")

    capsule = dlx.convert(b"abc", to="dlx").__dlpack__(max_version=(1, 0))
    with monkeypatch.context() as patched:
        patched.setattr(OnlyBytes, "load", load)
        with pytest.raises(error if error is not ValueError else errors.ConversionError):
            dlx.convert(capsule, to="onlybytes")
    assert dlx.convert(capsule, to="onlybytes").tensor.shape == (3,)


def test_a_dtype_that_only_ml_dtypes_has(python, np):
    """to_native names the missing package, like a conversion."""
    python("""
        import sys
        sys.modules["ml_dtypes"] = None
        import dlx, numpy
        try:
            dlx.adapters()["numpy"].dtypes.to_native(dlx.DType("bfloat16"))
        except dlx.errors.DTypeError as error:
            assert "pip install ml_dtypes" in str(error)
        else:
            raise SystemExit("no error")
    """)


def test_text_and_float0_say_what_they_are(np, torch):
    """Their reasons are true, and their fixes do not lead to another refusal."""
    if hasattr(np.dtypes, "StringDType"):
        with pytest.raises(errors.DTypeError, match="no text"):
            dlx.convert(np.array(["a"], np.dtypes.StringDType()), to="torch")
    with pytest.raises(errors.DTypeError, match="no bytes"):
        dlx.convert(np.zeros(2, [("float0", "V")]), to="torch")
