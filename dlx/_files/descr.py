"""Entries of arrays whose dtype is written as numpy's: in .npy and HDF5 files."""

from __future__ import annotations

import math
import re
from typing import Any

from dlx._core.array_protocol import NUMBERS
from dlx._files.header import Stored
from dlx._support.text import one_line
from dlx.errors import FileError

__all__ = ["entry_from_descr"]

_DESCR = re.compile(r"([<>|=]?)([biufcSUVOmM])(\d{0,18})(\[.*\])?")
_REFUSED = {
    "S": "DLPack has no text",
    "U": "DLPack has no text",
    "V": "raw bytes: load it, then .view the dtype that it was saved from (ml_dtypes do not save their names)",
    "O": "it contains pickled Python objects",
    "m": "DLPack has no durations: .view('int64') after loading",
    "M": "DLPack has no dates: .view('int64') after loading",
}


def entry_from_descr(name: str, descr: Any, shape: tuple[int, ...], order: str, offset: int | None) -> Stored:
    """Return the entry for an array, given its ``numpy.dtype.descr`` or ``.str``."""
    if not isinstance(descr, str):
        fields = [str(each[0]) for each in descr if isinstance(each, tuple) and each]
        refused = f"DLPack has no structures (fields: {one_line(', '.join(fields), 60)})"
        member = f"[{name!r}]" if name else ""
        fix = f"Read its fields with numpy: numpy.load(path){member}[{fields[0]!r}]." if fields else ""
        return Stored(name, None, "structure", shape, None, order, offset, refused=refused, fix=fix)
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
