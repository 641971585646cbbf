"""Whole containers of device memory: one record and one wait for each pair of streams, and all or nothing."""

from __future__ import annotations

import gc

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import LEGACY, PER_THREAD

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx._core.native import ffi
from dlx._core.stream import Stream
from dlx.errors import DeviceError, StreamError

SHAPES = {
    "one": lambda made: [made()],
    "many": lambda made: [made() for _ in range(50)],
    "nested": lambda made: {"a": [made(), (made(), {"b": made()})], "c": made()},
}


def flat(tree):
    """Every array in a container."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [array for child in tree for array in flat(child)] if isinstance(tree, list | tuple) else [tree]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("consumer", ["own", "legacy", "per-thread"])
@pytest.mark.parametrize("producer", ["own", "legacy", "per-thread"])
def test_any_number_costs_two_calls(cuda, lib_a, lib_b, producer, consumer, shape):
    """For every pair of streams and every container; no calls if both are the same stream."""
    handles = {"own": cuda.stream, "legacy": lambda: LEGACY, "per-thread": lambda: PER_THREAD}
    p, c = handles[producer](), handles[consumer]()
    with lib_a.on(p), lib_b.on(c):
        tree = SHAPES[shape](lib_a.made)
        cuda.forget()
        result = dlx.convert(tree, to="libb")
        assert cuda.ordering == (0 if p == c else 2)
        assert not any(lib_b.read(array) for array in flat(result))
        assert [array.ptr for array in flat(result)] == [array.ptr for array in flat(tree)]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_order_all_would_race(cuda, lib_a, lib_b, shape):
    """The instrument."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        result = dlx.convert(SHAPES[shape](lib_a.made), to="libb", stream=-1)
        assert cuda.ordering == 0 and all(lib_b.read(array) for array in flat(result))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_capture_is_not_broken(cuda, lib_a, lib_b, side, shape):
    """The tree is refused before anything is handed over; the capture continues."""
    p, c = cuda.stream(), cuda.stream()
    handed = []
    lib_b.adapter.load = lambda tensor: handed.append(tensor)
    with lib_a.on(p), lib_b.on(c):
        tree = SHAPES[shape](lib_a.made)
        cuda.capture(p if side == "producer" else c)
        with pytest.raises(StreamError, match="capturing a graph"):
            dlx.convert(tree, to="libb")
        assert handed == [] and cuda.end_capture(p if side == "producer" else c) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_one_stream_in_a_capture(cuda, lib_a, lib_b, shape):
    """On the stream that captures, conversions work and add nothing."""
    p = cuda.stream()
    with lib_a.on(p), lib_b.on(p):
        tree = SHAPES[shape](lib_a.made)
        cuda.capture(p)
        cuda.forget()
        result = dlx.convert(tree, to="libb")
        assert cuda.ordering == 0 and not any(lib_b.read(array) for array in flat(result))
        assert cuda.end_capture(p) == 0


def test_the_host_first_and_two_devices_last(cuda, np, lib_a, lib_b):
    """Every array is looked at: two calls for each device, none for the host's."""
    with lib_a.on(cuda.stream()), lib_a.on(cuda.stream(1), 1), lib_b.on(cuda.stream()), lib_b.on(cuda.stream(1), 1):
        tree = [np.zeros(3, "uint8"), {"x": lib_a.made(), "y": [lib_a.made(1)]}, lib_a.made(1), lib_a.made()]
        cuda.forget()
        result = dlx.convert(tree, to="libb")
        assert cuda.ordering == 4
        assert [array.device for array in flat(result)] == [(1, 0), (2, 0), (2, 1), (2, 1), (2, 0)]
        assert not any(lib_b.read(array) for array in flat(result)[1:])


def test_to_numpy(cuda, np, lib_a):
    """Copies to the host: one copy each, on the producer's stream, which waits for nothing."""
    with lib_a.on(cuda.stream()):
        tree = SHAPES["nested"](lib_a.made)
        cuda.forget()
        result = dlx.convert(tree, to="numpy")
    assert cuda.ordering == 0 and cuda.races == 0 and len(flat(result)) == 4


def test_to_dlx_and_on(cuda, lib_a, lib_b):
    """A tree of dlx.Tensor shares one event; going on costs one wait."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        middle = dlx.convert(SHAPES["many"](lib_a.made), to="dlx")
        cuda.forget()
        result = dlx.convert(middle, to="libb")
        assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent")) == (0, 1)
        assert not any(lib_b.read(array) for array in result)


def test_fresh_tensors_of_dlx(cuda, lib_b):
    """Each is ready when dlx's stream is: one record and one wait for a tree of them, and none before."""
    with lib_b.on(cuda.stream()):
        cuda.forget()
        tree = [dlx.empty(gpulib.N, "uint8", "cuda:0") for _ in range(20)]
        assert cuda.ordering == 0
        results = dlx.convert(tree, to="libb")
        assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent")) == (1, 1)
        assert not any(lib_b.read(result) for result in results)


def test_all_of_it_waits_for_the_consumer(cuda, lib_a, lib_b):
    """No memory of a dropped tree returns to the producer's allocator while the consumer's stream is busy."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()) as c:
        result = dlx.convert(SHAPES["many"](lib_a.made), to="libb")
        cuda.stall(c.ptr)
        for array in result:
            lib_b.read(array)
        del array, result
        gc.collect()
        assert (lib_a.freed, driver.release_pending()) == (0, 50)
        cuda.resume(c.ptr)
        assert driver.release_pending() == 0
    assert (lib_a.freed, lib_a.reused_too_early, cuda.syncs) == (50, 0, 0)


@pytest.mark.parametrize("device", [0, 1])
def test_stack(cuda, np, lib_a, lib_b, device):
    """Arrays of a device, and dlx.Tensors there, are copied into one there: in order, their sources free at once."""
    c = cuda.stream(device)
    with lib_a.on(cuda.stream(device), device), lib_b.on(c, device):
        arrays = [lib_a.made(device) for _ in range(3)]
        for i, array in enumerate(arrays):
            cuda.poke(array.ptr, [i] * gpulib.N)
        arrays[1] = dlx.convert(arrays[1], to="dlx")
        cuda.stall(c, device)
        whole = dlx.stack([*arrays, arrays[0]], "libb")
        assert whole.tensor.shape == (4, gpulib.N) and whole.device == (2, device)
        assert not cuda.read(c, whole.ptr, 4 * gpulib.N, device)
        assert cuda.peek(whole.ptr, 4 * gpulib.N) == b"".join(bytes([i]) * gpulib.N for i in (0, 1, 2, 0))
        assert not lib_a.write(arrays[0]) and cuda.syncs == 0, cuda.log
        assert (dlx.stack(arrays, "numpy") == np.repeat([[0], [1], [2]], gpulib.N, axis=1)).all() and cuda.races == 0


def test_sources_of_a_stack_stay_until_it_is_made(cuda, lib_a, lib_b):
    """Even without other references."""
    work = cuda.stream()
    with lib_a.on(work), lib_b.on(cuda.stream()):
        cuda.stall(work)
        whole = dlx.stack([lib_a.made() for _ in range(3)], "libb")
        gc.collect()
        assert lib_a.freed == 0 and not cuda.read(lib_b.handle(0), whole.ptr, 3 * gpulib.N)
        cuda.resume(work)
        assert driver.release_pending() == 0 and (lib_a.freed, lib_a.reused_too_early) == (3, 0)


def test_a_capture_is_not_broken_by_the_last_of_many(cuda, lib_a, lib_b):
    """It is refused before any array is handed over."""
    taken, capturing = [], cuda.stream(1)
    load = lib_b.adapter.load
    lib_b.adapter.load = lambda tensor: taken.append(tensor) or load(tensor)
    with lib_a.on(cuda.stream()), lib_a.on(capturing, 1), lib_b.on(cuda.stream()), lib_b.on(cuda.stream(1), 1):
        arrays = [lib_a.made(), lib_a.made(1)]
        cuda.capture(capturing, device=1)
        with pytest.raises(StreamError, match=r"\[1\].*capturing a graph"):
            dlx.convert(arrays, to="libb")
        assert taken == [] and cuda.end_capture(capturing, 1) == 0


def test_stack_of_what_differs(cuda, np, lib_a, lib_b):
    """The error has its path and comes before the allocation; empty arrays allocate nothing."""
    arrays = [lib_a.made(), lib_a.made(1)]
    cuda.forget()
    with pytest.raises(DeviceError, match=r"arrays\[1\].*its device is cuda:1, but arrays\[0\] has cuda:0"):
        dlx.stack(arrays, "libb")
    with pytest.raises(DeviceError, match=r"arrays\[1\]"):
        dlx.stack([arrays[0], np.zeros(gpulib.N, "uint8")], "libb")
    assert cuda.count("cuMemAllocFromPoolAsync") == 0
    empty = dlx.from_pointer(0, (0, 3), "uint8", device="cuda")
    assert dlx.stack([empty, empty], "libb").tensor.shape == (2, 0, 3)


# ---- lazy views ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("consumer", ["own", "legacy", "per-thread"])
@pytest.mark.parametrize("producer", ["own", "legacy", "per-thread"])
def test_an_element_is_ordered_when_it_is_asked_for(cuda, lib_a, lib_b, producer, consumer, said):
    """Elements are ordered on first access, once each, not when the view is created."""
    handles = {"own": cuda.stream, "legacy": lambda: LEGACY, "per-thread": lambda: PER_THREAD}
    p, c = handles[producer](), handles[consumer]()
    with lib_a.on(p), lib_b.on(c):
        tree = [lib_a.made(), {"x": lib_a.made()}]
        cuda.forget()
        view = dlx.convert(tree, to="libb", lazy=True, stream=c if said else None)
        assert cuda.ordering == 0 and lib_a.heard == []
        each = 0 if p == c else 2
        assert not lib_b.read(view[0]) and cuda.ordering == each
        lib_a.write(tree[1]["x"])  # after the first element was ordered
        assert not lib_b.read(view[1]["x"]) and cuda.ordering == 2 * each
        assert view[0] is view[0] and cuda.ordering == 2 * each


def test_the_current_stream_is_that_of_the_look(cuda, lib_a, lib_b):
    """Streams are looked up at the access of each element, not when the view is created."""
    device, first = dlx.Device("cuda"), cuda.stream()
    with lib_a.on(first):
        tree = [lib_a.made(), lib_a.made()]
    view = dlx.convert(tree, to="libb", lazy=True)
    for i in range(2):
        with lib_a.on(cuda.stream()) as p, lib_b.on(cuda.stream()):
            driver.order(Stream(device, first), Stream(device, p.ptr))
            lib_a.write(tree[i])
            assert not lib_b.read(view[i])


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_lazy_look_does_not_break_a_capture(cuda, lib_a, lib_b, side):
    """The error names the element, which can be accessed again later."""
    p, c = cuda.stream(), cuda.stream()
    with lib_a.on(p), lib_b.on(c):
        view = dlx.convert([lib_a.made()], to="libb", lazy=True)
        cuda.capture(p if side == "producer" else c)
        with pytest.raises(StreamError, match="capturing a graph"):
            view[0]
        assert cuda.end_capture(p if side == "producer" else c) == 0
        assert not lib_b.read(view[0])


# ---- the fast path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "cuda_managed"])
@pytest.mark.parametrize("source", ["dlx", "tvm_ffi"])
@pytest.mark.parametrize("to", ["numpy", "torch", "tvm_ffi", "dlx", "libb"])
@pytest.mark.parametrize("shape", ["one", "nested", "lazy"])
def test_the_fast_path_leaves_devices_alone(cuda, np, torch, lib_b, source, to, kind, shape):
    """Types of the fast path, on a device: never touched by the host unordered; the bytes arrive from a busy stream."""
    pytest.importorskip("tvm_ffi")
    if to == "torch" and torch.version.cuda:
        pytest.skip("a torch for CUDA looks for a driver of its own")
    p = cuda.stream()
    address = cuda.alloc(8, 0, 2 if kind == "cuda" else 3)
    cuda.write(p, address, 8)
    cuda.poke(address, range(8))
    memory = dlx.from_pointer(address, (8,), "uint8", device=kind)
    point = driver.ready(Stream(dlx.Device("cuda"), p, p))
    memory = native.tensor_behind(memory, 0, 0, None, int(ffi.cast("uintptr_t", point)))
    with tvm_stream(p):
        made = dlx.convert(memory, to=source)
        tree = {"one": made, "nested": {"a": [made, (made,)]}, "lazy": [made]}[shape]
        result = dlx.convert(tree, to=to, lazy=shape == "lazy")
        result = result[0] if shape == "lazy" else flat(result)[0]
        found = dlx.describe(result)
        if found.device.name in ("cuda", "cuda_managed"):
            assert found.address == address
        else:
            assert bytes(dlx.convert(result, to="numpy")) == bytes(range(8))
            assert not cuda.host_read(address, 8) and cuda.races == 0


def tvm_stream(handle):
    """Let tvm_ffi work on a stream."""
    import tvm_ffi

    return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), handle)
