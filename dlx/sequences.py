"""Lazy views of sequences; those that can be changed are in `dlx.mutable_sequences`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from dlx.containers import LIST, TUPLE
from dlx.errors import DlxError
from dlx.foreign import derives
from dlx.lazy import MISSING
from dlx.view import PlacesView, is_view

__all__ = ["NamedView", "SequenceView", "SliceView"]


T = TypeVar("T")


class Window(Sequence[Any]):
    """Some places of a sequence: what a slice of a view looks at."""

    __slots__ = ("places", "source")

    def __init__(self, source: Any, places: range) -> None:
        self.source, self.places = source, places

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Window(self.source, self.places[i])
        return self.source[self.places[i]]

    def __len__(self) -> int:
        return len(self.places)


class SequenceView(PlacesView, Sequence[T]):
    """A lazy view of a sequence. A slice of it is a view of those places, which are settled then."""

    __slots__ = ()

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, i: SupportsIndex) -> T: ...
        @overload
        def __getitem__(self, i: slice) -> SequenceView[T]: ...
        def __getitem__(self, i: Any) -> Any: ...

    def _missed(self, key: Any) -> Any:
        return self._part(key) if isinstance(key, slice) else self._touch(key)

    def _part(self, places: slice) -> SequenceView[T]:
        return SliceView(self, range(len(self._source))[places])

    def _kind(self) -> str:
        source = self._source
        while isinstance(source, Window):
            source = source.source
        return type(source).__name__

    def _is_tuple(self) -> bool:
        return isinstance(self._source, tuple) or self._row is TUPLE

    def _plain(self, elements: Iterable[Any]) -> Any:
        return tuple(elements) if self._is_tuple() else list(elements)

    def __len__(self) -> int:
        return len(self._source)

    def _children(self) -> Any:
        return () if self._row.elements == "fresh" else self._source

    # ---- one after another ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        if self._row.elements != "stable":
            yield from self._counted()
            return
        self._begin()
        slots, scope = self._slots, self._scope
        known, moved, me, nested = scope.known, scope.moved, self._me, self._path is not None
        lane, to = scope.options.lane, scope.options.to
        get, place = slots.get, lane._place if lane is not None else None
        for i, element in enumerate(self._source):
            slot = get(i)
            if slot is None:
                if place is not None and i & 255 and scope.back is None:  # what _touch does
                    try:
                        new = place(element, to, slots, known, moved, i, (me, i) if nested else i)
                    except DlxError:  # _touch says where
                        new = None
                    if new is not None:
                        yield new
                        continue
            elif slot[0] is element:
                yield slot[1]
                continue
            yield self._touch(i, element)

    def _counted(self) -> Iterator[Any]:
        i = 0
        while i < len(self._source):
            yield self._touch(i)
            i += 1

    def __reversed__(self) -> Iterator[T]:
        i = len(self._source)
        while (i := i - 1) >= 0:
            yield self[i]

    def _elements(self) -> Iterator[tuple[int, Any]]:
        """Give the places and the source's elements; of elements made anew, the results that are there."""
        if self._row.elements == "fresh":
            return ((i, self._slots[i]() if i in self._slots else self._at(i)) for i in range(len(self._source)))
        return enumerate(self._source)

    def __contains__(self, value: Any) -> bool:
        return self._place(value) is not None

    def _place(self, value: Any, start: int = 0, stop: int | None = None) -> int | None:
        raw = value if self._row.elements == "fresh" else self._raw(value)
        for i, element in self._elements():
            if stop is not None and i >= stop:
                return None
            if i >= start and self._is(element, raw):
                return i
        return None

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first place of a value, compared as ``in`` does: arrays by identity, data by equality."""
        n = len(self._source)
        start = max(start + n, 0) if start < 0 else start
        stop = max(stop + n, 0) if stop is not None and stop < 0 else stop
        place = self._place(value, start, stop)
        if place is None:
            raise ValueError("the value is not in the view")
        return place

    def count(self, value: Any) -> int:
        """Return how often a value is in the view, compared as ``in`` does."""
        raw = value if self._row.elements == "fresh" else self._raw(value)
        return sum(self._is(element, raw) for _, element in self._elements())

    # ---- with others ------------------------------------------------------------------------------------------------

    def copy(self) -> Any:
        """Return a list, of a tuple a tuple, of what the view shows: arrays, and views of nested containers."""
        return self._plain(self)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, list | tuple | SequenceView):
            return NotImplemented
        return self._plain([*self, *other])

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
            raw: Any = [other._raw(x) for x in other._source]
        elif isinstance(other, tuple if self._is_tuple() else list):
            raw = [self._raw(x) for x in other]
        else:
            return NotImplemented
        return len(self) == len(raw) and all(
            self._is(x, y) or self._deep(i, y) for i, (x, y) in enumerate(zip(self._source, raw, strict=True))
        )

    def _deep(self, i: int, other: Any) -> bool:
        """Return whether the container at a place equals another one."""
        return derives(type(other), (list, tuple, dict)) and is_view(here := self[i]) and here.__eq__(other) is True

    __hash__ = None  # type: ignore[assignment]


class SliceView(SequenceView[T]):
    """A lazy view of some places of a sequence, which were settled when it was made. It cannot be written to."""

    __slots__ = ("_places", "_whole")

    def __init__(self, whole: SequenceView[T], places: range) -> None:
        row = TUPLE if whole._is_tuple() else replace(LIST, elements=whole._row.elements, identity=whole._row.identity)
        super().__init__(Window(whole._source, places), row, whole._scope, whole._path)
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
        found = dict(self._whole._elements()) if self._row.elements == "fresh" else self._source.source
        return ((i, found[place]) for i, place in enumerate(self._places))

    def _done(self) -> list[tuple[Any, Any]]:
        done = dict(self._whole._done())
        return [(i, done[place]) for i, place in enumerate(self._places) if place in done]

    def materialize(self) -> Any:
        """Convert everything now: a list, or a tuple of a tuple's part."""
        return self._scope.eager(self._stored(), TUPLE if self._is_tuple() else LIST)

    def refresh(self) -> None:
        """Forget what was converted, in the whole sequence."""
        self._whole.refresh()

    def _stored(self) -> Any:
        return self._plain(self._source)


class NamedView(SequenceView[Any]):
    """A lazy view of a named tuple, or a structure of C, whose names are attributes.

    So are `_fields`, `_asdict`, `_replace`.
    """

    __slots__ = ()

    @property
    def _fields(self) -> tuple[str, ...]:
        names: Any = self._row.open(self._source)[0]
        return tuple(names if names is not None else type(self._source).__match_args__)  # of a structure of C

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **values: Any) -> Any:
        return self.copy()._replace(**values)

    def copy(self) -> Any:
        """Return a named tuple of the same type with what the view shows."""
        assert self._row.close is not None
        return self._row.close(self._source, list(self._fields), list(self), None)

    def __mul__(self, times: int) -> Any:
        return tuple(self) * times

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            raise AttributeError(f"a view of {type(self._source).__name__} has no attribute {name!r}")
        return self[self._fields.index(name)]

    # Fields may be called as a tuple's methods are, and go first, as in the tuple itself.

    @property
    def index(self) -> Any:
        """The field of that name, else as a tuple's method."""
        return self.__getattr__("index") if "index" in self._fields else super().index

    @property
    def count(self) -> Any:
        """The field of that name, else as a tuple's method."""
        return self.__getattr__("count") if "count" in self._fields else super().count
