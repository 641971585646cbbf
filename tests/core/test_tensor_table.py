"""dlx.Tensor's exchange table: each slot's result, its owner, and its errors."""

import ctypes
import gc
import weakref

import pytest
from support.arrays.reference import FLOAT32, INT4, IS_COPIED, READ_ONLY, dltensor, row_major

import dlx
from dlx import errors
from dlx._core import native
from dlx._core.native import ffi, lib

DEVICES = [(2, 0), (3, 0), (4, 1), (8, 0), (10, 0), (13, 0), (99, 0)]


class Owner(bytearray):
    """Memory with a weak reference."""


def over(shape=(2, 3), strides=None, dtype=FLOAT32, device=(1, 0), flags=0, *, owner=None, at=0):
    """Return a dlx.Tensor over 64 bytes 0, 1, 2, ..."""
    owner = Owner(range(64)) if owner is None else owner
    address = native.buffer_address(memoryview(owner)) + at
    return native.tensor_new(address, shape, strides, dtype, device, flags, owner)


def numbers(pointer, n):
    """Return n numbers at a pointer as a tuple."""
    return tuple(pointer[i] for i in range(n))


def described(t):
    """Return the fields of a DLTensor as plain values."""
    dtype, device = (t.dtype.code, t.dtype.bits, t.dtype.lanes), (t.device.device_type, t.device.device_id)
    return numbers(t.shape, t.ndim), numbers(t.strides, t.ndim), dtype, device, int(ffi.cast("uintptr_t", t.data))


def says(tensor):
    """Return the same of a dlx.Tensor."""
    return tensor.shape, tensor.strides, tuple(tensor.dtype), tuple(tensor.device), tensor.data_ptr


# ---- the table


def test_the_type_publishes_a_capsule():
    """The attribute is on the type; attribute and capsule have the standard's names."""
    capsule = vars(dlx.Tensor)["__dlpack_c_exchange_api__"]
    assert type(capsule).__name__ == "PyCapsule" and '"dlpack_exchange_api"' in repr(capsule)
    assert over().__dlpack_c_exchange_api__ is dlx.Tensor.__dlpack_c_exchange_api__ is capsule


def test_the_table_cannot_be_replaced():
    """The type is immutable, including its table."""
    with pytest.raises(TypeError):
        dlx.Tensor.__dlpack_c_exchange_api__ = None
    with pytest.raises((TypeError, AttributeError)):
        over().__dlpack_c_exchange_api__ = None


def test_header(exchange):
    """The table has version 1.3 and no predecessor."""
    header = exchange.api.header
    assert (header.version.major, header.version.minor, header.prev_api) == (1, 3, ffi.NULL)


@pytest.mark.parametrize("slot", [name for name, _ in ffi.typeof("DLPackExchangeAPI").fields if name != "header"])
def test_every_slot_is_real(exchange, slot):
    """No slot is NULL."""
    assert getattr(exchange.api, slot) != ffi.NULL


# ---- the allocator


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (4, 1, 7), (1000, 257)])
@pytest.mark.parametrize("dtype", [FLOAT32, (0, 8, 1), (5, 128, 1), (4, 16, 1), (2, 32, 4)])
def test_allocate(exchange, shape, dtype, thread):
    """New writable CPU memory, aligned to 256 bytes, row-major, from any thread, without the GIL."""
    call = exchange.allocate(dltensor(shape, None, dtype), thread=thread)
    assert (call.rc, call.reports) == (0, 0)
    tensor = exchange.take(call.out)
    assert says(tensor)[:4] == (shape, row_major(shape), dtype, (1, 0))
    assert tensor.data_ptr % 256 == 0 and tensor.data_ptr and not tensor.readonly
    ctypes.memset(tensor.data_ptr, 0x5A, tensor.nbytes)


def test_allocate_packs_small_elements(exchange):
    """Five int4 take three bytes, as the ABI requires without a flag."""
    tensor = exchange.take(exchange.allocate(dltensor((5,), None, INT4)).out)
    assert (tensor.nbytes, tensor.flags) == (3, 0)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2**62)])
def test_allocate_nothing(exchange, shape):
    """A shape without elements needs no memory."""
    tensor = exchange.take(exchange.allocate(dltensor(shape)).out)
    assert (tensor.shape, tensor.nbytes, tensor.data_ptr) == (shape, 0, 0)


def test_allocate_reads_only_what_the_protocol_names(exchange):
    """Strides, data and byte offset of the prototype are ignored."""
    prototype = dltensor((2, 3), (1, 2), address=0, byte_offset=2**64 - 1)
    plain = exchange.take(exchange.allocate(prototype).out)
    prototype.strides = ffi.cast("int64_t*", 1)
    bad = exchange.take(exchange.allocate(prototype).out)
    assert plain.strides == bad.strides == (3, 1)


def test_allocated_memory_is_released_without_python(exchange, counting):
    """The deleter of allocated memory runs on a thread unknown to Python."""
    before = native.live()
    call = exchange.allocate(dltensor((9,)), thread=True)
    assert native.live() == before + 1
    counting.delete(call.out, thread=True)
    assert native.live() == before


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize(
    ("prototype", "kind", "message"),
    [
        (dltensor((2**40, 2**18), None, (0, 8, 1)), b"MemoryError", b"memory"),
        (dltensor((2**62, 2)), b"ValueError", b""),
        (dltensor((-1,)), b"ValueError", b""),
        (dltensor(None, ndim=2), b"ValueError", b""),
        (dltensor(None, ndim=-1), b"ValueError", b""),
        (dltensor(None, ndim=129), b"ValueError", b""),
        (dltensor((2,), None, (2, 0, 1)), b"ValueError", b""),
        (dltensor((2,), None, (2, 32, 0)), b"ValueError", b""),
        *((dltensor((2,), device=device), b"BufferError", b"(%d, %d)" % device) for device in DEVICES[1:]),
        (dltensor((2,), device=DEVICES[0]), b"BufferError", b"no CUDA driver"),
    ],
)
def test_allocate_reports_once(exchange, prototype, kind, message, thread):
    """A failure is -1, NULL, and one report with the name of an exception and a message."""
    call = exchange.allocate(prototype, thread=thread)
    assert (call.rc, call.out, call.reports, call.kind) == (-1, None, 1, kind)
    assert call.message and message in call.message


# ---- managed_tensor_from_py_object


@pytest.mark.parametrize("device", [(1, 0), (3, 1), (2, 0), (8, 0)])
@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), None), ((3, 2), (1, 3)), ((4,), (-1,)), ((2,), (0,)), ((), ())]
)
def test_export(exchange, shape, strides, device):
    """The managed tensor has the dlx.Tensor's fields, on any device."""
    tensor = over(shape, strides, device=device, at=24)
    managed = exchange.export(tensor)
    assert described(managed.dl_tensor) == says(tensor)
    assert (managed.version.major, managed.version.minor, managed.flags) == (1, 3, 0)
    lib.dlx_managed_release(managed)


@pytest.mark.parametrize("flags", [0, READ_ONLY, IS_COPIED, READ_ONLY | IS_COPIED])
def test_export_flags(exchange, flags):
    """The read-only flag is exported; the copied flag is not."""
    managed = exchange.export(over(flags=flags))
    assert managed.flags == flags & READ_ONLY
    lib.dlx_managed_release(managed)


def test_export_keeps_the_memory_alive(exchange):
    """The managed tensor keeps the owner and its shape until its deleter runs."""
    owner = Owner(range(64))
    gone = weakref.ref(owner)
    managed = exchange.export(over(owner=owner))
    del owner
    gc.collect()
    assert gone() is not None and numbers(managed.dl_tensor.shape, 2) == (2, 3)
    lib.dlx_managed_release(managed)
    assert gone() is None


@pytest.mark.parametrize("obj", [None, b"abc", 3, dlx.Tensor], ids=repr)
@pytest.mark.parametrize("slot", ["export", "borrow"])
def test_only_dlx_tensors(exchange, slot, obj):
    """Other objects raise TypeError."""
    with pytest.raises(TypeError, match=r"expected dlx\.Tensor"):
        getattr(exchange, slot)(obj)


# ---- managed_tensor_to_py_object


def test_import_takes_ownership(exchange, counting):
    """The foreign deleter runs once, with the last dlx.Tensor."""
    before = counting.deleted
    tensor = exchange.take(counting.managed((2, 3)))
    assert type(tensor) is dlx.Tensor and says(tensor)[:4] == ((2, 3), (3, 1), FLOAT32, (1, 0))
    view = native.tensor_view(tensor, None, None, None, None)
    del tensor
    assert counting.deleted == before
    del view
    assert counting.deleted == before + 1


@pytest.mark.parametrize(
    ("flags", "kept"), [(0, 0), (READ_ONLY, READ_ONLY), (IS_COPIED, 0), (READ_ONLY | IS_COPIED, READ_ONLY)]
)
def test_import_flags(exchange, counting, flags, kept):
    """The read-only flag is kept; the copied flag is dropped."""
    assert exchange.take(counting.managed(flags=flags)).flags == kept


@pytest.mark.parametrize("arguments", [{"strides": None}, {"byte_offset": 16}, {"version": (1, 99)}])
def test_import_of_what_others_write(exchange, counting, arguments):
    """NULL strides, a byte offset and a later minor version are supported."""
    tensor = exchange.take(counting.managed((2, 3), **arguments))
    assert (tensor.strides, tensor.byte_offset) == ((3, 1), 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"version": (2, 0)}, errors.ProtocolError),
        ({"version": (0, 8)}, errors.ProtocolError),
        ({"null_data": True}, errors.LayoutError),
        ({"shape": (2, -3)}, errors.ProtocolError),
        ({"dtype": (2, 0, 1)}, errors.DTypeError),
        ({"shape": (2**62, 8)}, errors.LayoutError),
        ({"shape": (), "ndim": -1}, errors.LayoutError),
        ({"shape": None, "ndim": 3}, errors.ProtocolError),
    ],
)
def test_import_that_fails_takes_nothing(exchange, counting, arguments, error):
    """A rejected tensor is unchanged and stays the caller's, whose deleter call frees it."""
    before = counting.deleted
    address = counting.managed(**arguments)
    managed = ffi.cast("DLManagedTensorVersioned*", address)
    content = bytes(ffi.buffer(managed))
    with pytest.raises(error):
        exchange.take(address)
    assert counting.deleted == before and bytes(ffi.buffer(managed)) == content
    counting.delete(address)
    assert counting.deleted == before + 1


def test_there_and_back(exchange):
    """A dlx.Tensor exported by the table is imported over the same memory, with its read-only flag."""
    tensor = over((3, 2), (1, 3), flags=READ_ONLY)
    back = exchange.take(exchange.export(tensor))
    assert says(back) == says(tensor) and back.readonly


# ---- dltensor_from_py_object


@pytest.mark.parametrize("device", [(1, 0), (2, 3), (8, 0)])
def test_borrow(exchange, device):
    """The borrowed struct has the dlx.Tensor's fields."""
    tensor = over((3, 2), (1, 3), device=device)
    assert described(exchange.borrow(tensor)) == says(tensor)


def test_borrow_holds_nothing(exchange):
    """A borrowed struct owns nothing: the memory is freed with the dlx.Tensor."""
    tensor = over()
    before = native.live()
    look = exchange.borrow(tensor)
    assert native.live() == before
    assert numbers(look.shape, 2) == (2, 3)
    gc.collect()
    assert numbers(look.shape, 2) == (2, 3)  # while the dlx.Tensor lives
    del tensor
    assert native.live() == before - 1


def test_borrow_refuses_read_only(exchange):
    """A DLTensor has no read-only flag, so read-only memory cannot be borrowed; nothing is written."""
    out = ffi.new("DLTensor*")
    with pytest.raises(errors.ReadOnlyError, match="no read-only flag"):
        exchange.held.exchange_borrow(exchange.address, over(flags=READ_ONLY), int(ffi.cast("uintptr_t", out)))
    assert bytes(ffi.buffer(out)) == bytes(ffi.sizeof("DLTensor"))


# ---- current_work_stream


@pytest.mark.parametrize("device", [(1, 0), (1, 5), (3, 0), (11, 0)])
def test_host_memory_has_no_stream(exchange, device):
    """The stream of host memory is NULL."""
    assert exchange.stream(device) == 0


@pytest.mark.parametrize("device", [(2, 0), (2, 1), (10, 0), (13, 0), (8, 0), (99, 0)])
def test_no_stream_elsewhere(exchange, device):
    """A device without a known stream raises DeviceError: NULL would mean the default stream."""
    reason = "no CUDA driver" if device[0] in (2, 13) else rf"\({device[0]}, {device[1]}\)"
    with pytest.raises(errors.DeviceError, match=reason):
        exchange.stream(device)


# ---- a real consumer


def test_tvm_ffi_uses_the_table():
    """tvm_ffi imports a dlx.Tensor by its table, shares the memory, and returns dlx.Tensor from its functions."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    owner = Owner(range(64))
    tensor = over(owner=owner)
    taken = tvm_ffi.from_dlpack(tensor)
    assert (taken.data_ptr(), tuple(taken.shape)) == (tensor.data_ptr, (2, 3))
    # It finds the result's type only by the table: without one it returns a tvm_ffi.Tensor.
    echoed = tvm_ffi.get_global_func("testing.echo")(tensor)
    assert type(echoed) is dlx.Tensor and echoed.data_ptr == tensor.data_ptr
    gone = weakref.ref(owner)
    del owner, tensor, taken
    assert gone() is not None
    del echoed
    assert gone() is None
