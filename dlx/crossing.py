"""Streams of ONE call: which one a consumer works on, which one memory is ready on, who was made to wait already.

A call, for one array or for a whole tree, has one `Crossing`. However many arrays it holds, a pair of streams is
ordered once: everything is exported before anything is ordered, so one record covers it all.
"""

from __future__ import annotations

from typing import Any

from dlx import cuda, native
from dlx.abi import Device, host_readable
from dlx.adapter import Adapter
from dlx.errors import DeviceError, DlxError, LayoutError
from dlx.foreign import exception_text
from dlx.native import Tensor, ffi, lib
from dlx.stream import PER_THREAD, UNORDERED, Stream, is_unordered, kept, meaning

__all__ = ["Crossing", "Moment", "physical"]

Moment = Stream | cuda.Ready | None
"""When memory is ready: what is on a stream now, a point on one, or None: it is."""

LEGACY = lib.DLX_STREAM_LEGACY


class Crossing:
    """The streams of one call.

    Parameters
    ----------
    target
        The consumer's adapter.
    stream
        What the user said of the consumer's stream; None: ask the framework for its current one.
    device
        Where the result was asked for; None: nowhere in particular.
    """

    def __init__(self, target: Adapter, stream: Any = None, device: Device | None = None) -> None:
        self._target, self._asked, self._wanted = target, stream, device
        self._streams: dict[tuple[int, Device], Stream | None] = {}
        self._consumers: dict[Device, Stream | None] = {}
        self._points: dict[Stream, cuda.Ready] = {}
        self._ordered: set[tuple[Stream | int, Stream | None]] = set()
        self._held: list[cuda.Ready] = []
        self._words: dict[tuple[int, Device, Device], str] = {}

    # ---- whose stream -----------------------------------------------------------------------------------------------

    def consumer(self, device: Device) -> Stream | None:
        """Return the stream that the consumer works on, None where it says so only when it is handed the memory.

        Raises
        ------
        StreamError
            If the user named one that is none.
        """
        try:
            return self._consumers[device]
        except KeyError:
            place = physical(device)
            found = self._current(self._target, place) if self._asked is None else meaning(self._asked, place)
            self._consumers[device] = found
            return found

    def _reader(self, device: Device) -> Stream | None:
        """Return the consumer's stream if it reads memory where it is; elsewhere it reads a copy that dlx makes."""
        if is_unordered(self._asked) or self._wanted is None or physical(self._wanted) == physical(device):
            return self.consumer(device)
        return None

    def producer(self, source: Adapter, device: Device) -> Stream | None:
        """Return the stream that a framework works on, None where each array has its own, or nobody knows."""
        return self._current(source, physical(device))

    def _current(self, adapter: Adapter, device: Device) -> Stream | None:
        """Ask a framework once per device."""
        key = id(adapter), device
        if key not in self._streams:
            try:
                value = adapter.work_stream(device)
            except (DlxError, MemoryError):
                raise
            except Exception as error:
                text = f"{adapter.name} failed to name its stream on {device}: {exception_text(error)}"
                raise DeviceError(text) from error
            # Frameworks say 0 for the legacy stream.
            value = LEGACY if isinstance(value, int) and value == 0 and cuda.is_cuda(device) else value
            self._streams[key] = None if value is None else kept(meaning(value, device))
        return self._streams[key]

    def explained(self, source: Adapter, device: Device, place: Device) -> str:
        """Return what is ordered, in words; empty where nothing is. The driver is not asked."""
        if not cuda.is_cuda(device):
            return ""
        key = id(source), device, place
        if key not in self._words:
            self._words[key] = self._explained(source, device, place)
        return self._words[key]

    def _explained(self, source: Adapter, device: Device, place: Device) -> str:
        if is_unordered(self._asked):
            return "stream=-1: nobody waits for its producer"
        own = self.producer(source, device)
        if host_readable(place):
            return f"{own or 'its producer'} is waited for"
        consumer = self.consumer(place)
        if consumer is not None and own == consumer:
            return ""
        return f"{consumer or 'the stream of whoever uses it'} waits for {own or 'its producer'}"

    # ---- from the producer ------------------------------------------------------------------------------------------

    def reach(self, source: Adapter, device: Device | None) -> None:
        """Raise a DeviceError where nobody can order what is on a producer's device; before the producer is called."""
        if device is None or host_readable(device) or not source.takes_stream:
            return
        if cuda.is_cuda(device):
            try:
                cuda.require()
            except DeviceError as error:
                raise DeviceError(f"its memory is on {device}, and {error.reason}", fix=error.fix) from error
        if self._reader(device) is None and not cuda.is_cuda(device):
            raise _cannot_order(device)

    def export(self, source: Adapter, obj: Any, device: Device | None) -> tuple[Tensor, Moment]:
        """Call a producer once, on its device and with the right stream; return the tensor and when it is ready.

        A producer with a current stream orders nothing: dlx does, once for all of its arrays. Others are given a
        stream every time.

        Raises
        ------
        DeviceError
            If nobody can order what is on that device.
        """
        if device is None or host_readable(device) or not source.takes_stream:
            tensor = source.export(obj)
            asked = None
            if source.takes_stream and cuda.is_cuda(tensor.device):
                asked = Stream(physical(tensor.device), LEGACY)  # what a call without a stream means
        else:
            self.reach(source, device)
            own, asked = self.asked_of(source, device)
            with source.on_device(device):
                tensor = source.export(obj, stream=UNORDERED if own is not None else asked.wire)
            asked = own or asked
        if not cuda.is_cuda(tensor.device):
            if source.takes_stream and device is None and not host_readable(tensor.device):
                raise _cannot_order(tensor.device)
            if tensor.device.type == lib.kDLCUDAHost and not is_unordered(self._asked):
                self.wait(source.ready_on(obj, tensor, None), None)  # a device may still write to it
            return tensor, None
        if source.takes_stream:
            cuda.require()
        if asked is not None and asked.is_unordered:
            return tensor, asked
        return tensor, cuda.readiness(tensor) or source.ready_on(obj, tensor, asked)

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
        assert consumer is not None  # `reach` has been there
        return None, consumer

    # ---- to the consumer --------------------------------------------------------------------------------------------

    def order(self, tensor: Tensor, moment: Moment, place: Device | None) -> None:
        """See to it that memory is ready for a consumer who reads it as it is, on a device or on the host.

        Raises
        ------
        StreamError
            If that would break a graph capture, which goes on unharmed.
        DeviceError
            If the driver fails.
        """
        device = tensor.device
        if not cuda.is_cuda(device):
            return
        if place is not None and host_readable(place):
            self.wait(moment, None)
            return
        consumer = self.consumer(device)
        if consumer is not None:
            self.wait(moment, consumer)
        if isinstance(moment, Stream) and not moment.is_unordered and (consumer is None or self._target.is_own):
            self._point(moment)

    def given(self, source: Adapter, tensor: Tensor, moment: Moment) -> Tensor:
        """Return the tensor to hand to the consumer, who has nothing left to order.

        The memory stays until the consumer's stream is done with it; for a producer that works on that very stream it
        may go at once.
        """
        device = tensor.device
        if not cuda.is_cuda(device):
            return tensor
        self.order(tensor, moment, None)
        device = physical(device)
        consumer = self.consumer(device)
        same = consumer == moment and consumer == self.producer(source, device)
        if consumer is not None and not consumer.is_unordered and not same:
            tensor = native.tensor_behind(tensor, device.id, consumer.handle, consumer.keep)
        elif consumer is not None and not self._target.is_own:
            tensor = native.tensor_behind(tensor, device.id, UNORDERED, None)
        if consumer is not None and (consumer.is_unordered or not self._target.is_own):
            return tensor
        point = self._point(moment) if isinstance(moment, Stream) else moment
        if point is None:
            return tensor
        return cuda.when(tensor, point)

    def copied(
        self, source: Adapter | None, tensor: Tensor, moment: Moment, keep_order: bool, place: Device
    ) -> tuple[Tensor, Moment]:
        """Copy to the host or to a CUDA device, on dlx's own stream; return the copy and when it is ready.

        The source may be written to as soon as this returns; nobody will where it is None, a copy itself.

        Raises
        ------
        ConversionError
            If the driver fails, a capture would be broken, or the layout cannot be copied.
        MemoryError
            If there is not enough memory.
        """
        on_device = cuda.is_cuda(tensor.device)
        if not on_device and host_readable(place):
            return native.tensor_copy(tensor, keep_order), None
        device = physical(tensor.device if host_readable(place) else place)
        work = cuda.work_stream(device)
        if on_device:
            self.wait(moment, work)
        if host_readable(place):
            return native.tensor_fetch(tensor, keep_order), None
        fresh = native.tensor_on_device(tensor, keep_order, device.id)
        # The source stays until the copy is made.
        held = native.tensor_behind(tensor, device.id, work.handle, None) if on_device else tensor
        try:
            native.tensor_transfer(held, fresh, work.handle, not on_device)
        except LayoutError as error:
            error.fix = "Make it contiguous in its own framework first."
            raise
        if not on_device:
            return fresh, None
        self._forget(work)
        self.reused(source, moment, work)
        return fresh, work

    def reused(self, source: Adapter | None, moment: Moment, work: Stream) -> None:
        """Let whoever may write to memory wait for a copy of it; the host, where nobody knows who that is."""
        if source is None or source.immutable or is_unordered(self._asked):
            return
        if isinstance(moment, Stream) and moment == self.producer(source, moment.device):
            cuda.order(work, moment)
        elif moment is not None and not isinstance(moment, Stream):
            cuda.follow(moment, work)
        else:
            cuda.synchronize(work)

    # ---- once -------------------------------------------------------------------------------------------------------

    def wait(self, moment: Moment, waiting: Stream | None) -> None:
        """Make a stream, or the host (None), wait for memory, unless it has done so in this call."""
        if moment is None or (isinstance(moment, Stream) and (moment.is_unordered or moment == waiting)):
            return
        key = moment if isinstance(moment, Stream) else _number(moment)
        if (key, waiting) in self._ordered:
            return
        if waiting is None:
            cuda.synchronize(moment)
        elif isinstance(moment, Stream):
            cuda.order(moment, waiting)
        else:
            cuda.wait(moment, waiting)
        if not isinstance(moment, Stream):  # its address must not be given out again meanwhile
            self._held.append(ffi.gc(lib.dlx_ready_hold(moment), lib.dlx_ready_drop))
        self._ordered.add((key, waiting))

    def _point(self, moment: Stream) -> cuda.Ready:
        if moment not in self._points:
            self._points[moment] = cuda.ready(moment)
        return self._points[moment]

    def _forget(self, stream: Stream) -> None:
        """There is new work on a stream: whoever waited for it must wait again."""
        self._ordered = {pair for pair in self._ordered if pair[0] != stream}
        self._points.pop(stream, None)


def _number(point: cuda.Ready) -> int:
    return int(ffi.cast("uintptr_t", point))


def physical(device: Device) -> Device:
    """Return the device whose streams work on memory: managed memory has those of its device."""
    return Device(lib.kDLCUDA, device.id) if device.type == lib.kDLCUDAManaged else device


def _cannot_order(device: Device) -> DeviceError:
    return DeviceError(
        f"its memory is on {device}, whose work dlx cannot wait for",
        fix="Move it to the host in its own framework first.",
    )
