"""The sources of the matrix: each dtype of each framework, and odd objects.

A maker returns a new object for each call, because some can be used only once. It imports its framework itself, so that
an ImportError means that the framework is not installed.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import tempfile
from collections.abc import Callable
from typing import Any

import dlx
from dlx._core.native import ffi

FRAMEWORKS = ("dlx", "numpy", "torch", "jax", "tvm_ffi", "pyarrow")
FURTHER = ("tensorflow", "paddle", "mlx", "warp", "onnxruntime")  # in separate environments
DTYPES = (*(dtype.name for dtype in dlx.DType.all()), "float32x4")
COUNT = 6


def memory(dtype: str, shape: tuple[int, ...] = (COUNT,)) -> Any:
    """Return a dlx.Tensor over 256-byte aligned memory filled with a pattern; bools hold 0 and 1."""
    whole = ffi.new("unsigned char[]", 1024)
    start = int(ffi.cast("intptr_t", whole)) + 256
    start += -start % 256
    mask = 1 if dtype == "bool" else 255
    first = start - int(ffi.cast("intptr_t", whole))
    for i in range(512):
        whole[first + i] = (i * 73 + 9) & mask
    return dlx.from_pointer(start, shape, dtype, owner=whole)


def make_array(framework: str, dtype: str) -> Any:
    """Return an array of a framework with a dtype, or raise an error if the framework has no such dtype."""
    if framework == "dlx":
        return memory(dtype)
    if framework == "jax":
        import jax

        with jax.enable_x64(True):
            return jax.block_until_ready(jax.numpy.asarray(dlx.convert(memory(dtype), to="numpy")))
    if framework == "pyarrow" and dtype == "bool":
        import pyarrow

        return pyarrow.array([True, False, True, True, False, False])
    return dlx.convert(memory(dtype), to=framework)


def make_unaligned(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a maker that retries until the object's memory is not at a multiple of 64 bytes."""

    def source() -> Any:
        kept = []
        while True:
            kept.append(make())
            if dlx.describe(kept[-1]).address % 64:
                return kept[-1]

    return source


# ---- odd sources -----------------------------------------------------------------------------------------------------

ODD: dict[str, Callable[[], Any]] = {}


def register_odd(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a maker under a name."""

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in ODD, name
        ODD[name] = make
        return make

    return enter


def _numpy(name: str, make: Callable[[Any], Any]) -> None:
    def source() -> Any:
        import numpy

        return make(numpy)

    register_odd(f"numpy {name}")(source)


def _grid(np: Any, dtype: str = "f4") -> Any:
    """Return a 4 by 6 array that is aligned to 256 bytes."""
    return dlx.convert(memory(dlx.describe(np.zeros(1, dtype)).dtype.name, (4, 6)), to="numpy")


def _readonly(np: Any) -> Any:
    grid = _grid(np)
    grid.flags.writeable = False
    return grid


def _make_shifted(np: Any, nbytes: int) -> Any:
    whole = dlx.convert(memory("uint8", (128,)), to="numpy")
    return np.frombuffer(whole, "u4", 24, nbytes).view("f4") if nbytes % 4 else whole[nbytes : nbytes + 96].view("f4")


def _liar(np: Any) -> type:
    return type("Liar", (np.ndarray,), {"shape": property(lambda self: (99,)), "strides": property(lambda self: (8,))})


def _memmap(np: Any) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(bytes(range(96)))
        file.flush()
        return np.memmap(file.name, "f4", "r+", shape=(4, 6))


_numpy("C", lambda np: _grid(np))
_numpy("F", lambda np: _grid(np).reshape(6, 4).T)
_numpy("transposed", lambda np: _grid(np).T)
_numpy("[::-1]", lambda np: _grid(np)[::-1])
_numpy("[:, ::2]", lambda np: _grid(np)[:, ::2])
_numpy("broadcast", lambda np: np.broadcast_to(_grid(np)[0], (4, 6)))
_numpy("overlapping", lambda np: np.lib.stride_tricks.as_strided(_grid(np), (4, 3), (4, 4)))
_numpy("(0, 3)", lambda np: np.zeros((0, 3), "f4"))
_numpy("0-d", lambda np: _grid(np)[0, 0, ...])
_numpy("size 1, odd strides", lambda np: np.lib.stride_tricks.as_strided(_grid(np), (1, 1), (-8, 400)))
_numpy("offset 4 bytes", lambda np: _make_shifted(np, 4))
_numpy("misaligned 1 byte", lambda np: _make_shifted(np, 1))
_numpy("struct field", lambda np: np.zeros(4, "i1,f4")["f1"])
_numpy("structured", lambda np: np.zeros(4, "i4,f4"))
_numpy(">f4", lambda np: _grid(np).astype(">f4"))
_numpy("read-only", _readonly)
_numpy("scalar", lambda np: np.float64(1.5))
_numpy("matrix", lambda np: _grid(np).view(np.matrix))
_numpy("recarray field", lambda np: np.rec.array(np.zeros(4, "f4,f4")).f1)
_numpy("masked", lambda np: np.ma.masked_array([1.0, 2.0], [False, True]))
_numpy("memmap", _memmap)
_numpy("datetime64", lambda np: np.zeros(3, "M8[s]"))
_numpy("object", lambda np: np.array([None, 1]))
_numpy("str", lambda np: np.array(["a", "b"]))
_numpy("longdouble", lambda np: np.zeros(3, np.longdouble))
_numpy("StringDType", lambda np: np.array(["a"], np.dtypes.StringDType()))
_numpy("float0", lambda np: np.zeros(2, [("float0", "V")]))
_numpy("subclass that lies", lambda np: _grid(np).view(_liar(np)))
_numpy("33-d", lambda np: _grid(np)[0, 0, ...].reshape((1,) * 33))


def _torch(name: str, make: Callable[[Any], Any]) -> None:
    def source() -> Any:
        import torch

        return make(torch)

    register_odd(f"torch {name}")(source)


def _plane(torch: Any) -> Any:
    return dlx.convert(memory("float32", (4, 6)), to="torch")


def _subclass(torch: Any) -> Any:
    return _plane(torch).as_subclass(type("Named", (torch.Tensor,), {}))


def _fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def _make_emptied(torch: Any) -> Any:
    tensor = torch.zeros(6)
    tensor.untyped_storage().resize_(0)
    return tensor


_torch("C", _plane)
_torch("transposed", lambda torch: _plane(torch).T)
_torch("expand", lambda torch: _plane(torch)[0].expand(4, 6))
_torch("channels last", lambda torch: torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last))
_torch("(0, 3)", lambda torch: torch.zeros(0, 3))
_torch("0-d", lambda torch: _plane(torch)[0, 0])
_torch("requires grad", lambda torch: torch.ones(3, requires_grad=True))
_torch("Parameter", lambda torch: torch.nn.Parameter(_plane(torch), requires_grad=False))
_torch("subclass", _subclass)
_torch("conj", lambda torch: torch.tensor([1 + 2j, 3 - 1j]).conj())
_torch("neg", lambda torch: torch.tensor([1 + 2j, 3 - 1j]).conj().imag)
_torch(
    "complex32, conj and neg",
    lambda torch: torch._neg_view(torch.tensor([1 + 2j], dtype=torch.complex32).conj()),
)
_torch("sparse", lambda torch: torch.eye(3).to_sparse())
_torch("meta", lambda torch: torch.ones(3, device="meta"))
_torch("fake", _fake)
_torch("nested", lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
_torch("quantized", lambda torch: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
_torch("int4", lambda torch: torch.zeros(3, dtype=torch.uint8).view(torch.int4))
_torch("storage resized to 0", _make_emptied)


def _jax(name: str, make: Callable[[Any], Any]) -> None:
    def source() -> Any:
        import jax

        return make(jax)

    register_odd(f"jax {name}")(source)


def _make_deleted(jax: Any) -> Any:
    gone = jax.numpy.ones(3)
    gone.delete()
    return gone


def _make_column_major(jax: Any, dtype: str) -> Any:
    from jax.experimental.layout import Format, Layout

    plain = jax.numpy.arange(6).reshape(2, 3).astype(dtype)
    return jax.device_put(plain, Format(Layout((1, 0)), plain.sharding))


_jax("C", lambda jax: jax.numpy.arange(24, dtype="float32").reshape(4, 6))
_jax("transposed", lambda jax: jax.numpy.arange(24, dtype="float32").reshape(4, 6).T)
_jax("0-d", lambda jax: jax.numpy.float32(1.5) + 0)
_jax("(0, 3)", lambda jax: jax.numpy.zeros((0, 3)))
_jax("int4, column-major", lambda jax: _make_column_major(jax, "int4"))
_jax("float4, column-major", lambda jax: _make_column_major(jax, "float4_e2m1fn"))
_jax("deleted", _make_deleted)
_jax("random key", lambda jax: jax.random.key(0))
_jax("sparse", lambda jax: __import__("jax.experimental.sparse").experimental.sparse.BCOO.fromdense(jax.numpy.eye(2)))


def _arrow(name: str, make: Callable[[Any], Any]) -> None:
    def source() -> Any:
        import pyarrow

        return make(pyarrow)

    register_odd(f"pyarrow {name}")(source)


_arrow("slice", lambda pa: pa.array([1.0, 2, 3, 4])[1:3])
_arrow("two chunks", lambda pa: pa.chunked_array([[1.0, 2], [3.0]]))
_arrow("one null", lambda pa: pa.array([1.0, None, 3]))
_arrow("bool", lambda pa: pa.array([True, False, True]))
_arrow("dictionary", lambda pa: pa.array(["a", "b", "a"]).dictionary_encode())
_arrow("text", lambda pa: pa.array(["a", "b"]))
_arrow("timestamp", lambda pa: pa.array([1, 2], pa.timestamp("s")))
_arrow("fixed-size list", lambda pa: pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)))
_arrow("null inside of a list", lambda pa: pa.array([[1, None]], pa.list_(pa.int32(), 2)))
_arrow("empty", lambda pa: pa.array([], pa.int32()))
_arrow("Tensor", lambda pa: pa.Tensor.from_numpy(__import__("numpy").arange(24.0).reshape(4, 6)[:, ::2]))


# ---- capsules, producers, objects of Python ---------------------------------------------------------------------


class Producer:
    """An object with `__dlpack__`."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def __dlpack__(self, **options: Any) -> Any:
        return self.answer(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class WithoutDevice:
    """A producer without `__dlpack_device__`."""

    def __dlpack__(self, **options: Any) -> Any:
        return _tensor().__dlpack__(**options)


class WithoutKeywords:
    """A producer without keywords."""

    def __dlpack__(self) -> Any:
        return _tensor().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _tensor() -> Any:
    return memory("float32", (4, 6))


class OnlyStream:
    """A producer without versions."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return _tensor().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _raiser(error: Exception) -> Callable[..., Any]:
    def answer(**options: Any) -> Any:
        raise error

    return answer


def _make_used() -> Any:
    capsule = _tensor().__dlpack__()
    dlx.convert(capsule, to="dlx")
    return capsule


_kept: list[Any] = []  # memory of capsules of another version, which are never consumed


def _major_2() -> Any:
    managed = ffi.new("DLManagedTensorVersioned *")
    shape = ffi.new("int64_t[]", [4])
    data = ffi.new("float[4]")
    managed.version.major = 2
    managed.dl_tensor.data, managed.dl_tensor.ndim, managed.dl_tensor.shape = data, 1, shape
    managed.dl_tensor.device.device_type = 1
    managed.dl_tensor.dtype.code, managed.dl_tensor.dtype.bits, managed.dl_tensor.dtype.lanes = 2, 32, 1
    name = ctypes.create_string_buffer(b"dltensor_versioned")
    _kept.append((managed, shape, data, name))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return make(int(ffi.cast("intptr_t", managed)), ctypes.addressof(name), None)


ODD |= {
    "capsule, legacy": lambda: _tensor().__dlpack__(),
    "capsule, versioned": lambda: _tensor().__dlpack__(max_version=(1, 0)),
    "capsule, used": _make_used,
    "capsule, major version 2": _major_2,
    "producer": lambda: Producer(_tensor().__dlpack__),
    "producer, only stream=": OnlyStream,
    "producer, no keywords": WithoutKeywords,
    "producer, no device": WithoutDevice,
    "producer raises TypeError": lambda: Producer(_raiser(TypeError("no"))),
    "producer raises ValueError": lambda: Producer(_raiser(ValueError("no"))),
    "producer returns None": lambda: Producer(lambda **options: None),
    "bytes": make_unaligned(lambda: bytes(range(8))),
    "bytearray": make_unaligned(lambda: bytearray(range(8))),
    "array.array": make_unaligned(lambda: array.array("d", [1.5, 2.5])),
    "memoryview 2-d": make_unaligned(lambda: memoryview(bytearray(range(24))).cast("f", (2, 3))),
    "ctypes array": make_unaligned(lambda: (ctypes.c_float * 3)(1, 2, 3)),
    "mmap": lambda: _make_mmap(),
    "__array_interface__": lambda: _Interface(),
    "__array__": lambda: type("Old", (), {"__array__": lambda self, dtype=None, copy=None: None})(),
    "__cuda_array_interface__": lambda: _cuda(),
    "list of numbers": lambda: [1.0, 2.0],
    "float": lambda: 1.5,
    "str": lambda: "text",
    "None": lambda: None,
}


def _first_grid() -> list[int]:
    from matrix.measure import read_elements

    return read_elements(_tensor())


VALUES: dict[str, Callable[[], list[int]]] = {  # of sources that can be read only once
    **{name: _first_grid for name in ODD if name.startswith(("capsule", "producer"))},
    "__array_interface__": lambda: [0x3FF0000000000000, 0x4000000000000000, 0x4008000000000000, 0x4010000000000000],
}


def _make_mmap() -> Any:
    mapped = mmap.mmap(-1, 64)
    mapped[:8] = bytes(range(8))
    return mapped


def _cuda() -> Any:
    interface = {"version": 3, "shape": (3,), "typestr": "<f4", "data": (0x7F0000000000, False)}
    return type("OnDevice", (), {"__cuda_array_interface__": interface})()


class _Interface:
    """An object with the array interface over its own memory, at a multiple of 64 bytes."""

    def __init__(self) -> None:
        self.memory = ffi.new("double[12]")
        address = int(ffi.cast("intptr_t", self.memory))
        aligned = address + -address % 64
        ffi.cast("double *", aligned)[0:4] = [1, 2, 3, 4]
        data = (aligned, False)
        self.__array_interface__ = {"version": 3, "shape": (4,), "typestr": "<f8", "data": data}
