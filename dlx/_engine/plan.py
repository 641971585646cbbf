"""`Plan` and its steps, which `dlx.plan` returns and `dlx.convert` runs."""

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
    """One step of a conversion.

    Attributes
    ----------
    do
        ``"detach"``, ``"resolve"``, ``"cast"``, ``"defer"``, ``"relabel"``, ``"view"``, ``"share"``, ``"copy"``,
        ``"move"``, ``"place"`` (commits the result to its device), or ``"order"`` (a stream or the host waits for
        another stream).
    why
        The reason, as text.
    nbytes
        Bytes that the step moves.
    option
        The option of `convert` that requires the step, as (name, value); else empty.
    details
        Parts of the reason that depend on the array, as in `dlx.errors.DlxError.details`.
    """

    do: str
    why: str
    nbytes: int = 0
    option: tuple[str, Any] | tuple[()] = ()
    details: tuple[tuple[str, str], ...] = ()

    def reason(self, write: Callable[[str, Any], str] = format_option, *, brief: bool = False) -> str:
        """Return the reason, with the option formatted by ``write(name, value)``; `brief` omits the details."""
        why = self.why + "".join(text for _, text in self.details if not brief)
        return ": ".join(filter(None, (write(*self.option) if self.option else "", why)))

    def __str__(self) -> str:
        return f"{self.do}: {self.reason()}" + (f" ({self.nbytes:,} bytes)" if self.nbytes else "")


@dataclass(frozen=True, slots=True)
class Resolve(Step):
    """Have the array's framework make another array before the export."""

    run: Callable[[Any], Any] = field(default=lambda obj: obj, compare=False, repr=False)
    copies: bool = False  # whether `run` returns an array in new memory


@dataclass(frozen=True, slots=True)
class Cast(Resolve):
    """Have a framework make an array with another dtype: the source before the export, or the target at the end."""

    dtype: DType | None = None
    at_end: bool = False


@dataclass(frozen=True, slots=True)
class Relabel(Step):
    """Present the memory as memory of another device that can read it."""

    device: Device = HOST


class Unmark(Step):
    """Pass read-only memory on without the flag."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """Copy to new memory of dlx, in row-major order or, if `keep_order`, in the source's order; `dtype`: cast it."""

    device: Device = HOST
    keep_order: bool = False
    dtype: DType | None = None


class Repack(Step):
    """Pack or unpack elements of less than a byte, in host memory."""

    __slots__ = ()


class Address(Step):
    """Give a tensor without elements a non-null address."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ViewAs(Step):
    """Import the memory as another dtype of the same width, and view the result as the real dtype."""

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
    """The steps and outcome of a conversion.

    Attributes
    ----------
    path
        Path inside a container; empty at the root.
    source
        Description of the array; None if unknown.
    target
        Name of the target framework.
    device
        Device of the result; None if the conversion is refused or the device is unknown.
    outcome
        ``"same"`` (the object itself, or the array in a wrapper), ``"shared"``, ``"copied"``, ``"refused"``,
        ``"passed"`` (with ``errors="pass"``: it stays as it is, because of `error`), ``"tree"`` (a container: see
        `leaves`), ``"deferred"`` (a collection that converts its chunks when they are computed), or ``"unknown"`` if
        only an export shows it and `probe` is False.
    steps
        Steps in order; empty if memory is shared unchanged.
    nbytes
        Total number of bytes copied.
    error
        The error that `dlx.convert` raises, or the reason of ``"passed"``; else None.
    leaves
        Plans of the arrays in a container, each array once, with its first path.
    passed
        For a container: (path, type) of each object that isn't an array and is passed through unchanged.
    """

    _again: tuple[Any, ...] = ()  # only in plans of `dlx.plan`: a function and its arguments

    @property
    def ok(self) -> bool:
        """Whether no refusal is known; also the truth value of the plan."""
        return self.outcome != "refused"

    def __bool__(self) -> bool:
        return self.ok

    def run(self) -> Any:
        """Convert the planned object with the same arguments and return the result of `dlx.convert`.

        Raises
        ------
        DlxError, ExceptionGroup
            As `dlx.convert`; `error`, if the plan is a refusal.
        ConversionError
            If the source no longer exists, or has changed so that the steps would differ.
        TypeError
            If this is a part or a copy of a plan that `dlx.plan` returned.

        Notes
        -----
        A plan refers weakly to the source and to `like`, so both must still be alive. It keeps objects without weak
        references alive: lists, tuples, dicts and bytes, with their contents. Before the conversion, the source is
        planned again and compared with this plan. Its values may have changed.

        Examples
        --------
        >>> import dlx
        >>> plan = dlx.plan(b"abc", to="dlx")
        >>> plan.run().shape if plan else plan.error
        (3,)
        """
        if self.error is not None:
            raise copy(self.error) from self.error.__cause__  # a copy: the plan must not keep frames alive
        if not self._again:
            raise TypeError("cannot run a part or a copy of a plan. Run the plan that dlx.plan returned.")
        run, *arguments = self._again
        try:
            return run(self, *arguments)
        except REFUSALS as error:
            shorten(error)
            raise

    def differs(self, other: Plan) -> bool:
        """Return whether another plan has other steps, devices or arrays."""
        return (
            (self.path, self.target, self.device, self.outcome, self.steps)
            != (other.path, other.target, other.device, other.outcome, other.steps)
            or len(self.leaves) != len(other.leaves)
            or any(mine.differs(its) for mine, its in zip(self.leaves, other.leaves, strict=True))
        )

    def __getstate__(self) -> None:
        return None  # copies and unpickled plans cannot run

    def __str__(self) -> str:
        if self.leaves or self.outcome == "tree":
            arrays = f"{len(self.leaves)} array{'s' * (len(self.leaves) != 1)}"
            head = f"tree of {arrays} -> {self.target}: {self.outcome} ({self.nbytes:,} bytes copied)"
            lines = [
                head,
                *(f"{leaf.path}: {leaf}" for leaf in self.leaves),
                *self._error_lines(),
                *self._passed_lines(),
            ]
            return "\n".join(lines)
        found = self.source or (self.error.source if isinstance(self.error, DlxError) else "")
        head = f"{found or 'unknown'} -> {self.target}: {self.outcome}"
        if self.error is not None:
            return f"{head}\n  {type(self.error).__name__}: {self.error}"
        return "\n  ".join([head, *map(str, self.steps)])

    def _error_lines(self) -> Iterator[str]:
        """Yield a line for each error that no leaf has."""
        shown = {id(leaf.error) for leaf in self.leaves}
        errors = self.error.exceptions if isinstance(self.error, ExceptionGroup) else [self.error]
        for error in errors:
            if error is not None and id(error) not in shown:
                yield f"{type(error).__name__}: {error}"

    def _passed_lines(self) -> Iterator[str]:
        """Yield a line for each type that passes through, with its first paths; also report a tree without arrays."""
        if not self.leaves and self.error is None:
            is_number = any(kind in _NUMBERS for _, kind in self.passed)
            advice = " Make an array of the numbers first: numpy.array(numbers)." * is_number
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
        """Return the target and a count of the outcomes."""
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
        """Return the outcome; "viewed" if the memory is shared as another dtype."""
        viewed = self.outcome == "shared" and any(step.do == "view" for step in self.steps)
        return "viewed" if viewed else self.outcome

    def _row(self) -> list[str]:
        """Return path, array, outcome, bytes copied and reasons."""
        error = self.error
        found = self.source or (error.source if isinstance(error, DlxError) else "") or "unknown"
        why = "; ".join(step.reason() for step in self.steps)
        if isinstance(error, DlxError):
            why = f"{type(error).__name__}: {error.reason}. {error.fix}"
        nbytes = amount(self.nbytes) if self.nbytes else ""
        return [one_line(self.path), one_line(str(found)), self._fate(), nbytes, one_line(why)]

    def _rows(self, most: int) -> tuple[list[list[str]], list[str]]:
        """Return the rows of at most `most` arrays, unshared ones first, and lines about the rest."""
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
        below += map(one_line, (*self._error_lines(), *self._passed_lines()))
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
