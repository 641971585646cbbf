"""`describe`: the dtype, shape and device of an array."""

from __future__ import annotations

from typing import Any

from dlx._core.array_info import ArrayInfo
from dlx._core.public import public
from dlx._engine.compound import describe_compound
from dlx._engine.fast_path import export_and_describe
from dlx._engine.sources import array_info
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler


@public
def describe(obj: Any) -> ArrayInfo:
    """Describe an array: dtype, shape, strides, device, read-only, owner. Its memory is not accessed.

    Raises
    ------
    AdapterNotFoundError
        If dlx does not recognize it as an array.
    ConversionError
        If it cannot be described, such as a used capsule.

    Examples
    --------
    >>> import dlx
    >>> str(dlx.describe(b"abc"))
    'bytes (uint8[3], read-only)'
    """
    known = export_and_describe(obj)
    if known is not None:
        return known[1]
    inside, handler = lookup.unwrap(obj)
    if isinstance(handler, CompoundHandler):
        return describe_compound(inside, handler)
    return array_info(*lookup.source(inside if handler is None else obj))
