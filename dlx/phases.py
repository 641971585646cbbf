"""Many arrays at once, in the phases of one: examine all, export, check, order streams, hand over.

Whatever is refused is refused before anything is handed over, and what can be told without calling a producer is told
before any is called. A failure undoes everything: results are let go of, capsules have their names back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dlx.adapter import Adapter, look_up
from dlx.containers import container_of
from dlx.crossing import Moment
from dlx.cuda import is_cuda, readiness
from dlx.errors import DlxError
from dlx.facts import Container
from dlx.failures import Failures, together
from dlx.leaf import Leaf, Plan, Request
from dlx.native import Lane, Tensor
from dlx.planning import begin
from dlx.strangers import Described
from dlx.transfer import forget_frames, load, order, plan_leaf, prepare, preview, release, take_back
from dlx.trees import Tree
from dlx.typing import Outcome

__all__ = ["Bulk", "convert_tree", "place_of", "plan_tree"]


class Bulk:
    """Arrays on their way to one target.

    Parameters
    ----------
    request
        The options of the call.
    objs, sources
        The arrays, each once, and their adapters.
    place
        Says where the array number i stands, for errors.
    failures
        What to do about errors.
    lane, to
        The fast lane, and the target as the caller named it; None where the lane must not be used.
    """

    def __init__(
        self,
        request: Request,
        objs: list[Any],
        sources: list[Adapter],
        place: Callable[[int], str],
        failures: Failures,
        lane: Lane | None = None,
        to: Any = None,
    ) -> None:
        # Streams are ordered once a call, and a lazy view makes many calls with one request.
        self.request, self.objs, self.sources = replace(request), objs, sources
        self.place, self.failures = place, failures
        self.lane, self.to = lane, to
        self.results: list[Any] = [None] * len(objs)
        self._lent: list[tuple[int, Any]] = []  # what the lane has examined, exported and checked
        self._leaves: dict[int, Leaf] = {}

    def run(self) -> list[Any]:
        """Convert all arrays, or none; return the results in order.

        Raises
        ------
        DlxError
            The first failure, with its place.
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
        """Return whether the array number `i` was copied on its way."""
        leaf = self._leaves.get(i)
        return leaf is not None and leaf.plan is not None and leaf.plan.outcome == "copied"

    def on_host(self, i: int) -> bool:
        """Return whether the array number `i` went by the lane, which takes memory of the host only."""
        return i not in self._leaves

    def tensors(self) -> list[Tensor]:
        """Return all arrays as tensors that are only to be read now: nothing is handed over or used up.

        Raises
        ------
        DlxError, ExceptionGroup
            As `run`.
        """
        self._make_ready(brief=True)
        for i, lent in self._lent:
            self.results[i] = lent
        for i, leaf in self._leaves.items():
            self.results[i] = load(leaf) if leaf.tensor is None else leaf.tensor
        return self.results

    def moment(self, i: int) -> Moment:
        """Return when the array number `i`, one of `tensors`, may be read."""
        leaf, tensor = self._leaves.get(i), self.results[i]
        if leaf is not None and leaf.moment is not None:
            return leaf.moment
        return readiness(tensor) if is_cuda(tensor.device) else None

    def _make_ready(self, *, brief: bool) -> None:
        """Go through the phases up to where nothing but a consumer can fail."""
        self._examine(brief)
        self._each(prepare)
        self.failures.check()
        self._each(order)
        self.failures.check()

    def undo(self, error: BaseException) -> None:
        """Let go of all results, and give back what was taken; frames of the error may hold some of it."""
        self.results.clear()
        self._lent.clear()
        taken = [leaf for leaf in self._leaves.values() if leaf.owned is not None]
        if taken:
            forget_frames(error)
        failed: BaseException | None = None
        for leaf in taken:
            try:
                for note in take_back(leaf):
                    error.add_note(note)
            except BaseException as failure:  # it is raised when the others are given back
                failed = failed or failure
        for leaf in self._leaves.values():
            release(leaf)
        if failed is not None:
            raise failed

    def _each(self, step: Callable[[Leaf], Any]) -> None:
        """Do one step with every array; one that fails is left out from then on."""
        for i, leaf in list(self._leaves.items()):
            try:
                step(leaf)
            except DlxError as error:
                del self._leaves[i]
                self.failures.add(error, self.place(i))

    def _examine(self, brief: bool) -> None:
        """Ask what is known of each array before any producer is called; those of the lane are exported at once."""
        for i, obj in enumerate(self.objs):
            lent = self.lane._lend(obj, self.to, brief) if self.lane is not None else None
            if lent is None:
                self._leaves[i] = begin(obj, self.sources[i], self.request)
            elif lent is obj:
                self.results[i] = obj
            else:
                self._lent.append((i, lent))
        self._each(_refused)
        if self.failures.collect or any(_is_stranger(leaf) for leaf in self._leaves.values()):
            self._each(_described)

    def _load(self) -> None:
        for i, lent in self._lent:
            assert self.lane is not None
            try:
                result = self.lane._load(lent, self.objs[i], self.to)
                self.results[i] = self.request.target.load(lent) if result is NotImplemented else result
            except DlxError as error:
                self.failures.add(error, self.place(i))
        self._lent.clear()
        for i, leaf in self._leaves.items():
            try:
                self.results[i] = load(leaf)
            except DlxError as error:
                self.failures.add(error, self.place(i))


def _refused(leaf: Leaf) -> None:
    if leaf.plan is not None and leaf.plan.error is not None:
        prepare(leaf)  # raises it


def _described(leaf: Leaf) -> None:
    if isinstance(leaf.source, Described):  # its description is its export
        prepare(leaf)
        return
    error = preview(leaf) if leaf.plan is None else None
    if error is not None:
        try:
            raise error
        finally:
            del error  # as in Failures.add


def _is_stranger(leaf: Leaf) -> bool:
    """Return whether calling the producer could have an effect that somebody sees, so that it is called late, once."""
    kind, source = type(leaf.obj), leaf.source
    return not isinstance(source, Described) and not any(look_up(name) is kind for name in source.lane)


def plan_all(
    request: Request,
    objs: list[Any],
    sources: list[Adapter],
    place: Callable[[int], str],
    *,
    probe: bool,
) -> tuple[list[Plan], list[DlxError]]:
    """Return the plan of each array, with its place, and errors in the order of the phases; nothing is converted."""
    plans, errors = [], []
    for i, (obj, source) in enumerate(zip(objs, sources, strict=True)):
        leaf = begin(obj, source, request)
        early = leaf.plan is not None  # refused before anything is exported
        late = _is_stranger(leaf)
        plan_leaf(leaf, probe=probe)
        assert leaf.plan is not None
        error = leaf.plan.error
        if isinstance(error, DlxError):
            error.complete(where=place(i))
            errors.append((0 if early else 2 if late else 1, error))
        plans.append(replace(leaf.plan, path=place(i)))
    errors.sort(key=lambda each: each[0])
    return plans, [error for _, error in errors]


# ---- the verbs, over trees -------------------------------------------------------------------------------------------


def convert_tree(
    root: Any, row: Container, request: Request, *, strict: bool, collect: bool, lane: Lane | None, to: Any
) -> Any:
    """Convert every array in a container, and return the same containers around the results.

    Raises
    ------
    DlxError
        The first failure, with its place; nothing was used up.
    ExceptionGroup
        All of them, if `collect`.
    """
    failures = Failures(request.target.name, collect=collect)
    tree = Tree(root, row, failures, strict=strict)
    bulk = Bulk(request, tree.arrays, tree.sources, tree.place, failures, lane, to)
    new: Any = None
    try:
        new = tree.rebuild(bulk.run(), request.target.name)
        failures.check()
        return new
    except BaseException as error:
        new = None
        tree.forget()
        bulk.undo(error)
        raise


def plan_tree(root: Any, row: Container, request: Request, *, strict: bool, collect: bool, probe: bool) -> Plan:
    """Say what `convert_tree` will do with every array; its own error, if it has one, is in the plan."""
    target = request.target.name
    failures = Failures(target, collect=True)
    tree = Tree(root, row, failures, strict=strict)
    for refused in failures.errors:
        forget_frames(refused)
    leaves, late = plan_all(request, tree.arrays, tree.sources, tree.place, probe=probe)
    errors = failures.errors + late
    error = (together(errors) if collect else errors[0]) if errors else None
    outcome: Outcome = "tree" if error is None else "refused"
    nbytes = sum(leaf.nbytes for leaf in leaves)
    return Plan("", None, target, None, outcome, nbytes=nbytes, error=error, leaves=tuple(leaves))


def place_of(array: Any, root: Any) -> str:
    """Return where an array stands in a container; empty where it is not there any more."""
    row = container_of(type(root))
    tree = None if row is None else Tree(root, row, Failures("", collect=True))
    for i, other in enumerate(tree.arrays if tree is not None else ()):
        if tree is not None and other is array:
            return tree.place(i)
    return ""
