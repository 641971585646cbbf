"""The libraries that the kit knows by itself, as data: each as a stranger, through ``__dlpack__`` and ``from_dlpack``.

Each function imports its library; nothing else does. Arrays are made and read by the library's own means, never by
DLPack, so that what is graded does not grade itself.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from dlx.testing.subject import Subject

__all__ = ["LIBRARIES", "find"]

LIBRARIES: dict[str, Callable[[], Subject]] = {}

_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_PLAIN = ("bool", *_INTS, "float16", "float32", "float64")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_MORE_FLOAT8 = ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")

# What can be done to a 4 by 6 array, where it is indexed as Python's are.
_VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: a.T,
    "every other column": lambda a: a[:, ::2],
    "one row": lambda a: a[1],
    "one column": lambda a: a[:, 2],
    "no row": lambda a: a[:0],
    "one element": lambda a: a[1:2, 3:4],
}
_BACKWARDS: dict[str, Callable[[Any], Any]] = {"backwards": lambda a: a[::-1]}


def library(name: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Enter a maker of a subject."""

    def enter(make: Callable[[], Subject]) -> Callable[[], Subject]:
        LIBRARIES[name] = make
        return make

    return enter


def find(spec: str) -> Subject:
    """Return a subject: a library known here, an adapter's name, or ``module:attribute``.

    Raises
    ------
    LookupError
        If there is no such thing.
    ImportError
        If it is not installed.
    """
    from dataclasses import replace

    if ":" in spec:
        module, _, attribute = spec.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
        found = found() if callable(found) and not isinstance(found, Subject) else found
        if not isinstance(found, Subject):
            raise LookupError(f"{spec} is {found!r}, not a dlx.testing.Subject")
        return replace(found, spec=spec)
    if spec in LIBRARIES:
        return replace(LIBRARIES[spec](), spec=spec)
    from dlx.errors import AdapterNotFoundError
    from dlx.registry import registry

    try:
        target = registry.target(spec)
    except AdapterNotFoundError as error:
        known = ", ".join(LIBRARIES)
        raise LookupError(f"{spec!r} is no adapter, and none of {known}. Give module:attribute.") from error
    return Subject(target.name, package=target.package, adapter=target.name, spec=spec)


@library("numpy")
def _numpy() -> Subject:
    """Numpy, whose own dtypes are all that it exports."""
    import numpy as np

    def readonly(array: Any) -> Any:
        view = array.view()
        view.flags.writeable = False
        return view

    def reshape(array: Any) -> None:
        array.shape = (array.size, 1)

    return Subject(
        "numpy", package="numpy", adapter="numpy",
        dtypes=(*_PLAIN, "complex64", "complex128"),
        make=lambda data, dtype, shape: np.frombuffer(bytearray(data), dtype).reshape(shape),
        from_dlpack=np.from_dlpack, takes_copy=True,
        views=_VIEWS | _BACKWARDS | {
            "one row for all": lambda a: np.broadcast_to(a[0], (4, 6)),
            "overlapping": lambda a: np.lib.stride_tricks.as_strided(a, (4, 3), (4, 4)),
            "no dimension": lambda a: a[1, 2, ...],
        },
        readonly=readonly, writable=lambda a: bool(a.flags.writeable),
        read=lambda a: a.tobytes(), describe=lambda a: (a.ctypes.data, a.shape, a.dtype.name),
        unfit={
            "masked": lambda: np.ma.masked_array([1.0, 2.0], [False, True]),
            "byte-swapped": lambda: np.zeros(3, ">f4"),
            "object": lambda: np.array([None, 1]),
            "text": lambda: np.array(["a"]),
            "datetime64": lambda: np.zeros(3, "M8[s]"),
            "structured": lambda: np.zeros(4, "i4,f4"),
            "odd strides": lambda: np.zeros(4, "i1,f4")["f1"],
            "longdouble": lambda: np.zeros(3, np.longdouble),
        },
        reshape=reshape,
        words={"imports": "import numpy as np", "take": "np.from_dlpack", "array": "np.arange(4, dtype='f4')"},
    )  # fmt: skip


@library("torch")
def _torch() -> Subject:
    """Torch on the host."""
    import torch

    def name(dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        kind = getattr(torch, dtype)
        if not data:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(kind).reshape(shape)

    def read(tensor: Any) -> bytes:
        fresh = tensor.resolve_conj().resolve_neg().contiguous().clone()
        return ctypes.string_at(fresh.data_ptr(), fresh.nbytes) if fresh.nbytes else b""

    def fake() -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.zeros(3)

    def emptied() -> Any:
        tensor = torch.zeros(6)
        tensor.untyped_storage().resize_(0)
        return tensor

    def conj() -> tuple[Any, bytes]:
        tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
        return tensor, read(tensor)

    def neg() -> tuple[Any, bytes]:
        tensor = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
        return tensor, read(tensor)

    floats = tuple(each for each in ("bfloat16", *_FLOAT8) if hasattr(torch, each))
    return Subject(
        "torch", package="torch", adapter="torch",
        dtypes=(*_PLAIN, *floats, "complex32", "complex64", "complex128"),
        make=make, from_dlpack=torch.from_dlpack, takes_capsules=True, takes_copy=True,
        views=_VIEWS | {
            "one row for all": lambda a: a[0].expand(4, 6),
            "overlapping": lambda a: a.as_strided((4, 3), (1, 1)),
            "no dimension": lambda a: a[1, 2],
        },
        write=lambda tensor: tensor.zero_(),
        read=read, describe=lambda t: (t.data_ptr(), tuple(t.shape), name(t.dtype)),
        unfit={
            "requires grad": lambda: torch.ones(3, requires_grad=True),
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.ones(3, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "fake": fake,
            "storage cut to nothing": emptied,
            "int4": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.int4),
        },
        pending={"conj": conj, "neg": neg},
        reshape=lambda tensor: tensor.t_(),
        words={"imports": "import torch", "take": "torch.from_dlpack", "array": "torch.arange(4.0)"},
    )  # fmt: skip


@library("jax")
def _jax() -> Subject:
    """Jax as it is configured here; without x64 it has no 64-bit dtypes."""
    import numpy as np

    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def kind(dtype: str) -> Any:
        if hasattr(np, dtype if dtype != "bool" else "bool_"):
            return np.dtype(dtype)
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))

    narrow = () if jax.config.jax_enable_x64 else ("int64", "uint64", "float64", "complex128")
    kinds = (*_PLAIN, "bfloat16", *_FLOAT8, *_MORE_FLOAT8, "complex64", "complex128")
    return Subject(
        "jax", package="jax", adapter="jax",
        dtypes=tuple(each for each in kinds if each not in narrow),
        make=lambda data, dtype, shape: jnp.array(np.frombuffer(data, kind(dtype)).reshape(shape)).block_until_ready(),
        from_dlpack=jnp.from_dlpack, takes_copy=True,
        views={key: view for key, view in _VIEWS.items() if key != "transposed"} | {"no dimension": lambda a: a[1, 2]},
        immutable=True,
        read=lambda a: np.asarray(a).tobytes(),
        describe=lambda a: (a.unsafe_buffer_pointer(), a.shape, a.dtype.name),
        unfit={"random key": lambda: jax.random.key(0)},
        words={"imports": "import jax.numpy as jnp", "take": "jnp.from_dlpack", "array": "jnp.arange(4.0)"},
    )  # fmt: skip


@library("tvm_ffi")
def _tvm_ffi() -> Subject:
    """Tvm-ffi's tensor, which is made by DLPack alone: numpy's producer stands behind its arrays."""
    import numpy as np

    tvm_ffi: Any = importlib.import_module("tvm_ffi")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        return tvm_ffi.from_dlpack(np.frombuffer(bytearray(data), dtype).reshape(shape))

    return Subject(
        "tvm_ffi", package="tvm_ffi", adapter="tvm_ffi",
        dtypes=_PLAIN, make=make, from_dlpack=tvm_ffi.from_dlpack, takes_capsules=True,
        words={
            "imports": "import numpy as np, tvm_ffi", "take": "tvm_ffi.from_dlpack",
            "array": "tvm_ffi.from_dlpack(np.arange(4, dtype='f4'))",
        },
    )  # fmt: skip


@library("pyarrow")
def _pyarrow() -> Subject:
    """Pyarrow's Tensor, of any rank."""
    import numpy as np

    pa: Any = importlib.import_module("pyarrow")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        return pa.Tensor.from_numpy(np.frombuffer(bytearray(data), dtype).reshape(shape))

    def describe(tensor: Any) -> tuple[int, tuple[int, ...], str]:
        view = tensor.to_numpy()
        return view.ctypes.data, tuple(tensor.shape), view.dtype.name

    return Subject(
        "pyarrow", package="pyarrow", adapter="pyarrow",
        dtypes=tuple(each for each in _PLAIN if each != "bool"),
        make=make, from_dlpack=pa.Tensor.from_dlpack, takes_copy=True,
        readonly=lambda tensor: pa.Tensor.from_numpy(_frozen(tensor.to_numpy())),
        writable=lambda tensor: bool(tensor.is_mutable),
        read=lambda tensor: tensor.to_numpy().tobytes(), describe=describe,
        words={
            "imports": "import numpy as np, pyarrow as pa", "take": "pa.Tensor.from_dlpack",
            "array": "pa.Tensor.from_numpy(np.arange(4, dtype='f4'))",
        },
    )  # fmt: skip


def _frozen(array: Any) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@library("pyarrow.Array")
def _pyarrow_array() -> Subject:
    """Pyarrow's Array: one dimension, and it never changes."""
    pa: Any = importlib.import_module("pyarrow")

    def kind(dtype: str) -> Any:
        return getattr(pa, dtype)()

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        return pa.Array.from_buffers(kind(dtype), shape[0], [None, pa.py_buffer(bytes(data))])

    def read(array: Any) -> bytes:
        size = array.type.bit_width // 8
        return bytes(array.buffers()[1])[array.offset * size : (array.offset + len(array)) * size]

    def describe(array: Any) -> tuple[int, tuple[int, ...], str]:
        size = array.type.bit_width // 8
        words = {"halffloat": "float16", "float": "float32", "double": "float64"}
        address = array.buffers()[1].address + array.offset * size
        return address, (len(array),), words.get(str(array.type), str(array.type))

    return Subject(
        "pyarrow.Array", package="pyarrow",
        dtypes=tuple(each for each in _PLAIN if each != "bool"),
        make=make, from_dlpack=pa.Array.from_dlpack, takes_copy=True, ndims=(1, 1),
        immutable=True, read=read, describe=describe,
        unfit={
            "a null": lambda: pa.array([1.0, None]),
            "bool": lambda: pa.array([True, False]),
            "text": lambda: pa.array(["a"]),
            "timestamp": lambda: pa.array([1], pa.timestamp("s")),
        },
        words={
            "imports": "import pyarrow as pa", "take": "pa.Array.from_dlpack",
            "array": "pa.array([0, 1, 2, 3], pa.float32())",
        },
    )  # fmt: skip
