"""Which types are containers: `container_of` answers once per type, with a row that says how to treat one.

A row is a `dlx.facts.Container`. The first of these that knows the type decides:

1. the table of exact built-in types below;
2. the object's own protocol, ``__dlx_tree__()`` -> ``(children, rebuild)``;
3. rows that adapters declare (`Adapter.containers`), the nearest base class first;
4. arrays, text, buffers and numbers are no containers, whatever they inherit from;
5. subclasses of built-in containers, which keep their attributes;
6. dataclasses, attrs classes and namespaces: records (`dlx.rows`);
7. anything registered as a `Mapping` or `Sequence`, whose inside nobody knows (`dlx.rows`).

Everything else is a leaf: an array, or an object that passes through.

>>> container_of(dict).kind, container_of(str)
('mapping', None)
"""

from __future__ import annotations

import abc
import array
import collections
import enum
import numbers
import types
from collections import OrderedDict, UserString, defaultdict, deque
from typing import Any

from dlx.adapter import Adapter
from dlx.errors import DlxError
from dlx.facts import Container
from dlx.foreign import TypeCache, derives, is_key, module_of
from dlx.registry import registry
from dlx.rows import abstract_row, close_set, elements, items, record_row, subclass_row

__all__ = ["LIST", "TUPLE", "VIEW", "container_of", "is_plain", "stamp", "what_is"]

# ---- exact built-in types --------------------------------------------------------------------------------------------


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
    new: OrderedDict[Any, Any] = OrderedDict()
    new.__dict__.update(obj.__dict__)  # a state_dict of torch carries its versions there
    return new


def _close_proxy(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    inside = obj.copy()  # of the mapping behind it, whose type is kept
    for key, child in zip(keys, children, strict=True):
        old = obj[key]
        inside[key] = child
        if child is not old and obj[key] is child:
            inside[key] = old
            raise TypeError("its copy shares its storage")
    return types.MappingProxyType(inside)


def _close_chain(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    return type(obj)(*children[0])


def _open_chain(obj: Any) -> tuple[list[Any], list[Any]]:
    return ["maps"], [list(obj.maps)]


LIST = Container(open=elements, close=_close_list, blank=lambda obj: [])
TUPLE = Container(open=elements, close=_close_tuple, mutable=False)
DICT = Container(kind="mapping", open=_exact_items, close=_close_dict, blank=lambda obj: {})
SET = Container(kind="set", open=elements, close=close_set)
FROZENSET = Container(kind="set", open=elements, close=close_set, mutable=False)

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
    deque: Container(open=elements, close=_close_filled(_blank_deque), blank=_blank_deque),
    set: SET,
    frozenset: FROZENSET,
    types.MappingProxyType: Container(kind="mapping", open=items, close=_close_proxy, falls_to=dict),
    collections.ChainMap: Container(kind="record", open=_open_chain, close=_close_chain),
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range)),
}

# Never entered, though some are sequences (a string is a sequence of strings).
_LEAVES = (str, bytes, bytearray, memoryview, range, slice, UserString, array.array, numbers.Number, enum.Enum)
_PLAIN_MODULES = ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo")


def is_plain(kind: type) -> bool:
    """Return whether objects of a type are plain data: numbers, text, dates and the like."""
    return kind is type(None) or derives(kind, _LEAVES) or module_of(kind).partition(".")[0] in _PLAIN_MODULES


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

# A lazy view stands for its source, or for the part of it that a slice shows.
VIEW = Container(
    kind="wrapper", open=lambda view: (None, [view._stored()]), close=lambda view, keys, children, blank: children[0]
)

# ---- look-up ---------------------------------------------------------------------------------------------------------

_known: TypeCache[Container | None] = TypeCache()
_arrays: TypeCache[Adapter] = TypeCache()
_seen: tuple[int, Any] = (0, None)


def stamp() -> tuple[int, Any]:
    """Return what is another one once an answer about types may be: an adapter was loaded, or a type registered."""
    return registry.generation, abc.get_cache_token()


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
    if (type(kind) is type or is_key(kind)) and kind in _EXACT:
        return _EXACT[kind]
    global _seen
    now = stamp()
    if now != _seen:
        _known.clear()
        _arrays.clear()
        _seen = now
    try:
        row = _known[kind]
    except KeyError:
        try:
            row = _known[kind] = _look_up(kind)
        except (DlxError, MemoryError):
            raise
        except Exception:  # a type that raises when it is looked at
            return None
    return None if row is not None and row is not OWN and _speaks(kind) else row  # it may have learnt it since


def what_is(kind: type) -> Container | Adapter | type | None:
    """Return what objects of a type are to a walk.

    Parameters
    ----------
    kind
        The exact type of an object.

    Returns
    -------
    Container, Adapter, type or None
        A container's row; an array's adapter; None for what passes through; `kind` itself where each object must be
        asked, since only it can tell whether it speaks a protocol.

    Raises
    ------
    PluginError
        If the adapter that knows the type is broken.
    """
    if (type(kind) is type or is_key(kind)) and kind in _EXACT:
        return _EXACT[kind]
    try:
        row = container_of(kind)
        if row is not None:
            return row
        adapter = _arrays.get(kind) or registry.knows(kind)
        if adapter is not None:
            _arrays[kind] = adapter
            return None if adapter.root_only else adapter
        return None if is_plain(kind) else kind
    except (DlxError, MemoryError):
        raise
    except Exception:  # a type that raises when it is looked at
        return kind


def _look_up(kind: type) -> Container | None:
    if any("__dlx_tree__" in cls.__dict__ for cls in kind.__mro__):
        return OWN
    if getattr(kind, "is_lazy_view", False):
        return VIEW
    row = registry.container(kind)
    if row is not None:
        return None if row.kind == "leaf" else row
    if registry.knows(kind) is not None or _speaks(kind) or derives(kind, _LEAVES):
        return None
    return subclass_row(kind) or record_row(kind) or abstract_row(kind)


def _speaks(kind: type) -> bool:
    """Return whether objects of a type are arrays by a protocol that needs no adapter."""
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__"))
