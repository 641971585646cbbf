"""`Inputs`: converts the arguments of a call, and values that are sent to a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlx._api.describe import describe
from dlx._engine.batch import Batch, not_writable
from dlx._engine.compound import Compounds
from dlx._engine.failures import Failures
from dlx._engine.planner import is_inside
from dlx._engine.request import Request
from dlx._protocols.arrow import Column
from dlx._registry.lookup import TUPLE, look
from dlx._support.reflect import type_name
from dlx._using.function_spec import FunctionSpec, Place, is_tracked
from dlx._using.identity import CallTree, Identity
from dlx._using.stream_context import Work
from dlx._using.write_back import Writes
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import ConversionError, DlxError

Locate = Callable[[tuple[Any, ...]], Place]


class Inputs:
    """Converts the inputs of one call, and records them in an `Identity`."""

    def __init__(self, spec: FunctionSpec, request: Request, identity: Identity) -> None:
        self._spec, self._request, self._identity = spec, request, identity
        self._compounds = Compounds(request)
        self.work, self.writes = Work(request.target, request.stream), Writes(request.target)
        self.seen: list[tuple[Adapter, Any, bool]] = []  # (adapter, array, whether it is known to be on the host)
        self._declared: set[int] = set()  # addresses of arrays that the function is declared to write to
        self._last: tuple[CallTree, Batch] | None = None  # of the arguments, for `undo`

    def convert_arguments(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Convert the arguments for the function."""
        values, locate = (args, options), self._spec.locate
        failures = Failures(self._request.target.name, passes=self._spec.passes, locate=locate)
        tree = CallTree(values, TUPLE, failures, self._request.target.adapter.package, compounds=self._compounds)
        self._declared, buffers = self._spec.find_written(tree)
        for at, buffer in buffers:
            if describe(buffer).readonly:
                failures.add(self._not_writable(buffer), at)
        batch = self._batch(tree, locate)
        self._last = tree, batch
        return self._convert_tree(tree, batch, locate, (values, *values))

    def convert_sent(self, value: Any) -> Any:
        """Convert a value that the caller sends to a generator."""
        what = look(value).part
        if what is None:
            return value
        root, handler = (value, what) if isinstance(what, Container) else ((value,), TUPLE)
        locate = lambda path: ("", path if root is value else path[1:])  # noqa: E731
        failures = Failures(self._request.target.name, passes=self._spec.passes, locate=locate)
        tree = CallTree(root, handler, failures, self._request.target.adapter.package, compounds=self._compounds)
        made = self._convert_tree(tree, self._batch(tree, locate), locate, () if root is value else (root,))
        return made if root is value else made[0]

    def undo(self, error: BaseException) -> None:
        """Release the converted arguments of a call that fails."""
        last, self._last = self._last, None
        if last is not None:
            last[0].forget()
            last[1].undo(error)

    def keep(self) -> None:
        """Make `undo` do nothing from now on."""
        self._last = None

    def _is_kept(self, array: Any, source: Adapter) -> bool:
        """Return whether an array is passed unchanged, with its graph; `detach` applies to the others."""
        return self._request.device is None and is_inside(array, source, self._request.target)

    def _batch(self, tree: CallTree, locate: Locate) -> Batch:
        """Return the batch that converts the arrays of a tree; arrays that must not be passed become failures."""
        request, failures = self._request, tree.failures
        pairs = list(zip(tree.arrays, tree.sources, strict=True))
        some = [i for i, pair in enumerate(pairs) if not self._is_kept(*pair)]
        if self._spec.detach is None:
            self._look_for_graphs(tree, some, locate)
        for i, (array, _) in enumerate(pairs):
            if id(array) in self._declared and i not in some and describe(array).readonly:
                failures.add(self._not_writable(array), tree.path(i))
        to = self._spec.to if request.device is None and request.stream is None else None
        arrays, sources = [tree.arrays[i] for i in some], [tree.sources[i] for i in some]
        batch = Batch(request, arrays, sources, lambda n: tree.path(some[n]), failures, to)
        batch.written = frozenset(n for n, array in enumerate(arrays) if id(array) in self._declared)
        return batch

    def _look_for_graphs(self, tree: CallTree, some: list[int], locate: Locate) -> None:
        """Add a failure for each array that would lose its graph; record the place of one that keeps it."""
        for i, (array, source) in enumerate(zip(tree.arrays, tree.sources, strict=True)):
            if not is_tracked(source, array):
                continue
            if i in some:
                tree.failures.add(_gradient_error(source, array, self._request.target.adapter), tree.path(i))
            if is_inside(array, source, self._request.target):
                self._identity.recorded = self._identity.recorded or locate(tree.path(i))

    def _convert_tree(self, tree: CallTree, batch: Batch, locate: Locate, skipped: tuple[Any, ...]) -> Any:
        """Convert a tree, and record the passed objects; `skipped` are containers that are not the caller's."""
        self.work.look(zip(tree.sources, tree.arrays, strict=True))
        with self.work.set_for_conversion():
            converted = iter(enumerate(batch.run()))
        results: list[Any] = []
        passed: set[int] = set()
        copied: set[int] = set()  # numbers of compound arrays whose elements were copied
        columns: dict[int, Any] = {}  # address of a table's column -> the passed array
        for i, (old, source) in enumerate(zip(tree.arrays, tree.sources, strict=True)):
            new, on_host, declared = old, False, id(old) in self._declared
            if not self._is_kept(old, source):
                n, new = next(converted)
                on_host = batch.took_fast_path(n)
                if batch.is_copied(n):  # writes to a copy must be written back
                    new = self.writes.add_copy(old, new, locate(tree.path(i)), declared=declared)
                    copied |= set() if declared or tree.is_index(i) else {tree.whole(i)}
            results.append(new)
            if new is old and self._spec.passes and not self._is_kept(old, source):
                passed.add(i)
                continue
            whole = tree.compound_of(i)
            if whole is None:
                self._identity.add(new, old)
            if not tree.is_index(i):  # indices may be a copy of dlx
                self.seen.append(((whole and whole.adapter) or source, old, on_host))
            if type(old) is Column:
                columns[id(old)] = new
            if declared:
                self.writes.add_declared(source, old)
        if self.writes:
            for i, (old, new) in enumerate(zip(tree.arrays, results, strict=True)):
                if i not in passed:
                    self.writes.add_shared(old, new, locate(tree.path(i)), declared=id(old) in self._declared)
        before = tree.containers()
        made = tree.rebuild(results, self._request.target.name)
        for i, ((own, keys, parts, _), (*_, new)) in enumerate(zip(before, tree.containers(), strict=True)):
            if i in copied and "data" in (keys or ()):  # torch counts writes to these as writes to the sparse tensor
                self.writes.add_copy(own, new, locate(tree.path_in(i)), declared=False)
            if all(own is not each for each in skipped):
                self._identity.add_container(new, own, keys, [columns.get(id(part), part) for part in parts])
        return made

    def _not_writable(self, array: Any) -> DlxError:
        return not_writable().complete(source=type_name(type(array)), target=self._request.target.name)


def _gradient_error(source: Adapter, array: Any, target: Adapter) -> ConversionError:
    """Return the error for a recorded array if neither `grad` nor `detach` is passed to `using`."""
    outer, inner = source.gradients, target.gradients
    both = outer is not None and outer.record is not None and inner is not None and inner.vjp is not None
    fix = "Use dlx.using(..., detach=True) to drop them"
    return ConversionError(
        f"{source.name} records it for differentiation, and its gradients would be lost",
        source=type_name(type(array)),
        fix=f"{fix}, or dlx.using(..., grad=True) to keep them." if both else f"{fix}.",
    )
