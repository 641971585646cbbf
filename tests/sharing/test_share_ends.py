"""Processes that keep handles until they exit: status 0 and nothing on stderr, in workers too."""

import multiprocessing
import re
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, builtins, functools, multiprocessing, sys, threading
from concurrent.futures import ProcessPoolExecutor

import dlx

HELD = {}


class Kept:
    inside = None


def keep(make):
    "Keep handles, each in another way: one that is kept twice is released by the last of them only."
    HELD["handle"] = make()
    threading.held, dlx.held, sys.held, builtins.held = make(), make(), make(), make()
    Kept.inside = make()
    Kept.method = lambda self, held=make(): held
    cycle = make()
    cycle.append(cycle)
    cached = functools.cache(lambda held=make(): held)
    cached()
    sys.modules["kept_by_dlx"] = type(sys)("kept_by_dlx")
    sys.modules["kept_by_dlx"].held = make()
    atexit.register(lambda held=make(): held)
    started = threading.Event()
    threading.Thread(target=lambda held: (started.set(), threading.Event().wait()), args=make(), daemon=True).start()
    started.wait()


def work(handle):
    found = dlx.attach(handle)
    keep(lambda: [[dlx.share(found), dlx.share(b"x"), dlx.attach(dict(handle)), dlx.empty(4, "uint8", shared=True)]])
    return bytes(memoryview(found))


def put(handle, queue):
    queue.put(work(handle))


class Data:
    def __init__(self, handle):
        self.handle = handle

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return work(self.handle)[i]


def main(way, method):
    context = multiprocessing.get_context(method)
    handle = dlx.share(bytearray(b"abcd"))
    keep(lambda: [[dlx.share(b"x"), dlx.attach(dict(handle))]])
    if way == "Process":
        queue = context.Queue()
        children = [context.Process(target=put, args=(handle, queue)) for _ in range(2)]
        [child.start() for child in children]
        results = [queue.get() for _ in children]
        [child.join() for child in children]
        assert [child.exitcode for child in children] == [0, 0]
    elif way == "Pool":
        pool = context.Pool(2)
        results = pool.map(work, [handle] * 4)
        pool.close()
        pool.join()
    elif way == "ProcessPoolExecutor":
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            results = list(pool.map(work, [dict(handle)] * 4))
    else:
        from torch.utils.data import DataLoader

        loader = DataLoader(Data(handle), num_workers=2, multiprocessing_context=method, collate_fn=bytes)
        results = [b"".join(loader)]
    assert set(results) == {b"abcd"}, results
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


WAYS = [
    pytest.param(way, method, marks=[pytest.mark.slow] if (way, method) == ("DataLoader", "spawn") else [])
    for way in ("Process", "Pool", "ProcessPoolExecutor", "DataLoader")
    for method in multiprocessing.get_all_start_methods()
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("way", "method"), WAYS)
def test_workers_that_keep_handles_end_quietly(tmp_path, way, method):
    """It holds for every way to start workers and to keep a handle."""
    if way == "DataLoader":
        pytest.importorskip("torch")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), way, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    errors = done.stderr
    if way == "DataLoader":
        # torch does not wait for the threads of its queues: one may stop while it removes a lock, and Python warns.
        errors = re.sub(r"(?m)^.*resource_tracker.*\n(  warnings\.warn.*\n)?", "", errors)
    assert (done.returncode, done.stdout, errors) == (0, "done\n", "")
