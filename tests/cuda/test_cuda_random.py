"""Random programs on devices: frameworks, streams, copies, captures, busy streams; no races, no leaks.

A program follows the rules for users: arrays are used on the stream that was current when they were created or
converted, and memory is written only while no other array shares it.
"""

from __future__ import annotations

import contextlib
import gc
import random

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import LEGACY, PER_THREAD
from support.cuda.gpulib import N

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx.errors import DlxError, StreamError

pytestmark = pytest.mark.filterwarnings("error")


class Program:
    """A run: frameworks, their current streams, and live arrays."""

    def __init__(self, cuda, frameworks, seed):
        self.cuda, self.frameworks, self.random = cuda, frameworks, random.Random(seed)
        self.streams = {d: [cuda.stream(d) for _ in range(3)] + [LEGACY, PER_THREAD] for d in (0, 1)}
        self.consumers = frameworks[:2]  # dlx cannot keep the third one's streams alive
        self.arrays = []  # [framework or None, array, the handle of its stream, whether its memory is unshared]
        self.capturing = None

    def current(self, framework, device):
        return framework.handle(device)

    def step(self):
        weights = {
            "make": 3,
            "convert": 6,
            "tree": 3,
            "read": 6,
            "write": 2,
            "drop": 6,
            "switch": 3,
            "busy": 2,
            "look": 1,
        }
        weights |= {"call": 2, "capture": 1}
        getattr(self, self.random.choices(list(weights), list(weights.values()))[0])()

    # ---- operations -------------------------------------------------------------------------------------------------

    def make(self):
        framework, device = self.random.choice(self.frameworks), self.random.randrange(2)
        array = framework.made(device, kind=self.random.choice((2, 2, 3)), readonly=self.random.random() < 0.1)
        self.arrays.append([framework, array, self.current(framework, device), True])

    def switch(self):
        framework, device = self.random.choice(self.frameworks), self.random.randrange(2)
        self.enter(framework, device, self.random.choice(self.streams[device]))

    def enter(self, framework, device, handle):
        framework._streams[device] = gpulib.Stream(handle, device)

    def at_home(self, entry):
        """Make the stream of an array current for the framework."""
        framework, array, handle, _ = entry
        if framework is not None:
            self.enter(framework, array.device.id, handle)

    def options(self):
        options = {"copy": self.random.choice((None, None, None, True))}
        if self.random.random() < 0.25:
            options["device"] = self.random.choice(("cuda:0", "cuda:1", "cpu"))
        return options

    def convert(self):
        if self.arrays:
            entry = self.random.choice(self.arrays)
            self.at_home(entry)
            target = self.random.choice([*self.consumers, None])
            with self.refusals():
                self.note(
                    entry, target, dlx.convert(entry[1], to=target.__name__ if target else "dlx", **self.options())
                )

    def tree(self):
        """Return several arrays whose streams are current for their frameworks."""
        chosen = self.random.sample(self.arrays, min(len(self.arrays), 5))
        for entry in chosen[:2]:
            self.at_home(entry)
        here = [entry for entry in chosen if entry[0] is None or self.is_home(entry)]
        target = self.random.choice([*self.consumers, None])
        lazy = self.random.random() < 0.3
        with self.refusals():
            name = target.__name__ if target else "dlx"
            results = dlx.convert([entry[1] for entry in here], to=name, lazy=lazy, **self.options())
            for entry, result in zip(here, [results[i] for i in range(len(here))], strict=True):
                self.note(entry, target, result)

    def is_home(self, entry):
        framework, array, handle, _ = entry
        return array.device.type == 1 or self.current(framework, array.device.id) == handle

    def note(self, entry, target, result):
        device = result.device if target is None else result.tensor.device
        same = dlx.describe(result).address == dlx.describe(entry[1]).address
        entry[3] = entry[3] and not same
        if device.type == 1:
            return
        handle = None if target is None else self.current(target, device.id)
        self.arrays.append([target, result, handle, not same])

    def read(self):
        if self.arrays:
            entry = self.random.choice(self.arrays)
            framework, array, handle, _ = entry
            if framework is None:  # a dlx.Tensor: its consumer waits
                taker = self.random.choice(self.consumers)
                with self.refusals():
                    taken = dlx.convert(array, to=taker.__name__, copy=False)
                    assert not taker.read(taken), self.cuda.report
            else:
                assert not self.cuda.read(handle, array.ptr, N, array.device.id), self.cuda.report

    def alone(self, frameworks):
        """Return arrays of some frameworks with unshared memory."""
        places = [dlx.describe(entry[1]).address for entry in self.arrays]
        pairs = zip(self.arrays, places, strict=True)
        return [entry for entry, place in pairs if entry[0] in frameworks and entry[3] and places.count(place) == 1]

    def write(self):
        alone = self.alone(self.frameworks)
        if alone:
            _, array, handle, _ = self.random.choice(alone)
            assert not self.cuda.write(handle, array.ptr, N, array.device.id), self.cuda.report

    def drop(self):
        if self.arrays:
            self.arrays.pop(self.random.randrange(len(self.arrays)))

    def busy(self):
        device = self.random.randrange(2)
        handle = self.random.choice(self.working(device))
        self.cuda.stall(handle, device) if self.random.random() < 0.6 else self.cuda.resume(handle, device)

    def working(self, device):
        """Return streams that can be busy: three of the frameworks', and dlx's own."""
        return [*self.streams[device][:3], driver.work_stream(dlx.Device(2, device)).handle]

    def look(self):
        driver.release_pending()

    def call(self):
        """One framework calls another one's function, which writes unshared memory of the caller."""
        callers = self.consumers  # streams that can be made to wait
        alone = [entry for entry in self.alone(callers) if not entry[1].tensor.readonly]
        if not alone:
            return
        entry = self.random.choice(alone)
        caller, array, _, _ = entry
        callee = next(each for each in self.consumers if each is not caller)
        self.at_home(entry)

        @dlx.using(callee.__name__)
        def work(x):
            assert not callee.write(x), self.cuda.report
            return callee.made(x.device.id)

        with self.refusals():
            result = work(array)
            assert not caller.write(array), self.cuda.report
            assert result.framework is caller
            self.arrays.append([caller, result, self.current(caller, result.device.id), False])

    def capture(self):
        """Begin a capture, or end the current one, which must be valid."""
        if self.capturing is None:
            device = self.random.randrange(2)
            self.capturing = self.cuda.stream(device), device
            self.streams[device].append(self.capturing[0])
            self.cuda.capture(*self.capturing[:1], device=device)
        else:
            handle, device = self.capturing
            self.streams[device].remove(handle)
            assert self.cuda.end_capture(handle, device) == 0
            self.capturing = None

    @contextlib.contextmanager
    def refusals(self):
        """Refusals that are allowed: an invalidated capture, and a copy with copy=False."""
        try:
            yield
        except StreamError as error:
            assert self.capturing is not None, error
        except DlxError as error:
            assert "copy=False" in str(error) or "cannot" in str(error), error

    def finish(self):
        if self.capturing is not None:
            self.capture()
        self.arrays.clear()
        gc.collect()
        for device in (0, 1):
            for handle in self.working(device):
                self.cuda.resume(handle, device)
        assert driver.release_pending() == 0


@pytest.fixture
def frameworks(monkeypatch, cuda):
    """Two with current streams, and one with a stream for each array."""
    kinds = (gpulib.GpuAdapter, gpulib.GpuAdapter, gpulib.EventAdapter)
    return [gpulib.install(monkeypatch, f"lib{i}", cuda, kind) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("seed", range(30))
def test_random_programs(cuda, frameworks, seed):
    """No race, no early release, no invalid driver call; all memory is released."""
    live, made = native.live(), 0
    for framework in frameworks:
        original = framework.made

        def counted(*args, original=original, **options):
            nonlocal made
            made += 1
            return original(*args, **options)

        framework.made = counted
    program = Program(cuda, frameworks, seed)
    for _ in range(150):
        program.step()
        assert (cuda.races, cuda.misuses, cuda.depth) == (0, 0, 0), cuda.report
    program.finish()
    assert cuda.races == 0 and sum(framework.reused_too_early for framework in frameworks) == 0, cuda.report
    assert sum(framework.freed for framework in frameworks) == made and native.live() == live
    assert cuda.events < 100
