"""Ends of processes in every way while results of dlx are alive: the same status as without dlx, and empty stderr.

    python tests/support stress.exits

Each ending runs with each set of frameworks, in a new interpreter with `-X dev`. The status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import signal
import subprocess
import sys
import time

SETS = ("", "numpy", "numpy pyarrow", "numpy torch", "numpy tvm_ffi jax", "numpy torch tvm_ffi jax pyarrow")

# Creates results of every kind: arrays of each framework from each other, trees, partly read views, capsules.
PREAMBLE = """
import atexit, builtins, contextlib, contextvars, functools, gc, os, signal, sys
import threading, time, types, warnings, weakref
for category in DeprecationWarning, RuntimeWarning:  # these endings fork while threads run
    warnings.filterwarnings("ignore", ".*fork", category)
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
EARLY = []
atexit.register(lambda: [call() for call in EARLY])  # runs after what frameworks have registered
import dlx

class Producer:
    def __init__(self):
        self.tensor = dlx.from_dlpack(bytearray(8))
    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)
    def __dlpack_device__(self):
        return 1, 0

arrays = {{"dlx": dlx.from_dlpack(bytearray(8))}}
for name in {frameworks!r}.split():
    arrays[name] = dlx.convert(arrays["dlx"], to=name)

file = os.memfd_create("x.npy")
os.write(file, b"\\x93NUMPY\\1\\0\\x37\\0{{'descr':'|u1','fortran_order':False,'shape':(3,)}}      abc")

# What ends the process from daemon threads at exit, also without dlx: it has released the GIL, and waits for it.
DIE_IN_DAEMONS = ("jax", "torch", "pyarrow")

def make(but=()):
    "Results of every kind."
    found = []
    for to in arrays.keys() - {{*but}}:
        tree = [Producer(), {{"a": (*(arrays[name] for name in arrays.keys() - {{*but}}), Producer())}}]
        view = dlx.convert(tree, to=to, lazy=True)
        found += [view, view[0], view[1]["a"][0], dlx.convert(tree, to=to), dlx.convert(Producer(), to=to, copy=True)]
        handle = dlx.share([arrays[to]])
        found += [handle, dlx.attach(dict(handle)), dlx.attach(handle, to=to, readonly="share", writable=True)]
        opened = dlx.open(f"/proc/self/fd/{{file}}", to)
        found += [dlx.share(dlx.empty(4, "uint8", shared=True)), opened, opened[""]]
    found += [dlx.to_capsule(arrays[name], max_version=(1, 0)) for name in arrays.keys() - {{*but}}]
    return found

def spare(count=1):
    "Daemon threads that convert until the process is gone."
    started = threading.Event()
    def work():
        while True:
            make(but=DIE_IN_DAEMONS)
            started.set()
    for _ in range(count):
        threading.Thread(target=work, daemon=True).start()
    started.wait()

class Late:
    "Converts when it is released."
    def __init__(self, make=make):
        self.held, self.make = make(), make
    def __del__(self, suppress=contextlib.suppress(Exception)):
        with suppress:  # where modules are gone already it may be refused
            self.held.append(self.make(but=("jax",)))
"""

# Name -> code; `expected` holds the expected status and stderr.
ENDINGS = {
    "globals": "held = make()",
    "cycles": """
class Node: pass
for _ in range(3):
    node = Node()
    node.itself, node.held = node, make()
    node.held.append({"node": node})
del node
""",
    "cycles, no collector": "gc.disable()\nfor _ in range(5):\n    x = make(); x.append(x)\n",
    "daemon threads that convert": "spare(3)\nheld = make()",
    "a daemon thread that holds": """
started = threading.Event()
def hold(held):
    started.set()
    threading.Event().wait()
threading.Thread(target=hold, args=(make(),), daemon=True).start()
started.wait()
""",
    "a daemon thread inside a producer": """
started = threading.Event()
class Slow(Producer):
    def __dlpack__(self, **options):
        started.set()
        time.sleep(0.05)
        return super().__dlpack__(**options)
def work(view=dlx.convert([Slow() for _ in range(10000)], to="dlx", lazy=True)):
    for each in view:
        make(but=DIE_IN_DAEMONS)
threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "atexit": "held = []\natexit.register(lambda: held.append(make()))\nEARLY.append(lambda: held.append(make()))",
    "atexit that raises nothing but works in threads": """
def late():
    thread = threading.Thread(target=make)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 lets no thread begin there
        return
    thread.join()
atexit.register(late)
EARLY.append(late)
""",
    "thread-locals": """
local = threading.local()
local.held = make()
started = threading.Event()
def hold():
    local.held = make()
    started.set()
    threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
started.wait()
""",
    "context variables": """
variable = contextvars.ContextVar("variable")
variable.set(make())
context = contextvars.copy_context()
context.run(lambda: variable.set(Late()))
""",
    "modules": """
module = types.ModuleType("module")
module.held, module.late = make(), Late()
sys.modules["module"] = module
builtins.held_to_the_end, sys.held, dlx.held = make(), make(), make()
import json
json.held = Late()
""",
    "dlx is gone from sys.modules": """
held = make(), Late()
for name in [name for name in sys.modules if name.partition(".")[0] in ("dlx", "dlx_adapters")]:
    del sys.modules[name]
del dlx
gc.collect()
""",
    "hooks of sys": """
held = make()
sys.excepthook = functools.partial(print, make())
sys.displayhook = functools.partial(print, make())
sys.addaudithook(lambda name, arguments, held=make(): None)
sys.setprofile(lambda *arguments, held=make(): None)
sys.settrace(lambda *arguments, held=make(): None)
""",
    "a hook of gc": """
def hook(phase, info, make=make, suppress=contextlib.suppress(Exception)):
    with suppress:  # as above; jax waits for ever for a thread then
        make(but=("jax",))
gc.callbacks.append(hook)
held = make()
""",
    "frozen": "held = make()\ngc.freeze()",
    "generators": """
def generator(held):
    try:
        yield held
    finally:
        held.append(make())
running = [generator(make()) for _ in range(3)]
[next(each) for each in running]
running.append(running)
""",
    "a generator under using": """
@dlx.using("dlx")
def values(x):
    try:
        while True:
            yield x
    finally:
        make()
running = values(Producer()), values(bytearray(4))
[next(each) for each in running]
""",
    "a task that waits": """
import asyncio
@dlx.using("dlx")
async def waiting(x):
    try:
        await asyncio.sleep(100)
    finally:
        make()
async def main():
    global task
    asyncio.get_running_loop().slow_callback_duration = 100  # which `-X dev` would tell of
    task = asyncio.ensure_future(waiting(Producer()))
    await asyncio.sleep(0)
asyncio.run(asyncio.wait_for(main(), 60))
""",
    "lazy views": """
tree = [Producer() for _ in range(100)] + [{"a": Producer()}]
views = [dlx.convert(tree, to=to, lazy=True) for to in arrays]
held = [(view[0], view[-1], iter(view), view[3:50][2]) for view in views]
[next(each[2]) for each in held]
tree.append(views)
""",
    "capsules": """
held = [dlx.to_capsule(x, max_version=version) for x in arrays.values() for version in ((1, 0),)]
dlx.from_dlpack(held[0])
memory = bytearray(8)
raw = dlx.to_capsule(memory)
""",
    "borrowed": "held = [dlx.borrow(Producer()) for _ in range(3)]\npointers = [each.__enter__() for each in held]",
    "pointers": """
block = bytearray(64)
import ctypes
memory = (ctypes.c_char * 64).from_buffer(block)
held = [dlx.from_pointer(memory, 64, "uint8", release=lambda: make()) for _ in range(3)]
held.append(held)
""",
    "caches": """
@functools.cache
def cached(n, late=Late()):
    return make()
class Kept:
    held = make()
    late = Late()
[cached(n) for n in range(3)]
""",
    "functions": """
held = make()
other = lambda: held
def default(held=make(), other=other):
    return held
def closure(held=make()):
    class Kept:
        inside = default
        def method(self):
            return held
    return Kept
kept = closure()
spare = kept().method
class Meta(type):
    held = make()
class Made(metaclass=Meta):
    __slots__ = ()
    held = property(lambda self, held=make(): held)
""",
    "finalizers": """
held = make()
class Object: pass
thing = Object()
weakref.finalize(thing, lambda make=make: make())
weakref.finalize(held[0], lambda make=make: make())
""",
    "a conversion after sys.modules is gone": """
class Last:
    def __call__(self): pass
    def __del__(self, convert=dlx.convert, producer=Producer(), suppress=contextlib.suppress(Exception)):
        with suppress:
            convert(producer, to="dlx")
        with suppress:
            convert([producer], to="dlx")
os.register_at_fork(after_in_child=Last())
held = [dlx.convert([Producer()], to="dlx") for _ in range(3)]
""",
    "late conversions": "late = Late()\nlate.itself = late\nother = Late()",
    "a child": """
held = make()
child = os.fork()
held += make()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "a child of a process with threads": """
spare(2)
held = make()
child = os.fork()
if child == 0:
    held += make()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "a child of a thread": """
statuses = []
def work():
    held = make()
    child = os.fork()
    if child == 0:
        held += make()
        os._exit(0)  # a child whose only thread ends is aborted with torch, also without dlx
    statuses.append(os.waitpid(child, 0)[1])
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert statuses == [0]
""",
    "a pool of processes": """
import multiprocessing
def work(n, held=make()):
    return len(make() + held)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert len(set(pool.map(work, range(4)))) == 1
held = make()
""",
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(3)
held = [pool.submit(make) for _ in range(20)]
""",
    "sys.exit in threads": """
def work():
    held = make()
    sys.exit(3)
for _ in range(3):
    threading.Thread(target=work).start()
held = make()
""",
    "sys.exit in a conversion": """
class Leaves(Producer):
    def __dlpack__(self, **options):
        sys.exit(3)
held = make()
print('done')
sys.stdout.flush()
dlx.convert({"a": [Producer(), (Leaves(),)]}, to="dlx")
""",
    "sys.exit in a view": """
class Leaves(Producer):
    def __dlpack__(self, **options):
        sys.exit(3)
view = dlx.convert([Leaves()], to="dlx", lazy=True)
print('done')
view[0]
""",
    "an unhandled exception": """
def outer(held):
    inner(make())
def inner(held):
    raise ValueError("the end")
print('done')
outer(make())
""",
    "an unhandled error of dlx": """
print('done')
dlx.convert([Producer(), make(), object()], to="dlx", strict=True)
""",
    "an interrupt": """
def outer(held):
    print('done')
    sys.stdout.flush()
    signal.raise_signal(signal.SIGINT)
outer(make())
""",
    "an interrupt in a conversion": """
class Interrupted(Producer):
    def __dlpack__(self, **options):
        signal.raise_signal(signal.SIGINT)
        return super().__dlpack__(**options)
print('done')
sys.stdout.flush()
dlx.convert([make(), Interrupted()], to="dlx")
""",
    "signals that come to the end": """
count, after = [0], [0.02]
def handler(*arguments):
    count[0] += 1
    make()
    signal.setitimer(signal.ITIMER_REAL, *after)  # again, once it is done
def stop():  # Python itself gives the signal its default, which kills
    after[0] = 0
    signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, handler)
atexit.register(stop)
held = make()
signal.setitimer(signal.ITIMER_REAL, *after)
while count[0] < 3:
    make()
""",
    "os._exit": "held = make()\nprint('done')\nsys.stdout.flush()\nos._exit(0)",
}

EXPECTED = {  # (status, pattern of stderr); by default (0, empty)
    "sys.exit in a conversion": (3, ""),
    "sys.exit in a view": (3, ""),
    "an unhandled exception": (1, r"Traceback.*ValueError: the end\n"),
    "an unhandled error of dlx": (1, r"Traceback.*AdapterNotFoundError: .*strict=True.*\n"),
    "an interrupt": (-signal.SIGINT, r"Traceback.*KeyboardInterrupt\n"),
    "an interrupt in a conversion": (-signal.SIGINT, r"Traceback.*KeyboardInterrupt\n"),
}


def trial(ending, frameworks):
    """Return the fault of an ending with these frameworks as text, empty if it is right."""
    code = PREAMBLE.format(frameworks=frameworks) + ENDINGS[ending]
    code += "" if "print('done')" in code else "\nprint('done')\n"
    try:
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired as error:
        return f"it does not end; {error.stdout}\n{error.stderr}"
    status, stderr = EXPECTED.get(ending, (0, ""))
    if done.returncode == status and re.fullmatch(stderr, done.stderr, re.DOTALL) and done.stdout == "done\n":
        return ""
    return f"status {done.returncode}, not {status}\n{done.stdout}{done.stderr}"


def main(arguments=None):
    """Try the endings; print the wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endings", default="", help="only those whose name matches this expression")
    parser.add_argument("--frameworks", action="append", help="a set of frameworks; may be given again")
    chosen = parser.parse_args(arguments)
    sets = SETS if chosen.frameworks is None else chosen.frameworks
    sets = [each for each in sets if all(importlib.util.find_spec(name) for name in each.split())]
    number = failed = 0
    started = time.monotonic()
    for frameworks in sets:
        for ending in filter(re.compile(chosen.endings).search, ENDINGS):
            number += 1
            wrong = trial(ending, frameworks)
            if wrong:
                failed += 1
                print(f"{ending}; {frameworks or 'dlx alone'}: {wrong}", flush=True)
    print(f"{number} exits, {failed} of them not as they should be; {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
