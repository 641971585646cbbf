"""Detection of a file's format by its first bytes, and the choice of its reader."""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlx._files.header import SAFE, Contents, File, Named, Stored, read_stream
from dlx._files.safetensors import BIN_INDEX, DCP, INDEX, ZARR, find_index, list_shards, read_index, read_safetensors
from dlx._files.signatures import HDF5, SIGNATURE_BYTES, SUPPORTED, identify_file, identify_folder
from dlx._support.reflect import type_name
from dlx._support.text import one_line
from dlx.errors import DlxError, FileError

LIBRARY_KINDS = (".pt", ".arrow", ".parquet", BIN_INDEX, DCP)
"""Formats that another library reads."""

MAX_NAME = 255  # bytes of a file's name
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_KINDS = {
    ".npy": ".npy", ".npz": ".npz", ".safetensors": ".safetensors", ".gguf": ".gguf", ".h5": "HDF5", ".hdf5": "HDF5",
    ".arrow": ".arrow", ".arrows": ".arrow", ".feather": ".arrow", ".parquet": ".parquet",
}  # fmt: skip
SUFFIXES = (*_KINDS, *_TORCH_SUFFIXES[:-1])
"""Suffixes of supported files; ``.bin`` is left out, since it is used for any content."""


def find_source(obj: Any) -> tuple[Path | memoryview, str]:
    """Return the path that an object is, or the contents of bytes and of a binary file object with their name."""
    if isinstance(obj, str | os.PathLike) or (isinstance(obj, bytes) and not _is_contents(obj)):
        name = os.fsdecode(obj)
        if not name:  # Path("") is the current folder
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return Path(name), ""
    if callable(getattr(obj, "read", None)) and not isinstance(obj, mmap.mmap):
        return read_stream(obj), str(getattr(obj, "name", type_name(type(obj))))
    try:
        view = memoryview(obj)
    except TypeError:
        found = type_name(type(obj))
        raise TypeError(f"path must be a path, bytes, or a binary file object, found {found}") from None
    if not view.c_contiguous:
        raise TypeError(f"path is a {type_name(type(obj))} with gaps in its memory; pass bytes(...) of it")
    return view.cast("B") if view.nbytes else memoryview(b""), type_name(type(obj))


def _is_contents(data: bytes) -> bool:
    """Return whether bytes are the contents of a file, by its signature, or because no path is like them."""
    signatures = (*SUPPORTED, b"PK\x03\x04", b"\x80")
    is_path = data and b"\0" not in data and max(map(len, data.split(b"/"))) <= MAX_NAME
    return data.startswith(signatures) or not is_path


@contextmanager
def open_file(source: Path | memoryview, name: str = "") -> Iterator[File]:
    """Open a file, the index of the checkpoint in a folder, or contents in memory; errors name it."""
    try:
        folder = source if isinstance(source, Path) and source.is_dir() else None
        if folder is not None:
            if other := identify_folder(folder):
                raise other
            source = find_index(folder)
        with File(source, name) as file:
            file.has_shards = folder is not None and len(list_shards(file.path.name)) > 1
            yield file
    except DlxError as error:
        error.complete(source=name or str(source))
        raise


def detect_kind(file: File) -> str:
    """Return the format of a file by its first bytes, or by its name if these are ambiguous."""
    start, name, suffix = file.read_at(SIGNATURE_BYTES, 0), file.path.name, file.path.suffix
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ".pt" if _is_torch(file) else ".npz"
    kind = next((kind for magic, kind in SUPPORTED.items() if start.startswith(magic)), None)
    if kind is not None:
        return kind
    kind = "zarr" if name in ZARR else DCP if name == DCP else None
    kind = kind or next((end for end in (INDEX, BIN_INDEX) if name.endswith(end)), None)
    if kind is not None:
        if file.data is not None:
            raise FileError("it lists files in its folder, but these contents are in memory", fix="Pass a path.")
        return kind
    if start[:4] == b"\xff\xff\xff\xff" and 0 < int.from_bytes(start[4:8], "little") < file.size:
        return ".arrow"  # a stream
    if start[8:9] == b"{" and not any(start[4:8]):  # the length of the header, below 4 GiB, and its first byte
        return ".safetensors"
    # A user block of 512, 1,024, 2,048 and so on bytes may precede HDF5 data.
    if any(file.read_at(len(HDF5), 512 << i) == HDF5 for i in range(file.size.bit_length() - 9)):
        return "HDF5"
    if (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05") or suffix in (".pkl", ".pickle", ".joblib"):
        old = suffix in _TORCH_SUFFIXES
        fix = "Save it again: torch.save(torch.load(..., weights_only=True), ...)." if old else SAFE
        raise FileError("it is a pickle, which can run any code when it is read", fix=fix)
    if suffix == ".onnx":
        fix = "Read its weights: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer."
        raise FileError("it is an ONNX model, a program with its weights", fix=fix)
    if suffix == ".npz" and importlib.import_module("zipfile").is_zipfile(file.handle):  # a zip after other data
        return ".npz"
    if other := identify_file(start):
        raise other
    if suffix in _KINDS:  # the reader reports the error
        return _KINDS[suffix]
    reason = "unknown file format (supported: .npy, .npz, .safetensors, .gguf, .pt, .arrow, HDF5)"
    raise FileError(reason, fix="Convert it to one of these formats first.")


def _is_torch(file: File) -> bool:
    from dlx._files.npz import open_zip

    try:
        with open_zip(file) as archive:
            return any(each.endswith("/data.pkl") for each in archive.namelist())
    except FileError:
        return file.path.suffix in _TORCH_SUFFIXES


@contextmanager
def read_contents(file: File, kind: str) -> Iterator[tuple[list[File], Contents]]:
    """Read a file, or the files of a checkpoint; close these afterwards, and the file's reader after an error.

    Yield the files, by the number in each `Stored`, and their contents.
    """
    if kind != INDEX and not file.has_shards:
        word = kind.removeprefix(".").lower()
        contents: Contents = getattr(importlib.import_module(f"dlx._files.{word}"), f"read_{word}")(file)
        try:
            yield [file], contents
        except BaseException:
            contents.close()
            raise
        return
    files, metadata = list[File](), dict[str, Any]()
    with contextlib.ExitStack() as stack:

        def read(part: File) -> Mapping[str, Stored]:
            files.append(stack.enter_context(part))
            contents = read_safetensors(part)
            metadata.update({**contents.metadata, **metadata})
            return contents.entries

        index, entries = read_shards(file, read)
        yield files, Contents(INDEX, entries, {**metadata, **index.metadata}, index.notes)


def read_shards(file: File, read: Callable[[File], Any]) -> tuple[Contents, Named]:
    """Read the files of a checkpoint; ``read(file)`` returns the members of one. Return its index and all members."""
    index, shards = read_index(file) if file.path.name.endswith(".json") else (Contents(INDEX, {}), None)
    listed = {name for names in shards.values() for name in names} if shards else set()
    parts, places = list[Mapping[str, Any]](), dict[str, int]()
    for place in list_shards(file.path.name) if shards is None else shards:
        with naming_part(place):
            names = read(File(file.path.parent / place))
            parts.append(names if isinstance(names, Mapping) else {})
            wanted = parts[-1].keys() if shards is None else set(shards[place])
            missing = wanted - parts[-1].keys()
            if missing:
                raise FileError(f"it has no tensor {one_line(min(missing), 80)!r}, which its index lists")
        # Skip tensors that the index lists in another file: these are stale copies. Keep unlisted ones.
        for name in parts[-1]:
            if name not in wanted and name in listed:
                continue
            if places.setdefault(name, len(parts) - 1) != len(parts) - 1:
                raise FileError(f"two of its files contain {one_line(name, 80)!r}")

    def find(name: str, part: int) -> Any:
        found = parts[part][name]
        return found._replace(part=part) if part and type(found) is Stored else found

    return index, Named(places, find)


@contextmanager
def naming_part(place: str) -> Iterator[None]:
    """Name the file of a checkpoint in the errors of reading it."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{one_line(place, 80)}: {error.reason}", fix=error.fix) from None
    except (OSError, ValueError) as error:  # a name that no file can have
        why = getattr(error, "strerror", None) or error
        raise FileError(f"cannot open {one_line(place, 80)}, which it lists: {why}") from error
