"""pyarrow for dlx: Array, ChunkedArray, Tensor.

Versions: 17 and later. Devices: the host. Dtypes: (u)int8 to 64, float16 to 64; bool out of pyarrow only.
Out of pyarrow. Shared: primitive arrays and slices of them, one chunk, fixed-size lists and fixed-shape tensors of such
(as dimensions), Tensors of any strides; arrays are always read-only, Tensors as they say. Copied: several chunks
(combined), bools (unpacked: pyarrow keeps eight in a byte). Refused: nulls, with their count; dates, times, decimals,
text, dictionaries, lists of varying length, structures, unions and what else is not one number per value.
Into pyarrow. One dimension becomes an Array, any other number a Tensor; `to=pyarrow.Array` or `to=pyarrow.Tensor` asks
for one of them. Arrays are compact and never written to: sharing one is safe as long as no other code writes to it.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import dlx
from dlx.adapter import (
    Adapter,
    ArrayInfo,
    Blocker,
    Capabilities,
    Description,
    Device,
    DType,
    DTypes,
    FastPath,
    KnownIssue,
    Layout,
    Tensor,
    over_memory,
    type_name,
)
from dlx.errors import AdapterNotFoundError, DeviceError, DTypeError, LayoutError

HOST = Device("cpu")


class _Fresh(NamedTuple):
    """Numbers in memory of their own: bools unpacked to bytes, or chunks combined."""

    flat: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType


class _DTypes(DTypes):
    def native(self, attribute: str) -> Any:
        return getattr(sys.modules["pyarrow"], attribute)()

    def from_native(self, native_dtype: Any) -> DType | None:
        try:
            return super().from_native(native_dtype)
        except TypeError:  # an extension type of a user's need not be hashable
            return None


DTYPES = _DTypes(
    "pyarrow",
    {
        "bool": "bool_",
        **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
        **{f"float{bits}": f"float{bits}" for bits in (16, 32, 64)},
    },
)


_NUMBERS = frozenset(DTYPES.names) - {"bool"}
_REFUSALS = {
    "bool": (
        "pyarrow packs bools eight to a byte, and DLPack has a byte for each",
        "View them as uint8 first, or have pyarrow.array(...) pack an array of numpy.",
    )
}
_ARRAYS = Capabilities(dtypes=_NUMBERS, min_ndim=1, max_ndim=1, keeps_readonly=True, refusals=_REFUSALS)
_TENSORS = Capabilities(
    dtypes=_NUMBERS,
    layouts=Layout.ZERO | Layout.GAPS | Layout.PERMUTED,
    max_ndim=64,
    keeps_readonly=True,
    refusals=_REFUSALS,
)
_COMPACT = Capabilities(dtypes=_NUMBERS, min_ndim=1, max_ndim=64, keeps_readonly=True)  # taken by both

# Classes of arrays whose values are numbers, and the dtypes.
_PRIMITIVE = {
    **{f"pyarrow.{sign}Int{bits}Array": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{
        f"pyarrow.{name}Array": dtype
        for name, dtype in (("HalfFloat", "float16"), ("Float", "float32"), ("Double", "float64"))
    },
}


def _export(obj: Any) -> Tensor | None:
    """Return the tensor of an array of numbers in host memory without nulls, known by its class."""
    buffer = obj.buffers()[1]
    if obj.null_count or buffer is None or not buffer.is_cpu:
        return None
    kind: Any = type(obj)
    dtype, itemsize = _dtype_of(kind)
    length = len(obj)
    address = buffer.address + obj.offset * itemsize if length else 0
    return over_memory(address, (length,), None, dtype, HOST, readonly=True, owner=obj)


@functools.cache
def _dtype_of(kind: Any) -> tuple[DType, int]:
    dtype = DType(_PRIMITIVE[f"pyarrow.{kind.__name__}"])
    return dtype, dtype.bits // 8


class _Arrow(Adapter):
    """What its arrays and tensors have in common."""

    name = "pyarrow"
    package = "pyarrow"
    install = "pip install pyarrow"
    dtypes = DTYPES
    known_issues = (
        KnownIssue(
            does="FixedShapeTensorArray gives out numbers in place of the nulls inside its tensors",
            see="tests/engine/test_defects.py",
        ),
        KnownIssue(
            does="Tensor gives no capsules, or ones that lose read-only, and takes none: buffers and numpy serve",
            see="https://arrow.apache.org/docs/python/dlpack.html",
            before="26",
            lowers={"tensors_by": "numpy"},
        ),
    )


class ArrowAdapter(_Arrow):
    """pyarrow as a whole: all its arrays as sources; as a target, Array or Tensor by the number of dimensions."""

    types = (
        "pyarrow.Array",
        "pyarrow.ChunkedArray",
        "pyarrow.Tensor",
        "pyarrow.SparseCOOTensor",
        "pyarrow.SparseCSRMatrix",
        "pyarrow.SparseCSCMatrix",
        "pyarrow.SparseCSFTensor",
    )

    fast_path = FastPath(types=tuple(_PRIMITIVE), export=_export, imports=False, takes=_COMPACT)

    # ---- as a producer ----------------------------------------------------------------------------------------------

    def describe(self, obj: Any) -> Description:
        pa = self.module()
        if isinstance(obj, pa.Tensor):
            tensor = self.export(obj)
            protocols = ("__dlpack__", "buffer")
            return Description(
                functools.partial(ArrayInfo.of_tensor, tensor, self.name, type(obj), protocols), (), tensor
            )
        if not isinstance(obj, pa.Array | pa.ChunkedArray):
            sparse = Blocker("it is sparse", "Call .to_tensor() first.", LayoutError, no_copy=True)
            kind, dtype = type_name(type(obj)), DTYPES.from_native(obj.type)
            return Description(ArrayInfo(self.name, kind, dtype, str(obj.type)), (sparse,))
        blocker = self._blocker(obj)
        if blocker is not None:
            return Description(functools.partial(self._info, obj, self._start(obj)), (blocker,))
        tensor = self.export(obj)
        return Description(functools.partial(self._info, obj, tensor.data_ptr), (), tensor)

    def _start(self, obj: Any) -> int:
        """Return the address of an array that cannot be exported; 0 where it is no single run in host memory."""
        pa = self.module()
        one = isinstance(obj, pa.Array) or obj.num_chunks == 1
        known = one and getattr(obj, "is_cpu", True) and DTYPES.from_native(_unnested(pa, obj.type)[0]) is not None
        return _address(_flat(pa, _one(pa, obj))) if known else 0

    def _blocker(self, obj: Any) -> Blocker | None:
        pa = self.module()
        if not getattr(obj, "is_cpu", True):
            return Blocker("it is not in host memory", "Copy it to the host first: .copy_to(...).", DeviceError)
        kind, _, _ = _unnested(pa, obj.type)
        if DTYPES.from_native(kind) is None:
            return Blocker(*_why_refused(pa.types, kind), DTypeError)
        nulls = _nulls(pa, obj)
        if nulls:
            return Blocker(
                f"it has {nulls} null{'s' * (nulls > 1)}, which DLPack cannot say",
                "Call .fill_null(value) or .drop_null() first."
                if obj.null_count == nulls
                else "Some are inside of its lists: call .flatten().fill_null(value).",
                LayoutError,
            )
        if pa.types.is_boolean(kind):
            return Blocker("its bools are packed eight to a byte", resolution=self._fresh, copies=True)
        if isinstance(obj, pa.ChunkedArray) and obj.num_chunks > 1:
            return Blocker(f"it lies in {obj.num_chunks} chunks", resolution=self._fresh, copies=True)
        return None

    def _fresh(self, obj: Any) -> _Fresh:
        pa = self.module()
        kind, inner, strides = _unnested(pa, obj.type)
        dtype = DTYPES.from_native(kind)
        assert dtype is not None
        flat = _flat(pa, _one(pa, obj))
        return _Fresh(flat.cast(pa.uint8()) if pa.types.is_boolean(kind) else flat, (len(obj), *inner), strides, dtype)

    def _info(self, obj: Any, address: int) -> ArrayInfo:
        pa = self.module()
        value_type, inner, strides = _unnested(pa, obj.type)
        dtype = DTYPES.from_native(value_type)
        shape = (len(obj), *inner)
        return ArrayInfo(
            framework=self.name,
            type_name=type_name(type(obj)),
            dtype=dtype,
            dtype_name=str(value_type if dtype is not None else obj.type),
            shape=shape,
            strides=strides or _row_major(shape),
            device=HOST,
            nbytes=math.prod(shape) * dtype.bits // 8 if dtype is not None else obj.nbytes,
            readonly=True,
            address=address,
            owner="pyarrow.lib.Buffer",
            protocols=("__dlpack__",) if isinstance(obj, pa.Array) else (),
        )

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        pa = self.module()
        if isinstance(obj, _Fresh):
            return over_memory(_address(obj.flat), obj.shape, obj.strides, obj.dtype, HOST, owner=obj.flat)
        if isinstance(obj, pa.Tensor):
            if self.lowered.get("tensors_by"):
                return dlx.convert(memoryview(obj), to="dlx")
            return super().export(obj)
        array = _one(pa, obj)
        value_type, inner, strides = _unnested(pa, array.type)
        dtype = DTYPES.from_native(value_type)
        assert dtype is not None
        flat = _flat(pa, array)
        return over_memory(_address(flat), (len(array), *inner), strides, dtype, HOST, readonly=True, owner=flat)

    # ---- as a consumer ----------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return _TENSORS

    def variant(self, wanted: type | Tensor) -> Adapter:
        if isinstance(wanted, Tensor):
            return _ARRAY_TARGET if wanted.ndim == 1 else _TENSOR_TARGET
        pa = self.module()
        if wanted is pa.Array or wanted is pa.Tensor:
            return _ARRAY_TARGET if wanted is pa.Array else _TENSOR_TARGET
        raise AdapterNotFoundError(
            f"{type_name(wanted)} cannot be a target", fix="Say to=pyarrow.Array, to=pyarrow.Tensor or to='pyarrow'."
        )

    def load(self, tensor: Tensor) -> Any:
        return self.variant(tensor).load(tensor)

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        pa = self.module()
        if isinstance(obj, pa.ChunkedArray):
            return pa.chunked_array([self.copy(chunk) for chunk in obj.chunks], obj.type)
        if isinstance(obj, pa.Tensor):
            return pa.Tensor.from_numpy(obj.to_numpy().copy(order="K"), obj.dim_names)
        if not hasattr(obj, "copy_to"):  # before 18: through a message, which holds its own memory
            batch = pa.record_batch([obj], ["copied"])
            return pa.ipc.read_record_batch(batch.serialize(), batch.schema).column(0)
        return obj.copy_to(pa.default_cpu_memory_manager())


class _ArrayTarget(_Arrow):
    """pyarrow.Array: one dimension, compact, constant."""

    name = "pyarrow.Array"
    types = ("pyarrow.Array",)
    immutable = True

    def capabilities(self) -> Capabilities:
        return _ARRAYS

    def load(self, tensor: Tensor) -> Any:
        pa = self.module()
        buffer = pa.foreign_buffer(tensor.data_ptr, tensor.nbytes, base=tensor)
        return pa.Array.from_buffers(DTYPES.to_native(tensor.dtype), tensor.shape[0], [None, buffer], 0)


class _TensorTarget(_Arrow):
    """pyarrow.Tensor: any dimensions, strides of 0 and more, read-only kept."""

    name = "pyarrow.Tensor"
    display_name = "tensor"
    types = ("pyarrow.Tensor",)

    def capabilities(self) -> Capabilities:
        return _TENSORS

    def load(self, tensor: Tensor) -> Any:
        pa = self.module()
        if any(stride < 0 for stride in tensor.strides):  # of extents below 2; pyarrow refuses them all the same
            strides = [max(stride, 0) for stride in tensor.strides]
            tensor = over_memory(
                tensor.data_ptr,
                tensor.shape,
                strides,
                tensor.dtype,
                tensor.device,
                readonly=tensor.readonly,
                owner=tensor,
            )
        if self.lowered.get("tensors_by"):
            return pa.Tensor.from_numpy(dlx.convert(tensor, to="numpy"))
        return pa.Tensor.from_dlpack(tensor)


_ARRAY_TARGET, _TENSOR_TARGET = _ArrayTarget(), _TensorTarget()


def _unnested(pa: Any, kind: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...] | None]:
    """Return the type of one number, the dimensions that each value of an array has, and all strides or None."""
    if isinstance(kind, pa.FixedShapeTensorType):
        shape = tuple(kind.shape)
        order = kind.permutation or range(len(shape))
        strides = (math.prod(shape), *_row_major(shape))
        return kind.value_type, tuple(shape[i] for i in order), (strides[0], *(strides[1 + i] for i in order))
    inner: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(kind):
        inner = (*inner, kind.list_size)
        kind = kind.value_type
    return kind, inner, None


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _nulls(pa: Any, obj: Any) -> int:
    """Return how many nulls there are, those inside of fixed-size lists and tensors included."""
    if isinstance(obj, pa.ChunkedArray):
        return sum(_nulls(pa, chunk) for chunk in obj.chunks)
    inside = _inside(pa, obj)
    return int(obj.null_count) + (_nulls(pa, inside) if inside is not obj else 0)


def _inside(pa: Any, array: Any) -> Any:
    """Return what is one level further down in an array of fixed-size lists or tensors; the array itself of numbers."""
    if isinstance(array, pa.FixedShapeTensorArray):
        return array.storage.flatten()
    return array.flatten() if pa.types.is_fixed_size_list(array.type) else array


def _flat(pa: Any, array: Any) -> Any:
    inside = _inside(pa, array)
    return array if inside is array else _flat(pa, inside)


def _one(pa: Any, obj: Any) -> Any:
    """Return an array as one Array: copied only where it lies in several chunks."""
    if isinstance(obj, pa.Array):
        return obj
    return obj.chunk(0) if obj.num_chunks == 1 else obj.combine_chunks()


def _address(array: Any) -> int:
    """Return where the first number of an Array of numbers is; 0 where there is none."""
    buffer = array.buffers()[1]
    return int(buffer.address) + array.offset * array.type.bit_width // 8 if len(array) and buffer is not None else 0


_REFUSED = (  # question of pyarrow.types, reason, fix
    (
        "is_temporal",
        "DLPack has no dates, times or durations",
        "Call .view({integer!r}) first, and keep the unit yourself.",
    ),
    ("is_decimal", "DLPack has no decimals", "Call .cast('float64') first, if that is exact enough."),
    ("is_dictionary", "it is a dictionary array", "Call .dictionary_decode() first, or convert its .indices."),
    ("is_run_end_encoded", "it is run-end encoded", "Call pyarrow.compute.run_end_decode(x) first."),
    ("is_union", "DLPack has no unions", "Convert its fields one by one: .field(0)."),
    ("is_struct", "DLPack has no structures", "Convert its fields one by one: .field(0)."),
    ("is_nested", "its values vary in length", "Convert its .flatten() and its .offsets apart."),
    ("is_null", "it holds nulls only, without a type", "Call .cast with a type and .fill_null(value) first."),
)


def _why_refused(types: Any, kind: Any) -> tuple[str, str]:
    """Return (reason, fix) for a type that is not one number per value."""
    for question, reason, fix in _REFUSED:
        if getattr(types, question)(kind):
            if "{integer" in fix:
                fix = fix.format(integer=f"int{kind.bit_width}") if kind.bit_width <= 64 else "Convert its parts apart."
            return f"{reason} ({kind})", fix
    if getattr(kind, "storage_type", None) is not None:
        return f"DLPack has no counterpart of {kind}", "Convert its .storage."
    return f"DLPack has no text or raw bytes ({kind})", "Convert its .buffers() if the bytes are what you need."


@dlx.hookimpl
def dlx_adapters() -> list[Adapter]:
    """Return pyarrow's adapter."""
    return [ArrowAdapter()]
