"""Doing for ONE array what `planning` decided: lift, export, view, copy, hand over; and what happens on failure."""

from __future__ import annotations

from typing import Any

from dlx import native
from dlx.abi import READ_ONLY
from dlx.errors import ConversionError, DlxError
from dlx.native import Tensor
from dlx.planning import Leaf, refuse, settle

__all__ = ["convert_leaf", "export", "plan_leaf"]


def convert_leaf(leaf: Leaf) -> Any:
    """Convert one array that `planning.begin` has started on, or raise what stands in the way."""
    if leaf.plan is not None:  # inside one framework, or refused
        if leaf.plan.error is not None:
            raise leaf.plan.error
        return _lifted(leaf)
    try:
        tensor = export(leaf)
    except DlxError as error:
        leaf.complete(error)
        raise
    settle(leaf, tensor)
    assert leaf.plan is not None
    if leaf.plan.error is not None:
        raise leaf.plan.error
    return _hand_over(leaf, tensor)


def plan_leaf(leaf: Leaf, *, probe: bool) -> None:
    """Settle one array without converting it. A producer is asked only where nothing else can tell, and if `probe`."""
    if leaf.plan is not None:
        return
    tensor: Tensor | None
    try:
        if leaf.fresh:  # the cure copies: do not run it, its result is compact
            tensor = _sketch_of_copy(leaf)
        else:
            tensor = leaf.source.sketch(_lifted(leaf))
            if tensor is None and not probe:
                leaf.finish("unknown", None)
                return
            tensor = _marked(leaf, tensor) if tensor is not None else export(leaf)
    except DlxError as error:
        refuse(leaf, error)
    except MemoryError:
        raise
    except Exception as error:
        failure = _adapter_failed(leaf, error)
        failure.__cause__ = error
        refuse(leaf, failure)
    else:
        settle(leaf, tensor)


def export(leaf: Leaf) -> Tensor:
    """Lift what hinders one array and export it: the producer is called once."""
    obj = _lifted(leaf)
    try:
        tensor = leaf.source.export(obj)
    except (DlxError, MemoryError):
        raise
    except Exception as error:
        raise _adapter_failed(leaf, error) from error
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
    except (DlxError, MemoryError) as error:
        if isinstance(error, DlxError):
            leaf.complete(error)
        raise
    except Exception as error:
        raise leaf.complete(_adapter_failed(leaf, error)) from error
    return obj


def _adapter_failed(leaf: Leaf, error: Exception) -> ConversionError:
    return ConversionError(f"{leaf.source.name} failed: {type(error).__name__}: {error}".rstrip("."))


def _sketch_of_copy(leaf: Leaf) -> Tensor:
    info = leaf.info
    if info is None or info.shape is None or info.dtype is None or info.device is None:
        raise ConversionError("only a conversion could tell: its description is incomplete")
    address = native.lib.DLX_ALIGNMENT  # any aligned address will do: nobody reads it
    return native.tensor_new(address, info.shape, None, info.dtype, info.device, 0, None)


def _hand_over(leaf: Leaf, tensor: Tensor) -> Any:
    """Pass the point of no return, and take it back if the consumer fails."""
    target = leaf.request.target
    owned = tensor
    try:
        owned = leaf.source.take(leaf.obj, tensor)
        ready = owned
        if leaf.view_device is not None or leaf.view_flags is not None:
            ready = native.tensor_view(ready, None, leaf.view_device, leaf.view_flags, None)
        if leaf.copy_order is not None:
            ready = native.tensor_copy(ready, leaf.copy_order)
        return target.load(ready)
    except Exception as error:
        ready = None  # let go of whatever shares the memory, so that it can go back
        failure = error.with_traceback(None)
        if owned is not tensor:
            leaf.source.give_back(leaf.obj, owned)
        if isinstance(failure, DlxError):
            raise leaf.complete(failure) from None
        if isinstance(failure, MemoryError):
            raise
        reason = f"{target.name} refused it: {type(failure).__name__}: {failure}".rstrip(".")
        raise leaf.complete(ConversionError(reason)) from failure
