"""The text of ``dlx --help``. This module imports no argparse, which takes as long to import as Python to start."""

from __future__ import annotations

import os
import sys

__all__ = ["COMMANDS", "columns", "exit_status", "overview"]

COMMANDS = {
    "inspect": "show the dtype, shape, strides, device and flags of arrays, and which targets accept them",
    "plan": "show whether dlx.convert would share, copy or refuse, and why, without converting",
    "convert": "write the arrays of a file in another format: .npy, .npz, .safetensors, .arrow; dtypes are kept",
    "dtypes": "show every dtype: DLPack's numbers, and each framework's name for it",
    "matrix": "show for each dtype whether installed frameworks share, view, copy or refuse each other's arrays",
    "devices": "show the devices that the CUDA driver and each framework see, and their names for them",
    "doctor": "show each adapter: ready, installed, missing or broken, with versions, and a block for bug reports",
    "new-adapter": "write a plugin for an unsupported framework: module, entry point and tests",
    "completion": "print a script that completes dlx commands in a shell",
}
"""Name -> what the command does."""


def exit_status(strict: str = "") -> str:
    """Return the help text about exit statuses; `strict` is the condition for status 1."""
    lines = ["0         success, even if dlx explains a refusal"]
    lines += [f"1         with --strict: {strict}"] if strict else []
    lines += ["2         bad input or a wrong call, in one line on stderr", "130, 141  interrupted; stdout was closed"]
    return "\n  ".join(["exit status", *lines])


def overview() -> str:
    """Return the help text of the whole command, as wide as the terminal."""
    width = max(columns() - 2, 38)
    indent = 4 + max(map(len, COMMANDS))
    lines = ["usage: dlx [-h] [--version] COMMAND ...", ""]
    lines += _wrap("Inspect arrays, plan and run conversions of files, and report on this machine.", width, "", "")
    lines += ["", "commands (dlx COMMAND --help describes each)"]
    for name, summary in COMMANDS.items():
        lines += _wrap(summary, width, f"  {name}".ljust(indent), " " * indent)
    lines += ["", "options:", "  -h, --help  show this text", "  --version   show the version of dlx", ""]
    lines.append(exit_status("plan: something is refused; doctor: something is broken"))
    return "\n".join(lines) + "\n"


def columns() -> int:
    """Return the width of the terminal, or of the variable COLUMNS."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or 80
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return 80


def _wrap(text: str, width: int, first: str, rest: str) -> list[str]:
    """Break a text between words; `first` and `rest` begin the lines."""
    lines = [first]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width and lines[-1].strip() and lines[-1] != first:
            lines.append(rest)
        lines[-1] += word if lines[-1] in (first, rest) else f" {word}"
    return lines
