"""The dask adapter: dask.array.Array, whose chunks are converted when they are computed.

As a source: the result is a dask array with the same chunks, and the conversion computes nothing. Each chunk is
converted after it is computed, in the same thread or process. dlx registers how dask concatenates chunks of torch, jax,
tensorflow and mlx. Functions that need the data immediately, unlike `dlx.describe`, refuse the array and suggest
`.compute()`.
As a target: dask chunks over the memory of a numpy array.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import uuid
from collections.abc import Callable
from typing import Any, cast

import dlx
from dlx import adapter as api
from dlx.errors import ConversionError

_DTYPES = {*api.COMMON_DTYPES, "complex64", "complex128"} - {"bfloat16"}  # numpy has no bfloat16
_NOT_COMPUTED = api.Blocker("its data is not computed yet", "Call .compute() first.", ConversionError)
_CONCATENATE = {  # root package of a chunk's type -> function of (arrays, axis)
    "torch": "torch.concatenate", "jaxlib": "jax.numpy.concatenate",
    "tensorflow": "tensorflow.concat", "mlx": "mlx.core.concatenate",
}  # fmt: skip


def _convert_chunk(chunk: Any, options: dict[str, Any]) -> Any:
    """Convert one chunk, as a task of dask's graph."""
    found = dlx.convert(chunk, **options)
    _register_concatenate(cast("Any", type(found)))
    return found


def _map_chunks(obj: Any, options: dict[str, Any]) -> Any:
    array, base = sys.modules["dask.array"], sys.modules["dask.base"]
    meta = _convert_chunk(obj._meta, options)  # no elements; raises if no chunk can be converted
    to = options["to"] if isinstance(options["to"], str) else api.type_name(options["to"])
    name = f"dlx-{to}-{base.tokenize(obj.name, options)}"
    return array.map_blocks(_convert_chunk, obj, options, meta=meta, name=name)


def _split(array: Any) -> Any:
    """Return a dask array whose chunks are views of a numpy array; `dask.array.from_array` would copy them."""
    core, name = sys.modules["dask.array.core"], f"dlx-{uuid.uuid4()}"
    chunks = core.normalize_chunks("auto", array.shape, dtype=array.dtype)
    numbers = itertools.product(*(range(len(each)) for each in chunks))
    parts = core.slices_from_chunks(chunks)
    graph = {(name, *at): array[(*part, ...)] for at, part in zip(numbers, parts, strict=True)}
    return core.Array(graph, name, chunks, meta=array[(*(slice(0, 0),) * array.ndim, ...)])


@functools.cache
def _register_concatenate(kind: type) -> None:
    """Register with dask how to concatenate chunks of a type."""
    name = _CONCATENATE.get(kind.__module__.partition(".")[0])
    concatenate = api.look_up(name) if name else None
    if concatenate is not None:
        sys.modules["dask.array.core"].concatenate_lookup.register(kind, functools.partial(_concatenate, concatenate))


def _concatenate(concatenate: Callable[..., Any], arrays: Any, axis: int = 0, **options: Any) -> Any:
    return concatenate(list(arrays), axis=axis)


def _backend(name: str) -> Any:
    """Return the backend of a framework for `dask.array.Array.to_backend`."""
    backends = importlib.import_module("dask.array.backends")

    class Backend(backends.ArrayBackendEntrypoint):  # type: ignore[misc, name-defined]
        @staticmethod
        def to_backend(data: Any, **options: Any) -> Any:
            return dlx.convert(data, to=name, **options)

        @classmethod
        def to_backend_dispatch(cls) -> Any:
            return functools.partial(dlx.convert, to=name)

    return Backend()


torch_backend, jax_backend = functools.partial(_backend, "torch"), functools.partial(_backend, "jax")


class DaskAdapter(api.Adapter):
    """dask.array.Array."""

    name = "dask"
    package = "dask.array"
    types = ("dask.array.Array",)
    dtypes = api.DTypes("numpy", {name: name for name in _DTYPES})
    arrays = api.Arrays(map_chunks=_map_chunks)

    def describe(self, obj: Any) -> api.Description:
        return api.Description(functools.partial(self._info, obj), (_NOT_COMPUTED,))

    def _info(self, obj: Any) -> api.ArrayInfo:
        known = all(extent == extent for extent in obj.shape)  # dask uses nan for unknown extents
        meta = dlx.describe(obj._meta)
        name = api.type_name(type(obj))
        shape, nbytes = (tuple(obj.shape), int(obj.nbytes)) if known else (None, None)
        return api.ArrayInfo(self.name, name, meta.dtype, str(obj.dtype), shape, None, meta.device, nbytes, owner=name)

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(dtypes=frozenset(_DTYPES), layouts=api.Layout.ANY, keeps_readonly=True)

    def load(self, tensor: Any) -> Any:
        return _split(dlx.convert(tensor, to="numpy", copy=False))


dlx_adapters = api.offer(DaskAdapter())
