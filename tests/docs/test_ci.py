"""`.ci/tests`: failed tests run again; those that then pass are named; an aborted run fails."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.project import ROOT

SCRIPT = ROOT / ".ci" / "tests"
TESTS = """
import pathlib, pytest
def test_of_a_kind_that_holds(): pass
@pytest.mark.parametrize("text", ["a b"])
def test_that_holds_the_second_time(text):
    before = pathlib.Path("before").exists()
    pathlib.Path("before").touch()
    assert before
"""

if not SCRIPT.exists():
    pytest.skip("an sdist has no CI", allow_module_level=True)


@pytest.fixture
def ci(tmp_path):
    """Run the script on test files, with a `make` that only calls pytest; return its status and lines."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"

    def run(tests, options="-p no:xdist", quiet="", **others):
        expected = '[ "$1" = a-target ] && [ "$2" = "NAME=a value" ] || exit 1'
        make.write_text(f'#!/bin/sh\n{expected}\nexec "{sys.executable}" -m pytest -ra {options} $ARGS\n')
        make.chmod(0o755)
        for name, text in {"test_it": tests, **others}.items():
            (tmp_path / f"{name}.py").write_text(text)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        env = clean | {"PATH": f"{make.parent}:{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        env |= {"ARGS": quiet}
        command = [tmp_path / ".ci" / "tests", "make", "a-target", "NAME=a value"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        return done.returncode, done.stdout.splitlines()

    return run


@pytest.mark.parametrize("quiet", ["", "-q"])
def test_what_passes_only_the_second_time_is_named(ci, quiet):
    """It counts as success; pytest's closing lines come last."""
    status, lines = ci(TESTS, quiet=quiet)
    assert status == 0, lines
    name = "test_it.py::test_that_holds_the_second_time[a b]"
    assert lines[-3] == f"passed only the second time: {name}"
    assert re.match("first: (=+ )?1 failed, 1 passed in ", lines[-2])
    assert re.match("second: (=+ )?1 passed(, 1 deselected)? in ", lines[-1])


def test_what_fails_twice_fails(ci):
    """A test that fails twice fails the run, even if others pass the second time."""
    status, lines = ci(TESTS + "def test_broken(): assert 0\n")
    assert status != 0
    assert not [line for line in lines if line.startswith("passed only the second time")]
    assert re.match("first: =+ 2 failed, 1 passed in ", lines[-2])
    assert re.match("second: =+ 1 failed, 1 passed in ", lines[-1])


def test_what_passes_is_run_once(ci):
    """If all pass, only pytest's output is printed."""
    status, lines = ci("def test_it(): pass\n")
    assert status == 0 and "passed in" in lines[-1] and "second" not in " ".join(lines)


FIRST = """
import os, pathlib
first = not pathlib.Path("before").exists()
"""
BROKEN_IN_ONE_WORKER = (
    FIRST
    + """
if os.environ["PYTEST_XDIST_WORKER"] == "gw1":
    pathlib.Path("before").touch()
    assert not first
def test_it(): pass
"""
)
CRASH = (
    FIRST
    + """
def test_that_crashes():
    pathlib.Path("before").touch()
    if first:
        os._exit(1)
"""
)


@pytest.mark.parametrize(
    ("tests", "options", "said"),
    [
        (BROKEN_IN_ONE_WORKER, "", "ERROR|Different tests were collected"),
        (CRASH, "--max-worker-restart 0", "gw[0-9]|worker restarting disabled"),
    ],
    ids=["not-collected-by-one", "crashed"],
)
@pytest.mark.slow
def test_a_run_that_stopped_early_fails(ci, tests, options, said):
    """An aborted run fails without a second run, which would hide its failures and miss tests."""
    pytest.importorskip("xdist")
    others = "".join(f"def test_{i}(): pass\n" for i in range(20))
    status, lines = ci(tests, f"-p xdist -n 2 --dist loadfile {options}", test_others=others)
    assert status == 1, lines
    assert re.match(f"not run again, .*({said})", lines[-1]), lines
