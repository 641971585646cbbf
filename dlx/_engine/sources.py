"""Describe arrays by their adapters."""

from __future__ import annotations

from typing import Any, NoReturn

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.types import READ_ONLY, Device
from dlx._support.reflect import foreign_errors, type_name
from dlx.adapter.base import Adapter, over_memory


def adapter_call(adapter: Adapter, **parts: Any) -> foreign_errors:
    """Return a context that turns the adapter's exceptions into errors of dlx."""
    return foreign_errors(f"{adapter.name} failed:", **parts)


def raise_as_error_of(adapter: Adapter) -> NoReturn:
    """Raise the current exception like `adapter_call`, whose context would slow down each call."""
    with adapter_call(adapter):
        raise


def array_info(obj: Any, source: Adapter) -> ArrayInfo:
    """Return the adapter's description of an array, exporting the array if necessary."""
    with adapter_call(source, source=type_name(type(obj))):
        found = source.describe(obj)
        unknown = found.info is None and found.tensor is None and not found.blockers
        return info_of(found.info, source, obj, source.export(obj) if unknown else found.tensor)


def info_of(known: Any, source: Adapter, obj: Any, tensor: Tensor | None, device: Device | None = None) -> ArrayInfo:
    """Return the description of an array from `Description.info` of its adapter, or from its tensor."""
    info = known if isinstance(known, ArrayInfo | None) else known()
    if tensor is not None and (info is None or info.shape is None):
        protocols = info.protocols if info is not None else ()
        return ArrayInfo.of_tensor(mark_immutable(tensor, source), source.name, type(obj), protocols)
    if info is not None:
        return info
    return ArrayInfo(source.name, type_name(type(obj)), device=device or source.devices.of(obj))


def abstract_tensor(info: ArrayInfo, owner: object) -> Tensor | None:
    """Return a tensor for planning only, or None if the description is incomplete."""
    if info.shape is None or info.dtype is None or info.device is None or info.address is None:
        return None  # the alignment needs the address
    return over_memory(
        info.address, info.shape, info.strides, info.dtype, info.device, readonly=info.readonly, owner=owner
    )


def device_of(source: Adapter, obj: Any) -> Device | None:
    """Return the device of an array; None if only an export shows it."""
    with adapter_call(source, source=type_name(type(obj))):
        found = source.describe(obj)
        if found.tensor is not None:
            return found.tensor.device
        return info_of(found.info, source, obj, None, found.device).device


def mark_immutable(tensor: Tensor, source: Adapter) -> Tensor:
    """Mark the tensor of an immutable framework as read-only."""
    if source.arrays.immutable and not tensor.readonly:
        return native.tensor_view(tensor, None, None, tensor.flags | READ_ONLY, None)
    return tensor
