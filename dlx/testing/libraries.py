"""The libraries that the kit knows by name, as data; each is graded through ``__dlpack__`` and ``from_dlpack`` only.

Only these functions import the libraries. Arrays are created and read with the library's own functions, not with
DLPack: otherwise a library would grade itself.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

from dlx._api import convert as api
from dlx._core.extension import ffi
from dlx._core.types import DType
from dlx._protocols.pointer import empty, from_pointer
from dlx.testing.capsules import OTHERS, VIEWS, spread
from dlx.testing.subject import Subject, library

_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_PLAIN = ("bool", *_INTS, "float16", "float32", "float64")
_FLOAT8 = tuple(name for name in OTHERS if name.startswith("float8"))
_COMPLEX = ("complex64", "complex128")

# Views of a 4 by 6 array with Python's indexing.
_VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: a.T,
    "every other column": lambda a: a[:, ::2],
    "one row": lambda a: a[1],
    "one column": lambda a: a[:, 2],
    "no row": lambda a: a[:0],
    "one element": lambda a: a[1:2, 3:4],
}
_BACKWARDS: dict[str, Callable[[Any], Any]] = {"backwards": lambda a: a[::-1]}


def _without(*names: str) -> tuple[str, ...]:
    return tuple(each for each in _PLAIN if each not in names)


def _host_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a numpy array with these bytes, as integers if numpy has no such dtype."""
    import numpy as np

    stored = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(dtype, dtype)
    return np.frombuffer(bytearray(data), stored).reshape(shape)


def _through_numpy(out: Callable[[Any], Any], back: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """Return numpy's views for a library without views."""

    def through(view: Callable[[Any], Any], array: Any) -> Any:
        return back(view(out(array)))

    return {key: functools.partial(through, view) for key, view in (_VIEWS | _BACKWARDS).items()}


@library("numpy")
def _numpy() -> Subject:
    import numpy as np

    return Subject(
        "numpy", package="numpy", adapter="numpy",
        dtypes=(*_PLAIN, *_COMPLEX),  # all that it exports
        make=_host_array, from_dlpack=np.from_dlpack, takes_copy=True,
        views=_VIEWS | _BACKWARDS | {
            "one row for all": lambda a: np.broadcast_to(a[0], (4, 6)),
            "overlapping": lambda a: np.lib.stride_tricks.as_strided(a, (4, 3), (4, 4)),
            "no dimension": lambda a: a[1, 2, ...],
        },
        readonly=lambda a: np.broadcast_to(a, a.shape), writable=lambda a: bool(a.flags.writeable),
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
        reshape=lambda a: setattr(a, "shape", (a.size, 1)),
        words={
            "imports": "import numpy as np", "take": "np.from_dlpack", "array": "np.arange(4, dtype='f4')",
            "grid": "np.zeros((4, 6), 'f4')", "reshape": "x.shape = (24, 1)", "write": "result.fill(0)",
            "unfit": "x = np.ma.masked_array([1.0, 2.0], [False, True])",
            "readonly": "np.broadcast_to(np.float32(1), (4,))",
        },
    )  # fmt: skip


@library("torch")
def _torch() -> Subject:
    import torch

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        kind = getattr(torch, dtype)
        if not data:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(kind).reshape(shape)

    def read(tensor: Any) -> bytes:
        fresh = tensor.resolve_conj().resolve_neg().contiguous().clone()
        return ctypes.string_at(fresh.data_ptr(), fresh.nbytes) if fresh.nbytes else b""

    def describe(tensor: Any) -> tuple[int, tuple[int, ...], str]:
        dtype = str(tensor.dtype).removeprefix("torch.").replace("_x2", "x2")  # two lanes
        return tensor.data_ptr(), tuple(tensor.shape), dtype

    def fake() -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.zeros(3)

    def cut_storage() -> Any:
        tensor = torch.zeros(6)
        tensor.untyped_storage().resize_(0)
        return tensor

    def conj() -> Any:
        return torch.tensor([1 + 2j, 3 - 1j]).conj()

    floats = tuple(each for each in ("bfloat16", *_FLOAT8) if hasattr(torch, each))
    return Subject(
        "torch", package="torch", adapter="torch",
        dtypes=(*_PLAIN, *floats, "complex32", *_COMPLEX),
        make=make, from_dlpack=torch.from_dlpack, takes_capsules=True, takes_copy=True,
        views=_VIEWS | {
            "one row for all": lambda a: a[0].expand(4, 6),
            "overlapping": lambda a: a.as_strided((4, 3), (1, 1)),
            "no dimension": lambda a: a[1, 2],
        },
        write=lambda tensor: tensor.zero_(), read=read, describe=describe,
        unfit={
            "requires grad": lambda: torch.ones(3, requires_grad=True),
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.ones(3, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "fake": fake,
            "storage cut to nothing": cut_storage,
            "int4": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.int4),
        },
        pending={"conj": lambda: (conj(), read(conj())), "neg": lambda: (conj().imag, read(conj().imag))},
        reshape=lambda tensor: tensor.t_(),
        words={
            "imports": "import torch", "take": "torch.from_dlpack", "array": "torch.arange(4.0)",
            "grid": "torch.zeros(4, 6)", "reshape": "x.t_()",
            "unfit": "x = torch.zeros(3, dtype=torch.uint8).view(torch.int4)", "write": "result.zero_()",
            "pending": "torch.tensor([1 + 2j]).conj().imag", "pending_bytes": "struct.pack('f', -2.0)",
        },
    )  # fmt: skip


@library("jax")
def _jax() -> Subject:
    import numpy as np

    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        if hasattr(np, dtype if dtype != "bool" else "bool_"):
            kind = np.dtype(dtype)
        else:
            kind = np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype))
        return jnp.array(np.frombuffer(data, kind).reshape(shape)).block_until_ready()

    without = () if jax.config.jax_enable_x64 else ("int64", "uint64", "float64", "complex128")
    return Subject(
        "jax", package="jax", adapter="jax",
        dtypes=tuple(each for each in (*_PLAIN, "bfloat16", *_FLOAT8, *_COMPLEX) if each not in without),
        make=make, from_dlpack=jnp.from_dlpack, takes_copy=True,
        views=_VIEWS | {"no dimension": lambda a: a[1, 2]},
        immutable=True,
        read=lambda a: np.asarray(a).tobytes(),
        describe=lambda a: (a.unsafe_buffer_pointer(), a.shape, a.dtype.name),
        unfit={"random key": lambda: jax.random.key(0)},
        words={
            "imports": "import jax.numpy as jnp", "take": "jnp.from_dlpack", "array": "jnp.arange(4.0)",
            "readonly": "jnp.arange(4.0)",
        },
    )  # fmt: skip


@library("tvm_ffi")
def _tvm_ffi() -> Subject:
    import numpy as np

    tvm_ffi: Any = importlib.import_module("tvm_ffi")

    return Subject(
        "tvm_ffi", package="tvm_ffi", adapter="tvm_ffi", dtypes=_PLAIN,
        make=lambda *args: tvm_ffi.from_dlpack(_host_array(*args)),  # tvm_ffi imports through DLPack only
        from_dlpack=tvm_ffi.from_dlpack, takes_capsules=True,
        views=_through_numpy(np.from_dlpack, tvm_ffi.from_dlpack),
        words={
            "imports": "import numpy as np, tvm_ffi", "take": "tvm_ffi.from_dlpack",
            "array": "tvm_ffi.from_dlpack(np.arange(4, dtype='f4'))", "write": "np.from_dlpack(result)[...] = 0",
        },
    )  # fmt: skip


@library("pyarrow")
def _pyarrow() -> Subject:
    import numpy as np

    pa: Any = importlib.import_module("pyarrow")

    def describe(tensor: Any) -> tuple[int, tuple[int, ...], str]:
        view = tensor.to_numpy()
        return view.ctypes.data, tuple(tensor.shape), view.dtype.name

    return Subject(
        "pyarrow", package="pyarrow", adapter="pyarrow", dtypes=_without("bool"),
        make=lambda *args: pa.Tensor.from_numpy(_host_array(*args)),
        from_dlpack=pa.Tensor.from_dlpack, takes_copy=True,
        readonly=lambda tensor: pa.Tensor.from_numpy(np.broadcast_to(tensor.to_numpy(), tensor.shape)),
        write=lambda tensor: tensor.to_numpy().fill(0),
        views=_through_numpy(lambda tensor: tensor.to_numpy(), pa.Tensor.from_numpy),
        read=lambda tensor: tensor.to_numpy().tobytes(), describe=describe,
        words={
            "imports": "import numpy as np, pyarrow as pa", "take": "pa.Tensor.from_dlpack",
            "array": "pa.Tensor.from_numpy(np.arange(4, dtype='f4'))",
            "readonly": "pa.Tensor.from_numpy(np.broadcast_to(np.float32(1), (4,)))",
            "write": "result.to_numpy().fill(0)",
        },
    )  # fmt: skip


@library("pyarrow.Array")
def _pyarrow_array() -> Subject:
    pa: Any = importlib.import_module("pyarrow")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        return pa.Array.from_buffers(getattr(pa, dtype)(), shape[0], [None, pa.py_buffer(bytes(data))])

    def read(array: Any) -> bytes:
        size = array.type.bit_width // 8
        return bytes(array.buffers()[1])[array.offset * size : (array.offset + len(array)) * size]

    def describe(array: Any) -> tuple[int, tuple[int, ...], str]:
        words = {"halffloat": "float16", "float": "float32", "double": "float64"}
        address = array.buffers()[1].address + array.offset * (array.type.bit_width // 8)
        return address, (len(array),), words.get(str(array.type), str(array.type))

    return Subject(
        "pyarrow.Array", package="pyarrow", dtypes=_without("bool"),
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
            "array": "pa.array([0, 1, 2, 3], pa.float32())", "readonly": "pa.array([0, 1, 2, 3], pa.float32())",
        },
    )  # fmt: skip


@library("mlx")
def _mlx() -> Subject:
    import numpy as np

    mx: Any = importlib.import_module("mlx.core")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        array = mx.array(_host_array(data, dtype, shape))
        return array.view(mx.bfloat16) if dtype == "bfloat16" else array

    def read(array: Any) -> bytes:
        exact = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        return bytes(np.array(exact).tobytes())

    return Subject(
        "mlx", package="mlx.core", dtypes=(*_without("float64"), "bfloat16", "complex64"),
        make=make, from_dlpack=mx.from_dlpack, takes_capsules=True, takes_copy=True, read=read, views=_VIEWS,
        words={"imports": "import mlx.core as mx", "take": "mx.from_dlpack", "array": "mx.arange(4.0)"},
    )  # fmt: skip


@library("tensorflow")
def _tensorflow() -> Subject:
    tf: Any = importlib.import_module("tensorflow")

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        tensor = tf.constant(_host_array(data, dtype, shape))
        return tf.bitcast(tensor, tf.bfloat16) if dtype == "bfloat16" else tensor

    def take(obj: Any) -> Any:  # the function takes a capsule; its users call `__dlpack__`
        return tf.experimental.dlpack.from_dlpack(obj.__dlpack__() if hasattr(obj, "__dlpack__") else obj)

    return Subject(
        "tensorflow", package="tensorflow", dtypes=(*_PLAIN, "bfloat16", *_COMPLEX),
        make=make, from_dlpack=take, takes_capsules=True, immutable=True,
        views=_VIEWS | {"transposed": tf.transpose},
        read=lambda tensor: tensor.numpy().tobytes(),
        unfit={
            "text": lambda: tf.constant(["a"]),
            "float8": lambda: tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2),
        },
        words={
            "imports": "import tensorflow as tf",
            "take": "(lambda x: tf.experimental.dlpack.from_dlpack(x.__dlpack__() if hasattr(x, '__dlpack__') else x))",
            "array": "tf.range(4, dtype=tf.float32)", "readonly": "tf.range(4, dtype=tf.float32)",
            "unfit": "x = tf.cast(tf.ones(3), tf.dtypes.experimental.float8_e5m2)",
        },
    )  # fmt: skip


@library("paddle")
def _paddle() -> Subject:
    paddle: Any = importlib.import_module("paddle")
    storage = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        tensor = paddle.to_tensor(_host_array(data, storage.get(dtype, dtype), shape))
        return tensor.view(dtype) if dtype in storage else tensor

    def read(tensor: Any) -> bytes:
        fresh = tensor if tensor.is_contiguous() else tensor.contiguous()  # not for wide unsigned dtypes
        return ctypes.string_at(fresh.data_ptr(), fresh.size * fresh.element_size()) if fresh.size else b""

    def parameter() -> Any:
        tensor = paddle.ones([3])
        tensor.stop_gradient = False
        return tensor

    return Subject(
        "paddle", package="paddle",
        dtypes=(*_without("uint16", "uint32", "uint64"), *storage, *_COMPLEX),  # paddle's functions cannot create them
        make=make, from_dlpack=paddle.from_dlpack, takes_capsules=True, takes_copy=True, ndims=(0, 9),
        views=_VIEWS, write=lambda tensor: tensor.zero_(), read=read,
        describe=lambda t: (t.data_ptr() if t.size else 0, tuple(t.shape), str(t.dtype).removeprefix("paddle.")),
        unfit={
            "requires grad": parameter,
            "sparse": lambda: paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2]),
        },
        words={
            "imports": "import paddle", "take": "paddle.from_dlpack", "write": "result.zero_()",
            "array": "paddle.arange(4, dtype='float32')", "unfit": "x = paddle.ones([3])\nx.stop_gradient = False",
        },
    )  # fmt: skip


@library("warp")
def _warp() -> Subject:
    wp: Any = importlib.import_module("warp")
    wp.config.quiet = True
    wp.init()

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        array = wp.array(_host_array(data, dtype, shape), device="cpu")
        return array.view(wp.bfloat16) if dtype == "bfloat16" else array

    return Subject(
        "warp", package="warp", dtypes=(*_PLAIN, "bfloat16"), make=make, from_dlpack=wp.from_dlpack,
        takes_capsules=True, ndims=(1, 4),
        views=_VIEWS | _BACKWARDS | {"transposed": lambda a: a.transpose()},
        write=lambda array: array.zero_(),
        read=lambda array: array.numpy().tobytes(),
        describe=lambda array: (array.ptr or 0, tuple(array.shape), array.dtype.__name__),
        unfit={"requires grad": lambda: wp.zeros(3, dtype=wp.float32, requires_grad=True, device="cpu")},
        words={
            "imports": "import numpy as np, warp as wp\nwp.init()", "take": "wp.from_dlpack",
            "array": "wp.array(np.arange(4, dtype='f4'), device='cpu')", "write": "result.zero_()",
            "unfit": "x = wp.zeros(3, dtype=float, requires_grad=True, device='cpu')",
        },
    )  # fmt: skip


@library("onnxruntime")
def _onnxruntime() -> Subject:
    import numpy as np

    ort: Any = importlib.import_module("onnxruntime")
    numbers = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19}  # in onnx.TensorProto; numpy lacks them
    words = {"float": "float32", "double": "float64", "float8e8m0": "float8_e8m0fnu", "float4e2m1": "float4_e2m1fn"}

    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        stored = _host_array(data, dtype, shape)
        kind = numbers.get(dtype, stored.dtype.type)
        value = ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, "cpu")  # from_numpy would share the memory
        ctypes.memmove(value.data_ptr(), stored.tobytes(), stored.nbytes)
        return value

    def describe(value: Any) -> tuple[int, tuple[int, ...], str]:
        word = value.data_type()[len("tensor(") : -1]
        word = words.get(word, word.replace("float8e", "float8_e"))
        return value.data_ptr(), tuple(value.shape()), word

    def read(value: Any) -> bytes:
        data, dtype = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), describe(value)[2]
        return data if DType(dtype).bits % 8 == 0 else spread(data, dtype, math.prod(value.shape()))

    def sparse() -> Any:
        host = ort.OrtDevice.make("cpu", 0)
        made = ort.SparseTensor.sparse_coo_from_numpy(np.array([2]), np.ones(1, "f4"), np.zeros(1, "i8"), host)
        return ort.OrtValue.ort_value_from_sparse_tensor(made)

    return Subject(
        "onnxruntime", package="onnxruntime", dtypes=(*_PLAIN, *numbers), make=make,
        from_dlpack=ort.OrtValue.from_dlpack, takes_capsules=True, read=read, describe=describe,
        write=lambda value: ctypes.memset(value.data_ptr(), 0, value.tensor_size_in_bytes()),
        unfit={"sparse": sparse},
        words={
            "imports": "import ctypes, numpy as np, onnxruntime as ort", "take": "ort.OrtValue.from_dlpack",
            "array": "ort.OrtValue.ortvalue_from_numpy(np.arange(4, dtype='f4'))",
            "write": "ctypes.memset(result.data_ptr(), 0, result.tensor_size_in_bytes())",
        },
    )  # fmt: skip


@library("array_api_strict")
def _array_api_strict() -> Subject:
    xp: Any = importlib.import_module("array_api_strict")

    return Subject(
        "array_api_strict", package="array_api_strict", dtypes=(*_without("float16"), *_COMPLEX),
        make=lambda *args: xp.asarray(_host_array(*args), copy=True),
        from_dlpack=xp.from_dlpack, takes_copy=True, views=_VIEWS | _BACKWARDS,
        write=lambda array: array.__setitem__(..., 0.0),
        read=lambda array: array._array.tobytes(),
        describe=lambda array: (array._array.ctypes.data, array.shape, array._array.dtype.name),
        words={
            "imports": "import array_api_strict as xp", "take": "xp.from_dlpack", "array": "xp.arange(4.0)",
            "write": "result[...] = 0.0",
        },
    )  # fmt: skip


@library("dlx")
def _dlx() -> Subject:
    def make(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
        tensor = empty(shape, dtype)
        if data:
            ffi.memmove(ffi.cast("char *", tensor.data_ptr), data, len(data))
        return tensor

    def view(name: str, t: Any) -> Any:
        shape, strides, first = VIEWS[name]
        return from_pointer(t.data_ptr + 4 * first, shape, t.dtype, strides=strides, owner=t)

    def readonly(t: Any) -> Any:
        return from_pointer(t.data_ptr, t.shape, t.dtype, strides=t.strides, readonly=True, owner=t)

    return Subject(
        "dlx", package="dlx", adapter="dlx", dtypes=OTHERS, make=make,
        from_dlpack=lambda obj, *, copy=None: api.convert(obj, to="dlx", copy=copy),
        takes_capsules=True, takes_copy=True, readonly=readonly,
        views={name: functools.partial(view, name) for name in VIEWS},
        words={
            "imports": "import dlx, functools", "take": "functools.partial(dlx.convert, to='dlx')",
            "array": "dlx.empty((4,), 'float32')", "readonly": "dlx.from_dlpack(bytes(16))",
            "write": "memoryview(result).cast('B')[0] ^= 1",
        },
    )  # fmt: skip
