"""A framework in the fast path, and the exchange tables of hostile.c, which a test controls."""

from __future__ import annotations

import ctypes
import sys
import types

import dlx
from dlx._core import native
from dlx._registry.registry import Registry
from dlx.adapter import Adapter, Capabilities, FastPath, Layout
from support.plugins.registries import use

NAME, OLD_NAME = "__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"
MODES = (
    *("takes", "fails before", "fails after", "fails later", "fails silently"),
    *("silent after", "null result", "null after", "raises"),
)
FLOAT32 = (2, 32, 1)


class Hostile:
    """The tables of hostile.c."""

    def __init__(self, path):
        self.free, self.held = ctypes.CDLL(path), ctypes.PyDLL(path)
        for name, arguments in {
            "table": [ctypes.c_char_p],
            "capsule": [ctypes.c_char_p, ctypes.c_int],
            "set": [ctypes.c_int, ctypes.py_object],
            "counts": [],
        }.items():
            function = getattr(self.held, f"hostile_{name}")
            function.restype, function.argtypes = ctypes.py_object, arguments

    def set(self, mode, error=ValueError):
        """Set the consumer's behaviour; counts start again."""
        self.held.hostile_set(MODES.index(mode), error)

    def lend(
        self, address, shape=(2, 3), strides=None, *, ndim=None, dtype=FLOAT32, device=1, offset=0, rc=0, error=False
    ):
        """Set the tensor that the producer lends."""
        numbers = [None if values is None else (ctypes.c_int64 * 64)(*values) for values in (shape, strides)]
        counts = [-1 if values is None else len(values) for values in (shape, strides)]
        self.free.hostile_lend(
            ctypes.c_void_p(address), len(shape or ()) if ndim is None else ndim, counts[0], numbers[0], counts[1],
            numbers[1], *dtype, device, ctypes.c_uint64(offset), rc, int(error),
        )  # fmt: skip

    def capsule(self, which="good", *, misnamed=False):
        return self.held.hostile_capsule(which.encode(), misnamed)

    def table(self, which="good"):
        return self.held.hostile_table(which.encode())

    @property
    def imports(self):
        return self.held.hostile_counts()[0]

    @property
    def borrows(self):
        return self.held.hostile_counts()[1]


class Owner(bytearray):
    """Memory with a counted release."""


def framework(monkeypatch):
    """Yield a framework `mylib` whose Array is in the fast path, and whose adapter counts calls of Python."""

    class Base:
        pass

    class Array(Base):
        """An array that implements the protocol, and counts the calls."""

        def __init__(self):
            self.asked = 0
            self.owner = Owner(64)

        def __dlpack__(self, **keywords):
            self.asked += 1
            address = native.buffer_address(memoryview(self.owner))
            tensor = native.tensor_new(address, (2, 3), None, FLOAT32, (1, 0), 0, self.owner)
            return tensor.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return (1, 0)

    class MyLib(Adapter):
        name = package = "mylib"
        types = ("mylib.Array",)
        fast_path = FastPath(types)
        loads = 0

        def capabilities(self):
            return Capabilities(dtypes=None, layouts=Layout.ANY, min_alignment=1, keeps_readonly=True)

        def load(self, tensor):
            self.loads += 1
            return ("loaded", tensor)

    package = types.ModuleType("mylib")
    package.__version__ = "1.0"
    package.Array, package.Base = Array, Base
    Array.__module__ = Base.__module__ = "mylib"
    package.adapter = MyLib()
    plugin = types.ModuleType("dlx_mylib")
    plugin.dlx_adapters = dlx.hookimpl(specname="dlx_adapters")(lambda: [package.adapter])
    registry = Registry(
        {"mylib": "dlx_mylib", "my": "dlx_mylib", "numpy": "dlx_adapters.dlx_numpy", "torch": "dlx_adapters.dlx_torch"}
    )
    monkeypatch.setitem(sys.modules, "mylib", package)
    monkeypatch.setitem(sys.modules, "dlx_mylib", plugin)
    use(registry, monkeypatch.setattr)
    native.routes_clear()
    yield package
    native.routes_clear()


def tensor(owner):
    """A dlx.Tensor over an owner's memory."""
    address = native.buffer_address(memoryview(owner))
    return native.tensor_new(address, (2, 3), None, FLOAT32, (1, 0), 0, owner)
