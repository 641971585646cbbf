"""Run checks in processes that may die: a worker reports each start and result; if it dies, its check is broken.

Each check that is `alone` has its own worker, which must exit cleanly. The others share one; if it dies, the current
check is broken, and a new worker runs the rest.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlx._support.module import set_module
from dlx.testing.check import CHECKS, Check, Verdict
from dlx.testing.subject import Subject

PATIENCE = 120  # seconds until a check counts as hanging
STARTING = 300  # seconds until a worker begins its first check: a busy machine imports frameworks slowly


@set_module("dlx.testing")
def run(subject: Subject, checks: Sequence[Check]) -> Iterator[Verdict]:
    """Return the verdict of each check, in order; a fatal check kills only its own process.

    Raises
    ------
    ValueError
        If a new process cannot find the subject: it has no `spec`.
    """
    if not subject.spec:
        raise ValueError(f"{subject.name} has no spec for a new process. Pass spec='module:attribute'")
    verdicts: dict[str, Verdict] = {}
    while together := [check for check in checks if not check.alone and check.name not in verdicts]:
        found = _run_worker(subject, together)
        if not found:
            raise RuntimeError(f"the worker for {subject.name} failed to start")
        verdicts |= found
    for check in checks:
        if check.alone:
            verdicts |= _run_worker(subject, [check])
        yield verdicts[check.name]


def environment() -> dict[str, str]:
    """Return the environment of a new process that imports the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _run_worker(subject: Subject, checks: Sequence[Check]) -> dict[str, Verdict]:
    """Run checks in one process until it ends; return their verdicts."""
    reader, writer = os.pipe()
    order = {"spec": subject.spec, "checks": [check.name for check in checks], "exceptions": dict(subject.exceptions)}
    checked = ["-X", "dev"] if checks[0].alone else []  # the allocators then detect calls without the GIL
    command = [sys.executable, *checked, "-m", "dlx.testing", "--work", json.dumps(order), str(writer)]
    with subprocess.Popen(
        command, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environment(),
    ) as process:  # fmt: skip
        os.close(writer)
        reports, hangs = _listen(reader, process)
        output = (process.stdout.read() if process.stdout else "").strip()
    verdicts: dict[str, Verdict] = {}
    begun = ""
    for report in reports:
        word, _, rest = report.partition(" ")
        if word == "failed":
            raise ImportError(json.loads(rest))
        begun = rest if word == "begin" else ""
        if word == "end":
            verdict = Verdict(**json.loads(rest))
            verdicts[verdict.check] = verdict
    code = process.returncode
    if code and checks[0].alone:
        begun = begun or next(iter(verdicts), "")
    if begun:
        seen = f"the process {'hangs' if hangs else _describe_exit(code)}{_find_last_line(output)}"
        verdicts[begun] = Verdict(begun, subject.name, "breaks", seen).under(subject, CHECKS[begun])
    elif code and not verdicts:
        how = f"did not begin within {STARTING} seconds" if hangs else _describe_exit(code)
        raise RuntimeError(f"the worker for {subject.name} {how}{_find_last_line(output)}")
    return verdicts


def _listen(reader: int, process: subprocess.Popen[str]) -> tuple[list[str], bool]:
    """Return a worker's reports until it ends, and whether it hung and was killed."""
    text = b""
    with os.fdopen(reader, "rb", buffering=0) as reports:
        while select.select([reports], [], [], PATIENCE if text else STARTING)[0]:
            piece = reports.read(65536)
            if not piece:
                return text.decode().splitlines(), False
            text += piece
    process.kill()
    return text.decode().splitlines(), True


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    known = -code in [*signal.Signals]
    return f"died of {signal.Signals(-code).name if known else f'signal {-code}'}"


def _find_last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for start in ("what():", "terminate called", "Fatal Python error"):  # the most informative line first
        lines = [line for line in lines if line.startswith(start)] or lines
    return f": {lines[-1].replace(str(Path.home()), '~')[:160]}" if lines else ""
