"""`Handle`: a small dict that identifies shared memory, and keeps it alive in the process that created it."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

from dlx._sharing.segment import SAME_VERSION, Segment, open_segment
from dlx._support.reflect import safe_repr
from dlx.errors import HandleError

__all__ = ["Handle", "create_handle", "find_segment"]

VERSION = 1
_FIELDS = {"dlx": int, "pid": int, "fd": int, "inode": int, "size": int, "token": str}


_Shared = TypeVar("_Shared")  # for type checkers only: what `dlx.attach` converts


class Handle(dict[str, Any], Generic[_Shared]):
    """A handle to shared memory, created by `dlx.share`: a dict of numbers and a text that any process can attach.

    It keeps the memory alive in the process that created it. Pickled, or written as JSON, it is a plain dict that only
    identifies the memory. Use it as a context manager to close it.

    Examples
    --------
    >>> import dlx, json
    >>> with dlx.share(b"abc") as handle:
    ...     dlx.attach(json.loads(json.dumps(handle)))
    dlx.Tensor(uint8[3], cpu, read-only, [97, 98, 99])
    """

    __slots__ = ("_export", "_segments")
    _segments: tuple[Segment, ...]
    _export: Any  # its device memory

    def close(self) -> None:
        """Release the memory; attached processes, and arrays over it in this process, keep it alive."""
        self._segments = ()
        self._export = None

    def fileno(self) -> int:
        """Return the descriptor of the memory, to send to a process that may not open this process's files.

        Raises
        ------
        HandleError
            If the handle is closed, or refers to several pieces of memory that were shared before.
        """
        if len(self._segments) != 1:
            if not self._segments:
                raise HandleError("it is closed", fix="Share the arrays again.")
            many = f"it refers to {len(self._segments) - 1} pieces of memory that were shared before"
            raise HandleError(many, fix="Share a copy, or share the pieces one by one.")
        self._segments[0].check()
        return self._segments[0].fd

    def filenos(self) -> list[int]:
        """Return all descriptors to send: `fileno`, then those of device memory. Errors: as `fileno`."""
        memories = self._export.memories if self._export is not None else ()
        return [self.fileno(), *(each.descriptor.number for each in memories if each.descriptor is not None)]

    def __enter__(self) -> Handle[_Shared]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)  # readable without dlx

    def __repr__(self) -> str:
        return f"Handle({dict.__repr__(self)})"


def create_handle(segment: Segment, others: tuple[Segment, ...], export: Any = None) -> Handle[Any]:
    """Return a handle that keeps a segment alive, and the segments and device memory that its description names."""
    numbers = {"fd": segment.fd, "inode": segment.inode, "size": segment.size}
    handle: Handle[Any] = Handle(dlx=VERSION, pid=os.getpid(), **numbers, token=segment.token)
    handle._segments = (segment, *others)
    handle._export = export
    return handle


def find_segment(handle: Any, received: int | None, access: int) -> Segment:
    """Open the segment of a handle; `received` is a descriptor of it, and `access` as in `open_segment`."""
    if not isinstance(handle, dict):
        raise TypeError(f"handle must be a handle of dlx.share, or an equal dict; found {safe_repr(handle)}")
    version = handle.get("dlx")
    if type(version) is int and version != VERSION:
        raise HandleError(f"it has version {version}; this dlx reads version {VERSION}", fix=SAME_VERSION)
    if handle.keys() != _FIELDS.keys() or any(type(handle[name]) is not kind for name, kind in _FIELDS.items()):
        raise HandleError(f"it is not a handle of dlx.share with {', '.join(_FIELDS)}; found {safe_repr(handle)}")
    return open_segment(handle["pid"], handle["fd"], handle["token"], handle["inode"], handle["size"], received, access)
