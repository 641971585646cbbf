"""Questions to one framework, or to the driver, asked in a process of their own: `python -m dlx.cli.probe`.

A framework that dies on import, or a driver that must not be initialised in a process that forks later, harms nobody
there. Asked by `dlx doctor --load` and `dlx devices`; the answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["ask"]

PATIENCE = 120  # seconds


def ask(question: str, name: str = "") -> dict[str, Any]:
    """Ask in a fresh process; what goes wrong there is in ``"broken"``, one line, and ``"details"``."""
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
        cause = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it failed in silence")
    return {"broken": cause, "details": done.stderr}


def _framework(name: str) -> dict[str, Any]:
    """Import a target, make an array of it, and inspect what it exports."""
    import warnings

    warnings.simplefilter("ignore")
    from dlx._api import convert as api
    from dlx._registry.registry import registry
    from dlx._support.reflect import type_name
    from dlx._version import __version__
    from dlx.adapter.base import version_of
    from dlx.cli.sources.objects import capsule_facts
    from dlx.cli.targets import array_of

    start = time.perf_counter()
    adapter = registry.target(name).adapter
    answer: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    answer["version"] = __version__ if name == "dlx" else version_of(adapter)
    if next(iter(adapter.devices.available()), None) is None:
        return answer | {"no_device": True}
    array = array_of(name, "float32")
    table = hasattr(type(array), "__dlpack_c_exchange_api__")
    answer |= {"type": type_name(type(array)), "exchange_api": table, "capsule": capsule_facts(array)}
    answer["defects"] = [issue.does for issue in adapter.known_issues if issue.affects(answer["version"])]
    answer["out"], answer["in"] = (
        api.plan(array, to="dlx").outcome,
        api.plan(array_of("dlx", "float32"), to=name).outcome,
    )
    return answer


def main(argv: list[str]) -> int:
    """Answer one question on stdout."""
    question, name = argv
    if question == "driver":
        from dlx.cli.driver import driver

        answer = driver()
    elif question == "devices":
        from dlx.cli.driver import framework_devices

        answer = framework_devices(name)
    else:
        answer = _framework(name)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
