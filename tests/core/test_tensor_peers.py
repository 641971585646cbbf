"""dlx.Tensor to other libraries and back: the same memory, and read-only if the library supports the flag."""

import struct

import pytest

import dlx
from dlx import errors
from dlx._core import native

SIX = struct.pack("6f", *range(6))


def tensor(readonly=False):
    """Return a dlx.Tensor over new memory aligned to 256 bytes, as jax requires."""
    made = native.tensor_copy(dlx.convert(bytearray(SIX), to="dlx"), True)
    made = native.tensor_view(made, (1, 8, 1), None, 1 if readonly else 0, None)
    return native.tensor_new(made.data_ptr, (2, 3), None, (2, 32, 1), (1, 0), made.flags, made)


def numpy_(np, t):
    """Convert to numpy by `from_dlpack`."""
    return np.from_dlpack(t)


def asarray(np, t):
    """Convert to numpy by the buffer protocol."""
    return np.asarray(t)


@pytest.mark.numpy("2.2.5")
@pytest.mark.parametrize("way", [numpy_, asarray])
@pytest.mark.parametrize("readonly", [False, True])
def test_numpy_and_back(np, way, readonly):
    """Numpy keeps the flag in both directions, and shares the memory."""
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
    """Torch has no read-only flag, so it gets a copy, and the source is unchanged."""
    source = tensor(readonly=True)
    taken = dlx.convert(source, to="torch")
    taken.fill_(9)
    assert taken.data_ptr() != source.data_ptr and bytes(source) == SIX


def test_tvm_ffi_and_back():
    """tvm_ffi shares the memory; it has no read-only flag, so the result is writable."""
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
    """Jax versions that request a legacy capsule cannot import read-only memory; newer ones get the flag."""
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
    """A StridedMemoryView of cuda.core keeps the flag in both directions."""
    utils = pytest.importorskip("cuda.core.utils")
    source = tensor(readonly)
    view = getattr(utils.StridedMemoryView, way)(source, stream_ptr=-1)
    assert (view.ptr, view.readonly, view.shape) == (source.data_ptr, readonly, (2, 3))
    back = dlx.convert(view, to="dlx")
    assert (back.data_ptr, back.readonly) == (source.data_ptr, readonly)


@pytest.mark.parametrize("readonly", [False, True])
def test_jax_by_dlx_and_back(readonly):
    """By dlx, jax shares both; the result is read-only, since jax arrays are."""
    pytest.importorskip("jax")
    source = tensor(readonly)
    array = dlx.convert(source, to="jax", copy=False)
    back = dlx.convert(array, to="dlx", copy=False)
    assert array.unsafe_buffer_pointer() == back.data_ptr == source.data_ptr
    assert bytes(back) == SIX and back.readonly and source.readonly is readonly


def test_tvm_ffi_by_dlx_and_back():
    """By dlx, tvm_ffi shares writable memory and gets a copy of read-only memory."""
    pytest.importorskip("tvm_ffi")
    source = tensor()
    back = dlx.convert(dlx.convert(source, to="tvm_ffi", copy=False), to="dlx", copy=False)
    assert (back.data_ptr, back.readonly) == (source.data_ptr, False)
    taken = dlx.convert(tensor(readonly=True), to="tvm_ffi")
    assert bytes(dlx.convert(taken, to="dlx")) == SIX


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("way", ["by itself", "by dlx"])
def test_pyarrow_tensor_and_back(way, readonly):
    """A pyarrow Tensor keeps the flag in both directions, and shares the memory."""
    pa = pytest.importorskip("pyarrow")
    if way == "by itself" and not hasattr(pa.Tensor, "from_dlpack"):
        pytest.skip("this pyarrow takes no tensors")
    source = tensor(readonly)
    taken = pa.Tensor.from_dlpack(source) if way == "by itself" else dlx.convert(source, to="pyarrow", copy=False)
    back = dlx.convert(taken, to="dlx", copy=False)
    assert taken.is_mutable is not readonly and taken.shape == (2, 3)
    assert (back.data_ptr, back.readonly, bytes(back)) == (source.data_ptr, readonly, SIX)


@pytest.mark.parametrize("readonly", [False, True])
def test_pyarrow_array_and_back(readonly):
    """A pyarrow Array is immutable: the result is read-only."""
    pytest.importorskip("pyarrow")
    source = tensor(readonly)
    flat = native.tensor_new(source.data_ptr, (6,), None, (2, 32, 1), (1, 0), source.flags, source)
    taken = dlx.convert(flat, to="pyarrow", copy=False)
    back = dlx.convert(taken, to="dlx", copy=False)
    assert taken.to_pylist() == [0, 1, 2, 3, 4, 5] and (back.data_ptr, back.readonly) == (source.data_ptr, True)


def test_a_long_way_round(np):
    """numpy, tvm_ffi, pyarrow, jax, numpy: the same memory, read-only after pyarrow or jax."""
    for package in ("tvm_ffi", "pyarrow", "jax"):
        pytest.importorskip(package)
    source = start = dlx.convert(tensor(), to="numpy")
    for target in ("dlx", "tvm_ffi", "pyarrow", "jax", "numpy"):
        source = dlx.convert(source, to=target, copy=False)
    assert source.ctypes.data == start.ctypes.data and source.tobytes() == SIX and not source.flags.writeable
