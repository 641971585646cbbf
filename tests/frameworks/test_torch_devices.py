"""The torch adapter on devices, on the recording driver: with the published CUDA build of torch in `nox -s cuda`.

Otherwise with a module that behaves like it; a test marked `stand_in` runs only with that, for the stated reason.

Copied behaviour: current streams per device, with handle 0 for the default one; `from_dlpack` names the current stream,
0 as 1; `__dlpack__` refuses stream 2 and a tensor on a device that is not current; setting a stream of another device
makes that device current. For CUDA's runtime, the device of the current context is current.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref

import pytest
from support.cuda import gpulib, originals
from support.plugins.adapter_copy import adapter_module

import dlx
from dlx._core import native
from dlx._core.stream import Stream
from dlx._using.stream_context import set_streams
from dlx.errors import DeviceError, StreamError

N = 64

if originals.FOLDER:
    cuda = originals.cuda  # the published torch uses the same driver


class Storage:
    """Memory of the caching allocator, reused at once on the stream of its allocation."""

    def __init__(self, torch, nbytes, device, stream):
        self.torch, self.size, self.device, self.stream = torch, nbytes, device, stream
        self.address = torch.driver.alloc(nbytes, device.index)

    def nbytes(self):
        return self.size

    def resizable(self):
        return True

    def __del__(self):
        self.torch.driver.write(self.stream or 1, self.address, self.size, self.device.index)


class Tensor:
    """A tensor on a device."""

    is_nested = is_meta = is_quantized = requires_grad = False
    layout = "strided"

    def __init__(self, torch, storage, address, device, shape):
        self.torch, self.storage, self.address, self.device, self.shape = torch, storage, address, device, shape
        self.dtype, self.offset = torch.uint8, 0
        self.is_cpu = device.type == "cpu"

    def stride(self):
        return (1,)

    def is_contiguous(self):
        return True

    def numel(self):
        return self.shape[0]

    def element_size(self):
        return 1

    def storage_offset(self):
        return 0

    def data_ptr(self):
        return self.address

    def untyped_storage(self):
        return self.storage

    def is_conj(self):
        return False

    is_neg = _is_zerotensor = is_conj

    def to(self, device):
        return type(self)(self.torch, self.storage, self.address, device, self.shape)

    def clone(self):
        return self.to(self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.torch.heard.append(stream)
        if stream == 2:
            raise BufferError("per-thread default stream is not supported.")
        if self.device.index != self.torch.cuda.current_device():
            raise BufferError("Can't export tensors on a different CUDA device index.")
        tensor = native.tensor_new(self.address, self.shape, None, (1, 8, 1), self.torch.code(self.device), 0, self)
        return (
            tensor.__dlpack__(stream=-1, max_version=(1, 0))
            if not self.torch.version.hip
            else tensor.__dlpack__(max_version=(1, 0))
        )

    def __dlpack_device__(self):
        return self.torch.code(self.device)


def fake_torch(driver, *, hip=None, cuda="12.8"):
    """Return a module like a build of torch for CUDA, for ROCm, or for neither."""
    import torch as real

    self = types.ModuleType("torch")
    self.driver, self.heard, self.entered, self.uint8, self.strided = driver, [], [], "uint8", "strided"
    self.complex32, self.name = "complex32", "build"
    self.__version__, self.version = "2.13.0", types.SimpleNamespace(hip=hip, cuda=cuda)
    self.device = lambda kind, index=None: types.SimpleNamespace(type=kind, index=index)
    self.code = lambda device: (10 if hip else 2, device.index or 0)
    current, streams = [0], {}

    class TorchStream:
        def __init__(self, handle, device_index):
            self.cuda_stream, self.device_index = handle, device_index

    class ExternalStream(TorchStream):
        pass

    def current_device():
        return driver.current if driver.depth else current[0]

    @contextlib.contextmanager
    def device(number):
        before, current[0] = current_device(), number
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def stream(new):
        number, here = new.device_index, current[0]
        before, streams[number] = streams.get(number), new.cuda_stream
        self.entered.append(new)
        current[0] = number
        try:
            yield
        finally:
            streams[number] = before
            current[0] = here

    def current_stream(number=None):
        number = current_device() if number is None else number
        return TorchStream(streams.get(number) or 0, number)  # a new object, which keeps nothing alive

    self.cuda = types.SimpleNamespace(
        current_device=current_device,
        current_stream=current_stream,
        default_stream=lambda number: TorchStream(0, number),
        device=device,
        stream=stream,
        Stream=TorchStream,
        ExternalStream=ExternalStream,
    )
    functorch = types.SimpleNamespace(is_functorch_wrapped_tensor=lambda obj: False)
    self._C = types.SimpleNamespace(
        _functorch=functorch,
        _data_address=lambda obj: obj.address,
        _len_torch_dispatch_stack=lambda: 0,
        _are_functorch_transforms_active=lambda: False,
        DisableTorchFunctionSubclass=contextlib.nullcontext,
    )
    self._is_functional_tensor = lambda obj: False
    self.autograd = real.autograd
    parameter = types.SimpleNamespace(is_lazy=lambda obj: False)
    self.nn = types.SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}), parameter=parameter)
    self.Tensor = type("Tensor", (Tensor,), {"__module__": "build"})

    def empty(number=0):
        place, handle = self.device("cuda", number), current_stream(number).cuda_stream
        storage = Storage(self, N, place, handle)
        tensor = self.Tensor(self, storage, storage.address, place, (N,))
        if driver is not None and not hip:
            driver.write(handle or 1, storage.address, N, number)
        return tensor

    def from_dlpack(obj):
        number = obj.__dlpack_device__()[1]
        handle = current_stream(number).cuda_stream
        taken = native.capsule_claim(obj.__dlpack__(stream=handle or (0 if hip else 1), max_version=(1, 0)))
        return self.Tensor(self, taken, taken.data_ptr, self.device("cuda", number), taken.shape)

    self.empty, self.from_dlpack = empty, from_dlpack
    return self


@pytest.fixture
def build(request, monkeypatch, cuda, torch):
    """Return the published build; or install a stand-in for one test under the adapter's name."""
    from dlx._registry.registry import Plugin, registry

    def install(**facts):
        if originals.FOLDER:
            return originals.Torch(cuda, request)
        module = fake_torch(cuda, **facts)
        adapter = adapter_module("torch", "build").TorchAdapter
        Build = type("Build", (adapter,), {"types": ("build.Tensor",), "containers": ()})
        monkeypatch.setitem(sys.modules, "build", module)
        adapter = Build()
        plugin = Plugin("dlx_build", lambda: None, "dlx", adapters=(adapter,))
        monkeypatch.setitem(registry._loader.plugins, "build", plugin)
        module.adapter = adapter
        return module

    return install


@pytest.fixture
def other(monkeypatch, cuda):
    """Return another framework on the same devices."""
    return gpulib.install(monkeypatch, "other", cuda)


def stream_of(cuda, torch, device=0):
    """Return a stream of that torch."""
    return torch.cuda.ExternalStream(cuda.stream(device), device)


@pytest.mark.stand_in("the published torch is one build, and the test needs three")
def test_what_a_build_can_hold(build):
    """Device types depend on the build, not on existing devices."""
    assert build().adapter.capabilities().device_types == {1, 2}
    assert build(hip="6.2", cuda=None).adapter.capabilities().device_types == {1, 10}
    assert build(cuda=None).adapter.capabilities().device_types == {1}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("device", [0, 1])
def test_out(cuda, build, other, own, device):
    """Memory is shared by address, with one record and one wait; torch orders nothing."""
    torch = build()
    stream = stream_of(cuda, torch, device) if own else torch.cuda.default_stream(device)
    with torch.cuda.stream(stream), other.on(cuda.stream(device), device):
        tensor = torch.empty(device)
        cuda.forget()
        result = dlx.convert(tensor, to="other")
        assert cuda.ordering == 2 and getattr(torch, "heard", []) == []
        assert (result.ptr, result.device) == (tensor.data_ptr(), (2, device)) and not other.read(result)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("device", [0, 1])
def test_in(cuda, build, other, own, device):
    """The current stream waits; 0 is the legacy stream."""
    torch = build()
    stream = stream_of(cuda, torch, device) if own else torch.cuda.default_stream(device)
    with other.on(cuda.stream(device), device), torch.cuda.stream(stream):
        source = other.made(device)
        result = dlx.convert(source, to=torch.name)
        assert type(result) is torch.Tensor and result.data_ptr() == source.ptr
        assert not cuda.read(stream.cuda_stream or 1, source.ptr, N, device)


def test_the_allocator_waits(cuda, build, other):
    """The caching allocator, which reuses a block at once, gets it only after the consumer's stream is finished."""
    torch = build()
    with torch.cuda.stream(stream_of(cuda, torch)), other.on(cuda.stream()) as c:
        result = dlx.convert(torch.empty(), to="other")
        cuda.stall(c.ptr)
        other.read(result)
        del result
        assert dlx.release_pending() == 1
        cuda.resume(c.ptr)
        assert dlx.release_pending() == 0
    assert cuda.races == 0


@pytest.mark.stand_in("the test's `__dlpack__` sees the arguments")
@pytest.mark.parametrize("device", [0, 1])
def test_a_subclass_is_asked_on_its_device(cuda, build, other, device):
    """The subclass's __dlpack__ is called with its device current, and with stream -1."""
    torch = build()
    with other.on(2, device), torch.cuda.stream(stream_of(cuda, torch, device)):
        tensor = torch.empty(device)
        tensor.__class__ = type("Special", (torch.Tensor,), {"__module__": "build"})
        assert not other.read(dlx.convert(tensor, to="other"))
    assert torch.heard == [-1]


def test_a_foreign_stream(cuda, build, other):
    """Torch stream objects name a stream for other frameworks; one of another device is refused."""
    torch = build()
    stream = stream_of(cuda, torch)
    array = other.made()
    result = dlx.convert(array, to="other", stream=stream, copy=True)
    assert not cuda.read(stream.cuda_stream, result.ptr, N)
    with pytest.raises(StreamError, match="device 1"):
        dlx.convert(array, to=torch.name, stream=stream_of(cuda, torch, 1))


@pytest.mark.parametrize("kept", ["own", "foreign", "legacy"])
@pytest.mark.parametrize("device", [0, 1])
def test_working_on_a_stream(cuda, build, kept, device):
    """Inside the context the stream is torch's current one."""
    torch = build()
    own = stream_of(cuda, torch, device)
    place = dlx.Device(2, device)
    stream = {
        "own": Stream(place, own.cuda_stream, own),
        "foreign": Stream(place, cuda.stream(device), 77),
        "legacy": Stream(place, 1),
    }[kept]
    with torch.adapter.streams.activate(stream):
        current = torch.cuda.current_stream(device)
        assert current.cuda_stream == (0 if kept == "legacy" else stream.handle)
        assert originals.FOLDER or (torch.entered[-1] is own) is (kept == "own")
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(device).cuda_stream == 0


@pytest.mark.parametrize("by", ["dlx", "itself"])
@pytest.mark.parametrize("device", [0, 1])
def test_a_stream_of_another_lives_as_long_as_it_is_used(cuda, build, other, device, by):
    """Torch's objects do not keep the stream alive; arrays created on it do, until the device is finished."""
    torch, place = build(), dlx.Device(2, device)
    owner = Owner(cuda, device)
    handle = owner.ptr
    tensor = dlx.convert(other.made(device), to="dlx")
    with set_streams(torch.adapter, {place: Stream(place, handle, owner)}):
        result = dlx.convert(tensor, to=torch.name) if by == "dlx" else torch.from_dlpack(tensor)
    assert torch.cuda.current_stream(device).cuda_stream == 0
    cuda.stall(handle, device)
    cuda.read(handle, result.data_ptr(), N, device)
    gone = weakref.ref(owner)
    del owner, tensor, result
    gc.collect()
    assert gone() is not None and other.freed == 0
    cuda.resume_all()
    assert dlx.release_pending() == 0
    gc.collect()
    assert gone() is None and (other.freed, other.reused_too_early) == (1, 0)


class Owner:
    """A stream of another framework, destroyed with its object."""

    def __init__(self, cuda, device):
        self.cuda, self.ptr, self.device_id = cuda, cuda.stream(device), device

    def __del__(self):
        self.cuda.destroy(self.ptr)


def test_moves_inside_torch_are_torchs(cuda, build):
    """Torch moves to the current device, or the requested one."""
    torch = build()
    tensor = torch.empty()
    assert dlx.convert(tensor, to=torch.name) is tensor
    assert dlx.convert(tensor, to=torch.name, device="cuda:1").device.index == 1
    with torch.cuda.device(1):
        assert dlx.convert(tensor, to=torch.name, device="cuda").device.index == 1


@pytest.mark.stand_in("the published torch is built for CUDA")
def test_rocm_goes_by_its_true_code(cuda, build, np):
    """Torch's "cuda" is rocm in dlx, and torch orders the streams."""
    torch = build(hip="6.2", cuda=None)
    tensor = torch.empty(1)
    assert dlx.describe(tensor).device == dlx.Device("rocm:1")
    with torch.cuda.device(1), pytest.raises(DeviceError, match="rocm:1"):
        dlx.convert(tensor, to="numpy")
    assert torch.heard == []
    result = dlx.convert(tensor, to="dlx", stream=4096)
    assert (result.device, torch.heard) == ((10, 1), [4096])
    with pytest.raises(StreamError, match="does not exist on ROCm"):
        dlx.convert(tensor, to="dlx", stream=1)
    assert cuda.count() == 0


@pytest.mark.stand_in("the published torch is built for CUDA")
def test_a_build_without_devices(cuda, build, np):
    """The error is one sentence, for plans, too."""
    torch = build(cuda=None)
    for call in (dlx.convert, lambda *a, **k: (_ for _ in ()).throw(dlx.plan(*a, **k).error)):
        with pytest.raises(DeviceError, match="supports only the host"):
            call(np.zeros(3), torch.name, device="cuda:0")


@pytest.mark.stand_in("its driver cannot be removed; see test_without_a_device")
def test_a_cuda_build_without_a_driver(build, np, monkeypatch):
    """The error is dlx's and names the missing driver."""
    torch = build()
    monkeypatch.setenv("DLX_CUDA_DRIVER", "nowhere.so")
    native.lib.dlx_cuda_forget()

    def fails():
        raise RuntimeError("Found no NVIDIA driver on your system.")

    torch.cuda.current_device = fails
    for device in ("cuda", "cuda:1"):
        with pytest.raises(DeviceError, match="there is no CUDA driver here"):
            dlx.convert(np.zeros(3, "uint8"), to=torch.name, device=device)
