"""On a real CUDA device: a stuck stream delays no other one, and strided memory moves in one transfer."""

from __future__ import annotations

import threading
import time

import pytest
from support.cuda.real_gpu import SLOW, N, cupy, gpu, torch, warm_stream  # noqa: F401

import dlx

pytestmark = pytest.mark.gpu

JOBS = {
    "to numpy": lambda np, tensor: dlx.convert(tensor, to="numpy"),
    "to dlx, copy": lambda np, tensor: dlx.convert(tensor, to="dlx", copy=True),
    "to torch, copy": lambda np, tensor: dlx.convert(dlx.convert(tensor, to="dlx"), to="torch", copy=True),
    "to cupy, copy": lambda np, tensor: dlx.convert(tensor, to="cupy", copy=True),
    "stack": lambda np, tensor: dlx.stack([tensor, tensor], "torch"),
    "stack in dlx": lambda np, tensor: dlx.stack([tensor, tensor], "dlx"),
    "numpy to torch": lambda np, tensor: dlx.convert(np.ones(64, "float32"), to="torch", device="cuda"),
    "numpy to cupy": lambda np, tensor: dlx.convert(np.ones(64, "float32"), to="cupy"),
    "numpy to dlx": lambda np, tensor: dlx.convert(np.ones(64, "float32"), to="dlx", device="cuda"),
}
STUCK = {
    "to dlx, copy": lambda tensor: dlx.convert(tensor, to="dlx", copy=True),
    "stack in dlx": lambda tensor: dlx.stack([tensor, tensor], "dlx"),
    "to dlx": lambda tensor: dlx.convert(tensor, to="dlx"),
}


@pytest.mark.parametrize("where", ["one thread", "two threads"])
@pytest.mark.parametrize("stuck", STUCK)
@pytest.mark.parametrize("job", JOBS)
def test_a_stuck_stream_delays_nothing(np, torch, cupy, job, stuck, where):  # noqa: F811
    """The host and a second stream do their work while a copy of a first stream waits for a slow kernel."""
    p, q, c = warm_stream(torch), warm_stream(torch), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(p):
        x = torch.ones(64, device="cuda")
        STUCK[stuck](x)
    with torch.cuda.stream(q), c:
        y = torch.full((64,), 3.0, device="cuda")
        JOBS[job](np, y)
    torch.cuda.synchronize()
    before, later, found = torch.cuda.Event(), torch.cuda.Event(), []

    def work():
        with torch.cuda.stream(q), c:
            found.append(JOBS[job](np, y))
            later.record()
            later.synchronize()
            found.append(before.query())

    with torch.cuda.stream(p):
        torch.cuda._sleep(SLOW)
        before.record()
        held = STUCK[stuck](x)
    if where == "one thread":
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found[1] is False, "the job waited for the slow kernel of another stream"
    torch.cuda.synchronize()
    assert set(np.ravel(dlx.convert(found[0], to="numpy")).tolist()) <= {1.0, 3.0}
    del held


@pytest.mark.parametrize("call", ["copy", "stack", "numpy"])
def test_a_copy_is_a_snapshot(np, torch, call):  # noqa: F811
    """A copy waits for earlier writes of its producer's stream, and later writes wait for the copy."""
    with torch.cuda.stream(warm_stream(torch)):
        tensor = torch.zeros(N, device="cuda")
        dlx.convert(tensor, to="dlx", copy=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW)
        tensor.fill_(1)
        copies = {
            "copy": lambda: dlx.convert(tensor, to="dlx", copy=True),
            "stack": lambda: dlx.stack([tensor, tensor], "dlx"),
            "numpy": lambda: dlx.convert(tensor, to="numpy"),
        }
        copy = copies[call]()
        tensor.fill_(2)
    assert set(dlx.convert(copy, to="numpy").ravel()[:: N // 8].tolist()) == {1.0}
    torch.cuda.synchronize()


def test_streams_and_threads(np, torch):  # noqa: F811
    """Two streams in two threads, each with copies, stacks and numpy: values are right, and nothing hangs."""
    failures = []

    def work(value):
        with torch.cuda.stream(warm_stream(torch)):
            for i in range(50):
                tensor = torch.full((1000,), float(value + i), device="cuda")
                copy, rows = dlx.convert(tensor, to="dlx", copy=True), dlx.stack([tensor, tensor], "dlx")
                tensor.fill_(-1)
                found = {*dlx.convert(copy, to="numpy").tolist(), *dlx.convert(rows, to="numpy").ravel().tolist()}
                if found != {float(value + i)}:
                    failures.append((value, i, found))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


LAYOUTS = {
    "plain": lambda array: array,
    "flipped": lambda array: array[::-1],
    "colors reversed": lambda array: array.reshape(-1, 100, 4)[..., ::-1],
    "every second column": lambda array: array.reshape(1000, -1)[:, ::2],
    "narrow column": lambda array: array.reshape(1000, -1)[:, :3],
    "crop": lambda array: array.reshape(100, 100, -1)[10:90, 10:90],
    "three dimensions": lambda array: array.reshape(100, 100, -1)[:, ::2, ::2],
    "transposed": lambda array: array.reshape(1000, -1).T,
}


@pytest.mark.parametrize("to", ["torch", "cupy", "dlx"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "broadcast"])
def test_strided_memory_moves(np, request, layout, to):
    """There and back with its values; it takes at most three times as long as by hand."""
    if to != "dlx":
        request.getfixturevalue(to)
    whole = np.arange(400_000, dtype="float32")
    array = np.broadcast_to(whole[:1000, None], (1000, 400)) if layout == "broadcast" else LAYOUTS[layout](whole)
    there = dlx.convert(array, to=to, device="cuda")
    assert np.array_equal(dlx.convert(there, to="numpy"), array)
    start = time.perf_counter()
    for _ in range(20):
        dlx.convert(np.ascontiguousarray(array), to=to, device="cuda")
    by_hand = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(20):
        dlx.convert(array, to=to, device="cuda")
    assert time.perf_counter() - start < 3 * by_hand + 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_device_memory_comes_back(np, torch, layout):  # noqa: F811
    """A strided dlx.Tensor on the device, which no framework can make compact, in one transfer or by rows."""
    whole = torch.arange(400_000, dtype=torch.float32, device="cuda")
    host = np.arange(400_000, dtype="float32")
    view = LAYOUTS[layout](host)
    strides = [step // 4 for step in view.strides]
    offset = (view.__array_interface__["data"][0] - host.__array_interface__["data"][0]) // 4
    tensor = dlx.from_pointer(
        whole.data_ptr() + 4 * offset, view.shape, "float32", device="cuda", strides=strides, owner=whole
    )
    torch.cuda.synchronize()
    assert np.array_equal(dlx.convert(tensor, to="numpy"), view)
    if layout not in ("flipped", "colors reversed"):  # which take one call an element
        assert np.array_equal(dlx.convert(dlx.convert(tensor, to="torch", copy=True), to="numpy"), view)


def test_copies_take_the_consumers_memory(torch):  # noqa: F811
    """`stack` and copies allocate by torch."""
    tensor = torch.ones(1 << 16, device="cuda")
    dlx.stack([tensor, tensor], "torch")
    before = torch.cuda.memory_allocated()
    rows = dlx.stack([tensor, tensor], "torch")
    copy = dlx.convert(dlx.convert(tensor, to="dlx"), to="torch", copy=True)
    assert torch.cuda.memory_allocated() - before == rows.nbytes + copy.nbytes
    assert rows.sum().item() == 2 * copy.sum().item() == 2 << 16
