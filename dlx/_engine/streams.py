"""Order the producer's and the consumer's streams in one call.

All arrays are exported before streams are ordered, so that one event per pair of streams covers all arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from dlx._core import cuda, native
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.stream import PER_THREAD, UNORDERED, Stream, is_unordered, parse_stream, with_keeper
from dlx._core.types import Device, host_readable
from dlx._registry.generic import TENSOR
from dlx._registry.target import Target
from dlx._support.reflect import foreign_errors
from dlx.adapter.base import Adapter, Devices
from dlx.errors import DeviceError

Readiness = Stream | cuda.Ready | None
"""When memory is ready: after the present work of a stream, after a recorded event, or None: now."""

LEGACY = lib.DLX_STREAM_LEGACY


def takes_stream(source: Adapter) -> bool:
    """Return whether the producer's export takes the consumer's stream for device memory."""
    return source.streams is None or source.streams.ready is None


class StreamSync:
    """The streams of one call; `stream` and `device` are the caller's options."""

    def __init__(self, target: Target, stream: Any = None, device: Device | None = None) -> None:
        self._target, self._stream, self._device = target, stream, device
        self._streams: dict[tuple[int, Device], Stream | None] = {}
        self._consumers: dict[Device, Stream | None] = {}
        self._points: dict[Stream, cuda.Ready] = {}
        self._ordered: set[tuple[Stream | int, Stream | None]] = set()
        self._held: list[cuda.Ready] = []

    def consumer(self, device: Device) -> Stream | None:
        """Return the consumer's stream; None if it becomes known only at the import."""
        try:
            return self._consumers[device]
        except KeyError:
            owner = physical(device)
            found = (
                self._current(self._target.adapter, owner)
                if self._stream is None
                else parse_stream(self._stream, owner)
            )
            self._consumers[device] = found
            return found

    def _reader(self, device: Device) -> Stream | None:
        """Return the consumer's stream if the consumer reads the memory itself, and not a copy of dlx."""
        if is_unordered(self._stream) or self._device is None or physical(self._device) == physical(device):
            return self.consumer(device)
        return None

    def producer(self, source: Adapter, device: Device) -> Stream | None:
        """Return the framework's current stream; None if unknown, or if each array has one."""
        return self._current(source, physical(device))

    def _current(self, adapter: Adapter, device: Device) -> Stream | None:
        """Return a framework's current stream on a device, looked up once per call."""
        key = id(adapter), device
        if key not in self._streams:
            current = adapter.streams.current if adapter.streams is not None else None
            with foreign_errors(f"{adapter.name} failed to name its stream on {device}:", DeviceError):
                value = None if current is None else current(device)
            # 0 is the legacy stream in most frameworks.
            value = LEGACY if isinstance(value, int) and value == 0 and cuda.is_cuda(device) else value
            self._streams[key] = None if value is None else with_keeper(parse_stream(value, device))
        return self._streams[key]

    def explain(self, source: Adapter, device: Device, place: Device) -> str:
        """Describe the stream synchronization without a call of the driver; empty without any."""
        if is_unordered(self._stream):
            return "stream=-1: no stream waits for its producer"
        own = self.producer(source, device)
        if host_readable(place):
            return f"the host waits for {own or 'its producer'}"
        consumer = self.consumer(place)
        if consumer is not None and own == consumer:
            return ""
        return f"{consumer or 'the stream that uses it'} waits for {own or 'its producer'}"

    def reach(self, device: Device) -> None:
        """Raise a DeviceError if dlx cannot order work on a device."""
        if cuda.is_cuda(device):
            try:
                cuda.require()
            except DeviceError as error:
                raise DeviceError(f"its memory is on {device}, and {error.reason}", fix=error.fix) from error
        if self._reader(device) is None and not cuda.is_cuda(device):
            raise _cannot_order(device)

    def export(self, source: Adapter, obj: Any, device: Device) -> tuple[Tensor, Readiness]:
        """Export an array on its device; dlx orders the producer's current stream, if there is one."""
        own, waiting = self.choose_streams(source, device)
        with source.devices.activate(device):
            tensor = source.export(obj, stream=UNORDERED if own is not None else waiting.wire)
        return tensor, self._readiness(source, obj, tensor, own or waiting)

    def readiness_of_export(self, source: Adapter, obj: Any, tensor: Tensor, device: Device | None) -> Readiness:
        """Return when a tensor is ready that was exported without a stream; `device` is from its description."""
        asked = None
        if takes_stream(source) and cuda.is_cuda(tensor.device):
            asked = Stream(physical(tensor.device), LEGACY)  # DLPack's default
        elif takes_stream(source) and device is None and not host_readable(tensor.device):
            raise _cannot_order(tensor.device)
        return self._readiness(source, obj, tensor, asked)

    def readiness_of_described(self, source: Adapter, obj: Any, tensor: Tensor) -> Readiness:
        """Return when the tensor of a description is ready, without a call of the producer."""
        asked = None
        if takes_stream(source) and not host_readable(tensor.device):
            own, asked = self.choose_streams(source, tensor.device)
            asked = own or asked
        return self._readiness(source, obj, tensor, asked)

    def _readiness(self, source: Adapter, obj: Any, tensor: Tensor, asked: Stream | None) -> Readiness:
        """Return when an exported tensor is ready; the producer made the stream `asked` wait for it."""
        if not cuda.is_cuda(tensor.device):
            if tensor.device.type == lib.kDLCUDAHost and not is_unordered(self._stream):
                self.wait(_ready(source, obj, tensor, None), None)  # a device may still write to it
            return None
        if takes_stream(source):
            cuda.require()
        if asked is not None and asked.is_unordered:
            return asked
        return cuda.readiness_of(tensor) or _ready(source, obj, tensor, asked)

    def choose_streams(self, source: Adapter, device: Device) -> tuple[Stream | None, Stream]:
        """Return the producer's stream or None, and the stream that the producer must make wait otherwise."""
        consumer = self._reader(device)
        if cuda.is_cuda(device):
            if consumer is not None and consumer.is_unordered:
                return None, consumer
            own = self.producer(source, device)
            if own is None and (consumer is None or consumer.handle == PER_THREAD):  # many producers refuse 2
                consumer = cuda.work_stream(physical(device))
            return own, consumer or Stream(device, UNORDERED)
        assert consumer is not None  # `reach` checks it
        return None, consumer

    def order(self, tensor: Tensor, readiness: Readiness, place: Device | None) -> None:
        """Make a consumer wait that reads the memory without a copy, on a device or on the host."""
        device = tensor.device
        if not cuda.is_cuda(device):
            return
        if place is not None and host_readable(place):
            self.wait(readiness, None)
            return
        consumer = self.consumer(device)
        if consumer is not None:
            self.wait(readiness, consumer)
        if (
            isinstance(readiness, Stream)
            and not readiness.is_unordered
            and (consumer is None or self._target.adapter is TENSOR)
        ):
            self._point(readiness)

    def for_consumer(self, source: Adapter, tensor: Tensor, readiness: Readiness) -> Tensor:
        """Return the ordered tensor for the consumer; its memory lives until the consumer's stream is done."""
        self.order(tensor, readiness, None)
        device = physical(tensor.device)
        consumer = self.consumer(device)
        same = consumer == readiness and consumer == self.producer(source, device)
        if consumer is not None and not consumer.is_unordered and not same:
            tensor = native.tensor_behind(tensor, device.id, consumer.handle, consumer.keep)
        elif consumer is not None and self._target.adapter is not TENSOR:
            tensor = native.tensor_behind(tensor, device.id, UNORDERED, None)
        if consumer is not None and (consumer.is_unordered or self._target.adapter is not TENSOR):
            return tensor
        point = self._point(readiness) if isinstance(readiness, Stream) else readiness
        if point is None:
            return tensor
        return cuda.when(tensor, point)

    def copy(
        self, source: Adapter | None, tensor: Tensor, readiness: Readiness, keep_order: bool, place: Device
    ) -> tuple[Tensor, Readiness]:
        """Copy from or to a CUDA device on dlx's stream; `source` is None if the tensor is already a copy of dlx."""
        on_device = cuda.is_cuda(tensor.device)
        device = physical(tensor.device if host_readable(place) else place)
        work = cuda.work_stream(device)
        if on_device:
            self.wait(readiness, work)
        if host_readable(place):
            return native.tensor_copy(tensor, keep_order, work.handle), None
        fresh = native.tensor_on_device(tensor, keep_order, device.id)
        # Keep the source alive until the copy is done.
        held = native.tensor_behind(tensor, device.id, work.handle, None) if on_device else tensor
        native.tensor_transfer(held, fresh, work.handle, not on_device)
        if not on_device:
            return native.tensor_when(fresh, 0), None
        self._forget(work)
        self.delay_writes(source, readiness, work)
        return fresh, work

    def copy_to_new_array(
        self, source: Adapter | None, tensor: Tensor, readiness: Readiness, strides: Sequence[int], place: Device
    ) -> Any:
        """Copy into a new CUDA array of the consumer; None if it allocates none, or the host would wait."""
        adapter, place = self._target.adapter, physical(place)
        if type(adapter.devices).new_array is Devices.new_array or self._target.varies:
            return None
        stream, on_device = self.consumer(place), cuda.is_cuda(tensor.device)
        if stream is None or stream.is_unordered:
            return None
        cuda.require()
        if not on_device and cuda.is_capturing(stream):
            return None
        activate = None if self._stream is None or adapter.streams is None else adapter.streams.activate
        with contextlib.nullcontext() if activate is None else activate(stream):
            array = adapter.devices.new_array(tensor.shape, tensor.dtype, place, strides)
        if array is None:
            return None
        target = adapter.export(array, stream=UNORDERED)
        if on_device:
            self.wait(readiness, stream)
            # Keep the source alive until the copy is done.
            tensor = native.tensor_behind(tensor, place.id, stream.handle, stream.keep)
        native.tensor_transfer(tensor, target, stream.handle, not on_device)
        if on_device:
            self._forget(stream)
            self.delay_writes(source, readiness, stream)
        return array

    def delay_writes(self, source: Adapter | None, readiness: Readiness, work: Stream) -> None:
        """Make the stream that may write to the source wait for the copy; the host, if that stream is unknown."""
        if source is None or source.arrays.immutable or is_unordered(self._stream):
            return
        if isinstance(readiness, Stream) and readiness == self.producer(source, readiness.device):
            cuda.order(work, readiness)
        elif readiness is not None and not isinstance(readiness, Stream):
            cuda.follow(readiness, work)
        else:
            cuda.synchronize(work)

    def wait(self, readiness: Readiness, waiting: Stream | None) -> None:
        """Make a stream, or the host (None), wait for memory once per call."""
        if readiness is None or (isinstance(readiness, Stream) and (readiness.is_unordered or readiness == waiting)):
            return
        key = readiness if isinstance(readiness, Stream) else cuda.identity(readiness)
        if (key, waiting) in self._ordered:
            return
        if waiting is None:
            cuda.synchronize(readiness)
        elif isinstance(readiness, Stream):
            cuda.order(readiness, waiting)
        else:
            cuda.wait(readiness, waiting)
        if not isinstance(readiness, Stream):  # keep its address from reuse
            self._held.append(readiness)
        self._ordered.add((key, waiting))

    def _point(self, readiness: Stream) -> cuda.Ready:
        if readiness not in self._points:
            self._points[readiness] = cuda.ready(readiness)
        return self._points[readiness]

    def _forget(self, stream: Stream) -> None:
        """Record new work on a stream: streams that waited for it must wait again."""
        self._ordered = {pair for pair in self._ordered if pair[0] != stream}
        self._points.pop(stream, None)


def _ready(source: Adapter, obj: Any, tensor: Tensor, asked: Stream | None) -> Stream | None:
    """Return the stream on which an exported array is ready: of `StreamSupport.ready`, else `asked`."""
    ready = source.streams.ready if source.streams is not None else None
    return asked if ready is None else ready(obj, tensor)


def physical(device: Device) -> Device:
    """Return the device whose streams use the memory; for managed memory, its CUDA device."""
    return Device(lib.kDLCUDA, device.id) if device.type == lib.kDLCUDAManaged else device


def _cannot_order(device: Device) -> DeviceError:
    return DeviceError(
        f"its memory is on {device}, and dlx cannot wait for work there",
        fix="Move it to the host in its own framework first.",
    )


Synchronization = Callable[[], StreamSync]
"""Returns the stream synchronization of a call, created for the first device memory."""
