"""Type checks for what adapters that are not dlx's own return.

dlx relies on these values. A plugin's adapter is therefore wrapped in a subclass whose methods call the plugin's own
and check the result: a wrong one raises a `PluginError` that names the adapter, what it returned and what it should
have returned. Its `dtypes` and `devices` are wrapped in the same way, and the functions in its other parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import Device, DType
from dlx._support.reflect import safe_repr
from dlx.adapter.base import Adapter, Description, Devices, DTypes
from dlx.adapter.declarations import Blocker, Capabilities, Ownership, Placement, StreamSupport, WriteTracking
from dlx.errors import PluginError

__all__ = ["checked_adapter"]

Check = Callable[[Adapter, Any], bool]


def _a(*kinds: Any) -> Check:
    """Return a check for an object of some types, no subclass by declaration only."""
    return lambda adapter, answer: type(answer) in kinds or isinstance(answer, kinds)


def _integer(adapter: Adapter, answer: Any) -> bool:
    return isinstance(answer, int) and not isinstance(answer, bool)


def _names(adapter: Adapter, answer: Any) -> bool:
    return isinstance(answer, frozenset) and all(isinstance(each, str) for each in answer)


def _capabilities(adapter: Adapter, answer: Any) -> bool:
    if not isinstance(answer, Capabilities):
        return answer is None
    said = answer.refusals
    return isinstance(said, Mapping) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, str) for each in (name, *pair))
        for name, pair in said.items()
    )


def _context(adapter: Adapter, answer: Any) -> bool:
    return hasattr(type(answer), "__enter__") and hasattr(type(answer), "__exit__")


def _is_info(adapter: Adapter, answer: Any) -> bool:
    if not isinstance(answer, ArrayInfo):
        return answer is None
    texts = (answer.framework, answer.type_name, answer.dtype_name, answer.owner, *answer.protocols, *answer.notes)
    sizes = [answer.nbytes, answer.address or 0, *(answer.shape or ()), *(answer.strides or ())]
    return (
        all(isinstance(each, str) for each in texts)
        and all(isinstance(each, int) for each in sizes)
        and all(each is None or isinstance(each, tuple) for each in (answer.shape, answer.strides))
        and isinstance(answer.dtype, DType | None)
        and isinstance(answer.device, Device | None)
    )


def _blockers(adapter: Adapter, answer: Any) -> bool:
    return isinstance(answer, tuple) and all(
        isinstance(each, Blocker) and isinstance(each.because, str) and isinstance(each.fix, str) for each in answer
    )


def _array(adapter: Adapter, answer: Any) -> bool:
    kinds = adapter.classes()
    return answer is not None and (not kinds or isinstance(answer, kinds))


_MAYBE = type(None)
_TEXT = (_a(str), "a str")
_ARRAY = (_array, "an array of one of its types")
_DEVICE = (_a(Device), "a Device")
_TENSOR = (_a(Tensor), "a dlx.Tensor")
_INT = (_integer, "an int")
_CONTEXT = (_context, "a context manager")
_DESCRIPTION = (_a(Description), "a Description")
_ADAPTER = (_a(Adapter), "an Adapter")

_Right = tuple[Check, str]
_INFO: _Right = (_is_info, "an ArrayInfo with fields of their types, or None")
_FIELDS: dict[str, _Right] = {  # of a Description
    "blockers": (_blockers, "a tuple of Blocker"),
    "tensor": (_a(Tensor, _MAYBE), "a dlx.Tensor, or None"),
}

# Method -> (check, its description). Those that are not listed return framework objects, or are checked by the caller.
_METHODS: dict[type, dict[str, _Right]] = {
    Adapter: {
        "module": (_a(ModuleType), "a module"),
        "version": _TEXT,
        "classes": (lambda _, all_: isinstance(all_, tuple) and all(isinstance(each, type) for each in all_), "types"),
        "describe": _DESCRIPTION,
        "export": _TENSOR,
        "capabilities": (_capabilities, "Capabilities whose refusals are pairs of str, or None"),
        "variant": _ADAPTER,
        "load": _ARRAY,
        "copy": _ARRAY,
    },
    DTypes: {
        "from_native": (_a(DType, _MAYBE), "a DType, or None"),
        "known": (_names, "a frozenset of str"),
        "native_name": _TEXT,
        "viewed": _ARRAY,
    },
    Devices: {
        "from_native": _DEVICE,
        "default": _DEVICE,
        "current": _INT,
        "activate": _CONTEXT,
        "available": (_a(Iterable), "an iterable of devices"),
    },
}

# The same for functions in the frozen parts of an adapter.
_FUNCTIONS: dict[type, dict[str, _Right]] = {
    StreamSupport: {"activate": _CONTEXT, "ready": (_a(Stream, _MAYBE), "a Stream, or None")},
    Ownership: {"consume": _TENSOR},
    WriteTracking: {
        "guarded": _ARRAY,
        "count": (lambda self, count: count is None or _integer(self, count), "an int, or None"),
        "mark_written": (lambda self, answer: True, "anything"),
    },
    Placement: {"load": _ARRAY, "is_committed": (_a(bool), "a bool")},
}


def checked_adapter(adapter: Adapter) -> Adapter:
    """Return a plugin's adapter with its return values checked from now on.

    Only methods that it overrides are; the others are dlx's own.
    """
    if _is_checked(adapter):
        return adapter
    # What is computed is left alone: asking for it may need the framework.
    parts = {name: inspect.getattr_static(adapter, name) for name in ("dtypes", "devices", *_PARTS)}
    _check_methods(adapter, Adapter, adapter)
    for name, part in parts.items():
        for base in (DTypes, Devices):
            if isinstance(part, base) and not _is_checked(part):
                _check_methods(part, base, adapter, f"{name}.")
        if type(part) in _FUNCTIONS:
            given = {each: getattr(part, each) for each in _FUNCTIONS[type(part)]}
            functions = {
                each: _function(function, adapter, f"{name}.{each}", _FUNCTIONS[type(part)][each])
                for each, function in given.items()
                if function is not None
            }
            vars(adapter)[name] = replace(part, **functions)
    return adapter


_PARTS = ("streams", "ownership", "placement", "writes")


def _is_checked(obj: Any) -> bool:
    return "_answers_are_checked" in type(obj).__dict__


def _check_methods(obj: Any, base: type, adapter: Adapter, path: str = "") -> None:
    """Give an object a class whose methods check what those of its own class return; all else stays what it is."""
    kind: Any = type(obj)
    made: list[type] = []
    hooks = {
        name: _method(made, name, adapter, path + name, right)
        for name, right in _METHODS[base].items()
        if getattr(kind, name, None) is not getattr(base, name)
    }
    if hooks or base is Adapter:
        shown = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        metaclass: Any = type(kind)
        made.append(metaclass(kind.__name__, (kind,), {**shown, "_answers_are_checked": True, **hooks}))
        obj.__class__ = made[0]


def _method(made: list[type], name: str, adapter: Adapter, shown: str, right: _Right) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return _verified(getattr(super(made[0], self), name)(*arguments, **options), adapter, shown, right)

    return method


def _function(function: Callable[..., Any], adapter: Adapter, shown: str, right: _Right) -> Callable[..., Any]:
    return lambda *arguments: _verified(function(*arguments), adapter, shown, right)


def _verified(answer: Any, adapter: Adapter, shown: str, right: _Right, field: str = "") -> Any:
    is_right, wanted = right
    if not _holds(is_right, adapter, answer):
        found = f"{shown} of the adapter {adapter.name!r} gave {field}{safe_repr(answer)}"
        raise PluginError(f"{found}, not {wanted}", fix="Repair its plugin.")
    if right is _ADAPTER:
        return checked_adapter(answer)
    return _verified_fields(answer, adapter, shown) if right is _DESCRIPTION else answer


def _verified_fields(found: Description, adapter: Adapter, shown: str) -> Description:
    for name, right in _FIELDS.items():
        _verified(getattr(found, name), adapter, shown, right, f"{name}=")
    info = found.info
    if callable(info):
        return found._replace(info=lambda: _verified(info(), adapter, shown, _INFO, "info="))
    _verified(info, adapter, shown, _INFO, "info=")
    return found


def _holds(is_right: Check, adapter: Adapter, answer: Any) -> bool:
    try:
        return is_right(adapter, answer)
    except MemoryError:
        raise
    except Exception:  # it raises when it is looked at
        return False
