"""ONE array on its way: the options of its call, what is known of it, and the plan that comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlx.abi import Device, DType
from dlx.adapter import Adapter
from dlx.crossing import Crossing, Moment
from dlx.errors import ConversionError, CopyRequiredError, DlxError, LayoutError, ProtocolError, ReadOnlyError
from dlx.foreign import exception_text
from dlx.native import Tensor
from dlx.tensor import ArrayInfo, type_name
from dlx.typing import Outcome

__all__ = ["HOST", "Leaf", "Plan", "Request", "Step", "adapter_failed", "refuse", "refuse_failure"]

HOST = Device("cpu")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a conversion does.

    Attributes
    ----------
    do
        ``"detach"``, ``"resolve"``, ``"relabel"``, ``"view"``, ``"share"``, ``"copy"``, ``"move"``, or ``"order"``: one
        stream, or the host, waits for another.
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
    outcome: Outcome
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
    is_plain: bool = field(init=False, compare=False, repr=False)  # memory is wanted where and as it is

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.device is None and not self.copy and self.stream is None)
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

    def finish(self, outcome: Outcome, device: Device | None, error: DlxError | None = None) -> None:
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
        """Tell an error of an inner layer what was found and asked for; `taken`: it is not the producer's."""
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
    """Settle a leaf with an exception that came out of an adapter, or of an object that it asked."""
    refuse(leaf, adapter_failed(leaf.source, cause))


def adapter_failed(adapter: Adapter, cause: Exception) -> ConversionError:
    """Return the error for an exception that came out of an adapter; a MemoryError goes on as it is."""
    if isinstance(cause, MemoryError):
        raise cause
    error = ConversionError(f"{adapter.name} failed: {exception_text(cause)}")
    error.__cause__ = cause
    return error
