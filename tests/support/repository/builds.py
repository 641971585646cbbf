"""An sdist of this checkout and a wheel from it, built once per run for all workers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile

from support.project import ROOT

LEFT = shutil.ignore_patterns(".*", "build", "dist", "site", "*.so", "*.o", "__pycache__", "*.egg-info")


def run(command, folder, **changes):
    """Run a command without the checkout on the path; return its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | changes
    command = [str(part) for part in command]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def once(factory, name, make):
    """Return the folder that `make(folder)` fills: one worker fills it, the others wait.

    An incomplete folder is built again, so that each test that needs it shows the failure.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # each worker has a folder in a common one
    folder = shared / name
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "finished").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "finished").touch()
    return folder


def _build(folder):
    """Build the sdist of a clean copy of the checkout, and the wheel from nothing but the unpacked sdist."""
    shutil.copytree(ROOT, folder / "checkout", ignore=LEFT)
    code = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run([sys.executable, "-W", "ignore", "-c", code], folder / "checkout")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    # Without optimization, which takes longest: no test measures this wheel. The last option wins.
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O0\n')
    compiler.chmod(0o755)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", folder]
    run([sys.executable, "-m", "pip", "wheel", *options, "."], source, CC=str(compiler))
    shutil.rmtree(folder / "checkout")
    shutil.rmtree(folder / "unpacked")


def distribution(factory, pattern):
    """Return the sdist or the wheel whose name matches a pattern; build both if needed."""
    (found,) = once(factory, "distributions", _build).glob(pattern)
    return found
