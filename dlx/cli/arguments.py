"""The arguments of every command. Only argparse is imported here, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from typing import Any, NoReturn

from dlx._support.stdout import SCHEMA
from dlx._version import __version__
from dlx.errors import did_you_mean
from dlx.typing import READONLY

COPY = {None: "auto", False: "never", True: "always"}
"""Values of ``copy`` -> those of the option ``--copy``."""

SHELLS = ("bash", "zsh", "fish")
_SOURCE = """\
a source is
  a file          .npy .npz .safetensors .gguf: headers only, by dlx itself
                  .pt .pth: by torch with weights_only, memory-mapped
                  .arrow .arrows .feather .parquet: the columns, by pyarrow
                  .h5 .hdf5: the list of datasets, by h5py
  a folder        all such files in it, or the one checkpoint that it is
  '*.npy'         all files with such names
  -               a file on stdin
  pkg.mod:attr    an object; this IMPORTS AND RUNS pkg.mod
  'float32[3,4]'  an abstract tensor: host memory of that dtype and shape"""


def _status(strict: str = "") -> str:
    """Return the meaning of exit statuses; `strict` says when a command fails under --strict."""
    lines = ["0         done; a refusal that was explained is an answer"]
    lines += [f"1         under --strict: {strict}"] if strict else []
    lines += ["2         bad input or a wrong call, in one line on stderr", "130, 141  interrupted; nobody reads on"]
    return "\n  ".join(["exit status", *lines])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = _Parser(
        prog="dlx",
        description="What an array is, where it can go, and what this machine has.",
        epilog=_status("plan: something is refused; doctor: something is broken"),
    )
    top.add_argument("--version", action="version", version=f"dlx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, *options: _Option, epilog: str = "", strict: str = "", **defaults: Any) -> None:
        description = textwrap.fill(f"{summary[0].upper()}{summary[1:]}.", 78)
        text = "\n\n".join(filter(None, (epilog, _status(strict))))
        command = commands.add_parser(name, help=summary, description=description, epilog=text)
        command.set_defaults(**{"module": name.replace("-", "_"), **defaults})
        command.add_argument("--json", action="store_true", help=f'print JSON with "schema": {SCHEMA}')
        for words, keywords in options:
            command.add_argument(*words, **keywords)

    sources = (
        _option("sources", nargs="+", metavar="SOURCE", help="see below"),
        _flag("--all", "show every array: fold nothing, cut nothing"),
    )
    pair = (
        _option("--from", dest="origin", metavar="NAMES", help="frameworks, as in torch,jax; default: all"),
        _option("--to", metavar="NAMES", help="targets, as in numpy,dlx; default: all that are installed"),
    )
    takers = (
        "say which of these targets take it, as in torch,numpy; they are imported. 'all' means all that are "
        "installed. Without --to: all for an abstract tensor and for an object that is one array, else none"
    )
    add(
        "inspect",
        "show what arrays are: dtype, shape, strides, device, flags, and which targets take them",
        *sources,
        _option("--to", metavar="NAMES", help=takers),
        epilog=_SOURCE,
    )
    add(
        "plan",
        "say what dlx.convert would do: share, copy or refuse, and why; nothing is converted",
        *sources,
        _option("--to", required=True, metavar="NAMES", help="targets, as in torch,numpy, or 'all'"),
        _option("--device", help="where the result shall be: cpu, cuda:0"),
        _option("--copy", choices=tuple(COPY.values()), default="auto", help="default: auto"),
        _option("--readonly", choices=READONLY, default="copy", help="default: copy"),
        _flag("--detach", "gradients may be left behind"),
        _flag("--strict", "exit with 1 if anything is refused"),
        epilog=_SOURCE,
        strict="something is refused",
    )
    add(
        "convert",
        "write the arrays of a file in another format: .npy, .npz, .safetensors, .arrow; no dtype is changed",
        _option("source", metavar="IN", help="any file that dlx.open reads, or - for stdin; see dlx inspect"),
        _option("target", metavar="OUT", help="its name's end says the format"),
        _flag("--force", "replace OUT if it is there"),
        epilog="OUT appears once it is complete and on the disk: a run that is killed may leave\n"
        ".OUT.dlx-partial, which the next run takes over. Arrays are written one at a\n"
        "time; nothing in IN is run.",
    )
    add(
        "dtypes",
        "show every dtype: DLPack's numbers, and what each framework calls it",
        *pair,
        epilog="Without options nothing is imported: words are those of the adapters' data.\n"
        "With --from or --to the frameworks are imported and a conversion of each\n"
        "dtype is planned, as `dlx matrix` does for all of them.",
        live=False,
        svg=None,
    )
    add(
        "matrix",
        "show what becomes of every dtype between the frameworks installed: shared, viewed, copied or refused",
        *pair,
        _option("--svg", metavar="FILE", help="write it as a picture, for light and dark pages"),
        epilog="The frameworks are imported, an array of each dtype is made in each of them,\n"
        "and its conversion to every other is planned; nothing is converted.",
        live=True,
        module="dtypes",
    )
    add(
        "devices",
        "show the devices that the CUDA driver and each framework see, and what each calls them",
        _option("names", nargs="*", metavar="NAME", help="frameworks to ask; default: all that are installed"),
        _flag("--driver", "ask the CUDA driver only: import no framework"),
        epilog="The driver and the frameworks are asked in processes of their own, several at\n"
        "once; importing a framework takes seconds.",
    )
    add(
        "doctor",
        "show each adapter: ready, installed, missing or broken, with versions; ends with a block to paste",
        _option("names", nargs="*", metavar="NAME", help="adapters to look at; default: all"),
        _flag("--load", "import each framework, in a process of its own, and try it"),
        _flag("--verbose", "whole tracebacks of what is broken"),
        _flag("--strict", "exit with 1 if any is broken; of those named, also if missing"),
        strict="something is broken; of what is named, also missing",
    )
    add(
        "new-adapter",
        "write a plugin for a framework that dlx does not know: module, entry point and tests",
        _option("name", metavar="NAME", help="the package of the framework, as it is imported"),
        _option("--into", metavar="FOLDER", help="a folder that is not there yet; default: dlx-NAME"),
        epilog="The package is imported, if it is there, to find its array types and dtypes.",
    )
    add(
        "completion",
        "print what a shell needs to complete the words of dlx",
        _option("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS)),
        epilog='bash  eval "$(dlx completion bash)" in ~/.bashrc\n'
        'zsh   eval "$(dlx completion zsh)" in ~/.zshrc, after compinit\n'
        "fish  dlx completion fish | source, in ~/.config/fish/config.fish\n\n"
        "The script is made by shtab, which the extra [completion] installs.",
    )
    return top


class WrongCall(Exception):
    """The words do not make a call of `program`, such as ``"dlx inspect"``: one line, exit status 2."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program
        self.command = program.partition(" ")[2]


class _Parser(argparse.ArgumentParser):
    """Keeps the line breaks of texts, and takes no abbreviations, which would have to work for ever."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown words in the parser whose options are like them, so that its error names the nearest."""
        self._words = list(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raise `WrongCall`; a missing option may be one that is misspelt."""
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

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print, and raise if that fails: argparse would keep silent about it."""
        file = file or sys.stderr
        if message and file is not None:
            file.write(message)
            file.flush()


_Option = tuple[tuple[str, ...], dict[str, Any]]


def _option(*words: str, **keywords: Any) -> _Option:
    return words, keywords


def _flag(word: str, text: str) -> _Option:
    return _option(word, action="store_true", help=text)
