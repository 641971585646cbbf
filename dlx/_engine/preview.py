"""Build the plans of `dlx.plan` without consuming a capsule or calling a consumer."""

from __future__ import annotations

import operator
from typing import Any

from dlx._core.native import Tensor
from dlx._engine.batch import Batch, Transfer
from dlx._engine.compound import Compounds, fold
from dlx._engine.failures import Failures, concerns_object, forget_frames, group_errors
from dlx._engine.fast_path import export_and_describe
from dlx._engine.plan import Plan
from dlx._engine.planner import UNDECIDED, Decision, decide, decide_before_export, share_unchanged
from dlx._engine.request import Request
from dlx._engine.streams import StreamSync
from dlx._engine.tree import Tree
from dlx._support.reflect import type_name
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import DlxError, path_text
from dlx.typing import Outcome


def plan_known(request: Request, obj: Any) -> Plan | None:
    """Return the plan of a host array that the fast path describes; None for other arrays and refusals."""
    known = export_and_describe(obj)
    if known is None or not known[2].is_host:
        return None
    source, info, tensor = known
    target, decision = request.target, UNDECIDED
    try:
        if source is target.source or request.casts is not None:
            decision = decide_before_export(obj, source, (), lambda: info, request)
        if decision.steps and decision.outcome == "unknown":
            return None  # its framework casts it
        if decision.outcome == "unknown":
            unchanged = share_unchanged(tensor, decision, source, request, in_full=True)
            decision = decide(tensor, decision, source, request, _no_sync) if unchanged is None else unchanged
    except MemoryError:
        raise
    except Exception:  # the full plan reports it
        return None
    steps, outcome, device, _ = decision
    nbytes = 0
    for step in steps:
        nbytes += step.nbytes
    place = info.device if device is None else device
    fields = ("", info, target.name, place, outcome, steps, nbytes, None, (), ())
    return tuple.__new__(Plan, fields)  # a call of the class takes twice as long


def _no_sync() -> StreamSync:
    raise AssertionError("host memory has no stream")


def plan_one(request: Request, obj: Any, source: Adapter, *, probe: bool) -> tuple[Plan, int]:
    """Return the plan of one array, and the stage of a refusal: 0 describing, 1 deciding, 2 calling the producer."""
    batch, transfer = Batch(request, [obj], [source]), Transfer(obj, source, request)
    stage = 0
    try:
        batch.describe(transfer)
        decision = transfer.resolution
        if decision.outcome == "unknown":
            stage = 1
            tensor = transfer.plan_export()
            stage = 2 if tensor is None else 1
            decision = _decide(batch, transfer, tensor, probe)
        info = None if decision.outcome == "unknown" and transfer.description is None else transfer.info()
    except DlxError as error:
        transfer.complete(error)
        forget_frames(error)
        return Plan("", transfer.known_info, request.target.name, None, "refused", error=error), stage
    nbytes = sum(step.nbytes for step in decision.steps) if decision.steps else 0
    device = decision.device
    if device is None and info is not None and decision.outcome != "unknown":
        device = info.device
    return Plan("", info, request.target.name, device, decision.outcome, decision.steps, nbytes), stage


def _decide(batch: Batch, transfer: Transfer, tensor: Tensor | None, probe: bool) -> Decision:
    before = transfer.resolution
    if tensor is None and probe and not before.copies:
        batch.export(transfer)
        tensor = transfer.tensor
    if tensor is None:
        return before
    if transfer.tensor is None and (transfer.description is None or transfer.info().shape is None):
        transfer.tensor = tensor  # describe the array by its export
    return batch.decide(transfer, tensor)


def plan_tree(root: Any, handler: Container, request: Request, *, strict: bool, errors: str, probe: bool) -> Plan:
    """Return the plan of `batch.convert_tree`, with the error that it would raise."""
    target = request.target.name
    failures = Failures(target, collect=True, passes=errors == "pass", can_pass=True)
    tree = Tree(root, handler, failures, strict=strict, compounds=Compounds(request.for_root()))
    tree.check_found()
    for each in failures.errors:
        forget_frames(each)
    if tree.is_one_array():
        request = request.for_root()
    without_casts = request._replace(casts=None)
    leaves: list[Plan] = []
    late: list[tuple[int, int, DlxError]] = []
    for i, (obj, source) in enumerate(zip(tree.arrays, tree.sources, strict=True)):
        options = without_casts if request.casts is not None and tree.is_index(i) else request
        known = plan_known(options, obj)
        plan, stage = (known, 0) if known is not None else plan_one(options, obj, source, probe=probe)
        refused = plan.error
        if isinstance(refused, DlxError):
            refused.complete(path=tree.path(i))
            if failures.passes and tree.place(i) and concerns_object(refused):
                plan = plan._replace(outcome="passed")
            else:
                late.append((stage, i, refused))
        if tree.is_one_array():
            return plan
        leaves.append(plan._replace(path=tree.path_text(i)))
    late.sort(key=operator.itemgetter(0))  # in the order of the stages
    for stage, i, refused in late:
        failures.can_pass = stage == 0  # as `convert`
        failures.add(refused, tree.path(i), tree.whole(i), tree.place(i))
    found = failures.errors
    ordered = [(i, leaf) for i, leaf in enumerate(leaves) if tree.whole(i) < 0]
    for whole in tree.compounds():
        plan = fold(whole, [leaves[i] for i in whole.numbers], target)
        if not whole.path and not (errors == "collect" and plan.error):  # the root is a compound array
            return plan._replace(path="")
        ordered.append((min(whole.numbers, default=len(leaves)), plan))
    leaves = [leaf for _, leaf in sorted(ordered, key=operator.itemgetter(0))]
    for path, reason in failures.passed:
        leaves.append(Plan(path_text(path), None, target, None, "passed", error=reason))
    error = (group_errors(found) if errors == "collect" else found[0]) if found else None
    outcome: Outcome = "tree" if error is None else "refused"
    nbytes = sum(leaf.nbytes for leaf in leaves)
    passed = tuple((path, type_name(type(obj))) for path, obj in tree.iter_passed())
    return Plan("", None, target, None, outcome, nbytes=nbytes, error=error, leaves=tuple(leaves), passed=passed)
