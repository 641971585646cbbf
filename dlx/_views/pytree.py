"""Lazy views as nodes of pytrees of torch, jax and optree: the leaves are results, converted when asked for.

A function over a tree gives plain containers back. Each of the three has its own registry, in which a class of views is
registered when that module is imported.
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
    """Attributes by name; equal where each is the same object, or an equal number or text."""

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
    """A view without its elements; equal if the containers have one type and the same keys."""

    kind: type  # of the plain container
    keys: tuple[Any, ...]  # of a mapping; names of a record, indices of a sequence
    rest: _Rest  # the other attributes of a record, which the next one gets
    build: Callable[[list[Any]], Any] = field(compare=False)  # the plain container around elements


def structure_of(view: Any) -> tuple[list[Any], Structure]:
    """Return the elements of a view, converted now but for nested views, and the structure around them."""
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
    try:  # one without its elements, which would live as long as the structure does: jax keeps that of each trace
        kept = unflatten(source, list(names), [None] * len(names), None)
        rest = {name: value for name, value in iterate_attributes(kept) if name not in names}
    except MemoryError:
        raise
    except Exception:  # it must have its elements
        kept, rest = source, {"": source}
    return elements, Structure(type(source), names, _Rest(rest), lambda new: unflatten(kept, list(names), new, None))


def _built(structure: Structure, elements: Iterable[Any]) -> Any:
    return structure.build(list(elements))


def _entries(view: Any, mapping: Any, attribute: Any, index: Any) -> tuple[list[tuple[Any, Any]], Structure]:
    """Return (entry of a path, element) for each element, and the structure."""
    elements, structure = structure_of(view)
    entry = mapping if structure.kind is dict else index if structure.kind in (list, tuple) else attribute
    return [(entry(key), each) for key, each in zip(structure.keys, elements, strict=True)], structure


def _with_torch(module: Any, cls: type) -> None:
    module.register_pytree_node(
        cls,
        structure_of,
        lambda elements, structure: _built(structure, elements),
        flatten_with_keys_fn=lambda view: _entries(view, module.MappingKey, module.GetAttrKey, module.SequenceKey),
    )


def _with_jax(module: Any, cls: type) -> None:
    keys = module.DictKey, module.GetAttrKey, module.SequenceKey
    module.register_pytree_with_keys(cls, lambda view: _entries(view, *keys), _built, structure_of)


def _with_optree(module: Any, cls: type) -> None:
    def flatten(view: Any) -> tuple[list[Any], Structure, tuple[Any, ...]]:
        elements, structure = structure_of(view)
        return elements, structure, structure.keys

    everywhere = getattr(module.registry, "__GLOBAL_NAMESPACE")
    entry = module.GetAttrEntry if "_names" in vars(cls) else module.AutoEntry
    module.register_pytree_node(cls, flatten, _built, path_entry_type=entry, namespace=everywhere)


_REGISTRIES: dict[str, Callable[[Any, type], None]] = {
    "torch.utils._pytree": _with_torch,
    "jax.tree_util": _with_jax,
    "optree": _with_optree,
}


def register(cls: type) -> None:
    """Register a class of views, with each of the three now or when it is imported."""
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
        text = f"{name} takes no lazy views of dlx as nodes, and treats one as a leaf: {exception_text(error)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
