"""Interrupts at points where Python checks for signals in dlx's code; a sample of `nox -s interrupts`."""

from __future__ import annotations

import importlib.util
import os
import subprocess

import pytest
from support.project import program


@pytest.mark.parametrize(("what", "sample"), [("warm", 400), ("cold", 10)])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_interrupts_anywhere(what, sample):
    """Nothing is used up, nothing is left, and the next call works. Another seed: `nox -s interrupts`."""
    frameworks = ",".join(name for name in ("numpy",) if importlib.util.find_spec(name))
    command = program("stress.interrupts", what, "--sample", sample, "--seed", 1)
    command += ["--frameworks", frameworks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and ", 0 faults;" in done.stdout, done.stdout + done.stderr
