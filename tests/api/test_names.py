"""Names and native objects of dtypes, devices and targets; errors suggest the right spelling."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import dlx
from dlx.errors import AdapterNotFoundError, DeviceError, DeviceNameError, DTypeError

np = pytest.importorskip("numpy")


@pytest.mark.parametrize(
    ("native", "name"),
    [
        *((text, name) for text, name in (("f4", "float32"), ("<i8", "int64"), ("|b1", "bool"), ("=c8", "complex64"))),
        *((kind, name) for kind, name in ((float, "float64"), (int, "int64"), (bool, "bool"), (complex, "complex128"))),
        *(
            (np.dtype("u2"), "uint16"),
            (np.float16, "float16"),
            (np.bool_, "bool"),
            (np.longlong, "int64"),
            (">u1", "uint8"),
        ),
    ],
    ids=repr,
)
def test_dtypes_of_python_and_numpy(native, name):
    """Names, type codes and scalar types are accepted."""
    assert dlx.DType(native) == dlx.DType(name)
    assert dlx.empty(2, native).dtype.name == name


@pytest.mark.parametrize(
    ("module", "attribute", "name"),
    [
        ("torch", "bfloat16", "bfloat16"),
        ("torch", "float8_e4m3fn", "float8_e4m3fn"),
        ("ml_dtypes", "bfloat16", "bfloat16"),
        ("ml_dtypes", "int4", "int4"),
        ("jax.numpy", "float32", "float32"),
        ("jax.numpy", "bfloat16", "bfloat16"),
    ],
)
def test_dtypes_of_frameworks(module, attribute, name):
    """The adapter of the object's package reads them."""
    pytest.importorskip(module.partition(".")[0])
    found = __import__(module, fromlist=["x"])
    assert dlx.DType(getattr(found, attribute)).name == name


def test_a_dtype_asked_for_first():
    """The registry need not have been used before."""
    code = "import dlx, numpy; print(dlx.DType(numpy.float32), dlx.empty(2, numpy.dtype('i2')).dtype)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "float32 int16\n"


@pytest.mark.parametrize("wrong", [str, object, np.str_, np.dtype("S3"), np.dtype(">f4"), None, 1.5], ids=repr)
def test_what_is_no_dtype(wrong):
    """An error with a fix."""
    with pytest.raises(DTypeError, match=r"is not a dtype of DLPack.*Pass a name"):
        dlx.DType(wrong)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("floa32", "Did you mean 'float32'"),
        ("BFloat16", "Did you mean 'bfloat16'"),
        ("bf16", "Did you mean 'bfloat16'"),
        (">f4", "Swap the bytes"),
        ("f3", "Use for example"),
        ("b8", "Use for example|Did you mean"),
        ("f99", "Use for example"),
    ],
)
def test_a_dtype_that_is_misspelt(name, said):
    """The error suggests the nearest name, or the reason without one."""
    with pytest.raises(DTypeError, match=said):
        dlx.DType(name)


def test_devices_of_frameworks():
    """Every parameter for a device accepts them."""
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    array = np.ones(3)
    assert dlx.Device(torch.device("cpu")) == dlx.Device("cpu") == dlx.Device(jax.local_devices(backend="cpu")[0])
    assert dlx.Device(torch.device("cuda", 1)) == dlx.Device("cuda:1")
    assert dlx.convert(array, to="torch", device=torch.device("cpu")).data_ptr() == array.ctypes.data
    assert dlx.plan(array, to="numpy", device=jax.local_devices(backend="cpu")[0]).outcome == "same"
    assert dlx.empty(2, "int8", device=torch.device("cpu")).device == dlx.Device("cpu")


def test_a_device_of_pyarrow():
    """Buffers have one; other objects of pyarrow are not devices."""
    pa = pytest.importorskip("pyarrow")
    device = pa.py_buffer(b"x").device
    assert dlx.Device(device) == dlx.Device("cpu")
    for to in ("numpy", "pyarrow", "dlx"):
        assert dlx.plan(np.ones(3), to=to, device=device).error is None
    with pytest.raises(DeviceError, match="is not a device"):
        dlx.Device(pa.array([1]))


def test_a_device_of_cuda_core():
    """It has `device_id`; the real class needs a driver."""
    kind = type("Device", (), {"__module__": "cuda.core._device", "device_id": 3})
    assert dlx.Device(kind()) == dlx.Device("cuda:3")


def test_numbers_are_devices_of_cuda():
    """They count like in torch and cupy; `dlx.Device` takes DLPack's number of a device type."""
    with pytest.raises(DeviceError, match=r"'cuda:1'|cuda:1|host only"):
        dlx.convert(np.ones(3), to="numpy", device=1)
    assert dlx.Device(1) == dlx.Device("cpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu", "Use 'cuda'"),
        ("mps", "'metal'"),
        ("meta:0", "no memory"),
        ("CPU", "Did you mean 'cpu'"),
        ("cdua:1", "Did you mean 'cuda'"),
        ("zzz", "Use one of: cpu"),
        ("cuda:99999999999", "Did you mean 'cuda'"),
        ("cuda:" + "1" * 5000, "Did you mean 'cuda'"),
    ],
    ids=lambda text: text[:20],
)
def test_a_name_that_is_no_device(name, said):
    """The error is also a ValueError, which the array API's tests expect."""
    for call in (lambda: dlx.Device(name), lambda: dlx.convert(np.ones(3), to="torch", device=name)):
        with pytest.raises(DeviceNameError, match=said) as caught:
            call()
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("np", "Did you mean 'numpy'"),
        ("jnp", "Did you mean 'jax'"),
        ("tvm-ffi", "Did you mean 'tvm_ffi'"),
        ("Torch", "Did you mean 'torch'"),
        ("nunpy", "Did you mean 'numpy'"),
        ("arow", "Did you mean 'arrow'"),
        ("tf", "tensorflow"),
        ("pt", "Did you mean 'torch'"),
        ("torch.Tensor", "Did you mean 'torch'"),
        ("cuda", "It is a device: pass device='cuda'"),
        ("cuda:1", "It is a device: pass device='cuda:1'"),
        ("cpu", "It is a device: pass device='cpu'"),
        ("zzz", "Use one of"),
    ],
)
def test_a_target_that_is_misspelt(name, said):
    """The nearest name, and all that there are."""
    with pytest.raises(AdapterNotFoundError, match=f"unknown target {name!r}.*{said}"):
        dlx.convert(np.ones(3), to=name)


@pytest.mark.parametrize("name", ["pandas", "polars", "xarray", "PIL", "h5py"])
def test_a_target_that_is_a_source_only(name):
    """The error names what makes its objects of an array, for its name, module and types."""
    module = pytest.importorskip(name)
    kinds = [getattr(module, kind) for kind in ("Series", "DataFrame", "DataArray") if hasattr(module, kind)]
    for to in (name, module, *kinds):
        with pytest.raises(AdapterNotFoundError, match=f"'{name}' is a source, but not a target. Convert to 'numpy'"):
            dlx.convert(np.ones(3), to=to)


@pytest.mark.parametrize("obj", [3, 2.0, 1j, True, range(3)], ids=repr)
def test_a_number_is_no_array(obj):
    """The error names the function that makes an array of it."""
    with pytest.raises(AdapterNotFoundError, match=re.escape("Make an array of it first: numpy.array(x).")):
        dlx.convert(obj, to="torch")


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (lambda torch: torch.device("cpu"), "found torch.device. Pass a device as device="),
        (lambda torch: torch.float32, "found torch.dtype. Pass a dtype as dtype="),
        (lambda _: 3, "found int$"),
    ],
    ids=["device", "dtype", "int"],
)
def test_what_is_no_target_at_all(torch, to, said):
    """The error names the option for a device or a dtype."""
    with pytest.raises(TypeError, match=said):
        dlx.convert(np.ones(3), to=to(torch))


def test_a_dtype_is_no_option_of_other_functions():
    """The error names the functions that change a dtype."""
    with pytest.raises(TypeError, match=r"'dtype'. Pass a dtype as dtype=, to convert, plan, stack or open"):
        dlx.using("numpy", dtype="float32")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspct", "x"], "(did you mean 'inspect'?)"),
        (["inspect", "--jsno", "x"], "dlx inspect: unrecognized arguments: --jsno (did you mean '--json'?)"),
        (["devices", "--jsn"], "(did you mean '--json'?)"),
        (["doctor", "--readonly"], "dlx doctor: unrecognized arguments: --readonly; see"),
        (["plan", "x", "--to", "dlx", "--coppy=never"], "(did you mean '--copy'?)"),
        (["--versoin", "inspect", "x"], "(did you mean '--version'?)"),
        (["zzz"], "(choose from"),
    ],
)
def test_a_word_of_the_command_that_is_misspelt(words, said):
    """The error is one line."""
    done = subprocess.run([sys.executable, "-m", "dlx", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
