"""Checks of a producer: memory lives as long as it is used, and is released once, on any thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from dlx._core.types import DType
from dlx.testing.check import check
from dlx.testing.subject import Subject, attempt, must
from dlx.testing.support.capsules import Taken

__all__ = ["none_left", "together", "together_well"]

MIB = 1 << 20
ROUNDS = 64  # arrays of one MiB each, per way of ending an export
LOST = 24  # MiB that may stay behind, of ROUNDS


def resident() -> int:
    """Return the process's memory in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def none_left(once: Callable[[], Any], what: str) -> None:
    """Raise `Broken` if the process grows over `ROUNDS` calls, warmed up, that each make an array of one MiB."""
    for _ in range(8):
        once()
    gc.collect()
    before = resident()
    for _ in range(ROUNDS):
        once()
    gc.collect()
    left = (resident() - before) / MIB
    must(left < LOST, f"{left:.0f} MiB stay behind after {ROUNDS} {what}")


def together(do: Callable[[int], Any], threads: int = 8) -> list[BaseException | None]:
    """Call ``do(i)`` on several threads that start at the same time; return what each raised."""
    gate = threading.Barrier(threads)
    raised: list[BaseException | None] = [None] * threads

    def one(i: int) -> None:
        gate.wait()
        try:
            do(i)
        except BaseException as error:
            raised[i] = error.with_traceback(None)

    running = [threading.Thread(target=one, args=(i,)) for i in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return raised


def together_well(do: Callable[[int], Any]) -> None:
    """Call ``do(i)`` on several threads; raise `Broken` if any of them raised."""
    raised = [error for error in together(do) if error is not None]
    must(not raised, f"{len(raised)} of 8 threads failed: {raised[:1]}")


def _owned(lib: Subject) -> tuple[Any, Taken]:
    array = lib.array()[0]
    taken = lib.versioned(array)
    taken.consume()
    return array, taken


@check(
    kind="producer", about="lifetimes", severity="wrong", see="DLPack, Python specification: capsule destructor",
    shows="""
import sys
x = {array}
before = sys.getrefcount(x)
for _ in range(10):
    x.__dlpack__(max_version=(1, 0))
assert sys.getrefcount(x) == before
""",
)  # fmt: skip
def owner_unconsumed(lib: Subject) -> None:
    """A capsule that nobody takes releases the array."""
    # Drop capsules of both generations; the array's reference count is as before.
    array = lib.array()[0]
    before = sys.getrefcount(array)
    for asked in (lib.asking(array), {}):
        for _ in range(10):
            attempt(array.__dlpack__, **asked)
    gc.collect()
    after = sys.getrefcount(array)
    must(after == before, f"20 capsules were dropped, and the array has {after - before} more references")


@check(kind="producer", about="lifetimes", severity="fatal", see="DLPack, Python specification: used capsules")
def owner_released(lib: Subject) -> None:
    """The deleter releases the array, and the capsule's destructor does not do it again."""
    array = lib.array()[0]
    before = sys.getrefcount(array)
    for _ in range(10):
        taken = lib.versioned(array)
        taken.consume()
        taken.capsule = None
        must(sys.getrefcount(array) >= before, "a consumed capsule released the array when it was dropped")
        taken.delete(gil=True)
    gc.collect()
    after = sys.getrefcount(array)
    must(after == before, f"10 deleters were called, and the array has {after - before:+} references")


@check(kind="producer", about="lifetimes", severity="fatal")
def owner_outlives(lib: Subject) -> None:
    """A consumer may outlive the array and its capsule."""
    array, data = lib.array()
    taken = lib.versioned(array)
    taken.consume()
    taken.capsule = None
    del array
    gc.collect()
    churn = [lib.array()[0] for _ in range(50)] + [bytearray(len(data)) for _ in range(200)]
    must(taken.elements() == data, "the memory changed when the array was deleted")
    del churn
    taken.delete()


@check(kind="producer", about="threads", severity="fatal", alone=True, see="DLPack, Python specification: deleters")
def deleter_without_gil(lib: Subject) -> None:
    """The deleter may be called without the GIL."""
    array, taken = _owned(lib)
    before = sys.getrefcount(array)
    taken.delete()
    must(sys.getrefcount(array) <= before, "the array gained references")
    del array
    gc.collect()


@check(kind="producer", about="threads", severity="fatal", alone=True, see="DLPack, Python specification: deleters")
def deleter_foreign_thread(lib: Subject) -> None:
    """The deleter may be called on a thread that Python has never seen."""
    # Call it on a new thread of the operating system, also when it is the last owner.
    for last in (False, True):
        array, taken = _owned(lib)
        if last:
            taken.capsule = None
            array = None
        taken.delete(thread=True)
        del array
    gc.collect()


@check(kind="producer", about="threads", severity="fatal", alone=True, see="DLPack, Python specification: deleters")
def deleter_at_exit(lib: Subject) -> None:
    """The deleter may be called when the interpreter is gone."""
    # Have it called by the C library at the end of the process.
    _, taken = _owned(lib)
    taken.delete_at_exit()


@check(kind="producer", about="leaks", severity="wrong")
def export_leaks(lib: Subject) -> None:
    """Memory is released, whichever way an export ends."""
    # Export arrays of one MiB over and over: dropped, consumed, copied, refused.
    assert lib.make is not None
    dtype = lib.dtype()
    data, shape = bytes(MIB), lib.shape(MIB * 8 // DType(dtype).bits // 64, 64)
    make = lib.make

    def consumed() -> None:
        taken = lib.versioned(make(data, dtype, shape))
        taken.consume()
        taken.delete()

    def asked(**keywords: Any) -> Callable[[], Any]:
        return lambda: attempt(make(data, dtype, shape).__dlpack__, **keywords)

    version = lib.asking(lib.array()[0])
    ways = {
        "dropped": asked(**version), "dropped, legacy": asked(), "consumed": consumed,
        "copied and dropped": asked(**version, copy=True),
        "refused": asked(**version, dl_device=(15, 0)), "called wrongly": asked(no_such_keyword=1),
    }  # fmt: skip
    for way, once in ways.items():
        none_left(once, f"arrays of 1 MiB: {way}")


@check(kind="producer", about="threads", severity="fatal")
def export_threads(lib: Subject) -> None:
    """Many threads may export one array at once."""
    # Eight threads export, read and release; values and references are as before.
    array, data = lib.array()
    before = sys.getrefcount(array)

    def work(_: int) -> None:
        for _ in range(100):
            taken = lib.versioned(array)
            must(taken.elements() == data, "other elements")
            taken.consume()
            taken.delete()

    together_well(work)
    gc.collect()
    after = sys.getrefcount(array)
    must(after == before, f"the array has {after - before:+} references")
