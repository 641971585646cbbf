"""A program that makes every call of the CUDA driver fail once, and reports wrong results.

``python tests/support cuda.driver_failures GROUP[=PART] ...`` runs the cases of a group whose names contain PART, over
the recording driver in DLX_CUDA_DRIVER. For each case, call number 1 fails, then number 2, and so on, until every call
succeeds. The error affects that call alone, or all later calls; the driver is fresh, or in use. Afterwards: an error
that names the call, or a right result in the right order; no context, capture mode, managed tensor, event or device
memory is left; the same call works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import traceback
from typing import Any, NamedTuple

import numpy as np
import pytest

import dlx
from dlx._core import cuda as driver
from dlx._core import native
from dlx.adapter import Layout
from support.cuda import gpulib
from support.cuda.fake_cuda import GLOBAL, LEGACY, MANAGED, PINNED, FakeCuda
from support.foreign.exchange import Exchange
from support.project import compiled, program

N = gpulib.N
BYTES = bytes(range(N))
SINGLE, STICKY = 2, 719
IS_IPC = "fake_cuda_ipc" in os.environ["DLX_CUDA_DRIVER"]

UNDONE = {
    "cuCtxPopCurrent": ["depth"],
    "cuThreadExchangeStreamCaptureMode": ["mode"],
    "cuEventDestroy": ["events"],
    "cuMemFree": ["blocks"],
    "cuMemFreeAsync": ["blocks"],
    "cuCtxPushCurrent": ["blocks", "opened", "allocations", "events"],
    "cuIpcCloseMemHandle": ["blocks", "opened"],
    "cuMemUnmap": ["blocks", "allocations"],
    "cuMemAddressFree": ["blocks"],
    "cuMemRelease": ["allocations"],
}
"""Remains of calls whose release failed."""


class Wrong(Exception):
    """A violated condition."""


class Case(NamedTuple):
    """One call: its source and its action."""

    name: str
    make: Any
    act: Any


class Counted(FakeCuda):
    """The driver, with a count of the blocks that frameworks took and never free."""

    def reset(self, devices=2):
        self.taken = 0
        super().reset(devices)

    def alloc(self, *args, **options):
        self.taken += 1
        return super().alloc(*args, **options)


class World:
    """The driver, and frameworks with streams on its devices."""

    def __init__(self, patch):
        self.cuda = Counted(os.environ["DLX_CUDA_DRIVER"])
        self.exchange = Exchange(str(compiled("exchange")))
        self.frameworks = {
            name: gpulib.install(patch, f"lib{name}", self.cuda, kind, **facts)
            for name, kind, facts in (
                ("a", gpulib.GpuAdapter, {}),
                ("b", gpulib.GpuAdapter, {}),
                ("p", gpulib.QuickAdapter, {}),
                ("q", gpulib.QuickAdapter, {}),
                ("f", gpulib.FreshAdapter, {"layouts": Layout.PERMUTED}),
                ("g", gpulib.QuickFreshAdapter, {}),
                ("e", gpulib.EventAdapter, {}),
            )
        }

    def __getattr__(self, name):
        """Return a framework by its letter."""
        try:
            return self.frameworks[name]
        except KeyError:
            raise AttributeError(name) from None

    def begin(self):
        """Start again: a fresh driver, and new streams for each framework."""
        native.lib.dlx_cuda_forget()
        native.routes_clear()
        self.cuda.reset()
        for framework in self.frameworks.values():
            framework.device = 0
            # No adapter names this stream; dlx knows that it is done if the legacy stream waits for it.
            named = framework.adapter.streams.current is not None
            framework._streams = {d: gpulib.Stream(self.cuda.stream(d, blocking=not named), d) for d in (0, 1)}
        self.reader = {d: self.cuda.stream(d, blocking=True) for d in (0, 1)}

    def made(self, letter, device=0, **facts):
        """Return a framework's array with known bytes, written on its stream."""
        array = self.frameworks[letter].made(device, **facts)
        self.cuda.poke(array.ptr, BYTES)
        return array

    def own(self, device=0):
        """Return a dlx.Tensor that a framework's stream has written."""
        return dlx.convert(self.made("a", device), to="dlx")

    def view(self, shape, strides):
        """Return a dlx.Tensor with gaps."""
        whole = self.made("a")
        self.cuda.settle()  # such memory is ready by definition
        return dlx.from_pointer(whole.ptr, shape, "uint8", strides=strides, device="cuda:0", owner=whole)

    def fresh(self):
        """Return memory that dlx allocates."""
        tensor = dlx.empty(N, "uint8", "cuda:0")
        self.cuda.poke(tensor.data_ptr, BYTES)
        return tensor

    def bytes_at(self, tensor):
        """Return the bytes of a tensor on any device."""
        start = tensor.data_ptr + tensor.byte_offset
        if tensor.strides == (1,):
            return self.cuda.peek(start, tensor.nbytes)
        every = itertools.product(*map(range, tensor.shape))
        steps = (sum(i * step for i, step in zip(index, tensor.strides, strict=True)) for index in every)
        return b"".join(self.cuda.peek(start + step, 1) for step in steps)

    def seen(self, result):
        """Return the properties of a result; a consumer's kernel reads it on a device, without a race."""
        if isinstance(result, dict):
            return {key: self.seen(each) for key, each in result.items()}
        if isinstance(result, list | tuple):
            return [self.seen(each) for each in result]
        if isinstance(result, gpulib.Array):
            self.cuda.read(
                result.framework.handle(result.device.id), result.ptr, result.tensor.nbytes, result.device.id
            )
            return result.framework.__name__, str(result.device), result.shape, self.bytes_at(result.tensor)
        if isinstance(result, dlx.Tensor) and result.device.type == 1:
            return str(result.device), result.shape, result.tobytes()
        if isinstance(result, dlx.Tensor):
            number, start = result.device.id, result.data_ptr + result.byte_offset
            capsule = result.__dlpack__(stream=self.reader[number], max_version=(1, 3))
            self.cuda.read(self.reader[number], start, 1, number)
            found = str(result.device), result.shape, self.bytes_at(result)
            del capsule
            return found
        return result.tolist() if isinstance(result, np.ndarray) else result


# ---- cases -----------------------------------------------------------------------------------------------------------


def to(name, **options):
    """Return a call of `convert`."""
    return lambda w, obj: dlx.convert(obj, to=name, **options)


def shared():
    """Shared memory: each kind of producer and consumer, one array, and a tree on two devices."""
    for source in ("a", "p", "e", "dlx"):
        for target in ("liba", "libq", "libb", "libe", "dlx"):
            if source == "dlx" == target or target == f"lib{source}":
                continue

            def one(w, source=source):
                return w.own() if source == "dlx" else w.made(source)

            def many(w, one=one, source=source):
                other = w.own(1) if source == "dlx" else w.made(source, 1)
                first = one(w)
                return {"x": [first, one(w), first], "y": other}

            yield Case(f"{source} to {target}", one, to(target))
            yield Case(f"a tree of {source} to {target}", many, to(target))
    yield Case("collected", lambda w: [w.made("a"), w.made("p")], to("libb", errors="collect"))
    yield Case("on one stream", lambda w: w.made("a"), on_one_stream)
    yield Case(
        "a stream that is passed", lambda w: w.made("a"), lambda w, x: dlx.convert(x, to="dlx", stream=w.reader[0])
    )
    yield Case("no stream", lambda w: w.own(), lambda w, x: dlx.convert(x, to="libb", stream=-1) and None)
    yield Case("lazy", lambda w: [w.made("p"), w.made("a")], lambda w, x: list(dlx.convert(x, to="libb", lazy=True)))
    yield Case("managed", lambda w: w.made("a", kind=MANAGED), to("libb"))


def on_one_stream(w, array):
    """Convert where producer and consumer work on one stream."""
    with w.b.on(w.a.handle(0)):
        return w.seen(dlx.convert(array, to="libb"))


def moved():
    """Copies and moves: to and from the host, to another device, with gaps."""

    def host(w):
        return np.frombuffer(BYTES, "uint8")

    for target in ("libb", "libf", "dlx"):
        yield Case(f"host to {target}", host, to(target, device="cuda:1"))
        yield Case(f"hosts to {target}", lambda w: [host(w), bytearray(BYTES)], to(target, device="cuda:0"))
        yield Case(f"a copy, {target}", lambda w: w.made("a"), to(target, copy=True))
        yield Case(f"a copy of dlx's, {target}", lambda w: w.fresh(), to(target, copy=True))
        yield Case(f"another device, {target}", lambda w: w.made("a"), to(target, device="cuda:1"))
        yield Case(f"with gaps, {target}", lambda w: w.view((4, 8), (16, 1)), to(target, copy=True))
        yield Case(f"with separate streams, {target}", lambda w: w.made("e"), to(target, device="cuda:1"))
    yield Case("to the host", lambda w: w.made("a"), to("numpy", device="cpu"))
    yield Case("many to the host", lambda w: [w.made("a"), w.own(), w.made("p", 1)], to("numpy", device="cpu"))
    yield Case("with gaps to the host", lambda w: w.view((4, 8), (16, 1)), to("numpy", device="cpu"))
    yield Case("scattered to the host", lambda w: w.view((4, 3, 2), (2, 16, 9)), to("numpy", device="cpu"))
    yield Case("scattered from the host", lambda w: host(w).reshape(8, 8).T[::2], to("dlx", device="cuda:0"))
    yield Case("managed to the host", lambda w: w.made("a", kind=MANAGED), to("numpy", device="cpu"))
    yield Case("like", lambda w: (host(w), w.made("a", 1)), lambda w, x: dlx.convert(x[0], like=x[1]))
    yield Case("stacked", lambda w: [w.made("a"), w.made("a")], lambda w, x: dlx.stack(x, to="libb"))
    for kinds in ("ppp", "pqg"):
        yield Case(f"stacked, {kinds}", lambda w, kinds=kinds: [w.made(x) for x in kinds], stacked)
    yield Case(
        "stacked on the host", lambda w: [w.made("a"), w.made("p")], lambda w, x: dlx.stack(x, to="numpy", device="cpu")
    )

    def with_peers(w):
        w.cuda.set_peers(True)

    yield Case("peers, moved", lambda w: (with_peers(w), host(w))[1], to("dlx", device="cuda:0"))
    yield Case("peers, empty", with_peers, lambda w, _: dlx.empty(N, "uint8", "cuda:1").shape)
    yield Case("peers, released", lambda w: (with_peers(w), [])[1], made_and_dropped)


def made_and_dropped(w, held):
    """Allocate memory with dlx, and release it while a stream reads it."""
    tensor = w.fresh()
    stream = w.reader[0]
    capsule = tensor.__dlpack__(stream=stream, max_version=(1, 3))
    w.cuda.stall(stream)
    w.cuda.read(stream, tensor.data_ptr, N)
    del capsule, tensor
    w.cuda.resume(stream)
    dlx.release_pending()


def released():
    """Memory that is released while its consumer works, before and after the work is done."""
    for letter, target in (("a", "libb"), ("p", "libq"), ("a", "dlx"), ("e", "libb")):
        for stream in ("side", "legacy", "per-thread"):
            yield Case(
                f"{letter}, {target}, {stream}",
                lambda w, letter=letter: [w.made(letter), w.made(letter)],
                lambda w, x, target=target, stream=stream: used_and_dropped(w, x, target, stream),
            )
    yield Case("looked for", lambda w: [w.made("a")], looked_for)


def used_and_dropped(w, arrays, target, stream):
    """Release memory while a consumer's stream reads it; then the producer writes to it."""
    handle = {"side": w.cuda.stream(), "legacy": LEGACY, "per-thread": 2}[stream]
    framework = w.frameworks.get(target[3:], w.b)
    with framework.on(handle):
        made = dlx.convert(arrays, to=target, stream=framework.current(0) if target == "dlx" else None)
        w.cuda.stall(handle)
        for each in made:
            address = each.data_ptr if target == "dlx" else each.ptr
            w.cuda.read(handle, address, N)
        del made, each
        arrays.pop()
        w.cuda.resume(handle)
        dlx.release_pending()


def looked_for(w, arrays):
    """Release finished memory before and after the work is done."""
    handle = w.b.handle(0)
    made = dlx.convert(arrays[0], to="libb")
    w.cuda.stall(handle)
    w.b.read(made)
    del made
    dlx.release_pending()
    arrays.clear()
    dlx.release_pending()
    w.cuda.resume(handle)
    dlx.release_pending()


def captured():
    """Calls during a capture, which stays valid."""
    for mode in (GLOBAL, 1):
        yield Case(f"the same stream, {mode}", lambda w: w.made("a"), lambda w, x, m=mode: in_capture(w, x, m, "same"))
        yield Case(f"another stream, {mode}", lambda w: w.made("a"), lambda w, x, m=mode: in_capture(w, x, m, "other"))
        yield Case(f"elsewhere, {mode}", lambda w: w.made("a"), lambda w, x, m=mode: in_capture(w, x, m, "elsewhere"))
        yield Case(f"memory, {mode}", lambda w: w.made("a"), lambda w, x, m=mode: in_capture(w, x, m, "memory"))


def in_capture(w, array, mode, what):
    """Convert while a stream captures; the capture must stay valid."""
    capturing = w.cuda.stream() if what in ("elsewhere", "memory") else w.b.handle(0)
    w.cuda.capture(capturing, mode)
    try:
        if what == "same":
            with w.a.on(capturing):
                result = dlx.convert(w.made("a"), to="libb")
        elif what == "memory":
            result = dlx.empty(N, "uint8", "cuda:0").shape
        else:
            result = dlx.convert(array, to="libb")
        return w.seen(result)
    except dlx.errors.StreamError as error:
        return type(error).__name__
    finally:
        ended = w.cuda.end_capture(capturing)
        if ended != 0 and w.cuda.failed_call != "cuThreadExchangeStreamCaptureMode":
            raise Wrong(f"the capture was broken: {ended}")


def asked():
    """Queries, plans, and calls of dlx.Tensor by C programs and other libraries."""
    yield Case("where, device", lambda w: w.made("a").ptr, lambda w, x: str(driver.where(x)))
    yield Case("where, pinned", lambda w: w.cuda.alloc(N, kind=PINNED), lambda w, x: str(driver.where(x)))
    yield Case("plan", lambda w: w.made("a"), lambda w, x: planned(x, to="dlx", device="cuda:1"))
    yield Case("plan of gaps", lambda w: w.view((4, 8), (16, 1)), lambda w, x: planned(x, to="libf"))
    yield Case("describe", lambda w: w.own(), lambda w, x: str(dlx.describe(x).device))
    yield Case("shares_memory", lambda w: (w.own(), w.made("a")), lambda w, x: dlx.shares_memory(*x))
    yield Case("capsule", lambda w: w.made("a"), lambda w, x: dlx.to_capsule(x) and None)
    yield Case("from_dlpack", lambda w: w.made("a"), lambda w, x: dlx.from_dlpack(x))
    yield Case("__dlpack__", lambda w: w.own(), lambda w, x: x.__dlpack__(stream=w.reader[0]) and None)
    yield Case(
        "__dlpack__ of fresh memory", lambda w: w.fresh(), lambda w, x: x.__dlpack__(stream=w.reader[0]) and None
    )
    yield Case("__dlpack__ to the host", lambda w: w.own(), lambda w, x: x.__dlpack__(dl_device=(1, 0)) and None)
    yield Case("__dlpack__ of managed memory", managed, lambda w, x: x.__dlpack__() and None)
    yield Case("interface", lambda w: w.own(), lambda w, x: x.__cuda_array_interface__["shape"])
    yield Case("by interface", lambda w: Interface(w), to("libb"))
    yield Case("pinned by interface", lambda w: Interface(w, PINNED), to("numpy"))
    yield Case("borrow", lambda w: w.made("a"), borrowed)
    yield Case("using", lambda w: w.made("a"), in_using)
    yield Case("using, iterated", lambda w: w.made("a"), in_generator)


def planned(obj, **options):
    """Return the steps of a plan; raise its error."""
    plan = dlx.plan(obj, **options)
    if plan.error is not None:
        raise plan.error
    return [str(step) for step in plan.steps]


def managed(w):
    """Return a dlx.Tensor over managed memory."""
    return dlx.convert(w.made("a", kind=MANAGED), to="dlx")


class Interface:
    """An object with __cuda_array_interface__, which names its stream."""

    def __init__(self, w, kind=2):
        self.array = w.made("a", kind=kind)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (N,),
            "typestr": "|u1",
            "data": (self.array.ptr, False),
            "strides": None,
            "stream": w.a.handle(0),
        }


def borrowed(w, array):
    """Lend an array to C."""
    with dlx.borrow(array, stream=w.reader[0]) as tensor:
        w.cuda.read(w.reader[0], array.ptr, N)
        return tensor.ndim


def in_using(w, array):
    """Work in another framework on the caller's stream."""

    @dlx.using("libb")
    def work(x):
        if w.b.write(x):
            raise Wrong("a race inside of `using`")
        return x, w.made("b")

    return work(array)


def in_generator(w, array):
    """Work in another framework in steps, on the caller's stream."""

    @dlx.using("libb")
    def work(x):
        w.b.write(x)
        yield w.made("b")
        yield x

    return list(work(array))


def tables():
    """The slots of dlx.Tensor's exchange table."""
    yield Case("stream", lambda w: None, lambda w, _: w.exchange.stream((2, 0)) and None)
    yield Case("export", lambda w: w.own(), lambda w, x: native.lib.dlx_managed_release(w.exchange.export(x)))
    yield Case("borrow", lambda w: w.own(), lambda w, x: w.exchange.borrow(x).ndim)
    yield Case("both ways", lambda w: w.own(), lambda w, x: w.exchange.take(w.exchange.export(x)))
    yield Case("allocate", lambda w: dlx.empty(N, "uint8"), allocated)


def allocated(w, like):
    """Make a foreign program allocate device memory through the table; raise the error that it reports."""
    prototype = native.ffi.new("DLTensor*")
    shape = native.ffi.new("int64_t[]", [N])
    prototype.shape, prototype.ndim, prototype.dtype = shape, 1, (1, 8, 1)
    prototype.device = (2, 0)
    call = w.exchange.allocate(prototype)
    if call.rc:
        raise dlx.errors.DeviceError(call.message.decode())
    return dlx.from_managed(native.ffi.cast("DLManagedTensorVersioned*", call.out)).shape


def sharing():
    """Memory shared between processes: the sharing side, which reads it again."""
    for by in ("handle", "descriptor"):

        def make(w, by=by):
            by_handle(w.cuda, by == "handle")
            return {"x": w.made("a"), "y": [w.made("p", 1)], "z": bytearray(BYTES)}

        yield Case(f"by {by}", make, shared_here)
        yield Case(f"of a pool, by {by}", lambda w, make=make: [make(w)["x"], w.fresh()], shared_here)
        yield Case(f"made to be shared, by {by}", make, shared_from_the_start)
    yield Case("into a framework", lambda w: w.made("a"), lambda w, x: shared_here(w, x, to="libb"))


def planted():
    """Wrong programs, which must be found."""
    yield Case("an order that is not made", lambda w: w.made("a"), without_looking)
    yield Case("an error of another kind", lambda w: w.made("a"), misnamed)
    yield Case("a tensor that is kept", lambda w: w.made("a"), keeping)


def without_looking(w, array):
    """Order two streams, and continue after a failure."""
    native.lib.dlx_cuda_order(0, w.a.handle(0), 0, w.b.handle(0))
    return w.b.Array(array.tensor)


def misnamed(w, array):
    """Raise an error that does not name the driver."""
    try:
        return dlx.convert(array, to="libb")
    except dlx.errors.DlxError:
        raise dlx.errors.DeviceError("it did not work") from None


_kept = []


def keeping(w, array):
    """Keep a tensor if the conversion fails."""
    try:
        return dlx.convert(array, to="libb")
    except dlx.errors.DlxError:
        _kept.append(native.tensor_behind(array.tensor, 0, 0, None))
        raise


def by_handle(cuda, yes):
    """Make the driver share memory by handles, or by descriptors."""
    cuda._lib.fake_set_sharing(int(yes), int(not yes))


def shared_here(w, obj, **options):
    """Share, and attach in the same process."""
    with dlx.share(obj) as handle:
        return dlx.attach(dict(handle), writable=True, **options)


def shared_from_the_start(w, _):
    """Allocate memory that other processes can open."""
    tensor = dlx.empty(N, "uint8", "cuda:1", shared=True)
    w.cuda.poke(tensor.data_ptr, BYTES)
    return shared_here(w, tensor)


def stacked(w, arrays):
    """Stack arrays until the fast path does it."""
    return [dlx.stack(arrays, to="libg") for _ in range(4)][-1]


def attaching():
    """Memory of another process, by handle and by descriptor."""
    for by, handle in json.loads(os.environ["DLX_HANDLES"]).items():
        for target in ("dlx", "libb"):
            yield Case(
                f"by {by} to {target}",
                lambda w, by=by: by_handle(w.cuda, by == "handle"),
                lambda w, _, handle=handle, target=target: dlx.attach(handle, to=target, writable=True),
            )


def while_sharing(command):
    """Run a program while this process shares memory by handle and by descriptor; return its exit status."""
    cuda, shares = FakeCuda(os.environ["DLX_CUDA_DRIVER"]), {}
    cuda.reset()
    with contextlib.ExitStack() as stack:
        for by in ("handle", "descriptor"):
            by_handle(cuda, by == "handle")
            tree = [dlx.empty(N, "uint8", f"cuda:{number}", shared=True) for number in (0, 1)]
            for tensor in tree:
                cuda.poke(tensor.data_ptr, BYTES)
            shares[by] = stack.enter_context(dlx.share(tree))
        return subprocess.run(command, env=os.environ | {"DLX_HANDLES": json.dumps(shares)}, check=False).returncode


GROUPS = {
    "planted": planted,
    "sharing": sharing,
    "attaching": attaching,
    "shared": shared,
    "moved": moved,
    "released": released,
    "captured": captured,
    "asked": asked,
    "tables": tables,
}


# ---- checks after each failure ---------------------------------------------------------------------------------------


def words(error):
    """Return the whole text of an error: its notes, collected errors and causes."""
    said = [str(error), *getattr(error, "__notes__", ())]
    for each in getattr(error, "exceptions", ()):
        said.append(words(each))
    if error.__cause__ is not None:
        said.append(words(error.__cause__))
    return "\n".join(said)


def is_said(name, code, error):
    """Return True if an error names the failed call, or one that failed because of it."""
    if name == "cuThreadExchangeStreamCaptureMode":  # calls that a capture forbids fail by themselves
        return "failed with CUDA" in words(error)
    return (name if code == SINGLE else str(code)) in words(error)


def complaints(w, name):
    """Return the complaints about leftovers of a driver's calls."""
    found = {"depth": w.cuda.depth, "mode": w.cuda.mode}
    return {key: value for key, value in found.items() if value and key not in UNDONE.get(name, ())}


def attempt(w, case, code, number, is_warm, expected):
    """Make one call fail; return its name, and whether an error was raised."""
    w.begin()
    if is_warm:
        once(w, case)
    kept = [case.make(w)]
    gc.collect()
    live = native.live()
    result = error = None
    w.cuda.fail_number(number, code)
    try:
        result = case.act(w, kept[0])
    except Wrong:
        raise
    except Exception as raised:
        error = raised
    w.failed = name = w.cuda.failed_call
    w.cuda.fail_number(0, 0)
    w.cuda.mend()
    if error is not None:
        if not name:
            raise Wrong(f"it raises though nothing failed: {error!r}") from error
        if not isinstance(error, dlx.errors.DlxError | ExceptionGroup):
            raise Wrong(f"{type(error).__name__}: {error}") from error
        if not is_said(name, code, error):
            raise Wrong(f"the error does not say so: {error}") from error
    elif (found := w.seen(result)) != expected:
        raise Wrong(f"wrong result {found}, not {expected}")
    raised, error, result = error is not None, None, None
    w.cuda.resume_all()
    driver.release_pending()
    if native.live() != live:
        gc.collect()
    if raised and native.live() != live:
        raise Wrong(f"{native.live() - live} managed tensors left")
    if found := complaints(w, name):
        raise Wrong(f"left behind: {found}")
    if w.cuda.misuses or (w.cuda.races and code != STICKY):
        raise Wrong(w.cuda.report)
    w.cuda.clear_report()
    if not raised:
        kept.clear()
    finish(w, case, kept, name, code, expected)
    return name, raised


def finish(w, case, kept, name, code, expected):
    """Call again without a failure, release everything, and check that nothing is left."""
    try:
        found = w.seen(case.act(w, kept[0])) if kept else once(w, case)
    except Exception as error:
        raise Wrong(f"the next call fails: {error!r}") from error
    if found != expected:
        raise Wrong(f"the next call gives {found}, not {expected}")
    found = None
    kept.clear()
    if left := driver.release_pending():
        raise Wrong(f"{left} arrays still wait")
    native.lib.dlx_cuda_forget()
    left = {"events": w.cuda.events, "blocks": w.cuda.blocks - w.cuda.taken}
    if IS_IPC:
        left |= {"opened": w.cuda.opened, "allocations": w.cuda.allocations}
    left = {key: value for key, value in left.items() if value and key not in UNDONE.get(name, ())}
    if (left and code != STICKY) or w.cuda.misuses:
        raise Wrong(f"left behind: {left} {w.cuda.report}")


def once(w, case):
    """Build a source and make the call; return the properties of its result."""
    source = case.make(w)
    result = case.act(w, source)
    found = w.seen(result)
    result = source = None
    driver.release_pending()
    return found


def run(w, case, code, is_warm):
    """Make every call fail once; return the number of calls, and of errors."""
    w.begin()
    expected = once(w, case)
    number = failures = 0
    while True:
        number += 1
        try:
            name, raised = attempt(w, case, code, number, is_warm, expected)
        except Wrong as wrong:
            told = f"{case.name}, {'warm' if is_warm else 'cold'}, {code}, call {number} {w.failed}: {wrong}"
            raise Wrong(told) from wrong.__cause__
        failures += raised
        if not name:
            return number - 1, failures


def main(*wanted):
    """Run the cases of groups; return the exit status."""
    faulthandler.enable()
    if any(each.startswith("attaching") for each in wanted) and "DLX_HANDLES" not in os.environ:
        return while_sharing(program("cuda.driver_failures", *wanted))
    wrong, unraised, calls, failures, cases = [], [], 0, 0, 0
    sys.unraisablehook = lambda args: unraised.append(f"{args.exc_value!r} in {args.object!r}")
    patch = pytest.MonkeyPatch()
    w = World(patch)
    gc.collect()
    gc.freeze()
    for group, _, part in (each.partition("=") for each in wanted):
        for case in GROUPS[group]():
            if part not in case.name:
                continue
            cases += 1
            for code, is_warm in itertools.product((SINGLE, STICKY), (False, True)):
                try:
                    found = run(w, case, code, is_warm)
                except Exception as error:
                    wrong.append(str(error) if isinstance(error, Wrong) else f"{case.name}: {error!r}")
                    if "DLX_SHOW" in os.environ:
                        traceback.print_exception(error)
                    continue
                calls, failures = calls + found[0], failures + found[1]
    patch.undo()
    native.lib.dlx_cuda_forget()
    print(*wrong, *unraised, sep="\n")
    print(f"{cases} cases, {calls} calls failed, {failures} errors")
    return bool(wrong or unraised)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
