"""Checks of a consumer's requests: producers of every DLPack version are understood, and called once."""

from __future__ import annotations

from dlx.testing.check import check
from dlx.testing.subject import Subject, attempt, error_line, must
from dlx.testing.support.producers import OldSource, Source


class Inside(Exception):
    """An error that only a producer could have raised."""


@check(
    kind="consumer", about="versions", severity="friction", see="array API standard, from_dlpack",
    shows="""
source = Source()
{take}(source)
assert "max_version" in source.calls[0], source.calls
""",
)  # fmt: skip
def asks_for_version(lib: Subject) -> None:
    """It asks for a versioned capsule, so that the producer can say what it must."""
    source = lib.source()
    lib.take(source)
    must(source.calls, "__dlpack__ was not called at all")
    version = source.calls[0].get("max_version")
    must(version is not None, f"it asks with {source.calls[0] or 'no keyword'}: legacy capsules only")
    must(isinstance(version, tuple) and len(version) == 2 and version[0] >= 1, f"it asks with max_version={version!r}")


@check(kind="consumer", about="keywords", severity="refuses", see="array API standard, __dlpack__: stream")
def asks_without_stream(lib: Subject) -> None:
    """On the host it gives no stream."""
    source = lib.source()
    lib.take(source)
    streams = [call["stream"] for call in source.calls if "stream" in call]
    must(not streams, f"it gives stream={streams[:1]} to a producer on the host")


@check(
    kind="consumer", about="versions", severity="refuses", see="array API standard 2021.12, __dlpack__",
    shows="{take}(OldSource())",
)  # fmt: skip
def old_producer(lib: Subject) -> None:
    """A producer from before DLPack 1.0, which knows `stream` only, is understood."""
    source = lib.source(kind=OldSource)
    lib.holds(lib.take(source), source)


@check(
    kind="consumer", about="versions", severity="refuses", see="array API standard: verify what was returned",
    shows="{take}(Source(legacy=True))",
)  # fmt: skip
def legacy_producer(lib: Subject) -> None:
    """A producer that answers with a legacy capsule whatever is asked is understood."""
    source = lib.source(legacy=True)
    lib.holds(lib.take(source), source)


@check(kind="consumer", about="versions", severity="refuses", see="dlpack.h: minor versions are compatible")
def newer_minor(lib: Subject) -> None:
    """A capsule of a later minor version is understood."""
    source = lib.source(version=(1, 99))
    lib.holds(lib.take(source), source)


@check(
    kind="consumer", about="errors", severity="friction", see="array API standard, from_dlpack: fall-back",
    shows="""
source = Source(raises=TypeError("of the producer's own"))
try:
    {take}(source)
except Exception:
    pass
assert len(source.calls) <= 2, f"asked {len(source.calls)} times"
""",
)  # fmt: skip
def asked_once(lib: Subject) -> None:
    """A producer that fails with TypeError is asked at most once more, as the standard describes."""
    source = lib.source(raises=TypeError("of the producer's own"))
    _, error = lib.tried(source)
    must(len(source.calls) <= 2, f"a producer that raises TypeError is asked {len(source.calls)} times")
    must(error is not None, "the producer's TypeError is swallowed")


@check(
    kind="consumer", about="errors", severity="friction",
    shows="""
source = Source(raises=ZeroDivisionError("of the producer's own"))
try:
    {take}(source)
except BaseException as error:
    found = error
assert isinstance(found, ZeroDivisionError) or isinstance(found.__cause__, ZeroDivisionError), found
assert len(source.calls) == 1
""",
)  # fmt: skip
def errors_shown(lib: Subject) -> None:
    """What a producer raises is shown, and it is not asked again."""
    source = lib.source(raises=Inside("of the producer's own"))
    _, error = lib.tried(source)
    must(error is not None, "the producer's exception is swallowed")
    chain: list[BaseException] = []
    found = error
    while found is not None:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    must(any(isinstance(each, Inside) for each in chain), f"the producer's exception is lost: {error_line(error)}")
    must(len(source.calls) == 1, f"it is asked {len(source.calls)} times")


@check(kind="consumer", about="refusals", severity="fatal")
def not_a_capsule(lib: Subject) -> None:
    """A producer that answers with something else is refused."""
    for answer in (None, 17, object()):
        result, error = lib.tried(lib.source(answer=answer))
        must(error is not None, f"a producer that returns {answer!r} gave {result!r}")


@check(kind="consumer", about="refusals", severity="fatal")
def no_producer(lib: Subject) -> None:
    """An object that is no producer is refused."""
    assert lib.from_dlpack is not None
    for obj in (None, 1.5, object(), Source):
        result, error = attempt(lib.from_dlpack, obj)
        must(error is not None, f"{obj!r} gave {result!r}")
