"""Processes that start with numpy, torch or other modules imported: forks of a process that waits there.

Importing torch takes seconds, and many tests need a process that may crash. In the waiting process no framework has
started work; the fork imports dlx. The fork ends as other processes do, when its main script ends.

Objects from before the fork are frozen for the collector, also at exit; tests of the exit call `gc.unfreeze()`. With
DLX_SHORT_EXIT, which `make test` sets when it leaves out slow tests, a fork with frozen objects ends after the atexit
functions, because torch's teardown costs more than most tests. Processes of the conformance kit always end completely.
Tests of imports, or of options of Python, start Python itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import types

from support.sanitizers import SANITIZED

SERVER = """
import gc, importlib.util, json, os, socket, sys, sysconfig, warnings
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.modules["triton"] = None  # as in conftest.py
path = sys.path[1:]
sys.path[:0] = json.loads(sys.argv[3])
for name in json.loads(sys.argv[2]):
    if importlib.util.find_spec(name):
        __import__(name)
gc.collect()
gc.freeze()
channel = socket.socket(fileno=int(sys.argv[1]))
while True:
    size, descriptors, _, _ = socket.recv_fds(channel, 8, 4)
    if not size:
        os._exit(0)
    order = json.loads(channel.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a library's threads that wait, such as OpenBLAS's
        child = os.fork()
    if not child:
        break
    for each in descriptors:
        os.close(each)
    channel.sendall(child.to_bytes(8, "little"))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    channel.sendall(status.to_bytes(8, "little", signed=True))
channel.close()
for number, each in enumerate(descriptors):
    os.dup2(each, number)
    os.close(each)
os.chdir(order["cwd"])
os.environ.clear()
os.environ.update(order["env"])
sys.argv = ["-c", *order["argv"]]
sys.path = ["", *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep)), *path]
code = order["code"]
for name in [name for name in globals() if name[:2] != "__" and name != "code"]:
    del globals()[name]
exec(compile(globals().pop("code"), "<string>", "exec"), globals())
import atexit, gc, os, sys, threading
if os.environ.get("DLX_SHORT_EXIT") and gc.get_freeze_count():
    threading._shutdown()
    atexit._run_exitfuncs()
    for each in (sys.stdout, sys.stderr):
        if each and not each.closed:
            each.flush()
    os._exit(0)
"""


class Warm:
    """A process that forks children, with options of Python."""

    def __init__(self, options, modules):
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        arguments = [str(theirs.fileno()), json.dumps(modules), json.dumps([path for path in sys.path if path])]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *options, "-c", SERVER, *arguments], pass_fds=[theirs.fileno()], env=environment
            )
        self.channel = ours
        self.unread = None  # the fork whose status was not read yet; 0: its process id was not read yet

    def start(self, code, argv, env, cwd, files):
        """Run code in a fork with these files as standard input, output, error and 3; return its process id."""
        order = {"code": code, "argv": argv, "env": dict(os.environ if env is None else env), "cwd": str(cwd)}
        sent = json.dumps(order).encode()
        self.unread = 0
        socket.send_fds(self.channel, [len(sent).to_bytes(8, "little")], files)
        self.channel.sendall(sent)
        child = self._number()
        assert child > 0, f"no number of a process: {child}"
        self.unread = child
        return child

    def wait(self, child, timeout=None):
        """Return the exit status of a fork; kill it if it takes too long, or if the wait is interrupted."""
        try:
            self.channel.settimeout(timeout)
            try:
                status = self._number()
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                self.channel.settimeout(None)
                self._number()
                status = None
            self.channel.settimeout(None)
            self.unread = None
        except BaseException:
            self.abandon()
            raise
        if status is None:
            raise subprocess.TimeoutExpired(str(child), timeout)
        return status

    def abandon(self):
        """Kill the process and its fork: later messages belong to an abandoned call."""
        for key in [key for key, server in _warm.items() if server is self]:
            del _warm[key]
        if self.unread:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.unread, signal.SIGKILL)
        self.process.kill()
        self.close()

    def _number(self):
        found = self.channel.recv(8, socket.MSG_WAITALL)
        assert found, f"the process that others are forked from ended: {self.process.wait()}"
        return int.from_bytes(found, "little", signed=True)

    def close(self):
        """End the process."""
        self.channel.close()
        self.process.wait()


def _content(file):
    file.seek(0)
    return file.read().decode("utf-8", "replace")


FRAMEWORKS = ("numpy", "torch")
PLAIN = ("_cffi_backend", "ctypes", "dataclasses", "importlib.resources", "inspect", "json", "pluggy", "tempfile")
"""Modules that dlx imports from other packages: a third of the time of `import dlx`."""
WARP = "Warp CUDA warning: Could not find or load the NVIDIA CUDA driver."
"""Where there is no GPU, NVIDIA Warp prints this when it starts, which no option of it prevents."""
_warm = {}


def _started(options, modules):
    """Return the process with these options and imported modules; start it if needed."""
    server = _warm.get((options, modules))
    if server is not None and server.unread is not None:  # interrupted between start and wait
        server.abandon()
    if (options, modules) not in _warm:
        _warm[options, modules] = Warm(options, modules)
    return _warm[options, modules]


def run(code, *argv, options=(), env=None, cwd=".", text="", timeout=120, modules=FRAMEWORKS):
    """Run code as ``python -c`` does, in a fork of a process with these options that has imported the modules."""
    if SANITIZED:  # their runtime libraries have threads
        command = [sys.executable, *options, "-c", code, *argv]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd, input=text, check=False
        )
    server = _started(options, modules)
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text)
        given.seek(0)
        child = server.start(code, argv, env, os.path.abspath(cwd), [each.fileno() for each in (given, out, err)])
        status = server.wait(child, timeout)
        return subprocess.CompletedProcess(code, status, *map(_content, (out, err)))


def python(code, *, args=("-X", "dev"), env=None, timeout=120, imported=()):
    """Run code in a fresh interpreter (`-X dev`), expect exit status 0 and empty stderr, and return stdout.

    `imported`: modules that are imported already, for tests that are not about imports; True means `FRAMEWORKS`.
    """
    code = textwrap.dedent(code)
    if imported:
        modules = FRAMEWORKS if imported is True else imported
        done = run(code, options=args, env=env, timeout=timeout, modules=modules)
    else:
        command = [sys.executable, *args, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith(WARP)]
    assert not lines, done.stderr
    return done.stdout


class Worker:
    """A process of the conformance kit as a fork: the part of `subprocess.Popen` that `dlx.testing.runner` uses."""

    def __init__(self, modules, command, *, pass_fds, env, **_):
        python, *options, _, module = command[: command.index("--work")]
        assert python == sys.executable
        (writer,) = pass_fds
        argv = [*command[command.index("--work") : command.index(str(writer))], "3"]
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        env = {name: value for name, value in env.items() if name != "DLX_SHORT_EXIT"}  # the kit grades the exit, too
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, errors="replace")
        self.server, self.returncode = _started(tuple(options), modules), None
        with open(os.devnull) as nothing:
            self.child = self.server.start(code, argv, env, os.getcwd(), [nothing.fileno(), writing, writing, writer])
        os.close(writing)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stdout.close()
        self.returncode = self.server.wait(self.child, 120)

    def kill(self):
        """Kill the process."""
        os.kill(self.child, signal.SIGKILL)


def fork_workers(monkeypatch, *modules):
    """Make the kit fork its processes from one that has imported modules, instead of starting Python."""
    if not SANITIZED:
        others = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "STDOUT")}
        start = functools.partial(Worker, modules)
        monkeypatch.setattr("dlx.testing.runner.subprocess", types.SimpleNamespace(Popen=start, **others))


def close():
    """End all waiting processes, after the tests."""
    while _warm:
        _warm.popitem()[1].close()
