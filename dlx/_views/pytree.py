"""Registration of lazy views as pytree nodes of torch, jax and optree, with results as leaves.

Functions over a pytree return built-in containers. A view class is registered with each library when the library is
imported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlx._registry.handlers import iterate_attributes
from dlx._support.imports import when_imported
from dlx._support.reflect import exception_text

__all__ = ["Structure", "register", "structure_of"]


class _Rest:
    """Attributes by name; equal if all values are the same objects, or equal numbers or text."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rest) or self.values.keys() != other.values.keys():
            return False
        return all(_same(value, other.values[name]) for name, value in self.values.items())

    def __hash__(self) -> int:
        return hash(frozenset(self.values))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _COMPARED and bool(one == other))


_COMPARED = (bool, int, float, complex, str, bytes)
_NO_REST = _Rest({})


@dataclass(frozen=True, slots=True)
class Structure:
    """A view without its elements; equal if types and keys are equal."""

    kind: type
    keys: tuple[Any, ...]  # of a mapping; names of a record, indices of a sequence
    rest: _Rest  # other attributes of a record, copied to new ones
    build: Callable[[list[Any]], Any] = field(compare=False)


def structure_of(view: Any) -> tuple[list[Any], Structure]:
    """Return the elements of a view, converted except for nested views, and its structure."""
    if isinstance(view, Mapping):
        keys = tuple(view.keys())
        structure = Structure(dict, keys, _NO_REST, lambda new: dict(zip(keys, new, strict=True)))
        return [view[key] for key in keys], structure
    names = view._names()
    if names is None:
        elements = list(view)
        kind = tuple if view._is_tuple() else list
        return elements, Structure(kind, tuple(range(len(elements))), _NO_REST, kind)
    source, unflatten = view._source, view._handler.unflatten
    elements = list(view) if isinstance(view, Sequence) else [view._touch(name) for name in names]
    try:  # without the elements, because jax keeps structures of traces alive
        empty = unflatten(source, list(names), [None] * len(names), None)
        rest = {name: value for name, value in iterate_attributes(empty) if name not in names}
    except MemoryError:
        raise
    except Exception:
        empty, rest = source, {"": source}
    return elements, Structure(type(source), names, _Rest(rest), lambda new: unflatten(empty, list(names), new, None))


def _build(structure: Structure, elements: Iterable[Any]) -> Any:
    return structure.build(list(elements))


def _entries(view: Any, mapping: Any, attribute: Any, index: Any) -> tuple[list[tuple[Any, Any]], Structure]:
    """Return pairs (path entry, element), and the structure."""
    elements, structure = structure_of(view)
    entry = mapping if structure.kind is dict else index if structure.kind in (list, tuple) else attribute
    return [(entry(key), each) for key, each in zip(structure.keys, elements, strict=True)], structure


def _register_torch(module: Any, cls: type) -> None:
    module.register_pytree_node(
        cls,
        structure_of,
        lambda elements, structure: _build(structure, elements),
        flatten_with_keys_fn=lambda view: _entries(view, module.MappingKey, module.GetAttrKey, module.SequenceKey),
    )


def _register_jax(module: Any, cls: type) -> None:
    keys = module.DictKey, module.GetAttrKey, module.SequenceKey
    module.register_pytree_with_keys(cls, lambda view: _entries(view, *keys), _build, structure_of)


def _register_optree(module: Any, cls: type) -> None:
    def flatten(view: Any) -> tuple[list[Any], Structure, tuple[Any, ...]]:
        elements, structure = structure_of(view)
        return elements, structure, structure.keys

    namespace = getattr(module.registry, "__GLOBAL_NAMESPACE")
    entry = module.GetAttrEntry if "_names" in vars(cls) else module.AutoEntry
    module.register_pytree_node(cls, flatten, _build, path_entry_type=entry, namespace=namespace)


_REGISTRIES: dict[str, Callable[[Any, type], None]] = {
    "torch.utils._pytree": _register_torch,
    "jax.tree_util": _register_jax,
    "optree": _register_optree,
}


def register(cls: type) -> None:
    """Register a view class with each library, now or when it is imported."""
    for name in _REGISTRIES:
        when_imported(name, functools.partial(_register, cls, name))


def _register(cls: type, name: str, module: Any) -> None:
    try:
        _REGISTRIES[name](module, cls)
    except MemoryError:
        raise
    except AttributeError:  # a test's stand-in for the module
        pass
    except Exception as error:
        text = f"cannot register lazy views of dlx with {name}, which treats them as leaves: {exception_text(error)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
