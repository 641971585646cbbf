"""Settings of all tests; the shared fixtures are in tests/support/fixtures.py."""

from __future__ import annotations

import collections
import importlib
import os
import sys
import warnings

import pytest
from support.project import FREE_THREADED
from support.sanitizers import SANITIZED

pytest_plugins = ["support.fixtures"]

sys.dont_write_bytecode = False  # the next run, and other processes of this one, use pytest's rewritten modules

# Waiting threads of torch sleep instead of using the processor: training with torch takes a third of the time. OpenMP
# reads this when torch is imported, also in processes of tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# jax compiles without optimization, which saves a quarter of the time of tests with many small functions. With all
# tests, and in CI, jax runs as users have it.
if os.environ.get("DLX_SHORT_EXIT"):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Much of torch imports its compiler, which must not find triton: importing that would enable the GIL.
if FREE_THREADED:
    sys.modules.setdefault("triton", None)

# Tests see no CUDA driver, even if there is one, except with fake_cuda.py or the mark `gpu`.
NO_DRIVER = "no-driver-in-this-test.so"
os.environ["DLX_CUDA_DRIVER"] = NO_DRIVER


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Import a share of the files before the collection; the other workers import the other shares.

    Most of the time is pytest's rewriting of assertions, whose result the others then find in a file.
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
                warnings.simplefilter("error")  # as for pytest's imports
                importlib.import_module(path.stem)
        except (Exception, pytest.skip.Exception):
            continue  # the collection tries again, and reports the error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests that build the sdist or the wheel as slow, and of functions with the mark `few` all other cases.

    Files with many slow tests come first: a worker runs a whole file, and the others would wait for the last one.
    """
    cases = {}
    for item in items:
        if {"sdist", "wheel"} & {*item.fixturenames}:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for few in cases.values():
        count = few[0].get_closest_marker("few").args[0]
        kept = {number * len(few) // count for number in range(count)}  # evenly spread
        for number, item in enumerate(few):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path])


def pytest_runtest_setup(item):
    """Skip tests that do not hold with the sanitizers or on a free-threaded build; the mark has the reason."""
    mark = item.get_closest_marker("unsanitized")
    if mark is not None and SANITIZED:
        pytest.skip(f"with the sanitizers {mark.args[0]}")
    mark = item.get_closest_marker("gil")
    if mark is not None and FREE_THREADED:
        pytest.skip(f"on a free-threaded build {mark.args[0]}")
