"""The error class, message and resolution of each incompatibility bit of the C core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlx._core.extension import lib
from dlx._core.native import Tensor
from dlx._core.types import DType
from dlx._engine.casting import Casts, can_cast, replace_cast
from dlx._registry.target import Target
from dlx.errors import ConversionError, CopyRequiredError, DeviceError, DTypeError, LayoutError, ReadOnlyError

_FLOAT32 = DType("float32")
_INSIDE_FLOAT32 = frozenset({lib.kDLBfloat, *range(lib.kDLFloat8_e3m4, lib.kDLFloat4_e2m1fn + 1)})
"""Codes of dtypes whose values float32 represents exactly."""
_NARROWER = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}

Sentence = Callable[[Tensor, Target], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One incompatibility; `detail` is the topic and text of the part that differs between arrays."""

    bit: int
    error: type[ConversionError]
    sentence: Sentence
    copy_resolves: bool = False
    fix: str = ""
    detail: tuple[str, Sentence] | None = None

    def explain(self, tensor: Tensor, target: Target) -> dict[str, Any]:
        """Return reason and details as arguments of an error."""
        return {"reason": self.sentence(tensor, target), "details": self.details(tensor, target)}

    def details(self, tensor: Tensor, target: Target) -> tuple[tuple[str, str], ...]:
        """Return the topic and text of the differing part; empty without one."""
        text = self.detail[1](tensor, target) if self.detail is not None else ""
        return ((self.detail[0], text),) if self.detail is not None and text else ()

    def advise(self, tensor: Tensor, target: Target, casts: Casts | None, is_cast: bool) -> dict[str, Any]:
        """Return fix and option as arguments of an error; `casts`: of the call, `is_cast`: the tensor is a cast."""
        known, old = None, tensor.dtype
        if self.bit == lib.DLX_INCOMPATIBLE_DEVICE:
            known = target.capabilities.refusals.get(tensor.device.name)
        if self.bit != lib.DLX_INCOMPATIBLE_DTYPE:
            return {"fix": self.fix if known is None else known[1]}
        known = target.capabilities.refusals.get(old.name)
        if known is None and (old.bits, old.lanes) == (4, 2):
            fix = "Convert its bytes, x.view(torch.uint8); the low four bits of each byte are the first value."
            return {"fix": fix}
        is_exact = known is None and old.code in _INSIDE_FLOAT32 and can_cast(old, _FLOAT32, tensor.device)
        new = "float32" if is_exact else _NARROWER.get(old.name)
        if new is None or new not in (target.capabilities.dtypes or ()):
            return {"fix": self.fix if known is None else known[1]}
        fix = "float32 is exact." * (not is_cast) if is_exact else "" if known is None else known[1]
        return {"fix": fix, "option": (("dtype", replace_cast(casts, old, new, is_cast)),)}


def _strides(limit: str) -> Sentence:
    return lambda tensor, target: f"{target.arrays} cannot {limit}, found {tensor.strides} in elements"


def _no_dtype(tensor: Tensor, target: Target) -> str:
    known = target.capabilities.refusals.get(tensor.dtype.name)
    return known[0] if known else f"{target.name} has no dtype {tensor.dtype}"


def _its_dtypes(tensor: Tensor, target: Target) -> str:
    known = tensor.dtype.name in target.capabilities.refusals
    return "" if known else f"; it has {', '.join(sorted(target.dtypes()))}"


def _no_device(tensor: Tensor, target: Target) -> str:
    known = target.capabilities.refusals.get(tensor.device.name)
    return known[0] if known else f"it is on {tensor.device}, which {target.name} does not support"


def _alignment(tensor: Tensor, target: Target) -> str:
    code, bits, lanes = tensor.dtype
    natural = lib.dlx_natural_alignment({"code": code, "bits": bits, "lanes": lanes})
    return f"{target.name} needs data aligned to {target.capabilities.min_alignment or natural} bytes"


RULES: tuple[Rule, ...] = (
    Rule(lib.DLX_INCOMPATIBLE_DEVICE, DeviceError, _no_device, fix="Move it to the host in its own framework first."),
    Rule(
        lib.DLX_INCOMPATIBLE_DTYPE,
        DTypeError,
        _no_dtype,
        detail=("dtypes", _its_dtypes),
        fix="Convert the values to one of these in its own framework first.",
    ),
    Rule(
        lib.DLX_INCOMPATIBLE_NDIM,
        LayoutError,
        lambda tensor, target: f"{target.name} cannot hold {tensor.ndim} dimensions",
        fix="Reshape it first.",
    ),
    Rule(
        lib.DLX_INCOMPATIBLE_EXTENTS,
        LayoutError,
        lambda tensor, target: (
            f"{target.name} multiplies the extents of empty {target.word}s, "
            f"and the product for {tensor.shape} overflows"
        ),
        fix="Reshape it first.",
    ),
    Rule(
        lib.DLX_INCOMPATIBLE_READONLY,
        ReadOnlyError,
        lambda tensor, target: f"it is read-only, and {target.arrays} are always writable",
        copy_resolves=True,
    ),
    Rule(
        lib.DLX_INCOMPATIBLE_PADDED,
        CopyRequiredError,
        lambda tensor, target: f"its {tensor.dtype} elements take one byte each, but {target.name} packs them",
        copy_resolves=True,
    ),
    Rule(
        lib.DLX_INCOMPATIBLE_PACKED,
        CopyRequiredError,
        lambda tensor, target: f"its {tensor.dtype} elements are packed, but {target.name} needs one byte each",
        copy_resolves=True,
    ),
    Rule(lib.DLX_INCOMPATIBLE_NEGATIVE, CopyRequiredError, _strides("have negative strides"), copy_resolves=True),
    Rule(lib.DLX_INCOMPATIBLE_ZERO, CopyRequiredError, _strides("have strides of 0"), copy_resolves=True),
    Rule(lib.DLX_INCOMPATIBLE_GAPS, CopyRequiredError, _strides("have gaps between elements"), copy_resolves=True),
    Rule(lib.DLX_INCOMPATIBLE_PERMUTED, CopyRequiredError, _strides("be other than row-major"), copy_resolves=True),
    Rule(
        lib.DLX_INCOMPATIBLE_UNALIGNED,
        CopyRequiredError,
        _alignment,
        copy_resolves=True,
        detail=("alignment", lambda tensor, target: f", found {tensor.data_ptr & -tensor.data_ptr}"),
    ),
)
"""Rules in order of preference for errors. DLX_INCOMPATIBLE_NULL has no rule: a tensor without an address is empty,
and gets an aligned address."""

REPACKED = lib.DLX_INCOMPATIBLE_PADDED | lib.DLX_INCOMPATIBLE_PACKED
"""Incompatibilities that a copy resolves by packing or unpacking the elements."""

READ_ONLY_RULE = next(rule for rule in RULES if rule.bit == lib.DLX_INCOMPATIBLE_READONLY)
