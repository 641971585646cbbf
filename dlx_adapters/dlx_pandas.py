"""The pandas adapter: Series and DataFrame, as sources only.

A Series of numpy numbers or bools shares its array read-only, in any layout; NaN stays NaN. Other dtypes (nullable,
pyarrow's, text, dates, categories) are read by Arrow's interface, which requires pyarrow; nulls are refused with their
count, and so are Python objects. A DataFrame becomes a dict of its columns. The index is ignored.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import dlx
from dlx import adapter as api
from dlx.errors import DlxError, DTypeError, LayoutError


def _is_number(values: Any) -> bool:
    """Return whether an object is a numpy array that a tensor can share."""
    if type(values) is not sys.modules["numpy"].ndarray:
        return False
    dtype = values.dtype
    is_number = dtype.char in "?bBhHiIlLqQefdFD" or (dtype.char in "gG" and not _is_long(dtype))
    return is_number and bool(dtype.isnative)


def _is_long(dtype: Any) -> bool:
    """Return whether a numpy dtype is a (complex) long double that is wider than a double."""
    return dtype.char in "gG" and dtype.itemsize > (8 if dtype.char == "g" else 16)


def _share(series: Any) -> api.Tensor | None:
    """Return a tensor over a Series' numpy array, or None. ``_values`` is 10 times as fast as ``.to_numpy()``."""
    values: Any = getattr(series, "_values", None)
    return cast("api.Tensor", dlx.convert(values, to="dlx", copy=False)) if _is_number(values) else None


_info = api.tensor_info("__arrow_c_stream__")


_OBJECTS = "Call numpy.array(list(x)) first, or dlx.stack(x, to=...) if they are arrays of one shape."


def _find_refusal(series: Any) -> tuple[str, str] | None:
    """Return (reason, fix) for a dtype that Arrow's interface would guess or refuse without a fix; or None."""
    dtype = series.dtype
    if isinstance(dtype, sys.modules["pandas"].SparseDtype):
        return "its values are sparse", "Call .sparse.to_dense() first."
    if dtype.name == "geometry":
        if not hasattr(type(series), "get_coordinates"):
            return "its values are geometries", "Convert geopandas.GeoSeries(x).get_coordinates()."
        return "its values are geometries", "Convert its .get_coordinates(), or for points its .x and .y."
    if not isinstance(dtype, sys.modules["numpy"].dtype):
        return None
    if dtype.hasobject:
        return "its values are Python objects", _OBJECTS
    if _is_long(dtype):
        wide = "float64" if dtype.kind == "f" else "complex128"
        return f"{dtype} has no counterpart in other frameworks", f"Call .astype('{wide}') first."
    if not dtype.isnative:
        return "it is in the other byte order", "Call .astype(x.dtype.newbyteorder('=')) first."
    return None


def _has_lists(series: Any) -> bool:
    types, kind = api.look_up("pyarrow.types"), getattr(series.dtype, "pyarrow_dtype", None)
    return kind is not None and (types.is_list(kind) or types.is_large_list(kind))


def _repeated(names: Any) -> LayoutError:
    name = names[names.duplicated()][0]
    return LayoutError(f"it has several columns named {name!r}", fix="Rename them, or convert them one by one.")


def _flatten(frame: Any) -> tuple[None, list[Any]]:
    if not frame.columns.is_unique:
        raise _repeated(frame.columns)
    return None, [dict(frame.items())]


def _columns(frame: Any) -> tuple[Any, list[Any], list[slice]] | None:
    """Return the matrices of numbers, and the places of their columns: a Series of each column takes longer."""
    names = frame.columns
    blocks: Any = getattr(frame._mgr, "blocks", ())
    if not names.is_unique:
        raise _repeated(names)
    if len(blocks) == 1 and _is_number(values := blocks[0].values) and values.ndim == 2:
        return names, [values.T], [slice(0, len(values))]
    found: list[tuple[slice, Any]] = []
    for block in blocks:
        values = block.values
        if not (_is_number(values) and values.ndim == 2):
            return None
        places = block.mgr_locs
        if places.is_slice_like and places.as_slice.step > 0:
            found.append((places.as_slice, values.T))
        else:
            found += [(slice(place, place + 1), values[i : i + 1].T) for i, place in enumerate(places)]
    found.sort(key=lambda each: each[0].start)
    return (names, [each for _, each in found], [at for at, _ in found]) if found else None


class PandasAdapter(api.ArrowSource):
    """pandas.Series, and pandas.DataFrame as their container."""

    name = package = "pandas"
    types = ("pandas.Series",)
    arrays = api.Arrays(immutable=True, alignment=256)  # of the copies that dlx makes
    fast_path = api.FastPath(types=("pandas.Series",), export=_share, describe=_info)
    containers = (
        api.Container(("pandas.DataFrame",), "wrapper", _flatten, falls_to=dict, live=_columns),
        api.arrow_lists(("pandas.Series",), _has_lists),
    )

    def describe(self, obj: Any) -> api.Description:
        tensor = _share(obj)
        refused = None if tensor is not None else _find_refusal(obj)
        if refused is not None:
            info = api.ArrayInfo(self.name, api.type_name(type(obj)), None, str(obj.dtype), obj.shape)
            return api.Description(info, (api.Blocker(*refused, DTypeError),))
        if tensor is None:
            try:
                return super().describe(obj)
            except DlxError as error:
                raise error.complete(fix="Call .astype with a numeric dtype first.") from error.__cause__
        return api.Description(functools.partial(_info, self.name, obj, tensor), (), tensor)

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        tensor = _share(obj)
        return super().export(obj, stream=stream) if tensor is None else tensor


dlx_adapters = api.offer(PandasAdapter())
