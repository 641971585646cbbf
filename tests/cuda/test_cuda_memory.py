"""Device memory and copies on the recording driver, which really copies and tracks the order."""

from __future__ import annotations

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import DEVICE, MANAGED, PINNED

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.stream import Stream
from dlx.errors import DeviceError, LayoutError, StreamError


def transfer(tensor, target, stream, wait):
    """Copy between the host and a device on the stream with a handle."""
    driver.transfer(tensor, target, Stream(CUDA0, stream), wait)


CUDA0, CUDA1 = dlx.Device("cuda:0"), dlx.Device("cuda:1")
HOST = dlx.Device("cpu")


def like(shape, dtype="int32", strides=None):
    """Return a tensor with only shape and dtype."""
    return native.tensor_new(256, shape, strides, dlx.DType(dtype), HOST, 0, None)


def on(device, shape, dtype="int32"):
    """Return a new dlx.Tensor on a device."""
    return native.tensor_on_device(like(shape, dtype), False, device.id)


def host(np, array):
    """Return a host tensor over a numpy array."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    pointer = array.__array_interface__["data"][0]
    return native.tensor_new(pointer, array.shape, strides, dlx.DType(array.dtype.name), HOST, 0, array)


def view(tensor, shape, strides, offset=0):
    """Return a view of a device tensor's memory."""
    item = tensor.dtype.bits // 8
    return native.tensor_new(tensor.data_ptr + offset * item, shape, strides, tensor.dtype, tensor.device, 0, tensor)


def work(tensor):
    """Return dlx's own stream of the tensor's device."""
    return driver.work_stream(tensor.device).handle


# ---- allocation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CUDA0, CUDA1])
def test_fresh_memory(cuda, device):
    """It is aligned, row-major, on the requested device, ordered on dlx's stream, and freed once."""
    tensor = on(device, (3, 5))
    assert (tensor.device, tensor.shape, tensor.strides) == (device, (3, 5), (5, 1))
    assert tensor.data_ptr % 256 == 0 and driver.where(tensor.data_ptr) == device
    assert cuda.count("cuMemAllocFromPoolAsync") == 1 and cuda.blocks == 1
    consumer = cuda.stream(device.id)
    assert cuda.write(consumer, tensor.data_ptr, 60, device.id)  # the allocation itself is on a stream
    cuda.clear_report()
    driver.wait(driver.readiness_of(tensor), Stream(device, consumer))
    assert not cuda.write(consumer, tensor.data_ptr, 60, device.id)
    del tensor
    assert cuda.count("cuMemFreeAsync") == 1 and cuda.blocks == 0


def test_a_device_without_pools(cuda):
    """The error has the driver's words; nothing is allocated by other means."""
    cuda.set_pools(False)
    with pytest.raises(DeviceError, match="cuMemPoolCreate failed with CUDA_ERROR_NOT_SUPPORTED"):
        on(CUDA0, (4,))
    assert cuda.blocks == 0 and cuda.depth == 0


def test_no_elements_no_memory(cuda):
    """An empty tensor has no memory."""
    tensor = on(CUDA0, (0, 3))
    assert tensor.data_ptr == 0 and cuda.blocks == 0


def test_too_much_memory(cuda):
    """The error has the size, the device and the driver's message; nothing leaks."""
    with pytest.raises(DeviceError, match=r"FromPoolAsync of \d+ bytes on cuda:1 failed with CUDA_ERROR_OUT_OF"):
        on(CUDA1, (1 << 42,))
    assert cuda.depth == 0 and native.live() == native.live()


def test_memory_during_a_capture_elsewhere(cuda):
    """Allocation and release do not disturb a capture in the strictest mode."""
    cuda.capture(other := cuda.stream())
    tensor = on(CUDA0, (4,))
    del tensor
    driver.release_pending()
    assert cuda.end_capture(other) == 0


@pytest.mark.parametrize("step", [1, 2], ids=["one run", "rows"])
def test_copies_during_a_capture_elsewhere(cuda, np, step):
    """Copies of pageable memory do not disturb it either, in either direction."""
    array = np.arange(64, dtype="int32").reshape(8, 8)[:, ::step]
    cuda.capture(other := cuda.stream())
    tensor = dlx.convert(array, to="dlx", device="cuda")
    back = dlx.convert(tensor, to="numpy")
    assert (back == array).all() and cuda.end_capture(other) == 0


@pytest.mark.parametrize("step", [1, 2], ids=["one run", "rows"])
@pytest.mark.parametrize("capturing", [False, True], ids=["no capture", "capture"])
def test_host_memory_for_a_consumer_that_captures(cuda, monkeypatch, np, capturing, step):
    """It is refused before anything is allocated or copied; without a capture it is copied on the consumer's stream."""
    framework = gpulib.install(monkeypatch, "mine", cuda, gpulib.FreshAdapter)
    array = np.arange(gpulib.N, dtype="uint8").reshape(8, 8)[:, ::step]
    with framework.on(cuda.stream()) as stream:
        cuda.forget()
        if capturing:
            blocks = cuda.blocks
            cuda.capture(stream.ptr)
            with pytest.raises(StreamError, match="capturing a graph"):
                dlx.convert(array, to="mine", device="cuda:0")
            assert cuda.blocks == blocks and cuda.copies() == 0
            assert cuda.end_capture(stream.ptr) == 0 and cuda.nodes == 0
            return
        assert dlx.plan(array, to="mine", device="cuda:0").outcome == "copied"
        result = dlx.convert(array, to="mine", device="cuda:0")
        assert [call.split()[1] for call in cuda.log if call.startswith("cuMemcpy")] == ["s1"]
    assert (dlx.convert(result.tensor, to="numpy") == array).all()


def test_a_copy_that_is_waited_for_enters_no_graph(cuda, np):
    """It is refused before anything is enqueued; if it is too scattered for the driver, it always waits."""
    host = dlx.convert(np.zeros((300, 300, 4, 3), "uint8"), to="dlx")
    scattered = native.tensor_new(host.data_ptr, (300, 300, 2, 2), (3600, 12, 7, 1), host.dtype, host.device, 0, host)
    cuda.capture(stream := cuda.stream())
    for source, wait in ((host, True), (scattered, True), (scattered, False)):
        target = on(CUDA0, source.shape, source.dtype)
        cuda.forget()
        for pair in ((source, target), (target, source)):
            if wait or pair[0] is source:
                with pytest.raises(StreamError, match="capturing a graph"):
                    transfer(*pair, stream, wait)
        assert cuda.count("cuMemcpyAsync", "cuMemcpy2DAsync") == 0
    assert cuda.end_capture(stream) == 0


def test_what_is_too_scattered_for_the_driver_says_what_to_do(cuda, monkeypatch):
    """Copies between devices raise, for memory of dlx and of the consumer."""
    gpulib.install(monkeypatch, "mine", cuda, gpulib.FreshAdapter)
    whole = on(CUDA0, (300, 300, 4, 3), dlx.DType("uint8"))
    view = native.tensor_new(whole.data_ptr, (300, 300, 2, 2), (3600, 12, 7, 1), whole.dtype, CUDA0, 0, whole)
    for target in ("mine", "dlx"):
        with pytest.raises(LayoutError, match="too scattered") as caught:
            dlx.convert(view, to=target, copy=True)
        assert caught.value.fix == "Make it contiguous in its own framework first."


def test_it_waits_for_its_last_user(cuda):
    """Memory is not freed while a consumer's stream still reads it."""
    tensor, c = on(CUDA0, (16,)), cuda.stream()
    address = tensor.data_ptr
    driver.wait(driver.readiness_of(tensor), Stream(CUDA0, c))
    given = native.tensor_behind(tensor, 0, c, "kept")
    cuda.stall(c)
    cuda.read(c, address, 64)
    del tensor, given
    assert cuda.is_alive(address)
    cuda.resume(c)
    driver.release_pending()
    assert not cuda.is_alive(address) and cuda.races == 0


def test_ten_thousand_tensors_leak_nothing(cuda):
    """Neither memory nor events leak."""
    for _ in range(3000):
        on(CUDA0, (4,))
    assert cuda.blocks == 0 and cuda.events <= 2


# ---- copies ----------------------------------------------------------------------------------------------------------

VIEWS = {
    "compact": lambda a: a,
    "transposed": lambda a: a.transpose(2, 0, 1),
    "every second": lambda a: a[:, ::2],
    "rows": lambda a: a[1:3, 1:4],
    "last axis": lambda a: a[..., ::3],
    "backwards": lambda a: a[::-1, :, ::-1],
    "broadcast": lambda a: a[:1].repeat(1, 0),
    "one": lambda a: a[2:3, 3:4, 4:5].reshape(()),
    "none": lambda a: a[:, :0],
}


@pytest.fixture
def array(np):
    """Return an array with different values."""
    return np.arange(4 * 5 * 6, dtype="int32").reshape(4, 5, 6)


@pytest.mark.parametrize("name", VIEWS)
def test_from_the_host_and_back(cuda, np, array, name):
    """Every layout has the right values on the device and back; the host continues immediately."""
    source = VIEWS[name](array)
    there = on(CUDA0, source.shape)
    transfer(host(np, source), there, work(there), True)
    if source.size:
        assert not cuda.host_write(source.__array_interface__["data"][0], 4)
    back = np.empty_like(source)
    transfer(there, host(np, back), work(there), True)
    assert np.array_equal(back, source) and cuda.races == 0
    if source.size:
        assert not cuda.host_read(back.__array_interface__["data"][0], back.nbytes)


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("broadcast", "none")])
@pytest.mark.parametrize("target", [HOST, CUDA0, CUDA1], ids=str)
def test_from_a_strided_view_on_a_device(cuda, np, array, name, target):
    """Strided device memory is copied correctly to the host, within the device, and to another device."""
    whole = on(CUDA0, array.shape)
    transfer(host(np, array), whole, work(whole), True)
    expected = VIEWS[name](array)
    start = (expected.__array_interface__["data"][0] - array.__array_interface__["data"][0]) // 4
    source = view(whole, expected.shape, tuple(stride // 4 for stride in expected.strides), start)
    back = np.empty(expected.shape, "int32")
    if target == HOST:
        transfer(source, host(np, back), work(whole), True)
    else:
        there = on(target, expected.shape)
        driver.order(driver.work_stream(CUDA0), driver.work_stream(target))
        transfer(source, there, work(there), False)
        transfer(there, host(np, back), work(there), True)
    assert np.array_equal(back, expected) and cuda.races == 0, cuda.report


SHAPES = {
    "compact": (lambda a: a, 1, 0),
    "wide rows": (lambda a: a[:, 1], 0, 1),
    "narrow rows": (lambda a: a[..., :3], 1, 0),
    "boxes": (lambda a: a[:, 1:6:2, :512], 1, 0),
    "reversed": (lambda a: a[::-1], 1, 0),
    "one element each": (lambda a: a[..., ::-1], 1, 0),
    "broadcast": (lambda a: a[:, :1, :1] + a[:1, :1, :8] * 0, 1, 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_for_copies_from_and_to_the_host(cuda, np, shape):
    """One run, or one box of wide rows; everything else is packed into one run."""
    view_of, runs, boxes = SHAPES[shape]
    array = view_of(np.arange(8 * 8 * 1024, dtype="int32").reshape(8, 8, 1024))
    there = on(CUDA0, array.shape)
    cuda.forget()
    transfer(host(np, array), there, work(there), True)
    assert (cuda.count("cuMemcpyAsync"), cuda.count("cuMemcpy2DAsync")) == (runs, boxes)
    back = np.empty(array.shape, "int32")
    transfer(there, host(np, back), work(there), True)
    assert np.array_equal(back, array)


def test_a_few_large_boxes_are_not_packed(cuda, np):
    """A call takes as long as packing 64 KiB."""
    array = np.arange(4 * 64 * 2048, dtype="int32").reshape(4, 64, 2048)[:, :, :1024]
    there = on(CUDA0, array.shape)
    whole = on(CUDA0, (4, 64, 2048))
    cuda.forget()
    transfer(host(np, array[:, ::2]), view(there, (4, 32, 1024), (64 * 1024, 1024, 1)), work(there), True)
    assert cuda.count("cuMemcpy2DAsync") == 4 and cuda.count("cuMemcpyAsync") == 0
    del whole


def test_a_sparse_view_is_not_fetched_whole(cuda, np):
    """A column of a wide array on the device comes back as a box, without the bytes between its elements."""
    whole = on(CUDA0, (1000, 4096), "uint8")
    column = view(whole, (1000, 4), (4096, 1))
    back = np.empty((1000, 4), "uint8")
    cuda.forget()
    transfer(column, host(np, back), work(whole), True)
    assert cuda.count("cuMemcpy2DAsync") == 1 and cuda.count("cuMemcpyAsync") == 0


@pytest.mark.parametrize("rows", [3, 2000])
def test_a_box_that_the_driver_refuses(cuda, np, rows):
    """Within a device a driver may refuse a pitch: the rows are copied one by one."""
    array = np.arange(rows * 6, dtype="int32").reshape(rows, 6)
    whole, there = on(CUDA0, (rows, 6)), on(CUDA0, (rows, 4))
    transfer(host(np, array), whole, work(whole), True)
    cuda.fail("cuMemcpy2DAsync", 1)
    cuda.forget()
    transfer(view(whole, (rows, 4), (6, 1)), there, work(there), True)
    assert cuda.count("cuMemcpyAsync") == rows
    back = np.empty((rows, 4), "int32")
    transfer(there, host(np, back), work(there), True)
    assert np.array_equal(back, array[:, :4])


def test_scattered_elements_go_through_the_host_in_one_piece(cuda, np):
    """Thousands of calls become one."""
    source = np.arange(40000, dtype="int32").reshape(200, 200)[::-1, ::-1]
    there = on(CUDA0, source.shape)
    cuda.forget()
    transfer(host(np, source), there, work(there), False)
    assert cuda.count("cuMemcpyAsync", "cuMemcpy2DAsync") == 1
    assert cuda.syncs == 1  # waits, since the packed memory is freed
    mirrored = view(there, (200, 200), (-200, -1), 39999)
    back = np.empty((200, 200), "int32")
    transfer(mirrored, host(np, back), work(there), False)
    assert cuda.count("cuMemcpyAsync", "cuMemcpy2DAsync") == 2 and cuda.syncs == 2
    assert np.array_equal(back, source[::-1, ::-1])
    with pytest.raises(LayoutError, match="too scattered"):
        transfer(mirrored, on(CUDA0, (200, 200)), work(there), True)


@pytest.mark.parametrize("wait", [True, False])
def test_waiting_for_a_copy(cuda, np, wait):
    """With `wait` the host may use both sides immediately; without, it would race."""
    source = np.arange(8, dtype="int32")
    there = on(CUDA0, (8,))
    transfer(host(np, source), there, work(there), wait)
    assert cuda.host_write(source.__array_interface__["data"][0], 32) is not wait
    assert cuda.syncs == (1 if wait else 0)


def test_a_copy_on_a_stream_is_ordered_there(cuda):
    """A copy between devices runs on the requested stream only."""
    source, target, c = on(CUDA0, (8,)), on(CUDA1, (8,)), cuda.stream(1)
    for tensor in (source, target):
        driver.wait(driver.readiness_of(tensor), Stream(CUDA1, c))
    transfer(source, target, c, False)
    assert cuda.races == 0 and cuda.count("cuMemcpyPeerAsync") == 1
    assert not cuda.read(c, target.data_ptr, 32, device=1)
    assert cuda.read(cuda.stream(1), target.data_ptr, 32, device=1)


@pytest.mark.parametrize("kind", [PINNED, DEVICE, MANAGED])
def test_kinds_of_memory(cuda, np, kind):
    """Pinned memory counts as host memory, managed memory as device memory."""
    address = cuda.alloc(32, 0, kind)
    device = driver.where(address)
    source = np.arange(8, dtype="int32")
    there = native.tensor_new(address, (8,), None, dlx.DType("int32"), device, 0, None)
    if kind == PINNED:
        there, middle = on(CUDA0, (8,)), there
        transfer(host(np, source), there, work(there), True)
        transfer(there, middle, work(there), True)
        transfer(middle, there, work(there), True)
    else:
        transfer(host(np, source), there, cuda.stream(), True)
    back = np.zeros(8, "int32")
    transfer(there, host(np, back), driver.work_stream(CUDA0).handle, True)
    assert np.array_equal(back, source)


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuStreamSynchronize"])
def test_a_failing_copy_is_named(cuda, np, name):
    """The error names the failed call, and no context stays pushed."""
    there = on(CUDA0, (8,))
    cuda.fail(name, 700)
    with pytest.raises(DeviceError, match=rf"{name} failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        transfer(host(np, np.zeros(8, "int32")), there, work(there), True)
    assert cuda.depth == 0


def test_shapes_must_agree(cuda, np):
    """A copy between different shapes is rejected."""
    there = on(CUDA0, (8,))
    with pytest.raises(LayoutError, match="differ in shape or dtype"):
        transfer(host(np, np.zeros(7, "int32")), there, work(there), True)
    with pytest.raises(DeviceError):
        transfer(host(np, np.zeros(8)), host(np, np.zeros(8)), 1, True)
