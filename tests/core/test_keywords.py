"""A misspelt keyword raises a TypeError that suggests the right one."""

import pytest

import dlx


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "convert": (lambda: dlx.convert(b"ab", to="dlx", raedonly="copy"), r"convert\(\).*'raedonly'.*'readonly'"),
        "from_dlpack": (lambda: dlx.from_dlpack(b"ab", devise="cpu"), r"from_dlpack\(\).*'devise'"),
        "plan": (lambda: dlx.plan(b"ab", to="dlx", devise="cpu"), r"plan\(\).*'devise'.*'device'"),
        "open": (lambda: dlx.open("no such file", devise="cpu"), r"open\(\).*'devise'.*'device'"),
        "stack": (lambda: dlx.stack([b"ab"], to="dlx", devise="cpu"), r"stack\(\).*'devise'.*'device'"),
        "empty": (lambda: dlx.empty((2,), dtyp="int8"), r"empty\(\).*'dtyp'.*'dtype'"),
        "from_pointer": (lambda: dlx.from_pointer(1, (0,), "int8", owener=0), r"from_pointer\(\).*'owener'.*'owner'"),
        "to_capsule": (lambda: dlx.to_capsule(b"ab", maxversion=1), r"to_capsule\(\).*'maxversion'.*'max_version'"),
        "using": (lambda: dlx.using("dlx", lasy=True), r"using\(\).*'lasy'.*'lazy'"),
        "no similar one": (
            lambda: dlx.stack([b"a"], to="dlx", dim=1),
            r"stack\(\).*'dim'\. Use one of: axis, dtype, pad, ",
        ),
    }.values(),
    ids=[
        "convert",
        "from_dlpack",
        "plan",
        "open",
        "stack",
        "empty",
        "from_pointer",
        "to_capsule",
        "using",
        "no similar one",
    ],
)
def test_the_nearest_keyword_is_said(call, words):
    """From Python 3.13 on, Python suggests keywords for its own functions."""
    with pytest.raises(TypeError, match=words) as caught:
        call()
    assert caught.value.__cause__ is None


def test_other_type_errors_stay():
    """An object's TypeError is not taken for a wrong call; a keyword that is like no other gets no suggestion."""

    class Fails:
        def __dlpack__(self, **options):
            raise TypeError("made by the producer")

        def __dlpack_device__(self):
            return 1, 0

    with pytest.raises(dlx.errors.DlxError, match="made by the producer"):
        dlx.convert(Fails(), to="dlx", readonly="copy")
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'") as caught:
        dlx.plan(b"ab", to="dlx", zzz=1)
    assert "Did you mean" not in str(caught.value)
