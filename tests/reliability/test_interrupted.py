"""Interrupts at every point where Python checks for signals in dlx's code: a part of `make test-interrupts`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from project import SUPPORT


@pytest.mark.parametrize(("what", "sample"), [("warm", 400), ("cold", 10)])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_interrupts_anywhere(what, sample):
    """Nothing is consumed or leaked, and the next call works. `make test-interrupts` uses other seeds."""
    frameworks = ",".join(name for name in ("numpy",) if importlib.util.find_spec(name))
    command = [sys.executable, SUPPORT / "interrupts.py", what, "--sample", str(sample), "--seed", "1"]
    command += ["--frameworks", frameworks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and ", 0 faults;" in done.stdout, done.stdout + done.stderr
