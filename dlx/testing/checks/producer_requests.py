"""Checks of a producer: each keyword of ``__dlpack__`` means what the array API standard says."""

from __future__ import annotations

from typing import Any

from dlx._core.types import IS_COPIED
from dlx.testing.check import check
from dlx.testing.subject import Broken, NotApplicable, Subject, attempt, error_line, must
from dlx.testing.support.capsules import Taken

ELSEWHERE = (15, 0)  # WebGPU: no producer exports to it


def _legacy(name: str, who: str, call: str, keywords: dict[str, Any]) -> None:
    def function(lib: Subject) -> str | None:
        if lib.immutable and isinstance(attempt(lib.array()[0].__dlpack__, **keywords)[1], BufferError):
            return "refused: it could not say read-only"
        must(lib.export(lib.array()[0], **keywords).legacy, "a versioned capsule, though nobody asked for one")
        return None

    check(
        name=f"keyword-max-version-{name}", promise=f"A consumer that {who} is given a legacy capsule.",
        kind="producer", about="versions", severity="refuses", see="array API standard, __dlpack__: max_version",
        shows=f"""
x = {{array}}
capsule = x.__dlpack__({call})
assert '"dltensor"' in repr(capsule), capsule
""",
    )(function)  # fmt: skip


_legacy("none", "says nothing of versions", "", {})
_legacy("0", "asks for DLPack 0.8", "max_version=(0, 8)", {"max_version": (0, 8)})


@check(
    kind="producer", about="versions", severity="friction", see="array API standard, __dlpack__: max_version",
    shows="""
x = {array}
capsule = x.__dlpack__(max_version=(1, 0))
assert '"dltensor_versioned"' in repr(capsule), capsule
""",
)  # fmt: skip
def keyword_max_version_1(lib: Subject) -> None:
    """A consumer that asks for DLPack 1.0 is given a versioned capsule."""
    taken = lib.export(lib.array()[0], max_version=(1, 0))
    must(not taken.legacy, "a legacy capsule, though 1.0 was asked for: flags are lost")
    must(taken.version is not None and taken.version[0] == 1, f"version {taken.version}")


@check(
    kind="producer", about="versions", severity="refuses", see="array API standard: a lower version may be returned",
    shows="""
x = {array}
x.__dlpack__(max_version=(2, 0))
""",
)  # fmt: skip
def keyword_max_version_2(lib: Subject) -> None:
    """A consumer from the future is given what the producer has."""
    array, data = lib.array()
    taken = lib.export(array, max_version=(2, 0))
    must(taken.elements() == data, "other elements")


@check(
    kind="producer", about="keywords", severity="refuses", see="array API standard, __dlpack__: all default to None",
    shows="""
x = {array}
x.__dlpack__(stream=None, max_version=(1, 0), dl_device=None, copy=None)
x.__dlpack__(stream=None)
""",
)  # fmt: skip
def keyword_none(lib: Subject) -> None:
    """Every keyword may be given as None."""
    array, data = lib.array()
    version = lib.asking(array)
    for keywords in (
        {"stream": None}, {"dl_device": None}, {"copy": None},
        {"stream": None, "max_version": (1, 0), "dl_device": None, "copy": None},
    ):  # fmt: skip
        asked = version | keywords
        must(lib.export(array, **asked).elements() == data, f"other elements with {asked}")


@check(
    kind="producer", about="keywords", severity="refuses", see="array API standard, __dlpack__: dl_device",
    shows="""
x = {array}
x.__dlpack__(max_version=(1, 0), dl_device=(1, 0))
""",
)  # fmt: skip
def keyword_own_device(lib: Subject) -> None:
    """A consumer may name the device that the array is on."""
    array, data = lib.array()
    taken = lib.export(array, max_version=(1, 0), dl_device=(1, 0))
    must(taken.device[0] == 1 and taken.elements() == data, f"on {taken.device}, or with other elements")


@check(
    kind="producer", about="keywords", severity="wrong", see="array API standard, __dlpack__: dl_device",
    shows="""
x = {array}
for version in (None, (1, 0)):
    try:
        capsule = x.__dlpack__(max_version=version, dl_device=(15, 0))
    except BufferError:
        continue
    raise AssertionError(f"asked for WebGPU, and got {capsule}")
""",
)  # fmt: skip
def keyword_other_device(lib: Subject) -> None:
    """A device that it cannot export to is refused with BufferError."""
    for version in (None, (1, 0)):
        capsule, error = attempt(lib.array()[0].__dlpack__, max_version=version, dl_device=ELSEWHERE)
        asked = f"max_version={version}, dl_device={ELSEWHERE}"
        if error is None:
            raise Broken(f"{asked} gave memory of device {Taken(capsule).device}")
        must(isinstance(error, BufferError), f"{asked} raised {error_line(error)}")


@check(
    kind="producer", about="keywords", severity="wrong",
    shows="""
x = {array}
try:
    x.__dlpack__(max_version=(1, 0), not_a_keyword=1)
except TypeError:
    raise SystemExit(0)
raise AssertionError("taken in silence")
""",
)  # fmt: skip
def keyword_unknown(lib: Subject) -> None:
    """A keyword that it does not know raises TypeError."""
    # Consumers try newer keywords first, and must learn that they are not known.
    _, error = attempt(lib.array()[0].__dlpack__, max_version=(1, 0), not_a_keyword=1)
    must(isinstance(error, TypeError), f"an unknown keyword: {'no error' if error is None else error_line(error)}")


@check(
    kind="producer", about="copies", severity="wrong", see="array API standard, __dlpack__: copy",
    shows="""
x = {array}
own = Taken(x.__dlpack__(max_version=(1, 0)))
try:
    copied = Taken(x.__dlpack__(max_version=(1, 0), copy=True))
except BufferError:
    raise SystemExit(0)
assert copied.address != own.address
""",
)  # fmt: skip
def copy_true(lib: Subject) -> str | None:
    """`copy=True` never shares: it gives memory of its own, or raises BufferError."""
    array, data = lib.array()
    shared = lib.versioned(array)
    capsule, error = attempt(array.__dlpack__, max_version=(1, 0), copy=True)
    if isinstance(error, BufferError):
        return f"refused: {error_line(error)}"
    must(error is None, f"copy=True raised {error_line(error)}")
    copied = Taken(capsule)
    must(copied.address != shared.address, "copy=True shares the array's memory")
    must(copied.elements() == data, "the copy has other elements")
    return None


@check(
    kind="producer", about="copies", severity="refuses", see="array API standard, __dlpack__: it must always copy",
    shows="""
x = {array}
x.__dlpack__(max_version=(1, 0), copy=True)
""",
)  # fmt: skip
def copy_true_served(lib: Subject) -> None:
    """`copy=True` is not refused."""
    lib.export(lib.array()[0], max_version=(1, 0), copy=True)


@check(
    kind="producer", about="copies", severity="friction", see="array API standard: the flag IS_COPIED must be set",
    shows="""
x = {array}
taken = Taken(x.__dlpack__(max_version=(1, 0), copy=True))
assert taken.flags & 2, taken.flags  # IS_COPIED
""",
)  # fmt: skip
def copy_true_flag(lib: Subject) -> None:
    """A copy made for the consumer says so."""
    array = lib.array()[0]
    capsule, error = attempt(array.__dlpack__, max_version=(1, 0), copy=True)
    if error is not None:
        raise NotApplicable("it makes no copies")
    copied = Taken(capsule)
    if copied.legacy or copied.address == lib.versioned(array).address:
        raise NotApplicable("it makes no copies in versioned capsules")
    must(copied.flags & IS_COPIED, f"a copy was made, and flags {copied.flags} do not say IS_COPIED")


@check(
    kind="producer", about="copies", severity="wrong", see="array API standard, __dlpack__: copy",
    shows="""
x = {array}
own = Taken(x.__dlpack__(max_version=(1, 0)))
shared = Taken(x.__dlpack__(max_version=(1, 0), copy=False))
assert shared.address == own.address
""",
)  # fmt: skip
def copy_false(lib: Subject) -> str | None:
    """`copy=False` shares the memory, or raises BufferError."""
    # Compare addresses, and see that an export shows what the array itself holds.
    array = lib.array()[0]
    own = lib.describe(array)[0] if lib.describe is not None else lib.versioned(array).address
    capsule, error = attempt(array.__dlpack__, max_version=(1, 0), copy=False)
    if isinstance(error, BufferError):
        return "refused: BufferError"
    must(error is None, f"copy=False raised {error_line(error)}")
    must(Taken(capsule).address == own, "copy=False gave other memory than the array's")
    return None
