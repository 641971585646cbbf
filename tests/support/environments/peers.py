"""Other libraries' DLPack tests with `dlx.convert` as their `from_dlpack`: `nox -s peers`.

numpy's tests are in its wheel. torch's and jax's are downloaded for the installed version, or read from a folder
(`--from FOLDER`). The others are checkouts in FOLDER. Missing tests are left out with a note.
tests/support/environments/peers.toml lists the tests that fail on purpose, with reasons. Status 1: another test fails,
or a listed test passes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from support.project import TESTS

PLUGIN = "support.environments.peers"
DIFFERENCES = Path(__file__).with_suffix(".toml")


class Suite(NamedTuple):
    """One library's tests."""

    file: str
    """The file's name; for numpy, the path in the package; for a checkout, the path with its folder."""
    url: str | None
    """The address for a version; empty: in the package; None: a checkout in the folder of ``--from``."""
    functions: tuple[str, ...]
    """The functions that `dlx.convert` replaces; the first part of each names the target."""
    needs: tuple[str, ...] = ()
    """Other modules that the tests import."""
    package: str = ""
    """The tested package, if its name is not the suite's."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables of its process."""


SUITES = {
    "numpy": Suite("_core/tests/test_dlpack.py", "", ("numpy.from_dlpack",)),
    "torch": Suite(
        "test_dlpack.py",
        "https://raw.githubusercontent.com/pytorch/pytorch/v{}/test/test_dlpack.py",
        ("torch.from_dlpack", "torch.utils.dlpack.from_dlpack"),
        needs=("expecttest",),
    ),
    "jax": Suite(
        "array_interoperability_test.py",
        "https://raw.githubusercontent.com/jax-ml/jax/jax-v{}/tests/array_interoperability_test.py",
        ("jax.dlpack.from_dlpack", "jax.numpy.from_dlpack"),
        needs=("absl",),
    ),
    # Build the extension from test_ndarray.cpp next to these tests, and put it on PYTHONPATH.
    "nanobind": Suite(
        "/".join(("nanobind", "tests", "test_ndarray.py")),
        None,
        ("numpy.from_dlpack", "torch.from_dlpack", "torch.utils.dlpack.from_dlpack"),
        needs=("test_ndarray_ext", "torch"),
    ),
    **{
        f"array-api-tests-{name}": Suite(
            "array-api-tests/array_api_tests/test_dlpack.py",
            None,
            (f"{name}.from_dlpack",),
            needs=("ndindex", "pytest_jsonreport"),
            package=name,
            environment=(
                ("ARRAY_API_TESTS_MODULE", name),
                ("PYTEST_ADDOPTS", "--hypothesis-seed=0 --max-examples=300"),
            ),
        )
        for name in ("array_api_strict", "numpy")
    },
}


def pytest_configure(config):
    """Replace a library's function by dlx, in the process of its tests."""
    import dlx

    def around(theirs, name):
        def from_dlpack(x, /, device=None, copy=None, **options):
            if isinstance(x, dlx.Tensor):  # dlx makes the call
                return theirs(x, **options)
            return dlx.convert(x, to=name, device=device, copy=copy)

        return from_dlpack

    for path in SUITES[os.environ["DLX_PEER"]].functions:
        module, _, function = path.rpartition(".")
        owner = importlib.import_module(module)
        setattr(owner, function, around(getattr(owner, function), path.partition(".")[0]))


def found(name, suite, given, folder):
    """Return the path of a suite's file, or the reason why it is missing."""
    try:
        version = importlib.metadata.version(suite.package or name).partition("+")[0]
        package = Path(importlib.import_module(suite.package or name).__file__).parent
    except ImportError:
        return f"{suite.package or name} is not installed here"
    for needed in suite.needs:
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed here, which its tests import"
    path = package / suite.file if suite.url == "" else Path(given or folder) / suite.file
    if not path.exists() and suite.url and not given:
        url = suite.url.format(version)
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                path.write_bytes(answer.read())
        except OSError as error:
            return f"{url} cannot be had ({error}); --from takes a folder with {suite.file}"
    return path if path.exists() else f"there is no {path}"


def results(name, path, folder):
    """Run the tests of a file; return {test: "passed", "failed" or "skipped"}."""
    report = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "--junitxml", str(report)]
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"DLX_PEER": name, "PYTHONPATH": paths} | dict(SUITES[name].environment)
    top = path.parents[1] if SUITES[name].url is None else path.parent
    options = ["-c", os.devnull, "--rootdir", str(top), str(path)]
    done = subprocess.run([*command, *options], env=environment, cwd=top, capture_output=True, text=True, check=False)
    if not report.exists():
        sys.exit(f"the tests of {name} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = outcome
    return outcomes


def main():
    """Run the suites, and compare their failures with the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="only these")
    parser.add_argument("--from", dest="given", help="a folder with the files of the suites")
    options = parser.parse_args()
    reasons, status = tomllib.loads(DIFFERENCES.read_text(encoding="utf-8")), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in options.suites or SUITES:
            path = found(name, SUITES[name], options.given, folder)
            if isinstance(path, str):
                print(f"{name}: left out, since {path}")
                continue
            outcomes, listed = results(name, path, folder), reasons.get(name, {})
            failed = {test for test, outcome in outcomes.items() if outcome == "failed"}
            counts = {kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")}
            version = importlib.metadata.version(SUITES[name].package or name)
            print(f"{name} {version}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
            for test in sorted(failed):
                print(f"  {test}: {listed.get(test, 'NOT LISTED')}")
            stale = [test for test in listed if outcomes.get(test) == "passed"]
            for test in stale:
                print(f"  {test}: passes, and is listed as a difference")
            status |= bool(failed - listed.keys() or stale)
    return status


if __name__ == "__main__":
    sys.exit(main())
