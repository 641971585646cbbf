"""Process exits while results are alive: a part of `nox -s exits`; see also tests/core/test_exit.py."""

from __future__ import annotations

import importlib.util
import os

import pytest
from support.stress import exits

SOME = (
    *("daemon threads that convert", "modules", "a task that waits", "a child of a process with threads"),
    *("sys.exit in a view", "an unhandled exception", "an interrupt in a conversion", "a pool of threads"),
    *("a conversion after sys.modules is gone", "hooks of sys", "functions"),
)


@pytest.mark.few(5)
@pytest.mark.parametrize("ending", SOME)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_an_ending(ending):
    """Exit status and stderr are the same as without dlx."""
    wrong = exits.trial(ending, "numpy" if importlib.util.find_spec("numpy") else "")
    assert not wrong, wrong
