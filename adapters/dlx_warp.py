"""NVIDIA Warp for dlx: warp.array.

Versions: 1.19 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16 to 64, bfloat16; arrays of vectors
and matrices leave with the dimensions of these, and come in as plain numbers.
Shared: every layout of 1 to 4 dimensions. Copied: read-only memory, which warp cannot say.
Refused: arrays without dimensions or with more than 4, arrays of structures; arrays with gradients, without
detach=True.
"""

from __future__ import annotations

from typing import Any

import dlx
from dlx.adapter import Adapter, Blocker, Capabilities, Description, Device, DTypes, GradSupport, Layout, Tensor

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)


class WarpAdapter(Adapter):
    """warp.array."""

    name = package = "warp"
    install = "pip install warp-lang"
    types = ("warp.array",)
    dtypes = DTypes(package, {name: name for name in _DTYPES})
    gradients = GradSupport(lambda array: bool(array.requires_grad))

    def initialize(self) -> None:
        self.module().init()

    def describe(self, obj: Any) -> Description:
        if not obj.requires_grad:
            return Description()
        why, fix = "it requires gradients, which cannot cross", ""
        return Description(blockers=(Blocker(why, fix, resolution=self._detached, option="detach"),))

    def _detached(self, obj: Any) -> Any:
        return self.module().from_dlpack(obj, dtype=obj.dtype)

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=self.dtypes.known(), layouts=Layout.ANY, min_ndim=1, max_ndim=4)

    def load(self, tensor: Tensor) -> Any:
        return self.module().from_dlpack(tensor)

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        return self.module().clone(obj)


@dlx.hookimpl
def dlx_adapters() -> list[Adapter]:
    """Return warp's adapter."""
    return [WarpAdapter()]
