"""Run checks in processes that may die: a worker reports each start and result; a check whose worker dies is broken.

Checks that are `alone` have a worker each, which must also end well. The others share one; when it dies, the check it
was in is blamed, and a new one goes on with the rest.
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

__all__ = ["environment", "run"]

PATIENCE = 120  # seconds that one check may take before it counts as hanging
STARTING = 300  # seconds until a worker begins its first check: on a busy machine a framework is imported slowly


@set_module("dlx.testing")
def run(subject: Subject, checks: Sequence[Check]) -> Iterator[Verdict]:
    """Give the verdict of each check, in order; a fatal one takes its own process only.

    Raises
    ------
    ValueError
        If a fresh process could not find the subject: it has no `spec`.
    """
    if not subject.spec:
        raise ValueError(f"{subject.name} has no spec by which a fresh process finds it: module:attribute")
    together = [check for check in checks if not check.alone]
    verdicts: dict[str, Verdict] = {}
    while together:
        found = _worker(subject, together)
        verdicts |= found
        left = [check for check in together if check.name not in found]
        if len(left) == len(together):
            raise RuntimeError(f"the worker for {subject.name} does not start")
        together = left
    for check in checks:
        if check.alone:
            verdicts |= _worker(subject, [check])
        yield verdicts[check.name]


def environment() -> dict[str, str]:
    """Return the environment of a fresh process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _worker(subject: Subject, checks: Sequence[Check]) -> dict[str, Verdict]:
    """Run checks in one process until it ends; return what is known then."""
    reader, writer = os.pipe()
    order = {"spec": subject.spec, "checks": [check.name for check in checks], "exceptions": dict(subject.exceptions)}
    checked = ["-X", "dev"] if checks[0].alone else []  # the allocators then detect calls without the GIL
    command = [sys.executable, *checked, "-m", "dlx.testing", "--work", json.dumps(order), str(writer)]
    with subprocess.Popen(
        command, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environment(),
    ) as process:  # fmt: skip
        os.close(writer)
        lines, hangs = _listen(reader, process)
        said = (process.stdout.read() if process.stdout else "").strip()
    verdicts: dict[str, Verdict] = {}
    begun = ""
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "begin":
            begun = rest
        elif word == "end":
            verdict = Verdict(**json.loads(rest))
            verdicts[verdict.check] = verdict
            begun = ""
        elif word == "failed":
            raise ImportError(json.loads(rest))
    code = process.returncode
    blamed = begun or (next(iter(verdicts), "") if code and checks[0].alone else "")
    if blamed and (begun or code):
        how = "hangs" if hangs else _ending(code)
        verdict = Verdict(blamed, subject.name, "breaks", f"the process {how}{_last(said)}")
        verdicts[blamed] = verdict.under(subject, CHECKS[blamed])
    elif code and not verdicts:
        how = f"did not begin within {STARTING} seconds" if hangs else _ending(code)
        raise RuntimeError(f"the worker for {subject.name} {how}{_last(said)}")
    return verdicts


def _listen(reader: int, process: subprocess.Popen[str]) -> tuple[list[str], bool]:
    """Read a worker's reports until it ends, or times out."""
    text = b""
    hangs = False
    output = process.stdout
    assert output is not None
    os.set_blocking(output.fileno(), True)
    while True:
        ready, _, _ = select.select([reader], [], [], PATIENCE if text else STARTING)
        if not ready:
            hangs = True
            process.kill()
            break
        piece = os.read(reader, 65536)
        if not piece:
            break
        text += piece
    os.close(reader)
    return text.decode().splitlines(), hangs


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"
    return f"ended with status {code}"


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for start in ("what():", "terminate called", "Fatal Python error"):  # the most telling line first
        lines = [line for line in lines if line.startswith(start)] or lines
    return f": {lines[-1].replace(str(Path.home()), '~')[:160]}" if lines else ""
