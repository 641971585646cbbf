"""`dlx.using`: calls on the fast path in C behave exactly like calls in Python."""

from __future__ import annotations

import asyncio
import collections
import collections.abc
import contextlib
import dataclasses
import gc
import re
import sys
import threading
import types
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays.agreement import bits
from support.arrays.examples import examples

import dlx
from dlx import errors
from dlx._core import native
from dlx._registry.registry import registry
from dlx._using import plan, wrappers
from dlx.adapter import GradSupport

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


@pytest.fixture
def invocations(monkeypatch):
    """Count the calls that are made in Python."""
    made = []
    complete = wrappers.calls.Invocation
    monkeypatch.setattr(wrappers.calls, "Invocation", lambda *args: made.append(1) or complete(*args))
    return made


# ---- both ways agree -------------------------------------------------------------------------------------------------


class Unknown:
    """Neither an array nor a container."""


def aligned():
    """Return an array that every framework imports without a copy: jax needs addresses at multiples of 64."""
    memory = np.zeros(20, dtype="f4")
    first = -memory.ctypes.data % 64 // 4
    array = memory[first : first + 4]
    array[:] = range(4)
    return array


class Producer:
    """An array without a framework."""

    def __init__(self):
        self.tensor = dlx.convert(aligned(), to="dlx")

    def __dlpack__(self, *, max_version=None):
        return self.tensor.__dlpack__(max_version=max_version)


class Turned(Unknown):
    """An object that becomes an array once a second one is created."""

    made = 0

    def __init__(self):
        Turned.made += 1
        if Turned.made % 2 == 0:
            self.array = aligned()  # the dict does not keep it alive
            self.__array_interface__ = self.array.__array_interface__


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    """A container, declared by its class."""

    x: object
    y: object = 3


def shared():
    """Return a list with one array twice, and one list twice."""
    array = np.arange(4, dtype="f4")
    inner = [array, torch.ones(2)]
    return [array, inner, {"again": inner, "n": 1}]


def cyclic():
    """Return a list that contains itself."""
    made = [np.arange(4, dtype="f4")]
    made.append(made)
    return made


def locked():
    """Return a read-only array."""
    array = aligned()
    array.flags.writeable = False
    return array


Mine = type("Mine", (np.ndarray,), {})

MADE = {
    "numpy": lambda: np.arange(4, dtype="f4"),
    "numpy backwards": lambda: np.arange(4, dtype="f4")[::-1],
    "numpy read-only": locked,
    "numpy text": lambda: np.array(["text"]),
    "numpy scalar": lambda: np.float32(3),
    "numpy subclass": lambda: np.arange(4, dtype="f4").view(Mine),
    "numpy 0-d": lambda: np.array(2.0),
    "torch": lambda: torch.arange(4, dtype=torch.float32),
    "torch gradient": lambda: torch.ones(4, requires_grad=True),
    "torch parameter": lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False),
    "torch conj": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "torch bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16),
    "torch sparse": lambda: torch.ones(4).to_sparse(),
    "dlx": lambda: dlx.convert(aligned(), to="dlx"),
    "dlx read-only": lambda: dlx.convert(locked(), to="dlx"),
    "producer": Producer,
    "capsule": lambda: dlx.convert(aligned(), to="dlx").__dlpack__(max_version=(1, 0)),
    "bytes": lambda: bytearray(b"abcd"),
    "number": lambda: 2,
    "None": lambda: None,
    "unknown": Unknown,
    "turned": Turned,
    "list": lambda: [np.arange(4, dtype="f4"), 2],
    "tuple": lambda: (torch.ones(4), [np.ones(1, "f4")]),
    "type": lambda: np.ndarray,
    "dtype": lambda: torch.float32,
    "function": lambda: len,
    "numbers": lambda: (1, (2, "text")),
    "list of numbers": lambda: [1, 2.5, None],
    "named numbers": lambda: Pair(1, 2),
    "dict": lambda: {"a": torch.ones(2), 3: np.arange(4, dtype="f4"), "n": 1},
    "nested": lambda: {"deep": [(np.arange(2.0), {"k": dlx.convert(aligned(), to="dlx")})], "f": len},
    "ordered": lambda: collections.OrderedDict(b=np.arange(4, dtype="f4"), a=torch.ones(2)),
    "named": lambda: Pair(np.arange(4, dtype="f4"), 3),
    "record": lambda: Record(torch.ones(2), [np.arange(4, dtype="f4")]),
    "set": lambda: {1, 2},
    "shared": shared,
    "cyclic": cyclic,
    "of copies": lambda: [np.arange(4, dtype="f4")[::-1], torch.ones(2)],
    "of gradients": lambda: (torch.ones(2, requires_grad=True),),
}
FOREIGN = {
    "jax": lambda: pytest.importorskip("jax.numpy").arange(4, dtype="float32"),
    "tvm_ffi": lambda: pytest.importorskip("tvm_ffi").from_dlpack(torch.arange(4, dtype=torch.float32)),
}
for _name, _make in FOREIGN.items():
    try:
        _make()
    except pytest.skip.Exception:
        continue
    MADE[_name] = _make
TARGETS = ["numpy", "torch", "dlx", *(name for name in FOREIGN if name in MADE)]


def parts(obj):
    """Return the keys and elements of a container of the tests; None for other objects."""
    if isinstance(obj, Record):
        return ["x", "y"], [obj.x, obj.y]
    if isinstance(obj, dict):
        return list(obj), list(obj.values())
    return (None, list(obj)) if isinstance(obj, list | tuple) else None


def arrays(obj, met=()):
    """Return the arrays in a tree, including repeated ones."""
    found = parts(obj)
    if found is None or any(obj is each for each in met):
        return [obj] if isinstance(obj, np.ndarray | torch.Tensor) else []
    return [each for part in found[1] for each in arrays(part, (*met, obj))]


def plus(arg):
    """Add one, in numpy, torch or jax; return other arguments unchanged."""
    return arg + 1 if type(arg) in (np.ndarray, torch.Tensor) and arg.dtype not in ("U4", torch.bfloat16) else arg


def fill(arg):
    """Write to an argument."""
    if isinstance(arg, np.ndarray) and arg.dtype.kind == "f":
        arg[...] = 7
    elif isinstance(arg, torch.Tensor) and arg.is_floating_point() and not arg.requires_grad:
        arg.fill_(7)
    elif type(arg) is list:
        arg.append(9)
    elif type(arg) is dict:
        arg["new"] = 9


BODIES = {
    "first": lambda args: args[0],
    "last": lambda args: args[-1],
    "all": lambda args: args,
    "list": lambda args: [args[0], {"k": args[-1]}],
    "none": lambda args: None,
    "number": lambda args: 1.5,
    "plus": lambda args: plus(args[0]),
    "plus and all": lambda args: {"new": [plus(args[0]), plus(args[0])], "old": args},
    "pair": lambda args: (plus(args[0]), args[-1], None, 2),
    "parts": lambda args: {"a": plus(args[0]), 3: plus(args[-1]), "old": args[0]},
    "plain list": lambda args: [1, None, "text"],
    "same twice": lambda args: [plus(args[0])] * 2,
    "bad part": lambda args: (plus(args[0]), np.array(["text"])),
    "grad part": lambda args: [plus(args[0]), torch.ones(2, requires_grad=True) * 2],
    "part": lambda args: args[0][1:] if type(args[0]) in (np.ndarray, torch.Tensor) and args[0].ndim else None,
    "grad": lambda args: torch.ones(2, requires_grad=True) * 2,
    "backwards": lambda args: np.arange(3.0)[::-1],
    "text": lambda args: np.array(["text"]),
    "scalar": lambda args: np.float64(1),
    "dlx": lambda args: dlx.convert(np.ones(2), to="dlx"),
    "producer": lambda args: Producer(),
    "unknown": lambda args: Unknown(),
    "not implemented": lambda args: NotImplemented,
    "types": lambda args: [type(arg).__name__ for arg in args],
    "every array": lambda args: [array + 1 for arg in args for array in arrays(arg)],
    "arrays": lambda args: {"in": tuple(arrays(args)), "n": (1, 2)},
    "turned around": lambda args: [*reversed(parts(args[0])[1])] if parts(args[0]) else args[0],
    "into a record": lambda args: Record(args[0], {"deep": Pair(plus(args[-1]), args)}),
    "the inside": lambda args: parts(args[0])[1][-1] if parts(args[0]) else plus(args[0]),
    "a part more": lambda args: fill(args[0]) or [args[0], args[-1], plus(args[0])],
    "cycle": lambda args: [made := [plus(args[0])], made.append(made)][0],
    "write": lambda args: [fill(arg) for arg in args] and None,
    "write and return": lambda args: fill(args[0]) or args[0],
    "write and raise": lambda args: fill(args[0]) or 1 / 0,
}


def objects(args):
    """Return the arguments and all objects in them, each once."""
    found = [*args]
    for each in found:
        for part in (parts(each) or ((), ()))[1]:
            if all(part is not other for other in found):
                found.append(part)
    return found


def seen(value, args, met=()):
    """Summarize a value: which argument it is, or its type, elements and shared memory."""
    for i, arg in enumerate(args):
        if value is arg:
            return f"argument {i}"
    if any(value is each for each in met):
        return "cycle"
    found = parts(value)
    if found is not None:
        return type(value), found[0], [seen(part, args, (*met, value)) for part in found[1]]
    if not isinstance(value, np.ndarray | torch.Tensor | dlx.Tensor):
        return type(value), value if isinstance(value, int | float | str) else None
    if getattr(value, "dtype", None) is not None and str(value.dtype).startswith("<U"):
        return type(value), value.tolist()
    info = dlx.describe(value)
    shared = [hasattr(arg, "dtype") and arg.dtype != "U4" and overlap(value, arg) for arg in args]
    graph = getattr(value, "requires_grad", None)
    return type(value), info.dtype, info.shape, info.strides, info.readonly, graph, bits(value), shared


def overlap(a, b):
    """Return whether two arrays share memory; None if that is unknown."""
    try:
        return dlx.shares_memory(a, b)
    except errors.DlxError:
        return None


def contents(arg, met=()):
    """Return the contents of an argument."""
    if any(arg is each for each in met):
        return "cycle"
    if isinstance(arg, np.ndarray | torch.Tensor):
        return arg.tolist() if not getattr(arg, "is_sparse", False) else None
    if isinstance(arg, dlx.Tensor):
        return np.from_dlpack(arg).tolist()
    found = parts(arg)
    return None if found is None else (found[0], [contents(part, (*met, arg)) for part in found[1]])


def outcome(function, made, names):
    """Return all visible effects of a call: the result or error, and the arguments afterwards."""
    values = [make() for make in made]
    n = len(values) - len(names)
    args, options = values[:n], dict(zip(names, values[n:], strict=True))
    try:
        result = function(*args, **options)
    except Exception as error:
        text = re.sub("0x[0-9a-f]+", "ADDRESS", str(error))
        found = type(error), getattr(error, "where", None), text, type(error.__cause__)
    else:
        found = seen(result, objects(values))
    return found, [contents(arg) for arg in values]


@contextlib.contextmanager
def complete_way():
    """Disable the fast path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrappers, "build_plan", lambda spec, function: None)
        yield


def compare(to, body, made, names=(), method=False, **options):
    """Compare calls in C and Python with new arguments, after enough calls for the fast path."""

    def plain(*args, default=(1, 2), **more):
        return BODIES[body]((*args, *more.values()) or (default,))

    def bound(self, *args, **more):
        return plain(*args, **more)

    def decorated():
        function = dlx.using(to, **options)(bound if method else plain)
        return function.__get__(Unknown()) if method else function

    short, complete = decorated(), decorated()
    Turned.made = 0
    found = [outcome(short, made, names) for _ in range(3)]
    Turned.made = 0
    with complete_way():
        wanted = [outcome(complete, made, names) for _ in range(3 if Turned in made else 1)]
    assert found == (wanted if Turned in made else wanted * 3)


@pytest.mark.slow
def test_every_argument_and_every_body():
    """Each argument is combined with each body, and both with each framework."""
    for i, body in enumerate(BODIES):
        for k, make in enumerate(MADE.values()):
            compare(TARGETS[(i + k) % len(TARGETS)], body, [make])


@pytest.mark.parametrize("returns", ["numpy", "torch"])
@pytest.mark.parametrize("to", ["numpy", "torch"])
def test_another_framework_of_results(to, returns):
    """It also converts returned arguments, and parts of containers."""
    for body in ("first", "plus", "pair", "write and return", "grad part"):
        for make in MADE.values():
            compare(to, body, [make], returns=returns)


@settings(deadline=None, max_examples=examples(200))
@given(data=st.data())
def test_generated_signatures(data):
    """Generated calls have several arguments by position and name, and options, for functions and methods."""
    made = [MADE[name] for name in data.draw(st.lists(st.sampled_from(list(MADE)), max_size=4))]
    if len(made) > 1 and data.draw(st.booleans()):  # repeated objects, and shared memory
        one = data.draw(st.sampled_from([np.arange(4, dtype="f4"), torch.ones(4), MADE["dlx"]()]))
        twin = one[::-1] if type(one) is np.ndarray and data.draw(st.booleans()) else one
        made[0], made[-1] = (lambda: one), (lambda: twin)
        body = data.draw(st.sampled_from(["first", "last", "all", "list", "plus", "plus and all", "types"]))
    else:
        body = data.draw(st.sampled_from(list(BODIES)))
    if not made and body not in ("all", "none", "number", "grad", "backwards", "text", "scalar", "dlx", "types"):
        body = "none"
    names = ["p", "q", "r"][: data.draw(st.integers(0, len(made)))] if len(made) < 4 else []
    options = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "returns": st.sampled_from(["numpy", "torch", "dlx", np.ndarray, torch]),
                "detach": st.booleans(),
                "readonly": st.sampled_from(["copy", "error", "share"]),
                "device": st.sampled_from(["cpu"]),
                "stream": st.sampled_from([-1]),
                "writes": st.sampled_from([(), ("p",), ("p", "q")]),
            },
        )
    )
    to = data.draw(st.sampled_from([*TARGETS, "".join(["nu", "mpy"]), np, torch.Tensor, "nosuch"]))
    compare(to, body, made, names, data.draw(st.booleans()), **options)


# ---- the short way is taken, and left -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "args", "body", "options"),
    [
        ("torch", ["torch"], "plus", {}),
        ("torch", ["torch"], "plus and all", {}),
        ("torch", ["torch gradient", "number", "None"], "plus", {}),
        ("torch", ["numpy"], "plus", {}),
        ("torch", ["numpy"], "first", {}),
        ("torch", ["numpy", "numpy"], "pair", {}),
        ("torch", ["numpy"], "parts", {}),
        ("numpy", ["torch"], "plain list", {}),
        ("torch", ["numpy"], "grad", {}),
        ("torch", ["numpy", "torch", "number", "unknown"], "number", {}),
        ("torch", ["numpy", "dlx"], "plus", {}),
        ("torch", ["numpy"], "plus", {"returns": "dlx"}),
        ("torch", ["torch"], "plus", {"returns": "numpy"}),
        ("torch", ["numpy"], "write and return", {"writes": "args", "lazy": True}),
        ("numpy", ["numpy"], "plus", {}),
        ("numpy", ["torch"], "plus", {"detach": False, "readonly": "error"}),
        ("numpy", ["torch", "torch"], "scalar", {}),
        ("numpy", ["dlx read-only"], "plus", {}),
        (np, ["torch"], "unknown", {}),
        (torch.Tensor, ["torch"], "plus", {}),
        ("torch", ["list"], "all", {}),
        ("torch", ["shared"], "into a record", {}),
        ("torch", ["cyclic"], "number", {}),
        ("numpy", ["nested", "record", "ordered", "named", "set"], "every array", {}),
        ("numpy", ["torch", "dtype", "function", "numbers", "named numbers", "list of numbers"], "plus", {}),
        ("torch", ["torch", "dict"], "turned around", {}),
    ],
)
def test_what_is_simple_is_not_flattened(invocations, to, args, body, options):
    """By position and by name, simple arguments are not flattened."""
    run = dlx.using(to, **options)(lambda *args, **more: BODIES[body]((*args, *more.values())))
    run(*(MADE[name]() for name in args))  # load the adapters first, since that restarts a call
    for call in (run, lambda *args: run(**{f"k{i}": arg for i, arg in enumerate(args)})):
        invocations.clear()
        for _ in range(5):
            call(*(MADE[name]() for name in args))
        assert not invocations


@pytest.mark.parametrize(
    ("to", "args"),
    [
        ("torch", ["of copies"]),
        ("numpy", ["of gradients"]),
        ("torch", ["numpy backwards"]),
        ("torch", ["numpy read-only"]),
        ("numpy", ["torch gradient"]),
        ("torch", ["producer"]),
        ("torch", ["capsule"]),
    ],
)
def test_what_is_not_simple_takes_the_complete_way(invocations, to, args):
    """It does so each time, and nothing is converted before."""
    run = dlx.using(to, detach=True)(lambda *args: None)
    for n in range(1, 4):
        run(*(MADE[name]() for name in args))
        assert len(invocations) == n


def test_one_argument_that_is_not_simple_leaves_the_others_alone(invocations):
    """The function gets each array once, and the copy of the second is written back."""
    run = dlx.using("torch")(lambda x, y: [x.add_(1), y.add_(1)])
    for n in range(3):
        a, b = np.zeros(3), np.zeros(3)[:: -1 if n == 2 else 1]
        run(a, b)
        assert a.tolist() == b.tolist() == [1] * 3
    assert len(invocations) == 1


def planned(monkeypatch):
    """Count the created plans, and the types that they learn."""
    plans, learnt, made, learn = [], [], wrappers.build_plan, plan._Kinds.learn
    monkeypatch.setattr(wrappers, "build_plan", lambda *args: plans.append(1) or made(*args))
    monkeypatch.setattr(plan._Kinds, "learn", lambda self, kind: learnt.append(kind) or learn(self, kind))
    return plans, learnt


def test_adapters_that_are_loaded_later_are_asked(monkeypatch):
    """Cached types are looked up again."""
    plans, learnt = planned(monkeypatch)
    run = dlx.using("torch")(lambda x: x + 1)
    for _ in range(3):
        run(np.ones(2))
    monkeypatch.setattr(registry, "generation", registry.generation + 1)
    for _ in range(3):
        assert type(run(np.ones(2))) is np.ndarray
    assert len(plans) == 2 and learnt == [np.ndarray, torch.Tensor] * 2


def test_an_adapter_that_is_loaded_meanwhile_is_asked(invocations, monkeypatch):
    """Types that were looked up before it was loaded are not cached."""
    find = plan._Kinds._find

    def loading(self, kind, source):
        monkeypatch.setattr(plan._Kinds, "_find", find)
        registry._forget()
        return find(self, kind, source)

    again = dlx.using("torch")(lambda x: x + 1)
    monkeypatch.setattr(plan._Kinds, "_find", loading)
    generation = registry.generation
    for _ in range(3):
        assert type(again(np.ones(2))) is np.ndarray
    assert not invocations and registry.generation > generation  # the call started again


def test_types_that_cannot_be_keys_and_types_that_go(invocations):
    """Metaclasses are not called, and the cache keeps a limited number of types alive."""

    class Odd(type):
        def __hash__(cls):
            raise RuntimeError("planted")

        __eq__ = __hash__

    run = dlx.using("torch")(lambda x, y: x + 1)
    for _ in range(3):
        assert run(np.ones(1), Odd("A", (), {})()).tolist() == [2]
    kinds = []
    for n in range(3 * plan.MAX_KNOWN):
        kind = type(f"Kind{n}", (), {})
        kinds.append(weakref.ref(kind))
        assert run(np.ones(1), kind()).tolist() == [2]
        del kind
    gc.collect()
    assert sum(kind() is not None for kind in kinds) <= plan.MAX_KNOWN


def test_a_class_that_changes_after_its_first_call_is_looked_at_again(invocations):
    """It becomes an array by a protocol, or a container by registration; other changes have no effect."""

    class Array:
        count = 0

    @dataclasses.dataclass
    class Record:
        x: object

    class Items:
        def __init__(self):
            self.items = [np.ones(2)]

        def __getitem__(self, i):
            return self.items[i]

        def __setitem__(self, i, value):
            self.items = [value]

        def __len__(self):
            return 1

    def exported(self, **options):
        return np.ones(2).__dlpack__(**options)

    run, kinds = dlx.using("torch")(lambda *args: [type(arg) for arg in args]), plan._Kinds
    assert run(Array(), Record(np.ones(2)), Items(), np.ones(2)) == [Array, Record, Items, torch.Tensor]
    Array.count += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "learn", None)
        assert run(Array(), Record(1), Items(), np.ones(2)) == [Array, Record, Items, torch.Tensor]
    for kind in (Array, Record):
        kind.__dlpack__, kind.__dlpack_device__ = exported, lambda self: (1, 0)
    assert run(Array(), Record(1)) == [torch.Tensor] * 2
    opened = dlx.using("torch")(lambda items: type(items[0]))
    assert opened(Items()) is np.ndarray
    collections.abc.Sequence.register(Items)
    assert opened(Items()) is torch.Tensor


def test_a_class_that_becomes_an_array_during_the_call():
    """The former container is returned as the caller's object."""

    @dataclasses.dataclass
    class Record:
        x: object

    @dlx.using("torch")
    def change(record):
        Record.__dlpack__ = lambda self, **options: np.ones(2).__dlpack__(**options)
        Record.__dlpack_device__ = lambda self: (1, 0)
        return record

    own = Record(np.ones(2))
    assert change(own) is own


@pytest.mark.parametrize("error", [errors.ConversionError, KeyboardInterrupt, MemoryError])
def test_a_consumer_that_fails_is_final(invocations, monkeypatch, error):
    """The error names the parameter, the function is not called, and nothing is kept."""
    called, failing = [], []

    class Own:
        def __init__(self, array):
            self.array = np.from_dlpack(array)
            if self.array.ctypes.data in failing:
                raise error("planted")

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return (1, 0)

    module = types.ModuleType("planted_consumer")
    module.from_dlpack = Own
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run = dlx.using(module)(lambda x, *more, y=None: called.append(1))
    bad = np.ones(2)
    for args, options, where in (
        ((np.ones(2), bad), {}, "more[0]"),
        ((np.ones(2),), {"y": bad}, "y"),
        (({"k": [bad]},), {}, "x['k'][0]"),
    ):
        failing.clear()
        run(*args, **options)
        failing.append(bad.ctypes.data)
        called.clear()
        live = native.live()
        with pytest.raises(error) as caught:
            run(*args, **options)
        assert error is not errors.ConversionError or caught.value.where == where
        del caught  # its traceback has the consumer's frames
        gc.collect()
        assert not called and native.live() == live and not invocations


def test_a_result_that_cannot_be_converted_names_itself():
    """The error is the same as in Python."""
    run = dlx.using("torch", detach=False)(lambda x: x * torch.ones(2, requires_grad=True))
    for _ in range(3):
        with pytest.raises(errors.ConversionError, match="grad") as caught:
            run(np.ones(2, "f4"))
        assert caught.value.where == "result"


def test_nothing_is_kept():
    """Neither arguments nor results are kept, even if the function raises."""
    run = dlx.using("torch")(lambda x, y=None: x + 1 if y is None else 1 / 0)
    live = native.live()
    gc.disable()
    try:
        for n in range(10):
            a = np.ones(3)
            gone = weakref.ref(a)
            if n % 2:
                with pytest.raises(ZeroDivisionError):
                    run(a, 2)
            else:
                run(a)
            del a
            assert gone() is None and native.live() == live
    finally:
        gc.enable()


def test_nested_and_threads(invocations):
    """Each function has its own callers; several threads may learn at once."""
    inner = dlx.using("numpy")(lambda x: x * 2)
    outer = dlx.using("torch")(lambda x: inner(x) + 1)
    made = {"numpy": np.ones(2), "torch": torch.ones(2), "dlx": dlx.convert(np.ones(2), to="dlx")}
    failed = []

    def work():
        for _ in range(50):
            for name, array in made.items():
                result = outer(array)
                if type(result) is not type(array) or dlx.convert(result, to="numpy").tolist() != [3, 3]:
                    failed.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(invocations) <= 40


def test_coroutines_and_generators_take_the_complete_way(invocations):
    """They write back after each step."""

    @dlx.using("torch")
    async def later(x):
        return x + 1

    @dlx.using("torch")
    def steps(x):
        yield x + 1

    for _ in range(3):
        assert asyncio.run(later(np.ones(1))).tolist() == [2]
        assert [type(x) for x in steps(np.ones(1))] == [np.ndarray]
    assert len(invocations) == 6


def test_an_array_that_is_recorded_from_some_call_on_is_refused(monkeypatch):
    """As with tensorflow's tapes, the array and its type are the same as in earlier calls."""
    array = pytest.importorskip("jax.numpy").arange(3.0)
    adapter, watched = registry.owner(type(array)), []
    monkeypatch.setattr(adapter, "gradients", GradSupport(lambda array: bool(watched)), raising=False)
    double = dlx.using("numpy")(lambda x: x * 2)
    for _ in range(3):
        assert double(array).tolist() == [0, 2, 4]
    watched.append(True)
    with pytest.raises(errors.ConversionError, match="detach=True"):
        double(array)
    assert dlx.using("numpy", detach=True)(lambda x: x * 2)(array).tolist() == [0, 2, 4]


@pytest.mark.parametrize("body", ["last", "all", "list", "pair", "plus and all", "arrays", "a part more"])
@pytest.mark.parametrize("method", [False, True])
def test_a_sparse_array_that_is_returned_is_the_callers(body, method):
    """It needs no counterpart in the framework of the other arguments."""
    compare("torch", body, [MADE["numpy"]] * 3 + [MADE["torch sparse"]], method=method)
