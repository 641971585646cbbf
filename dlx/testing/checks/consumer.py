"""Checks of a consumer: imports, read-only memory, lifetimes, leaks and threads."""

from __future__ import annotations

import builtins
import gc
import threading
from typing import Any

from dlx._api import convert as api
from dlx._protocols.pointer import from_pointer
from dlx.testing.capsules import LAYOUTS, OTHERS, Source, swept
from dlx.testing.check import check
from dlx.testing.checks.producer import MIB, check_memory, check_threads, run_threads
from dlx.testing.subject import Broken, Subject, attempt, error_line, must


def check_import(lib: Subject, source: Source) -> str | None:
    """Raise `Broken` unless a source is imported correctly or refused; return the refusal."""
    result, error = lib.tried(source)
    refused = None if error is None else f"refused: {error_line(error)}"
    if error is None:
        lib.holds(result, source)
    del result, error
    lib.settled(source)
    return refused


def require_legacy(lib: Subject) -> None:
    """Raise `NotApplicable` if legacy capsules are refused, which `legacy-producer` checks."""
    lib.needs(lib.tried(lib.source(legacy=True))[1] is None, "it accepts no legacy capsules")


@check("consumer", "dtypes", "wrong", see="dlpack.h, DLDataTypeCode")
def import_dtypes(lib: Subject) -> None:
    """Every dtype is imported with its name and all bits."""
    for dtype in lib.dtypes:
        source = lib.source(dtype)
        result, error = lib.tried(source)
        must(error is None, f"{dtype}: {error_line(error)}")
        lib.holds(result, source)


@check("consumer", "dtypes", "wrong")
def import_narrowing(lib: Subject) -> None:
    """An unsupported dtype is refused, never changed to another.

    for dtype in ("int64", "uint64", "float64", "complex128"):
        try:
            result = {take}(Source(dtype))
        except Exception:
            continue
        assert Taken(result.__dlpack__()).dtype.name == dtype, (dtype, result.dtype)
    """
    changed = []
    for dtype in (each for each in OTHERS if each not in lib.dtypes):
        source = Source(dtype, lib.shape(4, 6))
        result, error = lib.tried(source)
        if error is None:
            try:
                lib.holds(result, source)
            except Broken as broken:
                changed.append(str(broken))
    must(not changed, "; ".join(changed))


def _layout(name: str, what: str, shape: tuple[int, ...], strides: tuple[int, ...], severity: str) -> None:
    def function(lib: Subject) -> str | None:
        low, high = lib.ndims
        lib.needs(low <= len(shape) <= high, f"it supports {low} to {high} dimensions")
        return check_import(lib, lib.source("float32", shape, strides=strides))

    function.__doc__ = f"""{what} is imported correctly or refused.

    source = Source("float32", {shape}, {strides})
    result = {{take}}(source)  # or raises
    assert Source.read(result) == source.elements()
    """
    check("consumer", "layouts", severity, alone=name == "negative", name=f"import-{name}")(function)


for _name, (_what, _shape, _strides, _severity) in LAYOUTS.items():
    _layout(_name, _what, _shape, _strides, _severity)


@check("consumer", "layouts", "wrong", see="dlpack.h before 1.2: strides may be NULL")
def import_null_strides(lib: Subject) -> None:
    """A legacy capsule without strides is row-major.

    source = Source(legacy=True, null_strides=True)
    assert Source.read({take}(source)) == source.elements()
    """
    require_legacy(lib)
    remark = check_import(lib, lib.source(legacy=True, null_strides=True))
    must(remark is None, f"{remark}, but most legacy capsules have no strides")


@check("consumer", "layouts", "wrong", see="dlpack.h, DLTensor.byte_offset")
def import_offset(lib: Subject) -> str | None:
    """A byte offset is added or refused.

    for nothing in (False, True):
        source = Source(byte_offset=64, null_strides=nothing)
        try:
            result = {take}(source)
        except Exception:
            continue
        assert Source.read(result) == source.elements()
    """
    remarks = []
    for nbytes in (8, 64):
        for null_strides in (False, True):
            remarks.append(check_import(lib, lib.source(byte_offset=nbytes, null_strides=null_strides)))
    return next((remark for remark in remarks if remark), None)


@check("consumer", "layouts", "wrong", see="dlpack.h: no consumer may rely on 256 bytes")
def import_alignment(lib: Subject) -> None:
    """Memory is imported correctly from every address that is aligned to its elements."""
    for shift in (0, 4, 8, 16, 32, 64):
        for dtype in ("uint8", "float32", "complex64"):
            if not lib.dtypes or dtype in lib.dtypes:
                remark = check_import(lib, lib.source(dtype, shift=shift))
                must(remark is None, f"{dtype}, {shift} bytes beyond a multiple of 256: {remark}")


@check("consumer", "layouts", "fatal")
def import_misaligned(lib: Subject) -> str | None:
    """Memory that is not aligned to its elements is imported correctly or refused.

    source = Source(shift=1)
    result = {take}(source)  # or raises
    assert Source.read(result) == source.elements()
    """
    return check_import(lib, lib.source(shift=1))


@check("consumer", "copies", "wrong", see="array API standard, from_dlpack: copy")
def import_copy_true(lib: Subject) -> None:
    """`copy=True` returns new memory.

    source = Source()
    result = {take}(source, copy=True)
    assert Taken(result.__dlpack__()).address != source.address
    """
    lib.needs(lib.takes_copy, "its from_dlpack has no copy=")
    source = lib.source()
    result = lib.take(source, copy=True)
    lib.holds(result, source)
    must(lib.seen(result)[0] != source.address, "copy=True shares the producer's memory")


@check("consumer", "copies", "wrong", see="array API standard, from_dlpack: copy")
def import_copy_false(lib: Subject) -> str | None:
    """`copy=False` shares the memory or raises an error.

    for shift in (0, 4):
        source = Source(shift=shift)
        try:
            result = {take}(source, copy=False)
        except (BufferError, ValueError):
            continue
        assert Taken(result.__dlpack__()).address == source.address
    """
    lib.needs(lib.takes_copy, "its from_dlpack has no copy=")
    remark = None
    for shift in (0, 4):
        source = lib.source(shift=shift)
        result, error = lib.tried(source, copy=False)
        if error is None:
            must(lib.seen(result)[0] == source.address, f"copy=False copied, {shift} bytes beyond a multiple of 256")
        else:
            must(isinstance(error, BufferError | ValueError), f"copy=False raised {error_line(error)}")
            remark = f"refused: {type(error).__name__}"
    return remark


def _can_write(lib: Subject, result: Any, source: Source) -> bool:
    """Return whether the result can change the producer's memory."""
    before = source.elements()
    if lib.write is not None:
        _, error = attempt(lib.write, result)
        return error is None and source.elements() != before
    if lib.immutable:
        return False
    writable = not lib.versioned(result).readonly if lib.writable is None else lib.writable(result)
    return writable and lib.seen(result)[0] == source.address


@check("consumer", "read-only", "wrong", see="dlpack.h 1.0: writing is undefined behaviour")
def import_readonly(lib: Subject) -> str | None:
    """Read-only memory cannot be written through the result.

    from contextlib import suppress
    source = Source(readonly=True, legacy=False)
    before = source.elements()
    with suppress(Exception):
        result = {take}({argument})
        {write}
    assert source.elements() == before, "written to"
    """
    for legacy in (False, None):
        source = lib.source(readonly=True, legacy=legacy)
        result, error = lib.tried(source if legacy is None else lib.raw(source))
        if error is None:
            must(not _can_write(lib, result, source), "the read-only flag is lost: the result is writable")
            return None
    return f"refused: {error_line(error)}"


@check("consumer", "read-only", "friction")
def import_legacy_writable(lib: Subject) -> None:
    """Writable memory in a legacy capsule stays writable.

    result = {take}(Source(legacy=True))
    {write}
    """
    lib.needs(not lib.immutable, "its arrays are never writable")
    require_legacy(lib)
    source = lib.source(legacy=True)
    result = lib.take(source)
    lib.needs(lib.seen(result)[0] == source.address, "it copies")
    must(_can_write(lib, result, source), "writable memory in a legacy capsule became read-only")


@check("consumer", "lifetimes", "fatal", see="dlpack.h, DLManagedTensor.deleter")
def deleter_once(lib: Subject) -> None:
    """The deleter is called once, after the last use."""
    for legacy in (True, False, None):
        source = lib.source(legacy=legacy)
        result, error = lib.tried(lib.raw(source, legacy=bool(legacy)) if legacy is not None else source)
        if error is not None and legacy is not None:
            continue
        must(error is None, "a producer that honours every request is refused")
        (export,) = source.exports[-1:]
        must(export.consumed, "a consumed capsule kept its name: its destructor frees memory in use")
        shares = lib.seen(result)[0] == source.address
        must(not (shares and export.deleted), "the deleter was called while the memory is in use")
        gc.collect()
        lib.holds(result, source)
        must(not (shares and export.deleted), "the deleter was called while the memory is in use")
        del result
        lib.settled(source)


@check("consumer", "lifetimes", "fatal")
def view_keeps(lib: Subject) -> None:
    """A view of the result keeps the memory alive."""
    view_of = lib.views.get("one row")
    lib.needs(view_of is not None and lib.ndims[1] > 1, "no views of its arrays are declared")
    assert view_of is not None
    source = lib.source()
    result = lib.take(source)
    view, error = attempt(view_of, result)
    lib.needs(error is None, "it has no view of one row")
    inside = source.address <= lib.seen(view)[0] < source.address + 96
    del result
    gc.collect()
    lib.needs(inside, "its views are copies")
    must(not source.exports[-1].deleted, "the deleter was called while a view uses the memory")
    must(lib.seen(view)[3] == source.elements()[24:48], "the view shows other elements")
    del view
    lib.settled(source)


@check("consumer", "lifetimes", "fatal", alone=True, see="dlpack.h: deleter may be NULL")
def null_deleter(lib: Subject) -> str | None:
    """A struct with a null deleter is accepted or refused without a crash.

    for legacy in (True, False):
        try:
            result = {take}(Source(legacy=legacy, deleter=False))
        except Exception:
            continue
        del result  # must not crash
    """
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


@check("consumer", "leaks", "wrong")
def import_leaks(lib: Subject) -> None:
    """Memory is released after every kind of import, also after a refused one."""
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

    check_memory(once, "imports of 1 MiB")


@check("consumer", "threads", "fatal")
def race_for_one(lib: Subject) -> None:
    """If many threads import one capsule, one of them gets it."""
    first = lib.source()
    lib.take(first)
    for _ in range(40):
        source = lib.source()
        capsule = source.capsule(legacy=first.exports[-1].legacy)
        argument = capsule if lib.takes_capsules else lib.source(answer=capsule)
        results: list[Any] = []

        def take(_: int, argument: Any = argument, results: list[Any] = results) -> None:
            results.append(lib.take(argument))

        run_threads(take)
        must(len(results) == 1, f"{len(results)} of 8 threads took the same capsule")
        results.clear()
        del capsule, argument
        lib.settled(source)


@check("consumer", "threads", "fatal")
def import_threads(lib: Subject) -> None:
    """Many threads may import at once."""
    source = lib.source()

    def work(_: int) -> None:
        for _ in range(50):
            lib.holds(lib.take(source), source)

    check_threads(work)
    lib.settled(source)


@check("consumer", "threads", "fatal", alone=True)
def end_holding(lib: Subject) -> None:
    """The process exits cleanly while imported arrays are alive."""

    def make_array() -> Any:
        memory = bytearray(lib.source().elements())
        dtype = lib.source().dtype.name
        address = api.convert(memory, to="dlx").data_ptr
        return lib.take(from_pointer(address, lib.shape(4, 6), dtype, owner=memory))

    cycle: list[Any] = [make_array()]
    cycle.append(cycle)
    builtins.held_by_the_kit = make_array()  # type: ignore[attr-defined]
    started = threading.Event()

    def stay(array: Any) -> None:
        started.set()
        threading.Event().wait()
        del array

    threading.Thread(target=stay, args=(make_array(),), daemon=True).start()
    started.wait()
