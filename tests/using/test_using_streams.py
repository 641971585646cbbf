"""`dlx.using` on devices: the function works on its caller's stream, so that no stream has to wait."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from dataclasses import replace

import pytest
from support.cuda import gpulib
from support.cuda.fake_cuda import LEGACY, MANAGED
from support.cuda.gpulib import N

import dlx
from dlx._core import cuda as driver
from dlx._using.stream_context import Work
from dlx.errors import StreamError

pytestmark = pytest.mark.filterwarnings("error")

Pair = collections.namedtuple("Pair", "x y")


@pytest.fixture
def caller(monkeypatch, cuda):
    """Return a caller's framework."""
    return gpulib.install(monkeypatch, "liba", cuda)


@pytest.fixture
def callee(monkeypatch, cuda):
    """Return a function's framework."""
    return gpulib.install(monkeypatch, "libb", cuda)


@pytest.fixture
def third(monkeypatch, cuda):
    """Return a third framework."""
    return gpulib.install(monkeypatch, "libc", cuda)


@pytest.fixture
def unset(monkeypatch, cuda):
    """Return a framework whose current stream cannot be set, and whose arrays have streams, like jax."""
    return gpulib.install(monkeypatch, "libe", cuda, gpulib.EventAdapter)


def slow(cuda, device=0):
    """Return a stream that never finishes, so that the host cannot assume it by freeing memory."""
    handle = cuda.stream(device)
    cuda.stall(handle, device)
    return handle


def arrays(tree):
    """Return all arrays in containers of any type."""
    if isinstance(tree, gpulib.Array):
        return [tree]
    if isinstance(tree, collections.abc.Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple | collections.abc.Sequence) and not isinstance(tree, str):
        return [array for child in tree for array in arrays(child)]
    return []


TREES = {
    "one": lambda made: made(),
    "list": lambda made: [made(), made()],
    "tuple": lambda made: (made(), made()),
    "dict": lambda made: {"a": made(), "b": made()},
    "nested": lambda made: {"a": [made(), (made(), {"b": [made()]})]},
    "namedtuple": lambda made: Pair(made(), [made()]),
    "foreign sequence": lambda made: collections.UserList([made(), made()]),
    "foreign mapping": lambda made: collections.UserDict(a=made()),
    "deque": lambda made: collections.deque([made()]),
    "lazy view": lambda made: dlx.convert([made(), {"b": made()}], to="libb", lazy=True),
    "the host first": lambda made: [bytearray(4), 1, "text", None, made()],
}


# ---- whose stream ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["positional", "named"])
@pytest.mark.parametrize("tree", TREES)
def test_the_function_works_on_its_callers_stream(cuda, caller, callee, tree, where):
    """Arrays in any container are found; no stream is ordered, and nothing races."""
    streams = []

    @dlx.using("libb")
    def work(x):
        streams.append(callee.handle(0))
        for array in arrays(x):
            assert type(array) is callee.Array and not callee.write(array)
        return {"answer": callee.made()}

    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)) as before:
        x = TREES[tree](caller.made)
        cuda.forget()
        result = work(x=x) if where == "named" else work(x)
        assert streams == [p.ptr] and cuda.ordering == 0
        assert callee.current(0) is before
        assert type(result["answer"]) is caller.Array and not caller.read(result["answer"])
        assert cuda.races == 0


@pytest.mark.parametrize("handle", [LEGACY, 2])
def test_numbered_streams_are_streams(cuda, caller, callee, handle):
    """The legacy and the per-thread stream are supported."""
    work = dlx.using("libb")(lambda x: callee.handle(0))
    with caller.on(handle), callee.on(slow(cuda)):
        assert work(caller.made()) == handle


def test_the_host_first_and_the_device_last(cuda, np, caller, callee):
    """Host arrays have no stream; the last argument may determine it."""

    @dlx.using("libb", returns="libb")
    def work(a, b, *, c):
        return callee.handle(0)

    with caller.on(slow(cuda)) as p:
        assert work(np.zeros(3, "uint8"), [np.zeros(3, "uint8")], c={"x": (1, caller.made())}) == p.ptr


def test_two_devices(cuda, caller, callee):
    """Each device has its stream, in any order; managed memory uses the stream of its device."""

    @dlx.using("libb", returns="libb")
    def work(*x):
        assert not any(callee.write(array) for array in x)
        return callee.handle(0), callee.handle(1)

    with caller.on(slow(cuda)) as p, caller.on(slow(cuda, 1), 1) as q, callee.on(slow(cuda, 1), 1) as before:
        cuda.forget()
        assert work(caller.made(1, kind=MANAGED), caller.made(), caller.made(1)) == (p.ptr, q.ptr)
        assert (cuda.ordering, callee.handle(0), callee.current(1)) == (0, LEGACY, before)


def test_none(cuda, np, caller, callee, unset):
    """Host arrays, no arrays, and arrays with streams set none; host arrays do not load the driver."""
    work = dlx.using("libb")(lambda *x: callee.handle(0))
    with callee.on(slow(cuda)) as own:
        assert work(np.zeros(3, "uint8")) == work() == work("text", [None]) == own.ptr
        assert not driver.is_loaded()
        assert work(unset.made()) == own.ptr


def test_an_outer_stream_comes_back(cuda, caller, callee):
    """The previous stream is current afterwards, even if the function raises."""

    @dlx.using("libb")
    def work(x, divisor):
        assert callee.handle(0) == p.ptr
        return 1 / divisor

    with callee.on(slow(cuda)) as outer, caller.on(slow(cuda)) as p:
        work(caller.made(), 1)
        assert callee.current(0) is outer
        with pytest.raises(ZeroDivisionError):
            work(caller.made(), 0)
        assert callee.current(0) is outer
        with pytest.raises(dlx.errors.ReadOnlyError):
            dlx.using("libb", readonly="error")(work)(caller.made(readonly=True))
        assert callee.current(0) is outer


# ---- several callers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_callers_on_two_streams(cuda, caller, callee, third, turned, raises):
    """In any order of arguments, the function keeps its own stream, and callers wait for it, even if it raises."""

    @dlx.using("libb")
    def work(x, y):
        assert callee.current(0) is own
        assert not callee.write(x) and not callee.write(y)
        if raises:
            raise KeyError("planned")

    with caller.on(slow(cuda)), third.on(slow(cuda)), callee.on(slow(cuda)) as own:
        a, c = caller.made(), third.made()
        cuda.forget()
        with pytest.raises(KeyError, match="planned") if raises else contextlib.nullcontext():
            work(*((c, a) if turned else (a, c)))
        assert not caller.write(a) and not third.write(c)
        assert cuda.count("cuStreamWaitEvent") == 4  # two in, two out


def test_callers_on_one_stream(cuda, caller, callee, third):
    """Two frameworks on one stream count as one caller."""
    handle = slow(cuda)
    with caller.on(handle), third.on(handle):
        assert dlx.using("libb")(lambda *x: callee.handle(0))(caller.made(), third.made()) == handle


@pytest.mark.parametrize("turned", [False, True])
def test_arrays_of_the_functions_framework_stay_on_their_stream(cuda, caller, callee, turned):
    """They are not converted and therefore not ordered; the function keeps its stream."""

    @dlx.using("libb")
    def work(*x):
        assert callee.current(0) is own
        assert not any(callee.write(array) for array in x)

    with caller.on(slow(cuda)), callee.on(slow(cuda)) as own:
        a, b = caller.made(), callee.made()
        work(*((b, a) if turned else (a, b)))
        assert not caller.write(a) and not callee.write(b)


# ---- an explicit stream ----------------------------------------------------------------------------------------------


def test_a_stream_that_is_said(cuda, caller, callee):
    """It overrides the caller's; arguments are ordered in, and their callers wait."""
    c = slow(cuda)

    @dlx.using("libb", stream=c)
    def work(x, y):
        assert callee.handle(0) == c and not callee.write(x) and not callee.write(y)
        return callee.made(), x

    with caller.on(slow(cuda)), callee.on(slow(cuda)):
        a, b = caller.made(), callee.made()
        result, same = work(a, b)
        assert same is a and type(result) is caller.Array
        assert not caller.read(result) and not caller.write(a) and not callee.write(b)


def test_a_stream_that_is_said_for_results_that_stay(cuda, callee, third, caller):
    """Unconverted results are ready on the stream that is current afterwards."""
    work = dlx.using("libb", stream=slow(cuda))(lambda *x: callee.made())
    with caller.on(slow(cuda)), third.on(slow(cuda)), callee.on(slow(cuda)):
        for x in ([callee.made()], [caller.made(), third.made()]):
            assert not callee.write(work(*x))


def test_no_stream_orders_nothing(cuda, caller, callee):
    """With -1, the current stream is not set, and a planted race is detected."""
    raced = []

    @dlx.using("libb", stream=-1)
    def work(x):
        assert callee.current(0) is own
        raced.append(callee.write(x))

    with caller.on(slow(cuda)), callee.on(slow(cuda)) as own:
        a = caller.made()
        work(a)
        assert raced == [True] and cuda.ordering == 0
    cuda.clear_report()


def test_what_is_no_stream_is_refused_before_the_call(cuda, caller, callee):
    """The function is not called."""
    called = []
    with pytest.raises(StreamError, match="Pass 1"):
        dlx.using("libb", stream=0)(called.append)(caller.made())
    assert not called


def test_without_the_way_back_it_would_race(cuda, caller, callee, monkeypatch):
    """A planted race shows that the tests of ordering can fail."""
    monkeypatch.setattr(Work, "_wake", lambda *args: None)
    work = dlx.using("libb", stream=slow(cuda))(lambda x: callee.write(x))
    with caller.on(slow(cuda)):
        a = caller.made()
        work(a)
        assert caller.write(a)
    cuda.clear_report()


# ---- results ---------------------------------------------------------------------------------------------------------


def test_lazy_results_are_ready_when_they_are_looked_at(cuda, caller, callee):
    """They are converted after the function's stream is no longer current."""

    @dlx.using("libb", lazy=True)
    def work(x):
        return [callee.made(), {"b": callee.made()}]

    with caller.on(slow(cuda)), callee.on(slow(cuda)):
        view = work(caller.made())
        assert not caller.read(view[0]) and not caller.read(view[1]["b"]) and cuda.races == 0


class Pause:
    """An awaitable that a coroutine waits for, without an event loop."""

    def __await__(self):
        yield


def finished(running):
    """Run a coroutine to its end and return its result."""
    try:
        while True:
            running.send(None)
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("kind", ["lazy", "coroutine", "generator", "asynchronous generator"])
def test_a_caller_who_is_on_another_stream_by_then(cuda, caller, callee, kind):
    """A result is made on the first stream; the caller's current stream waits for it."""

    @dlx.using("libb", lazy=True)
    def lazy(x):
        return [callee.made()]

    @dlx.using("libb")
    async def coroutine(x):
        await Pause()
        return callee.made()

    @dlx.using("libb")
    def generator(x):
        yield
        yield callee.made()

    @dlx.using("libb")
    async def asynchronous(x):
        yield
        yield callee.made()

    with callee.on(slow(cuda)):
        with caller.on(slow(cuda)):
            if kind == "lazy":
                view = lazy(caller.made())
            elif kind == "coroutine":
                running = coroutine(caller.made())
                running.send(None)
            else:
                running = (generator if kind == "generator" else asynchronous)(caller.made())
                if kind == "generator":
                    next(running)
                else:
                    finished(anext(running))
        with caller.on(slow(cuda)):
            if kind == "lazy":
                result = view[0]
            elif kind == "coroutine":
                result = finished(running)
            else:
                result = next(running) if kind == "generator" else finished(anext(running))
            assert type(result) is caller.Array and not caller.read(result)


def test_writes_come_back_to_a_caller_who_is_on_another_stream_by_then(cuda, caller, callee):
    """The copy is ready before it is written back."""
    raced = []

    def put(array, key, value):
        raced.append(cuda.read(caller.handle(0), value.ptr, 8))

    caller.Array.__setitem__ = put
    callee.adapter.facts["layouts"] = 0  # compact arrays only

    @dlx.using("libb", writes="x")
    async def work(x):
        await Pause()
        cuda.write(callee.handle(0), x.ptr, 8)

    with callee.on(slow(cuda)):
        with caller.on(slow(cuda)):
            running = work(caller.made(shape=(8,), strides=(8,)))
            running.send(None)
        with caller.on(slow(cuda)):
            finished(running)
    assert raced == [False]


def test_results_in_another_framework(cuda, np, caller, callee, third):
    """With `returns`, they are ordered for their framework's current stream, or on the host."""
    with caller.on(slow(cuda)), third.on(slow(cuda)):
        assert not third.read(dlx.using("libb", returns="libc")(lambda x: callee.made())(caller.made()))
        cuda.forget()
        made = dlx.using("libb", returns="numpy")(lambda x: callee.made())(caller.made())
        assert type(made) is np.ndarray and cuda.count("cuStreamSynchronize") > 0 and cuda.races == 0


# ---- frameworks whose current stream cannot be set -------------------------------------------------------------------


def test_it_is_ordered_in_and_out(cuda, caller, unset):
    """Arguments and results are waited for."""

    @dlx.using("libe")
    def work(x):
        assert not unset.write(x)
        return x, unset.made()

    with caller.on(slow(cuda)), unset.on(slow(cuda)):
        a = caller.made()
        same, result = work(a)
        assert same is a and not caller.read(result)


def test_one_that_names_its_stream_but_cannot_set_it(cuda, caller, callee):
    """Its callers wait for its work on their memory."""
    callee.adapter.streams = replace(callee.adapter.streams, activate=None)

    @dlx.using("libb")
    def work(x):
        assert callee.current(0) is own and not callee.write(x)
        return callee.made()

    with caller.on(slow(cuda)), callee.on(slow(cuda)) as own:
        a = caller.made()
        result = work(a)
        assert not caller.write(a) and not caller.read(result)


def test_jax_like_callers(cuda, unset, callee):
    """Arrays with streams are exported for the function's stream."""
    with callee.on(slow(cuda)) as own, unset.on(slow(cuda)):
        assert not dlx.using("libb", returns="libb")(callee.read)(unset.made())
        assert unset.heard == [own.ptr]


# ---- step by step ----------------------------------------------------------------------------------------------------


def drive(*coroutines):
    """Run coroutines alternately, one step each."""

    async def together():
        return await asyncio.gather(*coroutines)

    return asyncio.run(together())


def test_coroutines_are_on_the_stream_between_awaits_only(cuda, caller, callee):
    """Two coroutines alternate, each on its caller's stream; during waits, no stream is set."""
    seen = []

    @dlx.using("libb")
    async def work(x, name):
        for _ in range(3):
            seen.append((name, callee.handle(0)))
            assert not callee.write(x)
            await asyncio.sleep(0)
        return callee.made()

    async def called(handle, name):
        with caller.on(handle):
            x = caller.made()
            running = work(x, name)
            step = asyncio.ensure_future(running)
            await asyncio.sleep(0)  # it begins here
        while not step.done():
            assert callee.current(0) is outer
            await asyncio.sleep(0)
        with caller.on(handle):
            assert not caller.write(x)
        return step.result()

    p, q = slow(cuda), slow(cuda)

    async def both():
        first = await called(p, "first")
        second = await called(q, "second")
        return first, second

    with callee.on(slow(cuda)) as outer:
        results = asyncio.run(both())
        assert seen == [("first", p)] * 3 + [("second", q)] * 3
        assert all(type(result) is caller.Array for result in results) and callee.current(0) is outer
    assert cuda.races == 0


def test_coroutines_in_turns(cuda, caller, callee):
    """A step of one coroutine does not see the stream of the other."""
    seen = []

    @dlx.using("libb", returns="libb")
    async def work(x, handle):
        for _ in range(3):
            seen.append(callee.handle(0) == handle)
            await asyncio.sleep(0)

    async def main():
        tasks = []
        for _ in range(4):
            with caller.on(slow(cuda)) as p:
                tasks.append(asyncio.ensure_future(work(caller.made(), p.ptr)))
                await asyncio.sleep(0)
            assert callee.handle(0) == LEGACY
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert seen == [True] * 12


def test_a_coroutine_that_is_cancelled_or_raises(cuda, caller, callee):
    """The stream is restored; cleanup code runs on it."""
    seen = []

    @dlx.using("libb")
    async def work(x, fails):
        try:
            if fails:
                raise KeyError("planned")
            await asyncio.sleep(10)
        finally:
            seen.append(callee.handle(0))

    async def main(p):
        with pytest.raises(KeyError, match="planned"):
            await work(caller.made(), True)
        task = asyncio.ensure_future(work(caller.made(), False))
        await asyncio.sleep(0)
        assert callee.current(0) is outer
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)) as outer:
        asyncio.run(main(p))
        assert seen == [p.ptr, p.ptr] and callee.current(0) is outer


def test_a_coroutine_that_is_closed(cuda, caller, callee):
    """Its cleanup code runs on the stream."""
    seen = []

    @dlx.using("libb")
    async def work(x):
        try:
            await Pause()
        finally:
            seen.append(callee.handle(0))

    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)) as outer:
        running = work(caller.made())
        running.send(None)
        assert callee.current(0) is outer
        running.close()
        assert seen == [p.ptr] and callee.current(0) is outer


def test_generators_are_on_the_stream_while_they_run(cuda, caller, callee):
    """Sent and yielded values are ordered; the stream of the first step is used."""
    seen = []

    @dlx.using("libb")
    def work(x):
        try:
            for _ in range(3):
                seen.append(callee.handle(0))
                sent = yield callee.made()
                assert sent is None or not callee.write(sent)
        finally:
            seen.append(callee.handle(0))

    with callee.on(slow(cuda)) as outer:
        with caller.on(slow(cuda)) as p:
            x = caller.made()
            running = work(x)
            assert not caller.read(next(running))
        assert callee.current(0) is outer
        with caller.on(slow(cuda)):
            sent = caller.made()
            assert not caller.read(running.send(sent)) and not caller.write(sent)
        assert callee.current(0) is outer
        running.close()
        assert seen == [p.ptr] * 3 and callee.current(0) is outer
    assert cuda.races == 0


def test_a_generator_is_thrown_into(cuda, caller, callee):
    """The exception is handled on its stream."""

    @dlx.using("libb")
    def work(x):
        try:
            yield 1
        except KeyError:
            yield callee.handle(0)

    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)) as outer:
        running = work(caller.made())
        next(running)
        assert running.throw(KeyError()) == p.ptr and callee.current(0) is outer


def test_asynchronous_generators(cuda, caller, callee):
    """The stream is set around each step."""
    seen = []

    @dlx.using("libb")
    async def work(x):
        try:
            for _ in range(2):
                seen.append(callee.handle(0))
                await asyncio.sleep(0)
                seen.append(callee.handle(0))
                yield callee.made()
        finally:
            seen.append(callee.handle(0))

    async def main():
        async for result in work(caller.made()):
            assert callee.current(0) is outer and not caller.read(result)
            await asyncio.sleep(0)

    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)) as outer:
        asyncio.run(main())
        assert seen == [p.ptr] * 5 and callee.current(0) is outer


def test_an_asynchronous_generator_that_is_closed(cuda, caller, callee):
    """Its cleanup code runs on the stream."""
    seen = []

    @dlx.using("libb")
    async def work(x):
        try:
            yield
        finally:
            seen.append(callee.handle(0))
            await Pause()
            seen.append(callee.handle(0))

    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)) as outer:
        running = work(caller.made())
        finished(anext(running))
        finished(running.aclose())
        assert seen == [p.ptr] * 2 and callee.current(0) is outer


# ---- capture, failures -----------------------------------------------------------------------------------------------


def test_a_call_inside_a_capture(cuda, caller, callee):
    """It runs on the capturing stream and becomes part of the graph."""
    work = dlx.using("libb")(lambda x: callee.made() if not callee.write(x) else None)
    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)):
        x = caller.made()
        cuda.capture(p.ptr)
        assert not caller.read(work(x))
        assert cuda.end_capture(p.ptr) == 0


def test_a_call_that_would_break_a_capture(cuda, caller, callee):
    """It is refused before the function is called, and the capture continues."""
    called = []
    callee.adapter.streams = replace(callee.adapter.streams, activate=None)
    with caller.on(slow(cuda)) as p, callee.on(slow(cuda)):
        x = caller.made()
        cuda.capture(p.ptr)
        with pytest.raises(StreamError, match="capturing a graph"):
            dlx.using("libb")(called.append)(x)
        assert not called and cuda.end_capture(p.ptr) == 0


# ---- a real framework ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["Array", "List", "Map", "Dict"])
@pytest.mark.parametrize("tagged", [False, True])
def test_containers_of_tvm_ffi(cuda, callee, container, tagged):
    """Foreign containers may convert their elements to a framework; tvm_ffi has current streams."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    place, p = tvm_ffi.device("cuda", 0), slow(cuda)
    memory = dlx.from_pointer(cuda.alloc(N), (N,), "uint8", device="cuda")
    with tvm_ffi.use_raw_stream(place, p), callee.on(slow(cuda)):
        tensor = dlx.convert(memory, to="tvm_ffi")
        cuda.write(p, memory.data_ptr, N)
        make = getattr(tvm_ffi, container, None) or pytest.skip(f"this tvm_ffi has no {container}")
        tree = make({"a": tensor} if container in ("Map", "Dict") else [tensor])
        if tagged:
            tree = dlx.convert(tree, to="dlx", lazy=True)

        @dlx.using("libb")
        def work(x):
            (inside,) = arrays(x)
            assert callee.handle(0) == p and not callee.write(inside)
            return callee.made()

        cuda.forget()
        result = work(tree)
        assert isinstance(result, tvm_ffi.Tensor) and cuda.ordering == 0
        assert not cuda.read(p, dlx.convert(result, to="dlx").data_ptr, N)


@pytest.mark.parametrize("handle", [LEGACY, None])
def test_tvm_ffi_works_on_its_callers_stream(cuda, caller, handle):
    """The stream of its environment is set and restored."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    place, p = tvm_ffi.device("cuda", 0), handle or slow(cuda)

    @dlx.using("tvm_ffi")
    def work(x):
        assert isinstance(x, tvm_ffi.Tensor) and x.device == place
        assert not cuda.write(tvm_ffi.get_raw_stream(place), dlx.describe(x).address, N)
        return tvm_ffi.get_raw_stream(place)

    with caller.on(p):
        x = caller.made()
        assert work(x) == p and tvm_ffi.get_raw_stream(place) == 0
        assert not caller.write(x)


def test_what_tvm_ffi_wrote_is_waited_for(cuda, caller):
    """Its `__dlpack__` orders nothing; dlx does, and releasing the memory waits."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    place, p = tvm_ffi.device("cuda", 0), slow(cuda)
    memory = dlx.from_pointer(cuda.alloc(N), (N,), "uint8", device="cuda")
    tensor = dlx.convert(memory, to="tvm_ffi")
    with tvm_ffi.use_raw_stream(place, p), caller.on(slow(cuda)):
        cuda.write(p, memory.data_ptr, N)
        result = dlx.convert(tensor, to="liba")
        assert result.ptr == memory.data_ptr and not caller.read(result)
