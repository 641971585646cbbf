"""More libraries that the kit knows: those that are rarer, and dlx itself."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable
from typing import Any

from dlx._api import convert as api
from dlx._core.extension import ffi
from dlx._core.types import DType
from dlx._protocols.pointer import empty, from_pointer
from dlx.testing.checks.producer_export import VIEWS
from dlx.testing.subject import Subject, library
from dlx.testing.subjects.frameworks import BACKWARDS, PLAIN, VIEWS_OF_ARRAYS, through_numpy
from dlx.testing.support.producers import OTHERS, spread


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


@library("tensorflow")
def _tensorflow() -> Subject:
    """Tensorflow on the host; its function takes a capsule, which its users ask the producer for."""
    import numpy as np

    tf: Any = importlib.import_module("tensorflow")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        if dtype == "bfloat16":
            return tf.bitcast(tf.constant(np.frombuffer(data, "uint16").reshape(shape)), tf.bfloat16)
        return tf.constant(np.frombuffer(data, dtype).reshape(shape))

    def take(obj: Any) -> Any:
        return tf.experimental.dlpack.from_dlpack(obj.__dlpack__() if hasattr(obj, "__dlpack__") else obj)

    indexed = {name: view for name, view in VIEWS_OF_ARRAYS.items() if name != "transposed"}
    return Subject(
        "tensorflow", package="tensorflow", dtypes=(*PLAIN, "bfloat16", "complex64", "complex128"),
        make=make, from_dlpack=take, takes_capsules=True, immutable=True,
        views=indexed | {"transposed": tf.transpose},
        read=lambda tensor: tensor.numpy().tobytes(),
        unfit={
            "text": lambda: tf.constant(["a"]),
            "float8": lambda: tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2),
        },
        words={
            "imports": "import tensorflow as tf", "argument": "source.capsule()",
            "take": "(lambda x: tf.experimental.dlpack.from_dlpack(x.__dlpack__() if hasattr(x, '__dlpack__') else x))",
            "array": "tf.range(4, dtype=tf.float32)", "readonly": "tf.range(4, dtype=tf.float32)",
            "unfit": "x = tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2)",
        },
    )  # fmt: skip


@library("paddle")
def _paddle() -> Subject:
    """Paddle on the host. Its wide unsigned dtypes are made by no function of its own, and left out."""
    import numpy as np

    paddle: Any = importlib.import_module("paddle")
    storage = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        tensor = paddle.to_tensor(np.frombuffer(data, storage.get(dtype, dtype)).reshape(shape))
        return tensor.view(dtype) if dtype in storage else tensor

    def read(tensor: Any) -> bytes:
        fresh = tensor if tensor.is_contiguous() else tensor.contiguous()  # which knows no wide unsigned ones
        return ctypes.string_at(fresh.data_ptr(), fresh.size * fresh.element_size()) if fresh.size else b""

    def parameter() -> Any:
        tensor = paddle.ones([3])
        tensor.stop_gradient = False
        return tensor

    wide = ("uint16", "uint32", "uint64")
    return Subject(
        "paddle", package="paddle",
        dtypes=(*(each for each in PLAIN if each not in wide), *storage, "complex64", "complex128"),
        make=make, from_dlpack=paddle.from_dlpack, takes_capsules=True, takes_copy=True, ndims=(0, 9),
        views=VIEWS_OF_ARRAYS, write=lambda tensor: tensor.zero_(), read=read,
        describe=lambda t: (t.data_ptr() if t.size else 0, tuple(t.shape), str(t.dtype).removeprefix("paddle.")),
        unfit={
            "requires grad": parameter,
            "sparse": lambda: paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2]),
        },
        words={
            "imports": "import paddle", "take": "paddle.from_dlpack", "argument": "source.capsule()",
            "array": "paddle.arange(4, dtype='float32')", "write": "result.zero_()",
            "unfit": "x = paddle.ones([3])\nx.stop_gradient = False",
        },
    )  # fmt: skip


@library("warp")
def _warp() -> Subject:
    """Warp on the host: one to four dimensions."""
    import numpy as np

    wp: Any = importlib.import_module("warp")
    wp.config.quiet = True
    wp.init()

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        array = wp.array(np.frombuffer(data, "uint16" if dtype == "bfloat16" else dtype).reshape(shape), device="cpu")
        return array.view(wp.bfloat16) if dtype == "bfloat16" else array

    indexed = {name: view for name, view in VIEWS_OF_ARRAYS.items() if name != "transposed"}
    return Subject(
        "warp", package="warp", dtypes=(*PLAIN, "bfloat16"), make=make, from_dlpack=wp.from_dlpack,
        takes_capsules=True, ndims=(1, 4),
        views=indexed | BACKWARDS | {"transposed": lambda a: a.transpose()},
        write=lambda array: array.zero_(),
        read=lambda array: array.numpy().tobytes(),
        describe=lambda array: (array.ptr or 0, tuple(array.shape), array.dtype.__name__),
        unfit={
            "requires grad": lambda: wp.zeros(3, dtype=wp.float32, requires_grad=True, device="cpu"),
        },
        words={
            "imports": "import numpy as np, warp as wp\nwp.init()", "take": "wp.from_dlpack",
            "argument": "source.capsule()", "array": "wp.array(np.arange(4, dtype='f4'), device='cpu')",
            "write": "result.zero_()", "unfit": "x = wp.zeros(3, dtype=float, requires_grad=True, device='cpu')",
        },
    )  # fmt: skip


@library("onnxruntime")
def _onnxruntime() -> Subject:
    """ONNX Runtime's OrtValue, over memory of its own: what it makes of numpy's is numpy's."""
    import numpy as np

    ort: Any = importlib.import_module("onnxruntime")
    numbers = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19}  # of onnx.TensorProto, for what numpy has not
    words = {"float": "float32", "double": "float64", "float8e8m0": "float8_e8m0fnu", "float4e2m1": "float4_e2m1fn"}

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        if dtype in numbers:
            stored = np.frombuffer(bytearray(data), "uint16" if dtype == "bfloat16" else "uint8").reshape(shape)
            value = ort.OrtValue.ortvalue_from_shape_and_type(shape, numbers[dtype], "cpu")
        else:
            stored = np.frombuffer(bytearray(data), dtype).reshape(shape)
            value = ort.OrtValue.ortvalue_from_shape_and_type(shape, stored.dtype.type, "cpu")
        ctypes.memmove(value.data_ptr(), stored.tobytes(), stored.nbytes)
        return value

    def describe(value: Any) -> tuple[int, tuple[int, ...], str]:
        word = value.data_type()[len("tensor(") : -1]
        word = words.get(word, word.replace("float8e", "float8_e"))
        return value.data_ptr(), tuple(value.shape()), word

    def read(value: Any) -> bytes:
        data, bits = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), DType(describe(value)[2]).bits
        return data if bits % 8 == 0 else spread(data, describe(value)[2], math.prod(value.shape()))

    def sparse() -> Any:
        host = ort.OrtDevice.make("cpu", 0)
        made = ort.SparseTensor.sparse_coo_from_numpy(np.array([2]), np.ones(1, "f4"), np.zeros(1, "i8"), host)
        return ort.OrtValue.ort_value_from_sparse_tensor(made)

    return Subject(
        "onnxruntime", package="onnxruntime", dtypes=(*PLAIN, *numbers), make=make,
        from_dlpack=ort.OrtValue.from_dlpack, takes_capsules=True,
        read=read,
        write=lambda value: ctypes.memset(value.data_ptr(), 0, value.tensor_size_in_bytes()),
        describe=describe,
        unfit={"sparse": sparse},
        words={
            "imports": "import ctypes, numpy as np, onnxruntime as ort", "take": "ort.OrtValue.from_dlpack",
            "argument": "source.capsule()", "array": "ort.OrtValue.ortvalue_from_numpy(np.arange(4, dtype='f4'))",
            "write": "ctypes.memset(result.data_ptr(), 0, result.tensor_size_in_bytes())",
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
