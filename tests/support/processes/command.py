"""The command `dlx`, in a process with bounded memory or in this process."""

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
# Bytes of address space: enough for Python and the core, not for the sizes that a header may claim. Without the GIL,
# Python's allocator reserves addresses by the GiB.
MEMORY = (3 << 30) if FREE_THREADED else 768 << 20


def dlx(*words, cwd=None, memory=MEMORY, env=None, code=None, imported=False):
    """Run the command; return (exit status, stdout, stderr).

    Without `env` and `code` it runs in a fork of a process that has imported the command. `imported`: numpy and torch
    are imported, too, and memory is not bounded. See warm.py.
    """
    # The process bounds itself, since code between fork and exec makes jax warn if it is imported here. Sanitizers need
    # more addresses than there is memory.
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
    """Run the command, expect status 2 and one line on stderr, and return that line."""
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
    """Return the text written to a terminal (this end of `os.openpty`) whose other end is closed; close it."""
    text = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(terminal, 1 << 16):  # a read may return only a part
            text += part
    os.close(terminal)
    return text


def document(*words):
    """Run the command with --json in this process; return the parsed output."""
    status, out = here(*words, "--json")
    assert status == 0
    found = json.loads(out)
    assert (found["schema"], found["command"]) == (1, words[0])
    return found
