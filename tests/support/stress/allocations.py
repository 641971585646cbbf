"""A program that makes every allocation of a call fail once, and reports wrong results.

``python tests/support stress.allocations GROUP=PART ...`` runs the cases of a group whose names contain PART. For each
case and way to fail, allocation number 1 fails, then number 2, and so on, until the call needs no more. After each: a
MemoryError, or a right result; the sources keep their references and are not consumed; no managed tensor is left; the
same call works. Free lists are emptied before each call, so that their objects are allocated, too.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import faulthandler
import gc
import os
import re
import sys
import time
import traceback
import types
from typing import Any, NamedTuple

import numpy as np

import dlx
from dlx._core import native
from dlx._registry.registry import registry

IN_DLX = 3  # failing.c's status of an allocation that failed in an extension of dlx
SPARE = 128  # more objects of dlx.Tensor than dlx's free list holds


# ---- two ways to fail ------------------------------------------------------------------------------------------------


FAULTS = {
    # Python 3.11 and 3.12 leak the arguments of a function if its cells cannot be allocated.
    b"PyCell_New": b"",
    # Iterators over a dict's items are untracked before they are tracked if their pair cannot be allocated.
    b"PyTuple_Pack": b"(+0x",
    # __array_interface__ puts NULL into a dict and crashes; all attributes of numpy's arrays are left out.
    b"_multiarray_umath": b"_PyObject_GenericGetAttrWithDict",
    # The hash of a new dtype uses a NULL tuple and crashes.
    b"Py_BuildValue": b"_multiarray_umath",
    # pybind11 uses NULL instances and crashes.
    b"PyType_GenericAlloc": b"/libtorch_python",
    # nanobind uses NULL method objects and crashes.
    b"/jaxlib/": b"",
    # tvm_ffi.from_dlpack leaks the imported tensor if it cannot allocate its object.
    b"/tvm_ffi/": b"",
}
"""Callers that crash at a failure and are left out: words in the names of a function or library, and of its caller."""


class Python:
    """Allocations by Python's allocators, in Python and in every extension that uses them."""

    name = "python"

    def __init__(self):
        library = ctypes.PyDLL(os.environ["DLX_FAILING"])
        library.failing_start.restype = None
        words = [word for pair in FAULTS.items() for word in pair]
        pairs = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        self.start = lambda number: library.failing_start(ctypes.c_long(number), pairs)
        self.stop = library.failing_stop


class Core:
    """Allocations by the C of dlx, in one extension."""

    def __init__(self, name, fail):
        self.name, self.start = name, fail
        self.stop = lambda: fail(0) == 0


def ways():
    """Return the ways to fail."""
    from dlx_adapters import _dlx_numpy

    numpy_table = ctypes.PyDLL(_dlx_numpy.__file__).dlx_fail_allocation
    numpy_table.restype, numpy_table.argtypes = ctypes.c_int64, [ctypes.c_int64]
    return Python(), Core("core", native.lib.dlx_fail_allocation), Core("numpy's table", numpy_table)


# ---- cases -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One call: its source and its action; `act` returns the value to compare."""

    name: str
    make: Any
    act: Any
    leaves: Any = None  # (source) -> objects whose references are counted


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    """A dataclass."""

    x: Any
    y: Any


def array():
    """Return a fresh numpy array that every framework can hold."""
    return np.arange(6, dtype="f4").reshape(2, 3)


def locked():
    """Return a read-only array."""
    made = array()
    made.flags.writeable = False
    return made


def sources():
    """Return constructors of each framework's array."""
    import jax.numpy
    import torch
    import tvm_ffi

    return {
        "numpy": array,
        "torch": lambda: torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "dlx": lambda: dlx.convert(array(), to="dlx"),
        "tvm_ffi": lambda: tvm_ffi.from_dlpack(array()),
        "jax": lambda: jax.numpy.arange(6, dtype="float32").reshape(2, 3),
    }


def to(name, **options):
    """Return a call of `convert`."""
    return lambda obj: dlx.convert(obj, to=name, **options)


def pairs():
    """Each source to each target, also with options that need the Python path."""
    every = {"": {}, ", copied": {"copy": True}, ", shared": {"copy": False}, ", host": {"device": "cpu"}}
    for source, make in sources().items():
        for target in sources():
            for text, options in every.items():
                if not (options.get("copy") is False and "jax" in (source, target)):
                    yield Case(f"{source} to {target}{text}", make, to(target, **options))


def sorts():
    """Sources that take the Python path."""
    import array as arrays
    import mmap

    import pyarrow
    import torch

    class Legacy:
        def __init__(self):
            self.made = array()

        def __dlpack__(self, stream=None):
            return self.made.__dlpack__()

        def __dlpack_device__(self):
            return 1, 0

    class Sub(np.ndarray):
        pass

    def mapped():
        made = mmap.mmap(-1, 16)
        made.write(b"0123456789abcdef")
        return made

    for name, make in {
        "read-only": locked,
        "negative strides": lambda: array()[::-1],
        "bytes": lambda: b"".join([b"abc", b"def"]),
        "memoryview": lambda: memoryview(bytearray(b"abc")),
        "array": lambda: arrays.array("f", [1, 2, 3]),
        "mmap": mapped,
        "ctypes": lambda: (ctypes.c_int * 3)(1, 2, 3),
        "producer": Legacy,
        "pyarrow": lambda: pyarrow.array([1.5, 2.5], pyarrow.float32()),
        "conjugated": lambda: torch.tensor([1j, 2]).conj(),
        "other byte order": lambda: array().astype(">f4"),
        "chunks": lambda: pyarrow.chunked_array([pyarrow.array([1.5], pyarrow.float32())] * 2),
        "subclass": lambda: array().view(Sub),
        "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
        "one number": lambda: np.float32(3),
    }.items():
        for target in ("numpy", "torch", "dlx", "jax"):
            yield Case(f"{name} to {target}", make, to(target))


def forms():
    """Constructors of trees of two arrays."""

    def ring(x, y):
        made = [x, {"y": y}]
        made.append(made)
        return made

    return {
        "list": lambda x, y: [x, y, 1],
        "tuple": lambda x, y: (x, y, "s"),
        "dict": lambda x, y: {"x": x, 1: y},
        "nested": lambda x, y: {"a": [x, (y, {"b": [x, None]})], "c": y},
        "named tuple": Pair,
        "dataclass": Record,
        "ordered": lambda x, y: collections.OrderedDict(x=x, y=y),
        "default": lambda x, y: collections.defaultdict(list, x=x, y=y),
        "deque": lambda x, y: collections.deque([x, y], 5),
        "the same twice": lambda x, y: [x, x, (y, x)],
        "ring": ring,
        "deep": lambda x, y: [[[[[[[[[[x]]]]]]]], (y,)]],
        "many": lambda x, y: [x, y] * 20 + [array() for _ in range(20)],
        "text inside": lambda x, y: {"x": x, "s": ["a", 2, None, {3}], "y": Pair(y, 1)},
    }


def trees(options):
    """Every form of tree."""
    makers = sources()
    for form, build in forms().items():
        for source, target in (
            *(("numpy", "torch"), ("torch", "numpy"), ("numpy", "dlx"), ("dlx", "torch")),
            *(("jax", "numpy"), ("numpy", "tvm_ffi"), ("numpy", "jax")),
        ):
            make = makers[source]
            yield Case(
                f"{form}, {source} to {target}",
                lambda build=build, make=make: build(make(), make()),
                to(target, **options),
                arrays_of,
            )


def views():
    """Reads of lazy views."""
    makers = sources()

    acts = {
        "list": {
            "[i]": lambda v: (v[1], v[1], v[-1]),
            "slice": lambda v: list(v[:2]),
            "all": list,
            "reversed": lambda v: list(reversed(v)),
            "popped": lambda v: v.pop(),
            "stored": lambda v: v.__setitem__(1, array()),
            "stored, a slice": lambda v: v.__setitem__(slice(0, 2), [array(), array()]),
            "stored, appended": lambda v: v.append(array()),
            "stored, inserted": lambda v: v.insert(1, array()),
            "deleted": lambda v: v.__delitem__(1),
        },
        "tuple": {"[i]": lambda v: v[1], "all": list},
        "deque": {"[i]": lambda v: v[1], "all": list},
        "dict": {
            "[k]": lambda v: (v["x"], v["x"]),
            "values": lambda v: list(v.values()),
            "items": lambda v: list(v.items()),
            "get": lambda v: (v.get("x"), v.get("z")),
            "popped": lambda v: v.pop("x"),
            "stored": lambda v: v.__setitem__("x", array()),
            "stored anew": lambda v: v.__setitem__("n", array()),
            "deleted": lambda v: v.__delitem__("x"),
        },
        "default": {"[k]": lambda v: v["x"], "missing": lambda v: v["z"]},
        "nested": {"deep": lambda v: v["a"][1][1]["b"][0], "all": lambda v: list(v["a"][1])},
        "dataclass": {"attribute": lambda v: (v.x, v.y)},
        "named tuple": {"attribute": lambda v: (v.x, v[1])},
    }
    shapes = forms() | {"dict": lambda x, y: {"x": x, "y": y}}
    for form, routes in acts.items():
        for source, target in (("numpy", "torch"), ("torch", "numpy"), ("numpy", "dlx"), ("jax", "numpy")):
            for route, act in routes.items():
                make = makers[source]

                def run(obj, act=act, target=target):
                    return act(dlx.convert(obj, to=target, lazy=True))

                changes = route.startswith(("stored", "deleted"))  # a call that fails changes nothing
                yield Case(
                    f"{form} {route}, {source} to {target}",
                    lambda make=make, b=shapes[form]: b(make(), make()),
                    run,
                    arrays_of if changes else None,
                )


def foreign_views():
    """Lazy views of containers that are not builtin."""
    import torch

    class Fresh(collections.abc.Mapping):
        """A container that creates its elements on access."""

        def __getitem__(self, key):
            return {"x": array}[key]()

        def __iter__(self):
            return iter("x")

        def __len__(self):
            return 1

    def act(view):
        return view["x"]

    yield Case("mapping, numpy to torch", Fresh, lambda obj: act(dlx.convert(obj, to="torch", lazy=True)))
    yield Case("mapping, numpy to dlx", Fresh, lambda obj: dict(dlx.convert(obj, to="dlx", lazy=True)))
    yield Case(
        "user list, numpy to torch",
        lambda: collections.UserList([array()]),
        lambda obj: list(dlx.convert(obj, to="torch", lazy=True)),
    )
    yield Case(
        "parameters to numpy",
        lambda: torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.ones(2), requires_grad=False)}),
        lambda obj: act(dlx.convert(obj, to="numpy", lazy=True)),
    )


class Struct:
    """A managed tensor of dlx at an address; once it is consumed, its capsule does not call the deleter."""

    def __init__(self, legacy):
        self.legacy, self.taken = legacy, False
        self.capsule = dlx.to_capsule(array(), max_version=(0 if legacy else 1, 0))
        self.address = address_in(self.capsule, name_of(self.capsule))

    def take(self):
        """Consume it, as a consumer written in C does."""
        tensor = dlx.from_managed(self.address, legacy=self.legacy)
        self.taken = True
        return tensor

    def borrow(self):
        """Borrow it."""
        return dlx.from_managed(self.address, legacy=self.legacy, borrow=True)

    def __del__(self):
        if self.taken:
            rename(self.capsule, b"used_dltensor" if self.legacy else b"used_dltensor_versioned")


address_in = ctypes.pythonapi.PyCapsule_GetPointer
address_in.restype, address_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
rename = ctypes.pythonapi.PyCapsule_SetName
rename.restype, rename.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Released:
    """A release function that counts its calls."""

    def __init__(self):
        self.calls = 0
        self.memory = array()

    def __call__(self):
        self.calls += 1


def interop():
    """Capsules, pointers and structs, as C authors use them."""
    import torch

    makers = sources()
    for source, make in makers.items():
        yield Case(f"to_capsule of {source}", make, lambda obj: dlx.to_capsule(obj, max_version=(1, 0)))
        yield Case(f"from_dlpack of {source}", make, dlx.from_dlpack)
        if source != "jax":  # read-only
            yield Case(f"legacy capsule of {source}", make, lambda obj: dlx.to_capsule(obj, max_version=(0, 8)))
        yield Case(f"borrow of {source}", make, lambda obj: lent(obj, readonly=True))
    for version in ((0, 8), (1, 0)):

        def capsule(version=version):
            return dlx.to_capsule(array(), max_version=version)

        for target in ("dlx", "numpy", "torch", "jax"):
            yield Case(f"capsule {version} to {target}", capsule, to(target))
            yield Case(f"capsules {version} to {target}", lambda c=capsule: [c(), (c(),)], to(target))
        yield Case(f"from_dlpack of a capsule {version}", capsule, dlx.from_dlpack)
        yield Case(f"to_capsule of a capsule {version}", capsule, lambda obj: dlx.to_capsule(obj))
        yield Case(f"borrow of a capsule {version}", capsule, lent)

        legacy = version == (0, 8)
        yield Case(f"from_managed {version}", lambda legacy=legacy: Struct(legacy), Struct.take)
        yield Case(f"from_managed {version}, borrowed", lambda legacy=legacy: Struct(legacy), Struct.borrow)
    yield Case("from_dlpack by numpy", makers["dlx"], np.from_dlpack)
    yield Case("from_dlpack by torch", makers["dlx"], torch.from_dlpack)
    yield Case("__dlpack__", makers["dlx"], lambda obj: obj.__dlpack__(max_version=(1, 0)))
    yield Case("__dlpack__, copied", makers["dlx"], lambda obj: obj.__dlpack__(max_version=(1, 0), copy=True))
    yield Case("memoryview", makers["dlx"], lambda obj: memoryview(obj).tolist())
    yield Case("repr", makers["dlx"], repr)
    yield Case("attributes", makers["dlx"], lambda t: (t.shape, t.strides, str(t.dtype), str(t.device), t.readonly))
    yield Case("from_pointer", array, lambda a: dlx.from_pointer(a.ctypes.data, (2, 3), "float32", owner=a))
    yield Case("from_pointer, released", Released, pointed)
    yield Case("empty", object, lambda _: dlx.empty((4, 5), "int64").shape)
    for target in ("numpy", "torch", "dlx", "jax"):
        yield Case(f"stack into {target}", lambda: [array(), array()], lambda obj, t=target: dlx.stack(obj, t), list)
    for name in ("numpy", "torch", "tvm_ffi", "jax"):
        yield Case(f"load of {name}", makers["dlx"], registry.target(name).adapter.load)
    yield Case("shares_memory", lambda: [array(), torch.ones(2)], lambda obj: dlx.shares_memory(*obj), list)
    for target in ("dlx", "numpy", "torch"):
        yield Case(f"attach to {target}", shared, lambda obj, t=target: dlx.attach(obj, t, writable=True))
    yield Case("share", lambda: [array(), array().T], lambda obj: len(dlx.share(obj)))
    yield Case("describe", array, lambda obj: str(dlx.describe(obj).shape))
    yield Case("plan", locked, lambda obj: dlx.plan(obj, to="torch").outcome)
    yield Case("using", array, dlx.using("torch")(lambda x: x + 1))
    yield Case("collected", lambda: [array(), np.array(["s"])], refused, lambda obj: obj)
    yield Case("refused", lambda: np.array(["s"]), refused)


def shared():
    """Return a handle of a tree."""
    return dlx.share({"a": [array(), array().T], "b": 3})


def lent(obj, **options):
    """Borrow a tensor and view it."""
    with dlx.borrow(obj, **options) as tensor:
        return tensor.ndim


def pointed(obj):
    """Create a tensor with a release function; it is called once if the tensor was created, otherwise never."""
    before = obj.calls
    try:
        tensor = dlx.from_pointer(obj.memory.ctypes.data, (2, 3), "float32", release=obj)
    except MemoryError:
        assert obj.calls == before, "released though nothing was made"
        raise
    shown = plain(tensor)
    assert obj.calls == before
    del tensor
    return shown


def refused(obj):
    """Return the classes of the errors of a refused conversion."""
    try:
        dlx.convert(obj, to="torch", errors="collect" if isinstance(obj, list) else "raise")
    except (dlx.errors.DlxError, ExceptionGroup) as error:
        if any(is_no_memory(each) for each in getattr(error, "exceptions", [error])):
            raise MemoryError from None
        return [type(each).__name__ for each in getattr(error, "exceptions", [error])]
    raise AssertionError("not refused")


def devices():
    """Memory and order on devices, over the recording driver in DLX_CUDA_DRIVER."""
    import pytest

    from support.cuda import gpulib
    from support.cuda.fake_cuda import FakeCuda

    cuda = FakeCuda(os.environ["DLX_CUDA_DRIVER"])
    cuda.reset()
    patch = pytest.MonkeyPatch()
    one, other = gpulib.install(patch, "liba", cuda), gpulib.install(patch, "libb", cuda)
    streams = cuda.stream(), cuda.stream()

    def on_device(**options):
        return dlx.convert(array(), to="dlx", device="cuda:0")

    def crossing(obj):
        with one.on(streams[0]), other.on(streams[1]):
            return dlx.convert(obj, to="libb")

    def shown(obj):
        result = crossing(obj)
        return [x.device.type for x in (result if isinstance(result, list) else [result])]

    def made():
        with one.on(streams[0]):
            return one.made()

    def fetched(obj):
        address, strides = obj.data_ptr, (1, 3)
        view = dlx.from_pointer(address, (3, 2), "float32", strides=strides, device="cuda:0", owner=obj)
        return dlx.convert(view, to="numpy", device="cpu")

    yield Case("to a device", array, lambda obj: dlx.convert(obj, to="dlx", device="cuda:1").device.id)
    yield Case("strided to a device", lambda: array().T, lambda obj: dlx.convert(obj, to="dlx", device="cuda:1").shape)
    yield Case("to the host", on_device, to("numpy", device="cpu"))
    yield Case("strided to the host", on_device, fetched)
    yield Case("between devices", on_device, lambda obj: dlx.convert(obj, to="dlx", device="cuda:1").device.id)
    yield Case("between streams", made, shown)
    yield Case("a tree between streams", lambda: [made(), made()], shown, list)
    yield Case("empty", object, lambda _: dlx.empty((4, 5), "int64", "cuda:0").shape)
    yield Case("capsule", made, lambda obj: dlx.to_capsule(obj))
    gc.collect()
    cuda.resume_all()
    left = dlx.release_pending()
    assert (left, cuda.depth, cuda.mode, cuda.misuses, cuda.races) == (0, 0, 0, 0, 0), (left, cuda.report)
    patch.undo()


GROUPS = {
    "pairs": pairs,
    "sorts": sorts,
    "trees": lambda: trees({}),
    "collected": lambda: trees({"errors": "collect"}),
    "copied": lambda: trees({"copy": True}),
    "views": views,
    "foreign": foreign_views,
    "interop": interop,
    "devices": devices,
}


# ---- checks after each failure ---------------------------------------------------------------------------------------


def plain(obj, depth=12):
    """Return an object's types and values; a result of numpy, torch, dlx, jax or tvm_ffi as nested lists."""
    if depth == 0:
        return "..."
    if type(obj).__name__ == "PyCapsule":
        return name_of(obj)
    if isinstance(obj, np.ndarray):
        return "ndarray", str(obj.dtype), obj.tolist()
    if hasattr(obj, "__dlpack__"):
        kind = type(obj).__module__.partition(".")[0]
        return kind, plain(dlx.convert(obj, to="numpy"))[1:]
    if dataclasses.is_dataclass(obj):
        return type(obj).__name__, [plain(value, depth - 1) for value in vars(obj).values()]
    if isinstance(obj, collections.abc.Mapping):
        return type(obj).__name__, [(key, plain(obj[key], depth - 1)) for key in obj]
    if isinstance(obj, collections.abc.Sequence) and not isinstance(obj, str | bytes):
        return type(obj).__name__, [plain(each, depth - 1) for each in obj]
    return obj


def arrays_of(tree):
    """Return the arrays of a tree, each once."""
    found, seen, rest = [], set(), [tree]
    while rest:
        each = rest.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if hasattr(each, "__dlpack__"):
            found.append(each)
        elif isinstance(each, dict):
            rest += each.values()
        elif dataclasses.is_dataclass(each):
            rest += vars(each).values()
        elif isinstance(each, list | tuple | collections.deque):
            rest += each
    return found


def references(case, source):
    """Return the reference counts of a source and its arrays."""
    watched = case.leaves(source) if case.leaves else []
    return sys.getrefcount(source), [sys.getrefcount(each) for each in watched]


LOST = ("without exception set", "without setting an exception")
# Python itself loses the error of a Python function.
LOST_BY_DLX = re.compile("(?!<function ).*without (exception set|setting an exception)$")
HIDDEN = ("Failed to allocate a Tensor object", "can't allocate lock", *LOST)
"""A MemoryError in torch's words and in Python's: 3.11 loses it if it cannot allocate a frame for the traceback."""


def is_no_memory(error):
    """Return True for a MemoryError, or an error by which a framework or Python hides one."""
    while error is not None:
        if isinstance(error, MemoryError) or any(text in str(error) for text in HIDDEN):
            return True
        error = error.__cause__ or error.__context__
    return False


class Wrong(Exception):
    """A violated condition."""


def attempt(case, way, number, expected):
    """Make one allocation of a call fail; return whether it failed, and whether the call failed."""
    source = case.make()
    live, before = native.live(), references(case, source)
    drained = [dlx.empty((), "int8") for _ in range(SPARE)]  # dlx's free list
    gc.collect()  # Python's free lists
    result = error = None
    way.start(number)
    try:
        result = case.act(source)
    except BaseException as raised:
        error = raised
    failed = way.stop()
    del drained
    if error is None:
        if plain(result) != expected:
            raise Wrong(f"wrong result {plain(result)}")
        if not failed:
            return False, False
    elif not is_no_memory(error) or (LOST_BY_DLX.match(str(error)) and failed == IN_DLX):
        raise Wrong(f"{type(error).__name__}: {error}") from error
    raised = error is not None
    result = error = None
    if (native.live(), references(case, source)) != (live, before):
        gc.collect()
    if (found := (native.live(), references(case, source))) != (live, before) and raised:
        raise Wrong(f"left behind: {found}, before {(live, before)}")
    try:
        again = plain(case.act(source)) if raised else expected
    except Exception as error:
        raise Wrong(f"the next call fails: {error!r}") from error
    if again != expected:
        raise Wrong(f"the next call gives {again}")
    return True, raised


def run(case, way):
    """Make every allocation of a call fail once; return the numbers of allocations and of failed calls."""
    number = failures = 0
    expected = plain(case.act(case.make()))
    for _ in range(3):
        case.act(case.make())
    gc.collect()
    live = native.live()
    while True:
        number += 1
        try:
            failed, raised = attempt(case, way, number, expected)
        except Wrong as wrong:
            raise Wrong(f"{case.name}, {way.name}, allocation {number}: {wrong}") from wrong.__cause__
        failures += raised
        if native.live() != live:
            gc.collect()
        if native.live() != live:
            raise Wrong(f"{case.name}, {way.name}, allocation {number}: {native.live() - live} managed tensors left")
        if not failed:
            return number - 1, failures


def main(*wanted):
    """Run the cases of groups; return the exit status."""
    faulthandler.enable()
    unraised = []

    def unraisable(args):
        """Record it, unless Python could not close a generator during its release."""
        if not isinstance(args.object, types.GeneratorType):
            unraised.append(f"{args.exc_value!r} in {args.object!r}")

    sys.unraisablehook = unraisable
    wrong, total, began = [], collections.Counter(), time.perf_counter()
    shows = "DLX_SHOW" in os.environ
    for group, _, part in (each.partition("=") for each in wanted):
        for case in GROUPS[group]():
            if part not in case.name:
                continue
            case.act(case.make())
            gc.collect()
            gc.freeze()
            total["cases"] += 1
            for way in ways():
                if shows:
                    print(case.name, way.name, flush=True)
                try:
                    number, failures = run(case, way)
                except Wrong as error:
                    wrong.append(str(error))
                    if shows:
                        traceback.print_exception(error)
                    continue
                total[way.name] += number
                total["calls that failed"] += failures
    print(*wrong, *unraised, sep="\n")
    print(dict(total), f"{time.perf_counter() - began:.1f} s")
    return bool(wrong or unraised)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
