"""Large copies in host memory: by several threads where there are several cores, and the same bytes as by one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import dlx
from dlx._core import native

MB = 1_000_000
LAYOUTS = {
    "a run": lambda np: np.arange(10 * MB, dtype="f4"),
    "rows": lambda np: np.arange(12 * MB, dtype="f4").reshape(3, -1)[::-1],
    "every second": lambda np: np.arange(6 * MB, dtype="f4").reshape(1000, -1)[:, ::2],
    "turned": lambda np: np.arange(3 * MB, dtype="f4").reshape(1500, 2000).T,
    "two of many": lambda np: np.arange(6 * MB, dtype="f4").reshape(2, -1, 2)[:, ::-1, 1],
}
"""Arrays that are more than a second thread wants, see `c_src/core/parallel.c`."""


def elsewhere(work):
    """Do some work; return what it gave, and the share of the processor's time that other threads took."""
    own, every = time.thread_time(), time.process_time()
    result = work()
    own, every = time.thread_time() - own, time.process_time() - every
    return result, 1 - own / every


@pytest.fixture
def cores():
    """Set which cores this thread may use; those that it could use are given back afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_copies_are_right_and_leave_no_thread(np, cores, layout):
    """Every element is copied, by all cores or by one, and the threads are gone when the copy is there."""
    array, keep_order = LAYOUTS[layout](np), layout != "turned"
    tensor, tasks = dlx.convert(array, to="dlx"), len(os.listdir("/proc/self/task"))
    copy, share = elsewhere(lambda: native.tensor_copy(tensor, keep_order))
    assert np.array_equal(np.from_dlpack(copy), array)
    assert len(os.listdir("/proc/self/task")) == tasks
    if len(cores) > 1 and threading.active_count() == 1:
        assert share > 0.1
    os.sched_setaffinity(0, {min(cores)})
    copy, share = elsewhere(lambda: native.tensor_copy(tensor, keep_order))
    assert np.array_equal(np.from_dlpack(copy), array)


def test_small_copies_start_no_thread(np):
    """Below some megabytes one thread is faster."""
    array = np.ones(MB, "f4")
    _, share = elsewhere(lambda: [dlx.convert(array, to="dlx", copy=True) for _ in range(5)])
    assert threading.active_count() > 1 or share < 0.05


def test_signals_come_to_the_threads_of_the_program(np):
    """A handler runs in the main thread, whatever copies meanwhile."""
    array, came = LAYOUTS["a run"](np), []
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.append(threading.current_thread()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while not came:
            dlx.convert(array, to="dlx", copy=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came == [threading.main_thread()]


@pytest.mark.unsanitized("a fault is told of by them, not by faulthandler")
def test_a_fault_while_copying_says_what_it_was(tmp_path):
    """Also in a thread of dlx's own: half of a file that is cut off, which the thread that asked does not copy."""
    program = """
import faulthandler, mmap, os, sys
import numpy as np
import dlx
faulthandler.enable()
with open(sys.argv[1], "wb+") as file:
    file.truncate(64 << 20)
    array = np.frombuffer(mmap.mmap(file.fileno(), 0), "f4")
    os.ftruncate(file.fileno(), 32 << 20)
    dlx.convert(array[::-1], to="dlx", copy=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGBUS and "Bus error" in done.stderr, done.stderr
