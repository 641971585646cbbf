"""The PaddlePaddle adapter: paddle.Tensor.

Versions: 3.3 and later. Devices: the host; tensors on a GPU can be exported. Dtypes: bool, (u)int8 to 64, float16,
bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, complex64 and 128.
Shared: all layouts without negative strides, up to 9 dimensions. Copied: read-only memory, because paddle drops the
flag.
Refused: tensors that require gradients, unless detach=True is passed (paddle's exchange table would export them
silently); sparse tensors and tensors without memory.

Paddle 3.3 stores imported memory by address: if two tensors import the same memory at a time, one of them and the owner
of the memory are never released.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import ConversionError

_DTYPES = (*api.COMMON_DTYPES, "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")
_WIDE = tuple(map(api.DType, ("uint16", "uint32", "uint64")))
_LAYOUTS = api.Layout.ZERO | api.Layout.GAPS | api.Layout.PERMUTED
_TAKES = api.Capabilities(dtypes=frozenset(_DTYPES), layouts=_LAYOUTS, ndims=(0, 9))
_GRAD = api.Blocker("it requires gradients, which would be lost", "", ConversionError, "detach", needs="detach")
_SPARSE = api.Blocker("it is sparse", "Call .to_dense() first.", also_blocks=("copy",))


def _device(place: Any) -> api.Device:
    """Return the device of a `Place` of a tensor, or of `CPUPlace` and similar classes."""
    kind, _, number = str(place).removeprefix("Place(").rstrip(")").partition(":")
    return api.Device({"cpu": "cpu", "gpu": "cuda", "gpu_pinned": "cuda_host"}[kind], int(number or 0))


class PaddleAdapter(api.Adapter):
    """paddle.Tensor, and parameters."""

    name = package = "paddle"
    types = ("paddle.Tensor",)
    namespaces = ("paddle",)
    dtypes = api.DTypes(package, _DTYPES)
    devices = api.ReportedDevices(_device, moves=False)  # cpu() loses the graph but not requires_grad
    fast_path = api.FastPath(
        types=types, guards=(api.Guard("requires_grad", _GRAD),), imports=replace(_TAKES, empty_extents="none")
    )
    gradients = api.GradSupport(lambda tensor: not tensor.stop_gradient and sys.modules["paddle"].is_grad_enabled())
    known_issues = (
        api.KnownIssue(
            does="never releases memory if two tensors import the same address at a time",
            see="tests/frameworks/test_more_frameworks.py",
        ),
    )

    def describe(self, obj: Any) -> api.Description:
        grad = (_GRAD,) if obj.requires_grad else ()
        return api.Description(blockers=grad if obj.is_dense() else (_SPARSE, *grad))

    def capabilities(self) -> api.Capabilities:
        return replace(_TAKES, dtypes=self.dtypes.known()) if "paddle" in sys.modules else _TAKES

    def load(self, tensor: api.Tensor) -> Any:
        paddle = sys.modules["paddle"]
        if 0 in tensor.shape:  # all at one address (see `known_issues`)
            signed = paddle.empty(tensor.shape, tensor.dtype.name.removeprefix("u"))  # no wide unsigned ones
            return signed.view(self.dtypes.to_native(tensor.dtype))
        return paddle.from_dlpack(tensor)

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        if self.dtypes.from_native(obj.dtype) in _WIDE:  # clone() does not support these
            return self.load(dlx.convert(obj, to="dlx", copy=True))
        return obj.clone()


dlx_adapters = api.offer(PaddleAdapter())
