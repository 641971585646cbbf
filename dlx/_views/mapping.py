"""Lazy views of mappings."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from dlx._support.reflect import derives
from dlx._views.base import MISSING, KeyedView, View, is_view

__all__ = ["MappingView", "MutableMappingView"]

D = TypeVar("D")
K = TypeVar("K")
V = TypeVar("V")


class Values(ValuesView[Any]):
    """The results of a view, converted during iteration."""

    _mapping: Any

    def __reversed__(self) -> Iterator[Any]:
        for key in reversed(self._mapping):
            yield self._mapping[key]

    def __contains__(self, value: Any) -> bool:
        return any(self._mapping._contains_item(key, value) for key in self._mapping)


class Items(ItemsView[Any, Any]):
    """The keys and results of a view, converted during iteration."""

    _mapping: Any

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        for key in reversed(self._mapping):
            yield key, self._mapping[key]

    def __contains__(self, item: Any) -> bool:
        if not (isinstance(item, tuple) and len(item) == 2):
            return False
        return item[0] in self._mapping and self._mapping._contains_item(*item)


class MappingView(KeyedView, Mapping[K, V]):
    """A lazy view of a mapping, with the source's keys."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __getitem__(self, key: K) -> V: ...

    def __iter__(self) -> Iterator[Any]:
        keys: Iterator[Any] = iter(self._source.keys())  # TensorDict does not iterate over keys
        return keys

    def __reversed__(self) -> Iterator[Any]:
        return cast("Iterator[Any]", reversed(self._source.keys()))

    def __contains__(self, key: Any) -> bool:
        return key in self._source.keys()  # noqa: SIM118 - as above

    def __len__(self) -> int:
        return len(self._source.keys())

    def _count(self) -> int:
        return len(self)

    def keys(self) -> KeysView[K]:
        """Return the source's keys."""
        return self._source.keys()  # type: ignore[no-any-return]

    def values(self) -> ValuesView[V]:
        """Return a view of the results."""
        return Values(self)

    def items(self) -> ItemsView[K, V]:
        """Return a view of keys and results."""
        return Items(self)

    @overload
    def get(self, key: K, default: None = None) -> V | None: ...
    @overload
    def get(self, key: K, default: V | D) -> V | D: ...
    def get(self, key: Any, default: Any = None) -> Any:
        """Return the result for a key, or the default, unconverted."""
        if isinstance(self._source, dict) and key not in self:  # avoids __missing__
            return default
        try:
            return self[key]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        # Items that are attributes, too: attribute dicts, BatchEncoding and ModelOutput of transformers.
        if not name.startswith("_") and self._handler.elements != "fresh" and name in self:
            element = self._source[name]
            if getattr(self._source, name, self) is element:
                return self._touch(name, element)
        raise AttributeError(f"a view of {type(self._source).__name__} has no attribute {name!r}")

    def _ipython_key_completions_(self) -> list[Any]:
        return list(self.keys())

    def _children(self) -> Any:
        return () if self._handler.elements == "fresh" else (self._source[key] for key in self)

    def _holds_still(self, key: Any, element: Any) -> bool:
        return key in self and super()._holds_still(key, element)  # avoids __missing__

    def _contains_item(self, key: Any, value: Any) -> bool:
        """Return whether the view has a value at a key. Arrays are compared by identity, data by equality."""
        if self._handler.elements == "fresh":
            here = self[key]
            return here is value or self._equals(here, value)
        return self._equals(self._source[key], self._to_source(value))

    # ---- operators --------------------------------------------------------------------------------------------------

    def copy(self) -> dict[K, V]:
        """Return a dict of the view's elements: converted arrays, and views of nested containers."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other) or any(key not in self for key in other):
            return False
        value = other._at if isinstance(other, MappingView) else other.__getitem__
        return all(self._contains_item(key, value(key)) or _equal(self[key], value(key)) for key in other)

    __hash__ = None  # type: ignore[assignment]


def _equal(here: Any, other: Any) -> bool:
    return is_view(here) and derives(type(other), (list, tuple, dict, View)) and bool(here == other)


class MutableMappingView(MappingView[K, V], MutableMapping[K, V]):
    """A lazy view of a mutable mapping. Changes are made to the source."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        keys = self._source.keys()
        return iter(keys) if isinstance(self._source, dict) else self._iterate_checked(keys)

    def keys(self) -> Any:
        """Return the source's keys."""
        return self._source.keys() if isinstance(self._source, dict) else KeysView(self)

    def _iterate_checked(self, keys: Any) -> Iterator[Any]:
        """Iterate over keys, and raise like a dict if the size changes."""
        n = len(keys)
        for key in keys:
            yield key
            if len(self._source.keys()) != n:
                raise RuntimeError(f"{type(self._source).__name__} changed size during iteration")

    def __setitem__(self, key: Any, value: Any) -> None:
        old = self._source[key] if key in self else None
        new = self._inward(value, old)
        self._forget(key)  # first: it may run out of memory
        self._source[key] = new

    def __delitem__(self, key: Any) -> None:
        self._forget(key)
        del self._source[key]

    def pop(self, key: Any, default: Any = MISSING) -> Any:
        """Remove a key and return its result, or the default, unconverted."""
        if key not in self:
            if default is MISSING:
                raise KeyError(key)
            return default
        new = self[key]
        del self[key]
        return new

    def popitem(self, *last: Any, **options: Any) -> tuple[Any, Any]:
        """Remove the last key, like a dict, or the first, like ``OrderedDict.popitem(last=False)``."""
        first = (last and not last[0]) or not options.get("last", True)
        for key in iter(self) if first or not hasattr(type(self._source.keys()), "__reversed__") else reversed(self):
            return key, self.pop(key)
        raise KeyError("popitem(): the view is empty")

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the result for a key; store the default first if the key is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Remove all keys."""
        self._forget()
        self._source.clear()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "move_to_end" and hasattr(type(self._source), name):
            return self._source.move_to_end
        if name == "default_factory" and hasattr(self._source, name):
            return self._source.default_factory
        return super().__getattr__(name)
