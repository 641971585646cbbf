"""Facts about the CUDA driver and its devices, for reports. They are read with ctypes, and create no context."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from dlx._core import cuda
from dlx._core.extension import ffi, lib
from dlx._core.types import Device
from dlx._support.text import amount
from dlx.errors import DeviceError

# Attributes of cuDeviceGetAttribute, from cuda.h.
_ATTRIBUTES = {"managed_memory": 83, "concurrent_managed_access": 89, "memory_pools": 115, "host_memory_mapped": 19}
_CAPABILITY = (75, 76)
_COMPUTE_MODE, _MPS = 20, 133
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}
_ABLE = ("managed_memory", "memory_pools", "host_memory_mapped")


def query_driver() -> dict[str, Any]:
    """Return the driver's versions and devices; without a driver, ``"missing"`` has the reason."""
    try:
        cuda.require()
    except DeviceError as error:
        return {"missing": error.reason, "fix": error.fix, "devices": []}
    driver = _Library(ffi.string(lib.dlx_cuda_library()).decode())  # already loaded by dlx
    nvml = _Library("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1", "nvmlInit_v2")
    version = driver.number("cuDriverGetVersion")
    names = {device: name for device, name in cuda.devices().items() if cuda.is_cuda(device)}
    handles = {device: driver.number("cuDeviceGet", device.id) for device in names}
    return {
        "version": None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        "release": nvml.text("nvmlSystemGetDriverVersion", 80),
        "devices": [_query_device(driver, nvml, device, name, handles) for device, name in names.items()],
    }


def _query_device(
    driver: _Library, nvml: _Library, device: Device, name: str, handles: dict[Device, int | None]
) -> dict[str, Any]:
    handle = handles[device]

    def ask(attribute: int) -> Any:
        return driver.number("cuDeviceGetAttribute", attribute, handle)

    capability, mode, mps = [ask(each) for each in _CAPABILITY], ask(_COMPUTE_MODE), ask(_MPS)
    others = [other for other in handles if other != device]
    # The two libraries number devices differently.
    bus = (driver.text("cuDeviceGetPCIBusId", 32, handle) or "").encode()
    managed = nvml.number("nvmlDeviceGetHandleByPciBusId_v2", kind=ctypes.c_void_p, before=[bus])
    here = None if managed is None else [ctypes.c_void_p(managed)]
    memory = here and nvml.number("nvmlDeviceGetMemoryInfo", kind=ctypes.c_uint64 * 3, before=here)
    mig = here and nvml.number("nvmlDeviceGetMigMode", ctypes.byref(ctypes.c_uint()), kind=ctypes.c_uint, before=here)
    return {
        "device": str(device),
        "name": name,
        "bytes": driver.number("cuDeviceTotalMem_v2", handle, kind=ctypes.c_size_t),
        "free": memory[1] if memory else None,  # of (total, free, used)
        "compute_capability": None if None in capability else ".".join(map(str, capability)),
        "compute_mode": None if mode is None else _COMPUTE_MODES.get(mode, str(mode)),
        "mig": None if mig is None else bool(mig),
        "mps": None if mps is None else bool(mps),
        **{word: bool(ask(each)) for word, each in _ATTRIBUTES.items()},
        "peers": [str(other) for other in others if driver.number("cuDeviceCanAccessPeer", handle, handles[other])],
    }


class _Library:
    """A library of NVIDIA's driver; a function that fails or is missing returns None."""

    def __init__(self, name: str, start: str = "") -> None:
        try:
            self._library: Any = ctypes.CDLL(name)
        except OSError:
            self._library = None
        if start and self._call(start):
            self._library = None

    def _call(self, function: str, *arguments: Any) -> Any:
        """Return the status of a function, 0 for success."""
        return not hasattr(self._library, function) or self._library[function](*arguments)

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_int, before: Any = ()) -> Any:
        """Return the value that a function writes to its first argument, or to the one after `before`."""
        value = kind()
        failed = self._call(function, *before, ctypes.byref(value), *arguments)
        return None if failed else getattr(value, "value", value)

    def text(self, function: str, room: int, *arguments: Any) -> str | None:
        """Return the text that a function writes to its first argument."""
        value = ctypes.create_string_buffer(room)
        return None if self._call(function, value, room, *arguments) else value.value.decode(errors="replace")


def format_version(driver: dict[str, Any]) -> str:
    """Return the versions of the driver in words, for example ``"driver 580.82.07 (CUDA 13.0)"``."""
    version = f"CUDA {driver['version'] or '?'}"
    return f"driver {driver['release']} ({version})" if driver["release"] else f"driver of {version}"


def format_device(device: dict[str, Any]) -> str:
    """Return the facts about a device in words, without its name and memory."""
    able = [word.replace("_", " ") for word in _ABLE if device[word]]
    modes = [f"{word.upper()} {'on' if device[word] else 'off'}" for word in ("mig", "mps") if device[word] is not None]
    if device["compute_mode"] is not None:
        modes.insert(0, f"compute mode {device['compute_mode']}")
    peers = f"peer access to {', '.join(device['peers'])}" if device["peers"] else "no peer access"
    return ", ".join([f"compute capability {device['compute_capability'] or '?'}", *modes, *able, peers])


def format_memory(device: dict[str, Any]) -> str:
    """Return the name of a device and its memory in words."""
    sizes = [amount(device["bytes"])] if device["bytes"] else []
    if device["free"] is not None:
        sizes.append(f"{amount(device['free'])} free")
    return ", ".join([device["name"], *sizes])
