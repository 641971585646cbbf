"""`DLX_SANITIZE=1` builds every extension with both sanitizers; otherwise none has them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dlx._core import native


def test_the_sanitizers_are_in_every_extension_or_in_none():
    """The adapters' C has the same sanitizers as the core; `nox -s sanitize` runs this test with them."""
    _ffi, table, guards = (
        pytest.importorskip(name) for name in ("dlx._ffi", "dlx_adapters._dlx_numpy", "dlx_adapters._dlx_torch")
    )
    if shutil.which("nm") is None:
        pytest.skip("nm, which lists symbols, is not installed")
    wanted = "-fsanitize=address,undefined" in native.ffi.string(native.lib.dlx_compile_flags()).decode()
    for module in (_ffi, table, guards):
        symbols = subprocess.run(["nm", "-D", module.__file__], capture_output=True, text=True, check=True).stdout
        assert ("__asan_report_load" in symbols, "__ubsan_handle" in symbols) == (wanted, wanted)
