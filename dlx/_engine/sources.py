"""Describe an array by its adapter: all facts, its device, or a tensor for planning."""

from __future__ import annotations

from typing import Any, NoReturn

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.types import READ_ONLY, Device
from dlx._support.reflect import foreign_errors, type_name
from dlx.adapter.base import Adapter, over_memory


def adapter_call(adapter: Adapter, **parts: Any) -> foreign_errors:
    """Return a context for calls of an adapter: what it raises there becomes an error of dlx."""
    return foreign_errors(f"{adapter.name} failed:", **parts)


def raise_as_error_of(adapter: Adapter) -> NoReturn:
    """Raise the error that is being handled as `adapter_call` does: that context would slow down each call."""
    with adapter_call(adapter):
        raise


def array_info(obj: Any, source: Adapter) -> ArrayInfo:
    """Return what an array's adapter says of it, or what it exports."""
    with adapter_call(source, source=type_name(type(obj))):
        found = source.describe(obj)
        unknown = found.info is None and found.tensor is None and not found.blockers
        return info_of(found.info, source, obj, source.export(obj) if unknown else found.tensor)


def info_of(said: Any, source: Adapter, obj: Any, tensor: Tensor | None, device: Device | None = None) -> ArrayInfo:
    """Return what there is to say of an array: what its adapter said (`Description`), or what was exported."""
    info = said if said is None or isinstance(said, ArrayInfo) else said()
    if tensor is not None and (info is None or info.shape is None):
        protocols = info.protocols if info is not None else ()
        return ArrayInfo.of_tensor(marked(tensor, source), source.name, type(obj), protocols)
    if info is not None:
        return info
    return ArrayInfo(source.name, type_name(type(obj)), device=device or source.devices.of(obj))


def abstract(info: ArrayInfo, owner: object) -> Tensor | None:
    """Return a tensor of these facts for planning, never passed to a consumer; None where some are unknown."""
    if info.shape is None or info.dtype is None or info.device is None or info.address is None:
        return None  # with an address only it is known how the memory is aligned
    return over_memory(
        info.address, info.shape, info.strides, info.dtype, info.device, readonly=info.readonly, owner=owner
    )


def device_of(source: Adapter, obj: Any) -> Device | None:
    """Return where an array is; None where only an export could tell."""
    with adapter_call(source, source=type_name(type(obj))):
        found = source.describe(obj)
        if found.tensor is not None:
            return found.tensor.device
        return info_of(found.info, source, obj, None, found.device).device


def marked(tensor: Tensor, source: Adapter) -> Tensor:
    """Mark arrays of an immutable framework as read-only, whatever the capsule says."""
    if source.arrays.immutable and not tensor.readonly:
        return native.tensor_view(tensor, None, None, tensor.flags | READ_ONLY, None)
    return tensor
