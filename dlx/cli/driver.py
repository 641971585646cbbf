"""What the CUDA driver and a framework say of devices. Called in a process of its own: it initialises them."""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Any

__all__ = ["driver", "framework_devices"]

LIBRARY = "libcuda.so.1"
# Attributes of cuDeviceGetAttribute, by cuda.h.
_ATTRIBUTES = {"managed_memory": 83, "concurrent_managed_access": 89, "memory_pools": 115, "host_memory_mapped": 19}
_CAPABILITY = (75, 76)


def driver() -> dict[str, Any]:
    """Return the driver's version and its devices, or in ``"missing"`` why there are none."""
    name = os.environ.get("DLX_CUDA_DRIVER") or LIBRARY
    try:
        cuda = ctypes.CDLL(name)
    except OSError:
        return {"missing": "no CUDA driver was found", "devices": []}
    try:
        number = ctypes.c_int()
        status = cuda.cuInit(0)
        if status:
            return {"missing": f"the CUDA driver cannot be used: cuInit gave {_error(cuda, status)}", "devices": []}
        cuda.cuDriverGetVersion(ctypes.byref(number))
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        cuda.cuDeviceGetCount(ctypes.byref(number))
        return {"version": version, "devices": [_device(cuda, each, number.value) for each in range(number.value)]}
    except AttributeError as error:  # a library that lacks a function
        return {"missing": f"the CUDA driver is not whole: {error}", "devices": []}


def _error(cuda: Any, status: int) -> str:
    name = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, ctypes.byref(name)) or not name.value:
        return str(status)
    return name.value.decode(errors="replace")


def _device(cuda: Any, place: int, count: int) -> dict[str, Any]:
    handle, found = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(handle), place)
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, 256, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(number: int) -> int:
        cuda.cuDeviceGetAttribute(ctypes.byref(found), number, handle)
        return found.value

    peers = []
    for other in range(count):
        there = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(there), other)
        cuda.cuDeviceCanAccessPeer(ctypes.byref(found), handle, there)
        if other != place and found.value:
            peers.append(f"cuda:{other}")
    return {
        "id": place,
        "name": name.value.decode(errors="replace"),
        "bytes": memory.value,
        "compute_capability": ".".join(str(attribute(each)) for each in _CAPABILITY),
        **{word: bool(attribute(each)) for word, each in _ATTRIBUTES.items()},
        "peers": peers,
    }


def framework_devices(name: str) -> dict[str, Any]:
    """Import a target and return the devices that it sees, by dlx's names, with its own words for them."""
    from dlx.registry import registry

    adapter = registry.target(name)
    stated = adapter.capabilities
    assert stated is not None
    found = []
    for native in itertools.islice(adapter.devices(), 256):
        device = adapter.device_from(native)
        taken = stated.device_types is None or device.type in stated.device_types
        found.append({"device": str(device), "dlpack": list(device), "native": repr(native), "taken": taken})
    return {"devices": found}
