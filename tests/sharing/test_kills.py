"""Processes that share memory are killed, in some of the rounds of `make test-kills`."""

import subprocess
import sys

import pytest
from project import ROOT


@pytest.mark.unsanitized("a process takes its time to be killed")
def test_nothing_stays_behind_when_processes_are_killed():
    """No memory, name or descriptor remains, and the surviving processes can read the shared arrays."""
    command = [sys.executable, str(ROOT / "tests/support/kills.py"), "--count", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong; " in done.stdout and done.stderr == ""
