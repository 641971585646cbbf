"""Writers of .npy, .npz, .safetensors and Arrow IPC files, which write one array at a time and never change a dtype."""

from __future__ import annotations

import functools
import importlib
import json
import math
import operator
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import IO, Any, BinaryIO, NamedTuple

from dlx._core.array_protocol import typestr
from dlx._core.extension import ffi
from dlx._core.native import Tensor, tensor_copy, tensor_new
from dlx._core.types import HOST, DType, contiguous
from dlx._engine.casting import can_cast
from dlx._engine.seam import FAST_PATH
from dlx._files.header import import_reader
from dlx._files.npz import MAX_DIRECTORY, MAX_MEMBERS
from dlx._files.safetensors import DTYPE_NAMES
from dlx._support.text import amount, one_line
from dlx.errors import DTypeError, FileError

MAX_NAME = 0xFFFF - len(".npy")  # bytes in a zip file
_SURROGATE = re.compile("[\ud800-\udfff]")  # UTF-8 has none
_BYTES = ffi.typeof("char *")
PIECE = 64 << 20  # bytes written at a time: 4 MiB take 5 % longer


class Item(NamedTuple):
    """One array to write."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int  # of its elements, packed
    source: Any  # the array, or a tensor over its memory
    load: Callable[[], Tensor] | None  # returns a tensor in host memory, released once it is written; None: `source`
    lists: tuple[Any, ...] = ()  # items of the offsets of lists around these values, from the inner to the outer

    def read(self, *, rows: bool = True) -> Tensor:
        """Return a tensor in host memory, with `rows` in row-major order; raise `FileError` if it has changed."""
        tensor: Tensor = self.source if self.load is None else self.load()
        if self.load is not None and (tensor.dtype != self.dtype or tensor.shape != self.shape):
            raise FileError(f"{_item_text(self)} changed while dlx read it", fix="Try again.")
        return tensor_copy(tensor, False) if rows and not is_row_major(self.shape, tensor.strides) else tensor


is_row_major = functools.lru_cache(contiguous)  # a model has many tensors of few shapes


class _Output(NamedTuple):
    file: IO[bytes]
    advance: Callable[[int], object]  # called with the number of written bytes

    def data(self, item: Item) -> None:
        """Write the bytes of an array in row-major order."""
        tensor = item.read()
        at, end = (tensor.data_ptr, tensor.data_ptr + item.nbytes) if item.nbytes else (0, 0)
        for start in range(at, end, PIECE):
            size = end - start if end - start < PIECE else PIECE
            self.file.write(ffi.buffer(ffi.cast(_BYTES, start), size))
            self.advance(size)


def _item_text(item: Item) -> str:
    return f"{one_line(item.name, 80)!r}" if item.name else "the array"


def _check_dtypes(items: Sequence[Item], kind: str) -> None:
    """Raise `DTypeError` for the first array whose dtype a format lacks."""
    for dtype in dict.fromkeys([item.dtype for item in items]):
        if FORMATS[kind][1](dtype) is None:
            item = next(item for item in items if item.dtype == dtype)
            others = [name for name, (_, has) in reversed(FORMATS.items()) if name != kind and has(dtype) is not None]
            reason = f"{kind} cannot store {dtype} ({_item_text(item)}); dlx does not change dtypes"
            option = (("dtype", {dtype.name: "float32"}),) if can_cast(dtype, DType("float32"), HOST) else ()
            fix = f"Write {' or '.join(others)} instead." if others else ""
            raise DTypeError(reason, option=option, via="to dlx.convert(obj, to='dlx')", fix=fix)


def _check_names(items: Sequence[Item], kind: str) -> None:
    """Raise `FileError` for the first name that UTF-8 or a zip file cannot store."""
    for name, *_ in items:
        if not name.isascii() and _SURROGATE.search(name):
            why = "a lone surrogate"
        elif kind == ".npz" and "\0" in name:
            why = "NUL"
        elif kind == ".npz" and len(name.encode()) > MAX_NAME:
            why = f"more than {MAX_NAME:,} bytes"
        else:
            continue
        into = "Write .safetensors or rename it." if why != "a lone surrogate" else "Rename it."
        raise FileError(f"{kind} cannot store the name {one_line(name, 80)!r}, which has {why}", fix=into)


def _check_metadata(metadata: dict[str, str]) -> None:
    """Raise `FileError` for metadata that UTF-8 cannot store."""
    for key, value in metadata.items():
        if _SURROGATE.search(key + value):
            reason = f"its metadata {one_line(key, 80)!r} has a lone surrogate, which UTF-8 cannot store"
            raise FileError(reason, fix="Write .npz, which stores no metadata, or correct it.")


# ---- .npy and .npz ---------------------------------------------------------------------------------------------------


def _npy_header(item: Item, fortran: bool) -> bytes:
    text = f"{{'descr': {typestr(item.dtype)!r}, 'fortran_order': {fortran}, 'shape': {item.shape}, }}".encode()
    width = 2 if len(text) < 65_000 else 4
    text += b" " * (-(len(text) + 9 + width) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([1 if width == 2 else 2, 0]) + len(text).to_bytes(width, "little") + text


def _write_npy(out: _Output, items: Sequence[Item], metadata: dict[str, str]) -> None:
    if len(items) != 1:
        raise FileError(f"a .npy file stores one array, found {len(items):,}", fix="Write .npz or .safetensors.")
    tensor, back = items[0].read(rows=False), items[0].shape[::-1]
    fortran = not contiguous(tensor.shape, tensor.strides) and contiguous(back, tensor.strides[::-1])
    out.file.write(_npy_header(items[0], fortran))
    if fortran:  # its transposed array has row-major order
        tensor = tensor_new(tensor.data_ptr, back, None, tensor.dtype, HOST, 0, tensor)
    out.data(items[0]._replace(shape=tensor.shape, source=tensor, load=None))


def _write_npz(out: _Output, items: Sequence[Item], metadata: dict[str, str]) -> None:
    archive = zipfile.ZipFile(out.file, "w")
    try:
        for item in items:
            member = zipfile.ZipInfo(f"{item.name}.npy")  # a fixed date, 1980: the output is reproducible
            # An extra field (like zipalign's) pads the header to a multiple of 64 bytes, so that data can be mapped.
            begin = out.file.tell() + 30 + len(member.filename.encode()) + 4 + 20  # 20: sizes of 64 bits
            member.extra = struct.pack("<HH", 0xD935, -begin % 64) + bytes(-begin % 64)
            with archive.open(member, "w", force_zip64=True) as content:
                content.write(_npy_header(item, False))
                out._replace(file=content).data(item)
        archive.close()
    finally:
        archive.fp = None  # after an interrupt, closing it raises another exception
    if len(items) > MAX_MEMBERS or out.file.tell() - archive.start_dir > MAX_DIRECTORY:
        reason = f"dlx.open reads .npz files of at most {MAX_MEMBERS:,} arrays and {amount(MAX_DIRECTORY)} of names"
        raise FileError(reason, fix="Write .safetensors, or several files.")


# ---- .safetensors ----------------------------------------------------------------------------------------------------


_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _dtype_name(dtype: DType) -> str | None:
    return DTYPE_NAMES.get(dtype) if sys.byteorder == "little" else None


def _write_safetensors(out: _Output, items: Sequence[Item], metadata: dict[str, str]) -> None:
    header = [f'"__metadata__":{_to_json(metadata)}'] if metadata else []
    kinds: dict[Any, str] = {}
    end = 0
    # Wide elements first, in the order of the safetensors library, so that each array is aligned.
    widths = {dtype: -dtype.bits for dtype in {item.dtype for item in items}}
    ordered = sorted(sorted(items, key=operator.itemgetter(0)), key=lambda item: widths[item.dtype])
    for name, dtype, shape, nbytes, *_ in ordered:
        if name == "__metadata__":
            raise FileError("an array is named '__metadata__', which the format reserves", fix="Rename it.")
        key = dtype, shape
        kind = kinds.get(key)
        if kind is None:
            if math.prod(shape) * dtype.bits % 8:
                reason = f"the {math.prod(shape):,} elements of {one_line(name, 80)!r} do not fill whole bytes"
                raise FileError(reason, fix="Cast it, or pad its shape.")
            kind = kinds[key] = f'{{"dtype":"{_dtype_name(dtype)}","shape":{_to_json(shape)},"data_offsets":['
        header.append(f"{encode_basestring(name)}:{kind}{end},{end + nbytes}]}}")
        end += nbytes
    raw = f"{{{','.join(header)}}}".encode()
    raw += b" " * (-(len(raw) + 8) % 64)
    if len(raw) > 100_000_000:
        reason = f"safetensors reads headers of at most 100,000,000 bytes, and this one would have {len(raw):,}"
        raise FileError(reason, fix="Write several files.")
    out.file.write(len(raw).to_bytes(8, "little") + raw)
    for item in ordered:
        out.data(item)


# ---- Arrow -----------------------------------------------------------------------------------------------------------

_ARROW = re.compile(r"(bool|u?int(?:8|16|32|64)|float(?:16|32|64))")

_MAX_LIST = (1 << 31) - 1  # elements of a FixedSizeList


def _write_arrow(out: _Output, items: Sequence[Item], metadata: dict[str, str]) -> None:
    pa = import_reader("pyarrow", ".arrow")
    counts = [item.lists[-1].shape[0] - 1 if item.lists else (item.shape or (0,))[0] for item in items]
    for item, count in zip(items, counts, strict=True):
        reason, shaped = "", f"{_item_text(item)} has shape {list(item.shape)}, but"
        if not item.shape or 0 in item.shape[1:]:
            reason = f"{shaped} an .arrow column needs non-empty rows"
        elif max(item.shape[1:], default=0) > _MAX_LIST:
            reason = f"{shaped} an .arrow row has at most {_MAX_LIST:,} elements along a dimension"
        elif count != counts[0]:
            found = f"{counts[0]:,} rows of {_item_text(items[0])} and {count:,} of {_item_text(item)}"
            reason = f".arrow columns must have the same length, found {found}"
        if reason:
            raise FileError(reason, fix="Write .npz or .safetensors.")
    columns = [_build_column(pa, item) for item in items]
    out.advance(sum(item.nbytes for item in items))
    schema = pa.schema([(item.name, column.type) for item, column in zip(items, columns, strict=True)])
    ipc = importlib.import_module("pyarrow.ipc")
    with ipc.new_file(out.file, schema.with_metadata(metadata or None)) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def _build_column(pa: Any, item: Item) -> Any:
    """Return an array as a column that uses its memory; bools are copied, since Arrow packs them into bits."""
    tensor = item.read()
    flat = tensor_new(tensor.data_ptr, (math.prod(item.shape),), None, item.dtype, HOST, 0, tensor)
    column = FAST_PATH(flat, "pyarrow")
    for extent in reversed(item.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, extent)
    for offsets in item.lists:
        found = _build_column(pa, offsets)
        found = found if found.type == pa.int32() else found.cast(pa.int64())
        column = (pa.ListArray if found.type == pa.int32() else pa.LargeListArray).from_arrays(found, column)
    return column


# ---- all -------------------------------------------------------------------------------------------------------------

FORMATS: dict[str, tuple[Callable[[_Output, Sequence[Item], dict[str, str]], None], Callable[[DType], Any]]] = {
    ".npy": (_write_npy, typestr),
    ".npz": (_write_npz, typestr),
    ".safetensors": (_write_safetensors, _dtype_name),
    ".arrow": (_write_arrow, lambda dtype: _ARROW.fullmatch(dtype.name)),
}
"""The writer of each suffix, and its function that returns None for a dtype that the format lacks."""
WITH_METADATA = (".safetensors", ".arrow")
"""The formats that store metadata."""


def write(
    file: BinaryIO, kind: str, items: Sequence[Item], metadata: dict[str, str], advance: Callable[[int], object]
) -> None:
    """Write arrays to a file in one of the `FORMATS`."""
    _check_dtypes(items, kind)
    if kind != ".npy":
        _check_names(items, kind)
    _check_metadata(metadata)
    FORMATS[kind][0](_Output(file, advance), items, metadata)
