"""The MLX adapter: mlx.core.array.

Versions: 0.32 and later. Devices: the host. Dtypes: bool, (u)int8 to 64, float16, bfloat16, float32, complex64;
float64 is exported but refused on import, because mlx would narrow it.
Shared: exports, which mlx declares writable. Copied: imports, because mlx copies host memory.
Refused: arrays inside mx.compile and mx.vmap, which have no values. Inside mx.grad, mlx exports values and silently
ignores the gradient.
Gradients: dlx differentiates functions of mlx (`dlx.using` with ``grad=True``) for real arguments. The backward pass
calls the function again.

Exporting or describing an array computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dlx import adapter as api

_TAKEN = frozenset({*api.COMMON_DTYPES, "complex64"} - {"float64"})
_NARROWS = {"float64": ("mlx would narrow float64 to float32", "")}


def _export(array: Any) -> api.Tensor:
    return api.consumed(array.__dlpack__())


def _is_differentiable(array: Any) -> bool:
    mx = sys.modules["mlx.core"]
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _vjp(function: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
    mx = sys.modules["mlx.core"]
    results = list(function(*arrays))

    def pullback(gradients: Sequence[Any]) -> list[Any]:
        there = [i for i, each in enumerate(gradients) if each is not None]

        def select(*operands: Any) -> list[Any]:
            repeated = list(function(*operands))
            return [repeated[i] for i in there]

        return list(mx.vjp(select, list(arrays), [gradients[i] for i in there])[1])

    return results, pullback


def _device(native_device: Any) -> api.Device:
    """Return the device of an `mlx.core.Device` or `mlx.core.DeviceType`."""
    kind = getattr(native_device, "type", native_device)
    return api.Device({"cpu": "cpu", "gpu": "metal"}[kind.name])


class MlxAdapter(api.Adapter):
    """mlx.core.array."""

    name = "mlx"
    package = "mlx.core"
    types = ("mlx.core.array",)
    namespaces = ("mlx.core",)
    dtypes = api.DTypes(package, {name: name for name in (*_TAKEN, "float64")} | {"bool": "bool_"})
    devices = api.Devices(_device)
    fast_path = api.FastPath(types=types, export=_export)
    gradients = api.GradSupport(lambda array: False, _is_differentiable, _vjp)

    def capabilities(self) -> api.Capabilities:
        layouts = api.Layout.ZERO | api.Layout.GAPS | api.Layout.PERMUTED
        return api.Capabilities(dtypes=_TAKEN, layouts=layouts, min_alignment=1, copies=True, refusals=_NARROWS)

    def load(self, tensor: api.Tensor) -> Any:
        try:
            return sys.modules["mlx.core"].from_dlpack(tensor)
        except ValueError:  # negative strides of extents 0 or 1
            return sys.modules["mlx.core"].from_dlpack(api.forward(tensor))

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        return sys.modules["mlx.core"].array(obj)


dlx_adapters = api.offer(MlxAdapter())
