"""Processes that share memory are killed, in some of the rounds of `nox -s kills`."""

import subprocess

import pytest
from support.project import program


@pytest.mark.unsanitized("a process takes its time to be killed")
def test_nothing_stays_behind_when_processes_are_killed():
    """No memory, name or descriptor remains, and the surviving processes can read the shared arrays."""
    command = program("stress.kills", "--count", 12)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong; " in done.stdout and done.stderr == ""
