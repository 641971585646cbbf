"""Lay out a tree in a segment, and read one that another process has laid out."""

from __future__ import annotations

import errno
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dlx._core import native
from dlx._core.cuda import check
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.types import READ_ONLY, SUBBYTE_PADDED, Device
from dlx._engine.batch import Batch
from dlx._engine.failures import Failures
from dlx._engine.request import Request
from dlx._engine.seam import FAST_PATH
from dlx._engine.tree import Tree
from dlx._protocols.dlpack import HOST
from dlx._protocols.pointer import dltensor
from dlx._registry import lookup
from dlx._registry.generic import TENSOR
from dlx._sharing.description import decoded, encoded, has_sets, parsed
from dlx._sharing.handle import Handle, handle_of, segment_of
from dlx._sharing.segment import (
    HEADER,
    Segment,
    has_huge_pages,
    new_segment,
    opened,
    placed,
    read_description,
)
from dlx._support.text import amount
from dlx.errors import DeviceError, DlxError, DTypeError, HandleError, LayoutError

if TYPE_CHECKING:
    from dlx._sharing.device import Export, Memory, Part

__all__ = ["attach_tree", "share_tree", "shared_empty"]


_BYTE = (lib.kDLUInt, 8, 1)


class _Block(NamedTuple):
    """Memory that is copied once, for all arrays that lie in it."""

    offset: int  # where to, in the new memory
    keep: Any  # arrays that keep it
    run: tuple[int, int] | None  # address and bytes; None: it is not one run, and is copied element by element

    def tensor(self, device: Device) -> Tensor:
        """Return what is copied, as a tensor."""
        if self.run is None:
            tensor: Tensor = self.keep
            return tensor
        address, size = self.run
        return native.tensor_new(address, (size,), None, _BYTE, device, READ_ONLY, self.keep)


# ---- share -----------------------------------------------------------------------------------------------------------


def share_tree(obj: Any, request: Request, *, is_copied: bool = True) -> Handle:
    """Put an array, or every array of a tree, into shared memory; what lies there already stays where it is.

    Parameters
    ----------
    obj, request
        As in `Batch`.
    is_copied
        False: the arrays only say what is made: the same, of zeros, all of it new.

    Raises
    ------
    DlxError
        If an array cannot be read, or is in memory that cannot be shared, or the tree holds what is no plain data.
    MemoryError, OSError
        If there is no memory, or no descriptor, left.
    """
    handler = lookup.kind(type(obj)).handler
    failures = _Listed("shared memory", collect=True)
    if handler is None:
        tree, objs, sources, path = None, [obj], [lookup.source(obj, target=request.target.name)[1]], None
    else:
        tree = Tree(obj, handler, failures)
        objs, sources, path = tree.arrays, tree.sources, tree.path

    def where(number: int) -> tuple[Any, ...]:
        return () if path is None else path(number)

    batch = Batch(request, objs, sources, path, failures, TENSOR.name)
    tensors = batch.tensors()  # None where that failed
    readable = []
    for i, tensor in enumerate(tensors):
        try:
            if tensor is not None:
                _check(tensor, is_copied=is_copied)
                readable.append(i)
        except DlxError as error:
            failures.add(error, where(i))
    extents = dict(zip(readable, native.tensors_extents([tensors[i] for i in readable]), strict=True))
    local = [i for i in readable if tensors[i].is_host]
    found = placed([extents[i] for i in local]) if is_copied else [None] * len(local)
    places = {i: place for i, place in zip(local, found, strict=True) if place is not None}
    fresh = [i for i in local if i not in places]
    blocks, copied, room = _blocks(tensors, extents, fresh, where, failures)
    remote = [i for i in readable if not tensors[i].is_host]
    export: Export | None = None
    parts_of: dict[int, Part] = {}
    if remote:
        export, parts_of = _exported(tensors, extents, remote, batch, where, failures)
    segments = {place.mapping.segment.token: place.mapping.segment for place in places.values()}
    # Arrays are numbered by segment: those that are copied into the new one first; those on devices come last.
    groups = [fresh]
    groups += [[i for i, place in places.items() if place.mapping.segment.token == token] for token in segments]
    memories = [] if export is None else export.memories
    groups += [[i for i in remote if i in parts_of and parts_of[i].memory == n] for n in range(len(memories))]
    number = [0] * len(objs)
    for n, i in enumerate(i for group in groups for i in group):
        number[i] = n
    nodes, names = ([-1, []], b"") if tree is None else encoded(tree, number, failures.add)
    failures.raise_first()
    at = {i: (offset, strides) for i, (offset, strides) in copied.items()}
    at |= {i: (place.offset + tensors[i].data_ptr - extents[i][0], None) for i, place in places.items()}
    at |= {i: (part.offset, part.strides) for i, part in parts_of.items()}
    numbers = [
        native.tensors_numbers([tensors[i] for i in group], [at[i][0] for i in group], [at[i][1] for i in group])
        for group in groups
    ]
    said = {
        "tree": nodes,
        "segments": [[each.fd, each.inode, each.size, each.token] for each in segments.values()],
        "numbers": [len(each) for each in numbers],
    }
    if export is not None:
        said["memories"], said["events"] = [each.written() for each in memories], export.events.written()
    text = json.dumps(said, separators=(",", ":")).encode()
    segment = new_segment(room, b"".join(numbers), text, names)
    if is_copied:
        _fill(segment, blocks)
    if export is not None:
        export.bind(segment)
    return handle_of(segment, tuple(segments.values()), export)


class _Listed(Failures):
    """Errors of all that cannot be shared; none is raised before all are known."""

    def check(self) -> None:
        """Go on: what did not fail is looked at further."""

    def raise_first(self) -> None:
        """Raise the first error, if there is one, with notes that say what else cannot be shared, and where."""
        if not self.errors:
            return
        first, *others = self.errors
        for other in others[:MAX_NOTES]:
            first.add_note(f"Neither can this: {other}")
        if len(others) > MAX_NOTES:
            first.add_note(f"Nor can {len(others) - MAX_NOTES} more.")
        self.errors = []
        try:
            raise first
        finally:
            del first, others  # this frame is in its traceback, and would keep it, and all that it holds, alive


def _exported(
    tensors: list[Tensor],
    extents: dict[int, tuple[int, int, bool]],
    remote: list[int],
    batch: Batch,
    where: Callable[[int], tuple[Any, ...]],
    failures: Failures,
) -> tuple[Export, dict[int, Part]]:
    """Lay out what is in device memory: allocations that others can open, which what is in none of them is copied to.

    `remote` are the numbers of the arrays; what fails is added to `failures`.
    """
    from dlx._sharing import device as devices  # needed by few programs

    memories: list[Memory] = []
    parts: dict[int, Part] = {}
    loose: dict[Device, list[int]] = {}
    events = devices.Events()
    devices.collect()
    for i in remote:
        tensor = tensors[i]
        low, high, _ = extents[i]
        try:
            events.after(tensor.device, batch.readiness(i))
            memory = devices.found(tensor.device, low, high) if low < high else None
        except DlxError as error:
            failures.add(_unshared(error, tensor), where(i))
            continue
        if memory is None:
            loose.setdefault(tensor.device, []).append(i)
            continue
        known = [n for n, each in enumerate(memories) if (each.device, each.address) == (memory.device, memory.address)]
        if not known:
            memories.append(memory)
        at = known[0] if known else len(memories) - 1
        parts[i] = devices.Part(at, tensor.data_ptr - memory.address, None)
    for device, waiting in loose.items():
        try:
            blocks, copied, room = _blocks(tensors, extents, waiting, where, failures)
            memory = devices.empty(device, room)
            stream = events.after(device, None).handle
            for block in blocks:
                source = block.tensor(device)
                flags, place = source.flags & SUBBYTE_PADDED, memory.address + block.offset
                target = native.tensor_new(place, source.shape, None, source.dtype, device, flags, memory)
                check(lib.dlx_cuda_transfer(dltensor(source), dltensor(target), flags, stream, 1))
        except DlxError as error:
            failures.add(_unshared(error, tensors[waiting[0]]), where(waiting[0]))
            continue
        memories.append(memory)
        parts |= {i: devices.Part(len(memories) - 1, *copied[i]) for i in waiting if i in copied}
    held = [tensors[i] for i in remote if i in parts and parts[i].strides is None]
    return devices.Export(memories, held, events), parts


def _unshared(error: DlxError, tensor: Tensor) -> DeviceError:
    """Return the error for device memory that cannot be shared."""
    reason = f"its memory on {tensor.device} cannot be shared: {error.reason}"
    return DeviceError(reason, source=repr(tensor), fix=_MOVE)


def _fill(segment: Segment, blocks: list[_Block]) -> None:
    """Copy memory of the host into the data of a segment.

    Raises
    ------
    DlxError
        If memory cannot be read.
    MemoryError
        If there is not enough memory.
    """
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
        source: Tensor = block.keep
        assert mapping is not None
        flags, place = source.flags & SUBBYTE_PADDED, mapping.address + start + block.offset
        target = native.tensor_new(place, source.shape, None, source.dtype, HOST, flags, mapping)
        status = lib.dlx_copy(dltensor(source), dltensor(target), flags)
        if status != lib.DLX_OK:
            raise DlxError(f"it could not be copied: status {status}")


MIN_MAPPED = 2 << 20  # bytes from which there may be huge pages
_MOVE = "Move it first: dlx.convert(obj, to=..., device='cpu')."
MAX_NOTES = 20  # errors beside the first that are told


def _check(tensor: Tensor, *, is_copied: bool) -> None:
    if not tensor.is_host and tensor.device[0] != lib.kDLCUDA:
        reason = f"dlx.share shares memory of the host and of CUDA devices, and its memory is on {tensor.device}"
        raise DeviceError(reason, source=repr(tensor), fix=_MOVE)
    if not is_copied and not tensor.is_host:
        raise DeviceError(
            f"dlx.share(like=) makes memory of the host, and its memory is on {tensor.device}",
            source=repr(tensor),
            fix="Make it there: dlx.empty(shape, dtype, device, shared=True).",
        )
    if tensor.dtype.code == lib.kDLOpaqueHandle:
        raise DTypeError("its elements are handles, which mean nothing in another process")


def _blocks(
    tensors: list[Tensor],
    extents: dict[int, tuple[int, int, bool]],
    waiting: list[int],
    where: Callable[[int], tuple[Any, ...]],
    failures: Failures,
) -> tuple[list[_Block], dict[int, tuple[int, Any]], int]:
    """Lay out what has to be copied.

    Parameters
    ----------
    tensors, extents
        The arrays, and their addresses.
    waiting
        The numbers of those that are copied; all are on one device.
    where
        ``where(i)`` is the path of an array, for errors.
    failures
        Gets a LayoutError for each array whose elements, packed below one byte, would have to be copied one by one.

    Returns
    -------
    blocks
        What is copied, once each.
    copied
        {number of an array: (offset of its first element, its strides, None for its own)}.
    room
        Bytes in all.
    """
    blocks: list[_Block] = []
    copied: dict[int, tuple[int, Any]] = {i: (0, None) for i in waiting if extents[i][0] == extents[i][1]}
    room = 0

    def add(keep: Any, size: int, address: int | None, remainder: int = 0) -> int:
        nonlocal room
        offset = room + remainder
        blocks.append(_Block(offset, keep, None if address is None else (address, size)))
        room += -(-(remainder + size) // HEADER) * HEADER
        return offset

    order = sorted((i for i in waiting if i not in copied), key=extents.__getitem__)
    for group in _overlapping(order, extents):
        if len(group) == 1:
            (i,) = group
            low, high, is_dense = extents[i]
            if is_dense and tensors[i].data_ptr == low:  # as nearly all are
                copied[i] = add(tensors[i], high - low, low), None
                continue
        # Bytes that no array of the group has elements in are not copied: they are nobody's, or another's.
        runs: list[tuple[int, int]] = []
        for i in group:
            low, high, is_dense = extents[i]
            if not is_dense:
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
            kept = [tensors[i] for i in members]
            # The first byte lies where all others are, at a multiple of HEADER, unless that unaligns a member.
            offset = add(kept, high - low, low, low % max(map(_alignment, kept)))
            copied |= {i: (offset + tensors[i].data_ptr - low, None) for i in members}
        known: dict[Any, int] = {}
        for i in apart:
            tensor = tensors[i]
            key = tensor.data_ptr, tensor.shape, tensor.strides, tensor.dtype
            if key not in known:
                if tensor.dtype.bits * tensor.dtype.lanes % 8 and not tensor.flags & SUBBYTE_PADDED:
                    reason = f"its {tensor.dtype} elements are packed below one byte and not contiguous"
                    failures.add(LayoutError(reason, source=repr(tensor)), where(i))
                    continue
                known[key] = add(tensor, tensor.nbytes, None)
            copied[i] = known[key], _compact(tensor.shape)
    return blocks, copied, room


def _overlapping(order: list[int], extents: dict[int, tuple[int, int, bool]]) -> Iterator[list[int]]:
    """Give the groups of arrays whose ranges of addresses overlap; `order` is by first address, and none is empty."""
    group: list[int] = []
    end = 0
    for i in order:
        low, high, _ = extents[i]
        if group and low >= end:
            yield group
            group = []
        end = max(end, high) if group else high
        group.append(i)
    if group:
        yield group


def _alignment(tensor: Tensor) -> int:
    """Return to how many bytes a tensor is aligned, as far as its dtype can need it; a power of two up to HEADER."""
    item = -(-tensor.dtype.bits * tensor.dtype.lanes // 8)
    bits = tensor.data_ptr | item | HEADER
    return bits & -bits


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


# ---- attach ----------------------------------------------------------------------------------------------------------


def attach_tree(
    handle: Any,
    mode: str,
    given: int | Sequence[int] | None = None,
    converted: Callable[[Any], Any] | None = None,
    to: Any = None,
) -> Any:
    """Return the tree that a handle stands for, of tensors over the shared memory.

    Parameters
    ----------
    handle
        As `share_tree` gives it, or the plain dict that it is.
    mode
        Of `Segment.mapping`.
    given
        Descriptors that were received, or one.
    converted
        Converts tensors, or a container of them; None where tensors are wanted.
    to
        The target, if the fast path does the same for a tensor: it then makes no tensor first.

    Raises
    ------
    DlxError
        Whatever `converted` raises.
    HandleError
        If it is none, is damaged, or what it stands for is gone. Then nothing was given out.
    DeviceError
        If memory is on a device that this process does not see, or would have to be private to it.
    """
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
        counts, listed = said["numbers"], said["segments"]
        segments = [segment]
        for fd, inode, size, token in listed:
            if (type(fd), type(inode), type(size), type(token)) != (int, int, int, str):
                raise HandleError("its description names no segment")
            segments.append(opened(handle["pid"], fd, token, inode, size, None, access))
        memories = said.get("memories", [])
        if len(counts) != len(segments) + len(memories) or {*map(type, counts)} != {int} or min(counts) < 0:
            raise HandleError("its description contradicts itself")
        if sum(counts) != len(numbers):
            raise HandleError("its description has more numbers, or fewer, than it says")
        whole = said.get("tree")
        in_sets = converted is not None and has_sets(whole)
        tensors: list[Any] = []  # or arrays of the target
        are_converted = True
        flags = 0 if mode == "write" else READ_ONLY
        at, start = 0, segment.start  # what lies in the others is counted from their first byte
        for each, count in zip(segments, counts, strict=False):  # the rest of them are of memories
            if count:
                mapping = each.mapping(mode)
                part = mapping.address + start, each.size - start, numbers[at : at + count], flags, mapping
                made = None if to is None or in_sets else native.arrays_within(*part, FAST_PATH, to)
                are_converted = are_converted and made is not None
                tensors += native.tensors_within(*part) if made is None else made
            at, start = at + count, 0
        if memories:
            are_converted = False
            if mode == "private":
                raise DeviceError(
                    "device memory has no pages that are private to who attaches",
                    fix="Pass writable=True, or readonly='copy'.",
                )
            tensors += _on_devices(handle["pid"], segment, said, numbers[at:], counts[len(segments) :], flags, fds[1:])
    except (HandleError, DeviceError):
        raise
    except (DlxError, TypeError, ValueError, LookupError) as error:
        said_too = error.reason if isinstance(error, DlxError) else str(error)
        raise HandleError(f"its description is that of no arrays: {said_too}") from error
    if converted is None or are_converted:
        return decoded(whole, names, tensors)
    if not in_sets:  # containers are made once, of what is converted
        try:
            return decoded(whole, names, converted(tensors))
        except HandleError:
            raise
        except DlxError:
            pass  # it is raised with a path below
    return converted(decoded(whole, names, tensors))


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
        made = native.tensors_within(memory.address, memory.size, part, flags, (memory, keep))
        tensors += [devices.placed(each, memory, (memory, keep), points.get(memory.device)) for each in made]
        at += count
    return tensors


def shared_empty(shape: tuple[int, ...], dtype: Any, device: Device) -> Tensor:
    """Return a writable, row-major tensor over new shared memory: of zeros on the host, of anything on a device.

    Raises
    ------
    DTypeError, LayoutError, DeviceError
        If there is no such dtype, its size does not fit 63 bits, or no memory of that device can be shared.
    MemoryError, OSError
        If there is no memory, or no descriptor, left.
    """
    like = native.tensor_new(lib.DLX_ALIGNMENT, shape, None, dtype, HOST, 0, None)
    if device[0] == lib.kDLCUDA:
        from dlx._sharing.device import empty  # needed by few programs

        memory = empty(device, like.nbytes)
        return native.tensor_new(memory.address if like.nbytes else 0, shape, None, dtype, device, 0, memory)
    if device != Device("cpu"):
        raise DeviceError(f"memory of the host and of CUDA devices can be shared, asked for {device}")
    segment = new_segment(max(like.nbytes, 1))
    mapping = segment.mapping("write")
    return native.tensor_new(mapping.address + HEADER, shape, None, dtype, HOST, 0, mapping)
