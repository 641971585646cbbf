"""On a real CUDA device: moves without `device=`, copies and stacks on the device, pinned memory, `wait=False`.

Late values are written by copies behind a slow kernel, so that the values are also right on the recording driver.
"""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
from support.cuda.real_gpu import SLOW, cupy, gpu, torch  # noqa: F401

import dlx
from dlx._core.cuda import where
from dlx.errors import StreamError

pytestmark = pytest.mark.gpu

FEW = 1000


@pytest.fixture
def ones(torch):  # noqa: F811
    """Pinned ones, which a copy on a stream writes to a device."""
    return torch.ones(FEW).pin_memory()


def write_late(torch, tensor, ones):  # noqa: F811
    """Write ones to a tensor behind a slow kernel on the current stream."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW // 5)
    tensor.copy_(ones[: tensor.numel()].view(tensor.shape), non_blocking=True)


def read(np, x):
    """Return the distinct values of an array."""
    return np.unique(np.asarray(dlx.convert(x, to="numpy"))).tolist()


def streams_of(torch, cupy):  # noqa: F811
    """Return {name: context in which torch and cupy use a stream}."""
    side, own = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    return {
        "legacy": (torch.cuda.stream(torch.cuda.default_stream()), cupy.cuda.Stream.null),
        "per-thread": (torch.cuda.stream(torch.cuda.default_stream()), cupy.cuda.Stream.ptds),
        "one": (torch.cuda.stream(side), cupy.cuda.Stream.from_external(side)),
        "two": (torch.cuda.stream(side), own),
    }


STREAMS = ["legacy", "per-thread", "one", "two"]


@pytest.mark.parametrize("stream", STREAMS)
def test_moves_without_a_device(np, torch, cupy, ones, stream):  # noqa: F811
    """From the device they wait for late work; to the device, the source may change at once."""
    ours, theirs = streams_of(torch, cupy)[stream]
    with ours, theirs:
        tensor = torch.zeros(FEW).cuda()
        for _ in range(3):
            tensor.copy_(torch.zeros(FEW))
            write_late(torch, tensor, ones)
            assert read(np, tensor) == [1.0]
        array = dlx.convert(tensor, to="cupy")
        assert read(np, array) == [1.0]
        for _ in range(3):
            host = np.full(FEW, 3, "float32")
            there = dlx.convert(host, to="cupy")
            host[:] = 4
            assert type(there) is cupy.ndarray and read(np, there) == [3.0]


@pytest.mark.parametrize("to", ["torch", "cupy", "dlx"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("call", ["copy", "stack"])
def test_copies_on_the_device_are_snapshots(np, torch, cupy, ones, stream, to, call):  # noqa: F811
    """After late work and before the next write of the producer; the source may be dropped at once."""
    ours, theirs = streams_of(torch, cupy)[stream]
    with ours, theirs:
        for _ in range(4):  # the first calls take the Python path
            tensors = [torch.zeros(FEW).cuda() for _ in range(8)]
            for tensor in tensors:
                write_late(torch, tensor, ones) if tensor is tensors[0] else tensor.copy_(ones[:FEW], non_blocking=True)
            arrays = [cupy.asarray(each) if i % 2 else each for i, each in enumerate(tensors)]
            arrays = arrays[:1] if call == "copy" else arrays
            result = dlx.convert(arrays[0], to=to, copy=True) if call == "copy" else dlx.stack(arrays, to)
            for tensor in tensors:
                tensor.copy_(torch.zeros(FEW), non_blocking=True)
            del tensors, tensor, arrays
            others = [torch.full((FEW,), 9.0).cuda() for _ in range(8)]  # would reuse the memory
            assert read(np, result) == [1.0]
            del others


LAYOUTS = {
    "plain": lambda whole: list(whole),
    "every second": lambda whole: list(whole)[::2],
    "reversed": lambda whole: list(whole)[::-1],
    "repeated": lambda whole: [whole[3]] * 7,
    "columns": lambda whole: list(whole.T)[:40],
    "odd pitch": lambda whole: [row[1:-2] for row in whole],
    "narrow": lambda whole: [row[3:4] for row in whole],
    "blocks": lambda whole: list(whole.reshape(16, 4, -1)),
    "shuffled": lambda whole: [whole[i] for i in (5, 1, 1, 15, 0, 8)],
}


@pytest.mark.parametrize("to", ["torch", "cupy", "dlx"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_every_layout(np, torch, cupy, layout, to):  # noqa: F811
    """Equal distances are one copy with any pitch; others are copied row by row."""
    host = np.arange(16 * 1004, dtype="float32").reshape(16, 1004)
    whole = torch.from_numpy(host.copy()).cuda()
    wanted = np.stack(LAYOUTS[layout](host))
    for kind in ("torch", "cupy", "mixed"):
        rows = LAYOUTS[layout](whole)
        rows = [cupy.asarray(x) if kind == "cupy" or (kind == "mixed" and i % 2) else x for i, x in enumerate(rows)]
        for _ in range(4):
            assert np.array_equal(dlx.convert(dlx.stack(rows, to), to="numpy"), wanted)


@pytest.mark.parametrize("n", [2, 63, 400])
def test_torch_stacks_its_own_arrays(np, torch, n):  # noqa: F811
    """With torch's memory, for any number; the values are those of `torch.stack`."""
    rows = [torch.from_numpy(np.full(FEW, i, "float32")).cuda() for i in range(n)]
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        whole = dlx.stack(rows, "torch")
        assert torch.cuda.memory_allocated() - before >= whole.nbytes
        assert torch.equal(whole, torch.stack(rows)) and not whole.is_inference()
        del whole
    with torch.inference_mode():
        assert not dlx.stack(rows, "torch").is_inference()
    doubles = [row.double() for row in rows]
    assert torch.equal(dlx.stack(doubles, "torch"), torch.stack(doubles))


@pytest.mark.parametrize("to", ["torch", "cupy"])
@pytest.mark.parametrize("source", ["numpy", "strided", "pinned", "device", "late device"])
def test_pinned_results(np, torch, cupy, ones, source, to):  # noqa: F811
    """By the framework's allocator, with the values after late work."""
    host = np.arange(FEW, dtype="float32")
    if source == "late device":
        x, wanted = torch.zeros(FEW).cuda(), [1.0]
        write_late(torch, x, ones)
    else:
        x = {
            "numpy": lambda: host,
            "strided": lambda: host[::-2],
            "pinned": lambda: torch.from_numpy(host).pin_memory(),
            "device": lambda: torch.from_numpy(host).cuda(),
        }[source]()
        wanted = sorted(host[::-2].tolist() if source == "strided" else host.tolist())
    result = dlx.convert(x, to=to, device="cuda_host")
    address = result.data_ptr() if to == "torch" else result.data.ptr
    assert where(address).name == "cuda_host" and read(np, result) == wanted


@pytest.mark.parametrize("to", ["torch", "cupy"])
def test_a_move_that_nothing_waits_for(np, torch, cupy, to):  # noqa: F811
    """To the device, behind a slow kernel: dropped at once, the pinned source keeps its values until the copy."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(stream):
        for _ in range(3):
            source, event = torch.full((FEW,), 5.0).pin_memory(), torch.cuda.Event()
            torch.cuda.synchronize()
            torch.cuda._sleep(SLOW)
            event.record()
            result = dlx.convert(source, to=to, device="cuda", wait=False)
            is_late = not event.query()
            del source
            gc.collect()
            for _ in range(4):
                torch.full((FEW,), 7.0).pin_memory()
            assert is_late, "the host waited for the slow kernel"
            assert read(np, result) == [5.0]


@pytest.mark.parametrize("to", ["torch", "cupy"])
def test_a_pinned_result_that_nothing_waits_for(np, torch, cupy, ones, to):  # noqa: F811
    """To the host: unfinished at first, right after a synchronization, and safe to drop before."""
    with torch.cuda.stream(torch.cuda.Stream()) as _, cupy.cuda.Stream(non_blocking=True):
        tensor, event = torch.zeros(FEW).cuda(), torch.cuda.Event()
        for keeps in (True, False, True):
            write_late(torch, tensor, ones)
            event.record()
            result = dlx.convert(tensor, to=to, device="cuda_host", wait=False)
            is_late = not event.query()
            if not keeps:
                del result
                gc.collect()
                others = [torch.full((FEW,), 7.0).pin_memory() for _ in range(4)]
            torch.cuda.synchronize()
            assert is_late, "the host waited for the slow kernel"
            assert read(np, result if keeps else others[0]) == [1.0 if keeps else 7.0]
            dlx.release_pending()


def test_moves_are_refused_in_a_capture(np, torch, cupy, ones):  # noqa: F811
    """Without `device=`, pinned, without a wait: each says so, and the graph replays."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    tensor, host = torch.zeros(FEW).cuda(), np.ones(FEW, "float32")
    array = cupy.asarray(host)
    calls = [
        lambda: dlx.convert(tensor, to="numpy"),
        lambda: dlx.convert(host, to="torch", device="cuda"),
        lambda: dlx.convert(ones, to="torch", device="cuda", wait=False),
        lambda: dlx.convert(tensor, to="torch", device="cuda_host", wait=False),
        lambda: dlx.stack([tensor, array], "torch"),
        lambda: dlx.stack([array, array], "cupy"),
        lambda: dlx.convert(host, to="cupy"),
    ]
    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(stream):
        for call in calls * 3:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        tensor.add_(1)
        for call in calls[:4]:
            with pytest.raises(StreamError):
                call()
        tensor.add_(1)
    torch.cuda.synchronize()
    before = tensor.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert ((tensor - before) == 2).all()


class Interface:
    """An object with only the CUDA array interface."""

    def __init__(self, owner):
        self.owner = owner
        self.__cuda_array_interface__ = owner.__cuda_array_interface__


def test_addresses_without_a_context(np, torch):  # noqa: F811
    """On a thread that has never used CUDA, the driver still knows whose memory an address is."""
    found = []
    for number in range(torch.cuda.device_count()):
        tensor = torch.from_numpy(np.arange(FEW, dtype="float32")).to(f"cuda:{number}")
        torch.cuda.synchronize(number)

        def work(tensor=tensor):
            found.append(where(tensor.data_ptr()))
            found.append(dlx.convert(Interface(tensor), to="dlx").device)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [each.id for each in found] == [i for i in range(torch.cuda.device_count()) for _ in range(2)]


@pytest.mark.parametrize("step", [3, 5, 7, 100, 1001])
def test_pitches_on_the_device(np, torch, step):  # noqa: F811
    """Within a device, cuMemcpy2DAsync "may fail for pitches not computed by cuMemAllocPitch"."""
    host = np.arange(200_000, dtype="uint8")
    whole = torch.from_numpy(host).cuda()
    torch.cuda.synchronize()
    for width, size in itertools.product((1, 2), (1, 2, 4)):
        dtype, pitch = {1: "uint8", 2: "uint16", 4: "uint32"}[size], step * size
        n = min(150, len(host) // pitch)
        strides = (step, 1)
        tensor = dlx.from_pointer(whole.data_ptr(), (n, width), dtype, device="cuda", strides=strides, owner=whole)
        view = np.lib.stride_tricks.as_strided(host.view(dtype), (n, width), (pitch, size))
        for to in ("torch" if size == 1 else "dlx", "dlx"):
            copy = dlx.convert(tensor, to=to, copy=True)
            assert np.array_equal(dlx.convert(copy, to="numpy"), view)


def test_two_devices(np, torch, cupy, ones):  # noqa: F811
    """Moves, copies and stacks on a device that is not current, with late work there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    with torch.cuda.device(1):
        for _ in range(4):
            tensor = torch.zeros(FEW).cuda()
            torch.cuda._sleep(SLOW)
            tensor.copy_(ones[:FEW], non_blocking=True)
            with torch.cuda.device(0):
                assert dlx.stack([tensor, tensor], "torch").device.index == 1
                assert read(np, dlx.stack([tensor, tensor], "cupy")) == [1.0]
                assert read(np, dlx.convert(tensor, to="torch", device="cuda:0")) == [1.0]
                assert read(np, tensor) == [1.0] and torch.cuda.current_device() == 0
