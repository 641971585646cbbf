"""The NVIDIA Warp adapter: warp.array.

Versions: 1.19 and later. Devices: the host; arrays on a GPU can be exported. Dtypes: bool, (u)int8 to 64, float16 to
64, bfloat16; vectors and matrices add dimensions on export, and imports are arrays of numbers.
Shared: all layouts with 1 to 4 dimensions. Copied: read-only memory, because warp has no such flag.
Refused: arrays with 0 or more than 4 dimensions, arrays of structs, strides of partial elements; arrays with gradients,
unless detach=True is passed.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from dlx import adapter as api
from dlx.errors import ConversionError

_DTYPES = api.DTypes("warp", api.COMMON_DTYPES)
_HOST = api.Device("cpu")


def _detach(array: Any) -> Any:
    return sys.modules["warp"].from_dlpack(array, dtype=array.dtype)


def _has_whole_strides(array: Any, dtype: api.DType) -> bool:
    """Return whether all strides are multiples of the dtype's size, as DLPack requires."""
    size = dtype.bits // 8
    return not any(stride % size for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1)


def _export(array: Any) -> api.Tensor | None:
    """Return the tensor of a host array of numbers, or None; warp's export in Python is much slower."""
    dtype = _DTYPES.from_native(array.dtype)
    if dtype is None or array.pinned or not array.device.is_cpu:
        return None
    if not _has_whole_strides(array, dtype):
        return None
    strides = [stride // (dtype.bits // 8) for stride in array.strides]
    return api.over_memory(array.ptr or 0, array.shape, strides, dtype, _HOST, owner=array)


def _release(tensor: api.Tensor, address: int, nbytes: int) -> None:
    """Do nothing: deleting the array also deletes this function's reference to the tensor."""


_GRAD = api.Blocker("it requires gradients, which would be lost", "", ConversionError, _detach, needs="detach")
# warp's export would round them down.
_BROKEN = api.Blocker("its strides are not multiples of the element size", "Call .contiguous() first.")


def _device(native_device: Any) -> api.Device:
    return _HOST if native_device.is_cpu else api.Device("cuda", native_device.ordinal)


class WarpAdapter(api.Adapter):
    """warp.array."""

    name = package = "warp"
    types = ("warp.array",)
    dtypes = _DTYPES
    devices = api.ReportedDevices(_device)
    fast_path = api.FastPath(types=types, export=_export, guards=(api.Guard("requires_grad", _GRAD),))
    gradients = api.GradSupport(lambda array: bool(array.requires_grad))

    def describe(self, obj: Any) -> api.Description:
        dtype = _DTYPES.from_native(getattr(obj.dtype, "_wp_scalar_type_", obj.dtype))  # scalar type of a vector
        broken = dtype is not None and not _has_whole_strides(obj, dtype)
        return api.Description(blockers=(*((_BROKEN,) if broken else ()), *((_GRAD,) if obj.requires_grad else ())))

    def capabilities(self) -> api.Capabilities:
        sys.modules["warp"].init()
        return api.Capabilities(dtypes=self.dtypes.known(), layouts=api.Layout.ANY, ndims=(1, 4))

    def load(self, tensor: api.Tensor) -> Any:
        step = tensor.dtype.bits // 8
        return sys.modules["warp"].array(  # twice as fast as its from_dlpack in Python
            ptr=tensor.data_ptr,
            dtype=_DTYPES.to_native(tensor.dtype),
            shape=tensor.shape,
            strides=[stride * step for stride in tensor.strides],
            device="cpu",
            copy=False,
            deleter=functools.partial(_release, tensor),
        )

    def copy(self, obj: Any, device: api.Device | None = None) -> Any:
        return sys.modules["warp"].clone(obj, device=None if device is None else "cpu")


dlx_adapters = api.offer(WarpAdapter())
