"""The parser of .npz files, the zip files of `numpy.savez`. It reads headers only and unpickles nothing."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import struct
import zipfile
from collections.abc import Iterator

from dlx._core.native import Tensor
from dlx._files.header import AGAIN, SPLIT, Contents, File, Stored, allocate, by_name, check_names
from dlx._files.npy import add_loader, read_header, read_start, swap_bytes
from dlx._files.signatures import identify_zip
from dlx._support.text import amount, one_line
from dlx.errors import FileError

MAX_MEMBERS = 100_000  # files in a zip
_METHODS = {
    zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1100, zipfile.ZIP_BZIP2: 1 << 21, zipfile.ZIP_LZMA: 1 << 14,
}  # fmt: skip
"""The largest number of bytes that one compressed byte expands to, by method; zlib's documentation says 1032."""
MAX_DIRECTORY = 16 << 20  # bytes of a zip's list of files


class _BoundedReader(io.BufferedReader):
    """A file with a limit on each read, since `zipfile` trusts the sizes in the file."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_DIRECTORY:
            raise FileError(f"its list of files claims more than {amount(MAX_DIRECTORY)}, dlx's limit", fix=SPLIT)
        return super().read(size)


@contextlib.contextmanager
def open_zip(file: File) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; raise `FileError` if it is damaged or exceeds dlx's limits."""
    try:
        archive = file.archive = file.archive or zipfile.ZipFile(_BoundedReader(file.reopen()))
        members = archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise FileError(f"it has {len(members):,} members; dlx reads at most {MAX_MEMBERS:,}", fix=SPLIT)
        check_names([each.filename for each in members])
        first = min((int(each.header_offset) for each in members), default=0)
        if first and file.read_at(4, 0) == b"PK\3\4":
            fix = "Split it into separate archives; only the last one is listed."
            raise FileError("it contains several zip archives, or members missing from its list", fix=fix)
        yield archive
    except (FileError, MemoryError):
        raise
    except Exception as error:  # the exceptions depend on the compression method
        # EINVAL: an offset before the file; no errno: a damaged stream; RuntimeError: a lock that cannot be allocated.
        of_file = error.errno in (None, errno.EINVAL) if isinstance(error, OSError) else type(error) is not RuntimeError
        if not of_file:
            raise
        raise FileError(f"it is not a valid zip file: {one_line(str(error), 200)}", fix=AGAIN) from error


def read_npz(file: File) -> Contents:
    """Read the headers of the arrays in an .npz file; of a compressed array, decompress only the header."""
    with open_zip(file) as archive:
        members = [each for each in archive.infolist() if not each.is_dir()]
        ends = [(each.header_offset, find_data_start(file, each) + each.compress_size) for each in members]
        entries = by_name(_read_member(file, archive, each) for each in members)
        names = archive.namelist()
    if all(entry.dtype_name == "file" for entry in entries.values()):
        raise identify_zip(names)
    ends.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise([*ends, (file.size, 0)])):
        raise FileError("its members overlap, or end after the file")
    return Contents(".npz", entries)


def find_data_start(file: File, member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's data, after its local header of variable length."""
    head = file.read_at(30, member.header_offset)  # keeps the position of the open archive
    if len(head) < 30:
        raise FileError("it is truncated: it ends in the middle of its header", fix=AGAIN)
    name, extra = struct.unpack_from("<HH", head, 26)
    return member.header_offset + 30 + int(name) + int(extra)


def _read_member(file: File, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Stored:
    name, method, size = member.filename.removesuffix(".npy"), member.compress_type, member.file_size
    refuse = functools.partial(Stored, name, None, "?", None, None)
    if member.flag_bits & 1:
        return refuse(refused="it is encrypted")
    if method not in _METHODS:
        return refuse(refused=f"it is compressed with method {method}, which dlx does not support")
    try:
        if not method and size != member.compress_size:
            raise FileError(f"it is not compressed, but has two sizes: {size:,} and {member.compress_size:,} bytes")
        if size > _METHODS[method] * member.compress_size:
            raise FileError(f"it claims {amount(size)}, more than {member.compress_size:,} bytes can hold")
        with archive.open(member) as content:
            begin = read_start(content)
            if begin is None and not size and name != member.filename:
                return refuse(refused="it is empty, without the header of an array", fix=AGAIN)
            if begin is None:
                return refuse(refused="it is another file in the archive, not an array")._replace(dtype_name="file")
            entry = read_header(content, begin, size, name)
    except RuntimeError as error:
        if "missing" not in str(error):  # "missing": this Python was built without the method
            raise
        return refuse(refused=f"it cannot be decompressed: {error}")
    except FileError as error:
        reason = f"member {one_line(member.filename, 80)!r}: {error.reason}"
        raise FileError(reason, fix=error.fix) from None
    start = find_data_start(file, member)
    assert entry.offset is not None
    if not method:
        return add_loader(entry, offset=start + entry.offset)
    load = functools.partial(_load_compressed, start, member, entry.offset)
    return add_loader(entry, "compressed", offset=None, load=load)


def _load_compressed(start: int, member: zipfile.ZipInfo, skip: int, entry: Stored, data: memoryview) -> Tensor:
    """Read a compressed array: it begins `skip` bytes into the decompressed member, whose data is at `start`."""
    tensor, target = allocate(entry)
    size = 1 << 20 if member.compress_type == zipfile.ZIP_DEFLATED else 4096  # the other methods do not limit output
    at = -skip
    try:
        with File(data[start : start + member.compress_size], member.filename) as packed:
            content = zipfile.ZipExtFile(packed.handle, "r", member)
            while piece := memoryview(content.read1(size)):
                rest = target[max(at, 0) : max(at + len(piece), 0)]  # other bytes may follow the array
                rest[:] = piece[max(-at, 0) :][: rest.nbytes]
                at += len(piece)
    except MemoryError:
        raise
    except Exception as error:  # the exceptions depend on the method
        raise FileError(f"its compressed data is damaged: {error}", fix=AGAIN) from error
    if at + skip != member.file_size:
        raise FileError("its compressed data is damaged: its length is wrong", fix=AGAIN)
    swap_bytes(entry, target)
    return tensor
