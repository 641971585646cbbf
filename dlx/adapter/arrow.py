"""`ArrowSource`: the base of adapters for arrays with Arrow's PyCapsule interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dlx._core import cuda, native
from dlx._core.array_info import ArrayInfo
from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.types import host_readable
from dlx._protocols import arrow
from dlx._support.reflect import TypeCache, type_name
from dlx.adapter.base import Adapter, Description
from dlx.adapter.declarations import Arrays, Blocker, Compound
from dlx.errors import DeviceError, DTypeError, LayoutError

__all__ = ["ArrowSource", "arrow_info", "arrow_lists"]

_NAMES = {"float16": "halffloat", "float32": "float", "float64": "double"}  # Arrow's names


_known: TypeCache[tuple[str, tuple[str, ...]]] = TypeCache()


def _known_of(kind: type) -> tuple[str, tuple[str, ...]]:
    """Return a type's name and the protocols that it supports."""
    facts = _known.find(kind)
    if facts is None:
        protocols = tuple(name for name in ("__dlpack__", *arrow.METHODS) if hasattr(kind, name))
        facts = _known.keep(kind, (type_name(kind), protocols))
    return facts


def arrow_info(framework: str, obj: Any, tensor: Tensor) -> ArrayInfo:
    """Return the description of an array that `arrow_exchange` has exported as `tensor` (for `FastPath.describe`)."""
    exact: Any = type(obj)
    (kind, protocols), name = _known_of(exact), tensor.dtype.name
    return ArrayInfo.of_tensor(tensor, framework, kind, protocols, _NAMES.get(name))


def arrow_lists(types: tuple[str, ...], matches: Callable[[Any], bool] | None = None, join: Any = None) -> Compound:
    """Return the declaration of types with Arrow's interface whose values are lists of varying length.

    Parameters
    ----------
    types, matches, join
        As in `Compound`; `join` gets ``values`` and ``offsets``.
    """
    return Compound("ragged", types, arrow.split_lists, join, matches)


class ArrowSource(Adapter):
    """An adapter for objects with ``__arrow_c_array__``, ``__arrow_c_stream__`` or their device variants.

    Numbers in one chunk are shared read-only; fixed-size lists and fixed-shape tensors become dimensions. A copy joins
    several chunks (on CUDA devices, too) and unpacks bools (on the host); a plan shows it. Nulls and other types are
    refused with an explanation.
    """

    arrays = Arrays(alignment=lib.DLX_ALIGNMENT)  # of copies, which dlx makes

    joined = staticmethod(native.arrow_join)
    """For `FastPath.unblocks`: copies chunks and bools on the host."""

    def shown(self, obj: Any) -> str:
        """Return the framework's name for the type of the values; empty: Arrow's name."""
        return ""

    def describe(self, obj: Any) -> Description:
        """Describe an array by its Arrow data."""
        column = arrow.column(obj)
        blocker = self._blocker(obj, column)
        if blocker is not None:
            return Description(functools.partial(self._info, obj, column), (blocker,), device=column.device)
        return Description(functools.partial(self._info, obj, column), (), column.share())

    def export(self, obj: Any, *, stream: int | None = None) -> Tensor:
        """Return a tensor over the array's memory, or the tensor that a resolution has made."""
        return obj if isinstance(obj, Tensor) else arrow.column(obj).share()

    def _gather(self, obj: Any) -> Tensor:
        return arrow.column(obj).gather()

    def _blocker(self, obj: Any, column: arrow.Column) -> Blocker | None:
        if column.dtype is None:
            return Blocker(*arrow.why_refused(column, self.shown(obj)), DTypeError)
        if column.n_nulls:
            why = f"it has {column.n_nulls} null{'s' * (column.n_nulls > 1)}, which DLPack cannot represent"
            return Blocker(why, arrow.null_fix(column), LayoutError)
        if not column.is_packed and column.n_chunks < 2:
            return None
        if not (host_readable(column.device) or (cuda.is_cuda(column.device) and not column.is_packed)):
            if column.is_packed:
                return Blocker("its bools are packed in device memory", "Cast them to uint8 first.", DeviceError)
            why = f"it consists of {column.n_chunks} chunks of device memory"
            return Blocker(why, "Join them first.", DeviceError)
        why = "its bools are packed eight to a byte" if column.is_packed else f"it consists of {column.n_chunks} chunks"
        return Blocker(why, resolution=self._gather, needs="copy")

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
