"""Paths of the project, commands for programs, and C files compiled for tests."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # a free-threaded build


LIBRARIES = ROOT / "build" / "tests"


def program(name, *arguments, options=()):
    """Return the command that runs a program of this package with options of Python."""
    return [sys.executable, *options, str(SUPPORT), name, *map(str, arguments)]


def compiled(name):
    """Compile a C file of the tests as a library, unless its sources and command are unchanged; return its path."""
    source, include = ROOT / "tests" / "c" / f"{name}.c", ROOT / "c_src" / "include"
    command = ["cc", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{include}", f"-I{sysconfig.get_path('include')}", str(source), "-lpthread"]
    made_of = hashlib.sha256("\0".join([*command, sysconfig.get_config_var("EXT_SUFFIX")]).encode())
    for path in sorted([*source.parent.glob("*.[ch]"), *include.glob("*.h")]):  # they include one another
        made_of.update(path.read_bytes())
    target = LIBRARIES / f"{name}-{made_of.hexdigest()[:16]}.so"
    if not target.exists():
        LIBRARIES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=LIBRARIES) as folder:
            subprocess.run([*command, "-o", f"{folder}/made"], check=True)
            os.replace(f"{folder}/made", target)  # other processes may do the same
    return target
