"""The arguments of all commands. This module imports little besides argparse, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from typing import Any, NoReturn

from dlx._support.stdout import SCHEMA
from dlx._version import __version__
from dlx.cli.overview import COMMANDS, columns, exit_status, overview
from dlx.errors import did_you_mean
from dlx.typing import READONLY

COPY = {None: "auto", False: "never", True: "always"}
"""Value of ``copy`` -> value of the option ``--copy``."""

SHELLS = ("bash", "zsh", "fish")
_SOURCE = """\
a source is
  a file          .npy .npz .safetensors .gguf: headers only, read by dlx
                  .pt .pth: read by torch with weights_only, memory-mapped
                  .arrow .arrows .feather .parquet: columns, read by pyarrow
                  .h5 .hdf5: the list of datasets, read by h5py
  a folder        all such files in it, or a checkpoint in a folder
  '*.npy'         all files that match the pattern
  -               a file on stdin
  pkg.mod:attr    an object; this IMPORTS AND RUNS pkg.mod
  'float32[3,4]'  an abstract tensor: host memory of that dtype and shape"""


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Create the parser of the command line, with all commands or only one."""
    top = _Parser(prog="dlx")
    top.add_argument("--version", action="version", version=f"dlx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, *options: _Option, epilog: str = "", strict: str = "", **defaults: Any) -> None:
        if command not in ("", name):
            return
        summary = COMMANDS[name]
        description = textwrap.fill(f"{summary[0].upper()}{summary[1:]}.", 78)
        text = "\n\n".join(filter(None, (epilog, exit_status(strict))))
        parser = commands.add_parser(name, help=summary, description=description, epilog=text)
        parser.set_defaults(**{"module": name.replace("-", "_"), **defaults})
        parser.add_argument("--json", action="store_true", help=f'print JSON with "schema": {SCHEMA}')
        for words, keywords in options:
            parser.add_argument(*words, **keywords)

    sources = (
        _option("sources", nargs="+", metavar="SOURCE", help="see below"),
        _flag("--all", "show every array, without folding or truncation"),
    )
    selection = (
        _option("--only", action="append", metavar="NAME", help="arrays to show, such as 'model.*'; repeatable"),
        _option("--skip", action="append", metavar="NAME", help="arrays to leave out, such as 'optim*'; repeatable"),
    )
    pair = (
        _option("--from", dest="origin", metavar="NAMES", help="frameworks, such as torch,jax; default: all"),
        _option("--to", metavar="NAMES", help="targets, such as numpy,dlx; default: all installed ones"),
    )
    takers = (
        "show which of these targets accept it, such as torch,numpy; they are imported. 'all' means all installed "
        "ones. Default: all for an abstract tensor and for an object that is one array, otherwise none"
    )
    add(
        "inspect",
        *sources,
        _option("--to", metavar="NAMES", help=takers),
        *selection,
        epilog=_SOURCE,
    )
    add(
        "plan",
        *sources,
        _option("--to", required=True, metavar="NAMES", help="targets, such as torch,numpy, or 'all'"),
        _option("--device", help="the device of the result: cpu, cuda:0"),
        _option("--copy", choices=tuple(COPY.values()), default="auto", help="default: auto"),
        _option("--readonly", choices=READONLY, default="copy", help="default: copy"),
        _flag("--detach", "allow the loss of gradients"),
        _dtype_option(),
        *selection,
        _flag("--strict", "exit with 1 if anything is refused"),
        epilog=_SOURCE,
        strict="something is refused",
    )
    add(
        "convert",
        _option("source", metavar="IN", help="any file that dlx.open reads, or - for stdin; see dlx inspect"),
        _option("target", metavar="OUT", help="its suffix selects the format"),
        _option("--only", action="append", metavar="NAME", help="members to write, such as 'model.*'; repeatable"),
        _option("--skip", action="append", metavar="NAME", help="members to leave out, such as 'optim*'; repeatable"),
        _dtype_option(),
        _flag("--force", "replace OUT if it exists"),
        epilog="OUT appears once it is complete and on disk. A killed run may leave\n"
        ".OUT.dlx-partial, which the next run replaces. Arrays are written one at a\n"
        "time; code in IN is never run.",
    )
    add(
        "dtypes",
        *pair,
        epilog="Without options no framework is imported; the names come from the adapters.\n"
        "With --from or --to the frameworks are imported and a conversion of each\n"
        "dtype is planned, as `dlx matrix` does for all of them.",
        live=False,
        svg=None,
    )
    add(
        "matrix",
        *pair,
        _option("--svg", metavar="FILE", help="write a picture, for light and dark pages"),
        epilog="The frameworks are imported, an array of each dtype is created in each of them,\n"
        "and its conversion to each of the others is planned, without converting.",
        live=True,
        module="dtypes",
    )
    add(
        "devices",
        _option("names", nargs="*", metavar="NAME", help="frameworks to query; default: all installed ones"),
        _flag("--driver", "query the CUDA driver only, without importing a framework"),
        epilog="The driver and each framework are queried in separate processes, several at\n"
        "once; importing a framework takes seconds.",
    )
    add(
        "doctor",
        _option("names", nargs="*", metavar="NAME", help="adapters to check; default: all"),
        _flag("--load", "import and try each framework, in a separate process"),
        _flag("--verbose", "show full tracebacks"),
        _flag("--strict", "exit with 1 if an adapter is broken, or if a named one is missing"),
        strict="an adapter is broken, or a named one is missing",
    )
    add(
        "new-adapter",
        _option("name", metavar="NAME", help="the framework's import name"),
        _option("--type", metavar="NAMES", help="its array types, such as Array; default: found in the package"),
        _option("--into", metavar="FOLDER", help="a new folder; default: dlx-NAME"),
        epilog="The package is imported, if it is installed, to find its array types and dtypes.",
    )
    add(
        "completion",
        _option("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS)),
        epilog='bash  eval "$(dlx completion bash)" in ~/.bashrc\n'
        'zsh   eval "$(dlx completion zsh)" in ~/.zshrc, after compinit\n'
        "fish  dlx completion fish | source, in ~/.config/fish/config.fish\n\n"
        "This needs shtab, which the extra [completion] installs.",
    )
    return top


class WrongCall(Exception):
    """Invalid arguments of `program`, such as ``"dlx inspect"``: one line, exit status 2."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program
        self.command = program.partition(" ")[2]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that knows the width, for which argparse would import `shutil`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=max(columns() - 2, 38))


class _Parser(argparse.ArgumentParser):
    """A parser that keeps line breaks in texts, and accepts no abbreviations, to stay free to add options."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown arguments in the subcommand's parser, so that its error suggests the closest option."""
        self._words = list(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raise `WrongCall`; report a misspelt option instead of the missing one."""
        if "arguments are required: --" in message:
            options = itertools.takewhile(lambda each: each != "--", self._words)
            named = (each.partition("=")[0] for each in options if each[:2] == "--")
            unknown = (each for each in named if each not in self._option_string_actions)
            message = next((f"unrecognized arguments: {each}" for each in unknown), message)
        wrong = re.search(r"COMMAND: invalid choice: '([\w-]+)'|unrecognized arguments: (--[\w-]+)", message)
        if wrong is not None:
            commands = self._subparsers._group_actions[0].choices if self._subparsers else None
            guess = did_you_mean(wrong[1] or wrong[2], (wrong[1] and commands) or self._option_string_actions)
            message = f"{message.partition(' (choose')[0]} ({guess[:1].lower()}{guess[1:]})" if guess else message
        raise WrongCall(self.prog, message)

    def format_help(self) -> str:
        """Return the help of a command, or the overview of all."""
        return super().format_help() if self._subparsers is None else overview()

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print, and raise if that fails; argparse would ignore the error."""
        file = file or sys.stderr
        if message and file is not None:
            file.write(message)
            file.flush()


_Option = tuple[tuple[str, ...], dict[str, Any]]


def _option(*words: str, **keywords: Any) -> _Option:
    return words, keywords


def _dtype(text: str) -> Any:
    """Parse a dtype, or changes such as ``float64=float32,int64=int32``, for the option `dtype`."""
    if "=" not in text:
        return text
    pairs = [each.strip().partition("=") for each in text.split(",")]
    if not all(old and new for old, _, new in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of changes such as float64=float32,int64=int32")
    return {old: new for old, _, new in pairs}


def _dtype_option() -> _Option:
    help_text = "float32 for all floating arrays, or changes: float64=float32,int64=int32"
    return _option("--dtype", type=_dtype, metavar="DTYPE", help=help_text)


def _flag(word: str, text: str) -> _Option:
    return _option(word, action="store_true", help=text)
