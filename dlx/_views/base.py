"""`View`, the base class of all lazy views.

A view is a sequence, a mapping or a record over the live source. An element is converted when it is read, not before.
What is written to a view is written to the source, in the source's own framework.

Results are cached in `_slots`: key -> (the source's element, its result). An entry is valid only while the source still
holds that same element there, so that the source may change at any time. Of a container that makes its elements anew on
each access (``elements="fresh"``) the result is kept weakly, and the source is not asked again.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from typing import TYPE_CHECKING, Any, TypeGuard

from dlx._core.foreign import is_key, safe_repr
from dlx._core.native import Places
from dlx._views.scope import MISSING, Path, Scope, inward, kind_of, name_of, path_text
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import DlxError

__all__ = ["PlacesView", "View", "is_view"]


class View:
    """The base class of all lazy views."""

    if not TYPE_CHECKING:  # the slots are those of the classes below
        __slots__ = ()
    is_lazy_view = True
    _source: Any
    _slots: dict[Any, Any]
    _handler: Container
    _scope: Scope
    _path: Path
    _me: Any  # a weak reference to itself

    def __init__(self, source: Any, handler: Container, scope: Scope, path: Path) -> None:
        self._source, self._handler, self._scope, self._path = source, handler, scope, path
        self._slots = {}
        self._me = None

    def materialize(self) -> Any:
        """Convert everything now.

        Returns
        -------
        container
            What `dlx.convert` gives for the source without ``lazy=True``.
        """
        return self._scope.eager(self._source, self._handler)

    def refresh(self) -> None:
        """Drop all results, so that each element is read from the source again.

        Needed only where a source that makes its elements anew on each access (a file, say) has changed behind the
        view; changes of lists and dicts are seen at once.
        """
        self._slots.clear()

    # ---- one element ------------------------------------------------------------------------------------------------

    def _at(self, key: Any) -> Any:
        """Return the source's element at a key; raises what the source raises."""
        return self._source[key]

    def _begin(self) -> None:
        """Register the view with its scope, when its first element is read."""
        if self._me is None:
            self._me = weakref.ref(self)
            if self._path is None:
                self._scope.root = self._me

    def _touch(self, key: Any, element: Any = MISSING) -> Any:
        """Return the result at a key, converted now if it is not cached."""
        handler, scope, slots = self._handler, self._scope, self._slots
        if self._me is None:
            self._begin()
        if handler.elements == "fresh":
            return self._fresh(key, element)
        if element is MISSING:
            element = self._at(key)
        options, old, kind = scope.options, slots.get(key), type(element)
        if old is not None:
            if old[0] is element or (handler.identity is not None and self._same(old[0], element)):
                return old[1]
            self._forget(key)
        free = (type(kind) is type or is_key(kind)) and kind in options.free
        if free and handler.identity is None and scope.back is None:  # nearly always
            try:
                new = options.fast_path._place(  # type: ignore[union-attr]
                    element, options.to, slots, scope.known, scope.moved, key, (self._me, key)
                )
            except DlxError as error:
                error.complete(where=path_text((self._path, handler, key)))
                raise
            if new is not None:
                if not len(slots) & 255:
                    self._tidy()
                return new
        new = scope.result(element, handler, self._path, key)
        slot = slots.setdefault(key, (element, new))
        if slot[1] is not new:
            if slot[0] is element:  # another thread converted it meanwhile
                return slot[1]
            slots[key] = (element, new)
        if new is not element:
            scope.place(name_of(element, handler), element, new, self._me, key)
        if not len(slots) & 63:
            self._tidy()
        return new

    def _evict(self, slot: Any) -> None:
        """Record a result that loses its slot: it may still be referenced, and its source may have another key now."""
        waiting, met = [(slot, self._handler)], set()  # views visited so far: a view may contain itself
        while waiting:
            (element, new), handler = waiting.pop()
            self._scope.leave(name_of(element, handler), element, new)
            if is_view(new) and new._handler.elements != "fresh" and id(new) not in met:
                met.add(id(new))  # its elements may have other keys as well
                waiting += [(each, new._handler) for each in list(new._slots.values())]

    def _forget(self, *keys: Any) -> None:
        """Drop the results of some keys, or of all."""
        slots = self._slots
        for key in keys or list(slots):
            slot = slots.pop(key, None)
            if slot is not None and self._handler.elements != "fresh":
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
                new = self._scope.result(element, self._handler, self._path, key)
                if new is not element or isinstance(kind_of(new), Adapter):
                    with contextlib.suppress(TypeError):  # it cannot be referred to weakly: it is made anew each time
                        self._slots[key] = weakref.ref(new)
                    if not len(self._slots) & 63:
                        self._tidy()
        return new

    def _tidy(self) -> None:
        """Remove dead entries: slots of this view, if there are far more than elements; and those of the scope."""
        self._scope.sweep()
        if len(self._slots) > 2 * self._count() + 64:
            fresh = self._handler.elements == "fresh"
            for key, slot in list(self._slots.items()):
                if slot() is None if fresh else not self._holds_still(key, slot[0]):
                    self._forget(key)

    def _holds_still(self, key: Any, element: Any) -> bool:
        """Return whether the source holds an element at a key; no missing element is created."""
        try:
            return self._at(key) is element
        except (LookupError, AttributeError):
            return False

    def _same(self, one: Any, other: Any) -> bool:
        name = self._handler.identity(one) if self._handler.identity is not None else None
        return name is not None and self._handler.identity(other) == name  # type: ignore[misc]

    def _inward(self, value: Any, old: Any = None) -> Any:
        """Return what is stored in the source for a value."""
        if is_view(value):
            return value._stored()
        return inward(self._scope, value, old, self._children(), self._path)

    def _stored(self) -> Any:
        """Return what another container stores when this view is put into it."""
        return self._source

    def _children(self) -> Any:
        """Return the source's elements, of which the first few are examined; none where each would be made anew."""
        return ()

    def _is(self, element: Any, value: Any) -> bool:
        """Return whether an element is a value: the same array or container, or equal data."""
        if element is value or (self._handler.identity is not None and self._same(element, value)):
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
        done = [f"{self._handler.place([key], 0)}: {_shown(new)}" for key, new in self._done()]
        more = f", ... {len(done) - 6} more" if len(done) > 6 else ""
        found = f"{'; '.join(done[:6])}{more}" if done else "nothing yet"
        return (
            f"<lazy {self._kind()}[{self._count()}] -> {self._scope.options.request.target.name}, converted: {found}>"
        )

    def _done(self) -> list[tuple[Any, Any]]:
        """Return what is converted so far, without reading the source."""
        if self._handler.elements == "fresh":
            return [(key, new) for key, slot in list(self._slots.items()) if (new := slot()) is not None]
        return [(key, slot[1]) for key, slot in list(self._slots.items()) if slot[0] is not slot[1]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ([self.materialize()], 0)  # unpickling gives the plain container

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.materialize(), memo)

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        """Return a plain container of what the view shows: converted arrays, and views of nested containers."""
        raise NotImplementedError


class PlacesView(View, Places):
    """A view whose elements are read by key: `Places` returns a cached result, else calls `_missed`."""

    __slots__ = ("__weakref__", "_handler", "_me", "_path", "_scope")

    def _missed(self, key: Any) -> Any:
        """Return `self[key]` where it is not cached."""
        return self._touch(key)


def is_view(obj: Any) -> TypeGuard[View]:
    """Return whether an object is a lazy view, by its type: a proxy's ``__class__`` is not read."""
    return issubclass(type(obj), View)


def _shown(new: Any) -> str:
    if is_view(new):
        return f"<lazy {new._kind()}[{new._count()}]>"
    text = " ".join(safe_repr(new, 1000).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
