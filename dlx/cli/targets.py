"""Where an entry could go: the targets that are installed, and a plan for each."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import dlx
from dlx._engine.plan import Plan
from dlx.adapter import Adapter, over_memory
from dlx.cli.model import BadInput, Entry, aligned_to
from dlx.errors import ConversionError, DlxError

__all__ = ["Outcome", "brief", "can_be_target", "chosen", "installed", "outcome", "refusal"]

_ALIGNED = 1 << 20  # an address that is never read: abstract tensors start after it

_ADDRESS = re.compile(r", found address 0x[0-9a-f]+")  # differs from array to array, and from run to run
_KNOWN = re.compile(r"; it has \w+(, \w+){3,}")  # all the dtypes of a framework: `dlx dtypes` shows them
_SWAPPED = "its elements are in the other byte order"
_PLAIN = ("copy", "resolve", "share", "view")  # steps that the outcome names already


@dataclass(frozen=True)
class Outcome:
    """What becomes of one entry on the way to one target.

    Attributes
    ----------
    target
        Its name.
    outcome
        ``"same"``, ``"shared"``, ``"copied"``, ``"refused"`` or ``"unknown"``.
    why
        The steps, or the reason of a refusal; empty where memory is simply shared.
    nbytes
        Bytes copied; None where their number is unknown.
    error
        Class of the refusal, or empty.
    fix
        What to do about a refusal, or empty.
    """

    target: str
    outcome: str
    why: str = ""
    nbytes: int | None = 0
    error: str = ""
    fix: str = ""


def brief(why: str, *, many: bool = False) -> str:
    """Return a reason as a table has room for it; of many arrays without what differs from one to the next."""
    return _KNOWN.sub("", _ADDRESS.sub("", why) if many else why)


def can_be_target(adapter: Adapter) -> bool:
    """Return whether an adapter says what its framework takes; its framework is not asked."""
    return type(adapter).accepts is not Adapter.accepts


def installed() -> list[str]:
    """Return the targets whose package is here; nothing is imported."""
    return [name for name, adapter in dlx.adapters().items() if can_be_target(adapter) and _is_here(adapter.package)]


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
        error = refusal(dlx.plan(b"", to=name))
        if error is not None and not isinstance(error, ConversionError):
            raise BadInput(f"{error.reason}. {error.fix}")
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
        entry = replace(entry, dtype=dlx.DType("uint8"), shape=raw, order="C", swapped=False, refused="")
    if entry.refused:
        return Outcome(target, "refused", entry.refused, error="DTypeError")
    if entry.shape is None or entry.dtype is None:
        return Outcome(target, "unknown", "its shape is not in the file's header")
    never = options.get("copy") is False
    if entry.swapped and never and entry.nbytes:
        return Outcome(target, "refused", _SWAPPED, 0, "CopyRequiredError", "Drop copy=False.")
    turned = entry.swapped and not never  # what goes on to the target is dlx's own memory
    start = _abstract(replace(entry, alignment=64) if turned else entry, mapped and not turned)
    found = _planned(start, target, options)
    found = replace(found, why=_without_address(found.why, entry, mapped))
    if turned and found.outcome != "refused":
        why = "; ".join(filter(None, (_SWAPPED, found.why)))
        return replace(found, outcome="copied", why=why, nbytes=found.nbytes or entry.nbytes or 0)
    return replace(found, outcome="shared") if found.outcome == "same" else found


def _planned(obj: Any, target: str, options: dict[str, Any]) -> Outcome:
    try:
        plan = dlx.plan(obj, to=target, **options)
        error = refusal(plan)
    except DlxError as raised:  # of the options
        error = raised
    if error is not None:
        return Outcome(target, "refused", error.reason, error=type(error).__name__, fix=error.fix)
    why = "; ".join(step.why if step.do in _PLAIN else f"{step.do}: {step.why}" for step in plan.steps)
    return Outcome(target, plan.outcome, why, plan.nbytes)


def _without_address(text: str, entry: Entry, mapped: bool) -> str:
    """Replace the address of an abstract tensor in a text by the offset of its data in the file."""
    if mapped and entry.offset is not None:
        return _ADDRESS.sub(f", and in the file it is aligned to {aligned_to(entry.offset)}", text)
    return _ADDRESS.sub(f", and loading it promises {entry.alignment} only", text)


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
    return over_memory(address, shape, strides, dtype, dlx.Device("cpu"), readonly=in_file, owner=None)
