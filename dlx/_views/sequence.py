"""Lazy views of sequences: tuples, lists, deques and named tuples."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from dlx._registry.lookup import LIST, TUPLE, look
from dlx._support.reflect import derives
from dlx._views.base import MISSING, KeyedView, is_view
from dlx.adapter.declarations import Container

__all__ = ["MutableSequenceView", "NamedView", "SequenceView", "SliceView"]

T = TypeVar("T")


class Window(Sequence[Any]):
    """The source of a slice of a view: positions of a sequence."""

    __slots__ = ("places", "source")

    def __init__(self, source: Any, places: range) -> None:
        self.source, self.places = source, places

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Window(self.source, self.places[i])
        return self.source[self.places[i]]

    def __len__(self) -> int:
        return len(self.places)


class SequenceView(KeyedView, Sequence[T]):
    """A lazy view of a sequence. A slice is a view of fixed positions."""

    __slots__ = ()

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, i: SupportsIndex) -> T: ...
        @overload
        def __getitem__(self, i: slice) -> SequenceView[T]: ...
        def __getitem__(self, i: Any) -> Any: ...

    def _convert_at(self, key: Any) -> Any:
        return self._slice(key) if isinstance(key, slice) else self._touch(key)

    def _slice(self, places: slice) -> SequenceView[T]:
        return SliceView(self, range(len(self._source))[places])

    def _kind(self) -> str:
        source = self._source
        while isinstance(source, Window):
            source = source.source
        return type(source).__name__

    def _is_tuple(self) -> bool:
        return isinstance(self._source, tuple) or self._handler is TUPLE

    def _to_builtin(self, elements: Iterable[Any]) -> Any:
        return tuple(elements) if self._is_tuple() else list(elements)

    def _children(self) -> Any:
        return () if self._handler.elements == "fresh" else self._source

    # ---- iteration --------------------------------------------------------------------------------------------------

    def _iterate(self) -> Iterator[T]:
        """Return an iterator over the results if there is no getter for elements."""
        elements = self._handler.elements
        if elements == "fresh" or elements == "same_as":
            return self._iterate_indices()
        self._begin()
        return self._results()

    def _iterate_indices(self) -> Iterator[Any]:
        i = 0
        while i < len(self._source):
            yield self._touch(i)
            i += 1

    def _elements(self) -> Iterator[tuple[int, Any]]:
        """Yield (index, source element), or cached results if each access creates a new element."""
        if self._handler.elements == "fresh":
            return ((i, self._slots[i]() if i in self._slots else self._at(i)) for i in range(len(self._source)))
        return enumerate(self._source)

    def __contains__(self, value: Any) -> bool:
        return self._find_index(value) is not None

    def _find_index(self, value: Any, start: int = 0, stop: int | None = None) -> int | None:
        raw = value if self._handler.elements == "fresh" else self._to_source(value)
        for i, element in self._elements():
            if stop is not None and i >= stop:
                return None
            if i >= start and self._equals(element, raw):
                return i
        return None

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first index of a value, compared like ``in``: arrays by identity, data by equality."""
        n = len(self._source)
        start = max(start + n, 0) if start < 0 else start
        stop = max(stop + n, 0) if stop is not None and stop < 0 else stop
        place = self._find_index(value, start, stop)
        if place is None:
            raise ValueError("the value is not in the view")
        return place

    def count(self, value: Any) -> int:
        """Return the number of occurrences of a value, compared like ``in``."""
        raw = value if self._handler.elements == "fresh" else self._to_source(value)
        return sum(self._equals(element, raw) for _, element in self._elements())

    # ---- operators --------------------------------------------------------------------------------------------------

    def copy(self) -> Any:
        """Return a list or tuple of the view's elements: arrays, and views of nested containers."""
        return self._to_builtin(self)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, list | tuple | SequenceView):
            return NotImplemented
        return self._to_builtin([*self, *other])

    def __radd__(self, other: Any) -> Any:
        return type(other)([*other, *self]) if type(other) in (list, tuple) else NotImplemented

    def __mul__(self, times: int) -> Any:
        return self.copy() * times

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, SequenceView):
            if self._is_tuple() is not other._is_tuple():
                return NotImplemented
            raw: Any = [other._to_source(x) for x in other._source]
        elif isinstance(other, tuple if self._is_tuple() else list):
            raw = [self._to_source(x) for x in other]
        else:
            return NotImplemented
        return len(self) == len(raw) and all(
            self._equals(x, y) or self._equals_nested(i, y)
            for i, (x, y) in enumerate(zip(self._source, raw, strict=True))
        )

    def _equals_nested(self, i: int, other: Any) -> bool:
        """Return whether a nested container at an index equals another one."""
        return derives(type(other), (list, tuple, dict)) and is_view(here := self[i]) and here.__eq__(other) is True

    __hash__ = None  # type: ignore[assignment]


class SliceView(SequenceView[T]):
    """A read-only lazy view of fixed positions of a sequence."""

    __slots__ = ("_places", "_whole")

    def __init__(self, whole: SequenceView[T], places: range) -> None:
        base = whole._handler
        handler = TUPLE if whole._is_tuple() else replace(LIST, elements=base.elements, identity=base.identity)
        super().__init__(Window(whole._source, places), handler, whole._scope, whole._path)
        self._whole, self._places = whole, places

    def _touch(self, key: Any, element: Any = MISSING) -> Any:
        return self._whole._touch(self._places[key], element)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return SliceView(self._whole, self._places[i])
        return self._whole[self._places[i]]

    def __iter__(self) -> Iterator[T]:
        return (self._whole[place] for place in self._places)

    def _elements(self) -> Iterator[tuple[int, Any]]:
        found = dict(self._whole._elements()) if self._handler.elements == "fresh" else self._source.source
        return ((i, found[place]) for i, place in enumerate(self._places))

    def _list_results(self) -> list[tuple[Any, Any]]:
        results = dict(self._whole._list_results())
        return [(i, results[place]) for i, place in enumerate(self._places) if place in results]

    def materialize(self) -> Any:
        """Convert all elements to a list or tuple."""
        return self._scope.eager(self._to_stored(), TUPLE if self._is_tuple() else LIST)

    def refresh(self) -> None:
        """Drop the results of the whole sequence."""
        self._whole.refresh()

    def _to_stored(self) -> Any:
        return self._to_builtin(self._source)


class NamedView(SequenceView[Any]):
    """A lazy view of a named tuple or struct sequence, with its attributes, `_fields`, `_asdict` and `_replace`."""

    __slots__ = ()

    @property
    def _fields(self) -> tuple[str, ...]:
        names: Any = self._handler.flatten(self._source)[0]
        return tuple(names if names is not None else type(self._source).__match_args__)  # a struct sequence

    def _names(self) -> tuple[str, ...]:
        return self._fields

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **values: Any) -> Any:
        return self.copy()._replace(**values)

    def copy(self) -> Any:
        """Return a named tuple of the same type with the view's elements."""
        assert self._handler.unflatten is not None
        return self._handler.unflatten(self._source, list(self._fields), list(self), None)

    def __mul__(self, times: int) -> Any:
        return tuple(self) * times

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            raise AttributeError(f"a view of {type(self._source).__name__} has no attribute {name!r}")
        return self[self._fields.index(name)]

    @property
    def index(self) -> Any:
        """The field `index`, else the tuple's method."""
        return self.__getattr__("index") if "index" in self._fields else super().index

    @property
    def count(self) -> Any:
        """The field `count`, else the tuple's method."""
        return self.__getattr__("count") if "count" in self._fields else super().count


class MutableSequenceView(SequenceView[T], MutableSequence[T]):  # type: ignore[misc]  # a slice is a view
    """A lazy view of a mutable sequence. Changes are made to the source."""

    __slots__ = ()

    def __setitem__(self, i: Any, value: Any) -> None:
        if isinstance(i, slice):
            places = range(len(self._source))[i]
            values = self._list_values(value)
            olds = [self._source[k] for k in places] if self._handler.elements != "fresh" else []
            olds += [None] * (len(values) - len(olds))
            news = [self._inward(new, old) for new, old in zip(values, olds, strict=False)]
            self._forget()  # first: it may run out of memory
            self._source[i] = news
            return
        i = operator.index(i)
        new = self._inward(value, self._source[i])
        self._drop(i)
        self._source[i] = new

    def _list_values(self, values: Iterable[Any]) -> list[Any]:
        """Return the values to store; for a view, its unconverted arrays, and views of its containers."""
        if not isinstance(values, SequenceView) or values._handler.elements == "fresh":
            return [*(values._source if isinstance(values, SequenceView) else values)]
        return [values[k] if isinstance(look(x).part, Container) else x for k, x in enumerate(values._source)]

    def _drop(self, i: int) -> None:
        """Drop the result of an index, positive or negative."""
        n = len(self._source)
        self._forget(i, i + n if i < 0 else i - n)

    def __delitem__(self, i: Any) -> None:
        self._forget()
        del self._source[i]

    def insert(self, i: SupportsIndex, value: Any) -> None:
        """Insert a value before an index."""
        i = operator.index(i)
        new = self._inward(value)
        if i < len(self._source) or self._slots.keys() - range(len(self._source)):
            self._forget()
        self._source.insert(i, new)

    def append(self, value: Any) -> None:
        """Append a value."""
        new = self._inward(value)
        if self._handler.elements == "fresh":
            self._forget()
        self._source.append(new)

    def extend(self, values: Iterable[Any]) -> None:
        """Append values."""
        for value in self._list_values(values):
            self.append(value)

    def __imul__(self, times: SupportsIndex) -> Any:
        n = operator.index(times)
        values = [*self._source] * (n - 1)
        if n > 0:
            self._source.extend(values)
        else:
            self.clear()
        return self

    def clear(self) -> None:
        """Remove all elements."""
        self._forget()
        if hasattr(type(self._source), "clear"):
            self._source.clear()
        else:
            del self._source[:]

    def reverse(self) -> None:
        """Reverse the source in place."""
        self._forget()
        self._source.reverse()

    def __getattr__(self, name: str) -> Any:
        if name in ("appendleft", "popleft", "extendleft", "rotate", "maxlen") and hasattr(type(self._source), name):
            return _deque_method(self, name)
        raise AttributeError(f"a view of {type(self._source).__name__} has no attribute {name!r}")


def _deque_method(view: MutableSequenceView[Any], name: str) -> Any:
    source = view._source
    if name == "maxlen":
        return source.maxlen

    def rotate(n: int = 1) -> None:
        view._forget()
        source.rotate(n)

    def appendleft(value: Any) -> None:
        new = view._inward(value)
        view._forget()
        source.appendleft(new)

    def extendleft(values: Iterable[Any]) -> None:
        for value in list(values):
            appendleft(value)

    return {"rotate": rotate, "appendleft": appendleft, "extendleft": extendleft, "popleft": lambda: view.pop(0)}[name]
