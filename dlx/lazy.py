"""What the lazy views of one call share: the options, and which object became which.

An element is converted when it is first asked for. Results are found again by two roads: each view keeps, for every
place that was asked for, the source's element and its result; and the scope knows, weakly, what became of an object, so
that one that stands in two places, or has moved, gives the same result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

from dlx import strangers
from dlx.adapter import Adapter, look_up
from dlx.containers import VIEW, is_plain, stamp, what_is
from dlx.errors import AdapterNotFoundError, DlxError
from dlx.facts import Container
from dlx.failures import Failures
from dlx.foreign import is_key
from dlx.leaf import Request
from dlx.locks import lock_of
from dlx.native import Lane
from dlx.phases import Bulk, convert_tree
from dlx.tensor import type_name
from dlx.trees import ROOT

__all__ = ["MISSING", "Options", "Path", "Scope", "name_of", "path_text"]

MISSING: Any = object()

Path = tuple[Any, Container, Any] | None
"""Where a view was met first: the path of the view around it, that one's row, and the key; None at the root."""


def path_text(path: Path) -> str:
    """Return a path as Python would write it: ``obj['a'][3]``."""
    steps: list[str] = []
    while path is not None:
        path, row, key = path
        steps.append(row.place([key], 0))
    if len(steps) > 64:
        steps[32:-32] = [" ... "]
    return ROOT + "".join(reversed(steps))


class Options:
    """What was asked for, and what is known of types under it; shared by calls that ask for the same.

    Parameters
    ----------
    request, strict, collect
        The options.
    make
        ``make(obj, row, scope, path)`` gives the view of a container, or None where it has none.
    lane, to
        The fast lane and its target, where the options ask for nothing else; None otherwise.

    Attributes
    ----------
    known_at
        The stamp under which types were looked up; under another one they are looked up anew.
    """

    __slots__ = ("collect", "free", "kinds", "known_at", "lane", "make", "request", "strict", "to")

    def __init__(
        self,
        request: Request,
        make: Callable[[Any, Container, Scope, Path], Any],
        lane: Lane | None,
        to: Any,
        strict: bool = False,
        collect: bool = False,
    ) -> None:
        self.request, self.make, self.lane, self.to = request, make, lane, to
        self.strict, self.collect = strict, collect
        self.known_at = stamp()
        self.kinds: dict[type, Any] = {}
        self.free: set[type] = set()  # types whose arrays may be asked twice, by the lane

    def known(self, kind: type) -> Any:
        """Return what `what_is` says of a type, if it was asked since types last changed; else MISSING."""
        now = stamp()
        if now != self.known_at:
            self.kinds, self.free, self.known_at = {}, set(), now
        return self.kinds.get(kind, MISSING) if type(kind) is type or is_key(kind) else MISSING


class Scope:
    """The objects that became others in one call.

    Where an object stands is noted as (the view, weakly; its place there); what it became is in that view. Only what is
    put out of its place, while somebody may still hold it, is referred to itself.

    Attributes
    ----------
    options
        What was asked for.
    known
        Name of a source's object -> a place where it and its result are; a mere number is one in the root.
    moved
        Name -> (the object, what it became), weakly; for what has no place, or lost it.
    back
        Address of a result -> name; None as long as nobody asked.
    root
        The outermost view, weakly, once an element of it was asked for.
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

    def result(self, obj: Any, row: Container, path: Path, key: Any) -> Any:
        """Return what an element is in the target: an array, a view, or the element itself.

        Parameters
        ----------
        obj
            The element.
        row, path, key
            The container's row and path, and the element's place in it.
        """
        options, kind = self.options, type(obj)
        what = options.known(kind)
        if what is MISSING:
            what = self._learn(kind, row, path, key)
        if what is None:
            return obj
        name = name_of(obj, row)
        with self.lock():
            new = self._again(name, obj)
            if new is not None:
                return new
            if what is kind:  # a class may not even say what it is
                source = self._stranger(obj, row, path, key)
            elif isinstance(what, Container):
                return self._entered(obj, what, row, path, key)
            else:
                source = what
            if source is None:
                return obj
            new = self._converted(obj, source, row, path, key)
            self.leave(name, obj, new)  # until it has its place, which another thread may ask for already
            return new

    def lock(self) -> threading.RLock:
        """Return the lock that is held while something is done that must not be done twice."""
        return lock_of(self)

    def _learn(self, kind: type, row: Container, path: Path, key: Any) -> Any:
        try:
            what = what_is(kind)
        except DlxError as error:
            raise error.complete(
                source=type_name(kind), target=self.options.request.target.name, where=path_text((path, row, key))
            ) from None
        options = self.options
        if type(kind) is type or is_key(kind):
            options.kinds[kind] = what
            lane = what.lane if what is not kind and isinstance(what, Adapter) and options.lane is not None else ()
            if any(look_up(name) is kind for name in lane):
                options.free.add(kind)
        return what

    def _stranger(self, obj: Any, row: Container, path: Path, key: Any) -> Adapter | None:
        try:
            source = strangers.array_stranger(obj)
            plain = source is not None or not self.options.strict or strangers.buffer_stranger(obj) is not None
        except (DlxError, MemoryError):
            raise
        except Exception:  # it raises when it is looked at, so it is nothing that we know
            source, plain = None, not self.options.strict
        if plain:
            return source
        raise AdapterNotFoundError(
            "it is neither array, container nor plain data (strict=True)",
            source=type_name(type(obj)),
            target=self.options.request.target.name,
            where=path_text((path, row, key)),
            fix="Drop strict=True to let it pass through.",
        )

    def _converted(self, obj: Any, source: Adapter, row: Container, path: Path, key: Any) -> Any:
        options = self.options
        if options.lane is not None:
            try:
                return options.lane(obj, options.to)
            except DlxError as error:
                error.complete(where=path_text((path, row, key)))
                raise
        return self.run(obj, source, options.request, (path, row, key))

    def run(self, obj: Any, source: Adapter, request: Request, path: Path) -> Any:
        """Convert one array through all phases."""
        failures = Failures(request.target.name)
        return Bulk(request, [obj], [source], lambda i: path_text(path), failures).run()[0]

    def _entered(self, obj: Any, what: Container, row: Container, path: Path, key: Any) -> Any:
        """Return a view of a container; sets and recipes, which nobody can look into by key, are converted now."""
        root, name = self.root and self.root(), name_of(obj, what)
        if root is not None and name_of(root._source, root._row) == name:
            return root
        new = self.options.make(obj, what, self, (path, row, key))
        if new is not None:
            self.leave(name_of(obj, row), obj, new)
            return new
        try:
            return self.eager(obj, what)
        except DlxError as error:
            error.where = path_text((path, row, key)) + error.where.removeprefix(ROOT)
            raise

    def eager(self, obj: Any, row: Container) -> Any:
        """Convert a whole container now."""
        o = self.options
        return convert_tree(obj, row, o.request, strict=o.strict, collect=o.collect, lane=o.lane, to=o.to)

    # ---- who is who -------------------------------------------------------------------------------------------------

    def place(self, name: Any, obj: Any, new: Any, view: Any, key: Any) -> None:
        """Note where an object, and what it became, are; where it has a place already, that is kept."""
        if self._at(name) is None:
            self.known[name] = (view, key)
        if self.back is not None:
            self.back[id(new)] = name

    def leave(self, name: Any, obj: Any, new: Any) -> None:
        """Note what an object became that has no place, or loses it."""
        if new is not obj:
            self.know(name, obj, new)

    def know(self, name: Any, obj: Any, new: Any) -> None:
        """Note what an object is to be, weakly; it may be to stay as it is."""
        moved = self.moved
        try:
            # A view of the object itself holds it; what it shows of a view, or reads in its stead, does not.
            held = what_is(type(new)) is VIEW and name_of(new._source, new._row) == name
            result, source = ref(new), None if held else _source_ref(obj)
            if source is not None and not isinstance(source, ref):  # it is held, as long as the result lives

                def let_go(dead: Any) -> None:
                    if moved.get(name, (None, None))[1] is dead:
                        del moved[name]

                result = ref(new, let_go)
        except TypeError:  # the result cannot be referred to weakly
            return
        moved[name] = (source, result)
        if self.back is not None:
            self.back[id(new)] = name
        self.sweep()

    def _at(self, name: Any) -> Any:
        """Return (object, what it became) from where it was noted to be; None where it is there no more."""
        place = self.known.get(name)
        if place is None:
            return None
        ref_of, key = (self.root, place) if isinstance(place, int) else place
        view = ref_of()
        slot = None if view is None else view._slots.get(key)
        return slot if slot is not None and name_of(slot[0], view._row) == name else None

    def _again(self, name: Any, obj: Any) -> Any:
        """Return what an object became, if that is still there."""
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
        """Forget what is gone, now and then."""
        if max(len(self.known), len(self.moved)) <= self._full:
            return
        for name, place in list(self.known.items()):
            if self._at(name) is None and self.known.get(name) is place:
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
        if name is None or is_plain(type(obj)):  # what a recipe made of an object may be any number, or None
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


def name_of(obj: Any, row: Container) -> Any:
    """Return what tells an element of a container apart from others."""
    name = None if row.identity is None else row.identity(obj)
    return id(obj) if name is None else ("same_as", name)
