"""Array libraries' `asarray` of a `dlx.Tensor` returns its values, dtype and shape, or raises."""

import ctypes
import importlib

import pytest

import dlx
from dlx import errors
from dlx._core import native

DTYPES = ["bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64", "complex64"]


def made(np, dtype, readonly=False):
    """Return an array of 8 elements of a dtype, and a tensor over it."""
    source = np.arange(8).reshape(2, 4).astype(dtype)
    source.flags.writeable = not readonly
    return source, dlx.convert(source, to="dlx", copy=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["as_tensor", "tensor", "from_dlpack"])
def test_torch(np, torch, dtype, function):
    """Functions that use DLPack, or copy, return the array."""
    source, tensor = made(np, dtype)
    result = getattr(torch, function)(tensor)
    assert result.numpy().dtype == source.dtype and result.tolist() == source.tolist()
    assert (result.data_ptr() == tensor.data_ptr) is (function != "tensor")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, {"copy": True}])
@pytest.mark.parametrize("namespace", ["torch", "array_api_compat.torch"])
def test_torch_asarray(np, torch, namespace, dtype, options):
    """It would read any buffer's plain bytes as float32 or the requested dtype; dlx refuses with an explanation."""
    if namespace != "torch":
        pytest.importorskip(namespace)
    source, tensor = made(np, dtype)
    if "dtype" in options:
        options = {"dtype": torch.float64}
    try:
        result = importlib.import_module(namespace).asarray(tensor, **options)
    except (RuntimeError, ValueError, BufferError):
        return
    assert result.shape == source.shape and result.to(torch.complex128).tolist() == source.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_asarray(np, dtype):
    """It uses numpy."""
    jnp = pytest.importorskip("jax.numpy")
    source, tensor = made(np, dtype)
    result = jnp.asarray(tensor)
    assert result.tolist() == source.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("readonly", [False, True])
def test_numpy(np, dtype, readonly):
    """The buffer, __array__ and __array_interface__ share the memory, read-only if the tensor is."""

    class Interface:
        def __init__(self, tensor):
            self.__array_interface__, self.tensor = tensor.__array_interface__, tensor

    source, tensor = made(np, dtype, readonly)
    for result in (np.asarray(tensor), tensor.__array__(), np.asarray(Interface(tensor)), memoryview(tensor)):
        result = np.asarray(result)
        assert (result.dtype, result.shape, result.tolist()) == (source.dtype, source.shape, source.tolist())
        assert result.ctypes.data == source.ctypes.data and result.flags.writeable is not readonly


def test_strides_are_said(np):
    """The array interface always has strides, so that no consumer asks for plain bytes."""
    for view in (np.arange(24).reshape(4, 6)[::-2, 1:], np.ones((2, 3)), np.array(3.0)):
        tensor = dlx.convert(view, to="dlx", copy=False)
        said = tensor.__array_interface__
        assert said["strides"] == view.strides and said["typestr"] == view.__array_interface__["typestr"]
        assert tensor.tobytes() == view.tobytes()
        assert tensor.__array__().strides == view.strides


def test_array_of_another_dtype(np):
    """dtype= and copy= have numpy's meaning."""
    source, tensor = made(np, "int32")
    assert (
        tensor.__array__("int32").ctypes.data == tensor.__array__(np.int32, copy=False).ctypes.data == tensor.data_ptr
    )
    for result in (tensor.__array__("float64"), tensor.__array__(np.int32, copy=True), tensor.__array__(copy=True)):
        assert result.tolist() == source.tolist() and result.ctypes.data != tensor.data_ptr and result.flags.writeable
    with pytest.raises(ValueError, match="its dtype is int32, not float64") as caught:
        tensor.__array__("float64", copy=False)
    assert isinstance(caught.value, errors.CopyRequiredError)
    for wrong in ((1, 2, 3), (None, None)):
        with pytest.raises(TypeError):
            tensor.__array__(*wrong, copy=None)


def test_dtypes_that_a_buffer_cannot_say(np):
    """They have ml_dtypes' dtypes; the array interface does not support them."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    source = np.ones(3, ml_dtypes.bfloat16)
    tensor = dlx.convert(source, to="dlx", copy=False)
    result = np.asarray(tensor)
    assert result.dtype == source.dtype and result.ctypes.data == source.ctypes.data
    assert not hasattr(tensor, "__array_interface__")


def test_device_memory_is_not_moved(np):
    """Numpy would move it silently: it is rejected, with a fix."""
    tensor = native.tensor_new(4096, (2,), None, (2, 32, 1), (2, 0), 0, None)
    with pytest.raises(errors.DeviceError, match=r"dlx\.convert\(tensor, to='numpy'\)"):
        np.asarray(tensor)
    assert not hasattr(tensor, "__array_interface__")


def test_the_array_keeps_the_memory(np):
    """It holds the tensor's memory, not the tensor."""
    block = (ctypes.c_int * 4)(1, 2, 3, 4)
    live = native.live()
    array = dlx.convert(block, to="dlx").__array__()
    del block
    assert array.tolist() == [1, 2, 3, 4] and native.live() > live
    del array
    assert native.live() == live


def test_images_and_tables(np):
    """Pillow and pandas accept a tensor like an array."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(4 * 5 * 3, dtype="u1").reshape(4, 5, 3)
    for view in (pixels, pixels[:, :, 0], pixels[::-1]):
        made_of = image.fromarray(dlx.convert(view, to="dlx", copy=False))
        assert np.asarray(made_of).tolist() == view.tolist()


def test_pandas(np):
    """Arrays and indexes accept it; a Series needs an iterable, so it gets a numpy array."""
    pandas = pytest.importorskip("pandas")
    source = np.arange(3.0)
    tensor = dlx.convert(source, to="dlx")
    for made_of in (pandas.array, pandas.Index, lambda each: pandas.Series(np.asarray(each))):
        assert made_of(tensor).tolist() == source.tolist()


def test_a_tensor_is_an_array_from_the_first_on(python):
    """A tensor is an array before any conversion; __array__ accepts only its positions and keywords."""
    said = python(
        """
        import numpy as np
        from dlx._protocols.pointer import empty
        tensor = empty((2, 3), "float32")
        print(tensor.__array_interface__["shape"], tensor.__array__().shape)
        for keywords in ({"tensor": 1}, {"dtype": None, "copy": None, "like": None}):
            try:
                tensor.__array__(**keywords)
            except TypeError as error:
                print(error)
        """
    )
    assert said.startswith("(2, 3) (2, 3)\n") and said.count("__array__ takes 0 to 2 arguments") == 1
    assert "'tensor'" in said
