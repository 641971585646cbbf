"""The recording driver of fake_cuda.c, as tests steer it."""

from __future__ import annotations

import contextlib
import ctypes
import types

LEGACY, PER_THREAD = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
PINNED, DEVICE, MANAGED = 1, 2, 3

_U64 = ctypes.c_uint64
_RESULTS = {
    "fake_log": ctypes.c_char_p,
    "fake_report": ctypes.c_char_p,
    "fake_failed_call": ctypes.c_char_p,
    "fake_stream": _U64,
    "fake_alloc": _U64,
    **dict.fromkeys(
        (
            *("fake_calls", "fake_held", "fake_races", "fake_misuses", "fake_syncs", "fake_blocked", "fake_events"),
            *("fake_blocks", "fake_copies", "fake_mapped", "fake_returned"),
        ),
        ctypes.c_long,
    ),
}


class FakeCuda:
    """Calls of the driver, and what they would mean on a device."""

    def __init__(self, path):
        self.path = str(path)
        self._lib = ctypes.CDLL(self.path)
        for name, result in _RESULTS.items():
            getattr(self._lib, name).restype = result
        self._stalled = []

    def __getattr__(self, name):
        """Numbers without arguments: races, misuses, syncs, blocked, events, blocks, depth, mode, current.

        Since the record of calls began: how often memory was `mapped` from the system, or `returned` to it by a pool.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._lib, f"fake_{name}")()

    def reset(self, devices=2):
        """Start anew; nothing of before may be in use."""
        self._stalled.clear()
        self._lib.fake_reset(devices)

    def forget(self):
        """Start a new record of calls."""
        self._lib.fake_forget()

    def count(self, *names):
        """How often these entry points were called since the record began; all of them without a name."""
        return sum(self._lib.fake_calls(name.encode()) for name in names or ("",))

    def held(self, *names):
        """How many of them were made by a thread that held the GIL: where one takes long, all of Python waits."""
        return sum(self._lib.fake_held(name.encode()) for name in names or ("",))

    def copies(self, below=0):
        """How many copies were asked for since the record began; `below`: of fewer bytes than this power of two."""
        return self._lib.fake_copies(ctypes.c_size_t(below))

    @property
    def ordering(self):
        """Calls that order streams."""
        return self.count("cuEventRecord", "cuStreamWaitEvent")

    @property
    def log(self):
        """Calls that matter, in order."""
        return self._lib.fake_log().decode().splitlines()

    @property
    def report(self):
        """What races and misuses there were, in words."""
        return self._lib.fake_report().decode()

    def clear_report(self):
        """Forget races, misuses and waits, which a test has provoked."""
        self._lib.fake_clear_report()

    def fail(self, name, code, after=0):
        """Let one call fail, after so many that go well. After 700 and 719 every later call fails, as on a device."""
        self._lib.fake_fail(name.encode(), code, after)

    def fail_number(self, number, code):
        """Let the call of this number fail from now on, whichever it is; 1 = the next one. 0: none."""
        self._lib.fake_fail_number(ctypes.c_long(number), code)

    @property
    def failed_call(self):
        """Which call that was; empty where there were not so many."""
        return self._lib.fake_failed_call().decode()

    def mend(self):
        """Let calls go well again, as in a new process."""
        self._lib.fake_mend()

    @contextlib.contextmanager
    def slow(self, name):
        """Let the next call of a name wait in the driver until the block is over, or for 10 seconds.

        `wait()` of what it gives is true once the call waits.
        """
        self._lib.fake_hold(name.encode())
        try:
            yield types.SimpleNamespace(wait=lambda seconds=10: bool(self._lib.fake_is_held(seconds)))
        finally:
            self._lib.fake_let_go()

    def settle(self):
        """Let everything be done, and known to all: between tests that share a driver."""
        self._lib.fake_settle()

    def set_pools(self, yes):
        """Whether devices have stream-ordered allocators."""
        self._lib.fake_set_pools(int(yes))

    def set_peers(self, yes):
        """Whether devices can be let see each other's memory."""
        self._lib.fake_set_peers(int(yes))

    def stream(self, device=0, *, blocking=False):
        """A stream's handle. Frameworks make theirs non-blocking."""
        return self._lib.fake_stream(device, int(blocking))

    def name_of(self, stream, device=0):
        """What the log calls a stream."""
        return f"s{self._lib.fake_number(device, _U64(stream))}"

    def destroy(self, stream):
        """Destroy a stream; using it afterwards is a misuse."""
        self._lib.fake_stream_destroy(_U64(stream))

    def alloc(self, nbytes, device=0, kind=DEVICE):
        """The address of memory."""
        return self._lib.fake_alloc(device, ctypes.c_size_t(nbytes), kind)

    def free(self, address):
        """Give memory back; using it afterwards is a misuse."""
        self._lib.fake_free(_U64(address))

    def peek(self, address, nbytes):
        """What memory holds, on a device too; no access that counts."""
        out = ctypes.create_string_buffer(nbytes)
        self._lib.fake_peek(_U64(address), ctypes.c_size_t(nbytes), out)
        return out.raw

    def poke(self, address, data):
        """Let memory hold bytes."""
        data = bytes(data)
        self._lib.fake_poke(_U64(address), ctypes.c_size_t(len(data)), data)

    def is_alive(self, address):
        """Whether memory has not been given back."""
        return bool(self._lib.fake_is_alive(_U64(address)))

    def write(self, stream, address, nbytes, device=0):
        """Run a kernel that writes memory; return whether it races."""
        return bool(self._lib.fake_kernel(device, _U64(stream), _U64(address), ctypes.c_size_t(nbytes), 1))

    def read(self, stream, address, nbytes, device=0):
        """Run a kernel that reads memory; return whether it races."""
        return bool(self._lib.fake_kernel(device, _U64(stream), _U64(address), ctypes.c_size_t(nbytes), 0))

    def copied(self, stream, address, nbytes, device=0):
        """Let a copy read memory, as `read`; copies see what is on other devices."""
        return bool(self._lib.fake_kernel(device, _U64(stream), _U64(address), ctypes.c_size_t(nbytes), 2))

    def host_read(self, address, nbytes):
        """Read memory on the host; return whether that races."""
        return bool(self._lib.fake_host_access(_U64(address), ctypes.c_size_t(nbytes), 0))

    def host_write(self, address, nbytes):
        """Write memory on the host; return whether that races."""
        return bool(self._lib.fake_host_access(_U64(address), ctypes.c_size_t(nbytes), 1))

    def stall(self, stream, device=0):
        """Let nothing that is put on the stream from now on get done."""
        self._stalled.append((device, stream))
        self._lib.fake_stall(device, _U64(stream))

    def resume(self, stream, device=0):
        """Let the stream go on."""
        self._stalled = [each for each in self._stalled if each != (device, stream)]
        self._lib.fake_resume(device, _U64(stream))

    def resume_all(self):
        """Let every stream go on."""
        for device, stream in self._stalled:
            self.resume(stream, device)

    def capture(self, stream, mode=GLOBAL, device=0):
        """Begin a graph capture."""
        self._lib.fake_capture(device, _U64(stream), mode)

    def end_capture(self, stream, device=0):
        """End it; 0 where it is whole, 901 where it was broken, 904 where other streams were drawn in."""
        return self._lib.fake_capture_end(device, _U64(stream))
