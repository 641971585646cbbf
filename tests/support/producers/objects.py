"""Objects and containers that fail when they are inspected, iterated or copied; for `producers.cases`."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from collections.abc import Mapping

from support.producers.tensors import EXCEPTIONS

# ---- hostile objects -------------------------------------------------------------------------------------------------


class Pretender:
    """An object that claims another class."""

    def __init__(self, kind):
        self._kind = kind

    @property
    def __class__(self):
        return self._kind


def junk(case):
    """Return an object that is not a valid answer."""
    rng = case.rng
    return rng.choice((
        lambda: None, lambda: 0, lambda: -1, lambda: 1 << 70, lambda: "text", lambda: b"", lambda: (), list, dict,
        lambda: 1.5, lambda: float("nan"), object, lambda: NotImplemented, lambda: ..., lambda: type,
        lambda: (1, 2, 3), lambda: [1, 0], lambda: (1.0, 0), lambda: ("1", "0"), lambda: (1, None),
        lambda: (1 << 40, 0), lambda: (1, 1 << 70), lambda: True, lambda: range(3), lambda: iter(()),
        lambda: (n for n in "ab"), lambda: Pretender(int), lambda: Pretender(tuple), lambda: Trap(case),
        lambda: types.SimpleNamespace(shape=3), lambda: bytearray(3), lambda: (True, False),
        lambda: (Code.cpu, Code.cuda), lambda: Pair((1, 0)), lambda: hostile_class(case)(), lambda: sys,
    ))()  # fmt: skip


class Code(enum.IntEnum):
    """Device types as some frameworks represent them."""

    cuda = 0
    cpu = 1


class Pair(tuple):
    """A pair that cannot be read."""

    def __iter__(self):
        raise ValueError("no iteration")

    def __getitem__(self, i):
        raise ValueError("no item")

    def __len__(self):
        return 2


class Trap:
    """An object that raises, or returns junk, at its n-th inspection of any kind."""

    def __init__(self, case):
        own = object.__getattribute__(self, "__dict__")
        own["case"], own["left"] = case, case.rng.choice((0, 0, 1, 2, 3, 5, 8))
        own["make"] = case.rng.choice(EXCEPTIONS)
        own["once"] = case.chance(0.5)
        case.is_steady = False

    def _step(self):
        own = object.__getattribute__(self, "__dict__")
        left = own["left"]
        own["left"] = left - 1
        if left == 0 or (left < 0 and not own["once"]):
            own["case"].fail(own["make"])

    def __getattribute__(self, name):
        step = object.__getattribute__(self, "_step")
        step()
        return object.__getattribute__(self, name)

    def _any(self, *arguments, **options):
        object.__getattribute__(self, "_step")()
        return 1

    __eq__ = __ne__ = __lt__ = __bool__ = __len__ = __index__ = __int__ = __float__ = __call__ = __contains__ = _any
    __enter__ = __exit__ = __setattr__ = __delattr__ = __abs__ = _any

    def __hash__(self):
        object.__getattribute__(self, "_step")()
        return 7

    def __iter__(self):
        object.__getattribute__(self, "_step")()
        return iter(())

    def __getitem__(self, key):
        object.__getattribute__(self, "_step")()
        raise IndexError(key)

    def __repr__(self):
        object.__getattribute__(self, "_step")()
        return "a trap"

    __str__ = __repr__


class Meta(type):
    """A metaclass whose classes raise when they are inspected."""

    def __hash__(cls):
        raise RuntimeError("no hash")

    def __eq__(cls, other):
        raise RuntimeError("no eq")


class Blind(type):
    def __getattribute__(cls, name):
        raise RuntimeError(f"no {name}")


class Checks(type):
    def __instancecheck__(cls, obj):
        raise RuntimeError("no isinstance")

    def __subclasscheck__(cls, kind):
        raise RuntimeError("no issubclass")


class Equal(type):
    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return 1


class Lying(type):
    """An object with wrong class attributes."""

    def __getattribute__(cls, name):
        lies = {"__module__": 3, "__name__": 5, "__mro__": (), "__dict__": None, "__qualname__": None}
        return lies[name] if name in lies else type.__getattribute__(cls, name)


METAS = (type, Meta, Blind, Checks, Equal, Lying)
_hostile = {}


def hostile_class(case):
    """Return a class that its metaclass or its attributes make hard to inspect."""
    rng = case.rng
    n, meta = rng.randrange(8), rng.choice(METAS)
    key = n, id(meta)
    if key not in _hostile:
        body = [
            {},
            {"__module__": None},
            {"__slots__": ()},
            {"__getattr__": lambda self, name: 1 / 0},
            {"__class__": property(lambda self: 1 / 0)},
            {"__dict__": property(lambda self: 1 / 0)},
            {"__array__": lambda self, *a, **k: 1 / 0, "__len__": lambda self: -1},
            {"__dlx_tree__": None},
        ][n]
        try:
            _hostile[key] = meta("Odd", (), dict(body))
        except Exception:
            _hostile[key] = type("Odd", (), dict(body))
    return _hostile[key]


class Arrow:
    """An object with Arrow's C interfaces that dlx does not read: it is never called."""

    def __init__(self, case):
        self.case = case

    def _ask(self, *arguments, **options):
        self.case.calls["arrow"] += 1
        return

    __arrow_c_array__ = __arrow_c_stream__ = __arrow_c_device_array__ = __arrow_c_schema__ = _ask
    __arrow_c_device_stream__ = _ask


# ---- containers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    x: object
    y: object = 3


class HostileList(list):
    """A list that fails, or returns wrong items, while it is iterated, copied or filled."""

    case = None

    def __iter__(self):
        if self.case is not None and self.case.chance(0.5):
            self.case.fail(self.case.rng.choice(EXCEPTIONS))
        return list.__iter__(self)

    def __setitem__(self, key, value):
        if self.case is not None and self.case.chance(0.5):
            self.case.fail(ValueError)
        list.__setitem__(self, key, value)


class HostileDictionary(dict):
    case = None

    def keys(self):
        if self.case is not None and self.case.chance(0.4):
            self.case.fail(self.case.rng.choice(EXCEPTIONS))
        return [*dict.keys(self), *(["more"] if self.case is not None and self.case.chance(0.2) else [])]


class OddMapping(Mapping):
    def __init__(self, case, held):
        self.case, self.held = case, held

    def __getitem__(self, key):
        if self.case.chance(0.3):
            self.case.fail(self.case.rng.choice(EXCEPTIONS))
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return self.case.rng.choice((len(self.held), 0, 5))


class OwnTree:
    def __init__(self, case, held):
        self.case, self.held, self.kind = case, held, case.rng.randrange(6)

    def __dlx_tree__(self):
        if self.kind == 0:
            self.case.fail(self.case.rng.choice(EXCEPTIONS))
        if self.kind == 1:
            return junk(self.case)
        if self.kind == 2:
            return {"x": self.held}, lambda children: self.case.fail(self.case.rng.choice(EXCEPTIONS))
        return ([self.held], list) if self.kind == 3 else ({"x": self.held}, dict)


Named = collections.namedtuple("Named", "x y")


def tree(case, make):
    """Return a container around one to three objects of a family; most are ordinary, some hostile."""
    rng = case.rng
    held = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        held.append(make(case))
        case.sources.append(held[-1])
    if len(held) > 1:
        case.expected, case.must_fail = None, False
    case.must_pass = False
    if case.chance(0.2):
        held.append(rng.choice(held))
    if case.chance(0.3):
        held.insert(0, rng.choice((3, "text", None, bytearray(4), b"x")))
    how = rng.randrange(16)
    case.tell("tree", how)
    if how >= 9:
        case.is_steady = False
        case.expected, case.must_fail = None, False
    first = held[-1]
    made = [
        lambda: list(held), lambda: list(held), lambda: tuple(held), lambda: dict(enumerate(held)),
        lambda: {"a": [held], "b": first}, lambda: Record(held, first), lambda: Named(first, held),
        lambda: collections.deque(held), lambda: types.MappingProxyType({"a": first}),
        lambda: HostileList(held), lambda: HostileDictionary(enumerate(held)), lambda: OddMapping(case, {"a": first}),
        lambda: OwnTree(case, first), lambda: collections.ChainMap({"a": first}, {"b": held}),
        lambda: types.SimpleNamespace(x=first, y=held), lambda: {Trap(case): first},
    ]  # fmt: skip
    try:
        whole = made[how]()
    except BaseException:  # a trap as a key
        case.raised.clear()
        whole = list(held)
    if isinstance(whole, HostileList | HostileDictionary):
        whole.case = case
    if type(whole) is list and case.chance(0.05):
        whole.append(whole)
    case.sources.append(whole)
    return whole
