"""GitHub's workflows, which run on none of our machines: they can be read, and the names in them exist."""

import re
import tomllib

import pytest
from support.project import ROOT
from support.repository import wheels as cross

yaml = pytest.importorskip("yaml")

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE, NOX = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "noxfile.py"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = [
    each.rpartition(" ")[2] for each in SETTINGS["project"]["classifiers"] if re.search(r"Python :: 3\.\d+$", each)
]

if not FILES:
    pytest.skip("an sdist has no workflows", allow_module_level=True)


TESTS = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")


def steps(path):
    """Yield the steps of all jobs of a workflow."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    assert all("runs-on" in job for job in jobs.values())
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_is_a_workflow_for_each_purpose():
    """There are workflows for tests, wheels, the site and sanitizers, named after their files, each with a trigger."""
    assert [path.stem for path in FILES] == ["docs", "sanitizers", "tests", "wheels"]
    for path in FILES:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["name"] == path.stem
        assert workflow[True]  # YAML 1.1 reads the key `on` as a truth value
        assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_steps_name_make_targets_that_exist(path):
    """Each runs a target of make, or a session of nox, so that a developer can run the same."""
    targets = [word for step in steps(path) for word in re.findall(r"make (\S+)", step.get("run", ""))]
    assert targets or path.stem == "wheels"
    for target in targets:
        session = target.removeprefix("nox-")
        if session == target:
            assert re.search(rf"^(\w+ )*{target}( \w+)*:", MAKE, re.MULTILINE), target
        else:
            assert re.search(rf'^def {session}\(|^@nox.session\(name="{session}"\)', NOX, re.MULTILINE), target


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned(path):
    """An action is pinned to a commit, with its version in a comment."""
    used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert len(used) == sum("uses" in step for step in steps(path)) > 0
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


def test_each_system_is_tested_and_has_wheels():
    """Linux on two processors, macOS and Windows; what may fail has a comment with the reason."""
    wheels = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    for text in (TESTS, wheels):
        assert {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "windows-2025"} <= {
            *re.findall(r"[a-z]+-[\d.]+\S*[\w]", text)
        }
        for line in text.splitlines():
            if "continue-on-error" in line:
                assert re.search(r" # .{30,}", line), line


def test_the_same_pythons_everywhere():
    """The classifiers, the tests, the wheels, the Makefile and noxfile.py agree on the Pythons that are supported."""
    tests = yaml.safe_load(TESTS)
    assert PYTHONS == tests["jobs"]["tests"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14", "3.15"]
    assert tests["jobs"]["windows"]["strategy"]["matrix"]["python"] == PYTHONS
    wheels = {f"cp{each.replace('.', '')}-*" for each in PYTHONS}
    free_threaded = [f"cp{version.replace('.', '')}-*" for version in re.findall(r'python-version: "(.*t)"', TESTS)]
    assert free_threaded == ["cp314t-*"]
    assert SETTINGS["tool"]["cibuildwheel"]["build"] == sorted({*wheels, *free_threaded})
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8"))["jobs"]
    (installed,) = [step["with"]["python-version"] for step in jobs["cross"]["steps"] if "setup-python" in str(step)]
    assert list(cross.PYTHONS) == installed.split()[::-1] == PYTHONS
    assert f"PYTHON ?= {' '.join('python' + each for each in PYTHONS)} python3\n" in MAKE
    assert f'"PYTHONS", "{" ".join("python" + each for each in PYTHONS[1:])}"' in NOX
