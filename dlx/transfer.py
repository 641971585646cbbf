"""Doing for ONE array what `planning` decided: lift, export, view, copy, hand over; and what happens on failure."""

from __future__ import annotations

from typing import Any

from dlx import cuda, native
from dlx.abi import READ_ONLY
from dlx.crossing import physical
from dlx.errors import ConversionError, DlxError
from dlx.native import Tensor
from dlx.planning import Leaf, adapter_failed, refuse, settle

__all__ = ["convert_leaf", "export", "forget_frames", "plan_leaf"]


def convert_leaf(leaf: Leaf) -> Any:
    """Convert one array that `planning.begin` has started on, or raise what stands in the way."""
    if leaf.plan is None:
        try:
            tensor = export(leaf)
        except DlxError as error:
            leaf.complete(error)
            raise
        settle(leaf, tensor)
        assert leaf.plan is not None
        if leaf.plan.error is None:
            return _hand_over(leaf, tensor)
    elif leaf.plan.error is None:  # it stays inside its framework
        return _lifted(leaf)
    raise _refusal(leaf)


def _refusal(leaf: Leaf) -> DlxError:
    """Take the error out of the plan: its traceback will hold the leaf, which must not hold it as well."""
    assert leaf.plan is not None
    assert leaf.plan.error is not None
    error, leaf.plan = leaf.plan.error, None
    return error


def plan_leaf(leaf: Leaf, *, probe: bool) -> None:
    """Settle one array without converting it. A producer is asked only where nothing else can tell, and if `probe`."""
    if leaf.plan is None:
        try:
            tensor = _facts(leaf, probe)
        except DlxError as error:
            refuse(leaf, error)
        except Exception as error:
            refuse(leaf, adapter_failed(leaf, error))
        else:
            if tensor is not None:
                settle(leaf, tensor)
            else:
                leaf.finish("unknown", None)
    assert leaf.plan is not None
    forget_frames(leaf.plan.error)


def _facts(leaf: Leaf, probe: bool) -> Tensor | None:
    if leaf.fresh:  # the cure copies: it is not run, its result is known to be compact
        return _sketch_of_copy(leaf)
    tensor = leaf.source.sketch(_lifted(leaf))
    if tensor is not None:
        return _marked(leaf, tensor)
    return export(leaf) if probe else None


def forget_frames(error: BaseException | None) -> None:
    """Let go of the frames in an error's tracebacks: a plan is kept, and must hold no memory."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            waiting += [error.__cause__, error.__context__]


def export(leaf: Leaf) -> Tensor:
    """Lift what hinders one array and export it: the producer is called once."""
    obj = _lifted(leaf)
    try:
        tensor, leaf.moment = leaf.request.crossing.export(leaf.source, obj, leaf.device)
    except DlxError:
        raise
    except Exception as error:
        raise adapter_failed(leaf, error) from error
    return _marked(leaf, tensor)


def _marked(leaf: Leaf, tensor: Tensor) -> Tensor:
    """Say read-only for a framework whose arrays must not change, whatever its capsule claims."""
    if leaf.source.immutable and not leaf.fresh and not tensor.readonly:
        return native.tensor_view(tensor, None, None, tensor.flags | READ_ONLY, None)
    return tensor


def _lifted(leaf: Leaf) -> Any:
    obj = leaf.obj
    try:
        for cure in leaf.cures:
            obj = cure(obj)
    except DlxError as error:
        leaf.complete(error)
        raise
    except Exception as error:
        raise leaf.complete(adapter_failed(leaf, error)) from error
    return obj


def _sketch_of_copy(leaf: Leaf) -> Tensor | None:
    info = leaf.info
    if info is None or info.shape is None or info.dtype is None or info.device is None:
        return None  # only a conversion could tell
    address = native.lib.DLX_ALIGNMENT  # any aligned address will do: nobody reads it
    return native.tensor_new(address, info.shape, None, info.dtype, info.device, 0, None)


def _hand_over(leaf: Leaf, tensor: Tensor) -> Any:
    """Pass the point of no return, and take it back if the consumer fails."""
    target = leaf.request.target
    owned: Tensor | None = None
    ready: Tensor | None = None
    try:
        ready = owned = leaf.source.take(leaf.obj, tensor, shared=leaf.copy_order is None and not leaf.fresh)
        crossing, moment = leaf.request.crossing, leaf.moment
        if leaf.copy_order is None:
            crossing.order(ready, moment, leaf.view_device)
        if leaf.view_device is not None or leaf.view_flags is not None:
            ready = native.tensor_view(ready, None, leaf.view_device, leaf.view_flags, None)
        if leaf.gather:
            ready, moment = crossing.copied(ready, moment, leaf.copy_order or False, physical(ready.device))
        if leaf.copy_order is not None:
            ready, moment = crossing.copied(ready, moment, leaf.copy_order, leaf.copy_device)
        device = ready.device
        if not cuda.is_cuda(device):
            return target.load(ready)
        ready = crossing.given(ready, moment)
        with target.on_device(device):
            return target.load(ready)
    except Exception as error:
        if owned is not None:
            # Whatever shares the memory must let go of it first: our view of it, frames of the consumer.
            ready = None
            if owned is not tensor:
                forget_frames(error)
            leaf.source.give_back(leaf.obj, owned)
        if isinstance(error, DlxError):
            leaf.complete(error)
            raise
        if isinstance(error, MemoryError):
            raise
        if owned is None:
            raise leaf.complete(adapter_failed(leaf, error)) from error
        reason = f"{target.name} refused it: {type(error).__name__}: {error}".rstrip(".")
        raise leaf.complete(ConversionError(reason)) from error
