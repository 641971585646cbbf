"""Queries of a framework or the CUDA driver in a separate process: `python -m dlx.cli.probe`.

There, a framework may crash on import, and a driver that does not survive a fork may be initialized. The answer is one
line of JSON.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from dlx._api import convert as api
from dlx._core import cuda
from dlx._core.extension import ffi, lib
from dlx._registry.registry import registry
from dlx._support.reflect import type_name
from dlx._version import __version__
from dlx.adapter.base import version_of
from dlx.cli.sources import capsule_facts
from dlx.cli.targets import array_of
from dlx.errors import DeviceError

PATIENCE = 120  # seconds


def ask(question: str, name: str = "") -> dict[str, Any]:
    """Run a query in a new process; its failure is returned in ``"broken"`` (one line) and ``"details"``."""
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "dlx.cli.probe", question, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"broken": f"no answer within {PATIENCE} seconds", "details": ""}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    if done.returncode < 0:
        cause = f"it ended the process with {signal.Signals(-done.returncode).name}"
    else:
        cause = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it failed without output")
    return {"broken": cause, "details": done.stderr}


# ---- queries, in the other process -----------------------------------------------------------------------------------

# Attributes of cuDeviceGetAttribute, from cuda.h.
_ATTRIBUTES = {"managed_memory": 83, "concurrent_managed_access": 89, "memory_pools": 115, "host_memory_mapped": 19}
_CAPABILITY = (75, 76)


def _driver() -> dict[str, Any]:
    """Return the driver's version and devices; without a driver, ``"missing"`` has the reason."""
    try:
        cuda.require()
    except DeviceError as error:
        return {"missing": error.reason, "fix": error.fix, "devices": []}
    library = ctypes.CDLL(ffi.string(lib.dlx_cuda_library()).decode())  # already loaded by dlx

    def ask(function: str, *arguments: Any, kind: Any = ctypes.c_int) -> Any:
        """Return the number that a driver function writes to its first argument; None if it fails or is missing."""
        number = kind()
        failed = not hasattr(library, function) or library[function](ctypes.byref(number), *arguments)
        return None if failed else number.value

    version = ask("cuDriverGetVersion")
    found = {device: name for device, name in cuda.devices().items() if cuda.is_cuda(device)}
    handles = {device: ask("cuDeviceGet", device.id) for device in found}
    devices = []
    for device, handle in handles.items():
        capability = [ask("cuDeviceGetAttribute", each, handle) for each in _CAPABILITY]
        others = [other for other in found if other != device]
        peers = [str(other) for other in others if ask("cuDeviceCanAccessPeer", handle, handles[other])]
        devices.append(
            {
                "device": str(device),
                "name": found[device],
                "bytes": ask("cuDeviceTotalMem_v2", handle, kind=ctypes.c_size_t),
                "compute_capability": None if None in capability else ".".join(map(str, capability)),
                **{word: bool(ask("cuDeviceGetAttribute", each, handle)) for word, each in _ATTRIBUTES.items()},
                "peers": peers,
            }
        )
    number = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
    return {"version": number, "devices": devices}


def framework_devices(name: str) -> dict[str, Any]:
    """Import a target and return its visible devices, with dlx's names and its own."""
    target = registry.target(name)
    devices, types = target.adapter.devices, target.capabilities.device_types
    found = []
    for native in itertools.islice(devices.available(), 256):
        device = devices.from_native(native)
        accepted = types is None or device.type in types
        found.append({"device": str(device), "dlpack": list(device), "native": repr(native), "taken": accepted})
    return {"devices": found}


def _framework(name: str) -> dict[str, Any]:
    """Import a target, create an array, and inspect its export."""
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    adapter = registry.target(name).adapter
    answer: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    answer["version"] = __version__ if name == "dlx" else version_of(adapter)
    if next(iter(adapter.devices.available()), None) is None:
        return answer | {"no_device": True}
    array = array_of(name, "float32")
    return answer | {
        "type": type_name(type(array)),
        "exchange_api": hasattr(type(array), "__dlpack_c_exchange_api__"),
        "capsule": capsule_facts(array),
        "defects": [issue.does for issue in adapter.known_issues if issue.affects(answer["version"])],
        "out": api.plan(array, to="dlx").outcome,
        "in": api.plan(array_of("dlx", "float32"), to=name).outcome,
    }


def main(question: str, name: str) -> None:
    """Run one query and print the answer."""
    queries = {"driver": lambda _: _driver(), "devices": framework_devices, "framework": _framework}
    print(json.dumps(queries[question](name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
