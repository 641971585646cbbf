"""Checks of a consumer: an array is imported exactly, or refused."""

from __future__ import annotations

from typing import Any

from dlx.testing.check import check, unless_refused
from dlx.testing.subject import Broken, NotApplicable, Subject, attempt, error_line, must
from dlx.testing.support.producers import LAYOUTS, OTHERS, Source

__all__ = ["needs_legacy", "right_or_refused"]


def right_or_refused(lib: Subject, source: Source) -> str | None:
    """Give a source; what comes in is right, or an exception says no. Nothing is leaked either way."""
    result, error = lib.tried(source)
    refused = None if error is None else f"refused: {error_line(error)}"
    if error is None:
        lib.holds(result, source)
    del result, error
    lib.settled(source)
    return refused


def needs_legacy(lib: Subject) -> None:
    """Raise `NotApplicable` where no legacy capsule is taken at all, which `legacy-producer` is about."""
    _, error = lib.tried(lib.source(legacy=True))
    if error is not None:
        raise NotApplicable("it takes no legacy capsules")


@check(kind="consumer", about="dtypes", severity="wrong", see="dlpack.h, DLDataTypeCode")
def import_dtypes(lib: Subject) -> None:
    """Every dtype comes in with its own name and every bit."""
    for dtype in lib.dtypes:
        source = lib.source(dtype)
        result, error = lib.tried(source)
        must(error is None, f"{dtype}: {error_line(error)}")
        lib.holds(result, source)


@check(
    kind="consumer", about="dtypes", severity="wrong",
    shows="""
for dtype in ("int64", "uint64", "float64", "complex128"):
    try:
        result = {take}(Source(dtype))
    except Exception:
        continue
    assert Taken(result.__dlpack__()).dtype.name == dtype, (dtype, result.dtype)
""",
)  # fmt: skip
def import_narrowing(lib: Subject) -> None:
    """A dtype that it does not have is refused, never changed to another."""
    changed = []
    for dtype in OTHERS:
        if dtype in lib.dtypes:
            continue
        source = Source(dtype, lib.shape(4, 6))
        result, error = lib.tried(source)
        if error is not None:
            continue
        try:
            lib.holds(result, source)
        except Broken as broken:
            changed.append(str(broken))
    must(not changed, "; ".join(changed))


def _layout(name: str, what: str, shape: tuple[int, ...], strides: tuple[int, ...], severity: str) -> None:
    def function(lib: Subject) -> str | None:
        low, high = lib.ndims
        if not low <= len(shape) <= high:
            raise NotApplicable(f"it has {low} to {high} dimensions")
        return right_or_refused(lib, lib.source("float32", shape, strides=strides))

    check(
        name=f"import-{name}", promise=f"{what} comes in right, or is refused.",
        kind="consumer", about="layouts", severity=severity, alone=name == "negative",
        shows=unless_refused(
            "result = {take}(source)", "assert Source.read(result) == source.elements()",
            first=f'source = Source("float32", {shape}, {strides})',
        ),
    )(function)  # fmt: skip


for _name, (_what, _shape, _strides, _severity) in LAYOUTS.items():
    _layout(_name, _what, _shape, _strides, _severity)


@check(
    kind="consumer", about="layouts", severity="wrong", see="dlpack.h before 1.2: strides may be NULL",
    shows="""
source = Source(legacy=True, null_strides=True)
assert Source.read({take}(source)) == source.elements()
""",
)  # fmt: skip
def import_null_strides(lib: Subject) -> str | None:
    """A legacy capsule without strides is row-major."""
    # Leave the strides out, as producers did until DLPack 1.2.
    needs_legacy(lib)
    source = lib.source(legacy=True, null_strides=True)
    remark = right_or_refused(lib, source)
    must(remark is None, f"{remark}: most legacy capsules have no strides")
    return None


@check(
    kind="consumer", about="layouts", severity="wrong", see="dlpack.h, DLTensor.byte_offset",
    shows="""
for nothing in (False, True):
    source = Source(byte_offset=64, null_strides=nothing)
    try:
        result = {take}(source)
    except Exception:
        continue
    assert Source.read(result) == source.elements()
""",
)  # fmt: skip
def import_offset(lib: Subject) -> str | None:
    """A byte offset is added, or refused."""
    # Give a pointer that is too low, and an offset; without strides too.
    remarks = []
    for nbytes in (8, 64):
        for null_strides in (False, True):
            source = lib.source(byte_offset=nbytes, null_strides=null_strides)
            remarks.append(right_or_refused(lib, source))
    return next((remark for remark in remarks if remark), None)


@check(kind="consumer", about="layouts", severity="wrong", see="dlpack.h: no consumer may rely on 256 bytes")
def import_alignment(lib: Subject) -> str | None:
    """Memory at any address that its elements allow comes in right."""
    # Sweep addresses of 0, 4, 8, 16, 32 and 64 bytes beyond a multiple of 256.
    for shift in (0, 4, 8, 16, 32, 64):
        for dtype in ("uint8", "float32", "complex64"):
            if lib.dtypes and dtype not in lib.dtypes:
                continue
            remark = right_or_refused(lib, lib.source(dtype, shift=shift))
            must(remark is None, f"{dtype}, {shift} bytes beyond a multiple of 256: {remark}")
    return None


@check(
    kind="consumer", about="layouts", severity="fatal",
    shows=unless_refused(
        "result = {take}(source)", "assert Source.read(result) == source.elements()", first="source = Source(shift=1)",
    ),
)  # fmt: skip
def import_misaligned(lib: Subject) -> str | None:
    """Memory that is not aligned to its elements comes in right, or is refused."""
    return right_or_refused(lib, lib.source(shift=1))


@check(
    kind="consumer", about="copies", severity="wrong", see="array API standard, from_dlpack: copy",
    shows="""
source = Source()
result = {take}(source, copy=True)
assert Taken(result.__dlpack__()).address != source.address
""",
)  # fmt: skip
def import_copy_true(lib: Subject) -> None:
    """`copy=True` gives memory of its own."""
    lib.needs(lib.takes_copy, "its from_dlpack has no copy=")
    source = lib.source()
    result = lib.take(source, copy=True)
    lib.holds(result, source)
    must(lib.seen(result)[0] != source.address, "copy=True shares the producer's memory")


@check(
    kind="consumer", about="copies", severity="wrong", see="array API standard, from_dlpack: copy",
    shows="""
for shift in (0, 4):
    source = Source(shift=shift)
    try:
        result = {take}(source, copy=False)
    except (BufferError, ValueError):
        continue
    assert Taken(result.__dlpack__()).address == source.address
""",
)  # fmt: skip
def import_copy_false(lib: Subject) -> str | None:
    """`copy=False` shares the memory, or raises."""
    # Give memory that is as aligned as can be, and some that is not.
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


def _write(lib: Subject, result: Any, source: Source) -> bool:
    """Return whether the producer's memory can be changed through what came in."""
    before = source.elements()
    if lib.write is not None:
        _, error = attempt(lib.write, result)
        return error is None and source.elements() != before
    return lib.may_write(result) and lib.seen(result)[0] == source.address


@check(
    kind="consumer", about="read-only", severity="wrong", see="dlpack.h 1.0: writing is undefined behaviour",
    shows="""
from contextlib import suppress
source = Source(readonly=True, legacy=False)
before = source.elements()
with suppress(Exception):
    result = {take}({argument})
    {write}
assert source.elements() == before, "written to"
""",
)  # fmt: skip
def import_readonly(lib: Subject) -> str | None:
    """Read-only memory cannot be written through what comes in."""
    # Give a versioned capsule with the flag, and try to write.
    for legacy in (False, None):
        source = lib.source(readonly=True, legacy=legacy)
        result, error = lib.tried(source if legacy is None else lib.raw(source))
        if error is None:
            must(not _write(lib, result, source), "the read-only flag is dropped: the result may be written to")
            return None
    return f"refused: {error_line(error)}"


@check(
    kind="consumer", about="read-only", severity="friction",
    shows="""
result = {take}(Source(legacy=True))
{write}
""",
)  # fmt: skip
def import_legacy_writable(lib: Subject) -> None:
    """Writable memory stays writable when it comes in a legacy capsule."""
    # Give a legacy capsule, which says nothing, of writable memory.
    if lib.immutable:
        raise NotApplicable("its arrays are never writable")
    needs_legacy(lib)
    source = lib.source(legacy=True)
    result = lib.take(source)
    if lib.seen(result)[0] != source.address:
        raise NotApplicable("it copies")
    must(_write(lib, result, source), "writable memory in a legacy capsule came in read-only")
