"""`Request`, the checked options of a call."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from dlx._core import native
from dlx._core.types import HOST, Device
from dlx._engine.casting import Casts, read_casts
from dlx._engine.sources import adapter_call, array_info
from dlx._registry.compound import CompoundHandler
from dlx._registry.registry import NOT_INSPECTED, find_source, registry
from dlx._registry.target import Target, is_committed
from dlx._support.reflect import foreign_errors, module_of, packages, type_name
from dlx.errors import AdapterNotFoundError, DeviceError, DlxError
from dlx.typing import ERRORS, READONLY


class Request(NamedTuple):
    """The checked options of one call."""

    target: Target
    device: Device | None = None
    copy: bool | None = None
    readonly: str = "copy"
    detach: bool = False
    stream: Any = None
    later: bool = True  # whether a collection may convert its chunks when they are computed
    committed: bool = True  # whether the result must stay on `device`, see `Placement`
    casts: Casts | None = None
    wait: bool = True  # whether the host waits for moves from and to it

    def for_root(self) -> Request:
        """Return the request for one array at the root, to which `dtype` must apply."""
        return self if self.casts is None else self._replace(casts=self.casts._replace(at_root=True))

    def for_element(self) -> Request:
        """Return the request for an array that `dtype` need not apply to."""
        return self if self.casts is None else self._replace(casts=self.casts._replace(at_root=False))


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
    dtype: Any = None,
    wait: bool = True,
) -> Request:
    """Return the checked options of a call, or raise its error."""
    if (to is None) == (like is None):
        raise TypeError("give either to= (a name, a module, an array type) or like= (an array), not both or neither")
    if not isinstance(readonly, str):  # an array has no truth value after ==
        raise _invalid_choice("readonly", readonly, READONLY)
    if not isinstance(errors, str):
        raise _invalid_choice("errors", errors, ERRORS)
    if not type(detach) is type(lazy) is type(strict) is type(wait) is bool:
        check_flags(detach=detach, lazy=lazy, strict=strict, wait=wait)
    has_no_options = device is copy is stream is dtype is None and readonly == "copy" and errors == "raise"
    if to is not None and has_no_options and wait and not detach:
        target = registry.target(to)
        if target.request is None:
            target.request = Request(target)
        request: Request = target.request
        return request
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy must be None, True or False, found {copy!r}")
    if readonly not in READONLY:
        raise _invalid_choice("readonly", readonly, READONLY)
    if errors not in ERRORS:
        raise _invalid_choice("errors", errors, ERRORS)
    if type(device) is int:  # torch and cupy name their devices by number
        device = Device("cuda", device)
    wanted, committed = None if device is None else Device(device), True
    if like is None:
        target = registry.target(to)
    else:
        target, place, is_fixed = _read_like(like)
        if wanted is None:
            wanted, committed = place, is_fixed
    if isinstance(device, str) and ":" not in device and wanted is not None:
        wanted = Device(wanted.type, _current_device(target, wanted.type))
    elif wanted == HOST and next(packages(module_of(type(device)))) in ("dlx", target.adapter.package):
        native.add_host(device)  # for the fast path of later calls
    if wanted is not None and wanted.type == HOST.type and wanted.id:
        wanted = _host_device(target, wanted)
    return Request(
        target, wanted, copy, readonly, detach, stream, committed=committed, casts=read_casts(dtype), wait=wait
    )


def check_flags(**flags: Any) -> None:
    """Check that each option is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, found {value!r}")


def _invalid_choice(name: str, found: str, choices: tuple[str, ...]) -> ValueError:
    *most, last = map(repr, choices)
    return ValueError(f"{name} must be {', '.join(most)} or {last}, found {found!r}")


def _current_device(target: Target, device_type: int) -> int:
    with foreign_errors(f"{target.name} failed to name its current device:", DeviceError, target=target.name):
        return target.adapter.devices.current(device_type)


def _host_device(target: Target, wanted: Device) -> Device:
    """Return the target's device for a host number; most targets have one host device for all numbers."""
    devices = target.adapter.devices
    with foreign_errors(f"{target.name} failed to find {wanted}:", DeviceError, target=target.name):
        return devices.from_native(devices.to_native(wanted))


def _read_like(like: Any) -> tuple[Target, Device | None, bool]:
    """Return the framework and the device of an example, and whether it is committed to the device."""
    own = type(like)
    kind, shown = registry.kinds().find(own), type_name(own)
    with foreign_errors(NOT_INSPECTED, AdapterNotFoundError, source=shown):
        known = registry.owner(own) if kind is None else kind.adapter
        handlers = registry.declared_handlers(own) if kind is None else (kind.handler, *kind.compounds)
        for handler in handlers:
            if isinstance(handler, CompoundHandler):
                known, compound = known or handler.adapter, handler.compound
                if compound.matches is None or compound.matches(like):
                    with contextlib.suppress(DlxError):  # splitting may be refused because it would lose gradients
                        parts = compound.split(like)
                        found = parts.get("data", parts.get("values"))  # it has the device
                        if type(found) is own:  # rows of rows
                            return _read_like(found)
                        others = (each for each in parts.values() if registry.owner(type(each)) is not None)
                        like = found if found is not None else next(others, like)
                    break
    target = registry.ready(known) if known is not None else None
    if known is None or target is None:
        if error := find_source(module_of(own)):
            raise error
        raise AdapterNotFoundError(
            f"like= is {shown}, not an array of a target",
            fix="Pass to= with the name of a target, such as to='numpy', or another array as like=.",
        )
    info = array_info(like, known)
    with adapter_call(known, source=shown):  # a tracer of jax has no device
        device = info.device or known.devices.of(like)
    if device is None and info.shape is not None:
        raise DeviceError(f"like= is {info}, whose device is unknown", fix="Pass to= and device= instead.")
    return target, device, is_committed(known, like)
