"""xarray for dlx: DataArray, Variable and Dataset, as containers of the arrays in them; xarray is no target.

A DataArray or Variable is converted by its data. If xarray can hold the result (numpy, cupy, jax, array API modules:
with ``__array_function__`` or ``__array_namespace__``), the result is one again, with its dims, coords, attrs and
name; elsewhere (torch, dlx, mlx, ...) it is the array alone. A Dataset becomes a Dataset, or else a dict of its data
variables. Coordinates are labels: they are never converted, and stay where the container stays. Data that is still in
a file is read.
"""

from __future__ import annotations

import sys
from typing import Any

from dlx.adapter import Adapter, Container, flatten_mapping, offer


def _unwrapped(obj: Any, keys: Any, children: list[Any], new_empty: Any) -> Any:
    """Return the wrapper around its new data, or that data where it cannot be held as it is."""
    (data,) = children
    try:
        held = obj.copy(deep=False, data=data)
    except (TypeError, ValueError, NotImplementedError):  # xarray calls numpy.asarray on unknown arrays
        return data
    return held if held.data is data else data


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
            unflatten=_unwrapped,
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
