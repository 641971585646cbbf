"""The parser of .npy headers (``numpy.lib.format``, versions 1 to 3). It reads no data and unpickles nothing."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from dlx._core import native
from dlx._core.native import Tensor
from dlx._core.types import HOST, READ_ONLY, DType, row_major
from dlx._files.descr import entry_from_descr
from dlx._files.header import AGAIN, SAFE, SPLIT, Contents, File, Named, Stored, allocate, are_extents, read_next
from dlx._files.selection import Names, select_tree
from dlx._support.text import amount
from dlx.errors import FileError

MAGIC = b"\x93NUMPY"
MAX_NPY = 1 << 20  # bytes of a .npy header; numpy's own default limit is 10 000

_TOKEN = re.compile(r"""\s*((['"])(?:\\.|(?!\2|\\).)*\2|True|False|None|[][(){},:]|-?\d+)(?:(?<=\d)L)?\s*""", re.DOTALL)
MAX_DEPTH = 32  # of brackets in a header, as in numpy's dtypes


def read_npy(file: File) -> Contents:
    """Read the header of a .npy file."""
    start = read_start(file.handle)
    if start is None:
        raise FileError("it does not begin with the .npy signature")
    entry = read_header(file.handle, start, file.size, "")
    if entry.dtype_name == "object":
        raise FileError("it contains pickled Python objects, which can run any code when they are read", fix=SAFE)
    end = (entry.offset or 0) + (entry.nbytes or 0)
    extra = file.size - end if entry.nbytes is not None else 0
    if extra and file.read_at(6, end) == MAGIC:
        fix = "Read each with numpy.load from one open file, and save them with numpy.savez."
        raise FileError("it contains several arrays, one after the other", fix=fix)
    return Contents(".npy", {"": add_loader(entry)}, notes=(f"{extra:,} bytes follow the array",) if extra else ())


def read_start(file: BinaryIO | Any) -> bytes | None:
    """Read the first 8 bytes of a .npy file; return None if it is another file."""
    start: bytes = file.read(8)
    if not start or start[: len(MAGIC)] != MAGIC[: len(start)]:
        return None
    return start + read_next(file, 8 - len(start))


def read_header(file: BinaryIO | Any, start: bytes, size: int, name: str) -> Stored:
    """Read the rest of a header; `size` is the size of the file, or the size that a zip lists for it."""
    major = start[6]
    if major not in (1, 2, 3):
        reason = f"it has version {major} of the .npy format; dlx reads versions 1 to 3"
        raise FileError(reason, fix="Save it again with numpy.save.")
    width = 2 if major == 1 else 4
    length = int.from_bytes(read_next(file, width), "little")
    if length > MAX_NPY:
        raise FileError(f"its header claims {amount(length)}; dlx reads at most {amount(MAX_NPY)}", fix=SPLIT)
    raw = read_next(file, length)
    try:
        header = _parse_literal(raw.decode("utf-8" if major == 3 else "latin-1"))
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        usable = isinstance(shape, tuple) and are_extents(shape)
    except (ValueError, SyntaxError, TypeError, KeyError):
        usable = False
    if not usable or not isinstance(fortran, bool) or not isinstance(descr, str | list | tuple):
        raise FileError("its header does not describe an array")
    offset = 8 + width + length
    entry = entry_from_descr(name, descr, shape, "F" if fortran and len(shape) > 1 else "C", offset)
    held = size - offset
    if entry.nbytes is not None and entry.nbytes > held:
        claims = f"its header claims {amount(entry.nbytes)} of data, found {amount(max(held, 0))}"
        raise FileError(f"it is truncated: {claims}", fix=AGAIN)
    return entry


def _parse_literal(text: str) -> Any:
    """Return the value of a literal of Python 2 or 3; its nesting is checked before Python parses it."""
    at, depth, tokens = 0, 0, []
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError
        token, at = match[1], match.end()
        depth += (token in "([{") - (token in ")]}")
        if depth > MAX_DEPTH:
            raise ValueError
        tokens.append(token)
    return ast.literal_eval(" ".join(tokens))


# ---- structures ------------------------------------------------------------------------------------------------------


def read_fields(records: Stored) -> list[Stored]:
    """Return the entries of the fields of records: strided if they are aligned, otherwise copied.

    The entry of records inside of records has strides in bytes, and a loader of all bytes.
    """
    shape, load, entries = records.shape or (), records.load, []
    width = (records.nbytes or 0) // max(math.prod(shape), 1)
    outer = records.steps or tuple(step * width for step in records.strides() or row_major(shape))
    if load is not None and records.steps is None:
        plain = records._replace(dtype=DType("uint8"), shape=(records.nbytes or 0,), fields=())
        load = functools.partial(load, plain)  # of all bytes
    for field in records.fields:
        inner, whole = field.shape or (), (*shape, *(field.shape or ()))
        size = (field.nbytes or 0) // max(math.prod(inner), 1)
        steps = (*outer, *(step * size for step in row_major(inner)))
        at, nbytes = (records.offset or 0) + (field.offset or 0), math.prod(whole) * size
        entry = field._replace(shape=whole, nbytes=nbytes, offset=at, steps=steps, load=load)
        if entry.dtype is not None and not nbytes:
            entry = entry._replace(steps=None, load=None)
        elif entry.dtype is not None and load is None and not field.swapped and not any(each % size for each in steps):
            entry = entry._replace(steps=tuple(each // size for each in steps))
        elif entry.dtype is not None:
            read = functools.partial(_load_field, load, at, (*steps, 1))
            entry = entry._replace(steps=None, load=read, offset=None, notes=(*records.notes, "in records"))
        entries.append(entry)
    return entries


def split_fields(stored: Stored) -> Any:
    """Return an entry; of records, the entries of the fields by name."""
    return {field.name: split_fields(field) for field in read_fields(stored)} if stored.fields else stored


def list_leaves(entries: Mapping[str, Any], at: str = "") -> Iterator[Stored]:
    """Yield the entries of arrays; of records, the entries of all fields without fields, named by their paths."""
    for key, stored in entries.items():
        name = f"{at}.{key}" if at else key
        stored = stored if isinstance(stored, Mapping) else split_fields(stored)
        if isinstance(stored, Mapping):
            yield from list_leaves(stored, name)
        else:
            yield stored._replace(name=name)


def select_entries(entries: Mapping[str, Stored], only: Names, skip: Names) -> Mapping[str, Any]:
    """Return the selected entries, and the selected fields of records."""
    if only is None and skip is None:
        return entries
    if isinstance(entries, Named):  # without records, and made when they are used
        return Named(select_tree(dict.fromkeys(entries), only, skip), lambda name, _: entries[name])
    return select_tree({name: split_fields(each) for name, each in entries.items()}, only, skip)


def _load_field(load: Any, at: int, steps: tuple[int, ...], entry: Stored, data: memoryview) -> Tensor:
    """Copy a field of records, by the offset and the strides of its bytes; `load` decodes the records."""
    assert entry.shape is not None and entry.dtype is not None and entry.nbytes
    decoded = None if load is None else load(data)
    address = native.buffer_address(data) if decoded is None else decoded.data_ptr
    shape, held = (*entry.shape, entry.nbytes // math.prod(entry.shape)), decoded or data
    found = native.tensor_new(address + at, shape, steps, DType("uint8"), HOST, READ_ONLY, held)
    copied = native.tensor_copy(found, False)
    swap_bytes(entry, memoryview(copied).cast("B"))
    return native.tensor_new(copied.data_ptr, entry.shape, None, entry.dtype, HOST, 0, copied)


# ---- read with a copy ------------------------------------------------------------------------------------------------


def add_loader(entry: Stored, *notes: str, **changes: Any) -> Stored:
    """Return an entry with changes, and with a loader if its bytes are swapped."""
    if entry.swapped:
        notes = (*notes, "in the other byte order")
        changes.setdefault("load", _load_swapped)
    return entry._replace(notes=notes, **changes)


def _load_swapped(entry: Stored, data: memoryview) -> Tensor:
    """Copy an uncompressed array with swapped bytes."""
    tensor, target = allocate(entry)
    assert entry.offset is not None
    target[:] = data[entry.offset : entry.offset + target.nbytes]
    swap_bytes(entry, target)
    return tensor


def swap_bytes(entry: Stored, target: memoryview) -> None:
    """Swap the bytes of each number in place, if the entry requires it."""
    if entry.swapped:
        width = int(entry.dtype_name[2:]) // (2 if entry.dtype_name[1] == "c" else 1)
        for low in range(width // 2):
            high = width - 1 - low
            kept = bytes(target[low::width])
            target[low::width] = target[high::width]
            target[high::width] = kept
