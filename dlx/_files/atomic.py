"""A file that appears whole or not at all, whatever ends the process meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dlx.errors import FileError

__all__ = ["replaced"]

_BY_NUMBER = "/proc/self/fd"
_LACKING = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)  # O_TMPFILE, by file system and kernel
_LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_HERE, _NOREPLACE = -100, 1  # AT_FDCWD and RENAME_NOREPLACE of Linux


@contextlib.contextmanager
def replaced(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Give a file to write to, which gets its name once it is complete and on the disk.

    Until then it has no name, where the file system can do that: nothing is left of a process that was killed.
    Elsewhere, and at the step in which it replaces another, it has one name for each path, ``.NAME.dlx-partial``,
    which the next run takes over.

    Raises
    ------
    FileError
        If there is such a file and `force` is false, or it is no regular file; also where it appeared meanwhile. And
        where the file system can name a file only by replacing what has the name, and `force` is false.
    OSError
        If it cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link is followed, not replaced
    mode = _mode(path, force)
    if not path.parent.is_dir():
        raise FileError(f"there is no folder {path.parent}", source=str(path), fix="Make it first.")
    handle, named = _opened(path)
    partial = _partial(path)
    with handle, _folder(path.parent) as folder:
        try:
            yield handle
            handle.flush()
            if mode is not None:
                os.fchmod(handle.fileno(), mode)
            os.fsync(handle.fileno())
            if named:
                _rename(partial, path, force)
            else:
                _name(handle, path, force, folder)
            with contextlib.suppress(OSError):  # it has its name, and not every file system does this
                os.fsync(folder)
        finally:
            if _is_named(handle, partial):  # else the name is of another run by now
                partial.unlink()


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.dlx-partial")


def _is_named(handle: BinaryIO, name: Path) -> bool:
    """Return whether a name is that of an open file."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), name.lstat())
    except FileNotFoundError:
        return False


def _mode(path: Path, force: bool) -> int | None:
    """Return the permissions of the file that is replaced, or None where there is none."""
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise FileError("it is there, and no regular file", source=str(path), fix="Name another file.")
    if not force:
        raise _taken(path)
    return stat.S_IMODE(found)


def _taken(path: Path) -> FileError:
    return FileError("it is there already", source=str(path), fix="Pass --force to replace it, or name another file.")


def _opened(path: Path) -> tuple[BinaryIO, bool]:
    """Return a new file in the folder of a path, and whether it has a name."""
    try:
        if not Path(_BY_NUMBER).is_dir():  # by which a file without a name gets one
            raise OSError(errno.EOPNOTSUPP, "no /proc")
        return os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b"), False
    except OSError as error:
        if error.errno not in _LACKING:
            raise
    while True:
        handle = _locked(path, os.O_CREAT)
        if handle is not None:
            os.ftruncate(handle.fileno(), 0)
            return handle, True


def _locked(path: Path, flags: int) -> BinaryIO | None:
    """Return the file that a path's partial name has, locked; None where another run gave it away meanwhile.

    Whoever has the lock of the file that has this name may write to it, and may take the name away.
    """
    partial = _partial(path)
    handle = os.fdopen(os.open(partial, os.O_RDWR | os.O_NOFOLLOW | flags, 0o666), "r+b")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_named(handle, partial):
            if os.fstat(handle.fileno()).st_nlink == 1:
                return handle
            partial.unlink()  # complete, and named: its run was killed before it took this name away
    except BlockingIOError:
        handle.close()
        raise FileError("another process is writing it", source=str(path), fix="Wait for it to end.") from None
    except BaseException:
        handle.close()
        raise
    handle.close()
    return None


def _name(handle: BinaryIO, path: Path, force: bool, folder: int) -> None:
    """Give a complete file without a name its name, in one step."""
    source = f"{_BY_NUMBER}/{handle.fileno()}"
    try:
        os.link(source, path, src_dir_fd=folder)  # Python follows the link in /proc only where a folder is given
        return
    except FileExistsError:
        if not force:
            raise _taken(path) from None
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before it has the name by which others could take it
    while True:  # a file without a name cannot replace another one
        try:
            os.link(source, _partial(path), src_dir_fd=folder)
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                left = _locked(path, 0)
                if left is not None:
                    with left:
                        _partial(path).unlink()
    _partial(path).replace(path)


def _rename(partial: Path, path: Path, force: bool) -> None:
    """Give a complete file that has its partial name the other one, in one step."""
    if force:
        partial.replace(path)
        return
    try:
        os.link(partial, path)  # which replaces nothing; the partial name is taken away by who calls this
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        if error.errno not in _LINKLESS:
            raise
        _rename_only(partial, path)


def _rename_only(partial: Path, path: Path) -> None:
    """Rename where there are no hard links, replacing nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):  # which Python's os lacks
        if libc.renameat2(_HERE, os.fsencode(partial), _HERE, os.fsencode(path), _NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
    else:
        number = errno.ENOSYS
    if number == errno.EEXIST:
        raise _taken(path)
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(path))
    raise FileError(
        "its file system has neither hard links nor a rename that replaces nothing",
        source=str(path),
        fix="Pass --force, or name a file elsewhere.",
    )
