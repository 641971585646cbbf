"""Order the producer's and the consumer's streams in one call.

All arrays are exported before streams are ordered, so that one event per pair of streams covers all arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dlx._core import cuda, native
from dlx._core.cuda import is_cuda
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.stream import LEGACY, PER_THREAD, UNORDERED, Stream, is_unordered, parse_stream, with_keeper
from dlx._core.types import Device, host_readable
from dlx._registry.generic import TENSOR
from dlx._registry.target import Target
from dlx._support.reflect import foreign_errors
from dlx.adapter.base import Adapter, Devices
from dlx.errors import DeviceError, DlxError

Readiness = Stream | cuda.Ready | None
"""When memory is ready: after the present work of a stream, after a recorded event, or None: now."""


def takes_stream(source: Adapter) -> bool:
    """Return whether the producer's export takes the consumer's stream for device memory."""
    return source.streams is None or source.streams.ready is None


class StreamSync:
    """The streams of one call; `stream` and `device` are the caller's options."""

    def __init__(self, target: Target, stream: Any = None, device: Device | None = None, *, wait: bool = True) -> None:
        self._target, self._stream, self._device, self._waits = target, stream, device, wait
        self._streams: dict[tuple[Any, Device], Stream | None] = {}  # by adapter; None = the caller's
        self._points: dict[Stream, cuda.Ready] = {}
        self._ordered: dict[tuple[Stream | int, Stream | None], Readiness] = {}  # keeps its address from reuse

    def consumer(self, device: Device) -> Stream | None:
        """Return the consumer's stream; None if it becomes known only at the import."""
        if self._stream is None:
            return self.producer(self._target.adapter, device)
        key = None, physical(device)
        if key not in self._streams:
            self._streams[key] = parse_stream(self._stream, key[1])
        return self._streams[key]

    def _reader(self, device: Device) -> Stream | None:
        """Return the consumer's stream if the consumer reads the memory itself, and not a copy of dlx."""
        if is_unordered(self._stream) or self._device is None or physical(self._device) == physical(device):
            return self.consumer(device)
        return None

    def producer(self, adapter: Adapter, device: Device) -> Stream | None:
        """Return a framework's current stream, looked up once per call; None if unknown, or if each array has one."""
        device = physical(device)
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
        asked, wire = self.choose_stream(source, device)
        with source.devices.activate(device):
            tensor = source.export(obj, stream=wire)
        return tensor, self._readiness(source, obj, tensor, asked)

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
            asked = self.choose_stream(source, tensor.device)[0]
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

    def choose_stream(self, source: Adapter, device: Device) -> tuple[Stream, int]:
        """Return the stream on which an export is ready, and its argument: the stream, or -1 for the producer's own."""
        consumer = self._reader(device)
        if is_cuda(device) and (consumer is None or not consumer.is_unordered):
            own = self.producer(source, device)
            if own is not None:
                return own, UNORDERED
            self.ask(consumer, None)  # the producer records an event
            if consumer is None or consumer.handle == PER_THREAD:  # many producers refuse 2
                consumer = cuda.work_stream(physical(device))
        assert consumer is not None  # `reach` checks it
        return consumer, consumer.wire

    def order(self, tensor: Tensor, readiness: Readiness, place: Device | None) -> None:
        """Make a consumer wait that reads the memory without a copy, on a device or on the host."""
        device = tensor.device
        if not is_cuda(device):
            return
        if place is not None and host_readable(place):
            self.wait(readiness, None)
            return
        self._order(readiness, self.consumer(device))

    def for_consumer(self, source: Adapter, tensor: Tensor, readiness: Readiness) -> Tensor:
        """Return the ordered tensor for the consumer; its memory lives until the consumer's stream is done."""
        consumer = self.consumer(tensor.device)
        point = self._order(readiness, consumer)
        if consumer is None or (consumer.is_unordered and self._target.adapter is TENSOR):
            return tensor if point is None else cuda.when(tensor, point)
        same = consumer == readiness == self.producer(source, tensor.device)
        return cuda.when(tensor, point, Stream(consumer.device, UNORDERED) if same else consumer)

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

    def choose_fetch_stream(self, tensor: Tensor, readiness: Readiness) -> Stream:
        """Return the stream for a copy of CUDA memory to the host, on which the memory is ready."""
        stream = self._stream_of(tensor, readiness)
        if stream is None:
            self.wait(readiness, None)  # dlx's stream must not wait for another one: all threads use it
            stream = cuda.work_stream(physical(tensor.device))
        self.ask(stream, None)
        return stream

    def copy(
        self,
        rows: Sequence[Tensor],
        sources: Sequence[tuple[Adapter | None, Readiness]],
        like: Tensor,
        is_last: bool,
        axis: int = 0,
    ) -> tuple[Any, Tensor]:
        """Copy tensors of one CUDA device along an axis of new CUDA memory like a tensor.

        `sources` has the adapter of each, None for a copy of dlx, and when it is ready. If `is_last`, the consumer gets
        the memory unchanged, so its framework may allocate it. Return its new array or None, and the memory.
        """
        cuda.require()
        known = {readiness: self._stream_of(rows[0], readiness) for _, readiness in sources}
        streams = [*dict.fromkeys(stream for stream in known.values() if stream is not None)]
        waits = any(self._must_wait(source, rows[0], readiness) for source, readiness in set(sources))
        array, whole, base = self._allocate(like, is_last, streams[0] if streams else None, streams, waits)
        assert base is not None
        for readiness, stream in known.items():
            self.wait(stream or readiness, base)  # the stream may have written since
        if not waits:  # keep them alive until the copy is done
            pairs = zip(rows, sources, strict=True)
            rows = [row if source is None else cuda.when(row, None, base) for row, (source, _) in pairs]
        try:
            cuda.stack(rows, whole, axis, base)
            for other in streams:
                cuda.order(base, other)  # which may write next
        except BaseException:
            with contextlib.suppress(DlxError):
                cuda.synchronize(base)  # the memory is free after this call
            raise
        if waits:
            cuda.synchronize(base)
        return array, whole if array is not None else cuda.when(whole, cuda.ready(base))

    def move(self, tensor: Tensor, readiness: Readiness, like: Tensor, is_last: bool) -> tuple[Any, Tensor]:
        """Copy memory to new CUDA or pinned memory like a tensor; one of both is on the host. Return as `copy`."""
        base = self.choose_fetch_stream(tensor, readiness) if is_cuda(tensor.device) else None
        array, whole, stream = self._allocate(like, is_last, base, (), asks_host=True)
        if not self._waits and stream is not None:  # keep them alive until the copy is done
            tensor = cuda.when(tensor, None, stream)
            whole = whole if is_cuda(whole.device) else cuda.when(whole, None, stream)
        cuda.transfer(tensor, whole, stream, self._waits)
        if array is not None:
            return array, whole
        return None, cuda.when(whole, None if self._waits or stream is None else cuda.ready(stream))

    def _allocate(
        self, like: Tensor, is_last: bool, base: Stream | None, streams: Iterable[Stream], asks_host: bool
    ) -> tuple[Any, Tensor, Stream | None]:
        """Return a new array of the consumer or None, its memory like a tensor, and the stream for a copy to it."""
        adapter, place = self._target.adapter, physical(like.device)
        allocates = is_last and not self._target.varies and type(adapter.devices).new_array is not Devices.new_array
        consumer = base
        if is_cuda(place):
            consumer = self.consumer(place)
            allocates &= consumer is not None and not consumer.is_unordered
            if allocates:
                base = consumer
            elif base is None or base.device != place:
                base = cuda.work_stream(place)
        self.ask(base, *streams, *([None] if asks_host or not allocates else []))
        if allocates:
            with self.use(consumer):
                array = adapter.devices.new_array(like.shape, like.dtype, like.device, like.strides)
            if array is not None:
                whole = adapter.export(array, stream=UNORDERED)  # pinned memory may be declared as host memory
                return array, whole if is_cuda(place) else native.tensor_view(whole, None, place, None, None), base
        if not is_cuda(place) or base is None:
            reason = f"{adapter.name} cannot allocate pinned memory now"
            raise DeviceError(reason, fix="Pass device='cpu'.")
        if allocates and not asks_host:
            self.ask(base, None)  # memory of dlx does not belong to a graph
        return None, native.tensor_on_device(like, True, place.id, base.handle, base.keep), base

    def use(self, consumer: Stream | None) -> AbstractContextManager[Any]:
        """Return a context in which the consumer's framework works on its stream, if the caller named that."""
        streams = self._target.adapter.streams
        if self._stream is None or streams is None or streams.activate is None:
            return contextlib.nullcontext()
        return contextlib.nullcontext() if consumer is None or consumer.is_unordered else streams.activate(consumer)

    def _stream_of(self, tensor: Tensor, readiness: Readiness) -> Stream | None:
        """Return the stream of the memory's device on which it is ready: copies there are ordered with all writes."""
        found = readiness if isinstance(readiness, Stream) or readiness is None else cuda.stream_of(readiness)
        known = found is not None and not found.is_unordered and found.device == physical(tensor.device)
        return found if known else None

    def _must_wait(self, source: Adapter | None, tensor: Tensor, readiness: Readiness) -> bool:
        """Return whether the host must wait for a copy, because an unknown stream may write next."""
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
        self._ordered[key, waiting] = readiness

    def _order(self, readiness: Readiness, consumer: Stream | None) -> cuda.Ready | None:
        """Make a consumer's stream wait for memory.

        Return the event for readers that wait later: a consumer of an unknown stream, or those of a dlx.Tensor.
        """
        if consumer is not None:
            self.wait(readiness, consumer)
        if consumer is not None and self._target.adapter is not TENSOR:
            return None
        if not isinstance(readiness, Stream) or readiness.is_unordered:
            return None if isinstance(readiness, Stream) else readiness
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
