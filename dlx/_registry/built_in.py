"""Handlers of Python's containers, by exact type."""

from __future__ import annotations

import collections
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

from dlx._protocols import arrow
from dlx._registry.handlers import flatten_list, unflatten_set
from dlx.adapter.declarations import Container
from dlx.adapter.files import flatten_mapping


def _flatten_items(obj: Any) -> tuple[list[Any], list[Any]]:
    items = list(obj.items())  # atomic: another thread may write
    return [key for key, _ in items], [child for _, child in items]


def _unflatten_list(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    if new_empty is None:
        return children
    new_empty.extend(children)
    return new_empty


def _unflatten_dict(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    if new_empty is None:
        return dict(zip(keys, children, strict=True))
    new_empty.update(zip(keys, children, strict=True))
    return new_empty


def _unflatten_into(new_empty_of: Any) -> Any:
    def unflatten(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
        new = new_empty_of(obj) if new_empty is None else new_empty
        if keys is None:
            new.extend(children)
        else:
            new.update(zip(keys, children, strict=True))
        return new

    return unflatten


def _new_empty_defaultdict(obj: Any) -> Any:
    return defaultdict(obj.default_factory)


def _new_empty_deque(obj: Any) -> Any:
    return deque(maxlen=obj.maxlen)


def _new_empty_ordered(obj: Any) -> Any:
    new: OrderedDict[Any, Any] = OrderedDict()
    new.__dict__.update(obj.__dict__)  # state_dict of torch stores versions there
    return new


def _unflatten_proxy(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    inside = obj.copy()  # keeps the type of the underlying mapping
    for key, child in zip(keys, children, strict=True):
        old = obj[key]
        inside[key] = child
        if child is not old and obj[key] is child:
            inside[key] = old
            raise TypeError("the copy shares its storage")
    return types.MappingProxyType(inside)


LIST = Container(flatten=flatten_list, unflatten=_unflatten_list, new_empty=lambda obj: [])
TUPLE = Container(flatten=flatten_list, unflatten=lambda obj, keys, children, new_empty: tuple(children), mutable=False)
DICT = Container(kind="mapping", flatten=_flatten_items, unflatten=_unflatten_dict, new_empty=lambda obj: {})
SET = Container(kind="set", flatten=flatten_list, unflatten=unflatten_set)
FROZENSET = Container(kind="set", flatten=flatten_list, unflatten=unflatten_set, mutable=False)

HANDLERS: dict[type, Container] = {
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    OrderedDict: Container(
        kind="mapping",
        flatten=_flatten_items,
        unflatten=_unflatten_into(_new_empty_ordered),
        new_empty=_new_empty_ordered,
    ),
    defaultdict: Container(
        kind="mapping",
        flatten=_flatten_items,
        unflatten=_unflatten_into(_new_empty_defaultdict),
        new_empty=_new_empty_defaultdict,
    ),
    deque: Container(flatten=flatten_list, unflatten=_unflatten_into(_new_empty_deque), new_empty=_new_empty_deque),
    set: SET,
    frozenset: FROZENSET,
    types.MappingProxyType: Container(
        kind="mapping", flatten=flatten_mapping, unflatten=_unflatten_proxy, falls_to=dict
    ),
    arrow.Table: Container(kind="mapping", flatten=_flatten_items, unflatten=_unflatten_dict),
    collections.ChainMap: Container(
        kind="record",
        flatten=lambda obj: (["maps"], [list(obj.maps)]),
        unflatten=lambda obj, keys, children, new_empty: type(obj)(*children[0]),
    ),
}
