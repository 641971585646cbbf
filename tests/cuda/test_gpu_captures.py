"""On a real CUDA device: every conversion inside a graph capture is right or refused, and the graph replays."""

from __future__ import annotations

import gc

import pytest
from support.cuda.captures import CONVERSIONS, TWO, Arrays, capture
from support.cuda.real_gpu import N, cupy, gpu, jax, torch, warm_stream  # noqa: F401

import dlx
from dlx.errors import StreamError

pytestmark = pytest.mark.gpu


@pytest.fixture
def arrays(np, torch, cupy):  # noqa: F811
    """Arrays of both frameworks, on both devices if there are two."""
    made = Arrays(np, torch, cupy)
    yield made
    vars(made).clear()  # pytest still holds it when leaks are counted


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_inside_a_capture(arrays, torch, np, name):  # noqa: F811
    """It says what the table says, and the graph replays after its other memory is gone."""
    needs, expected, call = CONVERSIONS[name]
    if needs == TWO and arrays.devices < 2:
        pytest.skip("one device only")
    said, graph = capture(arrays, call)
    assert said == expected
    gc.collect()
    dlx.release_pending()
    for _ in range(3):  # would reuse memory that belongs to no graph
        dlx.convert(np.full(64, np.nan, "float32"), to="dlx", device="cuda")
        dlx.convert(np.full(64, np.nan, "float32"), to="torch", device="cuda")
    torch.cuda.synchronize()
    before = arrays.static.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert (arrays.static - before).tolist() == [2.0] * 64


def test_a_copy_in_a_graph_reads_new_values(arrays, torch):  # noqa: F811
    """A copy on the capturing stream is a node of the graph, in memory of the graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy = dlx.convert(arrays.static, to="torch", copy=True)
        rows = dlx.stack([arrays.static, arrays.static], "torch")
        result = copy + rows.sum(0)
    del copy, rows
    gc.collect()
    for value in (1.0, 5.0):
        arrays.static.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert result.tolist() == [3 * value] * 64


def test_jax_inside_a_capture(arrays, torch, jax):  # noqa: F811
    """Jax records an event for the consumer: refused before jax is asked, and the capture is whole."""
    device = jax.local_devices(backend="cuda")[0]
    array = jax.device_put(jax.numpy.arange(64.0), device).block_until_ready()
    dlx.convert(array, to="torch", readonly="share")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrays.static.add_(1)
        with pytest.raises(StreamError):
            dlx.convert(array, to="torch", readonly="share")
        with pytest.raises(StreamError):
            dlx.convert(array, to="torch")
    graph.replay()
    torch.cuda.synchronize()
    assert arrays.static.tolist() == [1.0] * 64


def test_memory_of_cupy_is_freed_inside_a_capture(arrays, torch, cupy):  # noqa: F811
    """Memory without a pool, dropped before the capture and freed inside it: cudaFree breaks nothing."""
    consumer = warm_stream(torch)
    with cupy.cuda.using_allocator(None):
        array = cupy.zeros(1 << 16, "float32")
    with torch.cuda.stream(consumer):
        tensor = dlx.convert(array, to="torch")
        torch.cuda._sleep(100_000_000)
        tensor += 1
    del array, tensor
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrays.static.add_(1)
        while dlx.release_pending():
            pass
        arrays.static.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert arrays.static.tolist() == [2.0] * 64
