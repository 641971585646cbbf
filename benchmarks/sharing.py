"""Arrays for another process: `share` and `attach` beside shared memory by hand, torch's queues and pickles."""

import gc
import sys
import time
from multiprocessing import shared_memory

import dlx
from benchmarks.measure import peer, race, verdict

ARRAYS, ATTACH_MS, BEYOND_US, COPY = 1000, 1.0, 200.0, 1.1


def sharing(names, *, quick):
    """Measure both verbs, and one array on its way to another process; print them, and say which goals are met."""
    np, torch = names["np"], peer("torch")
    rounds, mib = (3, 64) if quick else (7, 1024)
    found = {}
    tree = {f"layer.{i}.weight": np.zeros((10, 10), np.float32) for i in range(ARRAYS)}
    context = (torch.multiprocessing if torch else __import__("multiprocessing")).get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    worker = context.Process(target=_work, args=(tasks, answers), daemon=True)
    worker.start()
    to = "torch" if torch else "numpy"
    cold, convert = [], []
    for _ in range(rounds + 1):
        with dlx.share(tree) as handle:
            tasks.put(("attach", dict(handle), to))
            one, other = answers.get()
            cold.append(one)
            convert.append(other)
    attach, beyond = min(cold[1:]), min(cold[1:]) - min(convert[1:])
    met = verdict(attach * 1e3 <= ATTACH_MS)
    print(f"\nAnother process attaches {ARRAYS} arrays as {to}: {attach * 1e3:.2f} ms  {met}")
    print(f"beyond the conversion of that tree: {beyond * 1e6:.0f} us  {verdict(beyond * 1e6 <= BEYOND_US)}")
    source = np.ones(mib << 20, np.uint8)
    ours, copied = race(lambda: dlx.share(source).close(), source.copy, rounds=rounds)
    times = min(ours) / min(copied)
    print(f"share of {mib} MiB: {min(ours) * 1e3:.0f} ms, {times:.2f} of a copy  {verdict(times <= COPY)}")
    found = {"attach_ms": attach * 1e3, "beyond_us": beyond * 1e6, "share_ms": min(ours) * 1e3, "share_ratio": times}
    print(f"\n{mib} MiB of numpy on their way to {to} in another process, ms")
    for kind, send in _WAYS.items():
        if kind == "torch's queue" and torch is None:
            continue
        seconds = [_trip(kind, send(source), tasks, answers, to) for _ in range(3)]
        found[kind] = min(seconds) * 1e3
        print(f"{kind:30} {min(seconds) * 1e3:8.0f}")
    tasks.put(("end", None, to))
    worker.join()
    for queue in (tasks, answers):
        queue.close()
        queue.join_thread()
    return [found]


def _trip(kind, steps, tasks, answers, to):
    """Return the seconds from an array here until the other process has its own; `steps` give what is sent."""
    gc.collect()
    start = time.monotonic()
    sent = next(steps)
    tasks.put((kind, sent, to))
    end, total = answers.get()
    assert total == 1
    del sent
    next(steps, None)
    return end - start


def _shared(source):
    with dlx.share(source) as handle:
        yield dict(handle)


def _by_hand(source):
    memory = shared_memory.SharedMemory(create=True, size=source.nbytes)
    view = memory.buf.cast("B")
    view[:] = source.data.cast("B")
    yield memory.name, source.nbytes
    view.release()
    memory.close()
    memory.unlink()


def _by_torch(source):
    import torch

    yield torch.from_numpy(source)


def _pickled(source):
    yield source


_WAYS = {"dlx": _shared, "SharedMemory by hand": _by_hand, "torch's queue": _by_torch, "a pickle": _pickled}


def _work(tasks, answers):
    """Do what the tasks say; in the other process."""
    import numpy as np

    warm = {f"{i}": np.zeros(3, np.float32) for i in range(3)}
    while True:
        kind, sent, to = tasks.get()
        to = sys.intern(to)  # as the names in a program are
        if kind == "end":
            return
        if kind == "attach":
            dlx.convert(dlx.attach(dlx.share(warm), writable=True), to)
            gc.collect()
            gc.disable()  # as `race` does
            start = time.perf_counter()
            found = dlx.attach(sent, to, writable=True)
            middle = time.perf_counter()
            tensors = dlx.attach(sent, writable=True)
            again = time.perf_counter()
            converted = dlx.convert(tensors, to)
            answers.put((middle - start, time.perf_counter() - again))
            gc.enable()
            del found, tensors, converted
            continue
        keep = None
        if kind == "dlx":
            array = dlx.attach(sent, to, writable=True)
        elif kind == "SharedMemory by hand":
            keep = shared_memory.SharedMemory(sent[0])
            array = dlx.convert(np.frombuffer(keep.buf, np.uint8, sent[1]), to)
        else:
            array = sent if kind == "torch's queue" else dlx.convert(sent, to)
        end = time.monotonic()
        total = int(array[-1])
        del array, sent
        gc.collect()
        if keep is not None:
            keep.close()
        answers.put((end, total))
