"""MLX for dlx: mlx.core.array.

Versions: 0.32 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16, bfloat16, float32, complex64;
float64 is exported, and refused on the way in, since mlx would narrow it.
Shared: what leaves mlx, writable as mlx says it is. Copied: whatever comes in; mlx imports no host memory as it is.
Refused: arrays inside mx.compile and mx.vmap, which have no values. Inside mx.grad mlx gives values out, without a
word about the gradient.
Gradients: functions of mlx are differentiated for others (`dlx.using` with ``grad=True``), real arguments only. The
way back calls the function once more.

An array that mlx has not computed yet is computed when it is exported or described.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import dlx
from dlx.adapter import Adapter, Capabilities, Device, DTypes, GradSupport, Layout, Tensor, over_memory

_TAKEN = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "complex64"),
)
_NARROWS = {"float64": ("mlx would narrow float64 to float32", "Convert the values to float32 first.")}


def _is_differentiable(array: Any) -> bool:
    mx = sys.modules["mlx.core"]
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _vjp(function: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
    mx = sys.modules["mlx.core"]
    results = list(function(*arrays))

    def pullback(gradients: Sequence[Any]) -> list[Any]:
        there = [i for i, each in enumerate(gradients) if each is not None]

        def chosen(*operands: Any) -> list[Any]:
            again = list(function(*operands))
            return [again[i] for i in there]

        return list(mx.vjp(chosen, list(arrays), [gradients[i] for i in there])[1])

    return results, pullback


class MlxAdapter(Adapter):
    """mlx.core.array."""

    name = "mlx"
    package = "mlx.core"
    install = "pip install 'mlx[cpu]'"
    types = ("mlx.core.array",)
    dtypes = DTypes("mlx.core", {"bool": "bool_", "float64": "float64"} | {name: name for name in _TAKEN})

    gradients = GradSupport(lambda array: False, _is_differentiable, _vjp)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=frozenset({"bool", *_TAKEN}),
            layouts=Layout.ZERO | Layout.GAPS | Layout.PERMUTED,
            min_alignment=1,
            copies=True,
            narrows=frozenset(_NARROWS),
            refusals=_NARROWS,
        )

    def load(self, tensor: Tensor) -> Any:
        if any(stride < 0 for stride in tensor.strides):  # of an extent of 1, which mlx refuses all the same
            strides = [max(stride, 0) for stride in tensor.strides]
            tensor = over_memory(tensor.data_ptr, tensor.shape, strides, tensor.dtype, tensor.device, owner=tensor)
        return self.module().from_dlpack(tensor)

    def copy(self, obj: Any, device: Device | None = None) -> Any:
        return self.module().array(obj)


@dlx.hookimpl
def dlx_adapters() -> list[Adapter]:
    """Return mlx's adapter."""
    return [MlxAdapter()]
