"""Reader of Zarr stores in local folders, with zarr: arrays are decoded when they are used."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlx._core.native import Tensor
from dlx._files.descr import entry_from_dtype
from dlx._files.hdf5 import read_array
from dlx._files.header import AGAIN, Contents, File, Stored, import_reader, reader_error
from dlx._files.safetensors import ZARR
from dlx._support.text import one_line
from dlx.errors import FileError

_CODECS = {
    *("blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "endian", "fixedscaleoffset", "gzip", "lz4", "lzma"),
    *("sharding_indexed", "shuffle", "transpose", "zlib", "zstd"),
}
"""Codecs that decode numbers; others, such as pickle, may run code."""


def read_zarr(file: File) -> Contents:
    """List the arrays of the store in a file's folder; the names are paths in it. A damaged array is refused alone."""
    zarr = import_reader("zarr", "zarr")
    store = file.path.parent
    found: dict[str, Stored] = {}
    metadata: dict[str, Any] = {}
    for folder, folders, names in os.walk(store):
        name = Path(folder).relative_to(store).as_posix().removeprefix(".")
        if not any(each in names for each in ZARR):
            continue
        try:
            node = zarr.open(folder, mode="r")
            if not name:
                metadata = dict(node.attrs)
            if isinstance(node, zarr.Array):
                found[name] = _describe(name, node, Path(folder))
                folders.clear()  # of chunks
        except Exception as error:  # a damaged store can cause any exception
            failure = reader_error("zarr", error)
            if not name or not isinstance(failure, FileError):
                raise failure from error
            found[name] = Stored(name, None, "?", None, None, refused=failure.reason)
    return Contents("zarr", dict(sorted(found.items())), metadata)


def _describe(name: str, array: Any, folder: Path) -> Stored:
    entry = entry_from_dtype(name, array.dtype, tuple(array.shape))
    known = array.metadata.to_dict()
    codecs = {*_list_codecs([known.get(key) for key in ("codecs", "filters", "compressor")])}
    if not codecs <= _CODECS:
        word = one_line(min(codecs - _CODECS), 40)
        return entry._replace(dtype=None, refused=f"it needs the codec {word!r}, which dlx does not allow")
    last = known.get("compressor") or [{}, *known.get("codecs", ())][-1]
    is_blosc = "blosc" in (last.get("id"), last.get("name"))
    return entry._replace(
        notes=("in chunks",), load=functools.partial(_read_chunks, array, folder if is_blosc else None)
    )


def _read_chunks(array: Any, folder: Path | None, entry: Stored, data: object) -> Tensor:
    """Read an array, after a check of the length in each chunk of Blosc's, which numcodecs trusts."""
    for each in folder.rglob("*") if folder else ():
        if each.is_file() and each.name not in (*ZARR, ".zattrs"):
            with File(each) as chunk:
                if int.from_bytes(chunk.read_at(4, 12), "little") != chunk.size:
                    raise FileError(f"its chunk {one_line(each.name, 40)!r} is damaged", fix=AGAIN)
    return read_array(array, "zarr", entry, data)


def _list_codecs(value: Any) -> Iterator[str]:
    """Yield the names of the codecs in the metadata of an array."""
    if isinstance(value, dict):
        yield from (str(value[key]) for key in ("name", "id") if key in value)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _list_codecs(each)
