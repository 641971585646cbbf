"""What the lazy views of one call share: the options, and which object became which.

An element is converted when it is first asked for. Results are found again by two roads: each view keeps, for every
place that was asked for, the source's element and its result; and the scope knows, weakly, what became of an object, so
that one that stands in two places, or has moved, gives the same result.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from dlx import strangers
from dlx.adapter import Adapter, look_up
from dlx.containers import what_is
from dlx.errors import AdapterNotFoundError, DlxError
from dlx.facts import Container
from dlx.native import Lane
from dlx.phases import Bulk, convert_tree
from dlx.planning import Request
from dlx.tensor import type_name
from dlx.trees import ROOT, Failures

__all__ = ["Path", "Scope", "path_text"]

Path = tuple[Any, Container, Any] | None
"""Where a view was met first: the path of the view around it, that one's row, and the key; None at the root."""

SAMPLE = 16  # children that are looked at to find out which framework a container's arrays are of


def path_text(path: Path) -> str:
    """Return a path as Python would write it: ``obj['a'][3]``."""
    steps: list[str] = []
    while path is not None:
        path, row, key = path
        steps.append(row.place([key], 0))
    if len(steps) > 64:
        steps[32:-32] = [" ... "]
    return ROOT + "".join(reversed(steps))


class Scope:
    """The options of one call, and the objects that became others in it.

    Parameters
    ----------
    request, strict, collect
        The options.
    make
        ``make(obj, row, scope, path)`` gives the view of a container, or None where it has none.
    lane, to
        The fast lane and its target, where the options ask for nothing else; None otherwise.
    """

    __slots__ = ("_free", "_full", "_kinds", "_known", "_lock", "collect", "lane", "make", "request", "strict", "to")

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
        self._lock = threading.RLock()  # held while something is done that must not be done twice
        self._kinds: dict[type, Any] = {}
        self._free: set[type] = set()  # types whose arrays may be asked twice
        self._known: dict[Any, tuple[Any, Any]] = {}  # name of a source, address of a result -> both, weakly
        self._full = 64  # sweep when it is that large

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
        kind = type(obj)
        try:
            what = self._kinds[kind]
        except KeyError:
            what = self._learn(kind, row, path, key)
        if what is None:
            return obj
        name = id(obj) if row.identity is None else row.identity(obj) or id(obj)
        if kind in self._free:
            new = self._again(name, obj)
            if new is not None:
                return new
            return self._remember(name, obj, self._converted(obj, what, row, path, key))
        with self._lock:
            new = self._again(name, obj)
            if new is not None:
                return new
            if isinstance(what, Container):
                return self._entered(name, obj, what, row, path, key)
            source = self._stranger(obj, row, path, key) if isinstance(what, type) else what
            if source is None:
                return obj
            return self._remember(name, obj, self._converted(obj, source, row, path, key))

    def _learn(self, kind: type, row: Container, path: Path, key: Any) -> Any:
        try:
            what = what_is(kind)
        except DlxError as error:
            raise error.complete(
                source=type_name(kind), target=self.request.target.name, where=path_text((path, row, key))
            ) from None
        if isinstance(what, Adapter) and any(look_up(name) is kind for name in what.lane):
            self._free.add(kind)
        self._kinds[kind] = what
        return what

    def _stranger(self, obj: Any, row: Container, path: Path, key: Any) -> Adapter | None:
        try:
            source = strangers.array_stranger(obj)
            plain = source is not None or not self.strict or strangers.buffer_stranger(obj) is not None
        except DlxError:
            raise
        except Exception:  # it raises when it is looked at
            return None
        if plain:
            return source
        raise AdapterNotFoundError(
            "it is neither array, container nor plain data (strict=True)",
            source=type_name(type(obj)),
            target=self.request.target.name,
            where=path_text((path, row, key)),
            fix="Drop strict=True to let it pass through.",
        )

    def _converted(self, obj: Any, source: Adapter, row: Container, path: Path, key: Any) -> Any:
        if self.lane is not None:
            try:
                return self.lane(obj, self.to)
            except DlxError as error:
                error.complete(where=path_text((path, row, key)))
                raise
        return self.run(obj, source, self.request, (path, row, key))

    def run(self, obj: Any, source: Adapter, request: Request, path: Path) -> Any:
        """Convert one array through all phases."""
        failures = Failures(request.target.name)
        return Bulk(request, [obj], [source], lambda i: path_text(path), failures).run()[0]

    def _entered(self, name: Any, obj: Any, what: Container, row: Container, path: Path, key: Any) -> Any:
        """Return a view of a container; sets and recipes, which nobody can look into by key, are converted now."""
        new = self.make(obj, what, self, (path, row, key))
        if new is not None:
            self.met(name, new)
            return new
        try:
            return self.eager(obj, what)
        except DlxError as error:
            error.where = path_text((path, row, key)) + error.where.removeprefix(ROOT)
            raise

    def eager(self, obj: Any, row: Container) -> Any:
        """Convert a whole container now."""
        return convert_tree(
            obj, row, self.request, strict=self.strict, collect=self.collect, lane=self.lane, to=self.to
        )

    # ---- who is who -------------------------------------------------------------------------------------------------

    def met(self, name: Any, view: Any) -> None:
        """Note the view of a container, which holds its source: as long as it lives, the name is valid."""
        self._known[name] = (None, weakref.ref(view))

    def _again(self, name: Any, obj: Any) -> Any:
        """Return what an object became, if that is still there."""
        known = self._known.get(name)
        if known is None:
            return None
        old, new = known[0], known[1]()
        if old is None:
            return new  # a view
        alive = old()
        return new if alive is obj or (alive is not None and name != id(obj)) else None

    def _remember(self, name: Any, obj: Any, new: Any) -> Any:
        """Note what an array became; return what another thread has made of it meanwhile, if it has."""
        if new is obj:
            return new
        try:
            pair = (weakref.ref(obj), weakref.ref(new))
        except TypeError:  # one of them cannot be referred to weakly: it is known by its places only
            return new
        known = self._known.setdefault(name, pair)
        if known is not pair:
            other = self._again(name, obj)
            if other is not None:
                return other
            self._known[name] = pair
        self._known[id(new)] = pair
        if len(self._known) > self._full:
            self._sweep()
        return new

    def _sweep(self) -> None:
        """Forget what is gone."""
        for name, pair in list(self._known.items()):
            if pair[1]() is None and self._known.get(name) is pair:
                del self._known[name]
        self._full = 2 * len(self._known) + 64

    def source_of(self, obj: Any) -> Any:
        """Return the source's own object for a result of this scope; anything else as it is."""
        known = self._known.get(id(obj))
        if known is not None and known[0] is not None and known[1]() is obj:
            source = known[0]()
            if source is not None:
                return source
        return obj

    # ---- inwards ----------------------------------------------------------------------------------------------------

    def what(self, obj: Any) -> Any:
        """Return the row of a container, the adapter of an array, or None."""
        what = what_is(type(obj))
        return strangers.array_stranger(obj) if isinstance(what, type) else what

    def inward(self, value: Any, old: Any, children: Iterable[Any], path: Path) -> Any:
        """Return what is to be stored in the source for a value that is given to a view.

        A result of this scope stands for the source's own object, a view for its source. An array goes to the framework
        and device of the array that it replaces; a new one, and those in a container, to the one framework of the
        arrays among the first children, else it is stored as given.

        Parameters
        ----------
        value
            What is to be stored.
        old
            What it replaces, or None.
        children
            Of the container that it is stored in, from the first on; read as far as is needed.
        path
            For errors.
        """
        value = self.source_of(value)
        what = self.what(value)
        if what is None:
            return value
        target, device = self._home(old, children)
        if target is None or target is what or target.capabilities is None:
            return value
        request = replace(self.request, target=target, device=device, copy=None, stream=None)
        if isinstance(what, Container):
            return convert_tree(value, what, request, strict=False, collect=False, lane=None, to=None)
        return self.run(value, what, request, path)

    def _home(self, old: Any, children: Iterable[Any]) -> tuple[Adapter | None, Any]:
        """Return the framework, and the device, of an array that is replaced; else the one framework of the first."""
        what = None if old is None else self.what(old)
        if isinstance(what, Adapter):
            info = what.info(old)
            return what, info.device if info is not None else None
        homes = {home for child in islice(children, SAMPLE) if isinstance(home := self.what(child), Adapter)}
        return (homes.pop() if len(homes) == 1 else None), None
