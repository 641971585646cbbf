"""Classification of objects: one look-up per type, in one module, with one cache."""

from __future__ import annotations

import abc
import datetime
import gc
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

import pytest

import dlx
from dlx._registry import generic, lookup
from dlx._registry.registry import registry


class Record(dict):
    """A subclass of a container."""


@dataclass
class Point:
    x: object


class Unknown:
    pass


class Producer:
    def __dlpack__(self, **options):
        return dlx.empty((2,), "int8").__dlpack__(**options)

    def __dlpack_device__(self):
        return 1, 0


class Refused:
    """An array-like object without a protocol."""

    def __array__(self):
        raise AssertionError("it is never asked")


def entered(function):
    """Return (file, function) of each called Python function of dlx."""
    found = []

    def note(frame, event, argument):
        if event == "call" and "dlx" in Path(frame.f_code.co_filename).parts and frame.f_code is not function.__code__:
            found.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


KINDS = {
    "array": (lambda np: np.ones(2), "array"),
    "tensor": (lambda np: dlx.empty((2,), "int8"), "array"),
    "record": (lambda np: Record(a=1), "container"),
    "dataclass": (lambda np: Point(1), "container"),
    "unknown": (lambda np: Unknown(), "unknown"),
    "date": (lambda np: datetime.date.min, "passthrough"),
    "number of numpy": (lambda np: np.float32(1), "passthrough"),
    "refused": (lambda np: Refused(), "refused"),
}


def test_a_call_of_using_classifies_its_argument_once(np):
    """Everything else uses the adapter that was found; the same for results."""
    torch = pytest.importorskip("torch")
    array, kinds = np.ones(2), []
    function = dlx.using(to="torch", device="cpu")(lambda tensor: [tensor + 1])
    function(array)

    def note(frame, event, argument):
        if event == "call" and frame.f_code is lookup.kind.__code__:
            kinds.append(frame.f_locals["cls"])

    sys.setprofile(note)
    try:
        function(array)
    finally:
        sys.setprofile(None)
    assert kinds.count(np.ndarray) == kinds.count(torch.Tensor) == 1


@pytest.mark.parametrize(("make", "verdict"), KINDS.values(), ids=KINDS)
def test_a_type_is_classified_once_and_in_one_file(np, make, verdict):
    """The second object of a type only reads the cache."""
    assert lookup.kind(type(make(np))).verdict == verdict
    lookup.kind(type(make(np)))  # the first may have loaded plugins, hence modules
    other = make(np)
    found = entered(lambda: lookup.kind(type(other)))
    assert [name for name in found if name != ("lookup.py", "_has_array_protocol")][:2] == [
        ("lookup.py", "kind"),
        ("registry.py", "kinds"),
    ]
    assert not {name for _, name in found} & {"_classify", "owner", "explain"}
    assert len(found) <= 3


@pytest.mark.parametrize("make", [lambda np: np.ones(2), lambda np: Point(np.ones(2)), lambda np: [Unknown()]])
def test_a_conversion_classifies_nothing_again(np, make):
    """On the Python path, for all kinds of objects."""
    for _ in range(2):
        dlx.convert.__wrapped__(make(np), to="dlx")
    obj = make(np)
    names = {name for _, name in entered(lambda: dlx.convert.__wrapped__(obj, to="dlx"))}
    assert not names & {"_classify", "owner", "explain"}


def test_exact_types_need_no_look_up(np):
    """A table contains Python's built-in types."""
    assert [lookup.kind(each).verdict for each in (list, OrderedDict, int, bytes)] == [
        "container",
        "container",
        "passthrough",
        "passthrough",
    ]
    assert entered(lambda: lookup.kind(dict)) == [("lookup.py", "kind")]


def test_parts_of_a_tree(np):
    """`Kind.part` is a container's handler, an array's adapter, or None."""
    assert lookup.look([]).part is lookup.LIST
    assert lookup.look(np.ones(1)).part.name == "numpy"
    assert lookup.look(Producer()).part is generic.DLPACK
    assert lookup.look(b"abc").part is lookup.look(np.float32(1)).part is lookup.look(Unknown()).part is None


def test_only_the_object_can_tell():
    """For unknown types, dlx checks the attributes of each object."""
    one, other = Unknown(), Unknown()
    one.__array_interface__ = {"version": 3}
    assert lookup.kind(Unknown).verdict == "unknown"
    assert lookup.look(one).adapter is generic.INTERFACE
    assert lookup.look(other).adapter is None


def test_a_protocol_that_a_class_gains_is_seen():
    """Objects of unknown types and undeclared containers are checked each time."""
    late = type("Late", (), {})
    container = type("LateDict", (dict,), {})
    assert lookup.look(late()).adapter is None and lookup.look(container()).verdict == "container"
    late.__dlpack__ = container.__dlpack__ = Producer.__dlpack__
    assert lookup.look(late()).adapter is lookup.look(container()).adapter is generic.DLPACK


def test_what_is_refused_and_when():
    """Array-like types are refused in any tree; `strict` also refuses unknown objects, but not buffers."""
    assert lookup.look(Refused()).refusal.fix.startswith("Call numpy.asarray(x) first")
    with pytest.raises(dlx.errors.AdapterNotFoundError, match=r"numpy\.asarray"):
        lookup.look(Refused(), strict=False)
    assert lookup.look(Unknown(), strict=False).verdict == "unknown"
    with pytest.raises(dlx.errors.AdapterNotFoundError, match="strict=True"):
        lookup.look(Unknown(), strict=True)

    class Buffer(bytearray, Refused):
        pass

    assert lookup.look(Buffer(), strict=True).part in (None, generic.BUFFER)


def test_what_is_known_is_forgotten_with_one_stamp(monkeypatch):
    """Loading an adapter, importing a module or registering a class clears the cache."""
    base = abc.ABCMeta("Base", (), {})
    events = {
        "adapter": registry._forget,
        "module": lambda: monkeypatch.setitem(sys.modules, "a_module_that_is_new", types.ModuleType("new")),
        "class": lambda: base.register(type("Registered", (), {})),
    }
    for name, happens in events.items():
        kind = type("Thing", (), {})
        lookup.kind(kind)
        known = registry.kinds()
        assert known.find(kind) is not None and registry.kinds() is known, name
        happens()
        assert registry.kinds() is not known and registry.kinds().find(kind) is None, name


def test_a_class_is_not_kept_alive():
    """The cache has weak references to classes."""
    kind = type("Short", (), {})
    lookup.kind(kind)
    known, gone = registry.kinds(), ref(kind)
    assert known.find(kind) is not None
    del kind
    gc.collect()
    assert gone() is None and all(key() is not None for key in known)


def test_a_hundred_unknown_classes_are_looked_at_once():
    """The next tree only reads the cache."""
    made = [type(f"Unknown{i}", (), {})() for i in range(100)]
    dlx.convert.__wrapped__([dlx.empty((2,), "int8"), *made], to="dlx")
    dlx.convert.__wrapped__([dlx.empty((2,), "int8"), *made], to="dlx")
    one = dlx.empty((2,), "int8")
    found = entered(lambda: dlx.convert.__wrapped__([one, *made], to="dlx"))
    assert not {name for _, name in found} & {"_classify", "owner"}
    assert len(found) < 100 * 15
