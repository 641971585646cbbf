"""PaddlePaddle for dlx: paddle.Tensor.

Versions: 3.3 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16, bfloat16, float32, float64,
float8_e4m3fn, float8_e5m2, complex64 and 128.
Shared: every layout without negative strides, of up to 9 dimensions. Copied: read-only memory, since paddle drops the flag.
Refused: tensors that require gradients, without detach=True (paddle's exchange table would give them out without a word);
sparse tensors, and those without memory.
"""

from __future__ import annotations

from typing import Any

import dlx
from dlx.adapter import (
    Adapter,
    Blocker,
    Capabilities,
    Description,
    Device,
    DTypes,
    FastPath,
    Guard,
    Layout,
    Tensor,
)

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)
_GRAD = Blocker("it requires gradients", resolution="detach", option="detach")


class PaddleAdapter(Adapter):
    """paddle.Tensor, and parameters."""

    name = package = "paddle"
    install = "pip install paddlepaddle"
    types = ("paddle.Tensor",)
    display_name = "tensor"
    dtypes = DTypes(package, {name: name for name in _DTYPES})
    fast_path = FastPath(types=types, guards=(Guard("requires_grad", _GRAD),), detach="detach")

    def describe(self, obj: Any) -> Description:
        return Description(blockers=(_GRAD,) if obj.requires_grad else ())

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=self.dtypes.known(), layouts=Layout.ZERO | Layout.GAPS | Layout.PERMUTED, max_ndim=9
        )

    def load(self, tensor: Tensor) -> Any:
        return self.module().from_dlpack(tensor)

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        return obj.clone()


@dlx.hookimpl
def dlx_adapters() -> list[Adapter]:
    """Return paddle's adapter."""
    return [PaddleAdapter()]
