"""The command `dlx`: what an array is, where it can go, and what this machine has.

Nothing is imported before it is needed: `--help` loads argparse only, a file's header needs no framework, and tables
are drawn by rich for terminals alone. Exit status: 0 done; 1 refused, or not all ready, under ``--strict``; 2 bad input
or a wrong call, in one line on stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

OK, STRICT, BAD = 0, 1, 2
PIPE, INTERRUPTED = 141, 130  # as a shell says of a program that SIGPIPE or SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    argv
        Arguments without the program's name; those of the process if left out.

    Raises
    ------
    SystemExit
        By argparse: 0 after ``--help``, 2 for a wrong call.
    """
    from dlx.cli.arguments import parser

    arguments = parser().parse_args(argv)
    try:
        from dlx.cli.entries import BadInput, one_line
        from dlx.cli.screen import Screen
        from dlx.errors import DlxError
    except ImportError as error:  # no compiled core for this Python
        print(f"dlx {arguments.command}: dlx itself is not whole: {error}", file=sys.stderr)
        return BAD

    screen = Screen(arguments.command, as_json=arguments.json)
    try:
        status = int(importlib.import_module(f"dlx.cli.{arguments.module}").run(arguments, screen))
        screen.flush()
        return status
    except (BadInput, DlxError) as error:
        text = one_line(str(error))
    except MemoryError:
        text = "out of memory"
    except BrokenPipeError:  # `dlx dtypes | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"dlx {arguments.command}: {text}", file=sys.stderr)
    return BAD
