"""The kit finds a hook that returns an object of a wrong type, and names it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import pytest
from support.kit.adapters import Good

import dlx
from dlx.adapter import (
    ArrayInfo,
    Arrays,
    Blocker,
    Capabilities,
    Description,
    Devices,
    Placement,
    StreamSupport,
    WriteTracking,
)
from dlx.testing import Broken
from dlx.testing.checks.adapter import check_results


class Complete(Good):
    """An adapter with every part."""

    streams = StreamSupport(ready=lambda obj, tensor: None)
    arrays = Arrays(consume=lambda obj, tensor, shared: tensor)
    writes = WriteTracking(guarded=lambda obj, writable: obj, count=lambda obj: 0)

    def __init__(self):
        super().__init__("complete")
        self.devices = type("Own", (Devices,), {})()
        self.dtypes = type("Own", (type(self.dtypes),), {})(__name__, {"float32": "f"})
        self.placement = Placement(lambda tensor, committed: self.kind(tensor), lambda obj: True)

    def is_tracing(self):
        return False


class Odd:
    """An object that raises on every access."""

    def __getattribute__(self, name):
        raise RuntimeError(f"no {name}")

    __bool__ = __iter__ = __repr__ = __eq__ = __hash__ = lambda self, *other: 1 / 0


@pytest.fixture
def adapter(monkeypatch):
    """Return a complete adapter that is registered as a target."""
    made = type("Own", (Complete,), {})()
    target = type("Target", (), {"adapter": made, "over": lambda self, tensor: self})()
    monkeypatch.setattr("dlx.testing.checks.adapter.registry", type("R", (), {"target": lambda self, name: target})())
    yield made
    delattr(sys.modules["support.kit.adapters"], made.kind.__name__)


def with_hook(adapter, hook, function):
    """Replace a method of an adapter or a part, or a function in one of its frozen parts."""
    part, _, name = hook.rpartition(".")
    owner = getattr(adapter, part) if part else adapter
    if dataclasses.is_dataclass(owner):
        setattr(adapter, part, dataclasses.replace(owner, **{name: function}))
    else:
        setattr(type(owner), name, lambda self, *given, **options: function(*given, **options))


def answer(adapter):
    """Check every hook on one array."""
    tensor = dlx.empty((2, 3), "float32")
    check_results(adapter, adapter.kind(tensor), tensor)


def test_right_answers_pass(adapter):
    """A complete adapter passes."""
    answer(adapter)


HOOKS = (
    *("describe", "export", "capabilities", "variant", "load", "copy", "is_tracing"),
    *("dtypes.known", "dtypes.native_name", "dtypes.from_native"),
    *("devices.from_native", "devices.of", "devices.default", "devices.current", "devices.activate"),
    *("devices.available", "streams.ready", "arrays.consume", "placement.load", "placement.is_committed"),
    *("writes.guarded", "writes.count"),
)


@pytest.mark.parametrize("rubbish", [bytes, Odd])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_wrong_answer_is_named(adapter, hook, rubbish):
    """The error names the hook and the adapter, for any object."""
    with_hook(adapter, hook, lambda *given, **options: rubbish())
    found = pytest.raises(Broken) if (hook, rubbish) != ("devices.available", bytes) else contextlib.nullcontext()
    with found as caught:
        answer(adapter)
    if caught is not None:
        assert f"{hook} of 'planted_complete' returned" in str(caught.value)


@pytest.mark.parametrize(
    ("described", "says"),
    [
        (Description(blockers="text"), "describe, blockers of"),
        (Description(blockers=(Blocker("a"), 3)), "describe, blockers of"),
        (Description(tensor=3), "describe, tensor of"),
        (Description(3), "describe, info of"),
        (Description(lambda: 3), "describe, info of"),
        (Description(ArrayInfo("planted", "Grid", shape=[3])), "describe, info.shape of"),
        (Description(ArrayInfo("planted", "Grid", dtype="float32")), "describe, info.dtype of"),
        (Description(ArrayInfo("planted", "Grid", nbytes=1.5)), "describe, info.nbytes of"),
    ],
)
def test_a_wrong_description_is_named(adapter, described, says):
    """The parts of a description are checked, too."""
    with_hook(adapter, "describe", lambda obj: described)
    with pytest.raises(Broken, match=says):
        answer(adapter)


def test_wrong_refusals_are_named(adapter):
    """Refusals must be pairs of text."""
    with_hook(adapter, "capabilities", lambda: Capabilities(dtypes=None, refusals={"int8": "no"}))
    with pytest.raises(Broken, match="refuses 'int8'"):
        answer(adapter)
