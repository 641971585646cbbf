"""Fixtures: no test may leak a managed tensor; what could kill the process runs in a subprocess; a foreign producer."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import warnings

import pytest
from support.cuda.fake_cuda import FakeCuda
from support.foreign.counting import Counting
from support.foreign.exchange import exchange  # noqa: F401  (a fixture)
from support.processes import warm
from support.project import FREE_THREADED, compiled
from support.repository.builds import sdist, wheel  # noqa: F401  (fixtures)
from support.sanitizers import SANITIZED

from dlx._core import native
from dlx.adapter import KnownIssue

sys.dont_write_bytecode = False  # what pytest has rewritten is kept for the next run, and for processes beside this one

# Threads of torch's that wait for work sleep, instead of taking the processor from the tests beside them: two thirds of
# the time of what trains with torch. OpenMP reads it where torch is imported, in processes of tests as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# jax compiles without optimization: what compiles many small functions once each takes a quarter less. Where nothing is
# left out, and in CI, jax is as users have it.
if os.environ.get("DLX_SHORT_EXIT"):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# torch's compiler, which much of torch imports, finds no triton: to import that would turn the GIL on.
if FREE_THREADED:
    sys.modules.setdefault("triton", None)

# A test that says nothing about CUDA sees no driver, also where there is one; see fake_cuda.py and the mark `gpu`.
NO_DRIVER = "no-driver-in-this-test.so"
os.environ["DLX_CUDA_DRIVER"] = NO_DRIVER


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Import a share of the files before all are collected, where other processes import the other shares.

    Most of that time is pytest's rewriting of assertions, whose result the others then find in a file.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted((session.config.rootpath / "tests").glob("*/test_*.py"))
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as pytest does
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # as for all that pytest imports itself
                importlib.import_module(path.stem)
        except (Exception, pytest.skip.Exception):
            continue  # it is tried again, and then told, when it is collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is shipped is built for some tests only: these are slow."""
    for item in items:
        if {"sdist", "wheel"} & {*item.fixturenames}:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    """Skip what means nothing with the sanitizers, or on a free-threaded build; the mark says why."""
    mark = item.get_closest_marker("unsanitized")
    if mark is not None and SANITIZED:
        pytest.skip(f"with the sanitizers {mark.args[0]}")
    mark = item.get_closest_marker("gil")
    if mark is not None and FREE_THREADED:
        pytest.skip(f"on a free-threaded build {mark.args[0]}")


def has_gil():
    """Whether Python runs with its GIL now."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def _collect():
    """Collect, and take what is left out of the collector's sight: with torch and jax there a collection is 0.1 s else.

    What tests leave behind counts as well: a recording driver, a framework for one test and its report in each.
    """
    gc.collect()
    gc.freeze()


_modules = 0


def _has_many_new_objects():
    """Whether there are thousands of new objects: a collector of two generations does not count them, modules do."""
    global _modules
    if not FREE_THREADED:
        return gc.get_count()[2] > 0
    before, _modules = _modules, len(sys.modules)
    return _modules > before + 20


@pytest.fixture(autouse=True)
def no_leaks():
    """Every managed tensor that a test made or consumed is released when the test is over."""
    if _has_many_new_objects():
        _collect()
    elif native.live():
        gc.collect()
    before = native.live()
    yield
    deadline = time.monotonic() + 5  # jax releases some on threads of its own
    while native.live() != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert native.live() == before, "managed tensors leaked"


@pytest.fixture
def np(request):
    """numpy, or a skip; ``@pytest.mark.numpy("2.1")`` skips where an older one is installed."""
    return _installed(request, "numpy")


@pytest.fixture
def torch(request):
    """torch, or a skip; ``@pytest.mark.torch("2.10")`` skips where an older one is installed."""
    return _installed(request, "torch")


def _installed(request, name):
    """Return a framework that is as new as the mark of its name says, or skip."""
    found, mark = pytest.importorskip(name), request.node.get_closest_marker(name)
    version = found.__version__.partition("+")[0]  # torch's wheels call themselves 2.13.0+cpu
    if mark is not None and KnownIssue("", "", before=mark.args[0]).affects(version):
        pytest.skip(f"this is about {name} itself from {mark.args[0]} on, found {version}")
    return found


@pytest.fixture(scope="session", autouse=True)
def ended():
    """Processes that others were forked from end with the tests; no test has switched the GIL on."""
    before = has_gil()
    yield
    warm.close()
    assert has_gil() == before


@pytest.fixture
def python():
    """Run code in a fresh interpreter; see `warm.python`."""
    return warm.python


@pytest.fixture(scope="session")
def counting():
    """The compiled counting.c."""
    return Counting(compiled("counting"))


@pytest.fixture(scope="session")
def fake_driver():
    """The compiled fake_cuda.c."""
    return compiled("fake_cuda")


@pytest.fixture
def cuda(fake_driver, monkeypatch):
    """A machine with two CUDA devices whose driver keeps account of everything; nothing may be left of it."""
    driver = FakeCuda(fake_driver)
    monkeypatch.setenv("DLX_CUDA_DRIVER", str(fake_driver))
    native.lib.dlx_cuda_forget()
    native.routes_clear()  # which know frameworks of other tests by their names
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
    assert (depth, mode) == (0, 0), "a context was not popped, or a capture mode not put back"
    assert misuses == 0, report
