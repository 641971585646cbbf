"""Decide what must be done for one array.

`begin` asks the producer's adapter what it knows before there is a tensor; `settle` compares a tensor with what the
consumer takes. `dlx.convert` runs what is decided here, and `dlx.plan` shows it.
"""

from __future__ import annotations

from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.cuda import is_cuda, require
from dlx._core.extension import lib
from dlx._core.tensor import Tensor
from dlx._core.types import IS_COPIED, READ_ONLY, Device, DType, host_readable, same_device
from dlx._engine.incompatibility import READ_ONLY_RULE, REPACKED, RULES
from dlx._engine.placement import decide_place, note_copy, result_device
from dlx._engine.plan import Step
from dlx._engine.request import HOST, Request
from dlx._engine.transfer import Leaf, adapter_failed, refuse, refuse_failure
from dlx._protocols.dlpack import device_of
from dlx.adapter.base import Adapter, Blocker
from dlx.errors import CopyRequiredError, DeviceError, DlxError, ReadOnlyError

__all__ = ["begin", "is_settled", "settle"]

# ---- before a tensor exists ------------------------------------------------------------------------------------------


def begin(obj: Any, source: Adapter, request: Request) -> Leaf:
    """Begin one array: settle it if it is in the target already, or note what must be resolved before it is exported.

    The leaf's plan is set if nothing is left to decide.
    """
    leaf = Leaf(obj, source, request, None)
    try:
        inside = request.target.holds(obj, source)
        if inside or not source.describes_by_export:
            leaf.info = source.info(obj)
        if inside and _stays(leaf):
            return leaf
        for blocker in source.examine(obj):
            error = _accept(leaf, blocker)
            if error is not None:
                leaf.finish("refused", None, error)
                return leaf
        if source.takes_stream:
            leaf.device = leaf.info.device if leaf.info is not None else device_of(obj)
            request.sync.reach(source, leaf.device)
    except DlxError as error:
        refuse(leaf, error)
    except Exception as error:
        refuse_failure(leaf, error)
    return leaf


def _accept(leaf: Leaf, blocker: Blocker) -> DlxError | None:
    """Note the resolution of a blocker, or return the error where there is none or it is not allowed."""
    request = leaf.request
    if blocker.resolution is None or (blocker.option and not getattr(request, blocker.option)):
        return leaf.error(blocker.error, blocker.because, blocker.fix)
    empty = leaf.info is not None and leaf.info.shape is not None and 0 in leaf.info.shape
    if blocker.copies and request.copy is False and not empty:
        return leaf.error(CopyRequiredError, blocker.because, "Drop copy=False.")
    nbytes = leaf.info.nbytes if blocker.copies and leaf.info else 0
    leaf.steps.append(Step(blocker.option or "resolve", blocker.because, nbytes))
    leaf.resolutions.append(blocker.resolve)
    leaf.fresh = leaf.fresh or (blocker.copies and not (empty and request.copy is False))
    return None


def _stays(leaf: Leaf) -> bool:
    """Settle an array that is in the target framework already: it is returned unchanged, unless an option changes it.

    `readonly` has no effect here. False where dlx must move or copy it.
    """
    source, request = leaf.source, leaf.request
    for blocker in source.examine(leaf.obj):
        if blocker.always or (blocker.no_copy and request.copy):
            leaf.finish("refused", None, leaf.error(blocker.error, blocker.because, blocker.fix))
            return True
    device = leaf.info.device if leaf.info else None
    nbytes = leaf.info.nbytes if leaf.info else 0
    if request.detach and source.detached(leaf.obj) is not leaf.obj:
        leaf.resolutions.append(source.detached)
        leaf.steps.append(Step("detach", "detach=True gives a graph-free array"))
    wanted = request.device
    if wanted is not None and not same_device(wanted, device):
        accepted = source.capabilities.device_types if source.capabilities is not None else None
        may = accepted is None or wanted.type in accepted
        if may and type(source).moved is Adapter.moved and _dlx_reaches(wanted, device):
            leaf.resolutions.clear()
            leaf.steps.clear()
            return False  # dlx moves it, or relabels it as host memory
        if type(source).moved is Adapter.moved or not may:
            reason = f"{source.name} {source.display_name}s cannot be moved to {wanted} here"
            leaf.finish("refused", None, leaf.error(DeviceError, reason, "Leave device out."))
            return True
        for blocker in source.examine(leaf.obj):
            if blocker.resolution is None:  # without memory there is nothing to move
                leaf.finish("refused", None, leaf.error(blocker.error, blocker.because, blocker.fix))
                return True
        if request.copy is False:
            reason = f"it is on {device}, and {wanted} was asked for"
            leaf.finish("refused", None, leaf.error(CopyRequiredError, reason, "Drop copy=False."))
            return True
        leaf.resolutions.append(lambda obj: source.moved(obj, wanted))
        leaf.steps.append(Step("move", f"from {device or 'an unknown device'} to {wanted}", nbytes))
        leaf.finish("copied", wanted)
        return True
    if request.copy:
        if type(source).clone is Adapter.clone:
            leaf.resolutions.clear()
            leaf.steps.clear()
            return False
        leaf.resolutions.append(source.clone)
        leaf.steps.append(Step("copy", f"copy=True, made by {source.name}", nbytes))
        leaf.finish("copied", device)
        return True
    leaf.finish("shared" if leaf.steps else "same", device)
    return True


def _dlx_reaches(wanted: Device, device: Device | None) -> bool:
    """Return whether dlx itself brings memory there: by a copy from or to CUDA, or because the host reads it anyway."""
    readable = wanted == HOST and device is not None and host_readable(device)
    return readable or is_cuda(wanted) or is_cuda(device)


# ---- with a tensor ---------------------------------------------------------------------------------------------------


def is_settled(leaf: Leaf, tensor: Tensor) -> bool:
    """Return whether nothing is left to decide: the consumer takes the memory as it is, and is asked for nothing else.

    As nearly always. `settle` would write a plan without a step, which only `dlx.plan` shows.
    """
    target = leaf.request.target
    if leaf.plan is not None or leaf.fresh or not leaf.request.is_plain or tensor.flags:
        return False
    if is_cuda(tensor.device) and not leaf.source.takes_stream:  # else the driver is known to be there
        return False
    try:
        return not target.check(tensor) and (
            not target.storage_dtypes or tensor.dtype.name not in target.storage_dtypes
        )
    except MemoryError:
        raise
    except Exception:  # `settle` asks again, and reports it
        return False


def settle(leaf: Leaf, tensor: Tensor) -> None:
    """Decide, from the facts of a tensor, and set the plan."""
    try:
        _settle(leaf, tensor)
    except DlxError as error:
        refuse(leaf, error)
    except Exception as error:  # from the consumer's adapter
        refuse(leaf, adapter_failed(leaf.request.target, error))


def _settle(leaf: Leaf, tensor: Tensor) -> None:
    if leaf.info is None or leaf.info.shape is None:
        protocols = leaf.info.protocols if leaf.info else ()
        leaf.info = ArrayInfo.of_tensor(tensor, leaf.source.name, type(leaf.obj), protocols)
    error = _freshness(leaf, tensor) or decide_place(leaf, tensor) or _incompatibilities(leaf, tensor)
    if error is not None:
        leaf.finish("refused", None, error)
        return
    if leaf.copy_order is None and leaf.request.copy and not leaf.fresh:
        error = note_copy(leaf, tensor, "copy=True")
        if error is not None:
            leaf.finish("refused", None, error)
            return
    copied = leaf.fresh or leaf.made_by_producer or leaf.copy_order is not None
    if 0 in tensor.shape and leaf.request.copy is False:
        copied = False  # no element to copy
    target = leaf.request.target
    _choose_storage_dtype(leaf, tensor)
    if not copied and not tensor.readonly and target.constant_over(tensor):
        why = f"{target.name} {target.display_name}s are constant: do not write to the source while the result lives"
        leaf.steps.append(Step("share", why))
    device = leaf.copy_device if leaf.copy_order is not None else result_device(leaf, tensor)
    error = _driver(leaf, tensor, device)
    if error is not None:
        leaf.finish("refused", None, error)
        return
    order = leaf.request.sync.explained(leaf.source, tensor.device, device)
    if order:
        leaf.steps.insert(0, Step("order", order))
    leaf.finish("copied" if copied else "shared", device)


def _choose_storage_dtype(leaf: Leaf, tensor: Tensor) -> None:
    """Note the storage dtype that the consumer takes instead of a dtype that its exchange does not know."""
    target = leaf.request.target
    name = target.storage_dtypes.get(tensor.dtype.name)
    if name is not None:
        leaf.storage_dtype = DType(name)
        leaf.steps.append(
            Step("view", f"{target.name} takes {tensor.dtype} as {name}, which is viewed as {tensor.dtype} again")
        )


def _freshness(leaf: Leaf, tensor: Tensor) -> DlxError | None:
    """Check whether the producer made a copy for this export (the flag IS_COPIED)."""
    if not tensor.flags & IS_COPIED:
        return None
    if leaf.request.copy is False:
        return leaf.error(CopyRequiredError, "its producer made a copy", "Drop copy=False.")
    leaf.fresh = not tensor.readonly  # read-only memory does not satisfy copy=True
    leaf.steps.append(Step("copy", "made by its producer", tensor.nbytes))
    leaf.made_by_producer = True
    return None


def _driver(leaf: Leaf, tensor: Tensor, device: Device) -> DlxError | None:
    """Return the error if the CUDA driver is needed and cannot be used; a dlx tensor over shared memory needs none."""
    if not (is_cuda(tensor.device) or is_cuda(device)) or (leaf.copy_order is None and leaf.request.target.is_own):
        return None
    try:
        require()
    except DeviceError as error:
        return leaf.complete(error)
    return None


def _incompatibilities(leaf: Leaf, tensor: Tensor) -> DlxError | None:
    request, target = leaf.request, leaf.request.target
    found = target.check(tensor)
    if leaf.view_device is not None or leaf.copy_order is not None:  # `decide_place` has decided it
        found &= ~lib.DLX_INCOMPATIBLE_DEVICE
    leaf.give_address = bool(found & lib.DLX_INCOMPATIBLE_NULL)
    rules = [rule for rule in RULES if found & rule.bit]
    for rule in rules:
        if not rule.copy_resolves:
            return leaf.error(rule.error, rule.sentence(tensor, target), rule.fix_for(tensor, target))
    layout = [rule for rule in rules if rule.bit != lib.DLX_INCOMPATIBLE_READONLY]
    if len(layout) < len(rules):
        error, share = _read_only(leaf, tensor, copied_anyway=bool(layout or request.copy))
        if error is not None:
            return error
        if share:
            return None
    if layout and request.copy is False and 0 not in tensor.shape:
        return leaf.error(layout[0].error, layout[0].sentence(tensor, target), layout[0].fix)
    if rules:
        leaf.repack = bool(found & REPACKED)
        return note_copy(leaf, tensor, "; ".join(rule.sentence(tensor, target) for rule in rules))
    return None


def _read_only(leaf: Leaf, tensor: Tensor, *, copied_anyway: bool) -> tuple[DlxError | None, bool]:
    """Apply the read-only policy; returns an error, or whether to share all the same."""
    request = leaf.request
    reason = READ_ONLY_RULE.sentence(tensor, request.target)
    if request.readonly == "error" and not request.copy:
        return leaf.error(ReadOnlyError, reason, "Pass readonly='copy' or readonly='share'."), False
    if copied_anyway:
        return None, False
    if request.readonly == "share":
        leaf.view_flags = tensor.flags & ~READ_ONLY
        leaf.steps.append(Step("share", "readonly='share': read-only memory is given out writable; do not write to it"))
        return None, True
    if request.copy is False:
        return leaf.error(ReadOnlyError, reason, "Drop copy=False, or pass readonly='share'."), False
    return None, False
