"""One call of a decorated function: convert the arguments and the results, and write copies back."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import Any, cast

from dlx._api.convert import convert
from dlx._containers.failures import Failures
from dlx._containers.lookup import TUPLE, is_plain
from dlx._containers.tree import ROOT, Tree
from dlx._core.foreign import derives
from dlx._core.native import FastPathFunction
from dlx._core.types import Device
from dlx._engine.batch import Batch
from dlx._engine.request import Request
from dlx._registry.registry import registry
from dlx._using.stream_context import Work
from dlx._using.write_back import Writes
from dlx._views.factory import lazy_view
from dlx._views.scope import kind_of
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import DlxError

__all__ = ["Invocation", "FunctionSpec"]

HOST = Device("cpu")


class FunctionSpec:
    """The options and the parameters of a decorated function."""

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
        """Return the name of a positional argument, for errors."""
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
    """A flattened result; arguments that were passed unchanged are not flattened."""

    def __init__(self, root: Any, handler: Container, failures: Failures, whole: tuple[Any, ...]) -> None:
        self._whole = whole
        super().__init__(root, handler, failures)

    def _enter(self, obj: Any, handler: Container, key: Any, parent: int, at: int) -> int:
        return super()._enter(obj, WHOLE if any(obj is each for each in self._whole) else handler, key, parent, at)


WHOLE = Container(flatten=lambda obj: (None, []), mutable=False)


def _is_key(one: Any, other: Any) -> bool:
    """Return whether two keys are the same object, or equal data. Arrays are not compared by value."""
    return one is other or (type(one) is type(other) and is_plain(type(one)) and bool(one == other))


class Invocation:
    """One call: converts the arguments, converts the results, and writes copies back."""

    def __init__(self, spec: FunctionSpec, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.spec = spec
        self.request: Request = spec.request()
        self.kept = args[: spec.skipped]
        self._caller: tuple[Adapter, Device | None] | None = None
        # Address of what was passed to the function -> (it, the caller's own object).
        self._own: dict[int, tuple[Any, Any]] = {id(each): (each, each) for each in self.kept}
        self._containers: dict[int, tuple[Any, Any, Any, list[Any]]] = {}  # as above, with keys and children
        self.writes = Writes(self.request.target)
        self._seen: list[tuple[Adapter, Any, bool]] = []  # (adapter, array, whether it is on the host for certain)
        self.work = Work(self.request.target, self.request.stream)
        self._declared: set[int] = set()  # addresses; also of those that appear elsewhere among the arguments
        inside = self.inward((args[spec.skipped :], options), arguments=True)
        self._caller = self._answerer()
        self.work.stays = self._caller is None or spec.lazy  # a later conversion uses the stream that is current then
        self.args, self.options = (*self.kept, *inside[0]), inside[1]

    # ---- in ---------------------------------------------------------------------------------------------------------

    def inward(self, value: Any, *, arguments: bool = False) -> Any:
        """Convert a value for the function."""
        what = TUPLE if arguments else kind_of(value)
        if what is None:
            return value
        target, failures = self.request.target, Failures(self.request.target.name)
        root, handler = (value, what) if isinstance(what, Container) else ((value,), TUPLE)
        try:
            tree = Tree(root, handler, failures)
            if arguments:
                self._declared = self.spec.written(tree)
            results = list(tree.arrays)
            # Arrays of the target are passed unchanged, with their graph; `detach` applies to all others.
            some = [
                i for i, source in enumerate(tree.sources) if source is not target or self.request.device is not None
            ]
            arrays, sources = [tree.arrays[i] for i in some], [tree.sources[i] for i in some]
            quick = self.request.device is None and self.request.stream is None
            fast_path = cast("FastPathFunction", convert) if quick else None
            batch = Batch(
                self.request, arrays, sources, lambda n: tree.place(some[n]), failures, fast_path, self.spec.to
            )
            host = set()
            self.work.look(zip(tree.sources, tree.arrays, strict=True))
            with self.work.on_streams():
                converted = batch.run()
            for n, (i, new) in enumerate(zip(some, converted, strict=True)):
                results[i] = self._copied(tree.arrays[i], new, tree.place(i)) if batch.copied(n) else new
                if batch.on_host(n):
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
                own = known[1] if known is not None and known[0] is new else old  # a view represents its source
                self._containers[id(new)] = (new, own, keys, children)
        except DlxError as error:
            if arguments:
                error.where = self._place(error.where)
            raise
        return made if isinstance(what, Container) else made[0]

    def _copied(self, old: Any, new: Any, place: str) -> Any:
        """Register an array that had to be copied; return what the function gets, so that no write to it is lost."""
        return self.writes.copied(old, new, self._place(place), declared=id(old) in self._declared)

    def _place(self, where: str) -> str:
        """Return a path in (args, options) as one that begins with the parameter's name."""
        first, _, rest = where.removeprefix(f"{ROOT}[").partition("]")
        if not rest.startswith("["):
            return where
        key, _, rest = rest[1:].partition("]")
        if first == "0" and key.isdecimal():
            return self.spec.name(int(key) + self.spec.skipped) + rest
        return key.strip("'\"") + rest if first == "1" else where

    def _answerer(self) -> tuple[Adapter, Device | None] | None:
        """Return the framework of the results, and its device; None: results are not converted."""
        if self.spec.answer is not None:
            return registry.target(self.spec.answer), None
        target = self.request.target
        others = {id(source): source for source, *_ in self._seen if source is not target}
        if len(others) != 1:
            return None
        (adapter,) = others.values()
        if registry.ready(adapter) is None:
            return None
        devices = set()
        for source, array, on_host in self._seen:
            if source is adapter:
                info = None if on_host else adapter.info(array)
                devices.add(HOST if on_host else info.device if info is not None else None)
        devices.discard(None)
        return adapter, devices.pop() if len(devices) == 1 else None

    # ---- out --------------------------------------------------------------------------------------------------------

    def answer(self, value: Any) -> Any:
        """Convert a result for the caller."""
        what = kind_of(value)
        if what is None:
            return value
        request = None
        if self._caller is not None:
            target, device = self._caller
            request = Request(target, device, detach=self.request.detach, readonly=self.request.readonly)
            if self.spec.lazy and isinstance(what, Container) and not self._is_handed_back(value, what):
                known = [pair for pair in self._own.values() if self._may_answer(pair[1])]
                return lazy_view(value, request, None, None, strict=False, collect=False, known=known)
        if isinstance(what, Container):
            return self._outward(value, what, request, "result")
        return self._outward((value,), TUPLE, request, "")[0]

    def _outward(self, value: Any, handler: Container, request: Request | None, name: str) -> Any:
        """Convert a container; without a request only arrays that were passed in are replaced, by the caller's own."""
        target = self.request.target if request is None else request.target
        failures = Failures(target.name)
        tree = Answer(value, handler, failures, self.kept)
        arrays = [self._mine(array) for array in tree.arrays]
        results = list(arrays)
        own = any(id(container) in self._containers for container, *_ in tree.containers())
        own = own or any(new is not old for new, old in zip(results, tree.arrays, strict=True))
        if not own and (request is None or not results):
            return value  # it holds nothing of the caller's, and nothing to convert
        if request is not None:
            rest = [i for i, old in enumerate(tree.arrays) if not (self._went_in(old) and self._may_answer(arrays[i]))]
            some = [arrays[i] for i in rest]
            sources = [
                source if isinstance(source := kind_of(array), Adapter) else tree.sources[i]
                for i, array in zip(rest, some, strict=True)
            ]
            place = lambda n: name + tree.place(rest[n]).removeprefix(ROOT) if name else "result"  # noqa: E731
            for i, new in zip(
                rest, Batch(request, some, sources, place, failures, *self._fast_path(request)).run(), strict=True
            ):
                results[i] = new
        return tree.rebuild(results, target.name, self._stands)

    def _fast_path(self, request: Request) -> tuple[FastPathFunction | None, Any]:
        """Return the fast path, where results are host arrays of the adapter registered under the target's name."""
        target = request.target
        if (
            request.device not in (None, HOST)
            or not target.fast_path_types
            or registry.target(target.name) is not target
        ):
            return None, None
        return cast("FastPathFunction", convert), target.name

    def _went_in(self, obj: Any) -> bool:
        """Return whether an object was passed to the function."""
        own = self._own.get(id(obj))
        return own is not None and own[0] is obj

    def _mine(self, array: Any) -> Any:
        """Return the caller's own array for one that was passed in."""
        return self._own[id(array)][1] if self._went_in(array) else array

    def _may_answer(self, own: Any) -> bool:
        """Return whether the caller's own object may be the result: not if `answer` names another framework."""
        if self.spec.answer is None or self._caller is None:
            return True
        what = kind_of(own)
        return not isinstance(what, Adapter) or self._caller[0].holds(own, what)

    def _is_handed_back(self, container: Any, handler: Container) -> bool:
        """Return whether a container and all that it holds are the caller's own."""
        if self._went_in(container):
            return True
        own = self._containers.get(id(container))
        if own is None or own[0] is not container:
            return False
        tree = Answer(container, handler, Failures(""), self.kept)
        arrays = [self._mine(array) for array in tree.arrays]
        if not all(self._went_in(old) and self._may_answer(new) for old, new in zip(tree.arrays, arrays, strict=True)):
            return False
        return tree.rebuild(arrays, "", self._stands) is own[1]

    def _stands(self, container: Any, keys: Any, children: list[Any]) -> Any:
        """Return the caller's own container for one that was passed in and is unchanged."""
        made, own, old_keys, old = self._containers.get(id(container), (None, None, None, []))
        if made is not container or len(old) != len(children):
            return None
        if derives(type(container), Set):  # unordered
            return own if {id(child) for child in children} == {id(child) for child in old} else None
        same = keys is None or all(map(_is_key, keys, old_keys or ()))
        return own if same and all(a is b for a, b in zip(old, children, strict=True)) else None

    # ---- back -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Invocation:
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
            If one of those cannot be written to, or one write would overwrite another.
        """
        self.writes.back()
