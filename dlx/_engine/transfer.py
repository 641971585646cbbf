"""`Leaf`, the state of one array during a conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.foreign import exception_text
from dlx._core.tensor import Tensor, type_name
from dlx._core.types import Device, DType
from dlx._engine.plan import Plan, Step
from dlx._engine.request import HOST, Request
from dlx._engine.streams import Readiness
from dlx.adapter.base import Adapter
from dlx.errors import ConversionError, CopyRequiredError, DlxError, LayoutError, ProtocolError, ReadOnlyError
from dlx.typing import Outcome

__all__ = ["Leaf", "adapter_failed", "refuse", "refuse_failure"]


@dataclass(slots=True)
class Leaf:
    """The conversion of one array: what the planner decided, and what the executor holds meanwhile."""

    obj: Any
    source: Adapter
    request: Request
    info: ArrayInfo | None
    steps: list[Step] = field(default_factory=list)
    resolutions: list[Callable[[Any], Any]] = field(default_factory=list)
    fresh: bool = False  # a resolution, or the producer, made new memory
    made_by_producer: bool = False
    view_device: Device | None = None  # present the memory as that of this device
    view_flags: int | None = None  # replaces the tensor's flags
    copy_order: bool | None = None  # None: no copy; True: the copy keeps the order of dimensions
    copy_device: Device = HOST  # device of the copy
    gather: bool = False  # make a compact copy on its own device first
    device: Device | None = None  # its device before it is exported, as its adapter says
    readiness: Readiness = None  # when an exported tensor is ready
    repack: bool = False  # the copy packs or unpacks elements of less than a byte
    storage_dtype: DType | None = None  # export as this dtype, and view the result as the real one
    give_address: bool = False  # no element, and the consumer needs a non-null address
    plan: Plan | None = None
    tensor: Tensor | None = None  # exported, not yet passed to the consumer
    owned: Tensor | None = None  # consumed from the producer

    def finish(self, outcome: Outcome, device: Device | None, error: DlxError | None = None) -> None:
        """Set the plan."""
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

    def found(self) -> ArrayInfo | None:
        """Return what is known of the array: what its adapter said of it, or what was exported."""
        held = self.tensor if self.tensor is not None else self.owned
        if held is not None and (self.info is None or self.info.shape is None):
            protocols = self.info.protocols if self.info is not None else ()
            self.info = ArrayInfo.of_tensor(held, self.source.name, type(self.obj), protocols)
        return self.info

    def error(self, kind: type[DlxError], reason: str, fix: str) -> DlxError:
        """Return an error that names what was found and asked for."""
        return self.complete(kind(reason, fix=fix))

    def complete(self, error: DlxError, *, taken: bool = False) -> DlxError:
        """Add what was found and asked for to an error of an inner layer; `taken`: it is not the producer's error."""
        fixless = not error.fix and error.__cause__ is None and not taken
        if fixless and isinstance(error, ProtocolError | LayoutError):
            error.fix = "Its producer gave what DLPack does not allow: mend it there."
        return error.complete(
            source=str(self.found() or type_name(type(self.obj))),
            target=self.request.target.name,
            sharing=self.request.copy is False and isinstance(error, CopyRequiredError | ReadOnlyError),
        )


def refuse(leaf: Leaf, error: DlxError) -> None:
    """Settle a leaf with an error of an inner layer."""
    leaf.finish("refused", None, leaf.complete(error))


def refuse_failure(leaf: Leaf, cause: Exception) -> None:
    """Settle a leaf with an exception raised by an adapter, or by an object that it asked."""
    refuse(leaf, adapter_failed(leaf.source, cause))


def adapter_failed(adapter: Adapter, cause: Exception) -> ConversionError:
    """Return the error for an exception raised by an adapter; a MemoryError is raised again unchanged."""
    if isinstance(cause, MemoryError):
        raise cause
    error = ConversionError(f"{adapter.name} failed: {exception_text(cause)}")
    error.__cause__ = cause
    return error
