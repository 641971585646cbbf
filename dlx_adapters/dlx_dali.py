"""The NVIDIA DALI adapter: tensors, tensor lists and batches of the dynamic mode.

As a source. Shared: TensorCPU, TensorGPU and dynamic tensors; TensorListCPU, TensorListGPU and a Batch become lists of
their tensors. As a target: TensorCPU and TensorGPU over compact memory. A list of arrays becomes a list of them in one
pass, for `TensorListCPU(list)`, `ndd.as_batch(list)` or an external source. dlx does not pass complex numbers, whose
imaginary parts DALI drops.
"""

from __future__ import annotations

import sys
from typing import Any

from dlx import adapter as api

_DTYPES = {name: name.upper() for name in api.COMMON_DTYPES if name != "bfloat16"} | {"float32": "FLOAT"}


def _list(kind: str, tensors: Any) -> api.Container:
    """Return the handler of a type that becomes a list of its tensors."""
    return api.Container((kind,), "wrapper", lambda obj: (None, [list(tensors(obj))]), falls_to=list)


def _export(tensor: Any) -> api.Tensor:
    return api.consumed(tensor.__dlpack__())


class DaliAdapter(api.Adapter):
    """nvidia.dali."""

    name = "dali"
    package = "nvidia.dali"
    install = "pip install nvidia-dali-cuda120"
    types = ("nvidia.dali.backend.TensorCPU", "nvidia.dali.backend.TensorGPU")
    dtypes = api.DTypes("nvidia.dali.types", _DTYPES)
    devices = api.ReportedDevices()
    fast_path = api.FastPath(types=("nvidia.dali.backend.TensorCPU",), export=_export)
    containers = (
        _list("nvidia.dali.backend.TensorListCPU", iter),
        _list("nvidia.dali.backend.TensorListGPU", iter),
        _list("nvidia.dali.experimental.dynamic.Batch", lambda batch: batch.tensors),
    )

    def capabilities(self) -> api.Capabilities:
        kinds = frozenset(api.Device(name).type for name in ("cpu", "cuda"))
        return api.Capabilities(dtypes=frozenset(_DTYPES), device_types=kinds)

    def load(self, tensor: api.Tensor) -> Any:
        backend = sys.modules["nvidia.dali.backend"]
        return (backend.TensorCPU if tensor.is_host else backend.TensorGPU)(tensor.__dlpack__())


dlx_adapters = api.offer(DaliAdapter())
