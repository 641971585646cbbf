"""The versions of frameworks that tests are run with: one table, and what documentation and extras say of it."""

import os
import re
import subprocess
import tomllib

import pytest
from support.environments import versions
from support.project import ROOT, SUPPORT, program

requirements = pytest.importorskip("packaging.requirements")

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
NAMES = {"apache-tvm-ffi": "tvm-ffi", "paddlepaddle": "paddle", "warp-lang": "warp"}
FRAMEWORKS = (
    *("numpy", "torch", "jax", "pyarrow", "apache-tvm-ffi"),
    *("tensorflow", "paddlepaddle", "mlx", "warp-lang", "onnxruntime", "xarray", "pandas", "dask", "ray"),
)
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def runs(framework):
    """Give (version, Python) of a framework's runs."""
    first = [(each["install"][0], each["python"]) for each in versions.TABLE["runs"]]
    return [(each.partition("==")[2], python) for each, python in first if each.startswith(f"{framework}==")]


def test_every_framework_but_cupy_has_runs():
    """Each is in the table, and nothing else is; each requirement is one, and each file of tests is there."""
    wide = [run for run in versions.TABLE["runs"] if run.get("name") == "wide"]  # about all of them
    assert sum(len(runs(framework)) for framework in FRAMEWORKS) == len(versions.TABLE["runs"]) - len(wide)
    for run in versions.TABLE["runs"]:
        assert [requirements.Requirement(each).name for each in run["install"]]
    for path in versions.TABLE["tests"] + [path for run in versions.TABLE["runs"] for path in run.get("tests", ())]:
        assert (ROOT / path).exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_oldest_version_is_the_one_that_the_extra_asks_for(framework):
    """No version is claimed that the tests are not run with."""
    name = NAMES.get(framework, framework)
    (bound,) = requirements.Requirement(EXTRAS[name][0]).specifier
    assert bound.contains(runs(framework)[0][0])
    assert runs(framework)[0][0].startswith(bound.version)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_page_on_installing_names_each_version(framework):
    """A Python is named where it is not 3.11."""
    words = [version if python == "3.11" else f"{version} (Python {python})" for version, python in runs(framework)]
    assert f"\n| {framework} | {', '.join(words)} |\n" in PAGE


def test_the_page_names_the_versions_that_all_tests_run_with():
    """They agree with constraints.txt and the Makefile."""
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"\*\*All tests\*\* run with ([^:]*?\d)\.\n", PAGE)
    names = {"tvm-ffi": "apache-tvm-ffi"}
    for name, version in re.findall(r"([\w-]+) (\d[\w.]*)", sentence):
        assert f"\n{names.get(name, name)}=={version}" in pinned
        assert (name != "torch") or f"TORCH ?= torch=={version}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_a_run_can_be_shown_and_left_out():
    """What would be installed is printed; a run whose Python is not here is left out with a word."""
    script = program("environments.versions")
    shown = subprocess.check_output([*script, "--only", "numpy==1.26", "--print"], text=True)
    assert shown == "numpy==1.26.4 ml_dtypes==0.5.4\n"
    told = subprocess.check_output([*script, "--only", "numpy==1.26", "--pythons"], text=True)
    assert told.splitlines()[-1] == "numpy==1.26.4: left out, python3.11 does not run here"


# ---- Pythons of Debian's unstable suite ------------------------------------------------------------------------------


@pytest.fixture
def debian(tmp_path):
    """Run tests/support/environments/debian.sh with a test's programs instead of the machine's; return its output."""
    (tmp_path / "bin").mkdir()

    def run(*pythons, **programs):
        for name, code in programs.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
        command = ["sh", str(SUPPORT / "environments" / "debian.sh"), str(tmp_path / "debian"), *pythons]
        return subprocess.check_output(command, env=environment, text=True)

    return run


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({"id": "echo 1000"}, "a chroot needs root"),
        ({"id": "echo 0", "unshare": "exit 1", "debootstrap": "exit 1"}, "nothing can be mounted here"),
        (
            {"id": "echo 0", "unshare": 'shift; exec "$@"', "debootstrap": "exit 1"},
            "debootstrap failed (is there a network?), see",
        ),
    ],
)
def test_what_a_chroot_lacks_is_said(debian, programs, reason):
    """One sentence, and no failure."""
    (line,) = debian("python3.91", **programs).splitlines()
    assert line.startswith(f"note: python3.91 of Debian's unstable suite: {reason}") and line.endswith("; left out")


def test_nothing_is_done_for_no_python(debian):
    """Where all Pythons run here, no chroot is made."""
    assert debian(id="exit 1") == ""
