"""Lazy views of sequences that can be changed through them: lists and deques."""

from __future__ import annotations

import operator
from collections.abc import Iterable, MutableSequence
from typing import Any, SupportsIndex, TypeVar

from dlx.facts import Container
from dlx.sequences import SequenceView
from dlx.writing import kind_of

__all__ = ["MutableSequenceView"]

T = TypeVar("T")


class MutableSequenceView(SequenceView[T], MutableSequence[T]):  # type: ignore[misc]  # a slice is a view
    """A lazy view of a sequence that can be changed through it: the source is changed."""

    __slots__ = ()

    def __setitem__(self, i: Any, value: Any) -> None:
        if isinstance(i, slice):
            places = range(len(self._source))[i]
            values = self._given(value)
            olds = [self._source[k] for k in places] if self._row.elements != "fresh" else []
            olds += [None] * (len(values) - len(olds))
            self._source[i] = [self._inward(new, old) for new, old in zip(values, olds, strict=False)]
            self._forget()
            return
        i = operator.index(i)
        self._source[i] = self._inward(value, self._source[i])
        self._drop(i)

    def _given(self, values: Iterable[Any]) -> list[Any]:
        """Return values to be stored; of a view its arrays as they are, its containers as views, as one by one."""
        if not isinstance(values, SequenceView) or values._row.elements == "fresh":
            return [*(values._source if isinstance(values, SequenceView) else values)]
        return [values[k] if isinstance(kind_of(x), Container) else x for k, x in enumerate(values._source)]

    def _drop(self, i: int) -> None:
        """Forget the result of one place, by both of its numbers."""
        n = len(self._source)
        self._forget(i, i + n if i < 0 else i - n)

    def __delitem__(self, i: Any) -> None:
        del self._source[i]
        self._forget()

    def insert(self, i: SupportsIndex, value: Any) -> None:
        """Put a value before a place; see the class for what the source gets."""
        i = operator.index(i)
        end = i >= len(self._source)
        self._source.insert(i, self._inward(value))
        if not end or self._slots.keys() - range(len(self._source)):
            self._forget()

    def append(self, value: Any) -> None:
        """Put a value at the end."""
        self._source.append(self._inward(value))
        if self._row.elements == "fresh":
            self._forget()

    def extend(self, values: Iterable[Any]) -> None:
        """Put values at the end."""
        for value in self._given(values):
            self.append(value)

    def __iadd__(self, values: Iterable[Any]) -> Any:  # type: ignore[misc]
        self.extend(values)
        return self

    def pop(self, i: int = -1) -> T:
        """Take one element out, and return its result."""
        new = self[i]
        del self[i]
        return new

    def remove(self, value: Any) -> None:
        """Take the first element out that is the value, compared as ``in`` does."""
        del self[self.index(value)]

    def clear(self) -> None:
        """Take everything out."""
        if hasattr(type(self._source), "clear"):
            self._source.clear()
        else:
            del self._source[:]
        self._forget()

    def reverse(self) -> None:
        """Turn the source's order round."""
        self._source.reverse()
        self._forget()

    def __getattr__(self, name: str) -> Any:
        if name in ("appendleft", "popleft", "extendleft", "rotate", "maxlen") and hasattr(type(self._source), name):
            return _deque_method(self, name)
        raise AttributeError(f"a view of {type(self._source).__name__} has no attribute {name!r}")


def _deque_method(view: MutableSequenceView[Any], name: str) -> Any:
    source = view._source
    if name == "maxlen":
        return source.maxlen

    def rotate(n: int = 1) -> None:
        source.rotate(n)
        view._forget()

    def appendleft(value: Any) -> None:
        source.appendleft(view._inward(value))
        view._forget()

    def extendleft(values: Iterable[Any]) -> None:
        for value in list(values):
            appendleft(value)

    return {"rotate": rotate, "appendleft": appendleft, "extendleft": extendleft, "popleft": lambda: view.pop(0)}[name]
