"""Parsers of .safetensors headers, and of the index of a checkpoint in several files.

The format is documented in the safetensors README; an index is the JSON file that transformers and diffusers write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlx._core.types import DType
from dlx._files.header import (
    AGAIN,
    MAX_BYTES,
    SPLIT,
    Contents,
    File,
    Named,
    Stored,
    are_extents,
    check_names,
    check_order,
    is_sibling,
    read_next,
)
from dlx._support.text import amount, one_line
from dlx.errors import FileError

INDEX = ".safetensors.index.json"
BIN_INDEX = ".bin.index.json"  # of torch checkpoints
DCP = ".metadata"  # of torch.distributed.checkpoint
ZARR = ("zarr.json", ".zgroup", ".zarray")  # the metadata of a store
MAX_HEADER = 128 << 20  # bytes of a header or an index; a million tensors need about 120 MiB
_SHIFT = 24  # bits of the number of a kind, more than the tensors in the largest header
_KINDS = (1 << _SHIFT) - 1

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
"""The format's names of dtypes."""


def read_safetensors(file: File) -> Contents:
    """Read the header of a .safetensors file and check its offsets against the file's size."""
    size = file.size
    length = int.from_bytes(read_next(file.handle, 8), "little")
    if length > size - 8:
        claims = f"its header claims {amount(length)}, the file has {amount(size)}"
        raise FileError(f"it is truncated, or not a .safetensors file: {claims}")
    if length > MAX_HEADER:
        raise FileError(f"its header claims {amount(length)}; dlx reads at most {amount(MAX_HEADER)}", fix=SPLIT)
    packed = _Packed(8 + length, read_next(file.handle, length))
    end = packed.find_end()
    if end > size:
        raise FileError(f"it is truncated: its tensors need {end:,} bytes, the file has {size:,}", fix=AGAIN)
    if end < size:
        raise FileError(f"{size - end:,} bytes follow its last tensor, which the format forbids")
    return Contents(".safetensors", packed, packed.metadata)


class _Place(int):
    """The place of a tensor in the file: its offset, shifted by `_SHIFT`, and the number of its kind."""

    __slots__ = ()


class _Packed(Named):
    """The tensors of a header. Besides its name, each takes a number: its offset and its kind, a dtype and a shape."""

    def __init__(self, start: int, raw: bytes) -> None:
        self._start = start
        self._kinds: list[Stored] = []
        numbers: dict[Any, int] = {}

        def place(word: Any, shape: Any, begin: int, end: int, name: str = "") -> _Place:
            key = word, end - begin, *shape  # true is 1, also in a shape
            if not 0 <= begin < MAX_BYTES:
                raise ValueError
            if key not in numbers:
                self._kinds.append(_build_entry(name, word, shape, begin, end, self._start))
                numbers[key] = len(numbers)
            return _Place(begin << _SHIFT | numbers[key])

        def pack(pairs: list[tuple[str, Any]]) -> Any:
            """Return the place of a tensor in the usual form, without a dict for it."""
            try:
                (one, word), (two, shape), (three, (begin, end)) = pairs
                if one == "dtype" and two == "shape" and three == "data_offsets":
                    return place(word, shape, begin, end)
            except (TypeError, ValueError):  # also a FileError, whose text needs the name
                pass
            return _check_unique(pairs)

        header = _parse_json(raw, "header", pack)
        metadata = header.pop("__metadata__", {})
        for name, stated in header.items():
            if type(stated) is not _Place:
                try:
                    begin, end = stated["data_offsets"]
                    header[name] = place(stated["dtype"], stated["shape"], begin, end, name)
                except FileError:
                    raise
                except (TypeError, ValueError, KeyError):
                    raise FileError(f"its header has an invalid entry for {one_line(name, 80)!r}") from None
        if not isinstance(metadata, dict):
            raise FileError("the metadata in its header is not a JSON object")
        self._names: dict[str, _Place] = header
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def find_end(self) -> int:
        """Return the end of the last tensor; raise `FileError` if two overlap, or leave a gap."""
        at, sizes = 0, [each.nbytes or 0 for each in self._kinds]
        for place in self._names.values():
            if place >> _SHIFT != at:  # not in order
                return check_order(self.values(), self._start, gaps=False)
            at += sizes[place & _KINDS]
        return self._start + at

    def __getitem__(self, name: str) -> Stored:
        place = self._names[name]
        return self._kinds[place & _KINDS]._replace(name=name, offset=self._start + (place >> _SHIFT))


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        check_names([name for name, _ in pairs])
    return found


def _parse_json(raw: bytes, what: str, hook: Callable[[list[tuple[str, Any]]], Any] = _check_unique) -> dict[str, Any]:
    try:
        import json

        found = json.loads(raw.decode(), object_pairs_hook=hook)
    except FileError:
        raise
    except RecursionError:
        raise FileError(f"its {what} is nested too deeply to describe tensors") from None
    except ValueError as error:  # also for a number with thousands of digits
        raise FileError(f"its {what} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise FileError(f"its {what} is JSON, but does not describe tensors")
    return found


def _build_entry(name: str, word: Any, shape: Any, begin: Any, end: Any, start: int) -> Stored:
    if not isinstance(word, str) or type(shape) is not list or not are_extents(shape):
        raise ValueError
    if not are_extents((begin, end)) or end < begin:
        raise ValueError
    shape = tuple(shape)
    dtype = _DTYPES.get(word)
    if dtype is None:
        refused = f"dlx does not know the dtype {one_line(word, 20)!r}"
        return Stored(name, None, word, shape, end - begin, offset=start + begin, refused=refused)
    nbytes = -(-math.prod(shape) * dtype.bits // 8)
    if nbytes != end - begin:
        by_shape = f"{nbytes:,} bytes" if nbytes < MAX_BYTES else "too many bytes"
        found = f"{by_shape} by its shape, {end - begin:,} by its offsets"
        raise FileError(f"its header contradicts itself about {one_line(name, 80)!r}: {found}")
    return Stored(name, dtype, word, shape, nbytes, offset=start + begin)


# ---- several files ---------------------------------------------------------------------------------------------------


def find_index(folder: Path) -> Path:
    """Return the file that describes the checkpoint in a folder: an index, a first shard, or the only file."""
    names = sorted(each.name for each in folder.iterdir())
    found = [name for name in (DCP, *ZARR) if name in names][:1] or [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if not found and files and set(files) == set(list_shards(files[0])):
        return folder / files[0]
    found = found or files or [name for name in names if name.endswith(BIN_INDEX)]
    found = found or [name for name in names if name == "pytorch_model.bin"]
    shards = list_shards(found[0]) if len(found) == 1 else ()
    if len(shards) > 1:
        reason = f"it is a folder with one of {len(shards):,} files, {one_line(found[0], 120)!r}, but no index"
        raise FileError(reason, fix="Download the other files and the index, or pass the path of this file.")
    if len(found) != 1:
        text = f"{len(found)} candidates: {one_line(', '.join(found), 120)}" if found else "no such file"
        raise FileError(f"it is a folder, and dlx expects one *{INDEX} in it; found {text}", fix="Pass a file's path.")
    return folder / found[0]


def list_shards(name: str) -> Sequence[str]:
    """Return the names of all files of a checkpoint, by the name of one: ``model-00001-of-00003.safetensors``."""
    match = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)", name)
    count = int(match[3]) if match else 0
    return [f"{match[1]}{i:05}-of-{match[3]}{match[4]}" for i in range(1, count + 1)] if match else [name]


def read_index(file: File) -> tuple[Contents, dict[str, list[str]]]:
    """Read an index; return its contents, and the names of the tensors in each file."""
    if file.size > MAX_HEADER:
        raise FileError(f"it has {amount(file.size)}; dlx reads at most {amount(MAX_HEADER)}", fix=SPLIT)
    index = _parse_json(read_next(file.handle, file.size), "text")
    places, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise FileError("it has no 'weight_map' that names a file for each tensor")
    shards: dict[str, list[str]] = {}
    for name, place in places.items():
        shards.setdefault(place, []).append(name)
    for place in shards:
        suffix = ".bin" if file.path.name.endswith(BIN_INDEX) else ".safetensors"
        if not is_sibling(place) or not place.endswith(suffix):
            raise FileError(f"it lists {one_line(place, 80)!r}, which is not a {suffix} file in its folder")
    texts = {key: str(value) for key, value in metadata.items()} if isinstance(metadata, Mapping) else {}
    return Contents(INDEX, {}, texts, (f"in {len(shards)} files",)), shards
