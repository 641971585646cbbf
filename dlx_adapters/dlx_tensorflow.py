"""The TensorFlow adapter: eager tf.Tensor, and the values of tf.Variable.

Versions: 2.21 and later. Devices: the host; tensors on a GPU can be exported. Dtypes: bool, (u)int8 to 64, float16,
bfloat16, float32, float64, complex64 and 128.
Shared: compact row-major data aligned to 64 bytes; exports are always read-only. Copied: other strides and lower
alignments, which crash tensorflow.
Refused: symbolic tensors, strings and other non-numbers, float8 and int4 (tensorflow does not export them).
Sparse and ragged tensors, also nested ones, in both directions.

Tensors are constant: read-only memory is shared, and shared memory must not be written to while a tensor uses it. Only
`tf.raw_ops.InplaceAdd`, `InplaceSub` and `InplaceUpdate` write to constants, including tensorflow's.
Gradients: dlx differentiates functions of tensorflow (`dlx.using` with ``grad=True``). A gradient tape does not track
exports: `dlx.using` refuses watched tensors, `dlx.convert` does not check.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dlx import adapter as api
from dlx.errors import DTypeError

_DTYPES = api.DTypes("tensorflow", (*api.COMMON_DTYPES, "complex64", "complex128"))
_VARIABLE = api.Blocker("it is a variable; its value is converted", resolution="value")
_OTHERS = {
    "IndexedSlices": api.Blocker("it consists of slices", "Call tf.convert_to_tensor(x) first."),
}


def _split_sparse(obj: Any) -> dict[str, Any]:
    return {"data": obj.values, "coords": obj.indices, "shape": tuple(obj.shape)}


def _join_sparse(parts: dict[str, Any]) -> Any:
    return sys.modules["tensorflow"].SparseTensor(parts["coords"], parts["data"], parts["shape"])


def _split_ragged(obj: Any) -> dict[str, Any]:
    return {"values": obj.values, "offsets": obj.row_splits}


def _join_ragged(parts: dict[str, Any]) -> Any:
    create = sys.modules["tensorflow"].RaggedTensor.from_row_splits
    return create(parts["values"], parts["offsets"], validate=False)


_COMPOUNDS = (
    api.Compound(
        "coo", ("tensorflow.SparseTensor",), _split_sparse, _join_sparse, None, {"coords": ("int64",)},
        "tf.sparse.to_dense(x)", ("swapped",),
    ),
    api.Compound("ragged", ("tensorflow.RaggedTensor",), _split_ragged, _join_ragged, dense=".to_tensor()"),
)  # fmt: skip


class _Devices(api.ReportedDevices):
    def from_native(self, native_device: Any) -> api.Device:
        kind, _, number = str(native_device).rpartition("device:")[2].partition(":")
        return api.Device({"CPU": "cpu", "GPU": "cuda"}[kind.upper()], int(number or 0))

    def of(self, obj: Any) -> api.Device | None:
        found = super().of(obj)
        if found is None:  # a variable: parse ".../device:GPU:0"
            try:
                found = self.from_native(getattr(obj, "device", ""))
            except (KeyError, ValueError):
                found = None
        return found


_last_dtype: Any = None  # the last numeric dtype (dtypes are singletons, but slow to hash)


def _export(tensor: Any) -> api.Tensor | None:
    """Return the `dlx.Tensor` of an eager tensor, or None for strings, whose export would crash."""
    global _last_dtype
    dtype = tensor.dtype
    if dtype is not _last_dtype:
        if _DTYPES.from_native(dtype) is None:
            return None
        _last_dtype = dtype
    return api.consumed(tensor.__dlpack__())


def _is_tracked(tensor: Any) -> bool:
    """Return whether a gradient tape watches a tensor."""
    should_record = api.look_up("tensorflow.python.eager.record.should_record_backprop")
    if should_record is None:
        return False
    # A tape watches a variable only after it was read.
    return bool(should_record([tensor.value() if isinstance(tensor, api.look_up("tensorflow.Variable")) else tensor]))


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _vjp(function: Any, tensors: Sequence[Any]) -> tuple[Any, Any]:
    tf = sys.modules["tensorflow"]
    with tf.GradientTape(persistent=True) as tape:
        operands = [tf.identity(each) for each in tensors]
        tape.watch(operands)
        results = [tf.convert_to_tensor(each) for each in function(*operands)]

    def pullback(gradients: Sequence[Any]) -> list[Any]:
        pairs = [(one, other) for one, other in zip(results, gradients, strict=True) if other is not None]
        found = tape.gradient(
            [result for result, _ in pairs],
            operands,
            [gradient for _, gradient in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(each) for each in found]  # may be IndexedSlices

    return results, pullback


class TensorFlowAdapter(api.Adapter):
    """tf.Tensor."""

    name = package = "tensorflow"
    types = ("tensorflow.Tensor", "tensorflow.Variable", *(f"tensorflow.{name}" for name in _OTHERS))
    namespaces = ("tensorflow.experimental.numpy",)
    containers = _COMPOUNDS
    arrays = api.Arrays(immutable=True, alignment=64)
    dtypes = _DTYPES
    devices = _Devices()
    fast_path = api.FastPath(types=("tensorflow.python.framework.ops.EagerTensor",), export=_export)
    gradients = api.GradSupport(_is_tracked, _is_differentiable, _vjp)

    def describe(self, obj: Any) -> api.Description:
        blocker = self._blocker(obj)
        return api.Description(blockers=(blocker,) if blocker is not None else ())

    def _blocker(self, obj: Any) -> api.Blocker | None:
        for name, other in _OTHERS.items():
            if isinstance(obj, api.look_up(f"tensorflow.{name}")):
                return other
        if self.dtypes.from_native(obj.dtype) is None:
            why = f"tensorflow does not export {obj.dtype.name}"
            return api.Blocker(why, "Call tf.cast first if its values are numbers.", DTypeError)
        if isinstance(obj, api.look_up("tensorflow.Variable")):
            return _VARIABLE
        if not hasattr(obj, "__dlpack__"):
            why = "inside a tf.function or while a model is built, tensors have no data"
            return api.Blocker(why, "Convert outside of it, or in tf.py_function.")
        return None

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        return super().export(obj)  # tensorflow accepts no stream; it waits itself

    def capabilities(self) -> api.Capabilities:
        names = self.dtypes.known() if "tensorflow" in sys.modules else frozenset(self.dtypes.names)
        return api.Capabilities(dtypes=names, min_alignment=64, keeps_readonly=True)

    def load(self, tensor: api.Tensor) -> Any:
        if tensor.readonly:  # it only accepts legacy capsules, without this flag
            tensor = api.unmarked(tensor)
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(tensor.__dlpack__())


dlx_adapters = api.offer(TensorFlowAdapter())
