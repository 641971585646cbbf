"""Sharing of trees between processes: write arrays to a segment, and build tensors over an attached one."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dlx._core import cuda, native
from dlx._core.cuda import check
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.types import HOST, READ_ONLY, SUBBYTE_PADDED, Device, row_major
from dlx._engine.batch import Batch
from dlx._engine.compound import Compounds
from dlx._engine.failures import Failures
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.tree import Tree
from dlx._protocols.pointer import dltensor
from dlx._registry import lookup
from dlx._registry.generic import TENSOR
from dlx._sharing.description import Packed, decode, encode, needs_tensors, pack_lists, pack_rows, parse
from dlx._sharing.handle import Handle, create_handle, find_segment
from dlx._sharing.ring import Ring, RingReader, check_apart, plain_data
from dlx._sharing.segment import HEADER, Segment, has_huge_pages, locate, new_segment, open_segment, read_description
from dlx._sharing.workers import register_types
from dlx._support.reflect import type_name
from dlx._support.text import amount
from dlx.errors import (
    ConversionError,
    CopyRequiredError,
    DeviceError,
    DlxError,
    DTypeError,
    HandleError,
    LayoutError,
    ReadOnlyError,
)

if TYPE_CHECKING:
    from dlx._core.stream import Stream
    from dlx._sharing.device import Export, Memory

__all__ = ["attach_tree", "create_ring", "share_tree", "shared_empty"]

_BYTE = (lib.kDLUInt, 8, 1)


class _Item:
    """A shared array, its range of addresses, and its offset in the segment or allocation that contains it."""

    __slots__ = ("extent", "index", "offset", "strides", "tensor")

    def __init__(self, index: int, tensor: Tensor, extent: tuple[int, int, bool]) -> None:
        self.index, self.tensor = index, tensor  # the number of the array in the tree
        self.extent = extent  # its first byte, its end, whether its elements have no gaps
        self.offset = 0  # of its first element
        self.strides: tuple[int, ...] | None = None  # None: the tensor's

    def move(self, start: int) -> None:
        """Set its offset from the address `start`."""
        self.offset = self.tensor.data_ptr - start


class _Block(NamedTuple):
    """A run of bytes, or one tensor with gaps, that is copied once for all arrays in it."""

    offset: int  # of its copy in the new memory
    keep: Any  # the tensor with gaps, or objects that keep the run alive
    run: tuple[int, int] | None  # address and bytes; None: `keep` is copied element by element

    def endpoints(self, start: int, device: Device, owner: Any) -> tuple[Tensor, Tensor, int]:
        """Return tensors over the source and over the target in the new memory at `start`, and the element flags."""
        source: Tensor = self.keep
        if self.run is not None:
            source = native.tensor_new(self.run[0], (self.run[1],), None, _BYTE, device, READ_ONLY, self.keep)
        flags, place = source.flags & SUBBYTE_PADDED, start + self.offset
        return source, native.tensor_new(place, source.shape, None, source.dtype, device, flags, owner), flags


_Fail = Callable[[DlxError, _Item], None]


# ---- share -----------------------------------------------------------------------------------------------------------


def share_tree(obj: Any, request: Request, *, with_values: bool = True, ring: tuple[int, ...] = ()) -> Handle[Any]:
    """Share an array or tree; arrays in shared memory stay there. Without `with_values`, share zeros instead.

    With the options of a `ring`, share one slot after the other.
    """
    handler = lookup.kind_of(obj).handler
    failures, path = _AllFailures("shared memory", collect=True), None
    tree = None if handler is None else Tree(obj, handler, failures, compounds=Compounds(None))
    if tree is None:
        objs, sources = [obj], [lookup.source(obj, target=request.target.name)[1]]
    else:
        objs, sources, path = [*tree.arrays], [*tree.sources], tree.path
    found, inside = pack_lists(tree) if with_values and tree is not None else ({}, set())
    packed: dict[int, tuple[str, int, int]] = {}
    further: list[Tensor] = []  # the arrays of packed lists

    def add(rows: Any) -> int:
        further.append(FAST_PATH(rows, TENSOR.name))
        return len(objs) + len(further) - 1

    for node, (kind, data, offsets) in found.items():
        packed[node] = kind, add(data), add(offsets)
    for i, array_ in enumerate(objs if with_values else ()):
        is_text = getattr(getattr(array_, "dtype", None), "kind", "") in ("U", "S", "T")
        rows = pack_rows(array_.tolist()) if is_text and array_.ndim == 1 else None
        if rows is not None:  # its joined bytes take its place
            objs[i], sources[i] = FAST_PATH(rows[1], TENSOR.name), TENSOR
            packed[~i] = f"packed {rows[0]} list", i, add(rows[2])

    def fail(error: DlxError, item: _Item) -> None:
        failures.add(error, () if path is None else path(item.index))

    batch = Batch(request, objs, sources, path, failures, TENSOR.name)
    layout = _place_items(_collect_items([*batch.tensors(), *further], with_values, fail), batch, with_values, fail)
    number = [0] * (len(objs) + len(further))
    for n, item in enumerate(itertools.chain(*layout.groups)):
        number[item.index] = n
    if tree is None:
        root = [[kind, None, [~number[each] for each in rows]] for kind, *rows in packed.values()]
        nodes, names = [0 if root else -1, root], b""
    else:
        nodes, names = encode(tree, number, failures.add, packed, inside)
    failures.raise_first()
    register_types()
    return _write_segment(layout, nodes, names, with_values, ring)


class _Layout(NamedTuple):
    """The memory of all arrays of a tree."""

    groups: list[list[_Item]]  # in the new segment, in each of `segments`, in each memory of `export`
    blocks: _Blocks  # of the new segment
    segments: list[Segment]  # existing segments that contain arrays
    export: Export | None  # device memory


def _collect_items(tensors: Sequence[Tensor | None], with_values: bool, fail: _Fail) -> list[_Item]:
    """Return the arrays that can be shared; report the others to `fail`."""
    items = []
    for i, tensor in enumerate(tensors):
        if tensor is None:  # its conversion failed
            continue
        item = _Item(i, tensor, (0, 0, True))
        try:
            _check_item(tensor, with_values=with_values)
            items.append(item)
        except DlxError as error:
            fail(error, item)
    for item, extent in zip(items, native.tensors_extents([item.tensor for item in items]), strict=True):
        item.extent = extent
    return items


def _place_items(items: list[_Item], batch: Batch, with_values: bool, fail: _Fail) -> _Layout:
    """Assign each array to the segment or allocation that contains it, or to new memory."""
    local = [item for item in items if item.tensor.is_host]
    remote = [item for item in items if not item.tensor.is_host]
    fresh: list[_Item] = []
    segments: dict[str, Segment] = {}
    held: dict[str, list[_Item]] = {}
    places = locate([item.extent for item in local]) if with_values else [None] * len(local)
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


def _write_segment(
    layout: _Layout, nodes: list[Any], names: bytes, with_values: bool, ring: tuple[int, ...]
) -> Handle[Any]:
    """Create the segment of a layout, with its description and the copied arrays."""
    numbers = []
    for group in layout.groups:
        offsets, strides = [item.offset for item in group], [item.strides for item in group]
        numbers.append(native.tensors_pack([item.tensor for item in group], offsets, strides))
    export = layout.export
    fields = {
        "tree": nodes,
        "segments": [[each.fd, each.inode, each.size, each.token] for each in layout.segments],
        "numbers": [len(each) for each in numbers],
    }
    if export is not None:
        fields["memories"] = [each.describe() for each in export.memories]
        fields["events"] = export.record()
    room = layout.blocks.room
    if ring:
        fields["ring"] = [*ring, room]
        room = lib.DLX_RING_BYTES + ring[0] * room
    text = json.dumps(fields, separators=(",", ":")).encode()
    segment = new_segment(room, b"".join(numbers), text, names)
    if with_values:
        _fill(segment, layout.blocks.blocks)
    if export is not None:
        export.bind(segment)
    return create_handle(segment, tuple(layout.segments), export)


class _AllFailures(Failures):
    """Errors of all objects that cannot be shared, raised together at the end."""

    def check(self) -> None:
        """Do nothing, so that the remaining objects are checked, too."""

    def raise_first(self) -> None:
        """Raise the first error, if any, with a note for each of the others."""
        if self.errors:
            raise self._take_first()  # a local variable would form a cycle with the error's traceback

    def _take_first(self) -> DlxError:
        (first, *others), self.errors = self.errors, []
        for other in others[:MAX_NOTES]:
            first.add_note(f"Another error: {other}")
        if len(others) > MAX_NOTES:
            first.add_note(f"{len(others) - MAX_NOTES} more errors are not shown.")
        return first


def _export(remote: list[_Item], batch: Batch, fail: _Fail) -> tuple[Export, list[list[_Item]]]:
    """Group device arrays by allocations that other processes can open; copy them if their own cannot be opened."""
    from dlx._sharing import device as devices  # needed by few programs

    groups: dict[Memory, list[_Item]] = {}
    known: dict[tuple[Device, int], Memory] = {}
    loose: dict[Device, list[_Item]] = {}
    streams: dict[Device, Stream] = {}
    devices.collect()
    for item in remote:
        device, (low, high, _) = item.tensor.device, item.extent
        try:
            devices.order(streams, device, batch.readiness(item.index))
            memory = devices.find_memory(device, low, high) if low < high else None
        except DlxError as error:
            fail(_device_error(error, item.tensor), item)
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
            memory = devices.allocate(device, blocks.room)
            stream = devices.order(streams, device, None).handle
            for block in blocks.blocks:
                source, target, flags = block.endpoints(memory.address, device, memory)
                check(lib.dlx_cuda_transfer(dltensor(source), dltensor(target), flags, stream, 1))
        except DlxError as error:
            fail(_device_error(error, waiting[0].tensor), waiting[0])
            continue
        groups[memory] = waiting
    held = [item.tensor for group in groups.values() for item in group if item.strides is None]
    return devices.Export([*groups], held, streams), [*groups.values()]


def _device_error(error: DlxError, tensor: Tensor) -> DeviceError:
    """Return the error for device memory that cannot be shared."""
    reason = f"its memory on {tensor.device} cannot be shared: {error.reason}"
    return DeviceError(reason, source=repr(tensor), fix=_MOVE)


def _fill(segment: Segment, blocks: list[_Block]) -> None:
    """Copy host memory into the data of a segment."""
    start = segment.start
    runs = array("q")
    for block in blocks:
        if block.run is not None:
            runs.extend((block.run[0], start + block.offset, block.run[1]))
    odd = [block for block in blocks if block.run is None]
    is_large = bool(runs) and segment.size - start >= MIN_MAPPED and has_huge_pages(segment.size)
    mapping = segment.mapping("write") if odd or is_large else None
    pages = mapping.pages if is_large and mapping is not None else ffi.NULL
    table = ffi.cast("dlx_run *", ffi.from_buffer(runs)), len(runs) // 3
    if lib.dlx_write_runs(segment.fd, pages, segment.size, *table) != 0:
        if ffi.errno == errno.EFAULT:
            raise DlxError("its memory cannot be read", fix="Check whether another program truncated the mapped file.")
        raise MemoryError(f"a segment of {amount(segment.size)}: {os.strerror(ffi.errno)}")
    for block in odd:
        assert mapping is not None
        source, target, flags = block.endpoints(mapping.address + start, HOST, mapping)
        status = lib.dlx_copy(dltensor(source), dltensor(target), flags)
        if status != lib.DLX_OK:
            raise DlxError(f"the copy failed with status {status}", fix="Report this error of dlx.")


MIN_MAPPED = 2 << 20  # bytes of the smallest segment that can use huge pages
_MOVE = "Move it first: dlx.convert(obj, to=..., device='cpu')."
MAX_NOTES = 20  # of further errors


def _check_item(tensor: Tensor, *, with_values: bool) -> None:
    if not tensor.is_host and tensor.device[0] != lib.kDLCUDA:
        reason = f"dlx.share supports host and CUDA memory; its memory is on {tensor.device}"
        raise DeviceError(reason, source=repr(tensor), fix=_MOVE)
    if not with_values and not tensor.is_host:
        reason = f"dlx.share(like=) allocates host memory; its memory is on {tensor.device}"
        fix = "Allocate it on the device: dlx.empty(shape, dtype, device, shared=True)."
        raise DeviceError(reason, source=repr(tensor), fix=fix)
    if tensor.dtype.code == lib.kDLOpaqueHandle:
        raise DTypeError("its elements are handles, which are invalid in other processes")


class _Blocks:
    """Blocks to copy, and the number of bytes for them."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.room = 0

    def add(self, keep: Any, size: int, address: int | None, remainder: int = 0) -> int:
        """Add a run of bytes, or a tensor without an address; return its offset."""
        offset = self.room + remainder
        self.blocks.append(_Block(offset, keep, None if address is None else (address, size)))
        self.room += -(-(remainder + size) // HEADER) * HEADER
        return offset


def _lay_out(items: list[_Item], fail: _Fail) -> _Blocks:
    """Assign arrays of one device to new memory, and return the blocks to copy; `fail` gets errors."""
    blocks = _Blocks()
    order = sorted((item for item in items if item.extent[0] < item.extent[1]), key=attrgetter("extent"))
    for group in _group_overlapping(order):
        (low, high, is_dense), first = group[0].extent, group[0].tensor
        if len(group) == 1 and is_dense and first.data_ptr == low:  # the usual case
            group[0].offset = blocks.add(first, high - low, low)
            continue
        apart = _copy_runs(group, _merge_runs(group), blocks)
        _copy_separately(apart, blocks, fail)
    return blocks


def _group_overlapping(order: list[_Item]) -> Iterator[list[_Item]]:
    """Yield groups of arrays whose address ranges overlap; `order` is sorted by first address, without empty arrays."""
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
    """Return the address ranges that arrays without gaps fill; no other bytes are copied."""
    runs: list[tuple[int, int]] = []
    for item in group:
        low, high, is_dense = item.extent
        if is_dense and runs and low <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(high, runs[-1][1])
        elif is_dense:
            runs.append((low, high))
    return runs


def _copy_runs(group: list[_Item], runs: list[tuple[int, int]], blocks: _Blocks) -> list[_Item]:
    """Add a block for each run that contains arrays; return the arrays outside all runs."""
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
        # Start the run at a multiple of HEADER, plus its remainder by the largest alignment of a member.
        offset = blocks.add(kept, high - low, low, low % max(map(_alignment, kept)))
        for item in members:
            item.move(low - offset)
    return apart


def _copy_separately(items: list[_Item], blocks: _Blocks, fail: _Fail) -> None:
    """Add a compact copy for each array with gaps; arrays with the same elements share one."""
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
    """Return the alignment of a tensor in bytes, limited by its item size: a power of two up to HEADER."""
    item = -(-tensor.dtype.bits * tensor.dtype.lanes // 8)
    bits = tensor.data_ptr | item | HEADER
    return bits & -bits


# ---- attach ----------------------------------------------------------------------------------------------------------


def attach_tree(
    handle: Any,
    mode: str,
    received: int | Sequence[int] | None = None,
    convert: Callable[..., Any] | None = None,
    to: Any = None,
    lazy: bool = False,
) -> Any:
    """Return the tree of a handle, over shared memory; with `to`, the fast path converts without tensors."""
    fds: list[int | None] = [*received] if isinstance(received, Sequence) and received else [None]
    if isinstance(received, int):
        fds = [received]
    access = os.O_RDWR if mode == "write" else os.O_RDONLY
    segment = find_segment(handle, fds[0], access)
    numbers, text, names = read_description(segment)
    if not text:
        raise HandleError("its segment has no description of arrays")
    fields = parse(text)
    if "ring" in fields:
        if mode == "private":
            raise ReadOnlyError("the frames of a ring have no private pages", fix="Pass writable=True.")
        return RingReader(segment, *_open_ring(segment, fields, numbers, names, mode, convert))
    try:
        segments = [segment, *_open_segments(fields["segments"], handle["pid"], access)]
        counts, memories = fields["numbers"], fields.get("memories", [])
        is_right = len(counts) == len(segments) + len(memories) and {*map(type, counts)} == {int} and min(counts) >= 0
        if not is_right or sum(counts) != len(numbers):
            raise HandleError("its description contradicts itself")
        whole = fields.get("tree")
        as_tensors = convert is not None and needs_tensors(whole)
        tensors, are_converted = _build_tensors(segments, counts, numbers, mode, None if as_tensors else to)
        if memories:
            rest, flags = numbers[sum(counts[: len(segments)]) :], 0 if mode == "write" else READ_ONLY
            if mode == "private":
                reason = "device memory cannot be mapped with private pages"
                raise DeviceError(reason, fix="Pass writable=True, or readonly='copy'.")
            tensors += _build_remote(handle["pid"], segment, fields, rest, counts[len(segments) :], flags, fds[1:])
    except (DlxError, TypeError, ValueError, LookupError) as error:
        _raise_invalid(error)
    if convert is None or (are_converted and not memories):
        register_types({*map(type, tensors)})
        return decode(whole, names, tensors, lazy=lazy)
    for tensor in tensors[:1]:
        with contextlib.suppress(DlxError):  # a target without empty arrays
            like = native.tensor_new(lib.DLX_ALIGNMENT, (0,), None, tensor.dtype, HOST, 0, None)
            register_types({type(convert(like))})
    tree = decode(whole, names, tensors, joins=True, lazy=lazy)
    return tree if isinstance(tree, Packed) else convert(tree)


def create_ring(ring: tuple[int, ...], like: Any, request: Request, convert: Callable[..., Any]) -> Ring:
    """Create a ring for frames like a tree; reserve its memory."""
    handle = share_tree(like, request, with_values=False, ring=ring)
    (segment,) = handle._segments
    numbers, text, names = read_description(segment)
    if not numbers:
        reason, fix = "it has no array, and frames consist of arrays", "Make its numbers arrays: numpy.array(0)."
        raise ConversionError(reason, source=type_name(type(like)), fix=fix)
    mapping = segment.mapping("write")
    try:
        if segment.size >= MIN_MAPPED and has_huge_pages(segment.size):
            lib.dlx_write_runs(segment.fd, mapping.pages, segment.size, ffi.NULL, 0)
        os.posix_fallocate(segment.fd, 0, segment.size)
    except OSError as error:
        raise MemoryError(f"a ring of {amount(segment.size)}: {error.strerror}") from error
    trees, options = _open_ring(segment, parse(text), numbers, names, "write", None)
    check_apart(trees[0], type_name(type(like)))
    own = [convert(each, copy=False) for each in trees]
    return Ring(segment, trees, options, handle=handle, own=own, plain=plain_data(trees[0]))


def _open_ring(
    segment: Segment, fields: Any, numbers: memoryview, names: bytes, mode: str, convert: Any
) -> tuple[list[Any], tuple[int, int, int]]:
    """Return the frames of a ring, converted without a copy, and its options."""
    try:
        slots, overwrite, readers, room = fields["ring"]
        start = segment.start + lib.DLX_RING_BYTES
        if {*map(type, fields["ring"])} != {int} or not 2 <= slots <= lib.DLX_RING_SLOTS or min(room, readers) < 0:
            raise HandleError("the numbers of its ring are out of range")
        if start + slots * room > segment.size:
            raise HandleError("its ring is larger than its segment")
        mapping, flags = segment.mapping(mode), 0 if mode == "write" else READ_ONLY
        parts = [(mapping.address + start + slot * room, room, numbers, flags, mapping) for slot in range(slots)]
        trees = [decode(fields.get("tree"), names, native.tensors_unpack(*part)) for part in parts]
    except (DlxError, TypeError, ValueError) as error:
        _raise_invalid(error)
    try:
        trees = trees if convert is None else [convert(each, copy=False) for each in trees]
    except (ReadOnlyError, CopyRequiredError) as error:
        fix = "Attach it with to='dlx', and convert each frame."
        fix = "Pass writable=True." if isinstance(error, ReadOnlyError) else fix
        error.sharing, error.option, error.fix = False, (), fix
        raise
    return trees, (slots, int(bool(overwrite)), min(readers, 1 << 30))


def _raise_invalid(error: Exception) -> NoReturn:
    """Raise `HandleError` for a description that cannot be read."""
    if isinstance(error, (HandleError, DeviceError)):
        raise error
    why = error.reason if isinstance(error, DlxError) else str(error)
    raise HandleError(f"its description is invalid: {why}") from error


def _open_segments(listed: Any, pid: int, access: int) -> Iterator[Segment]:
    """Open the segments that a description lists."""
    for fd, inode, size, token in listed:
        if (type(fd), type(inode), type(size), type(token)) != (int, int, int, str):
            raise HandleError("its description of a segment is invalid")
        yield open_segment(pid, fd, token, inode, size, None, access)


def _build_tensors(
    segments: list[Segment], counts: list[int], numbers: memoryview, mode: str, to: Any
) -> tuple[list[Any], bool]:
    """Return tensors over segments, or arrays of the target if the fast path supports that, and whether it does."""
    found: list[Any] = []
    are_converted = True
    flags = 0 if mode == "write" else READ_ONLY
    at, start = 0, segments[0].start  # offsets in the other segments start at their first byte
    for segment, count in zip(segments, counts, strict=False):  # further counts are of device memory
        if count:
            mapping = segment.mapping(mode)
            part = mapping.address + start, segment.size - start, numbers[at : at + count], flags, mapping
            made = None if to is None else native.arrays_unpack(*part, FAST_PATH, to)
            are_converted = are_converted and made is not None
            found += native.tensors_unpack(*part) if made is None else made
        at, start = at + count, 0
    return found, are_converted


def _build_remote(
    pid: int, segment: Segment, fields: Any, numbers: memoryview, counts: list[int], flags: int, fds: list[int | None]
) -> list[Tensor]:
    """Return tensors over the device memory of a description. Errors: as `attach_tree`."""
    from dlx._sharing import device as devices  # needed by few programs

    own = devices.exports.get(segment.token)
    keep: Any = own
    if own is not None:
        memories, points = own.memories, own.points()
    else:
        keep = devices.lock(segment)
        received = iter(fds)
        memories = [
            devices.open_memory(pid, each, next(received, None) if each[0] == lib.DLX_IPC_DESCRIPTOR else None)
            for each in fields["memories"]
        ]
        points = devices.wait_events(fields["events"])
    tensors: list[Tensor] = []
    at = 0
    for memory, count in zip(memories, counts, strict=True):
        part = numbers[at : at + count]
        made = native.tensors_unpack(memory.address, memory.size, part, flags, (memory, keep))
        there = (native.tensor_view(each, None, memory.device, None, None) for each in made)
        tensors += [cuda.when(each, points.get(memory.device)) for each in there]
        at += count
    return tensors


def shared_empty(shape: tuple[int, ...], dtype: Any, device: Device) -> Tensor:
    """Return a writable, row-major tensor over new shared memory: zeros on the host, uninitialized on a device."""
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, dtype, HOST, 0, None)
    if device[0] == lib.kDLCUDA:
        from dlx._sharing.device import allocate  # needed by few programs

        memory = allocate(device, like.nbytes)
        return native.tensor_new(memory.address if like.nbytes else 0, shape, None, dtype, device, 0, memory)
    if device != HOST:
        raise DeviceError(f"only host and CUDA memory can be shared, not {device}", fix="Pass 'cpu' or 'cuda:0'.")
    segment = new_segment(max(like.nbytes, 1))
    mapping = segment.mapping("write")
    return native.tensor_new(mapping.address + HEADER, shape, None, dtype, HOST, 0, mapping)
