"""ONNX Runtime for dlx: onnxruntime.OrtValue.

Versions: 1.32 and later. Devices: the host; values on a GPU leave. Dtypes: bool, (u)int2 to 64, float16, bfloat16,
float32, float64, five float8 kinds and float4.
Shared: compact row-major data. Copied: read-only memory, and other strides. Refused: strings, sequences,
maps, optional values without one, and sparse tensors.
"""

from __future__ import annotations

import sys
from typing import Any

from dlx import adapter as api
from dlx.errors import DTypeError

_WORDS = {name: name for name in (*api.COMMON_DTYPES, "int4", "uint4", "int2", "uint2")}
_WORDS |= {"float32": "float", "float64": "double", "float8_e8m0fnu": "float8e8m0", "float4_e2m1fn": "float4e2m1"}
_WORDS |= {f"float8_{kind}": f"float8{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}


def _export(value: Any) -> api.Tensor:
    """Return the tensor of a value; what holds no numbers raises."""
    return api.keeping(api.consumed(value.__dlpack__()), value)  # its capsule does not keep numpy's memory alive


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        return attribute  # its dtypes are words


class _Devices(api.ReportedDevices):
    def of(self, obj: Any) -> api.Device | None:
        return super().of(obj) if obj.is_tensor() else api.Device("cpu")  # others raise if they are asked


class OnnxRuntimeAdapter(api.Adapter):
    """onnxruntime.OrtValue."""

    name = package = "onnxruntime"
    types = ("onnxruntime.OrtValue",)
    dtypes = _DTypes(package, {name: f"tensor({word})" for name, word in _WORDS.items()})
    devices = _Devices()
    fast_path = api.FastPath(types=types, export=_export)

    def describe(self, obj: Any) -> api.Description:
        if self.dtypes.from_native(obj.data_type()) is not None:
            return api.Description()
        fix = "Convert the tensors of numbers that it holds, or what its .numpy() gives."
        because = f"it is {obj.data_type() or 'empty'}, no tensor of numbers"
        return api.Description(blockers=(api.Blocker(because, fix, DTypeError),))

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        return api.keeping(super().export(obj, stream=stream), obj)  # as `_export`

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(dtypes=self.dtypes.known())

    def load(self, tensor: api.Tensor) -> Any:
        return sys.modules["onnxruntime"].OrtValue.from_dlpack(tensor)


dlx_adapters = api.offer(OnnxRuntimeAdapter())
