"""The types that an adapter's hooks must return; a conversion relies on them without a check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import Device, DType
from dlx._registry.registry import registry
from dlx._support.reflect import safe_repr
from dlx.adapter.base import Adapter, Description, classes_of
from dlx.adapter.declarations import Blocker, Capabilities
from dlx.testing.subject import attempt, must

__all__ = ["check_answers"]

_NONE = type(None)
_INFO: dict[str, Any] = {
    **dict.fromkeys(("framework", "type_name", "dtype_name", "owner"), str),
    **dict.fromkeys(("protocols", "notes"), tuple),
    **dict.fromkeys(("shape", "strides"), (tuple, _NONE)),
    **dict.fromkeys(("nbytes", "address"), (int, _NONE)),
    "dtype": (DType, _NONE),
    "device": (Device, _NONE),
}


def check_answers(adapter: Adapter, array: Any, tensor: Tensor | None) -> None:
    """Call every hook with an array, and a tensor if the adapter is a target; `Broken` if one returns a wrong type."""
    for hook, kinds, function, *arguments in _calls(adapter, array, tensor):
        answer, error = attempt(function, *arguments)
        if error is None:  # what raises is reported by the checks that convert
            _must_be(adapter, hook, answer, kinds)


def _must_be(adapter: Adapter, hook: str, answer: Any, kinds: Any) -> None:
    named = kinds if isinstance(kinds, tuple) else (kinds,)
    wanted = " or ".join("None" if kind is _NONE else kind.__name__ for kind in named)
    # By the exact type too: an object whose class cannot be asked for is of no right type.
    found, error = attempt(lambda: type(answer) in named or isinstance(answer, kinds))
    must(found and error is None, f"{hook} of {adapter.name!r} gave {safe_repr(answer)}, not {wanted}")
    if type(answer) is Description:
        for blocker in answer.blockers if isinstance(answer.blockers, tuple) else (answer.blockers,):
            _must_be(adapter, f"{hook}, blockers", blocker, Blocker)
        _must_be(adapter, f"{hook}, tensor", answer.tensor, (Tensor, _NONE))
        info = answer.info() if callable(answer.info) else answer.info
        _must_be(adapter, f"{hook}, info", info, (ArrayInfo, _NONE))
        for field, kind in _INFO.items() if info is not None else ():
            _must_be(adapter, f"{hook}, info.{field}", getattr(info, field), kind)
    elif type(answer) is Capabilities:
        for name, pair in answer.refusals.items():
            right = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, str) for each in (name, *pair))
            must(right, f"{hook} of {adapter.name!r} refuses {name!r} with {safe_repr(pair)}, not (reason, fix)")


def _calls(adapter: Adapter, array: Any, tensor: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Give (name, types, function, arguments...) for the hooks that can be called for an array."""
    exact, host, dtypes, devices = classes_of(adapter) or object, Device("cpu"), adapter.dtypes, adapter.devices
    yield "describe", Description, adapter.describe, array
    yield "export", Tensor, adapter.export, array
    yield "capabilities", (Capabilities, _NONE), adapter.capabilities
    if tensor is not None:
        yield "variant", Adapter, adapter.variant, tensor
        yield "load", exact, registry.target(adapter.name).over(tensor).adapter.load, tensor
    if type(adapter).copy is not Adapter.copy:
        yield "copy", exact, adapter.copy, array
    yield "dtypes.known", frozenset, dtypes.known
    for name in sorted(dtypes.names):
        yield "dtypes.native_name", str, dtypes.native_name, name
        yield "dtypes.from_native", (DType, _NONE), lambda name=name: dtypes.from_native(dtypes.to_native(DType(name)))
    yield "devices.from_native", Device, lambda: devices.from_native(devices.to_native(host))
    yield "devices.of", (Device, _NONE), devices.of, array
    yield "devices.default", Device, devices.default
    yield "devices.current", int, devices.current, host.type
    yield "devices.activate", AbstractContextManager, devices.activate, host
    yield "devices.available", Iterable, devices.available
    if tensor is None:
        return
    streams, placement, writes = adapter.streams, adapter.placement, adapter.writes
    if streams is not None and streams.ready is not None:
        yield "streams.ready", (Stream, _NONE), streams.ready, array, tensor
    if adapter.arrays.consume is not None:
        yield "arrays.consume", Tensor, adapter.arrays.consume, array, tensor, False
    if placement is not None:
        yield "placement.load", exact, placement.load, tensor, True
        yield "placement.is_committed", bool, placement.is_committed, array
    if writes is not None and writes.guarded is not None:
        yield "writes.guarded", exact, writes.guarded, array, True
    if writes is not None and writes.count is not None:
        yield "writes.count", (int, _NONE), writes.count, array
    if adapter.is_tracing is not None:
        yield "is_tracing", bool, adapter.is_tracing
