"""Checks of a consumer: invalid capsules, calls of the producer, and the producer's errors."""

from __future__ import annotations

from typing import Any

from dlx.testing.capsules import OldSource, Source
from dlx.testing.check import check
from dlx.testing.subject import Subject, attempt, error_line, must

# ---- invalid capsules: an exception, never a crash -------------------------------------------------------------------

# A refused capsule is not consumed: it keeps its name, or its deleter is called once.
UNTOUCHED: list[Any] = []  # keeps results of invalid imports, because their deletion or repr could crash


def _check_refused(lib: Subject, argument: Any, source: Source, what: str) -> str:
    result, error = lib.tried(argument)
    if error is None:
        UNTOUCHED.append((argument, result))
    must(error is not None, f"{what} was accepted")
    remark = f"refused: {error_line(error)}"
    del error
    lib.settled(source)
    return remark


@check("consumer", "versions", "fatal", alone=True, see="dlpack.h, DLPackVersion")
def other_major(lib: Subject) -> str:
    """A capsule of another major version is refused, and nothing after its flags is read.

    source = Source(version=(2, 0), legacy=False)
    result = {take}({argument})  # or raises
    raise AssertionError("a capsule of DLPack 2.0 was accepted")
    """
    for poisoned in (False, True):
        source = lib.source(version=(2, 0), poisoned=poisoned, legacy=False)
        remark = _check_refused(lib, lib.raw(source), source, "a capsule of DLPack 2.0")
    return remark


@check("consumer", "refusals", "fatal", see="DLPack, Python specification: names")
def wrong_name(lib: Subject) -> str:
    """A capsule with another name is refused and unchanged."""
    source = lib.source(name=b"dltensor_other")
    return _check_refused(lib, lib.raw(source), source, "a capsule named 'dltensor_other'")


@check("consumer", "refusals", "fatal", see="DLPack, Python specification: used capsules")
def used_capsule(lib: Subject) -> str:
    """A capsule is consumed once; a second import is refused."""
    remark = ""
    for legacy in (True, False):
        source = lib.source()
        capsule = source.capsule(legacy=legacy)
        again = lib.source(answer=capsule)
        argument = capsule if lib.takes_capsules else again
        first, error = lib.tried(argument)
        if error is not None:
            continue
        second, error = lib.tried(argument)
        must(error is not None, "the same capsule was consumed twice")
        remark = f"refused: {error_line(error)}"
        del first, second, error
        lib.settled(source)
    lib.needs(remark, "it accepts no such capsule")
    return remark


@check("consumer", "refusals", "wrong", alone=True, see="memory safety: there are no elements to read")
def null_data(lib: Subject) -> str:
    """A null pointer with elements is refused.

    result = {take}(Source(data=0))  # or raises
    raise AssertionError("an array without memory was created")
    """
    source = lib.source(data=0)
    return _check_refused(lib, source, source, "a null pointer with 24 elements")


@check("consumer", "refusals", "fatal", alone=True)
def negative_extent(lib: Subject) -> str:
    """A negative extent is refused.

    result = {take}(Source(claims=(-4,)))  # or raises
    raise AssertionError("an array of -4 elements was created")
    """
    source = lib.source("float32", (4,), claims=(-4,), strides=(1,))
    return _check_refused(lib, source, source, "a shape of (-4,)")


@check("consumer", "refusals", "fatal", alone=True)
def overflow(lib: Subject) -> str:
    """A size above 63 bits is refused.

    result = {take}(Source(claims=(1 << 62,)))  # or raises
    raise AssertionError("an array of 2**62 elements was created")
    """
    shape, claims, strides = ((4, 6), (1 << 62, 16), (16, 1)) if lib.ndims[1] > 1 else ((4,), (1 << 62,), (1,))
    source = lib.source("float32", shape, claims=claims, strides=strides)
    return _check_refused(lib, source, source, f"a shape of {claims}")


@check("consumer", "refusals", "fatal", alone=True, see="memory safety: a device address is not a host pointer")
def other_device(lib: Subject) -> str:
    """Memory of an unsupported device is refused or keeps its device; it is never read.

    source = Source(device=(15, 0), says=(1, 0), data=4096)  # WebGPU memory, but the producer claims the host
    result = {take}(source)  # or raises
    assert result.__dlpack_device__()[0] == 15, "treated as host memory"
    """
    for says in (None, (1, 0)):
        source = lib.source(device=(15, 0), says=says, data=0x1000)
        result, error = lib.tried(source)
        if error is None:
            UNTOUCHED.append((source, result))  # deletes the result first
            kind, _ = result.__dlpack_device__()
            must(int(kind) == 15, f"WebGPU memory was treated as memory of device type {int(kind)}")
            remark = "kept as WebGPU memory"
        else:
            remark = f"refused: {error_line(error)}"
    return remark


@check("consumer", "lifetimes", "wrong", see="DLPack, Python specification: capsule destructor")
def refusal_releases(lib: Subject) -> str:
    """A refused capsule is neither consumed nor leaked."""
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
    lib.needs(refused, "it refuses none of these")
    return f"{refused} refusals"


class Inside(Exception):
    """An error of a producer."""


@check("consumer", "versions", "friction", see="array API standard, from_dlpack")
def asks_for_version(lib: Subject) -> None:
    """A consumer requests a versioned capsule, which can carry flags.

    source = Source()
    {take}(source)
    assert "max_version" in source.calls[0], source.calls
    """
    source = lib.source()
    lib.take(source)
    must(source.calls, "__dlpack__ was not called")
    version = source.calls[0].get("max_version")
    must(version is not None, f"it passes {source.calls[0] or 'no keyword'}, so it gets only legacy capsules")
    must(isinstance(version, tuple) and len(version) == 2 and version[0] >= 1, f"it passes max_version={version!r}")


@check("consumer", "keywords", "refuses", see="array API standard, __dlpack__: stream")
def asks_without_stream(lib: Subject) -> None:
    """A consumer on the host passes no stream."""
    source = lib.source()
    lib.take(source)
    streams = [call["stream"] for call in source.calls if "stream" in call]
    must(not streams, f"it passes stream={streams[:1]} to a producer on the host")


@check("consumer", "versions", "refuses", see="array API standard 2021.12, __dlpack__")
def old_producer(lib: Subject) -> None:
    """A producer before DLPack 1.0, with only the keyword `stream`, is supported.

    {take}(OldSource())
    """
    source = lib.source(kind=OldSource)
    lib.holds(lib.take(source), source)


@check("consumer", "versions", "refuses", see="array API standard: verify what was returned")
def legacy_producer(lib: Subject) -> None:
    """A producer that always returns a legacy capsule is supported.

    {take}(Source(legacy=True))
    """
    source = lib.source(legacy=True)
    lib.holds(lib.take(source), source)


@check("consumer", "versions", "refuses", see="dlpack.h: minor versions are compatible")
def newer_minor(lib: Subject) -> None:
    """A capsule of a later minor version is supported."""
    source = lib.source(version=(1, 99))
    lib.holds(lib.take(source), source)


@check("consumer", "errors", "friction", see="array API standard, from_dlpack: fall-back")
def asked_once(lib: Subject) -> None:
    """A producer that raises TypeError is called at most twice, as the standard describes.

    source = Source(raises=TypeError("from the producer"))
    try:
        {take}(source)
    except Exception:
        pass
    assert len(source.calls) <= 2, f"called {len(source.calls)} times"
    """
    source = lib.source(raises=TypeError("from the producer"))
    _, error = lib.tried(source)
    must(len(source.calls) <= 2, f"a producer that raises TypeError is called {len(source.calls)} times")
    must(error is not None, "the producer's TypeError is lost")


@check("consumer", "errors", "friction")
def errors_shown(lib: Subject) -> None:
    """An exception of the producer is raised, and the producer is called only once.

    source = Source(raises=ZeroDivisionError("from the producer"))
    try:
        {take}(source)
    except BaseException as error:
        found = error
    assert isinstance(found, ZeroDivisionError) or isinstance(found.__cause__, ZeroDivisionError), found
    assert len(source.calls) == 1
    """
    source = lib.source(raises=Inside("from the producer"))
    _, error = lib.tried(source)
    must(error is not None, "the producer's exception is lost")
    chain: list[BaseException] = []
    found = error
    while found is not None:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    must(any(isinstance(each, Inside) for each in chain), f"the producer's exception is lost: {error_line(error)}")
    must(len(source.calls) == 1, f"it is called {len(source.calls)} times")


@check("consumer", "refusals", "fatal")
def not_a_capsule(lib: Subject) -> None:
    """A result of `__dlpack__` that is not a capsule is refused."""
    for answer in (None, 17, object()):
        result, error = lib.tried(lib.source(answer=answer))
        must(error is not None, f"a producer that returns {answer!r} was imported as {result!r}")


@check("consumer", "refusals", "fatal")
def no_producer(lib: Subject) -> None:
    """An object without `__dlpack__` is refused."""
    assert lib.from_dlpack is not None
    for obj in (None, 1.5, object(), Source):
        result, error = attempt(lib.from_dlpack, obj)
        must(error is not None, f"{obj!r} was imported as {result!r}")
