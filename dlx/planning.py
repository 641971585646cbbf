"""Deciding about ONE array: what stands between it and the consumer, and what to do about each thing.

`begin` asks the producer's adapter what it knows before any tensor exists; `settle` takes a tensor (an exported one, or
a sketch of it) and decides. `dlx.convert` runs what is decided here, `dlx.plan` shows it: explaining is a dry run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlx.abi import IS_COPIED, READ_ONLY, SUBBYTE_PADDED, Device, DType, host_readable, same_device
from dlx.adapter import Adapter, Hindrance, Layout
from dlx.crossing import Crossing, Moment
from dlx.cuda import is_cuda, require
from dlx.errors import (
    ConversionError,
    CopyRequiredError,
    DeviceError,
    DlxError,
    LayoutError,
    ProtocolError,
    ReadOnlyError,
    StreamError,
)
from dlx.native import Tensor, ffi, lib, tensor_address
from dlx.obstacles import READ_ONLY_ROW, REPACKED, TABLE
from dlx.protocol import device_of
from dlx.stream import is_unordered
from dlx.tensor import ArrayInfo, contiguous, type_name

__all__ = ["Leaf", "Plan", "Request", "Step", "adapter_failed", "begin", "refuse", "settle"]

HOST = Device("cpu")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a conversion does.

    Attributes
    ----------
    do
        ``"detach"``, ``"resolve"``, ``"relabel"``, ``"view"``, ``"share"``, ``"copy"`` or ``"move"``.
    why
        The reason, in words.
    nbytes
        Bytes moved by it.
    """

    do: str
    why: str
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.do}: {self.why}" + (f" ({self.nbytes:,} bytes)" if self.nbytes else "")


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, and why; it holds no memory.

    Attributes
    ----------
    path
        Place inside a container; empty at the root.
    source
        What was found; None where nothing is known.
    target
        Name of the target framework.
    device
        Where the result will be; None where it is refused or unknown.
    outcome
        ``"same"`` (the object itself), ``"shared"``, ``"copied"``, ``"refused"``, ``"tree"`` (a container: see
        `leaves`), or ``"unknown"`` where only an export could tell and ``probe=False`` forbade it.
    steps
        What is done, in order; empty where memory is simply shared.
    nbytes
        Bytes copied in all.
    error
        What `dlx.convert` raises, or None.
    leaves
        Plans of the arrays in a container, each array once, at the first place where it stands.
    """

    path: str
    source: ArrayInfo | None
    target: str
    device: Device | None
    outcome: str
    steps: tuple[Step, ...] = ()
    nbytes: int = 0
    error: DlxError | ExceptionGroup[DlxError] | None = None
    leaves: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        if self.leaves or self.outcome == "tree":
            arrays = f"{len(self.leaves)} array{'s' * (len(self.leaves) != 1)}"
            head = f"tree of {arrays} -> {self.target}: {self.outcome} ({self.nbytes:,} bytes copied)"
            return "\n".join([head, *(f"{leaf.path}: {leaf}" for leaf in self.leaves)])
        found = self.source or (self.error.source if isinstance(self.error, DlxError) else "")
        head = f"{found or 'unknown'} -> {self.target}: {self.outcome}"
        if self.error is not None:
            return f"{head}\n  {type(self.error).__name__}: {self.error}"
        return "\n  ".join([head, *map(str, self.steps)])


@dataclass(frozen=True, slots=True)
class Request:
    """The options of one call, checked."""

    target: Adapter
    device: Device | None = None
    copy: bool | None = None
    readonly: str = "copy"
    detach: bool = False
    stream: Any = None
    crossing: Crossing = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "crossing", Crossing(self.target, self.stream, self.device))


@dataclass(slots=True)
class Leaf:
    """One array on its way: what `transfer` needs to do what `plan` says, and what it holds meanwhile."""

    obj: Any
    source: Adapter
    request: Request
    info: ArrayInfo | None
    steps: list[Step] = field(default_factory=list)
    cures: list[Callable[[Any], Any]] = field(default_factory=list)
    fresh: bool = False  # a cure, or the producer, made new memory
    made_by_producer: bool = False
    view_device: Device | None = None  # relabel to this device
    view_flags: int | None = None  # replace the flags by these
    copy_order: bool | None = None  # copy; True keeps the order of dimensions
    copy_device: Device = HOST  # to here
    gather: bool = False  # make a compact copy where it is, before that
    device: Device | None = None  # where it says that it is, before it is exported
    moment: Moment = None  # when an exported tensor is ready
    repack: bool = False  # the copy packs or unpacks elements of less than a byte
    carried: DType | None = None  # hand over under this name, and view again
    give_address: bool = False  # there is no element, and the consumer wants an address
    plan: Plan | None = None
    tensor: Tensor | None = None  # exported, not yet handed over
    owned: Tensor | None = None  # taken from the producer

    def finish(self, outcome: str, device: Device | None, error: DlxError | None = None) -> None:
        """Write the plan."""
        steps = () if error is not None else tuple(self.steps)
        self.plan = Plan(
            path="",
            source=self.info,
            target=self.request.target.name,
            device=device,
            outcome=outcome,
            steps=steps,
            nbytes=sum(step.nbytes for step in steps),
            error=error,
        )

    def error(self, kind: type[DlxError], reason: str, fix: str) -> DlxError:
        """Return an error that names what was found and asked for."""
        return self.complete(kind(reason, fix=fix))

    def complete(self, error: DlxError) -> DlxError:
        """Tell an error of an inner layer what was found and asked for."""
        if not error.fix and error.__cause__ is None and isinstance(error, ProtocolError | LayoutError):
            error.fix = "Its producer gave what DLPack does not allow: mend it there."
        return error.complete(
            source=str(self.info or type_name(type(self.obj))),
            target=self.request.target.name,
            sharing=self.request.copy is False and isinstance(error, CopyRequiredError | ReadOnlyError),
        )


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


def refuse(leaf: Leaf, error: DlxError) -> None:
    """Settle a leaf with an error of an inner layer."""
    leaf.finish("refused", None, leaf.complete(error))


def refuse_failure(leaf: Leaf, cause: Exception) -> None:
    """Settle a leaf with an exception that came out of an adapter, or of an object that it asked."""
    refuse(leaf, adapter_failed(leaf.source, cause))


def adapter_failed(adapter: Adapter, cause: Exception) -> ConversionError:
    """Return the error for an exception that came out of an adapter; a MemoryError goes on as it is."""
    if isinstance(cause, MemoryError):
        raise cause
    error = ConversionError(f"{adapter.name} failed: {type(cause).__name__}: {cause}".rstrip("."))
    error.__cause__ = cause
    return error


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
        if (
            may
            and type(source).moved is Adapter.moved
            and (is_cuda(wanted) or (device is not None and is_cuda(device)))
        ):
            leaf.cures.clear()
            leaf.steps.clear()
            return False  # dlx moves it
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


# ---- with a tensor ---------------------------------------------------------------------------------------------------


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
    error = _freshness(leaf, tensor) or _place(leaf, tensor) or _obstacles(leaf, tensor)
    if error is not None:
        leaf.finish("refused", None, error)
        return
    if leaf.copy_order is None and leaf.request.copy and not leaf.fresh:
        error = _copy(leaf, tensor, "copy=True")
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
    place = leaf.copy_device if leaf.copy_order is not None else _device_of(leaf, tensor)
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


def _nearest(leaf: Leaf, device: Device, accepted: frozenset[int]) -> Device | None:
    """Return where memory goes that the consumer cannot hold where it is; None where nothing will do."""
    if device.type == lib.kDLCUDAManaged and lib.kDLCUDA in accepted:
        return Device(lib.kDLCUDA, device.id)
    if not (host_readable(device) or is_cuda(device)):
        return None
    home = leaf.request.target.home()
    return home if home.type in accepted else None


def _move(leaf: Leaf, tensor: Tensor, wanted: Device) -> DlxError | None:
    """Note that the array is copied to another device, or return why it cannot be."""
    device, target = tensor.device, leaf.request.target
    accepted = target.capabilities.device_types if target.capabilities is not None else None
    if accepted is not None and wanted.type not in accepted:
        reason = f"{target.name} {target.noun}s cannot be on {wanted}"
        return leaf.error(DeviceError, reason, "Leave device out.")
    reachable = wanted == HOST or wanted.type == lib.kDLCUDA
    if not reachable or not (host_readable(device) or is_cuda(device)):
        reason = f"it is on {device}, and dlx cannot move it to {wanted}"
        return leaf.error(DeviceError, reason, "Leave device out, or move it in its own framework first.")
    if leaf.request.copy is False:
        return leaf.error(CopyRequiredError, f"it is on {device}, and the result is on {wanted}", "Drop copy=False.")
    error = _copy(leaf, tensor, "")
    if error is None:
        leaf.copy_device = wanted
        del leaf.steps[-1]
        if is_cuda(device) and is_cuda(wanted) and _has_gaps(tensor, permuted=not leaf.copy_order):
            leaf.gather = True
            leaf.steps.append(Step("copy", f"made compact on {device}, devices copy runs to each other", tensor.nbytes))
        leaf.steps.append(Step("move", f"from {device} to {wanted}", tensor.nbytes))
    return error


def _has_gaps(tensor: Tensor, *, permuted: bool) -> bool:
    """Return whether the elements are not one run of memory, or not in row-major order if that counts as well."""
    layout = lib.dlx_layout(ffi.cast("DLTensor *", tensor_address(tensor)))
    odd = Layout.GAPS | Layout.ZERO | Layout.NEGATIVE
    return bool(layout & (odd | Layout.PERMUTED if permuted else odd))


def _device_of(leaf: Leaf, tensor: Tensor) -> Device:
    return leaf.view_device or tensor.device


def _place(leaf: Leaf, tensor: Tensor) -> DlxError | None:
    """Decide where the result will be. Pinned memory is host memory to a consumer that knows the host only."""
    request, device = leaf.request, tensor.device
    accepted = request.target.capabilities.device_types if request.target.capabilities else None
    wanted = request.device
    if wanted is None and accepted is not None and device.type not in accepted:
        wanted = _nearest(leaf, device, accepted)
    if wanted is not None and not same_device(wanted, device):
        if wanted.type == HOST.type and (host_readable(device) or device.type == lib.kDLCUDAManaged):
            leaf.view_device = HOST
            leaf.steps.append(Step("relabel", f"{device} memory is read by the host as it is"))
        elif (device.type, *wanted) == (lib.kDLCUDAManaged, lib.kDLCUDA, device.id):
            leaf.view_device = wanted
            leaf.steps.append(Step("relabel", f"{device} memory is memory of {wanted}"))
        else:
            error = _move(leaf, tensor, wanted)
            if error is not None:
                return error
    result = leaf.copy_device if leaf.copy_order is not None else _device_of(leaf, tensor)
    if not (request.stream is None or is_unordered(request.stream)) and host_readable(result):
        return leaf.error(StreamError, f"host memory has no stream, found stream={request.stream!r}", "Leave it out.")
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
        return _copy(leaf, tensor, "; ".join(row.sentence(tensor, target) for row in rows))
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


def _copy(leaf: Leaf, tensor: Tensor, why: str) -> DlxError | None:
    """Note that dlx makes a copy, or return why it cannot."""
    if not (host_readable(tensor.device) or is_cuda(tensor.device)):
        reason = f"it is on {tensor.device}, and dlx copies memory of the host and of CUDA devices only"
        return leaf.error(DeviceError, reason, "Copy it in its own framework first.")
    packed = tensor.dtype.bits * tensor.dtype.lanes % 8 and not tensor.flags & SUBBYTE_PADDED
    if leaf.repack and (tensor.dtype.bits >= 8 or tensor.dtype.lanes != 1):
        reason = f"dlx does not pack or unpack {tensor.dtype}"
        return leaf.error(LayoutError, reason, "Convert to 'dlx', which holds both.")
    place = _device_of(leaf, tensor) if leaf.copy_order is None else leaf.copy_device
    if leaf.repack and is_cuda(tensor.device) and is_cuda(place):
        reason = (
            f"dlx packs and unpacks {tensor.dtype} on the host only, and it would go from {tensor.device} to {place}"
        )
        return leaf.error(LayoutError, reason, "Pass device='cpu', and move the result, or convert to 'dlx'.")
    if packed and not contiguous(tensor.shape, tensor.strides):
        reason = f"its {tensor.dtype} elements are packed below one byte and not contiguous"
        return leaf.error(LayoutError, reason, "Make it contiguous in its own framework first.")
    capabilities = leaf.request.target.capabilities
    if leaf.copy_order is None:  # else it is moved, which is a copy
        leaf.copy_device = HOST if host_readable(place) else Device(lib.kDLCUDA, place.id)
        leaf.copy_order = bool(capabilities and capabilities.layouts & Layout.PERMUTED)
        leaf.steps.append(Step("copy", why, tensor.nbytes))
    return None
