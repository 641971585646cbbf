"""Conversions between frameworks on devices: nothing races, is ordered twice, or is let go of too early."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import LEGACY, MANAGED, PER_THREAD
from support.cuda.gpulib import N
from support.project import ROOT

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.native import ffi
from dlx._engine.batch import Batch
from dlx._engine.request import Request
from dlx._engine.streams import StreamSync
from dlx._registry import lookup
from dlx._registry.registry import registry
from dlx.adapter import Capabilities, StreamSupport
from dlx.errors import CopyRequiredError, DeviceError, LayoutError, StreamError

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def lib_e(monkeypatch, cuda):
    """A framework with one stream per array."""
    return gpulib.install(monkeypatch, "libe", cuda, gpulib.EventAdapter)


def pick(cuda, which):
    """A stream's handle by name."""
    return {"own": None, "legacy": LEGACY, "per-thread": PER_THREAD}[which] or cuda.stream()


STREAMS = ["own", "legacy", "per-thread"]


# ---- who waits for whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", STREAMS)
@pytest.mark.parametrize("producer", STREAMS)
def test_the_consumers_stream_waits(cuda, lib_a, lib_b, producer, consumer):
    """For any two current streams, the consumer's next kernel reads finished data in the same memory."""
    p, c = pick(cuda, producer), pick(cuda, consumer)
    with lib_a.on(p), lib_b.on(c):
        array = lib_a.made()
        cuda.forget()
        result = dlx.convert(array, to="libb")
        assert cuda.ordering == (0 if p == c else 2)
        assert result.ptr == array.ptr and type(result) is lib_b.Array
        assert not lib_b.read(result)
    assert cuda.syncs == 0


def test_without_order_it_would_race(cuda, lib_a, lib_b):
    """The instrument: stream=-1 orders nothing, calls nothing, and the consumer races."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        array = lib_a.made()
        assert "no stream waits" in str(dlx.plan(array, "libb", stream=-1))
        cuda.forget()
        result = dlx.convert(array, to="libb", stream=-1)
        assert cuda.ordering == 0 and lib_b.read(result)


def test_the_same_stream_calls_nothing(cuda, lib_a, lib_b):
    """No event, no wait, no query: not one call but those that make the device current."""
    with lib_a.on(cuda.stream()) as p, lib_b.on(p.ptr):
        array = lib_a.made()
        with driver.at(array.device):  # the first time has additional calls
            pass
        cuda.forget()
        result = dlx.convert(array, to="libb")
        assert cuda.count() == cuda.count("cuCtxPushCurrent", "cuCtxPopCurrent")
        assert not lib_b.read(result)


@pytest.mark.parametrize("as_object", [True, False])
def test_a_stream_that_is_said(cuda, lib_a, lib_b, as_object):
    """An explicit stream waits, not the framework's current one."""
    p, c = cuda.stream(), cuda.stream()
    with lib_a.on(p), lib_b.on(cuda.stream()):
        array = lib_a.made()
        result = dlx.convert(array, to="libb", stream=gpulib.Stream(c) if as_object else c)
        assert not cuda.read(c, result.ptr, N)
        assert cuda.ordering == 2 and lib_b.read(result)


@pytest.mark.parametrize(
    ("stream", "message"), [(0, "Pass 1"), ("x", "is not a stream"), (gpulib.Stream(5, 1), "device 1")]
)
def test_what_is_no_stream_is_refused_before_the_producer_is_asked(cuda, lib_a, lib_b, stream, message):
    """Invalid streams are refused, and nothing is ordered."""
    array = lib_a.made()
    with pytest.raises(StreamError, match=message):
        dlx.convert(array, to="libb", stream=stream)
    assert lib_a.heard == [] and cuda.ordering == 0
    assert isinstance(dlx.plan(array, "libb", stream=stream).error, StreamError)


def test_a_producer_with_a_current_stream_orders_nothing_itself(cuda, lib_a, lib_b):
    """It always gets -1: many producers do not support 2, and dlx orders once for all arrays."""
    with lib_a.on(cuda.stream()), lib_b.on(PER_THREAD):
        dlx.convert(lib_a.made(), to="libb")
    assert lib_a.heard == [-1]


@pytest.mark.parametrize(("consumer", "told"), [("own", "it"), ("legacy", "it"), ("per-thread", "ours")])
def test_a_producer_without_a_current_stream_gets_the_consumers(cuda, lib_e, lib_b, consumer, told):
    """It makes that stream wait. Many producers refuse 2, so dlx passes its work stream, for which stream 2 waits."""
    p, c = cuda.stream(), pick(cuda, consumer)
    with lib_e.on(p), lib_b.on(c):
        result = dlx.convert(lib_e.made(), to="libb")
        assert lib_e.heard == [c if told == "it" else driver.work_stream(dlx.Device("cuda")).handle]
        assert not lib_b.read(result)


def test_a_consumer_of_a_copy_elsewhere_is_not_bothered(cuda, lib_e, lib_b):
    """The consumer's stream on the source's device does not wait, since dlx copies on its own stream there."""
    with lib_e.on(cuda.stream()), lib_b.on(cuda.stream()), lib_b.on(cuda.stream(1), 1):
        result = dlx.convert(lib_e.made(), to="libb", device="cuda:1")
        assert lib_e.heard == [driver.work_stream(dlx.Device("cuda")).handle]
        assert not lib_b.read(result)


class Silent:
    """An object whose device is known only from its capsule; without a stream it makes the legacy stream wait."""

    def __init__(self, cuda, tensor, on):
        self.tensor, self.on = tensor, on

    def __dlpack__(self, *, stream=None, max_version=None):
        driver.order(self.on, driver.Stream(self.on.device, stream or LEGACY))
        return self.tensor.__dlpack__(stream=-1, max_version=max_version)


def test_a_producer_that_does_not_say_where_it_is(cuda, lib_a, lib_b):
    """It is called without a stream, so the consumer waits for the legacy stream."""
    p = driver.Stream(dlx.Device("cuda"), cuda.stream())
    with lib_a.on(p.handle), lib_b.on(cuda.stream()):
        result = dlx.convert(Silent(cuda, lib_a.made().tensor, p), to="libb")
        assert not lib_b.read(result)


def test_a_consumer_without_a_current_stream_says_it_itself(cuda, lib_a, lib_e):
    """It is handed a dlx.Tensor that waits for whatever stream is named."""
    with lib_a.on(cuda.stream()), lib_e.on(cuda.stream()):
        result = dlx.convert(lib_a.made(), to="libe")
        assert not lib_e.read(result)


def test_to_dlx_and_from_it(cuda, lib_a, lib_b):
    """A dlx.Tensor records when it is ready; later readers on any stream wait."""
    with lib_a.on(cuda.stream()):
        tensor = dlx.convert(lib_a.made(), to="dlx")
    with lib_b.on(cuda.stream()):
        assert not lib_b.read(dlx.convert(tensor, to="libb"))
    other = cuda.stream()
    taken = native.capsule_claim(tensor.__dlpack__(stream=other, max_version=(1, 0)))
    assert not cuda.read(other, taken.data_ptr, N)


def test_to_dlx_for_a_stream(cuda, lib_a):
    """The given stream waits immediately, and the tensor still makes other streams wait."""
    c, d = cuda.stream(), cuda.stream()
    with lib_a.on(cuda.stream()):
        tensor = dlx.convert(lib_a.made(), to="dlx", stream=c)
    assert not cuda.read(c, tensor.data_ptr, N)
    taken = native.capsule_claim(tensor.__dlpack__(stream=d, max_version=(1, 0)))
    assert not cuda.read(d, taken.data_ptr, N)


def test_a_capsule_is_ready_on_the_legacy_stream(cuda, lib_a, lib_b):
    """Its producer gave no stream, and most work is on the legacy stream."""
    with lib_b.on(cuda.stream()):
        capsule = lib_a.made().tensor.__dlpack__(stream=-1, max_version=(1, 0))
        result = dlx.convert(capsule, to="libb")
        assert not lib_b.read(result)
        through = dlx.convert(lib_a.made().tensor.__dlpack__(stream=-1, max_version=(1, 0)), to="dlx")
        assert not lib_b.read(dlx.convert(through, to="libb"))


def test_borrowed_for_a_stream(cuda, lib_a):
    """Borrowed memory is ready on the given stream, or else on the legacy stream."""
    for stream in (cuda.stream(), None):
        with lib_a.on(cuda.stream()), dlx.borrow(lib_a.made(), stream=stream) as borrowed:
            address = int(native.ffi.cast("uintptr_t", borrowed.data))
            assert not cuda.read(stream or LEGACY, address, N)


# ---- many ------------------------------------------------------------------------------------------------------------


def convert_together(arrays, to, **options):
    """Convert arrays in one call, stage by stage, as trees are."""
    sources = [lookup.adapter_of(array) for array in arrays]
    return Batch(Request(registry.target(to), **options), list(arrays), sources).run()


@pytest.mark.parametrize("n", [1, 2, 100])
def test_many_cost_as_much_as_one(cuda, lib_a, lib_b, n):
    """One record and one wait, one question to each framework."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        arrays = [lib_a.made() for _ in range(n)]
        cuda.forget()
        results = convert_together(arrays, "libb")
        assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent")) == (1, 1)
        assert (lib_a.asked, lib_b.asked) == (1, 1)
        assert not any(lib_b.read(result) for result in results)


@pytest.mark.parametrize("n", [1, 100])
def test_many_to_dlx_have_one_event(cuda, lib_a, lib_b, n):
    """One record; and going on to a framework together costs one wait."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        arrays = [lib_a.made() for _ in range(n)]
        cuda.forget()
        tensors = convert_together(arrays, "dlx")
        assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent")) == (1, 0)
        results = convert_together(tensors, "libb")
        assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent")) == (1, 1)
        assert not any(lib_b.read(result) for result in results)


def test_two_producers_two_devices(cuda, lib_a, lib_b, monkeypatch):
    """Two calls for each pair of streams."""
    lib_c = gpulib.install(monkeypatch, "libc_", cuda)
    with lib_a.on(cuda.stream()), lib_a.on(cuda.stream(1), 1), lib_b.on(cuda.stream()), lib_b.on(cuda.stream(1), 1):
        with lib_c.on(cuda.stream()):
            arrays = [lib_a.made(), lib_a.made(1), lib_c.made(), lib_a.made(1), lib_a.made(), lib_c.made()]
            cuda.forget()
            results = convert_together(arrays, "libb")
        assert cuda.ordering == 6
        assert [result.device.id for result in results] == [0, 1, 0, 1, 0, 0]
        assert not any(lib_b.read(result) for result in results)


def test_points_are_told_apart(cuda, lib_b):
    """One that is gone may have left its address to the next one of the same call."""
    sync, place, memory = StreamSync(registry.target("libb")), dlx.Device("cuda"), cuda.alloc(N)
    c = sync.consumer(place)
    for _ in range(8):
        p = driver.Stream(place, cuda.stream())
        cuda.read(c.handle, memory, N)
        driver.order(c, p)
        cuda.write(p.handle, memory, N)
        sync.wait(driver.ready(p), c)
        assert not cuda.read(c.handle, memory, N)


def test_producers_with_streams_of_their_own_are_asked_with_it_every_time(cuda, lib_e, lib_b):
    """One stream for the first array of a framework would miss the second array's."""
    with lib_b.on(cuda.stream()) as c:
        arrays = []
        for _ in range(3):
            with lib_e.on(cuda.stream()):
                arrays.append(lib_e.made())
        cuda.forget()
        convert_together(arrays, "libb")
    assert lib_e.heard == [c.ptr] * 3 and cuda.ordering == 6  # their own: dlx adds nothing


class Spoken:
    """An array of an unknown framework, which makes the given stream wait."""

    def __init__(self, tensor):
        self.tensor, self.told = tensor, []

    def __dlpack_device__(self):
        return tuple(self.tensor.device)

    def __dlpack__(self, *, stream=None, **options):
        self.told.append(stream)
        return self.tensor.__dlpack__(stream=-1, **options)


@pytest.mark.parametrize("n", [1, 10])
def test_a_generic_producer_orders_for_itself(cuda, lib_b, n):
    """It gets the consumer's stream with each array, and dlx calls nothing."""
    arrays = [Spoken(dlx.from_pointer(cuda.alloc(N), (N,), "uint8", device="cuda")) for _ in range(n)]
    with lib_b.on(cuda.stream()) as c:
        cuda.forget()
        results = dlx.convert(arrays, "libb")
        assert [array.told for array in arrays] == [[c.ptr]] * n
        assert cuda.ordering == cuda.count("cuEventCreate") == 0
        assert [result.ptr for result in results] == [array.tensor.data_ptr for array in arrays]


# ---- until when memory is used ---------------------------------------------------------------------------------------


def test_memory_is_not_reused_while_the_consumer_works(cuda, lib_a, lib_b):
    """The result is dropped while its stream is busy: the producer's allocator has the memory only afterwards."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()) as c:
        result = dlx.convert(lib_a.made(), to="libb")
        cuda.stall(c.ptr)
        lib_b.read(result)
        del result
        gc.collect()
        assert lib_a.freed == 0 and driver.release_pending() == 1
        cuda.resume(c.ptr)
        assert driver.release_pending() == 0
    assert (lib_a.freed, lib_a.reused_too_early, cuda.syncs) == (1, 0, 0)


def test_memory_of_arrays_with_streams_of_their_own_is_not_reused_either(cuda, lib_e, lib_b):
    """They made the consumer's stream wait, and reuse their memory on another."""
    with lib_e.on(cuda.stream()), lib_b.on(cuda.stream()) as c:
        result = dlx.convert(lib_e.made(), to="libb")
        cuda.stall(c.ptr)
        lib_b.read(result)
        del result
        assert dlx.release_pending() == 1 and lib_e.freed == 0
        cuda.resume(c.ptr)
        assert dlx.release_pending() == 0 and lib_e.freed == 1
    assert cuda.races == 0


def test_a_framework_takes_a_tensor_by_itself(cuda, lib_a, lib_b):
    """A consumer's from_dlpack passes its current stream as a number: dlx finds the stream object, and waits for it."""
    with lib_a.on(cuda.stream()):
        tensor = dlx.convert(lib_a.made(), to="dlx")
    with lib_b.on(cuda.stream()) as c:
        result = lib_b.adapter.load(tensor)
        assert not lib_b.read(result)
        cuda.stall(c.ptr)
        lib_b.read(result)
        gone = weakref.ref(c)
    del tensor, result, c
    gc.collect()
    assert gone() is not None and lib_a.freed == 0
    cuda.resume_all()
    assert driver.release_pending() == 0 and gone() is None
    assert (lib_a.freed, lib_a.reused_too_early) == (1, 0)


def test_a_framework_that_cannot_say_its_stream_is_passed_over(cuda, lib_a, monkeypatch):
    """A framework that is imported but broken (built for another driver) hides no other framework's stream."""
    broken, lib_b = (gpulib.install(monkeypatch, name, cuda) for name in ("broken", "libb"))
    monkeypatch.setattr(broken.adapter, "streams", StreamSupport(current=lambda device: 1 / 0))
    tensor = dlx.convert(lib_a.made(), to="dlx")
    with lib_b.on(cuda.stream()) as c:
        result = lib_b.adapter.load(tensor)
        cuda.stall(c.ptr)
        lib_b.read(result)
        del tensor, result
        gc.collect()
        assert lib_a.freed == 0
    cuda.resume_all()
    assert driver.release_pending() == 0 and (lib_a.freed, lib_a.reused_too_early) == (1, 0)


def test_an_allocator_that_has_memory_too_early_is_seen(cuda, lib_a, lib_b):
    """The instrument: with stream=-1, no stream waits at the end either."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()) as c:
        result = dlx.convert(lib_a.made(), to="libb", stream=-1)
        cuda.stall(c.ptr)
        lib_b.read(result)
        del result
        gc.collect()
        assert (lib_a.freed, lib_a.reused_too_early) == (1, 1)


def test_a_later_conversion_releases(cuda, lib_a, lib_b):
    """No call of release_pending is needed."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()) as c:
        result = dlx.convert(lib_a.made(), to="libb")
        cuda.stall(c.ptr)
        lib_b.read(result)
        del result
        cuda.resume(c.ptr)
        dlx.convert(lib_a.made(), to="libb")
    assert lib_a.freed >= 1 and lib_a.reused_too_early == 0


def test_conversions_leak_neither_memory_nor_events(cuda, lib_a, lib_b):
    """Two thousand of them, dropped while their stream is busy or not: a handful of events, no memory."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()) as c:
        array = lib_a.made()
        for i in range(2000):
            if i % 100 == 50:
                cuda.stall(c.ptr)
            elif i % 100 == 60:
                cuda.resume(c.ptr)
            dlx.convert(array, to="libb")
        assert driver.release_pending() == 0 and cuda.events < 40 and cuda.blocks == 1


def test_threads(cuda, lib_a, lib_b):
    """Conversions, releases and queries from many threads at once: nothing races, nothing is lost."""
    failed = []

    def work(array):
        for i in range(200):
            result = dlx.convert(array, to="libb")
            if lib_b.read(result):
                failed.append(i)
            del result
            driver.release_pending()

    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        arrays = [lib_a.made() for _ in range(6)]
        threads = [threading.Thread(target=work, args=(array,)) for array in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == [] and cuda.races == 0 and driver.release_pending() == 0
        assert cuda.events < 40 and lib_a.freed == 0


def test_after_a_fork(python, fake_driver):
    """The child gets an error with a fix, releases its arrays without a call, and still converts host memory."""
    code = """
        import gc, os
        import dlx
        from dlx._core import native
        from support.cuda.fake_cuda import FakeCuda

        cuda = FakeCuda(os.environ["DLX_CUDA_DRIVER"])
        tensor = dlx.empty(64, "uint8", device="cuda")
        pid = os.fork()
        if pid == 0:
            for target, device in (("dlx", "cpu"), ("dlx", "cuda:1")):
                error = dlx.plan(tensor, target, device=device).error
                assert isinstance(error, dlx.errors.DeviceError), error
                print(error.fix, flush=True)
            assert dlx.convert(bytearray(b"abc"), to="dlx").shape == (3,)
            del tensor, error
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(dlx.convert(tensor, to="dlx", device="cpu").device)
    """
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "DLX_CUDA_DRIVER": str(fake_driver), "PYTHONPATH": path}
    lines = python(code, env=env).splitlines()
    assert len(lines) == 3 and lines[2] == "cpu" and all("spawn" in line for line in lines[:2])


# ---- graph capture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("to", ["libb", "libe", "numpy"])
def test_a_capture_is_not_broken(cuda, lib_a, lib_b, lib_e, side, to, np):
    """A conversion that would break a capture is refused, and the capture continues."""
    p, c = cuda.stream(), cuda.stream()
    with lib_a.on(p), lib_b.on(c), lib_e.on(c):
        array = lib_a.made()
        if side == "consumer":
            cuda.stall(p)
            lib_a.write(array)
        cuda.capture(p if side == "producer" else c)
        if to == "numpy" and side == "consumer":
            cuda.resume(p)
            dlx.convert(array, to=to)  # it has nothing to do with that stream
        else:
            with pytest.raises(StreamError, match="capturing a graph"):
                dlx.convert(array, to=to)
        assert cuda.end_capture(p if side == "producer" else c) == 0
    cuda.clear_report()


def test_one_stream_in_a_capture(cuda, lib_a, lib_b):
    """Conversions on the stream that captures work, and add nothing to the graph."""
    p = cuda.stream()
    with lib_a.on(p), lib_b.on(p):
        array = lib_a.made()
        cuda.capture(p)
        cuda.forget()
        result = dlx.convert(array, to="libb")
        assert cuda.ordering == 0
        lib_b.read(result)
        assert cuda.end_capture(p) == 0


# ---- copies and moves ------------------------------------------------------------------------------------------------


def fill(array, values):
    """Write values to the array's memory without the driver."""
    array.framework.cuda.poke(array.ptr, bytes(values))


def content(array):
    """The bytes of an array, behind the driver's back."""
    return array.framework.cuda.peek(array.ptr, N)


def test_device_to_host(cuda, np, lib_a):
    """The result is a copy, made after the producer's kernels; the plan shows its bytes."""
    with lib_a.on(cuda.stream()):
        array = lib_a.made()
        fill(array, range(N))
        plan = dlx.plan(array, "numpy")
        assert (plan.outcome, plan.nbytes, plan.device) == ("copied", N, (1, 0))
        assert f"move: from cuda:0 to cpu ({N} bytes)" in str(plan)
        result = dlx.convert(array, to="numpy")
    assert result.tolist() == list(range(N)) and not cuda.host_read(result.ctypes.data, N)
    assert cuda.races == 0 and result.flags.writeable


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", (2, 1)])
def test_host_to_device(cuda, np, lib_b, device):
    """A numpy array is copied to a requested device, and may be written to immediately."""
    lib_b.device = 1  # "cuda" is the framework's current one
    place = dlx.Device("cuda:1" if device == "cuda" else device)
    source = np.arange(N, dtype="uint8")
    with lib_b.on(cuda.stream(place.id), place.id):
        plan = dlx.plan(source, "libb", device=device)
        assert (plan.outcome, plan.nbytes, plan.device) == ("copied", N, place)
        result = dlx.convert(source, to="libb", device=device)
        assert result.device == place
        assert not cuda.host_write(source.ctypes.data, N)
        source[:] = 0
        assert not lib_b.read(result) and content(result) == bytes(range(N))
    assert lib_b.device == 1


def test_device_to_device(cuda, lib_a, lib_b):
    """From cuda:1 to cuda:0: one copy, for which the consumer waits; the source stays alive until it is done."""
    with lib_a.on(cuda.stream(1), 1) as stream, lib_b.on(cuda.stream()):
        array = lib_a.made(1)
        fill(array, range(N))
        cuda.stall(stream.ptr, 1)
        result = dlx.convert(array, to="libb", device="cuda:0")
        del array
        gc.collect()
        assert result.device == (2, 0) and content(result) == bytes(range(N))
        assert lib_a.freed == 0
        cuda.resume_all()
        assert not lib_b.read(result)
        driver.release_pending()
        assert (lib_a.freed, lib_a.reused_too_early) == (1, 0)
    assert cuda.count("cuMemcpyPeerAsync") == 1 and cuda.syncs == 0


def test_dlx_tensors_move_and_are_copied(cuda, lib_a):
    """From device to device, to and from the host, and in place; ready for the next reader."""
    with lib_a.on(cuda.stream(1), 1):
        array = lib_a.made(1)
        fill(array, range(N))
        there = dlx.convert(array, to="dlx")
    c = cuda.stream(blocking=True)  # not kept alive, so dlx queries the legacy stream for its completion
    for tensor, place in (
        (dlx.convert(there, to="dlx", device="cuda:0"), (2, 0)),
        (dlx.convert(there, to="dlx", copy=True), (2, 1)),
        (dlx.convert(dlx.convert(there, to="dlx", device="cpu"), to="dlx", device="cuda:1"), (2, 1)),
    ):
        assert tensor.device == place and tensor.data_ptr != there.data_ptr
        d = c if place == (2, 0) else cuda.stream(1, blocking=True)
        taken = native.capsule_claim(tensor.__dlpack__(stream=d, max_version=(1, 0)))
        assert not cuda.read(d, taken.data_ptr, N, place[1])
        host = dlx.convert(tensor, to="dlx", device="cpu")
        assert host.device == (1, 0) and bytes(memoryview(host)) == bytes(range(N))
    assert dlx.plan(there, "dlx", device="cpu").outcome == "copied"
    assert dlx.convert(there, to="dlx", device="cuda:1") is there
    with pytest.raises(CopyRequiredError):
        dlx.convert(there, to="dlx", device="cpu", copy=False)
    assert cuda.races == 0, cuda.report


def test_gaps_are_closed_before_a_move(cuda, lib_b):
    """Many rows of two bytes go over in one copy; the plan tells of both copies."""
    n, c = 512, cuda.stream()
    memory = cuda.alloc(4 * n, 1)
    cuda.poke(memory, bytes(range(256)) * (n // 64))
    tensor = native.tensor_new(memory, (n, 2), (4, 2), dlx.DType("uint8"), (2, 1), 0, None)
    plan = dlx.plan(tensor, "libb", device="cuda:0")
    assert plan.nbytes == 4 * n and [step.do for step in plan.steps[-2:]] == ["copy", "move"]
    with lib_b.on(c):
        cuda.forget()
        result = dlx.convert(tensor, to="libb", device="cuda:0")
        assert cuda.count("cuMemcpy2DAsync", "cuMemcpyAsync") < 10 and cuda.count("cuMemcpyPeerAsync") == 1
        assert cuda.syncs == 1  # for the source, whose writers are unknown; the compact copy has no other writers
    assert not cuda.read(c, result.ptr, 2 * n)
    assert cuda.peek(result.ptr, 8) == bytes([0, 2, 4, 6, 8, 10, 12, 14])


def scattered(cuda, shape, strides, device=0):
    """Memory of a device as a tensor of a generic producer, from its lowest address on."""
    steps = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    memory = cuda.alloc(high - low + 1, device)
    return native.tensor_new(memory - low, shape, strides, dlx.DType("uint8"), (2, device), 0, None)


LIMIT = 1 << 14
"""Copies that one array may take."""


@pytest.mark.parametrize("options", [{"copy": True}, {"device": "cuda:1"}, {"device": "cpu"}], ids=str)
@pytest.mark.parametrize(
    ("shape", "strides", "call"),
    [
        ((LIMIT,), (-1,), "cuMemcpyAsync"),
        ((LIMIT + 1,), (-1,), None),
        ((LIMIT, 9), (-9, 1), "cuMemcpyAsync"),
        ((LIMIT + 1, 9), (-9, 1), None),
        ((LIMIT + 1, 9), (18, 1), "cuMemcpy2DAsync"),  # one box
        ((LIMIT // 2, 2, 4), (99, 45, 5), "cuMemcpy2DAsync"),  # a box for each of the first two
        ((LIMIT // 2 + 1, 2, 4), (99, 45, 5), None),
        ((1 << 20,), (0,), None),
        ((1 << 20,), (3,), "cuMemcpy2DAsync"),
    ],
)
def test_what_is_too_scattered(cuda, lib_b, shape, strides, call, options):
    """More single copies than are worth it are refused, by the plan too; the host gathers them itself.

    That a conversion begins to copy is seen from the first copy, which fails: thousands take the recording driver long.
    """
    tensor = scattered(cuda, shape, strides)
    is_refused = call is None and options != {"device": "cpu"}
    plan = dlx.plan(tensor, "libb", **options)
    assert plan.outcome == ("refused" if is_refused else "copied")
    cuda.forget()
    if is_refused:
        with pytest.raises(dlx.errors.LayoutError, match="Make it contiguous in its own framework") as caught:
            dlx.convert(tensor, "libb", **options)
        assert str(caught.value) == str(plan.error)
        assert cuda.copies() == cuda.count("cuMemAllocFromPoolAsync") == 0
    else:
        call = "cuMemcpyAsync" if options == {"device": "cpu"} else call  # one piece of host memory
        cuda.fail(call, 2)
        with pytest.raises(DeviceError, match=f"{call} failed"):
            dlx.convert(tensor, "libb", **options)
        assert cuda.count(call) == 1


def test_like_an_array_of_a_device(cuda, np, lib_a, lib_b):
    """The framework and the device of an example."""
    with lib_b.on(cuda.stream(1), 1):
        result = dlx.convert(np.zeros(N, "uint8"), like=lib_b.made(1))
        assert type(result) is lib_b.Array and result.device == (2, 1) and not lib_b.read(result)


def test_while_another_device_is_current(cuda, lib_a, lib_b):
    """A source on cuda:1 while cuda:0 is current: producer and consumer are called with cuda:1 current."""
    seen, load = [], lib_b.adapter.load
    lib_a.adapter.export = lambda obj, stream=None: seen.append((lib_a.device, cuda.current)) or obj.tensor
    lib_b.adapter.load = lambda tensor: seen.append((lib_b.device, cuda.current)) or load(tensor)
    with lib_a.on(cuda.stream(1), 1), lib_b.on(cuda.stream(1), 1):
        result = dlx.convert(lib_a.made(1), to="libb")
        assert result.device == (2, 1) and not lib_b.read(result)
    assert seen == [(1, 1), (1, 1)]
    assert (lib_a.device, lib_b.device, cuda.depth) == (0, 0, 0)


def test_a_copy_on_the_device(cuda, lib_a, lib_b):
    """copy=True stays on the device; streams wait only if necessary."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        array = lib_a.made()
        fill(array, range(N))
        result = dlx.convert(array, to="libb", copy=True)
        assert result.ptr != array.ptr and result.device == (2, 0) and content(result) == bytes(range(N))
        assert not lib_b.read(result) and not lib_b.write(result)
    assert cuda.races == 0 and cuda.syncs == 0


@pytest.mark.parametrize("to", ["libb", "dlx"])
def test_many_copies(cuda, lib_a, lib_b, to):
    """A stream that has waited for the first copy waits for the second as well, and a point is one of each."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        # Else the host learns that a copy is made when it lets go of the source.
        cuda.stall(driver.work_stream(dlx.Device("cuda")).handle)
        results = convert_together([lib_a.made() for _ in range(3)], to, copy=True)
        if to == "dlx":
            results = [lib_b.adapter.load(result) for result in results]
        assert not any(lib_b.read(result) for result in results)


def test_read_only_on_a_device(cuda, lib_a, lib_b):
    """A consumer without read-only arrays gets a copy, or an error."""
    with lib_b.on(cuda.stream()):
        array = lib_a.made(readonly=True)
        result = dlx.convert(array, to="libb")
        assert result.ptr != array.ptr and not lib_b.read(result)
        with pytest.raises(dlx.errors.ReadOnlyError):
            dlx.convert(array, to="libb", copy=False)
        assert dlx.convert(array, to="libb", readonly="share").ptr == array.ptr


@pytest.mark.parametrize("to", ["numpy", "libb"])
def test_no_move_without_a_copy(cuda, np, lib_a, lib_b, to):
    """copy=False refuses, naming both places."""
    with pytest.raises(CopyRequiredError, match=r"cuda:1.*(cpu|cuda:0)"):
        dlx.convert(lib_a.made(1), to=to, copy=False, device=None if to == "numpy" else "cuda:0")


def test_a_target_that_cannot_be_there(cuda, np, lib_a):
    """Numpy is on no device."""
    with pytest.raises(DeviceError, match="numpy arrays cannot be on cuda:0"):
        dlx.convert(lib_a.made(1), to="numpy", device="cuda:0")


def test_managed_memory_is_read_by_the_host_as_it_is(cuda, np, lib_a):
    """Zero-copy, after the host has waited for the producer."""
    with lib_a.on(cuda.stream()):
        array = lib_a.made(kind=MANAGED)
        result = dlx.convert(array, to="numpy")
    assert result.ctypes.data == array.ptr and not cuda.host_read(array.ptr, N)
    assert cuda.syncs == 1
    assert dlx.plan(array, "numpy").outcome == "shared"


def test_managed_memory_for_a_consumer_of_device_memory(cuda, lib_a, lib_b):
    """The consumer gets it as device memory; dlx keeps its real device type."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        array = lib_a.made(1, kind=MANAGED)
        with lib_a.on(cuda.stream(1), 1):
            lib_a.write(array)
            result = dlx.convert(array, to="libb")
            assert (result.device, result.ptr) == ((2, 1), array.ptr) and not lib_b.read(result)
            assert dlx.convert(array, to="dlx").device == (13, 1)


# ---- without ---------------------------------------------------------------------------------------------------------


def test_host_work_never_asks_for_the_driver(cuda, np, torch):
    """Conversions and plans of host memory load nothing."""
    dlx.plan(np.zeros(3), "torch")
    dlx.convert(np.zeros(3), to="torch", copy=True)
    dlx.describe(np.zeros(3))
    assert not driver.is_loaded() and cuda.count() == 0


def test_a_consumer_that_fails_costs_nothing(cuda, lib_a, lib_b):
    """The array is let go of, the next conversion works."""
    lib_b.adapter.load = lambda tensor: 1 / 0
    array = lib_a.made()
    with pytest.raises(dlx.errors.ConversionError, match="libb refused it"):
        dlx.convert(array, to="libb")
    del lib_b.adapter.load
    assert not lib_b.read(dlx.convert(array, to="libb")) and cuda.depth == 0


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent", "cuEventCreate"])
def test_a_failing_driver_is_named(cuda, lib_a, lib_b, call):
    """Operation, name and code; nothing leaks."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        array = lib_a.made()
        cuda.fail(call, 700)
        with pytest.raises(DeviceError, match=rf"{call} failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
            dlx.convert(array, to="libb")


# ---- plans -----------------------------------------------------------------------------------------------------------


def over(cuda, kind, dtype="uint8"):
    """Memory of the first device as a tensor."""
    number = {"cuda": 2, "cuda_managed": 3, "cuda_host": 1}[kind]
    return dlx.from_pointer(cuda.alloc(N, 0, number), (N,), dtype, device=kind)


@pytest.mark.parametrize(
    ("kind", "to", "copy", "outcome", "place"),
    [
        ("cuda", "libb", True, "copied", "cuda:0"),
        ("cuda", "dlx", True, "copied", "cuda:0"),
        ("cuda", "numpy", True, "copied", "cpu"),
        ("cuda", "numpy", None, "copied", "cpu"),
        ("cuda_host", "libb", None, "shared", "cpu"),
        ("cuda_host", "numpy", False, "shared", "cpu"),
        ("cuda_host", "numpy", True, "copied", "cpu"),
        ("cuda_host", "dlx", None, "same", "cuda_host:0"),
        ("cuda_host", "dlx", True, "copied", "cpu"),
        ("cuda_managed", "libb", False, "shared", "cuda:0"),
        ("cuda_managed", "libb", True, "copied", "cuda:0"),
        ("cuda_managed", "numpy", False, "shared", "cpu"),
        ("cuda_managed", "numpy", True, "copied", "cpu"),
        ("cuda_managed", "dlx", None, "same", "cuda_managed:0"),
        ("cuda_managed", "dlx", True, "copied", "cuda:0"),
    ],
)
def test_a_plan_says_what_happens(cuda, np, lib_b, kind, to, copy, outcome, place):
    """The plan has the result's device, whether it is a copy, and the copied bytes."""
    tensor = over(cuda, kind)
    plan = dlx.plan(tensor, to, copy=copy)
    assert (plan.outcome, str(plan.device), plan.nbytes) == (outcome, place, N * (outcome == "copied"))
    result = dlx.convert(tensor, to, copy=copy)
    found = dlx.describe(result)
    assert found.device == plan.device and (found.address == tensor.data_ptr) is (outcome != "copied")


def test_pinned_memory_is_host_memory_where_it_is_asked_for(cuda):
    """Memory that the host can read is not moved, for any owner."""
    tensor = over(cuda, "cuda_host")
    for copy in (None, False):
        plan = dlx.plan(tensor, to="dlx", device="cpu", copy=copy)
        result = dlx.convert(tensor, to="dlx", device="cpu", copy=copy)
        assert (plan.outcome, plan.device.name, result.device.name) == ("shared", "cpu", "cpu")
        assert result.data_ptr == tensor.data_ptr
    assert dlx.convert(tensor, to="dlx", device="cpu", copy=True).data_ptr != tensor.data_ptr


@pytest.mark.parametrize("copy", [None, True])
def test_managed_memory_is_waited_for_before_the_host_copies_it(cuda, np, lib_a, copy):
    """The host reads it, whether it is shared or copied."""
    with lib_a.on(cuda.stream()):
        array = lib_a.made(kind=MANAGED)
        lib_a.write(array)
        cuda.forget()
        for result in (dlx.convert(array, to="numpy", copy=copy), dlx.convert([array], to="numpy", copy=copy)[0]):
            assert (result.ctypes.data == array.ptr) is (copy is None)
        assert cuda.count("cuStreamSynchronize") == 2 and not cuda.host_read(array.ptr, N)


@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_packed_elements_are_not_unpacked_on_a_device(cuda, lib_b, device):
    """Only the host unpacks; the plan refuses, with a workaround."""
    lib_b.adapter.facts |= {"subbyte": "padded"}
    lib_b.adapter.capabilities = lambda: Capabilities(dtypes=frozenset({"int4"}), **lib_b.adapter.facts)
    tensor = over(cuda, "cuda", "int4")
    plan = dlx.plan(tensor, "libb", device=device)
    with pytest.raises(LayoutError, match=r"only on the host.*Pass device='cpu'") as caught:
        dlx.convert(tensor, to="libb", device=device)
    assert str(plan.error) == str(caught.value)


def test_packed_elements_between_device_and_host(cuda, np, lib_b):
    """Unpacked after the way to the host, and before the way to a device; the plan has both bytes."""
    lib_b.adapter.facts |= {"subbyte": "padded"}
    lib_b.adapter.capabilities = lambda: Capabilities(dtypes=frozenset({"int4"}), **lib_b.adapter.facts)
    tensor = over(cuda, "cuda", "int4")
    cuda.poke(tensor.data_ptr, bytes([0x21, 0x43] * (N // 4)))
    plan = dlx.plan(tensor, "libb", device="cpu")
    assert (plan.outcome, str(plan.device), [step.do for step in plan.steps[-2:]]) == (
        "copied",
        "cpu",
        ["move", "copy"],
    )
    here = dlx.convert(tensor, to="libb", device="cpu").tensor
    assert ffi.buffer(ffi.cast("char *", here.data_ptr), 4)[:] == bytes([1, 2, 3, 4])
    held = bytearray(tensor.nbytes)
    held[:2] = b"\x21\x43"
    source = dlx.from_pointer(ffi.from_buffer(held), (N,), "int4", owner=held)
    there = dlx.convert(source, to="libb", device="cuda:1")
    assert there.device == (2, 1) and cuda.peek(there.ptr, 4) == bytes([1, 2, 3, 4])


@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_the_source_of_a_copy_may_be_written_to_at_once(cuda, lib_a, lib_b, device):
    """The copy has the values of then: its producer's next kernel waits for the copy, not for the consumer."""
    c = cuda.stream()
    with lib_a.on(cuda.stream()), lib_b.on(c):
        sources = [lib_a.made() for _ in range(3)]
        cuda.stall(c)
        results = dlx.convert(sources, to="libb", copy=True, device=device)
        assert not any(lib_a.write(source) for source in sources)
        assert not any(lib_b.read(result) for result in results)


@pytest.mark.parametrize("device", [None, "cuda:1"])
@pytest.mark.parametrize("copy", ["convert", "stack"])
@pytest.mark.parametrize("source", ["through dlx", "with streams of their own"])
def test_so_may_others(cuda, lib_a, lib_b, lib_e, source, copy, device):
    """The stream that a dlx.Tensor is a point on waits, too; for who knows which stream, the host does."""
    lib = lib_e if source == "with streams of their own" else lib_a
    with lib.on(cuda.stream()), lib_b.on(cuda.stream()):
        arrays = [lib.made() for _ in range(2)]
        given = [dlx.convert(array, to="dlx") for array in arrays] if lib is lib_a else arrays
        for number in (0, 1):  # else the host learns that the copy is made when it lets go of the source
            cuda.stall(driver.work_stream(dlx.Device(2, number)).handle, number)
        if copy == "stack":
            result = [dlx.stack(given, to="libb")]
        else:
            result = dlx.convert(given, to="libb", copy=True, device=device)
        assert not any(lib.write(array) for array in arrays)
        assert not any(lib_b.read(each) for each in result)
