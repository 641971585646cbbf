"""Container handlers of file objects that contain named arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dlx.adapter.declarations import Container

__all__ = ["file_handler", "flatten_mapping"]


class _File(Mapping[str, Any]):
    """A file as a mapping."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def flatten_mapping(obj: Any) -> tuple[list[Any], list[Any]]:
    """Flatten a mapping by ``keys`` and ``__getitem__``, for `Container.flatten`."""
    keys = list(obj.keys())  # iteration may differ (a TensorDict iterates over its batches)
    return keys, [obj[key] for key in keys]


def file_handler(
    *types: str,
    names: Callable[[Any], Iterable[str]] | None = None,
    read: Callable[[Any, str], Any] | None = None,
    identity: Callable[[Any], Any] | None = None,
) -> Container:
    """Return the handler of a file type; a conversion returns a dict of the arrays that it read.

    Parameters
    ----------
    types, identity
        See `Container`.
    names, read
        ``names(file)`` returns the names of the arrays, ``read(file, name)`` one array; for files that are not
        mappings.
    """

    def live(file: Any) -> Any:
        if names is None or read is None or isinstance(file, _File):
            return file
        return _File(names(file), lambda name: read(file, name))

    return Container(
        types=types,
        kind="mapping",
        flatten=lambda file: flatten_mapping(live(file)),
        elements="fresh",
        identity=identity,
        falls_to=dict,
        live=None if names is None else live,
    )
