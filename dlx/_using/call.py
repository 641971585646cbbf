"""One call of a decorated function: convert the arguments and the results, and write copies back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any

from dlx._api.describe import describe
from dlx._core.types import Device
from dlx._engine.batch import Batch, not_writable
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.request import Request
from dlx._engine.sources import device_of
from dlx._engine.tree import Tree
from dlx._protocols.arrow import Column
from dlx._registry import lookup
from dlx._registry.lookup import TUPLE, Kind
from dlx._registry.registry import registry
from dlx._registry.target import Target, is_committed
from dlx._support.reflect import derives, type_name
from dlx._support.tracebacks import REFUSALS, shorten
from dlx._using.function_spec import FunctionSpec, Place, tracked
from dlx._using.stream_context import Work
from dlx._using.write_back import Writes
from dlx._views.factory import lazy_view
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import ConversionError, DlxError, path_text

__all__ = ["Invocation"]

HOST = Device("cpu")
_NO_ARRAYS: Mapping[int, Any] = {}


class CallTree(Tree):
    """A flattened argument or result. What holds arrays of the function's own framework, such as a model, is kept."""

    def __init__(
        self,
        root: Any,
        handler: Container,
        failures: Failures,
        package: str,
        whole: tuple[Any, ...] = (),
        *,
        strict: bool | None = False,
    ) -> None:
        self._package, self._whole = package, whole  # arguments that were passed unchanged are not flattened
        super().__init__(root, handler, failures, strict=strict)

    def _enter(self, obj: Any, handler: Container, key: Any, parent: int, at: int) -> int:
        return super()._enter(obj, WHOLE if any(obj is each for each in self._whole) else handler, key, parent, at)

    def _look(self, obj: Any, kind: Kind, number: int, i: int) -> Adapter | None:
        refusal = kind.refusal
        if any(obj is each for each in self._whole) or refusal is None or self._package in refusal.frameworks:
            return lookup.look(obj, None, kind).adapter
        return super()._look(obj, kind, number, i)


WHOLE = Container(flatten=lambda obj: (None, []), mutable=False)


def _untold(source: Adapter, array: Any, target: Adapter) -> ConversionError:
    """Return the error for an array that is tracked, where nobody said what becomes of its gradients."""
    outer, inner = source.gradients, target.gradients
    both = outer is not None and outer.record is not None and inner is not None and inner.vjp is not None
    computed = "grad=True) to have them computed, or dlx.using(..., " if both else ""
    return ConversionError(
        f"{source.name} records what becomes of it, and its gradients would be lost",
        source=type_name(type(array)),
        fix=f"Say dlx.using(..., {computed}detach=True) to do without.",
    )


def _cut(source: Adapter, array: Any, at: Place) -> ConversionError:
    """Return the error for a result that its framework records, as it does an argument, where it leaves that."""
    root, path = at
    what = path_text(path, root or "what was sent")
    return ConversionError(
        f"{source.name} records what becomes of {what}, and this result would lose its gradients",
        source=type_name(type(array)),
        fix="Say dlx.using(..., detach=True) to do without, detach it, or pass arrays of one framework only.",
    )


def _is_key(one: Any, other: Any) -> bool:
    """Return whether two keys are the same object, or equal data. Arrays are not compared by value."""
    return one is other or (
        type(one) is type(other) and lookup.kind(type(one)).verdict == "plain" and bool(one == other)
    )


class Invocation:
    """One call: converts the arguments, converts the results, and writes copies back.

    Parameters
    ----------
    spec, args, options
        The function, and what it is called with.
    shared
        Of a call that has been made: address of an array among the arguments -> the array that shares its memory on
        the host, and was passed instead.
    """

    def __init__(
        self, spec: FunctionSpec, args: tuple[Any, ...], options: dict[str, Any], shared: Mapping[int, Any] = _NO_ARRAYS
    ) -> None:
        self.spec, self._shared = spec, shared
        try:
            self.request: Request = spec.request()
        except REFUSALS as error:
            shorten(error, own=False)
            raise
        self.kept = args[: spec.skipped]
        self._caller: tuple[Target, Device | None, bool] | None = None
        # Address of what was passed to the function -> (it, the caller's own object).
        self._own: dict[int, tuple[Any, Any]] = {id(each): (each, each) for each in self.kept}
        self._containers: dict[int, tuple[Any, Any, Any, list[Any]]] = {}  # as above, with keys and children
        self.writes = Writes(self.request.target)
        self._seen: list[tuple[Adapter, Any, bool]] = []  # (adapter, array, whether it is on the host for certain)
        self._recorded: Place | None = None  # where an array is that the function's framework records
        self.work = Work(self.request.target, self.request.stream)
        self._declared: set[int] = set()  # addresses; also of those that appear elsewhere among the arguments
        self._last: tuple[Tree, Batch] | None = None  # the arguments, to be undone
        inside: Any = None
        try:
            inside = self.inward((args[spec.skipped :], options), arguments=True)
            self._caller = self._results_in()
            # A later conversion uses the stream that is current then.
            self.work.stays = self._caller is None or spec.lazy
            self.args, self.options = (*self.kept, *inside[0]), inside[1]
        except BaseException as error:
            inside, last = None, self._last
            vars(self).clear()  # nobody has this object, and it may hold results
            if last is not None:
                last[0].forget()
                last[1].undo(error)
            shorten(error, own=False)
            raise
        self._last = None

    # ---- in ---------------------------------------------------------------------------------------------------------

    def inward(self, value: Any, *, arguments: bool = False) -> Any:
        """Convert a value for the function."""
        what = TUPLE if arguments else lookup.look(value).part
        if what is None:
            return value
        target = self.request.target
        root, handler = (value, what) if isinstance(what, Container) else ((value,), TUPLE)
        located = self.spec.parameter if arguments else lambda path: ("", path if root is value else path[1:])
        failures = Failures(target.name, located=located)
        tree = CallTree(root, handler, failures, target.adapter.package)
        if arguments:
            self._declared, buffers = self.spec.written(tree)
            for at, buffer in buffers:
                if describe(buffer).readonly:
                    failures.add(self._not_writable(buffer), at)
        results = [self._shared.get(id(array), array) for array in tree.arrays]
        host = {i for i, array in enumerate(tree.arrays) if id(array) in self._shared}
        # Arrays of the target are passed unchanged, with their graph; `detach` applies to all others.
        some = [
            i
            for i, (array, source) in enumerate(zip(tree.arrays, tree.sources, strict=True))
            if (self.request.device is not None or not is_inside(array, source, target))
            and id(array) not in self._shared
        ]
        arrays, sources = [tree.arrays[i] for i in some], [tree.sources[i] for i in some]
        if self.spec.detach is None:
            for i, array, source in zip(some, arrays, sources, strict=True):
                if tracked(source, array):
                    failures.add(_untold(source, array, target.adapter), tree.path(i))
            self._recorded = self._recorded or next(
                (
                    located(tree.path(i))
                    for i, (array, source) in enumerate(zip(tree.arrays, tree.sources, strict=True))
                    if is_inside(array, source, target) and tracked(source, array)
                ),
                None,
            )
        named = self.spec.to if self.request.device is None and self.request.stream is None else None
        batch = Batch(self.request, arrays, sources, lambda n: tree.path(some[n]), failures, named)
        if self._declared:
            batch.written = frozenset(n for n, array in enumerate(arrays) if id(array) in self._declared)
            for i in set(range(len(results))).difference(some):
                array = tree.arrays[i]
                if id(array) in self._declared and id(array) not in self._shared and describe(array).readonly:
                    failures.add(self._not_writable(array), tree.path(i))
        if arguments:
            self._last = tree, batch
        self.work.look(zip(tree.sources, tree.arrays, strict=True))
        with self.work.on_streams():
            converted = batch.run()
        for n, (i, new) in enumerate(zip(some, converted, strict=True)):
            old, declared = tree.arrays[i], id(tree.arrays[i]) in self._declared
            copied = batch.copied(n)  # no write to a copy may be lost
            results[i] = self.writes.copied(old, new, located(tree.path(i)), declared=declared) if copied else new
            if batch.on_host(n):
                host.add(i)
        columns: dict[int, Any] = {}  # of tables: id -> what was passed for it
        for i, (source, old, new) in enumerate(zip(tree.sources, tree.arrays, results, strict=True)):
            self._own[id(new)] = (new, old)
            self._seen.append((source, old, i in host))
            if type(old) is Column:
                columns[id(old)] = new
            if id(old) in self._declared:
                self.writes.declared(source, old)
            if self.writes:
                self.writes.shared(old, new, located(tree.path(i)), declared=id(old) in self._declared)
        before = tree.containers()
        made = tree.rebuild(results, target.name)
        ours = (root, *root) if arguments else () if root is value else (root,)
        for (old, keys, children, _), (*_, new) in zip(before, tree.containers(), strict=True):
            if any(old is each for each in ours):
                continue
            known = self._containers.get(id(new))
            own = known[1] if known is not None and known[0] is new else old  # a view represents its source
            self._containers[id(new)] = (new, own, keys, [columns.get(id(child), child) for child in children])
        return made if isinstance(what, Container) else made[0]

    def _not_writable(self, array: Any) -> DlxError:
        return not_writable().complete(source=type_name(type(array)), target=self.request.target.name)

    def _results_in(self) -> tuple[Target, Device | None, bool] | None:
        """Return the framework of the results, their device, and whether they are committed to it, as an argument is.

        None: results are not converted.
        """
        if self.spec.returns is not None:
            return registry.target(self.spec.returns), None, True
        inside = self.request.target
        others = {id(source): source for source, array, _ in self._seen if not is_inside(array, source, inside)}
        if len(others) != 1:
            return None
        (adapter,) = others.values()
        target = registry.ready(adapter)
        if target is None:
            return None
        arrays = [(array, on_host) for source, array, on_host in self._seen if source is adapter]
        held_there = [pair for pair in arrays if is_committed(adapter, pair[0])]
        committed = bool(held_there)
        devices = {HOST if on_host else device_of(adapter, array) for array, on_host in held_there or arrays}
        devices.discard(None)
        held, device = target.capabilities.device_types, devices.pop() if len(devices) == 1 else None
        # Results go to the device of its own arrays, unless the framework can be given nothing there.
        return target, device if device is None or held is None or device.type in held else None, committed

    # ---- out --------------------------------------------------------------------------------------------------------

    def returned(self, value: Any) -> Any:
        """Convert a result for the caller."""
        what = lookup.look(value).part
        if self._caller is None and (what is None or self._passes()):
            return value
        if what is None and lookup.kind(type(value)).refusal is None:
            return value
        request = None
        if self._caller is not None:
            target, device, committed = self._caller
            detach = self.request.detach and (self._recorded is None or not self.spec.lazy)
            readonly = self.request.readonly
            request = Request(target, device, detach=detach, readonly=readonly, committed=committed)
            if self.spec.lazy and isinstance(what, Container) and not self._is_unchanged(value, what):
                known = [(new, self._mine(new)) for new, _ in self._own.values() if self._stays(new)]
                return lazy_view(value, request, None, strict=False, collect=False, known=known)
        try:
            if isinstance(what, Container):
                return self._outward(value, what, request)
            return self._outward((value,), TUPLE, request, wrapped=True)[0]
        except REFUSALS as error:
            shorten(error, own=False)
            raise

    def _passes(self) -> bool:
        """Return whether the function got the caller's own arguments, no containers among them."""
        return not self._containers and all(new is own for new, own in self._own.values())

    def _outward(self, value: Any, handler: Container, request: Request | None, *, wrapped: bool = False) -> Any:
        """Convert a container, or an array wrapped in one.

        Without a request only arrays that were passed in are replaced, by the caller's own.
        """
        target = self.request.target if request is None else request.target
        failures = Failures(target.name, located=lambda path: ("result", path[1:] if wrapped else path))
        package, strict = self.request.target.adapter.package, None if request is None else False
        tree = CallTree(value, handler, failures, package, self.kept, strict=strict)
        arrays = [self._mine(array) for array in tree.arrays]
        results = list(arrays)
        own = any(id(container) in self._containers for container, *_ in tree.containers())
        own = own or any(new is not old for new, old in zip(results, tree.arrays, strict=True))
        if not own and (request is None or not results):
            return value  # it holds nothing of the caller's, and nothing to convert
        if request is not None:
            rest = [i for i, old in enumerate(tree.arrays) if not self._stays(old)]
            some = [arrays[i] for i in rest]
            sources = [
                source if isinstance(source := lookup.look(array).part, Adapter) else tree.sources[i]
                for i, array in zip(rest, some, strict=True)
            ]
            path = lambda n: tree.path(rest[n])  # noqa: E731
            if self._recorded is not None:
                for n, (array, source) in enumerate(zip(some, sources, strict=True)):
                    if tracked(source, array) and not is_inside(array, source, target):
                        failures.add(_cut(source, array, self._recorded), tree.path(rest[n]))
            batch = Batch(request, some, sources, path, failures, self._named(request.target, request.device))
            for i, new in zip(rest, batch.run(), strict=True):
                results[i] = new
        return tree.rebuild(results, target.name, self._stands)

    def _named(self, target: Target, device: Device | None) -> str | None:
        """Return the name of a target for `Batch`; None unless the fast path makes its arrays, on the host."""
        if device not in (None, HOST) or target.adapter.fast_path is None or registry.target(target.name) is not target:
            return None
        if device is not None and target.adapter.placement is not None:
            return None
        return target.name

    def results_to(self) -> Any:
        """Return the name of the framework of results; None: they stay as they are; NotImplemented: it has none."""
        if self._caller is None:
            return None
        name = self._named(self._caller[0], None)
        return NotImplemented if name is None else name

    def _went_in(self, obj: Any) -> bool:
        """Return whether an object was passed to the function."""
        own = self._own.get(id(obj))
        return own is not None and own[0] is obj

    def _mine(self, array: Any) -> Any:
        """Return the caller's own array for one that was passed in; of a column, whose caller has the table, itself."""
        own = self._own[id(array)][1] if self._went_in(array) else array
        return array if type(own) is Column else own

    def _stays(self, array: Any) -> bool:
        """Return whether an array was passed in and needs no conversion: not if `returns` names another framework."""
        if not self._went_in(array):
            return False
        if self.spec.returns is None or self._caller is None:
            return True
        own = self._own[id(array)][1]
        what = lookup.look(own).part
        return not isinstance(what, Adapter) or is_inside(own, what, self._caller[0])

    def _is_unchanged(self, container: Any, handler: Container) -> bool:
        """Return whether a container and all that it holds are the caller's own."""
        if self._went_in(container):
            return True
        own = self._containers.get(id(container))
        if own is None or own[0] is not container:
            return False
        tree = CallTree(container, handler, Failures(""), "", self.kept, strict=None)
        arrays = [self._mine(array) for array in tree.arrays]
        if not all(map(self._stays, tree.arrays)):
            return False
        return tree.rebuild(arrays, "", self._stands) is own[1]

    def _stands(self, container: Any, keys: Any, children: list[Any]) -> Any:
        """Return the caller's own container for one that was passed in and is unchanged."""
        made, own, old_keys, old = self._containers.get(id(container), (None, None, None, []))
        if made is not container or len(old) != len(children):
            return None
        if derives(type(container), Set):  # unordered
            return own if {id(child) for child in children} == {id(child) for child in old} else None
        if any(self._went_in(child) and not self._stays(child) for child in children):
            return None
        same = keys is None or all(map(_is_key, keys, old_keys or ()))
        return own if same and all(a is b for a, b in zip(old, children, strict=True)) else None

    # ---- back -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Invocation:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, finalizing: Any = sys.is_finalizing) -> None:
        if isinstance(error, GeneratorExit) and finalizing():
            return  # a generator that outlived the program: what is needed to write back is gone
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
