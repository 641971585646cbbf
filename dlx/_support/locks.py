"""Fork-safe locks."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Protocol

__all__ = ["Holder", "lock_of", "no_fork", "remove_property_locks"]


class Holder(Protocol):
    """A weakly referenceable object whose lock `lock_of` creates."""

    _lock: threading.RLock | None


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_making = threading.RLock()
no_fork = threading.RLock()  # a fork waits until it is free


def lock_of(holder: Holder) -> threading.RLock:
    """Return the lock of an object, which a forked child can always take."""
    if holder._lock is None:
        with _making:
            if holder._lock is None:
                _holders.add(holder)  # first, so that a fork finds every lock
                holder._lock = threading.RLock()
    return holder._lock


def remove_property_locks(cls: type) -> None:
    """Remove the locks of a class's cached properties, as in Python 3.12.

    The lock of Python 3.11 covers all objects: a thread that imports a framework would block all other threads.
    """
    for value in vars(cls).values():
        if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
            value.lock = contextlib.nullcontext()


def _renew() -> None:
    """Replace the locks that other threads of the parent hold."""
    global _making
    _making = _free(_making)
    for holder in list(_holders):
        if holder._lock is not None:
            holder._lock = _free(holder._lock)


def _free(lock: threading.RLock) -> threading.RLock:
    if not lock.acquire(blocking=False):
        return threading.RLock()
    lock.release()  # it is free, or held by the forking thread, which continues here
    return lock


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_renew)
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
