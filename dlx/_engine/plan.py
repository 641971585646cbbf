"""`Plan` and its steps: what a conversion does and why. `dlx.plan` returns one, and `dlx.convert` runs one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST, Device, DType
from dlx._support.display import Shown, columns, table
from dlx._support.module import set_module
from dlx._support.text import SHOWN, amount, one_line
from dlx._support.tracebacks import REFUSALS, shorten
from dlx.errors import DlxError, format_option
from dlx.typing import Outcome

BYTES = DType("uint8")
_NUMBERS = {"bool", "int", "float", "complex"}


@set_module("dlx")
@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a conversion does.

    Attributes
    ----------
    do
        ``"detach"``, ``"resolve"``, ``"defer"``, ``"relabel"``, ``"view"``, ``"share"``, ``"copy"``, ``"move"``,
        ``"place"``: the result is committed to its device; or ``"order"``: one stream, or the host, waits for another.
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

    def reason(self, write: Callable[[str, Any], str] = format_option, *, brief: bool = False) -> str:
        """Return why it is done, its option formatted by ``write(name, value)``; `brief` leaves the details out."""
        why = self.why + "".join(text for _, text in self.details if not brief)
        return ": ".join(filter(None, (write(*self.option) if self.option else "", why)))

    def __str__(self) -> str:
        return f"{self.do}: {self.reason()}" + (f" ({self.nbytes:,} bytes)" if self.nbytes else "")


@dataclass(frozen=True, slots=True)
class Resolve(Step):
    """Ask the array's own framework for another array, before it is exported."""

    run: Callable[[Any], Any] = field(default=lambda obj: obj, compare=False, repr=False)
    copies: bool = False  # whether what `run` returns is in new memory


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


class _Fields(NamedTuple):
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


@set_module("dlx")
class Plan(Shown, _Fields):
    """What a conversion will do, and why; it holds no array, but see `run`.

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
        `leaves`), ``"deferred"`` (a collection whose arrays are converted when they are computed), or ``"unknown"``
        where only an export could tell and ``probe=False`` forbade it.
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

    _again: tuple[Any, ...] = ()  # of the plan that `dlx.plan` returned: a function, and what to call it with

    @property
    def ok(self) -> bool:
        """Whether the conversion is not refused, as far as is known; a plan is true if it is."""
        return self.outcome != "refused"

    def __bool__(self) -> bool:
        return self.ok

    def run(self) -> Any:
        """Convert what was planned, with the same arguments, and return the result of `dlx.convert`.

        Raises
        ------
        DlxError, ExceptionGroup
            As `dlx.convert`; `error`, where the plan is a refusal.
        ConversionError
            If the source is gone, or has changed so that something else would be done than the plan says.
        TypeError
            If this is no plan that `dlx.plan` returned, but a part of one, or a copy.

        Notes
        -----
        A plan refers weakly to the source, and to `like`, so that both must be alive still. What allows no weak
        reference is kept alive by the plan: lists, tuples, dicts and bytes, with what they hold. Before anything is
        converted the source is planned once more, and compared with this plan. Its values may have changed.

        Examples
        --------
        >>> import dlx
        >>> plan = dlx.plan(b"abc", to="dlx")
        >>> plan.run().shape if plan else plan.error
        (3,)
        """
        if self.error is not None:
            raise copy(self.error) from self.error.__cause__  # whose frames would be kept alive by the plan
        if not self._again:
            raise TypeError("only what dlx.plan returned can be run, neither a part of it nor a copy")
        run, *given = self._again
        try:
            return run(self, *given)
        except REFUSALS as error:
            shorten(error)
            raise

    def differs(self, other: Plan) -> bool:
        """Return whether another plan does something else: other steps, another place, other arrays."""
        return (
            (self.path, self.target, self.device, self.outcome, self.steps)
            != (other.path, other.target, other.device, other.outcome, other.steps)
            or len(self.leaves) != len(other.leaves)
            or any(mine.differs(its) for mine, its in zip(self.leaves, other.leaves, strict=True))
        )

    def __getstate__(self) -> None:
        return None  # a copy, or what is unpickled, knows no source

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
        """Give a line for each type that passes through, with the first places; first of all, if there is no array."""
        if not self.leaves and self.error is None:
            is_number = any(kind in _NUMBERS for _, kind in self.passed)
            advice = " Of a list of numbers, numpy.array makes one." * is_number
            yield f"nothing is converted: no array is in it.{advice}"
        places: dict[str, list[str]] = {}
        for path, kind in self.passed:
            places.setdefault(kind, []).append(path)
        for kind, paths in places.items():
            more = f", and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
            yield f"passes through: {kind} at {', '.join(paths[:SHOWN])}{more}"

    def __repr__(self) -> str:
        if not self._is_tree():
            head, *rest = map(one_line, str(self).split("\n"))
            return "\n".join([f"<dlx.Plan {head}>", *(f"  {line.strip()}" for line in rest)])
        rows, below = self._rows(10)
        lines = [f"<dlx.Plan {self._head()}>", *(columns(rows) if rows else ())]
        return "\n".join([*lines, *(f"  {line}" for line in below)])

    def _is_tree(self) -> bool:
        return bool(self.leaves) or self.outcome == "tree"

    def _head(self) -> str:
        """Return what becomes of how many arrays."""
        if not self._is_tree():
            return f"-> {self.target}" + (f" on {self.device}" if self.device is not None else "")
        arrays = f"{len(self.leaves):,} array{'s' * (len(self.leaves) != 1)}"
        copied = f" ({amount(self.nbytes)} copied)" if self.nbytes else ""
        return f"tree of {arrays} -> {self.target}: {self._counts(self.leaves) or self.outcome}{copied}"

    @staticmethod
    def _counts(plans: tuple[Plan, ...] | list[Plan]) -> str:
        fates = Counter(plan._fate() for plan in plans)
        return ", ".join(f"{count:,} {fate}" for fate, count in fates.most_common())

    def _fate(self) -> str:
        """Return the outcome, or that memory is shared and viewed as another dtype."""
        viewed = self.outcome == "shared" and any(step.do == "view" for step in self.steps)
        return "viewed" if viewed else self.outcome

    def _row(self) -> list[str]:
        """Return path, array, outcome, bytes copied and why."""
        error = self.error
        found = self.source or (error.source if isinstance(error, DlxError) else "") or "unknown"
        why = "; ".join(step.reason() for step in self.steps)
        if isinstance(error, DlxError):
            why = f"{type(error).__name__}: {error.reason}. {error.fix}"
        nbytes = amount(self.nbytes) if self.nbytes else ""
        return [one_line(self.path), one_line(str(found)), self._fate(), nbytes, one_line(why)]

    def _rows(self, most: int) -> tuple[list[list[str]], list[str]]:
        """Return the rows of at most so many arrays, and lines about the rest; first of all what is not shared."""
        leaves = list(self.leaves)
        if len(leaves) > most:
            ranks = {"refused": 0, "unknown": 1, "copied": 2}
            chosen = sorted(range(len(leaves)), key=lambda i: ranks.get(leaves[i].outcome, 3))[:most]
            kept = set(chosen)
            rest = [leaf for i, leaf in enumerate(leaves) if i not in kept]
            leaves = [leaves[i] for i in sorted(chosen)]
            below = [f"and {len(rest):,} more: {self._counts(rest)}"]
        else:
            below = []
        below += map(one_line, (*self._refused(), *self._passing()))
        return [leaf._row() for leaf in leaves], below

    def _table(self) -> str:
        rows, below = self._rows(50) if self._is_tree() else ([self._row()], [])
        return table(one_line(self._head()), ("path", "array", "outcome", "copied", "why"), rows, below)

    def __rich_repr__(self) -> Iterator[Any]:
        yield "target", self.target
        yield "outcome", self.outcome
        if self._is_tree():
            rows, below = self._rows(10)
            yield "leaves", {row[0]: row[2] for row in rows}
            yield "more", below, []
            return
        yield "source", self.source, None
        yield "steps", [str(step) for step in self.steps], []
        yield "error", self.error, None
