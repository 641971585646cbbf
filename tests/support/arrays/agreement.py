"""The fast path and the Python path compared on the same sources."""

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
    """The bytes of an array's elements, row-major."""
    try:
        tensor = native.tensor_copy(slow(array, to="dlx", detach=True), False)
    except errors.DlxError:  # it may stay where it is, and goes nowhere else
        return type(array)
    return ctypes.string_at(tensor.data_ptr, tensor.nbytes) if tensor.nbytes else b""


def facts(result, source):
    """What can be told of a result; its address counts where it is the source's."""
    if result is source:
        return "same"
    info = dlx.describe(result)
    flags = result.flags if isinstance(result, dlx.Tensor) else getattr(result, "requires_grad", None)
    shared = info.nbytes > 0 and address(result) == address(source)
    strides = info.strides if math.prod(info.shape) else None
    strides = strides and tuple(step for step, extent in zip(strides, info.shape, strict=True) if extent > 1)
    return (type(result), info.dtype, info.shape, strides, info.readonly, shared, flags, bits(result))


def outcome(convert, source, to, options):
    """What a conversion gives, or the class and the reason of its error, without the address of a fresh source."""
    try:
        result = convert(source, to=to, **options)
    except Exception as error:
        return type(error), re.sub("0x[0-9a-f]+", "ADDRESS", getattr(error, "reason", None) or "")
    return facts(result, source)


def agree(make, to, **options):
    """Compare both paths on fresh sources; the fast path is called twice, so that it has a route. Returns it."""
    fast_path, warm, other = (outcome(convert, make(), to, options) for convert in (dlx.convert, dlx.convert, slow))
    assert fast_path == other and warm == other
    return other


def emptied(torch, nbytes, frozen):
    """A tensor whose storage was cut, and perhaps forbidden to be resized afterwards, as any `.numpy()` does."""
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(nbytes)
    if frozen:
        torch.empty(0).set_(tensor.untyped_storage()).numpy()
    return tensor
