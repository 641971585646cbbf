"""The ONNX Runtime adapter: onnxruntime.OrtValue.

Versions: 1.32 and later. Devices: the host; values on a GPU can be exported. Dtypes: bool, (u)int2 to 64, float16,
bfloat16, float32, float64, five float8 types and float4.
Shared: compact row-major data. Copied: read-only memory and other strides. Refused: strings, sequences, maps, empty
optional values, and sparse tensors.
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
    """Return the tensor of a value; raise if it contains no numbers."""
    return api.keeping(api.consumed(value.__dlpack__()), value)  # the capsule does not keep numpy's memory alive


class _DTypes(api.DTypes):
    def native(self, attribute: str) -> Any:
        return attribute  # onnxruntime's dtypes are strings


class _Devices(api.ReportedDevices):
    def of(self, obj: Any) -> api.Device | None:
        return super().of(obj) if obj.is_tensor() else api.Device("cpu")  # other values raise


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
        fix = "Convert its tensors of numbers, or the result of .numpy()."
        because = f"it is {obj.data_type() or 'empty'}, not a tensor of numbers"
        return api.Description(blockers=(api.Blocker(because, fix, DTypeError),))

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        return api.keeping(super().export(obj, stream=stream), obj)  # see `_export`

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(dtypes=self.dtypes.known())

    def load(self, tensor: api.Tensor) -> Any:
        return sys.modules["onnxruntime"].OrtValue.from_dlpack(tensor)


dlx_adapters = api.offer(OnnxRuntimeAdapter())
