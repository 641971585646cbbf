"""Every call of the driver fails once: an error that names it, or a right result; nothing lost, kept or out of order.

`make test-allocations` runs all cases, other targets a few of each group.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from project import SUPPORT, compiled

pytest.importorskip("numpy")

IS_WHOLE = os.environ.get("DLX_ALLOCATIONS") == "all"
SHORT = {
    "shared": "p to libq",
    "moved": "another device, libf",
    "released": "a, libb, side",
    "captured": "the same stream, 0",
    "asked": "__dlpack__ of what is fresh",
    "tables": "allocate",
    "sharing": "into a framework",
    "attaching": "by handle to dlx",
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", SHORT)
def test_every_call_fails_once(group):
    """By an error of that call alone, and by one after which all of CUDA fails; see driver_failures.py."""
    driver = compiled("fake_cuda_ipc" if group in ("sharing", "attaching") else "fake_cuda")
    wanted = group if IS_WHOLE else f"{group}={SHORT[group]}"
    command = [sys.executable, "-W", "error", str(SUPPORT / "driver_failures.py"), wanted]
    environment = os.environ | {"DLX_CUDA_DRIVER": str(driver)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
