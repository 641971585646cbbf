"""The server that the tests fork processes from: an abandoned call does not affect the next one."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import warm
from support.sanitizers import SANITIZED

MODULES = ("json",)

pytestmark = pytest.mark.skipif(SANITIZED, reason="the sanitizers do not fork")


class Interrupted(BaseException):
    """An exception that pytest-timeout or Ctrl-C raises anywhere."""


def gone(process):
    """Return whether a process has ended, or is an unread zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_an_interrupted_call_shifts_no_status(tmp_path):
    """An interrupt at any time kills the fork; the next calls read their own results."""
    note = tmp_path / "process"
    code = (
        "import os, pathlib, signal, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()));"
        "os.kill(int(sys.argv[2]), signal.SIGUSR1); time.sleep(600)"
    )

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            warm.run(code, str(note), str(os.getpid()), modules=MODULES)
    finally:
        signal.signal(signal.SIGUSR1, before)
    for status in (7, 0, 9):
        assert warm.run(f"raise SystemExit({status})", modules=MODULES).returncode == status
    child = int(note.read_text())
    while not gone(child):  # the kill takes effect soon; the time limit of tests is the bound
        os.sched_yield()


def test_a_call_that_takes_too_long_shifts_no_status():
    """The process is killed and its status read."""
    with pytest.raises(warm.subprocess.TimeoutExpired):
        warm.run("import time; time.sleep(600)", modules=MODULES, timeout=0.1)
    assert warm.run("raise SystemExit(7)", modules=MODULES).returncode == 7


@pytest.mark.parametrize("code", ["sys.stdout = sys.stderr = None", "sys.stdout.close(); sys.stderr.close()"])
def test_a_short_end_needs_no_output_to_flush(code):
    """Streams that the code has closed are ignored at exit, like Python does."""
    done = warm.run(f"import sys; {code}", modules=MODULES, env=os.environ | {"DLX_SHORT_EXIT": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
