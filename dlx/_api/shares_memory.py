"""`shares_memory`: return whether two arrays overlap in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

from dlx._core.extension import lib
from dlx._core.public import public
from dlx._core.types import Device
from dlx._engine import fast_path as fast_path  # binds FAST_PATH
from dlx._engine.batch import Batch
from dlx._engine.compound import arrays_of, name_of
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.sources import abstract_tensor, adapter_call, info_of
from dlx._protocols import arrow
from dlx._registry import lookup
from dlx._registry.compound import CompoundHandler
from dlx._registry.registry import registry
from dlx._support.reflect import foreign_errors, type_name
from dlx.adapter.arrow import ArrowSource
from dlx.adapter.base import Adapter
from dlx.errors import DlxError, DTypeError

MAX_STEPS = 20_000  # combinations before the address ranges alone decide

_overlap = FAST_PATH._overlap  # for arrays without gaps, in C


class Extent(NamedTuple):
    """The bytes of one array: runs of `width` bytes at the start plus 0 to `most` times each step."""

    device: Device
    start: int
    end: int  # after the highest byte
    width: int
    axes: tuple[tuple[int, int], ...]  # (step in bytes > 0, most > 0)


@public
def shares_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays of any frameworks have at least one byte of memory in common.

    Only addresses are compared: nothing is read, copied or consumed. Strides count: ``x[::2]`` and ``x[1::2]`` share no
    memory, although their ranges overlap.

    Parameters
    ----------
    a, b
        Arrays as in `convert`, also sparse and ragged ones.

    Returns
    -------
    bool
        Exact for arrays without gaps, and for most strided arrays. The general problem is NP-complete: after 20,000
        combinations, the result is whether the address ranges overlap, so True may be wrong then, but False never is.

    Raises
    ------
    AdapterNotFoundError
        If an argument isn't an array.
    ConversionError
        If an array has no ordinary memory: fake tensors, used capsules.

    Notes
    -----
    Pages mapped at two addresses (`mmap` of one file twice, CUDA's IPC) are not recognized. An object with only
    ``__dlpack__`` exports a capsule, which is dropped. Of Arrow lists in several chunks, only the values are compared.

    Examples
    --------
    >>> import dlx
    >>> block = bytearray(8)
    >>> tensor = dlx.convert(block, to="dlx")
    >>> dlx.shares_memory(tensor, block), dlx.shares_memory(tensor, bytearray(8))
    (True, False)
    """
    overlap = _overlap(a, b)
    if overlap is not None:
        return overlap
    others = [*_extents(b)]
    return any(_overlaps(one, other) for one in _extents(a) for other in others)


def collision(some: Sequence[Any], others: Sequence[Any]) -> tuple[int, int] | None:
    """Return the indices in ``(*some, *others)`` of an array of `some` and another array that overlap, or None."""
    extents = []
    for i, array in enumerate((*some, *others)):
        try:
            extents += [(extent, i) for extent in find_extents(array)]
        except DlxError:
            continue
    extents.sort(key=lambda each: (each[0].start, each[1]))
    near: tuple[list[tuple[Extent, int]], list[tuple[Extent, int]]] = ([], [])  # in `some`, in `others`
    for extent, i in extents:
        mine = i < len(some)
        for group in near:
            group[:] = [each for each in group if each[0].end > extent.start]
        for other, j in (*near[0], *near[1]) if mine else near[0]:
            if i != j and _same_memory(extent.device, other.device) and _meet(other, extent):
                return (min(i, j), max(i, j))
        near[not mine].append((extent, i))
    return None


def _extents(obj: Any) -> Iterator[Extent]:
    """Yield the extents of an array, or of each part of a sparse or ragged array."""
    inside, handler = lookup.unwrap(obj)
    waiting = [inside] if handler is None else [obj]
    if isinstance(handler, CompoundHandler):
        with foreign_errors("it cannot be split:", source=name_of(inside)):
            waiting = arrays_of(handler.compound.split(inside))
    for each in waiting:
        yield from find_extents(each)


def _overlaps(one: Extent, other: Extent) -> bool:
    if not _same_memory(one.device, other.device) or one.start >= other.end or other.start >= one.end:
        return False
    return _meet(one, other)


def _same_memory(a: Device, b: Device) -> bool:
    """Return whether two devices share an address space, as all host devices do."""
    host = (lib.kDLCPU, lib.kDLCUDAHost, lib.kDLROCMHost, lib.kDLCUDAManaged)
    return a == b or (a.type in host and b.type in host)


def find_extents(obj: Any) -> list[Extent]:
    """Return the bytes of an array: several runs for an Arrow column in chunks, none without memory of its own."""
    obj, source = lookup.source(obj, target="dlx")
    column = None
    if isinstance(source, ArrowSource):
        with adapter_call(source, source=type_name(type(obj))):
            found = source.describe(obj)
            is_refused = any(each.error is DTypeError for each in found.blockers)  # the export raises the reason
            is_column = isinstance(obj, arrow.Column) or not (found.tensor is not None or is_refused)
            column = arrow.column(obj) if is_column else None
    if column is None or column.dtype is None:  # not numbers: the error tells why
        runs = [_find_extent(obj, source)]
    else:
        runs = [_runs(column.device, start, end - start, []) for start, end in column.extents()]
    return [each for each in runs if each is not None]


def _find_extent(obj: Any, source: Adapter) -> Extent | None:
    """Return the bytes of an array; None if it has no elements or is copied on export."""
    request = Request(registry.target("dlx"))
    try:
        found = source.describe(obj)
        info = info_of(found.info, source, obj, found.tensor)
        if (info.strides is None or info.dtype is None) and info.address:
            return _of_interface(obj.__array_interface__, info.address, obj.itemsize)
        tensor = found.tensor
        if tensor is None and not found.needs_export:
            tensor = abstract_tensor(info, obj)
    except DlxError:
        tensor = None  # the export below raises the reason
    except Exception:
        with adapter_call(source, source=type_name(type(obj))):
            raise
    if tensor is None:
        batch = Batch(request, [obj], [source])
        (tensor,) = batch.tensors()
        if batch.is_copied(0):  # new memory for each conversion
            return None
    bits = tensor.dtype.bits * tensor.dtype.lanes
    if bits % 8 and tensor.nbytes * 8 < bits * prod(tensor.shape) + 8:  # packed below a byte, hence contiguous
        return _runs(tensor.device, tensor.data_ptr, tensor.nbytes, [])
    width = -(-bits // 8)
    return _runs(
        tensor.device,
        tensor.data_ptr,
        width,
        [(step * width, extent) for step, extent in zip(tensor.strides, tensor.shape, strict=True)],
    )


def _of_interface(interface: dict[str, Any], address: int, width: int) -> Extent | None:
    """Return the extent of arrays that only the array interface describes: odd strides, dtypes that DLPack lacks."""
    shape = interface["shape"]
    steps = interface.get("strides")
    if steps is None:
        steps = [width * prod(shape[i + 1 :]) for i in range(len(shape))]
    return _runs(Device("cpu"), address, width, list(zip(steps, shape, strict=True)))


def _runs(device: Device, start: int, width: int, axes: list[tuple[int, int]]) -> Extent | None:
    """Return the `Extent` of axes (step in bytes, extent)."""
    if width == 0 or any(extent == 0 for _, extent in axes):
        return None
    start += sum(step * (extent - 1) for step, extent in axes if step < 0)
    steps = sorted((abs(step), extent - 1) for step, extent in axes if step and extent > 1)
    while steps and steps[0][0] <= width:  # merge adjacent runs
        step, most = steps.pop(0)
        width += step * most
    end = start + width + sum(step * most for step, most in steps)
    return Extent(device, start, end, width, tuple(steps))


def _meet(one: Extent, other: Extent) -> bool:
    """Return whether two sets of runs overlap: whether some sum of steps lies in a short interval.

    Two runs overlap if the difference of their offsets is between -width and width. The offsets of `other` are counted
    from its end, so all steps are positive. The search tries the largest steps first, and prunes by the reach and the
    greatest common divisor of the smaller steps.
    """
    most: dict[int, int] = {}
    for step, times in (*one.axes, *other.axes):
        most[step] = most.get(step, 0) + times
    steps = sorted(most, reverse=True)
    reach, divisor = [0], [0]  # of the last i steps
    for step in reversed(steps):
        reach.append(reach[-1] + step * most[step])
        divisor.append(gcd(divisor[-1], step))
    last = other.end - other.width  # start of the highest run
    waiting = [(0, last - one.start - one.width + 1, last - one.start + other.width - 1)]
    tried = 0
    while waiting:
        level, low, high = waiting.pop()
        if low <= 0 <= high:
            return True
        if level == len(steps):
            continue
        step, left = steps[level], len(steps) - level - 1
        first = max(0, -((reach[left] - low) // step))
        for times in range(first, min(most[step], high // step) + 1):
            tried += 1
            if tried > MAX_STEPS:
                return True
            bottom, top = low - times * step, high - times * step
            if divisor[left] == 0 or top // divisor[left] * divisor[left] >= bottom:
                waiting.append((level + 1, bottom, top))
    return False
