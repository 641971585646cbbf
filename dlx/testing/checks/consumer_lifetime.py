"""Checks of a consumer that owns memory: it is kept while it is used, and released once."""

from __future__ import annotations

import builtins
import gc
import threading
from typing import Any

from dlx._api import convert as api
from dlx._protocols.pointer import from_pointer
from dlx.testing.check import check
from dlx.testing.checks.producer_lifetime import MIB, none_left, together, together_well
from dlx.testing.subject import NotApplicable, Subject, attempt, must
from dlx.testing.support.capsules import swept
from dlx.testing.support.producers import Source


@check(kind="consumer", about="lifetimes", severity="fatal", see="dlpack.h, DLManagedTensor.deleter")
def deleter_once(lib: Subject) -> None:
    """The deleter is called once, when the last user is gone, and not before."""
    # Import from both generations, drop the producer, read, drop the result.
    for legacy in (True, False, None):
        source = lib.source(legacy=legacy)
        result, error = lib.tried(lib.raw(source, legacy=bool(legacy)) if legacy is not None else source)
        if error is not None and legacy is not None:
            continue
        must(error is None, "even a producer that gives what is asked is refused")
        (export,) = source.exports[-1:]
        must(export.consumed, "a capsule was used and kept its name: its destructor frees what is in use")
        shares = lib.seen(result)[0] == source.address
        must(not (shares and export.deleted), "the deleter was called while the memory is in use")
        gc.collect()
        lib.holds(result, source)
        must(not (shares and export.deleted), "the deleter was called while the memory is in use")
        del result
        lib.settled(source)


@check(kind="consumer", about="lifetimes", severity="fatal")
def view_keeps(lib: Subject) -> None:
    """A view of what came in keeps the memory."""
    view_of = lib.views.get("one row")
    lib.needs(view_of is not None and lib.ndims[1] > 1, "no views of its arrays are known")
    assert view_of is not None
    source = lib.source()
    result = lib.take(source)
    view, error = attempt(view_of, result)
    if error is not None:
        raise NotApplicable("it has no such view")
    inside = source.address <= lib.seen(view)[0] < source.address + 96
    del result
    gc.collect()
    if not inside:
        raise NotApplicable("its views are copies")
    must(not source.exports[-1].deleted, "the deleter was called while a view uses the memory")
    must(lib.seen(view)[3] == source.elements()[24:48], "the view shows other elements")
    del view
    lib.settled(source)


@check(
    kind="consumer", about="lifetimes", severity="fatal", alone=True, see="dlpack.h: deleter may be NULL",
    shows="""
for legacy in (True, False):
    try:
        result = {take}(Source(legacy=legacy, deleter=False))
    except Exception:
        continue
    del result  # must not end the process
""",
)  # fmt: skip
def null_deleter(lib: Subject) -> str | None:
    """A struct without a deleter is taken, and nothing is called."""
    remark = None
    for legacy in (True, False):
        source = lib.source(legacy=legacy, deleter=False)
        result, error = lib.tried(lib.raw(source, legacy=legacy))
        if error is not None:
            remark = f"refused: {type(error).__name__}"
            continue
        del result
        gc.collect()
    return remark


@check(kind="consumer", about="leaks", severity="wrong")
def import_leaks(lib: Subject) -> None:
    """Memory is released, whichever way an import ends."""
    # Import over and over, with errors of every kind in between; then arrays of one MiB.
    sources = []
    for i in range(300):
        for options in ({}, {"raises": ValueError("no")}, {"device": (15, 0)}, {"answer": None}, {"legacy": True}):
            source = lib.source("float32", (4, 6), **options)
            lib.tried(source)
            sources.append(source)
        if i % 100 == 99:
            twice = [export.deleted for source in sources for export in source.exports if export.deleted > 1]
            must(not twice, f"a deleter was called {twice[:1]} times")
            for source in sources[-5:]:
                lib.settled(source)
            sources.clear()
            swept()

    big = Source("uint8" if "uint8" in lib.dtypes else lib.dtypes[0], lib.shape(MIB // 64, 64))

    def once() -> None:
        copied = {"copy": True} if lib.takes_copy else {}
        for keywords in ({}, copied):
            lib.tried(big, **keywords)
            big.exports.clear()
            swept()

    none_left(once, "imports of 1 MiB")


def _asks_legacy(lib: Subject) -> bool:
    source = lib.source()
    lib.take(source)
    return bool(source.exports[-1].legacy)


@check(kind="consumer", about="threads", severity="fatal")
def race_for_one(lib: Subject) -> None:
    """Of many threads that are given one capsule, one takes it."""
    for _ in range(40):
        source = lib.source()
        capsule = source.capsule(legacy=_asks_legacy(lib))
        given = capsule if lib.takes_capsules else lib.source(answer=capsule)
        made: list[Any] = []

        def take(_: int, given: Any = given, made: list[Any] = made) -> None:
            made.append(lib.take(given))

        together(take)
        must(len(made) == 1, f"{len(made)} of 8 threads took the same capsule")
        made.clear()
        del capsule, given
        lib.settled(source)


@check(kind="consumer", about="threads", severity="fatal")
def import_threads(lib: Subject) -> None:
    """Many threads may import at once."""
    # Eight threads import from one producer; every deleter is called once.
    source = lib.source()

    def work(_: int) -> None:
        for _ in range(50):
            lib.holds(lib.take(source), source)

    together_well(work)
    lib.settled(source)


@check(kind="consumer", about="threads", severity="fatal", alone=True)
def end_holding(lib: Subject) -> None:
    """The process ends well while arrays that came in are still held."""
    # Hold results in a module, in a cycle and on a daemon thread, of a producer whose deleter is C.

    def held() -> Any:
        memory = bytearray(lib.source().elements())
        dtype = lib.source().dtype.name
        address = api.convert(memory, to="dlx").data_ptr
        return lib.take(from_pointer(address, lib.shape(4, 6), dtype, owner=memory))

    cycle: list[Any] = [held()]
    cycle.append(cycle)
    builtins.held_by_the_kit = held()  # type: ignore[attr-defined]
    started = threading.Event()

    def stay(array: Any) -> None:
        started.set()
        threading.Event().wait()
        del array

    threading.Thread(target=stay, args=(held(),), daemon=True).start()
    started.wait()
