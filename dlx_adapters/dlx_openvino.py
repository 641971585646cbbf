"""The OpenVINO adapter: openvino.Tensor in host memory.

Dtypes: bool, (u)int8 to 64, float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, float8_e8m0fnu.
Shared: row-major memory, in both directions; tensors are always writable. Refused: text and elements below a byte.
"""

from __future__ import annotations

import sys
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import DTypeError

_STORED = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"}
_NAMES = {
    **{f"{sign}int{bits}": f"Type.{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"Type.f{bits}" for bits in (16, 32, 64)},
    "bool": "Type.boolean",
    "bfloat16": "Type.bf16",
    "float8_e4m3fn": "Type.f8e4m3",
    "float8_e5m2": "Type.f8e5m2",
    "float8_e8m0fnu": "Type.f8e8m0",
}


class _DTypes(api.DTypes):
    def viewed(self, array: Any, dtype: api.DType) -> Any:
        return sys.modules["openvino"].Tensor(array.data, array.shape, self.to_native(dtype))


class OpenVINOAdapter(api.Adapter):
    """openvino.Tensor."""

    name = package = "openvino"
    types = ("openvino.Tensor",)
    dtypes = _DTypes("openvino", _NAMES, storage=_STORED)

    def describe(self, obj: Any) -> api.Description:
        if self.dtypes.from_native(obj.element_type) is None:
            name, kind = obj.element_type.get_type_name(), api.type_name(type(obj))
            info = api.ArrayInfo(self.name, kind, None, name, tuple(obj.shape), device=api.Device("cpu"))
            why = f"its elements are {name}, which have no numbers of whole bytes"
            return api.Description(info, (api.Blocker(why, "Convert its .data, the stored bytes.", DTypeError),))
        return api.Description(tensor=self.export(obj))

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        dtype: Any = self.dtypes.from_native(obj.element_type)
        return api.viewed(api.consumed(obj.data.__dlpack__()), dtype)  # always writable

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(dtypes=self.dtypes.known(), empty_extents="addressed")

    def load(self, tensor: api.Tensor) -> Any:
        array = dlx.convert(api.unmarked(tensor), to="numpy")  # only one without elements is read-only here
        return sys.modules["openvino"].Tensor(array, shared_memory=True)


dlx_adapters = api.offer(OpenVINOAdapter())
