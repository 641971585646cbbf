"""The part of the PyTorch adapter for sparse and ragged tensors."""

from __future__ import annotations

import functools
import sys
from typing import Any

from dlx import adapter as api
from dlx.errors import LayoutError


def _layout_of(obj: Any) -> Any:
    torch = sys.modules["torch"]
    if type(obj) is torch.Tensor:
        return obj.layout
    with torch._C.DisableTorchFunctionSubclass():
        return obj.layout


def _split_compressed(obj: Any) -> dict[str, Any]:
    """Return the parts of a csr, csc or bsr tensor."""
    is_csc = obj.layout is sys.modules["torch"].sparse_csc
    indptr, indices = (obj.ccol_indices(), obj.row_indices()) if is_csc else (obj.crow_indices(), obj.col_indices())
    return {"data": obj.values(), "indices": indices, "indptr": indptr, "shape": tuple(obj.shape)}


def _join_compressed(kind: str, parts: dict[str, Any]) -> Any:
    create = getattr(sys.modules["torch"], f"sparse_{kind}_tensor")
    options = {"check_invariants": False, "device": parts["data"].device}  # not torch's default device
    return create(parts["indptr"], parts["indices"], parts["data"], parts["shape"], **options)


def _split_coo(obj: Any) -> dict[str, Any]:
    if obj.requires_grad and not obj.is_coalesced():  # only `values()`, which needs unique indices, keeps the graph
        raise LayoutError("it records gradients, and is not coalesced", fix="Call .coalesce() or .detach() first.")
    values = obj.values() if obj.requires_grad else obj._values()
    shape, is_coalesced = tuple(obj.shape), obj.is_coalesced()
    return {"data": values, "coords": obj._indices(), "shape": shape, "_is_coalesced": is_coalesced}


def _join_coo(parts: dict[str, Any]) -> Any:
    create, is_coalesced = sys.modules["torch"].sparse_coo_tensor, parts.get("_is_coalesced")
    arrays, device = (parts["coords"], parts["data"], parts["shape"]), parts["data"].device
    return create(*arrays, check_invariants=False, is_coalesced=is_coalesced, device=device)


def _compound(kind: str, layout: str, split: Any, join: Any, **options: Any) -> api.Compound:
    """Return the declaration of the tensors of one layout."""

    def matches(obj: Any) -> bool:
        return _layout_of(obj) is getattr(sys.modules["torch"], layout)

    return api.Compound(kind, ("torch.Tensor",), split, join, matches, **options)


def _compressed(kind: str) -> api.Compound:
    join = functools.partial(_join_compressed, kind)
    return _compound(kind, f"sparse_{kind}", _split_compressed, join, dense=".to_dense()", limits=("unique",))


def _split_jagged(obj: Any) -> dict[str, Any]:
    if obj._ragged_idx != 1:
        raise LayoutError("its ragged dimension is not the second", fix=f"Call .transpose(1, {obj._ragged_idx}) first.")
    if obj.lengths() is not None:
        raise LayoutError("its rows have gaps", fix="Call .contiguous() first.")
    lengths = {"_min_seqlen": obj._maybe_min_seqlen, "_max_seqlen": obj._maybe_max_seqlen}  # torch pads to these
    return {"values": obj.values(), "offsets": obj.offsets(), **lengths}


def _join_jagged(parts: dict[str, Any]) -> Any:
    lengths = {name: parts.get(f"_{name}") for name in ("min_seqlen", "max_seqlen")}
    return sys.modules["torch"].nested.nested_tensor_from_jagged(parts["values"], parts["offsets"], **lengths)


COMPOUNDS = (
    _compound("ragged", "jagged", _split_jagged, _join_jagged, dense=".to_padded_tensor(value)", limits=("flat",)),
    _compound("coo", "sparse_coo", _split_coo, _join_coo, indices={"coords": ("int64",)}, dense=".to_dense()"),
    *map(_compressed, ("csr", "csc", "bsr")),
)
