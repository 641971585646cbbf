"""`Ring` and `RingReader`: frames in slots of one segment, from one producer to many readers, without a pickle.

`c_src/core/ring.c` has the protocol. A lock of the kernel on one byte of the segment shows that the producer or a
reader is alive: the kernel drops it even if the process is killed. A waiting process checks it every `SLICE` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakSet

from dlx._core import native
from dlx._core.extension import ffi, lib
from dlx._core.types import READ_ONLY
from dlx._engine.seam import FAST_PATH
from dlx._sharing.handle import Handle
from dlx._sharing.segment import Descriptor, Segment, check_descriptor_limit
from dlx._support.module import set_module
from dlx.errors import DlxError, HandleError

__all__ = ["Frames", "Ring", "RingReader", "build_frames"]

SLICE = 0.05  # seconds
_LOCK = struct.Struct("hhqqi0q")  # flock: type, whence, start, length, process
_SET, _GET = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_FORKED = "Call dlx.attach(handle) in this process, or create another ring."
_FULL = f"it has {lib.DLX_RING_READERS} readers, the most that a ring can have"


class Frames(NamedTuple):
    """The slots of a ring in this process."""

    trees: list[Any]  # the arrays of each slot
    segment: Segment
    options: tuple[int, int, int]  # slots, whether frames are overwritten, readers to wait for


def build_frames(
    segment: Segment, options: Any, numbers: memoryview, mode: str, build: Callable[[list[Any]], Any]
) -> Frames:
    """Return the frames of a ring, with the trees that `build` returns for the tensors of each slot."""
    try:
        slots, overwrite, readers, room = options
        start = segment.start + lib.DLX_RING_BYTES
        if {*map(type, options)} != {int} or not 2 <= slots <= lib.DLX_RING_SLOTS or min(room, readers) < 0:
            raise ValueError("its numbers are out of range")
        if start + slots * room > segment.size:
            raise ValueError("it is larger than its segment")
        mapping, flags = segment.mapping(mode), 0 if mode == "write" else READ_ONLY
        starts = [mapping.address + start + slot * room for slot in range(slots)]
        tensors = [native.tensors_unpack(each, room, numbers, flags, mapping) for each in starts]
    except (DlxError, TypeError, ValueError) as error:
        if isinstance(error, HandleError):
            raise
        why = error.reason if isinstance(error, DlxError) else str(error)
        raise HandleError(f"its description of a ring is invalid: {why}") from error
    return Frames([*map(build, tensors)], segment, (slots, int(bool(overwrite)), min(readers, 1 << 30)))


class _Member:
    """The producer or a reader: its frames, and its lock."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._control = frames.segment.mapping("write")  # a call of another thread may still use it after `close`
        self._ring = ffi.cast("void *", self._control.address + frames.segment.start)
        self._current: Any = None  # the slot that it writes or reads
        try:
            number = os.open(f"/proc/self/fd/{frames.segment.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            check_descriptor_limit(error)
            raise
        self._lock: Descriptor | None = Descriptor(number)  # opened again: locks belong to an open file
        _members.add(self)

    def _try_lock(self, byte: int, kind: int = fcntl.F_WRLCK) -> bool:
        assert self._lock is not None
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(self._lock.number, _SET, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
            return True
        return False

    def _is_locked(self, byte: int) -> bool:
        """Return whether another member holds the lock of a byte."""
        assert self._lock is not None
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._lock.number, _GET, asked))[0] != fcntl.F_UNLCK)

    def _check_open(self) -> None:
        if self._lock is None:
            raise HandleError("it is closed, or belongs to the parent of this process", fix=_FORKED)

    def _try(self, nanoseconds: int) -> int:
        raise NotImplementedError

    def _check_others(self) -> None:
        raise NotImplementedError

    def _wait(self, timeout: float | None, what: str) -> int:
        """Return a slot, or raise TimeoutError; `timeout` is in seconds, None for no limit."""
        end = None if timeout is None else time.monotonic() + timeout
        left = SLICE if timeout is None else min(SLICE, timeout)
        self._check_open()
        while (slot := self._try(int(left * 1e9))) == -1:
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{what} within {timeout} s")
            self._check_open()  # another thread may close it
            self._check_others()
            left = SLICE if end is None else min(SLICE, max(end - time.monotonic(), 0.0))
        return slot


_members: WeakSet[_Member] = WeakSet()


def _forget_members() -> None:
    """Close the locks in a forked child, which would otherwise outlive its parent."""
    for each in list(_members):
        each._lock = None


os.register_at_fork(after_in_child=_forget_members)


@set_module("dlx")
class Ring(_Member):
    """The producer's side of a ring, created by `dlx.ring`; `handle` goes to the readers.

    Use it as a context manager to end the ring. One thread at a time may use it.
    """

    handle: Handle[RingReader]

    def __init__(self, frames: Frames, handle: Handle[Any], own: Any) -> None:
        super().__init__(frames)
        self.handle = handle
        self._own = own  # the arrays of each slot, as `write` returns them
        self._try_lock(0)

    def _try(self, nanoseconds: int) -> int:
        return int(lib.dlx_ring_claim(self._ring, *self._frames.options, nanoseconds))

    def _check_others(self) -> None:
        """Remove dead readers. It takes their locks, so that no reader joins with this number at the same time."""
        for number in range(lib.DLX_RING_READERS):
            if self._try_lock(1 + number):
                lib.dlx_ring_leave(self._ring, number)
                self._try_lock(1 + number, fcntl.F_UNLCK)

    def put(self, tree: Any, *, timeout: float | None = None) -> None:
        """Copy a tree of arrays into the next slot, and publish it.

        Parameters
        ----------
        tree
            Arrays of any framework in the containers of `like`, with its shapes and dtypes.
        timeout
            Seconds to wait for a free slot; None: without limit, 0: not at all.

        Raises
        ------
        TimeoutError
            If no slot became free.
        LayoutError, DTypeError, ConversionError
            If the arrays do not fit. The frame is not published.
        """
        slot = self._claim(timeout)
        FAST_PATH(tree, out=self._frames.trees[slot])
        self._publish(slot)

    def write(self, *, timeout: float | None = None) -> AbstractContextManager[Any]:
        """Return a context manager with the arrays of the next slot; at its end the frame is published.

        The arrays contain an older frame; write to all of them. After an error in the ``with`` block the frame is not
        published. `timeout` and TimeoutError are as in `put`.
        """
        return _Write(self, timeout)

    def _claim(self, timeout: float | None) -> int:
        slot = self._current
        if slot is None or self._lock is None:
            slot = self._current = self._wait(timeout, "no reader released a frame")
        return int(slot)

    def _publish(self, slot: int) -> None:
        self._check_open()
        self._current = None
        lib.dlx_ring_publish(self._ring, slot)

    def close(self) -> None:
        """End the ring: readers get the remaining frames, and then their iterators end."""
        if self._lock is not None:
            lib.dlx_ring_end(self._ring)
        self._lock = None
        self.handle.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Write(AbstractContextManager[Any]):
    """The context manager of `Ring.write`; one of `contextlib` would take longer than the hand-over."""

    __slots__ = ("_ring", "_slot", "_timeout")

    def __init__(self, ring: Ring, timeout: float | None) -> None:
        self._ring, self._timeout = ring, timeout

    def __enter__(self) -> Any:
        self._slot = self._ring._claim(self._timeout)
        return self._ring._own[self._slot]

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None:
            self._ring._publish(self._slot)


@set_module("dlx")
class RingReader(_Member):
    """A reader of a ring, created by `dlx.attach`: an iterator over its frames.

    A frame is the tree of arrays of its slot. It is valid until the next frame is read, or `release` is called. Then
    the producer may overwrite it. One thread at a time may use a reader.
    """

    def __init__(self, frames: Frames) -> None:
        super().__init__(frames)
        self._newest = False
        numbers = (n for n in range(lib.DLX_RING_READERS) if self._try_lock(1 + n))
        number = next(numbers, None)
        if number is None:
            raise HandleError(_FULL, fix="Use fewer readers, or close one.")
        self._number = number
        lib.dlx_ring_join(self._ring, number)

    def _try(self, nanoseconds: int) -> int:
        slots = self._frames.options[0]
        return int(lib.dlx_ring_next(self._ring, slots, self._number, self._newest, nanoseconds))

    def _check_others(self) -> None:
        if self._is_locked(0):
            return
        slot = self._try(0)  # a frame that it published before its end
        if slot == -1:
            fix = "Start that process again; if it ended by itself, close the ring there."
            raise HandleError("the process that fills it has ended without closing it", fix=fix)

    @property
    def number(self) -> int:
        """The number of the current frame, from 1, or 0; gaps show frames that were overwritten or skipped."""
        return int(lib.dlx_ring_held(self._ring, self._number))

    def read(self, *, timeout: float | None = None, newest: bool = False) -> Any:
        """Release the current frame, and return the next one.

        Parameters
        ----------
        timeout
            Seconds to wait for it; None: without limit, 0: not at all.
        newest
            Whether to skip all frames before the newest one.

        Raises
        ------
        TimeoutError
            If there is no new frame.
        EOFError
            If the ring has ended, and all frames are read.
        HandleError
            If the producer ended without closing the ring, or this reader is closed.
        """
        self.release()
        self._newest = newest
        slot = self._wait(timeout, "no frame arrived")
        if slot < 0:
            raise EOFError("the ring has ended")
        self._current = slot
        return self._frames.trees[slot]

    def release(self) -> None:
        """Let the producer overwrite the current frame."""
        if self._current is not None and self._lock is not None:
            lib.dlx_ring_release(self._ring, self._number)
        self._current = None

    def close(self) -> None:
        """Leave the ring."""
        if self._lock is not None:
            lib.dlx_ring_leave(self._ring, self._number)
        self._lock = None

    def __iter__(self) -> RingReader:
        return self

    def __next__(self) -> Any:
        try:
            return self.read()
        except EOFError:
            raise StopIteration from None

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
