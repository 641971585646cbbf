"""Lay out a tree in a segment, and read one that another process has laid out."""

from __future__ import annotations

import errno
import itertools
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dlx._core import native
from dlx._core.cuda import check
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.types import HOST, READ_ONLY, SUBBYTE_PADDED, Device, row_major
from dlx._engine.batch import Batch
from dlx._engine.failures import Failures
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.tree import Tree
from dlx._protocols.pointer import dltensor
from dlx._registry import lookup
from dlx._registry.generic import TENSOR
from dlx._sharing.description import decoded, encoded, has_sets, parsed
from dlx._sharing.handle import Handle, handle_of, segment_of
from dlx._sharing.segment import HEADER, Segment, has_huge_pages, new_segment, opened, placed, read_description
from dlx._support.text import amount
from dlx.errors import DeviceError, DlxError, DTypeError, HandleError, LayoutError

if TYPE_CHECKING:
    from dlx._sharing.device import Export, Memory

__all__ = ["attach_tree", "share_tree", "shared_empty"]


_BYTE = (lib.kDLUInt, 8, 1)


class _Item:
    """An array that is shared, its range of addresses, and its place in the memory of its group."""

    __slots__ = ("extent", "index", "offset", "strides", "tensor")

    def __init__(self, index: int, tensor: Tensor, extent: tuple[int, int, bool]) -> None:
        self.index, self.tensor = index, tensor  # the number of the array in the tree
        self.extent = extent  # its first byte, its end, whether its elements lie without gaps
        self.offset = 0  # of its first element
        self.strides: tuple[int, ...] | None = None  # None: its own

    def move(self, start: int) -> None:
        """Place it where the byte at the address `start` becomes the first one."""
        self.offset = self.tensor.data_ptr - start


class _Block(NamedTuple):
    """Memory that is copied once, for all arrays that lie in it."""

    offset: int  # where to, in the new memory
    keep: Any  # arrays that keep it
    run: tuple[int, int] | None  # address and bytes; None: it is not one run, and is copied element by element

    def ends(self, start: int, device: Device, owner: Any) -> tuple[Tensor, Tensor, int]:
        """Return tensors over its source and its target, in new memory from `start` on, and flags of the elements."""
        source: Tensor = self.keep
        if self.run is not None:
            source = native.tensor_new(self.run[0], (self.run[1],), None, _BYTE, device, READ_ONLY, self.keep)
        flags, place = source.flags & SUBBYTE_PADDED, start + self.offset
        return source, native.tensor_new(place, source.shape, None, source.dtype, device, flags, owner), flags


_Fail = Callable[[DlxError, _Item], None]


# ---- share -----------------------------------------------------------------------------------------------------------


def share_tree(obj: Any, request: Request, *, is_copied: bool = True) -> Handle:
    """Put an array, or those of a tree, into shared memory unless they lie there; without `is_copied`, only zeros."""
    handler = lookup.kind(type(obj)).handler
    failures, path = _Listed("shared memory", collect=True), None
    tree = None if handler is None else Tree(obj, handler, failures)
    if tree is None:
        objs, sources = [obj], [lookup.source(obj, target=request.target.name)[1]]
    else:
        objs, sources, path = tree.arrays, tree.sources, tree.path

    def fail(error: DlxError, item: _Item) -> None:
        failures.add(error, () if path is None else path(item.index))

    batch = Batch(request, objs, sources, path, failures, TENSOR.name)
    layout = _place(_items(batch.tensors(), is_copied, fail), batch, is_copied, fail)
    number = [0] * len(objs)
    for n, item in enumerate(itertools.chain(*layout.groups)):
        number[item.index] = n
    nodes, names = ([-1, []], b"") if tree is None else encoded(tree, number, failures.add)
    failures.raise_first()
    return _write(layout, nodes, names, is_copied)


class _Layout(NamedTuple):
    """Where all arrays of a tree go."""

    groups: list[list[_Item]]  # of the new segment, of each of `segments`, of each memory of `export`
    blocks: _Blocks  # of the new segment
    segments: list[Segment]  # that hold arrays already
    export: Export | None  # the memory of devices


def _items(tensors: Sequence[Tensor | None], is_copied: bool, fail: _Fail) -> list[_Item]:
    """Return the arrays that can be shared."""
    items = []
    for i, tensor in enumerate(tensors):
        if tensor is None:  # it failed
            continue
        item = _Item(i, tensor, (0, 0, True))
        try:
            _check(tensor, is_copied=is_copied)
            items.append(item)
        except DlxError as error:
            fail(error, item)
    for item, extent in zip(items, native.tensors_extents([item.tensor for item in items]), strict=True):
        item.extent = extent
    return items


def _place(items: list[_Item], batch: Batch, is_copied: bool, fail: _Fail) -> _Layout:
    """Place each array: where it lies already, else in the new segment, or in memory of its device."""
    local = [item for item in items if item.tensor.is_host]
    remote = [item for item in items if not item.tensor.is_host]
    fresh: list[_Item] = []
    segments: dict[str, Segment] = {}
    held: dict[str, list[_Item]] = {}
    places = placed([item.extent for item in local]) if is_copied else [None] * len(local)
    for item, place in zip(local, places, strict=True):
        if place is None:
            fresh.append(item)
            continue
        segment, offset = place
        item.move(item.extent[0] - offset)
        segments[segment.token] = segment
        held.setdefault(segment.token, []).append(item)
    blocks = _lay_out(fresh, fail)
    export, of_devices = _export(remote, batch, fail) if remote else (None, [])
    return _Layout([fresh, *held.values(), *of_devices], blocks, [*segments.values()], export)


def _write(layout: _Layout, nodes: list[Any], names: bytes, is_copied: bool) -> Handle:
    """Make the segment of a layout: its description, and the arrays that are copied."""
    numbers = []
    for group in layout.groups:
        offsets, strides = [item.offset for item in group], [item.strides for item in group]
        numbers.append(native.tensors_pack([item.tensor for item in group], offsets, strides))
    export = layout.export
    described = {
        "tree": nodes,
        "segments": [[each.fd, each.inode, each.size, each.token] for each in layout.segments],
        "numbers": [len(each) for each in numbers],
    }
    if export is not None:
        described["memories"] = [each.written() for each in export.memories]
        described["events"] = export.events.written()
    text = json.dumps(described, separators=(",", ":")).encode()
    segment = new_segment(layout.blocks.room, b"".join(numbers), text, names)
    if is_copied:
        _fill(segment, layout.blocks.blocks)
    if export is not None:
        export.bind(segment)
    return handle_of(segment, tuple(layout.segments), export)


class _Listed(Failures):
    """Errors of all that cannot be shared; none is raised before all are known."""

    def check(self) -> None:
        """Go on: what did not fail is looked at further."""

    def raise_first(self) -> None:
        """Raise the first error, if there is one, with notes that say what else cannot be shared, and where."""
        if self.errors:
            raise self._noted()  # no local variable: it would keep the error by its own traceback

    def _noted(self) -> DlxError:
        (first, *others), self.errors = self.errors, []
        for other in others[:MAX_NOTES]:
            first.add_note(f"Neither can this: {other}")
        if len(others) > MAX_NOTES:
            first.add_note(f"Nor can {len(others) - MAX_NOTES} more.")
        return first


def _export(remote: list[_Item], batch: Batch, fail: _Fail) -> tuple[Export, list[list[_Item]]]:
    """Place device arrays in allocations that others can open, by copies if necessary, and group them by these."""
    from dlx._sharing import device as devices  # needed by few programs

    groups: dict[Memory, list[_Item]] = {}
    known: dict[tuple[Device, int], Memory] = {}
    loose: dict[Device, list[_Item]] = {}
    events = devices.Events()
    devices.collect()
    for item in remote:
        device, (low, high, _) = item.tensor.device, item.extent
        try:
            events.after(device, batch.readiness(item.index))
            memory = devices.found(device, low, high) if low < high else None
        except DlxError as error:
            fail(_unshared(error, item.tensor), item)
            continue
        if memory is None:
            loose.setdefault(device, []).append(item)
            continue
        memory = known.setdefault((device, memory.address), memory)
        item.move(memory.address)
        groups.setdefault(memory, []).append(item)
    for device, waiting in loose.items():
        try:
            blocks = _lay_out(waiting, fail)
            memory = devices.empty(device, blocks.room)
            stream = events.after(device, None).handle
            for block in blocks.blocks:
                source, target, flags = block.ends(memory.address, device, memory)
                check(lib.dlx_cuda_transfer(dltensor(source), dltensor(target), flags, stream, 1))
        except DlxError as error:
            fail(_unshared(error, waiting[0].tensor), waiting[0])
            continue
        groups[memory] = waiting
    held = [item.tensor for group in groups.values() for item in group if item.strides is None]
    return devices.Export([*groups], held, events), [*groups.values()]


def _unshared(error: DlxError, tensor: Tensor) -> DeviceError:
    """Return the error for device memory that cannot be shared."""
    reason = f"its memory on {tensor.device} cannot be shared: {error.reason}"
    return DeviceError(reason, source=repr(tensor), fix=_MOVE)


def _fill(segment: Segment, blocks: list[_Block]) -> None:
    """Copy memory of the host into the data of a segment."""
    start = segment.start
    runs = array("q")
    for block in blocks:
        if block.run is not None:
            runs.extend((block.run[0], start + block.offset, block.run[1]))
    odd = [block for block in blocks if block.run is None]
    is_large = bool(runs) and segment.size - start >= MIN_MAPPED and has_huge_pages(segment.size)
    mapping = segment.mapping("write") if odd or is_large else None
    pages = mapping.pages if is_large and mapping is not None else ffi.NULL
    given = ffi.cast("dlx_run *", ffi.from_buffer(runs)), len(runs) // 3
    if lib.dlx_write_runs(segment.fd, pages, segment.size, *given) != 0:
        if ffi.errno == errno.EFAULT:
            raise DlxError("memory of it cannot be read", fix="See whether the file that it maps has become shorter.")
        raise MemoryError(f"a segment of {amount(segment.size)}: {os.strerror(ffi.errno)}")
    for block in odd:
        assert mapping is not None
        source, target, flags = block.ends(mapping.address + start, HOST, mapping)
        status = lib.dlx_copy(dltensor(source), dltensor(target), flags)
        if status != lib.DLX_OK:
            raise DlxError(f"it could not be copied: status {status}")


MIN_MAPPED = 2 << 20  # bytes from which there may be huge pages
_MOVE = "Move it first: dlx.convert(obj, to=..., device='cpu')."
MAX_NOTES = 20  # of further errors


def _check(tensor: Tensor, *, is_copied: bool) -> None:
    if not tensor.is_host and tensor.device[0] != lib.kDLCUDA:
        reason = f"dlx.share shares memory of the host and of CUDA devices, and its memory is on {tensor.device}"
        raise DeviceError(reason, source=repr(tensor), fix=_MOVE)
    if not is_copied and not tensor.is_host:
        reason = f"dlx.share(like=) makes memory of the host, and its memory is on {tensor.device}"
        fix = "Make it there: dlx.empty(shape, dtype, device, shared=True)."
        raise DeviceError(reason, source=repr(tensor), fix=fix)
    if tensor.dtype.code == lib.kDLOpaqueHandle:
        raise DTypeError("its elements are handles, which mean nothing in another process")


class _Blocks:
    """Blocks to copy, and the bytes that they take."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.room = 0

    def add(self, keep: Any, size: int, address: int | None, remainder: int = 0) -> int:
        """Add memory, all of it from an address on, or a tensor without one; return where it goes."""
        offset = self.room + remainder
        self.blocks.append(_Block(offset, keep, None if address is None else (address, size)))
        self.room += -(-(remainder + size) // HEADER) * HEADER
        return offset


def _lay_out(items: list[_Item], fail: _Fail) -> _Blocks:
    """Place arrays of one device in new memory, and return the blocks to copy; `fail` gets those that cannot be."""
    blocks = _Blocks()
    order = sorted((item for item in items if item.extent[0] < item.extent[1]), key=attrgetter("extent"))
    for group in _overlapping(order):
        (low, high, is_dense), first = group[0].extent, group[0].tensor
        if len(group) == 1 and is_dense and first.data_ptr == low:  # as nearly all are
            group[0].offset = blocks.add(first, high - low, low)
            continue
        apart = _copy_runs(group, _merge_runs(group), blocks)
        _copy_separately(apart, blocks, fail)
    return blocks


def _overlapping(order: list[_Item]) -> Iterator[list[_Item]]:
    """Give the groups of arrays whose ranges of addresses overlap; `order` is by first address, and none is empty."""
    group: list[_Item] = []
    end = 0
    for item in order:
        low, high, _ = item.extent
        if group and low >= end:
            yield group
            group = []
        end = max(end, high) if group else high
        group.append(item)
    if group:
        yield group


def _merge_runs(group: list[_Item]) -> list[tuple[int, int]]:
    """Return the ranges of addresses that arrays without gaps fill: other bytes are not copied."""
    runs: list[tuple[int, int]] = []
    for item in group:
        low, high, is_dense = item.extent
        if is_dense and runs and low <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(high, runs[-1][1])
        elif is_dense:
            runs.append((low, high))
    return runs


def _copy_runs(group: list[_Item], runs: list[tuple[int, int]], blocks: _Blocks) -> list[_Item]:
    """Place arrays that lie in one run; return those that lie in none."""
    apart = []
    inside: dict[tuple[int, int], list[_Item]] = {}
    for item in group:
        low, high, _ = item.extent
        run = runs[max(bisect_right(runs, low, key=itemgetter(0)) - 1, 0)] if runs else (0, 0)
        if run[0] <= low and high <= run[1]:
            inside.setdefault(run, []).append(item)
        else:
            apart.append(item)
    for (low, high), members in inside.items():
        kept = [item.tensor for item in members]
        # The first byte lies where all others are, at a multiple of HEADER, unless that unaligns a member.
        offset = blocks.add(kept, high - low, low, low % max(map(_alignment, kept)))
        for item in members:
            item.move(low - offset)
    return apart


def _copy_separately(items: list[_Item], blocks: _Blocks, fail: _Fail) -> None:
    """Place arrays with gaps as compact copies; arrays of the same elements share one."""
    known: dict[Any, int] = {}
    for item in items:
        tensor = item.tensor
        key = tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype
        if key not in known:
            if tensor.dtype.bits * tensor.dtype.lanes % 8 and not tensor.flags & SUBBYTE_PADDED:
                reason = f"its {tensor.dtype} elements are packed below one byte and not contiguous"
                fail(LayoutError(reason, source=repr(tensor)), item)
                continue
            known[key] = blocks.add(tensor, tensor.nbytes, None)
        item.offset, item.strides = known[key], row_major(tensor.shape)


def _alignment(tensor: Tensor) -> int:
    """Return to how many bytes a tensor is aligned, as far as its dtype can need it; a power of two up to HEADER."""
    item = -(-tensor.dtype.bits * tensor.dtype.lanes // 8)
    bits = tensor.data_ptr | item | HEADER
    return bits & -bits


# ---- attach ----------------------------------------------------------------------------------------------------------


def attach_tree(
    handle: Any,
    mode: str,
    given: int | Sequence[int] | None = None,
    converted: Callable[[Any], Any] | None = None,
    to: Any = None,
) -> Any:
    """Return the tree of a handle, over shared memory; with `to` the fast path makes arrays without tensors."""
    fds: list[int | None] = [*given] if isinstance(given, Sequence) and given else [None]
    if isinstance(given, int):
        fds = [given]
    access = os.O_RDWR if mode == "write" else os.O_RDONLY
    segment = segment_of(handle, fds[0], access)
    numbers, text, names = read_description(segment)
    if not text:
        raise HandleError("its segment has no description of arrays")
    said = parsed(text)
    try:
        segments = [segment, *_open_segments(said["segments"], handle["pid"], access)]
        counts, memories = said["numbers"], said.get("memories", [])
        if len(counts) != len(segments) + len(memories) or {*map(type, counts)} != {int} or min(counts) < 0:
            raise HandleError("its description contradicts itself")
        if sum(counts) != len(numbers):
            raise HandleError("its description has more numbers, or fewer, than it says")
        whole = said.get("tree")
        in_sets = converted is not None and has_sets(whole)
        tensors, are_converted = _tensors(segments, counts, numbers, mode, None if in_sets else to)
        if memories:
            at, flags = sum(counts[: len(segments)]), 0 if mode == "write" else READ_ONLY
            if mode == "private":
                reason = "device memory has no pages that are private to who attaches"
                raise DeviceError(reason, fix="Pass writable=True, or readonly='copy'.")
            tensors += _on_devices(handle["pid"], segment, said, numbers[at:], counts[len(segments) :], flags, fds[1:])
    except (HandleError, DeviceError):
        raise
    except (DlxError, TypeError, ValueError, LookupError) as error:
        said_too = error.reason if isinstance(error, DlxError) else str(error)
        raise HandleError(f"its description is that of no arrays: {said_too}") from error
    if converted is None or (are_converted and not memories):
        return decoded(whole, names, tensors)
    if not in_sets:  # containers are made once, of converted arrays
        try:
            return decoded(whole, names, converted(tensors))
        except HandleError:
            raise
        except DlxError:
            pass  # it is raised with a path below
    return converted(decoded(whole, names, tensors))


def _open_segments(listed: Any, pid: int, access: int) -> Iterator[Segment]:
    """Open the segments that a description lists."""
    for fd, inode, size, token in listed:
        if (type(fd), type(inode), type(size), type(token)) != (int, int, int, str):
            raise HandleError("its description names no segment")
        yield opened(pid, fd, token, inode, size, None, access)


def _tensors(
    segments: list[Segment], counts: list[int], numbers: memoryview, mode: str, to: Any
) -> tuple[list[Any], bool]:
    """Return the tensors in segments, or arrays of a target if the fast path makes them, and whether all are such."""
    found: list[Any] = []
    are_converted = True
    flags = 0 if mode == "write" else READ_ONLY
    at, start = 0, segments[0].start  # offsets in the others count from their first byte
    for segment, count in zip(segments, counts, strict=False):  # the rest of them are of memories
        if count:
            mapping = segment.mapping(mode)
            part = mapping.address + start, segment.size - start, numbers[at : at + count], flags, mapping
            made = None if to is None else native.arrays_unpack(*part, FAST_PATH, to)
            are_converted = are_converted and made is not None
            found += native.tensors_unpack(*part) if made is None else made
        at, start = at + count, 0
    return found, are_converted


def _on_devices(
    pid: int, segment: Segment, said: Any, numbers: memoryview, counts: list[int], flags: int, given: list[int | None]
) -> list[Tensor]:
    """Return the tensors of a description that are in device memory. Errors: as `attach_tree`."""
    from dlx._sharing import device as devices  # needed by few programs

    own = devices.exports.get(segment.token)
    keep: Any = own
    if own is not None:
        memories, points = own.memories, own.events.points()
    else:
        keep = devices.Attached(segment)
        fds = iter(given)
        memories = [
            devices.opened(pid, each, next(fds, None) if each[0] == lib.DLX_IPC_DESCRIPTOR else None)
            for each in said["memories"]
        ]
        points = devices.waited(said["events"])
    tensors: list[Tensor] = []
    at = 0
    for memory, count in zip(memories, counts, strict=True):
        part = numbers[at : at + count]
        made = native.tensors_unpack(memory.address, memory.size, part, flags, (memory, keep))
        tensors += [devices.placed(each, memory, (memory, keep), points.get(memory.device)) for each in made]
        at += count
    return tensors


def shared_empty(shape: tuple[int, ...], dtype: Any, device: Device) -> Tensor:
    """Return a writable, row-major tensor over new shared memory: zeros on the host, anything on a device."""
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, dtype, HOST, 0, None)
    if device[0] == lib.kDLCUDA:
        from dlx._sharing.device import empty  # needed by few programs

        memory = empty(device, like.nbytes)
        return native.tensor_new(memory.address if like.nbytes else 0, shape, None, dtype, device, 0, memory)
    if device != HOST:
        raise DeviceError(f"memory of the host and of CUDA devices can be shared, asked for {device}")
    segment = new_segment(max(like.nbytes, 1))
    mapping = segment.mapping("write")
    return native.tensor_new(mapping.address + HEADER, shape, None, dtype, HOST, 0, mapping)
