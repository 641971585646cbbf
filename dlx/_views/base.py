"""`View`, the base class of all lazy views, and `Scope`, which the views of one call share.

A view is a sequence, a mapping or a record over the live source and converts an element when it is read. Writes go to
the source, in the source's framework (see `inward`). `View._slots` maps a key to (the source's element, its result),
valid while the source has the same element there; if each access creates a new element (``elements="fresh"``), it maps
to a weak result. The scope finds the result of each object again by weak references, also if the object appears twice
or was moved.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from weakref import ref

from dlx._core import native
from dlx._core.native import Slots
from dlx._engine.executor import is_tracing
from dlx._engine.failures import concerns_object
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.sources import device_of
from dlx._engine.traced import leave_out
from dlx._registry import lookup
from dlx._registry.lookup import VIEW
from dlx._registry.registry import registry
from dlx._support.display import Shown
from dlx._support.locks import lock_of
from dlx._support.reflect import module_of, safe_repr, type_name
from dlx._support.tracebacks import REFUSALS, name_action, shorten
from dlx._views import pytree
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import DlxError, path_text

__all__ = ["MISSING", "KeyedView", "Options", "Path", "Scope", "View", "is_view", "keys_of"]

MISSING: Any = object()

Path = tuple[Any, Container, Any] | None
"""The first path of a view: the path of its parent view, the parent's handler, and the key; None at the root."""


def keys_of(path: Path) -> tuple[Any, ...]:
    """Return a path as in `DlxError.path`."""
    steps: list[Any] = []
    while path is not None:
        path, handler, key = path
        steps += handler.path([key], 0)
    return tuple(reversed(steps))


def is_fixed(handler: Container, path: Path) -> bool:
    """Return whether a container and all its parents are immutable, so that addresses stay valid."""
    while path is not None and not handler.mutable:
        path, handler, _ = path
    return not handler.mutable


@dataclass(eq=False, slots=True)
class Options:
    """The options of a call; calls with equal options share them."""

    request: Request
    create: Callable[[Any, Container, Scope, Path], Any]
    convert: Callable[[Any, Container | Adapter, Options, Path], Any]
    is_tracing: Callable[[], bool] | None  # `Adapter.is_tracing` of the target
    to: Any = None  # the target of the fast path, without other options
    strict: bool = False
    errors: str = "raise"
    flags: int = 0  # options of the fast path


class Moved(NamedTuple):
    """An object without a slot and its result, by weak references."""

    source: Callable[[], Any] | None  # None: the result is a view, which keeps the object
    result: Callable[[], Any]


class Scope:
    """The objects that the views of one call have converted, and their results; only slots keep these alive."""

    __slots__ = ("__weakref__", "_full", "_lock", "back", "known", "moved", "options", "owned", "root")

    def __init__(self, options: Options, owned: dict[Any, Any] | None = None) -> None:
        self.options = options
        # Name -> weak result of an object that never moves (`is_fixed`) but has a new wrapper on each access.
        self.owned = owned
        self.known: dict[Any, Any] = {}  # object's name -> (weak view, key) of its slot; an int: key in the root
        self.root: Any = None  # weak reference to the outermost view, after its first read
        self.moved: dict[Any, Moved] = {}  # name -> an object without a slot
        self.back: dict[int, Any] | None = None  # address of a result -> name; built on demand
        self._lock: threading.RLock | None = None
        self._full = 256  # size for the next sweep

    # ---- conversion -------------------------------------------------------------------------------------------------

    def result(self, obj: Any, handler: Container, path: Path, key: Any) -> Any:
        """Return the result for an element: an array, a view, or the element itself."""
        options, kind, inner = self.options, type(obj), (path, handler, key)
        try:
            found = lookup.kind(kind)
            if found.verdict == "passthrough":
                return obj
            name = name_of(obj, handler)
            with lock_of(self):  # convert each object once
                new = self._find_result(name, obj)
                if new is None and self.owned and is_fixed(handler, path):
                    new = self.owned.get(name, lambda: None)()
                if new is not None:
                    return new
                what = lookup.look(obj, options.strict).part
                if what is None:
                    return obj
                if isinstance(what, Container):
                    return self._create_view(name, obj, what, inner)
                if options.to is not None and not options.flags:
                    new = FAST_PATH(obj, options.to)
                else:
                    new = options.convert(obj, what, options, inner)
                self.record_moved(name, obj, new)  # until its slot is set
                return new
        except DlxError as error:
            if options.errors == "pass" and concerns_object(error):
                return obj
            error.complete(source=type_name(kind), target=options.request.target.name, path=keys_of(inner))
            raise

    def _create_view(self, name: Any, obj: Any, what: Container, path: Path) -> Any:
        """Return a view of a container; convert sets and ``__dlx_tree__`` objects, which have no keys."""
        root = self.root and self.root()
        if root is not None and name_of(root._source, root._handler) == name_of(obj, what):
            return root
        new = self.options.create(obj, what, self, path)
        if new is None:
            return self.eager(obj, what, path)
        self.record_moved(name, obj, new)
        return new

    def eager(self, obj: Any, handler: Container, path: Path = None) -> Any:
        """Convert a whole container immediately."""
        return self.options.convert(obj, handler, self.options, path)

    # ---- results of objects -----------------------------------------------------------------------------------------

    def record_slot(self, name: Any, obj: Any, new: Any, view: Any, key: Any) -> None:
        """Record an object's slot, unless it has one, and its result."""
        if self._at(name) is None:
            self.known[name] = (view, key)
        if self.back is not None:
            self.back[id(new)] = name

    def record_moved(self, name: Any, obj: Any, new: Any) -> None:
        """Record the result of an object without a slot, unless both are the same object."""
        if new is not obj:
            self.record_result(name, obj, new)

    def record_result(self, name: Any, obj: Any, new: Any) -> None:
        """Record an object's result by a weak reference."""
        moved = self.moved
        try:
            # A view keeps its source, unless it was created by the handler's `live`.
            is_kept = lookup.kind(type(new)).handler is VIEW and name_of(new._source, new._handler) == name
            result, source = ref(new), None if is_kept else _source_ref(obj)
            if source is not None and not isinstance(source, ref):  # the entry keeps the object alive

                def remove(dead: Any) -> None:
                    entry = moved.get(name)
                    if entry is not None and entry.result is dead:
                        moved.pop(name, None)

                result = ref(new, remove)
        except TypeError:
            return
        moved[name] = Moved(source, result)
        if self.back is not None:
            self.back[id(new)] = name
        self.sweep()

    def _at(self, name: Any) -> Any:
        """Return (object, result) from the recorded slot, or None if the slot has changed."""
        entry = self.known.get(name)
        if entry is None:
            return None
        ref_of, key = (self.root, entry) if isinstance(entry, int) else entry
        view = ref_of()
        slot = None if view is None else view._slots.get(key)
        return slot if slot is not None and name_of(slot[0], view._handler) == name else None

    def _find_result(self, name: Any, obj: Any) -> Any:
        """Return an object's result if it is still alive, or None."""
        slot = self._at(name)
        if slot is not None:
            return slot[1]
        moved = self.moved.get(name)
        if moved is None or moved.source is None:
            return None if moved is None else moved.result()
        new, alive = moved.result(), moved.source()
        return new if alive is obj or (alive is not None and name != id(obj)) else None

    def sweep(self) -> None:
        """Remove dead entries if the tables have grown enough."""
        if max(len(self.known), len(self.moved)) <= self._full:
            return
        for name, entry in list(self.known.items()):
            if self._at(name) is None and self.known.get(name) is entry:
                del self.known[name]
        for name, moved in list(self.moved.items()):
            if moved.result() is None and self.moved.get(name) is moved:
                del self.moved[name]
        self._full = 4 * max(len(self.known), len(self.moved)) + 256
        self.back = None

    def source_of(self, obj: Any) -> Any:
        """Return the source's object for a result of this scope; return other objects unchanged."""
        if self.back is None:
            alive = [(name, moved.result()) for name, moved in list(self.moved.items())]
            self.back = {id(new): name for name, new in alive if new is not None}
            self.back |= {id(slot[1]): name for name in list(self.known) if (slot := self._at(name)) is not None}
        name = self.back.get(id(obj))
        # Results of ``__dlx_tree__`` may be numbers or None.
        if name is None or lookup.kind(type(obj)).verdict == "passthrough":
            return obj
        slot = self._at(name)
        if slot is not None and slot[1] is obj:
            return slot[0]
        moved = self.moved.get(name)
        if moved is None or moved.source is None or moved.result() is not obj:
            return obj
        source = moved.source()
        return obj if source is None else source


def _source_ref(obj: Any) -> Callable[[], Any]:
    try:
        return ref(obj)
    except TypeError:
        return lambda: obj


def name_of(obj: Any, handler: Container) -> Any:
    """Return an element's identity: its address, or the handler's `identity` (for an int its negative complement)."""
    name = None if handler.identity is None else handler.identity(obj)
    if name is None:
        return id(obj)
    return ~name if type(name) is int and 0 <= name <= sys.maxsize else ("same_as", name)


SAMPLE = 16  # children to examine for the framework of a container's arrays


def inward(scope: Scope, value: Any, old: Any, children: Iterable[Any], path: Path) -> Any:
    """Return the object to store in the source for a value: the source's, or an array of the source's framework."""
    value = scope.source_of(value)
    what = lookup.look(value).part
    if what is None:
        return value
    adapter, device = _framework_of(old, children)
    target = registry.ready(adapter) if adapter is not None and adapter is not what else None
    if target is None:
        return value
    options = scope.options
    request = options.request._replace(target=target, device=device, copy=None, stream=None, casts=None)
    inner = Options(request, options.create, options.convert, target.adapter.is_tracing)
    return options.convert(value, what, inner, path)


def _framework_of(old: Any, children: Iterable[Any]) -> tuple[Adapter | None, Any]:
    """Return the framework and device of the replaced array, or the single framework of the first children."""
    what = None if old is None else lookup.look(old).part
    if isinstance(what, Adapter):
        return what, device_of(what, old)
    adapters = {found for child in islice(children, SAMPLE) if isinstance(found := lookup.look(child).part, Adapter)}
    return (adapters.pop() if len(adapters) == 1 else None), None


# ---- views --------------------------------------------------------------------------------------------------------


class View(Shown):
    """The base class of all lazy views."""

    if not TYPE_CHECKING:  # subclasses define the slots
        __slots__ = ()
    is_lazy_view = True
    _source: Any
    _slots: dict[Any, Any]
    _handler: Container
    _scope: Scope
    _path: Path
    _me: Any
    _is_tracing: Any  # `Adapter.is_tracing` of the target; None before the first read
    _fast: Any  # arguments of `native.convert_slot`; None before the first read, and without a fast path

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        pytree.register(cls)

    def _names(self) -> tuple[str, ...] | None:
        """Return the element names of a record, or None for other containers."""
        return None

    def __tvm_ffi_value__(self) -> Any:
        """Return the argument for a function of tvm-ffi: the source if it is a tvm-ffi container, else the results."""
        return self._source if module_of(type(self._source)).partition(".")[0] == "tvm_ffi" else self.copy()

    def materialize(self) -> Any:
        """Convert all elements.

        Returns
        -------
        container
            The result of `dlx.convert` for the source without ``lazy=True``.
        """
        return self._scope.eager(self._source, self._handler)

    def refresh(self) -> None:
        """Drop all results, so that each element is read from the source again.

        Needed only if the source creates new elements on each access (for example a file) and has changed. Changes of
        lists and dicts are detected automatically.
        """
        self._slots.clear()

    # ---- one element ------------------------------------------------------------------------------------------------

    def _at(self, key: Any) -> Any:
        """Return the source's element at a key, or raise its error."""
        return self._source[key]

    def _begin(self) -> None:
        """Register the view with its scope before its first read."""
        if self._me is None:
            me = self._me = ref(self)
            scope, handler, path = self._scope, self._handler, self._path
            options = scope.options
            self._is_tracing = options.is_tracing
            if path is None:
                scope.root = me
            if options.to is not None and handler.elements != "fresh":
                known, moved = scope.known, scope.moved
                owned = scope.owned if scope.owned and is_fixed(handler, path) else None
                is_inner, flags = path is not None, options.flags
                self._fast = FAST_PATH, options.to, scope, known, moved, handler.identity, me, is_inner, owned, flags

    def _touch(self, key: Any, element: Any = MISSING) -> Any:
        """Return the cached result at a key, or convert the element."""
        handler, scope, slots = self._handler, self._scope, self._slots
        if self._me is None:
            self._begin()
        # Do not cache arrays of a graph.
        if self._is_tracing is not None and is_tracing(scope.options.request.target.adapter):
            element = self._at(key) if element is MISSING else element
            return Scope(scope.options).result(element, handler, self._path, key)
        if handler.elements == "fresh":
            return self._fresh(key, element)
        if element is MISSING:
            element = self._at(key)
        old = slots.get(key)
        if old is not None:
            if old[0] is element or (handler.identity is not None and self._same(old[0], element)):
                return old[1]
            self._forget(key)
        try:
            if self._fast is not None:
                new = native.convert_slot(slots, self._fast, key, element)
                if new is not None:
                    return new
            new = scope.result(element, handler, self._path, key)
        except REFUSALS as error:
            if isinstance(error, DlxError):
                error.complete(path=keys_of((self._path, handler, key)))
            shorten(error, own=False)
            raise
        slot = slots.setdefault(key, (element, new))
        if slot[1] is not new:
            if slot[0] is element:
                return slot[1]
            slots[key] = (element, new)
        if new is not element:
            scope.record_slot(name_of(element, handler), element, new, self._me, key)
        if not len(slots) & 63:
            self._tidy()
        return new

    def _evict(self, slot: Any) -> None:
        """Record a result without its slot: it may still be referenced, and its source may have moved."""
        waiting, visited = [(slot, self._handler)], set()  # a view may contain itself
        while waiting:
            (element, new), handler = waiting.pop()
            self._scope.record_moved(name_of(element, handler), element, new)
            if is_view(new) and new._handler.elements != "fresh" and id(new) not in visited:
                visited.add(id(new))  # its elements may have moved, too
                waiting += [(each, new._handler) for each in list(new._slots.values())]

    def _forget(self, *keys: Any) -> None:
        """Drop the results of the keys, or all results."""
        slots = self._slots
        for key in keys or list(slots):
            slot = slots.pop(key, None)
            if slot is not None and self._handler.elements != "fresh":
                self._evict(slot)

    def _fresh(self, key: Any, element: Any) -> Any:
        """Return the weakly cached result of an element that the source creates on each access."""
        new = self._slots.get(key, lambda: None)()
        if new is not None:
            return new
        with lock_of(self._scope):
            new = self._slots.get(key, lambda: None)()
            if new is None:
                if element is MISSING:
                    element = self._at(key)
                new = self._scope.result(element, self._handler, self._path, key)
                if new is not element or isinstance(lookup.look(new).part, Adapter):
                    with contextlib.suppress(TypeError):  # otherwise converted each time
                        self._slots[key] = ref(new)
                    if not len(self._slots) & 63:
                        self._tidy()
        return new

    def _tidy(self) -> None:
        """Remove dead entries of the scope, and of this view if it has many more slots than elements."""
        self._scope.sweep()
        if len(self._slots) > 2 * self._count() + 64:
            fresh = self._handler.elements == "fresh"
            for key, slot in list(self._slots.items()):
                if slot() is None if fresh else not self._holds_still(key, slot[0]):
                    self._forget(key)

    def _holds_still(self, key: Any, element: Any) -> bool:
        """Return whether the source has an element at a key, without creating missing elements."""
        try:
            return self._at(key) is element
        except (LookupError, AttributeError):
            return False

    def _same(self, one: Any, other: Any) -> bool:
        name = self._handler.identity(one) if self._handler.identity is not None else None
        return name is not None and self._handler.identity(other) == name  # type: ignore[misc]

    def _inward(self, value: Any, old: Any = None) -> Any:
        """Return the object to store in the source for a value."""
        if is_view(value):
            return value._to_stored()
        try:
            return inward(self._scope, value, old, self._children(), self._path)
        except REFUSALS as error:
            name_action(error, "convert", ())  # an assignment has no options
            shorten(error, own=False)
            raise

    def _to_stored(self) -> Any:
        """Return the object to store in another container for this view."""
        return self._source

    def _to_contents(self) -> Any:
        """Return the container to convert for this view."""
        return self._to_stored() if self._scope.options.request.casts is None else self.materialize()

    def _children(self) -> Any:
        """Return the source's elements for `inward`; none if each access creates a new one."""
        return ()

    def _equals(self, element: Any, value: Any) -> bool:
        """Return whether an element equals a value: the same array or container, or equal data."""
        if element is value or (self._handler.identity is not None and self._same(element, value)):
            return True
        if lookup.look(element).part is not None or lookup.look(value).part is not None:
            return False
        return bool(element == value)

    def _to_source(self, value: Any) -> Any:
        """Return the source's object for a result or a view."""
        return value._source if is_view(value) else self._scope.source_of(value)

    # ---- as an object -----------------------------------------------------------------------------------------------

    def _count(self) -> int:
        return len(self._source)

    def _kind(self) -> str:
        return type(self._source).__name__

    def __repr__(self) -> str:
        parts = [f"{path_text(self._handler.path([key], 0), '')}: {_format(new)}" for key, new in self._list_results()]
        more = f", ... {len(parts) - 6} more" if len(parts) > 6 else ""
        converted = f"{'; '.join(parts[:6])}{more}" if parts else "nothing yet"
        target = self._scope.options.request.target.name
        return f"<lazy {self._kind()}[{self._count()}] -> {target}, converted: {converted}>"

    def _list_results(self) -> list[tuple[Any, Any]]:
        """Return the keys and cached results, without reading the source."""
        if self._handler.elements == "fresh":
            return [(key, new) for key, slot in list(self._slots.items()) if (new := slot()) is not None]
        return [(key, slot[1]) for key, slot in list(self._slots.items()) if slot[0] is not slot[1]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ([self.materialize()], 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.materialize(), memo)

    def __rich_repr__(self) -> Iterator[Any]:
        yield self._kind()
        yield "target", self._scope.options.request.target.name
        yield "converted", dict(self._list_results()[:6]), {}

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        """Return a container of the view's elements: converted arrays, and views of nested containers."""
        raise NotImplementedError


class KeyedView(View, Slots):
    """A view whose elements are read by key. `Slots` returns cached results and otherwise calls `_convert_at`."""

    __slots__ = ("__weakref__",)

    def _convert_at(self, key: Any) -> Any:
        """Return `self[key]` if it is not cached."""
        return self._touch(key)


for _method in (View._touch, View.materialize):
    leave_out(_method, "a lazy view")


def is_view(obj: Any) -> TypeGuard[View]:
    """Return whether an object is a lazy view by its type, ignoring a proxy's ``__class__``."""
    return issubclass(type(obj), View)


def _format(new: Any) -> str:
    if is_view(new):
        return f"<lazy {new._kind()}[{new._count()}]>"
    text = " ".join(safe_repr(new, 1000).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
