"""Types and helpers of all readers: an open `File`, its `Contents`, and each `Stored` in it."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dlx._core import native
from dlx._core.native import Tensor
from dlx._core.types import HOST, DType, row_major
from dlx._protocols.pointer import empty
from dlx._support.reflect import exception_text, find_in
from dlx._support.system import map_privately
from dlx._support.text import one_line
from dlx.adapter.base import over_memory
from dlx.errors import FileError, FrameworkNotInstalledError

__all__ = [
    *("AGAIN", "MAX_BYTES", "MAX_NDIM", "NO_ARRAYS", "SAFE", "SPLIT", "Contents", "File", "Memory", "Stored"),
    *("allocate", "check_names", "check_order", "import_reader", "read_next", "reader_error"),
]

MAX_NDIM = 128
NO_ARRAYS = frozenset(("link", "group", "type", "dimension", "file"))  # `Stored.dtype_name` of names without data
MAX_BYTES = 1 << 63  # of an array; extents stay below
AGAIN = "Save or download it again."
SPLIT = "Split it into smaller files first."
SAFE = "Save the arrays as .npz or .safetensors."


class File:
    """A regular file, opened once so that dlx maps the file whose header it parsed."""

    def __init__(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if not path.is_symlink():
                raise
            place = os.readlink(path)  # noqa: PTH115 - unresolved
            fix = "Run: git annex get FILE." if "annex/objects" in place else "Download it again."
            reason = f"it is a link to {one_line(place, 200)!r}, which does not exist"
            raise FileError(reason, source=str(path), fix=fix) from None
        if not stat.S_ISREG(mode):  # before opening: to open a pipe would wait for its writer
            raise FileError("it is not a regular file", source=str(path), fix="Pass the path of a regular file.")
        self.path = path
        self.handle: BinaryIO = path.open("rb")
        self.size = os.fstat(self.handle.fileno()).st_size
        if self.size == 0:
            self.handle.close()
            raise FileError("it is empty", source=str(path), fix=AGAIN)

    def map(self, length: int, *, writable: bool = False) -> mmap.mmap:
        """Map the first `length` bytes of the file; writes do not reach it."""
        try:
            return map_privately(self.handle.fileno(), length, writable=writable)
        except ValueError as error:
            raise FileError("another program truncated it while dlx opened it", fix=AGAIN) from error
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"cannot map {length:,} bytes of {self.path}") from error
            raise

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()


class Memory:
    """The mapped bytes of a file. They stay mapped while a tensor uses them, even after the file is closed."""

    __slots__ = ("address", "bytes")

    def __init__(self, file: File, *, private: bool) -> None:
        self.bytes = memoryview(file.map(file.size, writable=private))
        self.address = native.buffer_address(self.bytes)


class Stored(NamedTuple):
    """The description of one array in a file."""

    name: str  # empty in a file of one array
    dtype: DType | None  # None if DLPack has no such dtype
    dtype_name: str  # in the file's format
    shape: tuple[int, ...] | None
    nbytes: int | None  # of all elements; None if unknown
    order: str = "C"  # "C" or "F"
    offset: int | None = None  # of the elements in the file, in bytes; None if they need decoding
    swapped: bool = False  # whether its bytes are in the other order
    refused: str = ""  # why DLPack cannot represent it
    fix: str = ""  # a solution if it is refused
    notes: tuple[str, ...] = ()  # after "it is": why reading needs a copy
    load: Callable[[Stored, memoryview], Tensor] | None = None  # copies it out of the bytes of the file

    def strides(self) -> tuple[int, ...] | None:
        """Return the strides in elements; None for row-major order."""
        if self.order != "F" or self.shape is None:
            return None
        return row_major(self.shape[::-1])[::-1]


class Contents(NamedTuple):
    """The contents of a file."""

    kind: str  # ".npy", ".safetensors" and so on
    entries: Sequence[Stored]
    metadata: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()  # shown by dlx inspect
    close: Callable[[], object] | None = None  # closes the reader


def read_next(file: BinaryIO | Any, count: int) -> bytes:
    """Return the next `count` bytes of a file's header; raise `FileError` if the file ends earlier."""
    parts: list[bytes] = []
    missing = count
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    if missing:
        raise FileError("it is truncated: it ends in the middle of its header", fix=AGAIN)
    return b"".join(parts)


def check_names(names: Sequence[str]) -> None:
    """Raise `FileError` if a file lists a name twice."""
    if len(set(names)) != len(names):
        met: set[str] = set()
        twice = next(each for each in names if each in met or met.add(each))  # type: ignore[func-returns-value]
        raise FileError(f"its header lists {one_line(twice, 80)!r} twice")


def check_order(entries: Iterable[Stored], start: int, *, gaps: bool) -> int:
    """Return the end of the last array; raise `FileError` if two overlap, or leave a gap and `gaps` is false."""
    at = start
    for entry in sorted(entries, key=lambda each: (each.offset or 0, each.nbytes or 0)):
        begin = entry.offset or 0
        if begin < at or (begin > at and not gaps):
            what = "overlap" if gaps else "overlap, or leave a gap,"
            raise FileError(f"its tensors {what} before {one_line(entry.name, 80)!r}")
        at = begin + (entry.nbytes or 0)
    return at


def allocate(stored: Stored) -> tuple[Tensor, memoryview]:
    """Allocate a writable tensor for an array; return it and its bytes, which the caller fills."""
    assert stored.nbytes is not None and stored.shape is not None and stored.dtype is not None
    block = empty(stored.nbytes, "uint8")
    tensor = over_memory(block.data_ptr, stored.shape, stored.strides(), stored.dtype, HOST, owner=block)
    return tensor, memoryview(block)


def reader_error(package: str, error: Exception) -> Exception:
    """Return the error for a file that a library cannot read; a `MemoryError` if it lacked memory or threads."""
    text = one_line(exception_text(error, 200), 260)
    if isinstance(error, MemoryError) or find_in(error, "(an(?:no|')t allocate|Failed to launch)"):
        return error if isinstance(error, MemoryError) else MemoryError(f"{package}: {text}")
    return FileError(f"{package} cannot read it: {text}", fix=AGAIN)


def import_reader(package: str, kind: str) -> Any:
    """Import the package that reads a kind of file, or raise `FrameworkNotInstalledError`."""
    if importlib.util.find_spec(package) is None:
        reason = f"reading {kind} files needs {package}, which is not installed"
        raise FrameworkNotInstalledError(reason, fix=f"Install it: pip install {package}.")
    try:
        return importlib.import_module(package)
    except MemoryError:
        raise
    except Exception as error:
        reason = f"reading {kind} files needs {package}, whose import fails: {exception_text(error, 240)}"
        raise FrameworkNotInstalledError(reason, fix=f"Repair the installation of {package}.") from error
