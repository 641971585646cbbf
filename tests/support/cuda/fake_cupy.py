"""Return a fresh module over a driver."""

from __future__ import annotations

import types
import warnings

from dlx._core import native


class _Memory:
    """Pool memory, reused at once on its stream."""

    def __init__(self, driver, nbytes, device, kind, stream):
        self.driver, self.nbytes, self.device_id, self.stream = driver, nbytes, device, stream
        self.ptr = driver.alloc(nbytes, device, kind)
        self.kind = kind

    def __del__(self):
        self.driver.write(self.stream or 1, self.ptr, self.nbytes, self.device_id)


class _Unowned:
    """Memory that a DLPack tensor holds."""

    def __init__(self, tensor):
        self.tensor, self.ptr, self.device_id = tensor, tensor.data_ptr, tensor.device.id
        self.kind = 3 if tensor.device.type == 13 else 2


class MemoryPointer:
    """A position in memory."""

    def __init__(self, mem, offset=0):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class _BaseStream:
    """The common part of cupy's streams."""

    module = None

    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id

    def __cuda_stream__(self):
        return (0, self.ptr)

    def _place(self):
        current = self.module.cuda.runtime.getDevice()
        if self.device_id not in (-1, current):
            raise RuntimeError(f"the stream's device ({self.device_id}) does not match the current device ({current})")
        return current

    def _set(self):
        """Become current; a stream without a device, on the current device."""
        place = self.device_id if self.device_id != -1 else self.module.cuda.runtime.getDevice()
        self.module._current[place] = self

    def is_capturing(self):
        return native.lib.dlx_cuda_can_order(self._place(), self.ptr, -1, 0) == native.lib.DLX_E_CAPTURE

    def record(self, event):
        event.place, event.ptr = self._place(), self.ptr or 1

    def wait_event(self, event):
        assert native.lib.dlx_cuda_order(event.place, event.ptr, self._place(), self.ptr or 1) == 0

    def __enter__(self):
        place = self._place()
        self.module._stacks[place].append(self)
        self.module._entered.append(place)
        self._set()
        return self

    def __exit__(self, *args):
        place = self.module._entered.pop()
        self.module._stacks[place].pop()
        self.module._stacks[place][-1]._set()


def module(driver):
    """A fresh module over a driver."""
    import numpy as np

    self = types.ModuleType("cupy")
    self.__version__ = "14.2.0"
    self._stacks, self._entered, self._current = {}, [], {}
    self.dtype, self.bool_ = np.dtype, np.bool_
    kinds = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
    for name in (f"{kind}{width}" for kind, widths in kinds.items() for width in widths):
        setattr(self, name, getattr(np, name))
    device = [0]

    def get_device():
        return driver.current if driver.depth else device[0]

    class Stream(_BaseStream):
        def __init__(self, non_blocking=True):
            super().__init__(driver.stream(device[0], blocking=not non_blocking), device[0])

    class ExternalStream(_BaseStream):
        def __init__(self, ptr, device_id=-1):
            warnings.warn("ExternalStream is deprecated", DeprecationWarning, stacklevel=2)
            super().__init__(ptr, device_id)

    _Null = type("_Null", (Stream,), {"__init__": lambda self: _BaseStream.__init__(self, 0, -1)})
    Stream.module = ExternalStream.module = self
    Stream.null = _Null()
    self._stacks.update({number: [Stream.null] for number in range(2)})
    self._current.update(dict.fromkeys(range(2), Stream.null))

    class Device:
        def __init__(self, number):
            self.id = number

        def __int__(self):
            return self.id

        def __enter__(self):
            self.before, device[0] = get_device(), self.id
            return self

        def __exit__(self, *args):
            device[0] = self.before

    def current(device_id=-1):
        return self._current[get_device() if device_id == -1 else device_id]

    class ndarray:
        def __init__(self, shape, dtype, data, strides=None):
            self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), data
            self.strides = np.empty(shape, dtype).strides if strides is None else tuple(strides)
            self.size = int(np.prod(shape))

        def __dlpack_device__(self):
            return (13 if self.data.mem.kind == 3 else 2, self.data.device_id)

        def __dlpack__(self, **keywords):
            raise AssertionError("cupy's own export orders every array by itself")

        def copy(self):
            fresh = empty(self.shape, self.dtype)
            memory = self.data.mem
            nbytes, here = getattr(memory, "nbytes", self.size), self.data.device_id == device[0]
            (driver.read if here else driver.copied)(current().ptr or 1, memory.ptr, nbytes, device[0])
            if isinstance(memory, _Memory):
                held, offset = driver.peek(memory.ptr, memory.nbytes) + bytes(64), self.data.ptr - memory.ptr
                driver.poke(fresh.data.ptr, np.ndarray(self.shape, self.dtype, held, offset, self.strides).tobytes())
            return fresh

        def __getitem__(self, index):
            like = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, self.strides)
            view = like[index]
            offset = view.__array_interface__["data"][0] - like.__array_interface__["data"][0]
            place = MemoryPointer(self.data.mem, self.data.ptr - self.data.mem.ptr + offset)
            return ndarray(view.shape, self.dtype, place, view.strides)

    def alloc(nbytes, kind=2):
        return MemoryPointer(_Memory(driver, max(nbytes, 1), device[0], kind, current().ptr))

    def empty(shape, dtype, kind=2):
        return ndarray(shape, dtype, alloc(int(np.prod(shape)) * np.dtype(dtype).itemsize, kind))

    def full(shape, dtype, kind=2):
        array = empty(shape, dtype, kind)
        driver.write(current().ptr or 1, array.data.ptr, array.size * array.dtype.itemsize, device[0])
        return array

    def from_dlpack(array, *, device=None, copy=None):
        kind, number = array.__dlpack_device__()
        if kind not in (2, 13):
            raise TypeError(f"Unsupported array type: {kind}")
        with Device(number):
            capsule = array.__dlpack__(stream=current().ptr or 1, max_version=(1, 0), copy=copy)
        tensor = native.capsule_claim(capsule)
        dtype = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}[tensor.dtype.code] + str(tensor.dtype.bits // 8)
        strides = [step * np.dtype(dtype).itemsize for step in tensor.strides]
        return ndarray(tensor.shape, dtype, MemoryPointer(_Unowned(tensor)), strides)

    self.ndarray, self.from_dlpack, self.empty, self.full = ndarray, from_dlpack, empty, full
    ndarray.__module__ = "cupy"
    runtime = types.SimpleNamespace(getDevice=get_device, is_hip=False)
    self.cuda = types.SimpleNamespace(
        Stream=Stream,
        ExternalStream=ExternalStream,
        Device=Device,
        Event=lambda disable_timing: types.SimpleNamespace(),
        runtime=runtime,
        get_current_stream=current,
        alloc=alloc,
    )
    return self
