"""Lay out a tree in a segment, and read one that another process has laid out."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from dlx._containers.failures import Failures
from dlx._containers.lookup import container_of
from dlx._containers.tree import Tree
from dlx._core import native
from dlx._core.extension import ffi, lib
from dlx._core.native import FastPathFunction, Tensor
from dlx._core.tensor import dense
from dlx._core.types import READ_ONLY, SUBBYTE_PADDED
from dlx._engine.batch import Batch
from dlx._engine.planner import Request
from dlx._engine.request import producer_of
from dlx._protocols.dlpack import HOST
from dlx._protocols.pointer import dltensor
from dlx._registry.generic import TENSOR
from dlx._sharing.description import decoded, encoded, parsed
from dlx._sharing.handle import Handle, handle_of, segment_of
from dlx._sharing.segment import (
    HEADER,
    Place,
    Segment,
    data_start,
    new_segment,
    opened,
    placed,
    read_text,
    write,
)
from dlx.errors import DeviceError, DlxError, DTypeError, HandleError, LayoutError

__all__ = ["attach_tree", "share_tree", "shared_empty"]


_BYTE = (lib.kDLUInt, 8, 1)


class _Block(NamedTuple):
    """Memory that is copied into the new segment once, for all arrays that lie in it."""

    tensor: Tensor  # bytes, or one array
    is_bytes: bool
    offset: int  # in the segment's data


# ---- share -----------------------------------------------------------------------------------------------------------


def share_tree(obj: Any, request: Request, fast_path: FastPathFunction | None) -> Handle:
    """Put an array, or every array of a tree, into shared memory; what lies there already stays where it is.

    Raises
    ------
    DlxError
        If an array cannot be read, or is in no host memory, or the tree holds what is no plain data.
    MemoryError, OSError
        If there is no memory, or no descriptor, left.
    """
    handler = container_of(type(obj))
    failures = Failures("shared memory")
    if handler is None:
        tree, objs, sources, path = None, [obj], [producer_of(obj, request)], None
    else:
        tree = Tree(obj, handler, failures)
        objs, sources, path = tree.arrays, tree.sources, tree.path

    def where(number: int) -> tuple[Any, ...]:
        return () if path is None else path(number)

    tensors = Batch(request, objs, sources, path, failures, fast_path, TENSOR.name).tensors()
    for i, tensor in enumerate(tensors):
        _check(tensor, where(i))
    extents = [_extent(tensor) for tensor in tensors]
    places = placed(extents)
    blocks, copied, room = _blocks(tensors, extents, places, where)
    segments: dict[str, Segment] = {}
    for place in places:
        if place is not None:
            segments.setdefault(place.mapping.segment.token, place.mapping.segment)
    # Arrays are numbered by segment: those that are copied into the new one first.
    groups: list[list[int]] = [[i for i, place in enumerate(places) if place is None]]
    groups += [[i for i, p in enumerate(places) if p and p.mapping.segment.token == token] for token in segments]
    number = [0] * len(tensors)
    for n, i in enumerate(i for group in groups for i in group):
        number[i] = n
    parts = []
    for group in groups:
        numbers = array("q")
        for i in group:
            place = places[i]
            at, strides = copied[i] if place is None else (place.offset + tensors[i].data_ptr - extents[i][0], None)
            numbers.extend(_numbers(tensors[i], at, strides))
        parts.append(numbers)
    nodes = [-1, []] if tree is None else encoded(tree, number, failures.add)
    said = {
        "tree": nodes,
        "segments": [[each.fd, each.inode, each.size, each.token] for each in segments.values()],
        "numbers": [len(each) for each in parts],
    }
    return _filled(said, parts, blocks, room, tuple(segments.values()))


def _filled(
    said: dict[str, Any],
    parts: list[array[int]],
    blocks: list[_Block],
    room: int,
    others: tuple[Segment, ...],
) -> Handle:
    """Return the handle of a new segment with all that was laid out for it."""
    text = json.dumps(said, separators=(",", ":")).encode()
    start = data_start(len(text), 8 * sum(map(len, parts)))
    own, at = parts[0], 0
    while at < len(own):  # offsets were counted from where data begins, which is known now
        own[at] += start
        at += 6 + 2 * own[at + 5]
    segment = new_segment(room, text, b"".join(each.tobytes() for each in parts))
    mapping = None
    for block in blocks:
        if block.is_bytes:
            write(segment.fd, memoryview(block.tensor), start + block.offset)
        else:
            mapping = mapping or segment.mapping("write")
            source, flags = block.tensor, block.tensor.flags & SUBBYTE_PADDED
            target = native.tensor_new(
                mapping.address + start + block.offset, source.shape, None, source.dtype, HOST, flags, mapping
            )
            status = lib.dlx_copy(dltensor(source), dltensor(target), flags)
            if status != lib.DLX_OK:
                raise DlxError(f"it could not be copied: status {status}")
    return handle_of(segment, others)


def _check(tensor: Tensor, path: tuple[Any, ...]) -> None:
    if not tensor.is_host:
        raise DeviceError(
            f"dlx.share shares host memory, and its memory is on {tensor.device}",
            source=repr(tensor),
            path=path,
            fix="Move it first: dlx.convert(obj, to=..., device='cpu').",
        )
    if tensor.dtype.code == lib.kDLOpaqueHandle:
        raise DTypeError("its elements are handles, which mean nothing in another process", path=path)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses (first, end) of a tensor's elements."""
    low, high = ffi.new("int64_t *"), ffi.new("int64_t *")
    lib.dlx_extent(dltensor(tensor), tensor.flags, low, high)
    return tensor.data_ptr + low[0], tensor.data_ptr + high[0]


def _blocks(
    tensors: list[Tensor],
    extents: list[tuple[int, int]],
    places: list[Place | None],
    where: Callable[[int], tuple[Any, ...]],
) -> tuple[list[_Block], dict[int, tuple[int, Any]], int]:
    """Lay out what has to be copied.

    Parameters
    ----------
    tensors, extents, places
        The arrays, their addresses, and where those lie that are not copied.
    where
        ``where(i)`` is the path of an array, for errors.

    Returns
    -------
    blocks
        What is copied, once each.
    copied
        {number of an array: (offset of its first element, its strides, None for its own)}.
    room
        Bytes in all.

    Raises
    ------
    LayoutError
        If elements that are packed below one byte would have to be copied one by one.
    """
    waiting = [i for i, place in enumerate(places) if place is None]
    blocks: list[_Block] = []
    copied: dict[int, tuple[int, Any]] = {i: (0, None) for i in waiting if extents[i][0] == extents[i][1]}
    room = 0

    def add(tensor: Tensor, *, is_bytes: bool, remainder: int = 0) -> int:
        nonlocal room
        offset = room + remainder
        blocks.append(_Block(tensor, is_bytes, offset))
        room += -(-(remainder + tensor.nbytes) // HEADER) * HEADER
        return offset

    order = sorted((i for i in waiting if i not in copied), key=lambda i: extents[i])
    for group in _overlapping(order, extents):
        # Bytes that no array of the group has elements in are not copied: they are nobody's, or another's.
        runs: list[tuple[int, int]] = []
        for i in group:
            low, high = extents[i]
            if not dense(tensors[i]):
                continue
            if runs and low <= runs[-1][1]:
                runs[-1] = runs[-1][0], max(high, runs[-1][1])
            else:
                runs.append((low, high))
        apart = []
        inside: dict[tuple[int, int], list[int]] = {}
        for i in group:
            run = runs[max(bisect_right(runs, extents[i][0], key=itemgetter(0)) - 1, 0)] if runs else (0, 0)
            if run[0] <= extents[i][0] and extents[i][1] <= run[1]:
                inside.setdefault(run, []).append(i)
            else:
                apart.append(i)
        for (low, high), members in inside.items():
            kept = tuple(tensors[i] for i in members)
            whole = native.tensor_new(low, (high - low,), None, _BYTE, HOST, READ_ONLY, kept)
            # What begins elsewhere keeps its alignment where the whole keeps its own.
            remainder = low % HEADER if any(each.data_ptr != low for each in kept) else 0
            offset = add(whole, is_bytes=True, remainder=remainder)
            copied |= {i: (offset + tensors[i].data_ptr - low, None) for i in members}
        known: dict[Any, int] = {}
        for i in apart:
            tensor = tensors[i]
            key = tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype
            if key not in known:
                if tensor.dtype.bits * tensor.dtype.lanes % 8 and not tensor.flags & SUBBYTE_PADDED:
                    reason = f"its {tensor.dtype} elements are packed below one byte and not contiguous"
                    raise LayoutError(reason, source=repr(tensor), path=where(i))
                known[key] = add(tensor, is_bytes=False)
            copied[i] = known[key], _compact(tensor.shape)
    return blocks, copied, room


def _overlapping(order: list[int], extents: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Give the groups of arrays whose ranges of addresses overlap; `order` is by first address, and none is empty."""
    group: list[int] = []
    end = 0
    for i in order:
        if group and extents[i][0] >= end:
            yield group
            group = []
        end = max(end, extents[i][1]) if group else extents[i][1]
        group.append(i)
    if group:
        yield group


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _numbers(tensor: Tensor, offset: int, strides: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return what `native.tensors_within` makes the tensor of."""
    shape = tensor.shape
    steps = tensor.strides if strides is None else strides
    return (offset, *tensor.dtype, tensor.flags & SUBBYTE_PADDED, len(shape), *shape, *steps)


# ---- attach ----------------------------------------------------------------------------------------------------------


def attach_tree(handle: Any, mode: str, given: int | None = None) -> Any:
    """Return the tree that a handle stands for, of tensors over the shared memory.

    Parameters
    ----------
    handle
        As `share_tree` gives it, or the plain dict that it is.
    mode
        Of `Segment.mapping`.
    given
        A descriptor that was received.

    Raises
    ------
    HandleError
        If it is none, is damaged, or what it stands for is gone. Then nothing was given out.
    """
    segment = segment_of(handle, given)
    segment.check()
    text, numbers = read_text(segment)
    if not text:
        raise HandleError("its segment has no description of arrays")
    said = parsed(text)
    try:
        counts, listed = said["numbers"], said["segments"]
        segments = [segment]
        for fd, inode, size, token in listed:
            if (type(fd), type(inode), type(size), type(token)) != (int, int, int, str):
                raise HandleError("its description names no segment")
            segments.append(opened(handle["pid"], fd, token, inode, size))
        if len(counts) != len(segments) or {*map(type, counts)} != {int} or min(counts) < 0:
            raise HandleError("its description contradicts itself")
        if 8 * sum(counts) != len(numbers):
            raise HandleError("its description has more numbers, or fewer, than it says")
        tensors: list[Tensor] = []
        flags = 0 if mode == "write" else READ_ONLY
        view, at = memoryview(numbers), 0
        for each, count in zip(segments, counts, strict=True):
            mapping = each.mapping(mode) if count else None
            if mapping is not None:
                part = view[8 * at : 8 * (at + count)]
                tensors += native.tensors_within(mapping.address, each.size, part, flags, mapping)
            at += count
    except HandleError:
        raise
    except (DlxError, TypeError, ValueError, LookupError) as error:
        said_too = error.reason if isinstance(error, DlxError) else str(error)
        raise HandleError(f"its description is that of no arrays: {said_too}") from error
    return decoded(said.get("tree"), tensors)


def shared_empty(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Return a writable, row-major tensor over new shared memory of zeros.

    Raises
    ------
    DTypeError, LayoutError
        If there is no such dtype, or its size does not fit 63 bits.
    MemoryError, OSError
        If there is no memory, or no descriptor, left.
    """
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, dtype, HOST, 0, None)
    segment = new_segment(max(like.nbytes, 1))
    mapping = segment.mapping("write")
    return native.tensor_new(mapping.address + HEADER, shape, None, dtype, HOST, 0, mapping)
