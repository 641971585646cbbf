"""Libraries that the kit knows by itself, as data, each through ``__dlpack__`` and ``from_dlpack`` only.

Each function imports its library; nothing else does. Arrays are made and read by the library's own means, never by
DLPack, so that what is graded does not grade itself.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from dlx.testing.subject import Subject, library
from dlx.testing.support.producers import OTHERS

__all__ = ["BACKWARDS", "PLAIN", "VIEWS_OF_ARRAYS", "through_numpy"]

_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
PLAIN = ("bool", *_INTS, "float16", "float32", "float64")
_FLOAT8 = tuple(name for name in OTHERS if name.startswith("float8"))

# What can be done to a 4 by 6 array, where it is indexed as Python's are.
VIEWS_OF_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: a.T,
    "every other column": lambda a: a[:, ::2],
    "one row": lambda a: a[1],
    "one column": lambda a: a[:, 2],
    "no row": lambda a: a[:0],
    "one element": lambda a: a[1:2, 3:4],
}
BACKWARDS: dict[str, Callable[[Any], Any]] = {"backwards": lambda a: a[::-1]}


def through_numpy(out: Callable[[Any], Any], back: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """Return the views of a library that has none of its own: numpy's, of its arrays."""

    def through(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda array: back(view(out(array)))

    return {key: through(view) for key, view in (VIEWS_OF_ARRAYS | BACKWARDS).items()}


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
        dtypes=(*PLAIN, "complex64", "complex128"),
        make=lambda data, dtype, shape: np.frombuffer(bytearray(data), dtype).reshape(shape),
        from_dlpack=np.from_dlpack, takes_copy=True,
        views=VIEWS_OF_ARRAYS | BACKWARDS | {
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
        words={
            "imports": "import numpy as np", "take": "np.from_dlpack", "array": "np.arange(4, dtype='f4')",
            "grid": "np.zeros((4, 6), 'f4')", "reshape": "x.shape = (24, 1)", "argument": "source",
            "unfit": "x = np.ma.masked_array([1.0, 2.0], [False, True])",
            "readonly": "np.broadcast_to(np.float32(1), (4,))", "write": "result.fill(0)",
        },
    )  # fmt: skip


@library("torch")
def _torch() -> Subject:
    """Torch on the host."""
    import torch

    def name(dtype: Any) -> str:
        return str(dtype).removeprefix("torch.").replace("_x2", "x2")  # two lanes

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
        dtypes=(*PLAIN, *floats, "complex32", "complex64", "complex128"),
        make=make, from_dlpack=torch.from_dlpack, takes_capsules=True, takes_copy=True,
        views=VIEWS_OF_ARRAYS | {
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
        words={
            "imports": "import torch", "take": "torch.from_dlpack", "array": "torch.arange(4.0)",
            "grid": "torch.zeros(4, 6)", "reshape": "x.t_()", "argument": "source.capsule()",
            "unfit": "x = torch.zeros(3, dtype=torch.uint8).view(torch.int4)", "write": "result.zero_()",
            "pending": "torch.tensor([1 + 2j]).conj().imag", "pending_bytes": "struct.pack('f', -2.0)",
        },
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
    kinds = (*PLAIN, "bfloat16", *_FLOAT8, "complex64", "complex128")
    return Subject(
        "jax", package="jax", adapter="jax",
        dtypes=tuple(each for each in kinds if each not in narrow),
        make=lambda data, dtype, shape: jnp.array(np.frombuffer(data, kind(dtype)).reshape(shape)).block_until_ready(),
        from_dlpack=jnp.from_dlpack, takes_copy=True,
        views=VIEWS_OF_ARRAYS | {"no dimension": lambda a: a[1, 2]},
        immutable=True,
        read=lambda a: np.asarray(a).tobytes(),
        describe=lambda a: (a.unsafe_buffer_pointer(), a.shape, a.dtype.name),
        unfit={"random key": lambda: jax.random.key(0)},
        words={
            "imports": "import jax.numpy as jnp", "take": "jnp.from_dlpack", "array": "jnp.arange(4.0)",
            "readonly": "jnp.arange(4.0)", "argument": "source",
        },
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
        dtypes=PLAIN, make=make, from_dlpack=tvm_ffi.from_dlpack, takes_capsules=True,
        views=through_numpy(np.from_dlpack, tvm_ffi.from_dlpack),
        words={
            "imports": "import numpy as np, tvm_ffi", "take": "tvm_ffi.from_dlpack",
            "array": "tvm_ffi.from_dlpack(np.arange(4, dtype='f4'))", "argument": "source.capsule()",
            "write": "np.from_dlpack(result)[...] = 0",
        },
    )  # fmt: skip
