"""`dlx.DType` and `dlx.Device` of a framework's own objects: numpy's dtypes and scalar types, torch's devices."""

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


def _from_native(part: str, obj: Any) -> Any:
    """Return the dtype or device (`part` is ``"dtypes"`` or ``"devices"``) that an object is, or None."""
    module = module_of(obj if isinstance(obj, type) else type(obj))
    for adapter in registry.iterate_imported() if isinstance(obj, str) else registry.iterate_package(module):
        if part == "devices" and not has_device_objects(adapter.devices):
            continue
        try:
            found = getattr(adapter, part).from_native(obj)
        except (DlxError, MemoryError):
            raise
        except Exception:  # it is something else of that package
            continue
        if found is not None:
            return found
    if part != "devices":
        return None
    root = next(packages(module))
    number = getattr(obj, "device_id", None) if root == "cuda" else None
    return Device("cuda", number) if isinstance(number, int) else _of_namespace(root, obj)  # one of cuda.core


def _of_namespace(root: str, obj: Any) -> Device | None:
    """Return where arrays are on a device of a module of the array API; None if it is no such device."""
    module: Any = sys.modules.get(root)
    if not hasattr(module, "__array_namespace_info__"):
        return None
    try:
        return Device(tuple(module.empty(0, device=obj).__dlpack_device__()))
    except MemoryError:
        raise
    except Exception:  # it is something else of that package
        return None


types.set_from_native(_from_native)
