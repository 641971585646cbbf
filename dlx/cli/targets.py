"""Where an entry could go: the targets that are installed, and a plan for each."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from typing import Any

from dlx._api import convert as api
from dlx._core.types import Device, DType
from dlx._engine.plan import Plan, Step
from dlx._registry.registry import adapters
from dlx.adapter import Adapter, over_memory
from dlx.cli.arguments import COPY
from dlx.cli.model import BadInput, Entry, aligned_to
from dlx.errors import ConversionError, CopyRequiredError, DlxError, DTypeError, sentences, written

__all__ = ["Outcome", "can_be_target", "chosen", "installed", "on_the_command_line", "outcome", "refusal"]

_ALIGNED = 1 << 20  # an address that is never read: abstract tensors start after it

_SWAPPED = "its elements are in the other byte order"
Details = tuple[tuple[str, str], ...]

_PLAIN = ("", "copy", "resolve", "share", "view")  # steps that the outcome names already


def on_the_command_line(name: str, value: Any) -> str:
    """Return an option of `dlx.convert` as commands have it; without a value its name."""
    if name == "copy" and value is not None:
        value = COPY[value]
    return f"--{name}" if value is None or value is True else f"--{name} {value}"


@dataclass(frozen=True)
class Outcome:
    """What becomes of one entry on the way to one target.

    Attributes
    ----------
    target
        Its name.
    outcome
        ``"same"``, ``"shared"``, ``"copied"``, ``"refused"`` or ``"unknown"``.
    nbytes
        Bytes copied; None where their number is unknown.
    steps
        What is done, and why; none where memory is simply shared.
    error
        The refusal, or None.
    """

    target: str
    outcome: str
    nbytes: int | None = 0
    steps: tuple[Step, ...] = ()
    error: DlxError | None = None

    def why(self, write: Any = written, *, brief: bool = False) -> str:
        """Return the steps, or the reason of a refusal, options written by ``write(name, value)``.

        `brief` leaves out what differs from one array to the next, and the dtypes of a framework, which `dlx dtypes`
        shows.
        """
        if self.error is not None:
            return self.error.brief if brief else self.error.reason
        said = ((step.do, step.reason(write, brief=brief)) for step in self.steps)
        return "; ".join(text if do in _PLAIN else f"{do}: {text}" for do, text in said)

    def shown(self) -> str:
        """Return why, in brief, and what to do about it, with options of the command."""
        return sentences(self.why(on_the_command_line, brief=True), self.advice())

    def advice(self) -> str:
        """Return what to do about a refusal, with options of the command."""
        return "" if self.error is None else self.error.advice(on_the_command_line)

    def document(self) -> dict[str, Any]:
        """Return what JSON has of it, in words of `dlx.convert`."""
        kind, fix = ("", "") if self.error is None else (type(self.error).__name__, self.error.fix)
        head = {"target": self.target, "outcome": self.outcome, "why": self.why()}
        return {**head, "nbytes": self.nbytes, "error": kind, "fix": fix}


def can_be_target(adapter: Adapter) -> bool:
    """Return whether an adapter says what its framework takes; its framework is not asked."""
    return type(adapter).capabilities is not Adapter.capabilities


def installed() -> list[str]:
    """Return the targets whose package is here; nothing is imported."""
    return [name for name, adapter in adapters().items() if can_be_target(adapter) and _is_here(adapter.package)]


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def chosen(words: str | None, default: str = "all", *, none: bool = False) -> list[str]:
    """Return the targets of a comma-separated list, which may be ``all``, or ``none`` where none are wanted."""
    words = default if words is None else words.strip()
    if words == "all":
        return installed()
    if words == "none" and none:
        return []
    # The fast path knows a target by the very object, as it stands in a program.
    names = [sys.intern(word) for word in dict.fromkeys(map(str.strip, words.split(","))) if word]
    if not names:
        raise BadInput("no target is named: say for instance numpy,torch, or all")
    for name in names:
        # Unknown and missing ones are errors of the call, in the words of dlx itself.
        error = refusal(api.plan(b"", to=name))
        if error is not None and not isinstance(error, ConversionError):
            raise BadInput(sentences(error.reason, error.fix))
    return names


def refusal(plan: Plan) -> DlxError | None:
    """Return the error in the plan of one array; only a tree's plan may hold several."""
    assert not isinstance(plan.error, ExceptionGroup)
    return plan.error


def outcome(entry: Entry, target: str, *, mapped: bool = False, **options: Any) -> Outcome:
    """Plan one entry for one target: the object itself, or what loading the file would give."""
    if entry.obj is not None:
        return _planned(entry.obj, target, options)
    if entry.sample is not None:
        found = _planned(entry.sample, target, options)
        same = replace(found, outcome="shared") if found.outcome == "same" else found
        return replace(same, nbytes=entry.nbytes if found.nbytes else 0)
    if entry.loader == target and (entry.swapped or (entry.refused and entry.dtype_name != "object")):
        # What loads it has it as it is; bytes stand for what DLPack has no dtype for.
        raw = (entry.nbytes or 0,)
        entry = replace(entry, dtype=DType("uint8"), shape=raw, order="C", swapped=False, refused="")
    if entry.refused:
        return Outcome(target, "refused", error=DTypeError(entry.refused))
    if entry.shape is None or entry.dtype is None:
        return Outcome(target, "unknown", steps=(Step("", "its shape is not in the file's header"),))
    never = options.get("copy") is False
    if entry.swapped and never and entry.nbytes:
        return Outcome(target, "refused", error=CopyRequiredError(_SWAPPED, option=(("copy", None),)))
    turned = entry.swapped and not never  # what goes on to the target is dlx's own memory
    start = _abstract(replace(entry, alignment=64) if turned else entry, mapped and not turned)
    promised = f", and loading it promises {entry.alignment} only"
    if mapped and entry.offset is not None:
        promised = f", and in the file it is aligned to {aligned_to(entry.offset)}"
    found = _planned(start, target, options, promised)
    if turned and found.outcome != "refused":
        steps = (Step("copy", _SWAPPED), *found.steps)
        return replace(found, outcome="copied", steps=steps, nbytes=found.nbytes or entry.nbytes or 0)
    return replace(found, outcome="shared") if found.outcome == "same" else found


def _planned(obj: Any, target: str, options: dict[str, Any], promised: str = "") -> Outcome:
    """Plan one object; `promised` stands for the address of an abstract tensor, which means nothing."""
    try:
        plan = api.plan(obj, to=target, **options)
        error = refusal(plan)
    except DlxError as raised:  # of the options
        error = raised
    if error is not None:
        if promised:
            error.brief, error.details = _promised(error.brief, error.details, promised)
        return Outcome(target, "refused", error=error)
    steps = plan.steps
    if promised:
        changed = [(step, *_promised(step.why, step.details, promised)) for step in steps]
        steps = tuple(replace(step, why=why, details=details) for step, why, details in changed)
    return Outcome(target, plan.outcome, plan.nbytes, steps)


def _promised(why: str, details: Details, promised: str) -> tuple[str, Details]:
    """Return a reason and its details with what is promised of the address in place of its alignment."""
    rest = tuple(each for each in details if each[0] != "alignment")
    return (why if rest == details else f"{why}{promised}"), rest


def _abstract(entry: Entry, mapped: bool) -> Any:
    """Return an abstract tensor, whose memory must not be read, with the facts of what loading an entry gives."""
    shape, dtype = entry.shape or (), entry.dtype
    assert dtype is not None
    strides: tuple[int, ...] | None = None
    if entry.order == "F":
        strides, step = (), 1
        for extent in shape:
            strides, step = (*strides, step), step * max(extent, 1)
    in_file = mapped and entry.offset is not None
    address = _ALIGNED + ((entry.offset or 0) if in_file else entry.alignment)
    return over_memory(address, shape, strides, dtype, Device("cpu"), readonly=in_file, owner=None)
