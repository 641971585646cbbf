"""The fast path for arrays in device memory has the results, driver calls and lifetimes of the Python path."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import LEGACY, MANAGED, PER_THREAD

import dlx
from dlx._core import cuda as native_cuda
from dlx._core import native
from dlx._core.stream import Stream
from dlx._engine.fast_path import consumer_failed, learn
from dlx._registry.registry import registry
from dlx._using.stream_context import set_streams
from dlx.errors import ConversionError, DeviceError, ReadOnlyError, StreamError

pytestmark = pytest.mark.filterwarnings("error")

PYTHON = object()
fast = native.FastPathFunction(lambda *args, **keywords: PYTHON, learn, consumer_failed)
"""The fast path alone: it returns PYTHON instead of calling the Python path."""
slow = dlx.convert.__wrapped__

STREAMS = ["shared", "own", "legacy", "per-thread"]
SHAPES = {
    "one": lambda made: made(),
    "many": lambda made: [made() for _ in range(20)],
    "nested": lambda made: {"a": [made(), (made(), {"b": made()}), 1], "c": made()},
}


@pytest.fixture
def lib_a(monkeypatch, cuda):
    """The producer."""
    return gpulib.install(monkeypatch, "liba", cuda, gpulib.QuickAdapter)


@pytest.fixture
def lib_b(monkeypatch, cuda):
    """The consumer."""
    return gpulib.install(monkeypatch, "libb", cuda, gpulib.QuickAdapter)


@pytest.fixture
def warm(cuda, lib_a, lib_b):
    """Use both on a device, including by dlx: the first use takes the Python path.

    Loading a plugin clears dlx's routes, so all are loaded first.
    """
    registry.load_all()
    for target in ("libb", "dlx"):
        assert fast(lib_a.made(), to=target) is PYTHON
        dlx.convert(lib_a.made(), to=target)
    own = dlx.empty((4,), "uint8", device="cuda:0")
    assert fast(own, to="libb") is PYTHON
    dlx.convert(own, to="libb")
    dlx.release_pending()


def flat(tree):
    """Return all arrays of a container."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [array for child in tree for array in flat(child)] if isinstance(tree, list | tuple) else [tree]


def arrays_of(tree):
    """The same without objects that are passed through."""
    return [each for each in flat(tree) if not isinstance(each, int)]


def handles(cuda, producer, consumer, device=0):
    """Return the streams of a pair; `shared` ones are the same."""
    known = {"shared": cuda.stream(device), "legacy": LEGACY, "per-thread": PER_THREAD}
    return known.get(producer) or cuda.stream(device), known.get(consumer) or cuda.stream(device)


def calls(cuda):
    """Return the driver's stream calls since the record began, without event numbers."""
    names = [
        f"cu{name}"
        for name in (
            *("EventCreate", "EventRecord", "EventQuery", "EventSynchronize", "StreamWaitEvent", "StreamQuery"),
            *("StreamIsCapturing", "StreamSynchronize", "ThreadExchangeStreamCaptureMode"),
        )
    ]
    log = [" ".join(word for word in line.split() if not word.startswith("e")) for line in cuda.log]
    return {name: cuda.count(name) for name in names}, log


@pytest.mark.few(64)
@pytest.mark.parametrize("target", ["libb", "dlx"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("producer", "consumer"), list(itertools.product(STREAMS, STREAMS)))
def test_as_the_python_path(cuda, lib_a, lib_b, warm, producer, consumer, shape, device, target):
    """Both order the same streams by the same calls, share the same memory, and release it at the same time."""
    p, c = handles(cuda, producer, consumer, device)
    seen = []
    with lib_a.on(p, device), lib_b.on(c, device):
        for convert in (slow, fast, slow, fast):
            tree = SHAPES[shape](lambda: lib_a.made(device))
            cuda.forget()
            results = arrays_of(convert(tree, to=target))
            ordered = calls(cuda)
            assert PYTHON not in results
            addresses = [array.ptr for array in arrays_of(tree)]
            if target == "dlx":
                assert [tensor.data_ptr for tensor in results] == addresses
                assert {tensor.device for tensor in results} == {(2, device)}
                results = arrays_of(slow(results, to="libb"))
            assert [array.ptr for array in results] == addresses
            assert not any(lib_b.read(array) for array in results) and cuda.races == 0
            cuda.stall(c, device)
            for array in results:
                lib_b.read(array)
            cuda.forget()
            freed = lib_a.freed
            del tree, results, array
            released, kept = calls(cuda), lib_a.freed - freed
            cuda.resume(c, device)
            assert dlx.release_pending() == 0 and lib_a.freed == freed + len(addresses)
            seen.append((ordered, released, kept))
    assert seen[2] == seen[3]  # creates events
    assert lib_a.reused_too_early == 0 and cuda.races == 0


@pytest.mark.parametrize(("producer", "consumer"), list(itertools.product(STREAMS, STREAMS)))
def test_one_order_for_many(cuda, lib_a, lib_b, warm, producer, consumer):
    """One record and one wait for a thousand arrays, nothing on one stream; each framework's stream is read once."""
    p, c = handles(cuda, producer, consumer)
    with lib_a.on(p), lib_b.on(c):
        arrays = [lib_a.made() for _ in range(1000)]
        cuda.forget()
        lib_a.asked = lib_b.asked = 0
        results = fast(arrays, to="libb")
        assert cuda.ordering == (0 if p == c else 2)
        assert lib_a.asked == lib_b.asked == 1
        assert len({array.ptr for array in results}) == 1000
        del results
        cuda.forget()
        tensors = fast(arrays, to="dlx")
        assert cuda.ordering == 1 == cuda.count("cuEventRecord")
        del tensors


@pytest.mark.parametrize("consumer", STREAMS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_from_dlx(cuda, lib_a, lib_b, warm, consumer, shape):
    """A dlx.Tensor has its own event; the tensors of one call share an event, and one wait is enough."""
    _, c = handles(cuda, "own", consumer)
    seen = []
    with lib_a.on(cuda.stream()), lib_b.on(c):
        for convert in (slow, fast, slow, fast):
            tree = slow(SHAPES[shape](lib_a.made), to="dlx")
            cuda.forget()
            results = convert(tree, to="libb")
            if results is PYTHON:
                assert consumer == "per-thread" and convert is fast
                results = slow(tree, to="libb")
            results = arrays_of(results)
            assert not any(lib_b.read(array) for array in results)
            seen.append(calls(cuda))
            del tree, results
    assert seen[2] == seen[3] and cuda.count("cuStreamWaitEvent") == 1


def test_memory_without_an_event(cuda, lib_b, warm):
    """A tensor created from an address is ready: no wait, but it is kept until the consumer's stream is done."""
    gone = []

    class Owner:
        def __del__(self):
            gone.append(1)

    memory = cuda.alloc(64)
    with lib_b.on(cuda.stream()) as c:
        for convert in (slow, fast):
            tensor = native.tensor_new(memory, (64,), None, dlx.DType("uint8"), (2, 0), 0, Owner())
            cuda.forget()
            result = convert(tensor, to="libb")
            assert cuda.ordering == 0 and result.ptr == memory
            cuda.stall(c.ptr)
            lib_b.read(result)
            del tensor, result
            assert not gone
            cuda.resume(c.ptr)
            assert dlx.release_pending() == 0 and gone.pop()
    cuda.free(memory)


def test_several_devices_and_frameworks(cuda, lib_a, lib_b, warm, monkeypatch):
    """Each pair of streams is ordered once, for all frameworks that use it; host arrays may be in between."""
    other = gpulib.install(monkeypatch, "other", cuda, gpulib.QuickAdapter)
    dlx.convert(other.made(), to="libb")
    host = other.Array(dlx.empty((64,), "uint8"))
    shared = cuda.stream()
    with lib_a.on(shared), other.on(shared), lib_a.on(cuda.stream(1), 1), lib_b.on(cuda.stream()):
        made = [lib_a.made(0), other.made(0), lib_a.made(1), lib_a.made(0), other.made(1)]
        cuda.forget()
        results = fast(made, to="libb")
        # The legacy stream of the second device is both the consumer's and the one of `other`.
        assert cuda.ordering == 4 and not any(lib_b.read(array) for array in results)
        assert fast([*made, host], to="libb") is PYTHON  # does not support device memory
        cuda.forget()
        tensors = fast(made[:2], to="dlx")
        assert cuda.ordering == 1
        del tensors, results


def test_what_python_does(cuda, lib_a, lib_b, warm):
    """If C cannot prove that a case is safe, the Python path rejects it or copies."""
    array = lib_a.made()
    for options in ({"copy": True}, {"device": "cpu"}, {"device": "cuda:1"}, {"stream": 1}, {"strict": True}):
        assert fast(array, to="libb", **options) is PYTHON
    assert fast(array, like=lib_b.made()) is PYTHON
    assert fast(lib_a.made(kind=MANAGED), to="libb") is PYTHON
    assert fast([array, lib_a.made(kind=MANAGED)], to="libb") is PYTHON
    memory = cuda.alloc(64)
    for device, flags in ((3, 0), (13, 0), (2, 1)):
        tensor = native.tensor_new(memory, (64,), None, dlx.DType("uint8"), (device, 0), flags, None)
        assert fast(tensor, to="libb") is PYTHON
    with pytest.raises(ReadOnlyError):
        dlx.convert(tensor, to="libb", copy=False)
    wide = native.tensor_new(memory, (16,), None, dlx.DType("int32"), (2, 0), 0, None)
    assert fast(wide, to="libb") is PYTHON  # it does not support int32
    for options in ({"copy": False}, {"detach": True}, {"readonly": "error"}):
        assert fast(array, to="libb", **options).ptr == array.ptr
    cuda.free(memory)


def test_a_capture(cuda, lib_a, lib_b, warm):
    """A stream that captures is shared; across the limits of a capture it is refused, and the capture continues."""
    with lib_a.on(cuda.stream()) as p, lib_b.on(p.ptr):
        array = lib_a.made()
        cuda.capture(p.ptr)
        cuda.forget()
        assert fast(array, to="libb").ptr == array.ptr
        assert cuda.count() == 0
        with lib_b.on(cuda.stream()):
            for tree in (array, [array]):
                assert fast(tree, to="libb") is PYTHON
                with pytest.raises(StreamError, match="capturing a graph"):
                    dlx.convert(tree, to="libb")
            assert cuda.ordering == 0
        assert cuda.end_capture(p.ptr) == 0


def test_inside_using(cuda, lib_a, lib_b, warm):
    """If a framework works on another framework's stream, the Python path knows the stream's owner."""
    array = lib_a.made()
    stream = cuda.stream()
    kept = gpulib.Stream(stream)
    with lib_a.on(cuda.stream()):
        with set_streams(lib_b.adapter, {dlx.Device("cuda:0"): Stream(dlx.Device("cuda:0"), stream, kept)}):
            assert fast(array, to="libb") is PYTHON
        assert fast(array, to="libb") is not PYTHON
    assert lib_b.freed == 0


def test_a_stream_is_kept(cuda, lib_a, lib_b, warm):
    """The stream's owner lives until its stream is done, and so does a consumer's memory."""
    with lib_a.on(cuda.stream()):
        with lib_b.on(cuda.stream()) as c:
            result = fast(lib_a.made(), to="libb")
            seen, handle = weakref.ref(c), c.ptr
        del c
        cuda.stall(handle)
        cuda.read(handle, result.ptr, gpulib.N)
        del result
        assert seen() is not None and dlx.release_pending() == 1
        cuda.resume(handle)
        assert dlx.release_pending() == 0 and seen() is None


@pytest.mark.parametrize("side", ["liba", "libb"])
def test_no_stream_is_told(cuda, lib_a, lib_b, warm, monkeypatch, side):
    """The Python path retries failures and reports them; an interrupt ends the call."""
    framework = {"liba": lib_a, "libb": lib_b}[side]
    array = lib_a.made()

    def failing(error):
        def current(device=None):
            raise error

        return current

    monkeypatch.setattr(framework, "current", failing(RuntimeError("it is broken")))
    assert fast(array, to="libb") is PYTHON and fast([array], to="libb") is PYTHON
    with pytest.raises(DeviceError, match=f"{side} failed to name its stream on cuda:0: .*it is broken"):
        dlx.convert(array, to="libb")
    monkeypatch.setattr(framework, "current", failing(KeyboardInterrupt()))
    for tree in (array, [array]):
        with pytest.raises(KeyboardInterrupt):
            fast(tree, to="libb")
    monkeypatch.undo()
    del array
    gc.collect()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_consumer_that_fails(cuda, lib_a, lib_b, warm, monkeypatch, shape):
    """The Python path's error with its path; all memory is released when the consumer's stream is done."""

    def failing(tensor):
        raise RuntimeError("no room for it")

    said = []
    monkeypatch.setattr(lib_b.adapter, "load", failing, raising=False)
    native.routes_clear()
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        dlx_first = fast(lib_a.made(), to="libb")
        assert dlx_first is PYTHON
        for convert in (slow, fast):
            before = lib_a.freed
            tree = SHAPES[shape](lib_a.made)
            with pytest.raises(ConversionError, match="no room for it") as caught:
                convert(tree, to="libb")
            said.append((type(caught.value), str(caught.value), caught.value.path, type(caught.value.__cause__)))
            n = len(arrays_of(tree))
            del tree, caught
            gc.collect()
            assert dlx.release_pending() == 0 and lib_a.freed == before + n
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing"])
def test_a_driver_that_fails(cuda, lib_a, lib_b, warm, name):
    """The Python path retries a failed driver call, and reports it if it fails again."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        array = lib_a.made()
        fast(array, to="libb")
        cuda.fail(name, 400)
        assert fast(array, to="libb") is PYTHON
        cuda.fail(name, 400)
        result = dlx.convert(array, to="libb")
        assert not lib_b.read(result)
        cuda.fail(name, 400)
        with pytest.raises(DeviceError, match=name):
            slow(array, to="libb")
        del result, array


def test_threads_have_streams_of_their_own(cuda, lib_a, lib_b, warm):
    """Concurrent conversions in several threads release shared memory once."""
    import threading

    failures = []

    def work():
        try:
            for _ in range(200):
                arrays = [lib_a.made() for _ in range(3)]
                results = fast({"a": arrays, "b": arrays[0]}, to="libb")
                assert [each.ptr for each in results["a"]] == [each.ptr for each in arrays]
        except BaseException as error:
            failures.append(error)

    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not failures
    dlx.release_pending()
    cuda.clear_report()  # kernels of several threads on one stream


def test_no_elements_and_odd_strides(cuda, lib_a, lib_b, warm):
    """Views with any strides are shared; an empty tensor has no owner to wait for."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        for shape, strides in (((4, 8), (16, 2)), ((8,), (0,)), ((3, 1, 2), (2, 99, 1)), ((), ()), ((0, 4), (4, 1))):
            array = lib_a.made(shape=shape, strides=strides)
            results = [convert(array, to="libb") for convert in (slow, fast)]
            assert results[0].tensor.strides == results[1].tensor.strides
            assert results[1].tensor.shape == shape
            assert results[1].ptr == (results[0].ptr if 0 not in shape else 0)
            del results, array
        dlx.release_pending()
        cuda.clear_report()


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "complex128"])
@pytest.mark.parametrize(("shape", "strides"), [((2,), (1,)), ((2, 2), (2, 1)), ((2, 1, 2), (1, 99, 1)), ((2,), (0,))])
@pytest.mark.parametrize("target", ["libb", "dlx"])
def test_wide_elements(cuda, lib_a, lib_b, warm, dtype, shape, strides, target):
    """Byte strides of elements of any width are read in C."""
    with lib_a.on(cuda.stream()), lib_b.on(cuda.stream()):
        array = lib_a.made(shape=shape, strides=strides, dtype=dtype)
        expected, found = slow(array, to=target), fast(array, to=target)
        assert found is not PYTHON
        if target == "libb":
            expected, found = expected.tensor, found.tensor
        assert (found.shape, found.strides, found.dtype) == (expected.shape, expected.strides, dlx.DType(dtype))
        assert found.data_ptr == expected.data_ptr
        del array, expected, found
        dlx.release_pending()
        cuda.clear_report()


def test_tvm_ffi(cuda, lib_a, warm):
    """The real tvm_ffi, whose table returns its environment's stream, in both directions."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    device = tvm_ffi.device(2, 0)
    with lib_a.on(cuda.stream()) as p:
        for target in ("tvm_ffi", "liba"):  # the first use takes the Python path
            dlx.convert(dlx.convert(lib_a.made(), to="tvm_ffi"), to=target)
        for c, orders in ((cuda.stream(), 2), (p.ptr, 0)):
            with tvm_ffi.use_raw_stream(device, c):
                array = lib_a.made()
                cuda.forget()
                held = fast([array], to="tvm_ffi")[0]
                assert type(held) is tvm_ffi.Tensor and cuda.ordering == orders
                assert not cuda.read(c, array.ptr, gpulib.N)
                cuda.write(c, array.ptr, gpulib.N)
                cuda.forget()
                back = fast(held, to="liba")
                assert back.ptr == array.ptr and cuda.ordering == orders and not lib_a.read(back)
                cuda.stall(p.ptr)
                lib_a.read(back)
                freed = lib_a.freed
                del array, held, back
                assert lib_a.freed == freed + (orders == 0)
                cuda.resume(p.ptr)
                assert dlx.release_pending() == 0 and lib_a.freed == freed + 1


class Producer:
    """An unregistered type whose host array must be copied for a consumer that needs alignment."""

    def __init__(self):
        memory = dlx.empty((192,), "uint8", "cpu")
        offset = -memory.data_ptr % 64 + 1
        self.array, self.calls = dlx.from_pointer(memory.data_ptr + offset, 64, "uint8", owner=memory), 0

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.calls += 1
        return self.array.__dlpack__(max_version=max_version)


@pytest.mark.parametrize("fails", [False, True], ids=["the first time", "the driver fails"])
def test_a_producer_that_is_copied_beside_a_device_array(monkeypatch, cuda, lib_a, fails):
    """Streams are ordered before any copy, so that the Python path can still take a capsule."""
    gpulib.install(monkeypatch, "libc", cuda, lambda framework: gpulib.QuickAdapter(framework, min_alignment=64))
    for _ in range(2):
        dlx.convert(Producer(), to="libc")
    if fails:
        dlx.convert(lib_a.made(), to="libc")
        dlx.convert(lib_a.made(), to="libc")
        cuda.fail("cuEventRecord", 2)
    producer, stream = Producer(), cuda.stream(0)
    with lib_a.on(stream):
        first, second = dlx.convert([producer, lib_a.made()], to="libc")
    assert producer.calls == 1 and first is not None and second is not None


def test_one_event_for_two_devices(cuda, lib_b, warm):
    """The legacy streams of two devices have the same number, and each waits."""
    arrays = [dlx.empty((64,), "uint8", f"cuda:{device}") for device in (0, 1)]
    for array in arrays:
        dlx.convert(array, to="libb")
    stream = Stream(dlx.Device("cuda:0"), cuda.stream(0))
    for array in arrays:
        native_cuda.order(native_cuda.work_stream(array.device), stream)
    ready = native_cuda.ready(stream)
    cuda.forget()
    dlx.convert([native_cuda.when(array, ready) for array in arrays], to="libb")
    assert cuda.count("cuStreamWaitEvent") == 2
