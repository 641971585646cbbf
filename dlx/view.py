"""What lazy views of every kind have in common.

A view is a sequence, a mapping or a record over the living source. Every way to reach an element converts it; nothing
else does. What is written to a view is written to the source, in the source's own framework.

Where a view keeps a result: `_slots` maps a place to (the source's element, its result). An entry counts only while the
source still has that very element there, so that a source may change as it likes. Of a container whose elements are
made anew on each access (``elements="fresh"``) the result is kept weakly, and the source is not asked again.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from typing import TYPE_CHECKING, Any, TypeGuard

from dlx.adapter import Adapter
from dlx.errors import DlxError
from dlx.facts import Container
from dlx.foreign import is_key, safe_repr
from dlx.lazy import MISSING, Path, Scope, name_of, path_text
from dlx.native import Places
from dlx.writing import inward, kind_of

__all__ = ["PlacesView", "View", "is_view"]


class View:
    """What views of every kind have in common."""

    if not TYPE_CHECKING:  # the slots are those of the classes below
        __slots__ = ()
    is_lazy_view = True
    _source: Any
    _slots: dict[Any, Any]
    _row: Container
    _scope: Scope
    _path: Path
    _me: Any  # a weak reference to itself

    def __init__(self, source: Any, row: Container, scope: Scope, path: Path) -> None:
        self._source, self._row, self._scope, self._path = source, row, scope, path
        self._slots = {}
        self._me = None

    def materialize(self) -> Any:
        """Convert everything now.

        Returns
        -------
        container
            What `dlx.convert` gives for the source without ``lazy=True``.
        """
        return self._scope.eager(self._source, self._row)

    def refresh(self) -> None:
        """Forget what was converted, so that each element is asked for again.

        Needed only where a source that makes its elements anew on each access (a file, say) has changed behind the
        view; changes of lists and dicts are seen at once.
        """
        self._slots.clear()

    # ---- one element ------------------------------------------------------------------------------------------------

    def _at(self, key: Any) -> Any:
        """Return the source's element at a place; raises what the source raises."""
        return self._source[key]

    def _begin(self) -> None:
        """Make the view known to its scope, when its first element is asked for."""
        if self._me is None:
            self._me = weakref.ref(self)
            if self._path is None:
                self._scope.root = self._me

    def _touch(self, key: Any, element: Any = MISSING) -> Any:
        """Return the result at a place, converted now if it has not been."""
        row, scope, slots = self._row, self._scope, self._slots
        if self._me is None:
            self._begin()
        if row.elements == "fresh":
            return self._fresh(key, element)
        if element is MISSING:
            element = self._at(key)
        options, old, kind = scope.options, slots.get(key), type(element)
        if old is not None:
            if old[0] is element or (row.identity is not None and self._same(old[0], element)):
                return old[1]
            self._forget(key)
        free = (type(kind) is type or is_key(kind)) and kind in options.free
        if free and row.identity is None and scope.back is None:  # nearly always
            try:
                new = options.lane._place(  # type: ignore[union-attr]
                    element, options.to, slots, scope.known, scope.moved, key, (self._me, key)
                )
            except DlxError as error:
                error.complete(where=path_text((self._path, row, key)))
                raise
            if new is not None:
                if not len(slots) & 255:
                    self._tidy()
                return new
        new = scope.result(element, row, self._path, key)
        slot = slots.setdefault(key, (element, new))
        if slot[1] is not new:
            if slot[0] is element:  # another thread was here meanwhile
                return slot[1]
            slots[key] = (element, new)
        if new is not element:
            scope.place(name_of(element, row), element, new, self._me, key)
        if not len(slots) & 63:
            self._tidy()
        return new

    def _evict(self, slot: Any) -> None:
        """Note what is put out of its place: somebody may hold it, and its source may be elsewhere by now."""
        waiting, met = [(slot, self._row)], set()  # views that were looked into: one may hold itself
        while waiting:
            (element, new), row = waiting.pop()
            self._scope.leave(name_of(element, row), element, new)
            if is_view(new) and new._row.elements != "fresh" and id(new) not in met:
                met.add(id(new))  # what it shows may be elsewhere as well
                waiting += [(each, new._row) for each in list(new._slots.values())]

    def _forget(self, *keys: Any) -> None:
        """Put the results of some places, or of all, out of them."""
        slots = self._slots
        for key in keys or list(slots):
            slot = slots.pop(key, None)
            if slot is not None and self._row.elements != "fresh":
                self._evict(slot)

    def _fresh(self, key: Any, element: Any) -> Any:
        """Return the result for an element that the source makes anew each time, and that is kept weakly."""
        slot = self._slots.get(key)
        new = slot() if slot is not None else None
        if new is not None:
            return new
        with self._scope.lock():
            slot = self._slots.get(key)
            new = slot() if slot is not None else None
            if new is None:
                if element is MISSING:
                    element = self._at(key)
                new = self._scope.result(element, self._row, self._path, key)
                if new is not element or isinstance(kind_of(new), Adapter):
                    with contextlib.suppress(TypeError):  # a tuple, say: it is made anew each time
                        self._slots[key] = weakref.ref(new)
                    if not len(self._slots) & 63:
                        self._tidy()
        return new

    def _tidy(self) -> None:
        """Forget what is gone: places of this view, where there are far more than elements; and in the scope."""
        self._scope.sweep()
        if len(self._slots) > 2 * self._count() + 64:
            fresh = self._row.elements == "fresh"
            for key, slot in list(self._slots.items()):
                if slot() is None if fresh else not self._holds_still(key, slot[0]):
                    self._forget(key)

    def _holds_still(self, key: Any, element: Any) -> bool:
        """Return whether the source has an element at a place; where it has none, none is made."""
        try:
            return self._at(key) is element
        except (LookupError, AttributeError):
            return False

    def _same(self, one: Any, other: Any) -> bool:
        name = self._row.identity(one) if self._row.identity is not None else None
        return name is not None and self._row.identity(other) == name  # type: ignore[misc]

    def _inward(self, value: Any, old: Any = None) -> Any:
        """Return what is stored in the source for a value."""
        if is_view(value):
            return value._stored()
        return inward(self._scope, value, old, self._children(), self._path)

    def _stored(self) -> Any:
        """Return what another container holds where this view was put into it."""
        return self._source

    def _children(self) -> Any:
        """Give the source's elements, for a look at the first few; none where each would be made anew."""
        return ()

    def _is(self, element: Any, value: Any) -> bool:
        """Return whether an element is a value: the same array or container, or equal data."""
        if element is value or (self._row.identity is not None and self._same(element, value)):
            return True
        if kind_of(element) is not None or kind_of(value) is not None:
            return False
        return bool(element == value)

    def _raw(self, value: Any) -> Any:
        """Return the source's own object for a result or a view."""
        return value._source if is_view(value) else self._scope.source_of(value)

    # ---- as an object -----------------------------------------------------------------------------------------------

    def _count(self) -> int:
        return len(self._source)

    def _kind(self) -> str:
        return type(self._source).__name__

    def __repr__(self) -> str:
        done = [f"{self._row.place([key], 0)}: {_shown(new)}" for key, new in self._done()]
        more = f", ... {len(done) - 6} more" if len(done) > 6 else ""
        found = f"{'; '.join(done[:6])}{more}" if done else "nothing yet"
        return (
            f"<lazy {self._kind()}[{self._count()}] -> {self._scope.options.request.target.name}, converted: {found}>"
        )

    def _done(self) -> list[tuple[Any, Any]]:
        """Return what is converted so far, without asking the source for anything."""
        if self._row.elements == "fresh":
            return [(key, new) for key, slot in list(self._slots.items()) if (new := slot()) is not None]
        return [(key, slot[1]) for key, slot in list(self._slots.items()) if slot[0] is not slot[1]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ([self.materialize()], 0)  # what is loaded is the plain container

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.materialize(), memo)

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        """Return a plain container of what the view shows: converted arrays, and views of nested containers."""
        raise NotImplementedError


class PlacesView(View, Places):
    """A view whose elements are asked for by key: `Places` gives what was converted before, and else asks `_missed`."""

    __slots__ = ("__weakref__", "_me", "_path", "_row", "_scope")

    def _missed(self, key: Any) -> Any:
        """Return what `self[key]` is where it was not converted before."""
        return self._touch(key)


def is_view(obj: Any) -> TypeGuard[View]:
    """Return whether an object is a lazy view itself; what stands for another object is not asked for whom."""
    return issubclass(type(obj), View)


def _shown(new: Any) -> str:
    if is_view(new):
        return f"<lazy {new._kind()}[{new._count()}]>"
    text = " ".join(safe_repr(new, 1000).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
