"""The cupy adapter on the recording driver: with the published cupy in `nox -s cuda`, else with a stand-in.

A test marked `stand_in` runs only with the stand-in, for the stated reason. Tests marked `gpu` are elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref

import pytest
from support.cuda import fake_cupy, gpulib, originals
from support.plugins.adapter_copy import adapter_module

import dlx
from dlx._core.stream import Stream
from dlx._using.stream_context import set_streams
from dlx.errors import CopyRequiredError, DeviceError, DTypeError, LayoutError, StreamError

N = 64


if originals.FOLDER:
    cuda = originals.cuda  # the published cupy uses the same driver


@pytest.fixture
def cupy(request, monkeypatch, cuda, np):
    """Return the published cupy if available; else a module that dlx takes for cupy during one test."""
    from dlx._registry.registry import Plugin, registry

    if originals.FOLDER:
        return originals.Cupy(cuda, request)
    module = fake_cupy.module(cuda)
    monkeypatch.setitem(sys.modules, "cupy", module)
    plugin = Plugin("dlx_cupy", lambda: None, "dlx", adapters=(adapter_module("cupy", "cupy").CupyAdapter(),))
    monkeypatch.setitem(registry._loader.plugins, "cupy", plugin)
    module.adapter = plugin.adapters[0]
    return module


@pytest.fixture
def other(monkeypatch, cuda):
    """Return another framework on the same devices."""
    return gpulib.install(monkeypatch, "other", cuda)


def reads(cuda, cupy, array):
    """Run a kernel that reads on cupy's current stream; return whether it races."""
    with cupy.cuda.Device(array.data.device_id):
        stream = cupy.cuda.get_current_stream().ptr or 1
    return cuda.read(stream, array.data.ptr, array.size * array.dtype.itemsize, array.data.device_id)


@contextlib.contextmanager
def on_stream(cupy, device, own):
    """Let cupy work on a stream of a device that is not current."""
    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True) if own else cupy.cuda.Stream.null
        stream.__enter__()
    yield
    with cupy.cuda.Device(device):
        stream.__exit__()


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_out(cuda, cupy, other, own, device):
    """Memory is shared and cupy's current stream waited for; the legacy stream is not distinguished from no stream."""
    with on_stream(cupy, device, own), other.on(cuda.stream(device), device):
        with cupy.cuda.Device(device):
            array = cupy.full((N,), "uint8")
        cuda.forget()
        result = dlx.convert(array, to="other")
        assert cuda.ordering == 2
        assert result.ptr == array.data.ptr and not other.read(result)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_in(cuda, cupy, other, own, device):
    """Memory is shared, and cupy's current stream waits."""
    with other.on(cuda.stream(device), device), on_stream(cupy, device, own):
        source = other.made(device)
        result = dlx.convert(source, to="cupy")
        assert type(result) is cupy.ndarray and result.data.ptr == source.ptr
        assert not reads(cuda, cupy, result)


def test_the_same_stream(cuda, cupy, other):
    """Nothing is ordered if both work on one stream."""
    with cupy.cuda.Stream(non_blocking=True) as stream, other.on(stream.ptr):
        array = cupy.full((N,), "uint8")
        cuda.forget()
        result = dlx.convert(array, to="other")
        assert cuda.ordering == 0 and not other.read(result)


@pytest.mark.parametrize("step", [1, 2], ids=["one run", "rows"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_host_memory_during_a_capture(cuda, cupy, np, mode, step):
    """It is refused, since a replay would not copy it again, and cupy's memory is not the graph's."""
    array = np.arange(N, dtype="float32")[::step]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuda.capture(stream.ptr, mode)
        cuda.forget()
        with pytest.raises(StreamError, match="capturing a graph"):
            dlx.convert(array, to="cupy")
        assert cuda.copies() == 0 and cuda.nodes == 0
        assert cuda.end_capture(stream.ptr) == 0
    assert np.array_equal(dlx.convert(dlx.convert(array, to="cupy"), to="numpy"), array)


def test_memory_is_not_reused_too_early(cuda, cupy, other):
    """Cupy's pools are per stream: memory used on another stream returns only when that is finished."""
    with cupy.cuda.Stream(non_blocking=True), other.on(cuda.stream()) as c:
        result = dlx.convert(cupy.full((N,), "uint8"), to="other")
        cuda.stall(c.ptr)
        other.read(result)
        del result
        assert dlx.release_pending() == 1
        cuda.resume(c.ptr)
        assert dlx.release_pending() == 0
    assert cuda.races == 0


@pytest.mark.parametrize("kind", [2, 3], ids=["device", "managed"])
@pytest.mark.parametrize("device", [0, 1])
def test_true_devices(cuda, cupy, device, kind):
    """Managed memory keeps its code, and each device its number, for any current device."""
    with cupy.cuda.Device(device):
        array = cupy.full((N,), "float32", kind)
    place = dlx.Device("cuda" if kind == 2 else "cuda_managed").type, device
    assert dlx.describe(array).device == place
    tensor = dlx.convert(array, to="dlx")
    assert (tensor.device, tensor.data_ptr) == (place, array.data.ptr)
    back = dlx.convert(tensor, to="cupy")
    assert back.data.ptr == array.data.ptr and back.__dlpack_device__() == place
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.parametrize(
    "index",
    [slice(None, None, -1), slice(2, 9), (slice(None), slice(None, None, 3)), (slice(None, None, -2), slice(1, 3)), 3],
)
def test_layouts(cuda, cupy, index):
    """Views, including negative steps, are shared in both directions."""
    array = cupy.full((10, 6), "float32")[index]
    tensor = dlx.convert(array, to="dlx")
    assert tensor.strides == tuple(step // 4 for step in array.strides) and tensor.data_ptr == array.data.ptr
    back = dlx.convert(tensor, to="cupy", copy=False)
    assert (back.shape, back.strides, back.data.ptr) == (array.shape, array.strides, array.data.ptr)


def test_no_elements(cuda, cupy):
    """An empty array has no address."""
    assert dlx.convert(cupy.empty((0, 3), "float32"), to="dlx").shape == (0, 3)


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "float16", "float64", "complex64", "complex128"])
def test_dtypes(cuda, cupy, name):
    """Each dtype keeps its name, in both directions."""
    array = cupy.full((3,), name)
    tensor = dlx.convert(array, to="dlx")
    assert tensor.dtype.name == name and dlx.convert(tensor, to="cupy").dtype == array.dtype


@pytest.mark.stand_in("the published cupy has only bfloat16 of these dtypes, which test_originals.py covers")
@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "bfloat16", "int4"])
def test_dtypes_that_cupy_would_misname(cuda, cupy, name):
    """Both directions are refused: numpy's kind of float8_e5m2 is 'f', which cupy would take for an 8-bit float."""
    dtypes = pytest.importorskip("ml_dtypes")
    array = cupy.full((3,), getattr(dtypes, name))
    with pytest.raises(DTypeError, match=name):
        dlx.convert(array, to="dlx")
    if name != "int4":
        with pytest.raises(DTypeError, match=f"cupy has no dtype {name}"):
            dlx.convert(dlx.empty(3, name, device="cuda"), to="cupy")


def test_byte_strides(cuda, cupy):
    """Strides that are not whole elements are copied by cupy, or refused."""
    array = cupy.ndarray((4,), "float32", cupy.full((6,), "float32").data, (6,))
    with pytest.raises(CopyRequiredError, match="byte strides"):
        dlx.convert(array, to="dlx", copy=False)
    assert dlx.convert(array, to="dlx").strides == (1,)


def test_read_only_memory_is_copied(cuda, cupy, other):
    """Cupy ignores the flag, so read-only memory is copied unless the user allows sharing."""
    source = other.made(readonly=True)
    result = dlx.convert(source, to="cupy")
    assert result.data.ptr != source.ptr and not reads(cuda, cupy, result)
    with pytest.raises(dlx.errors.ReadOnlyError):
        dlx.convert(source, to="cupy", copy=False)
    assert dlx.convert(source, to="cupy", readonly="share").data.ptr == source.ptr


# ---- the host --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 1])
def test_numpy_to_cupy(cuda, cupy, np, device):
    """The copy to the current device is reported; the source may be overwritten at once."""
    source = np.arange(N, dtype="float32")
    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True):
        plan = dlx.plan(source, "cupy")
        assert (plan.outcome, plan.nbytes, plan.device) == ("copied", 4 * N, (2, device))
        result = dlx.convert(source, to="cupy")
        assert not cuda.host_write(source.ctypes.data, source.nbytes)
        assert result.data.device_id == device and not reads(cuda, cupy, result)
    assert cuda.peek(result.data.ptr, 4 * N) == source.tobytes()
    with pytest.raises(CopyRequiredError, match=r"it is on cpu, and the result is on cuda:0"):
        dlx.convert(source, to="cupy", copy=False)


def test_a_strided_array_of_the_host(cuda, cupy, np):
    """The result is compact, with the values in place."""
    source = np.arange(60, dtype="int16").reshape(6, 10)[::-2, ::3]
    result = dlx.convert(source, to="cupy")
    assert cuda.peek(result.data.ptr, source.nbytes) == source.tobytes()
    assert result.shape == source.shape


@pytest.mark.stand_in("a kernel gathers the view, and kernels do nothing")
def test_cupy_to_numpy(cuda, cupy, np):
    """The reported copy waits for cupy's current stream only."""
    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.full((4, N), "uint8")
        cuda.poke(array.data.ptr, bytes(range(256)))
        view = array[::-1, ::2]
        result = dlx.convert(view, to="numpy")
    assert result.tolist() == np.arange(256, dtype="uint8").reshape(4, N)[::-1, ::2].tolist()
    assert cuda.races == 0 and result.flags.writeable


def test_pinned_memory_goes_to_the_device(cuda, cupy):
    """Host memory, pinned or not, is copied to cupy's device."""
    memory = cuda.alloc(N, 0, 1)
    tensor = dlx.from_pointer(memory, (N,), "uint8", device="cuda_host:0")
    assert dlx.convert(tensor, to="cupy").__dlpack_device__() == (2, 0)


def test_managed_memory_for_numpy(cuda, cupy, np):
    """Managed memory is read in place after a wait for its stream."""
    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.full((N,), "uint8", 3)
        result = dlx.convert(array, to="numpy")
    assert result.ctypes.data == array.data.ptr and not cuda.host_read(array.data.ptr, N)


# ---- inside cupy -----------------------------------------------------------------------------------------------------


def test_inside_cupy(cuda, cupy):
    """Without options the array itself is returned; copies use cupy, also to another device."""
    with cupy.cuda.Device(1):
        array = cupy.full((N,), "uint8")
    assert dlx.convert(array, to="cupy") is array
    assert dlx.convert(array, to="cupy", copy=True).data.device_id == 1
    assert dlx.convert(array, to="cupy", device="cuda:0").data.device_id == 0
    assert dlx.plan(array, "cupy", device="cuda:0").outcome == "copied"
    with pytest.raises(DeviceError, match="cannot be on cpu"):
        dlx.convert(array, to="cupy", device="cpu")


@pytest.mark.parametrize("capturing", [0, 1])
def test_between_devices_during_a_capture(cuda, cupy, capturing):
    """The conversion is refused, since the graph would include the streams' order; the capture continues."""
    with cupy.cuda.Device(1):
        array = cupy.full((N,), "uint8")
    with cupy.cuda.Device(capturing), cupy.cuda.Stream(non_blocking=True) as stream:
        cuda.capture(stream.ptr, device=capturing)
        with cupy.cuda.Device(0), pytest.raises(StreamError, match="capturing"):
            dlx.convert(array, to="cupy", device="cuda:0")
        assert cuda.end_capture(stream.ptr, capturing) == 0


# ---- the current stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kept", ["own", "foreign", "legacy"])
def test_working_on_a_stream(cuda, cupy, device, kept):
    """Inside the context the stream is cupy's current one on its device; the current device is unchanged."""
    place, before = dlx.Device(2, device), cupy.cuda.Stream.null
    with cupy.cuda.Device(device):
        own = cupy.cuda.Stream(non_blocking=True)
    stream = {
        "own": Stream(place, own.ptr, own),
        "foreign": Stream(place, cuda.stream(device), "somebody's"),
        "legacy": Stream(place, 1),
    }[kept]
    with cupy.adapter.streams.activate(stream):
        assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(device):
            assert cupy.cuda.get_current_stream().ptr == stream.handle
    for number in (0, 1):
        with cupy.cuda.Device(number):
            assert cupy.cuda.get_current_stream() is before


def test_a_stream_of_another_lives_as_long_as_it_is_used(cuda, cupy, other):
    """Cupy's wrapper does not own the stream; arrays created on it keep it alive until the device is finished."""

    class Owner:
        ptr, device_id = cuda.stream(), 0

    owner = Owner()
    gone, place, tensor = weakref.ref(owner), dlx.Device("cuda"), dlx.convert(other.made(), to="dlx")
    with set_streams(cupy.adapter, {place: Stream(place, Owner.ptr, owner)}):
        result = dlx.convert(tensor, to="cupy")
    del owner
    assert gone() is not None
    del tensor, result
    gc.collect()
    assert dlx.release_pending() == 0 and gone() is None and cuda.misuses == 0


def test_filters_of_warnings_are_left_alone(cuda, cupy, monkeypatch):
    """The process's filters stay unchanged, but the deprecation in cupy's wrapper is silent."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with monkeypatch.context() as patch:
            patch.setattr(warnings, "simplefilter", lambda *args: pytest.fail("a filter was set"))
            with cupy.adapter.streams.activate(Stream(dlx.Device("cuda"), cuda.stream())):
                assert heard == []
        cupy.cuda.ExternalStream(cuda.stream())
    assert [each.category for each in heard] == [DeprecationWarning]


def test_a_failure_restores_the_stream(cuda, cupy):
    """The stream is restored after an exception, too."""
    before = cupy.cuda.get_current_stream()
    with pytest.raises(ZeroDivisionError), cupy.adapter.streams.activate(Stream(dlx.Device("cuda"), cuda.stream())):
        1 / 0
    assert cupy.cuda.get_current_stream() is before


# ---- objects with a CUDA array interface -----------------------------------------------------------------------------


class Interface:
    """An object that has only the interface."""

    def __init__(self, memory, **entries):
        facts = {"shape": (N,), "typestr": "|u1", "data": (memory, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = facts | entries


@pytest.mark.parametrize(("version", "stream"), [(3, "own"), (3, 1), (3, 2), (3, None), (2, None)])
def test_a_cuda_array_interface(cuda, cupy, version, stream):
    """A source without an adapter: its stream is waited for; None needs no wait."""
    memory, p = cuda.alloc(N, 1), cuda.stream(1) if stream == "own" else stream
    if p is not None or version == 2:
        cuda.write(p or 1, memory, N, device=1)
    entries = {"version": version} | ({"stream": p} if version == 3 else {})
    with cupy.cuda.Device(1), cupy.cuda.Stream(non_blocking=True):
        cuda.forget()
        result = dlx.convert(Interface(memory, **entries), to="cupy")
        assert result.data.ptr == memory and result.data.device_id == 1
        assert not reads(cuda, cupy, result)
        assert cuda.ordering == (0 if version == 3 and p is None else 2)


def test_a_cuda_array_interface_to_numpy(cuda, np):
    """The copy waits for the stream."""
    memory, p = cuda.alloc(N), cuda.stream()
    cuda.write(p, memory, N)
    result = dlx.convert(Interface(memory, stream=p, strides=(2,), shape=(N // 2,)), to="numpy")
    assert result.shape == (N // 2,) and cuda.races == 0


@pytest.mark.parametrize("to", ["numpy", "cupy", "dlx"])
@pytest.mark.parametrize("kind", [1, 3], ids=["pinned", "managed"])
def test_a_cuda_array_interface_of_memory_that_the_host_reads(cuda, cupy, np, to, kind):
    """The host waits for the stream if it reads the memory in place."""
    memory, p = cuda.alloc(N, 0, kind), cuda.stream()
    cuda.stall(p)
    cuda.write(p, memory, N)
    result = dlx.convert(Interface(memory, stream=p), to=to)
    if to == "numpy" or (to == "dlx" and kind == 1):
        assert dlx.describe(result).address == memory and not cuda.host_read(memory, N)
    assert cuda.races == 0
    if kind == 1:
        cuda.write(p, memory, N)
        dlx.plan(Interface(memory, stream=p), to)
        assert cuda.host_read(memory, N)  # a plan does not wait
        cuda.clear_report()


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"mask": object()}, LayoutError, "has a mask"),
        ({"typestr": ">f4"}, DTypeError, "other byte order"),
        ({"stream": 0}, dlx.errors.ProtocolError, "stream 0 is ambiguous"),
        ({"stream": -1, "version": 3, "data": None}, dlx.errors.ProtocolError, "the data of its __cuda_array"),
        ({"strides": (3,), "typestr": "<i2"}, LayoutError, "not multiples of the item size 2"),
        ({"shape": "x"}, dlx.errors.ProtocolError, "incomplete"),
    ],
)
def test_a_broken_cuda_array_interface(cuda, cupy, entries, error, message):
    """Interfaces that DLPack cannot represent, or that are inconsistent, are refused by name."""
    with pytest.raises(error, match=message):
        dlx.convert(Interface(cuda.alloc(N), **entries), to="cupy")


def test_a_cuda_array_interface_of_host_memory(cuda, cupy, np):
    """An address that the driver does not know is a ProtocolError."""
    with pytest.raises(dlx.errors.ProtocolError, match="plain host memory"):
        dlx.convert(Interface(np.zeros(N).ctypes.data), to="cupy")


def test_a_cuda_array_interface_without_a_driver():
    """The error is one sentence."""
    with pytest.raises(DeviceError, match="no CUDA driver"):
        dlx.convert(Interface(4096), to="dlx")


@pytest.mark.parametrize(("version", "ndim"), [("13.6.0", 32), ("14.0.1", 64)])
def test_as_many_dimensions_as_the_version_takes(cupy, monkeypatch, version, ndim):
    """The limit is CUPY_MAXDIMS in cupy's sources."""
    monkeypatch.setattr(sys.modules["cupy"], "__version__", version)
    assert cupy.adapter.capabilities().ndims == (0, ndim)
