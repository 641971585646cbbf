"""Containers that are no kin of built-in ones: dataclasses, attrs classes, and whatever calls itself a mapping."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from dlx.errors import ConversionError
from dlx.facts import Container
from dlx.tensor import type_name

__all__ = ["abstract_row", "bare", "record_row"]

# ---- records ---------------------------------------------------------------------------------------------------------


def record_row(kind: type) -> Container | None:
    """Return the row of a dataclass or an attrs class, None for anything else."""
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    elif isinstance(fields := getattr(kind, "__attrs_attrs__", None), tuple):
        names = tuple(field.name for field in fields)
        frozen = kind.__setattr__.__name__ == "_frozen_setattrs"  # attrs tells it in no other way
    else:
        return None

    def open_record(obj: Any) -> tuple[list[str], list[Any]]:
        present = [name for name in names if hasattr(obj, name)]  # init=False: it may not be set yet
        for name in present:
            if not _is_own(obj, name):  # a tensorclass of tensordict
                raise ConversionError(
                    f"it does not keep its field {name!r} as an attribute, so it cannot be made anew",
                    source=type_name(kind),
                    fix="Convert its fields one by one, or give it a __dlx_tree__ method.",
                )
        return present, [getattr(obj, name) for name in present]

    blank = None if frozen else bare
    return Container(kind="record", open=open_record, close=_close_record, blank=blank, mutable=not frozen)


def _is_own(obj: Any, name: str) -> bool:
    """Return whether a field is kept in the object itself, so that setting it on another changes nothing here."""
    if name in getattr(obj, "__dict__", ()):
        return True
    found = inspect.getattr_static(type(obj), name, obj)
    return found is not obj and (inspect.ismemberdescriptor(found) or not hasattr(found, "__set__"))


def _close_record(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    new = bare(obj) if blank is None else blank
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(new, name, child)  # also where frozen; converters and validators have seen the source
    return new


def bare(obj: Any) -> Any:
    """Return a new object of the same class with the same attributes; no code of the class runs.

    Values that a `functools.cached_property` has kept are left out: they were computed from the old attributes.
    """
    kind: Any = type(obj)
    try:
        new = object.__new__(kind)
    except TypeError:  # it inherits from a built-in type
        new = kind.__new__(kind)
    if hasattr(obj, "__dict__"):
        new.__dict__.update(
            (name, value)
            for name, value in obj.__dict__.items()
            if not isinstance(getattr(kind, name, None), functools.cached_property)
        )
    for cls in kind.__mro__:
        for name in _slots(cls):
            if hasattr(obj, name):
                object.__setattr__(new, name, getattr(obj, name))
    if hasattr(new, "_attrs_cached_hash"):  # of fields that are about to change
        object.__setattr__(new, "_attrs_cached_hash", None)
    return new


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    mangled = (f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name for name in names)
    return [name for name in mangled if name not in ("__dict__", "__weakref__")]


# ---- anything that is registered as a mapping or a sequence ----------------------------------------------------------


class _Listing(list[Any]):
    """Keys, with the children that were found under them; it travels from `open` to `close`."""

    children: list[Any]


def _open_mapping(obj: Any) -> tuple[list[Any], list[Any]]:
    keys = _Listing(obj.keys())  # some iterate over something else (TensorDict: over its batches)
    keys.children = [obj[key] for key in keys]
    return keys, list(keys.children)


def _open_sequence(obj: Any) -> tuple[list[Any], list[Any]]:
    children = list(obj)
    keys = _Listing(range(len(children)))
    keys.children = children
    return keys, list(children)


def _close_unknown(obj: Any, keys: Any, children: list[Any], blank: Any) -> Any:
    """Copy the whole object deeply, with every child replaced on the way; nothing is ever assigned to a copy.

    A shallow copy may share its storage with the source (a class around a dict, a file), which must not be written to.
    """
    memo: dict[int, Any] = {id(key): key for key in keys}
    memo |= {id(old): child for old, child in zip(keys.children, children, strict=True)}
    new = copy.deepcopy(obj, memo)
    places = list(new.keys()) if isinstance(obj, Mapping) else list(range(len(new)))
    if type(new) is not type(obj) or places != keys:
        raise TypeError("its copy has other elements")
    if any(new[key] is not child for key, child in zip(keys, children, strict=True)):
        raise TypeError("its copy does not hold what was put in")
    return new


def abstract_row(kind: type) -> Container | None:
    """Return the row of a type that is registered as a `Mapping` or `Sequence`, None for anything else."""
    if issubclass(kind, Mapping):
        return Container(
            kind="mapping",
            open=_open_mapping,
            close=_close_unknown,
            mutable=issubclass(kind, MutableMapping),
            elements="fresh",
            falls_to=dict,
        )
    if issubclass(kind, Sequence):
        mutable = issubclass(kind, MutableSequence)
        return Container(open=_open_sequence, close=_close_unknown, mutable=mutable, elements="fresh", falls_to=list)
    return None
