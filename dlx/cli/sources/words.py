"""The words of a command line: files, globs, folders, stdin, and what `open_source` knows besides."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlx._files.reading import ENDS
from dlx._files.safetensors import INDEX
from dlx._files.signatures import other_folder
from dlx._support.screen import Screen
from dlx._support.text import one_line
from dlx.cli.model import BadInput, Source
from dlx.cli.sources.files import open_source
from dlx.errors import DlxError
from dlx.typing import Readonly

__all__ = ["open_sources", "stdin_file"]

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_GLOB = re.compile(r"[*?]|\[[^\]]+\]")


def open_sources(
    words: list[str], screen: Screen, readonly: Readonly | None
) -> tuple[list[Source], list[BadInput | DlxError]]:
    """Return all sources that words stand for, and what is wrong with others: one that is bad spoils no other.

    `readonly` is that of `open_source`.

    Raises
    ------
    BadInput, DlxError
        If there is nothing else to show.
    """
    sources: list[Source] = []
    errors: list[BadInput | DlxError] = []
    for word in words:
        try:
            for name in _names(word):
                try:
                    sources.append(_opened(name, screen, readonly))
                except (BadInput, DlxError) as error:
                    errors.append(error)
        except BadInput as error:
            errors.append(error)
    if len(errors) == 1 and not sources:
        raise errors[0]
    return sources, errors


def _names(word: str) -> Iterator[str]:
    """Give the names of all sources that one word stands for."""
    shown = one_line(word, 120)
    if _URL.match(word):
        raise BadInput(f"{shown}: dlx reads files of this machine only: fetch it first, for instance with curl -LO")
    with contextlib.suppress(OSError, ValueError):  # said by who opens it
        if os.path.isdir(word):  # noqa: PTH112
            yield from _folder(Path(word), shown)
            return
        if not os.path.lexists(word) and _GLOB.search(word):
            found = sorted(glob.glob(word, recursive=True))  # noqa: PTH207
            if not found and re.search(r"[*?]", word):
                raise BadInput(f"{shown}: no file has a name like this")
            if found:
                for each in found:
                    yield from _names(each)
                return
    yield word


def _folder(path: Path, shown: str) -> list[str]:
    """Return the files of a folder that dlx reads; the folder itself, where it is one checkpoint or store."""
    names = sorted(each.name for each in path.iterdir() if each.is_file())
    if other_folder(path) is not None or any(name.endswith(INDEX) for name in names):
        return [str(path)]
    known = [str(path / name) for name in names if name.endswith(ENDS)]
    if not known:
        ends = ", ".join(ENDS)
        raise BadInput(f"{shown}: none of the {len(names)} files in this folder has a name that ends in one of {ends}")
    return known


@contextlib.contextmanager
def stdin_file(screen: Screen) -> Iterator[str]:
    """Give a path of what stdin is: a file, or what comes through a pipe, kept in a file without a name."""
    if sys.stdin is None:
        raise BadInput("-: stdin is closed")
    descriptor = sys.stdin.fileno()
    with contextlib.ExitStack() as stack:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            kept = stack.enter_context(tempfile.TemporaryFile())
            with screen.working("reading stdin"):
                shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.flush()
            descriptor = kept.fileno()
        yield f"/proc/self/fd/{descriptor}"


def _opened(name: str, screen: Screen, readonly: Readonly | None) -> Source:
    if name != "-":
        return open_source(name, screen, readonly=readonly)
    with stdin_file(screen) as path:
        return open_source(path, screen, shown="-", readonly=readonly)
