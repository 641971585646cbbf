"""Which types are containers: `container_of` returns the handler of a type, looked up once per type.

A handler is a `dlx.adapter.Container`. The first of these that knows the type decides:

1. the table of exact built-in types below;
2. the object's own protocol, ``__dlx_tree__()`` -> ``(children, rebuild)``;
3. handlers that adapters declare (`Adapter.containers`), the nearest base class first;
4. arrays, text, buffers and numbers are no containers, whatever they inherit from, nor is what is refused by name
   (`dlx._registry.array_like`);
5. subclasses of built-in containers, which keep their attributes;
6. dataclasses, attrs classes, pydantic's models, msgspec's structures and namespaces: records
   (`dlx._registry.handlers`);
7. anything registered as a `Mapping` or `Sequence`, of unknown storage (`dlx._registry.handlers`).

Everything else is a leaf: an array, or an object that passes through.

>>> container_of(dict).kind, container_of(str)
('mapping', None)
"""

from __future__ import annotations

import array
import collections
import enum
import numbers
import types
from abc import get_cache_token
from collections import OrderedDict, UserString, defaultdict, deque
from typing import Any, NamedTuple
from weakref import ref

from dlx._core.types import Device, DType
from dlx._protocols import arrow
from dlx._registry import generic
from dlx._registry.array_like import not_readable, refusal, remedy
from dlx._registry.handlers import abstract_handler, elements, items, record_handler, subclass_handler, unflatten_set
from dlx._registry.registry import HELD, registry
from dlx._support.reflect import TypeCache, derives, foreign_error, is_key, module_of, type_name
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import AdapterNotFoundError, DlxError

__all__ = [
    *("ARROW", "LIST", "TUPLE", "VIEW", "array_of", "container_of", "is_built_in", "is_plain", "kind_of"),
    *("not_an_array", "stamp", "unwrapped", "what_is"),
]

# ---- exact built-in types --------------------------------------------------------------------------------------------


def _exact_items(obj: Any) -> tuple[list[Any], list[Any]]:
    items = list(obj.items())  # at once: another thread may be writing
    return [key for key, _ in items], [child for _, child in items]


def _unflatten_list(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    if new_empty is None:
        return children
    new_empty.extend(children)
    return new_empty


def _unflatten_tuple(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    return tuple(children)


def _unflatten_dict(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    if new_empty is None:
        return dict(zip(keys, children, strict=True))
    new_empty.update(zip(keys, children, strict=True))
    return new_empty


def _unflatten_filled(new_empty_of: Any) -> Any:
    def close(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
        new = new_empty_of(obj) if new_empty is None else new_empty
        if keys is None:
            new.extend(children)
        else:
            new.update(zip(keys, children, strict=True))
        return new

    return close


def _new_empty_defaultdict(obj: Any) -> Any:
    return defaultdict(obj.default_factory)


def _new_empty_deque(obj: Any) -> Any:
    return deque(maxlen=obj.maxlen)


def _new_empty_ordered(obj: Any) -> Any:
    new: OrderedDict[Any, Any] = OrderedDict()
    new.__dict__.update(obj.__dict__)  # a state_dict of torch carries its versions there
    return new


def _unflatten_proxy(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    inside = obj.copy()  # of the mapping behind it, whose type is kept
    for key, child in zip(keys, children, strict=True):
        old = obj[key]
        inside[key] = child
        if child is not old and obj[key] is child:
            inside[key] = old
            raise TypeError("its copy shares its storage")
    return types.MappingProxyType(inside)


def _unflatten_chain(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    return type(obj)(*children[0])


def _flatten_chain(obj: Any) -> tuple[list[Any], list[Any]]:
    return ["maps"], [list(obj.maps)]


LIST = Container(flatten=elements, unflatten=_unflatten_list, new_empty=lambda obj: [])
TUPLE = Container(flatten=elements, unflatten=_unflatten_tuple, mutable=False)
DICT = Container(kind="mapping", flatten=_exact_items, unflatten=_unflatten_dict, new_empty=lambda obj: {})
SET = Container(kind="set", flatten=elements, unflatten=unflatten_set)
FROZENSET = Container(kind="set", flatten=elements, unflatten=unflatten_set, mutable=False)

_EXACT: dict[type, Container | None] = {
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    OrderedDict: Container(
        kind="mapping",
        flatten=_exact_items,
        unflatten=_unflatten_filled(_new_empty_ordered),
        new_empty=_new_empty_ordered,
    ),
    defaultdict: Container(
        kind="mapping",
        flatten=_exact_items,
        unflatten=_unflatten_filled(_new_empty_defaultdict),
        new_empty=_new_empty_defaultdict,
    ),
    deque: Container(flatten=elements, unflatten=_unflatten_filled(_new_empty_deque), new_empty=_new_empty_deque),
    set: SET,
    frozenset: FROZENSET,
    types.MappingProxyType: Container(kind="mapping", flatten=items, unflatten=_unflatten_proxy, falls_to=dict),
    arrow.Table: Container(kind="mapping", flatten=_exact_items, unflatten=_unflatten_dict),
    collections.ChainMap: Container(kind="record", flatten=_flatten_chain, unflatten=_unflatten_chain),
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range)),
}

# Never entered, though some are sequences (a string is a sequence of strings).
_LEAVES = (
    str, bytes, bytearray, memoryview, range, slice, UserString, array.array, numbers.Number, enum.Enum, Device, DType,
)  # fmt: skip
_PLAIN_MODULES = ("datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo")


def is_built_in(kind: type) -> bool:
    """Return whether a type is one of Python's own containers, no subclass."""
    return (type(kind) is type or is_key(kind)) and _EXACT.get(kind) is not None


def is_plain(kind: type) -> bool:
    """Return whether objects of a type are plain data: numbers, text, dates and the like."""
    return kind is type(None) or derives(kind, _LEAVES) or module_of(kind).partition(".")[0] in _PLAIN_MODULES


# ---- an object's own protocol ----------------------------------------------------------------------------------------


class _Recipe(list[Any]):
    """Keys, with the function that came with the children; passed from `flatten` to `unflatten`."""

    rebuild: Any
    named: bool


def _flatten_own(obj: Any) -> tuple[list[Any], list[Any]]:
    children, rebuild = obj.__dlx_tree__()
    named = isinstance(children, dict)
    keys = _Recipe(children) if named else _Recipe(range(len(children)))
    keys.rebuild, keys.named = rebuild, named
    return keys, list(children.values()) if named else list(children)


def _unflatten_own(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    return keys.rebuild(dict(zip(keys, children, strict=True)) if keys.named else children)


OWN = Container(kind="mapping", flatten=_flatten_own, unflatten=_unflatten_own)

# A lazy view stands for its source, or for the part of it that a slice shows.
VIEW = Container(kind="wrapper", flatten=lambda view: (None, [view._stored()]))

# What gives out Arrow data: only that shows whether it is a table, whose columns become a dict, or a column.
ARROW = Container(kind="wrapper", flatten=lambda obj: (None, [arrow.opened(obj)]))

# ---- look-up ---------------------------------------------------------------------------------------------------------


class _Answers(NamedTuple):
    """What was found about types while `stamp` did not change. A look-up that still runs keeps its answer in these."""

    stamp: tuple[int, Any]
    containers: TypeCache[Container | None]
    arrays: TypeCache[Adapter]


_answers = _Answers((0, None), TypeCache(), TypeCache())
_UNKNOWN: Any = object()


def stamp() -> tuple[int, Any]:
    """Return a value that changes whenever a cached answer about a type may have become stale.

    That is when an adapter is loaded, or a type is registered with an abstract base class.
    """
    return registry.generation, get_cache_token()


def container_of(kind: type) -> Container | None:
    """Return the handler of a container type, None for a leaf. Looked up once per type.

    Parameters
    ----------
    kind
        The exact type of an object.

    Notes
    -----
    An array, an object that passes through and a type that an adapter declares as ``kind="leaf"`` all answer None.
    Answers are forgotten when an adapter is loaded, or a type registered with an abstract base class.
    """
    is_plain = type(kind) is type or is_key(kind)
    if is_plain and kind in _EXACT:
        return _EXACT[kind]
    global _answers
    now, answers = stamp(), _answers
    if now != answers.stamp:
        answers = _answers = _Answers(now, TypeCache(), TypeCache())
    handler: Container | None = answers.containers.get(ref(kind), _UNKNOWN) if is_plain else _UNKNOWN
    if handler is _UNKNOWN:
        try:
            handler = answers.containers.keep(kind, _look_up(kind))
        except (DlxError, MemoryError):
            raise
        except Exception:  # a type that raises when it is looked at
            return None
    late = handler is not None and handler is not OWN and not handler.types
    return None if late and _speaks(kind) else handler  # the attribute may have been added since


def what_is(kind: type) -> Container | Adapter | type | None:
    """Return how a walk of a tree treats objects of a type.

    Parameters
    ----------
    kind
        The exact type of an object.

    Returns
    -------
    Container, Adapter, type or None
        A container's handler; an array's adapter; None for what passes through; `kind` itself where each object must
        be looked at, since only the object shows whether it implements a protocol.

    Raises
    ------
    PluginError
        If the adapter that knows the type is broken.
    """
    if (type(kind) is type or is_key(kind)) and kind in _EXACT:
        return _EXACT[kind]
    try:
        handler = container_of(kind)
        if handler is not None:
            return handler
        arrays = _answers.arrays
        adapter = arrays.find(kind) or registry.knows(kind)
        if adapter is not None:
            arrays.keep(kind, adapter)
            return None if adapter.arrays.root_only else adapter
        return None if is_plain(kind) else kind
    except (DlxError, MemoryError):
        raise
    except Exception:  # a type that raises when it is looked at
        return kind


def kind_of(obj: Any) -> Container | Adapter | None:
    """Return the handler of a container, the adapter of an array, or None."""
    kind = type(obj)
    what = what_is(kind)
    if what is not kind:
        return what  # type: ignore[return-value]  # it is no type then
    try:
        return generic.generic_array_adapter(obj)
    except (DlxError, MemoryError):
        raise
    except Exception:  # an object whose attributes raise is of no known kind
        return None


def _look_up(kind: type) -> Container | None:
    if any("__dlx_tree__" in cls.__dict__ for cls in kind.__mro__):
        return OWN
    if getattr(kind, "is_lazy_view", False):
        return VIEW
    handler = registry.container(kind)
    if handler is not None:
        return None if handler.kind == "leaf" else handler
    if registry.knows(kind) is not None or _speaks(kind) or derives(kind, _LEAVES):
        return None
    if arrow.speaks(kind):
        return ARROW
    if refusal(kind) is not None:
        return None
    return subclass_handler(kind) or record_handler(kind) or abstract_handler(kind)


def _speaks(kind: type) -> bool:
    """Return whether objects of a type are arrays by a protocol that needs no adapter."""
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__"))


# ---- one array ----


def array_of(obj: Any, **parts: Any) -> tuple[Any, Adapter]:
    """Return the array that an object is or stands for, as a DataArray of xarray stands for its data, and its adapter.

    Parameters
    ----------
    obj
        Any object that `dlx.convert` takes for one array.
    parts
        They complete the error.

    Raises
    ------
    DlxError
        If it is not one array, or cannot be read.
    """
    source = registry.producer(obj)
    if source is not None and not (source is generic.ARROW and container_of(type(obj)) is not None):
        return obj, source
    inside, handler = unwrapped(obj, **parts)
    if inside is not obj and handler is None:
        return array_of(inside, **parts)
    raise not_an_array(obj).complete(**parts)


def unwrapped(obj: Any, **parts: Any) -> tuple[Any, Container | None]:
    """Return what a wrapper stands for, or any other object itself, and its handler if that is a container."""
    inside, handler = obj, container_of(type(obj))
    try:
        while handler is not None and handler.kind == "wrapper":
            _, (inside,) = handler.flatten(inside)
            handler = container_of(type(inside))
        return inside, handler
    except DlxError as error:
        error.complete(source=type_name(type(obj)), fix=remedy(type(obj)), **parts)
        raise
    except Exception as error:
        what = "the container cannot be taken apart:"
        raise foreign_error(what, error, source=type_name(type(obj)), **parts) from error


def not_an_array(obj: Any) -> DlxError:
    """Return the error for an object that is no array."""
    name = type_name(type(obj))
    broken = registry.broken_for(type(obj))
    if broken is not None:
        return broken.complete(source=name)
    reason = "it is no array: it has no adapter, no __dlpack__, no __array_interface__ and no buffer"
    if generic.is_proxy(type(obj)):
        fix = "Convert the object itself: a proxy does not keep it alive."
    elif container_of(type(obj)) is not None:
        reason = "it is a container, and one array is needed"
        fix = "Give one of the arrays in it; dlx.convert and dlx.plan take whole containers."
    else:
        try:
            if (refused := not_readable(type(obj))) is not None:
                return refused
            fix = remedy(type(obj))
        except MemoryError:
            raise
        except Exception:  # a class that raises when it is looked at
            fix = ""
        in_python = module_of(type(obj)) == "builtins"
        fix = fix or ("Give an array, or an object with a buffer such as bytes." if in_python else HELD)
    return AdapterNotFoundError(reason, source=name, fix=fix)
