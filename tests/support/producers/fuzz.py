"""Convert from invalid producers, by every public function, and check dlx's promises; `producers.cases` generates them.

    python tests/support producers.fuzz --count 100000 --seed 1 --processes 1
    python tests/support producers.fuzz --seed 1 --only 4711    # repeat one case with its details

Cases run in subprocesses, in batches. If a process ends, the case that killed it is named, and runs alone. For each
case: the process lives; an error is a dlx error, or the producer's interrupt or MemoryError, which is not swallowed; a
result has the right dtype, shape and values; a detectable fault is refused, and a valid producer is not; the producer
was called once; each deleter ran once, after all results were released; a refused capsule keeps its name; nothing is
left alive; and the plan matches the conversion.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import gc
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

from support.producers import tables
from support.project import ROOT, program

FRAMEWORKS = ("numpy", "torch", "jax", "tvm_ffi", "pyarrow")


class Fault(AssertionError):
    """A broken promise."""


def check(holds, *words):
    """Raise a Fault unless the condition is true."""
    if not holds:
        raise Fault(" ".join(map(str, words)))


# ---- one case --------------------------------------------------------------------------------------------------------


class World:
    """The installed frameworks, and counts over all cases."""

    def __init__(self, frameworks, folder=""):
        os.environ["DLX_CUDA_DRIVER"] = "no-driver-while-fuzzing.so"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        warnings.simplefilter("ignore")
        for name in frameworks:
            with contextlib.suppress(ImportError):
                __import__(name)
        import dlx
        from dlx._core import native
        from dlx._support.reflect import module_of
        from support.producers import cases, objects, tables, tensors

        self.module_of = module_of
        self.dlx, self.native, self.tensors, self.tree = dlx, native, tensors, objects.tree
        self.here = [name for name in frameworks if name in sys.modules]
        self.targets = ["dlx", "dlx", "numpy", "numpy", "torch", "jax", "tvm_ffi", "pyarrow"]
        self.targets = [name for name in self.targets if name in ("dlx", *self.here)]
        self.families = cases.prepare(self.here)
        self.outcomes = collections.Counter()
        self.late = collections.deque(maxlen=200)  # structs of earlier cases, whose deleters must not run again
        self.tables = tables.Tables(folder) if folder else None
        if self.tables is not None:
            self.targets.append(tables.NAME)
            self.families += [self.tables.family] * 6
        gc.collect()
        gc.freeze()


def run(world, seed, number):
    """Run one case.

    Raises
    ------
    Fault
        If a promise is broken.
    """
    case = world.tensors.Case(seed, number)
    before = world.native.live()
    try:
        try:
            attempt = Attempt(world, case)
            attempt.go()
            attempt.drop()
        finally:
            structs, sources, case.sources = case.structs, case.sources, []
            case.users_capsules = []
            for error in case.raised:
                error.__traceback__ = error.__context__ = None
        del sources, attempt
        if world.tables is not None:
            world.tables.settle()
        settle(world, before)
        for each in structs:
            wanted = int(each.has_deleter and each.is_consumed)
            check(each.deleted == wanted, f"a deleter ran {each.deleted} times, a consumed capsule: {each.is_consumed}")
        world.late.append(structs)
        if len(world.late) == world.late.maxlen:
            for each in world.late[0]:
                check(each.deleted <= 1, "a deleter of an earlier case ran again")
    except Fault as fault:
        fault.add_note("\n".join(map(world.tensors.told, case.story)))
        raise


def settle(world, before):
    """Release everything; no object of dlx may be left."""
    for _ in range(200 if "jax" in world.here else 5):  # jax releases memory in another thread
        if world.native.live() == before:
            return
        gc.collect()
        time.sleep(0.01)
    check(world.native.live() == before, f"{world.native.live() - before} managed tensors are left")


def weighted(**weights):
    """Return the names, each repeated by its weight."""
    return [name for name, weight in weights.items() for _ in range(weight)]


VERBS = weighted(convert=60, plan=8, describe=4, shares=3, stack=5, using=5, from_dlpack=4, capsule=5, borrow=5)
ARRAYS = ("numpy", "torch", "jaxlib", "tvm_ffi", "dlx", "pyarrow")  # packages of the results
LAZY = VERBS + weighted(lazy=60)


class Attempt:
    """A call on the objects of one case, and its outcome."""

    def __init__(self, world, case):
        self.world, self.case, self.dlx = world, case, world.dlx
        rng = case.rng
        make = rng.choice(world.families)
        case.is_own_memory = False
        self.is_tree = rng.random() < 0.25
        self.obj = world.tree(case, make) if self.is_tree else make(case)
        case.sources.append(self.obj)
        self.to = rng.choice(world.targets)
        self.options = self.some_options(rng)
        self.outcome = self.error = self.result = None
        self.verb = rng.choice(LAZY if self.is_tree else VERBS)
        self.armed = world.tables.arm(rng) if self.to == "fuzzlib" else None
        case.tell(self.verb, self.to, self.options)

    def some_options(self, rng):
        """Return options of `convert`."""
        options = {}
        if rng.random() < 0.5:
            return options
        if rng.random() < 0.4:
            options["copy"] = rng.choice((True, False))
        if rng.random() < 0.3:
            options["readonly"] = rng.choice(("share", "error", "copy"))
        if rng.random() < 0.2:
            options["detach"] = True
        if rng.random() < 0.2:
            options["device"] = rng.choice(("cpu", "cpu", "cuda", "cuda:1", (1, 0), "cuda_host"))
        if rng.random() < 0.2:
            options["strict"] = True
        if rng.random() < 0.2:
            options["errors"] = "collect"
        return options

    # ---- doing ------------------------------------------------------------------------------------------------------

    def go(self):
        """Make the call, and check its outcome."""
        case = self.case
        names = [each.name if not each.is_consumed else None for each in case.users_capsules]
        plan = None
        if self.verb == "convert" and case.is_steady and case.rng.random() < 0.3:
            plan = self.planned()
        asked = case.calls["__dlpack__"]
        before = len(case.raised)
        try:
            self.result = getattr(self, self.verb)()
        except BaseException as error:
            if isinstance(error, Fault):
                raise
            self.error = error
        self.world.outcomes[f"{self.verb} {type(self.error).__name__}" if self.error is not None else self.verb] += 1
        raised = case.raised[before:]
        self.judge(raised)
        if self.verb in ("convert", "describe", "from_dlpack", "capsule", "borrow") and not self.is_tree:
            calls = case.calls["__dlpack__"] - asked
            check(calls <= 1, f"the producer was called {calls} times")
            if not any(error for error in raised):
                check(case.calls["interface"] <= 2, f"an interface was asked for {case.calls['interface']} times")
        if (self.error is not None and self.verb not in ("lazy", "using")) or self.verb in (
            "plan",
            "describe",
            "shares",
            "stack",
        ):
            for each, name in zip(case.users_capsules, names, strict=True):
                check(name is None or not each.is_consumed, "a refused capsule lost its name")
        if plan is not None:
            self.agrees(plan)
        self.promises()
        if self.error is None and self.result is not None:
            for each in case.structs:
                if each.is_consumed:
                    each.scribble()
            self.right()

    def planned(self):
        try:
            return self.dlx.plan(self.obj, to=self.to, **self.options)
        except BaseException as error:
            self.error = error
            self.judge(self.case.raised)
            self.error = None
            return None

    def convert(self):
        return self.dlx.convert(self.obj, to=self.to, **self.options)

    def plan(self):
        plan = self.dlx.plan(self.obj, to=self.to, probe=self.case.rng.random() < 0.7, **self.options)
        str(plan), repr(plan)
        check(plan.error is None or isinstance(plan.error, (self.dlx.errors.DlxError, ExceptionGroup)), plan.error)

    def describe(self):
        str(self.dlx.describe(self.obj))

    def shares(self):
        self.dlx.shares_memory(self.obj, self.obj if self.case.rng.random() < 0.5 else bytes(3))

    def stack(self):
        arrays = [self.obj, *([self.obj] if self.case.rng.random() < 0.5 else [bytes(3)])]
        whole = self.dlx.stack(arrays[: self.case.rng.choice((1, 2))], to=self.to)
        expected = self.case.expected
        if expected is not None and not self.is_tree and self.to not in ("pyarrow", "fuzzlib"):
            check(tuple(whole.shape)[1:] == expected[1], "a stack has another shape", whole.shape)

    def using(self):
        rng, fails = self.case.rng, self.case.rng.random() < 0.15
        make = rng.choice(self.world.tensors.EXCEPTIONS)

        def function(x, y=None):
            if fails:
                self.case.fail(make)
            return {"x": x} if y is None else x

        options = {"readonly": self.options.get("readonly", "copy"), "detach": True, "lazy": rng.random() < 0.2}
        decorated = self.dlx.using(self.to, **options)(function)
        try:
            decorated(self.obj, *([self.obj] if rng.random() < 0.3 else []))
        except Exception as error:
            if isinstance(error, MemoryError) or not (fails and any(error is each for each in self.case.raised)):
                raise

    def from_dlpack(self):
        self.to, self.options = "dlx", {}
        return self.dlx.from_dlpack(self.obj)

    def capsule(self):
        version = self.case.rng.choice((None, (1, 0), (1, 3), (0, 8), (2, 0)))
        made = self.dlx.to_capsule(self.obj, max_version=version)
        legacy = version is None or version[0] < 1
        check(self.world.native.capsule_state(made) == ("legacy" if legacy else "versioned"), made)
        if self.case.rng.random() < 0.5:
            self.to, self.options = "dlx", {}
            return self.dlx.convert(made, to="dlx")
        return None

    def borrow(self):
        readonly = self.case.rng.random() < 0.6
        with self.dlx.borrow(self.obj, readonly=readonly) as tensor:
            check(readonly or not (self.case.readonly and self.case.expected), "read-only memory was lent writable")
            dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
            shape = tuple(tensor.shape[0 : tensor.ndim])
            if self.case.expected is not None and not self.is_tree:
                check((dtype, shape) == self.case.expected[:2], "another dtype or shape was lent", dtype, shape)
        check(tensor.ndim == 0 and not tensor.data, "borrowed memory is still there")

    def lazy(self):
        options = {name: value for name, value in self.options.items() if name != "errors"}
        view = self.dlx.convert(self.obj, to=self.to, lazy=True, **options)
        rng, kept = self.case.rng, []
        for _ in range(rng.choice((1, 2, 4))):
            how = rng.randrange(6)
            if how == 0 and hasattr(type(view), "__len__"):
                kept.append(len(view))
            elif how == 1 and hasattr(type(view), "__iter__"):
                kept += list(view)
            elif how == 2 and hasattr(view, "items"):
                kept += [value for _, value in view.items()]
            elif how == 3 and isinstance(self.obj, (list, tuple)) and len(self.obj):
                kept.append(view[0])
            elif how == 4:
                repr(view)
            else:
                with contextlib.suppress(ValueError, RuntimeError, TypeError):  # arrays are compared by value
                    kept.append(3 in view if hasattr(type(view), "__contains__") else None)

    # ---- looking ----------------------------------------------------------------------------------------------------

    def judge(self, raised):
        """Check that the error may leave dlx, and find swallowed interrupts."""
        error, errors = self.error, self.dlx.errors
        if self.armed is not None and self.world.tables.library.imports:
            check(isinstance(error, self.armed) or raised, "swallowed what a table raised:", self.armed, repr(error))
            return
        final = next((each for each in raised if self.world.tensors.is_final(each)), None)
        if final is not None:
            known = {id(each) for each in raised}
            check(error is not None, "swallowed:", repr(final))
            check(id(error) in known or isinstance(error, MemoryError), "replaced:", repr(final), "by", repr(error))
            return
        if error is None:
            return
        if self.verb == "lazy" and (
            {id(error), id(error.__cause__)} & {id(each) for each in raised} or is_from(error, "producers/cases.py")
        ):
            return  # a view raises the error of its source
        if self.verb == "lazy" and isinstance(error, KeyError) and "more" in error.args:
            return  # a mapping that lists a missing key
        if self.verb == "lazy" and not self.case.is_steady and "changed size during iteration" in str(error):
            return  # a source that changed during iteration
        if self.verb == "lazy" and isinstance(error, TypeError) and "as a dict key" in str(error):
            return  # the error of a key's hash, which Python 3.14 wraps
        if isinstance(error, ExceptionGroup) and not isinstance(error, errors.DlxError):
            check(self.options.get("errors") == "collect", "a group without errors='collect'", repr(error))
            every = error.exceptions
        else:
            every = (error,)
        for each in every:
            if not isinstance(each, errors.DlxError):
                where = "".join(traceback.format_exception(each)[-6:])
                raise Fault(f"{type(each).__name__} left dlx: {where}")
            str(each), repr(each)
            self.follow(each)

    def follow(self, error):
        """Look for mistakes of dlx behind its errors."""
        planted, seen = {id(each) for each in self.case.raised}, 0
        while error is not None and seen < 20:
            cause, seen = error.__cause__, seen + 1
            if cause is not None and id(cause) not in planted and is_mistake(cause, str(error)):
                told = "".join(traceback.format_exception(cause)[-8:])
                raise Fault(f"a mistake of dlx is behind {type(error).__name__}: {error}\n{told}")
            error = cause

    def agrees(self, plan):
        """Compare the plan with the outcome."""
        if not self.case.is_steady or self.to == "fuzzlib":
            return
        refused = plan.outcome == "refused"
        check(
            refused == (self.error is not None),
            f"planned {plan.outcome}, found",
            repr(self.error),
            "instead of",
            plan.error,
        )
        if refused:
            check(type(plan.error) is type(self.error), "planned", repr(plan.error), "found", repr(self.error))
            if isinstance(self.error, self.dlx.errors.DlxError):
                texts = [re.sub("0x[0-9a-f]+", "ADDRESS", str(each)) for each in (plan.error, self.error)]
                check(texts[0] == texts[1], "planned", texts[0], "found", texts[1])

    def promises(self):
        """Check that known faults are refused, and known valid producers are not."""
        case = self.case
        if self.verb in ("convert", "from_dlpack", "capsule", "borrow") and not case.raised:
            strict = not self.is_tree or self.verb != "convert"
            check(self.error is not None or not case.must_fail or not strict, "a lie went through:", self.result)
        if self.is_tree or not case.must_pass or self.error is None:
            return
        common = case.expected is not None and str(self.dlx.DType(case.expected[0])) in self.world.tensors.COMMON
        plain = not self.options or set(self.options) <= {"detach", "strict", "errors"}
        asked = {"convert": plain, "from_dlpack": True, "describe": True}.get(self.verb, False)
        if asked and (self.to == "dlx" or self.verb == "describe" or (self.to == "numpy" and common)):
            raise Fault(f"a valid object was refused: {self.error!r}")

    def right(self):
        """Compare a result with its source, with the result's framework if possible."""
        case, result = self.case, self.result
        if case.expected is None:
            return
        if self.is_tree:
            result = self.found(result)
            if result is None:
                return
        found = seen(self.dlx, self.world.tensors, self.to, result)
        if found is None:
            return
        dtype, shape, held, address, writable = found
        wanted = (case.expected[0], case.expected[1], case.expected[2])
        check(dtype == wanted[0], "another dtype:", dtype, "instead of", wanted[0])
        check(tuple(shape) == wanted[1], "another shape:", shape, "instead of", wanted[1])
        check(held == wanted[2], "other values:", held[:64], "instead of", wanted[2][:64])
        shared = bool(held) and self.world.tensors.is_inside(address)
        if shared and not case.is_own_memory:
            check(all(not each.deleted for each in case.structs if each.is_consumed and not case.calls["planned"])
                  or self.has_live_struct(), "memory is used after its deleter ran")  # fmt: skip
        if shared:
            check(self.options.get("copy") is not True or case.is_copied, "copy=True shares memory")
            if case.readonly and self.options.get("readonly") != "share":
                check(not writable, "read-only memory came out writable")

    def has_live_struct(self):
        """Return True if the last consumed capsule is not released yet; a plan may have consumed an earlier one."""
        consumed = [each for each in self.case.structs if each.is_consumed]
        return not consumed[-1].has_deleter or not consumed[-1].deleted

    def found(self, result):
        """Return the one array in a tree of builtin containers."""
        kinds = (list, tuple, dict, collections.deque)
        waiting, met = [result], set()
        while waiting:
            each = waiting.pop()
            if id(each) in met:
                continue
            met.add(id(each))
            if type(each) in kinds:
                waiting += list(each.values() if type(each) is dict else each)
            elif self.world.module_of(type(each)).partition(".")[0] in ARRAYS:
                return each
        return None

    def drop(self):
        """Drop the results."""
        self.obj = self.result = None
        error, self.error = self.error, None
        if error is not None:
            error.__traceback__ = error.__cause__ = error.__context__ = None


SURPRISES = (SystemError, NameError, AttributeError, TypeError, KeyError, IndexError, AssertionError, RecursionError,
             OverflowError, ZeroDivisionError, struct.error)  # fmt: skip


def is_mistake(error, told):
    """Return True for an exception that was not planted, and arose in a line of dlx that did not expect it.

    dlx wraps expected errors of foreign code in these words: "its __dlpack__ raised", "is incomplete".
    """
    if isinstance(error, (SystemError, UnboundLocalError)):
        return True
    if not re.search(r"[a-z_]+ failed: ", told):
        return False
    return isinstance(error, SURPRISES) and is_from(error, DLX, ADAPTERS)


DLX, ADAPTERS = str(ROOT / "dlx") + os.sep, str(ROOT / "dlx_adapters") + os.sep


def is_from(error, *parts):
    """Return True if an exception arose in a file whose path contains one of these parts."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and any(part in frame.tb_frame.f_code.co_filename for part in parts)


def seen(dlx, tensors, to, result):
    """Return (dtype triple, shape, bytes of the elements, address, whether it is writable)."""
    if to == "numpy":
        if type(result) is not sys.modules["numpy"].ndarray:
            return None
        name = result.dtype.name
        dtype, held = dlx.DType(name), result.tobytes()
        if dtype.bits < 8:
            held = bytes(value & (1 << dtype.bits) - 1 for value in held)  # the other bits are undefined
        return tuple(dtype), result.shape, held, result.ctypes.data, result.flags.writeable
    if to == "torch" and type(result).__module__.startswith("torch"):
        if type(result) is not sys.modules["torch"].Tensor:
            return None
        name = str(result.dtype)[6:].replace("float4_e2m1fn_x2", "float4_e2m1fnx2")
        plain = result.detach().contiguous()
        held = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
        return tuple(dlx.DType(name)), tuple(result.shape), held, result.data_ptr(), True
    if to == "jax":
        import numpy

        plain = numpy.asarray(result)
        if result.dtype.itemsize * 8 != dlx.DType(result.dtype.name).bits:
            return None
        return tuple(dlx.DType(result.dtype.name)), result.shape, plain.tobytes(), result.unsafe_buffer_pointer(), False
    if to == "fuzzlib":
        return None
    tensor = result if isinstance(result, dlx.Tensor) else dlx.convert(result, to="dlx")
    dtype = tuple(tensor.dtype)
    if dtype[1] * dtype[2] % 8 and dtype[1] * dtype[2] > 8:
        return None
    held = tensors.elements(tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype, padded=bool(tensor.flags & 4))
    return dtype, tensor.shape, held, tensor.data_ptr, not tensor.readonly or to == "tvm_ffi"


# ---- batches in subprocesses -----------------------------------------------------------------------------------------


def work(options):
    """Run a batch; a file holds the number of the current case, in case this process dies."""
    if options.plant:
        __import__(options.plant)
    world = World(options.frameworks.split(","), options.tables)
    world.tensors.Case.is_loud = options.only is not None
    where = None
    if options.progress:
        with open(options.progress, "r+b") as file:
            where = mmap.mmap(file.fileno(), 8)
    faults = 0
    for number in range(options.first, options.first + options.count):
        if where is not None:
            where[:] = struct.pack("q", number)
        try:
            run(world, options.seed, number)
        except Fault as caught:
            fault = caught
            faults += 1
            print(f"FAULT seed {options.seed} case {number}: {fault}")
            print("    " + "\n    ".join("\n".join(getattr(fault, "__notes__", ())).splitlines()), flush=True)
            if faults >= options.most:
                break
            fault.__traceback__ = fault.__context__ = None
            del fault
            gc.collect()
        if number % 2000 == 0:
            gc.collect()
    print("outcomes", dict(world.outcomes), flush=True)
    return min(faults, 100)


def batch(options, first, count, progress):
    """Run a batch in a subprocess; return (status, output)."""
    command = program("producers.fuzz", "--worker", options=("-X", "faulthandler"))
    command += ["--seed", str(options.seed), "--first", str(first), "--count", str(count), "--most", str(options.most)]
    command += ["--frameworks", options.frameworks, "--tables", options.tables, "--progress", progress]
    if options.plant:
        command += ["--plant", options.plant]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def spread(options):
    """Run all batches, a few processes at a time; return the number of faults."""
    started, faults, done, outcomes = time.monotonic(), 0, 0, collections.Counter()
    waiting = collections.deque(
        (first, min(options.batch, options.first + options.count - first))
        for first in range(options.first, options.first + options.count, options.batch)
    )
    running = []
    with tempfile.TemporaryDirectory() as folder:
        options.tables = tables.write(folder)
        while waiting or running:
            while waiting and len(running) < options.processes:
                first, count = waiting.popleft()
                progress = os.path.join(folder, str(first))
                with open(progress, "wb") as file:
                    file.write(struct.pack("q", -1))
                running.append((batch(options, first, count, progress), first, count, progress))
            process, first, count, progress = running.pop(0)
            out = process.communicate()[0]
            for line in out.splitlines():
                if line.startswith("outcomes "):
                    outcomes.update(eval(line[9:], {}))
                else:
                    print(line)
            if process.returncode < 0 or (process.returncode and "outcomes {" not in out):
                with open(progress, "rb") as file:
                    (number,) = struct.unpack("q", file.read(8))
                faults += 1
                print(f"DIED seed {options.seed} case {number}: status {process.returncode}")
                if number < first:
                    break
                alone = batch(options, number, 1, progress)
                print(alone.communicate()[0])
                print(f"alone: status {alone.returncode}")
                rest = first + count - number - 1
                if rest and faults < options.most:
                    waiting.appendleft((number + 1, rest))
                done += number - first + 1
            else:
                faults += process.returncode
                done += count
            print(f"{done} cases, {faults} faults, {time.monotonic() - started:.0f} s", flush=True)
    print("outcomes:", ", ".join(f"{name} {n}" for name, n in sorted(outcomes.items())))
    print(f"seed {options.seed}: {done} cases, {faults} faults")
    return faults


def main(arguments=None):
    """Run the program; return 1 if it found a fault."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, in this process")
    parser.add_argument("--batch", type=int, default=50_000)
    parser.add_argument("--most", type=int, default=10, help="faults after which a batch ends")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--plant", default="", help="a module that each worker imports first, with a fault to be found")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tables", default="", help=argparse.SUPPRESS)
    parser.add_argument("--progress", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options)
    if options.only is not None:
        options.first, options.count = options.only, 1
        with tempfile.TemporaryDirectory() as folder:
            options.tables = tables.write(folder)
            return work(options)
    return int(spread(options) > 0)


if __name__ == "__main__":
    sys.exit(main())
