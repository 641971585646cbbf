"""Segments: anonymous shared memory, which other processes open through the owner's descriptor.

A segment is a memfd, sealed so that no process can take memory away from a reader; the kernel frees it with its last
user. Its header of 256 bytes has a token, which distinguishes it from a later file with the same descriptor number.
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

__all__ = ["HEADER", "Descriptor", "Mapping", "Segment", "locate", "new_segment", "open_segment"]

HEADER = 256  # bytes; also the alignment of the data
VERSION = 2
SAME_VERSION = "Install the same version of dlx in both processes."
OPEN_DESCRIPTOR = "Pass an open descriptor of the memory."
_MAGIC = b"dlx seg\n"
_HEAD = struct.Struct("=8sI4x16sQQQQ")  # magic, version, token, size, bytes of numbers, of text, of names
# Linux constants, which Python's fcntl lacks if the C library does.
_ADD_SEALS, _GET_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033), getattr(fcntl, "F_GET_SEALS", 1034)
_MODES = {"read": lib.DLX_MAP_READ, "write": lib.DLX_MAP_WRITE, "private": lib.DLX_MAP_PRIVATE}
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
MAX_SIZE = 1 << 62
_SEND = "Send the descriptor: dlx.attach(handle, ..., fd=received)."


class Descriptor:
    """An open descriptor, which is closed with this object.

    It has no weak references, since these still work during ``__del__``: another thread could use the descriptor while
    it is closed. Weak references to a `Segment` are cleared before it releases its descriptor.
    """

    __slots__ = ("device", "inode", "number")

    def __init__(self, number: int, found: os.stat_result | None = None) -> None:
        self.number = self.device = self.inode = -1  # if fstat raises, the caller still owns the number
        found = found or os.fstat(number)
        self.device, self.inode, self.number = found.st_dev, found.st_ino, number

    def is_ours(self) -> bool:
        """Return whether the number still refers to the same file."""
        return bool(lib.dlx_is_file(self.number, self.device, self.inode))

    def __del__(self, close: Any = os.close, is_file: Any = lib.dlx_is_file, ending: Any = sys.is_finalizing) -> None:
        # At exit, modules may already be cleared, and the kernel closes the descriptor. No call here needs memory.
        if self.number >= 0 and not ending() and is_file(self.number, self.device, self.inode):
            close(self.number)


class Segment:
    """A segment that is open in this process while a handle or mapping uses it."""

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
        """Map this segment; read and write mappings are reused, private ones are created each time."""
        known = self._mappings.get(mode)
        found = None if known is None else known()
        if found is None:
            found = Mapping(self, mode)
            if mode != "private":
                self._mappings[mode] = ref(found)
                _mapped[found.address] = found
        return found

    def reopen(self, access: int) -> Descriptor:
        """Open its file again, for locks, which belong to an open file."""
        return Descriptor(_reopen(os.getpid(), self.fd, access))

    def check(self) -> None:
        """Raise `HandleError` if other code has closed the descriptor."""
        if not self._descriptor.is_ours():
            fix = "Do not close descriptors that you did not open (for example, with os.closerange)."
            raise HandleError(f"other code has closed the descriptor {self.fd} of its segment", fix=fix)


class _Pages:
    """A mapped file, which is unmapped with this object. It has no weak references, as a `Descriptor`."""

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
    """A mapped segment, which tensors over it keep alive."""

    __slots__ = ("__weakref__", "_pages", "address", "mode", "pages", "segment")

    def __init__(self, segment: Segment, mode: str) -> None:
        self.segment, self.mode = segment, mode
        fd = segment.fd
        if mode == "write":
            segment.check()
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                fd = _reopen(os.getpid(), segment.fd, os.O_RDWR)
        try:
            self._pages = _Pages(fd, segment.size, _MODES[mode])
        except OSError as error:
            segment.check()
            _raise_handle_error(error, f"its segment of {amount(segment.size)} cannot be mapped: {error.strerror}")
        finally:
            if fd != segment.fd:
                os.close(fd)
        segment.check()  # the mapped file is the sealed segment, so reading its header is safe
        if _HEAD.unpack(ffi.buffer(self._pages.address, _HEAD.size))[2].hex() != segment.token:
            why = "its descriptor was replaced, or its header overwritten"
            raise HandleError(f"the mapped file is not its segment: {why}")
        self.pages = self._pages.address  # a cffi pointer
        self.address = int(ffi.cast("uintptr_t", self.pages))


def has_huge_pages(size: int) -> bool:
    """Return whether twice `size` is free in blocks of 2 MiB; otherwise the kernel would compact memory first."""
    try:
        lines = Path("/proc/buddyinfo").read_text().splitlines()
    except OSError:
        return False
    # "Node 0, zone Normal" and the numbers of free blocks of 4 KiB, 8 KiB, ...
    return sum(int(count) << 21 + i for line in lines for i, count in enumerate(line.split()[4 + 9 :])) >= 2 * size


_held: WeakValueDictionary[str, Segment] = WeakValueDictionary()  # by token
_mapped: WeakValueDictionary[int, Mapping] = WeakValueDictionary()  # by address; without private mappings


def locate(extents: list[tuple[int, int, bool]]) -> list[tuple[Segment, int] | None]:
    """Return the segment and offset of each address range; None for other memory, such as private pages."""
    known = [reference() for reference in _mapped.valuerefs()]  # a copy, since other threads may change it
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
    """Create a segment with a header, a description (numbers, a text and names), and `room` bytes of data."""
    parts = len(numbers), len(text), len(names)
    size = _data_start(sum(parts)) + room
    if size > MAX_SIZE:
        raise MemoryError(f"a segment of {amount(size)}")
    try:
        fd = os.memfd_create("dlx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        check_descriptor_limit(error)
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
    """Return the offset of the data, after the header and a description of some bytes."""
    return HEADER + -(-described // HEADER) * HEADER


def write(fd: int, data: memoryview, at: int) -> None:
    """Write bytes into a segment with a system call, which neither clears new pages nor causes page faults."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], at + done)
        except OSError as error:
            raise MemoryError(f"a segment of {amount(at + len(data))}: {error.strerror}") from error


def read_description(segment: Segment) -> tuple[memoryview, bytes, bytes]:
    """Return copies of the numbers, the text and the names of a segment, since other processes can change it."""
    numbers, text, names = segment.parts
    size, raw = numbers + text + names, b""
    while len(raw) < size:
        try:
            more = os.pread(segment.fd, size - len(raw), HEADER + len(raw))
        except OSError as error:
            _raise_handle_error(error, f"the description of its arrays cannot be read: {error.strerror}")
        if not more:
            raise HandleError("its segment is truncated in the description of its arrays")
        raw += more
    return memoryview(raw)[:numbers], raw[numbers : numbers + text], raw[numbers + text :]


# ---- segments of other processes -------------------------------------------------------------------------------------


def open_segment(
    pid: int, fd: int, token: str, inode: int, size: int, received: int | None = None, access: int = os.O_RDONLY
) -> Segment:
    """Open the segment of a process by its descriptor or a received one, if token, inode and size match."""
    if not (0 < pid < 1 << 31 and 0 <= fd < 1 << 31 and 0 <= inode < 1 << 64 and HEADER <= size <= MAX_SIZE):
        raise HandleError("its process, descriptor, inode or size is invalid")
    known = _held.get(token)
    if known is not None and known.size == size:
        known.check()
        return known
    if received is not None:
        try:
            own = fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError as error:
            _raise_handle_error(error, f"fd={received} is not an open descriptor: {error.strerror}", OPEN_DESCRIPTOR)
        except (ValueError, OverflowError) as error:  # out of range
            raise HandleError(
                f"fd={safe_repr(received)} is not an open descriptor: {error}", fix=OPEN_DESCRIPTOR
            ) from error
    else:
        own = _reopen(pid, fd, access, inode)
    try:
        segment = _check_segment(own, token, size)
    except BaseException:
        os.close(own)
        raise
    _held[token] = segment
    return segment


def _reopen(pid: int, fd: int, access: int, inode: int | None = None) -> int:
    """Open the file of another process's descriptor, with the requested access only."""
    path = f"/proc/{pid}/fd/{fd}"
    gone = "Share it again, and keep the handle or its arrays until the other processes have attached."
    try:
        # Check before opening, since opening a device or pipe has side effects. A Path would cost more than the stat.
        found = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(found.st_mode) or (inode is not None and found.st_ino != inode):
            raise HandleError(f"its memory was freed: process {pid} reuses descriptor {fd} for another file", fix=gone)
        return os.open(path, access | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        if not Path("/proc/self").exists():
            raise HandleError("descriptors of other processes need /proc, which is missing", fix=_SEND) from error
        what = f"process {pid} has closed it" if Path(f"/proc/{pid}").exists() else f"there is no process {pid} here"
        raise HandleError(f"its memory was freed: {what}", fix=gone) from error
    except PermissionError as error:
        fix = f"Run both processes as one user. {_SEND}"
        raise HandleError(f"this process may not open the files of process {pid}", fix=fix) from error
    except OSError as error:
        _raise_handle_error(error, f"the descriptor {fd} of process {pid} cannot be opened: {error.strerror}")


def _check_segment(fd: int, token: str, size: int) -> Segment:
    """Return the segment of a descriptor. Errors: as `open_segment`; the caller then still owns the descriptor."""
    found = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        seals = 0
    if not stat.S_ISREG(found.st_mode) or seals & _SEALS != _SEALS:
        raise HandleError("its file is not a segment: it is not sealed, so its size could change")
    if found.st_uid != os.geteuid():
        reason = f"its segment belongs to user {found.st_uid}, and this process to user {os.geteuid()}"
        raise HandleError(reason, fix="Run both processes as one user.")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise HandleError("its segment uses huge pages; a reader would end with SIGBUS if the system has too few")
    if found.st_size != size:
        raise HandleError(f"it claims {size:,} bytes, and its segment has {found.st_size:,}")
    try:
        raw = os.pread(fd, _HEAD.size, 0)
    except OSError as error:  # opened for writing only
        _raise_handle_error(error, f"its segment cannot be read: {error.strerror}")
    if len(raw) < _HEAD.size:
        raise HandleError("its segment is truncated")
    magic, version, found_token, stated, *parts = _HEAD.unpack(raw)
    if magic != _MAGIC:
        raise HandleError("its file is not a segment of dlx")
    if version != VERSION:
        raise HandleError(f"its segment has version {version}; this dlx reads version {VERSION}", fix=SAME_VERSION)
    if found_token.hex() != token:
        raise HandleError("its memory was freed, and its descriptor is another segment")
    if stated != size or parts[0] % 8 or _data_start(sum(parts)) > size:
        raise HandleError("the header of its segment contradicts itself")
    if sum(parts) > 512 * found.st_blocks:  # the rest was never written; reading it would allocate zeros
        raise HandleError("the description of its arrays is larger than the allocated memory of its segment")
    return Segment(fd, token, size, (parts[0], parts[1], parts[2]), found)


def check_descriptor_limit(error: OSError) -> None:
    """Raise an OSError with advice if the process or machine has reached its limit of descriptors."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        whose = "this process" if error.errno == errno.EMFILE else "this machine"
        reason = f"{whose} cannot open more files, and each handle and each attached segment keeps one open."
        fix = "Raise the limit (ulimit -n), close handles, or share one tree instead of many arrays."
        raise OSError(error.errno, f"{reason} {fix}") from error


def _raise_handle_error(error: OSError, reason: str, fix: str = "") -> NoReturn:
    """Raise `HandleError` for a system error, but `MemoryError` or `OSError` for a lack of memory or descriptors."""
    try:
        check_descriptor_limit(error)
        raise (MemoryError(reason) if error.errno == errno.ENOMEM else HandleError(reason, fix=fix)) from error
    finally:
        del error  # this frame is in its traceback, which would form a cycle
