"""Shared arrays that workers return: they arrive without a copy, and outlive the worker."""

import importlib.util
import os
import subprocess
import sys

import pytest
from support.project import ROOT

METHODS = ("fork", "spawn", "forkserver")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

PROGRAM = """
import gc, multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import dlx

def work(kind):
    x = np.arange(6, dtype="f4").reshape(2, 3)
    handle = dlx.share({"x": x, "turned": x.T, "part": x[:, ::2], "n": [1, "text"]})
    if kind == "handle":
        return handle
    return dlx.attach(handle, to=kind, writable=kind != "dlx")

def put(queue, kind):
    queue.put(work(kind))

def check(tree, kind):
    tree = dlx.attach(tree, to="numpy") if kind == "handle" else tree
    assert tree["n"] == [1, "text"]
    if kind in ("numpy", "torch"):
        assert type(tree["x"]).__module__ == kind
        tree["x"][1, 2] = 9
        assert tree["turned"][2, 1] == 9 and tree["part"][1, 1] == 9  # one memory
        tree["x"][1, 2] = 5
    with dlx.share(tree) as again:
        assert again["size"] <= 2048, again  # nothing is copied
    x = dlx.convert(tree["x"], to="numpy")
    assert x.sum() == 15 and x.flags.writeable is (kind not in ("dlx", "handle"))

def main(method, kinds):
    context = multiprocessing.get_context(method)
    before = None
    for kind in kinds if method == "spawn" else (*kinds, *kinds):  # the second time finds leaks
        with context.Pool(1) as pool:
            found = [pool.apply(work, (kind,))]
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            found.append(executor.submit(work, kind).result(timeout=60))
        queue = context.Queue()
        process = context.Process(target=put, args=(queue, kind))
        process.start()
        found.append(queue.get(timeout=60))
        process.join()
        assert process.exitcode == 0
        for each in found:
            check(each, kind)
        del found, each, queue, process
        gc.collect()
        number = len(os.listdir("/proc/self/fd"))
        before = number if kind == kinds[-1] and before is None else before
    assert number <= before, (number, before)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    print("right")
"""


def run(text, *arguments, folder, timeout=240):
    """Run a program from a file, as spawn needs it; return its output."""
    file = folder / "program.py"
    file.write_text(text)
    command = [sys.executable, "-W", "ignore", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_results_of_workers_are_shared(np, tmp_path, method):
    """A pool, an executor and a process that ends at once return handles, tensors and numpy arrays."""
    assert run(PROGRAM, method, "handle", "dlx", "numpy", folder=tmp_path) == "right"


def test_results_of_torch_workers_are_shared(np, torch, tmp_path):
    """The own reduction of torch is used for other tensors only."""
    assert run(PROGRAM, "fork", "torch", folder=tmp_path) == "right"


def test_results_of_joblib_are_shared(np, tmp_path):
    """Its default workers (loky) send handles and tensors."""
    if importlib.util.find_spec("joblib") is None:
        pytest.skip("joblib is not installed")
    text = (
        PROGRAM[: PROGRAM.index("def main")]
        + """
from joblib import Parallel, delayed
if __name__ == "__main__":
    for kind in ("handle", "dlx"):
        for each in Parallel(2)(delayed(work)(kind) for _ in range(4)):
            check(each, kind)
    print("right")
"""
    )
    assert run(text, folder=tmp_path).splitlines()[-1] == "right"


LOADER = """
import os, sys
import numpy as np
import dlx
from torch.utils.data import DataLoader

RECIPE
samples = [(np.full((3, 8, 8), i, np.float32), i, *(np.array([i]) for _ in range(30))) for i in range(32)]

if __name__ == "__main__":
    options = {"multiprocessing_context": sys.argv[1], "persistent_workers": sys.argv[2] == "True"}
    loader = DataLoader(samples, batch_size=4, num_workers=2, collate_fn=collate_shared, **options)
    before = len(os.listdir("/proc/self/fd"))
    kept = list(loader)
    opened = len(os.listdir("/proc/self/fd")) - before
    assert opened <= len(kept) + 12, opened  # 32 arrays of a batch need one descriptor; the loader keeps some
    for i, (images, labels, *_) in enumerate(kept):
        assert images[:, 0, 0, 0].tolist() == labels.tolist() == [*range(4 * i, 4 * i + 4)]
        with dlx.share(images) as handle:
            assert handle["size"] <= 512
    kept.clear()
    for batch in loader:  # another epoch
        assert batch[0][0, 0, 0, 0] == batch[1][0]
    del batch
    print(len(os.listdir("/proc/self/fd")) - before < 24)  # the pipes of persistent workers, and batches on the way
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("keeps", (False, True))
@pytest.mark.parametrize("method", METHODS)
def test_batches_of_a_data_loader_are_shared(np, torch, tmp_path, method, keeps):
    """The collate function of the cookbook returns tensors in one segment, also from persistent workers."""
    page = (ROOT / "docs" / "cookbook" / "dataloader.md").read_text(encoding="utf-8")
    start = page.index("def collate_shared")
    recipe = page[start : page.index("\n\n", start)]
    assert len(recipe.splitlines()) == 3
    assert run(LOADER.replace("RECIPE", recipe + "\n"), method, str(keeps), folder=tmp_path) == "True"


PACKED = """
from multiprocessing.reduction import ForkingPickler
import numpy as np
import dlx
for lazy in (True, False):
    with dlx.share({"names": ["some text"] * 1000, "x": np.ones(100_000)}) as handle:
        tree = dlx.attach(handle, to="numpy", lazy=lazy, writable=True)
    assert len(bytes(ForkingPickler.dumps(tree["x"]))) < 1000
    assert len(bytes(ForkingPickler.dumps(tree["names"]))) < 1000 or not lazy
"""


def test_arrays_beside_packed_lists_are_sent_without_their_bytes(np, python):
    """Their type is registered, although the whole tree is converted at once."""
    python(PACKED)


LATE = """
import multiprocessing, os, signal, sys, time
import dlx

def put(queue):
    queue.put(dlx.share(b"abc"))
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=put, args=(queue,))
    process.start()
    while queue.empty():
        time.sleep(0.01)
    process.kill()
    process.join()
    try:
        queue.get()
    except dlx.errors.HandleError as error:
        print(error)
"""


def test_a_worker_that_was_killed_before_its_result_arrived_is_named(tmp_path):
    """The descriptor comes from the worker, which must live until then."""
    found = run(LATE, folder=tmp_path)
    assert "the process that sent it has ended" in found and found.endswith("has received its results.")


BUSY = """
import multiprocessing, time
import dlx

def put(queue):
    queue.put(dlx.share(b"abc"))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=put, args=(queue,))
    process.start()
    time.sleep(0.7)
    handle = queue.get()
    process.join()
    print(bytes(memoryview(dlx.attach(handle))))
"""


def test_a_busy_process_receives_from_a_worker_that_has_nothing_else_to_do(tmp_path):
    """The worker waits some seconds at its end."""
    assert run(BUSY, folder=tmp_path) == "b'abc'"


UNREAD = """
import multiprocessing, time
import dlx

def put(queue):
    queue.put(dlx.share(b"abc"))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=put, args=(queue,), daemon=True)
    process.start()
    process.join(4)
    print(process.exitcode)
"""


def test_a_daemon_does_not_wait_for_a_process_that_reads_no_more(tmp_path):
    """A DataLoader that is left early waits for its workers."""
    assert run(UNREAD, folder=tmp_path) == "0"


LIMIT = """
import multiprocessing, resource, sys, time
import dlx

def work(n):
    return [dlx.share(b"abc") for _ in range(n)]

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=lambda: (sender.send(work(60)), time.sleep(60)))
    process.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    try:
        receiver.recv()
    except OSError as error:
        print(error)
    process.kill()
"""


def test_the_limit_of_descriptors_names_the_remedy(tmp_path):
    """A process that cannot receive another descriptor gets the advice of `share`."""
    found = run(LIMIT, folder=tmp_path)
    assert "cannot open more files" in found and "share one tree instead of many arrays" in found


def test_other_pickles_of_handles_stay_dicts():
    """A plain pickle may be read without dlx, and much later."""
    import pickle

    import dlx

    with dlx.share(b"abc") as handle:
        assert type(pickle.loads(pickle.dumps(handle))) is dict
        assert not any(name.startswith("memfd") for name in os.listdir("/dev/shm"))


def test_ordinary_arrays_are_pickled_as_before(np):
    """Only arrays in shared memory are sent as descriptors."""
    from multiprocessing.reduction import ForkingPickler

    import dlx

    own = np.arange(3.0)
    with dlx.share(own) as handle:
        dlx.attach(handle, to="numpy")
        data = bytes(ForkingPickler.dumps({"own": own, "tensor": dlx.convert(own, to="dlx"), "odd": own[:0]}))
    found = ForkingPickler.loads(data)
    assert b"dlx._sharing" not in data and np.array_equal(found["own"], own) and found["own"].flags.writeable
    assert np.array_equal(dlx.convert(found["tensor"], to="numpy"), own)
