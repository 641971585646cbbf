"""dlx.Tensor through other libraries and back: the same memory, and read-only where the other side can say it."""

import struct

import pytest

import dlx
from dlx import errors, native

SIX = struct.pack("6f", *range(6))


def tensor(readonly=False):
    """Return a dlx.Tensor over fresh memory aligned to 256 bytes, as jax wants it."""
    made = native.tensor_copy(dlx.convert(bytearray(SIX), to="dlx"), True)
    made = native.tensor_view(made, (1, 8, 1), None, 1 if readonly else 0, None)
    return native.tensor_new(made.data_ptr, (2, 3), None, (2, 32, 1), (1, 0), made.flags, made)


def numpy_(np, t):
    """Into numpy."""
    return np.from_dlpack(t)


def asarray(np, t):
    """Into numpy by the buffer protocol."""
    return np.asarray(t)


@pytest.mark.numpy("2.2.5")
@pytest.mark.parametrize("way", [numpy_, asarray])
@pytest.mark.parametrize("readonly", [False, True])
def test_numpy_and_back(np, way, readonly):
    """Numpy keeps the flag, both ways, and the memory is the same."""
    source = tensor(readonly)
    array = way(np, source)
    assert array.flags.writeable is not readonly and array.tobytes() == SIX
    back = dlx.convert(array, to="dlx")
    assert (back.readonly, back.data_ptr, back.shape) == (readonly, source.data_ptr, (2, 3))


def test_torch_and_back(torch):
    """Torch shares a writable tensor."""
    source = tensor()
    taken = torch.from_dlpack(source)
    assert taken.data_ptr() == source.data_ptr and taken.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dlx.convert(taken, to="dlx").data_ptr == source.data_ptr


def test_torch_gets_a_copy_of_read_only(torch):
    """Torch cannot say read-only, so dlx hands it a copy, and the source stays as it was."""
    source = tensor(readonly=True)
    taken = dlx.convert(source, to="torch")
    taken.fill_(9)
    assert taken.data_ptr() != source.data_ptr and bytes(source) == SIX


def test_tvm_ffi_and_back():
    """tvm_ffi shares the memory; it holds no read-only flag, and dlx's own return has none to give."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    source = tensor()
    taken = tvm_ffi.from_dlpack(source)
    back = dlx.convert(taken, to="dlx")
    assert taken.data_ptr() == back.data_ptr == source.data_ptr
    assert bytes(back) == SIX and not back.readonly


def test_jax_and_back():
    """Jax shares writable, aligned memory."""
    dlpack = pytest.importorskip("jax.dlpack")
    source = tensor()
    array = dlpack.from_dlpack(source)
    back = dlx.convert(array, to="dlx")
    assert array.unsafe_buffer_pointer() == back.data_ptr == source.data_ptr and bytes(back) == SIX


def test_jax_is_not_given_read_only_unsaid():
    """A jax that asks for a legacy capsule is refused read-only memory; one that can hear the flag gets it."""
    dlpack = pytest.importorskip("jax.dlpack")
    source = tensor(readonly=True)
    try:
        array = dlpack.from_dlpack(source)
    except errors.ReadOnlyError as error:
        assert "legacy" in str(error)
    else:
        assert bytes(array) == SIX


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("way", ["from_dlpack", "from_any_interface"])
def test_cuda_core_and_back(readonly, way):
    """A StridedMemoryView of cuda.core keeps the flag, both ways."""
    utils = pytest.importorskip("cuda.core.utils")
    source = tensor(readonly)
    view = getattr(utils.StridedMemoryView, way)(source, stream_ptr=-1)
    assert (view.ptr, view.readonly, view.shape) == (source.data_ptr, readonly, (2, 3))
    back = dlx.convert(view, to="dlx")
    assert (back.data_ptr, back.readonly) == (source.data_ptr, readonly)
