"""Every conversion inside a graph capture is right or refused: the capture stays whole, and every address alive."""

from __future__ import annotations

import gc

import pytest
from support.cuda import originals
from support.cuda.captures import CONVERSIONS, NODES, Arrays, capture
from support.cuda.originals import pending

import dlx

cuda, torch, cupy = originals.cuda, originals.torch, originals.cupy  # fixtures


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_inside_a_capture(cuda, torch, cupy, np, name):
    """It says what the table says, the capture is whole, a refusal adds no node, and a replay finds its memory."""
    _, expected, call = CONVERSIONS[name]
    arrays = Arrays(np, torch, cupy)
    said, graph = capture(arrays, call)
    assert said == expected
    assert (cuda.nodes > 0) is (name in NODES), "a copy in the graph"
    assert pending() == 0
    for _ in range(3):  # would reuse memory that belongs to no graph
        dlx.convert(np.zeros(64, "float32"), to="dlx", device="cuda")
        dlx.convert(np.zeros(64, "float32"), to="torch", device="cuda")
    graph.replay()
    assert cuda.misuses == 0, cuda.report


def test_the_replay_can_fail(cuda, torch, np):
    """A graph that reads memory of dlx is a misuse once that memory is gone."""
    own, graph = dlx.convert(np.zeros(64, "float32"), to="dlx", device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shared = dlx.convert(own, to="torch")
        copy = shared.clone()
    graph.replay()
    assert cuda.nodes > 0 and cuda.misuses == 0
    del own, shared, copy
    gc.collect()
    assert pending() == 0
    with pytest.raises(RuntimeError):
        graph.replay()
    assert cuda.misuses > 0
    cuda.clear_report()
    cuda.mend()


@pytest.mark.parametrize("release", ["a conversion", "another thread", "release_pending"])
def test_memory_of_others_is_released_inside_a_capture(cuda, torch, cupy, release):
    """Dropped before the capture, freed inside it by its owner's cudaFree: the capture stays whole."""
    import threading

    ready, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    with cupy.cuda.using_allocator(None):
        array = cupy.zeros(1 << 16, "float32")
    address = array.data.ptr
    with torch.cuda.stream(stream):
        tensor = dlx.convert(array, to="torch")
    cuda.stall(stream.cuda_stream)
    cuda.read(stream.cuda_stream, address, 16)
    del array, tensor
    gc.collect()
    assert pending() == 1
    calls = {
        "a conversion": lambda: (dlx.convert(ready, to="dlx"), dlx.release_pending()),
        "another thread": lambda: _in_thread(threading, dlx.release_pending),
        "release_pending": dlx.release_pending,
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ready.add_(1)
        cuda.resume_all()
        calls[release]()
        ready.add_(1)
    assert not cuda.is_alive(address) and cuda.nodes == 0


def _in_thread(threading, call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
