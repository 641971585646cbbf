"""Device memory of several processes: allocations that others open, each once in a process, and who has them open.

Others open an allocation by a handle of the driver, or by a descriptor. It must not be freed while another process has
it open, so each of these holds a lock on the segment that describes it; the kernel drops the lock however the process
ends. Shared memory waits until no lock is held.
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

from dlx._core import cuda, native
from dlx._core.extension import ffi, lib
from dlx._core.native import Tensor
from dlx._core.stream import Stream
from dlx._core.types import Device
from dlx._sharing.segment import Descriptor, Segment, advise
from dlx._support.text import amount
from dlx.errors import DeviceError, HandleError

__all__ = ["Attached", "Events", "Export", "Memory", "empty", "exports", "found", "opened", "placed", "waited"]

NONE, HANDLE, DESCRIPTOR = lib.DLX_IPC_NONE, lib.DLX_IPC_HANDLE, lib.DLX_IPC_DESCRIPTOR


class Memory:
    """One allocation on a device, of this process or opened by it."""

    __slots__ = ("__weakref__", "address", "descriptor", "device", "key", "kind", "owner", "size")

    def __init__(self, device: Device, address: int, size: int, kind: int, key: str = "", owner: Any = None) -> None:
        self.device, self.address, self.size = device, address, size
        self.kind, self.key = kind, key  # others open it by a handle, as text, or by a descriptor and a secret
        self.descriptor: Descriptor | None = None
        self.owner = owner  # releases the memory; None if another object does

    def written(self) -> list[Any]:
        """Return the builtin values that describe it to other processes."""
        if not self.key:
            handle, fd = ffi.new("unsigned char[]", lib.DLX_IPC_BYTES), ffi.new("int *", -1)
            cuda.check(lib.dlx_ipc_export(self.device.id, self.address, self.kind, handle, fd))
            self.descriptor = Descriptor(fd[0]) if self.kind == DESCRIPTOR else None
            self.key = bytes(handle).hex() if self.kind == HANDLE else secrets.token_hex(16)
        return [self.kind, _uuid(self.device), self.size, self.key, self.descriptor.number if self.descriptor else -1]


_opened: WeakValueDictionary[str, Memory] = WeakValueDictionary()  # by key: of other processes


def _uuid(device: Device) -> str:
    """Return the name of a device in every process."""
    uuid = ffi.new("unsigned char[]", lib.DLX_UUID_BYTES)
    cuda.check(lib.dlx_ipc_uuid(device.id, uuid))
    return bytes(uuid).hex()


def _device(uuid: str) -> Device:
    """Return the device with a UUID in this process, or raise `DeviceError`."""
    count = ffi.new("int32_t *")
    cuda.check(lib.dlx_cuda_count(count))
    for number in range(count[0]):
        device = Device(lib.kDLCUDA, number)
        if _uuid(device) == uuid:
            return device
    fix = "Start it with the same devices: CUDA_VISIBLE_DEVICES may leave that one out."
    raise DeviceError("its memory is on a device that this process does not see", fix=fix)


# ---- share -----------------------------------------------------------------------------------------------------------


def found(device: Device, low: int, high: int) -> Memory | None:
    """Return the allocation that a range of addresses is in; None if others cannot open it."""
    for each in list(_opened.values()):  # it is passed on as it came
        if each.device == device and each.address <= low and high <= each.address + each.size:
            return each
    base, size, kind = ffi.new("uintptr_t *"), ffi.new("int64_t *"), ffi.new("int *")
    cuda.check(lib.dlx_ipc_find(device.id, ffi.cast("void *", low), base, size, kind))
    if kind[0] == NONE or not base[0] <= low <= high <= base[0] + size[0]:
        return None
    return Memory(device, base[0], size[0], kind[0])


def empty(device: Device, nbytes: int) -> Memory:
    """Return fresh memory that others can open."""
    owner, address = ffi.new("void **"), ffi.new("uintptr_t *")
    cuda.check(lib.dlx_ipc_empty(device.id, nbytes, owner, address))
    keep = ffi.gc(owner[0], lib.dlx_ipc_release)
    memory = found(device, address[0], address[0] + nbytes)
    if memory is None:
        raise DeviceError(f"memory on {device} cannot be opened by other processes")
    memory.owner = keep
    return memory


class Events:
    """One event a device, behind which all that was shared is ready; and the work that makes it so."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}  # dlx's own, by number of the device
        self.made: list[Any] = []

    def after(self, device: Device, ready: Any) -> Stream:
        """Return dlx's own stream of a device, ordered after an event or a stream."""
        stream = self.streams.get(device.id)
        if stream is None:
            stream = self.streams[device.id] = cuda.work_stream(device)
        if isinstance(ready, Stream):
            cuda.order(ready, stream)
        elif ready is not None:
            cuda.wait(ready, stream)
        return stream

    def written(self) -> list[list[str]]:
        """Record an event on each stream; return the values that describe them."""
        handle, event = ffi.new("unsigned char[]", lib.DLX_IPC_BYTES), ffi.new("void **")
        said = []
        for number, stream in self.streams.items():
            cuda.check(lib.dlx_ipc_event_new(number, stream.handle, handle, event))
            self.made.append(ffi.gc(event[0], functools.partial(lib.dlx_ipc_event_drop, number)))
            said.append([_uuid(stream.device), bytes(handle).hex()])
        return said

    def points(self) -> dict[Device, Any]:
        """Return when the memory is ready in this process, by device."""
        return {stream.device: cuda.ready(stream) for stream in self.streams.values()}


class Export:
    """What one `dlx.share` holds on devices: allocations, tensors that keep them, and events."""

    __slots__ = ("__weakref__", "_kept", "_process", "events", "memories", "segment")

    def __init__(self, memories: list[Memory], kept: Any, events: Events) -> None:
        self.memories, self.events = memories, events
        self._kept, self._process = kept, os.getpid()
        self.segment: Segment | None = None  # that describes them

    def bind(self, segment: Segment) -> None:
        """Note the segment that describes it."""
        self.segment = segment
        exports[segment.token] = self

    def is_open_elsewhere(self) -> bool:
        """Return whether another process has it open. Where none has, none can open it from now on."""
        if self.segment is None or self._process != os.getpid():  # a child's lock would be that of its parent
            return False
        try:
            self.segment.check()
            fcntl.flock(self.segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, HandleError):
            return True
        return False

    def __del__(self, finalizing: Any = sys.is_finalizing) -> None:
        if not finalizing() and self.is_open_elsewhere():  # at the end of the process modules may be empty already
            left = Export(self.memories, self._kept, self.events)
            left.segment = self.segment
            _waiting.append(left)


exports: WeakValueDictionary[str, Export] = WeakValueDictionary()  # of this process, by token of the segment
_waiting: list[Export] = []  # no longer shared here, and open elsewhere


def collect() -> int:
    """Free shared memory that no other process has open; return how many shares others still have open."""
    for each in list(_waiting):
        if not each.is_open_elsewhere():
            with contextlib.suppress(ValueError):  # another thread was faster
                _waiting.remove(each)
    return len(_waiting)


cuda.pending.append(collect)


# ---- attach ----------------------------------------------------------------------------------------------------------


class Attached:
    """Says to the process that shared memory that this one has it open, as long as this lives."""

    __slots__ = ("_descriptor",)

    def __init__(self, segment: Segment) -> None:
        # By another opening: the lock of a descriptor that was sent would be the sender's.
        try:
            self._descriptor = Descriptor(os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            advise(error)
            raise
        try:
            fcntl.flock(self._descriptor.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            fix = "Share it again, and keep the handle until the others have attached."
            raise HandleError("what it stands for is gone: nobody held it any more", fix=fix) from error


def opened(pid: int, said: Any, given: int | None) -> Memory:
    """Return an allocation that `Memory.written` describes, opened once; `given` is a received descriptor of it."""
    kind, uuid, size, key, fd = said
    if kind not in (HANDLE, DESCRIPTOR) or {type(uuid), type(key)} != {str} or {type(size), type(fd)} != {int}:
        raise HandleError("its description names no memory of a device")
    known = _opened.get(key)
    if known is not None:
        return known
    handle = bytes.fromhex(key)
    if not 0 < size < 1 << 62 or len(handle) != (lib.DLX_IPC_BYTES if kind == HANDLE else 16):
        raise HandleError("its description names no memory of a device")
    device = _device(uuid)
    length, owner, address = ffi.new("int64_t *", size), ffi.new("void **"), ffi.new("uintptr_t *")
    descriptor = _taken(pid, fd, given) if kind == DESCRIPTOR else None
    number = -1 if descriptor is None else descriptor.number
    try:
        cuda.check(lib.dlx_ipc_open(device.id, kind, handle, number, length, owner, address))
    except DeviceError as error:
        raise HandleError(f"its {amount(size)} on {device} cannot be opened: {error.reason}") from error
    memory = Memory(device, address[0], length[0], kind, key, ffi.gc(owner[0], lib.dlx_ipc_release))
    memory.descriptor = descriptor
    _opened[key] = memory
    return memory


def _taken(pid: int, fd: int, given: int | None) -> Descriptor:
    """Return a descriptor of another process, as one of this one."""
    if given is not None:
        try:
            return Descriptor(fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, 3))
        except (OSError, ValueError, OverflowError) as error:
            raise HandleError(f"the descriptor {given!r} is none: {error}") from error
    taken = ffi.new("int *", -1)
    if not (0 < pid < 1 << 31 and 0 <= fd < 1 << 31) or lib.dlx_ipc_take(pid, fd, taken) != lib.DLX_OK:
        name = errno.errorcode.get(ffi.errno, "it is no process, or no descriptor")
        fix = "Send all of handle.filenos(), and pass them: dlx.attach(handle, ..., fd=received)."
        raise HandleError(f"this process may not take descriptor {fd} of process {pid} ({name})", fix=fix)
    return Descriptor(taken[0])


def waited(said: Any) -> dict[Device, Any]:
    """Wait for the events of a description on dlx's own streams; return when memory is ready, by device."""
    points = {}
    for uuid, key in said:
        handle = bytes.fromhex(key)
        if len(handle) != lib.DLX_IPC_BYTES:
            raise HandleError("its description names no event")
        device = _device(uuid)
        try:
            cuda.check(lib.dlx_ipc_event_wait(device.id, handle))
        except DeviceError as error:
            raise HandleError(f"its event on {device} cannot be opened: {error.reason}") from error
        points[device] = cuda.ready(cuda.work_stream(device))
    return points


def placed(tensor: Tensor, memory: Memory, keep: Any, point: Any) -> Tensor:
    """Return a tensor that was made of numbers, on its device, after an event."""
    facts = tensor.shape, tensor.strides, tensor.dtype, memory.device, tensor.flags
    made = native.tensor_new(tensor.data_ptr, *facts, keep)
    return made if point is None else cuda.when(made, point)
