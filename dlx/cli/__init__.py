"""The command `dlx`: what an array is, where it can go, and what this machine has.

Nothing is imported before it is needed: `--help` loads argparse only, a file's header needs no framework, and rich
draws progress bars only. Exit status: 0 done; 1 refused, or not all ready, under ``--strict``; 2 bad input
or a wrong call, in one line on stderr, and as JSON on stdout under ``--json``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

BAD, INTERRUPTED, PIPE = 2, 130, 141  # the last two as a shell reports a program that SIGINT or SIGPIPE ended
TRACEBACK = "DLX_TRACEBACK"  # an environment variable: show the whole traceback of a fault of dlx


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    argv
        Arguments without the program's name; those of the process if left out.

    Raises
    ------
    SystemExit
        By argparse: 0 after ``--help`` and ``--version``.
    """
    from dlx.cli.arguments import WrongCall, build_parser

    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = ""
    try:
        arguments = build_parser().parse_args(words)
        command = arguments.command
        return _run(arguments)
    except WrongCall as error:
        return _fail(error.command, f"{error}; see {error.program} --help", "--json" in words, "WrongCall")
    except BrokenPipeError:  # `dlx dtypes | head` reads no further
        return PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # of stdout, for instance on a full disk
        if os.environ.get(TRACEBACK):
            raise
        return _fail(command, f"stdout could not be written: {error.strerror or error}", False, "OSError")


def _run(arguments: Any) -> int:
    """Run one command; print a failure in one line, also of foreign code."""
    try:
        from dlx._support.reflect import class_name, exception_text, safe_repr
        from dlx._support.screen import Screen
        from dlx._support.text import one_line
        from dlx.cli.model import BadInput
        from dlx.errors import DlxError
    except ImportError as error:  # no compiled core for this Python
        return _fail(arguments.command, f"dlx itself is not whole: {error}", arguments.json, "ImportError")
    from dlx._support.stdout import own_stdout

    try:
        with own_stdout() as out:
            screen = Screen(arguments.command, as_json=arguments.json, file=out)
            status = int(importlib.import_module(f"dlx.cli.commands.{arguments.module}").run(arguments, screen))
            screen.flush()
            return status
    except (BadInput, DlxError) as error:
        text, kind = str(error), type(error).__name__
    except MemoryError:
        text, kind = "out of memory", "MemoryError"
    except SystemExit as error:  # of an imported module, or of an object's code
        text, kind = f"code that it runs ends the process: SystemExit({safe_repr(error.code)})", "SystemExit"
    except Exception as error:
        if isinstance(error, OSError) or os.environ.get(TRACEBACK):
            raise
        kind = class_name(type(error))
        text = f"a fault of dlx: {exception_text(error, 400)}; please report it with what {TRACEBACK}=1 shows"
    return _fail(arguments.command, one_line(text, 1500), arguments.json, kind)


def _fail(command: str, text: str, as_json: bool, kind: str) -> int:
    """Print an error in one line, under --json as JSON on stdout too, and return the exit status."""
    from dlx._support.stdout import complain, head, say

    complain(command, text)
    if as_json:
        import json

        say(json.dumps({**head(command), "error": {"kind": kind, "message": text}}, indent=2), sys.stdout)
    return BAD
