"""Fork-safe locks."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Protocol

__all__ = ["Holder", "lock_of", "unlocked"]


class Holder(Protocol):
    """A weakly referenceable object with a lock, which is None until `lock_of` makes it."""

    _lock: threading.RLock | None


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_making = threading.RLock()


def lock_of(holder: Holder) -> threading.RLock:
    """Return the lock of an object, which a forked child can take whatever threads its parent had."""
    if holder._lock is None:
        with _making:
            if holder._lock is None:
                _holders.add(holder)  # first: a fork must find every lock
                holder._lock = threading.RLock()
    return holder._lock


def unlocked(cls: type) -> None:
    """Let the cached properties of a class be computed without a lock, as from Python 3.12 on.

    Python 3.11 has one lock for all objects: a thread that imports a framework would block all others and forked
    children.
    """
    for value in vars(cls).values():
        if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
            value.lock = contextlib.nullcontext()


def _renew() -> None:
    """Replace the locks of the parent's other threads, which do not exist in a child."""
    global _making
    _making = _free(_making)
    for holder in list(_holders):
        if holder._lock is not None:
            holder._lock = _free(holder._lock)


def _free(lock: threading.RLock) -> threading.RLock:
    if not lock.acquire(blocking=False):
        return threading.RLock()
    lock.release()  # it was free, or is held by the thread that forked, which goes on here
    return lock


os.register_at_fork(after_in_child=_renew)
