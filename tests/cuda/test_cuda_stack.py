"""Stacks of device arrays in one call: one allocation by the consumer, one wait per producer's stream, few copies."""

from __future__ import annotations

import gc

import pytest
from support.cuda import gpulib

import dlx
from dlx._core import cuda as driver
from dlx.adapter import DTypes
from dlx.errors import DlxError, StreamError

N = gpulib.N


class StackingDevices(gpulib.NewDevices):
    """Devices of a framework that stacks its arrays with a kernel."""

    def stack(self, arrays, out, axis):
        if out is None:
            shape = (len(arrays), *arrays[0].shape)
            out = self.new_array(shape, arrays[0].tensor.dtype, arrays[0].device, (N, 1))
        self.framework.stacked = [*getattr(self.framework, "stacked", []), len(arrays)]
        for i, array in enumerate(arrays):
            assert not self.framework.read(array)
            self.framework.cuda.poke(out.ptr + i * N, self.framework.cuda.peek(array.ptr, N))
        self.framework.cuda.write(self.framework.handle(out.device.id), out.ptr, N * len(arrays), out.device.id)
        return out


class Stacking(gpulib.QuickFreshAdapter):
    """The adapter of such a framework."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.devices = StackingDevices(framework)


class WritingDTypes(DTypes):
    """The dtypes of a framework that copies to its arrays with a kernel."""

    def cast(self, array, dtype, out=None):
        values = bytes(dlx.convert(dlx.convert(array, to="dlx"), to="numpy").ravel())
        lib, place = array.framework, dlx.convert(out, to="dlx")
        step = [0]
        for extent, stride in zip(place.shape, place.strides, strict=True):
            step = [at + i * stride for at in step for i in range(extent)]
        for at, value in zip(step, values, strict=True):
            lib.cuda.poke(out.ptr + at, [value])
        assert not lib.read(array)  # last, since reading by the host waits
        lib.cuda.write(lib.handle(0), out.ptr, 1)
        return out


class Writing(gpulib.QuickFreshAdapter):
    """The adapter of such a framework."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.dtypes = WritingDTypes(self.name, self.dtypes.names)


@pytest.fixture
def lib_w(monkeypatch, cuda):
    """A framework that copies to its arrays."""
    return gpulib.install(monkeypatch, "libw", cuda, Writing)


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
    monkeypatch.setattr(StackingDevices, "stack", lambda self, arrays, out, axis: 1 / 0)
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
        assert dlx.stack(arrays, to).shape == (3, N)  # the Python path repeats it
        cuda.fail("cuMemcpyAsync", 1, after=2)
        with pytest.raises(DlxError, match="cuMemcpyAsync failed"):
            dlx.stack(arrays, to, device="cuda:0")
        cuda.mend()
        for _ in range(3):
            dlx.stack(arrays[:1], to)
        cuda.resume_all()
    assert lib_a.reused_too_early == lib_b.reused_too_early == cuda.races == cuda.misuses == 0, cuda.report


# ---- options ---------------------------------------------------------------------------------------------------------


def rows_of(cuda, lib_a, lib_w, kind, shape=(8, 8)):
    """Return three rows of a kind, and their bytes."""
    makers = {"a": [lib_a] * 3, "b": [lib_w] * 3, "dlx": [lib_a] * 3, "mixed": [lib_a, lib_w, lib_a]}[kind]
    rows = [lib.made(shape=shape) for lib in makers]
    for i, row in enumerate(rows):
        cuda.poke(row.ptr, bytes((i * N + k) % 256 for k in range(N)))
    if kind in ("dlx", "mixed"):
        rows[2:] = [dlx.convert(row, to="dlx") for row in rows[2:]]
    return [dlx.convert(row, to="dlx") for row in rows] if kind == "dlx" else rows


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("kind", ["a", "b", "dlx", "mixed"])
@pytest.mark.parametrize("to", ["libw", "dlx", "numpy", "out", "out, turned", "out, gaps", "out on the host"])
def test_axis_and_out(cuda, np, lib_a, lib_w, to, kind, axis):
    """Along each axis, into new arrays and into outputs of any strides; a later write of a source is ordered."""
    with lib_a.on(cuda.stream()), lib_w.on(cuda.stream()):
        for _ in range(3):
            rows = rows_of(cuda, lib_a, lib_w, kind)
            wanted = np.stack([np.arange(i * N, (i + 1) * N, dtype="uint8").reshape(8, 8) for i in range(3)], axis)
            if to == "out on the host":
                out = np.zeros(wanted.shape, "uint8")
                assert dlx.stack(rows, out=out, axis=axis) is out
                assert (out == wanted).all()
            elif to.startswith("out"):
                turned, gaps = to.endswith("turned"), 2 if to.endswith("gaps") else 1
                shape = wanted.shape[::-1] if turned else wanted.shape
                steps = [step * gaps for step in np.zeros(shape, "uint8").strides]
                block = gpulib.Block(lib_w, 400, 0, lib_w.handle(0), 2)
                out = lib_w.Array(
                    driver.native.tensor_new(
                        block.address,
                        wanted.shape,
                        steps[::-1] if turned else steps,
                        dlx.DType("uint8"),
                        (2, 0),
                        0,
                        block,
                    )
                )
                assert dlx.stack(rows, out=out, axis=axis) is out
                assert (dlx.convert(out, to="numpy") == wanted).all()
            else:
                assert (dlx.convert(dlx.stack(rows, to, axis=axis), to="numpy") == wanted).all()
            assert not any(lib_a.write(row) for row in rows if isinstance(row, lib_a.Array))
    assert lib_a.reused_too_early == lib_w.reused_too_early == cuda.races == 0, cuda.report


def test_the_source_of_an_output_may_be_written_next(cuda, lib_a, lib_w):
    """A later write of the producer waits for the copy of another framework, also behind a dlx.Tensor."""
    with lib_a.on(cuda.stream()), lib_w.on(cuda.stream()):
        for _ in range(3):
            for to in ("liba", "dlx"):
                x, out = lib_a.made(), lib_w.made()
                assert dlx.convert(dlx.convert(x, to=to), out=out) is out
                assert not lib_a.write(x)
    assert cuda.races == 0, cuda.report


def test_an_output_that_is_a_row(cuda, np, lib_w):
    """The rows are copied first, as on the host."""
    with lib_w.on(cuda.stream()) as stream:
        view, uint8 = driver.native.tensor_new, dlx.DType("uint8")
        for order in ((1, 0), (1, 1), (0, 1)):
            block = gpulib.Block(lib_w, 2 * N, 0, stream.ptr, 2)
            cuda.poke(block.address, bytes(range(2 * N)))
            rows = [lib_w.Array(view(block.address + i * N, (N,), None, uint8, (2, 0), 0, block)) for i in order]
            out = lib_w.Array(view(block.address, (2, N), None, uint8, (2, 0), 0, block))
            dlx.stack(rows, out=out)
            wanted = np.arange(2 * N, dtype="uint8").reshape(2, N)[list(order)]
            assert cuda.peek(block.address, 2 * N) == wanted.tobytes()
    assert cuda.races == 0, cuda.report


def test_outputs_that_are_refused(cuda, np, lib_a, lib_w):
    """Before the first byte is written: another shape or dtype, read-only, overlapping, memory of dlx."""
    with lib_a.on(cuda.stream()), lib_w.on(cuda.stream()):
        rows = [lib_a.made() for _ in range(2)]
        dlx.stack(rows, "libw")
        view, uint8 = driver.native.tensor_new, dlx.DType("uint8")
        block = gpulib.Block(lib_w, 4 * N, 0, 1, 2)
        for shape, strides, dtype, flags, match in (
            ((2, N + 1), None, "uint8", 0, "shape"),
            ((2 * N,), None, "uint8", 0, "shape"),
            ((), None, "uint8", 0, "shape"),
            ((2, N, 1), None, "uint8", 0, "shape"),
            ((2, N), None, "float16", 0, "dtype"),
            ((2, N), None, "uint8", 1, "read-only"),
            ((2, N), (0, 1), "uint8", 0, "overlap"),
        ):
            out = lib_w.Array(view(block.address, shape, strides, dlx.DType(dtype), (2, 0), flags, block))
            copies = cuda.copies()
            with pytest.raises(DlxError, match=match):
                dlx.stack(rows, out=out)
            with pytest.raises((DlxError, ValueError)):
                dlx.stack(rows, out=out, axis=9)
            assert cuda.copies() == copies
        with pytest.raises(DlxError, match="cuda:0"):
            dlx.stack(rows, out=dlx.empty((2, N), uint8, "cuda"))


def test_rows_of_dlx_take_the_fast_path(cuda, lib_a, lib_b):
    """One wait for all rows that are ready on one stream, also to dlx; the next write of their producer waits."""
    counts = {}
    for to in ("libb", "dlx"):
        with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
            for n in (2, 2, 2, 60):
                arrays = filled(cuda, lib_a, n)
                rows = dlx.convert(arrays, to="dlx")
                cuda.forget()
                whole = dlx.stack(rows, to)
                counts[to, n] = cuda.count("cuEventRecord"), cuda.count("cuStreamWaitEvent"), cuda.syncs
                assert cuda.peek(whole.ptr if to == "libb" else whole.data_ptr, n * N) == expected(n)
                assert not any(lib_a.write(array) for array in arrays)
        assert counts[to, 2] == counts[to, 60] == ((2, 2, 0) if to == "libb" else (1, 0, 0))
    assert cuda.races == 0, cuda.report


def test_rows_of_dlx_on_many_streams(cuda, lib_a, lib_b):
    """More streams than the fast path counts, and streams that are gone."""
    for to in ("libb", "dlx"):
        rows, arrays = [], []
        for _ in range(12):
            with lib_a.on(cuda.stream()):
                arrays += filled(cuda, lib_a, 1)
                rows.append(dlx.convert(arrays[-1], to="dlx"))
        with lib_b.on(cuda.stream()):
            whole = dlx.stack(rows, to)
            assert cuda.peek(whole.ptr if to == "libb" else whole.data_ptr, 12 * N) == bytes(12 * N)
    assert cuda.races == 0, cuda.report


class CastingDTypes(DTypes):
    """The dtypes of a framework that casts float32 to uint8 with a kernel; its values are the bytes 0, 1, 2, ..."""

    def cast(self, array, dtype, out=None):
        lib = array.framework
        assert not lib.read(array)
        made = lib.adapter.devices.new_array(array.shape, dtype, array.device, (1,))
        lib.cuda.poke(made.ptr, lib.cuda.peek(array.ptr, 4 * array.shape[0])[::4])
        lib.cuda.write(lib.handle(array.device.id), made.ptr, array.shape[0])
        return made


class Casting(gpulib.QuickFreshAdapter):
    """The adapter of such a framework."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        self.dtypes = CastingDTypes(self.name, self.dtypes.names)


@pytest.mark.parametrize("casts", [True, False], ids=["casts", "copies"])
@pytest.mark.parametrize("sources", ["own", "of another", "of dlx", "mixed"])
@pytest.mark.parametrize("to", ["libc", "dlx"])
def test_a_stack_on_the_stream_of_the_call(cuda, monkeypatch, to, sources, casts):
    """`stream=` holds for casts by the target, for the copies and for the result, whatever the other streams do."""
    if casts and to == sources[-3:] == "dlx":
        pytest.skip("no framework casts them")
    lib_s, lib_c = (gpulib.install(monkeypatch, name, cuda, Casting) for name in ("libs", "libc"))
    libs = {"own": (lib_c, lib_c), "mixed": (lib_s, lib_c)}.get(sources, (lib_s, lib_s))
    stream, own, other = cuda.stream(), cuda.stream(), cuda.stream()
    facts = {"dtype": "float32", "shape": (16,)} if casts else {}
    for _ in range(2):
        with lib_s.on(other), lib_c.on(own):
            rows = [lib.made(**facts) for lib in libs]
            for i, row in enumerate(rows):
                cuda.poke(row.ptr, bytes(i * 16 + k // 4 for k in range(N)))
            wanted = b"".join(cuda.peek(row.ptr, N)[:: 4 if casts else 1] for row in rows)
            rows = [dlx.convert(row, to="dlx") for row in rows] if sources == "of dlx" else rows
            made = dlx.stack(rows, to, dtype="uint8", stream=stream)
            cuda.stall(own)
            cuda.stall(other)
            place = made if to == "dlx" else made.tensor
            assert (place.shape, str(place.dtype)) == ((2, len(wanted) // 2), "uint8")
            assert not cuda.read(stream, place.data_ptr, len(wanted))
            assert cuda.peek(place.data_ptr, len(wanted)) == wanted
            cuda.resume_all()
            assert not any(lib.write(row) for lib, row in zip(libs, rows, strict=True) if isinstance(row, lib.Array))
            del rows, made, place, row
            gc.collect()
    assert lib_s.reused_too_early == lib_c.reused_too_early == cuda.races == 0, cuda.report
