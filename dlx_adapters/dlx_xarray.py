"""The xarray adapter: DataArray, Variable and Dataset, as containers of their arrays.

dlx converts the data of a DataArray or Variable. If xarray supports the result (numpy, cupy, jax, array API modules:
``__array_function__`` or ``__array_namespace__``), it keeps dims, coords, attrs and name; otherwise (torch, dlx, mlx,
...) the result is the array. A Dataset becomes a Dataset, or else a dict of its data variables. Coordinates are never
converted; a resulting xarray object keeps them. Data in a file is read.
"""

from __future__ import annotations

import sys
from typing import Any

from dlx.adapter import Adapter, Container, flatten_mapping, offer


def _rewrap(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    """Return the wrapper with new data, or the data if xarray does not support it."""
    (data,) = children
    try:
        wrapper = obj.copy(deep=False, data=data)
    except (TypeError, ValueError, NotImplementedError):  # xarray calls numpy.asarray on unknown arrays
        return data
    return wrapper if wrapper.data is data else data


def _unflatten_dataset(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    named = dict(zip(keys, children, strict=True))
    kind = sys.modules["xarray"].DataArray
    return obj.assign(named) if all(isinstance(child, kind) for child in children) else named


class XarrayAdapter(Adapter):
    """Containers only."""

    name = package = "xarray"
    containers = (
        Container(
            types=("xarray.DataArray", "xarray.Variable"),
            kind="wrapper",
            flatten=lambda obj: (None, [obj.data]),
            unflatten=_rewrap,
        ),
        Container(
            types=("xarray.Dataset",),
            kind="mapping",
            flatten=flatten_mapping,
            unflatten=_unflatten_dataset,
            elements="fresh",
            falls_to=dict,
        ),
    )


dlx_adapters = offer(XarrayAdapter())
