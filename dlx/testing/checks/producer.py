"""Checks of a producer: its capsules, their lifetime, and the keywords of ``__dlpack__``."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dlx._core.types import IS_COPIED, DType
from dlx.testing.capsules import VIEWS, Taken, offsets
from dlx.testing.check import check
from dlx.testing.subject import Broken, Subject, attempt, error_line, must


def iter_views(lib: Subject) -> Iterator[tuple[str, Any, tuple[int, ...], bytes]]:
    """Yield (name, view, its shape, its bytes) for each supported view."""
    lib.needs(lib.views and lib.ndims[1] > 1, "no views of its arrays are declared")
    for name, view in lib.views.items():
        array, data = lib.array()
        shape, strides, first = VIEWS[name]
        made, error = attempt(view, array)
        if error is None:  # the library supports this view
            left = (4 * (first + each) for each in offsets(shape, strides))
            yield name, made, shape, b"".join(data[at : at + 4] for at in left)


def make_readonly(lib: Subject) -> Any:
    """Return a read-only array of the subject."""
    array = lib.array()[0]
    lib.needs(lib.immutable or lib.readonly, "it has no read-only arrays")
    return array if lib.immutable or lib.readonly is None else lib.readonly(array)


@check("producer", "dtypes", "wrong", see="dlpack.h, DLDataTypeCode")
def export_dtypes(lib: Subject) -> None:
    """Every dtype is exported with its name and all bits."""
    for dtype in lib.dtypes:
        array, data = lib.array(dtype)
        taken = lib.versioned(array)
        must(taken.dtype.name == dtype, f"{dtype} was exported as {taken.dtype.name}")
        must(taken.elements() == data, f"the elements of {dtype} changed")


@check("producer", "layouts", "wrong")
def export_layouts(lib: Subject) -> str:
    """A view is exported with its shape, strides and elements."""
    refused = []
    for name, view, shape, data in iter_views(lib):
        taken, error = lib.ask(view, **lib.asking(view))
        if error is not None:
            refused.append(f"{name} ({type(error).__name__})")
            continue
        must(taken.shape == shape, f"{name} was exported with shape {taken.shape}, not {shape}")
        must(taken.elements() == data, f"{name} was exported with other elements")
    return f"refused: {', '.join(refused)}" if refused else ""


@check("producer", "layouts", "friction", see="dlpack.h 1.2: strides are never NULL for ndim > 0")
def export_strides(lib: Subject) -> None:
    """A versioned capsule has strides for every layout."""
    taken = lib.versioned(lib.array()[0])
    lib.needs(not taken.legacy, "it exports only legacy capsules")
    must(taken.strides is not None, "the strides are NULL")


@check("producer", "keywords", "wrong")
def export_device(lib: Subject) -> None:
    """`__dlpack_device__` returns the device of the capsule as two integers."""
    array = lib.array()[0]
    device, error = attempt(array.__dlpack_device__)
    must(error is None, f"__dlpack_device__ raised {error_line(error)}")
    taken = lib.versioned(array)
    kind, number = device
    must(hasattr(kind, "__index__") and hasattr(number, "__index__"), f"__dlpack_device__ returned {device}")
    must((int(kind), int(number)) == taken.device, f"__dlpack_device__ returned {device}, not {taken.device}")


@check("producer", "layouts", "fatal")
def export_snapshot(lib: Subject) -> None:
    """A capsule keeps its shape if the array is reshaped in place afterwards.

    x = {grid}
    taken = Taken(x.__dlpack__(max_version=(1, 0)))
    before = taken.shape
    {reshape}
    taken.reread()
    assert taken.shape == before, taken.shape
    """
    lib.needs(lib.reshape, "its arrays keep their shape")
    assert lib.reshape is not None
    array = lib.array()[0]
    taken = lib.versioned(array)
    before = taken.shape, taken.strides
    lib.reshape(array)
    taken.reread()
    after = taken.shape, taken.strides
    must(after == before, f"shape and strides of an exported capsule changed from {before} to {after}")


@check("producer", "refusals", "wrong")
def export_unfit(lib: Subject) -> str:
    """Arrays that DLPack cannot describe are refused, not exported as something else.

    {unfit}
    capsule = x.__dlpack__(max_version=(1, 0))  # or raises
    raise AssertionError(capsule)
    """
    lib.needs(lib.unfit, "DLPack can describe all of its arrays")
    passed, refused = [], []
    for name, make in lib.unfit.items():
        array = make()
        capsule, error = attempt(lambda array=array: array.__dlpack__(**lib.asking(array)))
        if error is None:
            passed.append(f"{name} (as {Taken(capsule).dtype.name})")
        elif not isinstance(error, BufferError):
            refused.append(f"{name} with {type(error).__name__}")
    must(not passed, f"exported, though DLPack cannot describe them: {', '.join(passed)}")
    return f"refused, but not with BufferError: {', '.join(refused)}" if refused else ""


@check("producer", "refusals", "wrong")
def export_pending(lib: Subject) -> str:
    """A pending operation is applied or refused before the export.

    import struct
    x = {pending}
    found = Taken(x.__dlpack__(max_version=(1, 0))).elements()
    assert found == {pending_bytes}
    """
    lib.needs(lib.pending, "it has no pending operations")
    refused = []
    for name, make in lib.pending.items():
        array, data = make()
        taken, error = lib.ask(array, **lib.asking(array))
        lost = error is None and taken.elements() != data
        must(not lost, f"the {name} bit was lost: other values were exported without an error")
        refused += [name] if error is not None else []
    return f"refused: {', '.join(refused)}" if refused else ""


@check("producer", "read-only", "wrong", see="dlpack.h 1.0, DLPACK_FLAG_BITMASK_READ_ONLY")
def export_readonly(lib: Subject) -> str | None:
    """Read-only memory is exported with the read-only flag.

    x = {readonly}
    taken = Taken(x.__dlpack__(max_version=(1, 0)))
    assert taken.readonly, taken.capsule
    """
    array = make_readonly(lib)
    taken, error = lib.ask(array, **lib.asking(array))
    if isinstance(error, BufferError):
        return "refused: BufferError"
    must(error is None, f"a read-only array: {error_line(error)}")
    must(not taken.legacy, "a legacy capsule instead of the requested versioned one: the read-only flag is lost")
    must(taken.readonly, f"flags {taken.flags} have no read-only flag")
    return None


@check("producer", "read-only", "wrong", see="array API standard, __dlpack__: BufferError")
def export_readonly_legacy(lib: Subject) -> str | None:
    """Read-only memory is not exported in a legacy capsule, which has no read-only flag.

    x = {readonly}
    capsule = x.__dlpack__()  # or raises
    raise AssertionError(capsule)
    """
    array = make_readonly(lib)
    taken, error = lib.ask(array)
    if error is not None:
        return f"refused: {error_line(error)}"
    try:
        own = lib.seen(array)[0]
    except Broken:  # no versioned export to compare with
        own = taken.address
    must(taken.address != own, "a legacy capsule shares the memory, without a read-only flag")
    return None


MIB = 1 << 20
ROUNDS = 64  # arrays of 1 MiB for each way to end an export
LOST = 24  # MiB of ROUNDS that may stay allocated


def resident_memory() -> int:
    """Return the resident memory of the process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_memory(once: Callable[[], Any], what: str) -> None:
    """Raise `Broken` if the process grows during `ROUNDS` calls, after a warm-up, that each make an array of 1 MiB."""
    for _ in range(8):
        once()
    gc.collect()
    before = resident_memory()
    for _ in range(ROUNDS):
        once()
    gc.collect()
    left = (resident_memory() - before) / MIB
    must(left < LOST, f"{left:.0f} MiB stay allocated after {ROUNDS} {what}")


def run_threads(do: Callable[[int], Any], threads: int = 8) -> list[BaseException | None]:
    """Call ``do(i)`` on several threads that start at the same time; return the error of each, or None."""
    gate = threading.Barrier(threads)

    def one(i: int) -> None:
        gate.wait()
        do(i)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(one, i) for i in range(threads)]
    finally:
        sys.setswitchinterval(interval)
    raised = (future.exception() for future in running)
    return [None if error is None else error.with_traceback(None) for error in raised]


def check_threads(do: Callable[[int], Any]) -> None:
    """Call ``do(i)`` on several threads; raise `Broken` if any of them raised."""
    raised = [error for error in run_threads(do) if error is not None]
    must(not raised, f"{len(raised)} of 8 threads failed: {raised[:1]}")


def _consume_export(lib: Subject) -> tuple[Any, Taken]:
    array = lib.array()[0]
    return array, lib.versioned(array).consume()


@check("producer", "lifetimes", "wrong", see="DLPack, Python specification: capsule destructor")
def owner_unconsumed(lib: Subject) -> None:
    """An unused capsule releases the array.

    import sys
    x = {array}
    before = sys.getrefcount(x)
    for _ in range(10):
        x.__dlpack__(max_version=(1, 0))
    assert sys.getrefcount(x) == before
    """
    array = lib.array()[0]
    before = sys.getrefcount(array)
    for keywords in (lib.asking(array), {}):
        for _ in range(10):
            attempt(array.__dlpack__, **keywords)
    gc.collect()
    after = sys.getrefcount(array)
    must(after == before, f"20 capsules were dropped, but the array has {after - before} more references")


@check("producer", "lifetimes", "fatal", see="DLPack, Python specification: used capsules")
def owner_released(lib: Subject) -> None:
    """The deleter releases the array, and the capsule's destructor does not release it again."""
    array = lib.array()[0]
    before = sys.getrefcount(array)
    for _ in range(10):
        taken = lib.versioned(array).consume()
        taken.capsule = None
        must(sys.getrefcount(array) >= before, "a consumed capsule released the array again")
        taken.delete(gil=True)
    gc.collect()
    after = sys.getrefcount(array)
    must(after == before, f"10 deleters were called, but the array has {after - before:+} references")


@check("producer", "lifetimes", "fatal")
def owner_outlives(lib: Subject) -> None:
    """A consumer may outlive the array and its capsule."""
    array, data = lib.array()
    taken = lib.versioned(array).consume()
    taken.capsule = None
    del array
    gc.collect()
    churn = [lib.array()[0] for _ in range(50)] + [bytearray(len(data)) for _ in range(200)]
    must(taken.elements() == data, "the memory changed when the array was deleted")
    del churn
    taken.delete()


@check("producer", "threads", "fatal", alone=True, see="DLPack, Python specification: deleters")
def deleter_without_gil(lib: Subject) -> None:
    """The deleter may be called without the GIL."""
    array, taken = _consume_export(lib)
    before = sys.getrefcount(array)
    taken.delete()
    must(sys.getrefcount(array) <= before, "the array gained references")
    del array
    gc.collect()


@check("producer", "threads", "fatal", alone=True, see="DLPack, Python specification: deleters")
def deleter_foreign_thread(lib: Subject) -> None:
    """The deleter may be called on a thread that Python did not create."""
    for last in (False, True):
        array, taken = _consume_export(lib)
        if last:
            taken.capsule = None
            array = None
        taken.delete(thread=True)
        del array
    gc.collect()


@check("producer", "threads", "fatal", alone=True, see="DLPack, Python specification: deleters")
def deleter_at_exit(lib: Subject) -> None:
    """The deleter may be called after the interpreter has ended."""
    _, taken = _consume_export(lib)
    taken.delete_at_exit()


@check("producer", "leaks", "wrong")
def export_leaks(lib: Subject) -> None:
    """Memory is released after every kind of export, also after a refused one."""
    assert lib.make is not None
    dtype = lib.dtype()
    data, shape = bytes(MIB), lib.shape(MIB * 8 // DType(dtype).bits // 64, 64)
    make = lib.make

    def consume() -> None:
        lib.versioned(make(data, dtype, shape)).consume().delete()

    def export(**keywords: Any) -> Callable[[], Any]:
        return lambda: attempt(make(data, dtype, shape).__dlpack__, **keywords)

    version = lib.asking(lib.array()[0])
    ways = {
        "dropped": export(**version), "dropped, legacy": export(), "consumed": consume,
        "copied and dropped": export(**version, copy=True),
        "refused": export(**version, dl_device=(15, 0)), "called wrongly": export(no_such_keyword=1),
    }  # fmt: skip
    for way, once in ways.items():
        check_memory(once, f"arrays of 1 MiB: {way}")


@check("producer", "threads", "fatal")
def export_threads(lib: Subject) -> None:
    """Many threads may export one array at once."""
    array, data = lib.array()
    before = sys.getrefcount(array)

    def work(_: int) -> None:
        for _ in range(100):
            taken = lib.versioned(array)
            must(taken.elements() == data, "other elements")
            taken.consume().delete()

    check_threads(work)
    gc.collect()
    after = sys.getrefcount(array)
    must(after == before, f"the array has {after - before:+} references")


# ---- keywords of __dlpack__, from the array API standard --------------------------------------------------------

ELSEWHERE = (15, 0)  # WebGPU: no producer exports to it


def _legacy(name: str, who: str, **keywords: Any) -> None:
    def function(lib: Subject) -> str | None:
        if lib.immutable and isinstance(attempt(lib.array()[0].__dlpack__, **keywords)[1], BufferError):
            return "refused: it has no read-only flag"
        must(lib.export(lib.array()[0], **keywords).legacy, "a versioned capsule without a request for one")
        return None

    call = ", ".join(f"{key}={value}" for key, value in keywords.items())
    function.__doc__ = f"""A consumer {who} gets a legacy capsule.

    x = {{array}}
    capsule = x.__dlpack__({call})
    assert '"dltensor"' in repr(capsule), capsule
    """
    see = "array API standard, __dlpack__: max_version"
    check("producer", "versions", "refuses", see=see, name=f"keyword-max-version-{name}")(function)


_legacy("none", "that requests no version")
_legacy("0", "that requests DLPack 0.8", max_version=(0, 8))


@check("producer", "versions", "friction", see="array API standard, __dlpack__: max_version")
def keyword_max_version_1(lib: Subject) -> None:
    """A consumer that requests DLPack 1.0 gets a versioned capsule.

    x = {array}
    capsule = x.__dlpack__(max_version=(1, 0))
    assert '"dltensor_versioned"' in repr(capsule), capsule
    """
    taken = lib.export(lib.array()[0], max_version=(1, 0))
    must(not taken.legacy, "a legacy capsule instead of the requested 1.0: the flags are lost")
    must(taken.version is not None and taken.version[0] == 1, f"version {taken.version}")


@check("producer", "versions", "refuses", see="array API standard: a lower version may be returned")
def keyword_max_version_2(lib: Subject) -> None:
    """A consumer that requests a later major version gets a supported one.

    x = {array}
    x.__dlpack__(max_version=(2, 0))
    """
    array, data = lib.array()
    taken = lib.export(array, max_version=(2, 0))
    must(taken.elements() == data, "other elements")


@check("producer", "keywords", "refuses", see="array API standard, __dlpack__: all default to None")
def keyword_none(lib: Subject) -> None:
    """Every keyword accepts None.

    x = {array}
    x.__dlpack__(stream=None, max_version=(1, 0), dl_device=None, copy=None)
    x.__dlpack__(stream=None)
    """
    array, data = lib.array()
    version = lib.asking(array)
    for keywords in (
        {"stream": None}, {"dl_device": None}, {"copy": None},
        {"stream": None, "max_version": (1, 0), "dl_device": None, "copy": None},
    ):  # fmt: skip
        request = version | keywords
        must(lib.export(array, **request).elements() == data, f"other elements with {request}")


@check("producer", "keywords", "refuses", see="array API standard, __dlpack__: dl_device")
def keyword_own_device(lib: Subject) -> None:
    """A consumer may request the device of the array.

    x = {array}
    x.__dlpack__(max_version=(1, 0), dl_device=(1, 0))
    """
    array, data = lib.array()
    taken = lib.export(array, max_version=(1, 0), dl_device=(1, 0))
    must(taken.device[0] == 1 and taken.elements() == data, f"on {taken.device}, or with other elements")


@check("producer", "keywords", "wrong", see="array API standard, __dlpack__: dl_device")
def keyword_other_device(lib: Subject) -> None:
    """An unsupported device is refused with BufferError.

    x = {array}
    for version in (None, (1, 0)):
        try:
            capsule = x.__dlpack__(max_version=version, dl_device=(15, 0))
        except BufferError:
            continue
        raise AssertionError(f"WebGPU was requested: {capsule}")
    """
    for version in (None, (1, 0)):
        taken, error = lib.ask(lib.array()[0], max_version=version, dl_device=ELSEWHERE)
        request = f"max_version={version}, dl_device={ELSEWHERE}"
        must(error is not None, f"{request} returned memory of device {taken and taken.device}")
        must(isinstance(error, BufferError), f"{request} raised {error_line(error)}")


@check("producer", "keywords", "wrong")
def keyword_unknown(lib: Subject) -> None:
    """An unknown keyword raises TypeError.

    x = {array}
    try:
        x.__dlpack__(max_version=(1, 0), not_a_keyword=1)
    except TypeError:
        raise SystemExit(0)
    raise AssertionError("no error")
    """
    _, error = lib.ask(lib.array()[0], max_version=(1, 0), not_a_keyword=1)
    must(isinstance(error, TypeError), f"an unknown keyword: {'no error' if error is None else error_line(error)}")


@check("producer", "copies", "wrong", see="array API standard, __dlpack__: copy")
def copy_true(lib: Subject) -> str | None:
    """`copy=True` never shares: it returns new memory or raises BufferError.

    x = {array}
    own = Taken(x.__dlpack__(max_version=(1, 0)))
    try:
        copied = Taken(x.__dlpack__(max_version=(1, 0), copy=True))
    except BufferError:
        raise SystemExit(0)
    assert copied.address != own.address
    """
    array, data = lib.array()
    shared = lib.versioned(array)
    copied, error = lib.ask(array, max_version=(1, 0), copy=True)
    if isinstance(error, BufferError):
        return f"refused: {error_line(error)}"
    must(error is None, f"copy=True raised {error_line(error)}")
    must(copied.address != shared.address, "copy=True shares the array's memory")
    must(copied.elements() == data, "the copy has other elements")
    return None


@check("producer", "copies", "refuses", see="array API standard, __dlpack__: it must always copy")
def copy_true_served(lib: Subject) -> None:
    """`copy=True` is supported.

    x = {array}
    x.__dlpack__(max_version=(1, 0), copy=True)
    """
    lib.export(lib.array()[0], max_version=(1, 0), copy=True)


@check("producer", "copies", "friction", see="array API standard: the flag IS_COPIED must be set")
def copy_true_flag(lib: Subject) -> None:
    """A copy that was made for the consumer has the flag IS_COPIED.

    x = {array}
    taken = Taken(x.__dlpack__(max_version=(1, 0), copy=True))
    assert taken.flags & 2, taken.flags  # IS_COPIED
    """
    array = lib.array()[0]
    copied, error = lib.ask(array, max_version=(1, 0), copy=True)
    lib.needs(error is None, "it makes no copies")
    shares = copied.legacy or copied.address == lib.versioned(array).address
    lib.needs(not shares, "it exports no copies in versioned capsules")
    must(copied.flags & IS_COPIED, f"the flags {copied.flags} of a copy have no IS_COPIED")


@check("producer", "copies", "wrong", see="array API standard, __dlpack__: copy")
def copy_false(lib: Subject) -> str | None:
    """`copy=False` shares the memory or raises BufferError.

    x = {array}
    own = Taken(x.__dlpack__(max_version=(1, 0)))
    shared = Taken(x.__dlpack__(max_version=(1, 0), copy=False))
    assert shared.address == own.address
    """
    array = lib.array()[0]
    own = lib.describe(array)[0] if lib.describe is not None else lib.versioned(array).address
    taken, error = lib.ask(array, max_version=(1, 0), copy=False)
    if isinstance(error, BufferError):
        return "refused: BufferError"
    must(error is None, f"copy=False raised {error_line(error)}")
    must(taken.address == own, "copy=False returned other memory than the array's")
    return None
