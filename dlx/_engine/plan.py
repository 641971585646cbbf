"""`Plan` and `Step`: what a conversion does and why, as `dlx.plan` returns it."""

from __future__ import annotations

from dataclasses import dataclass

from dlx._core.array_info import ArrayInfo
from dlx._core.module import set_module
from dlx._core.types import Device
from dlx.errors import DlxError
from dlx.typing import Outcome

__all__ = ["Plan", "Step"]


@set_module("dlx")
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


@set_module("dlx")
@dataclass(frozen=True)
class Plan:
    """What a conversion will do, and why; it holds no memory.

    Attributes
    ----------
    path
        Path inside a container; empty at the root.
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
        Plans of the arrays in a container, each array once, under the first path where it stands.
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
