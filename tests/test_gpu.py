"""On a real CUDA device: `pytest -m gpu`. Skipped where there is none. docs/gpu.md says what ran, and on what."""

from __future__ import annotations

import gc
import threading
import time

import pytest

import dlx
from dlx import cuda as driver
from dlx import native
from dlx.errors import DeviceError, StreamError

pytestmark = pytest.mark.gpu

N = 1 << 22
SLOW = 300_000_000  # cycles: some 0.2 s


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The real driver, or a skip."""
    monkeypatch.delenv("DLX_CUDA_DRIVER")
    native.lib.dlx_cuda_forget()
    try:
        driver.require()
    except DeviceError as error:
        pytest.skip(error.reason)
    yield
    gc.collect()
    end = time.monotonic() + 10
    while driver.release_pending() and time.monotonic() < end:
        time.sleep(0.01)
    assert driver.release_pending() == 0
    native.lib.dlx_cuda_forget()


@pytest.fixture
def torch(gpu):
    """Its torch, with a device, or a skip."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA device")
    return module


@pytest.fixture
def cupy(gpu):
    """Its cupy, with a device, or a skip."""
    return pytest.importorskip("cupy")


# ---- shared memory ---------------------------------------------------------------------------------------------------


def address(array):
    """The address of any of the arrays."""
    return dlx.describe(array).address or dlx.convert(array, to="dlx").data_ptr


def test_torch_and_cupy(torch, cupy):
    """Both ways by address, values right."""
    tensor = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    array = dlx.convert(tensor, to="cupy", copy=False)
    assert array.data.ptr == tensor.data_ptr() and array.tolist() == tensor.tolist()
    back = dlx.convert(array[::2], to="torch", copy=False)
    assert back.data_ptr() == tensor.data_ptr() and back.tolist() == tensor[::2].tolist()


@pytest.mark.parametrize("name", ["float32", "float16", "int64", "uint8", "bool", "complex64"])
def test_torch_and_dlx(torch, name):
    """Both ways by address, each dtype."""
    tensor = torch.ones(5, dtype=getattr(torch, name), device="cuda")
    middle = dlx.convert(tensor, to="dlx")
    back = dlx.convert(middle, to="torch", copy=False)
    assert middle.data_ptr == back.data_ptr() == tensor.data_ptr() and back.tolist() == tensor.tolist()


def test_interface(torch):
    """An object with nothing but __cuda_array_interface__ is a source."""
    tensor = torch.arange(8, device="cuda")
    plain = type("Plain", (), {"__cuda_array_interface__": tensor.__cuda_array_interface__, "keep": tensor})()
    assert dlx.convert(plain, to="torch").data_ptr() == tensor.data_ptr()


# ---- order -----------------------------------------------------------------------------------------------------------


def late_ones(torch):
    """A tensor of zeros that a slow kernel on the current stream turns into ones."""
    tensor = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW)
    tensor.fill_(1)
    return tensor


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("to", ["torch", "cupy"])
def test_another_stream_reads_finished_data(torch, ordered, to):
    """With order the sum is whole; without it is not, which shows that the test can fail."""
    target = pytest.importorskip(to)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = dlx.convert(late_ones(torch), to="dlx", stream=None if ordered else -1)
    context = torch.cuda.stream(torch.cuda.Stream()) if to == "torch" else target.cuda.Stream(non_blocking=True)
    with context:
        total = float(dlx.convert(tensor, to=to).sum())
    torch.cuda.synchronize()
    assert (total == N) is ordered


def test_the_host_reads_finished_data(torch):
    """A copy to numpy waits for the producer's stream."""
    np = pytest.importorskip("numpy")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert dlx.convert(late_ones(torch), to="numpy").sum(dtype=np.float64) == N


def test_nothing_waits_on_the_host(torch):
    """Converting returns while the producer's kernel still runs."""
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = late_ones(torch)
        before = torch.cuda.Event()
        before.record()
        middle = dlx.convert(tensor, to="dlx")
    with torch.cuda.stream(torch.cuda.Stream()):
        result = dlx.convert(middle, to="torch")
        assert not before.query()
        assert result.sum().item() == N


# ---- lifetime --------------------------------------------------------------------------------------------------------


def test_memory_is_not_reused_while_it_is_read(torch):
    """Dropping the result while a slow stream has yet to read it: the allocator's next tensor lies elsewhere."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        tensor = torch.ones(N, device="cuda")
        middle = dlx.convert(tensor, to="dlx")
        where = tensor.data_ptr()
    with torch.cuda.stream(consumer):
        result = dlx.convert(middle, to="torch")
        torch.cuda._sleep(SLOW)
        total = result.sum()
    del tensor, middle, result
    gc.collect()
    assert driver.release_pending() == 1
    with torch.cuda.stream(producer):
        fresh = torch.zeros(N, device="cuda")
        assert fresh.data_ptr() != where
    torch.cuda.synchronize()
    assert driver.release_pending() == 0 and total.item() == N


def test_deleted_on_another_thread(torch):
    """Deleters run without the GIL's owner, on a thread that has no context."""
    held = [dlx.convert(dlx.empty(N, "float32", device="cuda"), to="torch")]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    torch.cuda.synchronize()


def test_conversions_leak_neither_memory_nor_events(torch):
    """10^5 conversions between two streams."""
    with torch.cuda.stream(torch.cuda.Stream()):
        middle = dlx.convert(torch.ones(1024, device="cuda"), to="dlx")
    live = native.live()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(1000):
            dlx.convert(middle, to="torch")
        torch.cuda.synchronize()
        driver.release_pending()
        free, _ = torch.cuda.mem_get_info()
        for _ in range(100_000):
            dlx.convert(middle, to="torch")
        torch.cuda.synchronize()
        driver.release_pending()
        assert native.live() == live
        assert free - torch.cuda.mem_get_info()[0] < 1 << 22


# ---- capture ---------------------------------------------------------------------------------------------------------


def test_one_stream_in_a_capture(torch):
    """A conversion on the capturing stream becomes part of nothing, and the graph replays."""
    static = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = dlx.convert(dlx.convert(static, to="dlx"), to="torch")
        result += 1
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [2.0] * 16


def test_a_capture_is_not_broken(torch):
    """Across streams it is refused by name, and the capture goes on."""
    static, graph = torch.zeros(16, device="cuda"), torch.cuda.CUDAGraph()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(SLOW)
        tensor = dlx.convert(torch.ones(16, device="cuda"), to="dlx")
    with torch.cuda.graph(graph):
        static += 1
        with pytest.raises(StreamError):
            dlx.convert(tensor, to="torch")
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 16


# ---- kinds of memory, moves ------------------------------------------------------------------------------------------


def test_managed_memory(cupy):
    """Under its true code; read by the host as it is, when the kernels are done."""
    memory = cupy.cuda.malloc_managed(4 * N)
    array = cupy.ndarray((N,), "float32", memory)
    array.fill(2)
    assert dlx.describe(array).device.name == "cuda_managed"
    result = dlx.convert(array, to="numpy", copy=False)
    assert result.ctypes.data == memory.ptr and (result == 2).all()


def test_pinned_memory(torch):
    """Pinned tensors of torch are host memory, and go to the device as a copy."""
    np = pytest.importorskip("numpy")
    tensor = torch.ones(N, pin_memory=True)
    assert np.shares_memory(dlx.convert(tensor, to="numpy"), tensor.numpy())
    assert dlx.convert(dlx.convert(tensor, to="numpy"), to="torch", device="cuda").sum().item() == N


@pytest.mark.parametrize("step", [1, 2, -3])
def test_numpy_to_the_device_and_back(torch, step):
    """Values survive, strided views too, and the plan says the bytes."""
    np = pytest.importorskip("numpy")
    source = np.arange(120, dtype="int32").reshape(10, 12)[:, ::step]
    assert dlx.plan(source, "torch", device="cuda").nbytes == source.nbytes
    there = dlx.convert(source, to="torch", device="cuda")
    assert there.device.type == "cuda" and np.array_equal(dlx.convert(there, to="numpy"), source)


def test_two_devices(torch):
    """From cuda:1 while cuda:0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    tensor = torch.arange(8, device="cuda:1")
    middle = dlx.convert(tensor, to="dlx")
    assert middle.device == (2, 1) and torch.cuda.current_device() == 0
    assert dlx.convert(middle, to="torch").data_ptr() == tensor.data_ptr()
    assert dlx.convert(middle, to="torch", device="cuda:0").tolist() == list(range(8))


def test_empty(torch):
    """Memory of dlx's own, used by torch at once."""
    tensor = dlx.convert(dlx.empty((4, N // 4), "float32", device="cuda"), to="torch")
    assert tensor.fill_(3).sum().item() == 3.0 * N


def test_what_c_is_lent(torch):
    """The exchange table's work stream is real."""
    assert driver.work_stream(dlx.Device("cuda")).handle > 2
