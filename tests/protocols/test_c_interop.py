"""from_dlpack, empty and to_capsule: raw exports, and new memory."""

import gc
import weakref

import pytest

import dlx
from dlx._core.native import ffi
from dlx.errors import (
    AdapterNotFoundError,
    ConsumedError,
    ConversionError,
    DeviceError,
    DTypeError,
    LayoutError,
    ReadOnlyError,
)

READ_ONLY = 1


class Owner(bytearray):
    """Bytes that support weak references."""


# ---- from_dlpack -----------------------------------------------------------------------------------------------------


def test_from_dlpack_shares_and_keeps_what_it_is_given():
    """The tensor shares the source's memory and keeps the source alive."""
    source = Owner(b"abc")
    gone = weakref.ref(source)
    tensor = dlx.from_dlpack(source)
    assert (tensor.shape, str(tensor.dtype), tensor.readonly) == ((3,), "uint8", False)
    assert tensor.data_ptr == dlx.describe(source).address
    del source
    assert gone() is not None
    del tensor
    assert gone() is None


def test_from_dlpack_of_a_tensor_is_the_tensor():
    """A dlx.Tensor is returned unchanged."""
    tensor = dlx.empty(3, "int8")
    assert dlx.from_dlpack(tensor) is tensor


def test_from_dlpack_takes_a_capsule_once(counting):
    """A raw capsule is consumed once; its deleter runs once."""
    before, capsule = counting.deleted, counting.capsule()
    tensor = dlx.from_dlpack(capsule)
    with pytest.raises(ConsumedError):
        dlx.from_dlpack(capsule)
    assert counting.deleted == before
    del tensor, capsule
    assert counting.deleted == before + 1


def test_from_dlpack_refuses_what_is_no_array():
    """A list is refused like in `convert`."""
    with pytest.raises(AdapterNotFoundError):
        dlx.from_dlpack([1.0])


def test_a_fix_names_the_call_that_has_the_option(torch):
    """from_dlpack has no detach=: the fix names the function with the option."""
    with pytest.raises(ConversionError, match=r"Pass detach=True to dlx\.convert"):
        dlx.from_dlpack(torch.ones(2, requires_grad=True))


# ---- empty -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4), 7, [5]])
@pytest.mark.parametrize("dtype", ["bool", "int64", "bfloat16", "float32x4", (2, 64, 1)])
def test_empty_has_the_shape_and_dtype_asked_for(shape, dtype):
    """New memory is on the host, row-major, writable, aligned to 256 bytes, and absent for an empty array."""
    tensor = dlx.empty(shape, dtype)
    assert tensor.shape == ((shape,) if isinstance(shape, int) else tuple(shape))
    assert tensor.dtype == dlx.DType(dtype)
    assert (tensor.device, tensor.readonly, tensor.flags) == ((1, 0), False, 0)
    assert tensor.data_ptr % 256 == 0
    assert (tensor.data_ptr == 0) == (0 in tensor.shape)
    assert tensor.strides == dlx.convert(tensor, to="dlx", copy=True).strides


def test_empty_memory_is_its_own_and_can_be_written():
    """Every byte can be written, and two tensors do not overlap."""
    a, b = dlx.empty(1000, "uint8"), dlx.empty(1000, "uint8")
    for tensor, byte in ((a, b"a"), (b, b"b")):
        ffi.buffer(ffi.cast("char *", tensor.data_ptr), 1000)[:] = byte * 1000
    assert ffi.string(ffi.cast("char *", a.data_ptr), 1000) == b"a" * 1000


def test_empty_packs_elements_below_a_byte():
    """Three elements of four bits take two bytes."""
    assert dlx.empty(3, "float4_e2m1fn").nbytes == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((-1,), "int8"), ValueError, "negative extent, found"),
        (("ab", "int8"), TypeError, "shape must be a sequence of int"),
        ((2.5, "int8"), TypeError, "shape must be a sequence of int, found 2.5"),
        (((2**70,), "int8"), ValueError, "64-bit"),
        ((2**70, "int8"), ValueError, "64-bit"),
        (((2**40, 2**40), "int8"), LayoutError, "63 bits"),
        (([1] * 129, "int8"), LayoutError, "128"),
        ((3, "float"), DTypeError, "unknown dtype 'float'"),
        ((3, (2, 0, 1)), DTypeError, "no bits"),
        ((3, (2, 999, 1)), DTypeError, "no bits"),
        ((3, "int8", "cuda"), DeviceError, "no CUDA driver"),
        ((3, "int8", "rocm"), DeviceError, "cannot allocate memory on rocm:0"),
        ((3, "int8", "cpu:1"), DeviceError, "cannot allocate memory on cpu:1"),
        ((3, "int8", "nowhere"), DeviceError, "unknown device 'nowhere'"),
        ((2**58, "int8"), MemoryError, None),
    ],
)
def test_empty_refuses(arguments, error, message):
    """Invalid allocations raise the error of their reason."""
    with pytest.raises(error, match=message):
        dlx.empty(*arguments)


# ---- to_capsule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((1, 3), "dltensor_versioned"),
        ((2, 0), "dltensor_versioned"),
    ],
)
def test_a_capsule_of_the_version_that_the_consumer_reads(counting, max_version, name):
    """None and major 0 request a legacy capsule, 1.0 and above a versioned one."""
    assert counting.name(dlx.to_capsule(bytearray(4), max_version=max_version)) == name


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_keeps_the_source_until_it_goes(max_version):
    """An unconsumed capsule keeps the source alive, and releases it at its end."""
    source = Owner(4)
    gone = weakref.ref(source)
    capsule = dlx.to_capsule(source, max_version=max_version)
    del source
    assert gone() is not None
    del capsule
    assert gone() is None


@pytest.mark.parametrize("thread", [False, True], ids=["here", "foreign-thread"])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_consumer_releases_the_source(counting, legacy, thread):
    """The consumer's call of the deleter, without the GIL and on any thread, releases the source."""
    source = Owner(4)
    gone = weakref.ref(source)
    address = counting.consume(dlx.to_capsule(source, max_version=None if legacy else (1, 0)), legacy=legacy)
    del source
    gc.collect()
    assert gone() is not None
    counting.delete(address, legacy=legacy, thread=thread)
    assert gone() is None


def test_a_versioned_capsule_says_read_only(counting):
    """The capsule has the flag of read-only memory."""
    address = counting.consume(dlx.to_capsule(b"abc", max_version=(1, 0)))
    assert ffi.cast("DLManagedTensorVersioned *", address).flags == READ_ONLY
    counting.delete(address)


@pytest.mark.parametrize("max_version", [None, (0, 8)])
def test_a_legacy_capsule_of_read_only_memory_is_refused(max_version):
    """A legacy capsule of read-only memory is refused; the fix names the parameter."""
    with pytest.raises(ReadOnlyError, match=r"cannot export bytes \(uint8.*: .*Pass max_version=\(1, 0\)"):
        dlx.to_capsule(b"abc", max_version=max_version)


def test_a_refused_capsule_is_untouched(counting):
    """A read-only capsule that cannot become a legacy one keeps its name and can still be used."""
    before, capsule = counting.deleted, counting.capsule(flags=READ_ONLY)
    with pytest.raises(ReadOnlyError):
        dlx.to_capsule(capsule)
    assert counting.name(capsule) == "dltensor_versioned"
    assert dlx.from_dlpack(capsule).readonly
    del capsule
    assert counting.deleted == before + 1


@pytest.mark.parametrize("max_version", [1, (1,), "1.0", [1, 0], (1, 0, 0)])
def test_a_version_is_a_pair(counting, max_version):
    """An invalid max_version is a TypeError before anything is consumed."""
    capsule = counting.capsule()
    with pytest.raises(TypeError, match="max_version must be None or a tuple"):
        dlx.to_capsule(capsule, max_version=max_version)
    assert counting.name(capsule) == "dltensor_versioned"


def test_a_capsule_of_numpy_and_torch(np, torch):
    """Each framework imports the other's capsule and shares the memory."""
    array = np.zeros(3, np.float32)
    tensor = torch.utils.dlpack.from_dlpack(dlx.to_capsule(array, max_version=(1, 0)))
    tensor[1] = 5
    assert array[1] == 5
