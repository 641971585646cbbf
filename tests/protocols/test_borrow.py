"""`borrow`: an array lent to C code as a DLTensor during a block."""

import gc
import weakref

import pytest

import dlx
from dlx._core.native import ffi
from dlx.errors import ConversionError, CopyRequiredError, ReadOnlyError, StreamError

READ_ONLY = 1


class Owner(bytearray):
    """Bytes that support weak references."""


class Producer:
    """An object with only `__dlpack__`, which counts its calls."""

    def __init__(self, tensor, **keywords):
        self.tensor, self.keywords, self.calls = tensor, keywords, 0

    def __dlpack__(self, **keywords):
        self.calls += 1
        return self.tensor.__dlpack__(**{**keywords, **self.keywords})

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_borrow_lends_the_memory_itself():
    """Inside the block the DLTensor describes the array and points to its memory."""
    source = bytearray(b"abc")
    with dlx.borrow(source) as tensor:
        assert ffi.typeof(tensor) is ffi.typeof("DLTensor *")
        assert (tensor.ndim, tensor.shape[0], tensor.strides[0], tensor.byte_offset) == (1, 3, 1, 0)
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (1, 8, 1)
        assert (tensor.device.device_type, tensor.device.device_id) == (1, 0)
        ffi.cast("char *", tensor.data)[1] = b"X"
    assert source == b"aXc"


def test_borrow_lends_strides_in_elements(np):
    """A strided view keeps its strides, including negative ones."""
    array = np.arange(12.0).reshape(3, 4)[::-1, ::2]
    with dlx.borrow(array) as tensor:
        assert list(tensor.strides[0:2]) == [-4, 2]
        assert int(ffi.cast("uintptr_t", tensor.data)) == array.ctypes.data


def test_borrow_keeps_the_source_until_the_block_is_left():
    """The array lives as long as the block."""
    source = Owner(3)
    gone = weakref.ref(source)
    borrowed = dlx.borrow(source)
    with borrowed:
        del source
        assert gone() is not None
    assert gone() is None


def test_borrow_releases_after_an_exception():
    """An exception inside the block propagates, and the array is released."""
    source = Owner(3)
    gone = weakref.ref(source)
    with pytest.raises(KeyError), dlx.borrow(source):
        del source
        raise KeyError
    gc.collect()
    assert gone() is None


def test_a_kept_tensor_is_emptied():
    """A cdata that is used after the block has no memory and no dimensions."""
    with dlx.borrow(bytearray(3)) as tensor:
        assert tensor.data != ffi.NULL
    assert tensor.data == tensor.shape == tensor.strides == ffi.NULL
    assert tensor.ndim == 0


def test_a_borrow_is_entered_once():
    """Entering the same object again, in the block or after it, is an error."""
    borrowed = dlx.borrow(bytearray(3))
    with borrowed as tensor:
        with pytest.raises(RuntimeError, match="cannot enter this borrow again"):
            borrowed.__enter__()
        assert tensor.ndim == 1
    with pytest.raises(RuntimeError, match=r"Call dlx\.borrow again"):
        borrowed.__enter__()


def test_what_c_writes_into_the_shape_changes_no_tensor():
    """The lent shape and strides are copies."""
    source = dlx.empty((2, 3), "int8")
    with dlx.borrow(source) as tensor:
        tensor.shape[0] = tensor.strides[0] = 99
    assert (source.shape, source.strides) == ((2, 3), (3, 1))


def test_borrow_refuses_read_only_memory():
    """Read-only memory is refused unless readonly=True."""
    with pytest.raises(ReadOnlyError, match=r"cannot borrow bytes .*Pass readonly=True if you only read it\."):
        dlx.borrow(b"abc").__enter__()


def test_borrow_lends_read_only_memory_to_readers():
    """With readonly=True, read-only memory is lent without a copy."""
    source = b"abc"
    with dlx.borrow(source, readonly=True) as tensor:
        assert int(ffi.cast("uintptr_t", tensor.data)) == dlx.describe(source).address


def test_borrow_refuses_a_read_only_capsule_untouched(counting):
    """A refused read-only capsule keeps its name."""
    capsule = counting.capsule(flags=READ_ONLY)
    with pytest.raises(ReadOnlyError):
        dlx.borrow(capsule).__enter__()
    assert counting.name(capsule) == "dltensor_versioned"


def test_borrow_of_a_capsule_uses_it_up(counting):
    """A capsule is consumed for the block, and its deleter runs once at the end."""
    before, capsule = counting.deleted, counting.capsule()
    with dlx.borrow(capsule):
        assert counting.deleted == before
    assert counting.deleted == before + 1
    del capsule
    assert counting.deleted == before + 1


def test_borrow_calls_a_producer_once():
    """`__dlpack__` is called once, on entry."""
    producer = Producer(dlx.empty(3, "int8"))
    borrowed = dlx.borrow(producer)
    assert producer.calls == 0
    with borrowed:
        assert producer.calls == 1


def test_borrow_never_lends_a_copy_to_be_written(np):
    """A copy is refused if C may write: of a producer that copies, or of a scalar."""
    with pytest.raises(CopyRequiredError, match="Pass readonly=True to read a copy"):
        dlx.borrow(Producer(dlx.empty(3, "int8"), copy=True)).__enter__()
    with pytest.raises(CopyRequiredError):
        dlx.borrow(np.float32(1)).__enter__()


def test_borrow_lends_a_copy_to_readers(torch):
    """With readonly=True a pending neg bit is resolved into a copy; otherwise it is refused."""
    tensor = torch.tensor([1 + 2j]).conj().imag
    assert tensor.is_neg()
    with dlx.borrow(tensor, readonly=True) as borrowed:
        assert ffi.cast("float *", borrowed.data)[0] == -2
    with pytest.raises(CopyRequiredError):
        dlx.borrow(tensor).__enter__()


def test_borrow_of_host_memory_has_no_stream():
    """A stream for host memory is refused; -1 means no stream."""
    with pytest.raises(StreamError):
        dlx.borrow(bytearray(3), stream=7).__enter__()
    with dlx.borrow(bytearray(3), stream=-1) as tensor:
        assert tensor.shape[0] == 3


def test_borrow_refuses_gradients(torch):
    """A tensor that requires gradients is refused."""
    with pytest.raises(ConversionError, match="requires gradients"):
        dlx.borrow(torch.ones(2, requires_grad=True)).__enter__()
