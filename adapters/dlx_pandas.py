"""pandas for dlx: Series and DataFrame, as sources; pandas is no target.

A Series of numpy's numbers or bools is the array in it, shared read-only, in any layout; NaN stays NaN. One of another
dtype (nullable, pyarrow's, text, dates, categories) is read by Arrow's interface, for which pandas asks for pyarrow:
its nulls are refused with their count; so are Python objects. A DataFrame becomes a dict of its columns, by their own
names. An index is left out.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import dlx
from dlx import adapter as api
from dlx.errors import DlxError, DTypeError, LayoutError


def _is_long(dtype: Any) -> bool:
    """Return whether a dtype of numpy is C's long double, or complex of it, and wider than a double."""
    return dtype.char in "gG" and dtype.itemsize > (8 if dtype.char == "g" else 16)


def _shared(series: Any) -> api.Tensor | None:
    """Return a tensor over the numpy array of a Series or None; ``_values`` is 10 times faster than ``.to_numpy()``."""
    values: Any = getattr(series, "_values", None)
    if type(values) is not sys.modules["numpy"].ndarray:
        return None
    dtype = values.dtype
    if dtype.kind not in "biufc" or _is_long(dtype) or not dtype.isnative:
        return None
    return cast("api.Tensor", dlx.convert(values, to="dlx", copy=False))


_info = api.tensor_info("__arrow_c_stream__")


_OBJECTS = "Call numpy.array(list(x)) first, or dlx.stack(x, to=...) if they are arrays of one shape."


def _why_refused(series: Any) -> tuple[str, str] | None:
    """Return (reason, fix) for a dtype that Arrow's interface would guess, or refuse without a remedy."""
    dtype = series.dtype
    if isinstance(dtype, sys.modules["pandas"].SparseDtype):
        return "its values are sparse", "Call .sparse.to_dense() first."
    if dtype.name == "geometry":
        if not hasattr(type(series), "get_coordinates"):
            return "it has geometries", "Convert geopandas.GeoSeries(x).get_coordinates()."
        return "it has geometries", "Convert its .get_coordinates(), or of points its .x and its .y."
    if not isinstance(dtype, sys.modules["numpy"].dtype):
        return None
    if dtype.hasobject:
        return "it has Python objects", _OBJECTS
    if _is_long(dtype):
        wide = "float64" if dtype.kind == "f" else "complex128"
        return f"{dtype} has no counterpart in other frameworks", f"Call .astype('{wide}') first."
    if not dtype.isnative:
        return "its bytes are in the other order", "Call .astype(x.dtype.newbyteorder('=')) first."
    return None


def _columns(frame: Any) -> tuple[None, list[Any]]:
    names = frame.columns
    if not names.is_unique:
        again = names[names.duplicated()][0]
        raise LayoutError(f"it has several columns named {again!r}", fix="Rename them, or convert them one by one.")
    return None, [dict(frame.items())]


class PandasAdapter(api.ArrowSource):
    """pandas.Series; pandas.DataFrame as a container of them."""

    name = package = "pandas"
    types = ("pandas.Series",)
    arrays = api.Arrays(immutable=True)
    fast_path = api.FastPath(types=("pandas.Series",), export=_shared, describe=_info)
    containers = (api.Container(types=("pandas.DataFrame",), kind="wrapper", flatten=_columns, falls_to=dict),)

    def describe(self, obj: Any) -> api.Description:
        tensor = _shared(obj)
        refused = None if tensor is not None else _why_refused(obj)
        if refused is not None:
            info = api.ArrayInfo(self.name, api.type_name(type(obj)), None, str(obj.dtype), obj.shape)
            return api.Description(info, (api.Blocker(*refused, DTypeError),))
        if tensor is None:
            try:
                return super().describe(obj)
            except DlxError as error:  # of a dtype that pyarrow does not know
                raise error.complete(fix="Call .astype with a numeric dtype first.") from error.__cause__
        return api.Description(functools.partial(_info, self.name, obj, tensor), (), tensor)

    def export(self, obj: Any, *, stream: int | None = None) -> api.Tensor:
        tensor = _shared(obj)
        return super().export(obj, stream=stream) if tensor is None else tensor


dlx_adapters = api.offer(PandasAdapter())
