"""Pools, new device memory, and the GIL during driver calls."""

from __future__ import annotations

import gc
import threading

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import THREAD_LOCAL

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.stream import Stream
from dlx.errors import CopyRequiredError, DeviceError, ReadOnlyError

N = 64
CUDA0, CUDA1 = dlx.Device("cuda:0"), dlx.Device("cuda:1")
MIB = 1 << 20


def empty(device=CUDA0, size=N):
    """Allocate memory with dlx."""
    return dlx.empty(size, "uint8", device)


# ---- the pool --------------------------------------------------------------------------------------------------------


def test_one_pool_a_device(cuda):
    """It is created with the first memory, and not shared."""
    made = [empty(device) for device in (CUDA0, CUDA1, CUDA0)]
    assert cuda.count("cuMemPoolCreate") == 2 and cuda.count("cuMemPoolSetAttribute") == 4
    assert cuda.count("cuMemAllocFromPoolAsync") == 3 and cuda.count("cuMemAllocAsync", "cuMemAlloc") == 0
    del made
    assert cuda.count("cuMemFreeAsync") == 3 and cuda.blocks == 0


@pytest.mark.parametrize("has_threshold", [True, False])
def test_a_loop_of_moves_uses_blocks_again(cuda, np, has_threshold):
    """The pool keeps its blocks across waits; without the threshold it would allocate again for each move."""
    array = np.zeros(MIB, "uint8")
    if not has_threshold:
        cuda.fail("cuMemPoolSetAttribute", 1)
    cuda.forget()
    for _ in range(10):
        dlx.convert(array, to="dlx", device="cuda:0")
        driver.synchronize(driver.work_stream(CUDA0))
    assert cuda.syncs == 20
    assert (cuda.mapped, cuda.returned) == ((1, 0) if has_threshold else (10, 10))


def test_the_pool_gives_back_what_is_above_its_threshold(cuda):
    """It keeps 256 MiB."""
    made = [empty(size=100 * MIB) for _ in range(4)]
    cuda.forget()
    del made
    driver.synchronize(driver.work_stream(CUDA0))
    assert cuda.returned == 2


@pytest.mark.parametrize("peers", [True, False])
def test_peers_see_the_memory(cuda, peers):
    """Another device's kernel can read it, if the devices support this."""
    cuda.set_peers(peers)
    tensor, c = empty(CUDA1), cuda.stream(0)
    driver.wait(driver.readiness_of(tensor), Stream(CUDA0, c))
    assert cuda.count("cuMemPoolSetAccess") == peers
    cuda.read(c, tensor.data_ptr, N, 0)
    assert bool(cuda.misuses) is not peers
    cuda.clear_report()


def test_a_pool_that_no_peer_may_use(cuda):
    """If access fails, allocation still works; moves between the devices continue."""
    cuda.set_peers(True)
    cuda.fail("cuMemPoolSetAccess", 217)
    tensor = empty(CUDA1)
    assert dlx.convert(tensor, to="dlx", device="cuda:0").device == CUDA0


def test_memory_goes_back_in_stream_order(cuda):
    """Memory that is released while dlx's stream uses it is not reused before that is done; nothing waits."""
    own = driver.work_stream(CUDA0)
    tensor = empty()
    address = tensor.data_ptr
    cuda.stall(own.handle)
    cuda.write(own.handle, address, N)
    del tensor
    again, c = empty(), cuda.stream()
    driver.wait(driver.readiness_of(again), Stream(CUDA0, c))
    assert again.data_ptr == address and not cuda.write(c, address, N)
    assert cuda.syncs == 0 and cuda.races == 0


def test_a_pool_that_cannot_be_made(cuda):
    """The error names the call, and the next request tries again."""
    cuda.fail("cuMemPoolCreate", 2)
    with pytest.raises(DeviceError, match=r"cuMemPoolCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        empty()
    assert empty().device == CUDA0 and cuda.depth == 0


# ---- no record without a wait ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "calls", "entered", "modes"), [("mine", 30, 6, 6), ("dlx", 60, 12, 18)], ids=["consumer's", "dlx's"]
)
def test_calls_of_three_moves(cuda, np, monkeypatch, to, calls, entered, modes):
    """Three copies and three waits, into memory of the consumer or of dlx, without a record."""
    framework = gpulib.install(monkeypatch, "mine", cuda, gpulib.FreshAdapter)
    array = np.zeros(N, "uint8")
    with framework.on(cuda.stream()):
        dlx.convert(array, to=to, device="cuda:0")
        cuda.forget()
        for _ in range(3):
            dlx.convert(array, to=to, device="cuda:0")
    assert cuda.copies() == cuda.syncs - 1 == 3
    assert cuda.count("cuMemAllocFromPoolAsync") == cuda.count("cuMemFreeAsync") == (3 if to == "dlx" else 0)
    assert cuda.ordering == cuda.count("cuEventCreate", "cuEventQuery") == 0
    assert cuda.count("cuCtxPushCurrent") == entered
    assert cuda.count("cuThreadExchangeStreamCaptureMode") == modes
    assert cuda.count() == calls


class Allocating(gpulib.QuickAdapter):
    """The adapter of a framework whose arrays take the fast path, and which allocates the memory of copies."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.devices = gpulib.NewDevices(framework)


@pytest.mark.parametrize("to", ["mine", "dlx"])
def test_a_move_is_a_copy(cuda, np, monkeypatch, to):
    """copy=False refuses each one, in the first call and after the fast path knows the target."""
    framework = gpulib.install(monkeypatch, "mine", cuda, Allocating)
    array = np.zeros(N, "uint8")
    with framework.on(cuda.stream()):
        for _ in range(3):
            for options in ({"device": "cuda:0", "copy": False}, {"copy": False, "device": "cuda:0", "detach": True}):
                with pytest.raises(CopyRequiredError):
                    dlx.convert(array, to=to, **options)
            dlx.convert(array, to=to, device="cuda:0")
            dlx.convert(array, to=to, device="cuda:0", copy=True)
        fixed, options = np.broadcast_to(array, N), {"to": to, "device": "cuda:0", "readonly": "error"}
        planned = dlx.plan(fixed, **options)
        if planned.ok:
            dlx.convert(fixed, **options)
        else:
            with pytest.raises(ReadOnlyError):
                dlx.convert(fixed, **options)


def test_fresh_memory_is_ordered_when_somebody_takes_it(cuda, np):
    """A move has already waited for its memory; other memory costs one record and one wait at its export."""
    moved, c = dlx.convert(np.zeros(N, "uint8"), to="dlx", device="cuda:0"), cuda.stream()
    cuda.forget()
    given = [moved.__dlpack__(stream=c)]
    assert cuda.ordering == 0 and not cuda.read(c, moved.data_ptr, N)
    fresh = empty()
    assert cuda.ordering == 0
    given.append(fresh.__dlpack__(stream=c))
    assert cuda.ordering == 2 and not cuda.write(c, fresh.data_ptr, N)


@pytest.mark.parametrize("is_done", [True, False])
def test_memory_of_before_a_capture(cuda, is_done):
    """Finished work needs no edge in the graph; unfinished work is refused, and the capture continues."""
    tensor, own, c = empty(), driver.work_stream(CUDA0), cuda.stream()
    if not is_done:
        cuda.stall(own.handle)
        cuda.write(own.handle, tensor.data_ptr, N)
    cuda.capture(c, THREAD_LOCAL)
    if is_done:
        tensor.__dlpack__(stream=c)
    else:
        with pytest.raises(dlx.errors.StreamError, match="capturing"):
            tensor.__dlpack__(stream=c)
    assert cuda.end_capture(c) == 0


# ---- the GIL ---------------------------------------------------------------------------------------------------------

LONG = (
    *("cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuMemPoolCreate", "cuMemAllocFromPoolAsync"),
    *("cuMemAlloc", "cuMemFree", "cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpyPeerAsync", "cuStreamSynchronize"),
    "cuEventSynchronize",
)


def raw(cuda):
    """Memory for which dlx makes no call."""
    return native.tensor_new(cuda.alloc(N, 1), (N,), None, dlx.DType("uint8"), CUDA1, 0, None)


def allocated(exchange):
    """Allocate by the exchange table."""
    from support.arrays.reference import dltensor

    made = exchange.allocate(dltensor((N,), None, (1, 8, 1), device=(2, 1)))
    native.lib.dlx_managed_release(native.ffi.cast("DLManagedTensorVersioned *", made.out))


FIRST = {
    "empty": lambda cuda, exchange, np: empty(CUDA1),
    "from the host": lambda cuda, exchange, np: dlx.convert(np.zeros(N), to="dlx", device="cuda:1"),
    "to the host": lambda cuda, exchange, np: dlx.convert(raw(cuda), to="numpy"),
    "to another device": lambda cuda, exchange, np: dlx.convert(raw(cuda), to="dlx", device="cuda:0"),
    "a capsule": lambda cuda, exchange, np: raw(cuda).__dlpack__(stream=cuda.stream(1)),
    "a capsule of a copy": lambda cuda, exchange, np: raw(cuda).__dlpack__(dl_device=(1, 0)),
    "lent by the table": lambda cuda, exchange, np: exchange.borrow(raw(cuda)),
    "taken by the table": lambda cuda, exchange, np: exchange.take(exchange.export(raw(cuda))),
    "the table's stream": lambda cuda, exchange, np: exchange.stream((2, 1)),
    "the table's memory": lambda cuda, exchange, np: allocated(exchange),
}


@pytest.mark.parametrize("first", FIRST)
def test_no_long_call_holds_the_gil(cuda, exchange, np, first):
    """First calls on a device that may take long release the GIL, including the release of memory."""
    FIRST[first](cuda, exchange, np)
    gc.collect()
    driver.release_pending()
    assert cuda.count(*LONG) > 0
    assert {name: cuda.held(name) for name in LONG if cuda.held(name)} == {}


SLOW = {
    "cuMemAllocFromPoolAsync": empty,
    "cuMemPoolCreate": empty,
    "cuStreamCreate": empty,
    "cuDevicePrimaryCtxRetain": empty,
}


@pytest.mark.parametrize("name", SLOW)
def test_others_run_while_the_driver_takes_its_time(cuda, name):
    """A thread drops device memory while another waits in the driver: otherwise they would deadlock."""
    dropped = empty(CUDA1)
    with cuda.slow(name) as call:
        thread = threading.Thread(target=SLOW[name])
        thread.start()
        assert call.wait()
        del dropped
    thread.join()
    driver.release_pending()
    assert cuda.misuses == 0, cuda.report  # no wait timed out


def test_two_threads_lend_one_tensor(cuda, exchange):
    """The second thread finds the tensor already moved to dlx's stream when the driver returns."""
    gone = []

    class Owner:
        """Records its release."""

        def __del__(self):
            gone.append(1)

    p = cuda.stream()
    tensor = native.tensor_new(cuda.alloc(N), (N,), None, dlx.DType("uint8"), CUDA0, 0, Owner())
    point = driver.ready(Stream(CUDA0, p))
    tensor = driver.when(tensor, point)
    own = driver.work_stream(CUDA0).handle
    with cuda.slow("cuStreamWaitEvent") as call:
        thread = threading.Thread(target=exchange.borrow, args=[tensor])
        thread.start()
        assert call.wait()
        exchange.borrow(tensor)
        address = native.tensor_address(tensor)
    thread.join()
    assert native.tensor_address(tensor) == address
    cuda.stall(own)
    cuda.read(own, tensor.data_ptr, N)
    del tensor, point, thread
    gc.collect()
    assert not gone
    cuda.resume(own)
    driver.release_pending()
    assert gone == [1]
