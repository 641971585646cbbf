"""Datasets of HDF5 files, listed by h5py. Those that lie in the file in one piece are mapped, the others read."""

from __future__ import annotations

import functools
from typing import Any

from dlx._core.foreign import exception_text
from dlx._core.native import Tensor
from dlx._core.text import one_line
from dlx._files.header import AGAIN, MAX_NDIM, Contents, File, Stored, needed
from dlx._files.npy import of_descr
from dlx._protocols.memory import array_interface
from dlx.errors import FileError

__all__ = ["read_hdf5"]


def read_hdf5(file: File) -> Contents:
    """List the datasets of an HDF5 file; names are paths inside of it."""
    h5py = needed("h5py", "HDF5")
    try:
        opened = h5py.File(file.path, "r")
    except Exception as error:
        raise _damaged(error) from error
    entries: list[Stored] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            entries.append(_dataset(h5py, file, name, item))

    try:
        opened.visititems(visit)
    except FileError:
        opened.close()
        raise
    except Exception as error:
        opened.close()
        raise _damaged(error) from error
    return Contents("HDF5", entries, close=opened.close)


def _damaged(error: Exception) -> Exception:
    if isinstance(error, MemoryError):
        return error
    return FileError(f"h5py cannot read it: {one_line(exception_text(error, 200), 260)}", fix=AGAIN)


def _dataset(h5py: Any, file: File, name: str, item: Any) -> Stored:
    try:
        dtype = item.dtype
    except (TypeError, ValueError) as error:
        return Stored(name, None, "?", None, None, refused=f"h5py has no dtype for it: {one_line(str(error), 120)}")
    if item.shape is None:
        return Stored(name, None, str(dtype), None, None, refused="it is null, without shape and elements")
    if dtype.hasobject:
        return Stored(
            name, None, str(dtype), item.shape, None, refused="its elements vary in length, or are references"
        )
    if item.external or item.is_virtual:
        return Stored(name, None, str(dtype), item.shape, None, refused="its elements are in other files")
    entry = of_descr(name, dtype.str if dtype.names is None else dtype.descr, item.shape, "C", None)
    if entry.refused or len(item.shape) > MAX_NDIM:
        return entry
    start = item.id.get_offset()
    in_file = item.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True))  # else h5py converts on the way
    notes = [] if in_file else ["stored as another type"]
    notes += ["in the other byte order"] if entry.swapped else []
    notes += ["in chunks"] if item.chunks is not None else []
    notes += [f"compressed ({one_line(item.compression, 20)})"] if item.compression else []
    if not notes and start is not None and item.id.get_storage_size() == entry.nbytes:
        if start + (entry.nbytes or 0) > file.size:
            raise FileError(f"it is cut off: {one_line(name, 80)!r} ends after the file", fix=AGAIN)
        return entry._replace(offset=start)
    told = tuple(notes) or ("not in the file in one piece",)
    return entry._replace(notes=told, load=functools.partial(_read, item))


def _read(item: Any, entry: Stored, data: memoryview) -> Tensor:
    try:
        array = item.astype(item.dtype.newbyteorder("="))[...]
    except Exception as error:
        raise _damaged(error) from error
    return array_interface(array, array.__array_interface__)
