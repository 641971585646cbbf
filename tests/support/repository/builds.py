"""An sdist of this checkout, and the wheel that is made of it: built once a run, whichever workers want them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from support.project import ROOT

LEFT = shutil.ignore_patterns(".*", "build", "dist", "site", "*.so", "*.o", "__pycache__", "*.egg-info")


def run(command, folder, **changes):
    """Run a command without the checkout on the path; give what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | changes
    command = [str(part) for part in command]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def once(factory, name, make):
    """Give the folder that `make(folder)` fills: one worker makes it, the others wait for it.

    One that was not finished is made again, so that each test that wants it shows why it failed.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # workers have a folder each in a common one
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
    """Build the sdist of a clean copy of the checkout, and the wheel of the unpacked sdist and nothing else."""
    shutil.copytree(ROOT, folder / "checkout", ignore=LEFT)
    code = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run([sys.executable, "-W", "ignore", "-c", code], folder / "checkout")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    # What is asked of this wheel is not how fast it is, and to optimize takes longest of all. The last option counts.
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O0\n')
    compiler.chmod(0o755)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", folder]
    run([sys.executable, "-m", "pip", "wheel", *options, "."], source, CC=str(compiler))
    shutil.rmtree(folder / "checkout")
    shutil.rmtree(folder / "unpacked")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The sdist of a clean copy of the checkout."""
    (found,) = once(tmp_path_factory, "distributions", _build).glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built of the unpacked sdist and nothing else, without network."""
    (found,) = once(tmp_path_factory, "distributions", _build).glob("*.whl")
    return found
