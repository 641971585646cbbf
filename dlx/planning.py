"""Deciding about ONE array: what stands between it and the consumer, and what to do about each thing.

`begin` asks the producer's adapter what it knows before any tensor exists; `settle` takes a tensor (an exported one, or
a sketch of it) and decides. `dlx.convert` runs what is decided here, `dlx.plan` shows it: explaining is a dry run.
"""

from __future__ import annotations

from typing import Any

from dlx.abi import IS_COPIED, READ_ONLY, Device, DType, host_readable, same_device
from dlx.adapter import Adapter, Hindrance
from dlx.cuda import is_cuda, require
from dlx.errors import (
    CopyRequiredError,
    DeviceError,
    DlxError,
    ReadOnlyError,
)
from dlx.leaf import HOST, Leaf, Request, Step, adapter_failed, refuse, refuse_failure
from dlx.native import Tensor, lib
from dlx.obstacles import READ_ONLY_ROW, REPACKED, TABLE
from dlx.places import decide_place, note_copy, result_device
from dlx.protocol import device_of
from dlx.tensor import ArrayInfo

__all__ = ["begin", "is_settled", "settle"]


# ---- before a tensor exists ------------------------------------------------------------------------------------------


def begin(obj: Any, source: Adapter, request: Request) -> Leaf:
    """Start on one array: settle it inside its framework, or note what must be lifted before it can be exported.

    The leaf's plan is set if nothing is left to decide.
    """
    leaf = Leaf(obj, source, request, None)
    try:
        inside = request.target.holds(obj, source)
        if inside or not source.describes_by_export:
            leaf.info = source.info(obj)
        if inside and _stays(leaf):
            return leaf
        for hindrance in source.examine(obj):
            error = _accept(leaf, hindrance)
            if error is not None:
                leaf.finish("refused", None, error)
                return leaf
        if source.takes_stream:
            leaf.device = leaf.info.device if leaf.info is not None else device_of(obj)
            request.crossing.reach(source, leaf.device)
    except DlxError as error:
        refuse(leaf, error)
    except Exception as error:
        refuse_failure(leaf, error)
    return leaf


def _accept(leaf: Leaf, hindrance: Hindrance) -> DlxError | None:
    """Note the cure of a hindrance, or return the error where there is none or it is not allowed."""
    request = leaf.request
    if hindrance.cure is None or (hindrance.option and not getattr(request, hindrance.option)):
        return leaf.error(hindrance.error, hindrance.because, hindrance.fix)
    empty = leaf.info is not None and leaf.info.shape is not None and 0 in leaf.info.shape
    if hindrance.copies and request.copy is False and not empty:
        return leaf.error(CopyRequiredError, hindrance.because, "Drop copy=False.")
    nbytes = leaf.info.nbytes if hindrance.copies and leaf.info else 0
    leaf.steps.append(Step(hindrance.option or "resolve", hindrance.because, nbytes))
    leaf.cures.append(hindrance.lift)
    leaf.fresh = leaf.fresh or (hindrance.copies and not (empty and request.copy is False))
    return None


def _stays(leaf: Leaf) -> bool:
    """Settle an array that is in the target framework already: it stays what it is, unless asked otherwise.

    `readonly` does not act here. False where the framework cannot copy by itself.
    """
    source, request = leaf.source, leaf.request
    for hindrance in source.examine(leaf.obj):
        if hindrance.always or (hindrance.no_copy and request.copy):
            leaf.finish("refused", None, leaf.error(hindrance.error, hindrance.because, hindrance.fix))
            return True
    device = leaf.info.device if leaf.info else None
    nbytes = leaf.info.nbytes if leaf.info else 0
    if request.detach and source.detached(leaf.obj) is not leaf.obj:
        leaf.cures.append(source.detached)
        leaf.steps.append(Step("detach", "detach=True gives a graph-free array"))
    wanted = request.device
    if wanted is not None and not same_device(wanted, device):
        accepted = source.capabilities.device_types if source.capabilities is not None else None
        may = accepted is None or wanted.type in accepted
        if may and type(source).moved is Adapter.moved and _dlx_reaches(wanted, device):
            leaf.cures.clear()
            leaf.steps.clear()
            return False  # dlx moves it, or says that it is host memory
        if type(source).moved is Adapter.moved or not may:
            reason = f"{source.name} {source.noun}s cannot be moved to {wanted} here"
            leaf.finish("refused", None, leaf.error(DeviceError, reason, "Leave device out."))
            return True
        for hindrance in source.examine(leaf.obj):
            if hindrance.cure is None:  # without memory there is nothing to move
                leaf.finish("refused", None, leaf.error(hindrance.error, hindrance.because, hindrance.fix))
                return True
        if request.copy is False:
            reason = f"it is on {device}, and {wanted} was asked for"
            leaf.finish("refused", None, leaf.error(CopyRequiredError, reason, "Drop copy=False."))
            return True
        leaf.cures.append(lambda obj: source.moved(obj, wanted))
        leaf.steps.append(Step("move", f"from {device or 'an unknown device'} to {wanted}", nbytes))
        leaf.finish("copied", wanted)
        return True
    if request.copy:
        if type(source).clone is Adapter.clone:
            leaf.cures.clear()
            leaf.steps.clear()
            return False
        leaf.cures.append(source.clone)
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
        return not target.check(tensor) and (not target.carried or tensor.dtype.name not in target.carried)
    except MemoryError:
        raise
    except Exception:  # `settle` asks again, and tells it
        return False


def settle(leaf: Leaf, tensor: Tensor) -> None:
    """Decide, with the tensor's facts known, and write the plan."""
    try:
        _settle(leaf, tensor)
    except DlxError as error:
        refuse(leaf, error)
    except Exception as error:  # the consumer's adapter is asked there
        refuse(leaf, adapter_failed(leaf.request.target, error))


def _settle(leaf: Leaf, tensor: Tensor) -> None:
    if leaf.info is None or leaf.info.shape is None:
        protocols = leaf.info.protocols if leaf.info else ()
        leaf.info = ArrayInfo.of_tensor(tensor, leaf.source.name, type(leaf.obj), protocols)
    error = _freshness(leaf, tensor) or decide_place(leaf, tensor) or _obstacles(leaf, tensor)
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
        copied = False  # nothing there to be copied
    target = leaf.request.target
    _carry(leaf, tensor)
    if not copied and not tensor.readonly and target.constant_over(tensor):
        why = f"{target.name} {target.noun}s are constant: do not write to the source while the result lives"
        leaf.steps.append(Step("share", why))
    place = leaf.copy_device if leaf.copy_order is not None else result_device(leaf, tensor)
    error = _driver(leaf, tensor, place)
    if error is not None:
        leaf.finish("refused", None, error)
        return
    order = leaf.request.crossing.explained(leaf.source, tensor.device, place)
    if order:
        leaf.steps.insert(0, Step("order", order))
    leaf.finish("copied" if copied else "shared", place)


def _carry(leaf: Leaf, tensor: Tensor) -> None:
    """Note the name under which the consumer takes a dtype, if it is not its own."""
    target = leaf.request.target
    name = target.carried.get(tensor.dtype.name)
    if name is not None:
        leaf.carried = DType(name)
        leaf.steps.append(
            Step("view", f"{target.name} takes {tensor.dtype} as {name}, which is viewed as {tensor.dtype} again")
        )


def _freshness(leaf: Leaf, tensor: Tensor) -> DlxError | None:
    """See whether the producer copied for this very hand-over, though nobody asked it to."""
    if not tensor.flags & IS_COPIED:
        return None
    if leaf.request.copy is False:
        return leaf.error(CopyRequiredError, "its producer made a copy", "Drop copy=False.")
    leaf.fresh = not tensor.readonly  # what nobody may write to is no fresh memory for copy=True
    leaf.steps.append(Step("copy", "made by its producer", tensor.nbytes))
    leaf.made_by_producer = True
    return None


def _driver(leaf: Leaf, tensor: Tensor, place: Device) -> DlxError | None:
    """Return why the driver cannot be used where it is needed: for all but a look at memory as it is."""
    if not (is_cuda(tensor.device) or is_cuda(place)) or (leaf.copy_order is None and leaf.request.target.is_own):
        return None
    try:
        require()
    except DeviceError as error:
        return leaf.complete(error)
    return None


def _obstacles(leaf: Leaf, tensor: Tensor) -> DlxError | None:
    request, target = leaf.request, leaf.request.target
    found = target.check(tensor)
    if leaf.view_device is not None or leaf.copy_order is not None:  # _place has seen to it
        found &= ~lib.DLX_OBSTACLE_DEVICE
    leaf.give_address = bool(found & lib.DLX_OBSTACLE_NULL)
    rows = [row for row in TABLE if found & row.bit]
    for row in rows:
        if not row.copy_cures:
            return leaf.error(row.error, row.sentence(tensor, target), row.fix_for(tensor, target))
    layout = [row for row in rows if row.bit != lib.DLX_OBSTACLE_READONLY]
    if len(layout) < len(rows):
        error, share = _read_only(leaf, tensor, copied_anyway=bool(layout or request.copy))
        if error is not None:
            return error
        if share:
            return None
    if layout and request.copy is False and 0 not in tensor.shape:
        return leaf.error(layout[0].error, layout[0].sentence(tensor, target), layout[0].fix)
    if rows:
        leaf.repack = bool(found & REPACKED)
        return note_copy(leaf, tensor, "; ".join(row.sentence(tensor, target) for row in rows))
    return None


def _read_only(leaf: Leaf, tensor: Tensor, *, copied_anyway: bool) -> tuple[DlxError | None, bool]:
    """Apply the read-only policy; returns an error, or whether to share all the same."""
    request = leaf.request
    reason = READ_ONLY_ROW.sentence(tensor, request.target)
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
