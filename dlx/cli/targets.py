"""Targets of conversions: which are installed, an array of each, and the plan of an entry for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlx._api import convert as api
from dlx._core.extension import ffi
from dlx._core.types import HOST
from dlx._engine.casting import read_casts
from dlx._engine.plan import Plan, Step
from dlx._engine.preview import plan_known
from dlx._engine.request import Request
from dlx._protocols.pointer import empty
from dlx._registry.listing import adapters, can_be_target
from dlx._registry.modules import is_installed
from dlx._registry.registry import registry
from dlx._registry.target import Target
from dlx._support.screen import OUTCOMES, SHORT, Cell, Screen
from dlx._support.text import amount
from dlx.adapter import over_memory
from dlx.cli.arguments import COPY
from dlx.cli.model import BadInput, Entry
from dlx.errors import ConversionError, DlxError, format_option, sentences

_ALIGNED = 1 << 20  # the address of abstract tensors, whose memory is never read

_NAMED_BY_OUTCOME = ("", "copy", "resolve", "share", "view")  # steps whose name would repeat the outcome


def command_option(name: str, value: Any) -> str:
    """Format an option of `dlx.convert` as an option of the command; without a value, format its name."""
    if name == "copy" and value is not None:
        value = COPY[value]
    if isinstance(value, dict):
        value = ",".join(f"{old}={new}" for old, new in value.items())
    return f"--{name}" if value is None or value is True else f"--{name} {value}"


@dataclass(frozen=True)
class Outcome:
    """The plan of one entry for one target."""

    target: str
    outcome: str  # "same", "shared", "copied", "refused" or "unknown"
    nbytes: int | None = 0  # copied; None if unknown
    steps: tuple[Step, ...] = ()  # empty if memory is shared unchanged
    error: DlxError | None = None  # of a refusal

    def why(self, write: Any = format_option, *, brief: bool = False) -> str:
        """Return the steps, or the reason of a refusal, with options formatted by ``write(name, value)``.

        `brief` leaves out details of the array, and the framework's list of dtypes.
        """
        if self.error is not None:
            return self.error.brief if brief else self.error.reason
        texts = ((step.do, step.reason(write, brief=brief)) for step in self.steps)
        return "; ".join(text if do in _NAMED_BY_OUTCOME else f"{do}: {text}" for do, text in texts)

    def short_text(self) -> str:
        """Return the brief reason and the advice, with options of the command."""
        return sentences(self.why(command_option, brief=True), self.advice())

    def advice(self) -> str:
        """Return the fix of a refusal, with options of the command."""
        return "" if self.error is None else self.error.advice(command_option)

    def document(self) -> dict[str, Any]:
        """Return the outcome for JSON, with options of `dlx.convert`."""
        kind, fix = ("", "") if self.error is None else (type(self.error).__name__, self.error.fix)
        head = {"target": self.target, "outcome": self.outcome, "why": self.why()}
        return {**head, "nbytes": self.nbytes, "error": kind, "fix": fix}


def installed_targets() -> list[str]:
    """Return the targets whose package is installed, without importing any."""
    return [name for name, adapter in adapters().items() if can_be_target(adapter) and is_installed(adapter.package)]


def parse_targets(words: str | None, default: str = "all", *, none: bool = False, load: bool = True) -> list[str]:
    """Parse a comma-separated list of targets, ``all``, or ``none`` if that is allowed.

    The frameworks are imported; without `load`, only those that `find_unimported` does not return.
    """
    words = default if words is None else words.strip()
    if words == "all":
        return installed_targets()
    if words == "none" and none:
        return []
    # Intern the names, since the fast path compares targets by identity.
    names = [sys.intern(word) for word in dict.fromkeys(map(str.strip, words.split(","))) if word]
    if not names:
        raise BadInput("no target: pass names such as numpy,torch, or all")
    for name in names if load else [name for name in names if find_unimported(name) is None]:
        # Planning any object raises dlx's error for an unknown or missing target.
        error = refusal(api.plan(b"", to=name))
        if error is not None and not isinstance(error, ConversionError):
            raise BadInput(sentences(error.reason, error.fix))
    return names


def array_of(framework: str, dtype: str, shape: tuple[int, ...] = (6,)) -> Any:
    """Create an array of a framework, with memory aligned to 64 bytes, or raise the error of its conversion."""
    aligned = empty(shape, dtype, device="cpu")
    nbytes = max(aligned.nbytes, 1)
    ffi.memmove(ffi.cast("void *", aligned.data_ptr), bytes(nbytes), nbytes)  # bools must be 0 or 1
    return aligned if framework == "dlx" else api.convert(aligned, to=framework)


def refusal(plan: Plan) -> DlxError | None:
    """Return the error in the plan of one array; only a tree's plan can have several."""
    assert not isinstance(plan.error, ExceptionGroup)
    return plan.error


def find_unimported(name: str) -> Target | None:
    """Return a target whose framework is installed but not imported, or None if only the framework can tell."""
    target = registry.find_unimported(name)
    return target if target is not None and is_installed(target.adapter.package) else None


class Planner:
    """Plans entries for one target with the options of `dlx.plan`; imports its framework only if a fact is missing."""

    def __init__(self, target: str, **options: Any) -> None:
        self.target, self._options = target, options
        self._unimported = find_unimported(target)
        self.note = ""  # says for which array the framework was imported

    def outcome(self, entry: Entry) -> Outcome:
        """Plan one entry."""
        if entry.error is not None:
            return Outcome(self.target, "refused", error=entry.error)
        obj = _abstract(entry) if entry.obj is None else entry.obj
        try:
            plan = self._plan_unimported(obj)
            if plan is None:
                if self._unimported is not None and not self.note:
                    dtype = "" if entry.dtype is None else f" ({entry.dtype})"
                    self.note = f"{self.target} was imported to plan {entry.path or 'the array'}{dtype}"
                plan = api.plan(obj, to=self.target, **self._options)
            error = refusal(plan)
        except DlxError as raised:  # about the options
            return Outcome(self.target, "refused", error=raised)
        if error is not None:
            return Outcome(self.target, "refused", error=error)
        same = entry.obj is None and plan.outcome == "same"  # an abstract tensor has no framework
        return Outcome(self.target, "shared" if same else plan.outcome, plan.nbytes, plan.steps)

    def _plan_unimported(self, obj: Any) -> Plan | None:
        """Return the plan of a host array without the framework; None if only the framework can tell or explain it."""
        if self._unimported is None or self._options.get("device") is not None:
            return None
        options = {name: value for name, value in self._options.items() if name != "dtype"}
        request = Request(self._unimported, casts=read_casts(self._options.get("dtype")), **options)
        plan = plan_known(request.for_root(), obj)
        return plan if plan is not None and plan.source is not None and plan.source.device == HOST else None


def _abstract(entry: Entry) -> Any:
    """Return a compact, aligned tensor whose memory must not be read."""
    assert entry.dtype is not None and entry.shape is not None
    return over_memory(_ALIGNED, entry.shape, None, entry.dtype, HOST, owner=None)


def show(found: Sequence[Outcome], screen: Screen) -> None:
    """Print the outcome of one array for each target; print a long reason only once."""
    rows: list[list[Cell]] = []
    firsts: dict[str, str] = {}
    for each in found:
        why = each.short_text()
        first = firsts.setdefault(why, each.target)
        again = first != each.target and len(why) > SHORT
        copied = amount(each.nbytes) if each.nbytes != 0 else ""
        rows.append([each.target, (each.outcome, OUTCOMES[each.outcome]), copied, f"as for {first}" if again else why])
    screen.table(["to", "outcome", ">bytes copied", "why"], rows)


def show_notes(planners: Sequence[Planner], screen: Screen) -> None:
    """Print for which arrays frameworks were imported."""
    for each in filter(None, (planner.note for planner in planners)):
        screen.line((f"note: {each}", "quiet"))
