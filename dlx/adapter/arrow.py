"""`ArrowSource`: an adapter whose arrays are read by Arrow's PyCapsule interface."""

from __future__ import annotations

import functools
from typing import Any

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.native import Tensor
from dlx._core.types import host_readable
from dlx._protocols import arrow
from dlx._support.reflect import TypeCache, type_name
from dlx.adapter.base import Adapter, Description
from dlx.adapter.declarations import Blocker
from dlx.errors import DeviceError, DTypeError, LayoutError

__all__ = ["ArrowSource", "arrow_info"]

_NAMES = {"float16": "halffloat", "float32": "float", "float64": "double"}  # what Arrow calls them


_known: TypeCache[tuple[str, tuple[str, ...]]] = TypeCache()


def _known_of(kind: type) -> tuple[str, tuple[str, ...]]:
    """Return a type's name, and the ways in which its objects give out their memory."""
    found = _known.find(kind)
    if found is None:
        protocols = tuple(name for name in ("__dlpack__", *arrow.METHODS) if hasattr(kind, name))
        found = _known.keep(kind, (type_name(kind), protocols))
    return found


def arrow_info(framework: str, obj: Any, tensor: Tensor) -> ArrayInfo:
    """Return the description of an array of which `arrow_exchange` has made a tensor, see `FastPath.describe`."""
    exact: Any = type(obj)
    (kind, protocols), name = _known_of(exact), tensor.dtype.name
    return ArrayInfo.of_tensor(tensor, framework, kind, protocols, _NAMES.get(name))


class ArrowSource(Adapter):
    """An adapter for objects with ``__arrow_c_array__``, ``__arrow_c_stream__``, or what these are called for devices.

    Numbers in one chunk are shared, read-only; fixed-size lists and fixed-shape tensors of them are dimensions. Chunks
    are joined by a copy that a plan shows, on a CUDA device in the order of their events; so are bools of the host
    unpacked. Nulls and other types are refused by name.
    """

    joined = staticmethod(native.arrow_joined)
    """For `FastPath.unblocks`: makes the copy of chunks and bools on the host."""

    def shown(self, obj: Any) -> str:
        """Return what the framework calls the type of an array's values; empty: what Arrow calls it."""
        return ""

    def describe(self, obj: Any) -> Description:
        """Describe an array by what it gives out."""
        column = arrow.column(obj)
        blocker = self._blocker(obj, column)
        if blocker is not None:
            return Description(functools.partial(self._info, obj, column), (blocker,), device=column.device)
        return Description(functools.partial(self._info, obj, column), (), column.shared())

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        """Return a tensor over the array's memory, or over that of a copy which a resolution has made."""
        return obj if isinstance(obj, Tensor) else arrow.column(obj).shared()

    def _gathered(self, obj: Any) -> Tensor:
        return arrow.column(obj).gathered()

    def _blocker(self, obj: Any, column: arrow.Column) -> Blocker | None:
        if column.dtype is None:
            return Blocker(*arrow.why_refused(column, self.shown(obj)), DTypeError)
        if column.n_nulls:
            why = f"it has {column.n_nulls} null{'s' * (column.n_nulls > 1)}, which DLPack cannot say"
            return Blocker(why, arrow.null_fix(column), LayoutError)
        if not column.is_packed and column.n_chunks < 2:
            return None
        if not (host_readable(column.device) or (cuda.is_cuda(column.device) and not column.is_packed)):
            return Blocker(*arrow.why_not_gathered(column), DeviceError)
        why = "its bools are packed eight to a byte" if column.is_packed else f"it lies in {column.n_chunks} chunks"
        return Blocker(why, resolution=self._gathered, needs="copy")

    def _info(self, obj: Any, column: arrow.Column) -> ArrayInfo:
        known = column.dtype is not None
        return ArrayInfo(
            framework=self.name,
            type_name=type_name(column.kind),
            dtype=column.dtype,
            dtype_name=str(column.type.values) if known else self.shown(obj) or str(column.type),
            shape=column.shape,
            strides=column.strides,
            device=column.device,
            nbytes=column.nbytes,
            readonly=True,
            address=column.address,
            owner=type_name(column.kind),
            protocols=_known_of(column.kind)[1],
        )
