"""Comparison of the fast path and the Python path for the same source."""

from __future__ import annotations

import ctypes
import math
import re

import dlx
from dlx import errors
from dlx._core import native
from support.arrays.layouts import address

slow = dlx.convert.__wrapped__


def bits(array):
    """Return the bytes of an array's elements, row-major."""
    try:
        tensor = native.tensor_copy(slow(array, to="dlx", detach=True), False)
    except errors.DlxError:  # no other target accepts it
        return type(array)
    return ctypes.string_at(tensor.data_ptr, tensor.nbytes) if tensor.nbytes else b""


def facts(result, source):
    """Return the properties of a result; its address counts only if it is the source's."""
    if result is source:
        return "same"
    info = dlx.describe(result)
    flags = result.flags if isinstance(result, dlx.Tensor) else getattr(result, "requires_grad", None)
    shared = info.nbytes > 0 and address(result) == address(source)
    strides = info.strides if math.prod(info.shape) else None
    strides = strides and tuple(step for step, extent in zip(strides, info.shape, strict=True) if extent > 1)
    return (type(result), info.dtype, info.shape, strides, info.readonly, shared, flags, bits(result))


def outcome(convert, source, to, options):
    """Return the facts of a result, or the class and reason of an error, without the address of a fresh source."""
    try:
        result = convert(source, **({} if to is None else {"to": to}), **options)
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "ADDRESS", getattr(error, "reason", None) or "")
    return facts(result, source)


def agree(make, to, **options):
    """Compare both paths with fresh sources, and return the outcome; the second call of the fast path has a route."""
    fast_path, warm, other = (outcome(convert, make(), to, options) for convert in (dlx.convert, dlx.convert, slow))
    assert fast_path == other and warm == other
    return other


def emptied(torch, nbytes, frozen):
    """Return a tensor whose storage was cut, and optionally made non-resizable, as `.numpy()` does."""
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(nbytes)
    if frozen:
        torch.empty(0).set_(tensor.untyped_storage()).numpy()
    return tensor
