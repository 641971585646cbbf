"""Run what the planner decided for one array: resolve, export, view, copy, load; and undo it after a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from dlx._core import cuda, native
from dlx._core.foreign import exception_text
from dlx._core.tensor import Tensor
from dlx._core.types import READ_ONLY, SUBBYTE_PADDED, host_readable
from dlx._engine.planner import is_settled, settle
from dlx._engine.streams import physical
from dlx._engine.transfer import Leaf, adapter_failed, refuse
from dlx.adapter.base import Adapter
from dlx.errors import ConversionError, DlxError

__all__ = [
    "convert_leaf",
    "export",
    "forget_frames",
    "load",
    "order",
    "plan_leaf",
    "prepare",
    "preview",
    "release",
    "take_back",
]


def convert_leaf(leaf: Leaf) -> Any:
    """Convert one array after `planner.begin`."""
    prepare(leaf)
    return load(leaf)


def prepare(leaf: Leaf) -> None:
    """Export and check one array. No capsule is consumed yet, and `release` undoes it.

    Raises
    ------
    DlxError
        If the producer fails, or the array cannot be converted.
    """
    if leaf.plan is None:
        try:
            leaf.tensor = export(leaf)
        except DlxError as error:
            leaf.complete(error)
            raise
        if is_settled(leaf, leaf.tensor):
            return
        settle(leaf, leaf.tensor)
    assert leaf.plan is not None
    if leaf.plan.error is not None:
        leaf.tensor = None
        raise _refusal(leaf)


def order(leaf: Leaf) -> None:
    """Make the reader of a prepared array wait for it, after all arrays of a call were exported.

    Raises
    ------
    DlxError
        If that would break a graph capture, or the driver fails.
    """
    if leaf.tensor is not None and _is_read_in_place(leaf):
        try:
            leaf.request.sync.order(leaf.tensor, leaf.readiness, leaf.view_device)
        except DlxError as error:
            leaf.complete(error)
            raise


def _is_read_in_place(leaf: Leaf) -> bool:
    """Return whether the consumer reads the producer's memory where it is, on its device or as host memory."""
    return leaf.copy_order is None or (leaf.view_device is not None and host_readable(leaf.view_device))


def preview(leaf: Leaf) -> DlxError | None:
    """Return the refusal that is known before the producer is called; None where there is none, or it is unknown."""
    if not leaf.resolutions:
        try:
            tensor = leaf.source.sketch(leaf.obj)
            if tensor is not None and is_settled(leaf, _marked(leaf, tensor)):
                return None
        except MemoryError:
            raise
        except Exception:
            pass  # it is raised again below, and reported there
    trial = replace(leaf, steps=list(leaf.steps))
    plan_leaf(trial, probe=False)
    return None if trial.plan is None else cast("DlxError | None", trial.plan.error)


def _refusal(leaf: Leaf) -> DlxError:
    """Move the error out of the plan: its traceback will hold the leaf, which must not hold the error."""
    assert leaf.plan is not None
    error, leaf.plan = leaf.plan.error, None
    assert isinstance(error, DlxError)
    return error


def plan_leaf(leaf: Leaf, *, probe: bool) -> None:
    """Settle one array without converting it. A producer is called only where it is the only source, and if `probe`."""
    if leaf.plan is None:
        try:
            tensor = _facts(leaf, probe)
        except DlxError as error:
            refuse(leaf, error)
        except Exception as error:
            refuse(leaf, adapter_failed(leaf.source, error))
        else:
            if tensor is not None:
                settle(leaf, tensor)
            else:
                leaf.finish("unknown", None)
    assert leaf.plan is not None
    forget_frames(leaf.plan.error)


def _facts(leaf: Leaf, probe: bool) -> Tensor | None:
    if leaf.fresh:  # the resolution copies: it is not run, its result is known to be compact
        return _abstract_copy(leaf)
    tensor = leaf.source.sketch(_resolved(leaf))
    if tensor is not None:
        return _marked(leaf, tensor)
    return export(leaf) if probe else None


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes: a plan is kept, and must hold no memory."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            waiting += [error.__cause__, error.__context__]


def export(leaf: Leaf) -> Tensor:
    """Resolve the blockers of one array and export it: the producer is called once."""
    obj = _resolved(leaf)
    try:
        tensor, leaf.readiness = leaf.request.sync.export(leaf.source, obj, leaf.device)
    except DlxError:
        raise
    except Exception as error:
        raise adapter_failed(leaf.source, error) from error
    return _marked(leaf, tensor)


def _marked(leaf: Leaf, tensor: Tensor) -> Tensor:
    """Mark arrays of an immutable framework as read-only, whatever the capsule says."""
    if leaf.source.immutable and not leaf.fresh and not tensor.readonly:
        return native.tensor_view(tensor, None, None, tensor.flags | READ_ONLY, None)
    return tensor


def _resolved(leaf: Leaf) -> Any:
    obj = leaf.obj
    try:
        for resolution in leaf.resolutions:
            obj = resolution(obj)
    except DlxError as error:
        leaf.complete(error)
        raise
    except Exception as error:
        raise leaf.complete(adapter_failed(leaf.source, error)) from error
    return obj


def _abstract_copy(leaf: Leaf) -> Tensor | None:
    info = leaf.info
    if info is None or info.shape is None or info.dtype is None or info.device is None:
        return None  # only a conversion could tell
    address = leaf.source.fresh_alignment  # it is never read
    stated = leaf.source.capabilities
    flags = SUBBYTE_PADDED if stated is not None and stated.subbyte == "padded" and info.dtype.bits < 8 else 0
    return native.tensor_new(address, info.shape, None, info.dtype, info.device, flags, None)


def load(leaf: Leaf) -> Any:
    """Consume one prepared array and load it into the target; restore the producer's if the consumer fails."""
    tensor, leaf.tensor = leaf.tensor, None
    if tensor is None:  # source and target are one framework
        return _resolved(leaf)
    target = leaf.request.target
    ready: Tensor | None = None
    array: Any = None
    taken = False
    try:
        shared = leaf.copy_order is None and not leaf.fresh
        leaf.owned = tensor  # an interrupt may come after `take` is done and before its result is stored here
        ready = leaf.owned = leaf.source.take(leaf.obj, tensor, shared=shared)
        taken = True
        sync, readiness = leaf.request.sync, leaf.readiness
        if leaf.view_device is not None and _is_read_in_place(leaf):
            sync.order(ready, readiness, leaf.view_device)  # else `given` does it
        if leaf.view_device is not None or leaf.view_flags is not None:
            ready = native.tensor_view(ready, None, leaf.view_device, leaf.view_flags, None)
        if leaf.gather:
            ready, readiness = sync.copied(
                leaf.source, ready, readiness, leaf.copy_order or False, physical(ready.device)
            )
        if leaf.copy_order is not None:
            here = leaf.repack and not cuda.is_cuda(ready.device)
            if here:
                ready = native.tensor_repack(ready)
            if not here or cuda.is_cuda(leaf.copy_device):
                source = None if leaf.gather else leaf.source
                ready, readiness = sync.copied(source, ready, readiness, leaf.copy_order, leaf.copy_device)
            if leaf.repack and not here:
                ready = native.tensor_repack(ready)
        if leaf.give_address:
            nowhere = native.lib.DLX_ALIGNMENT  # aligned, and never read
            ready = native.tensor_new(
                nowhere, ready.shape, ready.strides, ready.dtype, ready.device, ready.flags, ready
            )
        dtype = ready.dtype
        if leaf.storage_dtype is not None:
            ready = native.tensor_view(ready, leaf.storage_dtype, None, ready.flags & ~SUBBYTE_PADDED, None)
        device = ready.device
        if not cuda.is_cuda(device):
            array = target.load(ready)
        else:
            ready = sync.given(leaf.source, ready, readiness)
            with target.on_device(device):
                array = target.load(ready)
        return array if leaf.storage_dtype is None else target.viewed_as(array, dtype)
    except BaseException as error:
        # Everything that shares the memory is released first: our view of it, the result, frames of the consumer.
        ready = array = None
        notes: tuple[str, ...] = ()
        if not taken and isinstance(error, Exception):
            leaf.owned = None  # `take` itself failed: there is nothing to undo
        try:
            leaf.found()  # for the error: after `give_back` nothing can be read from it
        finally:
            if leaf.owned is not None and type(leaf.source).give_back is not Adapter.give_back:
                forget_frames(error)
            notes = take_back(leaf)
        if isinstance(error, DlxError):
            leaf.complete(error, taken=taken)
            _noted(error, notes)
            raise
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            raise
        if not taken:
            raise leaf.complete(adapter_failed(leaf.source, error)) from error
        reason = f"{target.name} refused it: {exception_text(error)}"
        raise _noted(leaf.complete(ConversionError(reason)), notes) from error


def take_back(leaf: Leaf) -> tuple[str, ...]:
    """Undo `take` for an array whose result is gone: a capsule gets its name back.

    If the adapter fails to, its message is returned as a note, so that it does not replace the error being raised.
    """
    owned, leaf.owned = leaf.owned, None
    if owned is not None:
        try:
            leaf.source.give_back(leaf.obj, owned)
        except MemoryError:
            raise
        except Exception as failure:
            return (f"{leaf.source.name} failed to take it back: {exception_text(failure)}",)
    return ()


def _noted(error: BaseException, notes: tuple[str, ...]) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


def release(leaf: Leaf) -> None:
    """Release what a leaf holds: a capsule that was only peeked at keeps its name."""
    leaf.tensor = leaf.owned = None
