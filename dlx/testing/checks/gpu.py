"""Checks of dlx on the CUDA devices of this machine, for `python -m dlx.testing --gpu`.

Data is written by copies, so that they also run on a driver without
kernels. A check whose result only timing can show raises `NotApplicable` if this machine does not show it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from dlx._core import cuda, native
from dlx._support.late import Late
from dlx._support.reflect import message_of
from dlx.errors import DeviceError, StreamError
from dlx.testing.check import CHECKS, Check
from dlx.testing.checks.gpu_frameworks import FRAMEWORKS, HOLD, HOST, Framework, N
from dlx.testing.runner import environment
from dlx.testing.subject import NotApplicable, Subject, attempt, error_line, must

dlx = Late("dlx")
GPU: dict[str, Check] = {}
"""The checks by name."""

SUBJECT = Subject("gpu", spec="dlx.testing.checks.gpu:register_checks")
_INSTALLED = [name for name in FRAMEWORKS if find_spec(name)]
CHOSEN = os.environ.get("DLX_GPU_FRAMEWORKS", "").split() or _INSTALLED
if unknown := [name for name in CHOSEN if name not in _INSTALLED]:
    raise LookupError(f"there is no {', '.join(unknown)} here. The report can check {', '.join(_INSTALLED)}.")

VALUES = HOST.tolist()
LARGE = 1 << 24  # float32: 64 MiB
_AT_ONCE = "the stream was done at once"
_loaded: dict[str, Framework | str] = {}


def register_checks() -> Subject:
    """Add the checks to those of the kit, for the process that runs them; return their subject."""
    CHECKS.update(GPU)
    return SUBJECT


def find(name: str) -> Any:
    """Return a framework that sees a CUDA device, or raise `NotApplicable` with the reason."""
    if name not in _loaded:
        try:
            _loaded[name] = FRAMEWORKS[name]()
        except Exception as error:
            _loaded[name] = f"{name} has no CUDA device: {error_line(error)}"
    found = _loaded[name]
    if isinstance(found, str):
        raise NotApplicable(found)
    return found


def others(name: str) -> list[Any]:
    """Return dlx and the other frameworks with a device."""
    found = []
    for other in dict.fromkeys(["dlx", *CHOSEN]):
        with suppress(NotApplicable):
            found += [find(other)] if other != name else []
    return found


def _check(*names: str, alone: bool = False) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    """Register a check, once for each installed framework in `names`; its docstring is the promise."""

    def register(function: Callable[..., str | None]) -> Callable[..., str | None]:
        what = function.__name__.replace("_", "-")
        for name in [each for each in names if each in ("dlx", *CHOSEN)]:

            def run(_: Subject, name: str = name) -> str | None:
                try:
                    return function(find(name))
                finally:
                    _settle(name)

            promise = (function.__doc__ or "").rstrip(".").format(name=name)
            GPU[f"{name}-{what}"] = Check(f"{name}-{what}", promise, "gpu", "", "wrong", run, alone)
        return function

    return register


def _settle(name: str) -> None:
    """Wait for the device; end the process if it is lost, so that the next check starts with a new one."""
    gc.collect()
    try:
        dlx.convert(dlx.convert(HOST, to="dlx", device="cuda"), to="dlx", device="cpu")
        if name in _loaded and not isinstance(_loaded[name], str):
            find(name).synchronize()
    except Exception as error:
        print(f"the device is lost: {error_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)


def values(x: Any) -> Any:
    """Return an array's elements, moved to the host by dlx."""
    return memoryview(dlx.convert(x, to="dlx", device="cpu", readonly="share")).tolist()


def refuse(error: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Require that a call raises an error of this class."""
    result, found = attempt(call, *args, **options)
    must(isinstance(found, error), f"no {error.__name__}: {'a result' if result is not None else error_line(found)}")


# ---- memory ----------------------------------------------------------------------------------------------------------


@_check("torch", "cupy", "jax", "numba")
def device(framework: Any) -> Any:
    """The framework {name} sees a CUDA device."""
    return framework.version()


@_check("dlx")
def moves(framework: Any) -> None:
    """Host memory survives a move to the device and back, with every layout."""
    view = memoryview(HOST)
    for source in (HOST, view[::2], view[::-3], view[:0], view[5:6]):
        there = dlx.convert(source, to="dlx", device="cuda")
        must(there.device == (2, 0), f"it is on {there.device}")
        must(values(there) == memoryview(source).tolist(), "the values changed")
    must(cuda.where(there.data_ptr) == (2, 0), "the driver names another device")


@_check("dlx", "torch", "cupy", "jax")
def copies(framework: Any) -> None:
    """A copy on the device has its own memory and the same values."""
    x = find("dlx").make()
    y = dlx.convert(x, to=framework.name, copy=True)
    must(framework.address(y) != x.data_ptr, "it shares the memory")
    must(framework.read(y) == VALUES, "the values changed")


@_check("torch", "cupy", "jax")
def host(framework: Any) -> None:
    """Host memory, also strided, is moved to {name} and back; the source may be written at once."""
    for step in (1, 2, -3):
        source = array("f", VALUES)
        wanted = source[::step].tolist()
        there = dlx.convert(memoryview(source)[::step], to=framework.name, device="cuda")
        source[:] = array("f", [-1.0]) * N
        must(framework.read(there) == wanted, f"step {step}: the values changed on the way there")
        must(values(there) == wanted, f"step {step}: the values changed on the way back")


@_check("dlx", "torch", "cupy", "jax", "numba")
def share(framework: Any) -> str:
    """Arrays of {name} are shared with the other frameworks, by address."""
    targets = [each for each in others(framework.name) if each.name != "numba"]
    for target in targets:
        x = framework.make()
        y = dlx.convert(x, to=target.name, copy=False, readonly="share")
        must(target.address(y) == framework.address(x), f"{target.name} has another address")
        must(target.read(y) == VALUES, f"{target.name} has other values")
        tree = dlx.convert({"a": [x, (framework.make(),)]}, to=target.name, lazy=True, readonly="share")
        must(target.address(tree["a"][0]) == framework.address(x), f"{target.name}, lazy: another address")
    if not targets:
        raise NotApplicable("no other framework has a CUDA device")
    return f"with {', '.join(target.name for target in targets)}"


@_check("torch")
def dtypes(framework: Any) -> None:
    """Float16, bfloat16, integers, bool and complex64 are shared with dlx and back."""
    torch = framework.module
    for name in ("float16", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"):
        x = torch.ones(5).to(getattr(torch, name)).cuda()
        y = dlx.convert(dlx.convert(x, to="dlx"), to="torch", copy=False)
        must((y.data_ptr(), y.dtype) == (x.data_ptr(), x.dtype), f"{name} came back as {y.dtype}")


@_check("torch")
def pinned(framework: Any) -> None:
    """Pinned host memory is shared with the host, and moved to the device."""
    x = framework.module.tensor(VALUES).pin_memory()
    must(str(cuda.where(x.data_ptr())).startswith("cuda_host"), "the driver does not know it")
    must(dlx.convert(x, to="dlx", copy=False).data_ptr == x.data_ptr(), "it was copied")
    must(framework.read(dlx.convert(x, to="torch", device="cuda")) == VALUES, "the values changed")


@_check("torch", "cupy")
def cuda_host(framework: Any) -> None:
    """A result of {name} with device="cuda_host" is in pinned memory."""
    for source in (HOST, framework.make(), memoryview(HOST)[::-1]):
        result = dlx.convert(source, to=framework.name, device="cuda_host")
        must(str(cuda.where(framework.address(result))).startswith("cuda_host"), "it is not pinned")
        wanted = VALUES[::-1] if isinstance(source, memoryview) else VALUES
        must(framework.read(result) == wanted, "the values changed")


@_check("cupy")
def managed(framework: Any) -> None:
    """Managed memory is shared with the host."""
    cupy = framework.module
    x = cupy.ndarray((N,), "float32", cupy.cuda.malloc_managed(4 * N))
    framework.write(x, framework.make())
    must(str(dlx.describe(x).device).startswith("cuda_managed"), "dlx names another kind of memory")
    y = dlx.convert(x, to="numpy", copy=False)
    must((y.ctypes.data, y.tolist()) == (x.data.ptr, VALUES), "the host sees other memory")


@_check("dlx")
def errors(framework: Any) -> None:
    """Too much memory and an unknown device are errors by name, and the next call works."""
    refuse(DeviceError, dlx.empty, 1 << 46, "uint8", device="cuda")
    refuse(DeviceError, dlx.empty, 4, "uint8", device="cuda:63")
    must(values(framework.make()) == VALUES, "the values changed")


@_check("dlx")
def leaks(framework: Any) -> None:
    """300 moves of a megabyte leave no memory behind."""
    import resource

    source, before, size = array("f", bytes(1 << 20)), native.live(), 0
    for number in range(300):
        dlx.convert(dlx.convert(source, to="dlx", device="cuda"), to="dlx", device="cpu")
        if number == 50:
            size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    must((native.live(), dlx.release_pending()) == (before, 0), "arrays are still alive")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size
    must(grown < 16 << 10, f"the process grew by {grown} KiB")


@_check("dlx")
def devices(framework: Any) -> str:
    """An array moves between two devices."""
    count = len(dlx.devices()) - 1
    if count < 2:
        raise NotApplicable("this machine has one device")
    for number in range(1, count):
        there = dlx.convert(framework.make(), to="dlx", device=f"cuda:{number}")
        must(there.device == (2, number) and values(there) == VALUES, f"cuda:{number} has other values")
        must(values(dlx.convert(there, to="dlx", device="cuda:0")) == VALUES, f"from cuda:{number}: other values")
    return f"{count} devices"


@_check("dlx", alone=True)
def exit(framework: Any) -> None:
    """The process ends normally with memory in every state."""
    held = framework.make()
    cycle: list[Any] = [held.__dlpack__(stream=1, max_version=(1, 0)), dlx.convert(held, to="dlx", copy=True)]
    cycle.append(cycle)
    sys.modules["__main__"].__dict__["dlx_held"] = held


@_check("dlx", alone=True)
def fork(framework: Any) -> None:
    """A forked child gets an error that names 'spawn', and its parent goes on."""
    x = framework.make()
    if (child := os.fork()) == 0:
        _, error = attempt(dlx.empty, 4, "float32", device="cuda")
        os._exit(0 if isinstance(error, DeviceError) and "spawn" in str(error) else 1)
    must(os.waitpid(child, 0)[1] == 0, "the child got no such error")
    must(values(x) == VALUES, "the values changed")


@_check("dlx", alone=True)
def processes(framework: Any) -> None:
    """Device memory is shared with another process."""
    code = (
        "import dlx, json, sys\nx = dlx.attach(json.loads(sys.argv[1]))\n"
        "print(memoryview(dlx.convert(x, to='dlx', device='cpu', readonly='share')).tolist())"
    )
    with dlx.share(framework.make()) as handle:
        command = [sys.executable, "-c", code, json.dumps(handle)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    last = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    must(done.stdout.strip() == str(VALUES), f"the other process has {last[:160]}")


# ---- streams ---------------------------------------------------------------------------------------------------------


@_check("torch", "cupy")
def order(producer: Any) -> str:
    """Another stream reads finished data of a busy stream of {name}, and the host waits for neither."""
    remarks, shown = [], 0
    for consumer in [each for each in [producer, *others(producer.name)] if each.name not in ("dlx", "numba")]:
        late = run_late(producer, consumer, -1)  # loads the code of both frameworks
        late = run_late(producer, consumer, -1)
        read, is_busy = run_late(producer, consumer, None)
        must(read == VALUES, f"{consumer.name} read unfinished data")
        shown += (is_shown := late[0] != VALUES)
        remarks += [] if is_shown else [f"{consumer.name} not shown"]
        remarks += [] if is_busy or not is_shown else [f"{consumer.name}: the host waited"]
    if not shown:
        raise NotApplicable("without order the data was finished, too")
    return ", ".join(remarks)


def run_late(producer: Any, consumer: Any, stream: int | None) -> tuple[Any, bool]:
    """Return the data that the consumer reads, and whether the producer was busy after the conversion."""
    ours, theirs = producer.stream(), consumer.stream()
    target, ones = producer.make([0.0] * N), producer.make()
    producer.synchronize()
    with producer.on(ours):
        producer.hold()
        producer.write(target, ones)
        middle = dlx.convert(target, to="dlx", stream=stream) if producer is consumer else target
        with consumer.on(theirs):
            result = dlx.convert(middle, to=consumer.name, stream=stream)
            is_busy = producer.is_busy(ours)
            read = consumer.read(result)
    producer.synchronize()
    return read, is_busy


@_check("torch", "cupy")
def to_host(framework: Any) -> None:
    """The host reads finished data of a busy stream of {name}."""
    stream, target, ones = framework.stream(), framework.make([0.0] * N), framework.make()
    for _ in range(2):  # the first round loads code
        with framework.on(stream):
            framework.hold()
            framework.write(target, ones)
            is_busy = framework.is_busy(stream)
            must(values(target) == VALUES, "the host read unfinished data")
    if not is_busy:
        raise NotApplicable(_AT_ONCE)


@_check("torch", "cupy")
def unrelated(framework: Any) -> None:
    """A busy stream of {name} delays no move on another one."""
    busy, other = framework.stream(), framework.stream()
    x, y = framework.make([0.0] * N), framework.make()
    framework.synchronize()
    for _ in range(2):  # the first round loads code
        with framework.on(busy):
            framework.hold()
            dlx.convert(x, to="dlx", copy=True)
        with framework.on(other):
            framework.read(y)
            is_shown = framework.is_busy(busy)
            values(y)
            dlx.convert(HOST, to=framework.name, device="cuda")
            is_busy = framework.is_busy(busy)
        framework.synchronize()
    if not is_shown:
        raise NotApplicable(f"{framework.name} itself waits for the other stream")
    must(is_busy, "dlx waited for the other stream")


@_check("torch")
def no_wait(framework: Any) -> str:
    """The host does not wait for a move with wait=False, whose source is kept alive until it is done."""
    stream, moved = framework.stream(), 0
    for source, device in ((framework.module.tensor(VALUES).pin_memory(), "cuda"), (framework.make(), "cuda_host")):
        framework.synchronize()
        with framework.on(stream):
            dlx.convert(source, to="torch", device=device, wait=False)  # loads code
            framework.hold()
            result = dlx.convert(source, to="torch", device=device, wait=False)
            is_busy = framework.is_busy(stream)
            del source
            moved += is_busy
            must(dlx.release_pending() or not framework.is_busy(stream), "the source was released early")
        framework.synchronize()
        must(framework.read(result) == VALUES, f"to {device}: the values changed")
        must(dlx.release_pending() == 0, "the source was never released")
    if not moved:
        raise NotApplicable(_AT_ONCE)
    return f"{moved} of 2 moves"


@_check("torch", "cupy")
def lifetime(framework: Any) -> None:
    """Memory of {name} that a stream still reads is not reused after it was dropped."""
    ours, theirs, seen = framework.stream(), framework.stream(), framework.make([0.0] * N)
    with framework.on(ours):
        x = framework.make()
        where = framework.address(x)
        middle = dlx.convert(x, to="dlx")
    framework.synchronize()
    with framework.on(theirs):
        result = dlx.convert(middle, to=framework.name)
        framework.hold()
        framework.write(seen, result)
    del x, middle, result  # without a collection, which takes longer than `hold`
    if not dlx.release_pending():
        must(not framework.is_busy(theirs), "the memory was released early")
        raise NotApplicable(_AT_ONCE)
    with framework.on(ours):
        fresh = framework.make([0.0] * N)
        must(framework.address(fresh) != where, "the memory was reused")
    framework.synchronize()
    must(framework.read(seen) == VALUES, "the stream read other data")
    must(dlx.release_pending() == 0, "the memory was never released")


@_check("torch")
def using(framework: Any) -> None:
    """A function under dlx.using("torch") works on the stream of its caller, cupy."""
    cupy = next((each for each in others("torch") if each.name == "cupy"), None)
    if cupy is None:
        raise NotApplicable("cupy has no CUDA device, or is not installed")
    torch, seen = framework.module, []

    def record(x: Any) -> Any:
        seen.append(torch.cuda.current_stream().cuda_stream)
        return x

    same: Any = dlx.using("torch")(record)

    before, stream = torch.cuda.current_stream(), cupy.stream()
    with cupy.on(stream):
        x = cupy.make()
        must(same(x) is x, "the result is another array")
    must(seen == [stream.ptr], "torch was on another stream")
    must(torch.cuda.current_stream() == before, "torch's stream was not restored")


# ---- captures --------------------------------------------------------------------------------------------------------


def capture(framework: Any, body: Callable[[], Any]) -> None:
    """Run a function in a graph capture, which it must neither break nor leave; then replay the graph."""
    marker, ones = framework.make([0.0] * N), framework.make()
    failure: list[Exception] = []

    def whole() -> None:
        framework.write(marker, ones)
        try:
            body()
        except Exception as error:
            failure.append(error)

    framework.synchronize()
    replay, error = attempt(framework.capture, whole)
    if failure:
        raise failure[0]
    must(error is None, f"the capture is broken: {error_line(error)}")
    framework.write(marker, framework.make([0.0] * N))
    replay()
    framework.synchronize()
    if framework.read(marker) != VALUES:
        raise NotApplicable("graphs are not replayed here")


@_check("torch", "cupy")
def capture_same(framework: Any) -> None:
    """A conversion on the stream that captures shares the memory, and the graph replays."""
    x, twos = framework.make(), framework.make([2.0] * N)

    def body() -> None:
        y = dlx.convert(dlx.convert(x, to="dlx"), to=framework.name)
        must(framework.address(y) == framework.address(x), "it was copied")
        framework.write(y, twos)

    try:
        capture(framework, body)
    finally:
        framework.synchronize()
    must(framework.read(x) == [2.0] * N, "the replay wrote other data")


@_check("torch", "cupy")
def capture_other(framework: Any) -> None:
    """Memory of another stream is refused in a capture, which goes on."""
    x, other, error = framework.make(), framework.stream(), None
    with framework.on(other):
        framework.hold()
        is_shown = framework.is_busy(other)

    def body() -> None:
        nonlocal error
        with framework.on(other):
            framework.hold()
            middle = dlx.convert(x, to="dlx")
        _, error = attempt(dlx.convert, middle, to=framework.name)

    capture(framework, body)
    if not is_shown:
        raise NotApplicable(_AT_ONCE)
    must(isinstance(error, StreamError), f"no StreamError, but {error_line(error)}")


@_check("torch", "cupy")
def capture_host(framework: Any) -> None:
    """Moves from and to the host are refused in a capture, which goes on."""
    x = framework.make()

    def body() -> None:
        refuse(StreamError, dlx.convert, x, to="dlx", device="cpu")
        refuse(StreamError, dlx.convert, HOST, to=framework.name, device="cuda")

    capture(framework, body)


@_check("torch")
def capture_pinned(framework: Any) -> str:
    """A move of pinned memory in a capture is refused or part of the graph."""
    x, said = framework.module.tensor(VALUES).pin_memory(), []

    def body() -> None:
        result, error = attempt(dlx.convert, x, to="torch", device="cuda")
        must(error is None or isinstance(error, StreamError), f"it raised {error_line(error)}")
        said.append((result, "part of the graph" if error is None else "refused"))

    capture(framework, body)
    must(said[0][0] is None or framework.read(said[0][0]) == VALUES, "the replay gave other values")
    return str(said[0][1])


@_check("torch", "cupy")
def capture_release(framework: Any) -> None:
    """Memory that was dropped before a capture is released in it without breaking it."""
    source = next((each for each in others(framework.name) if each.name == "cupy"), framework)
    other, x, y, seen = framework.stream(), source.make_unpooled(), framework.make(), framework.make()
    with framework.on(other):
        result = dlx.convert(dlx.convert(x, to="dlx"), to=framework.name)
        framework.hold()
        framework.write(seen, result)
    del x, result
    waiting = dlx.release_pending()

    def body() -> None:
        time.sleep(3 * HOLD)
        dlx.convert(y, to="dlx")

    capture(framework, body)
    if not waiting:
        raise NotApplicable(_AT_ONCE)


# ---- figures ---------------------------------------------------------------------------------------------------------


def _time(*functions: Callable[[], Any], number: int, rounds: int = 5) -> list[float]:
    """Return the shortest time of each function in seconds; the functions take turns."""
    best = [float("inf")] * len(functions)
    for turn in range(rounds + 1):  # the first warms up
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(number):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / number) if turn else best[i]
    return best


@_check("dlx", "torch", "cupy", "jax")
def figures(framework: Any) -> str:
    """A call of dlx takes as long as {name}'s own function."""
    try:
        np = importlib.import_module("numpy")
    except ImportError as error:
        raise NotApplicable(message_of(error, 80)) from error
    found = []

    def measure(name: str, pair: tuple[Callable[[], Any], Callable[[], Any] | None], number: int) -> None:
        def wait(call: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: framework.synchronize(call())

        times = _time(*[call if name == "share" else wait(call) for call in pair if call], number=number)
        ratio = f" {times[0] / times[1]:.2f}" if len(times) > 1 else ""
        unit = f"{times[0] * 1e6:.1f} µs" if times[0] < 1e-3 else f"{times[0] * 1e3:.1f} ms"
        found.append(f"{name} {unit}{ratio}")

    if framework.name != "dlx":
        source = next((each for each in others(framework.name) if each.name in ("torch", "cupy")), find("dlx")).make()
        ours = partial(dlx.convert, source, to=framework.name)
        measure("share", (ours, partial(framework.from_dlpack, source)), 100)
    for size, label, number in ((64, "256 B", 50), (LARGE, "64 MiB", 2)):
        a = np.ones(size, "f4")
        x = dlx.convert(a, to=framework.name, device="cuda")
        up, down = partial(dlx.convert, a, to=framework.name, device="cuda"), partial(dlx.convert, x, to="numpy")
        measure(f"to device {label}", (up, framework.to_device and partial(framework.to_device, a)), number)
        measure(f"to host {label}", (down, framework.to_host and partial(framework.to_host, x)), number)
    return "; ".join(found)
