"""Eager trees: the same containers around converted arrays; identity, cycles, depth; objects that pass through."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import sys
import time
import types
import typing

import pytest

import dlx
from dlx import errors


class Point(typing.NamedTuple):
    x: object
    y: object = 7


class Named(collections.namedtuple("Base", "x y")):
    def __new__(cls, x):
        raise AssertionError("a rebuilt tuple does not call __new__")


class Triple(tuple):
    pass


class Bag(dict):
    pass


class Rows(list):
    pass


class Checked(dict):
    """Items are also attributes, like in transformers' ModelOutput."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value


class SelfDict(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Ring(collections.deque):
    pass


class Encoding(collections.UserDict):
    """Like transformers' BatchEncoding: a UserDict with more than items."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Table(collections.UserList):
    pass


class Wrapper(collections.abc.MutableMapping):
    """A mapping with unknown storage, which a shallow copy would share."""

    def __init__(self, items, note=None):
        self._items = dict(items)
        self.note = note

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        raise AssertionError("dlx must not assign to a copy with unknown storage")

    __delitem__ = __setitem__

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Series(collections.abc.Sequence):
    def __init__(self, *items):
        self._items = items

    def __getitem__(self, i):
        return self._items[i]

    def __len__(self):
        return len(self._items)


class Generated(collections.abc.Mapping):
    """Creates its values on each access, so that a copy cannot contain others."""

    def __getitem__(self, key):
        if key != "a":
            raise KeyError(key)
        return [bytearray(2)]

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


@dataclasses.dataclass
class Record:
    x: object
    n: int = 3

    def __post_init__(self):
        self.calls = getattr(self, "calls", 0) + 1

    @functools.cached_property
    def derived(self):
        return self.x


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object


@dataclasses.dataclass(slots=True)
class Slotted:
    x: object
    y: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: object


@dataclasses.dataclass(kw_only=True)
class Keywords:
    x: object
    y: object = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass
class WithInitVar:
    x: object
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale):
        self.scaled = scale * 2


@dataclasses.dataclass
class WithClassDefault:
    x: object
    size: int = dataclasses.field(default=4, init=False)


@dataclasses.dataclass
class Child(Record):
    z: object = None


class Own:
    """An object with `__dlx_tree__`."""

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __dlx_tree__(self):
        return {"left": self.left, "right": self.right}, lambda children: Own(**children)


def leaf():
    """Return a tensor of 8 bytes."""
    return dlx.convert(bytearray(8), to="dlx")


def kept(obj, **options):
    """Convert to dlx.Tensor with a copy, so that every array changes."""
    return dlx.convert(obj, to="dlx", copy=True, **options)


def with_attribute(obj):
    """Return an object with an additional attribute."""
    obj.note = "kept"
    return obj


# name -> function that returns a container around an array
CONTAINERS = {
    "list": lambda a: [a, 1],
    "tuple": lambda a: (a, 1),
    "dict": lambda a: {"x": a, 2: 1},
    "OrderedDict": lambda a: with_attribute(collections.OrderedDict([("z", 1), ("x", a)])),
    "defaultdict": lambda a: collections.defaultdict(list, x=a),
    "deque": lambda a: collections.deque([1, a], maxlen=5),
    "Counter": lambda a: collections.Counter({"x": a}),
    "ChainMap": lambda a: collections.ChainMap({"x": a}, {"y": 1}),
    "mappingproxy": lambda a: types.MappingProxyType({"x": a}),
    "namespace": lambda a: types.SimpleNamespace(x=a, y=1),
    "namedtuple": lambda a: Point(a),
    "namedtuple with __new__": lambda a: with_attribute(tuple.__new__(Named, (a, 1))),
    "tuple subclass": lambda a: with_attribute(Triple((a, 1))),
    "structseq": lambda a: time.struct_time((a, 2, 3, 4, 5, 6, 7, 8, 9, "zone", 11)),
    "dict subclass": lambda a: with_attribute(Bag(x=a)),
    "list subclass": lambda a: with_attribute(Rows([a])),
    "deque subclass": lambda a: with_attribute(Ring([a], maxlen=3)),
    "UserDict": lambda a: collections.UserDict(x=a),
    "UserDict subclass": lambda a: Encoding({"x": a}, encodings=["e"]),
    "UserList": lambda a: collections.UserList([a]),
    "UserList subclass": lambda a: with_attribute(Table([a])),
    "Mapping": lambda a: Wrapper({"x": a}, note="kept"),
    "Sequence": lambda a: Series(a, 1),
    "dataclass": lambda a: with_attribute(Record(a)),
    "frozen dataclass": lambda a: Frozen(a),
    "slotted dataclass": lambda a: Slotted(a),
    "frozen slotted dataclass": lambda a: FrozenSlotted(a),
    "keyword dataclass": lambda a: Keywords(x=a),
    "dataclass with InitVar": lambda a: WithInitVar(a, 4),
    "dataclass with a default in its class": lambda a: WithClassDefault(a),
    "derived dataclass": lambda a: Child(a, z=[a]),
    "own protocol": lambda a: Own(a, 1),
}


def arrays_in(obj):
    """Return the arrays directly in a container."""
    if isinstance(obj, collections.ChainMap):
        parts = [value for mapping in obj.maps for value in mapping.values()]
    elif isinstance(obj, collections.abc.Mapping):
        parts = list(obj.values())
    elif isinstance(obj, collections.abc.Iterable):
        parts = list(obj)
    elif dataclasses.is_dataclass(obj):
        parts = [getattr(obj, f.name) for f in dataclasses.fields(obj) if hasattr(obj, f.name)]
    else:
        parts = list(vars(obj).values())
    return [part for part in parts if isinstance(part, dlx.Tensor)]


def attributes(obj):
    """Return the attributes that must be kept."""
    return {name: value for name, value in getattr(obj, "__dict__", {}).items() if name in ("note", "scaled", "calls")}


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_exact_type_is_kept_and_the_input_is_not_touched(name):
    """The result is a new container of the same type, with converted arrays, attributes and order."""
    array = leaf()
    source = CONTAINERS[name](array)
    before = (arrays_in(source), attributes(source), repr(source))
    result = kept(source)
    assert type(result) is type(source) and result is not source
    assert (arrays_in(source), attributes(source), repr(source)) == before and arrays_in(source)[0] is array
    (converted,) = arrays_in(result)
    assert converted is not array and converted.nbytes == 8 and not dlx.shares_memory(converted, array)
    assert attributes(result) == attributes(source)


@pytest.mark.parametrize("name", CONTAINERS)
def test_lists_of_containers_share_what_they_shared(name):
    """A repeated container or array has one result; equal ones stay separate."""
    array = leaf()
    one, twin = CONTAINERS[name](array), CONTAINERS[name](array)
    a, b, c, d = kept([one, one, twin, array])
    assert a is b and a is not c
    assert arrays_in(a)[0] is d and arrays_in(c)[0] is d


def test_order_and_keys_are_kept():
    """Keys of any type are the same objects in the same order."""
    keys = ["b", 2, ("t", 1), None, 1.5, b"a", frozenset({1})]
    result = kept(dict.fromkeys(keys, leaf()))
    assert all(one is other for one, other in zip(result, keys, strict=True))


def test_a_default_factory_and_a_maxlen_go_on_working():
    """A defaultdict still creates defaults, but not by being read; a deque keeps its maxlen."""
    source = collections.defaultdict(list, x=leaf())
    result = kept(source)
    assert result["missing"] == [] and "missing" not in source
    result = kept(collections.deque([leaf(), 2], maxlen=2))
    result.append(3)
    assert list(result) == [2, 3] and result.maxlen == 2


def test_a_proxy_keeps_the_type_behind_it():
    """A mappingproxy over an OrderedDict becomes one over a new OrderedDict."""
    source = types.MappingProxyType(collections.OrderedDict(x=leaf()))
    assert "OrderedDict" in repr(kept(source))


def test_a_structseq_keeps_its_hidden_fields():
    """os.stat_result and struct_time have fields that are not elements."""
    result = kept(CONTAINERS["structseq"](leaf()))
    assert result.tm_zone == "zone" and result.tm_gmtoff == 11
    stat = os.stat_result(range(10), {"st_atime": 5.0})
    assert kept([stat])[0] is stat


def test_hidden_fields_and_missing_ones_of_dataclasses():
    """Unset init=False fields stay unset; __post_init__ does not run again; cached values are dropped."""
    source = Keywords(x=leaf())
    assert not hasattr(kept(source), "y")
    source.y = leaf()
    assert kept(source).y is not source.y
    record = Record(leaf())
    assert record.derived is record.x
    result = kept(record)
    assert result.calls == 1 and result.derived is result.x


def test_items_that_are_attributes_too_change_in_both():
    """Items and attributes of ModelOutput or `self.__dict__ = self` stay equal."""
    for source in (Checked(), SelfDict(x=leaf())):
        source["x"] = leaf()
        result = kept(source)
        assert result["x"] is result.x and result["x"] is not source["x"] and source.x is source["x"]


def test_attrs_classes(np):
    """All kinds of attrs classes are records: normal, frozen, slotted, with a cached hash."""
    attrs = pytest.importorskip("attrs")

    @attrs.define
    class Slots:
        x: object
        _private: object = None

    @attrs.frozen
    class Fixed:
        x: object

    @attrs.define(slots=False)
    class Open:
        x: object = attrs.field(validator=attrs.validators.instance_of(np.ndarray))

    @attrs.frozen(cache_hash=True, eq=True)
    class Hashed:
        x: object

    array = np.ones(2)
    for source in (Slots(array, array), Fixed(array), Open(array), Hashed(array)):
        result = dlx.convert(source, to="dlx")
        assert type(result) is type(source) and type(result.x) is dlx.Tensor and source.x is array
    assert dlx.convert(Slots(array, array), to="dlx")._private is not array
    source = Hashed((1, array.tobytes()))
    hash(source)
    assert hash(kept([Hashed(leaf())])[0]) is not None
    assert dlx.convert([Fixed(1)], to="dlx") == [Fixed(1)]


@pytest.mark.parametrize("empty", [[], (), {}, set(), frozenset(), collections.deque(), collections.OrderedDict()])
def test_empty_containers(empty):
    """An empty container stays empty; a mutable one is a new object."""
    result = dlx.convert(empty, to="dlx")
    assert type(result) is type(empty) and result == empty
    assert (result is empty) is isinstance(empty, tuple | frozenset)


def test_an_untouched_subtree_is_reused_only_where_it_is_immutable():
    """Tuples and frozen records without arrays are returned unchanged; lists and dicts never are."""
    fixed, frozen, point = (1, ("a", None)), Frozen(2), Point(1)
    inner: list = [1]
    source = [fixed, frozen, point, inner, (inner,), {"k": 1}]
    for result in (kept(source), dlx.convert(source, to="dlx")):
        assert result == source
        assert [one is other for one, other in zip(result, source, strict=True)] == [True] * 3 + [False] * 3
        assert result[4][0] is result[3]


def subclass_that_needs(base, fill):
    """Return a filled object of a subclass of `base` with a different constructor."""

    class Special(base):
        __slots__ = ("mark",) if base.__dictoffset__ else ("mark", "__dict__")

        def __init__(self, need, *, also):
            super().__init__()
            self.need, self.mark = need, also
            fill(self)

        def __setitem__(self, key, value):
            self.writes = getattr(self, "writes", 0) + 1
            super().__setitem__(key, value)

    return Special("need", also="mark")


@pytest.mark.parametrize(
    "base",
    [dict, collections.OrderedDict, collections.Counter, collections.UserDict, list, collections.deque,
     collections.UserList, collections.defaultdict],
)  # fmt: skip
def test_a_subclass_whose_constructor_takes_other_arguments_keeps_everything(base):
    """Attributes, slots, order and factory are kept without the constructor; __setitem__ gets only changes."""
    array, other = leaf(), leaf()
    many = base in (list, collections.deque, collections.UserList)

    def fill(new):
        if many:
            new.extend([array, 1, other])
        else:
            for key, value in (("z", array), ("a", 1), ("y", other)):
                base.__setitem__(new, key, value)
        if base is collections.defaultdict:
            new.default_factory = list

    source = subclass_that_needs(base, fill)
    result = kept(source)
    assert type(result) is type(source) and result is not source
    assert result.need == "need" and result.mark == "mark"
    values = list(result) if many else [result[key] for key in ("z", "a", "y")]
    assert many or list(result) == ["z", "a", "y"]
    assert values[1] == 1 and all(type(v) is dlx.Tensor for v in (values[0], values[2]))
    assert values[0] is not array and values[2] is not other
    assert result.writes == 2 and not hasattr(source, "writes")
    if base is collections.defaultdict:
        assert result["new"] == [] and result.default_factory is list
    inside = subclass_that_needs(base, fill)
    inside.append(inside) if many else inside.__setitem__("self", inside)
    again = kept(inside)
    assert (again[3] if many else again["self"]) is again and again.need == "need"


def test_subclasses_of_sets_and_of_bounded_deques():
    """Copying does not call their constructors."""

    class Tags(set):
        def __init__(self, need, *members):
            super().__init__(members)
            self.need = need

    class Fixed(frozenset):
        def __new__(cls, need, *members):
            new = super().__new__(cls, members)
            new.need = need
            return new

    class Last(collections.deque):
        def __init__(self, need, size):
            super().__init__(maxlen=size)
            self.need = need

    for made in (Tags("n", leaf(), 1), Fixed("n", leaf(), 1)):
        result = kept(made)
        assert type(result) is type(made) and result.need == "n" and 1 in result and len(result) == 2
    last = Last("n", 2)
    last.extend([leaf(), leaf(), leaf()])
    result = kept(last)
    assert type(result) is Last and result.maxlen == 2 and len(result) == 2 and result.need == "n"


def test_a_class_that_says_how_it_is_copied_is_copied_so():
    """__copy__, __reduce__ and similar methods are used."""

    class Counted(dict):
        copies = 0

        def __copy__(self):
            new = Counted(self)
            new.copies = self.copies + 1
            return new

    result = kept(Counted(x=leaf()))
    assert type(result) is Counted and result.copies == 1 and type(result["x"]) is dlx.Tensor


def test_sets():
    """A set of hashable arrays is converted; unhashable results are an error."""
    array = leaf()
    result = kept({array, 1})
    assert type(result) is set and 1 in result and array not in result and len(result) == 2
    assert type(kept(frozenset({array}))) is frozenset
    np = pytest.importorskip("numpy")
    with pytest.raises(
        errors.ConversionError, match=r"at obj\['s'\]: the container cannot hold .*unhashable"
    ) as caught:
        dlx.convert({"s": {array}}, to=np)
    assert isinstance(caught.value.__cause__, TypeError)
    assert caught.value.fix == "Pass its elements in a list: such arrays cannot be hashed."


# ---- objects that pass through ---------------------------------------------------------------------------------------


def test_whatever_is_no_array_passes_through(np):
    """Data, buffers, scalars and unknown objects are the same objects."""
    import datetime
    import enum

    things = [1, 1.5, True, None, "text", b"bytes", bytearray(2), memoryview(b"ab"), range(3), 2j, object(), len, int]
    things += [np.float32(1), np.dtype("f4"), datetime.date(2020, 1, 1), enum.Enum("Color", "RED").RED]
    things += [iter(range(1)), itertools.count(), slice(1), Ellipsis, collections.UserString("text"), {}.keys()]
    for result in (dlx.convert(things, to="dlx"), dlx.convert([Point(things)], to="dlx")[0].x):
        assert all(one is other for one, other in zip(result, things, strict=True))


def test_strict_refuses_what_it_does_not_know(np):
    """strict=True accepts data; for any other object, the error has its path."""
    import datetime
    import decimal
    import enum
    import pathlib

    plain = [1, None, "t", b"b", bytearray(1), np.float64(1), decimal.Decimal(1), pathlib.PurePath("a")]
    plain += [datetime.datetime(2020, 1, 1), range(2), enum.Enum("Color", "RED").RED, 1j, slice(2)]
    plain.append(dlx.empty((), "int8"))
    assert dlx.convert(plain, to="dlx", strict=True) == plain
    for odd in (object(), len, int, iter(range(2))):
        with pytest.raises(errors.AdapterNotFoundError, match=r"at obj\['a'\]\[0\]: .*strict=True") as caught:
            dlx.convert({"a": (odd,)}, to="dlx", strict=True)
        assert caught.value.where == "obj['a'][0]"


def test_strict_is_asked_by_plan_too():
    """The plan of a strict conversion contains the refusal."""
    plan = dlx.plan([object()], to="dlx", strict=True)
    assert plan.outcome == "refused" and isinstance(plan.error, errors.AdapterNotFoundError)


def test_modules_of_torch_are_not_entered(torch):
    """A module is refused, even if it is a sequence, because it cannot be rebuilt."""
    for module in (torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(1, 1)])):
        with pytest.raises(errors.AdapterNotFoundError, match=r"at obj\[1\]: .*state_dict") as caught:
            dlx.convert([1, module], to="numpy")
        assert caught.value.where == "obj[1]"


def test_at_the_root_whatever_can_be_a_source_is_one(np):
    """Bytes and scalars convert at the root, and pass through inside a tree."""
    assert type(dlx.convert(b"abc", to="numpy")) is np.ndarray
    assert type(dlx.convert(np.float32(1), to="dlx")) is dlx.Tensor
    assert dlx.convert([b"abc", np.float32(1)], to="numpy") == [b"abc", np.float32(1)]


@pytest.mark.parametrize("root", [1, None, "text", object(), len])
def test_a_root_that_is_neither_array_nor_container(root):
    """`convert` raises an AdapterNotFoundError, and `plan` contains it."""
    with pytest.raises(errors.AdapterNotFoundError):
        dlx.convert(root, to="dlx")
    assert isinstance(dlx.plan(root, to="dlx").error, errors.AdapterNotFoundError)


# ---- identity, cycles, depth -----------------------------------------------------------------------------------------


def test_the_same_array_at_three_paths_is_one_result(np):
    """Identity is kept; equal but distinct arrays stay separate."""
    array, other = np.ones(3), np.ones(3)
    for wrap in (list, tuple, Rows, collections.deque):
        a, b, inner, c = dlx.convert(wrap([array, array, {"x": array}, other]), to="dlx")
        assert a is b and inner["x"] is a and c is not a


def deep_tree(np, seed, *leaves):
    """Return a tree of lists, tuples and dicts of up to 300 children, with repeated arrays and containers."""
    random, met = np.random.default_rng(seed), list(leaves)

    def grown(depth):
        if depth == 0 or random.random() < 0.3:
            met.append(np.full(2, len(met)) if random.random() < 0.8 else met[random.integers(len(met))])
            return met[-1]
        children = [grown(depth - 1) for _ in range(random.choice([0, 3, 40, 300], p=[0.1, 0.5, 0.3, 0.1]))]
        kind = random.integers(3)
        met.append(children if kind == 0 else tuple(children) if kind == 1 else dict(enumerate(children)))
        return met[-1]

    return [np.zeros(2), *(grown(2) for _ in range(8)), *leaves]


def pairs_of(source, result):
    """Yield each object of a tree with its result, once per pair."""
    todo, met = [(source, result)], set()
    while todo:
        one, other = todo.pop()
        if (id(one), id(other)) in met:
            continue
        met.add((id(one), id(other)))
        yield one, other
        if type(one) in (list, tuple, dict):
            assert type(one) is type(other) and len(one) == len(other)
            if type(one) is dict:
                assert list(one) == list(other)
                one, other = one.values(), other.values()
            todo += zip(one, other, strict=True)


@pytest.mark.parametrize("seed", range(6))
def test_large_trees_in_which_much_stands_repeatedly(np, seed):
    """The walk in C grows its tables and finds repeated objects."""
    results = {}
    tree = deep_tree(np, seed, "text", None)
    result = dlx.convert(tree, to="dlx")
    for one, other in pairs_of(tree, result):
        assert results.setdefault(id(one), other) is other
        if isinstance(one, np.ndarray):
            assert np.asarray(other).ctypes.data == one.ctypes.data


@pytest.mark.parametrize("last", [(1, 2), 1.5])
def test_a_dict_that_the_fast_path_leaves_holds_no_more_than_before(np, last):
    """After an unsupported key, references copied from the dict are released."""
    array, key = np.ones(3), "a key of this test alone"
    tree = {key: array, **dict.fromkeys(range(100), array), last: array}
    before = sys.getrefcount(array), sys.getrefcount(key), sys.getrefcount(last)
    result = dlx.convert(tree, to="dlx")
    assert len(result) == 102 and result[key] is result[last]
    del result
    assert (sys.getrefcount(array), sys.getrefcount(key), sys.getrefcount(last)) == before


def test_many_small_containers_side_by_side_in_memory(np):
    """Several objects may have the same address bits in the first hash."""
    arrays = [np.ones(1) for _ in range(10)]
    tree = [(arrays[i % 10],) for i in range(20_000)]
    result = dlx.convert([tree, tree[::-1]], to="dlx")
    assert len({id(x) for x in result[0]}) == 20_000 and len({id(x[0]) for x in result[0]}) == 10
    assert all(one is other for one, other in zip(result[0], reversed(result[1]), strict=True))


def test_identity_does_not_outlive_the_call(np):
    """Reused addresses have no effect on later calls."""
    for _ in range(50):
        (result,) = dlx.convert([np.full(3, _)], to="dlx")
        assert np.asarray(result)[0] == _


class Fresh(collections.abc.Sequence):
    """Returns a new array on each access, whose address is soon reused."""

    def __init__(self, np, n):
        self.np, self.n = np, n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(i)
        return self.np.full(2, i)

    def __len__(self):
        return self.n


def test_elements_made_on_access_are_not_mixed_up(np):
    """Temporary arrays are kept alive; the container becomes a list."""
    result = dlx.convert([Fresh(np, 100)], to="dlx")[0]
    assert type(result) is list and [int(np.asarray(x)[0]) for x in result] == list(range(100))
    assert type(dlx.convert([Generated()], to="dlx")[0]) is dict


CYCLIC = {
    "list": (list, lambda c, x: c.append(x), lambda c: c[-1]),
    "dict": (dict, lambda c, x: c.update(me=x), lambda c: c["me"]),
    "deque": (lambda: collections.deque(maxlen=4), lambda c, x: c.append(x), lambda c: c[-1]),
    "OrderedDict": (collections.OrderedDict, lambda c, x: c.update(me=x), lambda c: c["me"]),
    "defaultdict": (lambda: collections.defaultdict(int), lambda c, x: c.update(me=x), lambda c: c["me"]),
    "dict subclass": (Bag, lambda c, x: c.update(me=x), lambda c: c["me"]),
    "list subclass": (Rows, lambda c, x: c.append(x), lambda c: c[-1]),
    "UserDict": (collections.UserDict, lambda c, x: c.update(me=x), lambda c: c["me"]),
    "namespace": (types.SimpleNamespace, lambda c, x: setattr(c, "me", x), lambda c: c.me),
    "dataclass": (lambda: Slotted(None), lambda c, x: setattr(c, "x", x), lambda c: c.x),
}


@pytest.mark.parametrize("inside", [None, "list", "tuple"])
@pytest.mark.parametrize("name", CYCLIC)
def test_mutable_cycles_are_reproduced(name, inside):
    """A container that contains itself, directly or indirectly, becomes a new one that does."""
    make, put, get = CYCLIC[name]
    source = make()
    put(source, {"list": [source], "tuple": (source, leaf()), None: source}[inside])
    result = kept([source, leaf()])[0]  # a root that holds no array but itself would be refused
    assert type(result) is type(source) and result is not source
    me = get(result)
    assert (me if inside is None else me[0]) is result


def tuple_cycle():
    """Return a tuple that contains itself."""
    inner: list = []
    outer = (inner,)
    inner.append(outer)
    return outer


def frozen_cycle():
    """Return a frozen record that contains itself."""
    inner: dict = {}
    outer = Frozen(inner)
    inner["k"] = outer
    return outer


def own_cycle():
    """Return an object with `__dlx_tree__` that contains itself."""
    inner: list = []
    outer = Own(inner, 1)
    inner.append(outer)
    return outer


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (tuple_cycle, "obj[0][0]"),
        (lambda: [1, tuple_cycle()], "obj[1][0][0]"),
        (frozen_cycle, "obj.x['k']"),
        (own_cycle, "obj['left'][0]"),
    ],
    ids=["tuple", "tuple in a list", "frozen dataclass", "own protocol"],
)
def test_a_cycle_through_what_is_immutable_raises_with_its_path(make, where):
    """A tuple cannot exist before its elements: the error has the path of the cycle."""
    with pytest.raises(errors.ConversionError, match="contains itself") as caught:
        dlx.convert(make(), to="dlx")
    assert caught.value.where == where
    assert caught.value.fix == "Make it a list, or break the cycle."
    assert dlx.plan(make(), to="dlx").error.where == where


DEEP = """
    import collections, dataclasses, threading, types
    import dlx

    @dataclasses.dataclass
    class Node:
        next: object

    class Rows(list):
        pass

    Pair = collections.namedtuple("Pair", "a b")
    array = dlx.convert(bytearray(4), to="dlx")

    def walk(wrap, levels, *ways):
        deep = array
        for _ in range(levels):
            deep = wrap(deep)
        for options in ways:
            result = dlx.convert(deep, to="dlx", **options)
            assert type(result) is type(deep)
        plan = dlx.plan(deep, to="dlx")
        assert len(plan.leaves) == 1 and " ... " in plan.leaves[0].path and len(plan.leaves[0].path) < 5000

    def small_stack():
        for wrap in (lambda x: (x,), lambda x: {"k": x}, lambda x: Rows([x]), Node, lambda x: Pair(x, 1),
                     lambda x: collections.UserDict(k=x), lambda x: types.SimpleNamespace(x=x)):
            walk(wrap, 10_000, {}, {"copy": True})  # in C if possible, and in Python

    walk(lambda x: [x], 100_000, {}, {"copy": True})
    threading.stack_size(512 << 10)
    failed = []
    threading.excepthook = failed.append
    thread = threading.Thread(target=small_stack)
    thread.start()
    thread.join()
    assert not failed, failed
    print("alive")
"""


@pytest.mark.slow
def test_100_000_levels_convert_and_the_process_lives(python):
    """Nothing recurses: not the walk, nor the rebuilding, nor the deallocation.

    The other containers have a tenth of the levels on a sixteenth of the stack: fewer bytes per level for a recursion.
    """
    assert python(DEEP, args=(), timeout=280).strip() == "alive"


@pytest.mark.parametrize("levels", [0, 1, 31, 32, 63, 64, 65, 97, 300])
def test_paths_in_plans_are_those_of_errors(levels):
    """Long paths show the first and last steps, and are not walked for each leaf."""
    tree, way = [1, dlx.convert(bytearray(4), to="dlx")], [1]
    for level in range(levels):
        tree, step = ({"k": tree, "z": 2}, "k") if level % 3 else ((3, tree), 1)
        way.append(step)
    way.reverse()
    plan = dlx.plan(tree, to="dlx")
    assert plan.leaves[0].path == errors.path_text(way)
    beside = {"k": "z", 1: 0}
    expected = [errors.path_text([*way[:level], beside[way[level]]]) for level in range(levels + 1)]
    assert [path for path, _ in plan.passed] == expected


def test_what_never_ends_raises(monkeypatch):
    """A container that creates a new one inside itself forever is refused at a maximum depth."""
    from dlx._engine import tree as trees

    class Endless(collections.abc.Sequence):
        def __getitem__(self, i):
            if i:
                raise IndexError(i)
            return Endless()

        def __len__(self):
            return 1

    monkeypatch.setattr(trees, "MAX_DEPTH", 500)
    with pytest.raises(errors.ConversionError, match="more than 500 levels"):
        dlx.convert(Endless(), to="dlx")


# ---- options and targets ---------------------------------------------------------------------------------------------


def test_mixed_frameworks_all_go_to_the_target(np, torch):
    """Arrays of all frameworks in any order become the target's."""
    arrays = [np.ones(2), torch.ones(2), dlx.convert(b"ab", to="dlx")]
    for source in (arrays, arrays[::-1], Point(*arrays[:2])):
        assert {type(x) for x in dlx.convert(source, to="torch")} == {torch.Tensor}
        assert {type(x) for x in dlx.convert(source, like=arrays[0])} == {np.ndarray}


def test_arrays_of_the_target_stay_what_they_are(torch):
    """The new container has the same tensors, with their graph."""
    source = [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(1))]
    result = dlx.convert(source, to="torch")
    assert result is not source and result[0] is source[0] and result[1] is source[1]
    detached = dlx.convert(source, to="torch", detach=True)
    assert not any(x.requires_grad for x in detached)


@pytest.mark.parametrize("options", [{"copy": True}, {"copy": False}, {"device": "cpu"}, {"detach": True}], ids=str)
def test_options_hold_for_every_array(np, torch, options):
    """Options have the same effect as for a single array."""
    array = np.arange(4.0)
    for source in ([array, {"a": array}], Point(array, [array])):
        first = dlx.convert(source, to="torch", **options)[0]
        assert dlx.shares_memory(first, array) is (options != {"copy": True})


def test_a_broken_target_is_said_before_the_tree_is_looked_at():
    """The target is checked first."""
    with pytest.raises(errors.AdapterNotFoundError, match="unknown target"):
        dlx.convert([object()], to="nosuch")
    with pytest.raises(ValueError, match="errors must be"):
        dlx.convert([], to="dlx", errors="ignore")


def test_the_python_path_and_the_fast_path_agree_on_a_mixed_tree(np, torch):
    """Containers that C leaves to Python have the same results."""
    plain = {"a": [np.arange(3.0), (torch.ones(2), 1)], "b": None}
    odd = {**plain, ("t",): collections.OrderedDict(x=np.arange(4.0)[::-1])}
    for target in ("torch", "numpy", "dlx"):
        one, other = dlx.convert(plain, to=target), dlx.convert(odd, to=target)
        slow = dlx.convert.__wrapped__(plain, to=target)
        for tree in (other, slow):
            assert type(tree["a"][0]) is type(one["a"][0]) and type(tree["a"][1][0]) is type(one["a"][1][0])
            assert dlx.shares_memory(tree["a"][0], one["a"][0]) and dlx.shares_memory(tree["a"][1][0], one["a"][1][0])


class Shadow(dict):
    """A dict that also stores its items in an attribute."""

    def __init__(self, *args):
        super().__init__(*args)
        self.store = dict(self)

    def __setitem__(self, key, value):
        self.store[key] = value
        super().__setitem__(key, value)

    def __getitem__(self, key):
        return self.store[key]


class Alias(collections.UserDict):
    """A dict whose copies share its storage."""

    def __copy__(self):
        new = type(self)()
        new.data = self.data
        return new


class Deeper(dict):
    """A dict that stores its items in a nested attribute, which copies share."""

    def __init__(self, *args):
        super().__init__(*args)
        self.store = types.SimpleNamespace(items=dict(self))

    def __setitem__(self, key, value):
        self.store.items[key] = value

    def __getitem__(self, key):
        return self.store.items[key]


@pytest.mark.parametrize("kind", [Shadow, Alias, Deeper])
def test_a_container_whose_copy_shares_its_storage_is_not_written_to(np, kind):
    """The source is unchanged and the result correct, although item assignment writes to shared storage."""
    array, other = np.zeros(2), np.ones(1)
    source = kind({"a": array, "b": other})
    new = dlx.convert(source, to="dlx")
    assert source["a"] is array and source["b"] is other
    assert type(new["a"]) is type(new["b"]) is dlx.Tensor
    assert type(new) is (dict if kind is Deeper else kind)


def test_a_mapping_behind_a_proxy_whose_copy_is_itself_is_not_written_to(np):
    """The result is a dict."""

    class Same(dict):
        def copy(self):
            return self

    array = np.zeros(2)
    inside = Same(a=array)
    new = dlx.convert(types.MappingProxyType(inside), to="dlx")
    assert inside["a"] is array and type(new) is dict and type(new["a"]) is dlx.Tensor


def changing(base):
    """Return a subclass whose item assignment stores a different object."""

    class Changing(base):
        def __setitem__(self, key, value):
            super().__setitem__(key, dlx.convert(value, to="dlx", copy=True) if is_armed else value)

    is_armed = False
    source = (
        Changing({"a": leaf(), "b": 1}) if issubclass(base, (dict, collections.UserDict)) else Changing([leaf(), 1])
    )
    is_armed = True
    return source


@pytest.mark.parametrize(
    "base",
    [dict, collections.OrderedDict, collections.UserDict, list, collections.deque, collections.UserList],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_subclass_that_changes_what_is_put_in_becomes_a_plain_container(np, base, nested):
    """The result contains the converted arrays, not the objects of the class."""
    source = changing(base)
    many = not hasattr(source, "keys")
    new = dlx.convert([source] if nested else source, to="numpy")
    new = new[0] if nested else new
    assert type(new) is (list if many else dict)
    old, made = (source[0], new[0]) if many else (source["a"], new["a"])
    assert type(made) is np.ndarray and dlx.shares_memory(made, old) and type(source).__name__ == "Changing"
    assert list(new) == ([made, 1] if many else ["a", "b"])


class Picky(dict):
    """A dict that refuses new values."""

    def __setitem__(self, key, value):
        raise TypeError("accepts no new values")


@pytest.mark.parametrize("kind", [dict, Picky])
@pytest.mark.parametrize("collect", [False, True])
def test_keys_that_raise_when_they_are_compared(np, collect, kind):
    """The error has a path and a cause."""

    class Key:
        armed = False

        def __hash__(self):
            return 7

        def __eq__(self, other):
            if self.armed:
                raise OSError("not to be compared")
            return self is other

    source = kind(zip((Key(), Key()), (np.zeros(1), np.zeros(1)), strict=True))
    Key.armed = True
    with pytest.raises(ExceptionGroup if collect else errors.ConversionError) as caught:
        dlx.convert([source], to="dlx", errors="collect" if collect else "raise")
    error = caught.value.exceptions[0] if collect else caught.value
    assert error.where == "obj[0]" and isinstance(error.__cause__, OSError)


# ---- containers that C converts by a rule ----------------------------------------------------------------------------


def _ruled(array):
    """Return records, named tuples and other containers of the fast path, around an array."""
    Named = collections.namedtuple("Named", "a b")
    Record = dataclasses.make_dataclass("Record", ["a", "b"])
    Frozen = dataclasses.make_dataclass("Frozen", ["a", "b"], frozen=True)
    Slotted = dataclasses.make_dataclass("Slotted", ["a", "b"], slots=True)
    one = Record(array, [array, "text"])
    one.more = array
    makes = [Named, Record, Frozen, Slotted, types.SimpleNamespace]
    made = [make(a=array, b=[array, (array, 1)]) for make in makes]
    made += [
        collections.OrderedDict(a=array, b=made[0]),
        collections.defaultdict(list, a=array, b=made[1]),
        collections.deque([array, made[2]], maxlen=5),
    ]
    return [*made, one, collections.ChainMap({"a": array}, {"b": [array]})]


@pytest.mark.parametrize("i", range(10))
def test_what_has_a_rule_is_converted_in_c_as_by_python(np, torch, monkeypatch, i):
    """Both paths keep types, attributes, order and identity, at the root and inside."""
    array = np.ones(2, "f4")
    source = _ruled(array)[i]
    for root in (source, [source, {"again": source}, array]):
        expected = dlx.convert(root, to="torch", errors="collect")  # the Python path
        with monkeypatch.context() as patch:
            patch.setattr("dlx._engine.batch.convert_tree", None)
            found = dlx.convert(root, to="torch")
        assert type(found) is type(root) and _shape_of(found) == _shape_of(expected) and "T0" in _shape_of(found)
    assert found[0] is found[1]["again"] and array.tolist() == [1, 1]


def _shape_of(obj):
    """Return a tree as text: types, keys in order, and which arrays are the same."""
    numbers = {}

    def text(obj):
        kind = type(obj).__name__
        if hasattr(obj, "__dlpack__"):
            return f"{kind[0]}{numbers.setdefault(id(obj), len(numbers))}"
        if isinstance(obj, dict):
            return f"{kind}{[(key, text(value)) for key, value in obj.items()]}"
        if isinstance(obj, collections.ChainMap):
            return f"{kind}{[text(each) for each in obj.maps]}"
        if isinstance(obj, list | tuple | collections.deque):
            return f"{kind}{[text(each) for each in obj]}"
        if hasattr(obj, "__slots__"):
            return f"{kind}{[(name, text(getattr(obj, name))) for name in obj.__slots__]}"
        return (
            f"{kind}{[(name, text(value)) for name, value in vars(obj).items()]}" if hasattr(obj, "__dict__") else obj
        )

    return text(obj)


@pytest.mark.parametrize("make", [lambda: "ab", lambda: b"ab", lambda: dlx.from_dlpack(bytearray(2))])
def test_children_in_anything_but_a_list_or_dict_are_refused(np, make):
    """An array or a text is not a sequence of children, although it has a length."""

    class Box:
        def __dlx_tree__(self):
            return make(), type(self)

    for obj in (Box(), [Box(), np.ones(1)]):
        with pytest.raises(
            errors.ConversionError, match=r"__dlx_tree__ returns its children as .*, not as a list or dict"
        ):
            dlx.convert(obj, to="numpy")


@pytest.mark.parametrize(
    "children", [list, tuple, collections.deque, dict, types.MappingProxyType, lambda found: found.values()]
)
def test_children_are_any_sequence_or_mapping(np, torch, children):
    """`rebuild` gets a list or dict."""

    class Box:
        def __dlx_tree__(self):
            named = {"a": np.ones(1), "b": 2}
            return children(
                named if children in (dict, types.MappingProxyType) or "lambda" in str(children) else [*named.values()]
            ), Made

    class Made:
        def __init__(self, children):
            self.children = children

    found = dlx.convert([Box()], to="torch")[0].children
    assert type(found) is (dict if children in (dict, types.MappingProxyType) else list)
    assert [type(each) for each in (found.values() if type(found) is dict else found)] == [torch.Tensor, int]


def test_a_rule_that_fails_is_said_by_the_python_path(np, torch):
    """The error has the path; cycles through records have the same result as in Python."""

    class Refusing(collections.namedtuple("Refusing", "a b")):
        def __iter__(self):
            raise RuntimeError("not to be read")

    with pytest.raises(errors.ConversionError, match=r"at obj\[1\]: .*cannot be flattened: RuntimeError: not to be"):
        dlx.convert([np.ones(1), tuple.__new__(Refusing, (np.ones(1), 2))], to="torch")
    Record = dataclasses.make_dataclass("Record", ["a", "b"])
    record = Record(np.ones(1), [])
    record.b.append(record)
    result = dlx.convert([record], to="torch")[0]
    assert result.b[0] is result and type(result.a) is torch.Tensor
    with pytest.raises(errors.DlxError, match=r"at obj\[0\]\.b\['k'\]"):
        dlx.convert([Record(np.ones(1), {"k": np.array(["x"])})], to="torch")
