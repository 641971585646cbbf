"""Queries of a framework or the CUDA driver in a separate process: `python -m dlx.cli.probe`.

There, a framework may crash on import, and a driver that does not survive a fork may be initialized. The answer is one
line of JSON. A query of the driver imports no more of dlx than it needs.
"""

from __future__ import annotations

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

from dlx._core.driver import query_driver
from dlx._version import __version__

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


def framework_devices(name: str) -> dict[str, Any]:
    """Import a target and return its visible devices, with dlx's names and its own."""
    from dlx._registry.registry import registry

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
    from dlx._api import convert as api
    from dlx._registry.registry import registry
    from dlx._support.reflect import type_name
    from dlx.adapter.base import version_of
    from dlx.cli.objects import capsule_facts
    from dlx.cli.targets import array_of

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
    queries = {"driver": lambda _: query_driver(), "devices": framework_devices, "framework": _framework}
    print(json.dumps(queries[question](name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
