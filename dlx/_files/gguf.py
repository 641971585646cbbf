"""Parser of .gguf headers (ggml's format, versions 2 and 3).

Quantized tensors consist of blocks with scales, for which DLPack has no dtype.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from dlx._core.types import DType
from dlx._files.header import AGAIN, MAX_BYTES, SPLIT, Contents, File, Stored, by_name, check_order
from dlx._support.text import amount, one_line
from dlx.errors import FileError

MAX_HEADER = 64 << 20  # bytes; a vocabulary of 256 000 words takes about 10 MiB
MAX_TENSORS = 250_000
MAX_DEPTH = 4  # of nested arrays; no known writer nests them twice
MAX_NESTED = 100_000  # arrays in arrays
MAX_DIMS = 4  # ggml's limit

_DTYPES = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip

# Quantized types: name, elements per block, bytes per block.
_BLOCKS = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip

# Types of metadata values, as struct formats.
_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


class _Reader:
    """A cursor over the header; `whole` means that the data ends with the file."""

    def __init__(self, data: Any, whole: bool) -> None:
        self.data, self.whole, self.at, self.nested = data, whole, 0, 0

    def skip(self, count: int) -> int:
        """Advance by `count` bytes and return the old position."""
        start = self.at
        if count > len(self.data) - start:
            if self.whole:
                raise FileError("it is truncated: it ends in the middle of its header", fix=AGAIN)
            raise FileError(f"its header is larger than {amount(MAX_HEADER)}, dlx's limit", fix=SPLIT)
        self.at += count
        return start

    def read_number(self, letter: str) -> Any:
        return struct.unpack_from(f"<{letter}", self.data, self.skip(struct.calcsize(f"<{letter}")))[0]

    def read_text(self) -> str:
        length = self.read_number("Q")
        start = self.skip(length)
        return bytes(self.data[start : start + length]).decode("utf-8", "replace")

    def read_value(self, kind: int, depth: int = 0) -> Any:
        """Read a metadata value; an array becomes a list."""
        if kind in _VALUES:
            return self.read_number(_VALUES[kind])
        if kind == _TEXT:
            return self.read_text()
        self.nested += depth > 0
        if kind != _ARRAY or depth == MAX_DEPTH or self.nested > MAX_NESTED:
            raise FileError(f"its metadata has a value of the unknown type {kind}, or too many nested arrays")
        inner, count = self.read_number("I"), self.read_number("Q")
        if inner in _VALUES:
            start = self.skip(count * struct.calcsize(f"<{_VALUES[inner]}"))
            return list(struct.unpack_from(f"<{count}{_VALUES[inner]}", self.data, start))
        return [self.read_value(inner, depth + 1) for _ in range(count)]


def read_gguf(file: File) -> Contents:
    """Read the header of a .gguf file and check its offsets against the file's size."""
    length = min(file.size, MAX_HEADER)
    with file.map(length) as data:
        return _read_header(file, _Reader(data, file.size == length))


def _read_header(file: File, reader: _Reader) -> Contents:
    if reader.data[:4] != b"GGUF":
        raise FileError("it does not begin with the .gguf signature")
    reader.skip(4)
    version = reader.read_number("I")
    if version not in (2, 3):
        swapped = version and version & 0xFFFF == 0
        found = "it is big-endian" if swapped else f"it has format version {version}"
        reason = f"{found}; dlx reads versions 2 and 3 in little-endian order"
        raise FileError(reason, fix="Convert it with llama.cpp's tools first.")
    tensors, values = reader.read_number("Q"), reader.read_number("Q")
    if tensors > MAX_TENSORS:
        raise FileError(f"its header lists {tensors:,} tensors; dlx reads at most {MAX_TENSORS:,}", fix=SPLIT)
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = reader.read_text()
        if key in metadata:
            raise FileError(f"its metadata lists {one_line(key, 80)!r} twice")
        metadata[key] = reader.read_value(reader.read_number("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise FileError(f"its alignment is {one_line(str(alignment), 40)}, not a power of two")
    files = metadata.get("split.count", 1)
    if files != 1:
        reason = f"it is one of {one_line(str(files), 20)} files of a model; dlx reads models in one file only"
        raise FileError(reason, fix="Merge them with llama.cpp: llama-gguf-split --merge FIRST_FILE OUT.gguf.")
    described = [_read_tensor(reader) for _ in range(tensors)]
    start = -(-reader.at // alignment) * alignment
    entries = by_name(_build_entry(*each, start, alignment) for each in described)
    end = check_order(entries.values(), start, gaps=True)  # tensors are padded to the alignment
    if end > file.size:
        raise FileError(f"it is truncated: its tensors need {end:,} bytes, the file has {file.size:,}", fix=AGAIN)
    if any(file.read_at(4, at) == b"GGUF" for at in (end, -(-end // alignment) * alignment)):
        raise FileError("it contains several models, one after the other", fix="Split it into separate files.")
    return Contents(".gguf", entries, metadata)


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Read the name, shape, dtype number and offset of a tensor."""
    name, ndim = reader.read_text(), reader.read_number("I")
    if ndim > MAX_DIMS:
        raise FileError(f"{one_line(name, 80)!r} has {ndim:,} dimensions in its header; the limit is {MAX_DIMS}")
    extents = [reader.read_number("Q") for _ in range(ndim)]
    return name, tuple(reversed(extents)), reader.read_number("I"), reader.read_number("Q")


def _build_entry(name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int) -> Stored:
    at, count = start + offset, math.prod(shape)
    if offset % alignment or max(at, *shape, count * 8) >= MAX_BYTES:
        raise FileError(f"its header has an invalid entry for {one_line(name, 80)!r}")
    if kind in _DTYPES:
        dtype = DType(_DTYPES[kind])
        return Stored(name, dtype, dtype.name, shape, count * dtype.bits // 8, offset=at)
    word, elements, size = _BLOCKS.get(kind, (f"type {kind}", 1, 0))
    row = shape[-1] if shape else 1
    if row % elements:
        raise FileError(f"{one_line(name, 80)!r} has rows of {row:,} elements, but {word} has blocks of {elements}")
    refused = f"it is quantized ({word}), and DLPack has no dtype for blocks with scales" if size else ""
    refused = refused or f"dlx does not know the dtype {word!r}"
    return Stored(name, None, word, shape, count // elements * size if size else None, offset=at, refused=refused)
