"""The command `dlx` in a process of its own, its memory bounded, and in this one, for tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys

from dlx.cli import main
from support.processes import warm
from support.project import FREE_THREADED
from support.sanitizers import SANITIZED

COMMANDS = ("inspect", "plan", "convert", "dtypes", "matrix", "devices", "doctor", "new-adapter", "completion")
IMPORTED = ("dlx.cli", "dlx.cli.commands.inspect", "dlx.cli.commands.plan")
# Bytes of address space: enough for Python and the core, not for what a header may claim. Without the GIL Python's own
# allocator takes addresses by the GiB.
MEMORY = (3 << 30) if FREE_THREADED else 768 << 20


def dlx(*words, cwd=None, memory=MEMORY, env=None, code=None, imported=False):
    """Run the command; return (exit status, stdout, stderr).

    It is a fork of a process that has imported the command, but for `env` and `code`; `imported`: numpy and torch are
    imported, too, and memory is not bounded. See warm.py.
    """
    # The process bounds itself: what runs between fork and exec makes jax warn, once it was imported here. Sanitizers
    # want more addresses than there is memory.
    bound = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))\n"
    run = "" if memory is None or imported or SANITIZED else bound
    run += code or "import runpy; runpy.run_module('dlx', run_name='__main__', alter_sys=True)"
    words = [*map(str, words)]
    if imported or (env is None and code is None):
        done = warm.run(run, *words, cwd=cwd or ".", modules=warm.FRAMEWORKS if imported else IMPORTED)
    else:
        command = [sys.executable, "-c", run, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=env, check=False)
    return done.returncode, done.stdout, done.stderr


def refused(*words, **options):
    """Run the command, which must end with status 2 and one line on stderr; return that line."""
    status, out, err = dlx(*words, **options)
    assert (status, out) == (2, ""), (status, out, err)
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err.rstrip("\n")


def here(*words):
    """Run the command in this process; return (exit status, stdout)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([*map(str, words)])
    return status, out.getvalue()


def shown_on(terminal):
    """Return what was written to a terminal (this end of `os.openpty`) whose other end is closed; close it."""
    text = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(terminal, 1 << 16):  # one read may give a part
            text += part
    os.close(terminal)
    return text


def document(*words):
    """Run the command with --json in this process; return what it printed, parsed."""
    status, out = here(*words, "--json")
    assert status == 0
    found = json.loads(out)
    assert (found["schema"], found["command"]) == (1, words[0])
    return found
