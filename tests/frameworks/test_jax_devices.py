"""The jax adapter on devices, with a module that behaves like a CUDA build of jax on the recording driver.

It copies jax 0.10 (jaxlib/dlpack.cc): there is no current stream; an array is ready on its device's compute stream;
`__dlpack__(stream=s)` makes s wait, the host waits without a stream, and any number counts as a handle; capsules are
legacy ones; `from_dlpack` names its own stream, which the compute stream waits for.
"""

from __future__ import annotations

import gc
import sys
import types

import pytest
from support.cuda import gpulib
from support.plugins.adapter_copy import adapter_module

import dlx
from dlx._core import native
from dlx._core.native import lib
from dlx._registry.registry import registry
from dlx.errors import CopyRequiredError, DeviceError

N = 64

jax = pytest.importorskip("jax")


class Device:
    """A jax device."""

    client = types.SimpleNamespace(platform_version="cuda 12090")

    def __init__(self, build, platform, number):
        self.build, self.platform, self.local_hardware_id = build, platform, number
        self.streams = [build.driver.stream(number) for _ in range(2)] if platform == "gpu" else []

    def __repr__(self):
        return f"{self.platform}:{self.local_hardware_id}"

    @property
    def compute(self):
        return self.streams[0]

    @property
    def external(self):
        return self.streams[1]


class Array:
    """An array on one device, ready on its compute stream."""

    ndim, is_fully_addressable = 1, True

    def __init__(self, build, device, held, address, shape, kind="device"):
        self.build, self.device, self.held, self.address, self.shape = build, device, held, address, shape
        self.size, self.nbytes, self.dtype = shape[0], shape[0], build.numpy.dtype("uint8")
        self.sharding = types.SimpleNamespace(device_set={device}, memory_kind=kind)
        self.format = types.SimpleNamespace(layout=types.SimpleNamespace(major_to_minor=(0,)))

    def is_deleted(self):
        return False

    def unsafe_buffer_pointer(self):
        return self.address

    def copy(self):
        return self.build.computed(self.device)

    def __dlpack_device__(self):
        return (3 if self.sharding.memory_kind == "pinned_host" else 2, self.device.local_hardware_id)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.build.heard.append(stream)
        number = self.device.local_hardware_id
        if stream is None:
            assert lib.dlx_cuda_synchronize(number, self.device.compute) == 0
        else:
            assert stream > 0, "jax uses any number as a handle"
            assert lib.dlx_cuda_order(number, self.device.compute, number, stream) == 0
        place = self.__dlpack_device__()
        return native.tensor_new(self.address, self.shape, None, (1, 8, 1), place, 0, self).__dlpack__(
            stream=None if place[0] == 3 else -1
        )


def fake_jax(driver):
    """Return a module like a build of jax with the CUDA plugin."""
    self = types.ModuleType("jaxbuild")
    self.__version__, self.driver, self.heard, self.numpy = "0.10.2", driver, [], jax.numpy
    self.dtypes, self.config = (
        jax.dtypes,
        types.SimpleNamespace(jax_enable_x64=False, jax_platforms=None, jax_default_device=None),
    )
    self.Array = type("Array", (Array,), {"__module__": "jaxbuild"})
    devices = [Device(self, "gpu", number) for number in range(2)]
    self.local_devices = lambda backend=None: devices if backend in (None, "cuda") else [Device(self, "cpu", 0)]

    def computed(device=devices[0], *, kind="device"):
        number = device.local_hardware_id
        address = driver.alloc(N, number, 1 if kind == "pinned_host" else 2)
        driver.write(device.compute, address, N, number)
        return self.Array(self, device, None, address, (N,), kind)

    def from_dlpack(obj):
        kind, number = obj.__dlpack_device__()
        assert kind == 2, "not used here"
        device = devices[number]
        taken = native.capsule_claim(obj.__dlpack__(stream=device.external))
        assert lib.dlx_cuda_order(number, device.external, number, device.compute) == 0
        return self.Array(self, device, taken, taken.data_ptr, taken.shape)

    self.computed, self.dlpack = computed, types.SimpleNamespace(from_dlpack=from_dlpack)
    self.device_put = lambda obj, device: computed(device)
    return self


@pytest.fixture
def build(monkeypatch, cuda):
    """Return that jax, which dlx uses during one test."""
    from dlx._registry.registry import Plugin

    copied, module = adapter_module("jax", "jaxbuild"), fake_jax(cuda)
    copied._has_cuda_plugin = lambda: True
    Build = type("Build", (copied.JaxAdapter,), {"types": ("jaxbuild.Array",)})
    monkeypatch.setitem(sys.modules, "jaxbuild", module)
    module.adapter, module.of_adapter = Build(), copied
    plugin = Plugin("dlx_jaxbuild", lambda: None, "dlx", adapters=(module.adapter,))
    monkeypatch.setitem(registry._loader.plugins, "jaxbuild", plugin)
    return module


@pytest.fixture
def other(monkeypatch, cuda):
    """Return another framework on the same devices."""
    return gpulib.install(monkeypatch, "other", cuda)


@pytest.mark.parametrize("number", [0, 1])
def test_out(cuda, build, other, number):
    """Memory is shared by address; jax makes the consumer's stream wait."""
    with other.on(cuda.stream(number), number) as c:
        source = build.computed(build.local_devices()[number])
        assert dlx.describe(source).device == (2, number)
        assert dlx.plan(source, to="other").outcome == "copied"  # jax's memory must not be written to
        result = dlx.convert(source, to="other", readonly="share")
        assert result.ptr == source.address and build.heard[-1] == c.ptr and not other.read(result)


def test_out_without_order(cuda, build, other):
    """With stream -1, which is not a handle, jax waits on the host."""
    with other.on(cuda.stream()):
        dlx.convert(build.computed(), to="other", stream=-1, readonly="share")
    assert build.heard == [None]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("readonly", [False, True])
def test_in(cuda, build, other, number, readonly):
    """Memory is shared by address; the stream that jax names waits, also for read-only memory."""
    with other.on(cuda.stream(number), number):
        source = other.made(number, readonly=readonly)
        result = dlx.convert(source, to="jaxbuild")
        device = build.local_devices()[number]
        assert type(result) is build.Array and result.address == source.ptr and result.device is device
        assert not cuda.read(device.compute, result.address, N, number)
        assert other.freed == 0


def test_many(cuda, build, other):
    """One event serves all arrays; jax's stream waits for each, since jax requests each."""
    with other.on(cuda.stream()):
        sources = [other.made() for _ in range(10)]
        cuda.forget()
        results = dlx.convert(sources, to="jaxbuild")
        compute = build.local_devices()[0].compute
        assert not any(cuda.read(compute, result.address, N) for result in results)
        assert cuda.count("cuEventRecord") == 1 + 10  # including jax's


def test_memory_is_let_go_of(cuda, build, other):
    """The memory is released with the jax array."""
    with other.on(cuda.stream()):
        result = dlx.convert(other.made(), to="jaxbuild")
        del result
        gc.collect()
        dlx.release_pending()
    assert other.freed == 1


def test_to_the_host(cuda, build, np):
    """The copy waits for jax."""
    source = build.computed()
    assert type(dlx.convert(source, to="numpy")) is np.ndarray and cuda.races == 0
    with pytest.raises(CopyRequiredError):
        dlx.convert(source, to="numpy", copy=False)


def test_pinned_memory_is_read_by_the_host(cuda, build, np):
    """Pinned memory keeps its device; jax waits on the host."""
    source = build.computed(kind="pinned_host")
    assert dlx.describe(source).device == dlx.Device("cuda_host")
    result = dlx.convert(source, to="numpy", copy=False)
    assert result.ctypes.data == source.address and build.heard == [None] and cuda.races == 0


def test_moves(cuda, build, np):
    """Arrays from the host are moved by dlx, arrays of jax by jax."""
    made = dlx.convert(np.arange(N, dtype="uint8"), to="jaxbuild", device="cuda:1")
    device = build.local_devices()[1]
    assert made.device is device and not cuda.read(device.compute, made.address, N, 1)
    assert dlx.convert(build.computed(), to="jaxbuild", device="cuda:1").device is device
    with pytest.raises(DeviceError, match="cuda:2"):
        dlx.convert(build.computed(), to="jaxbuild", device="cuda:2")


def test_host_memory_goes_to_the_default_device(cuda, build, np):
    """Arrays go to the device of `jax.numpy.asarray`, unless the call forbids copies or names a device."""
    gpus, source = build.local_devices(), np.zeros(N + 64, "uint8")
    start = -source.ctypes.data % 64
    for number in (None, 0, 1):
        build.config.jax_default_device = None if number is None else gpus[number]
        there = gpus[number or 0]
        for offset in (0, 1):
            x = source[start + offset :][:N]
            plan, made = dlx.plan(x, to="jaxbuild"), dlx.convert(x, to="jaxbuild")
            assert made.device is there and not cuda.read(there.compute, made.address, N, number or 0)
            assert plan.outcome == "copied" and plan.device == (2, number or 0)
            assert "the default device of jaxbuild" in plan.steps[-1].why
            assert dlx.convert([x, x], to="jaxbuild")[0].device is there
            assert dlx.stack([x, x], "jaxbuild").device is there
            assert dlx.convert(x, to="jaxbuild", device="cuda:1").device is gpus[1]
        x = source[start:][:N]
        for options in ({"copy": False}, {"device": "cpu"}):
            kept = dlx.plan(x, to="jaxbuild", **options)
            assert kept.outcome == "shared" and kept.device == (1, 0)
    build.config.jax_default_device = build.local_devices("cpu")[0]
    assert dlx.plan(source[start:][:N], to="jaxbuild").outcome == "shared"


def test_what_a_function_in_jax_gets_and_gives(cuda, build, other):
    """Jax's stream cannot be set: inputs and outputs are ordered."""

    @dlx.using("jaxbuild")
    def work(x):
        assert not cuda.read(x.device.compute, x.address, N)
        return build.computed()

    with other.on(cuda.stream()):
        x = other.made()
        result = work(x)
        assert type(result) is other.Array and not other.read(result)


def test_other_platforms(build):
    """ROCm devices, which jax also calls 'gpu', and unknown platforms are handled."""
    device = build.local_devices()[0]
    assert build.adapter.devices.from_native(device) == (2, 0)
    device.client = types.SimpleNamespace(platform_version="rocm 60200")
    assert build.adapter.devices.from_native(device) == (10, 0)
    device.platform = "tpu"
    with pytest.raises(DeviceError, match="no device for jax's 'tpu'"):
        build.adapter.devices.from_native(device)


def test_without_a_plugin_there_is_no_cuda(cuda, build, other, monkeypatch):
    """Without the plugin, or with CUDA disabled, there is no device, before any backend is started."""
    assert registry.target("jaxbuild").capabilities.device_types == {1, 2}
    build.config.jax_platforms = "cpu"
    assert registry.target("jaxbuild").capabilities.device_types == {1}
    build.config.jax_platforms = "cuda"
    assert registry.target("jaxbuild").capabilities.device_types == {2}
    monkeypatch.setattr(build.of_adapter, "_has_cuda_plugin", lambda: False)  # cached once per process
    registry._forget()
    build.config.jax_platforms = None
    with pytest.raises(DeviceError, match="cuda:0, which jaxbuild does not support"):
        dlx.convert(other.made(), to="jaxbuild", device="cuda:0")
