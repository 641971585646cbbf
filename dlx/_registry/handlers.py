"""Container handlers for subclasses, named tuples, records, and abstract mappings and sequences."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from dlx._support.reflect import derives, type_name
from dlx.adapter.declarations import Container
from dlx.adapter.files import flatten_mapping
from dlx.errors import ConversionError


def flatten_list(obj: Any) -> tuple[None, list[Any]]:
    """Flatten a container without keys."""
    return None, list(obj)


def unflatten_set(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    """Return a set of the same type with hashable elements, without running code of the subclass."""
    kind = type(obj)
    if kind is set or kind is frozenset:
        return kind(children)
    new: Any = frozenset.__new__(kind, children) if issubclass(kind, frozenset) else set.__new__(kind)
    if not issubclass(kind, frozenset):
        set.update(new, children)
    _copy_slots(obj, new)
    _keep_attributes(obj, new)
    return new


def _keep_attributes(obj: Any, new: Any) -> None:
    """Copy the attributes that the new container lacks."""
    for name, value in getattr(obj, "__dict__", {}).items():
        new.__dict__.setdefault(name, value)


_BASES = (Counter, OrderedDict, defaultdict, dict, deque, list)
_COPYING = (
    "__copy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


def _find_base(kind: type) -> Any:
    """Return the built-in base of a container class, or None if the class defines its own copying."""
    for cls in kind.__mro__:
        if any(cls is base for base in _BASES):
            return dict if cls is Counter else cls
        if any(name in cls.__dict__ for name in _COPYING):
            return None
    return None


def _copy_shallow(base: Any, obj: Any) -> Any:
    """Return a shallow copy of a subclass of a mutable built-in, without calling its constructor."""
    kind = type(obj)
    if base is None:
        new = copy.copy(obj)
    else:
        new = base.__new__(kind)
        if base is defaultdict:
            base.__init__(new, obj.default_factory)
        elif base is deque:
            base.__init__(new, (), obj.maxlen)
        if issubclass(base, dict):
            for key in base.__iter__(obj):
                base.__setitem__(new, key, base.__getitem__(obj, key))
        else:
            base.extend(new, base.__iter__(obj))
    if new is obj or type(new) is not kind:
        raise TypeError(f"copying it returns {type(new).__name__}")
    _copy_slots(obj, new)
    if getattr(obj, "__dict__", None) is obj:  # the idiom `self.__dict__ = self`
        new.__dict__ = new
    else:
        _keep_attributes(obj, new)
        _copy_inner_containers(obj, new)
    return new


def _copy_inner_containers(obj: Any, new: Any) -> None:
    """Copy the built-in containers in attributes that item assignment may change."""
    kind = type(obj)
    if derives(kind, (UserDict, UserList)):
        names = ["data"]
    elif any("__setitem__" in cls.__dict__ for cls in kind.__mro__[: kind.__mro__.index(_find_builtin(kind))]):
        names = list(getattr(new, "__dict__", ()))
    else:
        return
    for name in names:
        value = new.__dict__.get(name)
        if type(value) in (dict, list, set, OrderedDict, defaultdict, deque) and value is obj.__dict__.get(name):
            new.__dict__[name] = value.copy()


def _find_builtin(kind: type) -> type:
    return next(base for cls in kind.__mro__ for base in _BASES if cls is base)


def _copy_slots(obj: Any, new: Any) -> None:
    for cls in type(obj).__mro__:
        for name in _slots(cls):
            if hasattr(obj, name) and not hasattr(new, name):
                object.__setattr__(new, name, getattr(obj, name))


def _unflatten_copy(base: Any, obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    """Assign the children to items of a copy, and to attributes that refer to replaced items."""
    new = _copy_shallow(base, obj) if new_empty is None else new_empty
    keys = range(len(children)) if keys is None else keys
    changed = {}
    for key, child in zip(keys, children, strict=True):
        old = new[key]
        if old is not child:
            changed[id(old)] = (old, child)
            new[key] = child
            if obj[key] is child:
                obj[key] = old
                raise TypeError("the copy shares its storage")
    attributes = getattr(new, "__dict__", None)
    if attributes and attributes is not new:
        for name, value in list(attributes.items()):
            if id(value) in changed and name != "data":  # UserDict's and UserList's storage
                attributes[name] = changed[id(value)][1]
    return new


def _unflatten_tuple_subclass(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    """Create a tuple without the class's __new__, whose parameters are unknown."""
    new = tuple.__new__(type(obj), children)
    _keep_attributes(obj, new)
    return new


def _unflatten_structseq(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    _, (_, hidden) = obj.__reduce__()
    return type(obj)(children, hidden)


def _flatten_named_tuple(obj: Any) -> tuple[list[str], list[Any]]:
    return list(obj._fields), list(obj)


def _is_named_tuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def subclass_handler(kind: type) -> Container | None:
    """Return the handler of a subclass of a built-in container, or None."""
    if issubclass(kind, tuple):
        if hasattr(kind, "n_sequence_fields"):
            return Container(flatten=flatten_list, unflatten=_unflatten_structseq, mutable=False, falls_to=list)
        frozen = not _has_dict(kind)
        if _is_named_tuple(kind):
            return Container(
                kind="record", flatten=_flatten_named_tuple, unflatten=_unflatten_tuple_subclass, mutable=not frozen
            )
        return Container(flatten=flatten_list, unflatten=_unflatten_tuple_subclass, mutable=not frozen, falls_to=list)
    if derives(kind, (dict, UserDict, list, deque, UserList)):
        base = _find_base(kind)
        unflatten, new_empty = functools.partial(_unflatten_copy, base), functools.partial(_copy_shallow, base)
        if derives(kind, (dict, UserDict)):
            return Container(
                kind="mapping", flatten=flatten_mapping, unflatten=unflatten, new_empty=new_empty, falls_to=dict
            )
        return Container(flatten=flatten_list, unflatten=unflatten, new_empty=new_empty, falls_to=list)
    if issubclass(kind, set | frozenset):
        return Container(kind="set", flatten=flatten_list, unflatten=unflatten_set)
    if issubclass(kind, types.SimpleNamespace):
        return Container(kind="record", flatten=_flatten_namespace, unflatten=_unflatten_namespace, new_empty=copy_bare)
    return None


def _has_dict(kind: type) -> bool:
    return bool(kind.__dictoffset__)


def _flatten_namespace(obj: Any) -> tuple[list[str], list[Any]]:
    return list(obj.__dict__), list(obj.__dict__.values())


def _unflatten_namespace(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    new: Any = new_empty
    if new_empty is None:
        new = types.SimpleNamespace() if type(obj) is types.SimpleNamespace else copy_bare(obj)
    new.__dict__.update(zip(keys, children, strict=True))
    return new


def record_handler(kind: type) -> Container | None:
    """Return the handler of a dataclass, attrs class, pydantic model or msgspec struct, or None."""
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    elif isinstance(fields := getattr(kind, "__attrs_attrs__", None), tuple):
        names = tuple(field.name for field in fields)
        frozen = kind.__setattr__.__name__ == "_frozen_setattrs"  # attrs has no public flag
    elif known := next((each for cls in kind.__mro__ if (each := _RECORDS.get(type_name(cls)))), None):
        return known(kind)  # type: ignore[no-any-return]
    else:
        return None

    dict_only = len(names) > 1 and _are_dict_only(kind, names)
    read, fields = operator.itemgetter(*names) if dict_only else None, frozenset(names)

    def flatten_record(obj: Any) -> tuple[list[str], list[Any]]:
        if read is not None:
            try:
                return list(names), list(read(obj.__dict__))
            except KeyError:  # a field is not set, or has only the default of the class
                pass
        present = [name for name in names if hasattr(obj, name)]  # fields with init=False may not be set
        for name in present:
            if not _stores_field(obj, name):  # a tensorclass of tensordict
                raise ConversionError(
                    f"it does not store its field {name!r} as an attribute, so it cannot be rebuilt",
                    source=type_name(type(obj)),
                    fix="Convert its fields one by one, or define its __dlx_tree__ method.",
                )
        return present, [getattr(obj, name) for name in present]

    def unflatten_record(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
        if not dict_only or new_empty is not None or not obj.__dict__.keys() <= fields:
            return _unflatten_record(obj, keys, children, new_empty)
        new = _create_without_init(type(obj))
        new.__dict__.update(obj.__dict__)  # keeps the order
        new.__dict__.update(zip(keys, children, strict=True))
        return new

    return _record(flatten_record, unflatten_record, copy_bare, frozen)


def _record(flatten: Any, unflatten: Any, new_empty: Any, frozen: bool) -> Container:
    new_empty = None if frozen else new_empty
    return Container(kind="record", flatten=flatten, unflatten=unflatten, new_empty=new_empty, mutable=not frozen)


def _are_dict_only(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether objects store all their data, and these fields, in their ``__dict__`` only."""
    reads = inspect.getattr_static(kind, "__getattribute__")
    if reads is not object.__getattribute__ or not _has_dict(kind) or any(map(_slots, kind.__mro__)):
        return False
    return not any(hasattr(type(inspect.getattr_static(kind, name, None)), "__set__") for name in names)


def _stores_field(obj: Any, name: str) -> bool:
    """Return whether the object itself stores a field, so that setting it on a copy does not change the object."""
    if name in getattr(obj, "__dict__", ()):
        return True
    found = inspect.getattr_static(type(obj), name, obj)
    if found is obj or inspect.ismemberdescriptor(found):  # slots
        return found is not obj
    return not hasattr(found, "__get__") and not hasattr(found, "__set__")  # a default of the class


def _unflatten_record(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    new = copy_bare(obj) if new_empty is None else new_empty
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(new, name, child)  # bypasses frozen classes, converters, validators
    return new


def _model_handler(kind: Any) -> Container:
    """Return the handler of a pydantic model, for fields and extra fields; it runs no validators or defaults."""
    frozen = bool(getattr(kind, "model_config", {}).get("frozen"))
    return _record(_flatten_model, _unflatten_model, _copy_model, frozen)


def _flatten_model(obj: Any) -> tuple[list[str], list[Any]]:
    fields = {name: value for name, value in obj.__dict__.items() if not _is_computed(type(obj), name)}
    children = fields | (getattr(obj, "__pydantic_extra__", None) or {})
    return list(children), list(children.values())


def _copy_model(obj: Any) -> Any:
    """Return a copy of a model that does not share the containers which setting a field changes."""
    new = copy_bare(obj)
    for name in (name for cls in type(obj).__mro__ for name in _slots(cls)):
        value: Any = getattr(new, name, None)
        if type(value) in (set, dict):
            object.__setattr__(new, name, value.copy())
    return new


def _unflatten_model(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    new = _copy_model(obj) if new_empty is None else new_empty
    extra = getattr(new, "__pydantic_extra__", None) or {}
    for name, child in zip(keys, children, strict=True):
        (extra if name in extra else new.__dict__)[name] = child
    return new


def _struct_handler(kind: Any) -> Container:
    """Return the handler of a msgspec struct; it does not run ``__post_init__``."""
    names, frozen = kind.__struct_fields__, kind.__struct_config__.frozen
    fields = {name: inspect.getattr_static(kind, name) for name in names}
    base = next(cls for cls in kind.__mro__ if _RECORDS.get(type_name(cls)) is _struct_handler)

    def flatten(obj: Any) -> tuple[list[str], list[Any]]:
        return list(names), [getattr(obj, name) for name in names]

    def copy_struct(obj: Any) -> Any:
        new = base.__copy__(obj)  # msgspec cannot create an object without fields
        if hasattr(obj, "__dict__"):
            new.__dict__.update(obj.__dict__)
        return new

    def unflatten(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
        new = copy_struct(obj) if new_empty is None else new_empty
        for name, child in zip(keys, children, strict=True):
            fields[name].__set__(new, child)
        return new

    return _record(flatten, unflatten, copy_struct, frozen)


_RECORDS: dict[str, Any] = {
    "pydantic.main.BaseModel": _model_handler,
    "pydantic.v1.main.BaseModel": _model_handler,
    "msgspec.Struct": _struct_handler,
}
"""Base classes of records without a marker attribute, and their handlers."""


def _is_computed(kind: Any, name: str) -> bool:
    """Return whether an object's attribute is the cached value of a `functools.cached_property`."""
    return isinstance(getattr(kind, name, None), functools.cached_property)


def _create_without_init(kind: Any) -> Any:
    try:
        return object.__new__(kind)
    except TypeError:
        return kind.__new__(kind)


def copy_bare(obj: Any) -> Any:
    """Return a shallow copy without running code of the class; drop cached properties."""
    kind: Any = type(obj)
    new = _create_without_init(kind)
    if hasattr(obj, "__dict__"):
        new.__dict__.update((name, value) for name, value in obj.__dict__.items() if not _is_computed(kind, name))
    _copy_slots(obj, new)
    if hasattr(new, "_attrs_cached_hash"):  # the fields will change
        object.__setattr__(new, "_attrs_cached_hash", None)
    return new


def iterate_attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes in an object's dict and slots."""
    yield from getattr(obj, "__dict__", {}).items()
    for name in (name for cls in type(obj).__mro__ for name in _slots(cls)):
        if hasattr(obj, name):
            yield name, getattr(obj, name)


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    mangled = (f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name for name in names)
    return [name for name in mangled if name not in ("__dict__", "__weakref__")]


class Keys(list[Any]):
    """Keys, with data that `flatten` passes to `unflatten`."""

    context: Any


def _flatten_unknown(obj: Any) -> tuple[list[Any], list[Any]]:
    found, children = flatten_mapping(obj) if derives(type(obj), Mapping) else flatten_list(obj)
    keys = Keys(range(len(children)) if found is None else found)
    keys.context = list(children)
    return keys, children


def _unflatten_unknown(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    """Return a deep copy with replaced children; a shallow copy may share the storage."""
    memo: dict[int, Any] = {id(key): key for key in keys}
    memo |= {id(old): child for old, child in zip(keys.context, children, strict=True)}
    new = copy.deepcopy(obj, memo)
    found = list(new.keys()) if derives(type(obj), Mapping) else list(range(len(new)))
    if type(new) is not type(obj) or found != keys:
        raise TypeError("the copy has different elements")
    if any(new[key] is not child for key, child in zip(keys, children, strict=True)):
        raise TypeError("the copy does not contain the assigned children")
    return new


def abstract_handler(kind: type) -> Container | None:
    """Return the handler of a registered `Mapping` or `Sequence`, or None."""
    is_mapping = derives(kind, Mapping)
    if not (is_mapping or derives(kind, Sequence)):
        return None
    return Container(
        kind="mapping" if is_mapping else "sequence",
        flatten=_flatten_unknown,
        unflatten=_unflatten_unknown,
        mutable=derives(kind, (MutableMapping, MutableSequence)),
        elements="fresh",
        falls_to=dict if is_mapping else list,
    )
