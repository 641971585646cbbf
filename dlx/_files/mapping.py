"""Lazy mappings over saved files: `Archive`, the contents of a file, and `FileView`, the result of `dlx.open`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST, DType
from dlx._files.header import File, Memory, Named, Stored, copy_to_memory, name_dtype
from dlx._files.reading import (
    FOLDER_KINDS,
    LIBRARY_KINDS,
    detect_kind,
    find_source,
    open_file,
    read_contents,
    read_torch_shards,
)
from dlx._files.safetensors import BIN_INDEX, DCP
from dlx._files.selection import Names, select_names, select_tree
from dlx._registry.generic import Deferred
from dlx._views.mapping import MappingView
from dlx.adapter.declarations import Blocker
from dlx.errors import DTypeError, FileError

__all__ = ["Archive", "FileView", "map_file"]

V = TypeVar("V")


def _open_array(stored: Stored, memory: Memory, file: str) -> Any:
    """Return a read-only tensor over a file's memory, or a `Deferred` that copies or refuses the array."""
    load = stored.load
    if stored.fields:
        from dlx._files.npy import read_fields

        return {field.name: _open_array(field, memory, file) for field in read_fields(stored)}
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


class _Members(Named[Any]):
    """The arrays of the parts of a file by name. Each access creates a new tensor; only the headers are kept."""

    def __init__(
        self,
        file: str,
        parts: list[tuple[Mapping[str, Stored], Memory]],
        places: dict[str, int] | None,
        raw: str | Mapping[str, str] | None,
    ) -> None:
        self._file, self._parts, self._places = file, parts, places
        self._names = parts[0][0] if places is None else places
        self._raw: dict[str, DType] = {}
        if raw is None:
            return
        known = {name: each for member in self for name, each in _list_names(member, self._find(member))}
        if isinstance(raw, str):
            raw = {
                name: raw
                for name, each in known.items()
                if each.dtype is None and each.dtype_name.lstrip("<>|=")[:1] == "V"
            }
        for which, dtype in raw.items():
            for name in select_names(known, which, None, "raw"):
                self._raw[name] = DType(dtype)
                name_dtype(known[name]._replace(name=name), self._raw[name])  # raises for a dtype of another size

    def _find(self, name: str) -> Stored:
        return self._parts[0 if self._places is None else self._places[name]][0][name]

    def __getitem__(self, name: str) -> Any:
        memory = self._parts[0 if self._places is None else self._places[name]][1]
        stored = self._find(name)
        return _open_array(self._name_dtypes(name, stored) if self._raw else stored, memory, self._file)

    def _name_dtypes(self, name: str, stored: Stored) -> Stored:
        """Return an entry with the dtypes that `raw` says for it or its fields."""
        if name in self._raw:
            return name_dtype(stored, self._raw[name])
        fields = [self._name_dtypes(_field_name(name, field), field) for field in stored.fields]
        return stored._replace(fields=tuple(fields))


def _field_name(name: str, field: Stored) -> str:
    return f"{name}.{field.name}" if name else field.name


def _list_names(name: str, stored: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield an entry and its fields, with their names."""
    yield name, stored
    for field in stored.fields:
        yield from _list_names(_field_name(name, field), field)


class Archive(Mapping[Any, Any]):
    """The contents of a file, by name."""

    is_file = True

    def __init__(
        self, path: Path, items: Mapping[Any, Any], metadata: Mapping[str, Any], closing: list[Callable[[], object]]
    ) -> None:
        self.path, self.metadata = path, metadata
        self._items = items
        self._closing = closing
        self.closed = False

    def __getitem__(self, key: Any) -> Any:
        if self.closed and key in self._items:
            raise FileError(f"it is closed, so {key!r} cannot be read", source=str(self.path), fix="Open it again.")
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def keys(self) -> Any:
        """Return the names, in file order."""
        return self._items.keys()

    def close(self) -> None:
        """Prevent further reads; arrays that were read keep their memory."""
        self.closed = True
        self._items = dict.fromkeys(self._items)
        while self._closing:
            self._closing.pop()()

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
        if file.data is not None and kind in FOLDER_KINDS:
            raise FileError("it lists files in its folder, and contents in memory have none", fix="Pass a path.")
        if kind == ".parquet":
            fix = "Read it with pyarrow: dlx.convert(pyarrow.parquet.read_table(path).column(name), to=...)."
            raise FileError("it is a Parquet file; its columns are encoded and cannot be mapped", fix=fix)
        if kind == "HDF5" and not mapped:
            file = stack.enter_context(copy_to_memory(file, needs_path=False))
        path = found if isinstance(found, Path) else file.path
        select = only is not None or skip is not None
        if kind in LIBRARY_KINDS:
            if raw is not None:
                raise FileError(f"raw= cannot name dtypes in {kind} files, which name them", fix="Leave it out.")
            loaded, metadata = _load(file, kind, private, mapped, only, skip)
            return Archive(path, loaded, metadata, [])
        parts, places = stack.enter_context(read_contents(file, kind))
        if select:
            names = places or {name: i for i, (_, contents) in enumerate(parts) for name in contents.entries}
            places = {name: names[name] for name in select_names(names, only, skip)}
        members: list[tuple[Mapping[str, Stored], Any]] = []
        for i, (each, contents) in enumerate(parts):
            selected = None if places is None else [name for name, at in places.items() if at == i]
            spans = None if mapped or kind == "HDF5" else _spans(each, contents.entries, selected)
            is_empty = not contents.entries or selected == []
            members.append((contents.entries, None if is_empty else Memory(each, private=private, spans=spans)))
        closing = [contents.close for _, contents in parts if contents.close is not None]
        metadata = parts[0][1].metadata  # HDF5 reads it when it is used
        if len(parts) > 1:
            metadata = {key: value for _, contents in reversed(parts) for key, value in contents.metadata.items()}
        return Archive(path, _Members(path.name, members, places, raw), metadata, closing)


def _load(
    file: File, kind: str, private: bool, mapped: bool, only: Names, skip: Names
) -> tuple[Mapping[Any, Any], Mapping[str, Any]]:
    """Return the members and the metadata of a file that another library reads, or of torch's folders."""
    from dlx._files.arrow_torch import arrow_columns, load_checkpoint

    def pick(names: Any) -> list[str]:
        return select_names(names, only, skip)

    if kind == ".arrow":
        memory = Memory(file, private=private, spans=None if mapped else [(0, file.size)])
        columns, metadata = arrow_columns(file, memory)
        return {name: columns[name] for name in pick(columns)}, metadata
    if kind == DCP:
        from dlx._files.dcp import read_dcp

        return read_dcp(file, pick, private=private, mapped=mapped), {}

    def load(part: File) -> Any:
        if mapped and part.data is None:
            return load_checkpoint(part)[0]
        with copy_to_memory(part, needs_path=True) as copy:
            return load_checkpoint(copy)[0]

    found = read_torch_shards(file, load) if kind == BIN_INDEX else load(file)
    found = found if isinstance(found, Mapping) else {"": found}
    return dict(found) if only is None and skip is None else select_tree(found, only, skip), {}


def _spans(file: File, entries: Mapping[str, Stored], names: list[str] | None) -> list[tuple[int, int]]:
    """Return the parts of a file that contain the named arrays; the whole file if names or places are unknown."""
    found = None if names is None else [each for each in map(entries.__getitem__, names) if not each.refused]
    if found is None or any(each.offset is None for each in found):
        return [(0, file.size)]
    return [(each.offset or 0, (each.offset or 0) + (each.nbytes or 0)) for each in found]


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
