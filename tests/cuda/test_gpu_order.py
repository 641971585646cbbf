"""On a real CUDA device: streams, lifetimes and captures. Slow kernels show errors that would pass by luck.

Each kind of test also runs without order, and must then read unfinished data: this tests the tests.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
from support.cuda.real_gpu import SLOW, N, cupy, gpu, jax, late_ones, quiet, torch, warm_stream  # noqa: F401

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx.errors import StreamError

pytestmark = pytest.mark.gpu


# ---- order -----------------------------------------------------------------------------------------------------------


def cupy_stream(cupy):  # noqa: F811
    """Return a new stream of cupy, with its kernels loaded."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert float(cupy.ones(N, "float32").sum()) == N
    stream.synchronize()
    return stream


class Again:
    """A context that can be entered repeatedly."""

    def __init__(self, make, *args):
        self.make, self.args, self.entered = make, args, []

    def __enter__(self):
        self.entered.append(self.make(*self.args))
        return self.entered[-1].__enter__()

    def __exit__(self, *error):
        return self.entered.pop().__exit__(*error)


def consumer(name, request):
    """Return a context on a warm stream of a framework, and its sum."""
    module = request.getfixturevalue(name)
    if name == "torch":
        return Again(module.cuda.stream, warm_stream(module)), lambda array: array.sum().item()
    if name == "cupy":
        return cupy_stream(module), lambda array: float(array.sum())
    total = module.jit(module.numpy.sum)
    on_device = module.device_put(module.numpy.ones(N), module.local_devices(backend="cuda")[0])
    assert float(total(on_device)) == N
    return contextlib.nullcontext(), lambda array: float(total(array))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("to", ["torch", "cupy", "jax"])
def test_another_stream_reads_finished_data(torch, ordered, to, request):  # noqa: F811
    """With order the sum is right; without it is not, which shows that the test can fail."""
    producer, (context, total) = warm_stream(torch), consumer(to, request)
    with context:  # the first call of each kind
        assert total(dlx.convert(dlx.convert(torch.ones(N, device="cuda"), to="dlx"), to=to)) == N
    with torch.cuda.stream(producer):
        middle = dlx.convert(late_ones(torch), to="dlx", stream=None if ordered else -1)
    with context:
        found = total(dlx.convert(middle, to=to, stream=None if ordered else -1))
    torch.cuda.synchronize()
    assert (found == N) is ordered


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("to", ["cupy", "jax"])
def test_from_one_current_stream_to_another(torch, ordered, to, request):  # noqa: F811
    """The same without a dlx.Tensor."""
    producer, (context, total) = warm_stream(torch), consumer(to, request)
    with context:
        assert total(dlx.convert(torch.ones(N, device="cuda"), to=to)) == N
    with torch.cuda.stream(producer), context:
        found = total(dlx.convert(late_ones(torch), to=to, stream=None if ordered else -1))
    torch.cuda.synchronize()
    assert (found == N) is ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_from_cupy(torch, cupy, ordered):  # noqa: F811
    """A slow producer of cupy on its own stream."""
    stream, c = cupy_stream(cupy), warm_stream(torch)
    dlx.convert(cupy.ones(3, "float32"), to="torch")
    with stream:
        array = cupy.zeros(N, "float32")
        array.fill(1)  # loads the kernel
        array.fill(0)
        stream.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(SLOW)
        array.fill(1)
        with torch.cuda.stream(c):
            found = dlx.convert(array, to="torch", stream=None if ordered else -1).sum().item()
    torch.cuda.synchronize()
    assert (found == N) is ordered


def test_many_at_once(torch, cupy):  # noqa: F811
    """All arrays of a tree are finished when they are read."""
    p, c = warm_stream(torch), cupy_stream(cupy)
    with torch.cuda.stream(p), c:
        tree = {"a": [torch.zeros(N, device="cuda") for _ in range(4)]}
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW)
        for tensor in tree["a"]:
            tensor.fill_(1)
        assert [float(array.sum()) for array in dlx.convert(tree, to="cupy")["a"]] == [N] * 4


@pytest.mark.parametrize("ordered", [True, False])
def test_the_source_of_a_copy_may_be_written_to_at_once(torch, cupy, ordered):  # noqa: F811
    """A late copy has the old values; without order it has the later ones."""
    p, c = warm_stream(torch), cupy_stream(cupy)
    work = torch.cuda.ExternalStream(driver.work_stream(dlx.Device("cuda")).handle)
    with torch.cuda.stream(p), c:
        tensor = torch.ones(N, device="cuda")
        dlx.convert(tensor, to="cupy", copy=True)
        torch.cuda.synchronize()
        for late in (work, torch.cuda.ExternalStream(c.ptr)):  # the copy waits for one of these
            with torch.cuda.stream(late):
                torch.cuda._sleep(SLOW)
        array = dlx.convert(tensor, to="cupy", copy=True, stream=None if ordered else -1)
        tensor.fill_(2)
        torch.cuda.synchronize()
        assert (float(array.sum()) == N) is ordered


def test_the_host_reads_finished_data(torch, np):  # noqa: F811
    """A copy to numpy waits for the producer's stream."""
    with torch.cuda.stream(warm_stream(torch)):
        assert dlx.convert(late_ones(torch), to="numpy").sum(dtype=np.float64) == N


def test_nothing_waits_on_the_host(torch):  # noqa: F811
    """A conversion returns while the producer's kernel still runs."""
    p, c = warm_stream(torch), warm_stream(torch)
    dlx.convert(dlx.convert(torch.ones(3, device="cuda"), to="dlx"), to="torch")
    with torch.cuda.stream(p):
        tensor = late_ones(torch)
        before = torch.cuda.Event()
        before.record()
        middle = dlx.convert(tensor, to="dlx")
    with torch.cuda.stream(c):
        result = dlx.convert(middle, to="torch")
        assert not before.query()
        assert result.sum().item() == N


def test_a_stream_of_cuda_core(torch):  # noqa: F811
    """An object with __cuda_stream__ is a stream."""
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    p, _ = warm_stream(torch), warm_stream(torch)
    with torch.cuda.stream(p):
        middle = dlx.convert(late_ones(torch), to="dlx")
    result = dlx.convert(middle, to="torch", stream=stream)
    with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle))):
        assert result.sum().item() == N


def test_a_function_works_on_its_callers_stream(torch, cupy):  # noqa: F811
    """Torch inside, cupy outside: one stream, restored afterwards."""
    seen = []

    @dlx.using("torch")
    def plus_one(x):
        seen.append(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(SLOW)
        return x + 1

    own = warm_stream(torch)
    with torch.cuda.stream(own), cupy_stream(cupy) as stream:
        result = plus_one(cupy.ones(N, "float32"))
        assert seen == [stream.ptr] and torch.cuda.current_stream() == own
        assert type(result) is cupy.ndarray and float(result.sum()) == 2 * N


# ---- lifetime --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_is_not_reused_while_it_is_read(torch, ordered):  # noqa: F811
    """After a result is dropped that a slow stream still reads, the allocator does not reuse its memory.

    Without order it does, and the next tensor overwrites the data.
    """
    torch.cuda.empty_cache()
    p, c = warm_stream(torch), warm_stream(torch)
    gc.collect()
    with torch.cuda.stream(p):
        tensor = torch.ones(N, device="cuda")
        middle = dlx.convert(tensor, to="dlx")
        where = tensor.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(c):
        result = dlx.convert(middle, to="torch", stream=None if ordered else -1)
        torch.cuda._sleep(SLOW)
        total = result.sum()
    del tensor, middle, result
    assert driver.release_pending() == (1 if ordered else 0)
    with torch.cuda.stream(p):
        fresh = torch.zeros(N, device="cuda")
        assert (fresh.data_ptr() != where) is ordered
    torch.cuda.synchronize()
    assert quiet() == 0 and (total.item() == N) is ordered


def test_conversions_leak_neither_memory_nor_events(torch):  # noqa: F811
    """10^5 conversions between two streams."""
    p, c = warm_stream(torch), warm_stream(torch)
    with torch.cuda.stream(p):
        middle = dlx.convert(torch.ones(1024, device="cuda"), to="dlx")
    live = native.live()

    def many(times):
        for _ in range(times):
            dlx.convert(middle, to="torch")
        torch.cuda.synchronize()
        assert quiet() == 0 and native.live() == live

    with torch.cuda.stream(c):
        many(1000)
        free, _ = torch.cuda.mem_get_info()
        many(100_000)
        assert free - torch.cuda.mem_get_info()[0] < 1 << 22


# ---- capture ---------------------------------------------------------------------------------------------------------


def test_one_stream_in_a_capture(torch):  # noqa: F811
    """A conversion on the capturing stream adds nothing to the graph, which replays."""
    static = torch.zeros(16, device="cuda")
    static += 1  # loads the kernel
    static.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = dlx.convert(dlx.convert(static, to="dlx"), to="torch")
        result += 1
    assert result.data_ptr() == static.data_ptr()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [2.0] * 16


def test_a_capture_is_not_broken(torch):  # noqa: F811
    """Across streams it is refused by name, and the capture continues."""
    static, tensor, graph = torch.zeros(16, device="cuda"), torch.ones(16, device="cuda"), torch.cuda.CUDAGraph()
    static += 1
    static.zero_()
    other = warm_stream(torch)
    with torch.cuda.graph(graph):
        static += 1
        with torch.cuda.stream(other):
            torch.cuda._sleep(SLOW)
            middle = dlx.convert(tensor, to="dlx")
        with pytest.raises(StreamError, match="capturing a graph"):
            dlx.convert(middle, to="torch")
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 16


def test_letting_go_during_a_capture(torch):  # noqa: F811
    """Memory that another stream still reads stays, and is released after the capture, which continues."""
    static, graph = torch.zeros(16, device="cuda"), torch.cuda.CUDAGraph()
    static += 1
    p, c = warm_stream(torch), warm_stream(torch)
    with torch.cuda.stream(p):
        middle = dlx.convert(torch.ones(N, device="cuda"), to="dlx")
    with torch.cuda.graph(graph):
        static += 1
        with torch.cuda.stream(c):
            torch.cuda._sleep(SLOW)
            result = dlx.convert(middle, to="torch")
        del result, middle
        assert driver.release_pending() == 1
    torch.cuda.synchronize()
    assert driver.release_pending() == 0
    graph.replay()
    torch.cuda.synchronize()
