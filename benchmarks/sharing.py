"""Arrays for another process: `share`, `attach` and `ring`, shared memory by hand, torch's queues, ray and pickles."""

import functools
import gc
import itertools
import mmap
import os
import statistics
import sys
import time
from multiprocessing import shared_memory

import dlx
from benchmarks import floor
from benchmarks.measure import peer, race, verdict

ARRAYS, ATTACH_MS, BEYOND_US, SHARE_US, COPY = 1000, 1.0, 200.0, 5.0, 1.1
TEXTS_MS, BANDWIDTH, HAND_OVER_US = 1.0, 0.9, 10.0


def sharing(names, *, quick):
    """Measure both functions, and sending one array to another process; print them and say which goals are met."""
    np, torch = names["np"], peer("torch")
    rounds, mib = (3, 64) if quick else (7, 1024)
    context = (torch.multiprocessing if torch else __import__("multiprocessing")).get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    worker = context.Process(target=_work, args=(tasks, answers), daemon=True)
    worker.start()
    to = "torch" if torch else "numpy"
    found = {}
    for target in ("numpy", "torch") if torch else ("numpy",):
        found |= _attach(np, tasks, answers, target, 10 * rounds)
    found |= _small(np, 10 * rounds)
    found |= _texts(np, rounds)
    found |= _frames(np, 20 * rounds)
    found |= _hand_over(np, 1000 * rounds)
    for size in (64,) if quick else (64, mib):
        source = np.ones(size << 20, np.uint8)
        found |= _share(np, source, f"share of {size} MiB", 7)
    print(f"\n{mib} MiB of numpy sent to another process as {to}, ms")
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
    ray = peer("ray")
    if ray is not None:
        found["ray"] = min(_by_ray(ray, source, to, 3)) * 1e3
        print(f"{'ray.put, ray.get in a task':30} {found['ray']:8.0f}")
        found |= _between_actors(ray, source)
    if torch is not None:
        found |= _measure_batch(np, rounds)
    return [found]


def _tree(np):
    return {f"layer.{i}.weight": np.zeros((10, 10), np.float32) for i in range(ARRAYS)}


def _attach(np, tasks, answers, to, rounds):
    """Measure how long another process takes to attach many arrays, in CPU time of its thread.

    The collector has just scanned all objects, so that attaching and converting both start with cold caches.
    """
    tree = _tree(np)
    seconds = {"attach": [], "tensors": [], "again": [], "convert": [], "floor": [], "slot": []}
    for _ in range(rounds):
        for kind, kept in seconds.items():
            with dlx.share(tree) as handle:
                tasks.put((kind, dict(handle), to))
                kept.append(answers.get())
    attach, tensors, again, convert, constructed, slot = (min(each[1:]) * 1e6 for each in seconds.values())
    ms = attach / 1e3
    print(f"\nAnother process attaches {ARRAYS} arrays as {to}: {ms:.2f} ms  {verdict(ms <= ATTACH_MS)}")
    beyond = {"attaching them as dlx.Tensor": attach - tensors, "the conversion of that tree": attach - convert}
    for what, us in beyond.items():
        print(f"    beyond {what}: {us:.0f} us  {verdict(us <= BEYOND_US)}")
    print(f"    if it holds the memory already: {again / 1e3:.2f} ms, {again - convert:.0f} us beyond")
    own = {"numpy": "np.ndarray(shape, dtype, memory, offset)", "torch": "torch.from_numpy(array)"}
    print(f"    {own[to]}, as many times: {constructed:.0f} us")
    print(f"    the target's import slot, called as many times by C with prepared tensors: {slot:.0f} us")
    return {
        f"{to}, attach_ms": ms,
        f"{to}, beyond_tensors_us": attach - tensors,
        f"{to}, beyond_us": attach - convert,
        f"{to}, again_ms": again / 1e3,
        f"{to}, floor_us": constructed,
        f"{to}, slot_us": slot,
    }


def _small(np, rounds):
    """Measure `share` of many small arrays, and one piece of shared memory by hand with their bytes only."""
    tree = _tree(np)
    size = sum(each.nbytes for each in tree.values())

    def by_hand():
        memory, at = shared_memory.SharedMemory(create=True, size=size), 0
        for each in tree.values():
            view = np.ndarray(each.shape, each.dtype, memory.buf, at)
            np.copyto(view, each)
            at += each.nbytes
        del view
        memory.close()
        memory.unlink()

    def join_bytes():
        fd = os.memfd_create("floor")
        os.write(fd, b"".join(tree.values()))
        os.close(fd)

    ours, *others = race(lambda: dlx.share(tree).close(), by_hand, join_bytes, rounds=rounds, clock=time.thread_time)
    us, hand, least = (min(each) / ARRAYS * 1e6 for each in (ours, *others))
    print(f"share of {ARRAYS} arrays, us each: {us:.1f}  {verdict(us <= SHARE_US)}")
    print(f"    SharedMemory and np.copyto of each {hand:.1f}, their bytes joined and written at once {least:.1f}")
    return {"share_us": us, "share_by_hand_us": hand, "share_joined_us": least}


def _texts(np, rounds):
    """Measure how long a million texts take to attach."""
    with dlx.share({"texts": [f"path/{i}" for i in range(1_000_000)]}) as handle:
        (seconds,) = race(lambda: dlx.attach(handle, "numpy", lazy=True), rounds=10 * rounds, clock=time.thread_time)
    ms = min(seconds) * 1e3
    print(f"A million texts are attached in {ms:.3f} ms  {verdict(ms <= TEXTS_MS)}")
    return {"texts_ms": ms}


def _frames(np, rounds):
    """Measure frames of 6 MB through a ring, and copies into as many ordinary arrays."""
    image, slots = np.ones((1080, 1920, 3), np.uint8), itertools.cycle(np.ones((4, 1080, 1920, 3), np.uint8))
    with dlx.ring(4, image) as ring, dlx.attach(ring.handle, "numpy") as reader:

        def frame():
            ring.put(image)
            reader.read()

        ours, copy = race(frame, lambda: np.copyto(next(slots), image), rounds=rounds)
    ratio = min(copy) / min(ours)
    print(f"Frames of 6 MB through a ring: {ratio:.2f} of the bandwidth of a copy  {verdict(ratio >= BANDWIDTH)}")
    return {"ring_bandwidth": ratio}


def _hand_over(np, rounds):
    """Measure half of the way of a frame to another process and back, and the same with a byte in pipes."""
    context = __import__("multiprocessing").get_context("spawn")
    here, there = context.Pipe()
    like = np.zeros(16)
    with dlx.ring(2, like, to="numpy") as ring:
        process = context.Process(target=_echo, args=(ring.handle, there, like))
        process.start()
        reader, seconds = dlx.attach(here.recv(), "numpy"), {"ring": [], "pipe": []}
        for number in range(rounds):
            start = time.perf_counter()
            with ring.write() as frame:
                frame[0] = number
            assert reader.read()[0] == number
            seconds["ring"].append(time.perf_counter() - start)
        ring.close()
        for _ in range(rounds):
            start = time.perf_counter()
            here.send_bytes(b"x")
            here.recv_bytes()
            seconds["pipe"].append(time.perf_counter() - start)
        here.close()
        process.join()
    us = {kind: statistics.median(each) / 2 * 1e6 for kind, each in seconds.items()}
    print(f"Hand-over of a frame, median: {us['ring']:.1f} us  {verdict(us['ring'] <= HAND_OVER_US)}")
    print(f"    a byte through multiprocessing's Pipe: {us['pipe']:.1f} us")
    return {"hand_over_us": us["ring"], "pipe_us": us["pipe"]}


def _echo(handle, pipe, like):
    """Send frames back, and then bytes."""
    with dlx.ring(2, like, to="numpy") as ring:
        pipe.send(ring.handle)
        for each in dlx.attach(handle, "numpy"):
            with ring.write() as frame:
                frame[0] = each[0]
    try:
        while True:
            pipe.send_bytes(pipe.recv_bytes())
    except (EOFError, OSError):
        pass


def _share(np, source, name, rounds):
    """Measure `share` of one array, and copies of its bytes into new memory, private or shared."""

    def write_memfd():
        fd, done = os.memfd_create("floor"), 0
        while done < source.nbytes:
            done += os.pwrite(fd, source.data[done:], done)
        os.close(fd)

    def small():
        with mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            np.copyto(np.frombuffer(memory, source.dtype), source)

    def by_hand():
        memory = shared_memory.SharedMemory(create=True, size=source.nbytes)
        view = np.frombuffer(memory.buf, source.dtype)
        np.copyto(view, source)
        del view
        memory.close()
        memory.unlink()

    beside = {
        "a copy": source.copy,
        "a copy into new pages of 4 KiB": small,
        "pwrite into a fresh memfd": write_memfd,
        "SharedMemory and np.copyto": by_hand,
    }
    ours, *others = race(lambda: dlx.share(source).close(), *beside.values(), rounds=rounds)
    ratios = {kind: min(ours) / min(times) for kind, times in zip(beside, others, strict=True)}
    print(f"{name}: {min(ours) * 1e3:.1f} ms")
    for kind, times in ratios.items():
        goal = f"  {verdict(times <= COPY)}" if kind != "SharedMemory and np.copyto" else ""
        print(f"    {times:.2f} of {kind}{goal}")
    return {f"{name}, {kind}": times for kind, times in ratios.items()} | {f"{name}, ms": min(ours) * 1e3}


def _measure_batch(np, rounds):
    """Measure a batch of numpy samples: the two lines of docs/cookbook/dataloader.md, and torch's default_collate."""
    from torch.utils.data import default_collate

    samples = [(np.full((3, 64, 64), i, np.float32), np.full(4, i)) for i in range(32)]

    def by_dlx():
        return [dlx.stack(column, to="torch") for column in zip(*samples, strict=True)]

    ours, theirs = map(min, race(by_dlx, lambda: default_collate(samples), number=20, rounds=5 * rounds))
    print(
        f"\nA batch of 32 samples, us: {ours * 1e6:.0f}, default_collate {theirs * 1e6:.0f}  {verdict(ours <= theirs)}"
    )
    return {"collate_us": ours * 1e6, "default_collate_us": theirs * 1e6}


def _between_actors(ray, source):
    """Measure an array from one ray actor to another, by the transport of dlx and by ray's store; print both."""
    from dlx_adapters.dlx_ray import register_transport

    shape = (source.size // 4,)
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=2, object_store_memory=3 * source.nbytes, **options)
    found = {}
    for to in ("numpy", "torch", "jax"):
        name = register_transport(to) if peer(to) else None

        class Source:
            def __init__(self, to):
                self.kept, self.to = dlx.empty(shape, "float32", shared=True), to

            def shared(self):
                return {"x": dlx.convert(self.kept, to=self.to)}

            def stored(self):  # another function, since ray marks the function itself
                return self.shared()

        class Sink:
            def read(self, tree):
                return float(memoryview(dlx.convert(tree["x"], to="dlx", readonly="share"))[-1])

        if name is None:
            continue
        Source.shared = ray.method(tensor_transport=name)(Source.shared)
        one = ray.remote(num_cpus=0)(Source).remote(to)
        two = ray.remote(num_cpus=0, enable_tensor_transport=True)(Sink).remote()
        for way in ("shared", "stored"):
            seconds = []
            for _ in range(6):
                start = time.perf_counter()
                ray.get(two.read.remote(getattr(one, way).remote()))
                seconds.append(time.perf_counter() - start)
            found[f"ray {to} {way}"] = min(seconds) * 1e3
            by = {"shared": "dlx's transport", "stored": "its store"}[way]
            print(f"ray, {to} from actor to actor by {by}: {found[f'ray {to} {way}']:.1f} ms")
    ray.shutdown()
    return found


def _by_ray(ray, source, to, rounds):
    """Return the seconds until a ray task has its array over the memory of ray's store."""
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=1, object_store_memory=3 * source.nbytes, **options)

    def receive(array):
        converted = dlx.convert(array, to, readonly="share")
        end = time.monotonic()
        return end, int(converted[-1])

    task = ray.remote(num_cpus=1)(receive)
    ray.get(task.remote(ray.put(source[:1])))  # the worker process has started and imported the framework
    seconds = []
    for _ in range(rounds):
        start = time.monotonic()
        end, total = ray.get(task.remote(ray.put(source)))
        assert total == 1
        seconds.append(end - start)
    ray.shutdown()
    return seconds


def _trip(kind, steps, tasks, answers, to):
    """Return the seconds from an array here to the other process's array; `steps` yield the messages."""
    gc.collect()
    start = time.monotonic()
    sent = next(steps)
    tasks.put((kind, sent, to))
    end, total = answers.get()
    assert total == 1
    del sent
    next(steps, None)
    return end - start


def _send_dlx(source):
    with dlx.share(source) as handle:
        yield dict(handle)


def _send_memory(source):
    memory = shared_memory.SharedMemory(create=True, size=source.nbytes)
    view = memory.buf.cast("B")
    view[:] = source.data.cast("B")
    yield memory.name, source.nbytes
    view.release()
    memory.close()
    memory.unlink()


def _send_queue(source):
    import torch

    yield torch.from_numpy(source)


def _send_pickle(source):
    yield source


_WAYS = {"dlx": _send_dlx, "SharedMemory by hand": _send_memory, "torch's queue": _send_queue, "a pickle": _send_pickle}


def _bind_class(np, to, arrays):
    """Return a function that creates as many arrays over existing memory with the framework's constructor."""
    if to == "torch":
        import torch

        return lambda: [torch.from_numpy(each) for each in arrays.values()]
    memory = bytearray(ARRAYS * 400)
    return lambda: [np.ndarray((10, 10), np.float32, memory, 400 * i) for i in range(ARRAYS)]


@functools.cache
def _bind_slot(to):
    """Return a C function that creates as many arrays with the framework's import slot, from prepared tensors."""
    c_floor = floor.build()
    if c_floor is None:
        return list
    tensors = [dlx.empty((10, 10), "float32") for _ in range(ARRAYS)]
    return floor.importer_of(c_floor, tensors, type(dlx.convert(tensors[0], to)))


def _work(tasks, answers):
    """Run the tasks in the other process."""
    import numpy as np

    warm = {f"{i}": np.zeros(3, np.float32) for i in range(3)}
    while True:
        kind, sent, to = tasks.get()
        to = sys.intern(to)  # like the names in a program
        if kind == "end":
            return
        if kind in ("attach", "tensors", "again", "convert", "floor", "slot"):
            dlx.convert(dlx.attach(dlx.share(warm), to, writable=True), to)
            make = _bind_class(np, to, dlx.attach(sent, "numpy", writable=True)) if kind == "floor" else _bind_slot(to)
            tensors = dlx.attach(sent, writable=True) if kind in ("again", "convert") else None
            target = "dlx" if kind == "tensors" else to
            gc.collect()
            gc.disable()  # like `race`
            start = time.thread_time()
            if kind in ("floor", "slot"):
                found = make()
            else:
                found = dlx.convert(tensors, to) if kind == "convert" else dlx.attach(sent, target, writable=True)
            answers.put(time.thread_time() - start)
            gc.enable()
            del found, tensors, make
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
