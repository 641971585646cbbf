"""Headers of .npy, .npz and .safetensors files, read by hand: no data is touched, nothing is run, memory is bounded.

Formats: ``numpy.lib.format`` (versions 1 to 3), zip as `numpy.savez` writes it, and the safetensors README.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dlx._core.types import DType
from dlx.cli.model import BadInput, Entry, Source, aligned_to, amount, one_line

__all__ = ["MAGIC_NPY", "MAX_BYTES", "MAX_NDIM", "SAFE", "opened_zip", "read_npy", "read_npz", "read_safetensors"]

MAGIC_NPY = b"\x93NUMPY"
MAX_NPY = 1 << 20  # bytes of a .npy header; numpy's own default limit is 10 000
MAX_SAFETENSORS = 16 << 20  # bytes of a safetensors header; 100 000 tensors need some 12 MiB
MAX_NDIM = 128
MAX_BYTES = 1 << 63  # of an array, and what an extent stays below
MAX_MEMBERS = 100_000  # files in a zip
MAX_DIRECTORY = 16 << 20  # bytes of a zip's list of files
NUMPY_ALIGNMENT = 16  # bytes: what malloc promises, and numpy asks for no more
AGAIN = "write it or fetch it again"
SAFE = "dlx does not. Save the arrays as .npz or .safetensors"

_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_DESCR = re.compile(r"([<>|=])([biufcSUVOmM])(\d*)(\[.*\])?")
_REFUSED = {
    "S": "DLPack has no text",
    "U": "DLPack has no text",
    "V": "raw bytes: load it, then .view the dtype that it was saved from (ml_dtypes leave no name behind)",
    "O": "it holds pickled Python objects",
    "m": "DLPack has no durations: .view('int64') after loading",
    "M": "DLPack has no dates: .view('int64') after loading",
}


def read_npy(path: Path) -> Source:
    """Read the header of a .npy file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        entry = _npy(file, size, "")
    if entry.dtype_name == "object":
        raise BadInput(f"it holds pickled Python objects, and reading them runs whatever code is in them; {SAFE}")
    return Source(str(path), ".npy", (entry,), size)


def _npy(file: BinaryIO | Any, size: int, name: str) -> Entry:
    """Read one header; `size` is the number of bytes that the file says to have."""
    start = _exactly(file, 8)
    if start[:6] != MAGIC_NPY:
        raise BadInput("it does not begin like a .npy file")
    major = start[6]
    if major not in (1, 2, 3):
        raise BadInput(f"it is of version {major} of the .npy format, and dlx reads 1 to 3")
    width = 2 if major == 1 else 4
    length = int.from_bytes(_exactly(file, width), "little")
    if length > MAX_NPY:
        raise BadInput(f"its header claims {amount(length)}, and dlx reads at most {amount(MAX_NPY)}")
    raw = _exactly(file, length)
    try:
        header = ast.literal_eval(raw.decode("utf-8" if major == 3 else "latin-1").strip())
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        usable = isinstance(shape, tuple) and len(shape) <= MAX_NDIM
        usable = usable and all(type(extent) is int and 0 <= extent < MAX_BYTES for extent in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        usable = False
    if not usable or not isinstance(fortran, bool) or not isinstance(descr, str | list | tuple):
        raise BadInput("its header is no description of an array")
    offset = 8 + width + length
    entry = _of_descr(name, descr, shape, "F" if fortran and len(shape) > 1 else "C", offset)
    held = size - offset
    if entry.nbytes is not None and entry.nbytes > held:
        claims = f"its header claims {amount(entry.nbytes)} of data, and {amount(max(held, 0))} are there"
        raise BadInput(f"it is cut off: {claims}; {AGAIN}")
    return entry


def _of_descr(name: str, descr: Any, shape: tuple[int, ...], order: str, offset: int) -> Entry:
    if not isinstance(descr, str):
        fields = ", ".join(str(each[0]) for each in descr if isinstance(each, tuple) and each)
        return Entry(
            name, None, "structure", shape, None, "file", order, offset, loader="numpy",
            refused=f"DLPack has no structures: convert its fields one by one ({one_line(fields, 60)})",
        )  # fmt: skip
    match = _DESCR.fullmatch(descr)
    if match is None or (match[2] != "O" and not match[3]):
        raise BadInput(f"its header gives {one_line(descr, 40)!r} as dtype")
    letter, width = match[2], int(match[3] or 0)
    itemsize = 4 * width if letter == "U" else width
    nbytes = None if letter == "O" else math.prod(shape) * itemsize
    dtype = _dtype(letter, width)
    refused = "" if dtype else _REFUSED.get(letter, f"DLPack has no dtype for {descr!r}")
    swapped = match[1] == ">" and itemsize > 1 and dtype is not None
    notes = ("in the other byte order",) if swapped else ()
    word = "object" if letter == "O" else dtype.name if dtype is not None and not swapped else descr
    return Entry(
        name, dtype, word, shape, nbytes, "file", order, offset, swapped, "numpy", NUMPY_ALIGNMENT, refused, notes
    )


def _dtype(letter: str, width: int) -> DType | None:
    allowed = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
    if width not in allowed.get(letter, ()):
        return None
    return DType("bool" if letter == "b" else f"{_KINDS[letter]}{8 * width}")


def _exactly(file: BinaryIO | Any, count: int) -> bytes:
    parts: list[bytes] = []
    missing = count
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    if missing:
        raise BadInput(f"it is cut off: it ends in the middle of its header; {AGAIN}")
    return b"".join(parts)


# ---- .npz ------------------------------------------------------------------------------------------------------------


class _Bounded(io.BufferedReader):
    """A file that is never read in one large piece, whatever its own fields claim."""

    def read(self, size: int | None = -1) -> bytes:
        everything = size is None or size < 0
        data = super().read(MAX_DIRECTORY + 1 if everything else min(size or 0, MAX_DIRECTORY + 1))
        if len(data) > MAX_DIRECTORY:
            raise BadInput(f"its list of files claims more than {amount(MAX_DIRECTORY)}, where dlx stops")
        return data


@contextlib.contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; whatever is wrong with it is bad input.

    Raises
    ------
    BadInput
        If it is damaged, or claims more than dlx reads.
    """
    try:
        with _Bounded(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            if len(archive.infolist()) > MAX_MEMBERS:
                raise BadInput(f"it has {len(archive.infolist()):,} members, and dlx reads at most {MAX_MEMBERS:,}")
            yield archive
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        struct.error,
        OSError,
    ) as error:
        raise BadInput(f"it is a damaged zip file: {error}; {AGAIN}") from error


def read_npz(path: Path) -> Source:
    """Read the headers of the arrays in an .npz file; of compressed ones only as much as the header needs."""
    with opened_zip(path) as archive:
        members = archive.infolist()
        arrays = [each for each in members if each.filename.endswith(".npy")]
        entries = tuple(_member(archive, each) for each in arrays)
    others = [each.filename for each in members if not each.filename.endswith(".npy")]
    if not entries:
        raise BadInput("it is a zip file without arrays in it")
    notes = (f"{len(others)} members that are no .npy",) if others else ()
    return Source(str(path), ".npz", entries, path.stat().st_size, notes)


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Entry:
    name = member.filename.removesuffix(".npy")
    try:
        if member.flag_bits & 1:
            raise BadInput("it is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadInput(f"it is compressed by method {member.compress_type}, which numpy does not read either")
        with archive.open(member) as file:
            entry = _npy(file, member.file_size, name)
    except BadInput as error:
        raise BadInput(f"member {one_line(member.filename, 80)!r}: {error}") from None
    changes: dict[str, Any] = {"offset": None}
    if member.compress_type == zipfile.ZIP_DEFLATED:
        changes["notes"] = (*entry.notes, "compressed")
    return type(entry)(**{**entry.__dict__, **changes})


# ---- .safetensors ----------------------------------------------------------------------------------------------------

_SAFETENSORS = {
    "BOOL": "bool",
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F4": "float4_e2m1fn",
}


def read_safetensors(path: Path) -> Source:
    """Read the header of a .safetensors file and hold its offsets against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(_exactly(file, 8), "little")
        if length > size - 8:
            claims = f"its header claims {amount(length)}, and the file holds {amount(size)}"
            raise BadInput(f"it is cut off, or no .safetensors file: {claims}")
        if length > MAX_SAFETENSORS:
            raise BadInput(f"its header claims {amount(length)}, and dlx reads at most {amount(MAX_SAFETENSORS)}")
        raw = _exactly(file, length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        raise BadInput("its header is nested too deep for a description of tensors") from None
    except ValueError as error:  # of a number with thousands of digits, too
        raise BadInput(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadInput("its header is JSON, and no description of tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise BadInput("the metadata in its header is no table")
    entries = [_stored(name, stated, 8 + length) for name, stated in header.items()]
    _check_coverage(entries, 8 + length, size)
    return Source(str(path), ".safetensors", tuple(entries), size, metadata={k: str(v) for k, v in metadata.items()})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _stored(name: str, stated: Any, start: int) -> Entry:
    try:
        word, shape, (begin, end) = stated["dtype"], tuple(stated["shape"]), stated["data_offsets"]
        numbers = [*shape, begin, end]
        wrong = any(type(each) is not int or not 0 <= each < MAX_BYTES for each in numbers) or end < begin
        if wrong or not isinstance(word, str) or len(shape) > MAX_NDIM:
            raise ValueError
    except (TypeError, ValueError, KeyError):
        raise BadInput(f"what its header says of {one_line(name, 80)!r} is no tensor") from None
    known = _SAFETENSORS.get(word)
    if known is None:
        refused = f"dlx does not know the dtype {one_line(word, 20)!r}"
        return Entry(name, None, word, shape, end - begin, order="C", offset=start + begin, refused=refused)
    dtype = DType(known)
    nbytes = -(-math.prod(shape) * dtype.bits // 8)
    if nbytes != end - begin:
        by_shape = f"{nbytes:,} bytes" if nbytes < MAX_BYTES else "more bytes than there are"
        found = f"{by_shape} by its shape and {end - begin:,} by its offsets"
        raise BadInput(f"its header gives {one_line(name, 80)!r} {found}")
    # Some libraries read it into memory of their own, others map the file.
    alignment = min(aligned_to(start + begin), NUMPY_ALIGNMENT)
    return Entry(name, dtype, word, shape, nbytes, order="C", offset=start + begin, alignment=alignment)


def _check_coverage(entries: list[Entry], start: int, size: int) -> None:
    """See that the tensors lie one after the other and end where the file ends, as the format demands."""
    at = start
    for entry in sorted(entries, key=lambda each: (each.offset or 0, each.nbytes or 0)):
        if entry.offset != at:
            raise BadInput(f"its tensors overlap, or leave a gap, before {one_line(entry.path, 80)!r}")
        at += entry.nbytes or 0
    if at > size:
        raise BadInput(f"it is cut off: its tensors need {at:,} bytes, and the file holds {size:,}; {AGAIN}")
    if at < size:
        raise BadInput(f"{size - at:,} bytes follow its last tensor, which the format forbids")
