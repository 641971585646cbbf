"""Forks and signals during a tree, a view or another thread's conversion break neither process."""

from __future__ import annotations

import os

import pytest
from support.project import TESTS, compiled

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

PREAMBLE = """
import gc, os, random, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this tests forks with threads
import dlx
from dlx._core import native

class Producer:
    def __init__(self, n):
        self.tensor = dlx.from_dlpack(bytes([n]) * 4)
    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)
    def __dlpack_device__(self):
        return 1, 0

def first(tensor):
    return bytes(memoryview(tensor))[0]

def everything(n=3):
    "Convert in every way; raise if something is wrong."
    arrays = [Producer(i) for i in range(n)]
    tree = {"a": [*arrays, (arrays[0],)], "b": arrays[-1]}
    made = dlx.convert(tree, to="dlx")
    assert [first(x) for x in made["a"][:n]] == [*range(n)] and made["a"][n][0] is made["a"][0]
    view = dlx.convert(tree, to="dlx", lazy=True)
    assert [first(x) for x in view["a"][:n]] == [*range(n)] and first(view["b"]) == n - 1
    assert first(dlx.using("dlx")(lambda x: dlx.convert(x, to="dlx", copy=True))(arrays[1])) == 1
    assert dlx.stack(arrays, to="dlx").shape == (n, 4)
    capsule = dlx.to_capsule(arrays[0], max_version=(1, 0))
    assert first(dlx.from_dlpack(capsule)) == 0 and native.capsule_state(capsule) == "used"
    assert dlx.plan([arrays, object()], to="dlx", strict=True).outcome == "refused"

def ends(child):
    assert os.waitpid(child, 0)[1] == 0

def in_child(call, leave=os._exit):
    "Fork; return the child's number, after the child has made the call."
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        call()
        leave(0)
    return child

everything()
"""


def test_a_fork_in_the_midst_of_a_tree(python):
    """A producer in the middle of a tree forks: both processes get the whole tree and exit silently."""
    out = python(
        PREAMBLE
        + """
class Forks(Producer):
    child = None
    def __dlpack__(self, **options):
        self.child = os.fork()
        signal.alarm(60)
        return super().__dlpack__(**options)

for way in range(4):
    live = native.live()
    forks = Forks(9)
    tree = [Producer(1), {"a": (forks, dlx.to_capsule(bytearray(4)))}, Producer(2)]
    if way == 0:
        made = dlx.convert(tree, to="dlx")
    elif way == 1:
        view = dlx.convert(tree, to="dlx", lazy=True)
        made = [view[0], {"a": list(view[1]["a"])}, view[2]]
        del view
    elif way == 2:
        made = dlx.using("dlx")(lambda x: dlx.convert(x, to="dlx"))(tree)
        made = dlx.convert(tree[:1] + tree[2:], to="dlx")
        made.insert(1, {"a": [dlx.convert(Producer(9), to="dlx")]})
    else:
        made = dlx.stack([tree[0], forks, tree[2]], to="dlx")
        made = [dlx.from_dlpack(x) for x in (tree[0], Producer(9), tree[2])]
        made[1] = {"a": [made[1]]}
    assert [first(made[0]), first(made[1]["a"][0]), first(made[2])] == [1, 9, 2]
    everything()
    child = forks.child
    del made, tree, forks
    gc.collect()
    assert native.live() == live, (native.live(), live)
    if child == 0:
        sys.exit(0)
    ends(child)
print("well")
"""
    )
    assert out == "well\n"


@pytest.mark.gil("a child deadlocks on a lock of CPython's objects that another thread held (3.14)")
def test_forks_beside_threads_that_convert(python):
    """The child converts in its main thread and in a new one, at any state of the parent's threads."""
    out = python(
        PREAMBLE
        + """
done, counts = threading.Event(), [0] * 3
shared = dlx.convert([Producer(i) for i in range(200)], to="dlx", lazy=True)

def work(number):
    while not done.is_set():
        everything()
        shared[random.randrange(200)]
        shared.refresh()
        counts[number] += 1

def check():
    everything()
    assert first(shared[7]) == 7
    thread = threading.Thread(target=everything)
    thread.start()
    thread.join()

sys.setswitchinterval(1e-4)
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
while min(counts) == 0:
    time.sleep(0.01)
for number in range(8):
    ends(in_child(check))
    time.sleep(0.001 * number)
done.set()
for thread in threads:
    thread.join()
del shared
gc.collect()
print("well", native.live())
"""
    )
    assert out == "well 0\n"


@pytest.mark.gil("CPython finalizes objects of the parent's threads in the child (3.14)")
def test_forks_while_memory_waits_for_a_device(python, fake_driver):
    """The child leaves the queue unchanged; the parent releases each owner once, also those queued later."""
    code = f"""
sys.path.insert(0, {str(TESTS)!r})
from support.cuda.fake_cuda import FakeCuda
cuda = FakeCuda({str(fake_driver)!r})
gone, done, made, memory = [], threading.Event(), [], cuda.alloc(64)

class Owner:
    def __del__(self):
        gone.append(os.getpid())

def used(stream):
    tensor = native.tensor_new(memory, (64,), None, (1, 8, 1), (2, 0), 0, Owner())
    made.append(stream)
    return native.tensor_behind(tensor, 0, stream, "kept")

def work(stream):
    while not done.is_set():
        cuda.stall(stream)
        tensor = used(stream)
        cuda.read(stream, memory, 64)
        del tensor
        cuda.resume(stream)
        dlx.release_pending()

def check():
    assert dlx.release_pending() >= 0
    everything()
    gc.collect()
    assert os.getpid() not in gone

stalled = cuda.stream()
cuda.stall(stalled)
for _ in range(5):
    tensor = used(stalled)
    cuda.read(stalled, memory, 64)
del tensor
threads = [threading.Thread(target=work, args=(cuda.stream(),)) for _ in range(2)]
for thread in threads:
    thread.start()
for number in range(8):
    ends(in_child(check))
    time.sleep(0.001 * number)
done.set()
for thread in threads:
    thread.join()
cuda.resume_all()
assert dlx.release_pending() == 0
assert len(gone) == len(made) >= 5 and set(gone) == {{os.getpid()}}
print("well", native.live(), cuda.misuses)
"""
    out = python(PREAMBLE + code, env={**os.environ, "DLX_CUDA_DRIVER": str(fake_driver)})
    assert out == "well 0 0\n"


SIGNALS = """
seed = random.randrange(1 << 32)
print(seed)
draw = random.Random(seed)
arrays = [Producer(i % 200) for i in range(300)]
tree = {"a": arrays[:100], "b": [(each, {"c": each}) for each in arrays[100:]]}

def long_tree():
    made = dlx.convert(tree, to="dlx")
    assert [first(x) for x in made["a"][:3]] == [0, 1, 2] and first(made["b"][150][0]) == 50

def long_view():
    view = dlx.convert(tree, to="dlx", lazy=True)
    assert [first(x) for x in view["a"]] == [*range(100)]
    assert [first(pair[0]) for pair in view["b"]] == [i % 200 for i in range(100, 300)]

def long_stack():
    assert dlx.stack(arrays, to="dlx").shape == (300, 4)

def long_call():
    made = dlx.using("dlx")(lambda x: x)(tree)
    assert made is tree

def long_plan():
    plan = dlx.plan(tree, to="dlx")
    if plan.error is not None:
        raise plan.error

WAYS = long_tree, long_view, long_stack, long_call, long_plan
took = {}
for way in WAYS:
    started = time.perf_counter()
    way()
    took[way] = time.perf_counter() - started
gc.collect()
live = native.live()
"""


@pytest.mark.parametrize("base", ["BaseException", "Exception"])
def test_handlers_that_raise(python, base):
    """The exception propagates, nothing leaks, and the next call works.

    If a handler raises an Exception, dlx may attribute it to the producer or type that it is inspecting: it is then the
    cause of an error, or the object passes through.
    """
    out = python(
        PREAMBLE
        + SIGNALS
        + f"""
class Stop({base}):
    pass

def stop(*arguments):
    raise Stop

# Python prints exceptions in callbacks of weak references, and continues.
sys.unraisablehook = lambda said: None if said.exc_type is Stop else sys.__unraisablehook__(said)
signal.signal(signal.SIGALRM, stop)
came, number, ends_at = 0, 0, time.monotonic() + 60
while came < 30 and time.monotonic() < ends_at:
    number += 1
    way = draw.choice(WAYS)
    capsule = dlx.to_capsule(bytearray(4))
    error = None
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, took[way]))
        try:
            dlx.convert([tree, capsule], to="dlx") if number % 5 == 0 else way()
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop as raised:
        error = raised
    except Exception as raised:
        error = raised
    came += error is not None
    assert {base} is Exception or error is None or isinstance(error, Stop), repr(error)
    del error, capsule
    if number % 10 == 0:
        way()
        gc.collect()
        assert native.live() == live, (number, native.live(), live)
for way in WAYS:
    way()
print(came)
""",
        args=(),
    )
    assert int(out.split()[1]) > 5, out


def test_handlers_that_convert(python):
    """A handler that interrupts a conversion converts, too, also from the view that is being read."""
    out = python(
        PREAMBLE
        + SIGNALS
        + """
view, count, errors = dlx.convert(tree, to="dlx", lazy=True), [0], []

def handler(*arguments):
    count[0] += 1
    try:
        everything()
        assert first(view["b"][count[0] % 200][0]) == (100 + count[0] % 200) % 200
        assert first(view["a"][count[0] % 100]) == count[0] % 100
        if count[0] % 10 == 0:
            view.refresh()
    except BaseException as error:
        errors.append(error)
    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 0.01))  # no earlier: it must not interrupt itself forever

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.003)
ends_at = time.monotonic() + 60
while count[0] < 25 and time.monotonic() < ends_at:
    draw.choice(WAYS)()
    assert [first(x) for x in view["a"]] == [*range(100)]
signal.setitimer(signal.ITIMER_REAL, 0)
assert not errors, errors
del view
gc.collect()
assert native.live() == live
print(count[0])
""",
        args=(),
    )
    assert int(out.split()[1]) > 5, out


def test_a_driver_that_forks_while_it_starts(python):
    """The driver's start runs fork handlers on the starting thread, which already holds the lock."""
    env = {**os.environ, "DLX_CUDA_DRIVER": str(compiled("forking_cuda")), "FAKE_CUDA_DEVICES": "1"}
    code = """
        import os
        import dlx
        print(len(dlx.devices()))
        child = os.fork()
        if child == 0:
            os._exit(len(dlx.devices()))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert python(code, env=env, timeout=60).split() == ["2", "1"]
