"""A short `make soak`: each of many calls returns the result of its first run, and nothing leaks."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import warm
from project import SUPPORT


@pytest.mark.unsanitized("freed memory is kept for a while: resident memory grows")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.slow
def test_a_short_soak():
    """No managed tensor and no memory leaks; `make soak` checks times. The seed is in the output."""
    frameworks = ",".join(name for name in ("numpy", "torch") if importlib.util.find_spec(name))
    code = f"import runpy, sys; sys.path.insert(0, {str(SUPPORT)!r}); runpy.run_module('soak', run_name='__main__')"
    done = warm.run(code, "--count", "20000", "--untimed", "--frameworks", frameworks, timeout=280)
    assert done.returncode == 0 and done.stdout.endswith("0 managed tensors alive at the end.\nAll bounds hold.\n"), (
        done.stdout + done.stderr
    )
