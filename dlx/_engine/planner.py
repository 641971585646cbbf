"""Plan the steps for one array: `decide_before_export` by its description, `decide` by the exported tensor."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from dlx._core.array_info import ArrayInfo
from dlx._core.cuda import check_gaps, is_cuda, is_pinned_device, require, where
from dlx._core.extension import lib
from dlx._core.native import Tensor, tensor_check, tensor_new
from dlx._core.stream import is_unordered
from dlx._core.tensor import dense
from dlx._core.types import HOST, IS_COPIED, SUBBYTE_PADDED, Device, DType, contiguous, host_readable, is_at
from dlx._engine.casting import can_cast, check_cast
from dlx._engine.executor import dense_strides
from dlx._engine.incompatibility import READ_ONLY_RULE, REPACKED, RULES
from dlx._engine.plan import Address, Cast, Copy, Relabel, Repack, Resolve, Step, Unmark, ViewAs
from dlx._engine.request import Request
from dlx._engine.streams import Synchronization, takes_stream
from dlx._registry.generic import TENSOR
from dlx._registry.registry import registry
from dlx._registry.target import Target, is_committed
from dlx._support.reflect import safe_repr
from dlx.adapter.base import Adapter, Blocker, DTypes
from dlx.adapter.declarations import ALIGNMENTS, Layout
from dlx.errors import CopyRequiredError, DeviceError, DlxError, DTypeError, LayoutError, ReadOnlyError, StreamError
from dlx.typing import Outcome


class Decision(NamedTuple):
    """The steps for one array, and their outcome."""

    steps: tuple[Step, ...] = ()  # `decide_before_export` gives steps to run before the export
    outcome: Outcome = "unknown"  # as `Plan.outcome`; unknown until the array is exported
    device: Device | None = None  # of the result; None: unchanged or unknown
    copies: bool = False  # whether a step before the export copies


UNDECIDED = Decision()
_SHARED, _COPIED = Decision(outcome="shared"), Decision(outcome="copied")
MAX_DECISIONS = 64  # cached for each target
_NOT_CHUNKS = frozenset({"dlx", "arrow"})  # a collection cannot compute with these
_COPY = (("copy", None),)  # the option that an error suggests
_DEVICE = (("device", None),)


def decide_before_export(
    obj: Any, source: Adapter, blockers: tuple[Blocker, ...], info: Any, request: Request
) -> Decision:
    """Plan the steps before the export, or return the array unchanged; ``info()`` gives its `ArrayInfo`."""
    inside = is_inside(obj, source, request.target)
    in_one_copy = inside or any(blocker.needs == "copy" for blocker in blockers)
    cast = None if request.casts is None else _own_cast(source, info(), request, in_one_copy)
    if inside:
        decision = _decide_inside(obj, source, blockers, info, request, cast)
        if decision is not None:
            return decision
    if cast is not None:  # it also does what the other copies do
        blockers = tuple(blocker for blocker in blockers if blocker.resolution is None or blocker.needs != "copy")
    steps = (*(_resolve_step(blocker, info, request) for blocker in blockers), *([cast] if cast is not None else ()))
    return Decision(steps, copies=any(step.copies for step in steps))


def casts_itself(adapter: Adapter, *dtypes: DType) -> bool:
    """Return whether the framework itself casts, and so copies to its arrays, and has all of the dtypes."""
    if type(adapter.dtypes).cast is DTypes.cast:
        return False
    target = registry.ready(adapter)
    known = adapter.dtypes.known() if target is None else target.dtypes()
    return all(each.name in known for each in dtypes)


def _own_cast(source: Adapter, info: ArrayInfo, request: Request, in_one_copy: bool) -> Cast | None:
    """Return the cast by the array's framework; None without a cast, and if `decide` must plan it.

    On the host, dlx casts to the target's layout and alignment in one pass, unless the framework makes the only copy.
    """
    new = None if info.dtype is None or request.casts is None else request.casts.find(info.dtype)
    if new is None or info.dtype is None or not casts_itself(source, info.dtype, new):
        return None
    if not in_one_copy and can_cast(info.dtype, new, info.device):
        return None
    check_cast(info.dtype, new, info.shape, request.copy)
    nbytes = (info.nbytes or 0) * new.bits // info.dtype.bits
    why, run = f"{info.dtype} to {new}, by {source.name}", functools.partial(source.dtypes.cast, dtype=new)
    return Cast("cast", why, nbytes, ("dtype", new.name), run=run, copies=True, dtype=new)


DEFERRED = Decision((Step("defer", "its chunks are converted when they are computed"),), "deferred")


def defer_chunks(obj: Any, source: Adapter, info: Any, request: Request) -> Any:
    """Return a collection that converts its chunks when they are computed, else None; ``info()`` describes it."""
    map_chunks = source.arrays.map_chunks
    if map_chunks is None or request.target.name in _NOT_CHUNKS or is_inside(obj, source, request.target):
        return None
    target, device, copy, readonly, detach, stream, *_ = request
    if stream is not None:
        why = "its chunks are converted when they are computed, each on its own stream"
        raise StreamError(why, option=(("stream", None),))
    to = target.name if target.kind is None else target.kind
    options: dict[str, Any] = {
        "to": to,
        "device": device and tuple(device),
        "copy": copy,
        "readonly": readonly,
        "detach": detach,
        "wait": request.wait,
    }
    if request.casts is not None:
        old, shape = info().dtype, info().shape
        new = None if old is None else request.casts.find(old)
        if new is not None:
            check_cast(old, new, shape, copy)
        options["dtype"] = {old: new.name for old, new in request.casts.dtypes.items()}
    try:
        return map_chunks(obj, options)
    except DlxError as error:
        error.source = ""  # the chunk; the message names the whole array
        raise


def is_inside(obj: Any, source: Adapter, target: Target) -> bool:
    """Return whether an array of `source` is an array of the target already."""
    return source is target.source and (target.kind is None or isinstance(obj, target.kind))


def _resolve_step(blocker: Blocker, info: Any, request: Request) -> Resolve:
    """Return the step that resolves a blocker, or raise its error if no step exists or is allowed."""
    if blocker.resolution is None:
        raise _blocker_error(blocker)
    if blocker.needs == "detach" and not request.detach:
        raise blocker.error(blocker.because, fix=blocker.fix, option=(("detach", True),))
    if blocker.needs != "copy":
        return Resolve(blocker.needs or "resolve", blocker.because, run=blocker.resolve)
    found: ArrayInfo = info()
    empty = found.shape is not None and 0 in found.shape
    if request.copy is False and not empty:
        raise CopyRequiredError(blocker.because, fix=blocker.fix, option=_COPY)
    copies = not (empty and request.copy is False)  # no element to copy
    return Resolve("resolve", blocker.because, found.nbytes or 0, run=blocker.resolve, copies=copies)


def _blocker_error(blocker: Blocker) -> Exception:
    return blocker.error(blocker.because, fix=blocker.fix)


def _decide_inside(
    obj: Any, source: Adapter, blockers: tuple[Blocker, ...], info: Any, request: Request, cast: Cast | None
) -> Decision | None:
    """Plan an array of the target framework, which only options change; None if dlx must copy it."""
    for blocker in blockers:
        requested = {"stay": True, "copy": request.copy or cast is not None, "detach": request.detach}
        if any(requested[each] for each in blocker.also_blocks):
            raise _blocker_error(blocker)
    steps: tuple[Step, ...] = ()
    if request.detach:
        why, option = "the result has no graph", ("detach", True)
        steps = tuple(
            Resolve("detach", why, option=option, run=blocker.resolve)
            for blocker in blockers
            if blocker.needs == "detach"
        )
    if cast is not None:
        steps = (*steps, cast)
    elif request.casts is not None:
        dtype = info().dtype
        if dtype is None and all(blocker.resolution is not None for blocker in blockers):
            return None  # its export shows the dtype
        if dtype is not None and request.casts.find(dtype) is not None:
            return None  # dlx casts it
    own_copies = type(source).copy is not Adapter.copy
    wanted = request.device
    if wanted is not None and request.committed and not is_committed(source, obj):
        return None  # the result shares the memory, committed to the device
    if wanted is not None and not is_at(info().device, wanted):
        return _move_inside(source, blockers, info(), request, steps, own_copies and source.devices.moves)
    if request.copy and cast is None:
        if not own_copies:
            return None
        why, nbytes = f"made by {source.name}", info().nbytes or 0
        step = Resolve("copy", why, nbytes, ("copy", True), run=source.copy, copies=True)
        return Decision((*steps, step), "copied")
    return Decision(steps, "copied" if cast is not None else "shared" if steps else "same")


def _move_inside(
    source: Adapter,
    blockers: tuple[Blocker, ...],
    info: ArrayInfo,
    request: Request,
    steps: tuple[Step, ...],
    own_moves: bool,
) -> Decision | None:
    wanted, accepted = request.device, request.target.capabilities.device_types
    assert wanted is not None
    is_accepted = accepted is None or wanted.type in accepted or pins(request.target, wanted)
    dlx_moves = not own_moves or not request.wait or is_pinned_device(wanted)
    if is_accepted and dlx_moves and _dlx_reaches(wanted, info.device):
        return None  # dlx moves it, or relabels it as host memory
    if not is_accepted:
        raise _unsupported(request.target, wanted)
    if not own_moves:
        raise DeviceError(f"{request.target.arrays} cannot be moved to {wanted} here", option=_DEVICE)
    for blocker in blockers:
        if blocker.resolution is None:  # no memory to move
            raise _blocker_error(blocker)
    if request.copy is False:
        raise CopyRequiredError(f"it is on {info.device}, and the result must be on {wanted}", option=_COPY)
    why = f"from {info.device or 'an unknown device'} to {wanted}"
    step = Resolve("move", why, info.nbytes or 0, run=functools.partial(source.copy, device=wanted), copies=True)
    return Decision((*steps, step), "copied", wanted)


def _unsupported(target: Target, wanted: Device) -> DeviceError:
    """Return the error for a device that the target does not support."""
    known = target.capabilities.refusals.get(wanted.name)
    if known is not None:
        return DeviceError(known[0], fix=known[1])
    return DeviceError(f"{target.arrays} cannot be on {wanted}", option=_DEVICE)


def _dlx_reaches(wanted: Device, device: Device | None) -> bool:
    """Return whether dlx can move the memory: from or to CUDA, or because the host can read it."""
    readable = host_readable(wanted) and device is not None and host_readable(device)
    return readable or is_cuda(wanted) or is_cuda(device)


def pins(target: Target, wanted: Device | None) -> bool:
    """Return whether a device is pinned memory, and the target's framework allocates it."""
    return is_pinned_device(wanted) and target.adapter.devices.pins


def share_unchanged(
    tensor: Tensor, before: Decision, source: Adapter, request: Request, *, in_full: bool = False
) -> Decision | None:
    """Return the decision if the consumer takes the memory unchanged, else None; `in_full` is for a plan."""
    target = request.target
    if (
        not before.steps
        and request.casts is None
        and (tensor.is_host or takes_stream(source))
        and (request.copy is None or not tensor.flags & IS_COPIED)
        and request.device is None
        and not request.copy
        and request.stream is None
        and not (target.varies or target.capabilities.home is not None)
        and not ((copies := target.capabilities.copies) and (copies is True or tensor.dtype.name in copies))
        and not tensor_check(tensor, target.address)
        and (not target.storage or tensor.dtype.name not in target.storage)
        and not (in_full and (target.adapter.arrays.immutable or tensor.flags & IS_COPIED))
    ):
        return _COPIED if tensor.flags & IS_COPIED else _SHARED
    return None


def check_copies(decision: Decision, tensor: Tensor) -> None:
    """Raise a LayoutError if a copy within a device needs too many driver calls."""
    copies = [step for step in decision.steps if isinstance(step, Copy)]
    if copies and is_cuda(copies[0].device) and is_cuda(tensor.device):
        check_gaps(tensor, copies[0].keep_order)


def decide(tensor: Tensor, before: Decision, source: Adapter, request: Request, sync: Synchronization) -> Decision:
    """Plan the steps for an exported array; the target caches decisions about host memory."""
    target = request.target
    if request.casts is not None and not any(isinstance(step, Cast) for step in before.steps):
        new = request.casts.find(tensor.dtype)
        if new is not None:
            return _decide_cast(tensor, new, before, source, request, sync)
    if not tensor.is_host or before.steps or request.stream is not None or is_pinned_device(request.device):
        return _Decider(tensor, before, source, request, sync).decision()
    address = tensor.data_ptr
    alignment = (address & -address) % ALIGNMENTS[-1] if address else None
    layout = tensor.device, tensor.dtype, tensor.shape, tensor.strides, tensor.flags, alignment
    key = *layout, request.device, request.committed, request.copy, request.readonly
    known: Decision | None = target.decisions.get(key)
    if known is None:
        known = _Decider(tensor, before, source, request, sync).decision()
        if known.device == HOST:
            if len(target.decisions) >= MAX_DECISIONS:
                target.decisions.clear()
            target.decisions[key] = known
    return known


def keeps_order(target: Target) -> bool:
    """Return whether a copy for a target keeps the order of dimensions, without a device of the call."""
    return bool(target.capabilities.layouts & Layout.PERMUTED) and target.adapter.placement is None


def _decide_cast(
    tensor: Tensor, new: DType, before: Decision, source: Adapter, request: Request, sync: Synchronization
) -> Decision:
    """Plan a cast that the array's framework does not do: by dlx on the host, or at the end by the target."""
    target, old = request.target, tensor.dtype
    check_cast(old, new, tensor.shape, request.copy)
    why, option = f"{old} to {new}", ("dtype", new.name)
    keep_order = keeps_order(target)
    strides = dense_strides(tensor, keep_order)
    cast = tensor_new(lib.DLX_ALIGNMENT, tensor.shape, strides, new, HOST, 0, None)  # for the plan only
    if can_cast(old, new, tensor.device):
        step = Copy("cast", why, cast.nbytes, option, keep_order=keep_order, dtype=new)
        after = Decision((*before.steps, step), copies=True)
        return _Decider(cast, after, source, request, sync).decision()
    if not casts_itself(target.adapter, old, new):
        fix = "Make an array of it first, such as numpy.asarray(x)." if source is TENSOR and tensor.is_host else ""
        raise DTypeError(f"neither its framework nor dlx casts {old} to {new} on {tensor.device}", fix=fix)
    if is_pinned_device(request.device):
        reason = f"{target.name} would cast it into memory that is not pinned"
        raise DeviceError(reason, fix="Cast it in its own framework first.")
    steps, _, device, _ = _Decider(tensor, before, source, request, sync).decision()
    run = functools.partial(target.adapter.dtypes.cast, dtype=new)
    made = Cast("cast", f"{why}, by {target.name}", cast.nbytes, option, run=run, copies=True, dtype=new, at_end=True)
    return Decision((*steps, made), "copied", device)


class _Decider:
    """Builds the decision for one tensor."""

    def __init__(
        self, tensor: Tensor, before: Decision, source: Adapter, request: Request, sync: Synchronization
    ) -> None:
        self.tensor, self.before, self.source, self.request, self.sync = tensor, before, source, request, sync
        self.target = request.target.over(tensor) if request.target.varies else request.target
        self.found = self.target.check(tensor)  # incompatibility bits
        self.notes: list[Step] = []  # what the producer did
        self.relabel: Device | None = None
        self.copies: list[Step] = []  # a copy or move, after a step that makes the array compact
        self.copy_device = HOST
        self.pinned: Device | None = None  # where the memory is already
        # An array that is not committed to a device must be in row-major order (see `Placement`).
        self.needs_row_major = self.target.adapter.placement is not None and not (
            request.device is not None and request.committed
        )
        self.keep_order = bool(self.target.capabilities.layouts & Layout.PERMUTED) and not self.needs_row_major
        self.repack = False

    def decision(self) -> Decision:
        tensor, request, target = self.tensor, self.request, self.target
        is_new, is_copied = self._check_memory()
        self._place()
        unmark = self._resolve_incompatibilities()
        imported = self._import_copies()
        if not self.copies and request.copy and not (is_new or imported):
            self._copy(Step("copy", "", tensor.nbytes, ("copy", True)))
        copied = is_new or is_copied or bool(self.copies or imported)
        if 0 in tensor.shape and request.copy is False:
            copied = False  # no element to copy
        after = unmark
        is_null = self.found & lib.DLX_INCOMPATIBLE_NULL or (0 in tensor.shape and (self.copies or self.before.copies))
        if is_null and target.capabilities.empty_extents == "addressed":
            after.append(Address("view", f"{target.arrays} need an address even without elements"))
        after += self._storage_step()
        if not copied and not tensor.readonly and target.adapter.arrays.immutable:
            why = f"{target.arrays} are constant: do not write to the source while the result exists"
            after.append(Step("share", why))
        if self.needs_row_major and not self.copies and not contiguous(tensor.shape, tensor.strides):
            after.append(Step("place", f"{target.name} keeps it on its device because it is not in row-major order"))
        device = self.copy_device if self.copies else self.pinned or self.relabel or tensor.device
        self._require_driver(device)
        order = self.sync().explain(self.source, tensor.device, device) if is_cuda(tensor.device) else ""
        steps = (
            *([Step("order", order)] if order else []),
            *self.before.steps,
            *self.notes,
            *self.copies,
            *after,
            *imported,
        )
        return Decision(steps, "copied" if copied else "shared", device)

    def _check_memory(self) -> tuple[bool, bool]:
        """Return whether the memory is new and writable, and whether the producer copied it (IS_COPIED)."""
        if not self.tensor.flags & IS_COPIED:
            return self.before.copies, False
        if self.request.copy is False:
            raise CopyRequiredError("its producer made a copy", option=_COPY)
        self.notes.append(Step("copy", "made by its producer", self.tensor.nbytes))
        return not self.tensor.readonly, True  # read-only memory does not satisfy copy=True

    def _import_copies(self) -> list[Step]:
        """Return the copy that the consumer makes when it imports any array, or this dtype."""
        copies = self.target.capabilities.copies
        why = "copies what it imports" if copies is True else copies and copies.get(self.tensor.dtype.name)
        if not why:
            return []
        if self.request.copy is False and 0 not in self.tensor.shape:
            raise CopyRequiredError(f"{self.target.name} {why}", option=_COPY)
        return [Step("copy", f"made by {self.target.name}, which {why}", self.tensor.nbytes)]

    def _place(self) -> None:
        """Choose the device of the result. A consumer without pinned memory takes it as host memory."""
        request, device = self.request, self.tensor.device
        accepted = self.target.capabilities.device_types
        wanted, home = request.device, self.target.capabilities.home
        if wanted is None and home is not None and request.copy is not False and self._is_default_host(device):
            wanted = home
        if wanted is None and accepted is not None and device.type not in accepted:
            wanted = self._nearest(device, accepted)
        if wanted is not None and pins(self.target, wanted):
            if request.copy or not self._is_pinned():
                self._move(wanted)
            else:
                self.pinned = wanted
                if device != HOST:
                    self._relabel(HOST, f"{self.target.name} takes pinned memory as host memory")
        elif wanted is not None and not is_at(device, wanted):
            if wanted.type == HOST.type and (host_readable(device) or device.type == lib.kDLCUDAManaged):
                self._relabel(wanted, f"{wanted} can read {device} memory")
            elif (device.type, *wanted) == (lib.kDLCUDAManaged, lib.kDLCUDA, device.id):
                self._relabel(wanted, f"{device} memory belongs to {wanted}")
            else:
                self._move(wanted)
        result = self.copy_device if self.copies else self.relabel or device
        if not (request.stream is None or is_unordered(request.stream)) and host_readable(result):
            reason = f"host memory has no stream, found stream={safe_repr(request.stream)}"
            raise StreamError(reason, option=(("stream", None),))

    def _is_pinned(self) -> bool:
        """Return whether the memory is pinned already, and the target takes it as host memory."""
        tensor, accepted = self.tensor, self.target.capabilities.device_types
        is_taken = host_readable(tensor.device) and (accepted is None or HOST.type in accepted)
        return is_taken and bool(tensor.nbytes) and is_pinned_device(where(tensor.data_ptr))

    @staticmethod
    def _is_default_host(device: Device) -> bool:
        """Return whether the host can read the memory and its device has no number."""
        return host_readable(device) and not (device.type == HOST.type and device.id)

    def _relabel(self, device: Device, why: str) -> None:
        self.relabel = device
        self.notes.append(Relabel("relabel", why, device=device))

    def _nearest(self, device: Device, accepted: frozenset[int]) -> Device | None:
        """Return the accepted device for memory on a device that the consumer lacks, or None."""
        if device.type == lib.kDLCUDAManaged and lib.kDLCUDA in accepted:
            return Device(lib.kDLCUDA, device.id)
        if not (host_readable(device) or is_cuda(device)):
            return None
        default = self.target.adapter.devices.default()
        return default if default.type in accepted else None

    def _move(self, wanted: Device) -> None:
        """Copy the array to another device."""
        tensor, target = self.tensor, self.target
        device, accepted = tensor.device, target.capabilities.device_types
        if accepted is not None and wanted.type not in accepted and not pins(target, wanted):
            raise _unsupported(target, wanted)
        reachable = wanted == HOST or wanted.type == lib.kDLCUDA or pins(target, wanted)
        if not reachable or not (host_readable(device) or is_cuda(device)):
            reason = f"it is on {device}, and dlx cannot move it to {wanted}"
            raise DeviceError(reason, fix="Leave device out, or move it in its own framework first.")
        if self.request.copy is False:
            raise CopyRequiredError(f"it is on {device}, and the result is on {wanted}", option=_COPY)
        self._can_copy(wanted)
        self.copy_device = wanted
        one_run = contiguous(tensor.shape, tensor.strides) or (self.keep_order and dense(tensor))
        if is_cuda(device) and is_cuda(wanted) and not one_run:
            why, here = (
                f"made compact on {device}: device copies need contiguous memory",
                Device(lib.kDLCUDA, device.id),
            )
            self.copies.append(Copy("copy", why, tensor.nbytes, device=here, keep_order=self.keep_order))
        named = "" if self.request.device is not None else f", the default device of {target.name}"
        why = f"from {device} to {wanted}{named if wanted == target.capabilities.home else ''}"
        if not self.request.wait and wanted != HOST and is_cuda(device) != is_cuda(wanted):
            why += ", which the host does not wait for"
        self.copies.append(Copy("move", why, tensor.nbytes, device=wanted, keep_order=self.keep_order))

    def _can_copy(self, device: Device) -> None:
        """Raise if dlx cannot copy the memory to a device."""
        tensor = self.tensor
        dtype = tensor.dtype
        if not (host_readable(tensor.device) or is_cuda(tensor.device)):
            reason = f"it is on {tensor.device}, and dlx copies only host and CUDA memory"
            raise DeviceError(reason, fix="Copy it in its own framework first.")
        if self.repack and (dtype.bits >= 8 or dtype.lanes != 1):
            raise LayoutError(f"dlx does not pack or unpack {dtype}", option=(("to", "dlx"),))
        if self.repack and is_cuda(tensor.device) and is_cuda(device):
            reason = f"dlx packs and unpacks {dtype} only on the host, not from {tensor.device} to {device}"
            raise LayoutError(reason, option=(("device", "cpu"), ("to", "dlx")))
        packed = dtype.bits * dtype.lanes % 8 and not tensor.flags & SUBBYTE_PADDED
        if packed and not contiguous(tensor.shape, tensor.strides):
            reason = f"its {dtype} elements are packed below one byte and not contiguous"
            raise LayoutError(reason, fix="Make it contiguous in its own framework first.")

    def _copy(self, why: Step) -> None:
        """Add a copy unless the array is moved; pack or unpack its elements if necessary."""
        here = self.relabel or self.tensor.device
        self._can_copy(self.copy_device if self.copies else here)
        if not self.copies:
            self.copy_device = HOST if host_readable(here) else Device(lib.kDLCUDA, here.id)
            if self.request.device is not None and here.type == HOST.type:
                self.copy_device = self.pinned or here  # keeps the device number
        parts = (why.do, why.why, why.nbytes, why.option, why.details)
        if self.repack and not is_cuda(here):
            self.copies.insert(0, Repack(*parts))
            if not is_cuda(self.copy_device):
                return  # packing copies
        elif self.repack:
            self.copies.append(Repack(*parts))
        elif not self.copies:
            self.copies.append(Copy(*parts, device=self.copy_device, keep_order=self.keep_order))

    def _resolve_incompatibilities(self) -> list[Step]:
        """Add a copy if it resolves the incompatibilities, else raise; return the step that shares read-only memory."""
        request, target, tensor = self.request, self.target, self.tensor
        found = self.found
        if self.relabel is not None or self.copies:  # `_place` has resolved it
            found &= ~lib.DLX_INCOMPATIBLE_DEVICE
        rules = [rule for rule in RULES if found & rule.bit]
        for rule in rules:
            if not rule.copy_resolves:
                is_cast = any(getattr(step, "dtype", None) == tensor.dtype for step in self.before.steps)
                advice = rule.advise(tensor, target, request.casts, is_cast)
                raise rule.error(**advice, **rule.explain(tensor, target))
        layout = [rule for rule in rules if rule.bit != lib.DLX_INCOMPATIBLE_READONLY]
        if len(layout) < len(rules) and self._shares_readonly(copied_anyway=bool(layout or request.copy)):
            why = "the result is writable although its memory is read-only; do not write to it"
            return [Unmark("share", why, option=("readonly", "share"))]
        if layout and request.copy is False and 0 not in tensor.shape:
            raise layout[0].error(option=_COPY, **layout[0].explain(tensor, target))
        if rules:
            self.repack = bool(found & REPACKED)
            parts = [rule.explain(tensor, target) for rule in rules]
            details = tuple(detail for part in parts for detail in part["details"])
            why = "; ".join(part["reason"] for part in parts)
            self._copy(Step("copy", why, tensor.nbytes, details=details))
        return []

    def _shares_readonly(self, *, copied_anyway: bool) -> bool:
        """Apply the read-only policy: return whether to share the memory, or raise."""
        request = self.request
        found = READ_ONLY_RULE.explain(self.tensor, self.target)
        if request.readonly == "error" and not request.copy:
            raise ReadOnlyError(option=(("readonly", "copy"), ("readonly", "share")), **found)
        if copied_anyway:
            return False
        if request.readonly == "share":
            return True
        if request.copy is False:
            raise ReadOnlyError(option=(("copy", None), ("readonly", "share")), **found)
        return False

    def _storage_step(self) -> list[Step]:
        """Return the view through a storage dtype if the consumer's exchange lacks the array's dtype."""
        dtype = self.tensor.dtype
        name = self.target.storage.get(dtype.name)
        if name is None:
            return []
        if is_pinned_device(self.request.device):
            raise DeviceError(f"{self.target.name} allocates no pinned memory for {dtype}", option=_DEVICE)
        why = f"{self.target.name} imports {dtype} as {name} and views it as {dtype}"
        return [ViewAs("view", why, dtype=DType(name))]

    def _require_driver(self, device: Device) -> None:
        """Raise if the CUDA driver is needed and missing; a dlx tensor over shared memory needs no driver."""
        on_device = is_cuda(self.tensor.device) or is_cuda(device)
        if on_device and (self.copies or self.relabel is not None or self.target.adapter is not TENSOR):
            require()
