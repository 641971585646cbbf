"""Checks of a consumer that is given invalid capsules: it raises, and never ends the process.

A refused capsule is not consumed: it keeps its name, or its deleter is called once.
"""

from __future__ import annotations

from typing import Any

from dlx.testing.check import check, unless_refused
from dlx.testing.subject import NotApplicable, Subject, error_line, must
from dlx.testing.support.producers import Source

UNTOUCHED: list[Any] = []  # results of invalid imports are kept: their deletion, or repr, could end the process


def _refused(lib: Subject, argument: Any, source: Source, what: str) -> str:
    result, error = lib.tried(argument)
    if error is None:
        UNTOUCHED.append((argument, result))
    must(error is not None, f"{what} was taken")
    text = error_line(error)
    del error
    lib.settled(source)
    return f"refused: {text}"


@check(
    kind="consumer", about="versions", severity="fatal", alone=True, see="dlpack.h, DLPackVersion",
    shows=unless_refused(
        "result = {take}({argument})", 'raise AssertionError("a capsule of DLPack 2.0 was taken")',
        first="source = Source(version=(2, 0), legacy=False)",
    ),
)  # fmt: skip
def other_major(lib: Subject) -> str:
    """A capsule of another major version is refused, and nothing beyond its flags is read."""
    # Give 2.0, whole, and then with every other field filled with ones.
    for poisoned in (False, True):
        source = lib.source(version=(2, 0), poisoned=poisoned, legacy=False)
        remark = _refused(lib, lib.raw(source), source, "a capsule of DLPack 2.0")
    return remark


@check(kind="consumer", about="refusals", severity="fatal", see="DLPack, Python specification: names")
def wrong_name(lib: Subject) -> str:
    """A capsule of another name is refused, and not touched."""
    source = lib.source(name=b"dltensor_other")
    return _refused(lib, lib.raw(source), source, "a capsule named 'dltensor_other'")


@check(kind="consumer", about="refusals", severity="fatal", see="DLPack, Python specification: used capsules")
def used_capsule(lib: Subject) -> str:
    """A capsule is consumed once; the second time it is refused."""
    # Give the same capsule twice, of both generations.
    remark = ""
    for legacy in (True, False):
        source = lib.source()
        capsule = source.capsule(legacy=legacy)
        again = lib.source(answer=capsule)
        given = capsule if lib.takes_capsules else again
        first, error = lib.tried(given)
        if error is not None:
            continue
        second, error = lib.tried(given)
        must(error is not None, "the same capsule was taken twice")
        remark = f"refused: {error_line(error)}"
        del first, second, error
        lib.settled(source)
    if not remark:
        raise NotApplicable("it takes no such capsule even once")
    return remark


@check(
    kind="consumer", about="refusals", severity="wrong", alone=True, see="plain safety: what is read is made up",
    shows=unless_refused("result = {take}(Source(data=0))", 'raise AssertionError("an array over no memory was made")'),
)  # fmt: skip
def null_data(lib: Subject) -> str:
    """A null pointer where there are elements is refused."""
    source = lib.source(data=0)
    return _refused(lib, source, source, "a null pointer with 24 elements")


@check(
    kind="consumer", about="refusals", severity="fatal", alone=True,
    shows=unless_refused(
        "result = {take}(Source(claims=(-4,)))", 'raise AssertionError("an array of -4 elements was made")',
    ),
)  # fmt: skip
def negative_extent(lib: Subject) -> str:
    """A negative extent is refused."""
    source = lib.source("float32", (4,), claims=(-4,), strides=(1,))
    return _refused(lib, source, source, "a shape of (-4,)")


@check(
    kind="consumer", about="refusals", severity="fatal", alone=True,
    shows=unless_refused(
        "result = {take}(Source(claims=(2**62,)))", 'raise AssertionError("an array of 2**62 elements was made")',
    ),
)  # fmt: skip
def overflow(lib: Subject) -> str:
    """A size that does not fit 63 bits is refused."""
    shape, claims, strides = ((4, 6), (2**62, 16), (16, 1)) if lib.ndims[1] > 1 else ((4,), (2**62,), (1,))
    source = lib.source("float32", shape, claims=claims, strides=strides)
    return _refused(lib, source, source, f"a shape of {claims}")


@check(
    kind="consumer", about="refusals", severity="fatal", alone=True,
    see="plain safety: a device address is no pointer",
    shows=unless_refused(
        "result = {take}(source)", 'assert result.__dlpack_device__()[0] == 15, "taken for host memory"',
        first="source = Source(device=(15, 0), says=(1, 0), data=4096)"
        "  # WebGPU memory, of a producer that says it is the host's",
    ),
)  # fmt: skip
def other_device(lib: Subject) -> str:
    """Memory of a device that it does not have is refused, or kept as what it is; it is not read."""
    # Give an address that is none on the host, on a WebGPU device; then a producer that lies about it.
    for says in (None, (1, 0)):
        source = lib.source(device=(15, 0), says=says, data=0x1000)
        result, error = lib.tried(source)
        if error is None:
            UNTOUCHED.append((source, result))  # the result goes first
            kind, _ = result.__dlpack_device__()
            must(int(kind) == 15, f"WebGPU memory was taken for memory of device type {int(kind)}")
            remark = "kept as WebGPU memory"
        else:
            remark = f"refused: {error_line(error)}"
    return remark


@check(kind="consumer", about="lifetimes", severity="wrong", see="DLPack, Python specification: capsule destructor")
def refusal_releases(lib: Subject) -> str:
    """What is refused is not consumed, and not leaked."""
    # Give unknown dtypes and rare layouts; look at the names and the count of deleters.
    refused = 0
    for options in (
        {"code": (99, 32, 1)}, {"code": (2, 32, 3)}, {"code": (2, 24, 1)}, {"code": (3, 64, 1)},
        {"byte_offset": 3}, {"shift": 3}, {"version": (2, 0)},
    ):  # fmt: skip
        for legacy in (True, False):
            source = lib.source(legacy=legacy, **options)
            result, error = lib.tried(lib.raw(source, legacy=legacy))
            refused += error is not None
            if error is None:
                UNTOUCHED.append((source, result))
                continue
            del result, error
            lib.settled(source)
    if not refused:
        raise NotApplicable("it refuses none of these")
    return f"{refused} refusals"
