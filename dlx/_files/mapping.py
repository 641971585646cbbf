"""The lazy mapping over a saved file: `Archive`, its source, and `FileView`, what `dlx.open` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dlx._core import native
from dlx._core.array_info import ArrayInfo
from dlx._core.types import HOST, READ_ONLY
from dlx._files.header import Memory, StoredArray
from dlx._files.reading import detect_kind, open_file, read_contents
from dlx._registry.generic import Deferred
from dlx._support.text import one_line
from dlx._views.mapping import MappingView
from dlx.adapter.declarations import Blocker
from dlx.errors import DTypeError, FileError

__all__ = ["Archive", "FileView", "map_file"]

V = TypeVar("V")


def _open_array(stored: StoredArray, memory: Memory, file: str) -> Any:
    """Return a read-only tensor over a file's memory, or a `Deferred` that reads or refuses the array."""
    load = stored.load
    if stored.refused:
        blocker = Blocker(stored.refused, stored.fix or "dlx inspect lists what is in the file.", DTypeError)
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
    """The contents of a file, by name. Each access makes a new tensor."""

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
            reason = f"it was closed, and {key!r} is not read any more"
            raise FileError(reason, source=str(self.path), fix="Open it again.")
        return item(self.path.name) if type(item) is partial else item

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def keys(self) -> Any:
        """Return the names, in the order of the file."""
        return self._items.keys()

    def close(self) -> None:
        """Refuse further reads; arrays that were read keep their memory."""
        self.closed = True
        self._items = dict.fromkeys(self._items)
        while self._closing:
            self._closing.pop()()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {self.path}, an open file: it stands for memory of this process. Open it again in "
            "the other process, or pickle arrays that hold their values: dlx.open(path, to='numpy').materialize()."
        )


def map_file(path: Path, *, private: bool = False) -> Archive:
    """Return the mapping over a saved file; with `private`, over pages that are copied when they are written to."""
    with open_file(path) as file:
        kind = detect_kind(file)
        if kind == ".parquet":
            fix = "Read it: dlx.convert(pyarrow.parquet.read_table(path).column(name), to=...)."
            raise FileError("it is a Parquet file, whose columns are encoded and cannot be mapped", fix=fix)
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
                        raise FileError(f"two of its files hold {one_line(stored.name, 80)!r}")
                    items[stored.name] = partial(_open_array, stored, memory)
            closing = [contents.close for _, contents in parts if contents.close is not None]
            metadata = {key: value for _, contents in reversed(parts) for key, value in contents.metadata.items()}
            return Archive(path, items, metadata, closing)


class FileView(MappingView[str, V]):
    """A lazy read-only mapping over a saved file: `dlx.open`. It is a context manager."""

    __slots__ = ()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the file, by name.

        The metadata of .safetensors and .gguf files; in HDF5 the attributes, those of a member as ``"member@name"``.
        Empty for other formats.
        """
        return self._source.metadata  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the file: arrays that were taken keep their memory, and no other can be read any more."""
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
