"""Frameworks that compute on the recording driver's devices, with current streams as in torch and cupy.

Their kernels are reads and writes that the driver watches. Their allocator reuses memory at once, on the stream of its
allocation, as torch's and cupy's do: memory that is freed too early is a race.
"""

from __future__ import annotations

import contextlib
import math
import types

import dlx
from dlx._core import native
from dlx._core.cuda import check
from dlx._core.native import lib
from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Capabilities,
    Description,
    Devices,
    DTypes,
    FastPath,
    Layout,
    Owner,
    StreamSupport,
)

N = 64
WIDTHS = ("uint8", "float16", "float32", "complex128")  # dtypes


class Stream:
    """A stream object that must outlive its handle."""

    def __init__(self, ptr, device_id=0):
        self.ptr, self.device_id = ptr, device_id


class Array:
    """An array of N bytes on a device."""

    framework = None

    def __init__(self, tensor):
        self.tensor = tensor

    @property
    def ptr(self):
        return self.tensor.data_ptr

    @property
    def device(self):
        return self.tensor.device

    dtype = property(lambda self: self.tensor.dtype.name)
    shape = property(lambda self: self.tensor.shape)
    strides = property(lambda self: tuple(step * self.tensor.dtype.bits // 8 for step in self.tensor.strides))  # bytes

    def __dlpack_device__(self):
        return tuple(self.tensor.device)


class Block:
    """Memory from the framework's allocator, which reuses it as soon as it is freed."""

    def __init__(self, framework, nbytes, device, stream, kind):
        self.framework, self.nbytes, self.device, self.stream = framework, nbytes, device, stream
        self.address = framework.cuda.alloc(nbytes, device, kind)

    def __del__(self):
        framework = self.framework
        framework.freed += 1
        if framework.cuda.write(self.stream, self.address, self.nbytes, self.device):
            framework.reused_too_early += 1


class Framework(types.ModuleType):
    """A framework with an adapter; streams are per device, initially the legacy one."""

    __version__ = "1.0"

    def __init__(self, name, cuda):
        super().__init__(name)
        self.cuda = cuda
        self.freed = self.reused_too_early = self.asked = 0
        self.device = 0
        self._streams = {}
        self.Array = type("Array", (Array,), {"framework": self, "__module__": name})
        self.heard = []  # streams that were passed to exports

    def current(self, device=None):
        """Return the current stream object of a device."""
        return self._streams.get(self.device if device is None else device) or Stream(0, -1)

    def told(self, device):
        """Return the answers to the fast path."""
        self.asked += 1
        return self.current(device)

    @contextlib.contextmanager
    def on(self, handle, device=0):
        """Work on a stream within a block."""
        before = self._streams.get(device)
        self._streams[device] = Stream(handle, device)
        try:
            yield self._streams[device]
        finally:
            self._streams[device] = before

    def handle(self, device):
        return self.current(device).ptr or 1

    def made(self, device=0, *, kind=2, shape=(N,), strides=None, readonly=False, dtype="uint8"):
        """Return a new array, written by a kernel on the current stream."""
        block = Block(self, N, device, self.handle(device), kind)
        place = (2 if kind == 2 else 13, device)
        tensor = native.tensor_new(block.address, shape, strides, dlx.DType(dtype), place, 1 if readonly else 0, block)
        array = self.Array(tensor)
        self.write(array)
        return array

    def write(self, array):
        """Run a kernel that writes; return whether it races."""
        return self.cuda.write(self.handle(array.device.id), array.ptr, N, array.device.id)

    def read(self, array):
        """Run a kernel that reads; return whether it races."""
        return self.cuda.read(self.handle(array.device.id), array.ptr, N, array.device.id)


class GpuDevices(Devices):
    """The devices of this framework."""

    def __init__(self, framework):
        self.framework = framework

    def current(self, device_type):
        return self.framework.device

    @contextlib.contextmanager
    def activate(self, device):
        before, self.framework.device = self.framework.device, device.id
        try:
            with super().activate(device):
                yield
        finally:
            self.framework.device = before


class GpuAdapter(Adapter):
    """The adapter of this framework."""

    install = "not to be had"

    def __init__(self, framework, **facts):
        self.framework = framework
        self.name = self.package = framework.__name__
        self.types = (f"{self.name}.Array",)
        self.devices = GpuDevices(framework)
        self.streams = self.stream_support()
        self.facts = {"device_types": frozenset({1, 2}), "layouts": Layout.ANY, "min_alignment": 1} | facts

    def stream_support(self):
        return StreamSupport(
            current=self.current_stream,
            activate=lambda stream: self.framework.on(stream.handle, stream.device.id),
        )

    def capabilities(self):
        return Capabilities(dtypes=frozenset(WIDTHS), **self.facts)

    def describe(self, obj):
        return Description(ArrayInfo.of_tensor(obj.tensor, self.name, type(obj), ()))

    def export(self, obj, *, stream=None):
        self.framework.heard.append(stream)
        return obj.tensor

    def current_stream(self, device):
        self.framework.asked += 1
        return self.framework.current(device.id)

    def load(self, tensor):
        device = tensor.device
        stream = self.framework.handle(device.id) if device.type in (2, 13) else None
        return self.framework.Array(native.capsule_claim(tensor.__dlpack__(stream=stream, max_version=(1, 0))))


class NewDevices(GpuDevices):
    """Devices of a framework that allocates the memory of copies itself."""

    def new_array(self, shape, dtype, device, strides):
        stream = self.framework.handle(device.id)
        block = Block(self.framework, math.prod(shape), device.id, stream, device.type)
        return self.framework.Array(native.tensor_new(block.address, shape, strides, dtype, device, 0, block))


class FreshAdapter(GpuAdapter):
    """The adapter of a framework that allocates the memory of copies itself, as torch does."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.devices = NewDevices(framework)


class QuickAdapter(GpuAdapter):
    """An adapter whose arrays take the fast path; its facts hold for writable arrays."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        names = {name: name for name in WIDTHS}
        framework.__dict__.update(names)
        self.dtypes = DTypes(self.name, names)
        self.fast_path = FastPath(types=self.types, owner=Owner("tensor", address="data_ptr"))

    def stream_support(self):
        told = super().stream_support()
        return StreamSupport(told.current, told.activate, quick=lambda: (self.framework.told, "ptr"))


class QuickFreshAdapter(QuickAdapter):
    """The same for a framework that allocates the memory of copies itself."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.devices = NewDevices(framework)


class EventAdapter(GpuAdapter):
    """The adapter of a framework whose arrays each have a stream, so it has no current stream and orders itself."""

    def stream_support(self):
        return StreamSupport(activate=super().stream_support().activate)

    def export(self, obj, *, stream=None):
        self.framework.heard.append(stream)
        if stream not in (None, -1):
            device = obj.device.id
            check(lib.dlx_cuda_order(device, self.framework.handle(device), device, stream))
        return obj.tensor


def install(monkeypatch, name, cuda, kind=GpuAdapter, **facts):
    """Register a framework with dlx for one test."""
    import sys

    from dlx._registry.registry import Plugin, registry

    framework = Framework(name, cuda)
    monkeypatch.setitem(sys.modules, name, framework)
    adapter = framework.adapter = kind(framework, **facts)
    plugin = Plugin(f"dlx_{name}", lambda: None, "tests", adapters=(adapter,))
    monkeypatch.setitem(registry._loader.plugins, name, plugin)
    return framework
