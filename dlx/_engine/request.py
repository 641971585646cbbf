"""`Request`, the checked options of one call, and the adapters of its producer and consumer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlx._containers.lookup import container_of
from dlx._core.array_info import ArrayInfo
from dlx._core.foreign import exception_text, module_of
from dlx._core.module import set_module
from dlx._core.tensor import type_name
from dlx._core.types import Device
from dlx._engine.streams import StreamSync
from dlx._registry.generic import is_proxy
from dlx._registry.registry import registry
from dlx.adapter.base import Adapter
from dlx.errors import AdapterNotFoundError, ConversionError, DeviceError, DlxError

__all__ = ["describe", "HOST", "Request"]

HOST = Device("cpu")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of one call, checked."""

    target: Adapter
    device: Device | None = None
    copy: bool | None = None
    readonly: str = "copy"
    detach: bool = False
    stream: Any = None
    sync: StreamSync = field(init=False, compare=False, repr=False)
    is_plain: bool = field(init=False, compare=False, repr=False)  # no device, copy or stream is asked for

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.device is None and not self.copy and self.stream is None)
        object.__setattr__(self, "sync", StreamSync(self.target, self.stream, self.device))


@set_module("dlx")
def describe(obj: Any) -> ArrayInfo:
    """Describe an array: dtype, shape, strides, device, read-only, owner. Its memory is not touched.

    Raises
    ------
    AdapterNotFoundError
        If it is nothing that dlx knows as an array.
    ConversionError
        If it is one that cannot even be described, such as a used capsule.

    Examples
    --------
    >>> import dlx
    >>> str(dlx.describe(b"abc"))
    'bytes (uint8[3], read-only)'
    """
    source = _known(obj)
    if source is None:
        raise not_an_array(obj)
    try:
        info = source.info(obj)
    except DlxError as error:
        error.complete(source=type_name(type(obj)))
        raise
    except MemoryError:
        raise
    except Exception as error:
        reason = f"{source.name} failed: {exception_text(error)}"
        raise ConversionError(reason, source=type_name(type(obj))) from error
    return info if info is not None else ArrayInfo(source.name, type_name(type(obj)))


def request_of(
    to: Any,
    like: Any = None,
    device: Any = None,
    copy: Any = None,
    readonly: str = "copy",
    detach: bool = False,
    stream: Any = None,
    errors: str = "raise",
) -> Request:
    """Check the options of a call; errors of the call itself are raised in every case."""
    if (to is None) == (like is None):
        raise TypeError("give either to= (a name, a module, an array type) or like= (an array), not both or neither")
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy must be None, True or False, found {copy!r}")
    if readonly not in ("copy", "error", "share"):
        raise ValueError(f"readonly must be 'copy', 'error' or 'share', found {readonly!r}")
    if errors not in ("raise", "collect"):
        raise ValueError(f"errors must be 'raise' or 'collect', found {errors!r}")
    wanted = None if device is None else Device(device)
    if like is None:
        target = registry.target(to)
    else:
        target, place = _as(like)
        wanted = wanted or place
    if isinstance(device, str) and ":" not in device and wanted is not None:
        wanted = Device(wanted.type, _current_device(target, wanted.type))
    return Request(target, wanted, copy, readonly, bool(detach), stream)


def _current_device(target: Adapter, device_type: int) -> int:
    try:
        return target.current_device(device_type)
    except (DlxError, MemoryError):
        raise
    except Exception as error:
        text = f"{target.name} failed to name its current device: {exception_text(error)}"
        raise DeviceError(text, target=target.name) from error


def _as(like: Any) -> tuple[Adapter, Device | None]:
    """Return the framework and the device of an example."""
    known = _known(like)
    adapter = registry.ready(known) if known is not None else None
    if adapter is None:
        raise AdapterNotFoundError(
            f"like= is {type_name(type(like))}, whose framework is no target",
            fix="Give an array of the target, or to=.",
        )
    info = describe(like)
    if info.device is None and info.shape is not None:
        raise DeviceError(f"like= is {info}, whose device dlx does not know", fix="Pass to= and device= instead.")
    return adapter, info.device


def producer_of(obj: Any, request: Request, where: str = "") -> Adapter:
    """Return the adapter of an array, or raise that it is none."""
    source = _known(obj)
    if source is None:
        raise not_an_array(obj).complete(target=request.target.name, where=where)
    return source


def _known(obj: Any) -> Adapter | None:
    try:
        return registry.producer(obj)
    except (DlxError, MemoryError):
        raise
    except Exception as error:  # a type whose attributes raise
        name = type_name(type(obj))
        reason = f"its type cannot be looked at: {exception_text(error)}"
        raise AdapterNotFoundError(reason, source=name, fix="Convert an array that it holds.") from error


def _described(obj: Any) -> ArrayInfo | None:
    try:
        return describe(obj)
    except DlxError:
        return None


def not_an_array(obj: Any) -> DlxError:
    name = type_name(type(obj))
    broken = registry.broken_for(type(obj))
    if broken is not None:
        return broken.complete(source=name)
    if is_proxy(type(obj)):
        fix = "Convert the object itself: a proxy does not keep it alive."
    elif container_of(type(obj)) is not None:
        fix = "Give one of the arrays in it; dlx.convert and dlx.plan take whole containers."
    elif module_of(type(obj)) == "builtins":
        fix = "Give an array, or an object with a buffer such as bytes."
    else:
        fix = f"Convert an array that it holds, or install an adapter for {name.partition('.')[0]!r}."
    return AdapterNotFoundError(
        "it is no array: it has no adapter, no __dlpack__, no __array_interface__ and no buffer",
        source=name,
        fix=fix,
    )
