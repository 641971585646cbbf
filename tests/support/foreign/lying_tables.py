"""Exchange tables whose slots succeed without a result, or with a wrong one, for a separate process."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools

import dlx
from dlx import errors
from dlx._core import native
from support.plugins.registries import use

SLOTS = ("export", "import", "borrow", "stream")
LIES = (
    *("right", "unwritten", "writes null", "silent", "silent written", "raises", "raises right", "one"),
    *("no shape", "no strides", "no data", "no data or shape", "ndim below", "ndim above", "no bits", "no lanes"),
    *("odd code", "odd device", "no deleter", "no context", "odd version", "old version", "odd flags"),
    "right once",
)
HARMLESS = ("right", "no strides", "no context", "no deleter", "odd flags")
"""Changes that keep the array valid; `odd flags` are meaningless for whole bytes."""


class Lying:
    """The tables of lying.c."""

    def __init__(self, path):
        library = ctypes.PyDLL(str(path))
        for name, arguments in {"table": 1, "set": 3, "owed": 0, "soil": 0}.items():
            function = getattr(library, f"lying_{name}")
            function.restype, function.argtypes = ctypes.py_object, [ctypes.c_int] * arguments
            setattr(self, name, function)

    def kind(self, *slots, **methods):
        """Return a class whose table has these slots."""
        capsule = self.table(sum(1 << SLOTS.index(slot) for slot in slots))
        return type("Lies", (), {"__dlpack_c_exchange_api__": capsule, **methods})

    def choose(self, slot, lie, *, is_cuda=False):
        """Set the behaviour of one slot; the others are valid."""
        self.set(SLOTS.index(slot), LIES.index(lie), is_cuda)


def _lazy(obj):
    return dlx.convert([obj, obj], to="numpy", lazy=True)[0]


CALLS = {
    "numpy": lambda obj: dlx.convert(obj, to="numpy"),
    "dlx": lambda obj: dlx.convert(obj, to="dlx"),
    "copy": lambda obj: dlx.convert(obj, to="numpy", copy=True),
    "shared": lambda obj: dlx.convert(obj, to="numpy", copy=False),
    "host": lambda obj: dlx.convert(obj, to="numpy", device="cpu"),
    "tree": lambda obj: dlx.convert({"a": [obj, obj]}, to="numpy"),
    "lazy": _lazy,
    "plan": lambda obj: dlx.plan(obj, to="numpy"),
    "describe": dlx.describe,
    "stack": lambda obj: dlx.stack([obj, obj], to="numpy"),
    "from_dlpack": dlx.from_dlpack,
    "to_capsule": dlx.to_capsule,
    "shares_memory": lambda obj: dlx.shares_memory(obj, obj),
    "like": lambda obj: dlx.convert(b"ab", like=obj),
    "export": native.exchange_export,
    "stream": lambda obj: native.exchange_stream(obj, 2, 0),
}


def borrow(obj):
    """Borrow a DLTensor."""
    with dlx.borrow(obj) as t:
        return t.ndim


CALLS["borrow"] = borrow


def call(name, obj):
    """Make one call; return its result, or the dlx error that it raised."""
    try:
        return CALLS[name](obj)
    except errors.DlxError as error:
        return error
    except SystemError as error:  # only from the functions in C: the layers above raise a dlx error
        assert name in ("export", "stream"), (name, error)
        return error
    except ValueError as error:  # the producer's error
        assert name in ("export", "stream") and str(error) == "lying", (name, error)
        return error


VALUES = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
OTHERS = [[10.0, 11.0, 12.0], [13.0, 14.0, 15.0]]
"""The values of a table, and of an object whose table cannot be used."""


def check(name, result, *why):
    """Check the result of a call: an error, or the right values."""
    if isinstance(result, Exception) or not getattr(result, "is_host", True) or "odd code" in why:
        return
    if name in ("numpy", "dlx", "copy", "shared", "host", "lazy", "from_dlpack", "export"):
        assert memoryview(result).tolist() in (VALUES, OTHERS), (name, *why)
    if name == "tree":
        assert [memoryview(each).tolist() for each in result["a"]] in ([VALUES] * 2, [OTHERS] * 2), why


def _dlpack(self, **keywords):
    owner = array.array("d", range(10, 16))
    address = native.buffer_address(memoryview(owner))
    return native.tensor_new(address, (2, 3), None, (2, 64, 1), (1, 0), 0, owner).__dlpack__(**keywords)


METHODS = {"__dlpack__": _dlpack, "__dlpack_device__": lambda self: (1, 0)}
"""The protocols of objects whose table cannot be used."""


def framework(*kinds):
    """Register classes as the arrays of a framework in the fast path, lyinglib."""
    import sys
    import types

    from dlx._registry.registry import Registry
    from dlx.adapter import Adapter, Capabilities, FastPath, Layout

    class Library(Adapter):
        name = package = "lyinglib"
        types = tuple(f"lyinglib.{kind.__name__}" for kind in kinds)
        fast_path = FastPath(types)

        def capabilities(self):
            return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)

        def load(self, tensor):
            raise TypeError("by its table only")

    package, plugin = types.ModuleType("lyinglib"), types.ModuleType("dlx_lyinglib")
    package.__version__ = "1.0"
    for kind in kinds:
        kind.__module__ = "lyinglib"
        setattr(package, kind.__name__, kind)
    adapter = Library()
    plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(lambda: [adapter])
    sys.modules.update(lyinglib=package, dlx_lyinglib=plugin)
    use(Registry({"lyinglib": "dlx_lyinglib", "numpy": "dlx_adapters.dlx_numpy"}))
    native.routes_clear()


def producers(lying, *, listed):
    """Call everything on objects with invalid tables, for each set of slots; return the number of calls.

    `listed`: an adapter lists the types; otherwise dlx finds the tables on the types.
    """
    calls = 0
    for slots in (("export",), ("borrow",), ("export", "borrow"), ("export", "borrow", "stream")):
        for slot, lie, is_cuda in itertools.product(slots, LIES, (False, True)):
            if is_cuda and slot != "stream" and lie != "right":
                continue
            lying.choose(slot, lie, is_cuda=is_cuda)
            kind = lying.kind(*slots, **(METHODS if listed else {}))
            if listed:
                framework(kind)
            for name in (*CALLS, *CALLS):
                lying.soil()
                result = call(name, kind())
                check(name, result, slots, slot, lie, is_cuda)
                if lie in HARMLESS and not is_cuda and "export" in slots and name in ("numpy", "dlx", "copy"):
                    assert not isinstance(result, Exception), (slots, slot, lie, name, result)
                calls += 1
                result = None
            gc.collect()
            assert native.live() == lying.owed() == 0, (slots, slot, lie, native.live(), lying.owed())
    return calls


def consumers(lying):
    """Convert to a framework whose import slot is invalid; return the number of calls."""
    import numpy

    calls = 0
    owner = bytearray(48)
    sources = (lambda: numpy.arange(6.0), lambda: dlx.convert(owner, to="dlx"), lambda: numpy.arange(9.0)[::-2])
    for lie in LIES[: LIES.index("no shape")]:
        lying.choose("import", lie)
        kind = lying.kind("import")
        framework(kind)
        for source, wrap in itertools.product(sources, (False, True) * 2):
            lying.soil()
            try:
                obj = source()
                result = dlx.convert([obj, obj] if wrap else obj, to="lyinglib")
                assert lie == "right", (lie, result)
            except errors.ConversionError as error:
                assert lie != "right", error
            calls += 1
            obj = result = None
        gc.collect()
        assert native.live() == 0, (lie, native.live())
    return calls


def stale(lying):
    """Convert two arrays in one call; the borrow slot writes nothing for the second, so the stack has the first."""
    kind = lying.kind("borrow", **METHODS)
    framework(kind)
    for options in ({}, {"copy": True}, {"copy": False}, {"device": "cpu"}):
        for _ in range(3):
            lying.choose("borrow", "right")
            first, second = dlx.convert([kind(), kind()], to="dlx", **options)
            assert memoryview(first).tolist() == memoryview(second).tolist() == VALUES
            lying.choose("borrow", "right once")
            first, second = dlx.convert([kind(), kind()], to="dlx", **options)
            assert memoryview(second).tolist() == OTHERS, options
    first = second = None
    assert native.live() == 0


def run(path):
    """Run everything."""
    lying = Lying(path)
    stale(lying)
    print("calls:", producers(lying, listed=False), producers(lying, listed=True), consumers(lying))
