"""Lazy mappings over saved files: `Archive`, the contents of a file, and `FileView`, the result of `dlx.open`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST, DType
from dlx._files.header import File, Memory, Named, Stored, copy_to_memory, name_dtype
from dlx._files.npy import list_leaves, select_entries, split_fields
from dlx._files.reading import LIBRARY_KINDS, detect_kind, find_source, open_file, read_contents, read_shards
from dlx._files.safetensors import BIN_INDEX, DCP
from dlx._files.selection import Names, match_names, select_tree
from dlx._registry.generic import Deferred
from dlx._views.mapping import MappingView
from dlx.adapter.declarations import Blocker
from dlx.errors import DTypeError, FileError

V = TypeVar("V")


def _open_array(stored: Stored | Mapping[str, Any], memories: Sequence[Memory], file: str) -> Any:
    """Return a read-only tensor over a file's memory, or a `Deferred` that copies or refuses the array."""
    if not isinstance(stored, Stored) or stored.fields:
        fields = split_fields(stored) if isinstance(stored, Stored) else stored
        return {name: _open_array(field, memories, file) for name, field in fields.items()}
    load, memory = stored.load, memories[stored.part]
    if stored.refused:
        blocker = Blocker(stored.refused, stored.fix or "List the file's arrays with dlx inspect.", DTypeError)
    elif load is not None:
        why = f"it is {', '.join(stored.notes)}"
        blocker = Blocker(why, resolution=lambda _: load(stored, memory.bytes), needs="copy")
    else:
        assert stored.dtype is not None and stored.shape is not None and stored.offset is not None
        at = memory.address + stored.offset
        return native.tensor_new(at, stored.shape, stored.strides(), stored.dtype, HOST, memory.flags, memory.bytes)
    nbytes = stored.nbytes or 0
    info = ArrayInfo("file", file, stored.dtype, stored.dtype_name, stored.shape, device=HOST, nbytes=nbytes)
    return Deferred(info, blocker)


def _name_dtypes(entries: Mapping[str, Stored], raw: str | Mapping[str, str]) -> dict[str, Stored]:
    """Return entries with the dtypes that `raw` says for them or their fields."""
    known: dict[str, Stored] = {}
    dtypes: dict[str, DType] = {}

    def list_names(name: str, stored: Stored) -> None:
        known[name] = stored._replace(name=name)
        for field in stored.fields:
            list_names(f"{name}.{field.name}" if name else field.name, field)

    def change(name: str, stored: Stored) -> Stored:
        if name in dtypes:  # an error has the whole name
            return name_dtype(known[name], dtypes[name])._replace(name=stored.name)
        fields = (change(f"{name}.{each.name}" if name else each.name, each) for each in stored.fields)
        return stored._replace(fields=tuple(fields))

    for name, stored in entries.items():
        list_names(name, stored)
    if isinstance(raw, str):
        is_raw = (name for name, each in known.items() if not each.dtype and each.dtype_name.lstrip("<>|=")[:1] == "V")
        raw = dict.fromkeys(is_raw, raw)
    for which, word in raw.items():
        dtypes |= dict.fromkeys(match_names(known, which, "raw") or (), DType(word))
    return {name: change(name, stored) for name, stored in entries.items()}


class Archive(Named):
    """The contents of a file, by name."""

    is_file = True

    def __init__(
        self,
        path: Path,
        items: Mapping[Any, Any],
        metadata: Mapping[str, Any],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._names, self.path, self.metadata = items, path, metadata
        self._close, self.closed = close, False

    def __getitem__(self, name: Any) -> Any:
        item = self._names[name]
        if self.closed:
            raise FileError(f"it is closed, so {name!r} cannot be read", source=str(self.path), fix="Open it again.")
        return item

    def close(self) -> None:
        """Prevent further reads; arrays that were read keep their memory."""
        self.closed = True
        self._names = dict.fromkeys(self._names)
        self._close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy the open file {self.path}: it uses memory of this process. Open the file in the "
            "other process, or pickle arrays with their values: dlx.open(path, to='numpy').materialize()."
        )


def map_file(
    source: Any,
    *,
    private: bool = False,
    only: Names = None,
    skip: Names = None,
    mapped: bool = True,
    raw: str | Mapping[str, str] | None = None,
) -> Archive:
    """Map the selected members of a saved file; with `private`, writes do not reach the file.

    Without `mapped`, they are read into memory instead.
    """
    found, name = find_source(source)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_file(found, name))
        kind = detect_kind(file)
        if kind == ".parquet":
            fix = "Read it with pyarrow: dlx.convert(pyarrow.parquet.read_table(path).column(name), to=...)."
            raise FileError("it is a Parquet file; its columns are encoded and cannot be mapped", fix=fix)
        if kind == "HDF5" and not mapped:
            file = stack.enter_context(copy_to_memory(file, needs_path=False))
        path = found if isinstance(found, Path) else file.path
        if kind in LIBRARY_KINDS:
            if raw is not None:
                raise FileError(f"raw= cannot name dtypes in {kind} files, which name them", fix="Leave it out.")
            return Archive(path, *_load(file, kind, private, mapped, only, skip))
        files, contents = stack.enter_context(read_contents(file, kind))
        entries: Mapping[str, Any] = contents.entries if raw is None else _name_dtypes(contents.entries, raw)
        entries = select_entries(entries, only, skip)
        spans = [None] * len(files) if mapped or kind == "HDF5" else _find_spans(files, entries)
        memories = [Memory(each, private=private, spans=span) for each, span in zip(files, spans, strict=True)]
        items: Mapping[str, Any] = Named(entries, lambda _, stored: _open_array(stored, memories, path.name))
        if kind == "zarr" and not mapped:
            items = _read_now(items)
        return Archive(path, items, contents.metadata, contents.close)


def _read_now(member: Any) -> Any:
    """Return a member, or the members of a mapping, with the arrays that would be copied when they are used."""
    if isinstance(member, Mapping):
        return {name: _read_now(member[name]) for name in member}
    resolution: Any = member.blocker.resolution if type(member) is Deferred else None
    return member if resolution is None else resolution(None)


def _load(
    file: File, kind: str, private: bool, mapped: bool, only: Names, skip: Names
) -> tuple[Mapping[Any, Any], Mapping[str, Any]]:
    """Return the members and the metadata of a file that another library reads, or of torch's folders."""
    from dlx._files.arrow_torch import arrow_columns, load_checkpoint

    if kind == DCP:
        from dlx._files.dcp import read_dcp

        return read_dcp(file, only, skip, private=private, mapped=mapped), {}

    def load(part: File) -> Any:
        with part, part if mapped and part.data is None else copy_to_memory(part, needs_path=True) as copy:
            return load_checkpoint(copy)[0]

    found: Any
    metadata: Mapping[str, Any] = {}
    if kind == ".arrow":
        memory = Memory(file, private=private, spans=None if mapped else [(0, file.size)])
        found, metadata = arrow_columns(file, memory)
    elif kind == BIN_INDEX:
        _, found = read_shards(file, load)
    else:
        found = load(file)
    found = found if isinstance(found, Mapping) else {"": found}
    return dict(select_tree(found, only, skip)), metadata


def _find_spans(files: Sequence[File], entries: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """Return the parts of each file that contain arrays; the whole file if an array is decoded."""
    spans: list[list[tuple[int, int]]] = [[] for _ in files]
    for each in list_leaves(entries):
        size, begin = files[each.part].size, each.offset
        if begin is not None and each.steps is not None and each.shape and each.dtype is not None:  # a field
            end = begin + max(n * step for n, step in zip(each.shape, each.steps, strict=True)) * each.dtype.bits // 8
        else:
            begin, end = (0, size) if begin is None else (begin, begin + (each.nbytes or 0))
        if not each.refused:
            spans[each.part].append((begin, min(end, size)))
    return spans


class FileView(MappingView[str, V]):
    """A lazy read-only mapping over a saved file, returned by `dlx.open`. It is a context manager."""

    __slots__ = ()
    is_file = True

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of a .safetensors, .gguf or .arrow file, or the attributes of an HDF5 file or a Zarr store.

        It is empty for other formats. The attributes of an HDF5 file include those of its members, with keys such as
        ``"member@name"``; they are read when they are used.
        """
        return self._source.metadata  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the file. Arrays that were read keep their memory; no others can be read."""
        self._source.close()
        self.refresh()

    def __enter__(self) -> FileView[V]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _kind(self) -> str:
        return f"{self._source.path.name}{' (closed)' if self._source.closed else ''}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._source.__reduce_ex__(protocol)
