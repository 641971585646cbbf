"""The arguments of every command. Nothing but argparse is imported here, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any, NoReturn

from dlx._version import __version__
from dlx.typing import READONLY

__all__ = ["SCHEMA", "WrongCall", "head", "parser"]

SCHEMA = 1
"""Version of what ``--json`` prints; it changes where a program that reads it would break."""

_SOURCE = """\
a source is
  a file          .npy .npz .safetensors: headers only, no framework needed
                  .pt .pth: by torch with weights_only, memory-mapped
                  .arrow .arrows .feather .parquet: the schema, by pyarrow
  pkg.mod:attr    an object; this IMPORTS AND RUNS pkg.mod
  'float32[3,4]'  an abstract tensor: host memory of that dtype and shape"""


def head(command: str) -> dict[str, Any]:
    """Return what every JSON document of a command begins with."""
    return {"schema": SCHEMA, "command": command or None, "dlx": __version__}


def _status(strict: str = "") -> str:
    """Return what exit statuses mean: 1 where a command has --strict, and when."""
    lines = ["0         done; a refusal that was explained is an answer"]
    lines += [f"1         under --strict: {strict}"] if strict else []
    lines += ["2         bad input or a wrong call, in one line on stderr", "130, 141  interrupted; nobody reads on"]
    return "\n  ".join(["exit status", *lines])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = _Parser(
        prog="dlx",
        description="What an array is, where it can go, and what this machine has.",
        epilog=_status("plan: something is refused; doctor: something is broken"),
    )
    top.add_argument("--version", action="version", version=f"dlx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _inspect(commands)
    _plan(commands)
    _dtypes(commands)
    _matrix(commands)
    _devices(commands)
    _doctor(commands)
    _bench(commands)
    return top


class WrongCall(Exception):
    """The words do not make a call: one line for the user, exit status 2.

    `program` is the part of the command line that is at fault, as in ``"dlx inspect"``.
    """

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program
        self.command = program.partition(" ")[2]


class _Parser(argparse.ArgumentParser):
    """Says things as they are written here, and takes no abbreviations, which would bind us for ever."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise what ends with one line, as any other bad input does."""
        raise WrongCall(self.prog, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print, and raise where that fails, at once: argparse keeps silent about it."""
        file = file or sys.stderr
        if message and file is not None:
            file.write(message)
            file.flush()


def _command(
    commands: Any, name: str, summary: str, epilog: str = "", *, strict: str = "", module: str = ""
) -> argparse.ArgumentParser:
    description = textwrap.fill(f"{summary[0].upper()}{summary[1:]}.", 78)
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog="\n\n".join(filter(None, (epilog, _status(strict))))
    )
    made.set_defaults(module=module or name)
    made.add_argument("--json", action="store_true", help=f'print JSON with "schema": {SCHEMA}')
    return made


def _add_sources(command: argparse.ArgumentParser) -> None:
    command.add_argument("sources", nargs="+", metavar="SOURCE", help="see below")
    command.add_argument("--all", action="store_true", help="show every array: fold nothing, cut nothing")
    command.add_argument(
        "--mapped", action="store_true", help="plan for arrays of files as memory-mapped read-only, not as loaded"
    )


def _inspect(commands: Any) -> None:
    command = _command(
        commands,
        "inspect",
        "show what arrays are: dtype, shape, strides, device, flags, and which targets take them",
        _SOURCE,
    )
    _add_sources(command)
    command.add_argument(
        "--to",
        metavar="NAMES",
        help="say which of these targets take it, as in torch,numpy; they are imported. 'all' means all that are "
        "installed. Without --to: all for an abstract tensor and for an object that is one array, else none",
    )


def _plan(commands: Any) -> None:
    command = _command(
        commands,
        "plan",
        "say what dlx.convert would do: share, copy or refuse, and why; nothing is converted",
        _SOURCE,
        strict="something is refused",
    )
    _add_sources(command)
    command.add_argument("--to", required=True, metavar="NAMES", help="targets, as in torch,numpy, or 'all'")
    command.add_argument("--device", help="where the result shall be: cpu, cuda:0")
    command.add_argument("--copy", choices=("auto", "never", "always"), default="auto", help="default: auto")
    command.add_argument("--readonly", choices=READONLY, default="copy", help="default: copy")
    command.add_argument("--detach", action="store_true", help="gradients may be left behind")
    command.add_argument("--strict", action="store_true", help="exit with 1 if anything is refused")


def _add_pair(command: argparse.ArgumentParser) -> None:
    command.add_argument("--from", dest="origin", metavar="NAMES", help="frameworks, as in torch,jax; default: all")
    command.add_argument("--to", metavar="NAMES", help="targets, as in numpy,dlx; default: all that are installed")


def _dtypes(commands: Any) -> None:
    command = _command(
        commands,
        "dtypes",
        "show every dtype: DLPack's numbers, and what each framework calls it",
        "Without options nothing is imported: words are those of the adapters' data.\n"
        "With --from or --to the frameworks are imported and a conversion of each\n"
        "dtype is planned, as `dlx matrix` does for all of them.",
    )
    _add_pair(command)
    command.set_defaults(live=False, svg=None)


def _matrix(commands: Any) -> None:
    command = _command(
        commands,
        "matrix",
        "show what becomes of every dtype between the frameworks installed: shared, viewed, copied or refused",
        "The frameworks are imported, an array of each dtype is made in each of them,\n"
        "and its conversion to every other is planned; nothing is converted.",
        module="dtypes",
    )
    _add_pair(command)
    command.add_argument("--svg", metavar="FILE", help="write it as a picture, for light and dark pages")
    command.set_defaults(live=True)


def _devices(commands: Any) -> None:
    command = _command(
        commands,
        "devices",
        "show the devices that the CUDA driver and each framework see, and what each calls them",
        "The driver and the frameworks are asked in processes of their own, several at\n"
        "once; importing a framework takes seconds.",
    )
    command.add_argument("names", nargs="*", metavar="NAME", help="frameworks to ask; default: all that are installed")
    command.add_argument("--driver", action="store_true", help="ask the CUDA driver only: import no framework")


def _doctor(commands: Any) -> None:
    command = _command(
        commands,
        "doctor",
        "show each adapter: ready, installed, missing or broken, with versions; ends with a block to paste",
        strict="something is broken; of what is named, also missing",
    )
    command.add_argument("names", nargs="*", metavar="NAME", help="adapters to look at; default: all")
    command.add_argument(
        "--load", action="store_true", help="import each framework, in a process of its own, and try it"
    )
    command.add_argument("--verbose", action="store_true", help="whole tracebacks of what is broken")
    command.add_argument(
        "--strict", action="store_true", help="exit with 1 if any is broken; of those named, also if missing"
    )


def _bench(commands: Any) -> None:
    command = _command(
        commands,
        "bench",
        "measure conversions between the frameworks installed here",
        "Figures are of this machine as it is now.",
    )
    command.add_argument("--pairs", metavar="A:B", help="pairs, as in numpy:torch,torch:numpy; default: all")
    command.add_argument("--quick", action="store_true", help="fewer rounds")
