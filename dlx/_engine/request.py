"""Check the options of a call; find the adapters of its producer and consumer; describe arrays."""

from __future__ import annotations

from typing import Any

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST, Device
from dlx._engine.executor import info_of
from dlx._engine.planner import Request
from dlx._registry.array_like import not_readable, remedy
from dlx._registry.generic import ARROW, is_proxy
from dlx._registry.lookup import container_of
from dlx._registry.registry import HELD, registry
from dlx._registry.target import Target, is_committed
from dlx._support.reflect import foreign_error, module_of, type_name
from dlx.adapter.base import Adapter
from dlx.adapter.declarations import Container
from dlx.errors import AdapterNotFoundError, DeviceError, DlxError
from dlx.typing import ERRORS, READONLY

__all__ = [
    "array_info",
    "array_of",
    "check_flags",
    "described",
    "not_an_array",
    "request_of",
    "unwrapped",
]


def array_info(obj: Any) -> ArrayInfo:
    """Return what an array's adapter says of it, or what it exports."""
    obj, source = array_of(obj)
    try:
        found = source.describe(obj)
        unknown = found.info is None and found.tensor is None and not found.blockers
        return info_of(found.info, source, obj, source.export(obj) if unknown else found.tensor)
    except DlxError as error:
        error.complete(source=type_name(type(obj)))
        raise
    except Exception as error:
        raise foreign_error(f"{source.name} failed:", error, source=type_name(type(obj))) from error


def request_of(
    to: Any,
    like: Any = None,
    device: Any = None,
    copy: Any = None,
    readonly: str = "copy",
    detach: bool = False,
    stream: Any = None,
    errors: str = "raise",
    lazy: bool = False,
    strict: bool = False,
) -> Request:
    """Check the options of a call; errors of the call itself are raised in every case."""
    if (to is None) == (like is None):
        raise TypeError("give either to= (a name, a module, an array type) or like= (an array), not both or neither")
    if not isinstance(readonly, str):  # an array does not say whether it is equal to a word
        raise _not_among("readonly", readonly, READONLY)
    if not isinstance(errors, str):
        raise _not_among("errors", errors, ERRORS)
    if not type(detach) is type(lazy) is type(strict) is bool:  # nor whether it is true
        check_flags(detach=detach, lazy=lazy, strict=strict)
    if to is not None and device is copy is stream is None and readonly == "copy" and errors == "raise" and not detach:
        target = registry.target(to)
        if target.request is None:
            target.request = Request(target)
        request: Request = target.request
        return request
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy must be None, True or False, found {copy!r}")
    if readonly not in READONLY:
        raise _not_among("readonly", readonly, READONLY)
    if errors not in ERRORS:
        raise _not_among("errors", errors, ERRORS)
    if type(device) is int:  # as torch and cupy count their devices
        device = Device("cuda", device)
    wanted, committed = None if device is None else Device(device), True
    if like is None:
        target = registry.target(to)
    else:
        target, place, held = _as(like)
        if wanted is None:
            wanted, committed = place, held
    if isinstance(device, str) and ":" not in device and wanted is not None:
        wanted = Device(wanted.type, _current_device(target, wanted.type))
    elif wanted == HOST and (type(device) is Device or _is_native(device, target)):
        native.add_host(device)  # the fast path knows it from now on
    if wanted is not None and wanted.type == HOST.type and wanted.id:
        wanted = _host_device(target, wanted)
    return Request(target, wanted, copy, readonly, detach, stream, committed=committed)


def _is_native(device: Any, target: Target) -> bool:
    return module_of(type(device)).partition(".")[0] == target.adapter.package


def check_flags(**flags: Any) -> None:
    """Check that each option is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, found {value!r}")


def _not_among(name: str, found: str, choices: tuple[str, ...]) -> ValueError:
    *most, last = map(repr, choices)
    return ValueError(f"{name} must be {', '.join(most)} or {last}, found {found!r}")


def _current_device(target: Target, device_type: int) -> int:
    try:
        return target.adapter.devices.current(device_type)
    except DlxError:
        raise
    except Exception as error:
        what = f"{target.name} failed to name its current device:"
        raise foreign_error(what, error, DeviceError, target=target.name) from error


def _host_device(target: Target, wanted: Device) -> Device:
    """Return which device of a target a number of the host's is: nearly all have one, whatever number it is given."""
    devices = target.adapter.devices
    try:
        return devices.from_native(devices.to_native(wanted))
    except DlxError:
        raise
    except Exception as error:
        what = f"{target.name} failed to find {wanted}:"
        raise foreign_error(what, error, DeviceError, target=target.name) from error


def _as(like: Any) -> tuple[Target, Device | None, bool]:
    """Return the framework and the device of an example, and whether it is committed to that."""
    known = registry.producer(like)
    target = registry.ready(known) if known is not None else None
    if target is None:
        raise AdapterNotFoundError(
            f"like= is {type_name(type(like))}, whose framework is no target",
            fix="Pass to= with a target's name, such as to='numpy', or an array of the target.",
        )
    info = array_info(like)
    device = info.device or (known.devices.of(like) if known is not None else None)
    if device is None and info.shape is not None:
        raise DeviceError(f"like= is {info}, whose device dlx does not know", fix="Pass to= and device= instead.")
    return target, device, known is None or is_committed(known, like)


def array_of(obj: Any, **parts: Any) -> tuple[Any, Adapter]:
    """Return the array that an object is or stands for, as a DataArray of xarray stands for its data, and its adapter.

    Parameters
    ----------
    obj
        Any object that `dlx.convert` takes for one array.
    parts
        They complete the error.

    Raises
    ------
    DlxError
        If it is not one array, or cannot be read.
    """
    source = registry.producer(obj)
    if source is not None and not (source is ARROW and container_of(type(obj)) is not None):
        return obj, source
    inside, handler = unwrapped(obj, **parts)
    if inside is not obj and handler is None:
        return array_of(inside, **parts)
    raise not_an_array(obj).complete(**parts)


def unwrapped(obj: Any, **parts: Any) -> tuple[Any, Container | None]:
    """Return what a wrapper stands for, or any other object itself, and its handler if that is a container."""
    inside, handler = obj, container_of(type(obj))
    try:
        while handler is not None and handler.kind == "wrapper":
            _, (inside,) = handler.flatten(inside)
            handler = container_of(type(inside))
        return inside, handler
    except DlxError as error:
        error.complete(source=type_name(type(obj)), fix=remedy(type(obj)), **parts)
        raise
    except Exception as error:
        what = "the container cannot be taken apart:"
        raise foreign_error(what, error, source=type_name(type(obj)), **parts) from error


def described(obj: Any) -> ArrayInfo | None:
    """Return the description of an array, or None where there is none."""
    try:
        return array_info(obj)
    except DlxError:
        return None


def not_an_array(obj: Any) -> DlxError:
    """Return the error for an object that is no array."""
    name = type_name(type(obj))
    broken = registry.broken_for(type(obj))
    if broken is not None:
        return broken.complete(source=name)
    reason = "it is no array: it has no adapter, no __dlpack__, no __array_interface__ and no buffer"
    if is_proxy(type(obj)):
        fix = "Convert the object itself: a proxy does not keep it alive."
    elif container_of(type(obj)) is not None:
        reason = "it is a container, and one array is needed"
        fix = "Give one of the arrays in it; dlx.convert and dlx.plan take whole containers."
    else:
        try:
            if (refused := not_readable(type(obj))) is not None:
                return refused
            fix = remedy(type(obj))
        except MemoryError:
            raise
        except Exception:  # a class that raises when it is looked at
            fix = ""
        in_python = module_of(type(obj)) == "builtins"
        fix = fix or ("Give an array, or an object with a buffer such as bytes." if in_python else HELD)
    return AdapterNotFoundError(reason, source=name, fix=fix)
