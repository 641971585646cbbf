"""Objects and classes whose inspection raises pass through lazy views and `using`."""

from __future__ import annotations

import collections
import types

import pytest

import dlx


class NoHash(type):
    __hash__ = None


class OnlyEqual(type):
    def __eq__(cls, other):
        return False


class Raising(type):
    def __hash__(cls):
        raise RuntimeError("no hash")

    def __getattribute__(cls, name):
        raise RuntimeError(f"unreadable {name}")


class Proxy:
    """Like werkzeug's LocalProxy without a bound object."""

    def __getattribute__(self, name):
        raise RuntimeError("working outside of application context")

    def __eq__(self, other):
        raise RuntimeError("unbound")

    def __hash__(self):
        raise RuntimeError("unbound")

    def __repr__(self):
        raise RuntimeError("unbound")


METAS = {"no hash": NoHash, "only ==": OnlyEqual, "raising class": Raising, "no module": type}


def kind(name, base=object):
    """Return a class whose inspection raises; pytest would inspect one in a module."""
    if name == "proxy":
        return Proxy
    return METAS[name]("Foreign", (base,), {"__module__": None if name == "no module" else __name__})


kinds = pytest.mark.parametrize("name", [*METAS, "proxy"])


@kinds
def test_they_are_shown_and_stored_by_views_of_sequences(np, name):
    """They are unchanged, next to converted arrays."""
    foreign, array = kind(name)(), np.ones(1)
    for container in (list, collections.deque, collections.UserList):
        source = container([foreign, array])
        for options in ({}, {"copy": True}):
            view = dlx.convert(source, to="dlx", lazy=True, **options)
            first, second = view
            assert first is foreign and view[0] is foreign and type(second) is dlx.Tensor and view[1] is second
            assert "dlx.Tensor" in repr(view) or "Tensor" in repr(view)
            view[0] = 3
            view[0] = foreign
            view.append(foreign)
            view.insert(0, foreign)
            assert len(source) == 4 and all(source[i] is foreign for i in (0, 1, 3)) and source[2] is array
            assert view.pop() is foreign and view.pop(0) is foreign and view[1] is second
            view.extend([foreign])
            assert source.pop() is foreign
    view = dlx.convert(source := [array, foreign, array], to="dlx", lazy=True)
    view[:2] = [foreign, view[0]]
    assert source[0] is foreign and source[1] is array and source[2] is array
    assert dlx.convert((foreign, array), to="dlx", lazy=True)[0] is foreign
    assert view.materialize()[0] is foreign


@kinds
def test_they_are_shown_and_stored_by_views_of_mappings_and_records(np, name):
    """They are unchanged, also in place of an array."""
    foreign, array = kind(name)(), np.ones(1)
    for container in (dict, collections.OrderedDict, collections.UserDict):
        source = container(a=foreign, b=array)
        view = dlx.convert(source, to="dlx", lazy=True)
        assert view["a"] is foreign and type(view["b"]) is dlx.Tensor and view.get("a") is foreign
        assert next(iter(view.values())) is foreign and view.copy()["a"] is foreign
        held = view["b"]
        view["b"] = foreign
        assert source["b"] is foreign and view["b"] is foreign
        view["b"] = held
        assert source["b"] is array and view["b"] is held
        assert view.setdefault("c", foreign) is foreign and source["c"] is foreign
        view.update(d=foreign)
        assert view.pop("d") is foreign and view.pop("c") is foreign and list(source) == ["a", "b"]
        assert view.materialize()["a"] is foreign and repr(view)
    record = types.SimpleNamespace(x=foreign, y=array)
    view = dlx.convert(record, to="dlx", lazy=True)
    assert view.x is foreign and type(view.y) is dlx.Tensor
    view.y = foreign
    assert record.y is foreign and view.y is foreign


@pytest.mark.parametrize("name", [name for name in METAS if name != "raising class"])
@pytest.mark.parametrize("base", [list, dict])
def test_containers_of_such_classes_are_viewed(np, name, base):
    """A list or dict is a container even if its class is unhashable or has no module."""
    source = kind(name, base)({0: np.ones(1)} if base is dict else [np.ones(1)])
    view = dlx.convert(source, to="dlx", lazy=True)
    assert type(view[0]) is dlx.Tensor and view[0] is view[0] and view.materialize()[0].shape == (1,)


@kinds
@pytest.mark.parametrize("lazy", [False, True])
def test_they_pass_through_using(np, name, lazy):
    """They pass through as arguments, in containers, as results, yielded and sent."""
    foreign, array = kind(name)(), np.ones(1)
    using = dlx.using("dlx", lazy=lazy)
    assert using(lambda x, y: y)(array, foreign) is foreign
    assert using(lambda x: foreign)(array) is foreign and using(lambda: foreign)() is foreign
    result = using(lambda x, y: [x, y, foreign, {"k": (foreign, x)}])(array, foreign)
    assert result[0] is array and result[1] is foreign and result[2] is foreign
    assert result[3]["k"][0] is foreign and result[3]["k"][1] is array
    inside = [array, foreign]
    assert using(lambda x: x)(inside) is inside and using(lambda x: [x])(inside)[0][1] is foreign

    @using
    def steps(x):
        sent = yield foreign
        yield [sent, x]

    running = steps(array)
    assert next(running) is foreign
    both = running.send(foreign)
    assert both[0] is foreign and both[1] is array

    class Model:
        @using
        def run(self, x):
            return [self, x]

    assert using(Model.run)(foreign, array)[1] is array
    assert using(lambda self, x: self)(foreign, array) is foreign


def test_what_cannot_be_described_is_replaced_with_a_clear_error_or_at_all(np):
    """An array with an unknown device stays in place until it is removed."""

    class Broken:
        def __dlpack__(self, **options):
            raise KeyError("gone")

        def __dlpack_device__(self):
            raise KeyError("gone")

    broken = Broken()
    source = [broken, np.ones(1)]
    view = dlx.convert(source, to="dlx", lazy=True)
    try:
        view[0] = np.ones(2)
    except dlx.errors.DlxError:
        assert source[0] is broken
    else:
        assert source[0].shape == (2,)
    view[0] = 3
    assert source[0] == 3
