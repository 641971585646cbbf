"""Describe an array by its adapter: all facts, its device, or a tensor for planning."""

from __future__ import annotations

from typing import Any

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.types import READ_ONLY, Device
from dlx._support.reflect import foreign_error, type_name
from dlx.adapter.base import Adapter, over_memory
from dlx.errors import DlxError

__all__ = ["abstract", "adapter_failed", "array_info", "device_of", "info_of", "marked"]


def adapter_failed(adapter: Adapter, cause: Exception, **parts: Any) -> DlxError:
    """Return the error for an exception raised by an adapter; a MemoryError is raised again unchanged."""
    try:
        return foreign_error(f"{adapter.name} failed:", cause, **parts)
    finally:
        del cause  # as there: this frame is in the traceback of a MemoryError


def array_info(obj: Any, source: Adapter) -> ArrayInfo:
    """Return what an array's adapter says of it, or what it exports."""
    try:
        found = source.describe(obj)
        unknown = found.info is None and found.tensor is None and not found.blockers
        return info_of(found.info, source, obj, source.export(obj) if unknown else found.tensor)
    except DlxError as error:
        error.complete(source=type_name(type(obj)))
        raise
    except Exception as error:
        raise adapter_failed(source, error, source=type_name(type(obj))) from error


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
    try:
        found = source.describe(obj)
        if found.tensor is not None:
            return found.tensor.device
        return info_of(found.info, source, obj, None, found.device).device
    except DlxError as error:
        error.complete(source=type_name(type(obj)))
        raise
    except Exception as error:
        raise adapter_failed(source, error, source=type_name(type(obj))) from error


def marked(tensor: Tensor, source: Adapter) -> Tensor:
    """Mark arrays of an immutable framework as read-only, whatever the capsule says."""
    if source.arrays.immutable and not tensor.readonly:
        return native.tensor_view(tensor, None, None, tensor.flags | READ_ONLY, None)
    return tensor
