"""Stacks of device arrays in one call: one allocation by the consumer, one wait per producer's stream, few copies."""

from __future__ import annotations

import gc

import pytest
from support.cuda import gpulib

import dlx
from dlx._core import cuda as driver
from dlx.errors import DlxError, StreamError

N = gpulib.N


class StackingDevices(gpulib.NewDevices):
    """Devices of a framework that stacks its arrays with a kernel."""

    def stack(self, arrays, out):
        self.framework.stacked = [*getattr(self.framework, "stacked", []), len(arrays)]
        for i, array in enumerate(arrays):
            assert not self.framework.read(array)
            self.framework.cuda.poke(out.ptr + i * N, self.framework.cuda.peek(array.ptr, N))
        self.framework.cuda.write(self.framework.handle(out.device.id), out.ptr, N * len(arrays), out.device.id)


class Stacking(gpulib.QuickFreshAdapter):
    """The adapter of such a framework."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.devices = StackingDevices(framework)


@pytest.fixture
def lib_a(monkeypatch, cuda):
    """A framework with streams."""
    return gpulib.install(monkeypatch, "liba", cuda, gpulib.QuickAdapter)


@pytest.fixture
def lib_b(monkeypatch, cuda):
    """A framework that allocates the memory of copies itself."""
    return gpulib.install(monkeypatch, "libb", cuda, gpulib.QuickFreshAdapter)


def filled(cuda, lib, n, device=0):
    """Return arrays with the bytes 0, 1, 2, ..."""
    arrays = [lib.made(device) for _ in range(n)]
    for i, array in enumerate(arrays):
        cuda.poke(array.ptr, [i % 256] * N)
    return arrays


def expected(n):
    """Return the bytes of their stack."""
    return b"".join(bytes([i % 256]) * N for i in range(n))


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("joined", [True, False], ids=["one stream", "two streams"])
def test_calls_do_not_depend_on_the_number(cuda, lib_a, lib_b, device, joined):
    """For 2 or 60 arrays: one allocation, one record and wait there and back, at most one copy for each array."""
    counts = []
    p = cuda.stream(device)
    c = p if joined else cuda.stream(device)
    with lib_a.on(p, device), lib_b.on(c, device):
        for n in (2, 2, 2, 60):  # the first calls learn
            arrays = filled(cuda, lib_a, n, device)
            cuda.forget()
            asked = lib_a.asked + lib_b.asked
            whole = dlx.stack(arrays, "libb")
            counts.append((cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent"), cuda.syncs))
            calls = len(cuda.log) - cuda.copies()
            assert cuda.copies() <= n and calls < 30, cuda.log
            assert lib_a.asked + lib_b.asked - asked <= 4
            assert whole.tensor.shape == (n, N) and whole.device == (2, device)
            assert not lib_b.read(whole) and cuda.peek(whole.ptr, n * N) == expected(n)
            assert not any(lib_a.write(array) for array in arrays)
    assert counts[2] == counts[3] == ((0, 0, 0) if joined else (2, 2, 0))
    assert cuda.races == 0, cuda.report


def test_rows_of_one_array_are_one_copy(cuda, lib_a, lib_b):
    """Also in the reverse order, or every second one."""
    with lib_a.on(cuda.stream()) as p, lib_b.on(p.ptr):
        block = gpulib.Block(lib_a, 4 * N, 0, p.ptr, 2)
        view, uint8 = driver.native.tensor_new, dlx.DType("uint8")
        rows = [lib_a.Array(view(block.address + i * 16, (16,), None, uint8, (2, 0), 0, block)) for i in range(16)]
        cuda.poke(block.address, bytes(range(256)))
        lib_a.write(rows[0])
        cuda.poke(block.address, bytes(range(256)))
        for _ in range(3):
            cuda.forget()
            whole = dlx.stack(rows, "libb")
        assert cuda.copies() == 1 and cuda.peek(whole.ptr, 256) == bytes(range(256))
        cuda.forget()
        whole = dlx.stack(rows[::2], "libb")
        assert cuda.count("cuMemcpy2DAsync") == cuda.copies() == 1
        assert cuda.peek(whole.ptr, 128) == b"".join(bytes(range(i * 16, i * 16 + 16)) for i in range(0, 16, 2))
        for order in (rows[::-1], [rows[3]] * 5, [rows[i] for i in (0, 1, 2, 9, 9, 4, 2)]):
            whole = dlx.stack(order, "libb")
            first = [(row.ptr - block.address) for row in order]
            assert cuda.peek(whole.ptr, 16 * len(order)) == b"".join(bytes(range(at, at + 16)) for at in first)
    assert cuda.races == 0, cuda.report


@pytest.mark.parametrize("strides", [(8, 1), (1, 8), (16, 2), (-8, 1), (0, 1)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_with_strides(cuda, np, lib_a, lib_b, strides, n):
    """The result is row-major, whatever the rows are."""
    shape = (4, 4) if strides[0] == 16 else (4, 8) if strides[1] == 1 else (8, 4)
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        rows = []
        for i in range(n):
            array = lib_a.made()
            cuda.poke(array.ptr, bytes((j * 3 + i) % 256 for j in range(N)))
            at = array.ptr + (24 if strides[0] < 0 else 0)
            tensor = driver.native.tensor_new(at, shape, strides, dlx.DType("uint8"), (2, 0), 0, array.tensor)
            rows.append(lib_a.Array(tensor))
        for _ in range(3):
            whole = dlx.stack(rows, "libb")
        wanted = np.stack([dlx.convert(row, to="numpy") for row in rows])
        assert whole.tensor.strides == (shape[0] * shape[1], shape[1], 1)
        assert cuda.peek(whole.ptr, wanted.nbytes) == wanted.tobytes() and cuda.races == 0


def test_several_producers_each_wait_once(cuda, monkeypatch, lib_a, lib_b):
    """Of three frameworks, one of them the consumer; a later write of each is ordered after the copies."""
    lib_c = gpulib.install(monkeypatch, "libc", cuda, gpulib.QuickAdapter)
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()), lib_c.on(cuda.stream()):
        for _ in range(6):
            arrays = [lib.made() for _ in range(5) for lib in (lib_a, lib_b, lib_c)]
            for i, array in enumerate(arrays):
                cuda.poke(array.ptr, [i] * N)
            cuda.forget()
            whole = dlx.stack(arrays, "libb")
        assert (cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent"), cuda.syncs) == (4, 4, 0)
        assert not lib_b.read(whole) and cuda.peek(whole.ptr, 15 * N) == expected(15)
        assert not any(lib.write(array) for lib, array in zip((lib_a, lib_b, lib_c) * 5, arrays, strict=True))
    assert cuda.races == 0, cuda.report


def test_dropped_at_once(cuda, lib_a, lib_b):
    """Neither the sources nor the result are reused before the copies are done."""
    with lib_a.on(cuda.stream()) as p, lib_b.on(cuda.stream()):
        for _ in range(3):
            cuda.stall(p.ptr)
            dlx.stack([lib_a.made() for _ in range(5)], "libb")
            gc.collect()
            cuda.resume_all()
            driver.release_pending()
    assert lib_a.reused_too_early == lib_b.reused_too_early == cuda.races == 0, cuda.report


def test_a_framework_stacks_its_own_arrays(cuda, monkeypatch, lib_a):
    """By one call on its stream, without any call of the driver; other arrays are copied by dlx."""
    lib = gpulib.install(monkeypatch, "libs", cuda, Stacking)
    with lib.on(cuda.stream()), lib_a.on(cuda.stream()):
        for _ in range(3):
            arrays = filled(cuda, lib, 5)
            cuda.forget()
            whole = dlx.stack(arrays, "libs")
            assert cuda.peek(whole.ptr, 5 * N) == expected(5)
        assert lib.stacked[-1] == 5 and cuda.copies() == 0 and cuda.count("cuEventRecord") == 0
        del lib.stacked[:]
        mixed = [*filled(cuda, lib, 1), lib_a.made()]
        for _ in range(3):
            dlx.stack(mixed, "libs")
        assert lib.stacked == [] and cuda.races == 0, cuda.report


def test_a_framework_that_fails_is_replaced(cuda, monkeypatch):
    """The arrays are copied one by one."""
    lib = gpulib.install(monkeypatch, "libs", cuda, Stacking)
    monkeypatch.setattr(StackingDevices, "stack", lambda self, arrays, out: 1 / 0)
    for _ in range(3):
        arrays = filled(cuda, lib, 5)
        assert cuda.peek(dlx.stack(arrays, "libs").ptr, 5 * N) == expected(5)
    assert cuda.races == 0, cuda.report


@pytest.mark.parametrize("odd", ["dtype", "shape", "device", "host", "object"])
def test_errors_are_those_of_the_python_path(cuda, np, lib_a, lib_b, odd):
    """They name the array, and nothing is left behind."""
    dlx.stack([lib_a.made() for _ in range(2)], "libb")
    wrong = {
        "dtype": lambda: lib_a.made(dtype="float32", shape=(16,)),
        "shape": lambda: lib_a.made(shape=(8, 8)),
        "device": lambda: lib_a.made(1),
        "host": lambda: np.zeros(N, "uint8"),
        "object": object,
    }[odd]()
    for _ in range(3):
        with pytest.raises(DlxError, match=r"arrays\[2\]"):
            dlx.stack([lib_a.made(), lib_a.made(), wrong], "libb")


@pytest.mark.parametrize("capturing", ["producer", "consumer", "both"])
def test_a_capture_stays_whole(cuda, lib_a, lib_b, capturing):
    """Of either stream; if both use it, the copies become nodes."""
    p, c = cuda.stream(), cuda.stream()
    with lib_a.on(p), lib_b.on(p if capturing == "both" else c):
        arrays = [lib_a.made() for _ in range(3)]
        for _ in range(3):
            dlx.stack(arrays, "libb")
        one = c if capturing == "consumer" else p
        cuda.capture(one)
        blocks = cuda.blocks
        if capturing == "both":
            dlx.stack(arrays, "libb")
        else:
            with pytest.raises(StreamError, match="capturing a graph"):
                dlx.stack(arrays, "libb")
            assert cuda.blocks == blocks
        assert cuda.end_capture(one) == 0
        assert (cuda.nodes > 0) is (capturing == "both") and cuda.replay() == 0


@pytest.mark.parametrize("to", ["dlx", "libb"])
def test_a_copy_that_fails_midway_is_waited_for(cuda, monkeypatch, lib_a, lib_b, to):
    """The second copy still runs on another stream when the memory of the result is freed."""
    lib_c = gpulib.install(monkeypatch, "libc", cuda, gpulib.QuickAdapter)
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()), lib_c.on(cuda.stream()) as q:
        arrays = [lib_a.made(), lib_c.made(), lib_c.made()]
        for _ in range(5):
            dlx.stack(arrays, to)
        driver.release_pending()
        cuda.stall(q.ptr)
        cuda.fail("cuMemcpyAsync", 1, after=2)
        if to == "dlx":
            with pytest.raises(DlxError, match="cuMemcpyAsync failed"):
                dlx.stack(arrays, to)
        else:  # the Python path repeats it
            assert dlx.stack(arrays, to).shape == (3, N)
        cuda.mend()
        for _ in range(3):
            dlx.stack(arrays[:1], to)
        cuda.resume_all()
    assert lib_a.reused_too_early == lib_b.reused_too_early == cuda.races == cuda.misuses == 0, cuda.report
