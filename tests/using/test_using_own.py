"""`dlx.using`: returned arguments are the caller's objects, and other results are not."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping

import pytest

import dlx
from dlx._views.base import View
from dlx._views.factory import RecordView
from dlx._views.sequence import SequenceView

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: object
    y: object = 3


FRAMEWORKS = {
    "numpy": lambda: np.arange(4, dtype="f4"),
    "numpy backwards": lambda: np.arange(4, dtype="f4")[::-1],
    "numpy read-only": lambda: np.broadcast_to(np.float32(1), (4,)),
    "torch": lambda: torch.arange(4, dtype=torch.float32),
    "torch gradient": lambda: torch.ones(4, requires_grad=True),
    "dlx": lambda: dlx.convert(np.arange(4, dtype="f4"), to="dlx"),
}
INTO = {  # how two arrays are passed
    "bare": lambda a, b: (a, b),
    "list": lambda a, b: ([a, b],),
    "tuple": lambda a, b: ((a, b), b),
    "dict": lambda a, b: ({"a": a, "n": 3, 2.5: [b]},),
    "deque": lambda a, b: (collections.deque([a], 3), {"k": (b,)}),
    "named": lambda a, b: (Pair(a, b), a),
    "record": lambda a, b: (Record([a]), Record(a, b)),
    "ordered": lambda a, b: (collections.OrderedDict(b=b, a=a), "text"),
}
OUT = {  # how a function returns its arguments
    "first": lambda args: args[0],
    "last": lambda args: args[-1],
    "all": lambda args: args,
    "list": lambda args: list(args),
    "dict": lambda args: {"k": args[-1], "n": [None, args[0]]},
    "twice": lambda args: [args[0], (args[0], args[-1])],
    "record": lambda args: Record(args[0], {"deep": [args[-1]]}),
}


def calling(body, to, **options):
    """Decorate a function."""
    return dlx.using(to, detach=True, **options)(lambda *args: body(args))


def method(body, to, **options):
    """Decorate a method."""

    class Model:
        @dlx.using(to, detach=True, **options)
        def run(self, *args):
            return body(args)

    return Model().run


def generating(body, to, **options):
    """Decorate a generator, to which the first argument is sent."""

    @dlx.using(to, detach=True, **options)
    def steps(*args):
        sent = yield None
        yield body([sent])
        return body(args)

    def run(*args):
        running = steps(*args)
        next(running)
        running.send(args[0])
        try:
            next(running)
        except StopIteration as stop:
            return stop.value

    return run


def awaiting(body, to, **options):
    """Decorate a coroutine function."""

    @dlx.using(to, detach=True, **options)
    async def later(*args):
        return body(args)

    return lambda *args: asyncio.run(later(*args))


def parts(obj):
    """Return keys and elements of a container of the tests, or a view of one; None for other objects."""
    if isinstance(obj, Record | RecordView):
        return ["x", "y"], [obj.x, obj.y]
    if isinstance(obj, Mapping):
        return list(obj), list(obj.values())
    return (None, list(obj)) if isinstance(obj, list | tuple | collections.deque | SequenceView) else None


def below(args):
    """Return all containers in the arguments, except these."""
    found = [each for each in args if parts(each)]
    for each in found:
        found += [child for child in parts(each)[1] if parts(child)]
    return found


def check(result, wanted, callers, *, lazy):
    """Check that a result equals the undecorated function's result for the caller's objects."""
    if parts(wanted) is None or any(wanted is each for each in callers):
        if not lazy or not isinstance(result, View):
            assert result is wanted
            return
    else:
        assert type(result) is type(wanted) or (lazy and isinstance(result, View))
    (keys, children), (wanted_keys, wanted_children) = parts(result), parts(wanted)
    assert keys == wanted_keys
    for pair in zip(children, wanted_children, strict=True):
        check(*pair, callers, lazy=lazy)


PAIRS = list(itertools.product(FRAMEWORKS, repeat=2))


@pytest.mark.few(8)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("to", ["numpy", "torch", "dlx"])
@pytest.mark.parametrize("decorate", [calling, method, generating, awaiting])
def test_an_argument_that_is_handed_back_is_the_callers_own_object(decorate, to, lazy):
    """It holds for each framework, container and combination; lazily, containers may be views."""
    ways, step = itertools.product(OUT.values(), INTO.values()), (5 if lazy else 3) if decorate is calling else 11
    for first, (body, into) in enumerate(ways):  # each way tests a different share of the pairs
        for one, other in PAIRS[first % step :: step]:
            a, b = FRAMEWORKS[one](), FRAMEWORKS[other]()
            run = decorate(body, to, lazy=lazy)
            args = into(a, a if one == other else b)
            check(run(*args), body(args), below(args), lazy=lazy)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_out_idiom(lazy):
    """A function returns the argument that it wrote to."""
    a, out = np.ones(3, "f4"), torch.zeros(3)
    double = dlx.using("torch", lazy=lazy)(lambda x, *, out: torch.mul(x, 2, out=out))
    assert double(a, out=out) is out and out.tolist() == [2, 2, 2]
    halves = dlx.using("torch", lazy=lazy)(lambda x, *, out: {"out": [torch.mul(x, 0.5, out=out)], "new": x * 3})
    result = halves(a, out=out)
    assert result["out"][0] is out and type(result["new"]) is np.ndarray


@pytest.mark.parametrize("lazy", [False, True])
def test_a_view_of_an_argument_is_not_the_argument(lazy):
    """It is converted like any other result."""
    a, t = np.ones(3, "f4"), torch.ones(3)
    slices = dlx.using("torch", lazy=lazy)(lambda x, y: [x[:], y[:], y.view(3), x, y])
    result = slices(a, t)
    assert [type(each) for each in result] == [np.ndarray] * 4 + [torch.Tensor]
    assert result[3] is a and result[4] is t and all(each is not a for each in result[:3])
    assert dlx.shares_memory(result[0], a) and dlx.shares_memory(result[1], t)


@pytest.mark.parametrize("lazy", [False, True])
def test_another_framework_of_results_is_asked_for_of_arguments_too(lazy):
    """Only arguments of other frameworks are converted."""
    a, t = np.ones(3, "f4"), torch.ones(3)
    for name, own, other in (("numpy", a, t), ("torch", t, a)):
        same_ = dlx.using("torch", returns=name, lazy=lazy)(lambda x: x)
        both = same_([own, other, [own]])
        assert both[0] is own and type(both[1]) is type(own) and both[2][0] is own
        mine = [own, {"k": own}]
        assert same_(own) is own and same_(mine) is mine and type(same_(other)) is type(own)


def test_what_was_passed_as_it_is_comes_back_as_it_is():
    """Methods may return `self`, also in a container; its contents are neither converted nor flattened."""

    @dataclasses.dataclass
    class Model:
        weight: object
        names: object

        def fit(self, x):
            return self

        def both(self, x):
            return [x, (self, x * 2), {"self": self}]

    class Mine(torch.Tensor):
        def fit(self, x):
            return self

    a = np.ones(2, "f4")
    for options in ({}, {"lazy": True}, {"returns": "numpy"}, {"returns": "numpy", "lazy": True}):
        using = dlx.using("torch", **options)
        model = Model(torch.ones(2), np.array(["text"]))
        assert using(Model.fit)(model, a) is model
        result = using(Model.both)(model, a)
        assert result[0] is a and result[1][0] is model and result[2]["self"] is model
        assert type(result[1][1]) is np.ndarray and type(model.weight) is torch.Tensor
        mine = torch.ones(2).as_subclass(Mine)
        assert (using(Mine.fit)(mine, a) is mine) is ("returns" not in options)


def test_what_a_function_changed_is_not_the_callers_container():
    """Its arrays, and unchanged containers in it, are the caller's."""

    def change(tree):
        tree["new"] = tree["x"] + 1
        return tree

    for lazy in (False, True):
        tree = {"x": np.ones(1), "t": torch.ones(1), "in": [torch.ones(1), np.ones(1)]}
        result = dlx.using("torch", lazy=lazy)(change)(tree)
        assert result is not tree and "new" not in tree and type(result["new"]) is np.ndarray
        assert result["x"] is tree["x"] and result["t"] is tree["t"]
        assert result["in"][0] is tree["in"][0] and result["in"][1] is tree["in"][1]
        assert lazy or result["in"] is tree["in"]


def test_sets_and_keys_that_are_arrays():
    """Sets are compared without order, and arrays as keys by identity."""
    arrays = [dlx.convert(np.full(1, n), to="dlx") for n in range(9)]
    every = set(arrays)
    handed = dlx.using("torch")(lambda x: [x])
    assert handed(every)[0] is every
    first, second = torch.ones(2), torch.ones(2)
    table = {first: np.ones(1), second: 2}
    assert dlx.using("torch")(lambda x: x)(table) is table

    def other(x):
        x[torch.ones(2)] = x.pop(second)
        return x

    result = dlx.using("torch")(other)(table)
    assert result is not table and result[first] is table[first] and len(result) == 2


@pytest.mark.parametrize("inside", ["torch", "numpy", "dlx"])
@pytest.mark.parametrize("observed", [False, True])
def test_a_column_of_a_table_stays_as_the_function_got_it(inside, observed):
    """The caller has no object for it; a whole table is returned as the caller's object."""
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip(inside)
    table = pa.table({"a": [1, 2, 3], "b": [0.5, 1.0, 2.0]})
    batch = table.to_batches()[0]
    kind = type(dlx.convert(table, to=inside)["a"])
    with dlx.trace() if observed else contextlib.nullcontext():
        for given in (table, batch):
            call = lambda function, given=given, **options: dlx.using(inside, **options)(function)(given)  # noqa: E731
            assert type(call(lambda x: x["a"])) is kind
            found = call(lambda x: {"q": x["a"], "r": x, "s": [x["b"], x]})
            assert type(found["q"]) is type(found["s"][0]) is kind
            assert found["r"] is found["s"][1] is given
            assert [type(each) for each in call(lambda x: list(x.values()))] == [kind, kind]
            assert call(lambda x: {"a": x["a"], "b": x["b"]}).keys() == {"a", "b"}
            assert memoryview(call(lambda x: x["a"], returns="dlx")).tolist() == [1, 2, 3]
            assert memoryview(call(lambda x: [x], returns="dlx")[0]["a"]).tolist() == [1, 2, 3]
            rows = dlx.using(inside)(lambda x: (x[0]["a"], x[0], x))([given])
            assert type(rows[0]) is kind and rows[1] is given and rows[2] == [given]
            lazy = call(lambda x: {"q": x["a"], "r": x}, lazy=True)
            assert type(lazy["q"]) is kind
