"""Every driver call fails once: dlx raises an error that names it, or returns a right result; nothing leaks or races.

`nox -s allocations` runs all cases, other targets a few of each group.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from support.project import compiled, program

pytest.importorskip("numpy")

IS_WHOLE = os.environ.get("DLX_ALLOCATIONS") == "all"
SHORT = {
    "shared": "p to libq",
    "moved": "another device, libf",
    "released": "a, libb, side",
    "captured": "the same stream, 0",
    "asked": "__dlpack__ of fresh memory",
    "tables": "allocate",
    "sharing": "into a framework",
    "attaching": "by handle to dlx",
}


def ran(wanted, timeout=250):
    """Run the program for a group, or a part of it; show its output after a timeout."""
    driver = compiled("fake_cuda_ipc" if wanted.startswith(("sharing", "attaching")) else "fake_cuda")
    command = program("cuda.driver_failures", wanted, options=("-W", "error"))
    environment = os.environ | {"DLX_CUDA_DRIVER": str(driver)}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{error.stdout}\n{error.stderr}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", SHORT)
@pytest.mark.slow
def test_every_call_fails_once(group):
    """By an error of that call only, and by an error that breaks CUDA; see driver_failures.py."""
    done = ran(group if IS_WHOLE else f"{group}={SHORT[group]}", 3500 if IS_WHOLE else 250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr


def test_what_is_wrong_is_found():
    """The test above can fail: a missing order races; wrong errors and leaks are reported."""
    done = ran("planted")
    for words in ("races with a write", "the error does not say so: it did not work", "1 managed tensors left"):
        assert words in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
