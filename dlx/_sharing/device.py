"""Device memory shared between processes: allocations, events, and locks that show which of them are in use.

Another process opens an allocation with a driver handle or a descriptor. It must not be freed while it is open
elsewhere, so each user locks the segment that describes it; the kernel drops the lock even if the process is killed.
An allocation is freed once no lock is held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import secrets
import sys
from typing import Any
from weakref import WeakValueDictionary

from dlx._core import cuda
from dlx._core.extension import ffi, lib
from dlx._core.stream import Stream
from dlx._core.types import Device
from dlx._sharing.segment import OPEN_DESCRIPTOR, Descriptor, Segment
from dlx._support.text import amount
from dlx.errors import DeviceError, HandleError

__all__ = ["Export", "Memory", "allocate", "exports", "find_memory", "lock", "open_memory", "order", "wait_events"]

NONE, HANDLE, DESCRIPTOR = lib.DLX_IPC_NONE, lib.DLX_IPC_HANDLE, lib.DLX_IPC_DESCRIPTOR


class Memory:
    """One allocation on a device, created or opened by this process."""

    __slots__ = ("__weakref__", "address", "descriptor", "device", "key", "kind", "owner", "size")

    def __init__(self, device: Device, address: int, size: int, kind: int, key: str = "", owner: Any = None) -> None:
        self.device, self.address, self.size = device, address, size
        self.kind, self.key = kind, key  # the key is the driver handle as text, or a secret if it has a descriptor
        self.descriptor: Descriptor | None = None
        self.owner = owner  # releases the memory; None if another object does

    def describe(self) -> list[Any]:
        """Return builtin values with which other processes can open it."""
        if not self.key:
            handle, fd = ffi.new("unsigned char[]", lib.DLX_IPC_BYTES), ffi.new("int *", -1)
            cuda.check(lib.dlx_ipc_export(self.device.id, self.address, self.kind, handle, fd))
            self.descriptor = Descriptor(fd[0]) if self.kind == DESCRIPTOR else None
            self.key = bytes(handle).hex() if self.kind == HANDLE else secrets.token_hex(16)
        return [self.kind, _uuid(self.device), self.size, self.key, self.descriptor.number if self.descriptor else -1]


_open_memories: WeakValueDictionary[str, Memory] = WeakValueDictionary()  # by key; created by other processes


def _uuid(device: Device) -> str:
    """Return the UUID of a device, which is the same in every process."""
    uuid = ffi.new("unsigned char[]", lib.DLX_UUID_BYTES)
    cuda.check(lib.dlx_ipc_uuid(device.id, uuid))
    return bytes(uuid).hex()


def _device(uuid: str) -> Device:
    """Return this process's device with a UUID, or raise `DeviceError`."""
    count = ffi.new("int32_t *")
    cuda.check(lib.dlx_cuda_count(count))
    for number in range(count[0]):
        device = Device(lib.kDLCUDA, number)
        if _uuid(device) == uuid:
            return device
    fix = "Start this process with the same CUDA_VISIBLE_DEVICES."
    raise DeviceError("its memory is on a device that is not visible to this process", fix=fix)


# ---- share -----------------------------------------------------------------------------------------------------------


def find_memory(device: Device, low: int, high: int) -> Memory | None:
    """Return the allocation that contains a range of addresses; None if other processes cannot open it."""
    for each in list(_open_memories.values()):  # memory of another process keeps its description
        if each.device == device and each.address <= low and high <= each.address + each.size:
            return each
    base, size, kind = ffi.new("uintptr_t *"), ffi.new("int64_t *"), ffi.new("int *")
    cuda.check(lib.dlx_ipc_find(device.id, ffi.cast("void *", low), base, size, kind))
    if kind[0] == NONE or not base[0] <= low <= high <= base[0] + size[0]:
        return None
    return Memory(device, base[0], size[0], kind[0])


def allocate(device: Device, nbytes: int) -> Memory:
    """Allocate memory that other processes can open."""
    size, owner, address = ffi.new("int64_t *", max(nbytes, 1)), ffi.new("void **"), ffi.new("uintptr_t *")
    cuda.check(lib.dlx_ipc_open(device.id, NONE, ffi.NULL, -1, size, owner, address))
    keep = ffi.gc(owner[0], lib.dlx_ipc_release)
    memory = find_memory(device, address[0], address[0] + nbytes)
    if memory is None:
        raise DeviceError(f"other processes cannot open memory on {device}")
    memory.owner = keep
    return memory


def order(streams: dict[Device, Stream], device: Device, ready: Any) -> Stream:
    """Return dlx's stream on a device, and make it wait for an event or a stream."""
    stream = streams[device] = streams.get(device) or cuda.work_stream(device)
    if isinstance(ready, Stream):
        cuda.order(ready, stream)
    elif ready is not None:
        cuda.wait(ready, stream)
    return stream


class Export:
    """The device resources of one `dlx.share`: allocations, all that must live as long, and dlx's streams."""

    __slots__ = ("__weakref__", "_kept", "_process", "memories", "segment", "streams")

    def __init__(self, memories: list[Memory], kept: list[Any], streams: dict[Device, Stream]) -> None:
        self.memories, self.streams = memories, streams
        self._kept, self._process = kept, os.getpid()
        self.segment: Segment | None = None  # which describes them

    def record(self) -> list[list[str]]:
        """Record an event on each stream; return builtin values with which other processes can open them."""
        handle, event = ffi.new("unsigned char[]", lib.DLX_IPC_BYTES), ffi.new("void **")
        values = []
        for device in self.streams:
            cuda.check(lib.dlx_ipc_record(device.id, handle, event))
            self._kept.append(ffi.gc(event[0], functools.partial(lib.dlx_cuda_drop_event, device.id)))
            values.append([_uuid(device), bytes(handle).hex()])
        return values

    def points(self) -> dict[Device, Any]:
        """Return, for each device, an event after which its memory is ready in this process."""
        return {device: cuda.ready(stream) for device, stream in self.streams.items()}

    def bind(self, segment: Segment) -> None:
        """Set the segment that describes it."""
        self.segment = segment
        exports[segment.token] = self

    def is_open_elsewhere(self) -> bool:
        """Return whether another process has it open. If not, lock the segment, so that none can open it later."""
        if self.segment is None or self._process != os.getpid():  # a forked child shares the lock of its parent
            return False
        try:
            self.segment.check()
            fcntl.flock(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, HandleError):
            return True
        return False

    def __del__(self, finalizing: Any = sys.is_finalizing) -> None:
        if not finalizing() and self.is_open_elsewhere():  # at exit, modules may already be cleared
            left = Export(self.memories, self._kept, self.streams)
            left.segment = self.segment
            _waiting.append(left)


exports: WeakValueDictionary[str, Export] = WeakValueDictionary()  # of this process, by token of the segment
_waiting: list[Export] = []  # released here, but still open elsewhere


def collect() -> int:
    """Free shared memory that no other process has open; return the number of shares that are still open elsewhere."""
    for each in list(_waiting):
        if not each.is_open_elsewhere():
            with contextlib.suppress(ValueError):  # another thread removed it
                _waiting.remove(each)
    return len(_waiting)


cuda.pending.append(collect)


# ---- attach ----------------------------------------------------------------------------------------------------------


def lock(segment: Segment) -> Descriptor:
    """Show the owner of shared memory that this process has it open, while the returned descriptor lives."""
    descriptor = segment.reopen(os.O_RDONLY)  # a received one shares its lock with the sender
    try:
        fcntl.flock(descriptor.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        fix = "Share it again, and keep the handle until the other processes have attached."
        raise HandleError("its memory was freed: no process used it any more", fix=fix) from error
    return descriptor


def open_memory(pid: int, values: Any, received: int | None) -> Memory:
    """Open an allocation by the values of `Memory.describe`, once in a process; `received` is a descriptor of it."""
    kind, uuid, size, key, fd = values
    typed = kind in (HANDLE, DESCRIPTOR) and {type(uuid), type(key)} == {str} and {type(size), type(fd)} == {int}
    handle, length = bytes.fromhex(key) if typed else b"", lib.DLX_IPC_BYTES if kind == HANDLE else 16
    if not typed or not 0 < size < 1 << 62 or len(handle) != length:
        raise HandleError("its description of device memory is invalid")
    known = _open_memories.get(key)
    if known is not None:
        return known
    device = _device(uuid)
    found, owner, address = ffi.new("int64_t *", size), ffi.new("void **"), ffi.new("uintptr_t *")
    descriptor = _take_descriptor(pid, fd, received) if kind == DESCRIPTOR else None
    number = -1 if descriptor is None else descriptor.number
    try:
        cuda.check(lib.dlx_ipc_open(device.id, kind, handle, number, found, owner, address))
    except DeviceError as error:
        reason = f"its memory of {amount(size)} on {device} cannot be opened: {error.reason}"
        raise HandleError(reason, fix=error.fix) from error
    memory = Memory(device, address[0], found[0], kind, key, ffi.gc(owner[0], lib.dlx_ipc_release))
    memory.descriptor = descriptor
    _open_memories[key] = memory
    return memory


def _take_descriptor(pid: int, fd: int, received: int | None) -> Descriptor:
    """Duplicate a received descriptor, or a descriptor of another process."""
    if received is not None:
        try:
            return Descriptor(fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, 3))
        except (OSError, ValueError, OverflowError) as error:
            raise HandleError(f"fd={received!r} is not an open descriptor: {error}", fix=OPEN_DESCRIPTOR) from error
    taken = lib.dlx_take_descriptor(pid, fd) if 0 < pid < 1 << 31 and 0 <= fd < 1 << 31 else -1
    if taken < 0:
        name = errno.errorcode.get(ffi.errno, "no such process or descriptor")
        fix = "Send all of handle.filenos() and pass them: dlx.attach(handle, ..., fd=received)."
        raise HandleError(f"this process may not take descriptor {fd} of process {pid} ({name})", fix=fix)
    return Descriptor(taken)


def wait_events(values: Any) -> dict[Device, Any]:
    """Make dlx's streams wait for the events of `Events.record`; return, for each device, when its memory is ready."""
    points = {}
    for uuid, key in values:
        handle = bytes.fromhex(key)
        if len(handle) != lib.DLX_IPC_BYTES:
            raise HandleError("its description of an event is invalid")
        device = _device(uuid)
        try:
            cuda.check(lib.dlx_ipc_wait(device.id, handle))
        except DeviceError as error:
            raise HandleError(f"its event on {device} cannot be opened: {error.reason}", fix=error.fix) from error
        points[device] = cuda.ready(cuda.work_stream(device))
    return points
