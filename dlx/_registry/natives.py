"""`dlx.DType` and `dlx.Device` of a framework's own objects: numpy's dtypes and scalar types, torch's devices."""

from __future__ import annotations

from typing import Any

from dlx._core import types
from dlx._core.foreign import module_of
from dlx._core.types import Device, DType
from dlx._registry.registry import packages, registry
from dlx.errors import DlxError

__all__ = ["Device", "DType"]


def _from_native(part: str, obj: Any) -> Any:
    """Return the dtype or device (`part` is ``"dtypes"`` or ``"devices"``) that an object is, or None."""
    module = module_of(obj if isinstance(obj, type) else type(obj))
    for adapter in registry.of_package(module):
        try:
            found = getattr(adapter, part).from_native(obj)
        except (DlxError, MemoryError):
            raise
        except Exception:  # it is something else of that package
            continue
        if found is not None:
            return found
    number = getattr(obj, "device_id", None) if part == "devices" and next(packages(module)) == "cuda" else None
    return Device("cuda", number) if isinstance(number, int) else None  # one of cuda.core


types.set_from_native(_from_native)
