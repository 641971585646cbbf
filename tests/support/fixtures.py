"""The fixtures that several folders of tests share; tests/conftest.py loads them."""

from __future__ import annotations

import gc
import sys
import time

import pytest

from dlx._core import native
from dlx.adapter import KnownIssue
from support.cuda import gpulib
from support.cuda.fake_cuda import FakeCuda
from support.foreign.counting import Counting
from support.foreign.exchange import Exchange
from support.foreign.hostile import Hostile, Owner, framework
from support.processes import warm
from support.project import FREE_THREADED, compiled
from support.repository import builds

# ---- every test ------------------------------------------------------------------------------------------------------


def _collect():
    """Collect, and freeze the remaining objects: otherwise a collection takes 0.1 s with torch and jax.

    The remains of tests count as well: a recording driver, a framework for one test, and its report.
    """
    gc.collect()
    gc.freeze()


_modules = 0


def _has_many_new_objects():
    """Return True if there are thousands of new objects; the new modules count if the collector has two generations."""
    global _modules
    if not FREE_THREADED:
        return gc.get_count()[2] > 0
    before, _modules = _modules, len(sys.modules)
    return _modules > before + 20


@pytest.fixture(autouse=True)
def no_leaks():
    """Every managed tensor that a test created or consumed is released at its end."""
    if _has_many_new_objects():
        _collect()
    elif native.live():
        gc.collect()
    before = native.live()
    yield
    deadline = time.monotonic() + 5  # jax releases some in its threads
    while native.live() != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert native.live() == before, "managed tensors leaked"


def _has_gil():
    return getattr(sys, "_is_gil_enabled", lambda: True)()


@pytest.fixture(scope="session", autouse=True)
def ended():
    """Waiting processes end with the tests; no test has enabled the GIL."""
    before = _has_gil()
    yield
    warm.close()
    assert _has_gil() == before


# ---- frameworks and processes ----------------------------------------------------------------------------------------


@pytest.fixture
def np(request):
    """numpy, or a skip; ``@pytest.mark.numpy("2.1")`` skips with an older version."""
    return _installed(request, "numpy")


@pytest.fixture
def torch(request):
    """PyTorch, or a skip; ``@pytest.mark.torch("2.10")`` skips with an older version."""
    return _installed(request, "torch")


def _installed(request, name):
    """Return a framework of the version in the mark with its name, or skip."""
    found, mark = pytest.importorskip(name), request.node.get_closest_marker(name)
    version = found.__version__.partition("+")[0]  # torch's wheels have versions such as 2.13.0+cpu
    if mark is not None and KnownIssue("", "", before=mark.args[0]).affects(version):
        pytest.skip(f"this is about {name} itself from {mark.args[0]} on, found {version}")
    return found


@pytest.fixture
def python():
    """Run code in a fresh interpreter; see `warm.python`."""
    return warm.python


# ---- foreign programs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def counting():
    """The compiled counting.c."""
    return Counting(compiled("counting"))


@pytest.fixture(scope="session")
def exchange():
    """The compiled exchange.c."""
    return Exchange(compiled("exchange"))


@pytest.fixture(scope="module")
def library():
    """The compiled hostile.c."""
    return Hostile(compiled("hostile"))


@pytest.fixture
def hostile(library):
    """The library of hostile.c; it accepts everything, and lends six floats."""
    library.set("takes")
    library.memory = Owner(64)
    library.lend(native.buffer_address(memoryview(library.memory)))
    return library


@pytest.fixture
def mylib(monkeypatch):
    """A framework `mylib` whose Array is in the fast path, and whose adapter counts calls of Python."""
    yield from framework(monkeypatch)


# ---- CUDA over the recording driver ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fake_driver():
    """The compiled fake_cuda.c."""
    return compiled("fake_cuda")


@pytest.fixture
def cuda(fake_driver, monkeypatch):
    """Two CUDA devices whose driver records every call; nothing may be left at the end."""
    driver = FakeCuda(fake_driver)
    monkeypatch.setenv("DLX_CUDA_DRIVER", str(fake_driver))
    native.lib.dlx_cuda_forget()
    native.routes_clear()  # they know frameworks of other tests by name
    driver.reset()
    yield driver
    native.routes_clear()
    _collect()
    driver.resume_all()
    left = native.lib.dlx_cuda_release_pending()
    depth, mode, misuses, report = driver.depth, driver.mode, driver.misuses, driver.report
    native.lib.dlx_cuda_forget()
    driver.reset()
    assert left == 0, "memory still waits for a device"
    assert (depth, mode) == (0, 0), "a context was not popped, or a capture mode not restored"
    assert misuses == 0, report


@pytest.fixture
def lib_a(monkeypatch, cuda):
    """A framework with current streams."""
    return gpulib.install(monkeypatch, "liba", cuda)


@pytest.fixture
def lib_b(monkeypatch, cuda):
    """A second framework with current streams."""
    return gpulib.install(monkeypatch, "libb", cuda)


@pytest.fixture
def other(monkeypatch, cuda):
    """Another framework on the same devices, besides a published one."""
    return gpulib.install(monkeypatch, "other", cuda)


# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The sdist of a clean copy of the checkout."""
    return builds.distribution(tmp_path_factory, "*.tar.gz")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from nothing but the unpacked sdist, without network."""
    return builds.distribution(tmp_path_factory, "*.whl")
