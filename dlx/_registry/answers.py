"""Type checks for the return values of adapter hooks, for adapters that are not dlx's own.

dlx relies on these values. A plugin's adapter is therefore wrapped in a subclass whose methods call the plugin's own
and check the result: a wrong one raises a `PluginError` that names the adapter, what it returned and what it should
have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.foreign import safe_repr
from dlx._core.stream import Stream
from dlx._core.tensor import Tensor
from dlx._core.types import Device, DType
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Blocker, Capabilities
from dlx.errors import PluginError

__all__ = ["checked_adapter"]

Check = Callable[[Adapter, Any], bool]


def _a(*kinds: Any) -> Check:
    """Return a check for an object of some types, no subclass by declaration only."""
    return lambda adapter, answer: type(answer) in kinds or isinstance(answer, kinds)


def _integer(adapter: Adapter, answer: Any) -> bool:
    return isinstance(answer, int) and not isinstance(answer, bool)


def _sentences(adapter: Adapter, answer: Any) -> bool:
    pair = isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(each, str) for each in answer)
    return answer is None or pair


def _context(adapter: Adapter, answer: Any) -> bool:
    return hasattr(type(answer), "__enter__") and hasattr(type(answer), "__exit__")


def _is_info(adapter: Adapter, answer: Any) -> bool:
    if not isinstance(answer, ArrayInfo):
        return answer is None
    texts = (answer.framework, answer.type_name, answer.dtype_name, answer.owner, *answer.protocols, *answer.notes)
    sizes = [answer.nbytes, answer.address, *(answer.shape or ()), *(answer.strides or ())]
    return (
        all(isinstance(each, str) for each in texts)
        and all(isinstance(each, int) for each in sizes)
        and all(each is None or isinstance(each, tuple) for each in (answer.shape, answer.strides))
        and isinstance(answer.dtype, DType | None)
        and isinstance(answer.device, Device | None)
    )


def _is_blocker(each: Any) -> bool:
    return isinstance(each, Blocker) and isinstance(each.because, str) and isinstance(each.fix, str)


def _array(adapter: Adapter, answer: Any) -> bool:
    while adapter.part_of is not None:
        adapter = adapter.part_of
    kinds = adapter.classes()
    return answer is not None and (not kinds or isinstance(answer, kinds))


_MAYBE = type(None)
_TEXT = (_a(str), "a str")
_BOOL = (_a(bool), "a bool")
_ARRAY = (_array, "an array of one of its types")
_ADAPTER = (_a(Adapter), "an Adapter")
_DEVICE = (_a(Device), "a Device")
_TENSOR = (_a(Tensor), "a dlx.Tensor")
_REASON = (_sentences, "a pair of str (reason, fix), or None")

# Hook -> (check, its description). Hooks that are not listed return framework objects, or are checked by the caller.
_ANSWERS: dict[str, tuple[Check, str]] = {
    "module": (_a(ModuleType), "a module"),
    "version": _TEXT,
    "classes": (lambda _, all_: isinstance(all_, tuple) and all(isinstance(each, type) for each in all_), "types"),
    "current": _ADAPTER,
    "accepts": (_a(Capabilities, _MAYBE), "Capabilities, or None"),
    "narrowed": _ADAPTER,
    "holds": _BOOL,
    "known_dtypes": (
        lambda _, names: isinstance(names, frozenset) and all(isinstance(each, str) for each in names),
        "a frozenset of str",
    ),
    "native_name": _TEXT,
    "dtype_from": (_a(DType, _MAYBE), "a DType, or None"),
    "dtype_names": _TEXT,
    "why_untaken": _REASON,
    "why_not_on": _REASON,
    "device_from": _DEVICE,
    "devices": (_a(Iterable), "an iterable of devices"),
    "examine": (lambda _, all_: isinstance(all_, tuple) and all(map(_is_blocker, all_)), "an iterable of Blocker"),
    "info": (_is_info, "an ArrayInfo with fields of their types, or None"),
    "sketch": (_a(Tensor, _MAYBE), "a dlx.Tensor, or None"),
    "export": _TENSOR,
    "ready_on": (_a(Stream, _MAYBE), "a Stream, or None"),
    "take": _TENSOR,
    "device_of": (_a(Device, _MAYBE), "a Device, or None"),
    "home": _DEVICE,
    "current_device": (_integer, "an int"),
    "on_device": (_context, "a context manager"),
    "on_stream": (lambda self, given: given is None or _context(self, given), "a context manager, or None"),
    "detached": _ARRAY,
    "clone": (lambda self, made: made is NotImplemented or _array(self, made), f"{_ARRAY[1]}, or NotImplemented"),
    "moved": _ARRAY,
    "guarded": _ARRAY,
    "writes_to": (lambda self, count: count is None or _integer(self, count), "an int, or None"),
    "load": _ARRAY,
    "capabilities_address": (
        lambda self, address: address == Adapter.capabilities_address(self),
        "what Adapter.capabilities_address gives",
    ),
    "fast_path_capabilities_address": (
        lambda self, address: address == Adapter.fast_path_capabilities_address(self),
        "what Adapter.fast_path_capabilities_address gives",
    ),
    "check": (_integer, "an int"),
    "constant_over": _BOOL,
    "viewed_as": _ARRAY,
}


def checked_adapter(adapter: Adapter) -> Adapter:
    """Return a plugin's adapter with its return values checked from now on.

    Only hooks that it overrides are; the others are dlx's own.
    """
    kind = type(adapter)
    if "_answers_are_checked" not in kind.__dict__:
        own = [name for name in _ANSWERS if getattr(kind, name, None) is not getattr(Adapter, name)]
        made: list[type] = []
        hooks = {name: _hook(made, name) for name in own}
        shown = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        # Its state, and what it inherits, stay what they are.
        metaclass: Any = type(kind)
        made.append(metaclass(kind.__name__, (kind,), {**shown, "_answers_are_checked": True, **hooks}))
        adapter.__class__ = made[0]
    return adapter


def _hook(made: list[type], name: str) -> Callable[..., Any]:
    is_right, wanted = _ANSWERS[name]

    def hook(self: Any, *arguments: Any, **options: Any) -> Any:
        answer = getattr(super(made[0], self), name)(*arguments, **options)
        if name == "examine" and isinstance(answer, Iterable):
            answer = tuple(answer)
        if not _holds(is_right, self, answer):
            raise PluginError(
                f"{name} of the adapter {self.name!r} gave {safe_repr(answer)}, not {wanted}", fix="Repair its plugin."
            )
        return checked_adapter(answer) if wanted is _ADAPTER[1] else answer

    return hook


def _holds(is_right: Check, adapter: Adapter, answer: Any) -> bool:
    try:
        return is_right(adapter, answer)
    except MemoryError:
        raise
    except Exception:  # it raises when it is looked at
        return False
