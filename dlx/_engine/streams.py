"""Stream synchronization of one call: which stream memory is ready on, and which one must wait for it.

Everything is exported before anything is ordered, so that one event for a pair of streams covers all arrays.
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
"""When memory is ready: after the work on a stream so far, after a recorded event, or None: at once."""

LEGACY = lib.DLX_STREAM_LEGACY


def takes_stream(source: Adapter) -> bool:
    """Return whether a producer's export is passed the consumer's stream for device memory."""
    return source.streams is None or source.streams.ready is None


class StreamSync:
    """The streams of one call; `stream` and `device` as its caller passed them."""

    def __init__(self, target: Target, stream: Any = None, device: Device | None = None) -> None:
        self._target, self._asked, self._wanted = target, stream, device
        self._streams: dict[tuple[int, Device], Stream | None] = {}
        self._consumers: dict[Device, Stream | None] = {}
        self._points: dict[Stream, cuda.Ready] = {}
        self._ordered: set[tuple[Stream | int, Stream | None]] = set()
        self._held: list[cuda.Ready] = []

    def consumer(self, device: Device) -> Stream | None:
        """Return the consumer's stream; None if it is known only when the consumer gets the memory."""
        try:
            return self._consumers[device]
        except KeyError:
            owner = physical(device)
            found = (
                self._current(self._target.adapter, owner) if self._asked is None else parse_stream(self._asked, owner)
            )
            self._consumers[device] = found
            return found

    def _reader(self, device: Device) -> Stream | None:
        """Return the consumer's stream if it reads memory where it is; elsewhere it reads a copy that dlx makes."""
        if is_unordered(self._asked) or self._wanted is None or physical(self._wanted) == physical(device):
            return self.consumer(device)
        return None

    def producer(self, source: Adapter, device: Device) -> Stream | None:
        """Return the stream that a framework works on, None where each array has its own, or it is unknown."""
        return self._current(source, physical(device))

    def _current(self, adapter: Adapter, device: Device) -> Stream | None:
        """Ask a framework once per device."""
        key = id(adapter), device
        if key not in self._streams:
            current = adapter.streams.current if adapter.streams is not None else None
            with foreign_errors(f"{adapter.name} failed to name its stream on {device}:", DeviceError):
                value = None if current is None else current(device)
            # Frameworks say 0 for the legacy stream.
            value = LEGACY if isinstance(value, int) and value == 0 and cuda.is_cuda(device) else value
            self._streams[key] = None if value is None else with_keeper(parse_stream(value, device))
        return self._streams[key]

    def explained(self, source: Adapter, device: Device, place: Device) -> str:
        """Describe the stream synchronization of a CUDA device; empty where there is none. The driver is not called."""
        if is_unordered(self._asked):
            return "stream=-1: nobody waits for its producer"
        own = self.producer(source, device)
        if host_readable(place):
            return f"{own or 'its producer'} is waited for"
        consumer = self.consumer(place)
        if consumer is not None and own == consumer:
            return ""
        return f"{consumer or 'the stream of whoever uses it'} waits for {own or 'its producer'}"

    def reach(self, device: Device) -> None:
        """Raise a DeviceError if work on a device cannot be ordered, before its producer is called."""
        if cuda.is_cuda(device):
            try:
                cuda.require()
            except DeviceError as error:
                raise DeviceError(f"its memory is on {device}, and {error.reason}", fix=error.fix) from error
        if self._reader(device) is None and not cuda.is_cuda(device):
            raise _cannot_order(device)

    def export(self, source: Adapter, obj: Any, device: Device) -> tuple[Tensor, Readiness]:
        """Call a producer once, on its device; if it has a current stream, dlx orders, once for all of its arrays."""
        own, asked = self.asked_of(source, device)
        with source.devices.activate(device):
            tensor = source.export(obj, stream=UNORDERED if own is not None else asked.wire)
        return tensor, self._readiness(source, obj, tensor, own or asked)

    def exported(self, source: Adapter, obj: Any, tensor: Tensor, device: Device | None) -> Readiness:
        """Return when a tensor is ready whose producer got no stream; `device` is where the producer said it is."""
        asked = None
        if takes_stream(source) and cuda.is_cuda(tensor.device):
            asked = Stream(physical(tensor.device), LEGACY)  # what a call without a stream means
        elif takes_stream(source) and device is None and not host_readable(tensor.device):
            raise _cannot_order(tensor.device)
        return self._readiness(source, obj, tensor, asked)

    def described(self, source: Adapter, obj: Any, tensor: Tensor) -> Readiness:
        """Return when a tensor is ready that its adapter has described, without a call of the producer."""
        asked = None
        if takes_stream(source) and not host_readable(tensor.device):
            own, asked = self.asked_of(source, tensor.device)
            asked = own or asked
        return self._readiness(source, obj, tensor, asked)

    def _readiness(self, source: Adapter, obj: Any, tensor: Tensor, asked: Stream | None) -> Readiness:
        """Return when an exported tensor is ready; `asked` is the stream that its producer made wait for it."""
        if not cuda.is_cuda(tensor.device):
            if tensor.device.type == lib.kDLCUDAHost and not is_unordered(self._asked):
                self.wait(_ready(source, obj, tensor, None), None)  # a device may still write to it
            return None
        if takes_stream(source):
            cuda.require()
        if asked is not None and asked.is_unordered:
            return asked
        return cuda.readiness_of(tensor) or _ready(source, obj, tensor, asked)

    def asked_of(self, source: Adapter, device: Device) -> tuple[Stream | None, Stream]:
        """Return the producer's stream, if it has one, and the stream that it is asked to make wait otherwise."""
        consumer = self._reader(device)
        if cuda.is_cuda(device):
            if consumer is not None and consumer.is_unordered:
                return None, consumer
            own = self.producer(source, device)
            if own is None and (consumer is None or consumer.handle == PER_THREAD):  # many refuse 2
                consumer = cuda.work_stream(physical(device))
            return own, consumer or Stream(device, UNORDERED)
        assert consumer is not None  # `reach` has checked it
        return None, consumer

    def order(self, tensor: Tensor, readiness: Readiness, place: Device | None) -> None:
        """Make a consumer wait that reads the memory where it is, on a device or on the host."""
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
        """Return the ordered tensor for the consumer; its memory is kept until the consumer's stream is done."""
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

    def copied(
        self, source: Adapter | None, tensor: Tensor, readiness: Readiness, keep_order: bool, place: Device
    ) -> tuple[Tensor, Readiness]:
        """Copy from or to a CUDA device, on dlx's own stream; `source` is None for a copy, which only dlx has."""
        on_device = cuda.is_cuda(tensor.device)
        device = physical(tensor.device if host_readable(place) else place)
        work = cuda.work_stream(device)
        if on_device:
            self.wait(readiness, work)
        if host_readable(place):
            return native.tensor_copy(tensor, keep_order, work.handle), None
        fresh = native.tensor_on_device(tensor, keep_order, device.id)
        # The source is kept until the copy is made.
        held = native.tensor_behind(tensor, device.id, work.handle, None) if on_device else tensor
        native.tensor_transfer(held, fresh, work.handle, not on_device)
        if not on_device:
            return native.tensor_when(fresh, 0), None
        self._forget(work)
        self.reused(source, readiness, work)
        return fresh, work

    def filled(
        self, source: Adapter | None, tensor: Tensor, readiness: Readiness, strides: Sequence[int], place: Device
    ) -> Any:
        """Copy into a new array of the consumer's own on a CUDA device; None if it makes none, or dlx had to wait."""
        adapter, place = self._target.adapter, physical(place)
        if type(adapter.devices).new_array is Devices.new_array or self._target.varies:
            return None
        stream, on_device = self.consumer(place), cuda.is_cuda(tensor.device)
        if stream is None or stream.is_unordered:
            return None
        cuda.require()
        if not on_device and cuda.is_capturing(stream):
            return None
        activate = None if self._asked is None or adapter.streams is None else adapter.streams.activate
        with contextlib.nullcontext() if activate is None else activate(stream):
            array = adapter.devices.new_array(tensor.shape, tensor.dtype, place, strides)
        if array is None:
            return None
        target = adapter.export(array, stream=UNORDERED)
        if on_device:
            self.wait(readiness, stream)
            # The source is kept until the copy is made.
            tensor = native.tensor_behind(tensor, place.id, stream.handle, stream.keep)
        native.tensor_transfer(tensor, target, stream.handle, not on_device)
        if on_device:
            self._forget(stream)
            self.reused(source, readiness, stream)
        return array

    def reused(self, source: Adapter | None, readiness: Readiness, work: Stream) -> None:
        """Make the stream that may write to memory wait for a copy of it; the host, where that stream is unknown."""
        if source is None or source.arrays.immutable or is_unordered(self._asked):
            return
        if isinstance(readiness, Stream) and readiness == self.producer(source, readiness.device):
            cuda.order(work, readiness)
        elif readiness is not None and not isinstance(readiness, Stream):
            cuda.follow(readiness, work)
        else:
            cuda.synchronize(work)

    def wait(self, readiness: Readiness, waiting: Stream | None) -> None:
        """Make a stream, or the host (None), wait for memory, unless it has done so in this call."""
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
        if not isinstance(readiness, Stream):  # its address must not be reused meanwhile
            self._held.append(readiness)
        self._ordered.add((key, waiting))

    def _point(self, readiness: Stream) -> cuda.Ready:
        if readiness not in self._points:
            self._points[readiness] = cuda.ready(readiness)
        return self._points[readiness]

    def _forget(self, stream: Stream) -> None:
        """Note new work on a stream: who waited for it must wait again."""
        self._ordered = {pair for pair in self._ordered if pair[0] != stream}
        self._points.pop(stream, None)


def _ready(source: Adapter, obj: Any, tensor: Tensor, asked: Stream | None) -> Stream | None:
    """Return the stream on which an exported array is ready: the one that its producer named, or made wait."""
    ready = source.streams.ready if source.streams is not None else None
    return asked if ready is None else ready(obj, tensor)


def physical(device: Device) -> Device:
    """Return the device whose streams work on the memory; for managed memory, its CUDA device."""
    return Device(lib.kDLCUDA, device.id) if device.type == lib.kDLCUDAManaged else device


def _cannot_order(device: Device) -> DeviceError:
    return DeviceError(
        f"its memory is on {device}, whose work dlx cannot wait for",
        fix="Move it to the host in its own framework first.",
    )


Synchronization = Callable[[], StreamSync]
"""Gives the stream synchronization of a call, which is made when memory of a device is met for the first time."""
