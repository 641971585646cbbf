"""The recording driver itself detects programs that would fail on a device, and accepts valid ones.

Each program is a few driver calls without dlx. The rules are those of cuda.h 13.0.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time

import pytest
from support.cuda.fake_cuda import LEGACY, PER_THREAD

import dlx
from dlx._core import cuda as driver
from dlx._core.stream import Stream
from dlx.errors import DeviceError, StreamError

N = 4096
CUDA0, CUDA1 = dlx.Device("cuda:0"), dlx.Device("cuda:1")
INVALID, INVALID_CONTEXT, UNSUPPORTED, INVALID_HANDLE = 1, 201, 217, 400
ILLEGAL, DESTROYED, LAUNCH_FAILED, NOT_PERMITTED = 700, 709, 719, 800
THRESHOLD, RESERVED, TAKEN = 4, 5, 7


class Api:
    """The driver's entry points; created objects are returned as a number."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.cuInit(0)

    def __getattr__(self, name):
        """Call an entry point with 64-bit numbers; return its code."""

        def call(*args):
            def plain(value):
                return ctypes.c_uint64(value) if isinstance(value, int) else value

            return getattr(self.lib, "cu" + name)(*[plain(value) for value in args])

        return call

    def made(self, name, *args):
        """Call an entry point that creates something; return that."""
        out = ctypes.c_uint64()
        code = getattr(self, name)(ctypes.byref(out), *args)
        assert code == 0, code
        return out.value

    def enter(self, device=0):
        """Make a device's primary context current on this thread."""
        context = self.made("DevicePrimaryCtxRetain", device)
        assert self.CtxSetCurrent(context) == 0
        return context

    def pool(self, device=0, threshold=0):
        """Create a pool."""
        facts = struct.pack("iiiiQQH54x", 1, 0, 1, device, 0, 0, 0)
        made = self.made("MemPoolCreate", ctypes.create_string_buffer(facts, len(facts)))
        assert self.MemPoolSetAttribute(made, THRESHOLD, ctypes.byref(ctypes.c_uint64(threshold))) == 0
        return made

    def attribute(self, pool, which):
        """Get an attribute of a pool."""
        found = ctypes.c_uint64()
        assert self.MemPoolGetAttribute(pool, which, ctypes.byref(found)) == 0
        return found.value

    def let_see(self, pool, device, flags=3):
        """Let a device access a pool; return the code."""
        return self.MemPoolSetAccess(pool, (ctypes.c_int * 3)(1, device, flags), 1)


@pytest.fixture
def api(cuda, fake_driver):
    """The entry points, with the context of device 0 current; no context remains."""
    api = Api(fake_driver)
    api.enter()
    yield api
    while api.lib.fake_depth():
        api.made("CtxPopCurrent_v2")


def caught(cuda, words):
    """Return whether the driver complained in these words; clear the complaint."""
    found, report = cuda.misuses > 0 and words in cuda.report, cuda.report
    cuda.clear_report()
    assert found, report
    return True


# ---- pools -----------------------------------------------------------------------------------------------------------


def test_memory_of_a_pool_is_unseen_by_peers(cuda, api):
    """A kernel on another device that reads it is an illegal access, until cuMemPoolSetAccess."""
    cuda.set_peers(True)
    stream, other = cuda.stream(0), cuda.stream(1)
    pool = api.pool()
    memory = api.made("MemAllocFromPoolAsync", N, pool, stream)
    assert api.StreamSynchronize(stream) == 0
    assert api.let_see(pool, 1) == 0
    cuda.read(other, memory, N, device=1)
    assert cuda.misuses == 0
    assert api.let_see(pool, 1, 0) == 0
    cuda.read(other, memory, N, device=1)
    assert caught(cuda, "memory that it cannot see") and api.StreamSynchronize(stream) == ILLEGAL


def test_peer_access_of_contexts_is_nothing_to_pools(cuda, api):
    """CuCtxEnablePeerAccess allows access to memory of cuMemAlloc, not of pools."""
    cuda.set_peers(True)
    own, other = api.enter(0), cuda.stream(1)
    plain, pooled = api.made("MemAlloc_v2", N), api.made("MemAllocAsync", N, LEGACY)
    api.enter(1)
    assert api.CtxEnablePeerAccess(own, 0) == 0
    cuda.read(other, plain, N, device=1)
    assert cuda.misuses == 0
    cuda.read(other, pooled, N, device=1)
    assert caught(cuda, "memory that it cannot see")


def test_devices_that_cannot_see_each_other(cuda, api):
    """Access cannot be enabled between them; access of the pool's own device cannot be disabled."""
    pool, yes = api.pool(), ctypes.c_int()
    assert api.DeviceCanAccessPeer(ctypes.byref(yes), 0, 1) == 0 and yes.value == 0
    assert api.let_see(pool, 1) == INVALID and api.let_see(pool, 0, 0) == INVALID
    assert api.CtxEnablePeerAccess(api.made("DevicePrimaryCtxRetain", 1), 0) == UNSUPPORTED


def test_a_plain_copy_between_devices_of_a_pools_memory(cuda, api):
    """It fails if the device has no access to the memory; a peer copy works, and so does memory of cuMemAlloc."""
    first, second = api.enter(0), api.enter(1)
    target = api.made("MemAlloc_v2", N)
    api.enter(0)
    plain, pooled = api.made("MemAlloc_v2", N), api.made("MemAllocAsync", N, LEGACY)
    api.enter(1)
    assert api.MemcpyAsync(target, plain, N, LEGACY) == 0
    assert api.MemcpyAsync(target, pooled, N, LEGACY) == INVALID
    assert caught(cuda, "memory of a pool that this device cannot see")
    api.enter(0)
    assert api.MemcpyPeerAsync(target, second, pooled, first, N, LEGACY) == 0
    cuda.clear_report()  # the two copies to the target are unordered


@pytest.mark.parametrize("stream", ["legacy", "own"])
def test_a_copy_between_devices_waits_for_both(cuda, api, stream):
    """On the legacy stream it is ordered with all work of both devices; on other streams with their own."""
    first, second = api.enter(0), api.enter(1)
    source, target = cuda.alloc(N, 0), cuda.alloc(N, 1)
    s = LEGACY if stream == "legacy" else cuda.stream(1)
    cuda.write(LEGACY, source, N, device=0)
    assert api.MemcpyPeerAsync(target, second, source, first, N, s) == 0
    before = cuda.races
    cuda.write(LEGACY, source, N, device=0)
    after = cuda.races
    assert (before, after) == ((0, 0) if stream == "legacy" else (1, 2))
    cuda.clear_report()


@pytest.mark.parametrize(("threshold", "kept"), [(0, False), (1 << 30, True)])
@pytest.mark.parametrize("call", ["stream", "event", "context"])
def test_a_pool_gives_memory_back_when_something_is_waited_for(cuda, api, threshold, kept, call):
    """Above its threshold, initially 0: a loop of allocations and waits maps memory again each time."""
    pool, stream = api.pool(threshold=threshold), cuda.stream()
    event = api.made("EventCreate", 2)
    cuda.forget()
    for _ in range(5):
        memory = api.made("MemAllocFromPoolAsync", N, pool, stream)
        assert api.MemFreeAsync(memory, stream) == 0
        assert api.EventRecord(event, stream) == 0
        waits = {
            "stream": lambda: api.StreamSynchronize(stream),
            "event": lambda: api.EventSynchronize(event),
            "context": lambda: api.CtxSynchronize(),
        }
        assert waits[call]() == 0
    assert (cuda.mapped, cuda.returned) == ((1, 0) if kept else (5, 5))
    assert api.attribute(pool, TAKEN) == 0 and api.attribute(pool, RESERVED) == (N if kept else 0)
    assert api.EventDestroy_v2(event) == 0


def test_a_pool_gives_memory_to_another_stream_in_order_only(cuda, api):
    """A block that a stream still uses is not reused by another stream, until that is done or waited for."""
    pool, first, second = api.pool(threshold=1 << 30), cuda.stream(), cuda.stream()
    memory = api.made("MemAllocFromPoolAsync", N, pool, first)
    cuda.stall(first)
    cuda.write(first, memory, N)
    assert api.MemFreeAsync(memory, first) == 0
    other = api.made("MemAllocFromPoolAsync", N, pool, second)
    assert other != memory
    again = api.made("MemAllocFromPoolAsync", N, pool, first)
    assert again == memory and not cuda.write(first, again, N)
    assert api.MemFreeAsync(again, first) == 0
    cuda.resume(first)
    late = api.made("MemAllocFromPoolAsync", N, pool, second)
    assert late == memory and not cuda.write(second, late, N) and cuda.races == 0


def test_a_second_start_forgets_nothing(cuda, api):
    """Every library calls cuInit, also a CUDA runtime after dlx: existing pools survive."""
    pool, stream = api.pool(), cuda.stream()
    assert api.Init(0) == 0
    memory = api.made("MemAllocFromPoolAsync", N, pool, stream)
    assert api.MemFreeAsync(memory, stream) == 0


def test_memory_that_is_freed_too_early_races(cuda, api):
    """A release that is not ordered after another stream's read is detected, with or without a pool."""
    first, second = cuda.stream(), cuda.stream()
    memory = api.made("MemAllocAsync", N, first)
    assert api.StreamSynchronize(first) == 0
    cuda.read(second, memory, N)
    assert api.MemFreeAsync(memory, first) == 0
    assert cuda.races == 1
    assert cuda.read(second, memory, N) or cuda.misuses  # and later reads use freed memory
    cuda.clear_report()


# ---- contexts --------------------------------------------------------------------------------------------------------


def test_a_destroyed_context(cuda, api):
    """If it is current, it is popped; on other threads calls fail with 709; making it current fails with 201."""
    made = api.made("CtxCreate_v2", 0, 0)
    stream, memory = api.made("StreamCreate", 1), api.made("MemAlloc_v2", N)
    found, after = [], []
    destroyed, current = threading.Event(), threading.Event()

    def elsewhere():
        assert api.CtxPushCurrent_v2(made) == 0
        current.set()
        destroyed.wait(20)
        found.append(api.made("CtxGetCurrent") == made and api.StreamSynchronize(LEGACY))
        api.made("CtxPopCurrent_v2")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert current.wait(20)
    depth = cuda.depth
    assert api.CtxDestroy_v2(made) == 0 and cuda.depth == depth - 1
    destroyed.set()
    thread.join()
    after = [api.CtxPushCurrent_v2(made), api.CtxSetCurrent(made), api.CtxDestroy_v2(made)]
    assert found == [DESTROYED] and after == [INVALID_CONTEXT] * 3
    assert api.StreamSynchronize(stream) == INVALID_HANDLE and caught(cuda, "a destroyed stream was used")
    assert api.MemFree_v2(memory) == INVALID and caught(cuda, "the freed address is not a block")


def test_no_context(cuda, fake_driver):
    """A thread without a context gets 201."""
    api = Api(fake_driver)
    assert api.StreamSynchronize(LEGACY) == INVALID_CONTEXT and api.CtxSynchronize() == INVALID_CONTEXT


def test_a_primary_context_that_is_released_or_reset(cuda, api):
    """It is destroyed by the last release, or by a reset; retaining it again creates a new one."""
    assert api.DevicePrimaryCtxRelease_v2(0) == 0
    assert api.StreamSynchronize(LEGACY) == DESTROYED
    assert api.DevicePrimaryCtxRelease_v2(0) == INVALID_CONTEXT
    api.enter()
    stream = api.made("StreamCreate", 1)
    assert api.StreamSynchronize(stream) == 0
    assert api.DevicePrimaryCtxReset_v2(0) == 0 and api.StreamSynchronize(LEGACY) == DESTROYED
    api.enter()
    assert api.StreamSynchronize(stream) == INVALID_HANDLE and caught(cuda, "a destroyed stream was used")


def test_events_and_streams_of_two_contexts(cuda, api):
    """An event is recorded on streams of its context; any stream waits for it. Default streams belong to a context."""
    event, memory = api.made("EventCreate", 2), cuda.alloc(N)
    cuda.write(LEGACY, memory, N)
    made = api.made("CtxCreate_v2", 0, 0)
    stream = api.made("StreamCreate", 0)
    assert api.EventRecord(event, stream) == INVALID_HANDLE
    assert caught(cuda, "a stream of another context")
    assert api.StreamWaitEvent(stream, event, 0) == 0
    assert api.StreamSynchronize(LEGACY) == 0  # of this context, independent of the other one's
    assert cuda.host_read(memory, N)
    cuda.clear_report()
    found = ctypes.c_uint64()
    assert api.StreamGetCtx(stream, ctypes.byref(found)) == 0 and found.value == made
    assert api.CtxDestroy_v2(made) == 0 and api.EventDestroy_v2(event) == 0


def test_dlx_with_a_stream_of_another_context(cuda, api):
    """Dlx works in the primary context: another context's stream raises an error, and nothing leaks."""
    made = api.made("CtxCreate_v2", 0, 0)
    stream = api.made("StreamCreate", 1)
    api.made("CtxPopCurrent_v2")
    depth = cuda.depth
    with pytest.raises(DeviceError, match=r"cuEventRecord failed with CUDA_ERROR_INVALID_HANDLE"):
        driver.order(Stream(CUDA0, stream), Stream(CUDA0, cuda.stream()))
    assert cuda.depth == depth and caught(cuda, "a stream of another context")
    assert api.CtxDestroy_v2(made) == 0


def test_a_destroyed_event(cuda, api):
    """Also one whose context was reset: 400, with any work on its stream."""
    event = api.made("EventCreate", 2)
    assert api.EventRecord(event, cuda.stream()) == 0 and api.EventQuery(event) == 0
    assert api.DevicePrimaryCtxReset_v2(0) == 0
    api.enter()
    assert api.EventQuery(event) == api.EventSynchronize(event) == INVALID_HANDLE
    assert caught(cuda, "a destroyed event was used")


def test_a_call_that_fails_by_its_number(cuda, api):
    """Exactly the call with this number; entry points that use others count as one."""
    cuda.fail_number(2, 2)
    assert [api.StreamSynchronize(LEGACY), api.StreamQuery(LEGACY), api.StreamQuery(LEGACY)] == [0, 2, 0]
    assert cuda.failed_call == "cuStreamQuery"
    cuda.fail_number(9, 2)
    assert api.StreamSynchronize(LEGACY) == 0 and cuda.failed_call == ""
    cuda.mend()


# ---- sticky errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [ILLEGAL, LAUNCH_FAILED])
def test_a_sticky_error_comes_back(cuda, api, code):
    """Every later call fails with it until the process ends; other errors occur only once."""
    for single in (2, 999):
        cuda.fail("cuStreamSynchronize", single)
        assert [api.StreamSynchronize(LEGACY), api.StreamSynchronize(LEGACY)] == [single, 0]
    cuda.fail("cuStreamSynchronize", code)
    assert [api.StreamSynchronize(LEGACY) for _ in range(3)] == [code] * 3
    assert api.MemAlloc_v2(ctypes.byref(ctypes.c_uint64()), N) == api.EventCreate(None, 2) == code
    cuda.mend()
    assert api.StreamSynchronize(LEGACY) == 0


@pytest.mark.parametrize("code", [ILLEGAL, LAUNCH_FAILED])
def test_dlx_after_a_sticky_error(cuda, np, code):
    """Every call names the error, host work continues, and pending memory is released."""
    c = cuda.stream()
    tensor = dlx.empty(N, "uint8", "cuda:0")
    waiting = dlx.convert(tensor, to="dlx", copy=True)
    cuda.fail("cuStreamIsCapturing", code)
    name = {ILLEGAL: "CUDA_ERROR_ILLEGAL_ADDRESS", LAUNCH_FAILED: "CUDA_ERROR_LAUNCH_FAILED"}[code]
    for _ in range(3):
        with pytest.raises(DeviceError, match=name):
            driver.order(Stream(CUDA0, c), Stream(CUDA0, cuda.stream()))
        with pytest.raises(DeviceError, match=name):
            dlx.convert(tensor, to="numpy")
        with pytest.raises(DeviceError, match=name):
            dlx.empty(N, "uint8", "cuda:0")
    assert dlx.convert(bytearray(8), to="numpy").nbytes == 8
    del tensor, waiting
    assert dlx.release_pending() == 0
    cuda.mend()


# ---- streams, copies -------------------------------------------------------------------------------------------------


def test_no_limit_of_streams(cuda, api):
    """Thousands of streams, each with its own clock: a race with the last one is detected like one with the first."""
    streams = [api.made("StreamCreate", 1) for _ in range(5000)]
    memory = cuda.alloc(N)
    cuda.write(streams[-1], memory, N)
    assert cuda.read(streams[0], memory, N)
    cuda.clear_report()
    driver.order(Stream(CUDA0, streams[-1]), Stream(CUDA0, streams[1]))
    assert not cuda.read(streams[1], memory, N)
    assert len({*streams}) == 5000 and all(api.StreamDestroy_v2(stream) == 0 for stream in streams)
    assert api.StreamQuery(streams[7]) == INVALID_HANDLE and caught(cuda, "a destroyed stream")


def test_copies_are_counted_by_size(cuda, api):
    """A test can forbid thousands of small copies; a box is one copy of all its rows."""
    source, target = cuda.alloc(N), cuda.alloc(N)
    cuda.forget()
    for i in range(1000):
        assert api.MemcpyAsync(target + 4 * i, source + 4 * i, 4, LEGACY) == 0
    assert api.MemcpyAsync(target, source, N, LEGACY) == 0
    assert (cuda.copies(), cuda.copies(below=4), cuda.copies(below=8), cuda.copies(below=N)) == (1001, 0, 1000, 1000)
    cuda.forget()
    assert cuda.copies() == 0


def test_sides_that_overlap(cuda, api):
    """The result of such a copy is undefined."""
    memory = cuda.alloc(N)
    assert api.MemcpyAsync(memory + 4, memory, 8, LEGACY) == 0 and caught(cuda, "overlap")


# ---- locks and host functions ----------------------------------------------------------------------------------------

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_a_host_function_makes_no_call(cuda, api):
    """A driver call in a host function is refused and reported."""
    codes = []
    wrong = FUNCTION(lambda data: codes.append(api.StreamQuery(LEGACY)))
    assert api.LaunchHostFunc(LEGACY, ctypes.cast(wrong, ctypes.c_void_p).value, 0) == 0
    assert api.StreamSynchronize(LEGACY) == 0
    assert codes == [NOT_PERMITTED] and caught(cuda, "was called by a host function")


def test_a_host_function_is_in_order(cuda, api):
    """It runs after the earlier work on its stream, and waiting for the stream includes it."""
    seen, memory, c = [], cuda.alloc(N, kind=1), cuda.stream()
    function = FUNCTION(lambda data: seen.append(cuda.host_read(memory, N)))
    cuda.write(c, memory, N)
    cuda.stall(c)
    cuda.write(c, memory, N)
    assert api.LaunchHostFunc(c, ctypes.cast(function, ctypes.c_void_p).value, 0) == 0
    time.sleep(0.05)
    assert seen == []
    cuda.resume(c)
    assert api.StreamSynchronize(c) == 0 and seen == [False] and not cuda.host_write(memory, N)


@pytest.mark.gil("this Python has no GIL to hold")
def test_who_waits_with_the_gil_for_what_needs_it(fake_driver, python):
    """Waiting with the GIL for a stream whose host function needs the GIL: detected after a timeout."""
    code = f"""
        import ctypes, os
        lib, held = ctypes.CDLL({str(fake_driver)!r}), ctypes.PyDLL({str(fake_driver)!r})
        for name in ("cuStreamSynchronize", "cuLaunchHostFunc"):
            getattr(lib, name).argtypes = getattr(held, name).argtypes = None
        lib.fake_report.restype = ctypes.c_char_p
        lib.fake_misuses.restype = lib.fake_held.restype = ctypes.c_long
        context = ctypes.c_void_p()
        lib.cuInit(0), lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), lib.cuCtxPushCurrent_v2(context)
        done = []
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(done.append)
        one = ctypes.c_uint64(1)
        assert lib.cuLaunchHostFunc(one, function, None) == 0
        assert lib.cuStreamSynchronize(one) == 0 and done == [None]
        assert lib.fake_held(b"") == 0 and lib.fake_misuses() == 0
        os.environ["FAKE_CUDA_PATIENCE"] = "1"
        assert held.cuLaunchHostFunc(one, function, None) == 0
        held.cuStreamSynchronize(one)
        print(lib.fake_held(b"cuStreamSynchronize"), lib.fake_misuses(), lib.fake_report().decode())
    """
    out = python(code)
    assert out.startswith("1 1 ") and "waits for who waits for the stream" in out


def test_a_call_that_takes_long_is_waited_for_by_its_caller_alone(cuda):
    """A thread that waits in the driver without the GIL blocks no other; the driver detects a wait with the GIL."""
    done = []
    with cuda.slow("cuStreamSynchronize") as call:
        thread = threading.Thread(target=lambda: done.append(driver.synchronize(Stream(CUDA0, cuda.stream()))))
        thread.start()
        assert call.wait() and done == []
        assert dlx.convert(bytearray(4), to="dlx").shape == (4,)
        driver.order(Stream(CUDA0, cuda.stream()), Stream(CUDA0, cuda.stream()))
    thread.join(20)
    assert done == [None] and cuda.misuses == 0 and cuda.held("cuStreamSynchronize") == 0


# ---- captures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("call", ["MemAlloc_v2", "DevicePrimaryCtxRetain", "MemPoolCreate", "CtxCreate_v2"])
def test_calls_that_break_a_capture(cuda, api, mode, call):
    """A call that may allocate invalidates a capture of its thread, except in relaxed mode."""
    facts = ctypes.create_string_buffer(struct.pack("iiiiQQH54x", 1, 0, 1, 0, 0, 0, 0))
    arguments = {
        "MemAlloc_v2": (N,),
        "DevicePrimaryCtxRetain": (1,),
        "MemPoolCreate": (facts,),
        "CtxCreate_v2": (0, 0),
    }[call]
    for relaxed in (True, False):
        stream, before = cuda.stream(), ctypes.c_int(2)
        cuda.capture(stream, mode)
        if relaxed:
            api.ThreadExchangeStreamCaptureMode(ctypes.byref(before))
        made = ctypes.c_uint64()
        code = getattr(api, call)(ctypes.byref(made), *arguments)
        if relaxed:
            api.ThreadExchangeStreamCaptureMode(ctypes.byref(before))
        assert cuda.end_capture(stream) == (0 if relaxed else 901)
        assert code == (0 if relaxed else 900) or call == "DevicePrimaryCtxRetain"
        if relaxed and call == "DevicePrimaryCtxRetain":
            assert api.DevicePrimaryCtxRelease_v2(1) == 0


def test_the_first_calls_of_dlx_break_no_capture(cuda):
    """The first use of a device, its stream and its pool during a capture of this thread leaves the capture valid."""
    stream = cuda.stream()
    cuda.capture(stream)
    tensor = dlx.empty(N, "uint8", "cuda:1")
    with pytest.raises(StreamError, match="capturing"):
        driver.order(Stream(CUDA0, stream), Stream(CUDA1, PER_THREAD))
    del tensor
    assert cuda.end_capture(stream) == 0
