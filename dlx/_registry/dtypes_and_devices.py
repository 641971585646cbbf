"""Conversion of frameworks' dtype and device objects to `dlx.DType` and `dlx.Device`."""

from __future__ import annotations

import sys
from typing import Any

from dlx._core import types
from dlx._core.types import Device as Device
from dlx._core.types import DType as DType
from dlx._registry.registry import registry
from dlx._support.reflect import module_of, packages
from dlx.adapter.base import has_device_objects
from dlx.errors import DlxError


def read_native(part: str, obj: Any) -> Any:
    """Return the dtype or device of a framework's object, or None. `part`: ``"dtypes"`` or ``"devices"``."""
    module = module_of(obj if isinstance(obj, type) else type(obj))
    for adapter in registry.iterate_imported() if isinstance(obj, str) else registry.iterate_package(module):
        if part == "devices" and not has_device_objects(adapter.devices):
            continue
        try:
            found = getattr(adapter, part).from_native(obj)
        except (DlxError, MemoryError):
            raise
        except Exception:
            continue
        if found is not None:
            return found
    if part != "devices":
        return None
    root = next(packages(module))
    number = getattr(obj, "device_id", None) if root == "cuda" else None
    return Device("cuda", number) if isinstance(number, int) else _device_of_namespace(root, obj)  # of cuda.core


def _device_of_namespace(root: str, obj: Any) -> Device | None:
    """Return the device of an array API module's device object, or None for other objects."""
    module: Any = sys.modules.get(root)
    if not hasattr(module, "__array_namespace_info__"):
        return None
    try:
        return Device(tuple(module.empty(0, device=obj).__dlpack_device__()))
    except MemoryError:
        raise
    except Exception:
        return None


types.set_from_native(read_native)
