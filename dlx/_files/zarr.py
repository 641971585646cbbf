"""Reader of Zarr stores in local folders, with zarr: arrays are decoded when they are used."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlx._files.descr import entry_from_dtype
from dlx._files.hdf5 import read_array
from dlx._files.header import Contents, File, Stored, import_reader, reader_error
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
        name = "" if folder == str(store) else Path(folder).relative_to(store).as_posix()
        if not any(each in names for each in ZARR):
            continue
        try:
            node = zarr.open(folder, mode="r")
            if not name:
                metadata = dict(node.attrs)
            if isinstance(node, zarr.Array):
                found[name] = _describe(name, node)
                folders.clear()  # of chunks
        except Exception as error:  # a damaged store can cause any exception
            failure = reader_error("zarr", error)
            if not name or not isinstance(failure, FileError):
                raise failure from error
            found[name] = Stored(name, None, "?", None, None, refused=failure.reason)
    return Contents("zarr", dict(sorted(found.items())), metadata)


def _describe(name: str, array: Any) -> Stored:
    entry = entry_from_dtype(name, array.dtype, tuple(array.shape))
    known = array.metadata.to_dict()
    codecs = [*_list_codecs([known.get(key) for key in ("codecs", "filters", "compressor")])]
    refused = {*codecs} - _CODECS
    if codecs.count("blosc") != sum(map(_guard_blosc, _list_objects(array.metadata))):  # another implementation
        refused.add("blosc")
    if refused:
        word = one_line(min(refused), 40)
        return entry._replace(dtype=None, refused=f"it needs the codec {word!r}, which dlx does not allow")
    return entry._replace(notes=("in chunks",), load=functools.partial(read_array, array, "zarr"))


def _list_objects(holder: Any) -> Iterator[Any]:
    """Yield the codecs of an array's metadata, and those inside of shards."""
    for key in ("codecs", "index_codecs", "filters"):
        for codec in getattr(holder, key, None) or ():
            yield codec
            yield from _list_objects(codec)
    yield getattr(holder, "compressor", None)


def _guard_blosc(codec: Any) -> bool:
    """Return whether a codec is Blosc's; it then checks the length in each chunk, which c-blosc trusts."""
    codec = getattr(codec, "_blosc_codec", codec)  # the codec of numcodecs in one of Zarr 3
    if getattr(codec, "codec_id", "") != "blosc":
        return False
    decode = codec.decode

    def check(chunk: Any, *out: Any) -> Any:
        data = memoryview(chunk).cast("B")
        if int.from_bytes(data[12:16], "little") != data.nbytes:
            raise ValueError("a chunk that Blosc compressed is damaged")
        return decode(chunk, *out)

    codec.decode = check
    return True


def _list_codecs(value: Any) -> Iterator[str]:
    """Yield the names of the codecs in the metadata of an array."""
    if isinstance(value, dict):
        yield from (str(value[key]) for key in ("name", "id") if key in value)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _list_codecs(each)
