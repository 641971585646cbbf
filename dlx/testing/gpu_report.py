"""The report of `python -m dlx.testing --gpu`: this machine, one line for each check, and the figures."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dlx._core.driver import format_device, format_memory, format_version
from dlx._support.text import one_line
from dlx._version import __version__
from dlx.adapter.base import installed_version
from dlx.testing.check import CHECKS, Verdict
from dlx.testing.runner import environment, run
from dlx.testing.subject import find

FILE = "dlx-gpu-report.txt"
_PACKAGES = ("torch", "cupy", "jax", "numba", "numpy", "ml_dtypes")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "DLX_CUDA_DRIVER",
)  # fmt: skip
_STATUS = {"keeps": "pass", "breaks": "fail", "error": "fail", "n/a": "not shown"}
_ORDER = ("fail", "not shown", "pass")


def report_gpu(frameworks: Sequence[str], only: Sequence[str]) -> int:
    """Run the checks on CUDA devices, print the report and write it to a file; return the exit status."""
    driver = _query_driver()
    if not driver["devices"]:
        print(f"note: no CUDA device here, so nothing was checked: {driver['missing']}")
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take most of the device
    os.environ["DLX_GPU_FRAMEWORKS"] = " ".join(frameworks)
    try:
        subject = find("dlx.testing.checks.gpu:register_checks")
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    checks = [check for check in CHECKS.values() if check.kind == "gpu" and (not only or check.name in only)]
    if not checks or any(name not in CHECKS for name in only):
        names = ", ".join(check.name for check in CHECKS.values() if check.kind == "gpu")
        print(f"--only names a check of {names}", file=sys.stderr)
        return 2
    print(f"running {len(checks)} checks, in about a minute", file=sys.stderr, flush=True)
    start = time.monotonic()
    verdicts = list(run(subject, checks))
    text = "\n".join(_describe_machine(driver) + _describe_verdicts(verdicts, time.monotonic() - start))
    print(text)
    try:
        Path(FILE).write_text(text + "\n", encoding="utf-8")
        print(f"\nPlease attach {FILE} to an issue of dlx.", file=sys.stderr)
    except OSError as error:
        print(f"\n{FILE}: {error.strerror}. Please copy this text into an issue of dlx.", file=sys.stderr)
    return int(any(_STATUS[verdict.status] == "fail" for verdict in verdicts))


def _query_driver() -> dict[str, Any]:
    """Return the facts about the driver, from a process of its own: a fork must not inherit it."""
    code = "import json; from dlx._core.driver import query_driver; print(json.dumps(query_driver()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"the query of the driver ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _describe_machine(driver: dict[str, Any]) -> list[str]:
    installed = {name: installed_version(name) for name in _PACKAGES if find_spec(name)}
    missing = ", ".join(name for name in _PACKAGES if name not in installed)
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    devices = driver["devices"]
    chosen = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    return [
        f"GPU report of dlx, {datetime.now(UTC).date()}: please attach it to an issue of dlx",
        f"dlx {__version__}, {platform.python_implementation()} {platform.python_version()}, {system}",
        ", ".join(f"{name} {version}" for name, version in installed.items()) + (missing and f"; missing: {missing}"),
        f"{format_version(driver)}, {len(devices)} device(s)",
        *(f"{each['device']} {format_memory(each)}, {format_device(each)}" for each in devices[:8]),
        *([_hide_home(one_line(", ".join(chosen), 160))] if chosen else []),
        "",
    ]


def _describe_verdicts(verdicts: Sequence[Verdict], seconds: float) -> list[str]:
    """Return one line for each check; checks that were not shown for the same reason share a line."""
    figures = [each for each in verdicts if each.check.endswith("-figures") and each.status == "keeps"]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in verdicts:
        if each not in figures:
            alone = "" if each.status == "n/a" else each.check
            rows.setdefault((_STATUS[each.status], _explain(each), alone), []).append(each.check)
    counts = Counter(_STATUS[each.status] for each in verdicts)
    lines = [f"{counts['pass']} passed, {counts['not shown']} not shown, {counts['fail']} failed, in {seconds:.0f} s"]
    for (status, text, _), names in sorted(rows.items(), key=lambda row: _ORDER.index(row[0][0])):
        name = f"{names[0]} and {len(names) - 1} more" if len(names) > 3 else ", ".join(names)
        lines.append(f"{status:<10}{name:<22} {text}")
    title = "time of one call of dlx, and its ratio to the framework's own call"
    return [*lines, "", title, *(f"{each.check.removesuffix('-figures'):<6} {each.seen}" for each in figures)]


def _explain(verdict: Verdict) -> str:
    """Return the promise of a passed check with its remark, or the reason of another verdict."""
    if verdict.status == "keeps":
        return CHECKS[verdict.check].promise + (f" ({verdict.seen})" if verdict.seen else "")
    places = re.findall(r'File "[^"]*?([^"/]+)", line (\d+)', verdict.seen)
    place = f" ({places[-1][0]}:{places[-1][1]})" if verdict.status == "error" and places else ""
    return _hide_home(one_line(verdict.seen.strip().splitlines()[-1], 200)) + place


def _hide_home(text: str) -> str:
    return text.replace(str(Path.home()), "~")
