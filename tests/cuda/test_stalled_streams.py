"""A stuck stream delays no unrelated one: two streams, one or two threads, every kind of copy."""

from __future__ import annotations

import threading

import pytest
from support.cuda import gpulib

import dlx
from dlx._core import cuda as driver

N = gpulib.N

JOBS = {
    "to numpy": lambda np, array: dlx.convert(array, to="numpy"),
    "to dlx, copy": lambda np, array: dlx.convert(array, to="dlx", copy=True),
    "to libb, copy": lambda np, array: dlx.convert(array, to="libb", copy=True),
    "to libb, shared": lambda np, array: dlx.convert(array, to="libb"),
    "stack": lambda np, array: dlx.stack([array, array], "libb"),
    "stack in dlx": lambda np, array: dlx.stack([array, array], "dlx"),
    "numpy to libb": lambda np, array: dlx.convert(np.zeros(N, "uint8"), to="libb", device="cuda:0"),
    "numpy to dlx": lambda np, array: dlx.convert(np.zeros(N, "uint8"), to="dlx", device="cuda:0"),
    "through dlx": lambda np, array: dlx.convert(dlx.convert(array, to="dlx"), to="numpy"),
    "to another device": lambda np, array: dlx.convert(array, to="dlx", device="cuda:1"),
}


@pytest.fixture
def lib_a(monkeypatch, cuda):
    """A framework with streams."""
    return gpulib.install(monkeypatch, "liba", cuda, gpulib.QuickAdapter)


@pytest.fixture
def lib_b(monkeypatch, cuda):
    """A framework that allocates the memory of copies itself."""
    return gpulib.install(monkeypatch, "libb", cuda, gpulib.FreshAdapter)


def is_free(cuda, stream):
    """Return whether all work on a stream is done."""
    point = driver.ready(dlx.adapter.Stream(dlx.Device("cuda:0"), stream))
    lib = driver.native.lib
    before = cuda.blocked
    assert lib.dlx_ready_synchronize(point) == 0
    return cuda.blocked == before


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stuck", ["to dlx, copy", "to libb, copy", "stack in dlx"])
@pytest.mark.parametrize("job", JOBS)
def test_a_stuck_stream_delays_nothing(cuda, np, lib_a, lib_b, job, stuck, threads):
    """Neither the host nor later work on the second stream waits for the first one."""
    p, q, c, d = (cuda.stream() for _ in range(4))
    with lib_a.on(q):
        y = lib_a.made()
    with lib_a.on(p), lib_b.on(c):
        x = lib_a.made()
        for name in (stuck, job):  # pools and streams
            JOBS[name](np, x)
        driver.release_pending()
        cuda.stall(p)
        cuda.write(p, x.ptr, N)
        held = JOBS[stuck](np, x)
    before, found = cuda.blocked, []

    def work():
        with lib_a.on(q), lib_b.on(d):
            found.append(JOBS[job](np, y))
            found.append((is_free(cuda, q), is_free(cuda, d)))

    if threads == 1:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert cuda.blocked == before and found[1] == (True, True)
    assert not is_free(cuda, c if stuck == "to libb, copy" else p), "the test cannot fail"
    cuda.resume_all()
    del held
    found.clear()
    driver.release_pending()
    assert cuda.races == 0 and lib_a.reused_too_early == lib_b.reused_too_early == 0, cuda.report


@pytest.mark.parametrize("to", ["dlx", "libb"])
@pytest.mark.parametrize("call", ["copy", "stack"])
@pytest.mark.parametrize("through", ["itself", "dlx"])
def test_a_copy_is_a_snapshot(cuda, np, lib_a, lib_b, to, call, through):
    """A copy of busy memory has the values before it, and later writes of the producer wait for the copy."""
    with lib_a.on(cuda.stream()) as p, lib_b.on(cuda.stream()):
        array = lib_a.made()
        source = dlx.convert(array, to="dlx") if through == "dlx" else array
        cuda.stall(p.ptr)
        lib_a.write(array)
        copy = dlx.convert(source, to=to, copy=True) if call == "copy" else dlx.stack([source, source], to)
        assert not lib_a.write(array)
        cuda.resume_all()
        if to == "libb":
            assert not lib_b.read(copy)
    assert cuda.races == 0, cuda.report
