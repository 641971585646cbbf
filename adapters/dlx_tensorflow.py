"""TensorFlow for dlx: eager tf.Tensor, and the values of tf.Variable.

Versions: 2.21 and later. Devices: the host; tensors on a GPU leave. Dtypes: bool, (u)int8 to 64, float16, bfloat16,
float32, float64, complex64 and 128.
Shared: compact row-major data aligned to 64 bytes; out of tensorflow always read-only. Copied: other strides
and lower alignments, of which tensorflow dies.
Refused: symbolic tensors, strings and all else that is no number, float8 and int4 (tensorflow does not export them),
sparse and ragged tensors.

Tensors are constant: read-only memory is shared, and memory that is shared must not be written to while a tensor of it
lives. Only `tf.raw_ops.InplaceAdd`, `InplaceSub` and `InplaceUpdate` write to constants, those of tensorflow included.
Gradients: functions of tensorflow are differentiated for others (`dlx.using` with ``grad=True``). A gradient tape does
not follow what leaves; `dlx.using` refuses what one watches, `dlx.convert` does not ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dlx import adapter as api
from dlx.errors import DTypeError

_DTYPES = api.DTypes("tensorflow", (*api.COMMON_DTYPES, "complex64", "complex128"))
_VARIABLE = api.Blocker("it is a variable, whose value is converted", resolution="value")
_OTHERS = {
    "SparseTensor": api.Blocker("it is sparse", "Call tf.sparse.to_dense(x) first."),
    "RaggedTensor": api.Blocker("its rows differ in length", "Call .to_tensor() first."),
    "IndexedSlices": api.Blocker("it holds slices", "Call tf.convert_to_tensor(x) first."),
}


class _Devices(api.ReportedDevices):
    def from_native(self, native_device: Any) -> api.Device:
        kind, _, number = str(native_device).rpartition("device:")[2].partition(":")
        return api.Device({"CPU": "cpu", "GPU": "cuda"}[kind], int(number or 0))

    def of(self, obj: Any) -> api.Device | None:
        found = super().of(obj)
        if found is None:  # a variable, whose value is not read for that; ".../device:GPU:0"
            try:
                found = self.from_native(getattr(obj, "device", ""))
            except (KeyError, ValueError):
                found = None
        return found


_numbers: Any = None  # the dtype, one object each, that was last found to be of numbers: a hash of one is slow


def _export(tensor: Any) -> api.Tensor | None:
    """Return the tensor of an eager one; the export of strings would end the process."""
    global _numbers
    dtype = tensor.dtype
    if dtype is not _numbers:
        if _DTYPES.from_native(dtype) is None:
            return None
        _numbers = dtype
    return api.consumed(tensor.__dlpack__())


def _is_tracked(tensor: Any) -> bool:
    """Return whether a tape watches a tensor now, as tensorflow tells its own operations."""
    watched = api.look_up("tensorflow.python.eager.record.should_record_backprop")
    if watched is None:
        return False
    # A tape watches a variable from its first reading on.
    return bool(watched([tensor.value() if isinstance(tensor, api.look_up("tensorflow.Variable")) else tensor]))


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
        return [tf.convert_to_tensor(each) for each in found]  # those of gathered rows are slices

    return results, pullback


class TensorFlowAdapter(api.Adapter):
    """tf.Tensor."""

    name = package = "tensorflow"
    types = ("tensorflow.Tensor", "tensorflow.Variable", *(f"tensorflow.{name}" for name in _OTHERS))
    namespaces = ("tensorflow.experimental.numpy",)
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
            why = f"tensorflow exports no {obj.dtype.name}"
            return api.Blocker(why, "Convert the values with tf.cast first, where they are numbers.", DTypeError)
        if isinstance(obj, api.look_up("tensorflow.Variable")):
            return _VARIABLE
        if not hasattr(obj, "__dlpack__"):
            why = "inside a tf.function, or a model that is being built, tensors have no data"
            return api.Blocker(why, "Convert outside of it, or call back with tf.py_function.")
        return None

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        return super().export(obj)  # tensorflow takes no stream: it waits itself

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(dtypes=self.dtypes.known(), min_alignment=64, keeps_readonly=True)

    def load(self, tensor: api.Tensor) -> Any:
        if tensor.readonly:  # a legacy capsule, the only kind that it takes, cannot say that
            tensor = api.unmarked(tensor)
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(tensor.__dlpack__())


dlx_adapters = api.offer(TensorFlowAdapter())
