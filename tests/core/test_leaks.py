"""Nothing leaks: managed tensors, memory, references; also after failures and in many threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import sysconfig
import threading
import weakref

import pytest

import dlx
from dlx import errors
from dlx._core import native

ROUNDS = int(os.environ.get("DLX_ROUNDS", "300"))  # per thread; `nox -s deep` sets more

# ---- 20 000 conversions ----------------------------------------------------------------------------------------------

WITH_FRAMEWORKS = """
import numpy as np
import torch

array, reverse, locked = np.arange(64.0), np.arange(64.0)[::-1], np.broadcast_to(np.arange(4.0), (16, 4))
tensor, leaf, pairs = torch.arange(64.0), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.uint8)
pairs = pairs.view(torch.float4_e2m1fn_x2)
conj, sparse = torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()
jobs += [
    (lambda: dlx.convert(array, to="torch")), (lambda: dlx.convert(tensor, to="numpy")),
    (lambda: dlx.convert(reverse, to="torch")), (lambda: dlx.convert(locked, to="torch")),
    (lambda: dlx.convert(dlx.convert(array, to="dlx"), to="torch")), (lambda: dlx.convert(array, to="numpy")),
    (lambda: dlx.convert(leaf, to="numpy", detach=True)), (lambda: dlx.convert(conj, to="numpy")),
    (lambda: dlx.convert(np.float32(1), to="torch")), (lambda: dlx.convert(array[:0], to="torch")),
    (lambda: dlx.convert(tensor.__dlpack__(max_version=(1, 0)), to="numpy")),
    (lambda: dlx.plan(reverse, to="torch")), (lambda: dlx.plan(leaf, to="numpy")), (lambda: dlx.describe(tensor)),
]
failing += [
    (lambda: dlx.convert(reverse, to="torch", copy=False)), (lambda: dlx.convert(locked, to="torch", copy=False)),
    (lambda: dlx.convert(leaf, to="numpy")), (lambda: dlx.convert(pairs, to="numpy")),
    (lambda: dlx.convert(sparse, to="numpy")), (lambda: dlx.convert(array.astype("M8[s]"), to="torch")),
]
"""

MANY = """
import ctypes
import gc
import sys
import dlx
from dlx._core import native


class Stranger:
    def __dlpack__(self, **options):
        return dlx.convert(bytearray(64), to="dlx").__dlpack__(**options)


class Raising:
    def __dlpack__(self):
        raise ValueError("no")


def used():
    capsule = Stranger().__dlpack__()
    dlx.convert(capsule, to="dlx")
    dlx.convert(capsule, to="dlx")


block = bytearray(4096)
jobs = [
    (lambda: dlx.convert(block, to="dlx")), (lambda: dlx.convert(block, to="dlx", copy=True)),
    (lambda: dlx.convert(memoryview(block)[::-2], to="dlx")), (lambda: dlx.convert(Stranger(), to="dlx")),
    (lambda: dlx.convert(Stranger().__dlpack__(max_version=(1, 0)), to="dlx")), (lambda: Stranger().__dlpack__()),
    (lambda: dlx.plan(Stranger(), to="dlx")), (lambda: dlx.plan(Raising(), to="dlx")),
]
failing = [
    (lambda: dlx.convert(Raising(), to="dlx")), (lambda: dlx.convert([1, (Raising(),)], to="dlx")), used,
    (lambda: dlx.convert(block, to="dlx", device="cuda")), (lambda: dlx.convert(block, to="nosuch")),
    (lambda: dlx.convert(Stranger().__dlpack__(), to="dlx", stream=5)),
]
# FRAMEWORKS


def rounds(n):
    for _ in range(n // (len(jobs) + len(failing))):
        for job in jobs:
            job()
        for job in failing:
            try:
                job()
            except dlx.errors.DlxError:
                pass
            else:
                raise AssertionError("did not fail")
    gc.collect()


class Mallinfo(ctypes.Structure):
    names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def memory():
    info = ctypes.CDLL(None).mallinfo2
    info.restype = Mallinfo
    found = info()
    return found.used + found.hblkhd


rounds(5_000)
live, before, blocks = native.live(), memory(), sys.getallocatedblocks()
rounds(20_000)
print(native.live() - live, live, memory() - before, sys.getallocatedblocks() - blocks)
"""


@pytest.mark.unsanitized("freed memory is kept for a while, so that resident memory grows")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 or later")
@pytest.mark.parametrize("frameworks", ["none", "numpy and torch"])
@pytest.mark.slow
def test_20_000_conversions(python, frameworks):
    """After 20 000 conversions, many of which fail, no managed tensor is alive and no memory is lost.

    malloc's memory is counted to the byte, so that a leak of 64 bytes in one kind of call is detected.
    """
    code = MANY
    if frameworks != "none":
        pytest.importorskip("numpy")
        pytest.importorskip("torch")
        code = MANY.replace("# FRAMEWORKS", WITH_FRAMEWORKS)
    more, live, grown, blocks = map(int, python(code, args=(), timeout=200, imported=frameworks != "none").split())
    assert (live, more) == (0, 0)
    assert grown < 1 << 15, f"{grown} bytes more"
    assert blocks < 200, f"{blocks} Python objects more"


IN_USE = """
import ctypes
import gc
import os
import threading
import dlx
from dlx._core import native

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


@pytest.mark.unsanitized("freed memory is kept for a while, so that resident memory grows")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.parametrize("form", ["list", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dict", "nested"))])
def test_wide_trees(np, torch, python, form):
    """A thousand conversions of a tree of 1,000 arrays leak neither bytes nor managed tensors."""
    out = python(
        IN_USE
        + f"""
import numpy as np
arrays = [np.zeros(2) for _ in range(1000)]
tree = {{"list": arrays, "dict": dict(enumerate(arrays)), "nested": [[x, (x, {{1: x}})] for x in arrays]}}[{form!r}]

def rounds(n):
    for _ in range(n):
        dlx.convert(tree, to="torch")
    gc.collect()

rounds(50)
live, before = native.live(), resident()
rounds(400 if {form!r} == "nested" else 1000)
print(native.live() - live, resident() - before)
""",
        args=(),
        timeout=200,
        imported=True,
    )
    more, grown = map(int, out.split())
    assert more == 0
    assert grown < 8 << 20, f"{grown} bytes more"


def test_threads_that_end_leave_no_counter(python):
    """A thread reuses the counter of a thread that has ended: 1,000 threads leave none behind."""
    out = python(
        IN_USE
        + """
class Info(ctypes.Structure):  # glibc's mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

library = ctypes.CDLL(None)
if not hasattr(library, "mallinfo2"):
    print("0")
    raise SystemExit
library.mallinfo2.restype = Info
block = bytearray(8)

def work():
    dlx.convert(block, to="dlx")

def rounds(n):
    for _ in range(n):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()

rounds(200)
before = library.mallinfo2().uordblks
rounds(1000)
print(library.mallinfo2().uordblks - before)
""",
        args=(),
        timeout=280,  # without the GIL an idle thread takes up to 0.1 s to start and end on a busy machine
    )
    assert int(out) < 1000 * 16, f"{out.strip()} bytes more"


# ---- references ------------------------------------------------------------------------------------------------------


class Stranger:
    def __dlpack__(self, *, max_version=None):
        return dlx.convert(bytearray(8), to="dlx").__dlpack__(max_version=max_version)


class Raising:
    def __dlpack__(self):
        raise ValueError("no")


CASES = {  # create, options
    "numpy": (lambda np, torch: np.zeros(4), {"to": "torch"}),
    "copied": (lambda np, torch: np.zeros(4)[::-1], {"to": "torch"}),
    "torch": (lambda np, torch: torch.zeros(4), {"to": "numpy"}),
    "to dlx": (lambda np, torch: torch.zeros(4), {"to": "dlx"}),
    "same": (lambda np, torch: np.zeros(4), {"to": "numpy"}),
    "detached": (lambda np, torch: torch.zeros(4, requires_grad=True), {"to": "numpy", "detach": True}),
    "subclass": (lambda np, torch: torch.zeros(4).as_subclass(type("Mine", (torch.Tensor,), {})), {"to": "numpy"}),
    "buffer": (lambda np, torch: bytearray(4), {"to": "dlx"}),
    "generic_adapter": (lambda np, torch: Stranger(), {"to": "dlx"}),
    "blocker": (lambda np, torch: torch.zeros(4, requires_grad=True), {"to": "numpy"}),
    "incompatibility": (lambda np, torch: np.zeros(4)[::-1], {"to": "torch", "copy": False}),
    "dtype": (lambda np, torch: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), {"to": "numpy"}),
    "option": (lambda np, torch: np.zeros(4), {"to": "torch", "stream": 5}),
    "raising": (lambda np, torch: Raising(), {"to": "dlx"}),
    "no array": (lambda np, torch: type("Unknown", (), {})(), {"to": "dlx"}),
}


def attempt(verb, obj, options):
    """Call, and release the result."""
    with contextlib.suppress(errors.DlxError):
        verb(obj, **options)


@pytest.fixture
def without_collector():
    """Disable the collector: references must be released without it, not be held by a cycle."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("verb", [dlx.convert, dlx.plan])
@pytest.mark.parametrize("case", CASES)
def test_sources_are_let_go(np, torch, without_collector, case, verb):
    """A conversion or plan, even a failing one, keeps no reference to its source without the collector."""
    make, options = CASES[case]
    obj = make(np, torch)
    before = sys.getrefcount(obj)
    for _ in range(3):
        attempt(verb, obj, options)
    assert sys.getrefcount(obj) == before


@pytest.mark.parametrize("case", ["numpy", "torch", "to dlx", "buffer", "generic_adapter", "detached", "subclass"])
def test_results_are_let_go(np, torch, without_collector, case):
    """Dropping a result releases it and its managed tensor immediately."""
    make, options = CASES[case]
    live = native.live()
    result = dlx.convert(make(np, torch), **options)
    assert native.live() > live
    alive = weakref.ref(result)
    del result
    assert alive() is None and native.live() == live


def test_the_source_lives_as_long_as_the_result(np, torch):
    """The result, or a view of it, keeps the source's memory alive, and nothing else does."""
    base = np.arange(1000.0)
    alive = weakref.ref(base)
    view = dlx.convert(base, to="torch")[5:].view(5, 199)
    del base
    gc.collect()
    assert alive() is not None and view[0, 0] == 5
    del view
    assert alive() is None


def test_chains_are_let_go(np, torch, without_collector):
    """A hundred conversions in a row keep the memory alive, and release it together."""
    live = native.live()
    array = base = np.arange(10.0)
    for _ in range(50):
        array = dlx.convert(dlx.convert(array, to="torch"), to="numpy")
    assert array.tolist() == base.tolist()
    assert array.__array_interface__["data"] == base.__array_interface__["data"]
    del array
    assert native.live() == live


def test_singletons_keep_their_references(without_collector):
    """The reference counts of None, True and commonly used classes do not change."""
    source = bytearray(8)
    dlx.convert(source, to="dlx")  # the first call caches its route, which holds the types
    watched = [dlx.Device, dlx.DType, dlx.Tensor, errors.DeviceError, type(source)]
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(200):
        tensor = dlx.convert(source, to="dlx")
        (tensor.device, tensor.dtype, tensor.shape, tensor.__dlpack__(), tensor.__dlpack_device__())
        attempt(dlx.convert, source, {"to": "dlx", "device": "cuda"})
        del tensor
    gc.collect()
    after = [sys.getrefcount(each) for each in watched]
    # Without the GIL each thread has its own reference counts for classes, which are merged now and then.
    few = 50 if sysconfig.get_config_var("Py_GIL_DISABLED") else 0
    assert all(abs(b - a) <= few for a, b in zip(before, after, strict=True)), (before, after)


# ---- threads ---------------------------------------------------------------------------------------------------------


def together(work, threads=10):
    """Run work(number) `ROUNDS` times in each of many threads; raise any exception."""
    failures = []

    def loop(number):
        try:
            for _ in range(ROUNDS):
                work(number)
                if failures:
                    break
        except BaseException as error:  # raised by the test below
            failures.append(error)

    running = [threading.Thread(target=loop, args=(number,)) for number in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]


@pytest.mark.slow
def test_threads_with_shared_and_private_arrays(np, torch):
    """Ten threads convert shared and private arrays: correct values, correct errors, no leaks."""
    live = native.live()
    shared, shared_tensor = np.arange(1000.0), torch.arange(1000.0)
    leaf = torch.ones(2, requires_grad=True)

    def work(number):
        private = np.full(300, number)
        assert dlx.convert(shared, to="torch")[999] == 999
        assert dlx.convert(shared_tensor, to="numpy")[999] == 999
        assert dlx.convert(private, to="torch").sum() == 300 * number
        assert dlx.convert(private[::-1], to="torch")[0] == number
        assert dlx.convert(dlx.convert(private, to="dlx"), to="numpy")[0] == number
        assert dlx.plan(shared, to="torch").outcome == "shared"
        with pytest.raises(errors.ConversionError, match="gradients"):
            dlx.convert(leaf, to="numpy")

    together(work)
    gc.collect()
    assert native.live() == live


def test_threads_with_one_capsule_each_use_it_once():
    """If many threads convert the same capsule, one gets it; the others get ConsumedError."""
    live, source = native.live(), dlx.convert(bytearray(8), to="dlx")
    for _ in range(200):
        capsule, got, barrier = source.__dlpack__(), [], threading.Barrier(4)

        def use(capsule=capsule, got=got, barrier=barrier):
            barrier.wait()
            try:
                got.append(dlx.convert(capsule, to="dlx").shape)
            except errors.ConsumedError:
                got.append(None)

        running = [threading.Thread(target=use) for _ in range(4)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert sorted(got, key=str) == [(8,), None, None, None]
    del source, capsule, use, running
    gc.collect()
    assert native.live() == live
