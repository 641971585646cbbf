"""Random programs with lazy views, compared to the same programs with lists and dicts."""

from __future__ import annotations

import collections
import gc

import pytest
from support.arrays.examples import examples

import dlx
from dlx._core import native

np = pytest.importorskip("numpy")
hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

INDEX = st.integers(-6, 6)
SLICE = st.builds(slice, st.none() | INDEX, st.none() | INDEX, st.none() | st.sampled_from([-2, -1, 1, 2]))
LIST_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), INDEX),
        st.tuples(st.just("get"), SLICE),
        st.tuples(st.just("set"), INDEX, st.integers(0, 9)),
        st.tuples(st.just("set slice"), SLICE, st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("del"), INDEX | SLICE),
        st.tuples(st.just("insert"), INDEX, st.integers(0, 9)),
        st.tuples(st.just("append"), st.integers(0, 9)),
        st.tuples(st.just("pop"), INDEX),
        st.tuples(st.just("extend"), st.lists(st.integers(0, 9), max_size=3)),
        st.tuples(st.just("own"), SLICE, SLICE),
        st.tuples(st.just("reverse")),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(
            st.just("behind"), st.sampled_from(["append", "pop", "reverse", "clear", "insert"]), st.integers(0, 9)
        ),
    ),
    max_size=25,
)


class Numbers:
    """Return always the same array for a number."""

    def __init__(self):
        self.made = [np.full(1, n, "u1") for n in range(10)]

    def __getitem__(self, n):
        return self.made[n]


def number(tensor):
    """Return the number of an array."""
    return bytes(memoryview(tensor))[0]


def outcome(call):
    """Return the result of a call, or the type of its error."""
    try:
        return call()
    except (LookupError, ValueError, TypeError) as error:
        return type(error)


def step_list(target, step, item, find):
    """Run one step with a list or a view; return its result in numbers."""
    name, *rest = step
    if name == "get":
        got = outcome(lambda: target[rest[0]])
        return got if isinstance(got, type) else [find(x) for x in got] if isinstance(rest[0], slice) else find(got)
    if name == "set":
        return outcome(lambda: target.__setitem__(rest[0], item(rest[1])))
    if name == "set slice":
        return outcome(lambda: target.__setitem__(rest[0], [item(n) for n in rest[1]]))
    if name == "own":
        return outcome(lambda: target.__setitem__(rest[0], target[rest[1]]))
    if name == "del":
        return outcome(lambda: target.__delitem__(rest[0]))
    if name == "remove":
        held = [x for x in target if find(x) == rest[0]]
        return outcome(lambda: target.remove(held[0])) if held else None
    if name in ("append", "insert"):
        return outcome(lambda: getattr(target, name)(*rest[:-1], item(rest[-1])))
    if name == "extend":
        return outcome(lambda: target.extend([item(n) for n in rest[0]]))
    got = outcome(lambda: getattr(target, name)(*rest))
    return find(got) if name == "pop" and not isinstance(got, type) else got


def behind(source, name, item):
    """Change the source of a view directly."""
    if name in ("append", "insert"):
        source.append(item) if name == "append" else source.insert(0, item)
    elif source or name != "pop":
        getattr(source, name)()


@hypothesis.given(
    steps=LIST_STEPS, make=st.sampled_from([list, collections.UserList]), copy=st.sampled_from([None, True])
)
@hypothesis.settings(deadline=None, max_examples=examples(300))
def test_a_view_of_a_list_does_what_a_list_does(steps, make, copy):
    """The same steps, errors and contents; a live result is found again at its source's place."""
    numbers = Numbers()
    source, model = make([numbers[n] for n in (1, 2, 3)]), [1, 2, 3]
    view = dlx.convert(source, to="dlx", lazy=True, copy=copy)
    held = {}
    for step in steps:
        if step[0] == "behind":
            behind(source, step[1], numbers[step[2]])
            behind(model, step[1], step[2])
        else:
            wanted = step_list(model, step, lambda n: n, lambda n: n)
            assert step_list(view, step, lambda n: numbers[n], number) == wanted, step
        assert [number(x) for x in view] == model == [number(x) for x in source]
        assert len(view) == len(model) and all(not any(x is y for y in numbers.made) for x in view)
        for raw, result in zip(source, view, strict=True):
            assert held.setdefault(id(raw), (raw, result))[1] is result
        assert [number(x) for x in reversed(view)] == model[::-1]


DICT_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["get", "del", "pop", "pop default"]), st.sampled_from("abcd")),
        st.tuples(st.sampled_from(["set", "setdefault", "update"]), st.sampled_from("abcd"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["popitem", "clear", "behind"])),
    ),
    max_size=25,
)


def step_dict(target, step, item, find):
    """Run one step with a dict or a view; return its result in numbers."""
    name, *rest = step
    shown = lambda got: got if isinstance(got, type) or got is None else find(got)  # noqa: E731
    if name == "get":
        return shown(target.get(*rest)), shown(outcome(lambda: target[rest[0]]))
    if name == "del":
        return outcome(lambda: target.__delitem__(*rest))
    if name in ("pop", "pop default"):
        return shown(outcome(lambda: target.pop(rest[0], *([None] if "default" in name else []))))
    if name == "set":
        return outcome(lambda: target.__setitem__(rest[0], item(rest[1])))
    if name == "setdefault":
        return shown(target.setdefault(rest[0], item(rest[1])))
    if name == "update":
        return target.update({rest[0]: item(rest[1])})
    if name == "popitem":
        got = outcome(target.popitem)
        return got if isinstance(got, type) else (got[0], find(got[1]))
    return target.clear()


@hypothesis.given(steps=DICT_STEPS, make=st.sampled_from([dict, collections.OrderedDict]))
@hypothesis.settings(deadline=None, max_examples=examples(300))
def test_a_view_of_a_dict_does_what_a_dict_does(steps, make):
    """The same steps, errors, order and contents."""
    numbers = Numbers()
    source, model = make(a=numbers[1], b=numbers[2]), make(a=1, b=2)
    view = dlx.convert(source, to="dlx", lazy=True)
    for step in steps:
        if step[0] == "behind":
            source["z"], model["z"] = numbers[7], 7
        else:
            assert step_dict(view, step, lambda n: numbers[n], number) == step_dict(
                model, step, lambda n: n, lambda n: n
            ), step
        assert [(k, number(x)) for k, x in view.items()] == list(model.items()) and list(view) == list(source)
        assert [number(x) for x in view.values()] == list(model.values()) and len(view) == len(model)
        assert all(view[k] is view[k] and k in view for k in model)


def test_random_programs_leave_nothing():
    """Afterwards no managed tensor is alive."""
    gc.collect()
    assert native.live() == 0
