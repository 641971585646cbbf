"""A real CUDA device for tests with the mark `gpu`, or a skip; slow kernels, and warm streams."""

from __future__ import annotations

import gc
import os
import time

import pytest

from dlx._core import cuda as driver
from dlx._core import native
from dlx.errors import DeviceError

N = 1 << 22
SLOW = 1_000_000_000  # cycles, about half a second

__all__ = ["N", "SLOW", "cupy", "gpu", "jax", "late_ones", "quiet", "torch", "warm_stream"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The real driver, or a skip; at the end nothing may wait for the device."""
    monkeypatch.delenv("DLX_CUDA_DRIVER")
    native.lib.dlx_cuda_forget()
    try:
        driver.require()
    except DeviceError as error:
        pytest.skip(error.reason)
    yield
    assert quiet() == 0
    native.lib.dlx_cuda_forget()


@pytest.fixture
def torch(gpu):
    """PyTorch with a device, or a skip."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA device")
    return module


@pytest.fixture
def cupy(gpu):
    """CuPy with a device, or a skip."""
    module = pytest.importorskip("cupy")
    if not module.cuda.is_available():
        pytest.skip("this cupy has no CUDA device")
    return module


@pytest.fixture
def jax(gpu):
    """JAX with a device, or a skip."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # by default it takes most of the device
    module = pytest.importorskip("jax")
    try:
        module.local_devices(backend="cuda")
    except RuntimeError as error:
        pytest.skip(f"this jax has no CUDA device: {error}")
    return module


def quiet(seconds=10):
    """Wait until nothing waits for the device; return the number that still does."""
    gc.collect()
    end = time.monotonic() + seconds
    while driver.release_pending() and time.monotonic() < end:
        time.sleep(0.01)
    return driver.release_pending()


def warm_stream(torch):
    """Return a new torch stream with one free block of N floats in its pool.

    Every kernel of the tests has run before: the first run of a kernel loads its code and waits for the whole device,
    so a test of missing order would pass.
    """
    torch.cuda.graph(torch.cuda.CUDAGraph())  # creates its stream
    stream = torch.cuda.Stream()
    while stream == torch.cuda.graph.default_capture_stream:  # torch hands out 32 streams in turn
        stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(N, device="cuda")
        torch.cuda._sleep(1000)
        tensor.fill_(1)
        tensor += 1
        assert tensor.sum().item() == 2.0 * N
    torch.cuda.synchronize()
    return stream


def late_ones(torch):
    """Return a tensor of zeros that a slow kernel on the current stream turns into ones."""
    tensor = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW)
    tensor.fill_(1)
    return tensor
