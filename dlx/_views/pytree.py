"""Lazy views as nodes of pytrees of torch, jax and optree: the leaves are results, converted when asked for.

A function over a tree gives plain containers back. Each of the three has a registry of its own, so views must be
registered with it, and none is imported for that: with what is imported already it is done when the first view class
is made. For what is not, a finder waits in `sys.meta_path`. It finds nothing by itself; it asks the other finders for
one of the three modules, and registers the views when that module has run. When all three are known it goes.
`when_imported` lets other code of dlx wait for one of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlx._registry.handlers import attributes
from dlx._support.reflect import exception_text

__all__ = ["Structure", "register", "structure_of", "when_imported"]


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
    """What is left of a view without its elements; equal where the containers are of one type and have the same keys.

    Attributes
    ----------
    kind
        The type of the plain container.
    keys
        Of the elements: keys of a mapping, names of a record, indices of a sequence.
    rest
        The other attributes of a record, which the next one gets.
    build
        ``build(elements)`` returns the plain container around elements.
    """

    kind: type
    keys: tuple[Any, ...]
    rest: _Rest
    build: Callable[[list[Any]], Any] = field(compare=False)


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
        rest = {name: value for name, value in attributes(kept) if name not in names}
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
    module.register_pytree_with_keys(
        cls,
        lambda view: _entries(view, module.DictKey, module.GetAttrKey, module.SequenceKey),
        _built,
        structure_of,
    )


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
_classes: list[type] = []
_known: dict[str, Any] = {}  # name of a registry -> its module
_called: dict[str, list[Callable[[], None]]] = {name: [] for name in _REGISTRIES}


def register(cls: type) -> None:
    """Register a class of views, with each of the three now or when it is imported."""
    _classes.append(cls)
    for name, module in list(_known.items()):  # another thread may import one
        _try(name, module, cls)


def when_imported(name: str, function: Callable[[], None]) -> None:
    """Call a function once one of the three modules is imported: now or later."""
    if name in _known:
        function()
    else:
        _called[name].append(function)


def _try(name: str, module: Any, cls: type) -> None:
    try:
        _REGISTRIES[name](module, cls)
    except MemoryError:
        raise
    except AttributeError:  # a test's stand-in for the module
        pass
    except Exception as error:
        text = f"{name} takes no lazy views of dlx as nodes, and treats one as a leaf: {exception_text(error)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _found(name: str, module: Any) -> None:
    """Register all classes with a module that was imported."""
    _known[name] = module
    for cls in _classes:
        _try(name, module, cls)
    for function in _called[name]:
        function()
    if len(_known) == len(_REGISTRIES):
        with contextlib.suppress(ValueError):  # it has gone
            sys.meta_path.remove(_waiting)


class _Loader:
    """A module's own loader, which registers views when the module has run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec) if hasattr(self._loader, "create_module") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        _found(module.__name__, module)


class _Waiting:
    """A finder that finds the registries' modules by the other finders, and registers views when they have run."""

    def __init__(self) -> None:
        self._asked = threading.local()  # the other finders may ask all of them in turn

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _REGISTRIES or getattr(self._asked, "name", None) == name:
            return None
        self._asked.name = name
        try:
            spec = next(
                (
                    spec
                    for finder in list(sys.meta_path)
                    if finder is not self and (spec := finder.find_spec(name, path, target)) is not None
                ),
                None,
            )
        finally:
            self._asked.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


_waiting: Any = _Waiting()


def _begin() -> None:
    for name in _REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _found(name, module)
    if len(_known) < len(_REGISTRIES):
        sys.meta_path.insert(0, _waiting)


_begin()
