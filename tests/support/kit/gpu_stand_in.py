"""A framework over the recording driver for the checks of `dlx.testing.checks.gpu`, which finishes work late.

`hold` stalls a stream; a timer resumes it. A read that is ordered after a write on a stalled stream waits; any other
read gets the data from before the write. (Copies of the driver are done at once.)
"""

from __future__ import annotations

import contextlib
import threading

from support.cuda import gpulib

N, HOLD = gpulib.N, 0.2
VALUES = [*range(N)]


class StandIn:
    """The functions that the checks need, for arrays of N bytes."""

    def __init__(self, monkeypatch, cuda, name="liba", kind=gpulib.FreshAdapter):
        self.name, self.cuda = name, cuda
        self.framework = gpulib.install(monkeypatch, name, cuda, kind)
        self._late, self._nodes, self._timers = {}, None, {}  # address -> (stream, data before), writes, timers

    def make(self, values=None):
        array = self.framework.made()
        self.cuda.poke(array.ptr, bytes(map(int, VALUES if values is None else values)))
        return array

    make_unpooled = make

    def read(self, array):
        races, late = self.framework.read(array), self._late.get(array.ptr)
        if late is not None and races:
            return [*late[1]]
        if late is not None:
            self._timers[late[0]].join()
        return [*self.cuda.peek(array.ptr, N)]

    def address(self, array):
        return array.ptr

    def stream(self):
        return self.cuda.stream()

    def on(self, stream):
        return self.framework.on(stream)

    def is_busy(self, stream):
        return (0, stream) in self.cuda._stalled

    def hold(self):
        stream = self.framework.handle(0)
        self.cuda.stall(stream)
        self._timers[stream] = threading.Timer(HOLD, self._resume, [stream])
        self._timers[stream].start()

    def _resume(self, stream):
        self._late = {address: late for address, late in self._late.items() if late[0] != stream}
        self.cuda.resume(stream)

    def write(self, target, source):
        self.framework.read(source)
        self.framework.write(target)
        stream = self.framework.handle(0)
        if self._nodes is not None:
            self._nodes.append((target, source))
            return
        if self.is_busy(stream):
            self._late[target.ptr] = stream, self.cuda.peek(target.ptr, N)
        self.cuda.poke(target.ptr, self.cuda.peek(source.ptr, N))

    def capture(self, body):
        stream, self._nodes = self.stream(), []
        with self.on(stream):
            self.cuda.capture(stream)
            try:
                body()
            finally:
                nodes, self._nodes = self._nodes, None
                code = self.cuda.end_capture(stream)
        if code:
            raise RuntimeError(f"the graph ended with {code}")
        return lambda: [self.write(*node) for node in nodes]

    def synchronize(self, result=None):
        for timer in self._timers.values():
            timer.join()
        self.cuda.settle()


@contextlib.contextmanager
def checked(monkeypatch, cuda, gpu):
    """Run the checks on this framework."""
    monkeypatch.setattr(gpu, "N", N)
    monkeypatch.setattr(gpu, "VALUES", VALUES)
    monkeypatch.setattr(gpu, "HOST", bytes(VALUES))
    monkeypatch.setattr(gpu, "HOLD", HOLD)
    stand_in = StandIn(monkeypatch, cuda)
    monkeypatch.setitem(gpu._loaded, "liba", stand_in)
    monkeypatch.setattr(gpu, "others", lambda name: [])
    yield stand_in
    stand_in.synchronize()
    cuda.clear_report()
