"""Atomic writes: a file appears complete or not at all, even if the process is killed."""

# pathlib takes as long as all other steps of a small file:
# ruff: noqa: PTH105, PTH108, PTH112, PTH114, PTH116, PTH117, PTH118

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from dlx.errors import FileError

if sys.platform != "win32":
    import fcntl

MAX_NAME = 240  # bytes; file systems allow 255
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def replace_file(path: str | Path, *, force: bool, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file named ``.NAME.dlx-partial``, which is renamed to `path` once it is complete (`sync`: on disk)."""
    target = os.fspath(path)
    if os.path.islink(target) or not os.path.isabs(target):  # follow a link instead of replacing it
        target = os.path.realpath(target)
    mode = _find_mode(target, force)
    folder, name = os.path.split(target)
    if not os.path.isdir(folder):
        raise FileError(f"the folder {folder} does not exist", source=target, fix="Create it first.")
    if sys.platform == "win32":
        with _replace_closed(Path(target), force) as handle:
            yield handle
        return
    partial = os.path.join(folder, f".{_shorten(name)}.dlx-partial")
    while True:
        try:
            with open(os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o666), "r+b") as handle:  # noqa: PTH123
                if not _lock_partial(handle, partial, target):
                    continue
                try:
                    yield handle
                    handle.flush()
                    if mode is not None:
                        os.fchmod(handle.fileno(), mode)
                    if sync:
                        os.fsync(handle.fileno())
                    _rename(partial, target, force)
                except BaseException:
                    _unlink(handle, partial)  # not below: a forked child may keep the lock
                    raise
        except BaseException:  # an interrupt before the file was locked
            with contextlib.suppress(OSError), open(os.open(partial, os.O_RDWR | os.O_NOFOLLOW), "r+b") as left:  # noqa: PTH123
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another process or thread writes it
                _unlink(left, partial)
            raise
        if sync:
            with contextlib.suppress(OSError):  # unsupported by some file systems
                _synchronise(folder)
        return


def _unlink(handle: BinaryIO, name: str) -> None:
    """Delete a name of an open file, unless it is another file's by now."""
    if _is_named(os.fstat(handle.fileno()), name):
        os.unlink(name)


@contextlib.contextmanager
def _replace_closed(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Yield a new file with a name that no other process has, for Windows, which renames no open file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{_shorten(path.name)}.", delete=False) as handle:
        partial = Path(handle.name)
        try:
            yield cast("BinaryIO", handle)
            handle.flush()
            os.fsync(handle.fileno())
            handle.close()
            (partial.replace if force else partial.rename)(path)  # a rename replaces no file on Windows
        except FileExistsError:
            raise _exists_error(str(path)) from None
        finally:
            handle.close()
            partial.unlink(missing_ok=True)


def _shorten(name: str) -> str:
    """Return a name, or its digest if the name of the partial file would be longer than file systems allow."""
    raw = os.fsencode(name)
    return name if len(raw) <= MAX_NAME else importlib.import_module("hashlib").sha256(raw).hexdigest()


def _find_mode(target: str, force: bool) -> int | None:
    """Return the permissions of the file to replace, or None if no such file exists."""
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise FileError("it exists and is not a regular file", source=target, fix="Choose another name.")
    if not force:
        raise _exists_error(target)
    return stat.S_IMODE(found)


def _exists_error(target: str) -> FileError:
    return FileError("it already exists", source=target, fix="Pass --force to replace it, or choose another name.")


def _lock_partial(handle: BinaryIO, partial: str, target: str) -> bool:
    """Lock and empty the partial file; return False if another process has just completed it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError("another process or thread is writing it", source=target, fix="Try again later.") from None
    found = os.fstat(handle.fileno())
    is_new = _is_named(found, partial)
    if is_new and found.st_nlink > 1:  # complete: its writer was killed after linking the file to its final name
        os.unlink(partial)
        return False
    if is_new and found.st_size:  # of a killed process; ext4 flushes a truncated file at close
        handle.truncate(0)
    return is_new


def _is_named(found: os.stat_result, name: str) -> bool:
    """Return whether `name` is a name of an open file."""
    try:
        return os.path.samestat(found, os.lstat(name))
    except FileNotFoundError:
        return False


def _rename(partial: str, target: str, force: bool) -> None:
    """Move a complete file to its final name atomically."""
    if force:
        os.replace(partial, target)
        return
    try:
        os.link(partial, target)  # unlike a rename, this never replaces a file
    except FileExistsError:
        raise _exists_error(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        why = "its file system has no hard links, so dlx could overwrite a file that another program creates"
        raise FileError(why, source=target, fix="Pass --force, or choose another folder.") from None
    os.unlink(partial)


def _synchronise(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
