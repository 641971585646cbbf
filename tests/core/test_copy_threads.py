"""Large copies on the host use several threads if there are several cores, with the same result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.project import compiled

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
"""Arrays large enough for a second thread, see `c_src/core/parallel.c`."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_copies_are_right_and_leave_no_thread(np, layout):
    """Every element is copied, and the threads have ended when the copy returns."""
    array, keep_order = LAYOUTS[layout](np), layout != "turned"
    tensor, tasks = dlx.convert(array, to="dlx"), len(os.listdir("/proc/self/task"))
    assert np.array_equal(np.from_dlpack(native.tensor_copy(tensor, keep_order)), array)
    assert len(os.listdir("/proc/self/task")) == tasks


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one thread copies")
@pytest.mark.usefixtures("np")
def test_large_copies_start_a_thread_for_each_further_core(python):
    """Up to four threads. Small copies, and one core, start no threads."""
    program = """
import ctypes, os
import numpy as np
import dlx
started = ctypes.CDLL(None).threads_started
def copy(array):
    before = started()
    assert np.array_equal(np.from_dlpack(dlx.convert(array, to="dlx", copy=True)), array)
    return started() - before
large, small = np.ones(10_000_000, "f4"), np.ones(1_000_000, "f4")
cores = os.sched_getaffinity(0)
print(copy(large) - min(len(cores), 4), copy(small))
os.sched_setaffinity(0, {min(cores)})
print(copy(large))
"""
    preloaded = [*os.environ.get("LD_PRELOAD", "").split(), str(compiled("threads_started"))]
    assert python(program, env=os.environ | {"LD_PRELOAD": " ".join(preloaded)}) == "-1 0\n0\n"


def test_signals_come_to_the_threads_of_the_program(np):
    """A signal handler runs in the main thread, even during a copy in other threads."""
    array, came = LAYOUTS["a run"](np), []
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.append(threading.current_thread()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while not came:
            dlx.convert(array, to="dlx", copy=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came == [threading.main_thread()]


@pytest.mark.unsanitized("sanitizers report a fault, not faulthandler")
def test_a_fault_while_copying_says_what_it_was(tmp_path):
    """A fault is reported even in a thread of dlx that copies part of a truncated file."""
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
