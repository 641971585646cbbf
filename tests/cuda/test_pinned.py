"""Results in pinned memory, ``device="cuda_host"``, and moves that the host does not wait for, ``wait=False``."""

from __future__ import annotations

import gc

import pytest
from support.cuda import gpulib
from support.cuda.gpulib import N

import dlx
from dlx._core import native
from dlx._core.cuda import where
from dlx.errors import CopyRequiredError, DeviceError, StreamError

DATA = bytes(range(N))


class PinningDevices(gpulib.NewDevices):
    """Devices of a framework that also allocates pinned memory, which it calls host memory as torch does."""

    pins = True

    def new_array(self, shape, dtype, device, strides):
        if device.name != "cuda_host":
            return super().new_array(shape, dtype, device, strides)
        block = gpulib.Block(self.framework, N, 0, 1, 1)
        self.framework.pinned.append(block.address)
        return self.framework.Array(native.tensor_new(block.address, shape, strides, dtype, (1, 0), 0, block))


class PinningAdapter(gpulib.FreshAdapter):
    """The adapter of such a framework."""

    def __init__(self, framework, **facts):
        super().__init__(framework, **facts)
        framework.pinned, self.devices = [], PinningDevices(framework)


@pytest.fixture
def lib(monkeypatch, cuda):
    """A framework that pins."""
    return gpulib.install(monkeypatch, "liba", cuda, PinningAdapter)


def on_device(lib):
    """Return an array on the current stream with known data."""
    array = lib.made()
    lib.cuda.poke(array.ptr, DATA)
    return array


# ---- pinned results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, -1])
def test_host_memory_is_copied_into_pinned_memory(cuda, lib, step):
    """Also strided memory; the plan says the same."""
    source = memoryview(DATA * 2)[::step]
    plan = dlx.plan(source, "liba", device="cuda_host")
    result = dlx.convert(source, to="liba", device="cuda_host")
    assert (plan.outcome, str(plan.device), plan.nbytes) == ("copied", "cuda_host:0", source.nbytes)
    assert lib.pinned == [result.ptr] and where(result.ptr).name == "cuda_host"
    assert cuda.peek(result.ptr, len(source)) == bytes(source)
    assert not cuda.copies()


@pytest.mark.parametrize("source", ["liba", "dlx"])
def test_device_memory_is_moved_into_pinned_memory(cuda, lib, source):
    """By one copy on the producer's stream, which the host waits for."""
    stream = cuda.stream()
    with lib.on(stream):
        array = on_device(lib)
        array = array if source == "liba" else dlx.convert(array, to="dlx")
        cuda.forget()
        result = dlx.convert(array, to="liba", device="cuda_host")
    assert where(result.ptr).name == "cuda_host" and not cuda.host_read(result.ptr, N)
    assert cuda.peek(result.ptr, N) == DATA and cuda.copies() == 1


def test_pinned_memory_is_shared(cuda, lib):
    """Memory that is pinned already is not copied, whatever its producer calls it."""
    pinned = dlx.convert(DATA, to="liba", device="cuda_host")
    for kind in ("cuda_host", "cpu"):
        source = dlx.from_pointer(pinned.ptr, (N,), "uint8", device=kind, owner=pinned)
        plan = dlx.plan(source, "liba", device="cuda_host")
        assert (plan.outcome, str(plan.device)) == ("shared", "cuda_host:0")
        assert dlx.convert(source, to="liba", device="cuda_host", copy=False).ptr == pinned.ptr
        copy = dlx.convert(source, to="liba", device="cuda_host", copy=True)
        assert copy.ptr != pinned.ptr and where(copy.ptr).name == "cuda_host"


def test_read_only_pinned_memory_is_copied_into_pinned_memory(cuda, lib):
    """As read-only memory always is for a framework whose arrays are writable."""
    pinned = dlx.convert(DATA, to="liba", device="cuda_host")
    source = dlx.from_pointer(pinned.ptr, (N,), "uint8", device="cuda_host", readonly=True, owner=pinned)
    copy = dlx.convert(source, to="liba", device="cuda_host")
    assert copy.ptr != pinned.ptr and where(copy.ptr).name == "cuda_host" and cuda.peek(copy.ptr, N) == DATA


def test_a_tree(cuda, lib):
    """All arrays, also empty ones."""
    tree = {"a": [on_device(lib), memoryview(DATA)], "b": dlx.convert(b"", to="dlx")}
    tree["a"][1] = dlx.convert(DATA, to="dlx")
    result = dlx.convert(tree, to="liba", device="cuda_host")
    assert [cuda.peek(each.ptr, N) for each in result["a"]] == [DATA] * 2 and result["b"].shape == (0,)
    assert all(where(each.ptr).name == "cuda_host" for each in result["a"])


def test_what_cannot_be_pinned(cuda, lib, lib_b, monkeypatch):
    """copy=False, a framework without pinned memory, a failing allocator; all by name."""
    with pytest.raises(CopyRequiredError, match="cuda_host:0"):
        dlx.convert(on_device(lib), to="liba", device="cuda_host", copy=False)
    with pytest.raises(DeviceError, match="cannot be on cuda_host:0"):
        dlx.convert(DATA, to="libb", device="cuda_host")
    monkeypatch.setattr(PinningDevices, "new_array", lambda *args: None)
    with pytest.raises(DeviceError, match=r"liba cannot allocate pinned memory now\. Pass device='cpu'\."):
        dlx.convert(DATA, to="liba", device="cuda_host")


# ---- without a wait --------------------------------------------------------------------------------------------------


def moved(lib, source, stream, **options):
    """Move memory on a stalled stream, without waiting for it; return the result."""
    lib.cuda.stall(stream)
    with lib.on(stream):
        result = dlx.convert(source, to="liba", wait=False, **options)
    assert not lib.cuda.blocked, "the host waited"
    return result


def pinned_source(cuda, owner):
    """Return pinned memory with known data."""
    address = cuda.alloc(N, kind=1)
    cuda.poke(address, DATA)
    return dlx.from_pointer(address, (N,), "uint8", device="cuda_host", owner=owner)


class Owner:
    """An owner whose release is noted."""

    released = 0

    def __del__(self):
        type(self).released += 1


@pytest.mark.parametrize("to", ["liba", "dlx"])
def test_to_the_device_the_source_is_kept_alive(cuda, lib, to):
    """Until the copy is done, and no longer; the host does not wait; the consumer's stream does."""
    stream, before = cuda.stream(), Owner.released
    source = pinned_source(cuda, Owner())
    cuda.stall(stream)
    with lib.on(stream):
        work = dlx._core.cuda.work_stream(dlx.Device("cuda")).handle if to == "dlx" else stream
        cuda.stall(work)
        blocked = cuda.blocked
        result = dlx.convert(source, to=to, device="cuda", wait=False)
        assert cuda.blocked == blocked, "the host waited"
        del source
        gc.collect()
        assert (Owner.released - before, dlx.release_pending()) == (0, 1)
        result = dlx.convert(result, to="liba")
        assert not lib.read(result)
    cuda.resume_all()
    assert dlx.release_pending() == 0 and Owner.released == before + 1
    assert cuda.peek(result.ptr, N) == DATA


def test_to_the_host_both_are_kept_alive(cuda, lib):
    """The pinned result is unfinished until its stream is; neither memory is reused, even if both are dropped."""
    stream = cuda.stream()
    with lib.on(stream):
        source = on_device(lib)
    cuda.stall(stream)
    blocked = cuda.blocked
    with lib.on(stream):
        result = dlx.convert(source, to="liba", device="cuda_host", wait=False)
        plan = str(dlx.plan(source, "liba", device="cuda_host", wait=False))
    assert "to cuda_host:0, which the host does not wait for" in plan and "the host waits" not in plan
    assert cuda.blocked == blocked and cuda.host_read(result.ptr, N), "the copy was waited for"
    cuda.clear_report()
    freed = lib.freed
    del source, result
    gc.collect()
    assert lib.freed == freed and dlx.release_pending() == 2
    cuda.resume_all()
    assert dlx.release_pending() == 0 and lib.freed == freed + 2 and not lib.reused_too_early


def test_other_host_memory_is_waited_for(cuda, lib):
    """A result in pageable memory is finished, whatever `wait` is."""
    stream = cuda.stream()
    with lib.on(stream):
        result = dlx.convert(on_device(lib), to="dlx", device="cpu", wait=False)
    assert bytes(memoryview(result)) == DATA and not cuda.host_read(result.data_ptr, N)


def test_an_unknown_stream_is_waited_for(cuda, lib):
    """Memory of an unknown stream is finished in pinned memory, since no one could wait for that stream."""
    array = on_device(lib)
    source = dlx.from_pointer(array.ptr, (N,), "uint8", device="cuda", owner=array)
    result = dlx.convert(source, to="liba", device="cuda_host", wait=False)
    assert cuda.peek(result.ptr, N) == DATA and not cuda.host_read(result.ptr, N)


def test_strided_host_memory(cuda, lib):
    """It is packed first, into memory that is waited for."""
    source = memoryview(DATA + DATA)[::2]
    result = dlx.convert(source, to="liba", device="cuda", wait=False)
    lib.read(result)
    assert cuda.peek(result.ptr, N) == bytes(source)


def test_in_a_capture(cuda, lib):
    """A graph keeps no source alive: host memory is refused, and the capture goes on."""
    stream, source = cuda.stream(), pinned_source(cuda, None)
    with lib.on(stream):
        cuda.capture(stream)
        with pytest.raises(StreamError):
            dlx.convert(source, to="liba", device="cuda", wait=False)
        assert cuda.end_capture(stream) == 0


def test_many_at_once(cuda, lib):
    """A tree of host arrays moves by one copy each, without a wait."""
    stream = cuda.stream()
    tree = [pinned_source(cuda, None) for _ in range(5)]
    cuda.stall(stream)
    blocked = cuda.blocked
    with lib.on(stream):
        results = dlx.convert(tree, to="liba", device="cuda", wait=False)
        assert cuda.blocked == blocked and not any(map(lib.read, results))
    cuda.resume_all()
    assert [cuda.peek(each.ptr, N) for each in results] == [DATA] * 5


def test_the_options(cuda, lib):
    """`wait` is True or False, also for plans, and belongs to what a plan runs."""
    with pytest.raises(ValueError, match="wait must be True or False, found None"):
        dlx.convert(DATA, to="liba", device="cuda", wait=None)
    plan = dlx.plan(DATA, "liba", device="cuda", wait=False)
    cuda.forget()
    assert "move: from cpu to cuda:0, which the host does not wait for" in str(plan)
    assert "wait" not in str(dlx.plan(DATA, "liba", device="cuda"))
    result = plan.run()
    lib.read(result)
    assert cuda.peek(result.ptr, N) == DATA and not cuda.count("cuStreamSynchronize")
