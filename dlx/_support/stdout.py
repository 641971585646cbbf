"""Redirect stray output of imported code and its subprocesses to stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from dlx._version import __version__

__all__ = ["SCHEMA", "complain", "has_colors", "head", "own_stdout", "say", "silence"]

SCHEMA = 1
"""Version of the ``--json`` documents, increased for incompatible changes."""


def head(command: str) -> dict[str, Any]:
    """Return the first keys of every JSON document of a command."""
    return {"schema": SCHEMA, "command": command or None, "dlx": __version__}


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Yield the process's stdout as another file, while ``sys.stdout`` and descriptor 1 are stderr.

    A replaced ``sys.stdout`` is yielded unchanged. It raises an OSError if stdout is closed or full.
    """
    out = sys.stdout
    if out is None:
        raise OSError(errno.EBADF, "it is closed")
    out.flush()
    with contextlib.redirect_stdout(sys.stderr):
        if _descriptor(out) != 1:
            yield out
            return
        saved = os.dup(1)
        try:
            try:
                os.dup2(2, 1)
            except OSError:
                silence(1)
            # Terminals are line-buffered; a C locale lacks most characters.
            buffering = 1 if os.isatty(saved) else -1
            with os.fdopen(saved, "w", buffering, out.encoding, "backslashreplace", closefd=False) as file:
                yield file
                file.flush()
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def silence(descriptor: int) -> None:
    """Discard the output of a descriptor."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _descriptor(file: TextIO) -> int | None:
    try:
        return file.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def complain(command: str, text: str) -> None:
    """Print an error on one line of stderr, or wrapped and coloured on a terminal."""
    head = f"dlx {command}: " if command else "dlx: "
    text, file = head + text, sys.stderr
    try:
        is_terminal = file is not None and file.isatty()
    except ValueError:  # closed or detached
        is_terminal = False
    if is_terminal:
        import shutil
        import textwrap

        width = max(shutil.get_terminal_size().columns, 20)
        text = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    if has_colors(is_terminal=is_terminal):
        text = f"\x1b[1;31m{head[:-1]}\x1b[0m{text[len(head) - 1 :]}"
    say(text, file)


def has_colors(*, is_terminal: bool) -> bool:
    """Return whether output is coloured, by the usual environment variables."""
    disabled = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not disabled and (is_terminal or bool(os.environ.get("FORCE_COLOR")))


def say(text: str, file: TextIO | None) -> None:
    """Print a line to a stream, and ignore failures of a closed or full one."""
    if file is not None:
        try:
            print(text, file=file, flush=True)
        except OSError:
            silence(file.fileno())  # otherwise Python reports an error at exit
