"""Atomic writes: a file appears complete or not at all, even if the process is killed."""

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
def replace_file(path: Path, *, force: bool, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file named ``.NAME.dlx-partial``, which is renamed to `path` once it is complete (`sync`: on disk)."""
    path = Path(os.path.realpath(path))  # follow a link instead of replacing it
    mode = _find_mode(path, force)
    if not path.parent.is_dir():
        raise FileError(f"the folder {path.parent} does not exist", source=str(path), fix="Create it first.")
    if sys.platform == "win32":
        with _replace_closed(path, force) as handle:
            yield handle
        return
    partial = path.with_name(f".{_shorten(path.name)}.dlx-partial")
    while (handle := _lock_partial(partial, path)) is None:
        pass
    with handle:
        try:
            if os.fstat(handle.fileno()).st_size:  # of a killed process; ext4 flushes a truncated file at close
                handle.truncate(0)
            yield handle
            handle.flush()
            if mode is not None:
                os.fchmod(handle.fileno(), mode)
            if sync:
                os.fsync(handle.fileno())
            _rename(partial, path, force)
            if sync:
                with contextlib.suppress(OSError):  # unsupported by some file systems
                    _synchronise(path.parent)
        finally:
            if _is_named(handle, partial):
                partial.unlink()


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
            raise _exists_error(path) from None
        finally:
            handle.close()
            partial.unlink(missing_ok=True)


def _shorten(name: str) -> str:
    """Return a name, or its digest if the name of the partial file would be longer than file systems allow."""
    raw = os.fsencode(name)
    return name if len(raw) <= MAX_NAME else importlib.import_module("hashlib").sha256(raw).hexdigest()


def _find_mode(path: Path, force: bool) -> int | None:
    """Return the permissions of the file to replace, or None if no such file exists."""
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise FileError("it exists and is not a regular file", source=str(path), fix="Choose another name.")
    if not force:
        raise _exists_error(path)
    return stat.S_IMODE(found)


def _exists_error(path: Path) -> FileError:
    return FileError("it already exists", source=str(path), fix="Pass --force to replace it, or choose another name.")


def _lock_partial(partial: Path, path: Path) -> BinaryIO | None:
    """Open the partial file and lock it; return None if another process has just completed it."""
    descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o666)
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(os.fdopen(descriptor, "r+b"))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError("another process is writing it", source=str(path), fix="Try again later.") from None
        if _is_named(handle, partial):
            if os.fstat(descriptor).st_nlink == 1:
                stack.pop_all()
                return handle
            partial.unlink()  # complete: its writer was killed after linking the file to its final name
    return None


def _is_named(handle: BinaryIO, name: Path) -> bool:
    """Return whether `name` is a name of an open file."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), name.lstat())
    except FileNotFoundError:
        return False


def _rename(partial: Path, path: Path, force: bool) -> None:
    """Move a complete file to its final name atomically."""
    if force:
        partial.replace(path)
        return
    try:
        os.link(partial, path)  # unlike a rename, this never replaces a file
    except FileExistsError:
        raise _exists_error(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        why = "its file system has no hard links, so dlx could overwrite a file that another program creates"
        raise FileError(why, source=str(path), fix="Pass --force, or choose another folder.") from None


def _synchronise(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
