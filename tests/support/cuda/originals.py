"""The published CUDA builds of torch and cupy over the recording driver; `nox -s cuda` builds it.

Copies are real, kernels do nothing: tests replace a kernel by `FakeCuda.read` and `FakeCuda.write`.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
from pathlib import Path

import pytest

from dlx._core import native
from dlx._registry.registry import registry
from support.cuda.fake_cuda import DEVICE, LEGACY, MANAGED, FakeCuda

FOLDER = os.environ.get("DLX_ORIGINALS", "")

__all__ = ["FOLDER", "Cupy", "Torch", "cuda", "cupy", "handle_of", "pending", "torch"]


@pytest.fixture
def cuda(monkeypatch):
    """The driver that torch and cupy also use, or a skip; the test must leave it unchanged."""
    if not FOLDER:
        pytest.skip("this needs the CUDA builds of torch and cupy on the recording driver: nox -s cuda")
    path = Path(FOLDER) / "libcuda.so.1"
    monkeypatch.setenv("DLX_CUDA_DRIVER", str(path))
    native.lib.dlx_cuda_forget()
    driver = FakeCuda(path)
    driver.settle()
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
    """The wheel of cupy with rebuilt bindings of the runtime, and two devices."""
    module = pytest.importorskip("cupy")
    assert module.cuda.runtime.getDeviceCount() == 2
    return module


class Original:
    """A published framework, with additions for the tests of its adapter."""

    def __init__(self, name, cuda, request):
        mark = request.node.get_closest_marker("stand_in")
        if mark:
            pytest.skip(f"not on the published {name}: {mark.args[0]}")
        self.module, self.driver, self.name = importlib.import_module(name), cuda, name
        self.adapter = registry.target(name).adapter

    def __getattr__(self, name):
        return getattr(self.module, name)


class Cupy(Original):
    """cupy, with arrays written by a kernel."""

    def __init__(self, cuda, request):
        super().__init__("cupy", cuda, request)

    def full(self, shape, dtype, kind=DEVICE):
        """Return an array on the current device, written on the current stream; `kind` is the kind of memory."""
        module = self.module
        if kind == MANAGED:
            nbytes = math.prod(shape) * module.dtype(dtype).itemsize
            array = module.ndarray(shape, dtype, module.cuda.MemoryPointer(module.cuda.ManagedMemory(nbytes), 0))
        else:
            array = module.empty(shape, dtype)
        stream = module.cuda.get_current_stream().ptr or LEGACY
        self.driver.write(stream, array.data.ptr, array.nbytes, module.cuda.runtime.getDevice())
        return array


class Torch(Original):
    """torch, with tensors of 64 bytes written by a kernel."""

    def __init__(self, cuda, request):
        super().__init__("torch", cuda, request)

    def empty(self, number=0):
        """Return a tensor on a device, written on the current stream there."""
        tensor = self.module.empty(64, dtype=self.module.uint8, device=f"cuda:{number}")
        stream = self.module.cuda.current_stream(number).cuda_stream or LEGACY
        self.driver.write(stream, tensor.data_ptr(), 64, number)
        return tensor


def pending():
    """Return the number of arrays that a device still uses."""
    return native.lib.dlx_cuda_release_pending()


def handle_of(stream):
    """Return the driver's handle of a torch or cupy stream."""
    handle = getattr(stream, "cuda_stream", None)
    return (stream.ptr if handle is None else handle) or 1
