"""Threads that make every public call while other threads change the shared objects.

    python tests/support stress.threads --threads 8 --seconds 60 --seed 1

The calls come from `soak.py`, plus one of each public name (`verbs`), including device memory of the recording
driver. Each must give the same class of result or error as alone. At the same time run: calls on containers that
threads change, shared views and iterators, capsules that several threads claim and one must get, device tensors that
threads take through the exchange table, and a thread that changes types, imports frameworks whose plugins dlx then
loads, clears caches and collects garbage. At the end no object may be alive. The status is 1 for any fault.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import dlx
import dlx.ctypes
from dlx._core import native
from dlx._registry.registry import registry
from support.plugins.distributions import Site, adapter
from support.processes.concurrent import at_once
from support.project import compiled
from support.stress import soak

PLUGINS = 100
PUBLIC = (*dlx.__all__, "open")  # a name that `from dlx import *` must not take

# A thread's private containers do not change; all threads share these.
MAY_FAIL = (dlx.errors.DlxError, RuntimeError, LookupError, ValueError, TypeError)

address = ctypes.pythonapi.PyCapsule_GetPointer
address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def verbs(plain, folder):
    """Return a call of every public name; names without a call are read."""
    tensor, array = plain["dlx"], plain.get("numpy", plain["dlx"])
    tree = {"a": [tensor, array], "b": array}
    file, header = Path(folder, "a.safetensors"), {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    capsule = tensor.__dlpack__(max_version=(1, 0))
    pointer = address(capsule, b"dltensor_versioned")
    memory = (ctypes.c_float * 6)()

    @dlx.using("dlx")
    def function(first, more):
        return first, more

    def shared():
        with dlx.share(tree) as handle:
            return dlx.attach(dict(handle), to="dlx")["a"][0].shape

    def ring():
        with dlx.ring(2, like=array, readers=0) as frames:
            frames.put(array)
            return frames.handle

    def moved():
        there = dlx.convert(tensor, to="dlx", device="cuda:0")
        there = dlx.convert([there, there], to="dlx", device="cuda:1")
        return memoryview(dlx.convert(there, to="dlx", device="cpu")[0]).tobytes()

    def traced():
        with dlx.trace() as seen:
            dlx.convert(array, to="dlx")
        return seen.records

    def opened():
        with dlx.open(file) as found:
            return found["a"].shape

    def borrowed():
        with dlx.borrow(array) as found:
            return found.ndim

    def split():
        with contextlib.suppress(dlx.errors.LayoutError):  # it is a dense array
            dlx.parts(array)

    calls = {
        "convert": moved,
        "parts": split,
        "save": lambda: dlx.save(array, Path(folder) / f"{threading.get_ident()}.npy"),
        "plan": lambda: str(dlx.plan(tree, to="dlx")),
        "describe": lambda: dlx.describe(array),
        "stack": lambda: dlx.stack([array, tensor], "dlx"),
        "share": shared,
        "attach": shared,
        "ring": ring,
        "shares_memory": lambda: dlx.shares_memory(tensor, array),
        "array_namespace": lambda: dlx.array_namespace(array),
        "adapters": lambda: len(dlx.adapters()),
        "using": lambda: function(array, [tensor]),
        "trace": traced,
        "Trace": traced,
        "ArrayInfo": lambda: str(dlx.describe(tensor)),
        "Device": lambda: dlx.Device("cuda:1"),
        "DType": lambda: str(dlx.DType("bfloat16")),
        "Plan": lambda: repr(dlx.plan(array, to="dlx")),
        "SupportsDLPack": lambda: isinstance(array, dlx.SupportsDLPack),
        "Tensor": lambda: (tensor.shape, tensor.strides, tensor.device, repr(tensor), memoryview(tensor).nbytes),
        "from_dlpack": lambda: dlx.from_dlpack(array),
        "empty": lambda: dlx.empty((2, 3), "float32", shared=True).shape,
        "to_capsule": lambda: dlx.to_capsule(array),
        "from_pointer": lambda: dlx.from_pointer(memory, 6, "float32", release=lambda: None),
        "from_managed": lambda: (dlx.from_managed(pointer, borrow=True), capsule)[0],
        "borrow": borrowed,
        "devices": lambda: len(dlx.devices()),
        "release_pending": lambda: dlx.release_pending() >= 0,
        "cffi_builder": dlx.cffi_builder,
        "get_include": dlx.get_include,
        "hookimpl": lambda: dlx.hookimpl(opened),
        "open": opened,
    }
    missing = {name for name in PUBLIC if callable(getattr(dlx, name))} - calls.keys()
    assert not missing, f"threads.py calls no {missing}"
    return {name: lambda name=name: getattr(dlx, name) for name in PUBLIC} | calls


class Shared:
    """The shared objects, and calls on them, each with its allowed errors."""

    def __init__(self, plain):
        self.plain = list(plain.values())
        self.list = list(self.plain) * 4
        self.dict = {f"k{i}": each for i, each in enumerate(self.plain * 4)}
        self.nested = {"a": self.list, "b": {"c": self.dict, "d": (self.list, self.plain[0])}}
        self.targets = list(plain)
        self.views = {to: dlx.convert(self.nested, to=to, lazy=True) for to in plain}
        self.iterators = {}
        self.claims = []

    def calls(self, draw):
        """Return the calls, as (name, function, the number for it)."""
        to = draw.choice(self.targets)
        return {
            "tree": lambda: dlx.convert(self.nested, to=to),
            "plan": lambda: dlx.plan(self.list, to=to),
            "stack": lambda: dlx.stack(self.plain, to) if draw.random() < 0.2 else None,
            "view": lambda: self.viewed(draw, to),
            "change": lambda: self.changed(draw),
            "iterate": lambda: self.iterated(to),
            "claim": lambda: self.claimed(draw),
            "take": lambda: self.taken() if draw.random() < 0.05 else None,
        }

    def viewed(self, draw, to):
        view = self.views[to]
        list(view["a"])[:2]
        dict(view["b"]["c"])
        view["b"]["d"][0][0]
        if draw.random() < 0.05:
            self.views[to] = dlx.convert(self.nested, to=to, lazy=True)
        if draw.random() < 0.05:
            view["a"].refresh()

    def changed(self, draw):
        self.list.append(draw.choice(self.plain))
        self.dict[f"k{draw.randrange(50)}"] = draw.choice(self.plain)
        if len(self.list) > 30:
            del self.list[draw.randrange(10) :]
        if len(self.dict) > 30:
            self.dict.pop(f"k{draw.randrange(50)}", None)

    def iterated(self, to):
        results = self.iterators.get(to)
        if results is None or next(results, None) is None:
            self.iterators[to] = iter(self.views[to]["a"])

    def claimed(self, draw):
        """Offer a capsule to all threads, and try to claim one; each is claimed once."""
        if not self.claims:
            tensor = dlx.empty((draw.randrange(1, 9),), "uint8")
            self.claims = [
                [tensor.__dlpack__(max_version=draw.choice([None, (1, 0)])), threading.Lock(), 0] for _ in "abcd"
            ]
        offer = draw.choice(self.claims or [None])
        if offer is None:
            return
        try:
            dlx.from_dlpack(offer[0])
        except dlx.errors.ConsumedError:
            for _ in range(6000):  # the winner reports as soon as it runs again
                if offer[2]:
                    break
                time.sleep(0.01)
            if offer[2] != 1:
                raise AssertionError(f"a capsule was claimed {offer[2]} times") from None
            self.claims = []
            return
        with offer[1]:
            offer[2] += 1

    def taken(self):
        """Make threads take the same new device tensors through the exchange table while others read them."""
        capsule = dlx.Tensor.__dlpack_c_exchange_api__
        table = dlx.ctypes.DLPackExchangeAPI.from_address(address(capsule, b"dlpack_exchange_api"))
        host = dlx.from_dlpack(bytearray(b"abcd"))
        tensors = [dlx.convert(host, to="dlx", device="cuda:0") for _ in range(50)]
        reached = [0] * 4

        def in_step(i):
            try:
                for n, tensor in enumerate(tensors):
                    reached[i] = n
                    while min(reached) < n:  # a barrier would release them one after the other
                        time.sleep(0)
                    yield tensor
            finally:
                reached[i] = len(tensors)

        def borrow(i):
            found = dlx.ctypes.DLTensor()
            for tensor in in_step(i):
                assert table.dltensor_from_py_object_no_sync(tensor, ctypes.byref(found)) == 0

        def export():
            for tensor in in_step(2):
                made = ctypes.POINTER(dlx.ctypes.DLManagedTensorVersioned)()
                assert table.managed_tensor_from_py_object_no_sync(tensor, ctypes.byref(made)) == 0
                made[0].deleter(made)

        def read():
            for tensor in in_step(3):
                assert bytes(memoryview(dlx.convert([tensor], to="dlx", device="cpu")[0])) == b"abcd"
                dlx.convert([tensor, tensor], to="dlx", device="cuda:0", copy=True)

        failed = [each for each in at_once(lambda: borrow(0), lambda: borrow(1), export, read) if each]
        if failed:
            raise AssertionError(f"taking device tensors gave {failed}")


def write_plugins(folder):
    """Write frameworks, each with a plugin that dlx finds at its first use; return their names."""
    site, names = Site(Path(folder)), [f"stresslib{i}" for i in range(PLUGINS)]
    for name in names:
        site.module(name)
        site.plugin(f"dlx-{name}", name, adapter(name))
    return names


def disturb(stop, draw, plugins, failures):
    """Clear dlx's caches, again and again."""

    class Changing(soak.Producer):
        pass

    memory = dlx.empty((4,), "float32")
    while not stop.is_set():
        try:
            what = draw.randrange(8)
            if what == 0:
                native.routes_clear()
            elif what == 1:
                gc.collect()
            elif what == 2:
                registry._forget()  # as when a plugin is loaded
            elif what < 5 and plugins:
                made = importlib.import_module(plugins.pop()).Array(memory)
                assert dlx.convert([made], to="dlx")[0].shape == (4,)
            elif what == 5:  # a type that is changed, then types that come and go
                Changing.attribute = draw.random()
                dlx.convert(Changing(lambda options: memory.__dlpack__(**options)), to="dlx")
            else:
                for _ in range(5):
                    brief = type("Brief", (soak.Producer,), {})
                    dlx.convert(brief(lambda options: memory.__dlpack__(**options)), to="dlx")
            time.sleep(draw.random() * 0.01)
        except BaseException as error:
            failures.append(error)
            raise


def work(stop, draw, distinct, often, every, kinds, shared, counts, number, failures):
    """Make calls until the end."""
    names = list(distinct)
    done = 0
    try:
        while not stop.is_set():
            for name in draw.sample(names, 20) + draw.choices(often, k=100) + draw.choices(every, k=4):
                soak.check_kind(name, distinct[name], kinds)
            for name, call in shared.calls(draw).items():
                try:
                    call()
                except MAY_FAIL as error:
                    if isinstance(error, SystemError):
                        raise
                    counts[name, type(error).__name__] = counts.get((name, type(error).__name__), 0) + 1
            done += 131
    except BaseException as error:
        failures.append(error)
        stop.set()
    counts["calls", number] = done


def stress(threads, seconds, seed, frameworks, folder):
    """Stress dlx; return the faults."""
    draw = random.Random(seed)
    plugins = write_plugins(folder)
    sys.path.insert(0, str(folder))
    frequent, rare = soak.calls(frameworks)
    shared = Shared(soak.arrays(frameworks)[1])
    few, often = dict(draw.sample(rare, min(len(rare), 400)) + frequent), [name for name, _ in frequent]
    public = {f"dlx.{name}": call for name, call in verbs(soak.arrays(frameworks)[1], folder).items()}
    few |= public
    for _ in range(2):  # fills caches, and imports
        kinds = {name: soak.kind_of(call) for name, call in few.items()}
    failed = {name: kinds[name] for name in public if issubclass(kinds[name], BaseException)}
    assert not failed, failed
    stop, failures, counts = threading.Event(), [], {}
    running = [threading.Thread(target=disturb, args=(stop, random.Random(seed + 1), plugins, failures))]
    running += [
        threading.Thread(
            target=work,
            args=(stop, random.Random(seed + 2 + n), few, often, [*public], kinds, shared, counts, n, failures),
        )
        for n in range(threads)
    ]
    for thread in running:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in running:
        thread.join()
    print(sum(number for (what, _), number in counts.items() if what == "calls"), "calls;",
          len(public), "public names,", PLUGINS - len(plugins), "plugins;",
          {f"{a} {b}": n for (a, b), n in counts.items() if a != "calls"})  # fmt: skip
    return failures


def main(arguments=None):
    """Stress dlx; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--frameworks", default="numpy,torch", help="to test with dlx (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    frameworks = soak.installed(chosen.frameworks)
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(
        f"seed {chosen.seed}; {chosen.threads} threads; the GIL is {'on' if gil else 'off'};", *frameworks, flush=True
    )
    os.environ["DLX_CUDA_DRIVER"] = str(compiled("fake_cuda"))
    with tempfile.TemporaryDirectory() as folder:
        failures = stress(chosen.threads, chosen.seconds, chosen.seed, frameworks, folder)
    if sysconfig.get_config_var("Py_GIL_DISABLED") and getattr(sys, "_is_gil_enabled", lambda: True)() != gil:
        failures.append(RuntimeError("something switched the GIL on"))
    gc.collect()
    gc.collect()
    for failure in failures:
        sys.excepthook(type(failure), failure, failure.__traceback__)
    print(f"{native.live()} managed tensors alive at the end.")
    return 1 if failures or native.live() else 0


if __name__ == "__main__":
    sys.exit(main())
