"""`Handle`: a few builtin values that identify shared memory, and hold it in the process that made them."""

from __future__ import annotations

import os
from typing import Any

from dlx._sharing.segment import Segment, opened
from dlx._support.reflect import safe_repr
from dlx.errors import HandleError

__all__ = ["Handle", "handle_of", "segment_of"]

VERSION = 1
_FIELDS = {"dlx": int, "pid": int, "fd": int, "inode": int, "size": int, "token": str}


class Handle(dict[str, Any]):
    """What `dlx.share` returns: a dict of a few numbers and a text, which any process attaches by `dlx.attach`.

    It holds the shared memory in the process that made it. Pickled, or written as JSON, it is a plain dict that stands
    for the memory and holds nothing. It is a context manager that closes it.

    Examples
    --------
    >>> import dlx, json
    >>> with dlx.share(b"abc") as handle:
    ...     dlx.attach(json.loads(json.dumps(handle)))
    dlx.Tensor(uint8[3], cpu, read-only, [97, 98, 99])
    """

    __slots__ = ("_export", "_segments")
    _segments: tuple[Segment, ...]
    _export: Any  # device memory that it holds

    def close(self) -> None:
        """Hold the memory no longer; who has attached, and arrays over it in this process, keep it."""
        self._segments = ()
        self._export = None

    def fileno(self) -> int:
        """Return the descriptor of the memory, to be sent to a process that may not look at this one's files.

        Raises
        ------
        HandleError
            If the handle was closed, or stands for several pieces of memory that were shared before.
        """
        if len(self._segments) != 1:
            many = f"it stands for {len(self._segments) - 1} pieces of memory that were shared before"
            reason = many if self._segments else "it was closed"
            raise HandleError(reason, fix="Share a copy, or the pieces one by one.")
        self._segments[0].check()
        return self._segments[0].fd

    def filenos(self) -> list[int]:
        """Return all descriptors to be sent, `fileno` first, then those of device memory. Errors: as `fileno`."""
        memories = self._export.memories if self._export is not None else ()
        return [self.fileno(), *(each.descriptor.number for each in memories if each.descriptor is not None)]

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)  # of builtins only: it can be read where dlx is not installed

    def __repr__(self) -> str:
        return f"Handle({dict.__repr__(self)})"


def handle_of(segment: Segment, others: tuple[Segment, ...], export: Any = None) -> Handle:
    """Return a handle that holds a segment with a description, and the segments and device memory that it names."""
    numbers = {"fd": segment.fd, "inode": segment.inode, "size": segment.size}
    handle = Handle(dlx=VERSION, pid=os.getpid(), **numbers, token=segment.token)
    handle._segments = (segment, *others)
    handle._export = export
    return handle


def segment_of(handle: Any, given: int | None, access: int) -> Segment:
    """Return the segment of a handle; `given` is a received descriptor of it, and `access` as in `opened`."""
    if not isinstance(handle, dict):
        raise TypeError(f"handle must be what dlx.share returned, or the dict that it is; found {safe_repr(handle)}")
    version = handle.get("dlx")
    if type(version) is int and version != VERSION:
        raise HandleError(f"it is of version {version}, and this dlx reads {VERSION}")
    if handle.keys() != _FIELDS.keys() or any(type(handle[name]) is not kind for name, kind in _FIELDS.items()):
        raise HandleError(f"it is no handle of dlx.share: it must have {', '.join(_FIELDS)}, found {safe_repr(handle)}")
    return opened(handle["pid"], handle["fd"], handle["token"], handle["inode"], handle["size"], given, access)
