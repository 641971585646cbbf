"""KeyboardInterrupts wherever Python checks for signals in dlx's code, one per call.

    python tests/support stress.interrupts

After each interrupt: it was raised; no capsule is consumed unless its conversion was complete; no managed tensor is
alive, and no reference to a source is left; the same call works, in another thread. "cold" tests first calls (imports,
plugins, routes), each in a forked child. `--sample` draws some of the places, by `--seed`.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import faulthandler
import functools
import gc
import os
import queue
import random
import re
import sys
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("dlx", "dlx_adapters"))
# Python does not check for signals after intrinsics. NOT_TAKEN, since 3.14, is in no `try`; PUSH_EXC_INFO begins the
# handler of a call's error, after which Python does not check either.
_DEAF = ("RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "NOT_TAKEN", "PUSH_EXC_INFO")
CHECKED = {
    code
    for name, code in dis.opmap.items()
    if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and not name.startswith("CALL_INTRINSIC")
}
DEAF = {dis.opmap.get(name) for name in _DEAF}
CALLBACKS = ("remove", "drop", "__del__")  # Python prints their errors, and continues
COMPLETE = {("convert.py", "convert"), ("batch.py", "run"), ("call.py", "__init__")}


@functools.cache
def _handlers(code):
    return dis._parse_exception_table(code)


def handler_of(code, offset):
    """Return the offset of an instruction's exception handler, or None."""
    return next((each.target for each in _handlers(code) if each.start <= offset < each.end), None)


class Interrupt:
    """A tracer that raises KeyboardInterrupt at place number `at` of dlx's code: calls and loops, or lines."""

    def __init__(self, at=0, *, lines=False):
        self.at, self.lines = at, lines
        self.count = 0
        self.completed = False  # a conversion has returned: its caller has the result, and the interrupt
        self._last = {}  # id of a frame -> the offset of its last instruction
        self.where = ""

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(FOLDERS) or code.co_name in CALLBACKS:
            return None
        if event == "return" and self.where == "" and (Path(code.co_filename).name, code.co_name) in COMPLETE:
            self.completed = True
        if self.lines:
            here = event == "line"
        else:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            last, at = self._last.get(id(frame), -1), frame.f_lasti
            self._last[id(frame)] = at if event == "opcode" else -1
            here = last >= 0 and event == "opcode" and code.co_code[last] in CHECKED and code.co_code[at] not in DEAF
            here = here and handler_of(code, last) == handler_of(code, at)  # a signal is raised by the last one
        if here:
            self.count += 1
            if self.count == self.at:
                self.where = f"{code.co_filename.removeprefix(f'{ROOT}{os.sep}')}:{frame.f_lineno} {code.co_name}"
                raise KeyboardInterrupt("now")
        return self

    def during(self, call):
        """Call; return the error that was raised, or None."""
        before = sys.gettrace()
        try:
            sys.settrace(self)
            call()
        except BaseException as error:
            return error
        finally:
            sys.settrace(before)
        return None


# ---- calls -----------------------------------------------------------------------------------------------------------


class Producer:
    """A producer without a framework."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return 1, 0


class Case:
    """A call, its arguments, and the capsules among them.

    Attributes
    ----------
    view
        Whether the call reads a view, which keeps results.
    """

    def __init__(self, call, *held, view=False):
        self.call, self.held, self.view = call, held, view


def cases(frameworks):
    """Return constructors of cases, by name."""
    import dlx

    block = dlx.empty((6,), "uint8", "cpu")
    memoryview(block)[:] = bytes(6)
    made = {}

    def add(function):
        made[function.__name__.replace("_", " ")] = function

    def capsule():
        return block.__dlpack__(max_version=(1, 0))

    def of_one(name, call, *makers):
        for maker in makers or (capsule, lambda: Producer(block), lambda: bytearray(6)):
            kind = type(maker()).__name__

            def make(maker=maker):
                obj = maker()
                return Case(lambda: call(obj), obj)

            made[f"{name}, {kind}"] = make

    of_one("convert", lambda obj: dlx.convert(obj, to="dlx"))
    of_one("convert, copied", lambda obj: dlx.convert(obj, to="dlx", copy=True))
    of_one("list", lambda obj: dlx.convert([obj, Producer(block), 1], to="dlx"))
    of_one("dict", lambda obj: dlx.convert({"a": obj, "b": block}, to="dlx"))
    of_one("nested", lambda obj: dlx.convert({"a": [(obj, {"b": [obj, block]})], "c": {1, 2}}, to="dlx"))
    of_one("strict", lambda obj: dlx.convert([obj, block], to="dlx", strict=True))
    of_one("refused", lambda obj: dlx.convert([obj, Producer(None)], to="dlx"))
    of_one("collected", lambda obj: dlx.convert([obj, Producer(None), (Producer(None),)], to="dlx", errors="collect"))
    of_one("plan", lambda obj: dlx.plan(obj, to="dlx"))
    of_one("plan of a tree", lambda obj: dlx.plan([obj, {"a": Producer(block)}, Producer(None)], to="dlx"))
    of_one("stack", lambda obj: dlx.stack([obj, block, obj], to="dlx"))
    of_one("describe", lambda obj: dlx.describe(obj))
    of_one("from_dlpack", lambda obj: dlx.from_dlpack(obj))
    of_one("to_capsule", lambda obj: dlx.to_capsule(obj))
    of_one("borrow", lambda obj: dlx.borrow(obj).__enter__())
    of_one("borrow, read", lambda obj: dlx.borrow(obj, readonly=True).__enter__())
    of_one("shares_memory", lambda obj: dlx.shares_memory(obj, block))
    of_one("like", lambda obj: dlx.convert(obj, like=block))
    if "numpy" in frameworks:
        import numpy as np

        array = np.arange(6.0)
        kinds = capsule, lambda: Producer(block), lambda: array[::-1], lambda: np.float64(3)
        of_one("to numpy", lambda obj: dlx.convert(obj, to="numpy"), *kinds)
        of_one("to numpy, copied", lambda obj: dlx.convert({"a": [obj]}, to="numpy", copy=True), *kinds)
        of_one("stack in numpy", lambda obj: dlx.stack([obj, obj], to="numpy"), *kinds)
    if "torch" in frameworks:
        import torch

        leaf = torch.ones(2, requires_grad=True)
        conj = torch.ones(2, dtype=torch.complex64).conj()
        kinds = capsule, lambda: Producer(block), lambda: conj
        of_one("to torch", lambda obj: dlx.convert(obj, to="torch"), *kinds)
        of_one("torch in a tree", lambda obj: dlx.convert([obj, (leaf, obj)], to="numpy", detach=True), *kinds)
        of_one("torch refused", lambda obj: dlx.convert([obj, (leaf, obj)], to="numpy", errors="collect"), *kinds)

    for kind, maker in {"capsule": capsule, "producer": lambda: Producer(block)}.items():

        def view(maker=maker):
            tree = [maker(), {"a": maker(), "b": (block, 1)}]
            lazy = dlx.convert(tree, to="dlx", lazy=True)

            def call():
                return lazy[0], lazy[1]["a"], list(lazy[1]["b"]), lazy[1].get("c"), repr(lazy), len(lazy)

            return Case(call, tree[0], tree[1]["a"], view=True)

        def new_view(maker=maker):
            tree = [maker(), {"a": maker()}]
            return Case(lambda: dlx.convert(tree, to="dlx", lazy=True)[1]["a"], tree[0], tree[1]["a"])

        def materialized(maker=maker):
            tree = [maker(), {"a": maker()}]
            lazy = dlx.convert(tree, to="dlx", lazy=True)
            return Case(lazy.materialize, tree[0], tree[1]["a"])

        def using(maker=maker):
            obj = maker()

            @dlx.using("dlx")
            def passed(first, *rest, more=None):
                return [first, more], rest

            return Case(lambda: passed(obj, 1, {"a": block}, more=[obj]), obj)

        def generator(maker=maker):
            obj = maker()

            @dlx.using("dlx")
            def values(first):
                for _ in range(2):
                    first = (yield first) or first

            return Case(lambda: list(values(obj)), obj)

        for function in (view, new_view, materialized, using, generator):
            made[f"{function.__name__.replace('_', ' ')}, {kind}"] = function

    @add
    def written_view():
        elements = [Producer(block), {"a": Producer(block)}]

        def call():
            lazy = dlx.convert([*elements], to="dlx", lazy=True)
            lazy.append(elements[0])
            lazy[0] = lazy[1]["a"]
            lazy.reverse()
            lazy[1:2] = [lazy[0]]
            return lazy.pop()

        return Case(call, *elements)

    @add
    def from_pointer():
        memory = bytearray(6)
        return Case(lambda: dlx.from_pointer(block.data_ptr, 6, "uint8", owner=memory), memory)

    if "numpy" in frameworks and "torch" in frameworks:

        @add
        def using_that_writes_back():
            array, strided = np.zeros(4), np.zeros(4)[::-1]

            @dlx.using("torch")
            def function(x, y):
                x += 1
                y += 1
                return x, y

            return Case(lambda: function(array, strided), array, strided)

    return made


# ---- warm: at each place --------------------------------------------------------------------------------------------


class Elsewhere:
    """A thread that makes calls, so that locks of the main thread block it."""

    def __init__(self):
        self.calls, self.errors = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            self.errors.put(_error_of(self.calls.get()))

    def error_of(self, call, after):
        """Return the class and text of a call's error in the thread; NoneType without one."""
        self.calls.put(call)
        try:
            return self.errors.get(timeout=60)
        except queue.Empty:
            faulthandler.dump_traceback()
            raise SystemExit(f"after {after}: the same call in another thread waits for ever for a lock") from None


def _error_of(call):
    try:
        call()
    except BaseException as error:
        return type(error), str(error)
    return type(None), ""


def trial(make, at, elsewhere, expected):
    """Interrupt a case at a place; return the place and the fault; None if it has fewer places."""
    import dlx
    from dlx._core import native

    gc.collect()
    case = make()
    references, live = [sys.getrefcount(obj) for obj in case.held], native.live()
    interrupt = Interrupt(at)
    error = interrupt.during(case.call)
    if not interrupt.where:
        return None
    wrong = []
    if not isinstance(error, KeyboardInterrupt):
        wrong.append(f"the interrupt is gone: {error!r} came out")
    del error
    used = any(native.capsule_state(obj) == "used" for obj in case.held)
    if used and not interrupt.completed:
        wrong.append("a capsule is used up")
    if not case.view:
        gc.collect()  # the error's frames form a cycle
        if native.live() > live:
            wrong.append(f"{native.live() - live} managed tensors are alive")
        if (found := [sys.getrefcount(obj) for obj in case.held]) != references:
            wrong.append(f"references {references} became {found}")
    kind, text = elsewhere.error_of(case.call, interrupt.where)
    if kind is not expected and not (used and kind is dlx.errors.ConsumedError):
        wrong.append(f"the next call gave {kind.__name__} {text}")
    return interrupt.where, wrong


def warm(chosen, frameworks):
    """Try all cases, or the matching ones; return (interrupts, faults)."""
    from dlx._core import native

    elsewhere, draw, done, faults = Elsewhere(), random.Random(chosen.seed), 0, 0
    made = {name: make for name, make in cases(frameworks).items() if re.search(chosen.cases, name)}
    counts, outcomes = {}, {}
    for name, make in made.items():
        for _ in range(3):  # fills the caches
            outcomes[name] = type(Interrupt().during(make().call))
        interrupt = Interrupt()
        interrupt.during(make().call)
        counts[name] = interrupt.count
    places = [(name, at) for name, count in counts.items() for at in range(1, count + 1)]
    if chosen.sample:
        places = draw.sample(places, min(chosen.sample, len(places)))
    gc.collect()
    gc.freeze()
    for name, at in places:
        found = trial(made[name], at, elsewhere, outcomes[name])
        if found is None:  # a cache was filled during the call
            continue
        done += 1
        if found[1]:
            faults += 1
            print(f"{name}, {at} at {found[0]}: {'; '.join(found[1])}", flush=True)
    made.clear()
    del make
    gc.collect()
    if native.live():
        faults += 1
        print(f"{native.live()} managed tensors are alive at the end")
    return done, faults


# ---- cold: before each line of a first call --------------------------------------------------------------------------


def story(frameworks):
    """Use dlx for the first time; raise if a result is wrong."""
    import dlx

    class Unknown:
        pass

    assert bytes(memoryview(dlx.convert(bytearray(b"abc"), to="dlx"))) == b"abc"
    view = dlx.convert([bytearray(1), {"a": Producer(dlx.from_dlpack(b"abc"))}], to="dlx", lazy=True)
    assert view[1]["a"].shape == (3,)
    if "numpy" in frameworks:
        import numpy as np

        array = np.arange(3.0)
        assert dlx.convert(array, to="dlx").shape == (3,)
        assert dlx.convert([dlx.convert(array, to="dlx")], to="numpy")[0].tolist() == [0, 1, 2]
        assert dlx.using("dlx")(lambda x: x)(array) is array
    if "torch" in frameworks:
        import torch

        assert dlx.convert(np.arange(3.0)[::-1], to="torch").tolist() == [2, 1, 0]
        assert dlx.convert(torch.ones(2), to="numpy").tolist() == [1, 1]
    with contextlib.suppress(dlx.errors.AdapterNotFoundError):
        dlx.convert(Unknown(), to="dlx")
    assert dlx.stack([b"abc", b"def"], to="dlx").shape == (2, 3)
    assert dlx.plan(b"abc", to="dlx").outcome == "shared"
    with dlx.borrow(bytearray(3)) as tensor:
        assert tensor.ndim == 1


def first_use(at, frameworks):
    """In a child: interrupt the story before a line, and repeat it; exit with the fault."""
    interrupt = Interrupt(at, lines=True)
    error = interrupt.during(lambda: story(frameworks))
    wrong = "" if isinstance(error, KeyboardInterrupt) else f"the interrupt is gone: {error!r} came out"
    del error
    try:
        story(frameworks)
        from dlx._core import native

        gc.collect()
        if native.live():
            wrong += f"; {native.live()} managed tensors are alive"
    except BaseException as error:
        wrong += f"; afterwards {type(error).__name__}: {error}"
        if os.environ.get("DLX_TRACEBACKS"):
            traceback.print_exc()
    return interrupt.where, wrong


def in_child(function):
    """Return a function's result in a forked child, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, "\n".join(function()).encode()[:60000])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    status = os.waitpid(child, 0)[1]
    return text if status == 0 and text else f"\nthe child ended with status {status}"


def cold(chosen, frameworks):
    """Interrupt first calls; return (interrupts, faults)."""
    for name in frameworks:
        __import__(name)

    def count():
        interrupt = Interrupt(lines=True)
        error = interrupt.during(lambda: story(frameworks))
        return str(interrupt.count), "" if error is None else repr(error)

    number, _, wrong = in_child(count).partition("\n")
    assert not wrong, wrong
    places = range(1, int(number) + 1)
    if chosen.sample:
        places = random.Random(chosen.seed).sample(places, min(len(places), chosen.sample))
    faults = 0
    for at in places:
        where, _, wrong = in_child(lambda at=at: first_use(at, frameworks)).partition("\n")
        if wrong:
            faults += 1
            print(f"cold, {at} at {where}: {wrong}", flush=True)
    return len(places), faults


def main(arguments=None):
    """Interrupt calls; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("warm", "cold"), default="warm")
    parser.add_argument("--sample", type=int, default=0, help="so many, not all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--cases", default="", help="only those whose name matches this expression")
    parser.add_argument("--frameworks", default="numpy,torch")
    chosen = parser.parse_args(arguments)
    frameworks = [name for name in chosen.frameworks.split(",") if name]
    started = time.monotonic()
    done, faults = (warm if chosen.what == "warm" else cold)(chosen, frameworks)
    print(f"{done} interrupts ({chosen.what}, seed {chosen.seed}), {faults} faults; {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
