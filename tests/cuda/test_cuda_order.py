"""Stream order and the release of memory on the recording driver, which detects races."""

from __future__ import annotations

import ctypes
import threading

import pytest
from support.cuda.fake_cuda import GLOBAL, LEGACY, MANAGED, PER_THREAD, RELAXED, THREAD_LOCAL

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.native import lib
from dlx._core.stream import Stream
from dlx.errors import DeviceError, StreamError

N = 1024
CUDA0, CUDA1 = dlx.Device("cuda:0"), dlx.Device("cuda:1")


def stream(handle, device=CUDA0, keep=None):
    """Return a stream as dlx's stream object."""
    return Stream(device, handle, keep)


class Owner:
    """The owner of memory; records its release."""

    def __init__(self, gone):
        self._gone = gone

    def __del__(self):
        self._gone.append(self)


def tensor_at(address, owner=None, device=CUDA0, n=N):
    """Return a tensor over device memory."""
    return native.tensor_new(address, (n,), None, dlx.DType("uint8"), device, 0, owner)


# ---- the recording driver --------------------------------------------------------------------------------------------


def test_a_missing_wait_is_seen(cuda):
    """Without ordering, a read on another stream races, even after a record without a wait; with both it does not."""
    p, c, memory = cuda.stream(), cuda.stream(), cuda.alloc(N)
    assert not cuda.write(p, memory, N)
    assert cuda.read(c, memory, N)
    point = driver.ready(stream(p))  # recorded without a wait
    assert cuda.read(c, memory, N)
    driver.wait(point, stream(c))
    assert not cuda.read(c, memory, N)
    assert cuda.races == 2


def test_order_is_not_undone_by_later_work(cuda):
    """Work after the ordering races again."""
    p, c, memory = cuda.stream(), cuda.stream(), cuda.alloc(N)
    cuda.write(p, memory, N)
    driver.order(stream(p), stream(c))
    assert not cuda.read(c, memory, N)
    assert cuda.write(p, memory, N)  # a write after c's read, which p does not wait for
    driver.order(stream(p), stream(c))
    assert not cuda.read(c, memory, N)


def test_the_host_is_a_reader_too(cuda):
    """A host read races until the stream is synchronized."""
    p, memory = cuda.stream(), cuda.alloc(N)
    cuda.write(p, memory, N)
    assert cuda.host_read(memory, N)
    driver.synchronize(stream(p))
    assert not cuda.host_read(memory, N)


@pytest.mark.parametrize(("blocking", "races"), [(True, False), (False, True)])
def test_the_legacy_stream_waits_for_blocking_streams_only(cuda, blocking, races):
    """Only blocking streams have an implicit order, so tests never rely on it."""
    p, memory = cuda.stream(blocking=blocking), cuda.alloc(N)
    cuda.write(p, memory, N)
    assert cuda.read(LEGACY, memory, N) is races


def test_reading_twice_is_no_race(cuda):
    """Two streams may read what a third one wrote before."""
    p, c, d, memory = cuda.stream(), cuda.stream(), cuda.stream(), cuda.alloc(N)
    cuda.write(p, memory, N)
    driver.order(stream(p), stream(c))
    driver.order(stream(p), stream(d))
    assert not cuda.read(c, memory, N) and not cuda.read(d, memory, N)
    assert cuda.write(c, memory, N)  # d may still read


# ---- one stream waits for another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", [LEGACY, PER_THREAD, None])
def test_the_same_stream_calls_nothing(cuda, handle):
    """If producer and consumer share a stream, the driver is not called."""
    p = handle or cuda.stream()
    driver.require()
    cuda.forget()
    driver.order(stream(p), stream(p))
    assert cuda.count() == 0


@pytest.mark.parametrize("after", [LEGACY, PER_THREAD, None])
@pytest.mark.parametrize("before", [LEGACY, PER_THREAD, None])
def test_different_streams_cost_one_record_and_one_wait(cuda, before, after):
    """Two calls, and the read does not race."""
    p, c, memory = before or cuda.stream(), after or cuda.stream(), cuda.alloc(N)
    cuda.write(p, memory, N)
    driver.order(stream(p), stream(c))
    if before is None or after is None or before != after:
        assert cuda.ordering == 2
    assert not cuda.read(c, memory, N)
    assert cuda.syncs == 0


def test_streams_of_two_devices(cuda):
    """The consumer may be on another device; each call is made in its stream's context."""
    p, c, memory = cuda.stream(0), cuda.stream(1), cuda.alloc(N, kind=MANAGED)  # accessible to both devices
    cuda.write(p, memory, N)
    driver.order(stream(p), stream(c, CUDA1))
    assert not cuda.read(c, memory, N, device=1)
    assert cuda.depth == 0
    memory = cuda.alloc(N, kind=MANAGED)
    cuda.write(LEGACY, memory, N)  # another stream on each device
    driver.order(stream(LEGACY), stream(LEGACY, CUDA1))
    assert not cuda.read(LEGACY, memory, N, device=1)


def test_no_stream_orders_nothing(cuda):
    """-1 makes no call."""
    driver.order(stream(-1), stream(cuda.stream()))
    driver.order(stream(cuda.stream()), stream(-1))
    assert cuda.count() == 0


def test_events_are_used_again(cuda):
    """Any number of orderings, on two devices and in several threads, creates at most one event for each."""
    p, c = stream(cuda.stream()), stream(cuda.stream())

    def work():
        for _ in range(500):
            driver.order(p, c)

    for _ in range(1000):
        driver.order(p, c)
    assert cuda.events == 1
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= cuda.events <= 5
    assert cuda.count("cuEventCreate") == cuda.events


@pytest.mark.parametrize("name", ["cuCtxPushCurrent", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_failing_call_is_named(cuda, name):
    """The error has the operation, name and code; no context stays pushed, and the next ordering works."""
    p, c = cuda.stream(), cuda.stream()
    driver.require()
    cuda.fail(name, 2)
    with pytest.raises(DeviceError, match=rf"{name} failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory"):
        driver.order(stream(p), stream(c))
    assert cuda.depth == 0
    driver.order(stream(p), stream(c))
    assert cuda.events == 1


def test_an_unknown_device(cuda):
    """The error for an unknown device has both numbers."""
    with pytest.raises(DeviceError, match=r"no device cuda:7, the driver sees 2; dlx.devices\(\) lists them"):
        driver.order(stream(3, dlx.Device("cuda:7")), stream(4))


# ---- when memory is ready --------------------------------------------------------------------------------------------


def test_a_ready_point_is_waited_for_once_per_stream(cuda):
    """An event is recorded once; each stream waits with one call; the same stream does not wait."""
    owner, memory = object(), cuda.alloc(N)
    p, c, d = cuda.stream(), cuda.stream(), cuda.stream()
    cuda.write(p, memory, N)
    point = driver.ready(stream(p, keep=owner))
    cuda.write(p, cuda.alloc(N), N)  # other work does not count
    for consumer in (p, c, d):
        driver.wait(point, stream(consumer))
        assert not cuda.read(consumer, memory, N)
    assert cuda.count("cuEventRecord") == 1
    assert cuda.count("cuStreamWaitEvent") == 2


def test_a_handle_that_was_given_out_again_is_not_taken_for_the_same(cuda):
    """If nothing keeps the stream alive, an equal handle may be another stream."""
    p = cuda.stream()
    point = driver.ready(stream(p))
    driver.wait(point, stream(p))
    assert cuda.count("cuStreamWaitEvent") == 1


def test_the_per_thread_stream_is_another_one_on_each_thread(cuda):
    """Stream 2 of one thread and stream 2 of another are ordered."""
    memory, raced = cuda.alloc(N), []
    cuda.write(PER_THREAD, memory, N)
    point = driver.ready(stream(PER_THREAD, keep=object()))

    def consume():
        driver.wait(point, stream(PER_THREAD))
        raced.append(cuda.read(PER_THREAD, memory, N))

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert raced == [False]


def test_waiting_on_the_host(cuda):
    """The host can wait for an event."""
    p, memory = cuda.stream(), cuda.alloc(N)
    cuda.write(p, memory, N)
    point = driver.ready(stream(p))
    driver.synchronize(point)
    assert not cuda.host_read(memory, N)


def test_ready_points_keep_their_stream_and_no_event(cuda):
    """The stream's owner is released with the event, and the event is reused."""
    gone, p = [], cuda.stream()
    for n in range(100):
        point = driver.ready(stream(p, keep=Owner(gone)))
        assert len(gone) == n
        del point
    assert cuda.events == 1


def test_the_legacy_streams_of_two_devices_are_two(cuda):
    """They have the same number."""
    memory = cuda.alloc(N, kind=MANAGED)
    cuda.write(LEGACY, memory, N)
    point = driver.ready(stream(LEGACY))
    driver.wait(point, stream(LEGACY, dlx.Device("cuda:1")))
    assert not cuda.read(LEGACY, memory, N, device=1)


@pytest.mark.parametrize("kept", [True, False])
def test_the_stream_of_a_point(cuda, kept):
    """It is known while the point keeps it alive; a stream that may be destroyed is unknown."""
    gone, p = [], cuda.stream()
    point = driver.ready(stream(p, keep=Owner(gone) if kept else None))
    found = driver.stream_of(point)
    assert found == (stream(p) if kept else None)
    del point
    assert not gone  # the stream keeps the point
    del found
    assert len(gone) == kept


# ---- memory that waits for the device --------------------------------------------------------------------------------


def used(cuda, gone, consumer, keep="kept"):
    """Export a tensor over device memory to a consumer's stream; return it and the address."""
    memory = cuda.alloc(N)
    return native.tensor_behind(tensor_at(memory, Owner(gone)), 0, consumer, keep), memory


def test_memory_waits_for_its_last_user(cuda):
    """The owner lives until the consumer's stream is done; the next call releases it, without waiting."""
    gone, c = [], cuda.stream()
    cuda.stall(c)
    tensor, memory = used(cuda, gone, c)
    cuda.read(c, memory, N)
    del tensor
    assert not gone and driver.release_pending() == 1
    assert cuda.syncs == 0
    cuda.resume(c)
    assert not gone
    assert driver.release_pending() == 0 and len(gone) == 1


def test_memory_whose_user_is_done_goes_at_once(cuda):
    """An idle stream keeps nothing and needs no event."""
    gone = []
    tensor, _ = used(cuda, gone, cuda.stream())
    cuda.forget()
    del tensor
    assert len(gone) == 1 and driver.release_pending() == 0
    assert cuda.count("cuEventRecord", "cuEventCreate") == 0


def test_later_calls_release(cuda):
    """Any later ordering releases finished owners."""
    gone, c = [], cuda.stream()
    cuda.stall(c)
    tensor, memory = used(cuda, gone, c)
    cuda.read(c, memory, N)
    del tensor
    cuda.resume(c)
    driver.order(stream(cuda.stream()), stream(cuda.stream()))
    assert len(gone) == 1


def test_one_slow_stream_does_not_hold_up_another(cuda):
    """Streams finish independently; each stream finishes in order."""
    slow, quick = cuda.stream(), cuda.stream()
    gone_slow, gone_quick = [], []
    for c, gone in ((slow, gone_slow), (quick, gone_quick)):
        cuda.stall(c)
        for _ in range(3):
            tensor, memory = used(cuda, gone, c)
            cuda.read(c, memory, N)
            del tensor
    assert driver.release_pending() == 6
    cuda.resume(quick)
    assert driver.release_pending() == 3
    assert (len(gone_slow), len(gone_quick)) == (0, 3)
    cuda.resume(slow)
    assert driver.release_pending() == 0 and len(gone_slow) == 3


def test_ten_thousand_pending_owners_ask_the_driver_little(cuda):
    """Only the head of a queue is checked, so the cost does not grow with the number of owners."""
    gone, c = [], cuda.stream()
    cuda.stall(c)
    memory = cuda.alloc(N)
    cuda.read(c, memory, N)
    for _ in range(2000):
        native.tensor_behind(tensor_at(memory, Owner(gone)), 0, c, "kept")
    cuda.forget()
    assert driver.release_pending() == 2000
    assert cuda.count("cuEventQuery") == 1
    cuda.resume(c)
    assert driver.release_pending() == 0 and len(gone) == 2000
    assert cuda.events <= 33


def test_the_release_is_ordered_behind_the_consumer(cuda):
    """The producer's allocator may write to released memory immediately, on its stream: no race."""
    p, c, memory = cuda.stream(), cuda.stream(), cuda.alloc(N)
    raced = []

    class Block:
        def __del__(self):
            raced.append(cuda.write(p, memory, N))

    cuda.write(p, memory, N)
    driver.order(stream(p), stream(c))
    tensor = native.tensor_behind(tensor_at(memory, Block()), 0, c, "kept")
    cuda.stall(c)
    cuda.read(c, memory, N)
    del tensor
    cuda.resume(c)
    driver.release_pending()
    assert raced == [False]
    cuda.write(p, memory, N)  # without the order, the driver would have seen it
    driver.order(stream(p), stream(c))
    cuda.read(c, memory, N)
    assert cuda.write(p, memory, N)


@pytest.mark.parametrize("where", ["here", "thread"])
def test_the_per_thread_stream_is_awaited_through_the_legacy_stream(cuda, where):
    """Another thread may release, on which 2 is another stream."""
    gone, memory = [], cuda.alloc(N)
    tensors = [native.tensor_behind(tensor_at(memory, Owner(gone)), 0, PER_THREAD, "kept")]
    cuda.stall(PER_THREAD)
    cuda.read(PER_THREAD, memory, N)
    if where == "here":
        tensors.clear()
    else:
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join()
    assert not gone and driver.release_pending() == 1
    cuda.resume(PER_THREAD)
    assert driver.release_pending() == 0 and len(gone) == 1


def test_the_stream_object_lives_as_long(cuda):
    """The owner of the consumer's stream is kept until the release is recorded and done."""
    gone, streams_gone, c = [], [], cuda.stream()
    cuda.stall(c)
    tensor, memory = used(cuda, gone, c, Owner(streams_gone))
    cuda.read(c, memory, N)
    del tensor
    driver.release_pending()
    assert not streams_gone
    cuda.resume(c)
    driver.release_pending()
    assert len(streams_gone) == len(gone) == 1


def test_a_stream_that_nobody_keeps_is_not_touched_later(cuda):
    """Its handle may be invalid at the release, which would crash a real driver: the legacy stream is used instead."""
    gone, c = [], cuda.stream(blocking=True)
    tensor, memory = used(cuda, gone, c, None)
    cuda.read(c, memory, N)
    cuda.destroy(c)
    cuda.forget()
    del tensor
    assert len(gone) == 1 and cuda.misuses == 0
    assert cuda.count("cuStreamQuery") == 0  # says nothing about the streams that the legacy stream waits for


def test_order_of_release_across_consumers(cuda):
    """A tensor with two consumers on two streams: the owner waits for both."""
    gone, c, d = [], cuda.stream(), cuda.stream()
    memory = cuda.alloc(N)
    base = tensor_at(memory, Owner(gone))
    first = native.tensor_behind(base, 0, c, "kept")
    second = native.tensor_behind(base, 0, d, "kept")
    cuda.stall(c)
    cuda.stall(d)
    cuda.read(c, memory, N)
    cuda.read(d, memory, N)
    del base, first, second
    cuda.resume(c)
    assert driver.release_pending() == 1 and not gone
    cuda.resume(d)
    assert driver.release_pending() == 0 and len(gone) == 1


@pytest.mark.parametrize(
    "name", ["cuCtxPushCurrent", "cuStreamQuery", "cuEventRecord", "cuEventQuery", "cuStreamIsCapturing"]
)
def test_a_driver_that_fails_while_letting_go(cuda, name):
    """A broken device cannot be queried: the owner is released, and nothing is raised."""
    gone = []
    tensor, _ = used(cuda, gone, cuda.stream())
    cuda.fail(name, 700)
    del tensor
    assert len(gone) == 1 and cuda.depth == 0


@pytest.mark.parametrize("consumer", ["kept", "per-thread"])
def test_no_event_to_be_had_while_letting_go(cuda, consumer):
    """The owner is not released too early: it waits for an event, or for the device."""
    gone, c = [], cuda.stream() if consumer == "kept" else PER_THREAD
    tensor, memory = used(cuda, gone, c)
    cuda.stall(c)
    cuda.read(c, memory, N)
    cuda.fail("cuEventCreate", 2)
    del tensor
    assert not gone and driver.release_pending() == 1
    cuda.resume(c)
    assert driver.release_pending() == 0 and len(gone) == 1


@pytest.mark.parametrize("name", ["cuEventRecord", "cuStreamWaitEvent"])
def test_events_of_a_context_that_was_reset(cuda, name):
    """They are never reused, so that the next call works."""
    streams = [cuda.stream() for _ in range(3)]
    points = [driver.ready(stream(each)) for each in streams]
    del points
    assert cuda.events == 3
    cuda.fail(name, 400)
    with pytest.raises(DeviceError, match="INVALID_HANDLE"):
        driver.order(stream(streams[0]), stream(streams[1]))
    assert cuda.events == 0
    driver.order(stream(streams[0]), stream(streams[1]))
    assert cuda.events == 1


def test_a_ready_point_that_cannot_be_had(cuda):
    """Its event is not reused."""
    cuda.fail("cuEventRecord", 400)
    with pytest.raises(DeviceError, match="INVALID_HANDLE"):
        driver.ready(stream(cuda.stream()))
    assert cuda.events == 0


def test_no_memory_is_used_for_nothing(cuda):
    """An empty tensor has no memory to wait for."""
    gone = []
    empty = native.tensor_new(0, (0,), None, dlx.DType("uint8"), CUDA0, 0, Owner(gone))
    tensor = native.tensor_behind(empty, 0, cuda.stream(), None)
    del empty, tensor
    assert len(gone) == 1 and cuda.count() == 0


@pytest.mark.parametrize("call", ["ready", "order", "empty", "release"])
def test_every_call_releases_what_is_done(cuda, call):
    """Every function for device memory does this."""
    gone, c, d = [], cuda.stream(), cuda.stream()
    other, _ = used(cuda, [], d)
    tensor, memory = used(cuda, gone, c)
    cuda.stall(c)
    cuda.read(c, memory, N)
    del tensor
    cuda.resume(c)
    assert not gone
    if call == "ready":
        driver.ready(stream(d))
    elif call == "order":
        driver.order(stream(d), stream(cuda.stream()))
    elif call == "empty":  # makes room
        cuda.fail("cuMemAllocFromPoolAsync", 2)
        with pytest.raises(DeviceError):
            dlx.empty(N, "uint8", device="cuda")
    else:
        del other
    assert len(gone) == 1


def test_the_legacy_streams_of_two_devices_hold_nothing_up(cuda):
    """They have the same number, and finish independently."""
    gone = [], []
    for device in (1, 0):
        memory = cuda.alloc(N, device)
        owned = tensor_at(memory, Owner(gone[device]), dlx.Device(2, device))
        tensor = native.tensor_behind(owned, device, LEGACY, None)
        cuda.stall(LEGACY, device)
        cuda.read(LEGACY, memory, N, device)
        del tensor, owned
    cuda.resume(LEGACY, 0)
    assert driver.release_pending() == 1 and (len(gone[0]), len(gone[1])) == (1, 0)
    cuda.resume(LEGACY, 1)
    assert driver.release_pending() == 0


# ---- graph capture ---------------------------------------------------------------------------------------------------

MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_dependency_across_a_capture_is_refused_and_the_capture_survives(cuda, side, mode):
    """Different streams, one of which captures: refused before anything is recorded."""
    p, c = cuda.stream(), cuda.stream()
    captured = p if side == "producer" else c
    cuda.capture(captured, mode)
    with pytest.raises(StreamError, match="capturing a graph"):
        driver.order(stream(p), stream(c))
    assert cuda.ordering == 0
    assert cuda.end_capture(captured) == 0


def test_the_planted_dependency_breaks_the_capture(cuda):
    """Without the refusal, the same calls invalidate the capture."""
    p, c = cuda.stream(), cuda.stream()
    cuda.capture(c)
    lib.dlx_cuda_push(0)
    assert _cross(cuda, p, c) == 905
    lib.dlx_cuda_pop()
    assert cuda.end_capture(c) == 901


def _cross(cuda, p, c):
    """Make a stream wait for another with driver calls, without checks; return the last code."""
    event = ctypes.c_void_p()
    cuda._lib.cuEventCreate(ctypes.byref(event), 2)
    cuda._lib.cuEventRecord(event, ctypes.c_uint64(p))
    return cuda._lib.cuStreamWaitEvent(ctypes.c_uint64(c), event, 0)


@pytest.mark.parametrize("handle", [None, PER_THREAD])
def test_the_same_stream_works_inside_a_capture(cuda, handle):
    """Nothing is called, so nothing can break."""
    p = handle or cuda.stream()
    cuda.capture(p)
    driver.order(stream(p), stream(p))
    assert cuda.end_capture(p) == 0


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_the_legacy_stream_is_refused_while_a_blocking_stream_captures(cuda, side):
    """The legacy stream would wait for the capturing one, which invalidates the capture."""
    captured, other = cuda.stream(blocking=True), cuda.stream()
    cuda.capture(captured)
    pair = (stream(LEGACY), stream(other))
    with pytest.raises(StreamError, match="capturing a graph"):
        driver.order(*(pair if side == "producer" else pair[::-1]))
    assert cuda.end_capture(captured) == 0


def test_two_streams_of_one_capture_are_ordered(cuda):
    """Within one capture, a dependency is an edge of the graph."""
    p, c = cuda.stream(), cuda.stream()
    cuda.capture(p)
    lib.dlx_cuda_push(0)
    assert _cross(cuda, p, c) == 0
    lib.dlx_cuda_pop()
    driver.order(stream(p), stream(c))
    driver.order(stream(c), stream(p))
    assert cuda.ordering == 6  # dlx's, and the one by which c joined
    assert cuda.end_capture(p) in (0, 904)


@pytest.mark.parametrize("mode", MODES)
def test_letting_go_while_the_consumer_captures(cuda, mode):
    """The owner stays queued and the capture valid; afterwards the owner is released."""
    gone, c = [], cuda.stream()
    cuda.capture(c, mode)
    tensor, _ = used(cuda, gone, c)
    del tensor
    assert not gone and driver.release_pending() == 1
    assert cuda.end_capture(c) == 0
    assert driver.release_pending() == 0 and len(gone) == 1


@pytest.mark.parametrize("mode", MODES)
def test_looking_for_what_is_done_during_a_capture_elsewhere(cuda, mode):
    """A capture in the strictest mode forbids other threads to query events, except in relaxed mode."""
    gone, c, other = [], cuda.stream(), cuda.stream()
    cuda.stall(c)
    tensor, memory = used(cuda, gone, c)
    cuda.read(c, memory, N)
    del tensor
    cuda.capture(other, mode)
    assert driver.release_pending() == 1
    cuda.resume(c)
    assert driver.release_pending() == 0
    assert cuda.end_capture(other) == 0


def test_memory_that_is_ready_may_enter_a_capture(cuda):
    """Finished work needs no edge in the graph; unfinished work is refused."""
    p, c = cuda.stream(), cuda.stream()
    point = driver.ready(stream(p))
    cuda.capture(c)
    driver.wait(point, stream(c))
    assert cuda.end_capture(c) == 0
    cuda.stall(p)
    cuda.write(p, cuda.alloc(N), N)
    point = driver.ready(stream(p))
    cuda.capture(c)
    with pytest.raises(StreamError, match="capturing"):
        driver.wait(point, stream(c))
    assert cuda.end_capture(c) == 0


def test_a_ready_point_inside_a_capture_is_the_stream(cuda):
    """No event enters the capture; the same stream needs no event, others are refused during the capture."""
    p, c = cuda.stream(), cuda.stream()
    cuda.capture(p)
    point = driver.ready(stream(p, keep=object()))
    driver.wait(point, stream(p))
    with pytest.raises(StreamError):
        driver.wait(point, stream(c))
    assert cuda.ordering == 0 and cuda.end_capture(p) == 0
    driver.wait(point, stream(c))
    assert cuda.ordering == 2


@pytest.mark.parametrize("what", ["stream", "point"])
def test_synchronising_during_a_capture_elsewhere(cuda, what):
    """The host may wait for other streams, but not for a stream that captures."""
    p, other = cuda.stream(), cuda.stream()
    point = driver.ready(stream(p))
    cuda.capture(other)
    driver.synchronize(stream(p) if what == "stream" else point)
    with pytest.raises(StreamError):
        driver.synchronize(stream(other))
    assert cuda.end_capture(other) == 0
