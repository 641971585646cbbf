"""Reader of HDF5 files, with h5py: contiguous datasets are memory-mapped, others are read with a copy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from math import prod
from typing import Any

from dlx._core import native
from dlx._core.native import Tensor
from dlx._core.types import HOST
from dlx._files.descr import entry_from_dtype
from dlx._files.header import (
    AGAIN,
    Contents,
    File,
    Named,
    Stored,
    by_name,
    import_reader,
    is_sibling,
    naming_reader,
    reader_error,
)
from dlx._files.signatures import HDF5
from dlx._support.text import amount, one_line
from dlx.errors import FileError

MAX_CHUNKS = 1 << 24  # of an array; libraries look for each, also if few are stored


def read_hdf5(file: File) -> Contents:
    """List the members of an HDF5 file; names are paths in the file."""
    h5py = import_reader("h5py", "HDF5")
    members = [""]
    with naming_reader("h5py"), contextlib.ExitStack() as stack:
        opened = stack.enter_context(h5py.File(file.path if file.data is None else file.reopen(), "r"))
        _check_end(file, opened.userblock_size)
        entries = by_name(_walk(h5py, file, opened, members))
        stack.pop_all()
    return Contents("HDF5", entries, _Attributes(opened, members), close=opened.close)


def _check_end(file: File, start: int) -> None:
    """Raise `FileError` if another HDF5 file follows the first one, whose superblock is at `start`."""
    block = file.read_at(64, start)
    width, at = (block[13], 28 if block[8] else 24) if block[8] < 2 else (block[9], 12)  # by the version
    base, _, end = (int.from_bytes(block[at + i * width :][:width], "little") for i in range(3))
    if file.read_at(len(HDF5), start + end - base) == HDF5:
        raise FileError("it contains several HDF5 files, one after the other", fix="Split it into separate files.")


def _walk(h5py: Any, file: File, root: Any, members: list[str]) -> Iterator[Stored]:
    """Yield an entry for each name in the file, and add it to `members`; a group is entered under its first name."""
    groups = {root: "/"}
    waiting = [("", root, iter(root))]
    while waiting:
        at, group, keys = waiting[-1]
        key = next(keys, None)
        if key is None:
            waiting.pop()
            continue
        name = f"{at}{key}"
        try:
            entry, item = _open_member(h5py, file, name, group, key)
            if isinstance(item, h5py.Group):
                if item in groups:
                    reason = f"it is another name of the group {one_line(groups[item], 80)!r}"
                    entry = _refuse(name, "group", reason, fix="Read the arrays under the group's first name.")
                else:
                    groups[item] = f"/{name}"
                    waiting.append((f"{name}/", item, iter(item)))
            if item is not None:
                members.append(name)
        except Exception as error:  # damaged, or unknown to this h5py
            failure = reader_error("h5py", error)
            if isinstance(error, FileError) or not isinstance(failure, FileError):
                raise
            entry = _refuse(name, "?", failure.reason)
        if entry is not None:
            yield entry


def _open_member(h5py: Any, file: File, name: str, group: Any, key: str) -> tuple[Stored | None, Any]:
    """Open a member of a group; return its entry (None for a group) and the member (None if it cannot be opened)."""
    link = group.get(key, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        return _refuse(name, "link", f"it is a link to another file, {one_line(link.filename, 80)!r}"), None
    if isinstance(link, h5py.SoftLink):
        access = h5py.h5p.create(h5py.h5p.LINK_ACCESS)
        access.set_nlinks(1)  # only this link: further ones may lead to any file on the machine
        place = one_line(link.path, 80)
        try:
            found = h5py.h5o.open(group.id, key.encode("utf-8", "surrogateescape"), lapl=access)
        except (KeyError, OSError):
            reason = f"it is a link to {place!r}, which is missing, or behind another link"
            return _refuse(name, "link", reason), None
        if isinstance(found, h5py.h5g.GroupID):  # the group is listed under its own name
            fix = "Read the arrays under the group's own name."
            return _refuse(name, "link", f"it is a link to the group {place!r}", fix=fix), None
        item = h5py.Dataset(found) if isinstance(found, h5py.h5d.DatasetID) else h5py.Datatype(found)
    else:
        item = group[key]
    if isinstance(item, h5py.Dataset):
        return _describe_dataset(h5py, file, name, item), item
    return (None if isinstance(item, h5py.Group) else _refuse(name, "type", "it is a named type, without data")), item


class _Attributes(Named):
    """The attributes of the members of a file, listed and read when they are used."""

    def __init__(self, root: Any, members: list[str]) -> None:
        self._root, self._members = root, members

    def _read(self, member: str) -> Any:
        if not self._root:
            raise FileError("it is closed, so its attributes cannot be read", fix="Open it again.")
        return self._root[member or "/"].attrs

    @functools.cached_property
    def _names(self) -> dict[str, tuple[str, str]]:  # type: ignore[override]
        with naming_reader("h5py"):
            return {f"{at}@{key}" if at else key: (at, key) for at in self._members for key in self._read(at)}

    def __getitem__(self, name: str) -> Any:
        member, key = self._names[name]
        try:
            return _to_builtin(self._read(member)[key])
        except (MemoryError, FileError):
            raise
        except Exception:  # numpy lacks the type
            return _to_builtin(None)


def _to_builtin(value: Any) -> Any:
    if getattr(value, "shape", ()) is None and value.dtype.kind == "S":  # an empty text of PyTables
        return ""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_to_builtin(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str | bool | int | float | complex) else "(unsupported value)"


def _refuse(name: str, word: str, reason: str, shape: Any = None, fix: str = "") -> Stored:
    return Stored(name, None, word, shape, None, refused=reason, fix=fix)


def _describe_dataset(h5py: Any, file: File, name: str, item: Any) -> Stored:
    try:
        dtype = item.dtype
    except (TypeError, ValueError) as error:
        return _refuse(name, "?", f"numpy has no dtype for it: {one_line(str(error), 120)}")
    if item.shape is None:
        return _refuse(name, str(dtype), "it is null: it has no shape and no elements")
    if dtype.hasobject:
        return _refuse(name, str(dtype), "its elements have variable length, or are references", item.shape)
    if item.external or (item.is_virtual and not _has_plain_sources(h5py, file, item)):
        fix = f"Read it with h5py: h5py.File(path)[{name!r}][...]."
        return _refuse(name, str(dtype), "its elements are in other files", item.shape, fix)
    entry = entry_from_dtype(name, dtype, item.shape)
    plist, start, nbytes = item.id.get_create_plist(), item.id.get_offset(), item.id.get_storage_size()
    filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    for code, _, _, word in filters if nbytes else ():  # an empty dataset needs no filter
        if not h5py.h5z.filter_avail(code):
            filter_name = one_line(word.decode("utf-8", "replace"), 60)
            reason = f"it needs the filter {code} ({filter_name}), which is not loaded"
            return _refuse(name, entry.dtype_name, reason, item.shape, "Install and import hdf5plugin.")
    if not nbytes and entry.nbytes and "This is a netCDF dimension but not" in str(item.attrs.get("NAME")):
        return _refuse(name, "dimension", f"it is a netCDF dimension of {item.shape[0]:,}, without values", item.shape)
    in_file = item.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True))  # else h5py converts while reading
    notes = [] if in_file else ["stored as another type"]
    notes += ["in the other byte order"] if entry.swapped else []
    notes += ["in chunks"] if item.chunks is not None else []
    notes += ["virtual"] if item.is_virtual else []
    notes += [f"compressed ({one_line(item.compression, 20)})"] if item.compression else []
    if not notes and start is not None and nbytes == entry.nbytes:
        if start + (entry.nbytes or 0) > file.size:
            raise FileError(f"it is truncated: {one_line(name, 80)!r} ends after the file", fix=AGAIN)
        return entry._replace(offset=start)
    notes = notes or ["not contiguous in the file"]
    return entry._replace(notes=tuple(notes), load=functools.partial(read_array, item, "h5py"))


def _has_plain_sources(h5py: Any, file: File, item: Any) -> bool:
    """Return whether a virtual dataset consists of datasets in this file, or in files of the same folder."""
    for source in item.virtual_sources():
        is_here, place = source.file_name == ".", file.path.parent / source.file_name
        if not is_here and (file.data is not None or not is_sibling(source.file_name) or not place.is_file()):
            return False
        with contextlib.nullcontext(item.file) if is_here else h5py.File(place, "r") as opened:
            found = opened
            for key in source.dset_name.strip("/").split("/"):
                is_plain = isinstance(found, h5py.Group) and isinstance(found.get(key, getlink=True), h5py.HardLink)
                if not is_plain:
                    return False
                found = found[key]
            if not isinstance(found, h5py.Dataset) or found.external or found.is_virtual:
                return False
    return True


def read_array(source: Any, package: str, entry: Stored, _: object) -> Tensor:
    """Read a numpy array with a library, and return its bytes as the entry describes them."""
    assert entry.dtype is not None and entry.shape is not None
    count = prod(-(-n // size) for n, size in zip(source.shape, source.chunks or source.shape, strict=True) if size)
    if count > MAX_CHUNKS:
        fix = f"Read a part with {package}, or save it in larger chunks."
        raise FileError(f"it has {count:,} chunks; dlx reads at most {MAX_CHUNKS:,}", fix=fix)
    try:
        array = source[...]
        native_dtype = array.dtype if array.dtype.kind == "V" else array.dtype.newbyteorder("=")
        array = array.astype(native_dtype, order="C", copy=False).reshape(-1).view("u1")
        if array.nbytes != entry.nbytes:
            raise ValueError("it changed while dlx read it")
    except MemoryError as error:
        shape = one_line(str(list(source.shape)), 80)
        reason = f"cannot allocate {amount(entry.nbytes or 0)} for {one_line(entry.name, 80)!r}, whose shape is {shape}"
        raise MemoryError(reason) from error
    except Exception as error:
        raise reader_error(package, error) from error
    from dlx._protocols.memory import array_interface

    tensor = array_interface(array, array.__array_interface__)
    return native.tensor_new(tensor.data_ptr, entry.shape, None, entry.dtype, HOST, 0, tensor)
