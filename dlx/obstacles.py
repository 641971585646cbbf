"""What each obstacle bit of the C core means to a user: one row per bit, refusals first.

A new obstacle is one bit in `dlx.h`, one line in `check.c`, one row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dlx.adapter import Adapter
from dlx.errors import (
    ConversionError,
    CopyRequiredError,
    DeviceError,
    DTypeError,
    LayoutError,
    ReadOnlyError,
)
from dlx.native import Tensor, lib

__all__ = ["READ_ONLY_ROW", "REPACKED", "TABLE", "Row"]

_INSIDE_FLOAT32 = frozenset({lib.kDLBfloat, *range(lib.kDLFloat8_e3m4, lib.kDLFloat4_e2m1fn + 1)})
"""Codes of dtypes all of whose values are float32 values."""

Sentence = Callable[[Tensor, Adapter], str]


@dataclass(frozen=True, slots=True)
class Row:
    """What one obstacle means: a sentence, the class to raise, and whether a copy cures it."""

    bit: int
    error: type[ConversionError]
    sentence: Sentence
    copy_cures: bool = False
    fix: str = "Drop copy=False."

    def fix_for(self, tensor: Tensor, target: Adapter) -> str:
        """Return the fix, made more precise where the dtype allows it."""
        if self.bit == lib.DLX_OBSTACLE_DTYPE and (known := target.why_untaken(tensor.dtype)) is not None:
            return known[1]
        if self.bit == lib.DLX_OBSTACLE_DEVICE and (known := target.why_not_on(tensor.device)) is not None:
            return known[1]
        if self.bit == lib.DLX_OBSTACLE_DTYPE and tensor.dtype.lanes == 1 and tensor.dtype.code in _INSIDE_FLOAT32:
            accepted = target.capabilities.dtypes if target.capabilities is not None else None
            if accepted is not None and "float32" in accepted:
                return "Convert the values to float32 in its own framework first; that is exact."
        return self.fix


def _strides(what: str) -> Sentence:
    return lambda tensor, target: f"{target.name} {target.noun}s cannot {what}, found {tensor.strides} in elements"


def _no_dtype(tensor: Tensor, target: Adapter) -> str:
    known = target.why_untaken(tensor.dtype)
    return known[0] if known else f"{target.name} has no dtype {tensor.dtype}; it has {target.dtype_names()}"


def _no_device(tensor: Tensor, target: Adapter) -> str:
    known = target.why_not_on(tensor.device)
    return known[0] if known else f"its memory is on {tensor.device}, which {target.name} cannot hold"


def _alignment(tensor: Tensor, target: Adapter) -> str:
    assert target.capabilities is not None
    code, bits, lanes = tensor.dtype
    natural = lib.dlx_natural_alignment({"code": code, "bits": bits, "lanes": lanes})
    wanted = target.capabilities.min_alignment or natural
    return f"{target.name} needs data aligned to {wanted} bytes, found address {tensor.data_ptr:#x}"


TABLE: tuple[Row, ...] = (
    Row(
        lib.DLX_OBSTACLE_DEVICE,
        DeviceError,
        _no_device,
        fix="Move it to the host in its own framework first.",
    ),
    Row(
        lib.DLX_OBSTACLE_DTYPE,
        DTypeError,
        _no_dtype,
        fix="Convert the values to one of these in its own framework first.",
    ),
    Row(
        lib.DLX_OBSTACLE_NDIM,
        LayoutError,
        lambda tensor, target: f"{target.name} cannot hold {tensor.ndim} dimensions",
        fix="Reshape it first.",
    ),
    Row(
        lib.DLX_OBSTACLE_EXTENTS,
        LayoutError,
        lambda tensor, target: (
            f"{target.name} multiplies the extents of {target.noun}s without elements, "
            f"and those of {tensor.shape} do not fit"
        ),
        fix="Reshape it first.",
    ),
    Row(
        lib.DLX_OBSTACLE_READONLY,
        ReadOnlyError,
        lambda tensor, target: f"it is read-only, and {target.name} {target.noun}s are always writable",
        copy_cures=True,
    ),
    Row(
        lib.DLX_OBSTACLE_PADDED,
        CopyRequiredError,
        lambda tensor, target: f"its {tensor.dtype} elements take a byte each, and {target.name} packs them",
        copy_cures=True,
    ),
    Row(
        lib.DLX_OBSTACLE_PACKED,
        CopyRequiredError,
        lambda tensor, target: f"its {tensor.dtype} elements are packed, and {target.name} wants a byte each",
        copy_cures=True,
    ),
    Row(lib.DLX_OBSTACLE_NEGATIVE, CopyRequiredError, _strides("have negative strides"), copy_cures=True),
    Row(lib.DLX_OBSTACLE_ZERO, CopyRequiredError, _strides("have strides of 0"), copy_cures=True),
    Row(lib.DLX_OBSTACLE_GAPS, CopyRequiredError, _strides("have gaps between elements"), copy_cures=True),
    Row(lib.DLX_OBSTACLE_PERMUTED, CopyRequiredError, _strides("be other than row-major"), copy_cures=True),
    Row(lib.DLX_OBSTACLE_UNALIGNED, CopyRequiredError, _alignment, copy_cures=True),
)
"""Every obstacle bit but one, refusals first. Without an address (DLX_OBSTACLE_NULL) there is no element: one is given.
"""

REPACKED = lib.DLX_OBSTACLE_PADDED | lib.DLX_OBSTACLE_PACKED
"""Obstacles that a copy cures which packs or unpacks."""

READ_ONLY_ROW = next(row for row in TABLE if row.bit == lib.DLX_OBSTACLE_READONLY)
