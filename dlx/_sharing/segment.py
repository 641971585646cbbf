"""Segments: memory without a name, reached through the sharer's descriptor, and counted by the kernel.

A segment is a memfd, sealed so that its size never changes: no process can take memory away from a reader. Its first
256 bytes are a header; its token tells it from a later file with the same descriptor number.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any, NoReturn
from weakref import ReferenceType, WeakValueDictionary, ref

from dlx._core.extension import ffi, lib
from dlx._support.reflect import safe_repr
from dlx._support.text import amount
from dlx.errors import HandleError

__all__ = ["HEADER", "Descriptor", "Mapping", "Segment", "advise", "new_segment", "opened", "placed"]

HEADER = 256  # bytes; what follows is aligned as they are
VERSION = 2
_MAGIC = b"dlx seg\n"
_HEAD = struct.Struct("=8sI4x16sQQQQ")  # magic, version, token, size, bytes of numbers, of text, of names
# Numbers of Linux, which Python's fcntl has where the C library does.
_ADD_SEALS, _GET_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033), getattr(fcntl, "F_GET_SEALS", 1034)
_MODES = {"read": lib.DLX_MAP_READ, "write": lib.DLX_MAP_WRITE, "private": lib.DLX_MAP_PRIVATE}
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
MAX_SIZE = 1 << 62
_SEND = "Send the descriptor: dlx.attach(handle, ..., fd=received)."


class Descriptor:
    """An open descriptor, which is closed with this object.

    No weak reference leads here, since ``__del__`` runs while these still work: one could find a descriptor that
    another thread is closing. Those to a segment are cleared before it releases its descriptor.
    """

    __slots__ = ("device", "inode", "number")

    def __init__(self, number: int, found: os.stat_result | None = None) -> None:
        self.number = self.device = self.inode = -1  # no file yet: if this raises, the number stays the caller's
        found = found or os.fstat(number)
        self.device, self.inode, self.number = found.st_dev, found.st_ino, number

    def is_ours(self) -> bool:
        """Return whether the number is still that of the same file."""
        return bool(lib.dlx_is_file(self.number, self.device, self.inode))

    def __del__(self, close: Any = os.close, is_file: Any = lib.dlx_is_file, ending: Any = sys.is_finalizing) -> None:
        # At the end of the process modules may be empty already, and the kernel closes it. No call here needs memory.
        if self.number >= 0 and not ending() and is_file(self.number, self.device, self.inode):
            close(self.number)


class Segment:
    """A segment that this process holds by its own descriptor, until no handle and no mapping here needs it."""

    __slots__ = ("__weakref__", "_descriptor", "_mappings", "fd", "inode", "parts", "size", "start", "token")

    def __init__(
        self, fd: int, token: str, size: int, parts: tuple[int, int, int], found: os.stat_result | None = None
    ) -> None:
        self.fd, self.token, self.size = fd, token, size
        self.parts = parts  # bytes of numbers, of text, of names
        self.start = _data_start(sum(parts))
        self._descriptor = Descriptor(fd, found)
        self.inode = self._descriptor.inode
        self._mappings: dict[str, ReferenceType[Mapping]] = {}

    def mapping(self, mode: str) -> Mapping:
        """Return this segment in memory, one mapping to read and one to write; private pages are mapped each time."""
        known = self._mappings.get(mode)
        found = None if known is None else known()
        if found is None:
            found = Mapping(self, mode)
            if mode != "private":
                self._mappings[mode] = ref(found)
                _mapped[found.address] = found
        return found

    def check(self) -> None:
        """Raise HandleError where the descriptor was closed behind dlx's back."""
        if not self._descriptor.is_ours():
            fix = "Leave descriptors open that you did not open (os.closerange, say)."
            raise HandleError(f"the descriptor {self.fd} of its segment was closed by somebody else", fix=fix)


class _Pages:
    """A file in this process's memory, which is unmapped with this object. No weak reference leads here: see above."""

    __slots__ = ("address", "size")

    def __init__(self, fd: int, size: int, mode: int) -> None:
        address = lib.dlx_map(fd, size, mode)
        if address == ffi.NULL:
            raise OSError(ffi.errno, os.strerror(ffi.errno))
        self.address, self.size = address, size

    def __del__(self, unmap: Any = lib.dlx_unmap) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.size)


class Mapping:
    """A segment in this process's memory, which tensors over it keep."""

    __slots__ = ("__weakref__", "_pages", "address", "mode", "pages", "segment")

    def __init__(self, segment: Segment, mode: str) -> None:
        self.segment, self.mode = segment, mode
        fd = segment.fd
        if mode == "write":
            segment.check()
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                fd = _open(os.getpid(), segment.fd, os.O_RDWR)
        try:
            self._pages = _Pages(fd, segment.size, _MODES[mode])
        except OSError as error:
            segment.check()
            _fail(error, f"its segment of {amount(segment.size)} cannot be mapped: {error.strerror}")
        finally:
            if fd != segment.fd:
                os.close(fd)
        segment.check()  # so the mapped file is the segment, which is never smaller than its size
        if _HEAD.unpack(ffi.buffer(self._pages.address, _HEAD.size))[2].hex() != segment.token:
            why = "its descriptor was replaced, or its header overwritten"
            raise HandleError(f"what was mapped is not its segment: {why}")
        self.pages = self._pages.address  # as cffi takes it
        self.address = int(ffi.cast("uintptr_t", self.pages))


def has_huge_pages(size: int) -> bool:
    """Return whether twice the bytes are free in blocks of 2 MiB: else the kernel would compact memory first."""
    try:
        lines = Path("/proc/buddyinfo").read_text().splitlines()
    except OSError:
        return False
    # "Node 0, zone Normal" and the numbers of free blocks of 4 KiB, 8 KiB, ...
    return sum(int(count) << 21 + i for line in lines for i, count in enumerate(line.split()[4 + 9 :])) >= 2 * size


_held: WeakValueDictionary[str, Segment] = WeakValueDictionary()  # by token
_mapped: WeakValueDictionary[int, Mapping] = WeakValueDictionary()  # by address; none that is private


def placed(extents: list[tuple[int, int, bool]]) -> list[tuple[Segment, int] | None]:
    """Return the segment and offset of ranges of addresses; None for other memory, such as private pages."""
    known = [reference() for reference in _mapped.valuerefs()]  # a copy: other threads add and remove
    mappings = sorted((each.address, each) for each in known if each is not None)
    if not mappings:
        return [None] * len(extents)
    starts = [address for address, _ in mappings]
    found: list[tuple[Segment, int] | None] = []
    for low, high, _ in extents:
        i = bisect_right(starts, low) - 1
        address, mapping = mappings[max(i, 0)]
        inside = i >= 0 and low < high <= address + mapping.segment.size
        found.append((mapping.segment, low - address) if inside else None)
    return found


def new_segment(room: int, numbers: bytes = b"", text: bytes = b"", names: bytes = b"") -> Segment:
    """Make a segment: a header, numbers, a text and names that describe its content, and `room` bytes for that."""
    parts = len(numbers), len(text), len(names)
    size = _data_start(sum(parts)) + room
    if size > MAX_SIZE:
        raise MemoryError(f"a segment of {amount(size)}")
    try:
        fd = os.memfd_create("dlx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        advise(error)
        raise
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        token = secrets.token_bytes(16)
        head = _HEAD.pack(_MAGIC, VERSION, token, size, *parts)
        write(fd, memoryview(head.ljust(HEADER, b"\0") + numbers + text + names), 0)
        segment = Segment(fd, token.hex(), size, parts)
    except BaseException:
        os.close(fd)
        raise
    _held[segment.token] = segment
    return segment


def _data_start(described: int) -> int:
    """Return where data begins behind a header, and a description of so many bytes."""
    return HEADER + -(-described // HEADER) * HEADER


def write(fd: int, data: memoryview, at: int) -> None:
    """Write bytes into a segment through the kernel: new pages are not cleared first, and no page faults."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], at + done)
        except OSError as error:
            raise MemoryError(f"a segment of {amount(at + len(data))}: {error.strerror}") from error


def read_description(segment: Segment) -> tuple[memoryview, bytes, bytes]:
    """Return the numbers, the text and the names of a segment, as copies that no one else can write to."""
    numbers, text, names = segment.parts
    size, raw = numbers + text + names, b""
    while len(raw) < size:
        try:
            more = os.pread(segment.fd, size - len(raw), HEADER + len(raw))
        except OSError as error:
            _fail(error, f"the description of its arrays cannot be read: {error.strerror}")
        if not more:
            raise HandleError("its segment is cut off in the description of its arrays")
        raw += more
    return memoryview(raw)[:numbers], raw[numbers : numbers + text], raw[numbers + text :]


# ---- segments of other processes -------------------------------------------------------------------------------------


def opened(
    pid: int, fd: int, token: str, inode: int, size: int, given: int | None = None, access: int = os.O_RDONLY
) -> Segment:
    """Return the segment of a process, by its descriptor or a received one, if token, inode and size match."""
    if not (0 < pid < 1 << 31 and 0 <= fd < 1 << 31 and 0 <= inode < 1 << 64 and HEADER <= size <= MAX_SIZE):
        raise HandleError("its process, descriptor, inode or size is a number that none has")
    known = _held.get(token)
    if known is not None and known.size == size:
        known.check()
        return known
    if given is not None:
        try:
            own = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as error:
            _fail(error, f"the descriptor {given} is none: {error.strerror}")
        except (ValueError, OverflowError) as error:  # no number that a descriptor can have
            raise HandleError(f"the descriptor {safe_repr(given)} is none: {error}") from error
    else:
        own = _open(pid, fd, access, inode)
    try:
        segment = _checked(own, token, size)
    except BaseException:
        os.close(own)
        raise
    _held[token] = segment
    return segment


def _open(pid: int, fd: int, access: int, inode: int | None = None) -> int:
    """Open another process's descriptor again, with no rights but the wanted ones."""
    path = f"/proc/{pid}/fd/{fd}"
    gone = "Share it again, and keep the handle, or what it stands for, until the others have attached."
    try:
        # Before it is opened: opening a device or a pipe may do anything. A Path would cost more than the kernel does.
        found = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(found.st_mode) or (inode is not None and found.st_ino != inode):
            raise HandleError(f"process {pid} has another file at descriptor {fd}: what it shared is gone", fix=gone)
        return os.open(path, access | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        if not Path("/proc/self").exists():
            raise HandleError("processes cannot be looked at here: there is no /proc", fix=_SEND) from error
        what = f"process {pid} has closed it" if Path(f"/proc/{pid}").exists() else f"there is no process {pid} here"
        raise HandleError(f"what it stands for is gone: {what}", fix=gone) from error
    except PermissionError as error:
        fix = f"Run both as one user. {_SEND}"
        raise HandleError(f"this process may not look at the files of process {pid}", fix=fix) from error
    except OSError as error:
        _fail(error, f"the descriptor {fd} of process {pid} cannot be opened: {error.strerror}")


def _checked(fd: int, token: str, size: int) -> Segment:
    """Return the segment behind a descriptor. Errors: as `opened`; the descriptor is still the caller's."""
    found = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        seals = 0
    if not stat.S_ISREG(found.st_mode) or seals & _SEALS != _SEALS:
        raise HandleError("what it names is no segment: it is not sealed, so that its size could change")
    if found.st_uid != os.geteuid():
        raise HandleError(f"its segment belongs to user {found.st_uid}, and this process to user {os.geteuid()}")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise HandleError("its segment is of huge pages: a reader would end with SIGBUS if the system has too few")
    if found.st_size != size:
        raise HandleError(f"it says {size:,} bytes, and its segment has {found.st_size:,}")
    try:
        raw = os.pread(fd, _HEAD.size, 0)
    except OSError as error:  # it was opened only to be written to
        _fail(error, f"its segment cannot be read: {error.strerror}")
    if len(raw) < _HEAD.size:
        raise HandleError("its segment is cut off")
    magic, version, found_token, stated, *parts = _HEAD.unpack(raw)
    if magic != _MAGIC:
        raise HandleError("what it names is no segment of dlx")
    if version != VERSION:
        raise HandleError(f"its segment is of version {version}, and this dlx reads {VERSION}")
    if found_token.hex() != token:
        raise HandleError("what it names is another segment: the one that was shared is gone")
    if stated != size or parts[0] % 8 or _data_start(sum(parts)) > size:
        raise HandleError("the header of its segment contradicts itself")
    if sum(parts) > 512 * found.st_blocks:  # the rest of it was never written, and would be zeros made to be read
        raise HandleError("the description of its arrays is larger than what the segment has in memory")
    return Segment(fd, token, size, (parts[0], parts[1], parts[2]), found)


def advise(error: OSError) -> None:
    """Raise an OSError that says what to do, if no descriptor is left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        whose = "this process" if error.errno == errno.EMFILE else "this machine"
        reason = f"{whose} may open no more files, and each handle and each attached segment keeps one."
        fix = "Raise the limit (ulimit -n), close handles, or share one tree instead of many arrays."
        raise OSError(error.errno, f"{reason} {fix}") from error


def _fail(error: OSError, reason: str) -> NoReturn:
    """Raise for an error of the system; a lack of memory or descriptors is not the handle's fault."""
    try:
        advise(error)
        raise (MemoryError if error.errno == errno.ENOMEM else HandleError)(reason) from error
    finally:
        del error  # this frame is in its traceback, and would keep it, and all that it holds, alive
