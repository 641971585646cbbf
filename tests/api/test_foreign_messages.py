"""Messages quote the first line of a foreign error, without library folders, in every place."""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import fields, replace

import pytest
from support.foreign.arrow import Streams, arrow_array, schema, stream
from support.plugins.mylib import Array

import dlx
from dlx import errors
from dlx._registry.registry import Plugin, registry
from dlx._support.reflect import MAX_MESSAGE, exception_text, first_line
from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Arrays,
    Blocker,
    Capabilities,
    Container,
    Description,
    Devices,
    DTypes,
    FastPath,
    GradSupport,
    Layout,
    Placement,
    StreamSupport,
    WriteTracking,
)

SAID = """\
[enforce fail at /opt/build/c10/core/alloc.cpp:114] out of luck
Exception raised from empty at /opt/build/aten/native/empty.cpp:12 (most recent call first):
frame #0: c10::Error::Error(...) + 0x57 (0x7f in /usr/lib/python3/site-packages/lib/libc10.so)"""
QUOTED = "[enforce fail at alloc.cpp:114] out of luck"
WORDS = ("frame #0", "\n", "/opt/", "/usr/", "site-packages")


def fail(*args, **options):
    """Raise as a framework in C++ does."""
    raise RuntimeError(SAID)


# ---- hooks of adapters -----------------------------------------------------------------------------------------------


class Failing(Adapter):
    """An adapter of which one hook fails; the others work."""

    name = package = "faillib"
    types = ("faillib.Array",)
    dtypes = DTypes("builtins", {"float32": "float"})

    def capabilities(self):
        return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)

    def describe(self, obj):
        return Description(ArrayInfo.of_tensor(obj.tensor, "faillib", type(obj)), needs_export=True)

    def export(self, obj, *, stream=None):
        return obj.tensor

    def load(self, tensor):
        return sys.modules["faillib"].Array(tensor)

    def copy(self, obj, device=None):
        return self.load(dlx.convert(obj.tensor, to="dlx", copy=True))


def described_by(blocker):
    """Return a `describe` with a blocker."""
    return lambda self, obj: Description(ArrayInfo.of_tensor(obj.tensor, "faillib", type(obj)), (blocker,))


HOOKS = {  # the hook that fails -> facts of the adapter
    name: {name: fail}
    for name in ("capabilities", "copy", "describe", "export", "load", "variant")
}  # fmt: skip
HOOKS |= {f"dtypes.{name}": {"dtypes": type("Types", (DTypes,), {name: fail})("builtins", {"float32": "float"})}
          for name in ("to_native", "from_native", "native_name", "viewed")}  # fmt: skip
HOOKS |= {f"devices.{name}": {"devices": type("Places", (Devices,), {name: fail})()}
          for name in ("to_native", "from_native", "of", "default", "current", "activate", "new_array",
                       "available")}  # fmt: skip
HOOKS |= {f"fast_path.{name}": {"fast_path": replace(FastPath(types=("faillib.Array",)), **{name: fail})}
          for name in ("subclasses", "exchange", "export", "guard_function", "describe", "ready")}  # fmt: skip
HOOKS |= {f"streams.{name}": {"streams": StreamSupport(**{name: fail})}
          for name in ("current", "activate", "ready", "quick")}  # fmt: skip
HOOKS |= {f"writes.{name}": {"writes": WriteTracking(**{name: fail})} for name in ("guarded", "count", "mark_written")}
HOOKS |= {
    "arrays.map_chunks": {"arrays": Arrays(map_chunks=fail)},
    "arrays.consume": {"arrays": Arrays(consume=fail)},
    "arrays.restore": {"arrays": Arrays(consume=lambda obj, tensor, shared: tensor, restore=fail)},
    "placement.load": {"placement": Placement(load=fail, is_committed=lambda obj: True)},
    "placement.is_committed": {"placement": Placement(load=lambda tensor, committed: None, is_committed=fail)},
    "is_tracing": {"is_tracing": fail},
    "gradients.is_tracked": {"gradients": GradSupport(is_tracked=fail)},
    "info": {"describe": lambda self, obj: Description(fail)},
    "resolution": {"describe": described_by(Blocker("its values are pending", resolution=fail, needs="copy"))},
}
HOLDERS = {f"containers.{name}": {name: fail} for name in ("flatten", "unflatten", "new_empty", "identity")}


class Bag:
    """A container of that framework."""

    def __init__(self, items):
        self.items = items

    __module__ = "faillib"


@pytest.fixture
def enter(monkeypatch):
    """Enter an adapter with some facts; give the framework."""
    library = types.ModuleType("faillib")
    library.__version__ = "1"
    library.Array = type("Array", (Array,), {"__module__": "faillib"})
    library.Bag = Bag
    monkeypatch.setitem(sys.modules, "faillib", library)

    def with_facts(facts):
        adapter = type("Failing", (Failing,), facts)()
        monkeypatch.setitem(
            registry._loader.plugins, "faillib", Plugin("faillib", object, "t", ["faillib"], (adapter,))
        )
        registry._forget()
        return library

    yield with_facts
    registry._loader.plugins.pop("faillib", None)
    registry._forget()


def texts(error):
    """Give all texts of an error, and of those in it."""
    yield str(error)
    yield getattr(error, "reason", "")
    yield from getattr(error, "__notes__", ())
    for each in getattr(error, "exceptions", ()):
        yield from texts(each)


def borrow(array):
    """Borrow an array."""
    with dlx.borrow(array, readonly=True):
        pass


def calls(make):
    """Give calls that reach the hooks, as functions."""
    return {
        "source": lambda: dlx.convert(make(), to="dlx"),
        "tree": lambda: dlx.convert([make(), {"a": make()}], to="dlx"),
        "collect": lambda: dlx.convert([make(), {"a": make()}], to="dlx", errors="collect"),
        "lazy": lambda: dlx.convert([make()], to="dlx", lazy=True)[0],
        "target": lambda: dlx.convert(dlx.empty((3,), "float32"), to="faillib"),
        "device": lambda: dlx.convert(dlx.empty((3,), "float32"), to="faillib", device="cpu"),
        "host 1": lambda: dlx.convert(dlx.empty((3,), "float32"), to="faillib", device="cpu:1"),
        "lazy in": lambda: dlx.convert([dlx.empty((3,), "float32")], to="faillib", lazy=True)[0],
        "lazy in, all": lambda: [*dlx.convert([dlx.empty((3,), "float32")], to="faillib", lazy=True)],
        "numpy": lambda: dlx.convert(make(), to="numpy"),
        "inside": lambda: dlx.convert(make(), to="faillib", copy=True),
        "moved": lambda: dlx.convert(make(), to="faillib", device="cuda"),
        "like": lambda: dlx.convert(b"abc", like=make()),
        "plan": lambda: str(dlx.plan(make(), to="dlx")) + repr(dlx.plan(b"abc", to="faillib")),
        "describe": lambda: str(dlx.describe(make())),
        "stack": lambda: dlx.stack([make(), make()], to="faillib"),
        "share": lambda: dlx.share(make()).close(),
        "shares_memory": lambda: dlx.shares_memory(make(), b"abc"),
        "borrow": lambda: borrow(make()),
        "to_capsule": lambda: dlx.to_capsule(make()),
        "namespace": lambda: dlx.array_namespace(make()),
        "using": lambda: dlx.using("faillib")(lambda a: a)(dlx.empty((3,), "float32")),
        "writes": lambda: dlx.using("dlx", writes=("a",))(lambda a: None)(make()),
        "adapters": lambda: repr(dlx.adapters()),
    }


def check(error_or_text):
    """Check every text that a user reads."""
    for text in [error_or_text] if isinstance(error_or_text, str) else texts(error_or_text):
        assert not [word for word in WORDS if word in text.replace("\n  ", " ")], text


@pytest.mark.parametrize("hook", [*HOOKS, *HOLDERS])
def test_of_a_hooks_error_the_first_line_is_quoted(enter, hook, np):
    """Whichever hook fails, in whichever call; the error itself is kept as the cause."""
    if hook in HOOKS:
        library = enter(HOOKS[hook])
        make = lambda: library.Array(dlx.empty((3,), "float32"))  # noqa: E731
    else:
        works = {"flatten": lambda bag: (None, list(bag.items)), "unflatten": lambda bag, *rest: Bag(rest[1])}
        library = enter({"containers": (Container(types=("faillib.Bag",), **{**works, **HOLDERS[hook]}),)})
        make = lambda: Bag([library.Array(dlx.empty((3,), "float32"))])  # noqa: E731
    quoted = 0
    for call in calls(make).values():
        try:
            result = call()
        except (errors.DlxError, ExceptionGroup) as error:
            check(error)
            quoted += QUOTED in "".join(texts(error))
        except RuntimeError as error:
            assert str(error) == SAID  # the framework's own, unchanged
        else:
            if isinstance(result, str) and hook not in QUIET:
                check(result.replace("\n", " "))
    assert quoted or hook in QUIET


QUIET = {  # hooks whose failure is not an error of a call on the host: the call does without, or does not ask
    "containers.identity", "containers.new_empty", "devices.activate", "devices.available",
    "devices.default", "devices.of", "dtypes.from_native", "dtypes.native_name", "dtypes.to_native", "dtypes.viewed",
    "fast_path.describe", "fast_path.exchange", "fast_path.export", "fast_path.guard_function", "fast_path.ready",
    "fast_path.subclasses", "gradients.is_tracked",
    "devices.new_array", "arrays.restore", "streams.activate", "streams.current", "streams.quick",
    "streams.ready", "variant", "writes.count", "writes.guarded",
}  # fmt: skip


def test_every_hook_of_an_adapter_is_tried():
    """A new hook has a row here."""
    known = {name.partition(".")[0] for name in HOOKS} | {"containers"}
    functions = {name for name, value in vars(Adapter).items() if callable(value) and name[0] != "_"}
    assert functions - known - {"lowered"} == set()
    for part, kind in {"streams": StreamSupport, "placement": Placement, "writes": WriteTracking}.items():
        assert {f"{part}.{field.name}" for field in fields(kind)} <= set(HOOKS)


# ---- producers and texts ---------------------------------------------------------------------------------------------


class Producer:
    """An object of which one method fails."""

    def __init__(self, **methods):
        self.methods = methods

    def __dlpack__(self, **keywords):
        return self.methods.get("__dlpack__", fail)()

    def __dlpack_device__(self):
        return self.methods.get("__dlpack_device__", lambda: (1, 0))()


class Interface:
    """An array interface that fails."""

    __array_interface__ = property(fail)


class Column:
    """A column whose export fails."""

    __arrow_c_array__ = fail


class Frame:
    """A table whose export fails."""

    __arrow_c_stream__ = fail


class Items(dict):
    """A container that cannot be walked."""

    keys = items = __iter__ = fail


class Tree:
    """A record that cannot be walked."""

    __dlx_tree__ = fail


@pytest.mark.parametrize(
    "obj",
    [Producer(), Producer(__dlpack_device__=fail), Interface(), Column(), Frame(), Items(a=1), Tree(), [Producer()]],
    ids=lambda obj: type(obj).__name__,
)
@pytest.mark.parametrize("way", ["convert", "plan", "collect"])
def test_of_a_producers_error_the_first_line_is_quoted(obj, way):
    """Every protocol quotes the first line."""
    if way == "plan":
        check(dlx.plan(obj, to="dlx").error)
        return
    with pytest.raises((errors.DlxError, ExceptionGroup)) as caught:
        dlx.convert(obj, to="dlx", errors="raise" if way == "convert" else "collect")
    assert QUOTED in "".join(texts(caught.value))
    check(caught.value)


def test_of_an_arrow_streams_text_the_first_line_is_quoted():
    """It comes as C text, not as an exception."""
    with pytest.raises(errors.ProtocolError) as caught:
        batches = [arrow_array(1, None, bytearray(4))]
        dlx.convert(Streams(stream(schema("i"), batches, fails=SAID)), to="dlx")
    assert QUOTED in str(caught.value)
    check(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "one"),
        ("\n\n  one  \ntwo", "one"),
        ("", ""),
        ("/usr/lib/libtorch.so.1: undefined symbol: x", "libtorch.so.1: undefined symbol: x"),
        ("name 'x' from 'numpy' (/a/site-packages/numpy/__init__.py)", "name 'x' from 'numpy' (numpy/__init__.py)"),
        ("cannot open '/mnt/me/data.h5'", "cannot open '/mnt/me/data.h5'"),
        ("a/b.py and ../c/d.cpp", "a/b.py and ../c/d.cpp"),
        ("1/2 = 0.5", "1/2 = 0.5"),
    ],
)
def test_the_first_line(text, line):
    """Paths of the user are kept."""
    assert first_line(text) == line


def test_a_long_first_line_is_cut():
    """A long first line is truncated to `MAX_MESSAGE`."""
    text = exception_text(ValueError("x" * 5000 + "\nmore"))
    assert text == f"ValueError: {'x' * MAX_MESSAGE}... (4,000 more characters)"


def test_a_framework_that_fails_to_import(monkeypatch, tmp_path):
    """The advice of numpy and torch themselves has a page."""
    (tmp_path / "faillib.py").write_text(f"raise ImportError({SAID!r})")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.suppress(KeyError):
        monkeypatch.delitem(sys.modules, "faillib")
    adapter = type("Failing", (Failing,), {"load": fail})()
    monkeypatch.setitem(registry._loader.plugins, "faillib", Plugin("faillib", object, "t", ["faillib"], (adapter,)))
    registry._forget()
    try:
        with pytest.raises(errors.FrameworkNotInstalledError) as caught:
            dlx.convert(b"abc", to="faillib")
        assert QUOTED in str(caught.value)
        check(caught.value)
    finally:
        registry._loader.plugins.pop("faillib", None)
        registry._forget()
