"""`shares_memory`: whether two arrays of any frameworks have a byte in common."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from dlx import native, protocol
from dlx.abi import Device, DType
from dlx.adapter import Adapter
from dlx.conversion import producer_of
from dlx.errors import ConversionError, DlxError
from dlx.native import Tensor, lib
from dlx.planning import Leaf, Request, begin
from dlx.strangers import TENSOR
from dlx.transfer import export

__all__ = ["shares_memory"]

MOST_STEPS = 20_000
"""Combinations that are tried before an answer is given by the ranges of addresses alone."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one array: an address, and runs of `width` bytes at the sums of ``0..count-1`` times each step."""

    device: Device
    start: int  # of the lowest run
    end: int  # behind the last byte of the highest one
    width: int
    axes: tuple[tuple[int, int], ...]  # (step in bytes > 0, count > 1)


def shares_memory(a: Any, b: Any) -> bool:
    """Say whether two arrays, of any frameworks, have at least one byte of memory in common.

    Addresses are compared, not values; nothing is read, copied or used up. Strides count: ``x[::2]`` and ``x[1::2]`` have
    nothing in common, though their ranges overlap.

    Parameters
    ----------
    a, b
        Arrays, as `convert` takes them.

    Returns
    -------
    bool
        Exact for arrays without gaps, and for strided ones unless that is too hard a question (deciding it is
        NP-complete): after 20,000 combinations the answer is whether the ranges of addresses overlap, so that True may
        be wrong then, and False never is.

    Raises
    ------
    AdapterNotFoundError
        If one of them is no array.
    ConversionError
        If one has no plain memory: sparse and fake tensors, used capsules.

    Notes
    -----
    Memory that the same pages map at two addresses (`mmap` of one file twice, CUDA's IPC) is not recognised. An object
    that only has ``__dlpack__`` is asked for a capsule, which is dropped.

    Examples
    --------
    >>> import dlx
    >>> block = bytearray(8)
    >>> tensor = dlx.convert(block, to="dlx")
    >>> dlx.shares_memory(tensor, block), dlx.shares_memory(tensor, bytearray(8))
    (True, False)
    """
    one, other = _extent(a), _extent(b)
    if one is None or other is None or not _same_memory(one.device, other.device):
        return False
    if one.start >= other.end or other.start >= one.end:
        return False
    return _meet(one, other)


def _same_memory(a: Device, b: Device) -> bool:
    """Return whether addresses of two devices are of one memory: the kinds of host memory are."""
    host = (lib.kDLCPU, lib.kDLCUDAHost, lib.kDLROCMHost, lib.kDLCUDAManaged)
    return a == b or (a.type in host and b.type in host)


def _extent(obj: Any) -> Extent | None:
    """Return the bytes of an array, None where it has no element."""
    request = Request(TENSOR)
    source = producer_of(obj, request)
    tensor = _tensor(obj, source, request)
    if tensor.nbytes == 0:
        return None
    width = tensor.dtype.bits * tensor.dtype.lanes // 8
    if width * 8 != tensor.dtype.bits * tensor.dtype.lanes:  # packed below a byte, hence contiguous
        return Extent(tensor.device, tensor.data_ptr, tensor.data_ptr + tensor.nbytes, tensor.nbytes, ())
    steps = [(step * width, count) for step, count in zip(tensor.strides, tensor.shape, strict=True) if count > 1]
    low = tensor.data_ptr + sum(step * (count - 1) for step, count in steps if step < 0)
    axes = sorted((abs(step), count) for step, count in steps if step)
    while axes and axes[0][0] <= width:  # runs that touch are one
        step, count = axes.pop(0)
        width += step * (count - 1)
    end = low + width + sum(step * (count - 1) for step, count in axes)
    return Extent(tensor.device, low, end, width, tuple(axes))


def _tensor(obj: Any, source: Adapter, request: Request) -> Tensor:
    leaf = Leaf(obj, source, request, None)
    try:
        interface = getattr(obj, "__array_interface__", None)
        if interface is not None and not hasattr(interface, "__call__"):
            return _of_interface(interface)
        tensor = source.sketch(obj)
        if tensor is not None and tensor.data_ptr:
            return tensor
        if tensor is not None and tensor.nbytes == 0:
            return tensor
        leaf = begin(obj, source, request)
        if leaf.plan is not None and isinstance(leaf.plan.error, DlxError):
            raise leaf.plan.error
        return export(leaf)
    except DlxError as error:
        leaf.complete(error)
        raise
