"""Which types are containers: `container_of` answers once per type, with a row that says how to treat one.

A row is a `dlx.facts.Container`. The first of these that knows the type decides:

1. the table of exact built-in types below;
2. the object's own protocol, ``__dlx_tree__()`` -> ``(children, rebuild)``;
3. rows that adapters declare (`Adapter.containers`), the nearest base class first;
4. arrays, text, buffers and numbers are no containers, whatever they inherit from;
5. subclasses of built-in containers, which keep their attributes;
6. dataclasses, attrs classes and namespaces: records (`dlx.records`);
7. anything registered as a `Mapping` or `Sequence`, whose inside nobody knows (`dlx.records`).

Everything else is a leaf: an array, or an object that passes through.

>>> container_of(dict).kind, container_of(str)
('mapping', None)
"""

from __future__ import annotations

import abc
import array
import collections
import copy
import enum
import numbers
import types
import weakref
from collections import OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from typing import Any

from dlx.errors import DlxError
from dlx.facts import Container
from dlx.records import abstract_row, bare, record_row
from dlx.registry import registry

__all__ = ["container_of", "is_plain"]

# ---- exact built-in types --------------------------------------------------------------------------------------------


def _elements(obj: Any) -> tuple[None, list[Any]]:
    return None, list(obj)


def _items(obj: Any) -> tuple[list[Any], list[Any]]:
    keys = list(obj.keys())
    return keys, [obj[key] for key in keys]


def _exact_items(obj: Any) -> tuple[list[Any], list[Any]]:
    items = list(obj.items())  # at once: another thread may be writing
    return [key for key, _ in items], [child for _, child in items]


def _close_list(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    if blank is None:
        return children
    blank.extend(children)
    return blank


def _close_tuple(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    return tuple(children)


def _close_dict(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    if blank is None:
        return dict(zip(keys, children, strict=True))
    blank.update(zip(keys, children, strict=True))
    return blank


def _close_filled(blank_of: Any) -> Any:
    def close(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
        new = blank_of(obj) if blank is None else blank
        if keys is None:
            new.extend(children)
        else:
            new.update(zip(keys, children, strict=True))
        return new

    return close


def _blank_defaultdict(obj: Any) -> Any:
    return defaultdict(obj.default_factory)


def _blank_deque(obj: Any) -> Any:
    return deque(maxlen=obj.maxlen)


def _blank_ordered(obj: Any) -> Any:
    return OrderedDict()


def _close_proxy(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    inside = obj.copy()  # of the mapping behind it, whose type is kept
    for key, child in zip(keys, children, strict=True):
        inside[key] = child
    return types.MappingProxyType(inside)


def _close_chain(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    return type(obj)(*children[0])


def _open_chain(obj: Any) -> tuple[list[Any], list[Any]]:
    return ["maps"], [list(obj.maps)]


def _close_set(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    new = type(obj)(children)
    _keep_attributes(obj, new)
    return new


LIST = Container(open=_elements, close=_close_list, blank=lambda obj: [])
TUPLE = Container(open=_elements, close=_close_tuple, mutable=False)
DICT = Container(kind="mapping", open=_exact_items, close=_close_dict, blank=lambda obj: {})
SET = Container(kind="set", open=_elements, close=_close_set)
FROZENSET = Container(kind="set", open=_elements, close=_close_set, mutable=False)

_EXACT: dict[type, Container | None] = {
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    OrderedDict: Container(
        kind="mapping", open=_exact_items, close=_close_filled(_blank_ordered), blank=_blank_ordered
    ),
    defaultdict: Container(
        kind="mapping", open=_exact_items, close=_close_filled(_blank_defaultdict), blank=_blank_defaultdict
    ),
    deque: Container(open=_elements, close=_close_filled(_blank_deque), blank=_blank_deque),
    set: SET,
    frozenset: FROZENSET,
    types.MappingProxyType: Container(kind="mapping", open=_items, close=_close_proxy, falls_to=dict),
    collections.ChainMap: Container(kind="record", open=_open_chain, close=_close_chain),
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range)),
}

# Never entered, though some are sequences (a string is a sequence of strings).
_LEAVES = (str, bytes, bytearray, memoryview, range, slice, UserString, array.array, numbers.Number, enum.Enum)
_PLAIN_MODULES = ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo")


def is_plain(kind: type) -> bool:
    """Return whether objects of a type are plain data: numbers, text, dates and the like."""
    return kind is type(None) or issubclass(kind, _LEAVES) or kind.__module__.partition(".")[0] in _PLAIN_MODULES


# ---- subclasses of built-in containers -------------------------------------------------------------------------------


def _keep_attributes(obj: Any, new: Any) -> None:
    """Give a new container the attributes that its copy did not bring along."""
    for name, value in getattr(obj, "__dict__", {}).items():
        new.__dict__.setdefault(name, value)


def _copied(obj: Any) -> Any:
    """Return a shallow copy of a subclass of a mutable built-in, its storage its own, its attributes kept."""
    new = copy.copy(obj)
    if new is obj or type(new) is not type(obj):
        raise TypeError(f"copying gives {type(new).__name__}")
    if getattr(obj, "__dict__", None) is obj:  # the idiom `self.__dict__ = self`
        new.__dict__ = new
    else:
        _keep_attributes(obj, new)
    return new


def _close_copied(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    """Put the children into a copy, through the class's own item assignment; attributes that name a child follow."""
    new = _copied(obj) if blank is None else blank
    places = range(len(children)) if keys is None else keys
    changed = {}
    for place, child in zip(places, children, strict=True):
        old = new[place]
        if old is not child:
            changed[id(old)] = (old, child)
            new[place] = child
    attributes = getattr(new, "__dict__", None)
    if attributes and attributes is not new:
        for name, value in list(attributes.items()):
            if id(value) in changed and name != "data":  # UserDict's and UserList's storage
                attributes[name] = changed[id(value)][1]
    return new


def _close_tuple_subclass(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    """Skip the class's __new__, which may take anything: a named tuple's takes its fields."""
    new = tuple.__new__(type(obj), children)
    _keep_attributes(obj, new)
    return new


def _close_structseq(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    _, (_, hidden) = obj.__reduce__()
    return type(obj)(children, hidden)


def _open_named(obj: Any) -> tuple[list[str], list[Any]]:
    return list(obj._fields), list(obj)


def _named(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def _subclass_row(kind: type) -> Container | None:
    if issubclass(kind, tuple):
        if hasattr(kind, "n_sequence_fields"):
            return Container(open=_elements, close=_close_structseq, mutable=False, falls_to=list)
        frozen = not _has_dict(kind)
        if _named(kind):
            return Container(kind="record", open=_open_named, close=_close_tuple_subclass, mutable=not frozen)
        return Container(open=_elements, close=_close_tuple_subclass, mutable=not frozen, falls_to=list)
    if issubclass(kind, dict | UserDict):
        return Container(kind="mapping", open=_items, close=_close_copied, blank=_copied, falls_to=dict)
    if issubclass(kind, list | deque | UserList):
        return Container(open=_elements, close=_close_copied, blank=_copied, falls_to=list)
    if issubclass(kind, set | frozenset):
        return Container(kind="set", open=_elements, close=_close_set)
    if issubclass(kind, types.SimpleNamespace):
        return Container(kind="record", open=_open_namespace, close=_close_namespace, blank=bare)
    return None


def _has_dict(kind: type) -> bool:
    return bool(kind.__dictoffset__)


def _open_namespace(obj: Any) -> tuple[list[str], list[Any]]:
    return list(obj.__dict__), list(obj.__dict__.values())


def _close_namespace(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    new = bare(obj) if blank is None else blank
    new.__dict__.update(zip(keys, children, strict=True))
    return new


# ---- an object's own protocol ----------------------------------------------------------------------------------------


class _Recipe(list[Any]):
    """Keys, with the function that came with the children; it travels from `open` to `close`."""

    rebuild: Any
    named: bool


def _open_own(obj: Any) -> tuple[list[Any], list[Any]]:
    children, rebuild = obj.__dlx_tree__()
    named = isinstance(children, dict)
    keys = _Recipe(children) if named else _Recipe(range(len(children)))
    keys.rebuild, keys.named = rebuild, named
    return keys, list(children.values()) if named else list(children)


def _close_own(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    return keys.rebuild(dict(zip(keys, children, strict=True)) if keys.named else children)


OWN = Container(kind="mapping", open=_open_own, close=_close_own)

# ---- look-up ---------------------------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[type, Container | None] = weakref.WeakKeyDictionary()
_seen: tuple[int, Any] = (0, None)


def container_of(kind: type) -> Container | None:
    """Return the row of a container type, None for a leaf. Asked once per type.

    Parameters
    ----------
    kind
        The exact type of an object.

    Notes
    -----
    An array, an object that passes through and a type that an adapter declares as ``kind="leaf"`` all answer None.
    Answers are forgotten when an adapter is loaded, or a type registered with an abstract base class.
    """
    if kind in _EXACT:
        return _EXACT[kind]
    global _seen
    now = (registry.generation, abc.get_cache_token())
    if now != _seen:
        _known.clear()
        _seen = now
    try:
        row = _known[kind]
    except KeyError:
        try:
            row = _known[kind] = _look_up(kind)
        except DlxError:
            raise
        except Exception:  # a type that raises when it is looked at
            return None
    return None if row is not None and row is not OWN and _speaks(kind) else row  # it may have learnt it since


def _look_up(kind: type) -> Container | None:
    if any("__dlx_tree__" in cls.__dict__ for cls in kind.__mro__):
        return OWN
    row = registry.container(kind)
    if row is not None:
        return None if row.kind == "leaf" else row
    if registry.knows(kind) is not None or _speaks(kind) or issubclass(kind, _LEAVES):
        return None
    return _subclass_row(kind) or record_row(kind) or abstract_row(kind)


def _speaks(kind: type) -> bool:
    """Return whether objects of a type are arrays by a protocol that needs no adapter."""
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__"))
