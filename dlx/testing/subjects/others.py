"""More libraries that the kit knows: those that are rarer, and dlx itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dlx._api import convert as api
from dlx._core.extension import ffi
from dlx._protocols.pointer import empty, from_pointer
from dlx.testing.catalog import library
from dlx.testing.checks.producer_export import VIEWS
from dlx.testing.subject import Subject
from dlx.testing.subjects.frameworks import BACKWARDS, PLAIN, VIEWS_OF_ARRAYS, through_numpy
from dlx.testing.support.producers import OTHERS


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
        dtypes=tuple(each for each in PLAIN if each != "bool"),
        make=make, from_dlpack=pa.Tensor.from_dlpack, takes_copy=True,
        readonly=lambda tensor: pa.Tensor.from_numpy(_frozen(tensor.to_numpy())),
        write=lambda tensor: tensor.to_numpy().fill(0),
        views=through_numpy(lambda tensor: tensor.to_numpy(), pa.Tensor.from_numpy),
        read=lambda tensor: tensor.to_numpy().tobytes(), describe=describe,
        words={
            "imports": "import numpy as np, pyarrow as pa", "take": "pa.Tensor.from_dlpack",
            "array": "pa.Tensor.from_numpy(np.arange(4, dtype='f4'))", "argument": "source",
            "readonly": "pa.Tensor.from_numpy(np.broadcast_to(np.float32(1), (4,)))",
            "write": "result.to_numpy().fill(0)",
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
        dtypes=tuple(each for each in PLAIN if each != "bool"),
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
            "array": "pa.array([0, 1, 2, 3], pa.float32())", "argument": "source",
            "readonly": "pa.array([0, 1, 2, 3], pa.float32())",
        },
    )  # fmt: skip


@library("mlx")
def _mlx() -> Subject:
    """Mlx on the host: what comes in is copied."""
    import numpy as np

    mx: Any = importlib.import_module("mlx.core")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        if dtype == "bfloat16":
            return mx.array(np.frombuffer(data, "uint16").reshape(shape)).view(mx.bfloat16)
        return mx.array(np.frombuffer(data, dtype).reshape(shape))

    def read(array: Any) -> bytes:
        plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        return bytes(np.array(plain).tobytes())

    return Subject(
        "mlx", package="mlx.core",
        dtypes=(*(each for each in PLAIN if each != "float64"), "bfloat16", "complex64"),
        make=make, from_dlpack=mx.from_dlpack, takes_capsules=True, takes_copy=True, read=read,
        views=VIEWS_OF_ARRAYS,
        words={
            "imports": "import mlx.core as mx", "take": "mx.from_dlpack", "array": "mx.arange(4.0)",
            "argument": "source.capsule()",
        },
    )  # fmt: skip


@library("array_api_strict")
def _array_api_strict() -> Subject:
    """The array API's own strict implementation, over numpy."""
    import numpy as np

    xp: Any = importlib.import_module("array_api_strict")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        return xp.asarray(np.frombuffer(bytearray(data), dtype).reshape(shape), copy=True)

    return Subject(
        "array_api_strict", package="array_api_strict",
        dtypes=(*(each for each in PLAIN if each != "float16"), "complex64", "complex128"),
        make=make, from_dlpack=xp.from_dlpack, takes_copy=True, views=VIEWS_OF_ARRAYS | BACKWARDS,
        write=lambda array: array.__setitem__(..., 0.0),
        read=lambda array: array._array.tobytes(),
        describe=lambda array: (array._array.ctypes.data, array.shape, array._array.dtype.name),
        words={
            "imports": "import array_api_strict as xp", "take": "xp.from_dlpack", "array": "xp.arange(4.0)",
            "argument": "source", "write": "result[...] = 0.0",
        },
    )  # fmt: skip


@library("dlx")
def _dlx() -> Subject:
    """dlx.Tensor, which is held to the same."""

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        tensor = empty(shape, dtype)
        if data:
            ffi.memmove(ffi.cast("char *", tensor.data_ptr), data, len(data))
        return tensor

    def view(name: str) -> Callable[[Any], Any]:
        shape, left = VIEWS[name]
        strides = {
            "transposed": (1, 6), "every other column": (6, 2), "backwards": (-6, 1), "one row": (1,),
            "one column": (6,), "no row": (6, 1), "one element": (6, 1), "one row for all": (0, 1),
            "overlapping": (1, 1), "no dimension": (),
        }[name]  # fmt: skip
        start = 4 * left[0] if left else 0
        return lambda t: from_pointer(t.data_ptr + start, shape, t.dtype, strides=strides, owner=t)

    def readonly(t: Any) -> Any:
        return from_pointer(t.data_ptr, t.shape, t.dtype, strides=t.strides, readonly=True, owner=t)

    def take(obj: Any, *, copy: bool | None = None) -> Any:
        return api.convert(obj, to="dlx", copy=copy)

    return Subject(
        "dlx", package="dlx", adapter="dlx", dtypes=OTHERS, make=make, from_dlpack=take, takes_capsules=True,
        takes_copy=True, views={name: view(name) for name in VIEWS}, readonly=readonly,
        words={
            "imports": "import dlx, functools", "take": "functools.partial(dlx.convert, to='dlx')",
            "array": "dlx.empty((4,), 'float32')", "argument": "source.capsule()",
            "readonly": "dlx.from_dlpack(bytes(16))", "write": "memoryview(result).cast('B')[0] ^= 1",
        },
    )  # fmt: skip
