"""`dlx completion`: print a script of shtab with which a shell completes `dlx` commands."""

from __future__ import annotations

import argparse

from dlx._support.screen import Screen
from dlx.cli.arguments import build_parser
from dlx.cli.model import BadInput

_FILES = ("SOURCE", "IN", "OUT", "FILE", "FOLDER")  # metavars of files


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the script for one shell."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        if error.name != "shtab":
            raise
        raise BadInput("`dlx completion` needs shtab: pip install shtab") from None
    script = shtab.complete(_mark_files(build_parser()), arguments.shell)
    screen.block(script.rstrip("\n"))
    screen.document({"shell": arguments.shell, "script": script})
    return 0


def _mark_files(found: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Mark the arguments that are file names, for shtab."""
    import shtab

    for action in found._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                command.description = " ".join((command.description or "").split())  # shtab shows its first line
                _mark_files(command)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif not action.option_strings and action.choices is None:
            action.complete = {"zsh": "()"}  # type: ignore[attr-defined]  # otherwise zsh lists the options, but inserts none
    return found
