"""Types and helpers of all readers: an open `File`, its `Contents`, and each `Stored` in it."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import io
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dlx._core import native
from dlx._core.native import Tensor
from dlx._core.types import HOST, READ_ONLY, DType, row_major
from dlx._support.reflect import exception_text, find_in
from dlx._support.system import find_missing, map_memory, map_privately, read_at, read_into
from dlx._support.text import one_line
from dlx.errors import DTypeError, FileError, FrameworkNotInstalledError

MAX_NDIM = 128
NO_ARRAYS = frozenset(("link", "group", "type", "dimension", "file"))  # `Stored.dtype_name` of names without data
MAX_BYTES = 1 << 63  # of an array; extents stay below
AGAIN = "Save or download it again."
SPLIT = "Split it into smaller files first."
PIECE = 16 << 20  # bytes of one read
READERS = 4  # threads that read at once
SAFE = "Save the arrays as .npz or .safetensors."


class File:
    """A regular file, opened once so that dlx maps the file whose header it parsed; or bytes in memory."""

    def __init__(self, source: Path | memoryview, name: str = "") -> None:
        self.data = None if isinstance(source, Path) else source
        self.handle: BinaryIO
        if isinstance(source, Path):
            _check_regular(source)
            self.path, self.handle = source, source.open("rb")
            self.size = os.fstat(self.handle.fileno()).st_size
        else:
            self.path, self.size = Path(name or "bytes"), source.nbytes
            self.handle = io.BufferedReader(self.reopen())
        self.archive: Any = None  # the list of a zip file's members, once it is read
        self.has_shards = False  # it is the first of several files in a folder, which are opened together
        if self.size == 0:
            self.handle.close()
            raise FileError("it is empty", source=str(self.path), fix=AGAIN)

    @property
    def location(self) -> str:
        """A path by which a library opens this very file, if the system has one, also if another has replaced it."""
        own = f"/proc/self/fd/{self.handle.fileno()}"
        return own if os.path.exists(own) else str(self.path)  # noqa: PTH110 - a link

    def reopen(self) -> io.RawIOBase:
        """Return an unbuffered reader of the same file."""
        return _Window(self.data) if self.data is not None else io.FileIO(self.handle.fileno(), closefd=False)

    def read_at(self, count: int, offset: int) -> bytes:
        """Return up to `count` bytes at an offset; the position of `handle` stays."""
        if self.data is not None:
            return bytes(self.data[offset : offset + count])
        return read_at(self.handle.fileno(), count, offset)

    def map(self, length: int, *, writable: bool = False) -> Any:
        """Map the first `length` bytes of the file; writes do not reach it."""
        if self.data is not None:
            return self.data[:length]
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


def _check_regular(path: Path) -> None:
    """Raise `FileError` unless a path names a regular file; to open a pipe would wait for its writer."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.is_symlink():
            if any(each in str(path) for each in "*?["):
                reason = "no file has this name; dlx expands no patterns. Open each file of glob.glob(path)"
                raise FileNotFoundError(errno.ENOENT, reason, str(path)) from None
            raise
        place = os.readlink(path)  # noqa: PTH115 - unresolved
        fix = "Run: git annex get FILE." if "annex/objects" in place else "Download it again."
        reason = f"it is a link to {one_line(place, 200)!r}, which does not exist"
        raise FileError(reason, source=str(path), fix=fix) from None
    if not stat.S_ISREG(mode):
        raise FileError("it is not a regular file", source=str(path), fix="Pass the path of a regular file.")


class _Window(io.RawIOBase):
    """A reader of bytes in memory, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max((0, self._at, self._data.nbytes)[whence] + offset, 0)
        return self._at

    def readinto(self, target: Any) -> int:
        piece = self._data[self._at : self._at + len(target)]
        target[: piece.nbytes] = piece
        self._at += piece.nbytes
        return piece.nbytes


class Memory:
    """The mapped bytes of a file. They stay mapped while a tensor uses them, even after the file is closed.

    With `spans`, (begin, end) pairs, these parts are read into new memory instead.
    """

    __slots__ = ("address", "bytes", "flags")

    def __init__(self, file: File, *, private: bool, spans: Iterable[tuple[int, int]] | None = None) -> None:
        if spans is None and private and file.data is not None and file.data.readonly:
            spans = [(0, file.size)]  # a private mapping's pages are copied at the first write: these at once
        if spans is not None:
            self.bytes = memoryview(allocate_block(file.size))
            read_spans(file, self.bytes, spans)
        else:
            self.bytes = memoryview(file.map(file.size, writable=private))
        self.flags = READ_ONLY if spans is None and (file.data is None or file.data.readonly) else 0
        self.address = native.buffer_address(self.bytes)


def allocate_block(size: int, descriptor: int = -1) -> mmap.mmap:
    """Return anonymous memory, or the memory of a memfd; pages that are not used take no memory."""
    try:
        if descriptor >= 0:
            os.ftruncate(descriptor, size)
            return mmap.mmap(descriptor, size)
        # Without MADV_HUGEPAGE, which took up to ten times as long: the kernel compacted memory first.
        return map_memory(size)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"cannot allocate {size:,} bytes") from error
        raise


def read_stream(stream: Any) -> memoryview:
    """Read the rest of a binary file object into writable memory."""
    data = bytearray()
    while piece := stream.read(PIECE):
        if isinstance(piece, str):
            raise TypeError("the file object is opened in text mode; open it with mode 'rb'")
        data += piece
    return memoryview(data)


def copy_to_memory(file: File, *, needs_path: bool) -> File:
    """Return a copy of a file in memory; with `needs_path`, libraries can open its `location`."""
    if needs_path and (reason := find_missing().get("share")):
        raise FileError(reason, source=str(file.path), fix="Pass mmap=True.")
    descriptor = os.memfd_create("dlx") if needs_path else -1
    try:
        block = memoryview(allocate_block(file.size, descriptor))
        read_spans(file, block, [(0, file.size)])
        copy = File(Path(f"/proc/self/fd/{descriptor}") if needs_path else block)
    finally:
        if needs_path:
            os.close(descriptor)
    copy.path = file.path
    return copy


def read_spans(file: File, target: memoryview, spans: Iterable[tuple[int, int]]) -> None:
    """Read parts of a file to the same offsets of `target`, with large reads in several threads."""
    pieces, at = [], 0
    for begin, end in sorted(spans):
        for start in range(max(begin, at), end, PIECE):
            pieces.append((start, min(start + PIECE, end)))
        at = max(at, end)

    def read(piece: tuple[int, int]) -> None:
        at, end = piece
        if file.data is not None:
            target[at:end] = file.data[at:end]
            return
        while at < end:
            count = read_into(file.handle.fileno(), target[at:end], at)
            if not count:
                raise FileError("another program truncated it while dlx read it", fix=AGAIN)
            at += count

    if len(pieces) <= 1:  # a thread takes longer to start than most files to read
        for piece in pieces:
            read(piece)
        return

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(READERS, len(pieces))) as pool:
        for _ in pool.map(read, pieces):
            pass


Loader = Callable[["Stored", memoryview], Tensor]
"""Copies an array out of the bytes of its file."""


class Stored(NamedTuple):
    """The description of one array in a file."""

    name: str  # empty in a file of one array
    dtype: DType | None  # None if DLPack has no such dtype
    dtype_name: str  # in the file's format; numpy's, such as ">f4", if it is swapped
    shape: tuple[int, ...] | None
    nbytes: int | None  # of all elements; None if unknown
    order: str = "C"  # "C" or "F"
    offset: int | None = None  # of the elements in the file, in bytes; None if they need decoding
    swapped: bool = False  # whether its bytes are in the other order
    refused: str = ""  # why DLPack cannot represent it
    fix: str = ""  # a solution if it is refused
    notes: tuple[str, ...] = ()  # after "it is": why reading needs a copy
    load: Loader | None = None  # None if it is stored unchanged
    fields: tuple[Stored, ...] = ()  # of a structure
    steps: tuple[int, ...] | None = None  # strides of a field, in elements; of records in records, in bytes
    part: int = 0  # the number of its file

    def strides(self) -> tuple[int, ...] | None:
        """Return the strides in elements; None for row-major order."""
        if self.steps is not None:
            return self.steps
        if self.order != "F" or self.shape is None:
            return None
        return row_major(self.shape[::-1])[::-1]


class Named(Mapping[Any, Any]):
    """A mapping with the names of another one; ``make(name, value)`` returns an element when it is read."""

    def __init__(self, names: Mapping[Any, Any], make: Callable[[Any, Any], Any]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: Any) -> Any:
        return self._make(name, self._names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Contents(NamedTuple):
    """The contents of a file."""

    kind: str  # ".npy", ".safetensors" and so on
    entries: Mapping[str, Stored]  # by name
    metadata: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()  # shown by dlx inspect
    close: Callable[[], object] = lambda: None  # closes the reader


def read_next(file: BinaryIO | Any, count: int) -> bytes:
    """Return the next `count` bytes of a file's header; raise `FileError` if the file ends earlier."""
    data: bytes = file.read(count)
    if len(data) < count:
        raise FileError("it is truncated: it ends in the middle of its header", fix=AGAIN)
    return data


def check_names(names: Sequence[str]) -> None:
    """Raise `FileError` if a file lists a name twice."""
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise FileError(f"its header lists {one_line(twice, 80)!r} twice")


def by_name(entries: Iterable[Stored]) -> dict[str, Stored]:
    """Return entries by their names; raise `FileError` if two have the same."""
    listed = list(entries)
    check_names([each.name for each in listed])
    return {each.name: each for each in listed}


def are_extents(values: Sequence[Any]) -> bool:
    """Return whether values are the extents of an array, which DLPack can represent."""
    return len(values) <= MAX_NDIM and all(type(each) is int and 0 <= each < MAX_BYTES for each in values)


def is_sibling(name: str) -> bool:
    """Return whether a name, which a file lists, can only be a file in the same folder."""
    return os.path.basename(name) == name and name not in ("", ".", "..") and "\0" not in name  # noqa: PTH119


def check_order(entries: Iterable[Stored], start: int, *, gaps: bool) -> int:
    """Return the end of the last array; raise `FileError` if two overlap, or leave a gap and `gaps` is false."""
    at = start
    for begin, size, name in sorted((each.offset or 0, each.nbytes or 0, each.name) for each in entries):
        if begin < at or (begin > at and not gaps):
            what = "overlap" if gaps else "overlap, or leave a gap,"
            raise FileError(f"its tensors {what} before {one_line(name, 80)!r}")
        at = begin + size
    return at


def name_dtype(stored: Stored, dtype: DType) -> Stored:
    """Return the entry of an array with another dtype for the same bytes; unchanged if its bytes cannot be read."""
    if stored.offset is None and stored.load is None:
        return stored
    if (
        stored.shape is None
        or stored.nbytes is None
        or prod(stored.shape) * dtype.bits * dtype.lanes != stored.nbytes * 8
    ):
        what = one_line(stored.name, 80) or "the array"
        reason = f"{what} has the dtype {stored.dtype_name}, whose size is not that of {dtype}"
        raise DTypeError(reason, fix="Pass a dtype of the same number of bytes.")
    word = stored.dtype_name if stored.swapped else dtype.name
    return stored._replace(dtype=dtype, dtype_name=word, refused="", fix="", fields=())


def allocate(stored: Stored) -> tuple[Tensor, memoryview]:
    """Allocate a writable tensor for an array; return it and its bytes, which the caller fills."""
    assert stored.nbytes is not None and stored.shape is not None and stored.dtype is not None
    from dlx._protocols.pointer import empty
    from dlx.adapter.base import over_memory

    block = empty(stored.nbytes, "uint8")
    tensor = over_memory(block.data_ptr, stored.shape, stored.strides(), stored.dtype, HOST, owner=block)
    return tensor, memoryview(block)


def reader_error(package: str, error: Exception) -> Exception:
    """Return the error for a file that a library cannot read; a `MemoryError` if it lacked memory or threads."""
    text = one_line(exception_text(error, 200), 260)
    if isinstance(error, MemoryError) or find_in(error, "(an(?:no|')t allocate|Failed to launch)"):
        return error if isinstance(error, MemoryError) else MemoryError(f"{package}: {text}")
    return FileError(f"{package} cannot read it: {text}", fix=AGAIN)


@contextlib.contextmanager
def naming_reader(package: str) -> Iterator[None]:
    """Name a library in the errors of reading a file with it."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:  # a damaged or hostile file can cause any exception
        raise reader_error(package, error) from error


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
