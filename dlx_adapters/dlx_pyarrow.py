"""The pyarrow adapter: Array, ChunkedArray, Tensor.

Versions: 17 and later. Devices: the host. Dtypes: (u)int8 to 64, float16 to 64; bool in 1-d arrays only.
As a source. Shared: primitive arrays and their slices, single chunks, fixed-size lists and fixed-shape tensors (as
dimensions), Tensors with any strides. Arrays are always read-only; Tensors have a flag. Copied: several chunks
(combined), bools (unpacked: pyarrow stores eight per byte). Refused: nulls, with their count; dates, times, decimals,
text, dictionaries, lists of varying length, structs, unions and other types that are not one number per value.
As a target. 1-d arrays become an Array, others a Tensor; `to=pyarrow.Array` or `to=pyarrow.Tensor` selects the type.
Arrays are compact and constant: sharing is safe as long as no other code writes to the memory. Bools are copied and
packed; Tensors of bools are refused.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import AdapterNotFoundError


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        return getattr(sys.modules["pyarrow"], attribute)()


DTYPES = _DTypes("pyarrow", {name: name for name in api.COMMON_DTYPES if name != "bfloat16"} | {"bool": "bool_"})
_NUMBERS = frozenset(DTYPES.names) - {"bool"}
_REFUSALS = {"bool": ("pyarrow.Tensor has no bools", "View it as uint8 first, or reshape it to one dimension.")}
_ARRAYS = api.Capabilities(
    dtypes=frozenset(DTYPES.names), ndims=(1, 1), keeps_readonly=True, copies={"bool": "packs bools eight to a byte"}
)
_STRIDED = api.Layout.ZERO | api.Layout.GAPS | api.Layout.PERMUTED
_TENSORS = api.Capabilities(dtypes=_NUMBERS, layouts=_STRIDED, keeps_readonly=True, refusals=_REFUSALS)
_COMPACT = api.Capabilities(dtypes=_NUMBERS, layouts=api.Layout.PERMUTED, keeps_readonly=True)  # accepted by both

_PRIMITIVE = (
    *(f"pyarrow.{sign}Int{bits}Array" for sign in ("", "U") for bits in (8, 16, 32, 64)),
    *(f"pyarrow.{name}Array" for name in ("HalfFloat", "Float", "Double")),
)


def _join_lists(parts: dict[str, Any]) -> Any:
    """Return a list array over offsets and values, which may have inner dimensions."""
    pa, values, offsets = sys.modules["pyarrow"], parts["values"], parts["offsets"]
    if isinstance(values, pa.Tensor):
        shape, values = values.shape, dlx.convert(values.to_numpy().reshape(-1), to=pa.Array)
        for extent in reversed(shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, extent)
    kind = pa.LargeListArray if offsets.type == pa.int64() else pa.ListArray
    return kind.from_arrays(offsets, values)


_LISTS = ("pyarrow.ListArray", "pyarrow.LargeListArray", "pyarrow.ChunkedArray")


def _has_lists(array: Any) -> bool:
    types = sys.modules["pyarrow"].types
    return bool(types.is_list(array.type) or types.is_large_list(array.type))


def _exchange() -> Any:
    """Return the table that exports arrays, by ``__dlpack__`` if it sets the read-only flag correctly."""
    return api.arrow_exchange("arrays_by" not in _ARRAY_TARGET.lowered)


def _device(native_device: Any) -> api.Device:
    """Return the device of a `pyarrow.Device`, where the host has the number -1."""
    return api.Device(int(native_device.device_type), max(native_device.device_id, 0))


_before_26 = functools.partial(api.KnownIssue, see="https://arrow.apache.org/docs/python/dlpack.html", before="26")


class _Arrow(api.Adapter):
    """Base class of the adapters for arrays and tensors."""

    name = package = "pyarrow"
    dtypes = DTYPES
    devices = api.Devices(_device)
    known_issues = (
        api.KnownIssue(
            does="FixedShapeTensorArray exports numbers instead of nulls inside its tensors",
            see="tests/engine/test_defects.py",
        ),
        _before_26(
            "Tensor exports no capsules, or without the read-only flag, and imports none; dlx uses buffers and numpy",
            lowers={"tensors_by": "numpy"},
        ),
        _before_26(
            "Array exports DLPack capsules without the read-only flag; dlx uses Arrow's", lowers={"arrays_by": "arrow"}
        ),
    )


class ArrowAdapter(_Arrow, api.ArrowSource):
    """All arrays of pyarrow as sources; as a target, it creates an Array or Tensor depending on `ndim`."""

    types = (
        *("pyarrow.Array", "pyarrow.ChunkedArray", "pyarrow.Tensor"),
        *(f"pyarrow.Sparse{kind}" for kind in ("COOTensor", "CSRMatrix", "CSCMatrix", "CSFTensor")),
    )
    fast_path = api.FastPath(
        types=(*_PRIMITIVE, "pyarrow.ChunkedArray"),
        exchange=_exchange,
        unblocks=api.ArrowSource.joined,
        imports=_COMPACT,
        describe=api.arrow_info,
    )
    containers = (api.arrow_lists(_LISTS, _has_lists, _join_lists),)

    def shown(self, obj: Any) -> str:
        return str(obj.type)

    def describe(self, obj: Any) -> api.Description:
        pa = sys.modules["pyarrow"]
        if isinstance(obj, pa.Tensor):
            tensor = self.export(obj)
            info = functools.partial(api.ArrayInfo.of_tensor, tensor, self.name, type(obj), ("__dlpack__", "buffer"))
            return api.Description(info, (), tensor)
        if not isinstance(obj, pa.Array | pa.ChunkedArray):
            sparse = api.Blocker("it is sparse", "Call .to_tensor() first.", also_blocks=("copy",))
            kind, dtype = api.type_name(type(obj)), DTYPES.from_native(obj.type)
            return api.Description(api.ArrayInfo(self.name, kind, dtype, str(obj.type)), (sparse,))
        return super().describe(obj)

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        if not isinstance(obj, sys.modules["pyarrow"].Tensor):
            return super().export(obj)
        if self.lowered.get("tensors_by"):
            return dlx.convert(memoryview(obj), to="dlx")
        return api.Adapter.export(self, obj)

    def capabilities(self) -> api.Capabilities:
        return _TENSORS

    def variant(self, wanted: type | api.Tensor) -> api.Adapter:
        if isinstance(wanted, api.Tensor):
            return _ARRAY_TARGET if wanted.ndim == 1 else _TENSOR_TARGET
        pa = sys.modules["pyarrow"]
        if wanted is pa.Array or wanted is pa.Tensor:
            return _ARRAY_TARGET if wanted is pa.Array else _TENSOR_TARGET
        fix = "Pass to=pyarrow.Array, to=pyarrow.Tensor or to='pyarrow'."
        raise AdapterNotFoundError(f"{api.type_name(wanted)} cannot be a target", fix=fix)

    def load(self, tensor: api.Tensor) -> Any:
        return (_ARRAY_TARGET if tensor.ndim == 1 else _TENSOR_TARGET).load(tensor)

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        pa = sys.modules["pyarrow"]
        if isinstance(obj, pa.ChunkedArray):
            return pa.chunked_array([self.copy(chunk) for chunk in obj.chunks], obj.type)
        if isinstance(obj, pa.Tensor):
            return pa.Tensor.from_numpy(obj.to_numpy().copy(order="K"), obj.dim_names)
        if not hasattr(obj, "copy_to"):  # before 18: copy by serialization
            batch = pa.record_batch([obj], ["copied"])
            return pa.ipc.read_record_batch(batch.serialize(), batch.schema).column(0)
        return obj.copy_to(pa.default_cpu_memory_manager())


class _ArrayTarget(_Arrow):
    """pyarrow.Array: 1-d, compact, constant."""

    name = "pyarrow.Array"
    types = ("pyarrow.Array",)
    arrays = api.Arrays(immutable=True)

    def capabilities(self) -> api.Capabilities:
        return _ARRAYS

    def load(self, tensor: api.Tensor) -> Any:
        return sys.modules["pyarrow"].array(tensor)


class _TensorTarget(_Arrow):
    """pyarrow.Tensor: any dimensions, no negative strides, keeps the read-only flag."""

    name = "pyarrow.Tensor"
    types = ("pyarrow.Tensor",)

    def capabilities(self) -> api.Capabilities:
        return _TENSORS

    @functools.cached_property
    def _create(self) -> Any:
        tensor_type = sys.modules["pyarrow"].Tensor
        if "tensors_by" in self.lowered:
            return lambda tensor: tensor_type.from_numpy(dlx.convert(tensor, to="numpy"))
        return tensor_type.from_dlpack

    def load(self, tensor: api.Tensor) -> Any:
        try:
            return self._create(tensor)
        except (ValueError, NotImplementedError):  # negative strides of extents 0 or 1
            return self._create(api.forward(tensor))


_ARRAY_TARGET, _TENSOR_TARGET = _ArrayTarget(), _TensorTarget()


dlx_adapters = api.offer(ArrowAdapter())
