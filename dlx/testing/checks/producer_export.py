"""Checks of a producer: its capsules describe its arrays correctly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlx.testing.check import check, unless_refused
from dlx.testing.subject import Broken, NotApplicable, Subject, attempt, error_line, must
from dlx.testing.support.capsules import Taken

__all__ = ["VIEWS"]


def _grid(rows: int, columns: int, down: int, right: int, start: int = 0) -> list[int]:
    return [start + i * down + j * right for i in range(rows) for j in range(columns)]


VIEWS: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "transposed": ((6, 4), _grid(6, 4, 1, 6)),
    "every other column": ((4, 3), _grid(4, 3, 6, 2)),
    "backwards": ((4, 6), _grid(4, 6, -6, 1, 18)),
    "one row": ((6,), _grid(1, 6, 0, 1, 6)),
    "one column": ((4,), _grid(4, 1, 6, 0, 2)),
    "no row": ((0, 6), []),
    "one element": ((1, 1), [9]),
    "one row for all": ((4, 6), _grid(4, 6, 0, 1)),
    "overlapping": ((4, 3), _grid(4, 3, 1, 1)),
    "no dimension": ((), [8]),
}
"""What can be done to a 4 by 6 array: name -> (shape, which elements are left, in row-major order)."""


def viewed(lib: Subject) -> Iterator[tuple[str, Any, tuple[int, ...], bytes]]:
    """Give (name, view, its shape, its bytes) of each view that the subject can make."""
    if not lib.views or lib.ndims[1] < 2:
        raise NotApplicable("no views of its arrays are known")
    for name, view in lib.views.items():
        array, data = lib.array()
        shape, left = VIEWS[name]
        made, error = attempt(view, array)
        if error is not None:  # it has no such view: nothing to export
            continue
        yield name, made, shape, b"".join(data[4 * i : 4 * i + 4] for i in left)


def readonly_of(lib: Subject) -> Any:
    """Return a read-only array of the subject's."""
    if lib.immutable:
        return lib.array()[0]
    if lib.readonly is None:
        raise NotApplicable("it has no read-only arrays")
    return lib.readonly(lib.array()[0])


@check(kind="producer", about="dtypes", severity="wrong", see="dlpack.h, DLDataTypeCode")
def export_dtypes(lib: Subject) -> None:
    """Every dtype leaves with its own name and every bit."""
    for dtype in lib.dtypes:
        array, data = lib.array(dtype)
        taken = lib.versioned(array)
        must(taken.dtype.name == dtype, f"{dtype} left as {taken.dtype.name}")
        must(taken.elements() == data, f"the elements of {dtype} changed")


@check(kind="producer", about="layouts", severity="wrong")
def export_layouts(lib: Subject) -> str:
    """A view leaves with its own shape, strides and elements."""
    # Export every view; one that cannot leave is refused.
    refused = []
    for name, view, shape, data in viewed(lib):
        capsule, error = attempt(view.__dlpack__, **lib.asking(view))
        if error is not None:
            refused.append(f"{name} ({type(error).__name__})")
            continue
        taken = Taken(capsule)
        must(taken.shape == shape, f"{name} left with shape {taken.shape}, not {shape}")
        must(taken.elements() == data, f"{name} left with other elements")
    return f"refused: {', '.join(refused)}" if refused else ""


@check(kind="producer", about="layouts", severity="friction", see="dlpack.h 1.2: strides are never NULL for ndim > 0")
def export_strides(lib: Subject) -> None:
    """A versioned capsule has strides, whatever the layout."""
    taken = lib.versioned(lib.array()[0])
    if taken.legacy:
        raise NotApplicable("it gives legacy capsules only")
    must(taken.strides is not None, "the strides are NULL")


@check(kind="producer", about="keywords", severity="wrong")
def export_device(lib: Subject) -> None:
    """`__dlpack_device__` names the device of the capsule, as two integers."""
    array = lib.array()[0]
    said, error = attempt(array.__dlpack_device__)
    must(error is None, f"__dlpack_device__ raised {error_line(error)}")
    taken = lib.versioned(array)
    kind, number = said
    must(hasattr(kind, "__index__") and hasattr(number, "__index__"), f"__dlpack_device__ says {said}")
    must((int(kind), int(number)) == taken.device, f"__dlpack_device__ says {said}, the capsule {taken.device}")


@check(
    kind="producer", about="layouts", severity="fatal",
    shows="""
x = {grid}
taken = Taken(x.__dlpack__(max_version=(1, 0)))
before = taken.shape
{reshape}
taken.reread()
assert taken.shape == before, taken.shape
""",
)  # fmt: skip
def export_snapshot(lib: Subject) -> None:
    """A capsule keeps its shape when the array's own is changed in place afterwards."""
    lib.needs(lib.reshape, "its arrays keep their shape")
    assert lib.reshape is not None
    array = lib.array()[0]
    taken = lib.versioned(array)
    before = taken.shape, taken.strides
    lib.reshape(array)
    taken.reread()
    after = taken.shape, taken.strides
    must(after == before, f"shape and strides of a capsule went from {before} to {after} while it was out")


@check(
    kind="producer", about="refusals", severity="wrong",
    shows=unless_refused(
        "capsule = x.__dlpack__(max_version=(1, 0))", "raise AssertionError(capsule)", first="{unfit}",
    ),
)  # fmt: skip
def export_unfit(lib: Subject) -> str:
    """What DLPack cannot tell is refused, not passed on as something else."""
    lib.needs(lib.unfit, "everything that it has can leave")
    passed, refused = [], []
    for name, make in lib.unfit.items():
        array = make()
        capsule, error = attempt(lambda array=array: array.__dlpack__(**lib.asking(array)))
        if error is None:
            passed.append(f"{name} (as {Taken(capsule).dtype.name})")
        elif not isinstance(error, BufferError):
            refused.append(f"{name} with {type(error).__name__}")
    must(not passed, f"exported in spite of it: {', '.join(passed)}")
    return f"refused, though not with BufferError: {', '.join(refused)}" if refused else ""


@check(
    kind="producer", about="refusals", severity="wrong",
    shows="""
import struct
x = {pending}
found = Taken(x.__dlpack__(max_version=(1, 0))).elements()
assert found == {pending_bytes}
""",
)  # fmt: skip
def export_pending(lib: Subject) -> str:
    """An operation that is still pending is done, or refused, before the memory leaves."""
    lib.needs(lib.pending, "it has no pending operations")
    refused = []
    for name, make in lib.pending.items():
        array, data = make()
        capsule, error = attempt(array.__dlpack__, **lib.asking(array))
        if error is not None:
            refused.append(name)
            continue
        must(Taken(capsule).elements() == data, f"the {name} bit was lost: other values left, without an error")
    return f"refused: {', '.join(refused)}" if refused else ""


@check(
    kind="producer", about="read-only", severity="wrong", see="dlpack.h 1.0, DLPACK_FLAG_BITMASK_READ_ONLY",
    shows="""
x = {readonly}
taken = Taken(x.__dlpack__(max_version=(1, 0)))
assert taken.readonly, taken.capsule
""",
)  # fmt: skip
def export_readonly(lib: Subject) -> str | None:
    """Read-only memory leaves with the read-only flag."""
    # Export a read-only array to a consumer that knows the flag.
    array = readonly_of(lib)
    capsule, error = attempt(array.__dlpack__, **lib.asking(array))
    if isinstance(error, BufferError):
        return "refused: BufferError"
    must(error is None, f"a read-only array: {error_line(error)}")
    taken = Taken(capsule)
    must(not taken.legacy, "a legacy capsule, though a versioned one was asked for: read-only is lost")
    must(taken.readonly, f"flags {taken.flags} do not say read-only")
    return None


@check(
    kind="producer", about="read-only", severity="wrong", see="array API standard, __dlpack__: BufferError",
    shows=unless_refused("capsule = x.__dlpack__()", "raise AssertionError(capsule)", first="x = {readonly}"),
)  # fmt: skip
def export_readonly_legacy(lib: Subject) -> str | None:
    """Read-only memory does not leave in a legacy capsule, which could not say so."""
    # Export a read-only array to a consumer from before the flag.
    array = readonly_of(lib)
    capsule, error = attempt(array.__dlpack__)
    if error is not None:
        return f"refused: {error_line(error)}"
    taken = Taken(capsule)
    try:
        own = lib.seen(array)[0]
    except Broken:  # it has no versioned export to compare with
        own = taken.address
    must(taken.address != own, "a legacy capsule shares it, and says nothing of read-only")
    return None
