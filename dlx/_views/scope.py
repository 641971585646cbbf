"""State shared by the lazy views of one call: the options, and the result of each converted object.

Results are cached in two ways: each view keeps, for each slot that was read, the source's element and the result; the
scope keeps, by weak references, the result of each object, so that an object that appears twice, or was moved, gives
the same result. `inward` computes what is stored in the source for a value written to a view.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import ref

from dlx._containers.failures import Failures
from dlx._containers.lookup import VIEW, is_plain, stamp, what_is
from dlx._core.foreign import is_key
from dlx._core.locks import lock_of
from dlx._core.native import FastPathFunction
from dlx._core.tensor import type_name
from dlx._engine.batch import Batch, convert_tree
from dlx._engine.request import Request, describe
from dlx._registry import generic
from dlx._registry.registry import registry
from dlx.adapter.base import Adapter, look_up
from dlx.adapter.declarations import Container
from dlx.errors import AdapterNotFoundError, DlxError

__all__ = ["inward", "kind_of", "MISSING", "Options", "Path", "Scope", "keys_of", "name_of"]

MISSING: Any = object()

Path = tuple[Any, Container, Any] | None
"""The first path of a view: the path of its parent view, the parent's handler, and the key; None at the root."""


def keys_of(path: Path) -> tuple[Any, ...]:
    """Return a path as errors have it (`DlxError.path`)."""
    steps: list[Any] = []
    while path is not None:
        path, handler, key = path
        steps += handler.path([key], 0)
    return tuple(reversed(steps))


class Options:
    """The options of a call, and what is known of types under them; shared by calls with the same options.

    Parameters
    ----------
    request, strict, collect
        The options.
    make
        ``make(obj, handler, scope, path)`` returns the view of a container, or None where it has none.
    fast_path, to
        The fast path and its target where no other option is set; None otherwise.

    Attributes
    ----------
    known_at
        The stamp under which types were looked up; when it changes they are looked up again.
    """

    __slots__ = ("collect", "fast_path", "free", "kinds", "known_at", "make", "request", "strict", "to")

    def __init__(
        self,
        request: Request,
        make: Callable[[Any, Container, Scope, Path], Any],
        fast_path: FastPathFunction | None,
        to: Any,
        strict: bool = False,
        collect: bool = False,
    ) -> None:
        self.request, self.make, self.fast_path, self.to = request, make, fast_path, to
        self.strict, self.collect = strict, collect
        self.known_at = stamp()
        self.kinds: dict[type, Any] = {}
        self.free: set[type] = set()  # types whose arrays the fast path may convert twice

    def known(self, kind: type) -> Any:
        """Return the cached answer of `what_is` for a type; MISSING where there is none, or it is stale."""
        now = stamp()
        if now != self.known_at:
            self.kinds, self.free, self.known_at = {}, set(), now
        return self.kinds.get(kind, MISSING) if type(kind) is type or is_key(kind) else MISSING


class Scope:
    """The objects converted by the views of one call, and their results.

    An object is recorded as (weak reference to the view, slot); its result is in that slot of the view. Only a result
    that has left its slot, and may still be referenced elsewhere, is referred to directly.

    Attributes
    ----------
    options
        The options of the call.
    known
        Name of a source's object -> a slot that holds it and its result; a plain int is a slot of the root.
    moved
        Name -> (the object, its result), weakly; for what has no slot, or lost it.
    back
        Address of a result -> name; None until it is needed.
    root
        The outermost view, weakly, after an element of it was read.
    """

    __slots__ = ("__weakref__", "_full", "_lock", "back", "known", "moved", "options", "root")

    def __init__(self, options: Options) -> None:
        self.options = options
        self.known: dict[Any, Any] = {}
        self.root: Any = None
        self.moved: dict[Any, tuple[Any, Any]] = {}
        self.back: dict[int, Any] | None = None
        self._lock: threading.RLock | None = None
        self._full = 256  # sweep when it is that large

    # ---- outwards ---------------------------------------------------------------------------------------------------

    def result(self, obj: Any, handler: Container, path: Path, key: Any) -> Any:
        """Return the result for an element: an array of the target, a view, or the element itself.

        Parameters
        ----------
        obj
            The element.
        handler, path, key
            The container's handler and path, and the element's key in it.
        """
        options, kind = self.options, type(obj)
        what = options.known(kind)
        if what is MISSING:
            what = self._learn(kind, handler, path, key)
        if what is None:
            return obj
        name = name_of(obj, handler)
        with self.lock():
            new = self._again(name, obj)
            if new is not None:
                return new
            if what is kind:  # a class may not even say what it is
                source = self._generic(obj, handler, path, key)
            elif isinstance(what, Container):
                return self._entered(obj, what, handler, path, key)
            else:
                source = what
            if source is None:
                return obj
            new = self._converted(obj, source, handler, path, key)
            self.leave(name, obj, new)  # until it has its slot, which another thread may read already
            return new

    def lock(self) -> threading.RLock:
        """Return the lock under which each object is converted, so that it is converted once."""
        return lock_of(self)

    def _learn(self, kind: type, handler: Container, path: Path, key: Any) -> Any:
        try:
            what = what_is(kind)
        except DlxError as error:
            raise error.complete(
                source=type_name(kind), target=self.options.request.target.name, path=keys_of((path, handler, key))
            ) from None
        options = self.options
        if is_key(kind):
            options.kinds[kind] = what
            learns = options.fast_path is not None and what is not kind
            fast_path = what.fast_path if learns and isinstance(what, Adapter) else None
            if fast_path is not None and any(look_up(name) is kind for name in fast_path.types):
                options.free.add(kind)
        return what

    def _generic(self, obj: Any, handler: Container, path: Path, key: Any) -> Adapter | None:
        try:
            return generic.strict_array_adapter(obj, self.options.strict)
        except AdapterNotFoundError as error:
            raise error.complete(target=self.options.request.target.name, path=keys_of((path, handler, key))) from None

    def _converted(self, obj: Any, source: Adapter, handler: Container, path: Path, key: Any) -> Any:
        options = self.options
        if options.fast_path is not None:
            try:
                return options.fast_path(obj, options.to)
            except DlxError as error:
                error.complete(path=keys_of((path, handler, key)))
                raise
        return self.run(obj, source, options.request, (path, handler, key))

    def run(self, obj: Any, source: Adapter, request: Request, path: Path) -> Any:
        """Convert one array through all stages."""
        return Batch(request, [obj], [source], lambda i: keys_of(path), Failures(request.target.name)).run()[0]

    def _entered(self, obj: Any, what: Container, handler: Container, path: Path, key: Any) -> Any:
        """Return a view of a container; sets and ``__dlx_tree__`` objects, which have no keys, are converted now."""
        root, name = self.root and self.root(), name_of(obj, what)
        if root is not None and name_of(root._source, root._handler) == name:
            return root
        new = self.options.make(obj, what, self, (path, handler, key))
        if new is not None:
            self.leave(name_of(obj, handler), obj, new)
            return new
        return self.eager(obj, what, (path, handler, key))

    def eager(self, obj: Any, handler: Container, path: Path = None) -> Any:
        """Convert a whole container now."""
        o = self.options
        return convert_tree(
            obj,
            handler,
            o.request,
            strict=o.strict,
            collect=o.collect,
            fast_path=o.fast_path,
            to=o.to,
            located=lambda inside: ("", keys_of(path) + inside),
        )

    # ---- results of objects -----------------------------------------------------------------------------------------

    def place(self, name: Any, obj: Any, new: Any, view: Any, key: Any) -> None:
        """Record the slot of an object and its result; a slot that is recorded already is kept."""
        if self._at(name) is None:
            self.known[name] = (view, key)
        if self.back is not None:
            self.back[id(new)] = name

    def leave(self, name: Any, obj: Any, new: Any) -> None:
        """Record the result of an object that has no slot, or loses it."""
        if new is not obj:
            self.know(name, obj, new)

    def know(self, name: Any, obj: Any, new: Any) -> None:
        """Record the result of an object, weakly; it may be the object itself."""
        moved = self.moved
        try:
            # A view of the object itself holds it; a view of what the object's `live` returns does not.
            held = what_is(type(new)) is VIEW and name_of(new._source, new._handler) == name
            result, source = ref(new), None if held else _source_ref(obj)
            if source is not None and not isinstance(source, ref):  # the object is kept alive by its entry

                def remove(dead: Any) -> None:
                    if moved.get(name, (None, None))[1] is dead:
                        del moved[name]

                result = ref(new, remove)
        except TypeError:  # the result cannot be referred to weakly
            return
        moved[name] = (source, result)
        if self.back is not None:
            self.back[id(new)] = name
        self.sweep()

    def _at(self, name: Any) -> Any:
        """Return (object, result) from the recorded slot; None where the slot holds something else now."""
        entry = self.known.get(name)
        if entry is None:
            return None
        ref_of, key = (self.root, entry) if isinstance(entry, int) else entry
        view = ref_of()
        slot = None if view is None else view._slots.get(key)
        return slot if slot is not None and name_of(slot[0], view._handler) == name else None

    def _again(self, name: Any, obj: Any) -> Any:
        """Return the result of an object, if it is still alive."""
        slot = self._at(name)
        if slot is not None:
            return slot[1]
        pair = self.moved.get(name)
        if pair is None:
            return None
        new = pair[1]()
        if pair[0] is None:  # a view, which holds it
            return new
        alive = pair[0]()
        return new if alive is obj or (alive is not None and name != id(obj)) else None

    def sweep(self) -> None:
        """Remove dead entries, once the tables have grown enough."""
        if max(len(self.known), len(self.moved)) <= self._full:
            return
        for name, entry in list(self.known.items()):
            if self._at(name) is None and self.known.get(name) is entry:
                del self.known[name]
        for name, pair in list(self.moved.items()):
            if pair[1]() is None and self.moved.get(name) is pair:
                del self.moved[name]
        self._full = 4 * max(len(self.known), len(self.moved)) + 256
        self.back = None

    def source_of(self, obj: Any) -> Any:
        """Return the source's own object for a result of this scope; anything else as it is."""
        if self.back is None:
            alive = [(name, pair[1]()) for name, pair in list(self.moved.items())]
            self.back = {id(new): name for name, new in alive if new is not None}
            self.back |= {id(slot[1]): name for name in list(self.known) if (slot := self._at(name)) is not None}
        name = self.back.get(id(obj))
        if name is None or is_plain(type(obj)):  # a ``__dlx_tree__`` object may have become any number, or None
            return obj
        slot = self._at(name)
        if slot is not None and slot[1] is obj:
            return slot[0]
        pair = self.moved.get(name)
        source = pair[0]() if pair is not None and pair[0] is not None and pair[1]() is obj else None
        return obj if source is None else source


def _source_ref(obj: Any) -> Callable[[], Any]:
    try:
        return ref(obj)
    except TypeError:
        return lambda: obj


def name_of(obj: Any, handler: Container) -> Any:
    """Return the identity of an element of a container: its address, or what the handler says."""
    name = None if handler.identity is None else handler.identity(obj)
    return id(obj) if name is None else ("same_as", name)


SAMPLE = 16  # how many children are examined to find the framework of a container's arrays


def kind_of(obj: Any) -> Container | Adapter | None:
    """Return the handler of a container, the adapter of an array, or None."""
    kind = type(obj)
    what = what_is(kind)
    if what is not kind:
        return what  # type: ignore[return-value]  # it is no type then
    try:
        return generic.generic_array_adapter(obj)
    except (DlxError, MemoryError):
        raise
    except Exception:  # an object whose attributes raise is of no known kind
        return None


def inward(scope: Scope, value: Any, old: Any, children: Iterable[Any], path: Path) -> Any:
    """Return what is to be stored in the source for a value.

    For a result of the scope the source's own object is stored. An array goes to the framework and device of the array
    that it replaces; a new one, and those in a container, to the one framework of the arrays among the first children.
    Where there is none, the value is stored as given.

    Parameters
    ----------
    scope
        The view's.
    value
        What is to be stored.
    old
        What it replaces, or None.
    children
        Of the container that it is stored in, from the first on; read as far as is needed.
    path
        For errors.
    """
    value = scope.source_of(value)
    what = kind_of(value)
    if what is None:
        return value
    adapter, device = _framework_of(old, children)
    target = registry.ready(adapter) if adapter is not None and adapter is not what else None
    if target is None:
        return value
    request = replace(scope.options.request, target=target, device=device, copy=None, stream=None)
    if isinstance(what, Container):
        return convert_tree(value, what, request, strict=False, collect=False, fast_path=None, to=None)
    return scope.run(value, what, request, path)


def _framework_of(old: Any, children: Iterable[Any]) -> tuple[Adapter | None, Any]:
    """Return the framework and device of an array that is replaced; else the one framework of the first children."""
    what = None if old is None else kind_of(old)
    if isinstance(what, Adapter):
        return what, describe(old).device
    adapters = {found for child in islice(children, SAMPLE) if isinstance(found := kind_of(child), Adapter)}
    return (adapters.pop() if len(adapters) == 1 else None), None
