"""Python control of the recording driver, fake_cuda.c."""

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
    """Calls of the driver, and their effects on an imaginary device."""

    def __init__(self, path):
        self.path = str(path)
        self._lib = ctypes.CDLL(self.path)
        for name, result in _RESULTS.items():
            getattr(self._lib, name).restype = result
        self._stalled = []

    def __getattr__(self, name):
        """Return a counter: races, misuses, syncs, blocked, events, blocks, depth, mode, current.

        Since the record of calls began: how often memory was `mapped` from the system, or `returned` to it by a pool.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._lib, f"fake_{name}")()

    def reset(self, devices=2):
        """Start again; nothing from before may be in use."""
        self._stalled.clear()
        self._lib.fake_reset(devices)

    def forget(self):
        """Start a new record of calls."""
        self._lib.fake_forget()

    def count(self, *names):
        """Return the number of calls of these entry points, or of all, since the record began."""
        return sum(self._lib.fake_calls(name.encode()) for name in names or ("",))

    def held(self, *names):
        """Return the number of calls with the GIL held: a slow one blocks all of Python."""
        return sum(self._lib.fake_held(name.encode()) for name in names or ("",))

    def copies(self, below=0):
        """Return the number of copies since the record began; `below`: of fewer bytes than this power of two."""
        return self._lib.fake_copies(ctypes.c_size_t(below))

    @property
    def ordering(self):
        """Return the calls that order streams."""
        return self.count("cuEventRecord", "cuStreamWaitEvent")

    @property
    def log(self):
        """Return the relevant calls, in order."""
        return self._lib.fake_log().decode().splitlines()

    @property
    def report(self):
        """Return the races and misuses as text."""
        return self._lib.fake_report().decode()

    def clear_report(self):
        """Forget the races, misuses and waits that a test has provoked."""
        self._lib.fake_clear_report()

    def fail(self, name, code, after=0):
        """Make one call fail after `after` good ones. After 700 and 719 every later call fails, as on a device."""
        self._lib.fake_fail(name.encode(), code, after)

    def fail_number(self, number, code):
        """Make the call with this number fail from now on; 1 is the next call, 0 none."""
        self._lib.fake_fail_number(ctypes.c_long(number), code)

    @property
    def failed_call(self):
        """Return the name of the failed call; empty if there were fewer calls."""
        return self._lib.fake_failed_call().decode()

    def mend(self):
        """Make calls succeed again, as in a new process."""
        self._lib.fake_mend()

    @contextlib.contextmanager
    def slow(self, name):
        """Make the next call of a name wait in the driver until the block ends, or for 10 seconds.

        `wait()` of the yielded object returns True once the call waits.
        """
        self._lib.fake_hold(name.encode())
        try:
            yield types.SimpleNamespace(wait=lambda seconds=10: bool(self._lib.fake_is_held(seconds)))
        finally:
            self._lib.fake_let_go()

    def settle(self):
        """Finish all work, and make it known to all, between tests that share a driver."""
        self._lib.fake_settle()

    def set_pools(self, yes):
        """Set whether devices have stream-ordered allocators."""
        self._lib.fake_set_pools(int(yes))

    def set_peers(self, yes):
        """Set whether devices can access each other's memory."""
        self._lib.fake_set_peers(int(yes))

    def stream(self, device=0, *, blocking=False):
        """Return the handle of a new stream, non-blocking as in frameworks."""
        return self._lib.fake_stream(device, int(blocking))

    def name_of(self, stream, device=0):
        """Return a stream's name in the log."""
        return f"s{self._lib.fake_number(device, _U64(stream))}"

    def destroy(self, stream):
        """Destroy a stream; later use is a misuse."""
        self._lib.fake_stream_destroy(_U64(stream))

    def alloc(self, nbytes, device=0, kind=DEVICE):
        """Allocate memory; return its address."""
        return self._lib.fake_alloc(device, ctypes.c_size_t(nbytes), kind)

    def free(self, address):
        """Free memory; later use is a misuse."""
        self._lib.fake_free(_U64(address))

    def peek(self, address, nbytes):
        """Return the content of memory, also on a device, without counting an access."""
        out = ctypes.create_string_buffer(nbytes)
        self._lib.fake_peek(_U64(address), ctypes.c_size_t(nbytes), out)
        return out.raw

    def poke(self, address, data):
        """Write bytes to memory, without counting an access."""
        data = bytes(data)
        self._lib.fake_poke(_U64(address), ctypes.c_size_t(len(data)), data)

    def is_alive(self, address):
        """Return True if memory is not freed."""
        return bool(self._lib.fake_is_alive(_U64(address)))

    def write(self, stream, address, nbytes, device=0):
        """Run a kernel that writes memory; return whether it races."""
        return bool(self._lib.fake_kernel(device, _U64(stream), _U64(address), ctypes.c_size_t(nbytes), 1))

    def read(self, stream, address, nbytes, device=0):
        """Run a kernel that reads memory; return whether it races."""
        return bool(self._lib.fake_kernel(device, _U64(stream), _U64(address), ctypes.c_size_t(nbytes), 0))

    def copied(self, stream, address, nbytes, device=0):
        """Make a copy read memory, as `read` does; copies can access other devices."""
        return bool(self._lib.fake_kernel(device, _U64(stream), _U64(address), ctypes.c_size_t(nbytes), 2))

    def host_read(self, address, nbytes):
        """Read memory on the host; return whether that races."""
        return bool(self._lib.fake_host_access(_U64(address), ctypes.c_size_t(nbytes), 0))

    def host_write(self, address, nbytes):
        """Write memory on the host; return whether that races."""
        return bool(self._lib.fake_host_access(_U64(address), ctypes.c_size_t(nbytes), 1))

    def stall(self, stream, device=0):
        """Stop the stream: later work on it is not done."""
        self._stalled.append((device, stream))
        self._lib.fake_stall(device, _U64(stream))

    def resume(self, stream, device=0):
        """Continue the stream."""
        self._stalled = [each for each in self._stalled if each != (device, stream)]
        self._lib.fake_resume(device, _U64(stream))

    def resume_all(self):
        """Continue every stream."""
        for device, stream in self._stalled:
            self.resume(stream, device)

    def capture(self, stream, mode=GLOBAL, device=0):
        """Begin a graph capture."""
        self._lib.fake_capture(device, _U64(stream), mode)

    def end_capture(self, stream, device=0):
        """End the capture; return 0 if it is valid, 901 if broken, 904 if it includes other streams."""
        return self._lib.fake_capture_end(device, _U64(stream))

    @property
    def nodes(self):
        """Return the number of copies and kernels in the last graph, 0 if its capture was broken."""
        return self._lib.fake_nodes(self._lib.fake_last_graph())

    def replay(self):
        """Replay the last graph; return the number of its nodes whose memory is gone, each a misuse."""
        return self._lib.fake_replay(self._lib.fake_last_graph())
