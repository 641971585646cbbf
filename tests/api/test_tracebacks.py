"""Tracebacks of refusals: few frames of dlx, and all frames of other code."""

import importlib.util
import traceback

import pytest

import dlx
from dlx._support.tracebacks import REFUSALS
from dlx.errors import ConversionError

MISSING = next((name for name in ("mlx", "cupy", "paddle") if importlib.util.find_spec(name) is None), None)


class Numbers:
    """It has text, which DLPack has no dtype for."""

    @property
    def __array_interface__(self):
        return {"shape": (2,), "typestr": "<U3", "data": b"abcdef" * 4, "version": 3}


class Liar:
    """Its producer fails in an inner function."""

    def __dlpack__(self, **options):
        return self.fail()

    def fail(self):
        raise RuntimeError("made by the producer")

    def __dlpack_device__(self):
        return 1, 0


class Tree:
    """Its author's code fails with an error of dlx."""

    def __dlx_tree__(self):
        return self.children()

    def children(self):
        raise ConversionError("made by the tree's author")


def using(obj, to="dlx"):
    """Call a decorated function."""
    return dlx.using(to)(lambda x: x)(obj)


CALLS = {
    "array": lambda: dlx.convert(Numbers(), to="dlx"),
    "copy": lambda: dlx.convert(memoryview(b"abcd")[::2], to="arrow", copy=False),
    "no array": lambda: dlx.convert(object(), to="dlx"),
    "device": lambda: dlx.convert(b"ab", to="dlx", device="hexagon"),
    "stream": lambda: dlx.convert(b"ab", to="dlx", stream=3),
    "tree": lambda: dlx.convert({"a": [Numbers()]}, to="dlx"),
    "strict tree": lambda: dlx.convert([object()], to="dlx", strict=True),
    "collected": lambda: dlx.convert([Numbers(), Numbers()], to="dlx", errors="collect"),
    "target": lambda: dlx.convert(b"ab", to="nunpy"),
    "view": lambda: dlx.convert({"a": Numbers()}, to="dlx", lazy=True)["a"],
    "view in a view": lambda: dlx.convert([{"a": Numbers()}], to="dlx", lazy=True)[0]["a"],
    "view, iterated": lambda: list(dlx.convert([Numbers()], to="dlx", lazy=True)),
    "view's items": lambda: dict(dlx.convert({"a": Numbers()}, to="dlx", lazy=True).items()),
    "view's values": lambda: list(dlx.convert({"a": Numbers()}, to="dlx", lazy=True).values()),
    "using": lambda: using(Numbers()),
    "using, a tree": lambda: using({"a": [Numbers()]}),
    "using, the target": lambda: using(b"ab", "nunpy"),
    "stack": lambda: dlx.stack([Numbers()], to="dlx"),
    "stack, the target": lambda: dlx.stack([b"ab"], to="nunpy"),
    "stack, shapes": lambda: dlx.stack([b"ab", b"abc"], to="dlx"),
    "open": lambda: dlx.open(__file__),
    "open, no file": lambda: dlx.open("/no/such/file.npy"),
    "share": lambda: dlx.share({"a": object()}),
    "attach": lambda: dlx.attach({"dlx": 1}),
    "attach, no handle": lambda: dlx.attach(3),
    "from_dlpack": lambda: dlx.from_dlpack(Numbers()),
    "to_capsule": lambda: dlx.to_capsule(Numbers()),
    "describe": lambda: dlx.describe(3),
    "shares_memory": lambda: dlx.shares_memory(b"ab", 3),
    "producer": lambda: dlx.convert(Liar(), to="dlx"),
    "producer in a tree": lambda: dlx.convert([Liar()], to="dlx"),
}
if MISSING is not None:
    CALLS["missing framework"] = lambda: dlx.convert(b"ab", to=MISSING)
    CALLS["missing framework, a tree"] = lambda: dlx.convert([b"ab"], to=MISSING)
    CALLS["missing framework, using"] = lambda: using(b"ab", MISSING)


def raised(call):
    """Return the exception of a call."""
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def names(error):
    """Return the modules of the frames in an error's traceback."""
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]


def ours(error):
    """Return those that are dlx's."""
    return [name for name in names(error) if name.partition(".")[0] == "dlx" or name.startswith("dlx_")]


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_shows_at_most_three_frames_of_dlx(name):
    """Collected errors do, too."""
    error = raised(CALLS[name])
    assert isinstance(error, (*REFUSALS, TypeError)), error
    for each in (error, *getattr(error, "exceptions", ())):
        assert len(ours(each)) <= 3, ours(each)
    if name in ("array", "tree", "stack", "using"):
        assert ours(error)[-1].startswith(("dlx._engine", "dlx._protocols")), "the last frame says where it was raised"


def test_producers_keep_their_frames():
    """The cause of an error is whole: every frame of the producer, and dlx's that called it."""
    cause = raised(CALLS["producer in a tree"]).__cause__
    assert names(cause)[-2:] == [__name__, __name__]
    assert str(cause) == "made by the producer"


def test_frames_of_others_stay_between_those_of_dlx():
    """The traceback shows the line of the container's code that raised."""
    error = raised(lambda: dlx.convert([Tree()], to="dlx"))
    while error.__cause__ is not None:
        error = error.__cause__
    assert "at obj[0]: made by the tree's author. " in str(error)
    assert names(error)[-2:] == [__name__, __name__]


@pytest.mark.parametrize(("kind", "frames"), [(AssertionError, 3), (ConversionError, 2)])
def test_only_refusals_are_shortened(monkeypatch, kind, frames):
    """Other exceptions may be bugs of dlx, so their frames are not hidden."""

    def fails(self, *, brief):
        raise kind("made here")

    monkeypatch.setattr("dlx._engine.batch.Batch._prepare", fails)
    error = raised(lambda: dlx.convert([b"ab", bytearray(2)], to="dlx", strict=True, detach=True))
    assert len(ours(error)) == frames
    assert names(error)[-1] == __name__
