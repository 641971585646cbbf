"""dlx.Tensor in device memory: streams in __dlpack__, its exchange table and its views."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
from support.cuda.fake_cuda import LEGACY, PER_THREAD, PINNED

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.native import ffi, lib
from dlx._core.stream import Stream
from dlx._registry.registry import registry
from dlx.errors import ConsumedError, CopyRequiredError, DeviceError, LayoutError, StreamError

N = 64
CUDA0, MANAGED0 = dlx.Device("cuda:0"), dlx.Device("cuda_managed:0")


class Owner:
    """Records its release."""

    def __init__(self, gone):
        self._gone = gone

    def __del__(self):
        self._gone.append(1)


def written(cuda, producer, gone=None, *, keep=None, device=CUDA0):
    """Return a tensor that a kernel on a stream has written, with a readiness event."""
    memory = cuda.alloc(N, device.id, 3 if device == MANAGED0 else 2)
    owner = Owner(gone if gone is not None else [])
    tensor = native.tensor_new(memory, (N,), None, dlx.DType("uint8"), device, 0, owner)
    if producer is None:
        return tensor
    cuda.write(producer, memory, N)
    point = driver.ready(Stream(CUDA0, producer, keep))
    return native.tensor_behind(tensor, 0, 0, None, int(ffi.cast("uintptr_t", point)))


def taken(tensor, stream, **keywords):
    """Import a tensor's capsule like a consumer on a stream; return a dlx.Tensor over it."""
    return native.capsule_claim(tensor.__dlpack__(stream=stream, max_version=(1, 0), **keywords))


# ---- __dlpack__(stream=...) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", [None, LEGACY, PER_THREAD, "own"])
def test_the_consumer_waits(cuda, consumer):
    """One wait on the consumer's stream (None = legacy), then its read does not race."""
    p = cuda.stream()
    tensor = written(cuda, p)
    c = cuda.stream() if consumer == "own" else consumer
    cuda.forget()
    got = taken(tensor, c)
    assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent")) == (0, 1)
    assert not cuda.read(c or LEGACY, got.data_ptr, N)


def test_no_wait_no_order(cuda):
    """With -1 the consumer races."""
    tensor, c = written(cuda, cuda.stream()), cuda.stream()
    got = taken(tensor, -1)
    assert cuda.ordering == 1 and cuda.read(c, got.data_ptr, N)


def test_the_same_stream_does_not_wait(cuda):
    """If the stream is known to be the producer's, no call is made."""
    p = cuda.stream()
    tensor = written(cuda, p, keep="kept")
    cuda.forget()
    got = taken(tensor, p)
    assert cuda.ordering == 0 and not cuda.read(p, got.data_ptr, N)


def test_memory_of_raw_pointers_is_taken_as_ready(cuda):
    """A tensor without an event is ready; its release still waits for the consumer."""
    gone, c = [], cuda.stream(blocking=True)
    tensor = written(cuda, None, gone)
    got = taken(tensor, c)
    assert cuda.ordering == 0
    del tensor
    cuda.stall(c)
    cuda.read(c, got.data_ptr, N)
    del got
    assert not gone
    cuda.resume(c)
    driver.release_pending()
    assert gone


def test_memory_of_raw_pointers_without_a_driver():
    """Without a driver nothing is ordered, and no call is made."""
    tensor = native.tensor_new(4096, (2,), None, dlx.DType("uint8"), CUDA0, 0, None)
    assert taken(tensor, 5).device == CUDA0


@pytest.mark.parametrize("stream", [0, -2, True, "1", 1.5, 2**70, object()])
def test_what_is_no_stream(cuda, stream):
    """Rejected before any wait, without a leak."""
    with pytest.raises(StreamError, match="found"):
        written(cuda, cuda.stream()).__dlpack__(stream=stream)
    assert cuda.count("cuStreamWaitEvent") == 0


def test_the_release_waits_for_the_consumer(cuda):
    """The owner is not released while the consumer's stream reads, even if the dlx.Tensor is gone."""
    gone, p, c = [], cuda.stream(), cuda.stream()
    native.register(stream_keeper=lambda device, handle: "kept" if (device, handle) == (0, c) else None)
    try:
        tensor = written(cuda, p, gone)
        got = taken(tensor, c)
        cuda.stall(c)
        cuda.read(c, got.data_ptr, N)
        del tensor, got
        assert not gone and driver.release_pending() == 1 and cuda.syncs == 0
        cuda.resume(c)
        assert driver.release_pending() == 0 and gone
    finally:
        native.register(stream_keeper=registry.stream_keeper)


def test_the_keeper_may_fail(cuda):
    """The function that keeps streams alive is foreign code: its exceptions are ignored."""
    native.register(stream_keeper=lambda device, handle: 1 / 0)
    try:
        gone = []
        got = taken(written(cuda, cuda.stream(), gone), cuda.stream())
        del got
        assert gone
    finally:
        native.register(stream_keeper=registry.stream_keeper)


def test_a_tensor_for_one_consumer_orders_nothing_more(cuda):
    """A tensor that is already ordered is not ordered again, for any stream of the consumer."""
    p, c = cuda.stream(), cuda.stream()
    tensor = written(cuda, p)
    driver.wait(driver.readiness_of(tensor), Stream(CUDA0, c))
    given = native.tensor_behind(tensor, 0, c, "kept")
    cuda.forget()
    got = taken(given, cuda.stream())
    assert cuda.count() == 0 and not cuda.read(c, got.data_ptr, N)


def test_views_are_as_ready_as_their_tensor(cuda):
    """A view with another device or flags has the same event."""
    for owner in (None, Owner([])):
        tensor, c = written(cuda, cuda.stream()), cuda.stream()
        view = native.tensor_view(tensor, dlx.DType("int8"), None, None, owner)
        del tensor
        assert not cuda.read(c, taken(view, c).data_ptr, N)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_capture_is_not_broken(cuda, side):
    """A consumer that would invalidate a capture gets a StreamError, and the capture continues."""
    p, c = cuda.stream(), cuda.stream()
    cuda.stall(p)
    if side == "producer":
        cuda.capture(p)
    tensor = written(cuda, p, keep="kept")
    if side == "consumer":
        cuda.capture(c)
    with pytest.raises(StreamError, match="capturing a graph"):
        tensor.__dlpack__(stream=c)
    assert taken(tensor, p).shape == (N,) or side == "consumer"
    assert cuda.end_capture(p if side == "producer" else c) == 0


def test_a_failing_driver(cuda):
    """The driver's error is raised, nothing is exported, nothing leaks."""
    tensor = written(cuda, cuda.stream())
    cuda.fail("cuStreamWaitEvent", 700)
    with pytest.raises(DeviceError, match="cuStreamWaitEvent failed with"):
        tensor.__dlpack__(stream=cuda.stream())
    assert cuda.depth == 0


def test_managed_memory_for_somebody_who_says_no_stream(cuda):
    """Numpy imports managed memory without a stream: the host waits, since it may read it."""
    tensor = written(cuda, cuda.stream(), device=MANAGED0)
    got = taken(tensor, None)
    assert got.device == MANAGED0 and not cuda.host_read(got.data_ptr, N)


# ---- to the host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [None, True])
def test_the_host_asks_for_a_copy(cuda, np, copy):
    """dl_device=(1, 0) returns a copy in host memory, created when the memory is ready, and marked as copied."""
    source = np.arange(N, dtype="uint8")
    tensor = written(cuda, cuda.stream())
    cuda.poke(tensor.data_ptr, source.tobytes())
    got = np.from_dlpack(tensor, device="cpu", copy=copy)
    assert np.array_equal(got, source)
    assert cuda.races == 0 and not cuda.host_read(got.ctypes.data, N)
    assert taken(tensor, None, dl_device=(1, 0), copy=copy).device == (1, 0)


def test_the_host_asks_for_no_copy(cuda):
    """copy=False and the host contradict each other."""
    with pytest.raises(CopyRequiredError, match="without a copy"):
        written(cuda, cuda.stream()).__dlpack__(dl_device=(1, 0), copy=False)


def test_no_buffer_and_no_values(cuda):
    """Device memory has no buffer, and a repr does not read it."""
    tensor = written(cuda, cuda.stream())
    with pytest.raises((BufferError, DeviceError)):
        memoryview(tensor)
    assert repr(tensor) == "dlx.Tensor(uint8[64], cuda:0)"


# ---- tensors that change while a call waits --------------------------------------------------------------------------

TP_CLEAR = 51  # Py_tp_clear, in the stable ABI


def clear(tensor):
    """Do to a tensor what the collector does to one in an unreachable cycle."""
    ctypes.pythonapi.PyType_GetSlot.restype = ctypes.c_void_p
    slot = ctypes.pythonapi.PyType_GetSlot(ctypes.py_object(dlx.Tensor), TP_CLEAR)
    assert ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(slot)(tensor) == 0


@pytest.mark.parametrize("call", ["to the host", "export", "borrow"])
def test_a_tensor_that_is_cleared_while_a_call_waits_is_refused(cuda, exchange, call):
    """The call waits without the GIL, so it reads the tensor's memory again; the memory it had before is freed."""
    gone, found = [], []
    tensor = written(cuda, cuda.stream(), gone)

    def work():
        try:
            if call == "to the host":
                found.append(tensor.__dlpack__(dl_device=(1, 0), copy=True))
            else:
                found.append(getattr(exchange, call)(tensor))
        except ConsumedError as error:
            found.append(error)

    work_stream()
    thread = threading.Thread(target=work)
    with cuda.slow("cuEventSynchronize" if call == "to the host" else "cuStreamWaitEvent") as slow:
        thread.start()
        assert slow.wait()
        clear(tensor)
        assert gone
    thread.join()
    assert [type(each) for each in found] == [ConsumedError], found


# ---- the exchange table ----------------------------------------------------------------------------------------------


def work_stream():
    """Return the handle of dlx's own stream."""
    return driver.work_stream(CUDA0).handle


def test_the_work_stream_is_one(cuda, exchange):
    """Each device has one stream of dlx, the same on every thread, without implicit waits."""
    first, found = exchange.stream((2, 0)), []
    thread = threading.Thread(target=lambda: found.append(exchange.stream((2, 0))))
    thread.start()
    thread.join()
    assert found == [first] == [work_stream()]
    assert first > 2 and exchange.stream((2, 1)) not in (0, first)
    assert exchange.stream((13, 0)) == first


@pytest.mark.parametrize("slot", ["export", "borrow"])
def test_what_is_given_is_ready_on_the_work_stream(cuda, exchange, slot):
    """Work on dlx's stream, which the table returns, reads the producer's values."""
    tensor = written(cuda, cuda.stream())
    address, managed = tensor.data_ptr, None
    if slot == "export":
        managed = exchange.export(tensor)
        assert int(ffi.cast("uintptr_t", managed.dl_tensor.data)) == address
    else:
        exchange.borrow(tensor)
    assert not cuda.read(work_stream(), address, N)
    if managed is not None:
        lib.dlx_managed_release(managed)


@pytest.mark.parametrize("slot", ["export", "borrow"])
def test_what_is_written_on_the_work_stream_is_seen_by_others(cuda, exchange, slot):
    """A kernel on dlx's stream may write the memory, and a later consumer waits for it."""
    tensor, c = written(cuda, cuda.stream()), cuda.stream()
    managed = exchange.export(tensor) if slot == "export" else exchange.borrow(tensor) and None
    cuda.write(work_stream(), tensor.data_ptr, N)
    assert not cuda.read(c, taken(tensor, c).data_ptr, N)
    if managed is not None:
        lib.dlx_managed_release(managed)


@pytest.mark.parametrize("slot", ["export", "borrow"])
def test_a_kernel_may_outlive_the_tensor(cuda, exchange, slot):
    """Exported memory is released when dlx's stream is done, even long after the dlx.Tensor."""
    gone = []
    tensor = written(cuda, cuda.stream(), gone)
    managed = exchange.export(tensor) if slot == "export" else exchange.borrow(tensor) and None
    w = work_stream()
    cuda.stall(w)
    cuda.read(w, tensor.data_ptr, N)
    if managed is not None:
        lib.dlx_managed_release(managed)
    del tensor
    gc.collect()
    assert not gone
    cuda.resume(w)
    driver.release_pending()
    assert gone


def test_what_a_consumer_was_given_may_be_exported_again(cuda, exchange):
    """It was not ordered again; from now on its consumers wait for dlx's stream."""
    c, d = cuda.stream(), cuda.stream()
    given = native.tensor_behind(written(cuda, c), 0, c, "kept")
    driver.order(driver.Stream(CUDA0, c), driver.Stream(CUDA0, work_stream()))
    exchange.borrow(given)
    cuda.stall(work_stream())
    cuda.write(work_stream(), given.data_ptr, N)
    assert not cuda.read(d, taken(given, d).data_ptr, N)


def test_lending_again_costs_nothing(cuda, exchange):
    """After the first time the driver is not called."""
    tensor = written(cuda, cuda.stream())
    exchange.borrow(tensor)
    cuda.forget()
    exchange.borrow(tensor)
    assert cuda.count() == 0


def test_what_was_borrowed_stays_where_it_is(cuda, exchange):
    """Shape and strides that were borrowed stay valid while the tensor lives."""
    tensor = written(cuda, cuda.stream())
    address = native.tensor_address(tensor)
    before = ffi.cast("DLTensor *", address)
    exchange.borrow(tensor)
    gc.collect()
    assert (before.ndim, before.shape[0], before.strides[0]) == (1, N, 1)


def test_what_comes_in_is_ready_when_the_work_stream_is(cuda, exchange):
    """Consumers of the new dlx.Tensor wait for the kernel on dlx's stream that wrote it."""
    base = dlx.empty((N,), "uint8", device="cuda:0")
    cuda.write(work_stream(), base.data_ptr, N)
    tensor = exchange.take(exchange.export(base))
    c = cuda.stream()
    assert not cuda.read(c, taken(tensor, c).data_ptr, N)


def test_the_allocator_allocates_on_the_device(cuda, exchange, counting):
    """Memory of the table's allocator is usable on dlx's stream immediately, and freed by its deleter."""
    from support.arrays.reference import dltensor

    call = exchange.allocate(dltensor((N,), None, (1, 8, 1), device=(2, 1)))
    assert call.rc == 0
    made = ffi.cast("DLManagedTensorVersioned *", call.out)
    address = int(ffi.cast("uintptr_t", made.dl_tensor.data))
    assert (made.dl_tensor.device.device_type, made.dl_tensor.device.device_id) == (2, 1)
    assert not cuda.write(driver.work_stream(dlx.Device("cuda:1")).handle, address, N, device=1)
    counting.delete(call.out, thread=True)
    assert cuda.blocks == 0


@pytest.mark.parametrize("name", ["cuMemAllocFromPoolAsync", "cuStreamCreate"])
def test_the_allocator_reports_the_driver(cuda, exchange, name):
    """The error names the failed driver call."""
    from support.arrays.reference import dltensor

    cuda.fail(name, 2)
    call = exchange.allocate(dltensor((N,), None, (1, 8, 1), device=(2, 0)))
    assert (call.rc, call.out, call.reports, call.kind) == (-1, None, 1, b"BufferError")
    assert name.encode() in call.message and b"CUDA_ERROR_OUT_OF_MEMORY (2)" in call.message


# ---- dlx.empty -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", (2, 1)])
def test_empty(cuda, device):
    """Memory on a device; a consumer waits for the allocation."""
    tensor = dlx.empty((2, 3), "float32", device=device)
    place = dlx.Device(device)
    assert (tensor.device, tensor.shape, tensor.strides, tensor.readonly) == (place, (2, 3), (3, 1), False)
    c = cuda.stream(place.id)
    assert not cuda.write(c, taken(tensor, c).data_ptr, 24, device=place.id)


@pytest.mark.parametrize("device", ["cuda:2", "rocm", "metal", "cuda_managed"])
def test_empty_elsewhere(cuda, device):
    """Unsupported devices are rejected by name."""
    with pytest.raises(DeviceError, match=r"cuda:2|rocm|metal|cuda_managed"):
        dlx.empty(3, "float32", device=device)


def test_empty_without_a_driver():
    """One clear sentence."""
    with pytest.raises(DeviceError, match="no CUDA driver"):
        dlx.empty(3, "float32", device="cuda")


def test_pinned_memory_is_host_memory(cuda):
    """A tensor over pinned memory has no stream."""
    memory = cuda.alloc(N, 0, PINNED)
    tensor = native.tensor_new(memory, (N,), None, dlx.DType("uint8"), (3, 0), 0, None)
    with pytest.raises(StreamError, match="host memory has no stream"):
        tensor.__dlpack__(stream=1)
    assert taken(tensor, None).device == (3, 0)


def test_pinned_memory_is_stacked(cuda):
    """On the host, for any device, or on a device; new pinned memory is rejected by name."""
    rows = []
    for number in range(2):
        memory = cuda.alloc(N, 0, PINNED)
        rows.append(native.tensor_new(memory, (N,), None, dlx.DType("uint8"), (3, number), 0, None))
        memoryview(rows[-1])[:] = bytes([number + 1]) * N
    whole = dlx.stack(rows, "dlx")
    assert whole.device == (1, 0) and whole.shape == (2, N)
    assert memoryview(whole).tolist() == [[1] * N, [2] * N]
    assert dlx.stack(rows, "dlx", device="cuda:1").device == (2, 1)
    with pytest.raises(DeviceError, match="to cuda_host:0"):
        dlx.stack(rows, "dlx", device="cuda_host")


def test_device_memory_of_dlx_is_no_output(cuda, np):
    """It names the device, and what to pass instead."""
    for out in (dlx.empty(4, "float32", "cuda"), dlx.empty((1, 4), "float32", "cuda:1")):
        call = dlx.convert if out.ndim == 1 else lambda x, out: dlx.stack([x], out=out)
        with pytest.raises(LayoutError, match=r"at out: it is on cuda:.\. Pass to= and device= instead of out=\."):
            call(np.zeros(4, "float32"), out=out)
