"""The parts of Python's `os` and `mmap` that differ between Linux, macOS and Windows."""

from __future__ import annotations

import mmap
import os
import sys
import threading

from dlx._support.locks import lock_of
from dlx.errors import DeviceError

__all__ = ["NAME", "check_sharing", "find_missing", "map_memory", "map_privately", "read_at", "read_into"]

NAME = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def find_missing() -> dict[str, str]:
    """Return the features that this system lacks: the name of each, and the reason."""
    missing = {}
    if not hasattr(os, "memfd_create"):
        missing["share"] = f"this needs the anonymous memory files of Linux, and this system is {NAME}"
    if sys.platform == "darwin":
        missing["cuda"] = "NVIDIA has no CUDA driver for macOS"
    return missing


def check_sharing(what: str) -> None:
    """Raise `DeviceError` about an object if this system cannot share memory between processes."""
    reason = find_missing().get("share")
    if reason is not None:
        raise DeviceError(reason, source=what, fix="Save the arrays to a file, and call dlx.open in the other process.")


class _Position:
    """Holder of the lock for the positions of files."""

    _lock: threading.RLock | None = None


_POSITION = _Position()


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read from a file without changing its position."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with lock_of(_POSITION):  # Windows
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.read(descriptor, size)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Read from a file into memory, without changing its position; return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], offset)
    data = read_at(descriptor, len(target), offset)
    target[: len(data)] = data
    return len(data)


def map_privately(descriptor: int, size: int, *, writable: bool) -> mmap.mmap:
    """Map the first `size` bytes of a file; writes do not reach the file."""
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=protection)


def map_memory(size: int) -> mmap.mmap:
    """Return new memory; pages that are not used take none."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Linux's MAP_NORESERVE: memory is reserved when a page is first used.
    unreserved = 0x4000 if sys.platform == "linux" else 0
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
