"""Order the producer's and the consumer's streams in one call.

All arrays are exported before streams are ordered, so that one event per pair of streams covers all arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from dlx._core import cuda, native
from dlx._core.cuda import is_cuda
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.stream import PER_THREAD, UNORDERED, Stream, is_unordered, parse_stream, with_keeper
from dlx._core.types import Device, host_readable
from dlx._registry.generic import TENSOR
from dlx._registry.target import Target
from dlx._support.reflect import foreign_errors
from dlx.adapter.base import Adapter, Devices
from dlx.errors import DeviceError, DlxError

Readiness = Stream | cuda.Ready | None
"""When memory is ready: after the present work of a stream, after a recorded event, or None: now."""

LEGACY = lib.DLX_STREAM_LEGACY


def takes_stream(source: Adapter) -> bool:
    """Return whether the producer's export takes the consumer's stream for device memory."""
    return source.streams is None or source.streams.ready is None


class StreamSync:
    """The streams of one call; `stream` and `device` are the caller's options."""

    def __init__(self, target: Target, stream: Any = None, device: Device | None = None, *, wait: bool = True) -> None:
        self._target, self._stream, self._device, self._waits = target, stream, device, wait
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
            value = LEGACY if isinstance(value, int) and value == 0 and is_cuda(device) else value
            self._streams[key] = None if value is None else with_keeper(parse_stream(value, device))
        return self._streams[key]

    def explain(self, source: Adapter, device: Device, place: Device) -> str:
        """Describe the stream synchronization without a call of the driver; empty without any."""
        if is_unordered(self._stream):
            return "stream=-1: no stream waits for its producer"
        own = self.producer(source, device)
        if host_readable(place):
            is_unfinished = own is not None and not self._waits and cuda.is_pinned_device(place)
            return "" if is_unfinished else f"the host waits for {own or 'its producer'}"
        consumer = self.consumer(place)
        if consumer is not None and own == consumer:
            return ""
        return f"{consumer or 'the stream that uses it'} waits for {own or 'its producer'}"

    def reach(self, device: Device) -> None:
        """Raise a DeviceError if dlx cannot order work on a device."""
        if is_cuda(device):
            try:
                cuda.require()
            except DeviceError as error:
                raise DeviceError(f"its memory is on {device}, and {error.reason}", fix=error.fix) from error
        if self._reader(device) is None and not is_cuda(device):
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
        if takes_stream(source) and is_cuda(tensor.device):
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
        if not is_cuda(tensor.device):
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
        if is_cuda(device):
            if consumer is not None and consumer.is_unordered:
                return None, consumer
            own = self.producer(source, device)
            if own is None:
                self.ask(consumer, None)  # the producer records an event
            if own is None and (consumer is None or consumer.handle == PER_THREAD):  # many producers refuse 2
                consumer = cuda.work_stream(physical(device))
            return own, consumer or Stream(device, UNORDERED)
        assert consumer is not None  # `reach` checks it
        return None, consumer

    def order(self, tensor: Tensor, readiness: Readiness, place: Device | None) -> None:
        """Make a consumer wait that reads the memory without a copy, on a device or on the host."""
        device = tensor.device
        if not is_cuda(device):
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

    def ask(self, *streams: Stream | None) -> None:
        """Raise a StreamError if work on all these streams, and on the host (None), would break a graph capture.

        Every copy, allocation and export across streams asks first, so that a refusal leaves nothing in the graph.
        """
        found = [stream for stream in dict.fromkeys(streams) if stream is not None and not stream.is_unordered]
        for other in (*found[1:], None) if None in streams else found[1:]:
            if found:
                cuda.can_order(found[0], other)

    def ask_copy(self, source: Adapter, device: Device | None, place: Device | None) -> None:
        """Raise a StreamError if a copy by the array's framework would break a graph capture."""
        before = self.producer(source, device) if device is not None and is_cuda(device) else None
        after = self.consumer(place) if place is not None and is_cuda(place) else None
        self.ask(before, after, *([] if device == place else [None]))  # no copy between devices can be captured

    def fetch(self, tensor: Tensor, readiness: Readiness, keep_order: bool) -> Tensor:
        """Copy CUDA memory to the host."""
        stream = self._stream_of(tensor, readiness) if isinstance(readiness, Stream) else None
        if stream is None:
            self.wait(readiness, None)  # dlx's stream must not wait for another one: all threads use it
            stream = cuda.work_stream(physical(tensor.device))
        self.ask(stream, None)
        return native.tensor_copy(tensor, keep_order, stream.handle)

    def copy(
        self, rows: Sequence[Tensor], sources: Sequence[tuple[Adapter | None, Readiness]], like: Tensor, is_last: bool
    ) -> tuple[Any, Tensor, Readiness]:
        """Copy tensors one after another into new CUDA memory like a tensor, on the streams on which they are ready.

        `sources` has the adapter of each, None for a copy of dlx, and when it is ready. If `is_last`, the consumer gets
        the memory unchanged, so its framework may allocate it. Return its new array or None, the memory, and when it is
        ready.
        """
        here, place, adapter = physical(rows[0].device), physical(like.device), self._target.adapter
        on_device, consumer = is_cuda(here), self.consumer(place)
        cuda.require()
        allocates = is_last and not self._target.varies and type(adapter.devices).new_array is not Devices.new_array
        if consumer is None or consumer.is_unordered or not allocates:
            allocates, usual = False, cuda.work_stream(here if on_device else place)
        else:
            usual = cuda.work_stream(here) if on_device and here != place else consumer
        streams = [self._stream_of(rows[0], readiness) or usual for _, readiness in sources]
        waits = any(self._must_wait(source, rows[0], readiness) for source, readiness in set(sources))
        belongs = on_device and allocates and not waits  # a graph keeps no source, and no memory of dlx
        self.ask(*streams, consumer, *([] if belongs else [None]))
        array = self._new_array(like, consumer) if consumer is not None and allocates else None
        if consumer is not None and array is not None:
            base, whole = consumer, adapter.export(array, stream=UNORDERED)
        else:
            base = streams[0]
            if allocates:
                self.ask(base, consumer, None)
            whole = native.tensor_on_device(like, True, place.id, base.device.id, base.handle, base.keep)
        others = set(streams) - {base}
        for other in others:
            cuda.order(base, other)  # which may still use the memory
        try:
            for i, (row, (source, readiness), stream) in enumerate(zip(rows, sources, streams, strict=True)):
                if on_device:
                    self.wait(readiness, stream)
                if not waits and not (on_device and source is None):  # keep it alive
                    row = native.tensor_behind(row, stream.device.id, stream.handle, stream.keep)
                if row.nbytes:
                    address, steps = whole.data_ptr + whole.byte_offset + i * row.nbytes, like.strides[-row.ndim :]
                    part = native.tensor_new(address, row.shape, steps[: row.ndim], row.dtype, place, like.flags, whole)
                    native.tensor_transfer(row, part, stream.handle, waits and not on_device)
            for other in others:
                cuda.order(other, base)
            if waits and on_device:
                cuda.synchronize(base)
        except BaseException:
            for stream in streams:  # the memory is free after this call
                with contextlib.suppress(DlxError):
                    cuda.synchronize(stream)
            raise
        return array, whole, None if waits or array is not None else cuda.ready(base)

    def copy_to_pinned(self, tensor: Tensor, readiness: Readiness, strides: Sequence[int], place: Device) -> Any:
        """Copy into a new array of the consumer in pinned host memory."""
        adapter, here = self._target.adapter, physical(tensor.device)
        stream = self._stream_of(tensor, readiness) if is_cuda(here) else None
        waits = self._waits or stream is None
        if is_cuda(here):
            if stream is None:
                self.wait(readiness, None)
            stream = stream or cuda.work_stream(here)
            self.ask(stream, None)
        array = adapter.devices.new_array(tensor.shape, tensor.dtype, place, strides)
        if array is None:
            reason = f"{adapter.name} cannot allocate pinned memory now"
            raise DeviceError(reason, fix="Pass device='cpu'.")
        target = native.tensor_view(adapter.export(array, stream=UNORDERED), None, place, None, None)
        if stream is None:
            cuda.copy_on_host(tensor, target)
            return array
        if not waits:  # keep both alive until the copy is done
            tensor, target = (
                native.tensor_behind(each, here.id, stream.handle, stream.keep) for each in (tensor, target)
            )
        native.tensor_transfer(tensor, target, stream.handle, waits)
        return array

    def _new_array(self, like: Tensor, consumer: Stream) -> Any:
        """Return a new array of the consumer on its stream; None if its framework cannot allocate one now."""
        adapter = self._target.adapter
        activate = None if self._stream is None or adapter.streams is None else adapter.streams.activate
        with contextlib.nullcontext() if activate is None else activate(consumer):
            return adapter.devices.new_array(like.shape, like.dtype, consumer.device, like.strides)

    def _stream_of(self, tensor: Tensor, readiness: Readiness) -> Stream | None:
        """Return the stream of the memory's device on which it is ready: copies there are ordered with all writes."""
        found = readiness if isinstance(readiness, Stream) or readiness is None else cuda.stream_of(readiness)
        known = found is not None and not found.is_unordered and found.device == physical(tensor.device)
        return found if known else None

    def _must_wait(self, source: Adapter | None, tensor: Tensor, readiness: Readiness) -> bool:
        """Return whether the host must wait for a copy: of host memory, or if an unknown stream may write next."""
        if not is_cuda(tensor.device):
            return self._waits
        if source is None or source.arrays.immutable or is_unordered(self._stream):
            return False
        if isinstance(readiness, Stream):
            return readiness != self.producer(source, readiness.device)
        return self._stream_of(tensor, readiness) is None

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
