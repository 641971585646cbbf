"""Processes that begin where numpy and torch are imported, and nothing else is: forks of one that waits there.

Importing torch takes seconds, and many tests want a process of their own, which may die. Neither framework has begun
any work by then; dlx is imported in the fork. A fork ends as a process of its own does: its main script ends.
What was there before is out of the collector's sight, at the end too; where the end matters, `gc.unfreeze()` brings it
back. What is about importing, or about options of Python, starts Python anew.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

from sanitized import SANITIZED

SERVER = """
import gc, importlib.util, json, os, socket, sys, warnings
for name in ("numpy", "torch"):
    if importlib.util.find_spec(name):
        __import__(name)
gc.collect()
gc.freeze()
channel, path = socket.socket(fileno=int(sys.argv[1])), sys.path[1:]
while True:
    size, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
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
"""


class Warm:
    """One such process, with some options of Python."""

    def __init__(self, options):
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, *options, "-c", SERVER, str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self.channel = ours

    def run(self, code, argv, env, cwd, text, timeout):
        """Run code in a fork; return what `subprocess.run` would."""
        order = {"code": code, "argv": argv, "env": dict(os.environ if env is None else env), "cwd": str(cwd)}
        sent = json.dumps(order).encode()
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(text)
            given.seek(0)
            files = [each.fileno() for each in (given, out, err)]
            socket.send_fds(self.channel, [len(sent).to_bytes(8, "little")], files)
            self.channel.sendall(sent)
            child = self._number()
            self.channel.settimeout(timeout)
            try:
                status = self._number()
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                self.channel.settimeout(None)
                self._number()
                raise subprocess.TimeoutExpired(code, timeout) from None
            self.channel.settimeout(None)
            return subprocess.CompletedProcess(code, status, *map(_content, (out, err)))

    def _number(self):
        found = self.channel.recv(8, socket.MSG_WAITALL)
        assert found, f"the process that others are forked from ended: {self.process.wait()}"
        return int.from_bytes(found, "little", signed=True)

    def close(self):
        """End it."""
        self.channel.close()
        self.process.wait()


def _content(file):
    file.seek(0)
    return file.read().decode("utf-8", "replace")


_warm = {}


def run(code, *argv, options=(), env=None, cwd=".", text="", timeout=120):
    """Run code as ``python -c`` does, in a fork of a process that was started with these options of Python."""
    if SANITIZED:  # their run time libraries have threads of their own
        command = [sys.executable, *options, "-c", code, *argv]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd, input=text, check=False
        )
    if options not in _warm:
        _warm[options] = Warm(options)
    return _warm[options].run(code, argv, env, os.path.abspath(cwd), text, timeout)


def close():
    """End all of them: the tests are over."""
    while _warm:
        _warm.popitem()[1].close()
