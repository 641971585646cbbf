"""One call of a function that `using` decorates: arguments in, results out, writes back."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import Any, cast

from dlx.abi import Device
from dlx.adapter import Adapter
from dlx.containers import TUPLE, is_plain
from dlx.conversion import convert
from dlx.errors import DlxError
from dlx.facts import Container
from dlx.failures import Failures
from dlx.foreign import derives
from dlx.leaf import Request
from dlx.native import Lane
from dlx.phases import Bulk
from dlx.registry import registry
from dlx.trees import ROOT, Tree
from dlx.views import lazy_view
from dlx.working import Work
from dlx.writes import Writes
from dlx.writing import kind_of

__all__ = ["Call", "Way"]

HOST = Device("cpu")


class Way:
    """What is known of a decorated function."""

    def __init__(
        self, function: Any, to: Any, request: Any, answer: Any, writes: frozenset[str], *, lazy: bool
    ) -> None:
        self.to, self.request, self.answer, self.lazy = to, request, answer, lazy
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        known = {parameter.name for parameter in parameters}
        if writes - known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            missing = ", ".join(sorted(writes - known))
            raise TypeError(f"{getattr(function, '__name__', function)} has no parameter {missing} (writes=)")
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = [p.name for p in positional]
        self.rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        self.skipped = 1 if self.names[:1] in (["self"], ["cls"]) else 0
        self.writes = writes

    def name(self, i: int) -> str:
        """Return the name of a positional argument, as it stands in errors."""
        return self.names[i] if i < len(self.names) else f"{self.rest}[{i - len(self.names)}]"

    def written(self, tree: Tree) -> set[int]:
        """Return the addresses of all arrays of (args, options) in parameters that are declared to be written to."""
        if not self.writes:
            return set()
        (_, args), (_, options) = tree.entries(0)
        chosen = [
            link for i, link in tree.entries(args) if self.name(i + self.skipped).partition("[")[0] in self.writes
        ]
        chosen += [link for name, link in tree.entries(options) if name in self.writes]
        return {id(tree.arrays[i]) for i in tree.below(chosen)}


class Answer(Tree):
    """A result taken apart; what the function was passed as it is stays whole."""

    def __init__(self, root: Any, row: Container, failures: Failures, whole: tuple[Any, ...]) -> None:
        self._whole = whole
        super().__init__(root, row, failures)

    def _enter(self, obj: Any, row: Container, key: Any, parent: int, at: int) -> int:
        return super()._enter(obj, WHOLE if any(obj is each for each in self._whole) else row, key, parent, at)


WHOLE = Container(open=lambda obj: (None, []), mutable=False)


def _is_key(one: Any, other: Any) -> bool:
    """Return whether two keys are one: the same object, or equal data. An array is never asked what it equals."""
    return one is other or (type(one) is type(other) and is_plain(type(one)) and bool(one == other))


class Call:
    """One call: arguments on their way in, results on their way out, writes on their way back."""

    def __init__(self, way: Way, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.way = way
        self.request: Request = way.request()
        self.kept = args[: way.skipped]
        self._caller: tuple[Adapter, Device | None] | None = None
        # Address of what went in -> (it, the caller's own object).
        self._own: dict[int, tuple[Any, Any]] = {id(each): (each, each) for each in self.kept}
        self._containers: dict[int, tuple[Any, Any, Any, list[Any]]] = {}  # the same; with keys and children
        self.writes = Writes(self.request.target)
        self._seen: list[tuple[Adapter, Any, bool]] = []  # (adapter, array, whether it is on the host for certain)
        self.work = Work(self.request.target, self.request.stream)
        self._declared: set[int] = set()  # addresses; even where they stand elsewhere among the arguments as well
        inside = self.inward((args[way.skipped :], options), arguments=True)
        self._caller = self._answerer()
        self.work.stays = self._caller is None or way.lazy  # what is converted later is on the stream of then
        self.args, self.options = (*self.kept, *inside[0]), inside[1]

    # ---- in ---------------------------------------------------------------------------------------------------------

    def inward(self, value: Any, *, arguments: bool = False) -> Any:
        """Return a value as the function is to see it."""
        what = TUPLE if arguments else kind_of(value)
        if what is None:
            return value
        target, failures = self.request.target, Failures(self.request.target.name)
        root, row = (value, what) if isinstance(what, Container) else ((value,), TUPLE)
        try:
            tree = Tree(root, row, failures)
            if arguments:
                self._declared = self.way.written(tree)
            results = list(tree.arrays)
            # What is there already stays, graph and all; `detach` is for what comes from elsewhere.
            some = [
                i for i, source in enumerate(tree.sources) if source is not target or self.request.device is not None
            ]
            arrays, sources = [tree.arrays[i] for i in some], [tree.sources[i] for i in some]
            quick = self.request.device is None and self.request.stream is None
            lane = cast("Lane", convert) if quick else None
            bulk = Bulk(self.request, arrays, sources, lambda n: tree.place(some[n]), failures, lane, self.way.to)
            host = set()
            self.work.look(zip(tree.sources, tree.arrays, strict=True))
            with self.work.on_streams():
                converted = bulk.run()
            for n, (i, new) in enumerate(zip(some, converted, strict=True)):
                results[i] = self._copied(tree.arrays[i], new, tree.place(i)) if bulk.copied(n) else new
                if bulk.on_host(n):
                    host.add(i)
            for i, (source, old, new) in enumerate(zip(tree.sources, tree.arrays, results, strict=True)):
                self._own[id(new)] = (new, old)
                self._seen.append((source, old, i in host))
                if self.writes:
                    self.writes.shared(old, new, self._place(tree.place(i)), declared=id(old) in self._declared)
            before = tree.containers()
            made = tree.rebuild(results, target.name)
            for (old, keys, children, _), (*_, new) in zip(before, tree.containers(), strict=True):
                known = self._containers.get(id(new))
                own = known[1] if known is not None and known[0] is new else old  # a view stands for what it shows
                self._containers[id(new)] = (new, own, keys, children)
        except DlxError as error:
            if arguments:
                error.where = self._place(error.where)
            raise
        return made if isinstance(what, Container) else made[0]

    def _copied(self, old: Any, new: Any, place: str) -> Any:
        """Return what the function gets of an array that had to be copied, so that no write to it is lost."""
        return self.writes.copied(old, new, self._place(place), declared=id(old) in self._declared)

    def _place(self, where: str) -> str:
        """Return a place in (args, options) by the parameter's name."""
        first, _, rest = where.removeprefix(f"{ROOT}[").partition("]")
        if not rest.startswith("["):
            return where
        key, _, rest = rest[1:].partition("]")
        if first == "0" and key.isdecimal():
            return self.way.name(int(key) + self.way.skipped) + rest
        return key.strip("'\"") + rest if first == "1" else where

    def _answerer(self) -> tuple[Adapter, Device | None] | None:
        """Return the framework that answers, and its device; None: results stay as they are."""
        if self.way.answer is not None:
            return registry.target(self.way.answer), None
        target = self.request.target
        others = {id(source): source for source, *_ in self._seen if source is not target}
        if len(others) != 1:
            return None
        (home,) = others.values()
        if registry.ready(home) is None:
            return None
        devices = set()
        for source, array, on_host in self._seen:
            if source is home:
                info = None if on_host else home.info(array)
                devices.add(HOST if on_host else info.device if info is not None else None)
        devices.discard(None)
        return home, devices.pop() if len(devices) == 1 else None

    # ---- out --------------------------------------------------------------------------------------------------------

    def answer(self, value: Any) -> Any:
        """Return a result as the caller is to see it."""
        what = kind_of(value)
        if what is None:
            return value
        request = None
        if self._caller is not None:
            home, device = self._caller
            request = Request(home, device, detach=self.request.detach, readonly=self.request.readonly)
            if self.way.lazy and isinstance(what, Container) and not self._is_handed_back(value, what):
                known = [pair for pair in self._own.values() if self._may_answer(pair[1])]
                return lazy_view(value, request, None, None, strict=False, collect=False, known=known)
        if isinstance(what, Container):
            return self._outward(value, what, request, "result")
        return self._outward((value,), TUPLE, request, "")[0]

    def _outward(self, value: Any, row: Container, request: Request | None, name: str) -> Any:
        """Convert a container; without a request its arrays stay, but for the caller's own."""
        target = self.request.target if request is None else request.target
        failures = Failures(target.name)
        tree = Answer(value, row, failures, self.kept)
        arrays = [self._mine(array) for array in tree.arrays]
        results = list(arrays)
        own = any(id(container) in self._containers for container, *_ in tree.containers())
        own = own or any(new is not old for new, old in zip(results, tree.arrays, strict=True))
        if not own and (request is None or not results):
            return value  # nothing in it is the caller's, and nothing is to be converted
        if request is not None:
            rest = [i for i, old in enumerate(tree.arrays) if not (self._went_in(old) and self._may_answer(arrays[i]))]
            some = [arrays[i] for i in rest]
            sources = [
                source if isinstance(source := kind_of(array), Adapter) else tree.sources[i]
                for i, array in zip(rest, some, strict=True)
            ]
            place = lambda n: name + tree.place(rest[n]).removeprefix(ROOT) if name else "result"  # noqa: E731
            for i, new in zip(
                rest, Bulk(request, some, sources, place, failures, *self._lane(request)).run(), strict=True
            ):
                results[i] = new
        return tree.rebuild(results, target.name, self._stands)

    def _lane(self, request: Request) -> tuple[Lane | None, Any]:
        """Return the fast lane, where results go to the host of a target that its name stands for."""
        home = request.target
        if request.device not in (None, HOST) or not home.lane or registry.target(home.name) is not home:
            return None, None
        return cast("Lane", convert), home.name

    def _went_in(self, obj: Any) -> bool:
        """Return whether an object is one that the function got."""
        own = self._own.get(id(obj))
        return own is not None and own[0] is obj

    def _mine(self, array: Any) -> Any:
        """Return the caller's own array for one that went in."""
        return self._own[id(array)][1] if self._went_in(array) else array

    def _may_answer(self, own: Any) -> bool:
        """Return whether the caller's own object is a result as it is: not where another framework was asked for."""
        if self.way.answer is None or self._caller is None:
            return True
        what = kind_of(own)
        return not isinstance(what, Adapter) or self._caller[0].holds(own, what)

    def _is_handed_back(self, container: Any, row: Container) -> bool:
        """Return whether a container is, all of it, the caller's own."""
        if self._went_in(container):
            return True
        own = self._containers.get(id(container))
        if own is None or own[0] is not container:
            return False
        tree = Answer(container, row, Failures(""), self.kept)
        arrays = [self._mine(array) for array in tree.arrays]
        if not all(self._went_in(old) and self._may_answer(new) for old, new in zip(tree.arrays, arrays, strict=True)):
            return False
        return tree.rebuild(arrays, "", self._stands) is own[1]

    def _stands(self, container: Any, keys: Any, children: list[Any]) -> Any:
        """Return the caller's own container for one that went in and holds what it held."""
        made, own, old_keys, old = self._containers.get(id(container), (None, None, None, []))
        if made is not container or len(old) != len(children):
            return None
        if derives(type(container), Set):  # in no order
            return own if {id(child) for child in children} == {id(child) for child in old} else None
        same = keys is None or all(map(_is_key, keys, old_keys or ()))
        return own if same and all(a is b for a, b in zip(old, children, strict=True)) else None

    # ---- back -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            with self.work.step():
                self.write_back()
        except DlxError:
            if error is None or isinstance(error, GeneratorExit):
                raise

    def write_back(self) -> None:
        """Write what the function wrote to copies into the caller's arrays.

        Raises
        ------
        ReadOnlyError
            If one of those cannot be written to, or two writes would be in each other's way.
        """
        self.writes.back()
