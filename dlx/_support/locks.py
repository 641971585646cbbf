"""Locks that a forked child can take, whatever threads of its parent held."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Protocol

__all__ = ["Holder", "lock_of", "unlocked"]


class Holder(Protocol):
    """An object with a lock of its own, made when it is first asked for: None until then. It is weakly referenced."""

    _lock: threading.RLock | None


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_making = threading.RLock()


def lock_of(holder: Holder) -> threading.RLock:
    """Return the lock of an object."""
    if holder._lock is None:
        with _making:
            if holder._lock is None:
                _holders.add(holder)  # first: once it can be taken, a fork must find it
                holder._lock = threading.RLock()
    return holder._lock


def unlocked(cls: type) -> None:
    """Let the cached properties of a class be computed without a lock, as they are from Python 3.12 on.

    Python 3.11 has one lock for all objects: a thread that imports a framework meanwhile blocks all others, and a child
    that is forked meanwhile deadlocks.
    """
    for value in vars(cls).values():
        if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
            value.lock = contextlib.nullcontext()


def _renew() -> None:
    """Replace the locks that threads of the parent held, which are not there to release them."""
    global _making
    _making = _free(_making)
    for holder in list(_holders):
        if holder._lock is not None:
            holder._lock = _free(holder._lock)


def _free(lock: threading.RLock) -> threading.RLock:
    if not lock.acquire(blocking=False):
        return threading.RLock()
    lock.release()  # free, or held by the thread that forked, which goes on here
    return lock


os.register_at_fork(after_in_child=_renew)
