"""`Plan` and its steps: what a conversion does and why. `dlx.plan` returns one, and `dlx.convert` runs one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlx._core.array_info import ArrayInfo
from dlx._core.module import set_module
from dlx._core.text import SHOWN
from dlx._core.types import Device, DType
from dlx.errors import DlxError, written
from dlx.typing import Outcome

__all__ = ["Address", "Copy", "Plan", "Relabel", "Repack", "Resolve", "Step", "Unmark", "ViewAs"]


HOST = Device("cpu")
BYTES = DType("uint8")


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
    option
        The option of `convert` that asks for it, as (name, value); empty where none does.
    details
        As `dlx.errors.DlxError.details`, of `why`.
    """

    do: str
    why: str
    nbytes: int = 0
    option: tuple[str, Any] | tuple[()] = ()
    details: tuple[tuple[str, str], ...] = ()

    def reason(self, write: Callable[[str, Any], str] = written, *, brief: bool = False) -> str:
        """Return why it is done, its option written by ``write(name, value)``; `brief` leaves the details out."""
        why = self.why + "".join(text for _, text in self.details if not brief)
        return ": ".join(filter(None, (write(*self.option) if self.option else "", why)))

    def __str__(self) -> str:
        return f"{self.do}: {self.reason()}" + (f" ({self.nbytes:,} bytes)" if self.nbytes else "")


@dataclass(frozen=True, slots=True)
class Resolve(Step):
    """Ask the array's own framework for another array, before it is exported.

    Attributes
    ----------
    run
        ``run(obj)`` gives it.
    copies
        Whether it is in memory of its own.
    """

    run: Callable[[Any], Any] = field(default=lambda obj: obj, compare=False, repr=False)
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Relabel(Step):
    """Present the memory as that of another device, which reads it as it is."""

    device: Device = HOST


@dataclass(frozen=True, slots=True)
class Unmark(Step):
    """Pass read-only memory on without the flag."""


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """Copy to memory that dlx makes, in row-major order or, `keep_order`, in that of the source."""

    device: Device = HOST
    keep_order: bool = False


@dataclass(frozen=True, slots=True)
class Repack(Step):
    """Pack or unpack elements of less than a byte, in host memory."""


@dataclass(frozen=True, slots=True)
class Address(Step):
    """Give a tensor without elements an address that is not null."""


@dataclass(frozen=True, slots=True)
class ViewAs(Step):
    """Load the memory under another dtype of the same width, and view the result as the real one."""

    dtype: DType = BYTES


@set_module("dlx")
class Plan(NamedTuple):
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
    passed
        Of a container: (path, type) of all that is no array, and passes through as it is.
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
    passed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if self.leaves or self.outcome == "tree":
            arrays = f"{len(self.leaves)} array{'s' * (len(self.leaves) != 1)}"
            head = f"tree of {arrays} -> {self.target}: {self.outcome} ({self.nbytes:,} bytes copied)"
            lines = [head, *(f"{leaf.path}: {leaf}" for leaf in self.leaves), *self._refused(), *self._passing()]
            return "\n".join(lines)
        found = self.source or (self.error.source if isinstance(self.error, DlxError) else "")
        head = f"{found or 'unknown'} -> {self.target}: {self.outcome}"
        if self.error is not None:
            return f"{head}\n  {type(self.error).__name__}: {self.error}"
        return "\n  ".join([head, *map(str, self.steps)])

    def _refused(self) -> Iterator[str]:
        """Give a line for each error that is not a leaf's."""
        shown = {id(leaf.error) for leaf in self.leaves}
        errors = self.error.exceptions if isinstance(self.error, ExceptionGroup) else [self.error]
        for error in errors:
            if error is not None and id(error) not in shown:
                yield f"{type(error).__name__}: {error}"

    def _passing(self) -> Iterator[str]:
        """Give a line for each type that passes through, with the first places."""
        places: dict[str, list[str]] = {}
        for path, kind in self.passed:
            places.setdefault(kind, []).append(path)
        for kind, paths in places.items():
            more = f", and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
            yield f"passes through: {kind} at {', '.join(paths[:SHOWN])}{more}"
