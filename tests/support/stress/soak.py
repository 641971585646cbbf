"""Millions of calls of every kind, including failing ones: nothing may leak, and nothing may slow down.

    python tests/support stress.soak --count 10000000 --seed 1

The calls cover every pair of frameworks, every option and every public function, nearly all of them on the fast path.
The seed deals them into hands, which are played repeatedly, each time in another order. Each call must give the same
class of result or error as the first time, and after each tenth exactly the same values or message. Part of each tenth
runs in four threads. The status is 1 if a bound does not hold at the end.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import importlib
import importlib.util
import random
import re
import statistics
import sys
import sysconfig
import threading
import time

import dlx
from dlx._core import native
from support.processes.memory import resident

FRAMEWORKS = ("numpy", "torch", "tvm_ffi", "jax", "pyarrow")
OPTIONS = (
    {}, {"copy": True}, {"copy": False}, {"device": "cpu"}, {"readonly": "error"}, {"readonly": "share"},
    {"detach": True}, {"strict": True}, {"errors": "collect"}, {"lazy": True}, {"stream": -1}, {"device": "cuda"},
)  # fmt: skip
COMMON = (OPTIONS[0],) * 8 + OPTIONS[1:4]
THREADS = 4
HAND = 2000  # calls; few, so that other processes disturb only few hands
RARE = 0.025  # of a hand; the others take the fast path

# From the first tenth to the last. Resident memory moves by pages, arenas and the order in which threads run; a leak of
# one byte a call would be 9 MiB of ten million calls.
# Without the GIL, mimalloc keeps free pages for each thread, and each tenth starts new ones: 2 MiB of noise.
MORE_RESIDENT = (4 if sysconfig.get_config_var("Py_GIL_DISABLED") else 1) << 20
MORE_IN_USE = 256 << 10  # of malloc
MORE_BLOCKS = 500  # of Python
SLOWER = 1.1  # relative to a loop of plain Python, since the machine may become slower


class Producer:
    """A producer without a framework, with a test's capsules of every kind."""

    def __init__(self, gives):
        self.gives = gives

    def __dlpack__(self, **options):
        return self.gives(options)

    def __dlpack_device__(self):
        return 1, 0


class Old:
    """A producer without keywords."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self):
        return self.tensor.__dlpack__()


class Interface:
    def __init__(self, memory):
        self.memory = memory

    @property
    def __array_interface__(self):
        return {"version": 3, "shape": (len(self.memory),), "typestr": "|u1", "data": memoryview(self.memory)}


class Unknown:
    pass


def raises(error):
    """Raise, in an expression."""
    raise error


def used(capsule):
    """Return the capsule, consumed."""
    dlx.from_dlpack(capsule)
    return capsule


def arrays(frameworks):
    """Yield the sources by name, as functions, and each framework's plain float32 array."""
    block = bytearray(range(64))
    zeros = dlx.empty((12,), "uint8", "cpu")  # aligned for every target: a bytearray's address varies
    memoryview(zeros)[:] = bytes(12)
    locked = dlx.from_dlpack(bytes(12))
    plain = {"dlx": dlx.from_dlpack(memoryview(array.array("f", range(8))))}
    odd = {
        "bytes": bytes(8),
        "bytearray": block,
        "reversed buffer": memoryview(block)[::-2],
        "ctypes": (ctypes.c_int * 4)(1, 2, 3),
        "producer": Producer(lambda options: zeros.__dlpack__(**options)),
        "read-only producer": Producer(lambda options: locked.__dlpack__(**options)),
        "producer without keywords": Old(zeros),
        "interface": Interface(block),
        "raising producer": Producer(lambda options: raises(ValueError("no"))),
        "interrupted producer": Producer(lambda options: raises(KeyboardInterrupt("now"))),
        "producer without memory": Producer(lambda options: raises(MemoryError("now"))),
        "producer of nothing": Producer(lambda options: None),
        "unknown": Unknown(),
        "none": None,
    }
    made = {
        "capsule": zeros.__dlpack__,
        "versioned capsule": lambda: zeros.__dlpack__(max_version=(1, 0)),
        "used capsule": lambda: used(zeros.__dlpack__()),
    }
    if "numpy" in frameworks:
        import numpy as np

        plain["numpy"] = np.arange(8, dtype=np.float32)
        odd |= {
            "numpy reversed": plain["numpy"][::-1],
            "numpy read-only": np.broadcast_to(plain["numpy"], (3, 8)),
            "numpy big-endian": plain["numpy"].astype(">f4"),
            "numpy dates": np.zeros(3, "M8[s]"),
            "numpy objects": np.array([None]),
            "numpy scalar": np.float32(3),
            "numpy empty": np.zeros((0, 3)),
            "numpy 0-d": np.array(1.5),
            "numpy structure": np.zeros(3, [("a", "i1"), ("b", "f8")])["b"],
            "numpy masked": np.ma.masked_array(plain["numpy"], mask=[True] * 8),
            "numpy bool": np.ones(3, bool),
        }
        if importlib.util.find_spec("ml_dtypes"):
            import ml_dtypes

            odd["numpy bfloat16"] = np.ones(3, ml_dtypes.bfloat16)
    if "torch" in frameworks:
        import torch

        plain["torch"] = torch.arange(8.0)
        odd |= {
            "torch leaf": torch.ones(2, requires_grad=True),
            "torch conj": torch.ones(2, dtype=torch.complex64).conj(),
            "torch neg": torch.ones(2, dtype=torch.complex64).conj().imag,
            "torch sparse": torch.eye(2).to_sparse(),
            "torch bfloat16": torch.ones(2, dtype=torch.bfloat16),
            "torch float4": torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "torch meta": torch.empty(3, device="meta"),
            "torch transposed": torch.ones(2, 3).t(),
            "torch subclass": torch.zeros(4).as_subclass(type("Mine", (torch.Tensor,), {})),
        }
    if "tvm_ffi" in frameworks:
        plain["tvm_ffi"] = dlx.convert(array.array("f", range(8)), to="tvm_ffi")
    if "jax" in frameworks:
        import jax.numpy as jnp

        plain["jax"] = jnp.arange(8, dtype=jnp.float32)
    if "pyarrow" in frameworks:
        import pyarrow as pa

        plain["pyarrow"] = pa.array([1, 2, 3], pa.float32())
        odd["pyarrow nulls"] = pa.array([1, None], pa.float32())
    sources = {name: (lambda obj=obj: obj) for name, obj in (plain | odd).items()}
    return sources | made, plain


def calls(frameworks):
    """Return the frequent calls and the rare ones, each as (name, function)."""
    sources, plain = arrays(frameworks)
    targets = list(plain)
    fast = [name for name in targets if name in ("dlx", "numpy", "torch")]

    def converted(name, to, options):
        source = sources[name]
        return f"{name} -> {to} {options or ''}", lambda: dlx.convert(source(), to=to, **options)

    takes = [*fast, "tvm_ffi"] if "tvm_ffi" in plain else fast
    frequent = [converted(name, to, options) for name in fast for to in takes for options in COMMON]
    rare = [converted(name, to, options) for name in sources for to in targets for options in OPTIONS]
    rare += [converted(name, to, {}) for name in (*plain, "bytes") for to in ("nosuch", 5, None, "cupy", "list")]

    def add(name, function, often=False):
        (frequent if often else rare).append((name, function))

    for name, source in sources.items():
        for to in targets:
            add(f"plan {name} -> {to}", lambda source=source, to=to: dlx.plan(source(), to=to))
            add(f"plan {name} -> {to}, no probe", lambda s=source, to=to: dlx.plan(s(), to=to, probe=False))
            add(f"like {to} {name}", lambda source=source, to=to: dlx.convert(source(), like=plain[to]))
        add(f"describe {name}", lambda source=source: dlx.describe(source()))
        add(f"from_dlpack {name}", lambda source=source: dlx.from_dlpack(source()))
        for version in (None, (1, 0), (0, 8), 3):
            add(f"to_capsule {name} {version}", lambda s=source, v=version: dlx.to_capsule(s(), max_version=v))
        for readonly in (False, True):
            add(f"borrow {name} {readonly}", lambda s=source, r=readonly: borrowed(s(), r))
        add(f"shares_memory {name}", lambda source=source: dlx.shares_memory(source(), plain["dlx"]))
    trees(add, sources, plain, fast)
    pointers(add)
    decorated(add, sources, plain)
    return frequent, rare


def borrowed(obj, readonly):
    """Borrow an array, and return it."""
    with dlx.borrow(obj, readonly=readonly) as tensor:
        return tensor.ndim


def trees(add, sources, plain, fast):
    """Add containers: lists, dicts, nested ones, views of them, stacks; some that fail, some halfway."""
    mixed = [plain[name] for name in plain]
    for name, source in sources.items():
        for to in plain:
            shapes = {
                "list": lambda s=source: [s(), s()],
                "dict": lambda s=source: {"a": s(), "b": 1},
                "nested": lambda s=source: {"a": [s(), (s(), {"b": [s()]})], "text": "text"},
                "last": lambda s=source: [sources["capsule"](), plain["dlx"], s()],
            }
            for shape, tree in shapes.items():
                add(f"{shape} of {name} -> {to}", lambda t=tree, to=to: dlx.convert(t(), to=to))
            add(f"collected {name} -> {to}", lambda t=shapes["last"], to=to: dlx.convert(t(), to=to, errors="collect"))
            add(f"strict {name} -> {to}", lambda t=shapes["dict"], to=to: dlx.convert(t(), to=to, strict=True))
            add(f"plan of {name} -> {to}", lambda t=shapes["nested"], to=to: dlx.plan(t(), to=to))
            add(f"view of {name} -> {to}", lambda t=shapes["nested"], to=to: viewed(t(), to))
            add(f"stack of {name} -> {to}", lambda s=source, to=to: dlx.stack([s(), s()], to))
    for to in fast:
        alike = [plain[name] for name in fast if name != to] or mixed
        for n in (3, 30):
            nest = {"a": alike * n, "b": [{"c": each} for each in alike * (n // 3)]}
            add(f"{n} in a list -> {to}", lambda each=alike * n, to=to: dlx.convert(each, to=to), True)
            add(f"{n} nested -> {to}", lambda tree=nest, to=to: dlx.convert(tree, to=to), True)
            keyed = dict(enumerate(alike * n))
            add(f"{n} in a dict -> {to}", lambda tree=keyed, to=to: dlx.convert(tree, to=to), True)
        add(f"first of a view -> {to}", lambda a=alike, to=to: dlx.convert(a, to=to, lazy=True)[0], True)
        add(f"written view -> {to}", lambda a=alike, to=to: written(a, to))
    for to in plain:
        add(f"mixed -> {to}", lambda to=to: dlx.convert(mixed, to=to))
        add(f"stack of mixed -> {to}", lambda to=to: dlx.stack(mixed, to))
        add(f"stack -> {to}", lambda to=to: dlx.stack([plain["dlx"]] * 3, to))
        add(f"itself -> {to}", lambda to=to: cyclic(plain["dlx"], to))


def viewed(tree, to):
    """Read a view in several ways."""
    view = dlx.convert(tree, to=to, lazy=True)
    found = view["a"][0], len(view["a"]), list(view["a"][1]), view.get("none"), dict(view.items())["text"]
    return [found, view.materialize()]


def written(elements, to):
    """Write to a view in several ways."""
    tree = {"a": list(elements), "b": elements[0]}
    view = dlx.convert(tree, to=to, lazy=True)
    view["b"], view["c"] = view["a"][0], elements[0]
    view["a"].append(view["a"].pop(0))
    view["a"].reverse()
    del view["b"]
    return view.materialize()


def cyclic(obj, to):
    """Convert a container that contains itself."""
    tree = [obj]
    tree.append({"again": tree})
    made = dlx.convert(tree, to=to)
    return made[1]["again"] is made


def pointers(add):
    """Add calls of C authors."""
    memory = (ctypes.c_float * 6)(*range(6))
    at = ctypes.addressof(memory)
    add("from_pointer", lambda: dlx.from_pointer(at, (2, 3), "float32", owner=memory))
    add("from_pointer, released", lambda: dlx.from_pointer(memory, 6, "float32", release=lambda: None))
    add("from_pointer, too large", lambda: dlx.from_pointer(memory, 600, "float32"))
    add("from_pointer, no dtype", lambda: dlx.from_pointer(at, 6, "float31"))
    add("empty", lambda: dlx.empty((2, 3), "float32", "cpu").shape)
    add("empty, nowhere", lambda: dlx.empty((2, 3), "float32", "cuda"))
    add("devices", lambda: len(dlx.devices()))


def decorated(add, sources, plain):
    """Add functions with `using`."""
    for to in plain:

        @dlx.using(to)
        def same(first, *rest, **options):
            return [first, *rest], options

        @dlx.using(to, returns="dlx")
        def again(first):
            return {"a": first, "b": [first]}

        @dlx.using(to, lazy=True)
        def lazily(first):
            return {"a": [first], "b": first}

        @dlx.using(to)
        def raising(first):
            raise ValueError("no")

        @dlx.using(to)
        def yielding(first):
            for _ in range(2):
                first = (yield first) or first

        @dlx.using(to, writes="first")
        def writing(first):
            if hasattr(type(first), "__setitem__"):
                first[0] = 2

        for name, source in sources.items():
            add(f"using {to} of {name}", lambda f=same, s=source: f(s(), plain["dlx"], more=[s()]))
            add(f"using {to} of {name}, in dlx", lambda f=again, s=source: f(s()))
            add(f"using {to} of {name}, lazily", lambda f=lazily, s=source: f(s())["b"])
            add(f"using {to} of {name}, raising", lambda f=raising, s=source: f(s()))
            add(f"using {to} of {name}, yielding", lambda f=yielding, s=source: next(f(s())))
        for name in plain:
            add(f"using {to} writing to {name}", lambda f=writing, name=name: f(plain[name]))


# ---- one call --------------------------------------------------------------------------------------------------------


def kind_of(call):
    """Call; return the class of its result or of its error."""
    try:
        return type(call())
    except BaseException as error:
        return type(error)


def check_kind(name, call, kinds):
    """Call; raise if the class of the outcome differs from the first time."""
    cause = None
    try:
        kind = type(call())
    except BaseException as error:
        kind, cause = type(error), error
    if kind is not kinds[name]:
        raise AssertionError(f"{name} gave {kind.__name__}, and {kinds[name].__name__} before") from cause


def shown(made):
    """Return a result as text, with its values."""
    if isinstance(made, list | tuple):
        return [shown(each) for each in made]
    if isinstance(made, dict):
        return {key: shown(each) for key, each in made.items()}
    try:
        text = repr(dlx.convert(made, to="dlx", detach=True))
    except dlx.errors.DlxError:
        text = str(made)
    return f"{type(made).__name__}: {text}"


def outcome(call):
    """Call; return its result or its error as text."""
    try:
        found = shown(call())
    except BaseException as error:
        found = f"{type(error).__name__}: {error} {getattr(error, 'exceptions', '')}"
    return re.sub(r"0x[0-9a-f]+|\d{10,}", "0x", str(found))  # addresses


EXPECTED = (dlx.errors.DlxError, ExceptionGroup, TypeError, ValueError, KeyboardInterrupt, MemoryError)


# ---- the run ---------------------------------------------------------------------------------------------------------


MALLOC = (
    "arena",
    *("ordblks", "smblks", "hblks"),
    "hblkhd",
    *("usmblks", "fsmblks"),
    "uordblks",
    "fordblks",
    "keepcost",
)


class MallocInfo(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLOC]


def malloc_in_use():
    """Return the bytes in use by malloc, 0 if unknown."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = MallocInfo
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def play(hand, kinds):
    """Make all calls of a hand; raise if an outcome differs from the first time."""
    for name, call in hand:
        check_kind(name, call, kinds)


def timed(call):
    """Return the CPU time of a call in ns."""
    started = time.process_time_ns()
    call()
    return time.process_time_ns() - started


def plain_time():
    """Return the CPU time of a fixed piece of plain Python."""
    return timed(lambda: [dict.fromkeys((str(i), i, (i,))) for i in range(2000)])


def play_in_threads(hands, kinds):
    """Play hands at the same time, each in a thread."""
    failures = []

    def work(hand):
        try:
            play(hand, kinds)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(hand,)) for hand in hands]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]


clear_caches = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache  # the first one since 3.13


def dealt(draw, frequent, rare):
    """Return hands that contain every rare call once."""
    draw.shuffle(rare)
    few = int(HAND * RARE)
    return [rare[i : i + few] + draw.choices(frequent, k=HAND - few) for i in range(0, len(rare), few)]


def soak(count, seed, frameworks, only=""):
    """Play, and print a table; return rows of (time of a call relative to `plain_time`, live, RSS, malloc, blocks).

    The first row is of an extra tenth, in which caches are filled. No object of it is alive afterwards.
    """
    draw, wanted = random.Random(seed), re.compile(only)
    frequent, rare = ([call for call in some if wanted.search(call[0])] for some in calls(frameworks))
    hands = dealt(draw, frequent or rare, rare or frequent)
    rounds = round(count / 10 / HAND / len(hands))
    if not rounds:  # a short run: some of the hands
        hands, rounds = hands[: max(1, count // 10 // HAND)], 1
    distinct = {name: call for hand in hands for name, call in hand}
    threaded = -(-len(hands) // 4 // THREADS) * THREADS or THREADS
    for _ in range(2):  # fills caches, and imports
        kinds = {name: kind_of(call) for name, call in distinct.items()}
    odd = {
        name: kind for name, kind in kinds.items() if issubclass(kind, BaseException) and not issubclass(kind, EXPECTED)
    }
    assert not odd, f"unexpected errors: {odd}"
    texts = {name: outcome(call) for name, call in distinct.items()}
    failing = sum(issubclass(kinds[name], BaseException) for hand in hands for name, _ in hand)
    print(f"seed {seed}: {len(distinct)} different calls in {len(hands)} hands of {HAND}; dlx,", *frameworks)
    share = failing / len(hands) / HAND
    print(f"{rounds} rounds a tenth, and {threaded} hands in {THREADS} threads; {share:.1%} fail as they should")
    print("tenth      calls  ns a call relative   live    RSS KiB malloc KiB    blocks", flush=True)

    def tenth(number):
        times, ratios = [], []
        for _ in range(rounds):
            for hand in draw.sample(hands, len(hands)):
                draw.shuffle(hand)
                before, took, after = plain_time(), timed(lambda hand=hand: play(hand, kinds)), plain_time()
                times.append(took / len(hand))
                ratios.append(took / len(hand) / min(before, after))
        for first in range(0, threaded, THREADS):
            play_in_threads([hands[(first + i) % len(hands)] for i in range(THREADS)], kinds)
        for name in list(distinct)[number % 10 :: 10]:
            found = outcome(distinct[name])
            assert found == texts[name], f"{name} gave {found}, and {texts[name]} before"
        gc.collect()
        clear_caches()  # the type cache keeps up to 4096 attribute names, which torch creates for each lookup
        numbers = native.live(), resident(), malloc_in_use(), sys.getallocatedblocks()
        return statistics.median(times), statistics.median(ratios) * 1000, *numbers

    rows, done = [], 0
    for number in range(10 + 1):
        ns, ratio, live, *memory, blocks = tenth(number)
        rows.append((ratio, live, *memory, blocks))
        done += (rounds * len(hands) + threaded) * HAND
        sizes = "".join(f"{size / 1024:11.0f}" for size in memory)
        print(f"{number or 'warm':>5} {done:>10} {ns:>10.0f} {ratio:>8.1f} {live:>6}{sizes}{blocks:>10}", flush=True)
    return rows


def findings(rows, live, *, in_time=True):
    """Return the bounds that do not hold, for the rows of `soak` and the live objects after it."""
    (ratio, first_live, *first), (last_ratio, last_live, *last) = rows[1], rows[-1]
    found = [] if live == 0 else [f"{live} managed tensors are alive"]
    if last_live != first_live:
        found.append(f"{last_live - first_live} managed tensors more after the last tenth than after the first")
    limits = ("bytes resident", MORE_RESIDENT), ("bytes of malloc", MORE_IN_USE), ("blocks of Python", MORE_BLOCKS)
    for (what, limit), before, after in zip(limits, first, last, strict=True):
        if after - before > limit:
            found.append(f"{after - before} {what} more, at most {limit} may be")
    if in_time and last_ratio > SLOWER * ratio:
        found.append(f"the last tenth took {last_ratio / ratio:.2f} times as long as the first")
    return found


def installed(names):
    """Return the installed ones of some frameworks, separated by commas; print the missing ones."""
    found = []
    for name in filter(None, names.split(",")):
        try:
            importlib.import_module(name)
            found.append(name)
        except ImportError:
            print(f"note: {name} is not installed; left out")
    return found


def main(arguments=None):
    """Soak; return 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000_000, help="calls in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="deals the calls")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="to test with dlx (default: %(default)s)")
    parser.add_argument("--only", default="", help="only calls whose name matches this expression")
    parser.add_argument("--untimed", action="store_true", help="let it get slower")
    chosen = parser.parse_args(arguments)
    frameworks = installed(chosen.frameworks)
    rows = soak(chosen.count, chosen.seed, frameworks, chosen.only)
    gc.collect()
    found = findings(rows, native.live(), in_time=not chosen.untimed)
    print(f"{native.live()} managed tensors alive at the end.", *found or ["All bounds hold."], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
