"""The command `dlx`, which inspects arrays, plans and runs conversions of files, and reports on this machine.

Imports are lazy: `--help` loads argparse only, reading a header loads no framework, and rich only draws progress bars.
Exit status: 0 success; 1 with ``--strict``, if something is refused or broken; 2 bad input or a wrong call, reported in
one line on stderr, and with ``--json`` also as JSON on stdout.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

from dlx._version import __version__
from dlx.cli.overview import COMMANDS, overview

__all__ = ["main"]

TYPE_CHECKING = False  # see `dlx`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

BAD, INTERRUPTED, PIPE = 2, 130, 141  # a shell reports the last two for a program killed by SIGINT or SIGPIPE
TRACEBACK = "DLX_TRACEBACK"  # environment variable: show the traceback of an internal error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    argv
        Arguments without the program's name; default: the arguments of the process.

    Raises
    ------
    SystemExit
        By argparse: 0 after ``--help`` and ``--version``.
    """
    if argv is None:  # the process ends with the command; collecting garbage would take a fifth of its time
        gc.set_threshold(100_000)
        atexit.register(gc.freeze)
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = ""
    try:
        if words in (["--help"], ["-h"], ["--version"]) and sys.stdout is not None:
            sys.stdout.write(f"dlx {__version__}\n" if words == ["--version"] else overview())
            sys.stdout.flush()
            return 0
        from dlx.cli.arguments import WrongCall, build_parser

        try:
            arguments = build_parser(words[0] if words[0] in COMMANDS else "").parse_args(words)
        except WrongCall as error:
            return _fail(error.command, f"{error}; see {error.program} --help", "--json" in words, "WrongCall")
        command = arguments.command
        return _run(arguments)
    except BrokenPipeError:  # as in `dlx dtypes | head`
        return PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # of stdout, for example on a full disk
        if os.environ.get(TRACEBACK):
            raise
        return _fail(command, f"cannot write to stdout: {error.strerror or error}", False, "OSError")


def _run(arguments: Any) -> int:
    """Run one command; print any error in one line, also errors of frameworks and users' code."""
    try:
        from dlx._support.reflect import class_name, exception_text, safe_repr
        from dlx._support.screen import Screen
        from dlx._support.text import one_line
        from dlx.cli.model import BadInput
        from dlx.errors import DlxError
    except ImportError as error:  # no compiled core for this Python
        text = _find_conflict() or f"dlx is not installed completely: {error}"
        return _fail(arguments.command, text, arguments.json, "ImportError")
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
    except SystemExit as error:  # of an imported module, or an object's code
        text, kind = f"the imported code ends the process: SystemExit({safe_repr(error.code)})", "SystemExit"
    except Exception as error:
        if isinstance(error, OSError) or os.environ.get(TRACEBACK):
            raise
        kind = class_name(type(error))
        text = f"internal error of dlx: {exception_text(error, 400)}; please report it with the output of {TRACEBACK}=1"
        if isinstance(error, AttributeError | ImportError):
            text = _find_conflict() or text
    return _fail(arguments.command, one_line(text, 1500), arguments.json, kind)


def _find_conflict() -> str:
    """Return why the installed files are not dlx's own, and the fix; empty if they are."""
    from dlx._support.installation import find_conflict

    return find_conflict()


def _fail(command: str, text: str, as_json: bool, kind: str) -> int:
    """Print an error in one line, with --json also as JSON on stdout, and return the exit status."""
    from dlx._support.stdout import complain, head, say

    complain(command, text)
    if as_json:
        import json

        say(json.dumps({**head(command), "error": {"kind": kind, "message": text}}, indent=2), sys.stdout)
    return BAD
