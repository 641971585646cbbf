"""dlx.exchange_api: an exchange table for C and C++ programs that accepts any array and applies dlx's guards."""

import array
import gc
import sys
import types
import weakref
from dataclasses import replace

import pytest
from support.foreign.exchange import Exchange
from support.foreign.hostile import NAME, Owner
from support.project import compiled

import dlx
from dlx import errors
from dlx._core import native
from dlx._core.native import ffi, lib
from dlx.adapter import Guard


@pytest.fixture(scope="module")
def table():
    """Return the foreign program with the table of dlx.exchange_api."""
    holder = types.SimpleNamespace(**{NAME: dlx.exchange_api})
    return Exchange(str(compiled("exchange")), holder)


def says(t):
    """Return the fields of a DLTensor as plain values."""
    shape, strides = ([numbers[i] for i in range(t.ndim)] for numbers in (t.shape, t.strides))
    return (
        shape,
        strides,
        (t.dtype.code, t.dtype.bits, t.dtype.lanes),
        int(ffi.cast("uintptr_t", t.data)) + t.byte_offset,
    )


def describes(tensor):
    """Return the same fields of a dlx.Tensor."""
    return list(tensor.shape), list(tensor.strides), tuple(tensor.dtype), tensor.data_ptr


def exported(table, obj):
    """Export an object; return the managed tensor's fields and flags, and release it."""
    managed = table.export(obj)
    found = says(managed.dl_tensor), managed.flags
    lib.dlx_managed_release(managed)
    return found


def test_it_is_a_table_like_any_other(table):
    """The capsule has the standard's name; the version is 1.3; no slot is NULL; some slots are dlx.Tensor's."""
    assert '"dlpack_exchange_api"' in repr(dlx.exchange_api)
    header = table.api.header
    assert (header.version.major, header.version.minor, header.prev_api) == (1, 3, ffi.NULL)
    assert all(getattr(table.api, name) != ffi.NULL for name, _ in ffi.typeof("DLPackExchangeAPI").fields[1:])
    tensor = dlx.empty((2, 3), "float32")
    made = table.take(table.export(tensor))
    assert type(made) is dlx.Tensor and describes(made) == describes(tensor)
    assert table.stream((1, 0)) == 0


def arrays(np, torch):
    """Return writable host arrays of numpy, torch and dlx, of several layouts and dtypes."""
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made = [base, base[::-1, :, ::2], base.T, np.ones((), np.int16), np.zeros((0, 3)), np.ones(3, np.complex64)]
    made += [torch.ones(2, 3).T, torch.ones(5, dtype=torch.bfloat16)[::2], torch.ones(3, dtype=torch.int8)]
    return [*made, dlx.convert(base, to="dlx"), dlx.empty((2, 0), "float64")]


@pytest.mark.torch("2.10")  # older versions have no exchange table
def test_it_borrows_what_needs_no_conversion(np, torch, table):
    """A borrowed DLTensor equals dlx.from_dlpack's tensor, without creating or keeping objects."""
    for source in arrays(np, torch):
        expected = describes(dlx.from_dlpack(source))
        before, live = sys.getrefcount(source), native.live()
        assert says(table.borrow(source)) == expected
        assert (sys.getrefcount(source), native.live()) == (before, live)


def test_it_borrows_from_tvm_ffi(np, table):
    """A tvm_ffi tensor is read in place; both slots refuse one whose handle was moved away."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    for source in (np.arange(6, dtype="i2").reshape(2, 3), np.ones(()), np.ones((4, 0), "u1")):
        tensor = tvm_ffi.from_dlpack(source)
        assert says(table.borrow(tensor)) == describes(dlx.from_dlpack(tensor))
    moved = tvm_ffi.Tensor.__new__(tvm_ffi.Tensor)
    for slot in (table.borrow, table.export):
        with pytest.raises(BufferError):
            slot(moved)


def test_it_exports_any_array(np, torch, table):
    """A managed tensor equals dlx.from_dlpack's tensor, including read-only, and is released once."""
    readonly = np.ones(3)
    readonly.flags.writeable = False
    for source in [*arrays(np, torch), readonly, array.array("d", [1, 2]), b"abc", memoryview(bytearray(4))]:
        tensor = dlx.from_dlpack(source)
        expected = describes(tensor), tensor.flags
        before, live = sys.getrefcount(source), native.live()
        assert exported(table, source) == expected
        assert (sys.getrefcount(source), native.live()) == (before, live)


def test_exported_memory_is_kept(table):
    """The managed tensor keeps its source alive until its deleter is called."""
    source = Owner(b"abc")
    gone = weakref.ref(source)
    managed = table.export(source)
    del source
    gc.collect()
    assert gone() is not None and bytes(ffi.buffer(managed.dl_tensor.data, 3)) == b"abc"
    lib.dlx_managed_release(managed)
    assert gone() is None


def test_what_cannot_be_borrowed_says_so(np, torch, table):
    """Borrowing read-only memory, buffers, pending negations, gradients and other objects is a BufferError."""
    readonly = np.ones(3)
    readonly.flags.writeable = False
    negative = torch.tensor([1 + 2j]).conj().imag
    for source in (readonly, b"abc", bytearray(2), negative, torch.ones(2, requires_grad=True), 3, [np.ones(2)]):
        with pytest.raises(BufferError, match="Export a managed tensor"):
            table.borrow(source)
    with pytest.raises(errors.ReadOnlyError):
        table.borrow(dlx.from_dlpack(b"abc"))


def test_guards_are_asked(torch, table):
    """Guards refuse or resolve states that the frameworks' tables hide, like dlx.from_dlpack."""
    negative = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    managed = table.export(negative)
    values = ffi.cast("float*", managed.dl_tensor.data)
    assert [values[i * managed.dl_tensor.strides[0]] for i in range(2)] == [-2, -4]
    lib.dlx_managed_release(managed)
    with pytest.raises(errors.ConversionError, match="requires gradients"):
        table.export(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("source", [3, None, object(), [b"abc"], {"a": b"abc"}], ids=lambda obj: type(obj).__name__)
def test_what_is_no_array_is_refused(table, source):
    """The errors are the same as from dlx.from_dlpack."""
    with pytest.raises(errors.AdapterNotFoundError, match=r"it is not an array|not one array"):
        table.export(source)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_interrupts_go_through(mylib, hostile, table, error):
    """BaseExceptions of a guard end the call, in both slots."""
    mylib.adapter.fast_path = replace(mylib.adapter.fast_path, guards=(Guard("nasty"),))
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()

    def raising(self):
        raise error

    mylib.Array.nasty = property(raising)
    for slot in (table.borrow, table.export):
        with pytest.raises(error):
            slot(mylib.Array())


BAD_LOANS = {
    "fails": {"rc": -1, "error": True},
    "fails silently": {"rc": -1},
    "negative extent": {"shape": (2, -3)},
    "overflowing strides": {"shape": (2, 3), "strides": (2**62, 2**62)},
    "null data": {"address": 0},
    "null shape": {"shape": None, "ndim": 2},
    "null strides": {"strides": None},
    "huge ndim": {"ndim": 2**31 - 1},
    "no bits": {"dtype": (2, 0, 1)},
    "code 200": {"dtype": (200, 32, 1)},
    "another device": {"device": 2},
    "huge offset": {"offset": 2**64 - 1},
}


@pytest.mark.parametrize("loan", BAD_LOANS)
def test_a_bad_loan_is_not_passed_on(mylib, hostile, table, loan):
    """Results that a type's table refuses or garbles are refused; the managed tensor comes from `__dlpack__`."""
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    good = {"address": native.buffer_address(memoryview(hostile.memory)), "strides": (3, 1)}
    source = mylib.Array()
    hostile.lend(**good)
    assert says(table.borrow(source))[:2] == ([2, 3], [3, 1])
    hostile.lend(**{**good, **BAD_LOANS[loan]})
    with pytest.raises(BufferError):
        table.borrow(source)
    assert source.asked == 0 and exported(table, source)[0][0] == [2, 3]


def test_a_guard_that_borrows_does_no_harm(np, mylib, hostile, table):
    """Guards that run after borrowing may run Python: the result is borrowed after them."""
    mylib.adapter.fast_path = replace(mylib.adapter.fast_path, guards=(Guard("nasty", kinds=("float",)),))
    mylib.Array.__dlpack_c_exchange_api__ = hostile.capsule()
    lent = {"address": native.buffer_address(memoryview(hostile.memory)), "strides": (3, 1)}
    hostile.lend(**lent)

    def shrinks(self):
        hostile.lend(**lent, shape=(1, 2))
        return False

    mylib.Array.nasty = property(shrinks)
    assert says(table.borrow(mylib.Array()))[0] == [1, 2]
