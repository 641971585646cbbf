"""The CUDA builds of torch and cupy, as they are published, on the recording driver; `make test-cuda` builds that.

Copies are true, kernels do nothing. Tests stand in for a kernel with `FakeCuda.read` and `FakeCuda.write`.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from fake_cuda import FakeCuda

from dlx._core import native

FOLDER = os.environ.get("DLX_ORIGINALS", "")

__all__ = ["FOLDER", "cuda", "cupy", "handle_of", "pending", "torch"]


@pytest.fixture
def cuda(monkeypatch):
    """The driver that torch and cupy use as well, or a skip; it is as it was when the test is over."""
    if not FOLDER:
        pytest.skip("this needs the CUDA builds of torch and cupy on the recording driver: make test-cuda")
    path = Path(FOLDER) / "libcuda.so.1"
    monkeypatch.setenv("DLX_CUDA_DRIVER", str(path))
    native.lib.dlx_cuda_forget()
    driver = FakeCuda(path)
    driver.clear_report()
    driver.forget()
    before = driver.depth, driver.mode
    yield driver
    gc.collect()
    driver.resume_all()
    left, races, misuses, report = pending(), driver.races, driver.misuses, driver.report
    driver.clear_report()
    native.lib.dlx_cuda_forget()
    assert left == 0, "memory still waits for a device"
    assert (max(driver.depth, 1), driver.mode) == (max(before[0], 1), before[1]), "a context or a mode was left behind"
    assert races == misuses == 0, report


@pytest.fixture
def torch(cuda):
    """The CUDA build of torch, with two devices."""
    module = pytest.importorskip("torch")
    assert module.cuda.device_count() == 2
    module.zeros(1).cuda()
    return module


@pytest.fixture
def cupy(cuda):
    """The wheel of cupy with its own bindings of the runtime, with two devices."""
    module = pytest.importorskip("cupy")
    assert module.cuda.runtime.getDeviceCount() == 2
    return module


def pending():
    """How many arrays are still in use by a device."""
    return native.lib.dlx_cuda_release_pending()


def handle_of(stream):
    """The handle of a stream of torch or cupy, as the driver knows it."""
    handle = getattr(stream, "cuda_stream", None)
    return (stream.ptr if handle is None else handle) or 1
