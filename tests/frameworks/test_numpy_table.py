"""The exchange table of the numpy adapter: what it reads, refuses and creates, and its ownership."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import subprocess
import sys
import sysconfig
import weakref

import pytest
from support.arrays.layouts import DTYPES, LAYOUTS
from support.arrays.reference import READ_ONLY
from support.project import ROOT

import dlx
from dlx._core import native
from dlx._core.native import ffi
from dlx._registry.registry import registry


class Owner(bytearray):
    """Memory that supports weak references."""


@pytest.fixture
def facts(np):
    """Return the facts that the table reads."""
    dlx.convert(np.ones(1), to="dlx")
    return pytest.importorskip("dlx_adapters._dlx_numpy").read_facts


@pytest.fixture
def table(np):
    """Return the table, called by exchange.c."""
    from support.project import compiled

    held = ctypes.PyDLL(str(compiled("exchange")))
    held.exchange_import.restype, held.exchange_import.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p]
    held.exchange_export.restype, held.exchange_export.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object]
    held.exchange_borrow.restype = ctypes.py_object
    held.exchange_borrow.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    from dlx._registry.registry import registry

    held.api = pointer(registry.target("numpy").adapter.fast_path.exchange(), b"dlpack_exchange_api")
    return held


def load(table, managed):
    """Import the managed tensor at an address."""
    return table.exchange_import(table.api, managed)


def tensor(shape=(2, 3), strides=None, dtype="float32", *, flags=0, owner=None, at=0, device=(1, 0)):
    """Return a dlx.Tensor over the bytes 0, 1, 2, ..., and its owner."""
    owner = Owner(range(128)) if owner is None else owner
    address = native.buffer_address(memoryview(owner)) + at
    return native.tensor_new(address, shape, strides, tuple(dlx.DType(dtype)), device, flags, owner), owner


def managed_of(made):
    """Return the address of a managed tensor that the caller owns, over a dlx.Tensor."""
    capsule = made.__dlpack__(max_version=(1, 3))
    pointer, rename = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor_versioned")
    rename(capsule, USED)
    return address


USED = b"used_dltensor_versioned"


def at(address):
    """Return the struct at an address."""
    return ffi.cast("DLManagedTensorVersioned*", address)


def release(address):
    """Call the deleter of a managed tensor."""
    at(address).deleter(at(address))


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_facts_are_what_numpy_says(np, facts, layout):
    """Address, shape, strides and dtype equal those of the array interface."""
    for dtype in DTYPES:
        array = LAYOUTS[layout](np, dtype)
        said = array.__array_interface__
        strides = tuple(step // array.itemsize for step in array.strides)
        assert facts(array) == (said["data"][0], said["shape"], strides, tuple(dlx.DType(dtype))), dtype


@pytest.mark.parametrize("steps", list(itertools.product((1, -1, 2, -3), repeat=2)), ids=str)
def test_facts_of_any_steps(np, facts, steps):
    """Slices in both directions have the right address and signed strides."""
    array = np.zeros((7, 9), "int16")[:: steps[0], :: steps[1]]
    assert facts(array)[0] == array.__array_interface__["data"][0]
    assert facts(array)[2] == tuple(step // 2 for step in array.strides)


@pytest.mark.parametrize("code", "?bhilqpBHILQPefdFD")
def test_every_type_of_c(np, facts, code):
    """Every C type of numpy, including long and long long, has the dtype of its width."""
    array = np.zeros(2, code)
    assert facts(array)[3] == tuple(dlx.DType(array.dtype.name))


@pytest.mark.parametrize("off", [1, 2, 3, 5])
def test_misaligned(np, facts, off):
    """The address is exact for any alignment."""
    array = np.zeros(64, "u1")[off : off + 32].view("f8")
    assert facts(array)[0] == array.__array_interface__["data"][0] and not array.flags.aligned


@pytest.mark.numpy("2.0")
def test_64_dimensions(np, facts):
    """Arrays with numpy's maximum number of dimensions are read."""
    array = np.zeros((1,) * 63 + (2,))
    assert facts(array)[1] == array.shape and len(facts(array)[2]) == 64


@pytest.mark.parametrize(
    "dtype", [">f4", ">i8", "M8[s]", "m8[D]", "U3", "S3", "V4", "O", "longdouble", "clongdouble", "i4,f4"]
)
def test_dtypes_without_a_name_in_dlpack_are_refused(np, facts, dtype):
    """The other byte order, dates, text, bytes, objects, long doubles and structures are refused."""
    with pytest.raises(BufferError, match="has no dtype"):
        facts(np.zeros(3, dtype))


def test_variable_text_is_refused(np, facts):
    """Numpy's StringDType, whose number is beyond the table, is refused."""
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy has no StringDType")
    with pytest.raises(BufferError):
        facts(np.array(["a"], np.dtypes.StringDType()))


def test_native_byte_order_by_any_letter(np, facts):
    """'=', '<' and '|' mean the native order."""
    for dtype in ("=f4", "<f4", "|u1"):
        assert facts(np.zeros(1, dtype))[3] == tuple(dlx.DType(np.dtype(dtype).name))


def test_read_only_is_refused_by_the_borrow_slot(np, table):
    """The borrow slot refuses a read-only array, since a DLTensor has no such flag."""
    array = np.zeros(3)
    array.flags.writeable = False
    out = ctypes.create_string_buffer(64)
    with pytest.raises(BufferError, match="read-only"):
        table.exchange_borrow(table.api, array, out)
    array.flags.writeable = True
    table.exchange_borrow(table.api, array, out)


@pytest.mark.parametrize("writable", [True, False])
def test_the_managed_slot_says_read_only(np, table, writable):
    """Any array is exported as a managed tensor with its flag, and kept alive until the release."""
    array = np.arange(24.0).reshape(4, 6)[::-1, ::2]
    array.flags.writeable = writable
    before = sys.getrefcount(array)
    managed = at(table.exchange_export(table.api, array))
    tensor = managed.dl_tensor
    assert managed.flags == (0 if writable else READ_ONLY) and sys.getrefcount(array) == before + 1
    assert int(ffi.cast("uintptr_t", tensor.data)) == array.ctypes.data
    assert [tensor.shape[0], tensor.shape[1], tensor.strides[0], tensor.strides[1]] == [4, 3, -6, 2]
    managed.deleter(managed)
    assert sys.getrefcount(array) == before


def test_the_managed_slot_refuses_what_dlpack_cannot_say(np, table):
    """Dates and the other byte order are refused without a leak."""
    for array in (np.zeros(2, "M8[s]"), np.zeros(2, ">f4"), np.zeros(0, "U1")):
        before = sys.getrefcount(array)
        with pytest.raises(BufferError):
            table.exchange_export(table.api, array)
        assert sys.getrefcount(array) == before


@pytest.mark.parametrize("stride", [1, 3, 6, -5])
def test_broken_strides_are_refused(np, facts, stride):
    """Byte strides that are not whole elements are refused."""
    array = np.ndarray((2,), "i4", bytearray(64), 16, (stride,))
    with pytest.raises(BufferError, match="multiples of the element size"):
        facts(array)


@pytest.mark.parametrize("value", [3, None, [1], b"abc"])
def test_facts_are_of_arrays_only(facts, value):
    """Other objects are a TypeError."""
    with pytest.raises(TypeError):
        facts(value)


def test_a_loan_takes_nothing(np, table):
    """The borrow slot takes no reference, on success and on refusal."""
    array, refused = np.zeros(3), np.zeros(3, ">f4")
    before = sys.getrefcount(array), sys.getrefcount(refused)
    out = ffi.new("DLTensor*")
    table.exchange_borrow(table.api, array, int(ffi.cast("uintptr_t", out)))
    with pytest.raises(BufferError):
        table.exchange_borrow(table.api, refused, int(ffi.cast("uintptr_t", out)))
    assert (sys.getrefcount(array), sys.getrefcount(refused)) == before
    assert (out.ndim, out.shape[0], out.strides[0], out.byte_offset) == (1, 3, 1, 0)


# ---- making ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_imported(np, table, dtype):
    """Every dtype is imported over the same memory."""
    made, owner = tensor((2, 3), None, dtype)
    array = load(table, managed_of(made))
    assert type(array) is np.ndarray and array.dtype == np.dtype(dtype) and array.flags.c_contiguous
    assert array.ctypes.data == made.data_ptr and array.shape == (2, 3) and not array.flags.owndata
    assert array.tobytes() == bytes(owner[: array.nbytes])


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((), (), 0), ((3,), (2,), 0), ((3,), (-2,), 40), ((2, 2), (-1, -3), 60), ((2, 3), (1, 2), 0), ((3, 2), (0, 1), 0)],
)
def test_layouts_are_imported(np, table, shape, strides, offset):
    """0-d, negative, permuted and broadcast strides are preserved, with the right flags."""
    made, _ = tensor(shape, strides, "int32", at=offset)
    array = load(table, managed_of(made))
    assert array.shape == shape and array.strides == tuple(4 * step for step in strides)
    assert array.ctypes.data == made.data_ptr and array.flags.writeable
    same = np.ndarray(shape, "i4", bytearray(128), offset, array.strides)
    for flag in ("c_contiguous", "f_contiguous", "aligned"):
        assert getattr(array.flags, flag) == getattr(same.flags, flag)


def test_a_misaligned_import_says_so(np, table):
    """An array at an odd address is not marked aligned."""
    made, owner = tensor((3,), None, "float64", at=1)
    array = load(table, managed_of(made))
    assert not array.flags.aligned and array.tobytes() == bytes(owner[1:25])


def test_read_only_is_kept(np, table):
    """A read-only tensor becomes an array that cannot be made writable."""
    array = load(table, managed_of(tensor(flags=READ_ONLY)[0]))
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 0)])
def test_without_elements(np, table, shape):
    """An empty tensor without an address becomes an empty array of its shape."""
    array = load(table, managed_of(native.tensor_new(0, shape, None, (2, 32, 1), (1, 0), 0, None)))
    assert array.shape == shape and array.tolist() == np.zeros(shape).tolist()
    copies = [
        convert(dlx.from_pointer(0, shape, "float32"), to="numpy", copy=True)
        for convert in (dlx.convert, dlx.convert.__wrapped__)
    ]
    assert copies[0].strides == copies[1].strides == array.strides


def test_the_memory_lives_as_long_as_the_array(np, table):
    """The deleter runs once, after the last array over the memory."""
    made, owner = tensor()
    before, live = sys.getrefcount(owner) - 1, native.live()
    address = managed_of(made)
    array = load(table, address)
    del made
    view = array[1:]
    del array
    gc.collect()
    assert view.tobytes() == bytes(owner[12:24]) and sys.getrefcount(owner) == before + 1
    del view
    assert sys.getrefcount(owner) == before and native.live() == live - 1


@pytest.mark.parametrize("free", [False, True])
def test_the_deleter_runs_once(np, table, counting, free):
    """A foreign deleter is called exactly once; a missing one is ignored."""
    before = counting.deleted
    array = load(table, counting.managed(strides=(3, 1), null_deleter=free))
    assert counting.deleted == before and array.sum() == 0
    del array
    assert counting.deleted == before + (not free)


def test_a_byte_offset_is_added(np, table, counting):
    """The byte offset of a foreign tensor is added to the address."""
    managed = counting.managed((2,), (1,), byte_offset=8)
    base = int(ffi.cast("uintptr_t", at(managed).dl_tensor.data))
    assert load(table, managed).ctypes.data == base + 8


REFUSED = {
    "other major version": {"version": (2, 0)},
    "device": {"device": (2, 0)},
    "bfloat16": {"dtype": (4, 16, 1)},
    "lanes": {"dtype": (2, 32, 2)},
    "float8": {"dtype": (10, 8, 1)},
    "65 dimensions": {"shape": (1,) * 65, "strides": (1,) * 65},
    "no strides": {"strides": None},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_leaves_ownership_behind(np, table, counting, kind):
    """Tensors that numpy cannot represent are a BufferError, and the caller still owns them."""
    before = counting.deleted
    address = counting.managed(**{"strides": (3, 1), **REFUSED[kind]})
    with pytest.raises(BufferError, match="cannot hold"):
        load(table, address)
    assert counting.deleted == before
    counting.delete(address)
    assert counting.deleted == before + 1


@pytest.mark.parametrize("broken", [{"shape": (2, -3)}, {"shape": (2**40, 2**40)}, {"ndim": -1}])
def test_numpys_own_refusal_leaves_ownership_behind(np, table, counting, broken):
    """A shape that numpy refuses is an error, and the caller still owns the tensor."""
    before = counting.deleted
    address = counting.managed(**{"strides": (3, 1), **broken})
    with pytest.raises((ValueError, BufferError)):
        load(table, address)
    gc.collect()
    assert counting.deleted == before
    counting.delete(address)
    assert counting.deleted == before + 1


def test_a_deleter_runs_with_an_error_pending(np, table, counting):
    """A pending error survives the release of the array."""
    held = [load(table, counting.managed(strides=(3, 1)))]
    before = counting.deleted
    with pytest.raises(KeyError, match="pending"):
        counting.clear_with_error(held)
    assert counting.deleted == before + 1


def test_any_capsule_is_no_table_of_numpy(np):
    """Only a capsule of numpy's functions is accepted."""
    module = pytest.importorskip("dlx_adapters._dlx_numpy")
    with pytest.raises(ValueError, match="PyCapsule"):
        module.exchange_api(object())


@pytest.mark.parametrize("wrong", ["address", "shape", "strides", "dtype"])
def test_a_table_that_reads_wrongly_is_not_used(np, facts, monkeypatch, wrong):
    """If the table disagrees with numpy in any point, Python is used, with the same result."""
    from dlx_adapters import _dlx_numpy

    place = ["address", "shape", "strides", "dtype"].index(wrong)
    exchange = registry.target("numpy").adapter.fast_path.exchange

    def spoilt(array):
        read = facts(array)
        return (*read[:place], read[place] + (1 if place == 0 else (1,)), *read[place + 1 :])

    assert exchange() is not None
    monkeypatch.setattr(_dlx_numpy, "read_facts", spoilt)
    try:
        native.routes_clear()
        assert exchange() is None
        for array in (np.arange(6.0).reshape(2, 3).T, np.arange(3)[::-1]):
            for to in ("dlx", "numpy"):
                assert np.array_equal(np.asarray(dlx.convert(dlx.convert(array, to="dlx"), to=to)), array)
            assert dlx.convert._borrow(array, "dlx") is None
    finally:
        native.routes_clear()


# ---- other machines --------------------------------------------------------------------------------------------------


@pytest.mark.numpy("2.0")
@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_the_other_byte_order_is_that_of_the_host(np, python, tmp_path, order):
    """Arrays of the other byte order are refused, also on a big-endian host."""
    if sys.byteorder != "little":
        pytest.skip("this test uses numpy's marks of a little-endian host")
    target = tmp_path / "_dlx_numpy.so"
    command = ["cc", "-std=c11", "-shared", "-fPIC", "-Wno-builtin-macro-redefined", "-U__BYTE_ORDER__"]
    command += [f"-D__BYTE_ORDER__=__ORDER_{order}_ENDIAN__", f"-I{ROOT / 'c_src'}", f"-I{ROOT / 'c_src' / 'include'}"]
    command += [f"-I{sysconfig.get_path('include')}", "-o", str(target)]
    command += [str(ROOT / "dlx_adapters" / "_dlx_numpy.c")]
    command += [str(ROOT / "c_src" / name) for name in ("core/allocate.c", "core/thread_state.c", "base/gil.c")]
    command += map(str, (ROOT / "c_src" / "platform").glob("*.c"))
    subprocess.run(command, check=True, capture_output=True)
    out = python(
        f"""
        import importlib.util, sys
        import numpy as np
        spec = importlib.util.spec_from_file_location("_dlx_numpy", {str(target)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.exchange_api(np._core._multiarray_umath._ARRAY_API)
        for mark in "=>|":
            array = np.zeros(2, "u1" if mark == "|" else mark + "f4")
            assert array.dtype.byteorder == mark
            try:
                module.read_facts(array)
                print(mark)
            except BufferError:
                pass
        """
    )
    assert out.split() == (["=", "|"] if order == "LITTLE" else ["=", ">", "|"])


@pytest.mark.parametrize("case", [((1,), (2**62,)), ((2, 1), (1, -(2**61))), ((0, 3), (3, 1)), ((0,), (2**62,))])
def test_strides_that_mean_nothing_do_not_overflow(np, case):
    """An arbitrary stride of an extent of 1 does not overflow in bytes."""
    shape, strides = case
    source, _ = tensor(shape, strides, "float64")
    steps = dlx.convert(source, to="numpy").strides
    assert len(steps) == len(shape) and all(0 < step <= 24 for step in steps)


def test_read_only_without_an_address(np):
    """An empty array keeps the read-only flag on both paths, also without an address."""
    tensor = native.tensor_new(0, (0, 3), None, (2, 32, 1), (1, 0), 1, None)
    for convert in (dlx.convert, dlx.convert.__wrapped__):
        assert not convert(tensor, to="numpy").flags.writeable


def test_scalar_types_of_others_are_not_kept(np):
    """Scalar types of ml_dtypes are looked up once; a program's own types are not kept alive."""

    def refused():
        class Mine(np.record):
            pass

        array = np.zeros(3, np.dtype((Mine, [("a", "i4")])))
        assert array.dtype.type is Mine
        with contextlib.suppress(dlx.errors.DTypeError):
            dlx.convert(array, to="dlx")
        return weakref.ref(Mine)

    kind = refused()
    gc.collect()
    assert kind() is None
