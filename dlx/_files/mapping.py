"""Lazy mappings over saved files: `Archive`, the contents of a file, and `FileView`, the result of `dlx.open`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST, READ_ONLY
from dlx._files.header import Memory, Stored
from dlx._files.reading import detect_kind, open_file, read_contents
from dlx._registry.generic import Deferred
from dlx._support.text import one_line
from dlx._views.mapping import MappingView
from dlx.adapter.declarations import Blocker
from dlx.errors import DTypeError, FileError

__all__ = ["Archive", "FileView", "map_file"]

V = TypeVar("V")


def _open_array(stored: Stored, memory: Memory, file: str) -> Any:
    """Return a read-only tensor over a file's memory, or a `Deferred` that copies or refuses the array."""
    load = stored.load
    if stored.refused:
        blocker = Blocker(stored.refused, stored.fix or "List the file's arrays with dlx inspect.", DTypeError)
    elif load is not None:
        why = f"it is {', '.join(stored.notes)}"
        blocker = Blocker(why, resolution=lambda _: load(stored, memory.bytes), needs="copy")
    else:
        assert stored.dtype is not None and stored.shape is not None and stored.offset is not None
        return native.tensor_new(
            memory.address + stored.offset, stored.shape, stored.strides(), stored.dtype, HOST, READ_ONLY, memory.bytes
        )
    nbytes = stored.nbytes or 0
    info = ArrayInfo("file", file, stored.dtype, stored.dtype_name, stored.shape, device=HOST, nbytes=nbytes)
    return Deferred(info, blocker)


class Archive(Mapping[Any, Any]):
    """The contents of a file, by name. Each access creates a new tensor."""

    def __init__(
        self, path: Path, items: Mapping[Any, Any], metadata: Mapping[str, Any], closing: list[Callable[[], object]]
    ) -> None:
        self.path, self.metadata = path, metadata
        self._items: dict[Any, Any] = dict(items)
        self._closing = closing
        self.closed = False

    def __getitem__(self, key: Any) -> Any:
        item = self._items[key]
        if self.closed:
            raise FileError(f"it is closed, so {key!r} cannot be read", source=str(self.path), fix="Open it again.")
        return item(self.path.name) if type(item) is partial else item

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


def map_file(path: Path, *, private: bool = False) -> Archive:
    """Map a saved file; with `private`, the arrays are writable and writes do not reach the file."""
    with open_file(path) as file:
        kind = detect_kind(file)
        if kind == ".parquet":
            fix = "Read it with pyarrow: dlx.convert(pyarrow.parquet.read_table(path).column(name), to=...)."
            raise FileError("it is a Parquet file; its columns are encoded and cannot be mapped", fix=fix)
        if kind == ".arrow":
            from dlx._files.arrow_torch import arrow_columns

            return Archive(path, arrow_columns(file, private=private), {}, [])
        if kind == ".pt":
            from dlx._files.arrow_torch import load_checkpoint

            loaded, _ = load_checkpoint(file)
            return Archive(path, loaded if isinstance(loaded, Mapping) else {"": loaded}, {}, [])
        with read_contents(file, kind) as parts:
            items: dict[Any, Any] = {}
            for each, contents in parts:
                memory: Any = Memory(each, private=private) if contents.entries else None
                for stored in contents.entries:
                    if stored.name in items:
                        raise FileError(f"two of its files contain {one_line(stored.name, 80)!r}")
                    items[stored.name] = partial(_open_array, stored, memory)
            closing = [contents.close for _, contents in parts if contents.close is not None]
            metadata = {key: value for _, contents in reversed(parts) for key, value in contents.metadata.items()}
            return Archive(path, items, metadata, closing)


class FileView(MappingView[str, V]):
    """A lazy read-only mapping over a saved file, returned by `dlx.open`. It is a context manager."""

    __slots__ = ()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of a .safetensors or .gguf file, or the attributes of an HDF5 file; empty for other formats.

        The key of an HDF5 member's attribute is ``"member@name"``.
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
