"""Convert many arrays in stages: examine all, export all, check, order streams, load.

What can be refused without calling a producer is refused before any is called. After a failure results
are released, and consumed capsules get their names back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dlx._containers.failures import Failures, together
from dlx._containers.lookup import container_of
from dlx._containers.tree import Tree
from dlx._core.cuda import is_cuda, readiness_of
from dlx._core.native import FastPathFunction
from dlx._core.tensor import Tensor
from dlx._engine.executor import forget_frames, load, order, plan_leaf, prepare, preview, release, take_back
from dlx._engine.plan import Plan
from dlx._engine.planner import begin
from dlx._engine.request import Request
from dlx._engine.streams import Readiness
from dlx._engine.transfer import Leaf
from dlx._registry.generic import Described
from dlx.adapter.base import Adapter, look_up
from dlx.adapter.declarations import Container
from dlx.errors import DlxError
from dlx.typing import Outcome

__all__ = ["Batch", "convert_tree", "place_of", "plan_tree"]


class Batch:
    """The conversion of several arrays to one target.

    Parameters
    ----------
    request
        The options of the call.
    objs, sources
        The arrays, each once, and their adapters.
    place
        ``place(i)`` is the path of the array number i, for errors.
    failures
        What to do about errors.
    fast_path, to
        The fast path, and the target as the caller named it; None where the fast path must not be used.
    """

    def __init__(
        self,
        request: Request,
        objs: list[Any],
        sources: list[Adapter],
        place: Callable[[int], str],
        failures: Failures,
        fast_path: FastPathFunction | None = None,
        to: Any = None,
    ) -> None:
        # Streams are ordered once a call, and a lazy view makes many calls with one request.
        self.request, self.objs, self.sources = replace(request), objs, sources
        self.place, self.failures = place, failures
        self.fast_path, self.to = fast_path, to
        self.results: list[Any] = [None] * len(objs)
        self._borrowed: list[tuple[int, Any]] = []  # what the fast path has examined, exported and checked
        self._leaves: dict[int, Leaf] = {}

    def run(self) -> list[Any]:
        """Convert all arrays, or none; return the results in order.

        Raises
        ------
        DlxError
            The first failure, with its path.
        ExceptionGroup
            All failures, where they are collected.
        """
        try:
            self._make_ready(brief=False)
            self._load()
            self.failures.check()
            return self.results
        except BaseException as error:
            self.undo(error)
            raise

    def copied(self, i: int) -> bool:
        """Return whether the array number `i` was copied."""
        leaf = self._leaves.get(i)
        return leaf is not None and leaf.plan is not None and leaf.plan.outcome == "copied"

    def on_host(self, i: int) -> bool:
        """Return whether the array number `i` took the fast path, which handles host memory only."""
        return i not in self._leaves

    def tensors(self) -> list[Tensor]:
        """Return all arrays as tensors to be read at once: nothing is passed to a consumer, no capsule is consumed.

        Raises
        ------
        DlxError, ExceptionGroup
            As `run`.
        """
        self._make_ready(brief=True)
        for i, borrowed in self._borrowed:
            self.results[i] = borrowed
        for i, leaf in self._leaves.items():
            self.results[i] = load(leaf) if leaf.tensor is None else leaf.tensor
        return self.results

    def readiness(self, i: int) -> Readiness:
        """Return when the array number `i`, one of `tensors`, may be read."""
        leaf, tensor = self._leaves.get(i), self.results[i]
        if leaf is not None and leaf.readiness is not None:
            return leaf.readiness
        return readiness_of(tensor) if is_cuda(tensor.device) else None

    def _make_ready(self, *, brief: bool) -> None:
        """Run all stages before `load`: what can fail afterwards is a consumer."""
        self._examine(brief)
        self._each(prepare)
        self.failures.check()
        self._each(order)
        self.failures.check()

    def undo(self, error: BaseException) -> None:
        """Release all results, and restore what was consumed; frames of the error's traceback may hold some of it."""
        self.results.clear()
        self._borrowed.clear()
        taken = [leaf for leaf in self._leaves.values() if leaf.owned is not None]
        if taken:
            forget_frames(error)
        failed: BaseException | None = None
        for leaf in taken:
            try:
                for note in take_back(leaf):
                    error.add_note(note)
            except BaseException as failure:  # raised after the others are restored
                failed = failed or failure
        for leaf in self._leaves.values():
            release(leaf)
        if failed is not None:
            raise failed

    def _each(self, step: Callable[[Leaf], Any]) -> None:
        """Run one stage for every array; an array that fails is dropped from later stages."""
        for i, leaf in list(self._leaves.items()):
            try:
                step(leaf)
            except DlxError as error:
                del self._leaves[i]
                self.failures.add(error, self.place(i))

    def _examine(self, brief: bool) -> None:
        """Examine each array before any producer is called; arrays of the fast path are exported at once."""
        for i, obj in enumerate(self.objs):
            borrowed = self.fast_path._borrow(obj, self.to, brief) if self.fast_path is not None else None
            if borrowed is None:
                self._leaves[i] = begin(obj, self.sources[i], self.request)
            elif borrowed is obj:
                self.results[i] = obj
            else:
                self._borrowed.append((i, borrowed))
        self._each(_refused)
        if self.failures.collect or any(_is_generic(leaf) for leaf in self._leaves.values()):
            self._each(_described)

    def _load(self) -> None:
        for i, borrowed in self._borrowed:
            assert self.fast_path is not None
            try:
                result = self.fast_path._load(borrowed, self.objs[i], self.to)
                self.results[i] = self.request.target.load(borrowed) if result is NotImplemented else result
            except DlxError as error:
                self.failures.add(error, self.place(i))
        self._borrowed.clear()
        for i, leaf in self._leaves.items():
            try:
                self.results[i] = load(leaf)
            except DlxError as error:
                self.failures.add(error, self.place(i))


def _refused(leaf: Leaf) -> None:
    if leaf.plan is not None and leaf.plan.error is not None:
        prepare(leaf)  # raises it


def _described(leaf: Leaf) -> None:
    if isinstance(leaf.source, Described):  # it is described by exporting it
        prepare(leaf)
        return
    error = preview(leaf) if leaf.plan is None else None
    if error is not None:
        try:
            raise error
        finally:
            del error  # as in Failures.add


def _is_generic(leaf: Leaf) -> bool:
    """Return whether calling the producer may have visible effects, so that it is called late, and once."""
    kind, source = type(leaf.obj), leaf.source
    return not isinstance(source, Described) and not any(look_up(name) is kind for name in source.fast_path_types)


def plan_all(
    request: Request,
    objs: list[Any],
    sources: list[Adapter],
    place: Callable[[int], str],
    *,
    probe: bool,
) -> tuple[list[Plan], list[DlxError]]:
    """Return the plan of each array, with its path, and the errors in the order of the stages; nothing is converted."""
    plans, errors = [], []
    for i, (obj, source) in enumerate(zip(objs, sources, strict=True)):
        leaf = begin(obj, source, request)
        early = leaf.plan is not None  # refused before anything is exported
        late = _is_generic(leaf)
        plan_leaf(leaf, probe=probe)
        assert leaf.plan is not None
        error = leaf.plan.error
        if isinstance(error, DlxError):
            error.complete(where=place(i))
            errors.append((0 if early else 2 if late else 1, error))
        plans.append(replace(leaf.plan, path=place(i)))
    errors.sort(key=lambda each: each[0])
    return plans, [error for _, error in errors]


# ---- conversion and planning of trees --------------------------------------------------------------------------------


def convert_tree(
    root: Any,
    handler: Container,
    request: Request,
    *,
    strict: bool,
    collect: bool,
    fast_path: FastPathFunction | None,
    to: Any,
) -> Any:
    """Convert every array in a container, and return the same containers around the results.

    Raises
    ------
    DlxError
        The first failure, with its path; no capsule was consumed.
    ExceptionGroup
        All of them, if `collect`.
    """
    failures = Failures(request.target.name, collect=collect)
    tree = Tree(root, handler, failures, strict=strict)
    batch = Batch(request, tree.arrays, tree.sources, tree.place, failures, fast_path, to)
    new: Any = None
    try:
        new = tree.rebuild(batch.run(), request.target.name)
        failures.check()
        return new
    except BaseException as error:
        new = None
        tree.forget()
        batch.undo(error)
        raise


def plan_tree(root: Any, handler: Container, request: Request, *, strict: bool, collect: bool, probe: bool) -> Plan:
    """Return what `convert_tree` will do with every array; the error that it would raise is in the plan."""
    target = request.target.name
    failures = Failures(target, collect=True)
    tree = Tree(root, handler, failures, strict=strict)
    for refused in failures.errors:
        forget_frames(refused)
    leaves, late = plan_all(request, tree.arrays, tree.sources, tree.place, probe=probe)
    errors = failures.errors + late
    error = (together(errors) if collect else errors[0]) if errors else None
    outcome: Outcome = "tree" if error is None else "refused"
    nbytes = sum(leaf.nbytes for leaf in leaves)
    return Plan("", None, target, None, outcome, nbytes=nbytes, error=error, leaves=tuple(leaves))


def place_of(array: Any, root: Any) -> str:
    """Return the path of an array in a container; empty where it is no longer there."""
    handler = container_of(type(root))
    tree = None if handler is None else Tree(root, handler, Failures("", collect=True))
    for i, other in enumerate(tree.arrays if tree is not None else ()):
        if tree is not None and other is array:
            return tree.place(i)
    return ""
