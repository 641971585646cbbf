"""Entries of arrays whose dtype is written as numpy's: in .npy, .npz, HDF5 and Zarr files."""

from __future__ import annotations

import math
import re
from typing import Any

from dlx._core.array_protocol import NUMBERS
from dlx._files.header import MAX_BYTES, MAX_NDIM, Stored, are_extents, check_names
from dlx._support.text import one_line
from dlx.errors import FileError

_DESCR = re.compile(r"([<>|=]?)([biufcSUVOmM])(\d{0,18})(\[.*\])?")
_REFUSED = {
    "S": "DLPack has no text",
    "U": "DLPack has no text",
    "V": "raw bytes, such as bfloat16 without its name: dlx.open(path, raw='bfloat16') says what they are",
    "O": "it contains pickled Python objects",
    "m": "DLPack has no durations: .view('int64') after loading",
    "M": "DLPack has no dates: .view('int64') after loading",
}


def entry_from_descr(name: str, descr: Any, shape: tuple[int, ...], order: str, offset: int | None) -> Stored:
    """Return the entry for an array, given its ``numpy.dtype.descr`` or ``.str``."""
    if not isinstance(descr, str):
        return _describe_structure(name, descr, shape, order, offset)
    match = _DESCR.fullmatch(descr)
    if match is None or (match[2] != "O" and not match[3]):
        raise FileError(f"its header has the invalid dtype {one_line(descr, 40)!r}")
    letter, width = match[2], int(match[3] or 0)
    itemsize = 4 * width if letter == "U" else width
    nbytes = None if letter == "O" else math.prod(shape) * itemsize
    dtype = NUMBERS.get(f"{letter}{width}")
    refused = "" if dtype else _REFUSED.get(letter, f"DLPack has no dtype for {descr!r}")
    swapped = match[1] == ">" and itemsize > 1 and dtype is not None
    word = "object" if letter == "O" else dtype.name if dtype is not None and not swapped else descr
    return Stored(name, dtype, word, shape, nbytes, order, offset, swapped, refused)


def entry_from_dtype(name: str, dtype: Any, shape: tuple[int, ...]) -> Stored:
    """Return the entry for an array that a library decodes, given its ``numpy.dtype``."""
    if max(shape, default=0) >= MAX_BYTES:  # more than DLPack's extents can be
        return Stored(name, None, str(dtype), None, None, refused=f"its shape is damaged: {one_line(str(shape), 80)}")
    if dtype.names is not None:
        dtype = dtype[sorted(dtype.names, key=lambda field: dtype.fields[field][1])]
    return entry_from_descr(name, dtype.str if dtype.names is None else dtype.descr, shape, "C", None)


def _describe_structure(name: str, descr: Any, shape: tuple[int, ...], order: str, offset: int | None) -> Stored:
    """Return the entry for records; the offset of a field counts from the start of a record."""
    fields, width = [], 0
    try:
        for word, kind, *inner in descr:
            kind = kind[0] if isinstance(kind, tuple) else kind  # without numpy's metadata
            word, extents = word[-1] if isinstance(word, tuple) else word, tuple(*inner)
            if type(word) is not str or not are_extents(extents) or len(shape) + len(extents) >= MAX_NDIM:
                raise ValueError
            field = entry_from_descr(word, kind, extents, "C", width)
            if field.nbytes is None:  # then the records are pickled, too
                return Stored(name, None, "object", shape, None, order, offset, refused=field.refused)
            fields += [field] if field.name else []
            width += field.nbytes
        check_names([field.name for field in fields])
        if width >= MAX_BYTES:
            raise ValueError
    except (TypeError, ValueError, IndexError) as error:
        raise FileError("its header has an invalid structure") from error
    refused = f"DLPack has no structures (fields: {one_line(', '.join(each.name for each in fields), 60)})"
    nbytes = math.prod(shape) * width
    return Stored(name, None, "structure", shape, nbytes, order, offset, refused=refused, fields=tuple(fields))
