"""Convert arrays in stages: describe all, decide, export all, order streams, load. One array is a batch of one.

Errors that need no call of a producer are raised before the first call. After a failure, results are released and
consumed capsules are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import prod
from typing import Any

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.cuda import is_cuda, readiness_of
from dlx._core.native import Tensor
from dlx._core.tensor import dense
from dlx._core.types import HOST, SUBBYTE_PADDED, Device, DType, host_readable
from dlx._engine import trace
from dlx._engine.casting import Casts, can_cast
from dlx._engine.compound import Compounds, name_of
from dlx._engine.executor import execute, is_read_in_place, resolve_blockers
from dlx._engine.failures import RAISING, Failures, Locate
from dlx._engine.plan import Cast, Copy, Relabel, Resolve
from dlx._engine.planner import (
    DEFERRED,
    UNDECIDED,
    Decision,
    casts_itself,
    check_copies,
    decide,
    decide_before_export,
    defer_chunks,
    keeps_order,
    share_unchanged,
)
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.sources import abstract_tensor, adapter_call, info_of, mark_immutable, raise_as_error_of
from dlx._engine.streams import Readiness, StreamSync, takes_stream
from dlx._engine.tree import Tree
from dlx._protocols.arrow import Column
from dlx._registry.generic import TENSOR
from dlx._registry.target import Target
from dlx._support.reflect import exception_text, foreign_error
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import CopyRequiredError, DlxError, LayoutError, ProtocolError, ReadOnlyError


class Transfer:
    """One array of a batch, with the results of each stage."""

    __slots__ = (
        *("claimed", "decision", "deferred", "description", "device", "known_info", "needs_export", "obj", "readiness"),
        *("request", "resolution", "source", "stream_device", "tensor", "written"),
    )

    def __init__(self, obj: Any, source: Adapter, request: Request) -> None:
        self.obj, self.source, self.request = obj, source, request
        self.description: Any = None  # `Description.info`
        self.device: Device | None = None  # `Description.device`
        self.needs_export = False
        self.stream_device: Device | None = None  # of device memory; its export takes a stream
        self.resolution = self.decision = UNDECIDED  # steps before the export, and all steps
        self.tensor: Tensor | None = None  # before it is passed to the consumer
        self.readiness: Readiness = None  # when the memory is ready
        self.claimed: Tensor | None = None  # consumed from the producer
        self.deferred: Any = None  # a collection that converts its chunks later
        self.known_info: ArrayInfo | None = None  # cache of `info`
        self.written = False  # whether the receiver of the result writes to it

    def info(self) -> ArrayInfo:
        """Return the description of the array, by its adapter or its tensor."""
        tensor = self.tensor if self.tensor is not None else self.claimed
        if self.known_info is None or (self.known_info.shape is None and tensor is not None):
            with adapter_call(self.source):
                self.known_info = info_of(self.description, self.source, self.obj, tensor, self.device)
        return self.known_info

    def text(self) -> str:
        """Return `info` as text for an error, or the type if the description fails."""
        try:
            return str(self.info())
        except DlxError:
            return name_of(self.obj)

    def plan_export(self) -> Tensor | None:
        """Return the tensor of the export, from the description only; None if only an export shows it."""
        obj, source, before, tensor = self.obj, self.source, self.resolution, self.tensor
        if tensor is not None:
            return mark_immutable(tensor, source)
        if before.copies:  # the resolution would copy; its result is contiguous
            cast = next((step.dtype for step in before.steps if isinstance(step, Cast)), None)
            return None if self.needs_export else _abstract_copy(self.info(), source, self.device, cast)
        described, needs_export = self.description, self.needs_export
        with adapter_call(source):
            if before.steps:
                obj = resolve_blockers(obj, before.steps, source)
                if isinstance(obj, Tensor):  # made by the resolution
                    return mark_immutable(obj, source)
                again = source.describe(obj)
                described, needs_export, tensor = again.info, again.needs_export, again.tensor
            if tensor is None and not needs_export and described is not None:
                tensor = abstract_tensor(info_of(described, source, obj, None) if before.steps else self.info(), obj)
        return None if tensor is None else mark_immutable(tensor, source)

    def restore(self) -> tuple[str, ...]:
        """Undo `Arrays.consume`; return the adapter's errors, for notes."""
        claimed, self.claimed = self.claimed, None
        restore = self.source.arrays.restore
        if claimed is not None and restore is not None:
            try:
                restore(self.obj, claimed)
            except MemoryError:
                raise
            except Exception as failure:
                return (f"{self.source.name} failed to restore it: {exception_text(failure)}",)
        return ()

    def complete(self, error: DlxError, *, consumed: bool = False) -> DlxError:
        """Add source and target to an error of an inner layer; `consumed` means that the consumer failed."""
        request = self.request
        if isinstance(error, LayoutError) and error.__cause__ is None and not consumed:
            error.complete(fix=ProtocolError.usual_fix)
        sharing = request.copy is False and isinstance(error, CopyRequiredError | ReadOnlyError)
        return error.complete(source=self.text(), target=request.target.name, sharing=sharing)


def _abstract_copy(info: ArrayInfo, source: Adapter, found: Device | None, cast: DType | None) -> Tensor | None:
    device, dtype = info.device or found, cast or info.dtype
    if info.shape is None or dtype is None or device is None:
        return None
    # Some frameworks import other elements than they export.
    padded = dtype.bits < 8 and info.nbytes == prod(info.shape)
    # The address is never read.
    return native.tensor_new(
        source.arrays.alignment, info.shape, None, dtype, device, SUBBYTE_PADDED if padded else 0, None
    )


def not_writable(because: str = "") -> ReadOnlyError:
    """Return the error for an array in `writes` that is read-only, or copied for a reason without a way back."""
    reason = f"the function writes to it (writes=), and {because or 'it is read-only'}"
    return ReadOnlyError(reason, fix="Return a new array from the function." if because else "Pass a writable array.")


def cast_host(obj: Any, source: Adapter, target: Target, casts: Casts) -> Any:
    """Return a host array of the fast path, cast for a target or unchanged; None if Python must plan it."""
    tensor = obj.share_plain() if type(obj) is Column else FAST_PATH._borrow(obj, TENSOR.name, True)
    if type(tensor) is not Tensor or not tensor.is_host:
        return None
    old, new = tensor.dtype, casts.dtypes.get(tensor.dtype.name)
    if new is None:
        return None if casts.at_root and casts.floating not in (None, old) else obj
    if trace.observers:
        return None
    if source is target.source and casts_itself(source, old, new):
        try:
            return source.dtypes.cast(obj, new)
        except MemoryError:
            raise
        except Exception:  # the planned call raises it
            return None
    if not can_cast(old, new, tensor.device):
        return None
    cast = native.tensor_copy(tensor, keeps_order(target), 0, new)
    with contextlib.suppress(DlxError):  # raised by the planned call
        return None if target.over(cast).check(cast) else cast
    return None


class Batch:
    """The conversion of arrays to one target; `to` is the caller's argument if the fast path may be used."""

    __slots__ = (
        *("_borrowed", "_may_defer", "_sync", "_transfers", "failures", "objs", "path", "request", "results"),
        *("sources", "to", "tree", "written"),
    )

    def __init__(
        self,
        request: Request,
        objs: list[Any],
        sources: list[Adapter],
        path: Callable[[int], tuple[Any, ...]] | None = None,
        failures: Failures = RAISING,
        to: Any = None,
    ) -> None:
        self.request, self.objs, self.sources = request, objs, sources
        self.path, self.failures, self.to = path or (lambda i: ()), failures, to
        self.results: list[Any] = [None] * len(objs)
        self._borrowed: list[tuple[int, Any]] = []  # tensors of the fast path
        self._transfers: dict[int, Transfer] = {}
        self._sync: StreamSync | None = None
        self._may_defer = request.later
        self.written: frozenset[int] = frozenset()  # indices of arrays that the caller writes to
        self.tree: Tree | None = None  # of `convert_tree`: the fast path may copy, and `is_copied` does not know it

    def sync(self) -> StreamSync:
        """Return the stream synchronization of this call, which orders each pair of streams once."""
        if self._sync is None:
            self._sync = StreamSync(
                self.request.target, self.request.stream, self.request.device, wait=self.request.wait
            )
        return self._sync

    def run(self) -> list[Any]:
        """Convert all arrays, or none; return the results in order."""
        try:
            self._prepare(brief=False)
            traced = [self._trace_event(transfer) for transfer in self._transfers.values()] if trace.observers else ()
            self._load()
            if self.failures.errors:
                self.failures.check()
            for event in traced:
                trace.record(*event)
            return self.results
        except BaseException as error:
            self.undo(error)
            raise

    def _trace_event(self, transfer: Transfer) -> tuple[Any, ...]:
        """Return the trace record of one array, before the consumer gets it."""
        before, tensor = transfer.resolution, transfer.tensor
        chosen = before if tensor is None else self.decide(transfer, tensor)
        nbytes = sum(step.nbytes for step in chosen.steps)
        return transfer.info(), self.request.target.name, chosen.outcome, chosen.steps, nbytes

    def tensors(self) -> list[Tensor]:
        """Return tensors of all arrays, to read them immediately; no consumer is called and no capsule consumed."""
        self._may_defer = False
        self._prepare(brief=True)
        for i, borrowed in self._borrowed:
            self.results[i] = borrowed
        for i, transfer in self._transfers.items():
            tensor = transfer.tensor
            self.results[i] = (
                resolve_blockers(transfer.obj, transfer.resolution.steps, transfer.source) if tensor is None else tensor
            )
        return self.results

    def is_copied(self, i: int) -> bool:
        """Return whether array number `i` was copied."""
        transfer = self._transfers.get(i)
        return transfer is not None and "copied" in (transfer.resolution.outcome, transfer.decision.outcome)

    def took_fast_path(self, i: int) -> bool:
        """Return whether array number `i` took the fast path, which supports host memory only."""
        return i not in self._transfers

    def readiness(self, i: int) -> Readiness:
        """Return when array number `i` of `tensors` is ready."""
        transfer, tensor = self._transfers.get(i), self.results[i]
        if transfer is not None and transfer.readiness is not None:
            return transfer.readiness
        return readiness_of(tensor) if is_cuda(tensor.device) else None

    def _prepare(self, *, brief: bool) -> None:
        """Run all stages before `_load`; after them only a consumer can fail."""
        to, borrow, request = self.to, FAST_PATH._borrow, self.request
        without_casts = request if request.casts is None else request._replace(casts=None)
        for i, obj in enumerate(self.objs):
            keeps_dtype = request.casts is None or (self.tree is not None and self.tree.is_index(i))
            options = without_casts if keeps_dtype else request
            quick = None if to is None else self._find_quick(i, options)
            unmarks = request.readonly == "share" and i not in self.written
            copies = self.tree is not None and options.copy is None and request.readonly == "copy"
            borrowed = None if quick is None else borrow(quick, to, brief, unmarks, copies)
            if borrowed is None or (i in self.written and borrowed.readonly):  # `export` refuses the latter
                self._transfers[i] = Transfer(obj, self.sources[i], options)
                self._transfers[i].written = i in self.written
            elif borrowed is quick:
                self.results[i] = borrowed
            else:
                self._borrowed.append((i, borrowed))
        self._each(self.describe)
        self.failures.can_pass = False  # from here on, the target refuses an array
        if len(self._transfers) > 1 or self.failures.collect:
            self._each(self._preview)
        self._each(self.export)
        if self.failures.errors:
            self.failures.check()
        if self._sync is not None:
            self._each(self._order)
            if self.failures.errors:
                self.failures.check()

    def _find_quick(self, i: int, request: Request) -> Any:
        """Return what the fast path takes for array number `i`: the array, its cast, a column's tensor; None: none."""
        obj, copy = self.objs[i], request.copy
        if request.casts is not None:
            cast = None if copy is False else cast_host(obj, self.sources[i], request.target, request.casts)
            return None if copy and cast is obj else cast
        if copy or (request.device and self.tree is not None and self.sources[i] is request.target.source):
            return None
        if isinstance(obj, Column):
            return None if trace.observers else obj.share_plain()
        return obj

    def _each(self, stage: Callable[[Transfer], None]) -> None:
        """Run one stage for every array; an array that fails is dropped from later stages."""
        for i, transfer in list(self._transfers.items()):
            try:
                stage(transfer)
            except DlxError as error:
                del self._transfers[i]
                self._keep(i, transfer.complete(error))
                del transfer

    def _keep(self, i: int, error: DlxError) -> bool:
        """Return whether array number `i` stays as it is, because of an error that is reported otherwise."""
        whole, place = (-1, self.path(i)) if self.tree is None else (self.tree.whole(i), self.tree.place(i))
        try:
            is_kept = self.failures.keep(error, self.path(i), whole, place)
        finally:
            del error  # break the cycle with this frame
        if is_kept:
            self.results[i] = self.objs[i]
        return is_kept

    def describe(self, transfer: Transfer) -> None:
        """Describe one array and plan the steps before its export."""
        obj, source = transfer.obj, transfer.source
        try:
            transfer.description, blockers, transfer.tensor, transfer.needs_export, transfer.device = source.describe(
                obj
            )
            request, maps = transfer.request, self._may_defer and source.arrays.map_chunks is not None
            later = defer_chunks(obj, source, transfer.info, request) if maps else None
            if later is not None:
                transfer.resolution, transfer.deferred = DEFERRED, later
            elif blockers or source is request.target.source or request.casts is not None:
                transfer.resolution = decide_before_export(obj, source, blockers, transfer.info, request)
            on_host = transfer.device == HOST if transfer.tensor is None else transfer.tensor.is_host
            if transfer.resolution.outcome == "unknown" and not on_host:
                self._reach(transfer)
        except Exception:
            raise_as_error_of(source)
        if transfer.tensor is not None and not (transfer.tensor.is_host or transfer.resolution.steps):
            self._gather(transfer, transfer.tensor)
        if transfer.resolution.steps or transfer.resolution.outcome != "unknown":
            transfer.tensor = None

    def _gather(self, transfer: Transfer, tensor: Tensor) -> None:
        """Have a framework make its device array contiguous with one kernel; dlx would copy each run."""
        if not is_cuda(tensor.device) or dense(tensor) or type(transfer.source).copy is Adapter.copy:
            return
        try:
            steps = decide(tensor, transfer.resolution, transfer.source, transfer.request, self.sync).steps
        except MemoryError:
            raise
        except Exception:
            return  # a later stage raises it
        for step in steps:
            if isinstance(step, Copy):
                why = ", ".join(filter(None, (step.why, f"made contiguous by {transfer.source.name}")))
                gather = Resolve(
                    "copy", why, tensor.nbytes, step.option, step.details, run=transfer.source.copy, copies=True
                )
                transfer.resolution = Decision((gather,), copies=True)
                return

    def _reach(self, transfer: Transfer) -> None:
        """Raise if dlx cannot order work on the array's device."""
        if not takes_stream(transfer.source):
            return
        device = transfer.device if transfer.tensor is None else transfer.tensor.device
        if device is None:
            device = (
                transfer.source.devices.of(transfer.obj) if transfer.description is None else transfer.info().device
            )
        if device is not None and not host_readable(device):
            transfer.stream_device = device
            self.sync().reach(device)

    def _preview(self, transfer: Transfer) -> None:
        """Decide by the description, without a call of the producer."""
        if transfer.tensor is not None:
            self.export(transfer)
        elif transfer.resolution.outcome == "unknown" and (transfer.resolution.steps or not transfer.needs_export):
            tensor = transfer.plan_export()
            if tensor is not None:
                self.decide(transfer, tensor)

    def export(self, transfer: Transfer) -> None:
        """Export and decide, without consuming a capsule."""
        before, source, tensor, readiness = transfer.resolution, transfer.source, transfer.tensor, None
        if before.outcome != "unknown" or transfer.decision is not UNDECIDED:
            return
        try:
            if tensor is not None:
                if not tensor.is_host:
                    readiness = self.sync().readiness_of_described(source, transfer.obj, tensor)
            else:
                obj = self._resolve(transfer) if before.steps else transfer.obj
                if transfer.stream_device is not None:
                    tensor, readiness = self.sync().export(source, obj, transfer.stream_device)
                else:
                    tensor = source.export(obj)
                    if not tensor.is_host:
                        device = None if transfer.description is None else transfer.info().device
                        readiness = self.sync().readiness_of_export(source, obj, tensor, device)
        except Exception:
            raise_as_error_of(source)
        transfer.readiness = readiness
        transfer.tensor = mark_immutable(tensor, source) if source.arrays.immutable and not before.copies else tensor
        if transfer.written and transfer.tensor.readonly and not before.copies:
            raise not_writable()
        unchanged = share_unchanged(transfer.tensor, before, source, transfer.request)
        transfer.decision = self.decide(transfer, transfer.tensor) if unchanged is None else unchanged

    def _resolve(self, transfer: Transfer) -> Any:
        """Run the steps before the export."""
        before = transfer.resolution
        if before.copies or before.outcome == "copied":
            device = transfer.info().device
            place = before.device or self.request.device or device
            if is_cuda(device) or is_cuda(place):
                self.sync().ask_copy(transfer.source, device, place)
        return resolve_blockers(transfer.obj, before.steps, transfer.source)

    def decide(self, transfer: Transfer, tensor: Tensor) -> Decision:
        """Return the decision of `planner.decide`."""
        try:
            decision = decide(tensor, transfer.resolution, transfer.source, transfer.request, self.sync)
            if not tensor.is_host:
                check_copies(decision, tensor)
            return decision
        except Exception:
            raise_as_error_of(self.request.target.adapter)

    def _order(self, transfer: Transfer) -> None:
        """Make the reader of an array wait for it."""
        tensor, steps = transfer.tensor, transfer.decision.steps
        if tensor is not None and is_read_in_place(steps):
            relabelled = next((step.device for step in steps if isinstance(step, Relabel)), None)
            self.sync().order(tensor, transfer.readiness, relabelled)

    def _load(self) -> None:
        objs, results = self.objs, self.results
        for i, borrowed in self._borrowed:
            try:
                results[i] = FAST_PATH._load(borrowed, objs[i], self.to)
                if results[i] is NotImplemented:  # a new plugin has dropped all pairs
                    transfer = Transfer(objs[i], self.sources[i], self.request._replace(casts=None))  # cast already
                    transfer.tensor = borrowed
                    self.export(transfer)
                    self._transfers[i] = transfer
            except DlxError as error:
                self._keep(i, error)
        self._borrowed.clear()
        for i, transfer in self._transfers.items():
            try:
                results[i] = self._load_one(transfer)
            except DlxError as error:
                if self._keep(i, error):
                    transfer.restore()

    def _load_one(self, transfer: Transfer) -> Any:
        """Consume one array and load it into the target; `undo` restores it if the consumer fails."""
        source, target = transfer.source, self.request.target
        tensor, transfer.tensor = transfer.tensor, None
        if transfer.deferred is not None:
            return transfer.deferred
        if tensor is None:  # source and target are one framework
            try:
                return self._resolve(transfer)
            except DlxError as error:
                transfer.complete(error)
                raise
        consume, consumed = source.arrays.consume, False
        transfer.claimed = tensor  # for an interrupt between `consume` and the assignment
        try:
            if consume is not None:
                shared = not transfer.resolution.copies and is_read_in_place(transfer.decision.steps)
                tensor = transfer.claimed = consume(transfer.obj, tensor, shared)
            consumed = True
            return execute(transfer.decision.steps, tensor, transfer.readiness, source, self.request, self.sync)
        except Exception as error:
            tensor = None
            if not consumed:
                transfer.claimed = None  # `consume` failed, so there is nothing to undo
            if isinstance(error, DlxError):
                transfer.complete(error, consumed=consumed)
                raise
            what = f"{target.name} refused it:" if consumed else f"{source.name} failed:"
            raise transfer.complete(foreign_error(what, error), consumed=consumed) from error

    def undo(self, error: BaseException) -> None:
        """Release all results and restore consumed arrays."""
        self.results.clear()
        self._borrowed.clear()
        consumed = [transfer for transfer in self._transfers.values() if transfer.claimed is not None]
        failed: BaseException | None = None
        for transfer in consumed:
            try:
                for note in transfer.restore():
                    error.add_note(note)
            except BaseException as failure:  # raised after the others are restored
                failed = failed or failure
        for transfer in self._transfers.values():
            transfer.tensor = transfer.claimed = None  # unconsumed capsules keep their names
        if failed is not None:
            raise failed


def convert_tree(
    root: Any,
    handler: Container,
    request: Request,
    *,
    strict: bool,
    errors: str,
    to: Any = None,
    locate: Locate | None = None,
) -> Any:
    """Convert every array in a container and rebuild the container; `to` as in `Batch`."""
    collect, passes = errors == "collect", errors == "pass"
    is_call = locate is None  # not an element of a view
    failures = Failures(request.target.name, collect=collect, passes=passes, can_pass=is_call, locate=locate)
    compounds = Compounds(request.for_root() if is_call else request)
    tree = Tree(root, handler, failures, strict=strict, compounds=compounds)
    if is_call and tree.is_one_array():
        request = request.for_root()
    batch = Batch(request, tree.arrays, tree.sources, tree.path, failures, to)
    batch.tree = tree
    new: Any = None
    try:
        if is_call:
            tree.check_found()
        new = tree.rebuild(batch.run(), request.target.name)
        failures.check()
        return new
    except BaseException as error:
        new = None
        tree.forget()
        batch.undo(error)
        raise
