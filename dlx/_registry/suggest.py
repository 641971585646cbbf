"""What a target that does not exist may mean."""

from __future__ import annotations

from typing import Any

from dlx._core.types import Device, DType
from dlx._registry.plugin import FRAMEWORKS
from dlx._support.keywords import UNCHANGED
from dlx._support.reflect import type_name
from dlx.errors import DlxError, did_you_mean

_SHORT = {row.short: root for root, row in FRAMEWORKS.items() if row.short}


def guess(name: str, names: list[str]) -> str:
    """Return a sentence on the target that an unknown name may mean, or nothing."""
    if _is(Device, name):
        return f"It is a device: say device={name!r}, and the framework in to=."
    word = name.lower().replace("-", "_").partition(".")[0]
    long = _SHORT.get(word, word)
    if long in names:
        return f"Did you mean {long!r}?"
    return f"{long} has no adapter here." if word in _SHORT else did_you_mean(word, names)


def _is(kind: type[Device] | type[DType], obj: Any) -> bool:
    """Return whether an object or a name stands for a device or a dtype."""
    try:
        kind(obj)
    except (DlxError, TypeError, ValueError):
        return False
    return True


def describe_wrong(to: Any) -> str:
    """Return the type of what is no target, and what to do where it is a device or a dtype."""
    shown = type_name(type(to))
    if type(to) in (int, tuple, list):  # which a device or a dtype can be written as
        return shown
    if _is(Device, to):
        return f"{shown}. Say device= for a device"
    return f"{shown}. {UNCHANGED}" if _is(DType, to) else shown
