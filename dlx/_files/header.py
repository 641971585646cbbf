"""`Contents`: the arrays of a file, as its header describes them; and helpers of all readers."""

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
from dlx._support.text import one_line
from dlx.adapter.base import over_memory
from dlx.errors import FileError, FrameworkNotInstalledError

__all__ = [
    *("AGAIN", "MAX_BYTES", "MAX_NDIM", "NO_ARRAYS", "SAFE", "Contents", "File", "Memory", "StoredArray"),
    *("allocate", "check_names", "check_order", "import_reader", "read_exactly", "reader_error"),
]

MAX_NDIM = 128
NO_ARRAYS = frozenset(("link", "group", "type", "dimension", "file"))  # `Stored.dtype_name` of names without data
MAX_BYTES = 1 << 63  # of an array; extents stay below
AGAIN = "Write it or fetch it again."
SAFE = "dlx does not. Save the arrays as .npz or .safetensors."


class File:
    """A regular file that is opened once: what is parsed is what is mapped."""

    def __init__(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if not path.is_symlink():
                raise
            place = os.readlink(path)  # noqa: PTH115 - as it is written
            fix = "Run: git annex get FILE." if "annex/objects" in place else "Fetch it again."
            reason = f"it is a link to {one_line(place, 200)!r}, which does not exist"
            raise FileError(reason, source=str(path), fix=fix) from None
        if not stat.S_ISREG(mode):  # before it is opened: opening a pipe waits for its writer
            raise FileError("it is no regular file", source=str(path))
        self.path = path
        self.handle: BinaryIO = path.open("rb")
        self.size = os.fstat(self.handle.fileno()).st_size
        if self.size == 0:
            self.handle.close()
            raise FileError("it is empty", source=str(path), fix=AGAIN)

    def map(self, length: int, protection: int = mmap.PROT_READ) -> mmap.mmap:
        """Return the first bytes of the file, mapped."""
        try:
            return mmap.mmap(self.handle.fileno(), length, flags=mmap.MAP_PRIVATE, prot=protection)
        except ValueError as error:
            raise FileError("another program cut it off while it was opened", fix=AGAIN) from error
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"cannot map {length:,} bytes of {self.path}") from error
            raise

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()


class Memory:
    """The bytes of a file, mapped. They stay mapped as long as a tensor over them lives; the file may be closed."""

    __slots__ = ("address", "bytes")

    def __init__(self, file: File, *, private: bool) -> None:
        self.bytes = memoryview(file.map(file.size, mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)))
        self.address = native.buffer_address(self.bytes)


class StoredArray(NamedTuple):
    """One array in a file."""

    name: str  # empty where the file is one array
    dtype: DType | None  # as DLPack says it; None where DLPack has none
    dtype_name: str  # the word of the file
    shape: tuple[int, ...] | None
    nbytes: int | None  # of all elements; None where unknown
    order: str = "C"  # "C" or "F"
    offset: int | None = None  # of the elements in the file, in bytes; None where they are not there as they are
    swapped: bool = False  # whether its bytes are in the other order
    refused: str = ""  # why it is no array of DLPack
    fix: str = ""  # what to do if it is refused
    notes: tuple[str, ...] = ()  # after "it is": why it can only be read with a copy
    load: Callable[[StoredArray, memoryview], Tensor] | None = None  # reads it from the bytes of the file, with a copy

    def strides(self) -> tuple[int, ...] | None:
        """Return the strides in elements; None where they are row-major."""
        if self.order != "F" or self.shape is None:
            return None
        return row_major(self.shape[::-1])[::-1]


class Contents(NamedTuple):
    """The contents of a file."""

    kind: str  # ".npy", ".safetensors" and so on
    entries: Sequence[StoredArray]
    metadata: Mapping[str, Any] = {}  # of the file
    notes: tuple[str, ...] = ()  # what else it holds
    close: Callable[[], object] | None = None  # closes its reader


def read_exactly(file: BinaryIO | Any, count: int) -> bytes:
    """Return the next `count` bytes of a file's header; raise `FileError` if the file ends before."""
    parts: list[bytes] = []
    missing = count
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    if missing:
        raise FileError("it is cut off: it ends in the middle of its header", fix=AGAIN)
    return b"".join(parts)


def check_names(names: Sequence[str]) -> None:
    """Raise `FileError` if a file lists a name twice."""
    if len(set(names)) != len(names):
        met: set[str] = set()
        twice = next(each for each in names if each in met or met.add(each))  # type: ignore[func-returns-value]
        raise FileError(f"it lists {one_line(twice, 80)!r} twice")


def check_order(entries: Iterable[StoredArray], start: int, *, gaps: bool) -> int:
    """Return where the last array ends; raise `FileError` if two overlap, or leave a gap and `gaps` is false."""
    at = start
    for entry in sorted(entries, key=lambda each: (each.offset or 0, each.nbytes or 0)):
        begin = entry.offset or 0
        if begin < at or (begin > at and not gaps):
            what = "overlap" if gaps else "overlap, or leave a gap,"
            raise FileError(f"its tensors {what} before {one_line(entry.name, 80)!r}")
        at = begin + (entry.nbytes or 0)
    return at


def allocate(stored: StoredArray) -> tuple[Tensor, memoryview]:
    """Return a writable tensor for an array over new memory, and the bytes of it, to be filled."""
    assert stored.nbytes is not None and stored.shape is not None and stored.dtype is not None
    block = empty(stored.nbytes, "uint8")
    tensor = over_memory(block.data_ptr, stored.shape, stored.strides(), stored.dtype, HOST, owner=block)
    return tensor, memoryview(block)


def reader_error(package: str, error: Exception) -> Exception:
    """Return the error for a file that a library refuses; a `MemoryError` if it lacked memory or threads."""
    said = exception_text(error, 200)
    if isinstance(error, MemoryError) or find_in(error, "(an(?:no|')t allocate|Failed to launch)"):
        return error if isinstance(error, MemoryError) else MemoryError(f"{package}: {one_line(said, 260)}")
    return FileError(f"{package} cannot read it: {one_line(said, 260)}", fix=AGAIN)


def import_reader(package: str, kind: str) -> Any:
    """Import the package that reads a kind of file, or raise `FrameworkNotInstalledError`."""
    if importlib.util.find_spec(package) is None:
        reason = f"{kind} files are read by {package}, which is not installed"
        raise FrameworkNotInstalledError(reason, fix=f"Install it: pip install {package}.")
    try:
        return importlib.import_module(package)
    except MemoryError:
        raise
    except Exception as error:
        said = exception_text(error, 240)
        raise FrameworkNotInstalledError(f"{package}, which reads {kind} files, fails to import: {said}") from error
