"""`Ring` and `RingReader`: frames in slots of one segment, from one producer to many readers, without a pickle.

`c_src/core/ring.c` has the protocol. A lock of the kernel on one byte of the segment shows that the producer or a
reader is alive: the kernel drops it even if the process is killed. A waiting process checks it every `SLICE` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NoReturn
from weakref import WeakSet

from dlx._core import native
from dlx._core.extension import ffi, lib
from dlx._engine.failures import Failures
from dlx._engine.seam import FAST_PATH
from dlx._engine.tree import Tree
from dlx._registry import lookup
from dlx._sharing.description import encode_value
from dlx._sharing.handle import Handle
from dlx._sharing.segment import Descriptor, Segment
from dlx._support.locks import no_fork
from dlx._support.module import set_module
from dlx._support.reflect import type_name
from dlx.errors import ConversionError, DlxError, HandleError, LayoutError

__all__ = ["Ring", "RingReader", "check_apart", "plain_data"]

SLICE = 0.05  # seconds
_LOCK = struct.Struct("hhqqi0q")  # flock: type, whence, start, length, process
_SET, _GET = getattr(fcntl, "F_OFD_SETLK", 37), getattr(fcntl, "F_OFD_GETLK", 36)
_FORKED = "Call dlx.attach(handle) in this process, or create another ring."
_FULL = f"it has {lib.DLX_RING_READERS} readers, the most that a ring can have"


def check_apart(tree: Any, source: str) -> None:
    """Raise unless each array of a tree is in one place, and shares no memory with another."""
    handler = lookup.kind_of(tree).handler
    if handler is None:
        return
    walked, parents = Tree(tree, handler, Failures("")), dict[int, list[int]]()
    for number, (*_, links) in enumerate(walked.nodes()):
        for link in links.values():
            parents.setdefault(link, []).append(number)
    waiting = [link for link in parents if link < 0]
    holding = {*waiting}  # arrays, and the containers that hold them
    while waiting:
        new = {*parents.get(waiting.pop(), ())} - holding
        holding |= new
        waiting += new
    runs = sorted(run[:2] for run in native.tensors_extents(walked.arrays) if run[0] < run[1])
    is_repeated = any(len(parents.get(link, ())) > 1 for link in holding)
    if is_repeated or any(one[1] > other[0] for one, other in pairwise(runs)):
        reason, fix = "two of its arrays share memory, or are one", "Pass arrays that do not share memory."
        raise LayoutError(reason, source=source, fix=fix)


def plain_data(tree: Any) -> int:
    """Return a hash of the numbers, texts and other plain data of a tree, and of their places."""
    handler = lookup.kind_of(tree).handler
    if handler is None:
        return 0
    nodes, found, opened, waiting = [*Tree(tree, handler, Failures("")).nodes()], dict[int, int](), set[int](), [0]
    while waiting:
        number = waiting[-1]
        _, handler, keys, parts, links = nodes[number]
        below = [link for link in links.values() if link >= 0 and link not in found]
        if below and number not in opened:
            opened.add(number)
            waiting += below
            continue
        waiting.pop()
        values = [found.get(links[i], 0) if i in links else _text(part) for i, part in enumerate(parts)]  # 0: an array
        if handler.kind == "wrapper":
            found[number] = hash(values[0])
        elif handler.kind == "set":
            found[number] = hash(frozenset(values))
        else:
            others = [i for i in range(len(values)) if links.get(i, 0) >= 0]  # not arrays, whose places `out` checks
            found[number] = hash(frozenset((_text(handler.path(keys, i)), values[i]) for i in others))
    return found[0]


def _text(value: Any) -> str:
    """Return plain data as text, which is the same for equal data of one type."""
    if type(value) is frozenset:
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{type(value).__name__} {encode_value(value)!r}" if not isinstance(value, str) else str.__repr__(value)


class _Member(AbstractContextManager[Any]):
    """The producer or a reader: the arrays of each slot, and its lock."""

    _try: Callable[[int], int]  # nanoseconds -> a slot, or -1
    _check_others: Callable[[], None]
    close: Callable[[], None]

    def __init__(self, segment: Segment, trees: list[Any], options: tuple[int, int, int]) -> None:
        self._trees, self._options = trees, options  # slots, whether frames are overwritten, readers to wait for
        self._control = segment.mapping("write")  # a call of another thread may still use it after `close`
        self._ring = ffi.cast("void *", self._control.address + segment.start)
        self._current: Any = None  # the slot that it writes or reads
        self._next_check = 0.0  # when it looks whether the other side is alive
        self._lock: Descriptor | None = None
        with no_fork:
            self._lock = segment.reopen(os.O_RDWR)
            _members.add(self)

    def _change_lock(self, byte: int, kind: int = fcntl.F_WRLCK, command: int = _SET) -> int:
        """Lock or unlock a byte, or ask for a lock; return its kind, or -1 if another member holds it."""
        assert self._lock is not None
        with contextlib.suppress(BlockingIOError, PermissionError):
            done = fcntl.fcntl(self._lock.number, command, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
            return int(_LOCK.unpack(done)[0])
        return -1

    def _check_open(self) -> None:
        if self._lock is None:
            raise HandleError("it is closed, or belongs to the parent of this process", fix=_FORKED)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle a {type(self).__name__}. Send ring.handle, and call dlx.attach there.")

    def _wait(self, timeout: float | None, what: str) -> int:
        """Return a slot, or raise TimeoutError; `timeout` is in seconds, None for no limit."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        left = SLICE if timeout is None else min(SLICE, timeout)
        self._check_open()
        lock = self._lock  # if another thread closes this member, no other one gets its number during the call
        try:
            while (slot := self._try(int(left * 1e9))) == -1:
                now = time.monotonic()
                if now >= self._next_check:
                    self._next_check = now + SLICE
                    self._check_others()
                elif now >= end:
                    raise TimeoutError(f"{what} within {timeout} s")
                self._check_open()
                left = min(SLICE, max(end - now, 0.0))
            self._check_open()
            return slot
        finally:
            del lock  # not kept by a traceback


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

    def __init__(self, *frames: Any, handle: Handle[Any], own: list[Any], plain: int) -> None:
        super().__init__(*frames)
        self.handle = handle
        self._own = own  # the arrays of each slot, as `write` returns them
        self._plain = plain  # the plain data of all frames, as `plain_data` returns it
        self._change_lock(0)

    def _try(self, nanoseconds: int) -> int:
        return int(lib.dlx_ring_claim(self._ring, *self._options, nanoseconds))

    def _check_others(self) -> None:
        """Remove dead readers. It takes their locks, so that no reader joins with this number at the same time."""
        for number in range(lib.DLX_RING_READERS):
            if self._change_lock(1 + number) != -1:
                lib.dlx_ring_leave(self._ring, number)
                self._change_lock(1 + number, fcntl.F_UNLCK)

    def put(self, tree: Any, *, timeout: float | None = None) -> None:
        """Copy a tree of arrays into the next slot, and publish it.

        Parameters
        ----------
        tree
            Arrays of any framework in the containers of `like`, with its shapes and dtypes; a named tuple as a tuple,
            and a sparse array as its `parts`.
        timeout
            Seconds to wait for a free slot; None: without limit, 0: not at all.

        Raises
        ------
        TimeoutError
            If no slot became free.
        LayoutError, DTypeError, ConversionError
            If the arrays do not fit, or plain data differs from that of `like`. The frame is not published.
        """
        slot = self._claim(timeout)
        try:
            FAST_PATH(tree, out=self._trees[slot])
            if plain_data(tree) != self._plain:
                why = "its numbers and texts are not those of like, which all frames have"
                raise ConversionError(why, source=type_name(type(tree)), fix="Make them arrays, in like, too.")
        except DlxError as error:
            error.action, error.via, error.root = "put", "to dlx.convert before", error.root and "frame"
            raise
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
            slot = self._current = self._wait(timeout, "no reader joined or released a frame")
        return int(slot)

    def _publish(self, slot: int) -> None:
        self._check_open()
        if self._current != slot:
            raise HandleError("another call has published the frame", fix="Do not call put or write inside of a write.")
        self._current = None
        lib.dlx_ring_publish(self._ring, slot)

    def close(self) -> None:
        """End the ring: readers get the remaining frames, and then their iterators end."""
        if self._lock is not None:
            lib.dlx_ring_end(self._ring)
        self._lock = None
        self.handle.close()


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

    def __init__(self, *frames: Any) -> None:
        super().__init__(*frames)
        self._newest = False
        both = 2 * [*range(lib.DLX_RING_READERS)]  # the producer may hold one of them in `_check_others`
        numbers = (n for n in both if self._change_lock(1 + n) != -1)
        number = next(numbers, None)
        if number is None:
            raise HandleError(_FULL, fix="Use fewer readers, or close one.")
        self._number = number
        lib.dlx_ring_join(self._ring, number)

    def _try(self, nanoseconds: int) -> int:
        slots = self._options[0]
        return int(lib.dlx_ring_next(self._ring, slots, self._number, self._newest, nanoseconds))

    def _check_others(self) -> None:
        if self._change_lock(0, command=_GET) != fcntl.F_UNLCK:
            return
        slot = self._try(0)  # a frame that it published before its end
        if slot == -1:
            fix = "Keep the ring in its process, and close it there."
            raise HandleError("its producer has ended without closing it", fix=fix)

    @property
    def number(self) -> int:
        """The number of the current frame, from 1, or 0; gaps show frames that were overwritten or skipped."""
        return 0 if self._lock is None else int(lib.dlx_ring_held(self._ring, self._number))

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
        return self._trees[slot]

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
