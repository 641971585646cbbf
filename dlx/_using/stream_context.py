"""Stream contexts: run a framework on the caller's CUDA streams, and restore its own afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from dlx._core import cuda, native
from dlx._core.stream import Stream, is_unordered, keep_streams
from dlx._core.types import Device
from dlx._engine.planner import is_inside
from dlx._engine.sources import device_of
from dlx._engine.streams import StreamSync, physical
from dlx._registry.target import Target
from dlx.adapter.base import Adapter
from dlx.errors import DlxError


@contextlib.contextmanager
def set_streams(adapter: Adapter, streams: Mapping[Device, Stream]) -> Iterator[None]:
    """Set a framework's current stream on each device, if its adapter can; restore them on exit."""
    activate = adapter.streams.activate if adapter.streams is not None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_streams(streams.values()))
        stack.callback(native.count_stream_contexts, -1)  # first, in case of an interrupt
        native.count_stream_contexts(1)  # disables the fast path, which cannot keep these streams alive
        for stream in streams.values():
            if activate is not None:
                stack.enter_context(activate(stream))
        yield


class Work:
    """The streams that one call of a function works on, and the streams that wait for it.

    On each device, the function's framework works on its caller's stream, so that no stream has to wait. It keeps its
    own stream if some arguments are its own arrays, if the callers use several streams, or if its stream cannot be set;
    then the callers' streams wait for it.
    """

    _nothing = contextlib.nullcontext()  # a class attribute: at exit, globals are cleared before generators are closed

    def __init__(self, target: Target, stream: Any = None) -> None:
        self.target, self._asked = target, stream
        self.streams: dict[Device, Stream] = {}  # the framework's current streams during the call
        self.stays = False  # whether results are not converted, so that the previous current stream must wait
        self._callers: dict[Device, set[Stream]] = {}
        self._own: set[Device] = set()
        self._seen: set[Device] = set()
        self._inside = False

    def look(self, arrays: Iterable[tuple[Adapter, Any]]) -> None:
        """Record the frameworks and streams of arguments on CUDA devices, without exporting any."""
        if is_unordered(self._asked):
            return
        syncs = StreamSync(self.target)
        for source, obj in arrays:
            if self._asked is None and (source.streams is None or source.streams.current is None):
                continue  # it has no current stream
            try:
                found = device_of(source, obj)
            except MemoryError:
                raise
            except Exception:  # raised again by its conversion
                continue
            if found is None or not cuda.is_cuda(found):
                continue
            device = physical(found)
            callers = self._callers.setdefault(device, set())
            if is_inside(obj, source, self.target):
                self._own.add(device)
                continue
            current = syncs.producer(source, device)
            if current is not None:
                callers.add(current)
        for device in self._callers.keys() - self._seen:
            self._seen.add(device)
            stream = self._stream(device)
            if stream is not None:
                self.streams[device] = stream

    def _stream(self, device: Device) -> Stream | None:
        if self._asked is not None:
            return StreamSync(self.target, self._asked).consumer(device)
        callers = self._callers[device]
        return next(iter(callers)) if len(callers) == 1 and device not in self._own else None

    def set_for_conversion(self) -> AbstractContextManager[None]:
        """Set the framework's streams while arguments are converted, without ordering any."""
        return set_streams(self.target.adapter, self.streams) if self.streams else self._nothing

    def step(self) -> AbstractContextManager[None]:
        """Set and order the streams for a call, or for the code between two awaits or yields."""
        return self._nothing if self._inside or not self._callers else self._step()

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        mine = self._callers if self.stays else self._own
        before = self._currents(mine)
        self._inside = True
        try:
            with set_streams(self.target.adapter, self.streams):
                inside = self._currents(self._callers)
                for device in before.keys() & self._own & inside.keys():
                    cuda.order(before[device], inside[device])
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(DlxError):
                        self._wake(inside, before)
                    raise
                self._wake(inside, before)
        finally:
            self._inside = False

    def _wake(self, inside: Mapping[Device, Stream], before: Mapping[Device, Stream]) -> None:
        """Make the streams wait that may reuse the memory that the function read or wrote."""
        for device, current in inside.items():
            waiting = self._callers[device] | ({before[device]} if device in before else set())
            for stream in waiting:
                cuda.order(current, stream)

    def _currents(self, devices: Iterable[Device]) -> dict[Device, Stream]:
        sync = StreamSync(self.target)
        found = ((device, sync.consumer(device)) for device in devices)
        return {device: stream for device, stream in found if stream is not None}

    def wrap_awaitable(self, awaitable: Awaitable[Any]) -> Awaitable[Any]:
        """Wrap an awaitable so that its code runs inside `step`, but not its waits."""
        return _SteppedAwaitable(self, awaitable) if self._callers else awaitable


class _SteppedAwaitable:
    """An awaitable whose steps run inside `Work.step`."""

    def __init__(self, work: Work, awaitable: Awaitable[Any]) -> None:
        self._work, self._awaitable = work, awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._awaitable.__await__()
        go, value = inner.send if hasattr(inner, "send") else (lambda _: next(inner)), None
        while True:
            with self._work.step():
                try:
                    waiting = go(value)
                except StopIteration as stop:
                    return stop.value
            try:
                go, value = inner.send, (yield waiting)
            except GeneratorExit:
                with self._work.step():
                    inner.close()
                raise
            except BaseException as error:
                go, value = inner.throw, error
