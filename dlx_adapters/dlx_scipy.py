"""The adapters of frameworks whose arrays consist of numpy arrays: scipy.sparse, pydata's sparse, and awkward.

As sources. Shared: all parts; the index arrays of scipy's coo are stacked in a copy, unless they are the rows of one
array. Refused: other formats, fill values other than 0, GCXS arrays that are not matrices.
As targets: csr, csc, coo and bsr arrays of scipy, COO and GCXS of sparse; dense arrays become numpy's. COO itself sorts
coordinates and adds elements with equal ones, in new memory; GCXS reads unsorted rows wrongly, so they are refused.
Awkward: arrays of lists, nested to any depth, in both directions. Refused: rows that are not in order in memory.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import dlx
from dlx import adapter as api
from dlx.errors import LayoutError

_DTYPES = frozenset(api.COMMON_DTYPES) - {"float16", "bfloat16"} | {"complex64", "complex128"}


def _split(obj: Any) -> dict[str, Any]:
    """Return the parts of an array of scipy, which may have room for more elements, or of sparse."""
    if getattr(obj, "fill_value", 0) != 0:
        raise LayoutError(f"its fill value is {obj.fill_value}, not 0", fix="Call .todense() first.")
    coords, is_matrix = getattr(obj, "coords", None), any(cls.__name__ == "spmatrix" for cls in type(obj).__mro__)
    plain = {"shape": tuple(map(int, obj.shape)), "_is_matrix": is_matrix}  # of scipy, whose * multiplies matrices
    if coords is not None:
        return {"data": obj.data, "coords": _find_matrix(coords), **plain}
    count = int(obj.indptr[-1])
    return {"data": obj.data[:count], "indices": obj.indices[:count], "indptr": obj.indptr, **plain}


def _find_matrix(coords: Any) -> Any:
    """Return the matrix whose rows are scipy's index arrays, such as after a conversion; else a list of them."""
    if not isinstance(coords, tuple):
        return coords
    whole = coords[0].base if len(coords) > 1 else coords[0][None]
    is_matrix = isinstance(whole, sys.modules["numpy"].ndarray) and whole.shape == (len(coords), *coords[0].shape)
    rows = [row.__array_interface__ for row in whole] if is_matrix else []
    return whole if rows == [row.__array_interface__ for row in coords] else list(coords)


def _join(kind: str, parts: dict[str, Any]) -> Any:
    """Return an array of scipy. The constructor would narrow indices, so it gets no arrays."""
    data, name = parts["data"], f"{kind}_matrix" if parts.get("_is_matrix") else f"{kind}_array"
    options = {"blocksize": data.shape[1:]} if kind == "bsr" else {}
    new = getattr(sys.modules["scipy.sparse"], name)(parts["shape"], dtype=data.dtype, **options)
    new.data = data
    if kind == "coo":
        new.coords, new.has_canonical_format = tuple(parts["coords"]), False
    else:
        new.indices, new.indptr = parts["indices"], parts["indptr"]
    return new


def _compound(kind: str) -> api.Compound:
    """Return the declaration of scipy's arrays of one kind."""
    types, join = (f"scipy.sparse.{kind}_array", f"scipy.sparse.{kind}_matrix"), functools.partial(_join, kind)
    return api.Compound(kind, types, _split, join, dense=".toarray()", limits=("axes",), dtypes=_DTYPES)


def _gcxs(kind: str, axis: int) -> api.Compound:
    """Return the declaration of the matrices of sparse that are compressed along an axis."""

    def matches(obj: Any) -> bool:
        return obj.ndim == 2 and tuple(obj.compressed_axes) == (axis,)

    def join(parts: dict[str, Any]) -> Any:
        arrays = parts["data"], parts["indices"], parts["indptr"]
        return sys.modules["sparse"].GCXS(arrays, shape=parts["shape"], compressed_axes=(axis,))

    types, limits = ("sparse.GCXS",), ("rising",)
    return api.Compound(kind, types, _split, join, matches, dense=".todense()", limits=limits, dtypes=_DTYPES)


def _join_sparse_coo(parts: dict[str, Any]) -> Any:
    known = {"sorted": True, "has_duplicates": False} if parts["_is_sorted"] else {}
    return sys.modules["sparse"].COO(parts["coords"], parts["data"], parts["shape"], **known)


class _OverNumpy(api.Adapter):
    """Base class of the adapters: dense arrays become numpy's."""

    dtypes = api.DTypes("numpy", {name: name for name in api.COMMON_DTYPES if name != "bfloat16"} | {"bool": "bool_"})

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(
            None, layouts=api.Layout.ANY, min_alignment=1, keeps_readonly=True, subbyte="padded", empty_extents="bytes"
        )

    def load(self, tensor: api.Tensor) -> Any:
        return dlx.convert(tensor, to="numpy")


class ScipyAdapter(_OverNumpy):
    """scipy.sparse."""

    name = package = "scipy"
    containers = tuple(map(_compound, ("csr", "csc", "bsr", "coo")))


class SparseAdapter(_OverNumpy):
    """sparse.COO, sparse.GCXS."""

    name = package = "sparse"
    containers = (
        api.Compound("coo", ("sparse.COO",), _split, _join_sparse_coo, dense=".todense()", limits=("sorts",)),
        _gcxs("csr", 0),
        _gcxs("csc", 1),
    )


# ---- awkward ---------------------------------------------------------------------------------------------------------


def _unmask(layout: Any) -> Any:
    """Return the content of a layout that allows missing values and has none, such as from Arrow."""
    return layout.content if type(layout).__name__ == "UnmaskedArray" else layout


_AWKWARD = _DTYPES | {"float16"}


def _is_ragged(obj: Any) -> bool:
    lists = _unmask(obj.layout)
    is_list = type(lists).__name__ in ("ListOffsetArray", "ListArray")
    return is_list and lists.parameter("__array__") is None  # which text has


def _split_awkward(obj: Any) -> dict[str, Any]:
    ak, lists = sys.modules["awkward"], _unmask(obj.layout)
    if not hasattr(lists, "offsets"):
        raise LayoutError("its rows do not follow each other in memory", fix="Call awkward.to_packed(x) first.")
    offsets = lists.offsets.data
    values = _unmask(lists.content[int(offsets[0]) : int(offsets[-1])])
    if _is_ragged(inner := ak.Array(values)):
        return {"values": inner, "offsets": offsets}
    if not (values.is_numpy or values.is_regular or values.is_unknown):  # unknown: without elements
        fix = "Call awkward.drop_none(x) or awkward.fill_none(x, value) first, or convert its fields one by one."
        raise LayoutError(f"its values are of the type {inner.type.content}, not numbers", fix=fix)
    return {"values": ak.to_numpy(values, allow_missing=False), "offsets": offsets}


def _join_awkward(parts: dict[str, Any]) -> Any:
    ak, offsets, values = sys.modules["awkward"], parts["offsets"], parts["values"]
    content = values.layout if isinstance(values, ak.Array) else ak.contents.NumpyArray(values)
    index = ak.index.Index32 if offsets.dtype.itemsize == 4 else ak.index.Index64
    return ak.Array(ak.contents.ListOffsetArray(index(offsets), content))


class AwkwardAdapter(_OverNumpy):
    """awkward.Array with rows of varying length."""

    name = package = "awkward"
    containers = (
        api.Compound("ragged", ("awkward.Array",), _split_awkward, _join_awkward, _is_ragged, dtypes=_AWKWARD),
    )


dlx_adapters = api.offer(ScipyAdapter(), SparseAdapter(), AwkwardAdapter())
