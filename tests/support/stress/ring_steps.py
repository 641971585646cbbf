"""Stop or kill the producer or a reader of a ring before each of its steps: the other side continues within a second.

    python tests/support stress.ring_steps [--every 10]

A step is a line of `dlx/_sharing/ring.py`, or a write to the ring, a wait or a wake in `c_src/core/ring.c`. A process
that is stopped (SIGSTOP) continues afterwards, and no frame is wrong. First, tests/c/ring_steps.c tries the orders of
the steps of three processes, with two switches between them, with one and a death, or with three where they sleep or
wake.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import dlx
from dlx._core.extension import ffi, lib
from dlx._sharing import ring as module
from dlx.errors import HandleError
from support.project import ROOT

PROTOCOL = ROOT / "c_src" / "core" / "ring.c"
LIMIT = 1.0  # seconds in which the survivor must continue
SLOTS, FRAMES, MORE = 3, 3, 8  # MORE: frames after the victim's end
LIKE = bytearray(16)


def build(folder, name="ring_steps", *flags, right="", wrong=""):
    """Compile a C file of the tests, with a change in the protocol; return the path of the program."""
    text = PROTOCOL.read_text(encoding="utf-8")
    assert right in text
    if name == "ring_steps":
        assert "SPINS = 4000" in text
        text = text.replace("SPINS = 4000", "SPINS = 2")
    (folder / "core").mkdir(exist_ok=True)
    (folder / "core" / "ring.c").write_text(text.replace(right, wrong), encoding="utf-8")
    paths = [f"-I{each}" for each in (folder, ROOT / "c_src", ROOT / "c_src" / "include")]
    command = ["cc", "-std=gnu11", "-O2", "-g", *([] if right else ["-Wall", "-Wextra", "-Werror"]), *flags, *paths]
    target = folder / name
    subprocess.run([*command, str(ROOT / "tests" / "c" / f"{name}.c"), "-lpthread", "-o", str(target)], check=True)
    return target


def explore(program, *words):
    """Run processes in many orders of their steps; return the output."""
    done = subprocess.run([program, "explore", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Stepping:
    """Functions of dlx, with those of a ring from ring_deaths.c."""

    def __init__(self, path):
        self._steps = ctypes.CDLL(str(path))
        self._steps.dlx_ring_held.restype = ctypes.c_uint64

    def __getattr__(self, name):
        if not name.startswith("dlx_ring"):
            return getattr(lib, name)
        function = getattr(self._steps, name)

        def call(memory, *numbers):
            function.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_int64][: 1 + len(numbers)]
            return function(int(ffi.cast("uintptr_t", memory)), *numbers)

        return call

    def stop(self, before, number):
        """Send a signal to this process before a step, which is counted from now on."""
        self._steps.ring_steps_stop(ctypes.c_long(before), number)
        module.lib = self
        sys.settrace(lambda frame, *_: self._trace if frame.f_code.co_filename == module.__file__ else None)

    def _trace(self, frame, event, _):
        if event == "line":
            self._steps.ring_step()
        return self._trace


class Child:
    """A forked child, which a signal hits before one of its steps."""

    def __init__(self, run, stepping, before, number):
        self.is_stopped = self.was_hit = False
        self.status = None  # once it has ended
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                stepping.stop(before, number)
                run()
                status = 0
            except BaseException:
                sys.settrace(None)
                traceback.print_exc()
            finally:
                os._exit(status)

    def look(self, options=os.WNOHANG):
        """Update the attributes; return whether it runs."""
        if self.status is None:
            pid, found = os.waitpid(self.pid, options | os.WUNTRACED)
            if pid and os.WIFSTOPPED(found):
                self.is_stopped = self.was_hit = True
            elif pid:
                self.status = os.waitstatus_to_exitcode(found)
                self.was_hit |= self.status == -signal.SIGKILL
        return self.status is None and not self.is_stopped

    def go_on(self):
        """Continue after a stop."""
        self.is_stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        """Wait until it has ended; return whether the signal has hit it."""
        while self.look(0) or self.is_stopped:
            if self.is_stopped:
                self.go_on()
        assert self.status == (-signal.SIGKILL if self.was_hit and self.status else 0), self.status
        return self.was_hit


def frame(number):
    """Return a frame, which contains its number four times."""
    return number.to_bytes(4, "little") * 4


def number_of(found):
    """Return the number of a frame."""
    (number,) = set(memoryview(found).cast("I"))
    return number


def stop_reader(stepping, overwrite, before, number):
    """Stop or kill a reader; return whether it has taken so many steps."""

    def run():
        with dlx.attach(ring.handle) as reader:
            last = 0
            for _ in range(FRAMES):
                found = number_of(reader.read(timeout=20))
                assert found > last and (overwrite or last in (0, found - 1)), (found, last)
                last = found
            reader.release()

    count = 0

    def put(timeout):
        nonlocal count
        ring.put(frame(count + 1), timeout=timeout)
        count += 1

    with dlx.ring(SLOTS, LIKE, overwrite=overwrite, readers=0) as ring:
        child = Child(run, stepping, before, number)
        while child.look():
            with contextlib.suppress(TimeoutError):
                put(0.01)
            time.sleep(0.001)
        start = time.monotonic()
        for _ in range(MORE):
            try:
                put(LIMIT if child.status is not None or overwrite else 0.01)
            except TimeoutError:
                assert child.is_stopped and not overwrite  # it is alive, so the producer waits for it
        assert time.monotonic() - start < LIMIT
        if child.is_stopped:
            child.go_on()
        while child.look():
            with contextlib.suppress(TimeoutError):
                put(0.01)
        with dlx.attach(ring.handle) as reader:  # perhaps with its number
            for _ in range(MORE):
                put(LIMIT)
                assert number_of(reader.read(timeout=0)) == count
        return child.end()


def stop_producer(stepping, overwrite, before, number):
    """Stop or kill the producer; return whether it has taken so many steps."""
    published = mmap.mmap(-1, mmap.PAGESIZE)  # the last number, shared with the child
    receiver, sender = os.pipe()

    def run():
        with dlx.ring(SLOTS, LIKE, overwrite=overwrite) as ring:
            os.write(sender, json.dumps(ring.handle).encode())
            for value in range(1, FRAMES + 3):
                ring.put(frame(value), timeout=20)
                published[0] = value
            with ring.write(timeout=20) as tree:
                memoryview(tree)[:] = frame(FRAMES + 3)
            published[0] = FRAMES + 3

    child = Child(run, stepping, before, number)
    last, reader = 0, None
    try:
        while reader is None:
            if not select.select([receiver], [], [], 0.002)[0]:
                child.look()
                if child.is_stopped:
                    child.go_on()
                if child.status is not None:  # before it had sent the handle
                    return child.end()
                continue
            try:
                reader = dlx.attach(json.loads(os.read(receiver, 1024)))
            except HandleError:
                return child.end()
        end, died = time.monotonic() + 20, math.inf
        while True:
            try:
                found = number_of(reader.read(timeout=0.12))
                assert found > last and (overwrite or found == last + 1), (found, last)
                last = found
            except TimeoutError:  # it is alive, so readers wait for it
                child.look()
                if child.is_stopped:
                    child.go_on()
                if child.status is not None:
                    died = min(died, time.monotonic())
                assert time.monotonic() < min(end, died + LIMIT), "stuck"
            except EOFError:
                break
            except HandleError as error:
                assert "has ended without closing it" in str(error)
                break
        assert last >= published[0], (last, published[0])
        return child.end()
    finally:
        os.close(receiver)
        os.close(sender)


ROLES = {"reader": stop_reader, "producer": stop_producer}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def stop_at_steps(stepping, role, overwrite, name, first=1, every=1):
    """Send a signal before the steps; return the number of times."""
    count, before = 0, first
    while ROLES[role](stepping, overwrite, before, SIGNALS[name]):
        count, before = count + 1, before + every
    return count


def main() -> int:
    """Try all; print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="only every so many steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for overwrite in "01":
            for words in (["2"], ["1", "kill"], ["3", "wakes"]):
                found = explore(program, overwrite, *words)
                print(f"orders of steps, overwrite={overwrite}, {' '.join(words)}: {found}", flush=True)
        stepping = Stepping(build(Path(folder), "ring_deaths", "-shared", "-fPIC"))
        for role in ROLES:
            for name in SIGNALS:
                for overwrite in (False, True):
                    count = stop_at_steps(stepping, role, overwrite, name, every=options.every)
                    print(f"{role}, overwrite={overwrite}: {count} times {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
