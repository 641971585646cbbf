"""Import and export of the struct from before DLPack 1.0."""

import ctypes

import pytest
from support.arrays.reference import FLOAT32, INT4, INT8, IS_COPIED, READ_ONLY, row_major

from dlx import errors
from dlx._core import native


def over(memory, shape, strides=None, dtype=INT8, *, flags=0, at=0):
    """Return a dlx.Tensor over a bytearray."""
    address = native.buffer_address(memoryview(memory)) + at
    return native.tensor_new(address, shape, strides, dtype, (1, 0), flags, memory)


def values(tensor):
    """Return the bytes of a one-dimensional int8 tensor."""
    step = tensor.strides[0]
    return [ctypes.c_uint8.from_address(tensor.data_ptr + step * i).value for i in range(tensor.shape[0])]


def described(tensor):
    """Return all attributes that both generations have."""
    return tensor.shape, tensor.strides, tensor.dtype, tensor.device, tensor.data_ptr, tensor.nbytes


LAYOUTS = [((), None), ((6,), None), ((6,), (-1,)), ((3,), (2,)), ((2, 3), (1, 2)), ((4,), (0,)), ((0, 5), None)]


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
def test_legacy_in_says_what_it_said(counting, shape, strides):
    """A legacy capsule keeps shape, strides and dtype; the tensor is writable and not marked as copied."""
    tensor = native.capsule_claim(counting.capsule(shape, strides, (1, 16, 1), legacy=True, byte_offset=64))
    wanted = strides if strides is not None else row_major(shape)
    assert (tensor.shape, tensor.dtype, tensor.flags) == (shape, (1, 16, 1), 0)
    assert tensor.strides == wanted or 0 in shape


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
def test_legacy_out_says_the_same(shape, strides):
    """A tensor exported in a legacy capsule is imported unchanged, at the same address."""
    tensor = over(bytearray(64), shape, strides, at=16)
    capsule = tensor.__dlpack__()
    assert native.capsule_state(capsule) == "legacy"
    assert described(native.capsule_claim(capsule)) == described(tensor)


def test_legacy_in_without_shape(counting):
    """With no dimensions, a NULL shape and NULL strides mean a scalar."""
    tensor = native.capsule_claim(counting.capsule((), None, legacy=True))
    assert (tensor.shape, tensor.strides, tensor.nbytes) == ((), (), 4)


def test_legacy_in_with_offset(counting):
    """The byte offset is added to the address."""
    at = [native.capsule_claim(counting.capsule(legacy=True)).data_ptr]
    capsule = counting.capsule(legacy=True, byte_offset=12)
    seen = native.capsule_peek(capsule)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    data = ctypes.c_void_p.from_address(pointer(capsule, b"dltensor")).value
    assert seen.data_ptr == data + 12
    assert at[0] % 4 == 0


@pytest.mark.parametrize("null_data", [False, True])
def test_legacy_in_of_nothing(counting, null_data):
    """An empty tensor is imported with or without memory."""
    before = counting.deleted
    tensor = native.capsule_claim(counting.capsule((3, 0), None, legacy=True, null_data=null_data))
    assert (tensor.shape, tensor.nbytes, bool(tensor.data_ptr)) == ((3, 0), 0, not null_data)
    del tensor
    assert counting.deleted == before + 1


def test_legacy_in_without_deleter(counting):
    """A NULL deleter is not called."""
    before = counting.deleted
    tensor = native.capsule_claim(counting.capsule(legacy=True, null_deleter=True))
    assert tensor.shape == (2, 3)
    del tensor
    assert counting.deleted == before


@pytest.mark.parametrize("version", [None, (0, 8), (0, 0)])
def test_read_only_does_not_go_out_as_legacy(version):
    """A legacy capsule has no read-only flag: read-only memory is rejected, unless a copy is requested."""
    memory = bytearray(range(8))
    tensor = over(memory, (8,), flags=READ_ONLY)
    with pytest.raises(errors.ReadOnlyError):
        tensor.__dlpack__(max_version=version)
    copy = native.capsule_claim(tensor.__dlpack__(max_version=version, copy=True))
    assert copy.data_ptr != tensor.data_ptr
    assert values(copy) == list(memory)


def test_read_only_without_elements_goes_out_as_legacy():
    """It cannot be written."""
    tensor = over(bytearray(8), (2, 0), flags=READ_ONLY)
    assert native.capsule_claim(tensor.__dlpack__()).shape == (2, 0)


def test_read_only_goes_out_versioned():
    """A versioned capsule keeps the flag."""
    tensor = over(bytearray(8), (8,), flags=READ_ONLY)
    assert native.capsule_claim(tensor.__dlpack__(max_version=(1, 0))).readonly


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
@pytest.mark.parametrize(
    "path", [(None, (1, 0)), ((1, 0), None), (None, (1, 0), None), ((1, 0), None, (1, 0)), (None,) * 5], ids=str
)
def test_round_trips_through_both(counting, path, shape, strides):
    """After legacy and versioned exports in any order, the tensor is unchanged, and deleted once."""
    before = counting.deleted
    tensor = native.capsule_claim(counting.capsule(shape, strides, legacy=path[0] is None, byte_offset=64))
    first = described(tensor)
    for version in path:
        tensor = native.capsule_claim(tensor.__dlpack__(max_version=version))
        assert counting.deleted == before
    assert described(tensor) == first
    del tensor
    assert counting.deleted == before + 1


def test_values_cross_both_ways():
    """A legacy round trip shares the source's bytes."""
    memory = bytearray(range(16))
    tensor = native.capsule_claim(over(memory, (4,), (-3,), at=12).__dlpack__())
    memory[9] = 99
    assert values(tensor) == [12, 99, 6, 3]


def test_dtypes_cross_both_ways():
    """The legacy struct keeps code, bits and lanes."""
    for dtype in (FLOAT32, (2, 32, 4), (17, 4, 2), (99, 24, 1), INT4):
        assert native.capsule_claim(over(bytearray(64), (2,), None, dtype).__dlpack__()).dtype == dtype


def test_a_copied_legacy_capsule_is_free_of_its_source(counting):
    """A legacy copy holds no reference to its source."""
    before = counting.deleted
    tensor = native.capsule_claim(counting.capsule((4,), legacy=True))
    capsule = tensor.__dlpack__(copy=True)
    del tensor
    assert counting.deleted == before + 1
    copy = native.capsule_claim(capsule)
    assert (copy.shape, copy.nbytes, copy.flags & IS_COPIED) == ((4,), 16, 0)
