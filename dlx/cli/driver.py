"""What the CUDA driver and a framework say of devices. Called in a process of its own: it initialises them.

Which devices there are, and their names, is what `dlx.devices` says; the driver is asked here for the rest.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Any

from dlx._core import cuda
from dlx._core.types import Device
from dlx.errors import DeviceError

__all__ = ["driver", "framework_devices"]

# Attributes of cuDeviceGetAttribute, by cuda.h.
_ATTRIBUTES = {"managed_memory": 83, "concurrent_managed_access": 89, "memory_pools": 115, "host_memory_mapped": 19}
_CAPABILITY = (75, 76)


def driver() -> dict[str, Any]:
    """Return the driver's version and its devices, or in ``"missing"`` why there are none."""
    try:
        cuda.require()
    except DeviceError as error:
        return {"missing": error.reason, "fix": error.fix, "devices": []}
    found = {device: name for device, name in cuda.devices().items() if cuda.is_cuda(device)}
    library = ctypes.CDLL(os.environ.get("DLX_CUDA_DRIVER") or "libcuda.so.1")  # the one that dlx has loaded
    version = _asked(library, "cuDriverGetVersion")
    return {
        "version": None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        "devices": [_device(library, device, found) for device in found],
    }


def _asked(library: ctypes.CDLL, function: str, *arguments: Any, kind: Any = ctypes.c_int) -> Any:
    """Return the number that a function of the driver writes to its first argument; None where it gives none."""
    number = kind()
    try:
        status = getattr(library, function)(ctypes.byref(number), *arguments)
    except AttributeError:  # a driver that has no such function
        return None
    return None if status else number.value


def _device(library: ctypes.CDLL, device: Device, found: dict[Device, str]) -> dict[str, Any]:
    def attribute(what: int) -> Any:
        return _asked(library, "cuDeviceGetAttribute", what, handle)

    handle = _asked(library, "cuDeviceGet", device.id)
    others = {other: _asked(library, "cuDeviceGet", other.id) for other in found if other != device}
    capability = [attribute(each) for each in _CAPABILITY]
    return {
        "device": str(device),
        "name": found[device],
        "bytes": _asked(library, "cuDeviceTotalMem_v2", handle, kind=ctypes.c_size_t),
        "compute_capability": None if None in capability else ".".join(map(str, capability)),
        **{word: bool(attribute(each)) for word, each in _ATTRIBUTES.items()},
        "peers": [
            str(other) for other, there in others.items() if _asked(library, "cuDeviceCanAccessPeer", handle, there)
        ],
    }


def framework_devices(name: str) -> dict[str, Any]:
    """Import a target and return the devices that it sees, by dlx's names, with its own words for them."""
    from dlx._registry.registry import registry  # adapters are read only where a framework is asked for

    target = registry.target(name)
    devices, types = target.adapter.devices, target.capabilities.device_types
    found = []
    for native in itertools.islice(devices.available(), 256):
        device = devices.from_native(native)
        taken = types is None or device.type in types
        found.append({"device": str(device), "dlpack": list(device), "native": repr(native), "taken": taken})
    return {"devices": found}
