"""Random trees with shared parts and cycles, compared to a reference of ten lines."""

from __future__ import annotations

import collections
import dataclasses
import gc
import types

import pytest
from support.arrays.examples import examples

import dlx
from dlx import errors

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    items: list


@dataclasses.dataclass(frozen=True)
class Frozen:
    items: tuple


class Rows(list):
    pass


class Cycle(Exception):
    pass


def reference(tree, is_array, convert, memo):
    """Return the same containers around converted arrays: a minimal `dlx.convert`."""
    kind, key = type(tree), id(tree)
    if key in memo:
        if memo[key] is Cycle:
            raise Cycle
        return memo[key]
    again = lambda child: reference(child, is_array, convert, memo)  # noqa: E731
    if is_array(tree):
        memo[key] = convert(tree)
    elif kind in (list, Rows, collections.deque):
        memo[key] = kind()
        memo[key].extend(map(again, tree))
    elif kind in (dict, collections.OrderedDict, collections.UserDict):
        memo[key] = kind()
        memo[key].update([(k, again(child)) for k, child in tree.items()])
    elif kind is Record:
        memo[key] = Record([])
        memo[key].items = again(tree.items)
    elif kind in (tuple, Point, Frozen):
        memo[key] = Cycle
        children = list(map(again, (tree.items,) if kind is Frozen else tree))
        memo[key] = tuple(children) if kind is tuple else kind(*children)
    return memo.get(key, tree)


def alike(a, b, met, arrays):
    """Return whether two graphs have the same types, keys, order, sharing and cycles; collect pairs of arrays."""
    if type(a) is not type(b):
        return False
    if id(a) in met:
        return met[id(a)] is b
    if isinstance(a, dlx.Tensor):
        met[id(a)] = b
        arrays.append((a, b))
        return True
    if isinstance(a, collections.abc.Mapping):
        met[id(a)] = b
        return list(a) == list(b) and all(alike(a[k], b[k], met, arrays) for k in a)
    if isinstance(a, list | tuple | collections.deque):
        if a != ():
            met[id(a)] = b
        return len(a) == len(b) and all(alike(x, y, met, arrays) for x, y in zip(a, b, strict=True))
    if isinstance(a, Record | Frozen):
        met[id(a)] = b
        return alike(a.items, b.items, met, arrays)
    return a is b


KINDS = {
    "list": list,
    "rows": Rows,
    "deque": collections.deque,
    "tuple": tuple,
    "dict": lambda parts: dict(enumerate(parts)),
    "ordered": lambda parts: collections.OrderedDict(zip("cbadefgh", parts, strict=False)),
    "userdict": lambda parts: collections.UserDict({str(i): part for i, part in enumerate(parts)}),
    "point": lambda parts: Point(parts, tuple(parts)),
    "record": lambda parts: Record(list(parts)),
    "frozen": lambda parts: Frozen(tuple(parts)),
}
PLAIN = ["list", "tuple", "dict"]  # containers that the walk in C supports


@st.composite
def graphs(draw, kinds):
    """Draw a container of earlier objects, some with later children: cycles."""
    nodes = [dlx.convert(bytearray([i]), to="dlx") for i in range(4)] + [None, "text", 7, ()]
    for _ in range(draw(st.integers(1, 12))):
        parts = [nodes[i] for i in draw(st.lists(st.integers(0, len(nodes) - 1), max_size=6))]
        nodes.append(KINDS[draw(st.sampled_from(kinds))](parts))
    for _ in range(draw(st.integers(0, 3))):
        node, child = nodes[draw(st.integers(8, len(nodes) - 1))], nodes[draw(st.integers(0, len(nodes) - 1))]
        if isinstance(node, list | collections.deque):
            node.append(child)
        elif isinstance(node, collections.abc.MutableMapping):
            node["more"] = child
    return nodes[-1]


def agrees(tree, **options):
    """Compare one conversion with the reference."""

    def convert(tensor):
        return dlx.convert(tensor, to="dlx", copy=True) if options else tensor

    try:
        wanted = reference(tree, lambda obj: isinstance(obj, dlx.Tensor), convert, {})
    except Cycle:
        with pytest.raises(errors.ConversionError, match="contains itself"):
            dlx.convert(tree, to="dlx", **options)
        return
    before = reference(tree, lambda obj: False, None, {})
    for call in (dlx.convert, dlx.convert.__wrapped__):
        result, arrays = call(tree, to="dlx", **options), []
        assert alike(wanted, result, {}, arrays) and alike(result, wanted, {}, [])
        assert all(bytes(a) == bytes(b) and (a is b) is (not options) for a, b in arrays)
        assert alike(tree, before, {}, [])  # the source is as it was


@hypothesis.given(tree=graphs(PLAIN))
@hypothesis.settings(deadline=None, max_examples=examples(300))
def test_random_trees_of_built_in_containers_agree_with_the_reference(tree):
    """The walks in C and in Python keep types, order, sharing and cycles."""
    agrees(tree)
    agrees(tree, copy=True)


@hypothesis.given(tree=graphs(list(KINDS)))
@hypothesis.settings(deadline=None, max_examples=examples(300))
def test_random_trees_of_many_containers_agree_with_the_reference(tree):
    """The same for subclasses, named tuples, records and user containers."""
    agrees([tree])  # as the root a record without an array is refused
    agrees([tree], copy=True)


# ---- the results, by another walk than ours --------------------------------------------------------------------------


def leaves(tree, kind):
    """Return all objects of a type in a tree, by the garbage collector's references."""
    found, seen, waiting = [], set(), [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, kind):
            found.append(each)
        elif id(each) not in seen and not isinstance(each, type | types.ModuleType | types.FunctionType):
            seen.add(id(each))
            waiting.extend(gc.get_referents(each))
    return found


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_array_of_the_source_is_left_in_the_result(np, torch, kind):
    """All arrays are converted without copies, and converting back returns the first memory."""
    x, y = np.arange(3.0), np.ones((2, 2))
    tree = KINDS[kind]([x, [y, 1], {"k": (x, None)}])
    result = dlx.convert(tree, to="torch")
    assert type(result) is type(tree) and result is not tree
    assert {t.data_ptr() for t in leaves(result, torch.Tensor)} == {x.ctypes.data, y.ctypes.data}
    assert not leaves(result, np.ndarray) and not leaves(tree, torch.Tensor)
    back = dlx.convert(result, to="numpy")
    assert type(back) is type(tree) and not leaves(back, torch.Tensor)
    assert {a.ctypes.data for a in leaves(back, np.ndarray)} == {x.ctypes.data, y.ctypes.data}


def test_an_objects_own_protocol_comes_first(np):
    """A list with __dlx_tree__ is flattened and rebuilt by it; its children have paths like [i]."""

    class Box(list):
        def __init__(self, inside):
            self.inside = inside

        def __dlx_tree__(self):
            return [self.inside], lambda children: Box(*children)

    result = dlx.convert([Box(np.ones(2))], to="dlx")
    assert type(result[0]) is Box and isinstance(result[0].inside, dlx.Tensor)
    with pytest.raises(errors.DTypeError) as caught:
        dlx.convert([Box(np.array(["x"]))], to="dlx")
    assert caught.value.where == "obj[0][0]"


def test_a_container_that_changes_while_it_is_walked_does_no_harm(np):
    """Children are read atomically: later changes by a producer have no effect."""
    tree = []

    class Clearing:
        def __dlpack__(self, *, max_version=None):
            tree.clear()
            return dlx.convert(bytearray(2), to="dlx").__dlpack__(max_version=max_version)

    tree += [Clearing(), np.ones(2), [np.ones(3)]]
    result = dlx.convert(tree, to="dlx")
    assert [x.shape for x in (result[0], result[1], result[2][0])] == [(2,), (2,), (3,)] and tree == []


def test_types_of_arrays_and_containers_are_objects_that_pass_through(np):
    """Classes are neither arrays nor containers."""
    things = [np.ndarray, dlx.Tensor, Point, Record, dict, Rows]
    assert all(a is b for a, b in zip(dlx.convert(things, to="dlx"), things, strict=True))
