"""Headers of .safetensors files, and indices of checkpoints in several of them.

The format is that of the safetensors README; an index is the JSON file that transformers and diffusers write.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlx._core.types import DType
from dlx._files.header import (
    AGAIN,
    MAX_BYTES,
    MAX_NDIM,
    Contents,
    File,
    StoredArray,
    check_names,
    check_order,
    read_exactly,
)
from dlx._support.text import amount, one_line
from dlx.errors import FileError

__all__ = ["DTYPE_NAMES", "INDEX", "find_index", "read_index", "read_safetensors"]

INDEX = ".safetensors.index.json"
MAX_HEADER = 16 << 20  # bytes of a header or an index; 100 000 tensors need some 12 MiB

_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn", "F4": "float4_e2m1fn",
}  # fmt: skip
_DTYPES = {word: DType(name) for word, name in _NAMES.items()}
DTYPE_NAMES = {dtype: word for word, dtype in _DTYPES.items()}
"""The format's name of each dtype that it has."""


def read_safetensors(file: File) -> Contents:
    """Read the header of a .safetensors file and hold its offsets against the file's size."""
    size = file.size
    length = int.from_bytes(read_exactly(file.handle, 8), "little")
    if length > size - 8:
        claims = f"its header claims {amount(length)}, and the file holds {amount(size)}"
        raise FileError(f"it is cut off, or no .safetensors file: {claims}")
    if length > MAX_HEADER:
        raise FileError(f"its header claims {amount(length)}, and dlx reads at most {amount(MAX_HEADER)}")
    header = _parse_json(read_exactly(file.handle, length), "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FileError("the metadata in its header is no table")
    start = 8 + length
    entries = [_build_entry(name, stated, start) for name, stated in header.items()]
    end = check_order(entries, start, gaps=False)
    if end > size:
        raise FileError(f"it is cut off: its tensors need {end:,} bytes, and the file holds {size:,}", fix=AGAIN)
    if end < size:
        raise FileError(f"{size - end:,} bytes follow its last tensor, which the format forbids")
    return Contents(".safetensors", entries, {key: str(value) for key, value in metadata.items()})


def _parse_json(raw: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(raw, object_pairs_hook=_check_unique)
    except FileError:
        raise
    except RecursionError:
        raise FileError(f"its {what} is nested too deep for a description of tensors") from None
    except ValueError as error:  # of a number with thousands of digits, too
        raise FileError(f"its {what} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise FileError(f"its {what} is JSON, but not a description of tensors")
    return found


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        check_names([name for name, _ in pairs])
    return found


def _build_entry(name: str, stated: Any, start: int) -> StoredArray:
    try:
        word, shape, (begin, end) = stated["dtype"], tuple(stated["shape"]), stated["data_offsets"]
        if not isinstance(word, str) or len(shape) > MAX_NDIM:
            raise ValueError
        for number in (*shape, begin, end):
            if type(number) is not int or not 0 <= number < MAX_BYTES:
                raise ValueError
        if end < begin:
            raise ValueError
    except (TypeError, ValueError, KeyError):
        raise FileError(f"its header describes {one_line(name, 80)!r} as no tensor can be") from None
    dtype = _DTYPES.get(word)
    if dtype is None:
        refused = f"dlx does not know the dtype {one_line(word, 20)!r}"
        return StoredArray(name, None, word, shape, end - begin, offset=start + begin, refused=refused)
    nbytes = -(-math.prod(shape) * dtype.bits // 8)
    if nbytes != end - begin:
        by_shape = f"{nbytes:,} bytes" if nbytes < MAX_BYTES else "more bytes than there are"
        found = f"{by_shape} by its shape and {end - begin:,} by its offsets"
        raise FileError(f"its header gives {one_line(name, 80)!r} {found}")
    return StoredArray(name, dtype, word, shape, nbytes, offset=start + begin)


# ---- several files ---------------------------------------------------------------------------------------------------


def find_index(folder: Path) -> Path:
    """Return the index of the checkpoint in a folder, or its only .safetensors file."""
    names = sorted(each.name for each in folder.iterdir())
    found = [name for name in names if name.endswith(INDEX)] or [n for n in names if n.endswith(".safetensors")]
    shard = re.fullmatch(r".*-(\d{5})-of-(\d{5})\.safetensors", found[0]) if len(found) == 1 else None
    if shard and int(shard[2]) > 1:
        lone = f"one file of {int(shard[2]):,}, {one_line(found[0], 120)!r}"
        reason = f"it is a folder that holds {lone}, without an index"
        raise FileError(reason, fix="Fetch the other files and the index, or name the file to open it alone.")
    if len(found) != 1:
        held = f"{len(found)} of them: {one_line(', '.join(found), 120)}" if found else "none"
        raise FileError(f"it is a folder: name files in it, or keep one *{INDEX} there; found {held}")
    return folder / found[0]


def read_index(file: File) -> tuple[Contents, dict[str, list[str]]]:
    """Return the contents that an index states, and the names of the tensors in each file of its folder."""
    if file.size > MAX_HEADER:
        raise FileError(f"it holds {amount(file.size)}, and dlx reads at most {amount(MAX_HEADER)}")
    index = _parse_json(read_exactly(file.handle, file.size), "text")
    places, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise FileError("it has no 'weight_map' that names a file for each tensor")
    shards: dict[str, list[str]] = {}
    for name, place in places.items():
        shards.setdefault(place, []).append(name)
    for place in shards:
        if place in ("", ".", "..") or "/" in place or "\0" in place or not place.endswith(".safetensors"):
            raise FileError(f"it names {one_line(place, 80)!r}, which is not a .safetensors file in its folder")
    said = {key: str(value) for key, value in metadata.items()} if isinstance(metadata, Mapping) else {}
    return Contents(INDEX, (), said, (f"in {len(shards)} files",)), shards
