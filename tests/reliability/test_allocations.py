"""Every allocation of a call fails once: the result is a MemoryError or correct, and nothing leaks or is consumed."""

from __future__ import annotations

import os
import subprocess
import sysconfig

import pytest
from support.project import compiled, program

pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("tvm_ffi")
pytest.importorskip("pyarrow")

GROUPS = ["pairs", "sorts", "trees", "collected", "copied", "views", "foreign", "interop", "devices"]
SHORT = [
    [
        "pairs=numpy to torch",
        "trees=nested, numpy to torch",
        "interop=from_pointer",
        "interop=share",
        "devices=to the host",
    ]
]
IS_WHOLE = os.environ.get("DLX_ALLOCATIONS") == "all"


@pytest.fixture(scope="session")
def failing():
    """Return the compiled failing.c."""
    return compiled("failing")


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="without the GIL, PyList_New of CPython 3.14 crashes if the allocation of its items fails",
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("wanted", [[group] for group in GROUPS] if IS_WHOLE else SHORT, ids=" ".join)
@pytest.mark.slow
def test_every_allocation_fails_once(failing, fake_driver, wanted):
    """Allocations of Python, the core and numpy's table fail in turn until the call succeeds."""
    environment = os.environ | {"DLX_FAILING": str(failing), "DLX_CUDA_DRIVER": str(fake_driver)}
    command = program("stress.allocations", *wanted)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
